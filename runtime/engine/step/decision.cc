#include "runtime/engine/step/decision.h"

#include <xxhash.h>

#include <array>
#include <cstring>
#include <optional>
#include <span>

#include "runtime/engine/step/reducer.h"
#include "runtime/engine/step/updater.h"

namespace forebay {
namespace {

// Values that must be the same on every rank, as a whole number that a double holds exactly.
double fingerprint_of(const Hyperparameters& hyperparameters, std::uint64_t values_fingerprint) {
  std::vector<double> words{hyperparameters.clip};
  for (const GroupHyperparameters& group : hyperparameters.groups) {
    words.push_back(group.lr);
    words.push_back(group.weight_decay);
  }
  const std::uint64_t hash =
      XXH3_64bits_withSeed(words.data(), words.size() * sizeof(double), values_fingerprint);
  return static_cast<double>(hash >> 12);
}

}  // namespace

Decision::Decision(StepContext& context) : StepPart(context), decided_event_(context) {
  std::byte* const record = value_or_throw(context.pinned->allocate(sizeof(StepControl) + sizeof(StepState)));
  uploaded_ = new (record) StepControl;
  decided_ = new (record + sizeof(StepControl)) StepState;
}

std::vector<bool> Decision::exchange(const Hyperparameters& hyperparameters, std::uint64_t values_fingerprint,
                                     StepResult& result) {
  const std::size_t count = context_.units.size();
  constexpr std::size_t kUsed = kStepFacts;
  std::vector<double> mine(kUsed + count);
  mine[0] = hyperparameters.metric;
  mine[1] = hyperparameters.stop ? 1.0 : 0.0;
  mine[2] = fingerprint_of(hyperparameters, values_fingerprint);
  for (std::size_t i = 0; i < count; ++i) mine[kUsed + i] = context_.units[i].used ? 1.0 : 0.0;
  const auto ranks = static_cast<std::size_t>(context_.ranks());
  std::vector<double> all(mine.size() * ranks);
  must(
      context_.communicator.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));

  std::vector<bool> used(count, false);
  for (std::size_t r = 0; r < ranks; ++r) {
    const double* theirs = &all[r * mine.size()];
    result.metric_sum += theirs[0];
    result.stop = result.stop || theirs[1] != 0.0;
    if (theirs[2] != all[2]) {
      must(Status(StatusCode::kInvalidArgument,
                  "rank " + std::to_string(r) +
                      " gave other values to step() or set_parameter() than rank 0 by step " +
                      std::to_string(context_.attempted_steps + 1) +
                      "; learning rates, weight decay, clip and initial weights must be the same "
                      "on every rank"));
    }
    for (std::size_t i = 0; i < count; ++i) used[i] = used[i] || theirs[kUsed + i] != 0.0;
  }
  if (options_.grid != nullptr) exchange_over_grid(hyperparameters, result);
  return used;
}

void Decision::exchange_over_grid(const Hyperparameters& hyperparameters, StepResult& result) {
  const std::array<double, kStepFacts> mine = {hyperparameters.metric, hyperparameters.stop ? 1.0 : 0.0,
                                               fingerprint_of(hyperparameters, 0)};
  const auto all = context_.exchange(context_.deciders(), mine);
  result.metric_sum = 0.0;
  for (const std::array<double, kStepFacts>& theirs : all) {
    result.metric_sum += theirs[0];
    result.stop = result.stop || theirs[1] != 0.0;
    if (theirs[2] != all[0][2]) {
      must(Status(StatusCode::kInvalidArgument,
                  "the ranks of the grid gave different values to step() for step " +
                      std::to_string(context_.attempted_steps + 1) +
                      "; learning rates, weight decay and clip must be the same on every rank"));
    }
  }
}

