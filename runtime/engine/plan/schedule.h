// The slot of each unit, and the gathers of a step. Plan and engine must agree on both, so both ask the code
// here.
//
// Units alternate between two slots, so that the next unit is gathered while this one computes. The owner of
// a tied parameter has slots of its own: its gradient lives from the first contribution to the last, and its
// gathered parameters stay in place between their two uses. A slot keeps its unit until another unit takes
// it. So the units at the turn from forward to backward, and from one micro-step to the next, are not
// gathered again. With a recorded order, units take as many slots as were needed at once.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/plan.h"
#include "runtime/engine/plan/unit_order.h"

namespace forebay {

// `order`: the recorded one; null: none is known.
SlotAssignment assign_slots(const ModelShape& model, const std::vector<UnitLayout>& layouts,
                            const PlanOptions& options, const UnitOrder* order);

// The units that must be gathered for `unit`: the unit itself, then the owners of the parameters that it
// ties.
std::vector<int> units_read_by(const ModelShape& model, int unit);

// Whether the next pass is a forward pass, after so many forward and backward passes of a step. Otherwise it
// is the backward pass of micro-step `backwards`. Up to `forwards_ahead` forward passes run ahead of the
// backward passes (EngineOptions::forwards_ahead).
constexpr bool forward_is_next(int micro_steps, int forwards_ahead, int forwards, int backwards) {
  return forwards < micro_steps && forwards - backwards <= forwards_ahead;
}

// The unit that each slot holds, and the version of its weights.
class Residency {
 public:
  explicit Residency(const SlotAssignment& assignment)
      : slot_of_(assignment.parameter_slot), held_(assignment.slot_bytes.size()) {}

  // Whether `unit` must be gathered to have `version` of the weights. Afterwards its slot holds that version.
  bool take(int unit, std::uint64_t version) {
    Held& held = held_[static_cast<std::size_t>(slot_of_[static_cast<std::size_t>(unit)])];
    if (holds(unit, version)) return false;
    held = {unit, version};
    return true;
  }

  // Whether take() would answer false.
  bool holds(int unit, std::uint64_t version) const {
    const Held& held = held_[static_cast<std::size_t>(slot_of_[static_cast<std::size_t>(unit)])];
    return held.unit == unit && held.version == version;
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
