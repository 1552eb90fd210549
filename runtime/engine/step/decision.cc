#include "runtime/engine/step/decision.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <optional>
#include <span>
#include <sstream>

#include "forebay/agreement.h"
#include "runtime/engine/step/reducer.h"
#include "runtime/engine/step/updater.h"

namespace forebay {
namespace {

// A hash as a whole number that a double holds exactly.
double as_double(std::uint64_t hash) {
  return static_cast<double>(hash >> 12);
}

// Values that must be the same on every rank, as a whole number that a double holds exactly.
double fingerprint_of(const Hyperparameters& hyperparameters, const EngineOptions& options,
                      std::uint64_t values_fingerprint) {
  std::vector<double> words{hyperparameters.clip, hyperparameters.gradient_factor};
  for (const GroupHyperparameters& group : hyperparameters.groups) {
    words.insert(words.end(), {group.lr, group.weight_decay, group.beta1.value_or(options.beta1),
                               group.beta2.value_or(options.beta2), group.epsilon.value_or(options.epsilon)});
  }
  const std::uint64_t hash =
      XXH3_64bits_withSeed(words.data(), words.size() * sizeof(double), values_fingerprint);
  return as_double(hash);
}

// The wish to stop and the facts, as a whole number that a double holds exactly: bits, then the hash.
constexpr std::uint64_t kStop = 1, kAbandoned = 2, kWantsNorm = 4, kNews = 8, kLeftOut = 16, kHash = 32;

double packed(bool stop, const Decision::Facts* facts) {
  std::uint64_t word = stop ? kStop : 0;
  if (facts != nullptr) {
    word |= (facts->abandoned ? kAbandoned : 0) | (facts->wants_norm ? kWantsNorm : 0) |
            (facts->news ? kNews : 0) | (facts->left_out ? kLeftOut : 0);
    word += (facts->hash >> 17) * kHash;
  }
  return static_cast<double>(word);
}

}  // namespace

Decision::Decision(StepContext& context) : StepPart(context), decided_event_(context) {
  std::byte* const record = value_or_throw(context.pinned->allocate(sizeof(StepControl) + sizeof(StepState)));
  uploaded_ = new (record) StepControl;
  decided_ = new (record + sizeof(StepControl)) StepState;
}

Decision::Agreed Decision::exchange(const Hyperparameters& hyperparameters, const Facts* facts,
                                    StepResult& result) {
  const std::size_t count = context_.units.size();
  constexpr std::size_t kUsed = kStepFacts;
  std::vector<double> mine(kUsed + count);
  mine[0] = hyperparameters.metric;
  mine[1] = packed(hyperparameters.stop, facts);
  mine[2] =
      fingerprint_of(hyperparameters, options_, context_.calls_fingerprint ^ context_.given_values.all());
  for (std::size_t i = 0; i < count; ++i) mine[kUsed + i] = context_.units[i].used ? 1.0 : 0.0;
  const auto ranks = static_cast<std::size_t>(context_.ranks());
  std::vector<double> all(mine.size() * ranks);
  must(
      context_.communicator.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));

