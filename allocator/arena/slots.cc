// Slots, and the aliases that show them.
#include <algorithm>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

// Takes chunks of the smallest size, `bytes` in all, mapped nowhere. On failure takes none. growth_mutex_ and
// mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::acquire_slot(Lock& lock, std::size_t bytes, std::vector<std::uint32_t>* chunks) {
  std::size_t spare_count = 0;
  for (std::uint32_t i = spares_; i != kNone; i = chunks_[i].next)
    spare_count += chunks_[i].bytes == chunk_bytes_;
  const std::size_t needed_bytes = bytes - std::min(bytes, spare_count * chunk_bytes_);
  Status status;
  // Spares of that size are taken first, so that making room does not destroy them.
  const auto take_small = [&] {
    std::uint32_t chunk = kNone;
    while (chunks->size() * chunk_bytes_ < bytes && take_spare(chunk_bytes_, &chunk))
      chunks->push_back(chunk);
  };
  take_small();
  if (needed_bytes > 0 && !make_room(lock, needed_bytes)) status = Status(StatusCode::kOutOfMemory, "");
  if (status.ok() && !reserve_books(lock, bytes)) status = no_books();
  if (status.ok()) status = create_chunks(lock, bytes - chunks->size() * chunk_bytes_, chunk_bytes_, chunks);
  if (!status.ok()) {
    for (const std::uint32_t chunk : *chunks) keep_spare(chunk);
    chunks->clear();
  }
  return status;
}

// Room for one more slot. growth_mutex_ and mutex_ held; may release mutex_ meanwhile.
bool ChunkedArena::reserve_slot(Lock& lock) {
  if (slots_.size() < slots_.capacity()) return true;
  lock.unlock();
  const bool made = make_vector_room(slots_, 2 * slots_.size() + 1);
  lock.lock();
  return made;
}

Result<Slot> ChunkedArena::slot_create(std::size_t bytes, Tag tag) {
  if (bytes == 0) {
    return invalid_argument("cannot create a slot of no bytes: it would have no chunk; ask for one");
  }
  settle();
  Status cause;
  std::vector<std::uint32_t> chunks;
  {
    std::lock_guard growth(growth_mutex_);
    Lock lock(mutex_);
    if (tag >= tag_count_) return no_such_tag("create a slot", tag);
    if (bytes > limit_bytes_) {
      cause = Status(StatusCode::kOutOfMemory, "");
    } else if (!reserve_row(lock, &chunks, ceil_div(bytes, chunk_bytes_)) || !reserve_slot(lock)) {
      cause = no_books();
    } else {
      const std::size_t live_bytes = round_up(bytes, kBlockGranule);
      recover_stranded(lock);
      if (!within_tag_limit(tag, live_bytes)) {
        lock.unlock();
        return over_tag_limit("create a slot of", live_bytes, tag);
      }
      cause = acquire_slot(lock, align_up(bytes, chunk_bytes_), &chunks);
      // mutex_ was released meanwhile, so the tag is checked again.
      if (cause.ok() && !within_tag_limit(tag, live_bytes)) {
        for (const std::uint32_t chunk : chunks) keep_spare(chunk);
        lock.unlock();
        return over_tag_limit("create a slot of", live_bytes, tag);
      }
      if (cause.ok()) {
        charge(tag, kNoStream, live_bytes, bytes);
        ArenaStatistics& account = tags_[tag].account;
        account.reserved_bytes += chunks.size() * chunk_bytes_;
        slot_slack_bytes_ += chunks.size() * chunk_bytes_ - live_bytes;
        account.peak_reserved_bytes = std::max(account.peak_reserved_bytes, account.reserved_bytes);
        lock.unlock();
        slots_.push_back({std::move(chunks), live_bytes, bytes, 0, tag, true});
        return Slot{static_cast<std::uint32_t>(slots_.size() - 1)};
      }
    }
  }
  if (cause.code() == StatusCode::kOutOfMemory)
    return out_of_memory("create a slot of", bytes, tag, Placement(), cause);
  return cause.with_context("cannot create a slot of " + format_bytes(bytes));
}

Status ChunkedArena::slot_destroy(Slot slot) {
  std::lock_guard growth(growth_mutex_);
  if (slot.index >= slots_.size() || !slots_[slot.index].live) {
    return invalid_argument("cannot destroy slot ", slot.index,
                            ": there is no such slot; was it destroyed already?");
  }
  SlotState& state = slots_[slot.index];
  if (state.alias_count != 0) {
    return invalid_argument("cannot destroy slot ", slot.index, ": ",
                            format_count(state.alias_count, "alias shows", "aliases show"),
                            " it; destroy its aliases first");
  }
  Lock lock(mutex_);
  for (const std::uint32_t chunk : state.chunks) keep_spare(chunk);
  discharge(state.tag, kNoStream, state.live_bytes, state.asked_bytes);
  tags_[state.tag].account.reserved_bytes -= state.chunks.size() * chunk_bytes_;
  slot_slack_bytes_ -= state.chunks.size() * chunk_bytes_ - state.live_bytes;
  lock.unlock();
  state.chunks.clear();
  state.live = false;
  return Status();
}

// Maps the first `bytes` of a slot at `begin`. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
ChunkedArena::MappedRow ChunkedArena::map_alias(Lock& lock, std::size_t begin, std::size_t bytes,
                                                const SlotState& slot) {
  const std::size_t count = bytes / chunk_bytes_;
  MappedRow mapped;
  lock.unlock();
  row_.clear();
  if (make_vector_room(row_, count)) {
    for (std::size_t i = 0; i < count; ++i) row_.push_back({chunks_[slot.chunks[i]].handle, chunk_bytes_});
    mapped = map_row(begin, begin + bytes, row_);
  } else {
    mapped.status = no_books();
  }
  lock.lock();
  return mapped;
}

