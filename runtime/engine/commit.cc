// From a description to a plan: agreement over the ranks, and the budget.

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <sstream>

#include "forebay/agreement.h"
#include "forebay/grouped_communicator.h"
#include "forebay/log.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {
namespace {

constexpr int kPartsShown = 3;  // Pools that a message names, the largest first.

// The options that make a pool smaller, by the names that C++ and the command line share.
std::string remedy(Pool pool, const Plan& plan) {
  const PlanOptions& options = plan.options;
  const auto shard_at = [&](int stage) {
    return options.stage < stage ? join_text("stage ", stage) : std::string("more ranks");
  };
  const auto offload_more = [&](Offload needed, const char* value) -> std::string {
    if (options.offload < needed) return join_text(", offload ", value);
    return plan.device_units > 0 ? ", a larger offload-fraction" : "";
  };
  switch (pool) {
    case Pool::kParameters:
      return shard_at(3) +
             (options.stage == 3 ? offload_more(Offload::kOptimizerAndParameters, "optimizer+parameters")
                                 : "") +
             (options.dtype == DataType::kFloat32 ? ", dtype bf16" : "");
    case Pool::kGradients:
      return shard_at(2) + (options.stage >= 2 ? offload_more(Offload::kOptimizer, "optimizer") : "") +
             (plan.accumulates_in_fp32() ? ", a single micro-step" : "");
    case Pool::kOptimizer:
      return shard_at(1) + offload_more(Offload::kOptimizer, "optimizer");
    case Pool::kGathered:
      return "narrower layers";
    case Pool::kBuckets:
      return "a smaller bucket";
    case Pool::kActivations:
      return "a smaller batch or sequence, recomputation, activations that are partitioned or offloaded";
    default:
      return "";
  }
}

Status refuse(const char* name, double value, const char* allowed) {
  return Status(StatusCode::kInvalidArgument, format_text("%s is %.9g; it may be %s", name, value, allowed));
}

}  // namespace

Status check_adamw(double beta1, double beta2, double epsilon) {
  for (const auto& [name, beta] : {std::pair("beta1", beta1), std::pair("beta2", beta2)}) {
    if (!(beta >= 0.0 && static_cast<float>(beta) < 1.0f))
      return refuse(name, beta, "0 up to below 1, in fp32");
  }
  if (!(static_cast<float>(epsilon) > 0.0f) || !std::isfinite(static_cast<float>(epsilon)))
    return refuse("epsilon", epsilon, "any positive number that fp32 holds");
  return {};
}

Status verdict_of(const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const Error& error) {
    return error.status();
  }
}

PlanOptions Engine::Impl::plan_options() const {
  PlanOptions result;
  static_cast<ShardingOptions&>(result) = options;
  result.ranks = communicator.size();
  result.deciding_ranks = options.grid != nullptr ? options.grid->size() : 0;
  result.deciding_units = deciding_units;
  if (chosen_bucket_bytes != 0) result.bucket_bytes = chosen_bucket_bytes;
  result.chunk_bytes = backend.capabilities().granularity;
  result.device_units = chosen_device_units;
  return result;
}

void Engine::Impl::agree(const Status& mine) {
  together([&] { forebay::agree(everyone(), mine); });
}

