// Unmapping: free chunks go back to the device, and addresses that own no memory become unmapped.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

namespace {

// Longer than an event takes that was recorded on an idle stream.
constexpr std::chrono::milliseconds kRefinePatience{1};
// The most steps between two attempts to refine.
constexpr std::uint32_t kRefinePauseMax = 1023;

}  // namespace

// Enters that the mapping under this claimed range is gone; the range becomes unmapped. True if its chunk is
// mapped nowhere now; it is a spare then. growth_mutex_ and mutex_ held.
bool ChunkedArena::remove_mapping(Range* range) {
  const std::uint32_t mapping = granules_.at(range->offset).mapping;
  const std::uint32_t index = mappings_[mapping].chunk;
  PhysicalChunk& chunk = chunks_[index];
  std::uint32_t* link = &chunk.first_mapping;
  while (*link != mapping) link = &mappings_[*link].next;
  *link = mappings_[mapping].next;
  std::uint32_t left = chunk.first_mapping;
  for (std::uint32_t& view : chunk.views) {
    view = left == kNone ? kNone : static_cast<std::uint32_t>(mappings_[left].offset / chunk_bytes_);
    if (left != kNone) left = mappings_[left].next;
  }
  mappings_.give(mapping);
  --mapping_count_;
  if (history_limit_ != 0) note(SnapshotAction::kSegmentUnmap, range->offset, range->bytes, Stream());
  put_unmapped(range);
  if (chunk.first_mapping != kNone) {
    --repeated_count_;
    return false;
  }
  keep_spare(index);
  return true;
}

// Whether every byte of a chunk is free for all, and no queued work may still use any of its addresses.
// mutex_ held.
bool ChunkedArena::evictable(std::uint32_t index) const {
  const PhysicalChunk& chunk = chunks_[index];
  if (capturing_count_ != 0 || !chunk.held || chunk.paused || chunk.first_mapping == kNone) return false;
  std::size_t free_bytes = 0;
  for (std::uint32_t i = chunk.first_mapping; i != kNone; i = mappings_[i].next) {
    const std::size_t begin = mappings_[i].offset;
    const std::size_t end = begin + chunk.bytes;
    for (const Range* range = range_at(begin); range != nullptr && range->offset < end; range = range->next) {
      if (range->kind == RangeKind::kFree) {
        if (range->waits != 0 || captured(range->region)) return false;
        free_bytes += std::min(end, range->end()) - std::max(begin, range->offset);
      } else if (range->kind != RangeKind::kShadow || unfinished(range->waits, range->epoch) != 0) {
        return false;
      }
    }
  }
  return free_bytes == chunk.bytes;
}

// Claims all addresses of an evictable chunk: one busy range for each mapping. mutex_ held; takes up to 4
// descriptors for each mapping.
void ChunkedArena::isolate_mappings(std::uint32_t chunk) {
  for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) {
    isolate(mappings_[i].offset, mappings_[i].offset + chunks_[chunk].bytes);
  }
}

std::size_t ChunkedArena::count_mappings(std::uint32_t chunk) const {
  std::size_t count = 0;
  for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) ++count;
  return count;
}

// Unmaps an evictable chunk everywhere: it becomes a spare. growth_mutex_ and mutex_ held; releases mutex_
// meanwhile.
Status ChunkedArena::evict(Lock& lock, std::uint32_t chunk) {
  if (!reserve_ranges(lock, 4 * count_mappings(chunk) + kSplitsMax)) return no_books();
  if (!evictable(chunk)) return Status(StatusCode::kUnavailable, "");
  isolate_mappings(chunk);
  const std::size_t bytes = chunks_[chunk].bytes;
  for (bool mapped = true; mapped;) {
    const std::size_t offset = mappings_[chunks_[chunk].first_mapping].offset;
    Status status = unmap_unlocked(lock, offset, bytes);
    if (!status.ok()) {
      give_back_claimed();
      return status;
    }
    mapped = !remove_mapping(range_at(offset));
  }
  return Status();
}

// Makes spares of all evictable chunks, in as few calls as there are gaps between their addresses. False if
// there was none. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
bool ChunkedArena::evict_all(Lock& lock) {
  if (!isolate_all_evictable(lock)) return false;
  bool refused = false;
  const bool any = unmap_claimed(lock, &refused);
  if (refused) give_back_claimed();
  return any;
}

// Claims all addresses of all evictable chunks. False if there is none. Both locks held; may release mutex_,
// but only before it claims anything.
bool ChunkedArena::isolate_all_evictable(Lock& lock) {
  std::size_t needed_count = kSplitsMax;
  do {
    // Making room may release the lock, and more may be evictable then.
    if (!reserve_ranges(lock, needed_count)) return false;
    needed_count = kSplitsMax;
    for (std::uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
      if (evictable(chunk)) needed_count += 4 * count_mappings(chunk);
    }
  } while (pool_.available() < needed_count);
  if (needed_count == kSplitsMax) return false;
  for (std::uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (evictable(chunk)) isolate_mappings(chunk);
  }
  return true;
}

