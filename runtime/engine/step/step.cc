// One step: the order of passes and units, then the decision and the update.

#include <algorithm>
#include <cmath>
#include <limits>

#include "forebay/text.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {

bool Engine::Impl::skipped(int end) const {
  const std::size_t place = place_in_flight(micro_step);
  return std::all_of(units.begin(), units.begin() + end, [&](const Unit& u) { return u.skipped[place]; });
}

void Engine::Impl::begin_backward() {
  if (options.accumulate == Accumulate::kShard) {
    for (Unit& u : units) std::fill(u.contributed.begin(), u.contributed.end(), false);
  }
  cursor = unit_count();
  phase = Phase::kBackward;
}

void Engine::Impl::begin_backward_of(int index) {
  if (phase == Phase::kForward && cursor != unit_count()) {
    misuse("backward(" + shape(index).name + ") was called before unit " + shape(cursor).name +
           " had its forward pass; lease it forward or skip it");
  }
  // The backward pass before this one may have ended early, if this rank skipped the remaining units.
  if (phase == Phase::kForward || (phase == Phase::kBackward && index >= cursor && skipped(cursor)))
    finish_pass();
  if (phase == Phase::kStep && micro_step < forward_count) {
    if (forward_is_next()) {
      misuse("backward(" + shape(index).name + ") comes after the forward pass of micro-step " +
             std::to_string(forward_count) + ": the engine was made for " +
             std::to_string(options.forwards_ahead) + " forward passes ahead");
    }
    begin_backward();
  }
  if (phase != Phase::kBackward) misuse("backward() needs micro_step_begin() and the forward pass before it");
  const std::size_t place = place_in_flight(micro_step);
  while (cursor - 1 > index && unit(cursor - 1).skipped[place]) pass_skipped(cursor - 1);
  if (cursor - 1 != index)
    misuse("backward(" + shape(index).name + ") is out of order: the next unit is " + shape(cursor - 1).name);
  if (unit(index).skipped[place])
    misuse("backward(" + shape(index).name + ") of a unit that forward skipped");
}

// Does the work of backward() and of the end of its lease, with zeros for gradients.
void Engine::Impl::pass_skipped(int index) {
  if (shape(index).backward_reads_parameters) gatherer->require(index);
  if (index > 0 && shape(index - 1).backward_reads_parameters) gatherer->prefetch(index - 1);
  cursor = index;
  reducer->wait_for_copy_down(index, engine_stream);
  reducer->complete(index, engine_stream);
  reducer->reduce(index, micro_step);
  if (index == 0) reducer->flush();  // The backward pass ends with the first unit.
}

void Engine::Impl::finish_backward() {
  const std::size_t place = place_in_flight(micro_step);
  while (cursor > 0) {
    if (!unit(cursor - 1).skipped[place]) {
      misuse("unit " + shape(cursor - 1).name + " had a forward and no backward pass in micro-step " +
             std::to_string(micro_step));
    }
    pass_skipped(cursor - 1);
  }
  phase = Phase::kStep;
  ++micro_step;
}

// Ends the open pass, then goes through the next backward passes if this rank skipped all their units.
void Engine::Impl::finish_pass() {
  if (after_evaluation) misuse("evaluation_end() is missing; call it before a step goes on");
  if (recorded()) {
    if (phase == Phase::kForward) {
      check_backward_passes();
      finish_micro_step();
    }
    return;
  }
  if (phase == Phase::kForward) {
    if (cursor < unit_count()) {
      misuse("unit " + shape(cursor).name + " has no forward pass in micro-step " +
             std::to_string(forward_count) + "; lease it forward or skip it");
    }
    phase = Phase::kStep;
    ++forward_count;
  } else if (phase == Phase::kBackward) {
    finish_backward();
  }
  while (phase == Phase::kStep && micro_step < forward_count && !forward_is_next() && skipped(unit_count())) {
    begin_backward();
    finish_backward();
  }
}

void Engine::Impl::check_passes(const char* call) {
  if (recorded()) {
    if (micro_step == 0) misuse(std::string(call) + " before a micro-step; call micro_step_begin(0) first");
    return;
  }
  if (micro_step < forward_count)
    misuse("micro-step " + std::to_string(micro_step) + " has no backward pass");
  if (phase != Phase::kStep || micro_step != options.micro_steps) {
    misuse(std::string(call) + " after " + std::to_string(micro_step) +
           " micro-steps; the engine was made for " + std::to_string(options.micro_steps));
  }
}

