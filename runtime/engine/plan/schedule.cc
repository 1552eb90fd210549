#include "runtime/engine/plan/schedule.h"

#include <algorithm>
#include <set>

#include "forebay/arena.h"
#include "forebay/units.h"

namespace forebay {
namespace {

// Consecutive units of a pass in order of registration, without those that have a slot of their own or none.
UnitPairs consecutive(const std::vector<std::uint64_t>& unit_bytes, const std::vector<bool>& owns_tied) {
  UnitPairs pairs;
  int last = -1;
  for (std::size_t unit = 0; unit < unit_bytes.size(); ++unit) {
    if (unit_bytes[unit] == 0 || owns_tied[unit]) continue;
    if (last >= 0) pairs.emplace(last, static_cast<int>(unit));
    last = static_cast<int>(unit);
  }
  return pairs;
}

// Gives a slot to every unit with bytes: owners of tied parameters have one each, every other unit takes the
// first slot without a unit that it is paired with. Consecutive pairs alone give two slots in turn.
std::vector<int> share_slots(const std::vector<std::uint64_t>& unit_bytes, const std::vector<bool>& owns_tied,
                             const UnitPairs& pairs, std::vector<std::uint64_t>& slot_bytes) {
  std::vector<std::vector<int>> earlier(unit_bytes.size());  // The units that each is paired with.
  for (const auto& [first, second] : pairs) earlier[static_cast<std::size_t>(second)].push_back(first);
  std::vector<int> slot_of(unit_bytes.size(), SlotAssignment::kNone);
  std::vector<int> shared;
  for (std::size_t unit = 0; unit < unit_bytes.size(); ++unit) {
    if (unit_bytes[unit] == 0) continue;
    std::set<int> taken;
    for (const int other : earlier[unit]) taken.insert(slot_of[static_cast<std::size_t>(other)]);
    const auto is_free = [&](int slot) { return !taken.contains(slot); };
    const auto found = owns_tied[unit] ? shared.end() : std::find_if(shared.begin(), shared.end(), is_free);
    if (found != shared.end()) {
      slot_of[unit] = *found;
    } else {
      slot_of[unit] = static_cast<int>(slot_bytes.size());
      slot_bytes.push_back(0);
      if (!owns_tied[unit]) shared.push_back(slot_of[unit]);
    }
    std::uint64_t& bytes = slot_bytes[static_cast<std::size_t>(slot_of[unit])];
    bytes = std::max(bytes, round_up(unit_bytes[unit], kBlockGranule));
  }
  return slot_of;
}

}  // namespace

SlotAssignment assign_slots(const ModelShape& model, const std::vector<UnitLayout>& layouts,
                            const PlanOptions& options, const UnitOrder* order) {
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
  const auto share = [&](const std::vector<std::uint64_t>& bytes, const UnitPairs* pairs) {
    return share_slots(bytes, owns_tied, pairs != nullptr ? *pairs : consecutive(bytes, owns_tied),
                       assignment.slot_bytes);
  };
  assignment.parameter_slot = share(parameter_bytes, order != nullptr ? &order->parameters : nullptr);
  assignment.gradient_slot = share(gradient_bytes, order != nullptr ? &order->gradients : nullptr);
  if (options.order_of_units == OrderOfUnits::kStrict || order != nullptr) return assignment;
  // Slots that no unit has for its own: for units leased at once.
  for (const auto* bytes : {&parameter_bytes, &gradient_bytes}) {
    const std::uint64_t largest = round_up(*std::max_element(bytes->begin(), bytes->end()), kBlockGranule);
    if (largest > 0)
      assignment.slot_bytes.insert(assignment.slot_bytes.end(),
                                   static_cast<std::size_t>(options.units_at_once - 1), largest);
  }
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