void Engine::Impl::agree_on_options() {
  const auto exact = [](double value) {
    char text[32];
    return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
  };
  const LossScaleOptions& scale = options.loss_scale;
  std::ostringstream common;
  common << option_lines(options, &OptionRow::agreed) << "beta1 " << exact(options.beta1) << "\nbeta2 "
         << exact(options.beta2) << "\nepsilon " << exact(options.epsilon) << "\nloss-scale "
         << exact(scale.initial) << ' ' << scale.growth_interval << ' ' << exact(scale.minimum) << '\n';
  if (recorded()) common << "recorded-order " << options.recorded_order << '\n';
  for (const auto& [name, value] : options.agreement) common << name << ' ' << value << '\n';
  together([&] { agree_on_text(everyone(), "options", common.str()); });

  std::ostringstream text;
  text << plan.fingerprint_text();
  for (const UnitShape& unit : model.units) {
    text << "unit:" << unit.name << ' ' << (unit.backward_reads_parameters ? "" : "gradient-only ");
    for (const ParameterShape& parameter : unit.parameters) {
      text << parameter.name << ':' << parameter.count << ':' << parameter.group
           << (parameter.replicated ? ":replicated " : " ");
      if (is_elementwise(options.optimizer)) continue;
      const FactoredShape matrices = factored_shape_of(parameter);
      if (is_muon_matrix(parameter)) text << ":matrix ";
      text << matrices.batches << 'x' << matrices.rows << 'x' << matrices.columns
           << (matrices.has_rows ? ":factored " : " ");
    }
    for (const UnitShape::Tied& tied : unit.tied) text << "tied:" << tied.unit << '.' << tied.index << ' ';
    text << '\n';
  }
  if (options.grid == nullptr) {
    together([&] { agree_on_text(communicator, "options", text.str()); });
    return;
  }
  // All ranks are told of a difference within one part of the grid.
  agree(verdict_of([&] { agree_on_text(communicator, "options", text.str()); }));
  agree(verdict_of([&] { agree_on_shared_units(); }));
}

// Pipeline stages have different units, but cut the shared ones into the same slices.
void Engine::Impl::agree_on_shared_units() {
  sharing_rank = {.rank = static_cast<std::uint64_t>(everyone().rank())};
  for (const auto& [shared, stages] : shared_units) {
    std::ostringstream text;
    text << "ranks " << ranks() << "\nbucket " << plan.shared_bucket_count(shared, stages->size())
         << "\nunit:" << shape(shared).name << ' ';
    for (const ParameterShape& parameter : shape(shared).parameters) {
      text << parameter.name << ':' << parameter.count << ':' << parameter.group
           << (parameter.frozen ? ":frozen " : " ");
    }
    text << '\n';
    agree_on_text(*stages, "options", text.str());
    const int first = exchange(*stages, everyone().rank()).front();
    sharing_rank.units = XXH3_64bits_withSeed(text.str().data(), text.str().size(),
                                              sharing_rank.units ^ (static_cast<std::uint64_t>(first) + 1));
  }
}

void Engine::Impl::together(const std::function<void()>& check) {
  try {
    check();
  } catch (const AgreementLost&) {
    must(everyone().status());
    must(communicator.status());
    throw;
  }
}

Status Engine::Impl::check_scalars() const {
  FOREBAY_RETURN_IF_ERROR(check_adamw(options.beta1, options.beta2, options.epsilon));
  const LossScaleOptions& scale = options.loss_scale;
  if (!(scale.initial > 0.0) || !std::isfinite(scale.initial)) {
    return refuse("the initial loss scale", scale.initial, "any positive number");
  }
  if (!(scale.minimum > 0.0) || !std::isfinite(scale.minimum)) {
    return refuse("the minimum loss scale", scale.minimum, "any positive number");
  }
  if (scale.growth_interval < 1) return refuse("the growth interval", scale.growth_interval, "1 or more");
  constexpr int kHostThreadsMax = 4096;
  if (options.host_threads < 0 || options.host_threads > kHostThreadsMax) {
    return Status(StatusCode::kInvalidArgument,
                  "EngineOptions::host_threads is " + std::to_string(options.host_threads) + "; use 1 to " +
                      std::to_string(kHostThreadsMax) + ", or 0 for one for each processor");
  }
  return {};
}