// Unmaps all busy ranges, each of which is one mapping, neighbours in one call. `*refused`: a call failed,
// and its ranges are busy still. True if a chunk became a spare. Both locks held; releases mutex_ meanwhile.
bool ChunkedArena::unmap_claimed(Lock& lock, bool* refused) {
  // Rows of neighbours that are found in one walk over all ranges.
  constexpr std::size_t kRowsMax = 128;
  std::pair<std::size_t, std::size_t> rows[kRowsMax];
  bool any = false;
  for (std::size_t offset = 0;;) {
    std::size_t count = 0;
    for (Range* range = first_; range != nullptr && count < kRowsMax;) {
      if (range->offset < offset || range->kind != RangeKind::kBusy) {
        range = range->next;
        continue;
      }
      const std::size_t begin = range->offset;
      for (; range != nullptr && range->kind == RangeKind::kBusy; range = range->next) offset = range->end();
      rows[count++] = {begin, offset};
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto [begin, end] = rows[i];
      if (!unmap_unlocked(lock, begin, end - begin).ok()) {
        *refused = true;
        continue;
      }
      for (std::size_t at = begin; at < end;) {
        Range* gone = range_at(at);
        at = gone->end();
        if (remove_mapping(gone)) any = true;
      }
    }
    if (count < kRowsMax) return any;
  }
}

// Busy ranges, each of which is one mapping, keep their memory: for each chunk one range owns it, the others
// are shadows. Both locks held.
void ChunkedArena::give_back_claimed() {
  for (Range* range = first_; range != nullptr;) {
    if (range->kind != RangeKind::kBusy) {
      range = range->next;
      continue;
    }
    range->waits = 0;
    range->epoch = 0;
    const std::uint32_t mapping = granules_.at(range->offset).mapping;
    if (chunks_[mappings_[mapping].chunk].first_mapping == mapping) {
      put_free(range);
      range = first_;  // It may have been joined to its neighbour.
    } else {
      range->kind = RangeKind::kShadow;
    }
  }
}

// Destroys spares, then evictable chunks, until `bytes` may be taken from the device. False if they do not
// suffice; then none is destroyed. Both locks held; releases mutex_ meanwhile.
bool ChunkedArena::make_room(Lock& lock, std::size_t bytes) {
  const auto room = [this] { return limit_bytes_ - total_.reserved_bytes; };
  std::size_t found_bytes = room() + spare_bytes_;
  for (std::uint32_t i = 0; i < chunks_.size() && found_bytes < bytes; ++i) {
    if (evictable(i)) found_bytes += chunks_[i].bytes;
  }
  if (found_bytes < bytes) return false;
  while (room() < bytes && spares_ != kNone) {
    if (!destroy_spare(lock, spares_).ok()) return false;
  }
  for (std::uint32_t i = 0; i < chunks_.size() && room() < bytes; ++i) {
    if (!evictable(i)) continue;
    if (!evict(lock, i).ok()) continue;
    if (!destroy_spare(lock, i).ok()) return false;
  }
  return room() >= bytes;
}

// Tries again to unmap stranded ranges. Both locks held; releases mutex_ meanwhile.
void ChunkedArena::recover_stranded(Lock& lock) {
  if (stranded_count_ == 0 || capturing_count_ != 0) return;
  for (Range* range = first_; range != nullptr;) {
    if (range->kind != RangeKind::kStranded) {
      range = range->next;
      continue;
    }
    range->kind = RangeKind::kBusy;
    const std::size_t offset = range->offset;
    const std::size_t bytes = range->bytes;
    const bool unmapped = unmap_unlocked(lock, offset, bytes).ok();
    if (!unmapped) {
      range->kind = RangeKind::kStranded;
      return;
    }
    --stranded_count_;
    if (granules_.at(offset).mapping == kNone) {
      put_unmapped(range);  // An alias of a slot.
    } else {
      remove_mapping(range);
    }
    range = first_;  // The unmapped range may have merged into its neighbour.
  }
}

// The bytes of the stale mapping that begins at `offset`: it owns no memory, and no queued work may still use
// it. 0 if there is none. mutex_ held.
std::size_t ChunkedArena::stale_mapping_bytes(std::size_t offset) const {
  const GranuleTable::Entry* entry = granules_.find(offset);
  if (entry == nullptr || entry->range == nullptr || entry->mapping == kNone) return 0;
  const Mapping& mapping = mappings_[entry->mapping];
  const std::size_t end = mapping.offset + chunks_[mapping.chunk].bytes;
  if (mapping.offset != offset) return 0;
  for (const Range* range = entry->range; range != nullptr && range->offset < end; range = range->next) {
    if (range->kind != RangeKind::kShadow || unfinished(range->waits, range->epoch) != 0) return 0;
  }
  return end - offset;
}

