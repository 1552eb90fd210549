#include "runtime/engine/step/slot_table.h"

#include <algorithm>
#include <string>

#include "forebay/units.h"
#include "runtime/engine/step/context.h"

namespace forebay {

SlotTable::SlotTable(StepContext& context, Arena& arena, Tag tag)
    : context_(context), arena_(arena), tag_(tag) {
  for (std::vector<Alias>& aliases : aliases_) aliases.resize(context.model.units.size());
  make_slots();
}

int SlotTable::home(SlotUse use, int unit) const {
  const SlotAssignment& slots = context_.plan.slots;
  return (use == SlotUse::kParameters ? slots.parameter_slot
                                      : slots.gradient_slot)[static_cast<std::size_t>(unit)];
}

// Slots of the plan that no unit has for its own are spare: first those of parameters, then those of
// gradients.
void SlotTable::make_slots() {
  const SlotAssignment& planned = context_.plan.slots;
  for (const std::uint64_t bytes : planned.slot_bytes)
    slots_.push_back({{}, bytes, SlotUse::kParameters, true});
  for (const int slot : planned.parameter_slot) {
    if (slot != SlotAssignment::kNone) slots_[static_cast<std::size_t>(slot)].spare = false;
  }
  for (const int slot : planned.gradient_slot) {
    if (slot != SlotAssignment::kNone) slots_[static_cast<std::size_t>(slot)].spare = false;
  }
  int spares_of_parameters = context_.options.stage >= 3 ? context_.options.units_at_once - 1 : 0;
  for (ArenaSlot& slot : slots_) {
    if (slot.spare && spares_of_parameters-- <= 0) slot.use = SlotUse::kGradients;
    slot.slot = value_or_throw(arena_.slot_create(slot.bytes, tag_));
  }
}

DevicePtr SlotTable::create_alias(SlotUse use, int unit, std::uint64_t bytes) {
  Alias& alias = aliases(use)[static_cast<std::size_t>(unit)];
  alias.slot = home(use, unit);
  if (alias.slot == SlotAssignment::kNone) return nullptr;
  alias.bytes = bytes;
  alias.addresses.push_back(
      value_or_throw(arena_.alias_create(slots_[static_cast<std::size_t>(alias.slot)].slot, bytes)));
  return alias.addresses.back();
}

void SlotTable::move(const Alias& alias, Slot slot) {
  for (DevicePtr const address : alias.addresses) context_.must(arena_.alias_move(address, slot));
}

void SlotTable::place(SlotUse use, int unit, const std::function<bool(int slot)>& in_use) {
  Alias& alias = aliases(use)[static_cast<std::size_t>(unit)];
  int chosen = home(use, unit);
  if (in_use(chosen)) {
    took_spare_ = true;
    const auto serves = [&](const ArenaSlot& slot) {
      return slot.spare && slot.use == use && slot.bytes >= alias.bytes &&
             !in_use(static_cast<int>(&slot - slots_.data()));
    };
    if (is_spare(alias.slot) && !in_use(alias.slot)) {
      chosen = alias.slot;
    } else if (const auto found = std::find_if(slots_.begin(), slots_.end(), serves); found != slots_.end()) {
      chosen = static_cast<int>(found - slots_.begin());
    } else {
      chosen = add_spare(use, unit, alias.bytes);
    }
  }
  if (chosen == alias.slot) return;
  context_.engine_stream.synchronize();
  context_.must(context_.backend.event_synchronize(context_.unit(unit).released));
  move(alias, slots_[static_cast<std::size_t>(chosen)].slot);
  alias.slot = chosen;
}

int SlotTable::add_spare(SlotUse use, int unit, std::uint64_t bytes) {
  const std::uint64_t rounded = round_up(bytes, kBlockGranule);
  const Result<Slot> made = arena_.slot_create(rounded, tag_);
  if (made.status().code() == StatusCode::kOutOfMemory) {
    std::string in_use;
    for (int other = 0; other < context_.unit_count(); ++other) {
      if (context_.unit(other).readers > 0 || context_.unit(other).open_backwards > 0)
        in_use += (in_use.empty() ? "" : ", ") + context_.shape(other).name;
    }
    context_.must(Status(
        StatusCode::kOutOfMemory,
        std::string(use == SlotUse::kParameters ? "the parameters" : "the gradients") + " of unit " +
            context_.shape(unit).name + " need " + format_bytes(rounded) + " beside the units in use (" +
            in_use + "), and the budget has no room: " + made.status().message() +
            "; lease fewer units at once, raise EngineOptions::memory_bytes, or take a larger ZeRO stage; "
            "EngineOptions::units_at_once or recorded_order makes the plan count these bytes"));
  }
  context_.must(made.status());
  slots_.push_back({made.value(), rounded, use, true});
  return static_cast<int>(slots_.size()) - 1;
}

bool SlotTable::took_spare() {
  return std::exchange(took_spare_, false);
}

void SlotTable::replace() {
  for (const std::vector<Alias>& aliases : aliases_) {
    for (const Alias& alias : aliases) move(alias, {});
  }
  for (const ArenaSlot& slot : slots_) context_.must(arena_.slot_destroy(slot.slot));
  slots_.clear();
  make_slots();
  for (const SlotUse use : {SlotUse::kParameters, SlotUse::kGradients}) {
    for (int unit = 0; unit < context_.unit_count(); ++unit) {
      Alias& alias = aliases(use)[static_cast<std::size_t>(unit)];
      if (alias.addresses.empty()) continue;
      alias.slot = home(use, unit);
      move(alias, slots_[static_cast<std::size_t>(alias.slot)].slot);
    }
  }
}

}  // namespace forebay