Status Engine::Impl::check_options() const {
  if (recorded() && !shared_units.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  "unit " + shape(shared_units.front().first).name +
                      " is shared by pipeline stages, and order-of-units is recorded; use strict");
  }
  if (options.offload != Offload::kNone && options.tier == Tier::kFile && !hooks.make_store &&
      options.offload_directories.empty()) {
    return Status(
        StatusCode::kInvalidArgument,
        "offload-tier is nvme without a directory; name one on the drive that is to hold the files, as "
        "nvme:DIR or in EngineOptions::offload_directories");
  }
  return Status();
}

std::uint64_t Engine::Impl::device_budget() const {
  const std::uint64_t device = backend.capabilities().memory_bytes;
  return options.memory_bytes == 0 ? device : std::min<std::uint64_t>(options.memory_bytes, device);
}

std::uint64_t Engine::Impl::activation_room() {
  if (phase != Phase::kDescribe) misuse("activation_room() belongs before commit()");
  PlanOptions candidate = plan_options();
  Result<Plan> made = make_plan(model, candidate);
  agree(made.status());
  const auto counts = exchange<std::uint64_t>(everyone(), model.units.size());
  candidate.deciding_units = *std::max_element(counts.begin(), counts.end());
  made = make_plan(model, candidate);
  const auto rooms = exchange(everyone(), made.value().activation_room(device_budget()));
  return *std::min_element(rooms.begin(), rooms.end());
}

Status Engine::Impl::check_budget() const {
  const std::uint64_t budget = device_budget();
  if (plan.reserved_bytes <= budget) return Status();
  std::array<Pool, kDevicePoolCount> pools;
  for (int i = 0; i < kDevicePoolCount; ++i) pools[i] = static_cast<Pool>(i);
  std::stable_sort(pools.begin(), pools.end(),
                   [&](Pool a, Pool b) { return plan.bytes_in(a) > plan.bytes_in(b); });
  std::string parts;
  for (int i = 0; i < kPartsShown && plan.bytes_in(pools[i]) > 0; ++i) {
    parts +=
        std::string(i == 0 ? "" : ", ") + pool_name(pools[i]) + ' ' + format_bytes(plan.bytes_in(pools[i]));
  }
  const auto exactly = [](std::uint64_t bytes) {
    return format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes)";
  };
  return Status(StatusCode::kOutOfMemory, "the plan needs ", exactly(plan.reserved_bytes), " on ",
                backend.capabilities().name, ", the budget is ", exactly(budget), "; the largest parts are ",
                parts, "; to shrink ", pool_name(pools[0]), ": ", remedy(pools[0], plan),
                budget < backend.capabilities().memory_bytes ? "; or raise the option memory" : "");
}

// The communicators of all-reduce groups and of the deciding ranks, where they are not the given one.
void Engine::Impl::connect() {
  if (plan.options.in_groups() && ranks() > 1) {
    grouped = value_or_throw(create_grouped_communicator(
        communicator, {.group = options.group, .replicate = options.shard_within_group}));
  }
  if (options.grid == nullptr && replicas() == 1) return;
  deciding = value_or_throw(everyone().split(0, part_number()));
  const auto counts = exchange<std::uint64_t>(*deciding, model.units.size());
  deciding_units = *std::max_element(counts.begin(), counts.end());
  if (options.grid != nullptr) sharing_ranks = exchange(*deciding, sharing_rank);
  plan = value_or_throw(make_plan(model, plan_options()));
}

// Each part of the model measures for itself; the smallest bucket is for all.
std::uint64_t Engine::Impl::least_over_grid(std::uint64_t mine) {
  if (options.grid == nullptr) return mine;
  const auto all = exchange(*options.grid, mine);
  return *std::min_element(all.begin(), all.end());
}