// After this gather every rank's device knows the same norm and takes the same decision. If it fails on some
// ranks, vote() finds the decision.
void Decision::queue(double clip, const Reducer& reducer, const Updater& updater) {
  updater.wait_for_step(engine_stream_);
  uploaded_->state = {.attempted_steps = context_.attempted_steps,
                      .applied_steps = context_.applied_steps,
                      .loss_scale = context_.loss_scale,
                      .growth_counter = context_.growth_counter};
  bias_corrections(options_.beta1, options_.beta2, context_.applied_steps + 1, &uploaded_->correction, 1);
  engine_stream_.copy(context_.control, uploaded_, sizeof(StepControl));
  // A gather that fails does nothing. It leaves these bytes, which are not a number: the step is skipped.
  const std::uint64_t norm_bytes = context_.norm_count() * sizeof(double);
  Communicator& deciders = context_.deciders();
  engine_stream_.fill(context_.staging, 0xFF, norm_bytes * static_cast<std::uint64_t>(deciders.size()));
  reducer.wait_for_norms();
  must(deciders.all_gather({.source = reinterpret_cast<const std::byte*>(context_.norms),
                            .target = context_.staging,
                            .target_stride_bytes = norm_bytes,
                            .bytes = norm_bytes},
                           engine_stream_));
  queue_control(clip);
  engine_stream_.copy(decided_, &context_.control->state, sizeof(StepState));
  committed_ = true;
  if (deciders.size() > 1) {
    engine_stream_.call<&Decision::vote>(*this);
    engine_stream_.copy(&context_.control->state, decided_, sizeof(StepState));
  }
  engine_stream_.record(decided_event_);
}

void Decision::queue_control(double clip) {
  const std::uint64_t norm_count = context_.norm_count();
  const int deciding_ranks = context_.deciders().size();
  StepControlArguments arguments{};
  arguments.state = &context_.control->state;
  arguments.squares = reinterpret_cast<const double*>(context_.staging);
  arguments.scratch =
      reinterpret_cast<double*>(context_.staging) + norm_count * static_cast<std::size_t>(deciding_ranks);
  arguments.rank_stride = norm_count;
  arguments.unit_count = norm_count;
  arguments.rank_count = deciding_ranks;
  arguments.clip = clip;
  arguments.corrections = &context_.control->correction;
  arguments.first_step = context_.applied_steps + 1;
  arguments.correction_count = 1;
  arguments.dynamic_loss_scale = options_.dtype == DataType::kFloat16;
  arguments.growth_interval = options_.loss_scale.growth_interval;
  arguments.minimum_loss_scale = options_.loss_scale.minimum;
  must(kernels_.step_control(arguments, engine_stream_));
}

// Runs in the order of the engine's stream. A rank that has all norms votes before it acts on them. If the
// gather failed here, this rank takes the decision of a rank that voted, and none if no rank did.
void Decision::vote() {
  const std::uint64_t step = context_.attempted_steps + 1;
  Communicator& deciders = context_.deciders();
  committed_ = deciders.vote(step, std::as_bytes(std::span(decided_, 1))).ok();
  if (committed_) return;
  const std::optional<std::vector<std::byte>> vote = deciders.survivors_vote(step);
  committed_ = vote && vote->size() == sizeof(StepState);
  if (committed_) {
    std::memcpy(decided_, vote->data(), sizeof(StepState));
  } else {
    decided_->outcome = StepOutcome::kSkipped;
  }
}

bool Decision::wait() {
  must(backend_.event_synchronize(decided_event_));
  return committed_;
}

void Decision::apply(StepResult& result) {
  ++context_.attempted_steps;
  context_.loss_scale = decided_->loss_scale;
  context_.growth_counter = decided_->growth_counter;
  switch (decided_->outcome) {
    case StepOutcome::kApplied:
      result.grad_norm = decided_->grad_norm;
      ++context_.applied_steps;
      break;
    case StepOutcome::kSkipped:
      result.skipped = true;
      break;
    case StepOutcome::kNone:
    case StepOutcome::kNoCorrection:
      must(Status(StatusCode::kInternal, "the device took no decision about step " +
                                             std::to_string(context_.attempted_steps) +
                                             ", which is a defect of forebay; please report it"));
  }
}

}  // namespace forebay
