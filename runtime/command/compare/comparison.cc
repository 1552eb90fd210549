#include "runtime/command/compare/comparison.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>

#include "forebay/activation_formulas.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/plan/activation_report.h"

namespace forebay {
namespace {

// The largest micro-batch that is tried by default.
constexpr std::uint64_t kBatchMost = 32;

// The data-parallel ranks that are left for parts of the model; 0 if the parts do not divide the ranks.
int data_ranks(int ranks, int tensor, int pipeline) {
  return ranks % tensor == 0 && ranks / tensor % pipeline == 0 ? ranks / tensor / pipeline : 0;
}

// All combinations, the first list slowest.
std::vector<SimulationRequest> combinations(const ComparisonRequest& request) {
  const ComparisonChoices& c = request.choices;
  std::vector<SimulationRequest> all;
  SimulationRequest one = request.base;
  for (const int stage : c.stages)
    for (const int tensor : c.tensor_parallel)
      for (const int pipeline : c.pipeline_parallel)
        for (const ActivationChoice& activations : c.activations)
          for (const Offload offload : c.offloads)
            for (const Tier tier : c.tiers)
              for (const double fraction : c.fractions)
                for (const int recompute : c.recompute)
                  for (const std::uint64_t batch : c.batches)
                    for (const std::uint64_t bucket : c.buckets)
                      for (const int group : c.groups) {
                        const bool offloads = offload != Offload::kNone;
                        if (!offloads && (tier != c.tiers.front() || fraction != c.fractions.front()))
                          continue;
                        if (offload == Offload::kOptimizerAndParameters && stage < 3) continue;
                        if (recompute == 0 && activations.placement != ActivationPlacement::kKeep) continue;
                        const int data = data_ranks(one.ranks, tensor, pipeline);
                        if (data == 0) continue;
                        if (group > 1 && (data % group != 0 || group >= data)) continue;
                        // Divides rather than multiplies, which could overflow.
                        const std::uint64_t of_rank = request.global_batch / static_cast<std::uint64_t>(data);
                        if (request.global_batch % static_cast<std::uint64_t>(data) != 0) continue;
                        if (of_rank % batch != 0) continue;
                        one.options.stage = stage;
                        one.options.offload = offload;
                        one.options.tier = offloads ? tier : Tier::kPinned;
                        one.options.offload_fraction = offloads ? fraction : 1.0;
                        // Too many are refused with the plan's words.
                        one.options.micro_steps = static_cast<int>(
                            std::min<std::uint64_t>(of_rank / batch, std::numeric_limits<int>::max()));
                        one.options.bucket_bytes = bucket;
                        one.options.group = group;
                        one.part = {.tensor_parallel = tensor, .pipeline_parallel = pipeline};
                        one.activations = activations.placement;
                        one.activation_tier = activations.tier;
                        one.recompute_every = recompute;
                        one.batch = batch;
                        all.push_back(one);
                      }
  return all;
}

// Errors: kInvalidArgument if a step would need too many micro-steps in all combinations.
Status check_global_batch(const ComparisonRequest& request, const std::vector<SimulationRequest>& all) {
  std::uint64_t most = 0;  // Sequences of a micro-step, over all ranks.
  std::uint64_t batch = 0;
  for (const SimulationRequest& one : all) {
    const int parts = one.part.tensor_parallel * one.part.pipeline_parallel;
    const std::uint64_t sequences = static_cast<std::uint64_t>(one.ranks / parts) * one.batch;
    if (sequences > most) batch = one.batch;
    most = std::max(most, sequences);
  }
  if (all.empty() || request.global_batch / most <= kMicroStepsMost) return {};
  return {StatusCode::kInvalidArgument,
          "--global-batch is " + std::to_string(request.global_batch) + "; a micro-step of " +
              std::to_string(request.base.ranks) + " ranks takes at most " + std::to_string(most) +
              " sequences (--micro-batch " + std::to_string(batch) + ") and a step has at most " +
              std::to_string(kMicroStepsMost) + " micro-steps, so use at most " +
              std::to_string(most * kMicroStepsMost) + ", more --ranks or a larger --micro-batch"};
}

// The bytes of the plan of the pipeline stage that needs most. Errors: a combination that the engine does not
// have.
Status plan_setting(Setting& setting) {
  const SimulationRequest& request = setting.request;
  const int parts = request.part.tensor_parallel * request.part.pipeline_parallel;
  PlanOptions options;
  static_cast<ShardingOptions&>(options) = request.options;
  options.ranks = request.ranks / parts;
  if (parts > 1) options.deciding_ranks = request.ranks;
  FOREBAY_ASSIGN_OR_RETURN(const std::vector<ActivationReport> stages, activations_of_stages(request));
  for (const ActivationReport& stage : stages) {
    const ModelPart& part = stage.request.part;
    FOREBAY_ASSIGN_OR_RETURN(ModelShape model, make_model_shape(request.shape, part));
    model.activation_bytes = stage.device_bytes();
    options.forwards_ahead = part.pipeline_parallel - 1 - part.pipeline_stage;
    FOREBAY_ASSIGN_OR_RETURN(const Plan plan, make_plan(model, options));
    setting.device_bytes = std::max(setting.device_bytes, plan.reserved_bytes);
    const std::uint64_t saved = stage.plan ? stage.plan->host_bytes() : 0;
    setting.host_bytes = std::max(setting.host_bytes, plan.host_bytes.total() + saved);
  }
  const ClusterDescription& cluster = request.cluster;
  const std::uint64_t device = cluster.device.memory_bytes;
  const std::uint64_t given =
      request.options.memory_bytes != 0 ? std::min(request.options.memory_bytes, device) : device;
  setting.device_limit = given - std::min(given, request.options.room_bytes);
  setting.host_limit = cluster.host_memory_bytes / static_cast<std::uint64_t>(cluster.host_ranks);
  return {};
}

// Why there is no setting at all.
std::string why_none(const ComparisonRequest& request) {
  const ComparisonChoices& c = request.choices;
  const std::string ranks = std::to_string(request.base.ranks) + " ranks";
  bool divides = false;
  for (const int tensor : c.tensor_parallel)
    for (const int pipeline : c.pipeline_parallel)
      divides = divides || data_ranks(request.base.ranks, tensor, pipeline) > 0;
  if (!divides) {
    return "no --tensor-parallel times --pipeline-parallel divides the " + ranks +
           "; use values that do, or other --ranks";
  }
  return "no setting gives " + std::to_string(request.global_batch) + " sequences in a step of " + ranks +
         "; use a --global-batch that is a multiple of the data-parallel ranks times --micro-batch";
}

// An exception that left the thread would end the program.
Status plan_within_memory(Setting& setting) {
  try {
    return plan_setting(setting);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "this host has no memory to plan it; give fewer --threads");
  }
}

Result<SimulationResult> simulate_within_memory(const SimulationRequest& request) {
  try {
    return simulate(request);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "this host has no memory to simulate it; give fewer --threads");
  }
}