// A collective costs its latency however little it moves.
void Engine::Impl::warn_of_small_buckets() {
  constexpr std::uint64_t kUsefulBytes = 64u << 10;
  constexpr std::uint64_t kPiecesMax = 1000;
  const std::uint64_t bucket_bytes = plan.options.bucket_bytes;
  if (ranks() == 1 || everyone().rank() != 0 || bucket_bytes >= kUsefulBytes) return;
  std::uint64_t pieces = 0;
  for (int unit = 0; unit < unit_count() && plan.bucket_columns > 0; ++unit)
    pieces += ceil_div(plan.slice_count(unit), plan.bucket_columns);
  if (pieces <= kPiecesMax) return;
  log(LogLevel::kWarning,
      "EngineOptions::bucket_bytes is %llu, so the gradients of a micro-step take %llu collectives; "
      "16 MiB is usual, and bucket_auto chooses by measurement",
      static_cast<unsigned long long>(bucket_bytes), static_cast<unsigned long long>(pieces));
}

// Adafactor and Muon treat a parameter without a shape as one that is no matrix.
void Engine::Impl::warn_of_missing_shapes() {
  constexpr std::uint64_t kManyElements = std::uint64_t{1} << 16;  // Fewer: biases and gains.
  if (is_elementwise(options.optimizer) || everyone().rank() != 0) return;
  const ParameterShape* first = nullptr;
  int count = 0;
  for (const UnitShape& unit : model.units) {
    for (const ParameterShape& parameter : unit.parameters) {
      if (parameter.frozen || parameter.elementwise || parameter.count < kManyElements) continue;
      if (!parameter.shape.empty() || parameter.split) continue;
      if (first == nullptr) first = &parameter;
      ++count;
    }
  }
  if (first == nullptr) return;
  log(LogLevel::kWarning,
      "%d large parameters have no declared shape, %s with %llu elements first, so the optimizer %s keeps "
      "a v for each of their elements%s; call declare_shape() before commit(), with one dimension to keep it "
      "so",
      count, first->name.c_str(), static_cast<unsigned long long>(first->count),
      optimizer_name(options.optimizer),
      options.optimizer == Optimizer::kMuon ? " and updates them as AdamW does" : "");
}

void Engine::Impl::commit() {
  if (phase != Phase::kDescribe) misuse("commit() was called twice; call it once for each engine");
  const OtherTraffic other(*this);
  Result<Plan> made = make_plan(model, plan_options());
  Status verdict = check_options();
  if (verdict.ok()) verdict = made.status();
  agree(verdict);
  plan = std::move(made).value();
  agree_on_options();
  connect();
  if (options.bucket_auto && ranks() > 1) {
    chosen_bucket_bytes = least_over_grid(choose_bucket_bytes());
    plan = value_or_throw(make_plan(model, plan_options()));
  }
  if (options.offload != Offload::kNone && options.offload_auto) {
    chosen_device_units = choose_device_units(plan);
    plan = value_or_throw(make_plan(model, plan_options()));
  }
  agree(check_budget());
  warn_of_small_buckets();
  warn_of_missing_shapes();
  Status allocated;
  try {
    allocate();
    place_units();
    decision = std::make_unique<Decision>(*this);
    updater = std::make_unique<Updater>(*this, *decision);
    if (options.optimizer == Optimizer::kAdafactor) {
      factored = std::make_unique<FactoredMoments>(*this, *decision, *updater);
      updater->use(*factored);
    }
    if (options.optimizer == Optimizer::kMuon) {
      matrix_updates = std::make_unique<MatrixUpdates>(*this, *decision, *updater);
      updater->use(*matrix_updates);
    }
    reducer = std::make_unique<Reducer>(*this, *updater);
    gatherer = std::make_unique<Gatherer>(*this);
    if (recorded()) {
      const bool known = !options.recorded_order.empty();
      recorder = std::make_unique<Recorder>(
          known ? value_or_throw(parse_unit_order(options.recorded_order, unit_count()))
                : registered_order(model, options.accumulate),
          known, unit_count());
    }
  } catch (const Error& error) {
    allocated = error.status();
  }
  agree(allocated);
  loss_scale = options.dtype == DataType::kFloat16 ? options.loss_scale.initial : 1.0;
  phase = Phase::kIdle;
}

}  // namespace forebay