  Agreed agreed;
  agreed.used.assign(count, false);
  bool all_left_out = true;
  std::size_t first = ranks;  // The first rank that did not give up the step.
  Status differs;
  const std::string step = std::to_string(context_.attempted_steps + 1);
  for (std::size_t r = 0; r < ranks; ++r) {
    const double* theirs = &all[r * mine.size()];
    const auto word = static_cast<std::uint64_t>(theirs[1]);
    result.metric_sum += theirs[0];
    result.stop = result.stop || (word & kStop) != 0;
    result.abandoned = result.abandoned || (word & kAbandoned) != 0;
    agreed.news = agreed.news || (word & kNews) != 0;
    all_left_out = all_left_out && (word & kLeftOut) != 0;
    if (word / kHash != static_cast<std::uint64_t>(all[1]) / kHash) {
      must(context_.hint_at_order(Status(
          StatusCode::kInvalidArgument,
          "rank " + std::to_string(r) + " leased its units in another order than rank 0 by step " + step)));
    }
    for (std::size_t i = 0; i < count; ++i) agreed.used[i] = agreed.used[i] || theirs[kUsed + i] != 0.0;
    if ((word & kAbandoned) != 0) continue;
    if (first == ranks) first = r;
    if ((word & kWantsNorm) != (static_cast<std::uint64_t>(all[first * mine.size() + 1]) & kWantsNorm)) {
      const bool wants_norm = (word & kWantsNorm) != 0;
      must(Status(StatusCode::kInvalidArgument,
                  "rank " + std::to_string(wants_norm ? r : first) + " called gradient_norm() and rank " +
                      std::to_string(wants_norm ? first : r) + " step() for step " + step +
                      "; call gradient_norm() on every rank or on none"));
    }
    if (differs.ok() && theirs[2] != all[first * mine.size() + 2]) {
      differs =
          Status(StatusCode::kInvalidArgument,
                 "rank " + std::to_string(r) + " gave other values to step() or set_parameter() than rank " +
                     std::to_string(first) + " by step " + step +
                     ", or one of them alone called freeze() or reset_moments(); learning rates, weight "
                     "decay, clip, initial weights and frozen parameters must be the same on every rank");
    }
  }
  must(differs.ok() || result.abandoned ? differs : name_difference(hyperparameters, differs));
  agreed.news = agreed.news || all_left_out;
  if (options_.grid != nullptr) exchange_over_grid(hyperparameters, facts, result);
  // The values are equal, and the update changes them: what is given from now on is compared by itself.
  if (!result.abandoned) context_.given_values.clear();
  return agreed;
}

Status Decision::name_difference(const Hyperparameters& hyperparameters, const Status& found) {
  std::ostringstream text;
  const auto line = [&](const std::string& name, double value) {
    char shown[32];
    std::snprintf(shown, sizeof(shown), "%.17g", value);
    text << name << '\t' << shown << '\n';
  };
  line("clip", hyperparameters.clip);
  line("the gradient factor", hyperparameters.gradient_factor);
  for (std::size_t i = 0; i < hyperparameters.groups.size(); ++i) {
    const GroupHyperparameters& group = hyperparameters.groups[i];
    const std::string of = " of parameter group " + std::to_string(i);
    line("lr" + of, group.lr);
    line("weight decay" + of, group.weight_decay);
    line("beta1" + of, group.beta1.value_or(options_.beta1));
    line("beta2" + of, group.beta2.value_or(options_.beta2));
    line("epsilon" + of, group.epsilon.value_or(options_.epsilon));
  }
  text << context_.given_values.text();
  try {
    agree_on_text(context_.communicator, "values by step " + std::to_string(context_.attempted_steps + 1),
                  text.str());
  } catch (const AgreementLost&) {
    return found;
  } catch (const Error& named) {
    return named.status();
  }
  return found;
}

void Decision::exchange_over_grid(const Hyperparameters& hyperparameters, const Facts* facts,
                                  StepResult& result) {
  const std::array<double, kGridFacts> mine = {hyperparameters.metric, packed(hyperparameters.stop, facts),
                                               fingerprint_of(hyperparameters, options_, 0),
                                               as_double(context_.shared_fingerprint())};
  const auto all = context_.exchange(context_.deciders(), mine);
  result.metric_sum = 0.0;
  const std::array<double, kGridFacts>* first = nullptr;
  std::vector<std::uint64_t> given;
  for (const std::array<double, kGridFacts>& theirs : all) {
    given.push_back(static_cast<std::uint64_t>(theirs[3]));
    const auto word = static_cast<std::uint64_t>(theirs[1]);
    result.metric_sum += theirs[0];
    result.stop = result.stop || (word & kStop) != 0;
    result.abandoned = result.abandoned || (word & kAbandoned) != 0;
    if ((word & kAbandoned) != 0) continue;
    if (first == nullptr) first = &theirs;
    if (theirs[2] != (*first)[2]) {
      must(Status(StatusCode::kInvalidArgument,
                  "the ranks of the grid gave different values to step() for step " +
                      std::to_string(context_.attempted_steps + 1) +
                      "; learning rates, weight decay and clip must be the same on every rank"));
    }
  }
  if (!result.abandoned) must(check_shared_values(context_.sharing_ranks, given));
}