void simulate_setting(Setting& setting) {
  const Result<SimulationResult> result = simulate_within_memory(setting.request);
  if (!result.ok()) {
    setting.failure = result.status();
    return;
  }
  setting.simulated = true;
  setting.step_seconds = result.value().step_seconds;
  setting.tokens_per_second = result.value().tokens_per_second();
  setting.model_flops_used = result.value().model_flops_used();
  setting.bottleneck = bottleneck(result.value()).cause;
}

// Runs work(i) for all i below `count`, on several threads, or on as many as the system has.
// Requires: work() throws nothing.
void run_all(std::size_t count, int threads, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  const auto loop = [&] {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  try {
    for (int t = 1; t < threads && static_cast<std::size_t>(t) < count; ++t) others.emplace_back(loop);
  } catch (const std::system_error&) {
    // The threads that there are do the work.
  }
  loop();
  for (std::thread& thread : others) thread.join();
}

template <typename Less>
std::vector<std::size_t> sorted(std::vector<std::size_t> indices, const Less& less) {
  std::stable_sort(indices.begin(), indices.end(), less);
  return indices;
}

std::vector<std::size_t> indices_where(const Comparison& comparison, bool (*is_wanted)(const Setting&)) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < comparison.settings.size(); ++i) {
    if (is_wanted(comparison.settings[i])) indices.push_back(i);
  }
  return indices;
}

}  // namespace

