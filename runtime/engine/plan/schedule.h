// Which slot each unit uses and when a unit has to be gathered: the part of the schedule that the plan and
// the engine must agree on, written once.
//
// Units alternate between two slots, so that the next one is gathered while this one computes. The owner of a
// tied parameter has slots of its own: its gradient lives from the first contribution to the last, and its
// gathered parameters stay in place between their two uses. A slot keeps its unit until another takes it, so
// the units at the turn from forward to backward (and from one micro-step to the next) are not gathered
// again.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/plan.h"

namespace forebay {

SlotAssignment assign_slots(const ModelShape& model, const std::vector<UnitLayout>& layouts,
                            const PlanOptions& options);

// The units whose gathered parameters unit `unit` reads: itself, then the owners of what it ties.
std::vector<int> units_read_by(const ModelShape& model, int unit);

// Whether a step of `micro_steps` goes on with a forward pass, once so many forward and backward passes are
// done; otherwise with the backward pass of micro-step `backwards`. Up to `forwards_ahead` forward passes run
// ahead of the backward ones (EngineOptions).
constexpr bool forward_is_next(int micro_steps, int forwards_ahead, int forwards, int backwards) {
  return forwards < micro_steps && forwards - backwards <= forwards_ahead;
}

// What is gathered where, by version of the weights.
class Residency {
 public:
  explicit Residency(const SlotAssignment& assignment)
      : slot_of_(assignment.parameter_slot), held_(assignment.slot_bytes.size()) {}

  // True when `unit` has to be gathered for `version`; from then on its slot holds it.
  bool take(int unit, std::uint64_t version) {
    Held& held = held_[static_cast<std::size_t>(slot_of_[static_cast<std::size_t>(unit)])];
    if (held.unit == unit && held.version == version) return false;
    held = {unit, version};
    return true;
  }

 private:
  struct Held {
    int unit = -1;
    std::uint64_t version = 0;
  };
  std::vector<int> slot_of_;
  std::vector<Held> held_;
};

}  // namespace forebay