// After this gather every rank's device knows the same norm and takes the same decision. If it fails on some
// ranks, vote() finds the decision.
void Decision::queue(const Hyperparameters& hyperparameters, const Reducer& reducer, const Updater& updater,
                     const std::function<void()>& before_vote) {
  gradient_factor_ = hyperparameters.gradient_factor;
  queue_state(gradient_factor_, updater);
  if (!has_norms_) gather_norms(reducer);
  has_norms_ = false;
  queue_control(hyperparameters.clip);
  take_decision();
  if (before_vote) {
    before_vote();
    gather_arrivals();
  }
  committed_ = true;
  // A rank alone fails where it fetches from files, or where a hook changes gradients on the host.
  if (context_.deciders().size() > 1 || context_.store != nullptr || options_.on_reduced_gradient) {
    engine_stream_.call<&Decision::vote>(*this);
    engine_stream_.copy(&context_.control->state, decided_, sizeof(StepState));
  }
  engine_stream_.record(decided_event_);
}

double Decision::take_norm(const Reducer& reducer, const Updater& updater) {
  queue_state(1.0, updater);
  gather_norms(reducer);
  queue_control(0.0);
  take_decision();
  engine_stream_.synchronize();
  must(context_.deciders().status());
  has_norms_ = true;
  return decided_->grad_norm;
}

// A factor of gradients is a divisor of the loss scale.
void Decision::queue_state(double gradient_factor, const Updater& updater) {
  updater.wait_for_step(engine_stream_);
  uploaded_->state = {.attempted_steps = context_.attempted_steps,
                      .applied_steps = context_.applied_steps,
                      .loss_scale = context_.loss_scale / gradient_factor,
                      .growth_counter = context_.growth_counter};
  bias_corrections(options_.beta1, options_.beta2, context_.applied_steps + 1, &uploaded_->correction, 1);
  engine_stream_.copy(context_.control, uploaded_, sizeof(StepControl));
}

void Decision::gather_norms(const Reducer& reducer) {
  // A gather that fails does nothing. It leaves these bytes, which are not a number: the step is skipped.
  const std::uint64_t norm_bytes = context_.norm_count() * sizeof(double);
  Communicator& deciders = context_.deciders();
  engine_stream_.fill(context_.staging, 0xFF, norm_bytes * static_cast<std::uint64_t>(deciders.size()));
  reducer.wait_for_norms();
  must(deciders.all_gather({.source = reinterpret_cast<const std::byte*>(context_.norms),
                            .target = context_.staging,
                            .target_stride_bytes = norm_bytes,
                            .bytes = norm_bytes,
                            .decides = true},
                           engine_stream_));
}

// A rank that has this gather knows that every rank has all that was gathered before it.
void Decision::gather_arrivals() {
  must(context_.deciders().all_gather({.source = reinterpret_cast<const std::byte*>(context_.norms),
                                       .target = context_.staging,
                                       .target_stride_bytes = sizeof(double),
                                       .bytes = sizeof(double),
                                       .decides = true},
                                      engine_stream_));
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

void Decision::take_decision() {
  if (context_.counts_only()) {
    // The copy moves nothing.
    *decided_ = {.attempted_steps = context_.attempted_steps + 1,
                 .applied_steps = context_.applied_steps + 1,
                 .loss_scale = context_.loss_scale,
                 .used_loss_scale = context_.loss_scale,
                 .factor = 1.0f,
                 .outcome = StepOutcome::kApplied,
                 .growth_counter = context_.growth_counter};
  }
  engine_stream_.copy(decided_, &context_.control->state, sizeof(StepState));
}

// Runs in the order of the engine's stream. A rank that has all norms votes before it acts on them. If the
// gather failed here, this rank takes the decision of a rank that voted, and none if no rank did.
void Decision::vote() {
  const std::uint64_t step = context_.attempted_steps + 1;
  Communicator& deciders = context_.deciders();
  if (deciders.size() == 1) {
    committed_ = deciders.status().ok();
    if (!committed_) decided_->outcome = StepOutcome::kSkipped;
    return;
  }
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
  if (gradient_factor_ == 1.0) {
    context_.loss_scale = decided_->loss_scale;
  } else if (options_.dtype == DataType::kFloat16) {
    // The same rule as on the device, for the scale without the factor.
    const bool grows = decided_->outcome == StepOutcome::kApplied && decided_->growth_counter == 0;
    if (decided_->outcome == StepOutcome::kSkipped)
      context_.loss_scale = std::max(context_.loss_scale / 2.0, options_.loss_scale.minimum);
    if (grows) context_.loss_scale *= 2.0;
  }
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
