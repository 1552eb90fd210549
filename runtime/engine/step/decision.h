// The decision about a step: applied or skipped, the clipping factor and the next loss scale.
//
// Ranks exchange facts between hosts and norms between devices. Each device decides by itself from the same
// norms. A rank votes for the decision before it acts on it: the commit point.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/engine/step/context.h"

namespace forebay {

class Reducer;
class Updater;

class Decision : private StepPart {
 public:
  explicit Decision(StepContext& context);

  // A rank's account of a step in recorded order.
  struct Facts {
    bool abandoned = false;   // This rank gives up the step.
    bool wants_norm = false;  // It is in gradient_norm().
    bool news = false;        // It used units in another order than the recorded one,
    bool left_out = false;    // or did not use some of them.
    std::uint64_t hash = 0;   // A hash of the order.
  };
  struct Agreed {
    std::vector<bool> used;  // By unit: some rank used it.
    bool news = false;       // The order has to be recorded again.
  };
  // Exchanges metrics, the wish to stop, the units in use and a fingerprint of values that must be the same.
  // `facts`: null in strict order. Collective.
  // Errors: kInvalidArgument naming a rank that was given other values; the engine is failed.
  Agreed exchange(const Hyperparameters& hyperparameters, const Facts* facts, StepResult& result);
  // The norm of the step, which queue() takes over. Order: as queue(). Waits.
  double take_norm(const Reducer& reducer, const Updater& updater);
  void forget_norm() { has_norms_ = false; }
  // Queues the gather of norms, the decision on the device and the vote. `before_vote`, unless empty, queues
  // work of all ranks that needs the decision; a rank votes when every rank has ended it.
  // Order: after the reductions of the step and after the updates of the step before, which read its
  // decision.
  void queue(const Hyperparameters& hyperparameters, const Reducer& reducer, const Updater& updater,
             const std::function<void()>& before_vote = {});
  // Waits for the decision. False: this rank may not act on it, because ranks failed.
  [[nodiscard]] bool wait();
  // Takes over the step's number, the loss scale and the norm.
  void apply(StepResult& result);

  // Recorded on the engine's stream: the decision has come to the host, too.
  Event decided() const { return decided_event_; }
  // Valid from decided() on.
  const StepState& on_host() const { return *decided_; }
  const StepState* on_device() const { return &context_.control->state; }

 private:
  // `found` with the first value that differs between ranks. Collective.
  Status name_difference(const Hyperparameters& hyperparameters, const Status& found);
  void exchange_over_grid(const Hyperparameters& hyperparameters, const Facts* facts, StepResult& result);
  void queue_state(double gradient_factor, const Updater& updater);
  void gather_norms(const Reducer& reducer);
  void gather_arrivals();
  void queue_control(double clip);
  // Copies the decision to the host.
  void take_decision();
  void vote();

  StepControl* uploaded_ = nullptr;  // Pinned: the device's input for a step,
  StepState* decided_ = nullptr;     // and its decision.
  bool has_norms_ = false;           // take_norm() has the norms of all ranks.
  double gradient_factor_ = 1.0;
  // Whether this rank may act on the decision. Written in the order of the engine's stream.
  bool committed_ = false;
  EngineEvent decided_event_;
};

}  // namespace forebay
