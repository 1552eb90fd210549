// The arena slots of gathered units and of their gradients, and the slot that each unit's alias shows.
//
// A unit shows its slot of the plan. In recorded order that slot may be in use when the unit needs it; then
// the unit's alias moves to a spare slot. The alias keeps its address.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "forebay/arena.h"
#include "forebay/plan.h"

namespace forebay {

struct StepContext;

enum class SlotUse : std::uint8_t { kParameters, kGradients };

class SlotTable {
 public:
  // Makes the slots of the plan. Errors: the Arena's, thrown.
  SlotTable(StepContext& context, Arena& arena, Tag tag);

  // Makes an alias of `bytes` for the unit, which may have several; null without a slot.
  DevicePtr create_alias(SlotUse use, int unit, std::uint64_t bytes);
  int slot_of(SlotUse use, int unit) const { return aliases(use)[static_cast<std::size_t>(unit)].slot; }
  std::size_t count() const { return slots_.size(); }
  bool is_spare(int slot) const { return slots_[static_cast<std::size_t>(slot)].spare; }

  // Moves the unit's alias to its slot of the plan, or where that is in use to a spare one. Makes one if it
  // must. Waits for the alias's queued work if the alias moves.
  // Errors: kOutOfMemory, thrown; the engine is failed.
  void place(SlotUse use, int unit, const std::function<bool(int slot)>& in_use);
  // Whether place() needed a spare slot since the last call.
  bool took_spare();

  // Makes the slots of the plan, which has changed, in place of all present ones.
  // Requires: no queued work uses a slot. Errors: as place().
  void replace();

 private:
  struct ArenaSlot {
    Slot slot;
    std::uint64_t bytes = 0;
    SlotUse use = SlotUse::kParameters;  // The use of a spare slot.
    bool spare = false;
  };
  // All aliases of a unit.
  struct Alias {
    std::vector<DevicePtr> addresses;
    std::uint64_t bytes = 0;
    int slot = SlotAssignment::kNone;
  };

  std::vector<Alias>& aliases(SlotUse use) { return aliases_[static_cast<std::size_t>(use)]; }
  const std::vector<Alias>& aliases(SlotUse use) const { return aliases_[static_cast<std::size_t>(use)]; }
  int home(SlotUse use, int unit) const;
  void move(const Alias& alias, Slot slot);
  void make_slots();
  int add_spare(SlotUse use, int unit, std::uint64_t bytes);

  StepContext& context_;
  Arena& arena_;
  const Tag tag_;
  std::vector<ArenaSlot> slots_;
  std::array<std::vector<Alias>, 2> aliases_;
  bool took_spare_ = false;
};

}  // namespace forebay
