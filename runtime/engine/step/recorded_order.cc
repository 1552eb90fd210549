// Recorded order: leases in any order, steps that are given up, and the new order when a step ends.

#include <algorithm>
#include <limits>

#include "forebay/log.h"
#include "runtime/engine/engine_impl.h"

namespace forebay {

// Before an order is known, gathers ahead of their use would take slots in vain.
void Engine::Impl::prefetch_first(const UnitEvents& events) {
  if (!recorder->known()) return;
  const auto first = std::find_if(events.begin(), events.end(), [](UnitEvent e) { return !e.reduces(); });
  if (first != events.end()) gatherer->prefetch(first->unit);
}

void Engine::Impl::begin_micro_step(int index) {
  for (Unit& u : units) {
    u.forwards = u.backwards = 0;
    u.reduced = false;
    if (options.accumulate == Accumulate::kShard)
      std::fill(u.contributed.begin(), u.contributed.end(), false);
  }
  last_readers.clear();
  last_reduced = -1;
  forward_leases = backward_leases = 0;
  recorder->begin_micro_step(index);
  phase = Phase::kForward;
}

// Goes through the events that other ranks may have, then reduces the gradients that are left.
void Engine::Impl::finish_micro_step() {
  pass_rest();
  for (int index = unit_count() - 1; index >= 0; --index) run({index, UnitEvent::Kind::kReduce}, true);
  phase = Phase::kStep;
  ++micro_step;
}

void Engine::Impl::acquire(int index, bool backward) {
  if (!reads(index, backward)) return;
  const bool is_read = std::any_of(leases.begin(), leases.end(), [&](const LiveLease& lease) {
    return lease.unit == index && reads(index, lease.backward);
  });
  if (is_read) return;
  for (const int other : last_readers) recorder->pair_parameters(index, other);
  come_to({index, backward ? UnitEvent::Kind::kBackward : UnitEvent::Kind::kForward});
}

// Units without a backward pass are allowed; a step without any is a mistake. A trainer may look at its model
// once more after a backward pass.
void Engine::Impl::check_backward_passes() {
  if (forward_leases == 0 || backward_leases > 0 || micro_step > 0) return;
  const bool any_trainable =
      std::any_of(plan.layouts.begin(), plan.layouts.end(),
                  [](const UnitLayout& unit_layout) { return unit_layout.trainable_count > 0; });
  if (!any_trainable) return;
  misuse("micro-step " + std::to_string(micro_step) +
         " has a forward pass and no backward pass; call backward() for units that were leased, or abandon() "
         "to give the step up; forward passes without gradients belong between evaluation_begin() and "
         "evaluation_end()");
}

void Engine::Impl::acquired(int index, bool backward) {
  if (!after_evaluation) ++(backward ? backward_leases : forward_leases);
  const std::vector<int> owners = units_read_by(model, index);
  for (const int owner : owners) {
    Unit& u = unit(owner);
    if (reads(index, backward)) ++u.readers;
    if (backward) {
      u.used = true;
      ++u.open_backwards;
      if (u.reduced) {
        // With zeros, because it was expected earlier. The second reduction takes the place of the first.
        u.reduced = false;
        std::fill(u.contributed.begin(), u.contributed.end(), false);
      }
      open_gradients(owner);
    } else if (!after_evaluation) {
      ++u.forwards;
    }
  }
  last_readers.clear();
  for (int other = 0; other < unit_count(); ++other) {
    if (unit(other).readers > 0) last_readers.push_back(other);
  }
  prefetch_next();
}

void Engine::Impl::prefetch_next() {
  if (!recorder->known()) return;
  if (const std::optional<int> next = recorder->next_unit()) gatherer->prefetch(*next);
}

void Engine::Impl::release(const LiveLease& lease) {
  const std::vector<int> owners = units_read_by(model, lease.unit);
  for (const int owner : owners) {
    Unit& u = unit(owner);
    if (reads(lease.unit, lease.backward)) --u.readers;
    if (!lease.backward) continue;
    --u.open_backwards;
    ++u.backwards;
  }
  // Gradients that add up in place over micro-steps can be reduced only once, so they wait for the end.
  if (!lease.backward || options.accumulate == Accumulate::kLocal) return;
  for (const int owner : owners) {
    const Unit& u = unit(owner);
    if (!u.reduced && u.open_backwards == 0 && u.forwards == u.backwards)
      come_to({owner, UnitEvent::Kind::kReduce});
  }
}

// A reduction is passed only if this rank has nothing more to add to it for now. An expected reduction passes
// no uses: where this rank left out the last use of a unit, other ranks reduce later, and so does this rank.
void Engine::Impl::come_to(UnitEvent event) {
  const auto may_pass = [&](UnitEvent passed) {
    if (!passed.reduces()) return !event.reduces();
    const Unit& u = unit(passed.unit);
    if (u.reduced) return true;
    return options.accumulate == Accumulate::kShard && u.open_backwards == 0 && u.forwards == u.backwards;
  };
  if (event.reduces() && recorder->expects_later(event, may_pass)) return;
  if (recorder->come_to(event, may_pass)) {
    while (*recorder->next() != event) pass(*recorder->next());
    recorder->advance();
  }
  run(event, true);
}

// Other ranks may have come to this event, and gathered ahead then.
void Engine::Impl::pass(UnitEvent event) {
  recorder->advance();
  run(event, false);
  if (!event.reduces()) prefetch_next();
}

void Engine::Impl::pass_rest() {
  while (const std::optional<UnitEvent> event = recorder->next()) pass(*event);
}

void Engine::Impl::run(UnitEvent event, bool used) {
  Unit& u = unit(event.unit);
  if (!event.reduces()) {
    recorder->note(event, used);
    for (int other = 0; other < unit_count(); ++other) {
      if (unit(other).readers > 0) recorder->pair_parameters(event.unit, other);
    }
    gatherer->require(event.unit);
    return;
  }
  if (u.reduced) return;
  recorder->note(event, true);
  u.reduced = true;
  open_gradients(event.unit);
  engine_stream.wait(u.released);
  reducer->wait_for_copy_down(event.unit, engine_stream);
  reducer->complete(event.unit, engine_stream);
  reducer->reduce(event.unit, micro_step);
  if (std::all_of(units.begin(), units.end(), [](const Unit& each) { return each.reduced; }))
    reducer->flush();
  if (layout(event.unit).trainable_count > 0) last_reduced = event.unit;
}

void Engine::Impl::open_gradients(int index) {
  if (reducer->is_open(index) || layout(index).trainable_count == 0) return;
  for (int other = 0; other < unit_count(); ++other) {
    if (reducer->is_open(other) || other == last_reduced) recorder->pair_gradients(index, other);
  }
  reducer->open(index);
}

void Engine::Impl::end_passes() {
  if (passes_ended) return;
  passes_ended = true;
  if (micro_step < options.micro_steps) reducer->end_early(micro_step);
}

Decision::Facts Engine::Impl::facts() const {
  const Recorder::News news = recorder->news();
  return {.news = news.differs, .left_out = news.left_out, .hash = news.hash};
}

double Engine::Impl::gradient_norm() {
  finish_pass();
  if (norm) return *norm;
  check_passes("gradient_norm()");
  check_peers();
  if (recorded()) {
    end_passes();
    const OtherTraffic other(*this);
    Decision::Facts mine = facts();
    mine.wants_norm = true;
    StepResult result;
    static_cast<void>(decision->exchange({}, &mine, result));
    abandoned = result.abandoned;
  }
  norm = abandoned ? std::numeric_limits<double>::quiet_NaN() : decision->take_norm(*reducer, *updater);
  return *norm;
}

void Engine::Impl::abandon(int count) {
  if (!recorded()) misuse("abandon() in strict order; set EngineOptions::order_of_units to recorded");
  if (phase != Phase::kForward || after_evaluation == Phase::kIdle) {
    if (phase != Phase::kStep) expect(Phase::kStep, "abandon()");
  }
  const int begun = micro_step + (phase == Phase::kForward && !after_evaluation ? 1 : 0);
  if (count == 0) count = options.micro_steps;
  if (count < begun || count > options.micro_steps) {
    misuse("abandon(" + std::to_string(count) + ") after " + std::to_string(begun) +
           " micro-steps were begun; give the number that the other ranks run, at most " +
           std::to_string(options.micro_steps));
  }
  check_peers();
  // A rank that does not know the order cannot follow the collectives of ranks that go on, so all abandon
  // here.
  const bool all_abandon = ranks() > 1 && !recorder->known();
  if (all_abandon) count = begun;
  const bool is_unused = recorder->is_empty(evaluated_in_step);
  gives_up = true;
  for (const LiveLease& lease : leases) {
    must(close_aliases(lease.unit, lease.stream, lease.backward));
    for (const int owner : units_read_by(model, lease.unit)) must(note_release(owner, lease.stream));
  }
  leases.clear();
  for (Unit& u : units) u.readers = u.open_backwards = 0;
  if (after_evaluation) end_evaluation();
  if (!abandoned) {
    if (all_abandon && is_unused) {
      recorder->clear();
      passes_ended = true;
    } else if (phase == Phase::kForward) {
      finish_micro_step();
    }
    while (!passes_ended && micro_step < count) {
      begin_micro_step(micro_step);
      finish_micro_step();
    }
    end_passes();
    Decision::Facts mine = facts();
    mine.abandoned = true;
    StepResult result;
    static_cast<void>(decision->exchange({}, &mine, result));
  }
  give_up();
}

void Engine::Impl::give_up() {
  // No decision has waited for the averages of this step, and the next step may write their gradients.
  reducer->wait_for_norms();
  decision->forget_norm();
  recorder->clear();
  static_cast<void>(slots->took_spare());
  phase = Phase::kIdle;
}

// All ranks come here after the same step.
void Engine::Impl::adopt_order() {
  const OtherTraffic other(*this);
  const std::vector<std::byte> mine = recorder->account();
  std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(ranks()));
  must(communicator.exchange(mine, all));
  recorder->adopt(all);
  const auto budgets = exchange(communicator, device_budget());
  PlanOptions wanted = plan.options;
  wanted.recorded_order = recorder->order().text();
  Plan next = value_or_throw(make_plan(model, wanted));
  if (next.reserved_bytes > *std::min_element(budgets.begin(), budgets.end())) {
    log(LogLevel::kWarning,
        "the recorded order would take %llu bytes of a device, more than the budget: gathers go on with the "
        "slots that there are; lease fewer units at once, or raise EngineOptions::memory_bytes",
        static_cast<unsigned long long>(next.reserved_bytes));
    return;
  }
  const bool same = next.slots.parameter_slot == plan.slots.parameter_slot &&
                    next.slots.gradient_slot == plan.slots.gradient_slot &&
                    next.slots.slot_bytes == plan.slots.slot_bytes;
  // Queued averages and updates read the plan.
  reducer->synchronize();
  settle_updates();
  plan = std::move(next);
  if (same) return;
  for (const Unit& u : units) must(backend.event_synchronize(u.released));
  slots->replace();
  gatherer->slots_changed();
  reducer->slots_changed();
}

}  // namespace forebay
