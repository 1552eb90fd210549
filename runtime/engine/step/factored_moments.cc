#include "runtime/engine/step/factored_moments.h"

#include <algorithm>
#include <cstring>

#include "forebay/host_adafactor.h"
#include "runtime/engine/step/decision.h"
#include "runtime/engine/step/updater.h"

namespace forebay {

FactoredMoments::FactoredMoments(StepContext& context, const Decision& decision, const Updater& updater)
    : StepPart(context),
      decision_(decision),
      updater_(updater),
      decided_(context),
      squared_on_device_(context),
      squared_on_host_(context) {
  std::uint64_t most = 0;
  for (int index = 0; index < context.unit_count(); ++index) {
    work_.push_back({this, index});
    summed_.emplace_back(context);
    reduced_.emplace_back(context);
    if (plan_.is_offloaded(index)) most = std::max(most, leaf_room(trainable_slice(index)));
  }
  scratch_.resize(most);
}

const EngineStream& FactoredMoments::stream_of(const Unit& u) const {
  return u.offloaded ? updater_.host_stream() : updater_.device_stream();
}

bool FactoredMoments::is_applied() const {
  return !context_.counts_only() && decision_.on_host().outcome == StepOutcome::kApplied;
}

void FactoredMoments::queue(const std::vector<bool>& used) {
  engine_stream_.record(decided_);
  updater_.device_stream().wait(decided_);
  if (plan_.offloads()) updater_.host_stream().wait(decided_);
  const auto for_each_used = [&](auto visit) {
    for (int index = 0; index < context_.unit_count(); ++index) {
      if (used[static_cast<std::size_t>(index)] && factor_bytes(index) > 0) visit(index);
    }
  };
  for_each_used([&](int index) {
    queue_sum(index);
    reduce(index);
  });
  for_each_used([&](int index) { queue_renewal(index); });
  exchange_squares();
}

void FactoredMoments::queue_sum(int index) {
  const Unit& u = unit(index);
  const EngineStream& stream = stream_of(u);
  const auto number = static_cast<std::size_t>(index);
  if (u.offloaded) {
    stream.call<&Work::sum>(work_[number]);
    stream.copy(u.factor_sums, u.host_factor_sums, factor_bytes(index));
  } else {
    for (const StepContext::Factored& p : u.factored) {
      must(kernels_.factor_sums({{own_run(index, p), u.factor_sums + p.factors_at}, decision_.on_device()},
                                stream));
    }
  }
  stream.record(summed_[number]);
}

void FactoredMoments::reduce(int index) {
  const auto number = static_cast<std::size_t>(index);
  const std::uint64_t slice = factor_bytes(index) / static_cast<std::uint64_t>(context_.ranks());
  engine_stream_.wait(summed_[number]);
  auto* const sums = reinterpret_cast<std::byte*>(unit(index).factor_sums);
  float* const reduced = context_.bucket_sums[0];
  must(context_.communicator.reduce_scatter({.source = sums,
                                             .source_stride_bytes = slice,
                                             .count = slice / sizeof(float),
                                             .type = DataType::kFloat32,
                                             .receive = context_.staging,
                                             .target = reduced,
                                             .first = true},
                                            engine_stream_));
  must(context_.communicator.all_gather({.source = reinterpret_cast<const std::byte*>(reduced),
                                         .target = sums,
                                         .target_stride_bytes = slice,
                                         .bytes = slice},
                                        engine_stream_));
  engine_stream_.record(reduced_[number]);
}

void FactoredMoments::queue_renewal(int index) {
  const Unit& u = unit(index);
  const EngineStream& stream = stream_of(u);
  const auto number = static_cast<std::size_t>(index);
  stream.wait(reduced_[number]);
  if (!u.offloaded) return renew_on_device(index);
  stream.copy(u.host_factor_sums, u.factor_sums, factor_bytes(index));
  stream.call<&Work::renew>(work_[number]);
}

// The old factors stay until the step is applied.
void FactoredMoments::renew_on_device(int index) {
  const Unit& u = unit(index);
  const EngineStream& stream = updater_.device_stream();
  const StepState* const state = decision_.on_device();
  const float weight = adafactor_weight(context_.applied_steps + 1);
  for (std::size_t i = 0; i < u.factored.size(); ++i) {
    const StepContext::Factored& p = u.factored[i];
    if (u.fixed[p.parameter]) continue;
    float* const sums = u.factor_sums + p.factors_at;
    must(kernels_.renew_factors({{p.shape, weight, u.factors + p.factors_at, sums, row_means_of(p)}, state},
                                stream));
    must(kernels_.update_squares(
        {{own_run(index, p), sums, row_means_of(p), context_.factor_leaves, squares_of(u, i) + 1}, state},
        stream));
  }
}

// Units on the device have their sums there; the offloaded ones follow them.
void FactoredMoments::exchange_squares() {
  updater_.device_stream().record(squared_on_device_);
  engine_stream_.wait(squared_on_device_);
  const std::uint64_t count = plan_.square_count;
  if (plan_.offloads()) {
    updater_.host_stream().record(squared_on_host_);
    engine_stream_.wait(squared_on_host_);
    const std::uint64_t on_device = unit(plan_.device_units).squares_at;
    engine_stream_.copy(context_.squares + on_device, context_.host_squares + on_device,
                        (count - on_device) * sizeof(double));
  }
  if (count == 0) return;
  double* const all = context_.squares + count;
  must(context_.communicator.all_gather({.source = reinterpret_cast<const std::byte*>(context_.squares),
                                         .target = reinterpret_cast<std::byte*>(all),
                                         .target_stride_bytes = count * sizeof(double),
                                         .bytes = count * sizeof(double)},
                                        engine_stream_));
  if (!plan_.offloads()) return;
  engine_stream_.copy(context_.host_squares + count, all,
                      count * sizeof(double) * static_cast<std::uint64_t>(context_.ranks()));
}

std::pair<std::uint64_t, std::uint64_t> FactoredMoments::own_part(int index,
                                                                  const StepContext::Factored& p) const {
  const std::uint64_t slice = trainable_slice(index);
  const std::uint64_t start = static_cast<std::uint64_t>(context_.rank()) * slice;
  const std::uint64_t begin = std::max(p.begin, start);
  const std::uint64_t end = std::min(p.begin + p.shape.count(), start + slice);
  return {begin, std::max(begin, end)};
}

FactoredRun FactoredMoments::own_run(int index, const StepContext::Factored& p) const {
  const Unit& u = unit(index);
  const auto [begin, end] = own_part(index, p);
  FactoredRun run;
  run.type = u.gradient_type;
  run.shape = p.shape;
  if (u.fixed[p.parameter] || begin == end) return run;
  run.gradient = (u.offloaded ? u.host_gradients : u.updated_gradients) +
                 (begin - u.updated_begin) * element_bytes(u.gradient_type);
  run.first = begin - p.begin;
  run.count = end - begin;
  run.place = begin;
  return run;
}

FactoredRun FactoredMoments::run_of(const Run& run, const StepContext::Factored& p) const {
  const Unit& u = unit(run.unit);
  FactoredRun result;
  result.gradient = run.gradient;
  result.type = u.gradient_type;
  result.shape = p.shape;
  result.first = u.updated_begin + run.begin - p.begin;
  result.count = run.count;
  result.place = u.updated_begin + run.begin;
  return result;
}

AdafactorStepArguments FactoredMoments::step_from(const double* squares, const StepContext::Factored& p,
                                                  const GroupHyperparameters& group) const {
  AdafactorStepArguments step;
  step.squares = squares + plan_.square_count;
  step.rank_stride = plan_.square_count;
  step.rank_count = static_cast<std::uint64_t>(context_.ranks());
  step.lr = group.lr;
  step.count = p.shape.count();
  return step;
}

void FactoredMoments::queue_update(int index, const StepContext::Segment& segment,
                                   const KeptUpdateArguments& kept, const GroupHyperparameters& group) {
  const Unit& u = unit(index);
  const std::size_t number = u.factored_index[segment.parameter];
  const StepContext::Factored& p = u.factored[number];
  const EngineStream& stream = updater_.device_stream();
  AdafactorStepArguments step = step_from(squares_of(u, number), p, group);
  step.step = step_of(p);
  must(kernels_.adafactor_step({step, decision_.on_device()}, stream));
  FactoredUpdateArguments a;
  static_cast<MasterMove&>(a) = move_of(kept);
  a.run = run_of({.unit = index,
                  .parameter = segment.parameter,
                  .begin = segment.begin,
                  .count = segment.count,
                  .gradient = static_cast<const std::byte*>(kept.update.gradient)},
                 p);
  a.factors = u.factor_sums + p.factors_at;
  a.row_means = row_means_of(p);
  a.computed_step = step_of(p);
  must(kernels_.factored_update({a, decision_.on_device()}, stream));
}

void FactoredMoments::queue_end(int index) {
  const Unit& u = unit(index);
  for (std::size_t i = 0; i < u.factored.size(); ++i) {
    const StepContext::Factored& p = u.factored[i];
    if (u.fixed[p.parameter]) continue;
    queue_squares(index, i, decision_.on_device());
    must(kernels_.keep_factors(
        {{u.factor_sums + p.factors_at, u.factors + p.factors_at, p.shape.factor_count()},
         decision_.on_device()},
        updater_.device_stream()));
  }
}

void FactoredMoments::refresh_on_device(int index) {
  for (std::size_t i = 0; i < unit(index).factored.size(); ++i) queue_squares(index, i, nullptr);
}

void FactoredMoments::queue_squares(int index, std::size_t number, const StepState* state) {
  const Unit& u = unit(index);
  const auto [begin, end] = own_part(index, u.factored[number]);
  const bool is_half = context_.format_of(StateField::kMaster) == MomentFormat::kBfloat16;
  const DataType type = is_half ? DataType::kBfloat16 : DataType::kFloat32;
  ParameterSquaresArguments a;
  a.type = type;
  a.count = end - begin;
  if (a.count > 0) {
    a.masters = u.kept[static_cast<std::size_t>(StateField::kMaster)] +
                (begin - u.updated_begin) * element_bytes(type);
    a.place = begin;
  }
  a.scratch = context_.factor_leaves;
  a.result = squares_of(u, number);
  must(kernels_.parameter_squares({a, state}, updater_.device_stream()));
}

// Runs in the order of the host's stream.
void FactoredMoments::sum(int index) {
  if (!is_applied()) return;
  const Unit& u = unit(index);
  for (const StepContext::Factored& p : u.factored) {
    FactorSumsArguments a{own_run(index, p), u.host_factor_sums + p.factors_at};
    a.run.factor = decision_.on_host().factor;
    factor_sums(a, updater_.host_runner());
  }
}

// Runs in the order of the host's stream. The old factors stay until the step is applied.
void FactoredMoments::renew(int index) {
  if (!is_applied()) return;
  Unit& u = unit(index);
  const float weight = adafactor_weight(decision_.on_host().applied_steps);
  double* squares = context_.host_squares + u.squares_at;
  for (StepContext::Factored& p : u.factored) {
    float* const factors = u.host_factor_sums + p.factors_at;
    if (!u.fixed[p.parameter]) {
      renew_factors({p.shape, weight, u.factors + p.factors_at, factors, p.row_means.data()},
                    updater_.host_runner());
    }
    squares[0] = p.squares;
    UpdateSquaresArguments a{own_run(index, p), factors, p.row_means.data(), scratch_.data(), squares + 1};
    a.run.factor = decision_.on_host().factor;
    update_squares(a, updater_.host_runner());
    squares += 2;
  }
}

void FactoredMoments::begin_update(int index) {
  Unit& u = unit(index);
  for (StepContext::Factored& p : u.factored) {
    if (!u.fixed[p.parameter]) p.squares = 0.0;
  }
}

void FactoredMoments::update(const Run& run, const KeptUpdateArguments& kept,
                             const GroupHyperparameters& group) {
  const Unit& u = unit(run.unit);
  const std::size_t number = u.factored_index[run.parameter];
  const StepContext::Factored& p = u.factored[number];
  FactoredUpdateArguments a;
  static_cast<MasterMove&>(a) = move_of(kept);
  a.run = run_of(run, p);
  a.run.factor = decision_.on_host().factor;
  a.factors = u.host_factor_sums + p.factors_at;
  a.row_means = p.row_means.data();
  a.step_number = decision_.on_host().applied_steps;
  AdafactorStepArguments step = step_from(context_.host_squares + u.squares_at + 2 * number, p, group);
  step.step_number = a.step_number;
  step.step = &a.step;
  adafactor_step(step, updater_.host_runner());
  factored_update(a, updater_.host_runner());
}

void FactoredMoments::add_squares(int index, std::size_t parameter, std::uint64_t begin, std::uint64_t end,
                                  const KeptUpdateArguments& kept) {
  Unit& u = unit(index);
  StepContext::Factored& p = u.factored[u.factored_index[parameter]];
  const auto [own_begin, own_end] = own_part(index, p);
  const std::uint64_t lower = std::max(own_begin, u.updated_begin + begin);
  const std::uint64_t upper = std::min(own_end, u.updated_begin + end);
  if (lower >= upper) return;
  const std::uint64_t skipped = lower - u.updated_begin - begin;
  const bool is_half = kept.half.elements != nullptr;
  const void* const masters = is_half ? static_cast<const void*>(kept.half.elements + skipped)
                                      : static_cast<const void*>(kept.update.master + skipped);
  p.squares =
      add(masters, is_half ? DataType::kBfloat16 : DataType::kFloat32, upper - lower, lower, p.squares);
}

double FactoredMoments::add(const void* masters, DataType type, std::uint64_t count, std::uint64_t place,
                            double sum) {
  double result = 0.0;
  parameter_squares({masters, type, count, place, scratch_.data(), &result}, updater_.host_runner(), sum);
  return result;
}

void FactoredMoments::end_update(int index) {
  const Unit& u = unit(index);
  for (const StepContext::Factored& p : u.factored) {
    if (u.fixed[p.parameter]) continue;
    std::memcpy(u.factors + p.factors_at, u.host_factor_sums + p.factors_at,
                p.shape.factor_count() * sizeof(float));
  }
}

}  // namespace forebay
