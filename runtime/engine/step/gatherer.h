// Gathers: the parameters of a unit, whole, before the trainer reads them.
//
// At stage 3 each unit is gathered into a slot, the next unit while this one computes. A slot keeps its unit
// until another unit takes it, so a unit that is still there is not gathered again. The shard of an offloaded
// unit is first fetched to its place in the slot. At stages 1 and 2 the parameters are gathered after the
// update.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "forebay/mover.h"
#include "runtime/engine/step/context.h"

namespace forebay {

class Gatherer : private StepPart {
 public:
  explicit Gatherer(StepContext& context);

  // Queues the gathers without which `unit` cannot be read: its own, and those of owners of tied parameters.
  void require(int unit);
  // The same ahead of need: nothing without overlap, or without such a unit.
  void prefetch(int unit);
  // Makes `stream` wait for the parameters that `unit` reads. Order: after require().
  void wait_for_parameters(int unit, Stream stream) const;
  // The trainer's last lease was of `unit`. Without overlap, gathers wait for its end.
  void note_lease(int unit) { last_leased_ = unit; }

  // The plan has other slots now, and nothing is gathered in them. Requires: no queued work uses a slot.
  void slots_changed();

  // After a unit's turn in the update: lets readers wait for it, and at stages 1 and 2 gathers the
  // parameters if they `changed`. Errors: the gather's. Others are thrown.
  Status publish(int unit, bool changed);
  // All weights changed: units have to be gathered again.
  void weights_changed() { ++version_; }

  // The host waits for all queued fetches. Errors: the store's.
  Status synchronize() const;
  std::uint64_t gather_count() const { return gather_count_; }

 private:
  struct Slot {
    int user = -1;         // The unit last gathered into it.
    EngineEvent gathered;  // The gather into it.
    EngineEvent fetched;   // Offloaded parameters: this rank's slice is in its place.
  };

  void gather(int unit);
  void fetch(int unit, Slot& slot);
  void fetch_slice(const OffloadedRange& source, std::uint64_t bytes, DevicePtr target);
  void wait_for_last_user(const EngineStream& stream, const Slot& slot) const;
  void add_slots();
  Slot* slot_of(int unit);
  const Slot* slot_of(int unit) const { return const_cast<Gatherer*>(this)->slot_of(unit); }
  bool in_use(int slot, int unit) const;

  Residency residency_;
  std::uint64_t version_ = 1;  // Counts changes of the weights.
  std::uint64_t gather_count_ = 0;
  int last_leased_ = -1;
  std::vector<Slot> slots_;
  std::vector<EngineEvent> parameters_ready_;  // By unit: the parameters after the last update.
  EngineStream fetch_stream_;                  // The mover's, if there is one.
  std::unique_ptr<Mover> mover_;               // File tier: parameters on their way up.
};

}  // namespace forebay
