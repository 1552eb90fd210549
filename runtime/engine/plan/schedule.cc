#include "runtime/engine/plan/schedule.h"

#include <algorithm>

#include "forebay/arena.h"
#include "forebay/units.h"

namespace forebay {
namespace {

// Gives a slot to every unit with bytes: owners of tied parameters have one each, the other units take two in
// turn.
std::vector<int> take_turns(const std::vector<std::uint64_t>& unit_bytes, const std::vector<bool>& owns_tied,
                            std::vector<std::uint64_t>& slot_bytes) {
  std::vector<int> slot_of(unit_bytes.size(), SlotAssignment::kNone);
  int turns[2] = {SlotAssignment::kNone, SlotAssignment::kNone};
  int turn = 0;
  for (std::size_t unit = 0; unit < unit_bytes.size(); ++unit) {
    if (unit_bytes[unit] == 0) continue;
    int slot;
    if (owns_tied[unit]) {
      slot = static_cast<int>(slot_bytes.size());
      slot_bytes.push_back(0);
    } else {
      if (turns[turn] == SlotAssignment::kNone) {
        turns[turn] = static_cast<int>(slot_bytes.size());
        slot_bytes.push_back(0);
      }
      slot = turns[turn];
      turn = 1 - turn;
    }
    slot_of[unit] = slot;
    std::uint64_t& bytes = slot_bytes[static_cast<std::size_t>(slot)];
    bytes = std::max(bytes, round_up(unit_bytes[unit], kBlockGranule));
  }
  return slot_of;
}

}  // namespace

SlotAssignment assign_slots(const ModelShape& model, const std::vector<UnitLayout>& layouts,
                            const PlanOptions& options) {
  const std::size_t unit_count = model.units.size();
  std::vector<bool> owns_tied(unit_count, false);
  for (const UnitShape& unit : model.units) {
    for (const UnitShape::Tied& tied : unit.tied) owns_tied[static_cast<std::size_t>(tied.unit)] = true;
  }
  std::vector<std::uint64_t> parameter_bytes(unit_count, 0);
  std::vector<std::uint64_t> gradient_bytes(unit_count, 0);
  for (std::size_t unit = 0; unit < unit_count; ++unit) {
    const std::uint64_t element = element_bytes(options.dtype);
    if (options.stage >= 3) parameter_bytes[unit] = layouts[unit].total_count() * element;
    if (options.stage >= 2) gradient_bytes[unit] = layouts[unit].trainable_count * element;
  }
  SlotAssignment assignment;
  assignment.parameter_slot = take_turns(parameter_bytes, owns_tied, assignment.slot_bytes);
  assignment.gradient_slot = take_turns(gradient_bytes, owns_tied, assignment.slot_bytes);
  return assignment;
}

std::vector<int> units_read_by(const ModelShape& model, int unit) {
  std::vector<int> units{unit};
  for (const UnitShape::Tied& tied : model.units[static_cast<std::size_t>(unit)].tied) {
    if (std::find(units.begin(), units.end(), tied.unit) == units.end()) units.push_back(tied.unit);
  }
  return units;
}

}  // namespace forebay
