#include "runtime/engine/step/gatherer.h"

namespace forebay {

Gatherer::Gatherer(StepContext& context)
    : StepPart(context), residency_(context.plan.slots), fetch_stream_(context) {
  const bool fetches = plan_.offloads() && context.options.offload == Offload::kOptimizerAndParameters;
  add_slots();
  for (std::size_t i = 0; i < context.units.size(); ++i) parameters_ready_.emplace_back(context);
  if (!fetches) return;
  if (context.options.tier == Tier::kPinned) {
    fetch_stream_.open();
  } else {
    // So that no rank gathers the undefined bytes and votes for the step.
    mover_ = value_or_throw(Mover::create(context.backend, *context.store, *context.mover_buffers,
                                          [&context](const Status& failure) {
                                            context.communicator.abort(failure.with_context(kStatesFailed));
                                          }));
    fetch_stream_.borrow(mover_->stream());
  }
}

void Gatherer::add_slots() {
  while (slots_.size() < context_.slots->count()) {
    Slot& slot = slots_.emplace_back();
    slot.gathered = EngineEvent(context_);
    if (plan_.offloads() && plan_.offloads_parameters()) slot.fetched = EngineEvent(context_);
  }
}

void Gatherer::slots_changed() {
  residency_ = Residency(plan_.slots);
  for (Slot& slot : slots_) slot.user = -1;
  add_slots();
}

Gatherer::Slot* Gatherer::slot_of(int unit) {
  const int slot = context_.slots->slot_of(SlotUse::kParameters, unit);
  return slot == SlotAssignment::kNone ? nullptr : &slots_[static_cast<std::size_t>(slot)];
}

void Gatherer::require(int unit) {
  if (options_.stage < 3) return;
  for (const int needed : units_read_by(context_.model, unit)) {
    if (slot_of(needed) != nullptr && residency_.take(needed, version_)) gather(needed);
  }
}

void Gatherer::prefetch(int unit) {
  if (options_.overlap && unit >= 0 && unit < context_.unit_count()) require(unit);
}

void Gatherer::wait_for_parameters(int unit, Stream stream) const {
  for (const int needed : units_read_by(context_.model, unit)) {
    if (options_.stage < 3) {
      must(backend_.stream_wait(stream, parameters_ready_[static_cast<std::size_t>(needed)]));
    } else if (const Slot* slot = slot_of(needed); slot != nullptr) {
      must(backend_.stream_wait(stream, slot->gathered));
    }
  }
}

void Gatherer::wait_for_last_user(const EngineStream& stream, const Slot& slot) const {
  if (slot.user >= 0) stream.wait(unit(slot.user).released);
  if (!options_.overlap && last_leased_ >= 0) stream.wait(unit(last_leased_).released);
}

// A leased unit keeps its slot. One that went to a spare slot keeps that for as long as it counts as
// gathered.
bool Gatherer::in_use(int slot, int index) const {
  for (int other = 0; other < context_.unit_count(); ++other) {
    if (other == index || context_.slots->slot_of(SlotUse::kParameters, other) != slot) continue;
    if (unit(other).readers > 0) return true;
    if (context_.slots->is_spare(slot) && residency_.holds(other, version_)) return true;
  }
  return false;
}

void Gatherer::gather(int index) {
  const Unit& u = unit(index);
  // A unit that the trainer reads stays where it is. It gets the bytes that it has, for other ranks may lack
  // them.
  if (context_.recorded() && u.readers == 0) {
    context_.slots->place(SlotUse::kParameters, index, [&](int slot) { return in_use(slot, index); });
    add_slots();
  }
  Slot& slot = *slot_of(index);
  wait_for_last_user(engine_stream_, slot);
  const std::uint64_t slice = trainable_slice(index) * element();
  const std::uint64_t frozen_slice = context_.frozen_slice(index) * element();
  DevicePtr const frozen = u.parameters + layout(index).trainable_count * element();
  const std::byte* mine = u.parameter_shard;
  const std::byte* my_frozen = u.parameter_shard + slice;
  if (u.parameters_offloaded) {
    // Straight to their place among the others'.
    mine = u.parameters + static_cast<std::uint64_t>(context_.shard()) * slice;
    my_frozen = frozen + static_cast<std::uint64_t>(context_.shard()) * frozen_slice;
    fetch(index, slot);
  } else {
    engine_stream_.wait(u.updated);
  }
  slot.user = index;
  const MarkedSpan span = context_.marked(engine_stream_, "engine", "gather", index);
  must(context_.all_gather_section(u.parameters, mine, slice));
  must(context_.all_gather_section(frozen, my_frozen, frozen_slice));
  engine_stream_.record(slot.gathered);
  ++gather_count_;
}

// Fetches this rank's slices when the slot's last user has ended and the unit's last update has been made.
// They need no other place on the device.
void Gatherer::fetch(int index, Slot& slot) {
  const Unit& u = unit(index);
  const std::uint64_t slice = trainable_slice(index) * element();
  const std::uint64_t frozen_slice = context_.frozen_slice(index) * element();
  const auto shard = static_cast<std::uint64_t>(context_.shard());
  wait_for_last_user(fetch_stream_, slot);
  fetch_stream_.wait(slot.gathered);
  fetch_stream_.wait(u.updated);
  const MarkedSpan span = context_.marked(fetch_stream_, "parameters up", "fetch", index);
  fetch_slice(u.trainable_slice, slice, u.parameters + shard * slice);
  fetch_slice(u.frozen_slice, frozen_slice,
              u.parameters + layout(index).trainable_count * element() + shard * frozen_slice);
  fetch_stream_.record(slot.fetched);
  engine_stream_.wait(slot.fetched);
}

void Gatherer::fetch_slice(const OffloadedRange& source, std::uint64_t bytes, DevicePtr target) {
  if (bytes == 0) return;
  if (source.host != nullptr) {
    fetch_stream_.copy(target, source.host, bytes);
  } else {
    must(mover_->fetch({source.range, 0, bytes, source.range_bytes}, target));
  }
}

Status Gatherer::publish(int index, bool changed) {
  const Unit& u = unit(index);
  const int stage = options_.stage;
  Status gathered;
  // At stage 3 the next gather waits for the update.
  if (stage < 3) engine_stream_.wait(u.updated);
  if (changed && (stage == 1 || stage == 2))
    gathered = context_.all_gather_section(u.parameters, u.updated_parameters, u.updated_count * element());
  engine_stream_.record(parameters_ready_[static_cast<std::size_t>(index)]);
  return gathered;
}

Status Gatherer::synchronize() const {
  if (fetch_stream_.is_open()) fetch_stream_.synchronize();
  return mover_ != nullptr ? mover_->status() : Status();
}

}  // namespace forebay
