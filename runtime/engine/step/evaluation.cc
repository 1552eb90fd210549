// Evaluations: forward passes without gradients, between steps or, in recorded order, within one.

#include "runtime/engine/engine_impl.h"

namespace forebay {

void Engine::Impl::begin_evaluation() {
  if (after_evaluation) misuse("evaluation_begin() twice; call evaluation_end() first");
  if (recorded()) finish_pass();
  if (!recorded() || phase != Phase::kStep) expect(Phase::kIdle, "evaluation_begin()");
  check_peers();
  outside_of_steps.emplace(*this);
  after_evaluation = phase;
  if (phase == Phase::kStep) evaluated_in_step = true;
  phase = Phase::kForward;
  if (recorded()) {
    last_readers.clear();
    recorder->begin_evaluation();
    prefetch_first(recorder->order().evaluation);
  } else {
    cursor = 0;
    gatherer->prefetch(0);
  }
}

void Engine::Impl::end_evaluation() {
  if (recorded()) {
    pass_rest();
  } else {
    // The trainer may still read parameters that the next update writes.
    for (const Unit& u : units) engine_stream.wait(u.released);
    cursor = 0;
  }
  phase = *after_evaluation;
  after_evaluation.reset();
  engine_stream.synchronize();  // Payload counts when it has arrived.
  check_peers();
  const Traffic before = other_traffic;
  outside_of_steps.reset();
  evaluation_traffic.sent_bytes += other_traffic.sent_bytes - before.sent_bytes;
  evaluation_traffic.received_bytes += other_traffic.received_bytes - before.received_bytes;
}

}  // namespace forebay