void Engine::Impl::check_step(const Hyperparameters& hyperparameters) {
  check_passes("step()");
  if (!abandoned) check_gradients();
  if (static_cast<int>(hyperparameters.groups.size()) < group_count) {
    misuse("step() was given hyperparameters for " + std::to_string(hyperparameters.groups.size()) +
           " groups; the model has " + std::to_string(group_count));
  }
  for (const GroupHyperparameters& group : hyperparameters.groups) {
    // The arithmetic is fp32. A NaN is not at most anything.
    constexpr double kMost = std::numeric_limits<float>::max();
    if (!(std::abs(group.lr) <= kMost && std::abs(group.weight_decay) <= kMost)) {
      misuse(format_text("step() was given lr %.9g and weight decay %.9g; both must be finite in fp32",
                         group.lr, group.weight_decay));
    }
    throw_if_error(check_adamw(group.beta1.value_or(options.beta1), group.beta2.value_or(options.beta2),
                               group.epsilon.value_or(options.epsilon)));
  }
  if (!(hyperparameters.clip >= 0.0)) {
    misuse(format_text("step() was given clip %.9g; use 0 for none, or more", hyperparameters.clip));
  }
  if (!(hyperparameters.gradient_factor >= 0.0) || !std::isfinite(hyperparameters.gradient_factor)) {
    misuse(
        format_text("step() was given gradient_factor %.9g; use 1 for none, or any finite number from 0 on",
                    hyperparameters.gradient_factor));
  }
}

// Adafactor: masters may have been changed since the last step.
void Engine::Impl::refresh_squares() {
  if (counts_only()) return;
  for (int index = 0; index < unit_count(); ++index) {
    if (unit(index).squares_known) continue;
    if (unit(index).offloaded) {
      factored->refresh_on_host(index, [&](std::uint64_t begin, std::span<float> masters) {
        read_state(index, StateField::kMaster, begin, masters);
      });
    } else {
      factored->refresh_on_device(index);
    }
    unit(index).squares_known = true;
  }
}

// The whole step is queued before the host waits for the decision, so the device does not wait for the host
// between its last reduction and the update. A committed step is finished on every rank that is left, whether
// or not the ranks still reach each other: failures are told when all is queued.
StepResult Engine::Impl::step(const Hyperparameters& hyperparameters) {
  finish_pass();
  check_step(hyperparameters);
  check_peers();
  StepResult result;
  result.loss_scale = loss_scale;
  Decision::Facts mine;
  if (recorded()) {
    end_passes();
    mine = facts();
    mine.news = slots->took_spare() || mine.news;
  }
  Decision::Agreed agreed;
  if (abandoned) {
    result.abandoned = true;
  } else {
    agreed = decision->exchange(hyperparameters, recorded() ? &mine : nullptr, result);
  }
  if (result.abandoned) {
    give_up();
    return result;
  }
  // The trainer may still read parameters in passes without gradients.
  if (recorded()) {
    for (const Unit& u : units) engine_stream.wait(u.released);
  }
  updater->keep_copies();
  if (factored != nullptr) {
    refresh_squares();
    decision->queue(hyperparameters, *reducer, *updater, [&] { factored->queue(agreed.used); });
  } else if (matrix_updates != nullptr) {
    decision->queue(hyperparameters, *reducer, *updater,
                    [&] { matrix_updates->queue(agreed.used, hyperparameters); });
  } else {
    decision->queue(hyperparameters, *reducer, *updater);
  }
  updater->begin(agreed.used, hyperparameters);
  for (int index = 0; index < unit_count(); ++index) {
    const bool is_used = agreed.used[static_cast<std::size_t>(index)];
    if (is_used) updater->update(index, hyperparameters);
    static_cast<void>(gatherer->publish(index, is_used));
  }
  updater->end();
  if (!decision->wait()) {
    check_peers();
    must(Status(StatusCode::kInternal, "step " + std::to_string(attempted_steps + 1) +
                                           " was not committed though no rank failed, which is a defect of "
                                           "forebay; please report it"));
  }
  decision->apply(result);
  gradients_checked = true;
  if (result.skipped && options.find_non_finite) result.non_finite = first_non_finite();
  if (!result.skipped) gatherer->weights_changed();
  check_peers();
  if (!options.overlap) {
    engine_stream.synchronize();
    reducer->synchronize();
    updater->synchronize_device();
    check_peers();
  }
  phase = Phase::kIdle;
  if (recorded()) {
    if (agreed.news) adopt_order();
    recorder->clear();
  }
  return result;
}

}  // namespace forebay