// Unmaps all stale mappings, neighbours in one call. None while a stream is being captured. Both locks held;
// releases mutex_ meanwhile.
void ChunkedArena::drop_stale_mappings(Lock& lock) {
  if (capturing_count_ != 0) return;
  for (std::size_t offset = 0; offset < reserve_bytes_;) {
    // First, because it may release the lock.
    if (!reserve_ranges(lock, 64)) return;
    const Range* range = range_at(offset);
    if (range == nullptr) {
      const Range* hole = holes_;
      while (hole->end() <= offset) hole = hole->bin_next;
      offset = hole->end();
      continue;
    }
    // One busy range for each mapping, as many of them as there are descriptors for.
    const std::size_t begin = offset;
    while (offset < reserve_bytes_ && pool_.available() >= kSplitsMax) {
      const std::size_t bytes = stale_mapping_bytes(offset);
      if (bytes == 0) break;
      isolate(offset, offset + bytes);
      offset += bytes;
    }
    if (offset > begin) {
      unmap_stale(lock, begin, offset);
      continue;
    }
    const GranuleTable::Entry* entry = granules_.find(offset);
    offset = entry->mapping == kNone
                 ? range->end()
                 : mappings_[entry->mapping].offset + chunks_[mappings_[entry->mapping].chunk].bytes;
  }
}

// Unmaps [begin, end), which is tiled by busy ranges, one for each mapping. If that fails they are shadows
// again. Both locks held; releases mutex_ meanwhile.
void ChunkedArena::unmap_stale(Lock& lock, std::size_t begin, std::size_t end) {
  const bool unmapped = unmap_unlocked(lock, begin, end - begin).ok();
  for (std::size_t offset = begin; offset < end;) {
    Range* range = range_at(offset);
    offset = range->end();
    if (unmapped) {
      remove_mapping(range);
    } else {
      range->waits = 0;
      range->kind = RangeKind::kShadow;
    }
  }
}

// Called by free, without a lock, at the low point of a step that is known to come again. If more is held
// than was ever live at once, everything that is free goes back to the device, and the next step is placed
// anew in smallest chunks. They can stand for each other; the larger chunks of the first steps cannot.
// Costs the driver calls of a cold start, once. While queued work may still use most of the free memory,
// nothing is done after kRefinePatience, and later attempts become rarer. If the pass that is placed anew
// needs more memory than the ones before, at its end the arena returns to their placements.
void ChunkedArena::refine() {
  std::unique_ptr<Earlier> outdated;  // Freed without a lock.
  const auto deadline = std::chrono::steady_clock::now() + kRefinePatience;
  std::unique_lock growth(growth_mutex_, std::defer_lock);
  Lock lock(mutex_, std::defer_lock);
  for (;;) {
    settle();
    growth.lock();
    lock.lock();
    if (!refine_due_ || !worth_refining()) return;
    if (earlier_ != nullptr && (total_.reserved_bytes <= earlier_->placed.held_bytes || !refined())) {
      outdated = std::move(earlier_);
      refine_due_ = worth_refining();
      if (!refine_due_) return;
    }
    std::size_t evictable_bytes = 0;
    for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
      if (evictable(i)) evictable_bytes += chunks_[i].bytes;
    }
    if (2 * evictable_bytes >= total_.reserved_bytes - slot_slack_bytes_ - total_.live_bytes) break;
    if (std::chrono::steady_clock::now() > deadline) {
      refine_due_ = false;
      refine_pause_ = std::min(2 * refine_pause_ + 1, kRefinePauseMax);
      troughs_to_skip_ = refine_pause_;
      return;
    }
    lock.unlock();
    growth.unlock();
    std::this_thread::yield();
  }
  refine_due_ = false;
  refine_pause_ = 0;
  if (earlier_ != nullptr) {
    return_to_earlier(lock);
    return;
  }
  // A loop's record does not begin at the beginning of the program.
  if (total_.live_bytes == 0 && !refined_in_loop_) keep_earlier(lock);
  refined_bytes_ = high_water();
  refined_in_loop_ = total_.live_bytes != 0;
  ++total_.refinement_count;
  give_back_all_free(lock);
  steps_.forget();
  learned_.reset();
}

// Everything that is free goes back to the device. Both locks held; releases mutex_ meanwhile.
void ChunkedArena::give_back_all_free(Lock& lock) {
  (void)evict_all(lock);
  drop_stale_mappings(lock);
  while (spares_ != kNone && destroy_spare(lock, spares_).ok()) {
  }
}

std::size_t ChunkedArena::trim() {
  settle();
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  recover_stranded(lock);
  const std::size_t before = total_.reserved_bytes;
  give_back_all_free(lock);
  return before - total_.reserved_bytes;
}

}  // namespace forebay::internal