ComparisonChoices default_choices(const SimulationRequest& base, std::uint64_t global_batch) {
  ComparisonChoices choices;
  choices.stages = {0, 1, 2, 3};
  choices.offloads = {Offload::kNone, Offload::kOptimizer, Offload::kOptimizerAndParameters};
  choices.tiers = {Tier::kPinned};
  if (base.cluster.drive_read_bytes_per_second > 0 && base.cluster.drive_write_bytes_per_second > 0)
    choices.tiers.push_back(Tier::kFile);
  choices.fractions = {0.5, 1.0};
  choices.recompute = {0, 1};
  for (int tensor = 1; tensor <= std::min(base.cluster.host_ranks, base.ranks); tensor *= 2) {
    if (base.shape.heads % static_cast<std::uint64_t>(tensor) == 0) choices.tensor_parallel.push_back(tensor);
  }
  choices.pipeline_parallel = {1};
  choices.activations = {ActivationChoice{}};
  for (std::uint64_t batch = 1; batch <= std::min(kBatchMost, global_batch); batch *= 2)
    choices.batches.push_back(batch);
  choices.buckets = {16u << 20, 64u << 20};
  choices.groups = {1};
  if (base.ranks > base.cluster.host_ranks) choices.groups.push_back(base.cluster.host_ranks);
  return choices;
}

Result<Comparison> compare_settings(const ComparisonRequest& given) {
  ComparisonRequest request = given;
  FOREBAY_ASSIGN_OR_RETURN(request.base.shape, complete_shape(given.base.shape));
  std::vector<SimulationRequest> all = combinations(request);
  FOREBAY_RETURN_IF_ERROR(check_global_batch(request, all));
  if (all.empty()) return Status(StatusCode::kInvalidArgument, why_none(request));
  std::mutex mutex;
  std::size_t done = 0;
  const auto tell = [&](const char* verb, std::size_t count) {
    const std::lock_guard lock(mutex);
    ++done;
    if (request.progress) request.progress(verb, done, count);
  };
  std::vector<Setting> settings(all.size());
  std::vector<Status> problems(all.size());
  run_all(all.size(), std::max(1, request.threads), [&](std::size_t i) {
    settings[i].request = std::move(all[i]);
    problems[i] = plan_within_memory(settings[i]);
    tell("planned", all.size());
  });
  Comparison comparison;
  for (std::size_t i = 0; i < settings.size(); ++i) {
    if (problems[i].ok()) comparison.settings.push_back(std::move(settings[i]));
  }
  if (comparison.settings.empty()) return problems.front();
  std::vector<std::size_t> fitting =
      indices_where(comparison, [](const Setting& setting) { return setting.fits(); });
  if (request.limit != 0 && fitting.size() > request.limit) {
    comparison.left_out = fitting.size() - request.limit;
    // Evenly over the whole sweep.
    std::vector<std::size_t> kept;
    for (std::size_t i = 0; i < request.limit; ++i)
      kept.push_back(fitting[i * fitting.size() / request.limit]);
    fitting = std::move(kept);
  }
  done = 0;
  run_all(fitting.size(), std::max(1, request.threads), [&](std::size_t i) {
    simulate_setting(comparison.settings[fitting[i]]);
    tell("simulated", fitting.size());
  });
  return comparison;
}