Result<DevicePtr> ChunkedArena::alias_create(Slot slot, std::size_t bytes) {
  std::lock_guard growth(growth_mutex_);
  if (slot.index >= slots_.size() || !slots_[slot.index].live) {
    return invalid_argument("cannot create an alias of slot ", slot.index,
                            ": there is no such slot; make it with slot_create");
  }
  SlotState& state = slots_[slot.index];
  const std::size_t slot_bytes = state.chunks.size() * chunk_bytes_;
  if (bytes == 0 || bytes > slot_bytes) {
    return invalid_argument("cannot create an alias of ", format_bytes(bytes), ": the slot has ",
                            format_bytes(slot_bytes), "; ask for one byte up to that");
  }
  const std::size_t alias_bytes = align_up(bytes, chunk_bytes_);
  Lock lock(mutex_);
  recover_stranded(lock);
  if (!reserve_ranges(lock)) return no_books();
  Range* target = unmapped_from_top(alias_bytes);
  if (target == nullptr) {
    drop_stale_mappings(lock);
    if (!reserve_ranges(lock)) return no_books();
    target = unmapped_from_top(alias_bytes);
  }
  if (target == nullptr) {
    return Status(StatusCode::kOutOfMemory, "cannot create an alias of ", format_bytes(alias_bytes),
                  ": no unmapped addresses of that size are left of ", format_bytes(reserve_bytes_),
                  "; reserve more (ArenaOptions::reserve_bytes)");
  }
  target->slot = slot.index;
  const std::size_t begin = target->offset;
  const MappedRow mapped = map_alias(lock, begin, alias_bytes, state);
  // Others may have taken the descriptors that were made room for.
  if (mapped.stranded) (void)reserve_ranges(lock);
  install_leaves(mapped);
  if (mapped.status.ok()) {
    target->kind = RangeKind::kAlias;
    granules_.own(target);
    ++state.alias_count;
    return base_ + begin;
  }
  if (mapped.stranded) {
    strand_alias(target, mapped);
  } else {
    put_unmapped(target);
  }
  if (!has_text_room()) return mapped.status;
  return mapped.status.with_context("cannot create an alias of " + format_bytes(alias_bytes));
}

// One stranded range for the part of an alias that could not be unmapped; the rest is unmapped. mutex_ held.
void ChunkedArena::strand_alias(Range* range, const MappedRow& mapped) {
  if (mapped.bytes < range->bytes) {
    const auto [lower, rest] = split(range, range->offset + mapped.bytes);
    put_unmapped(rest);
    range = lower;
  }
  range->slot = UINT32_MAX;
  range->kind = RangeKind::kStranded;
  granules_.own(range);
  ++stranded_count_;
}

// The range of an alias that begins at `address`, or null. mutex_ held.
Range* ChunkedArena::find_alias(DevicePtr address) {
  const auto offset = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(address) -
                                               reinterpret_cast<std::uintptr_t>(base_));
  Range* const range = offset < reserve_bytes_ ? ranges_.find(offset) : nullptr;
  return range != nullptr && range->kind == RangeKind::kAlias ? range : nullptr;
}

// Leaves an alias that shows no slot. mutex_ held; releases it meanwhile.
Status ChunkedArena::unmap_alias(Lock& lock, Range* range) {
  if (range->slot == Slot().index) return Status();
  range->kind = RangeKind::kBusy;
  Status status = unmap_unlocked(lock, range->offset, range->bytes);
  range->kind = RangeKind::kAlias;
  if (!status.ok()) return status;
  --slots_[range->slot].alias_count;
  range->slot = Slot().index;
  return Status();
}

Status ChunkedArena::alias_move(DevicePtr alias, Slot slot) {
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  Range* const range = find_alias(alias);
  const bool parks = slot.index == Slot().index;
  const bool fits = parks || (slot.index < slots_.size() && slots_[slot.index].live && range != nullptr &&
                              range->bytes <= slots_[slot.index].chunks.size() * chunk_bytes_);
  if (range == nullptr || !fits) {
    return invalid_argument("cannot move the alias at ", describe(alias), " to slot ", slot.index,
                            ": there is no such alias or slot, or the slot is smaller; use an alias of "
                            "alias_create and a slot that is at least as large");
  }
  if (Status status = unmap_alias(lock, range); !status.ok())
    return status.with_context("cannot move the alias at " + describe(alias));
  if (parks) return Status();
  SlotState& state = slots_[slot.index];
  range->kind = RangeKind::kBusy;
  const MappedRow mapped = map_alias(lock, range->offset, range->bytes, state);
  install_leaves(mapped);
  range->kind = RangeKind::kAlias;
  if (mapped.status.ok()) {
    range->slot = slot.index;
    ++state.alias_count;
    return Status();
  }
  if (mapped.stranded) {
    (void)reserve_ranges(lock);
    strand_alias(range, mapped);
  }
  if (!has_text_room()) return mapped.status;
  return mapped.status.with_context("cannot move the alias at " + describe(alias));
}

Status ChunkedArena::alias_destroy(DevicePtr alias) {
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  Range* const range = find_alias(alias);
  if (range == nullptr) {
    return invalid_argument("cannot destroy the alias at ", describe(alias),
                            ": no alias begins there; was it destroyed already?");
  }
  if (Status status = unmap_alias(lock, range); !status.ok())
    return status.with_context("cannot destroy the alias at " + describe(alias));
  put_unmapped(range);
  return Status();
}

}  // namespace forebay::internal