std::vector<std::size_t> best_first(const Comparison& comparison, Objective objective) {
  const auto simulated = indices_where(comparison, [](const Setting& setting) { return setting.simulated; });
  return sorted(simulated, [&](std::size_t a, std::size_t b) {
    const Setting& x = comparison.settings[a];
    const Setting& y = comparison.settings[b];
    // All settings have the same ranks and the same tokens in a step, so the cost goes by the time.
    if (objective == Objective::kMemory && x.device_bytes != y.device_bytes)
      return x.device_bytes < y.device_bytes;
    return x.step_seconds < y.step_seconds;
  });
}

std::vector<std::size_t> pareto_front(const Comparison& comparison) {
  const auto by_memory = best_first(comparison, Objective::kMemory);
  std::vector<std::size_t> front;
  for (const std::size_t i : by_memory) {
    if (front.empty() ||
        comparison.settings[i].step_seconds < comparison.settings[front.back()].step_seconds) {
      front.push_back(i);
    }
  }
  return front;
}

std::vector<std::size_t> failures(const Comparison& comparison) {
  return indices_where(comparison, [](const Setting& setting) { return !setting.failure.ok(); });
}

std::vector<std::size_t> nearest_misses(const Comparison& comparison) {
  const auto missing = indices_where(comparison, [](const Setting& setting) { return !setting.fits(); });
  return sorted(missing, [&](std::size_t a, std::size_t b) {
    return comparison.settings[a].missing_bytes() < comparison.settings[b].missing_bytes();
  });
}

std::string setting_text(const Setting& setting) {
  const SimulationRequest& r = setting.request;
  const ShardingOptions& o = r.options;
  std::string text = "stage " + std::to_string(o.stage);
  if (o.offload != Offload::kNone) {
    text += std::string(", offload ") + offload_name(o.offload) + " to " + tier_name(o.tier);
    if (o.offload_fraction < 1) text += format_text(" by %g", o.offload_fraction);
  }
  if (r.recompute_every > 0) text += ", recompute " + recompute_name(r.recompute_every);
  if (r.activations != ActivationPlacement::kKeep)
    text += ", activations " + activations_name(r.activations, r.activation_tier);
  if (r.part.tensor_parallel > 1) text += ", tensor-parallel " + std::to_string(r.part.tensor_parallel);
  if (r.part.pipeline_parallel > 1) text += ", pipeline-parallel " + std::to_string(r.part.pipeline_parallel);
  if (o.group > 1) text += ", order group:" + std::to_string(o.group);
  text += ", batch " + std::to_string(r.batch) + " x " + std::to_string(o.micro_steps);
  return text + ", bucket " + option_text(o, "bucket");
}

std::string setting_options(const Setting& setting) {
  const SimulationRequest& r = setting.request;
  const ShardingOptions& o = r.options;
  std::string text = "--stage " + std::to_string(o.stage) + " --micro-steps " +
                     std::to_string(o.micro_steps) + " --batch " + std::to_string(r.batch) + " --bucket " +
                     option_text(o, "bucket");
  if (o.offload != Offload::kNone) {
    text += std::string(" --offload ") + offload_name(o.offload);
    if (o.tier == Tier::kFile) text += " --offload-tier nvme";
    if (o.offload_fraction < 1) text += format_text(" --offload-fraction %g", o.offload_fraction);
  }
  if (r.recompute_every > 0) text += " --recompute " + recompute_name(r.recompute_every);
  if (r.activations != ActivationPlacement::kKeep)
    text += " --activations " + activations_name(r.activations, r.activation_tier);
  if (r.part.tensor_parallel > 1) text += " --tensor-parallel " + std::to_string(r.part.tensor_parallel);
  if (r.part.pipeline_parallel > 1)
    text += " --pipeline-parallel " + std::to_string(r.part.pipeline_parallel);
  if (o.group > 1) text += " --order group:" + std::to_string(o.group);
  return text;
}

}  // namespace forebay
