// Unmapping: free chunks go back to the device, and addresses that own no memory become unmapped.
#include <algorithm>
#include <chrono>
#include <thread>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

namespace {

// Longer than an event takes that was recorded on an idle stream.
constexpr std::chrono::milliseconds kRefinePatience{1};
// The most steps between two attempts to refine.
constexpr std::uint32_t kRefinePauseMax = 1023;

}  // namespace

// The mapping is undone: its range, which is claimed, becomes addresses only.
void ChunkedArena::remove_mapping(Range* range) {
  const std::uint32_t mapping = granules_.at(range->offset).mapping;
  PhysicalChunk& chunk = chunks_[mappings_[mapping].chunk];
  std::uint32_t* link = &chunk.first_mapping;
  while (*link != mapping) link = &mappings_[*link].next;
  *link = mappings_[mapping].next;
  mappings_.give(mapping);
  --mapping_count_;
  if (history_limit_ != 0) note(SnapshotAction::kSegmentUnmap, range->offset, range->bytes, Stream());
  put_unmapped(range);
}

// Whether every byte of a chunk is free for all, and no queued work may still use any of its addresses.
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

// Unmaps an evictable chunk everywhere: it becomes a spare. Room for 4 descriptors per mapping has been made.
Status ChunkedArena::evict(Lock& lock, std::uint32_t chunk) {
  std::size_t mapping_count = 0;
  for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) ++mapping_count;
  if (!reserve_ranges(lock, 4 * mapping_count + kSplitsMax)) return no_books();
  if (!evictable(chunk)) return Status(StatusCode::kUnavailable, "");
  const std::size_t bytes = chunks_[chunk].bytes;
  for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) {
    isolate(mappings_[i].offset, mappings_[i].offset + bytes);
  }
  Status status;
  while (chunks_[chunk].first_mapping != kNone) {
    const std::size_t offset = mappings_[chunks_[chunk].first_mapping].offset;
    lock.unlock();
    ++driver_call_count_;
    Status unmapped = backend_.unmap(base_ + offset, bytes);
    lock.lock();
    Range* range = range_at(offset);
    if (unmapped.ok()) {
      remove_mapping(range);
      continue;
    }
    // The mappings that are left keep the memory: one owns it, the others show it.
    for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) {
      Range* left = range_at(mappings_[i].offset);
      left->waits = 0;
      left->epoch = 0;
      if (i == chunks_[chunk].first_mapping) {
        put_free(left);
      } else {
        left->kind = RangeKind::kShadow;
      }
    }
    return unmapped;
  }
  keep_spare(chunk);
  return status;
}

// Makes spares of all evictable chunks, in as few calls as there are gaps between their addresses. False if
// there was none.
bool ChunkedArena::evict_all(Lock& lock) {
  std::size_t needed_count = kSplitsMax;
  do {
    // Room first, since making it may let go of the lock.
    if (!reserve_ranges(lock, needed_count)) return false;
    needed_count = kSplitsMax;
    for (std::uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
      if (!evictable(chunk)) continue;
      for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next)
        needed_count += 4;
    }
  } while (pool_.available() < needed_count);
  if (needed_count == kSplitsMax) return false;
  for (std::uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (!evictable(chunk)) continue;
    for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) {
      isolate(mappings_[i].offset, mappings_[i].offset + chunks_[chunk].bytes);
    }
  }
  // One busy range for each mapping, and no other range is busy. Those of a call that fails stay so until the
  // end.
  bool any = false;
  bool refused = false;
  for (std::size_t offset = 0;;) {
    Range* range = first_;
    while (range != nullptr && (range->offset < offset || range->kind != RangeKind::kBusy))
      range = range->next;
    if (range == nullptr) break;
    const std::size_t begin = range->offset;
    std::size_t end = begin;
    for (; range != nullptr && range->kind == RangeKind::kBusy; range = range->next) end = range->end();
    lock.unlock();
    ++driver_call_count_;
    const bool unmapped = backend_.unmap(base_ + begin, end - begin).ok();
    lock.lock();
    offset = end;
    if (!unmapped) {
      refused = true;
      continue;
    }
    for (std::size_t at = begin; at < end;) {
      Range* gone = range_at(at);
      const std::uint32_t chunk = mappings_[granules_.at(at).mapping].chunk;
      at = gone->end();
      remove_mapping(gone);
      if (chunks_[chunk].first_mapping != kNone) continue;
      keep_spare(chunk);
      any = true;
    }
  }
  if (!refused) return any;
  // The mappings that are left keep the memory: of each chunk one owns it, the others show it.
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
  return any;
}

// Destroys spares and then evictable chunks until `bytes` may be taken from the device. False if they do not
// suffice; then nothing was taken apart.
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
    lock.unlock();
    ++driver_call_count_;
    const bool unmapped = backend_.unmap(base_ + offset, bytes).ok();
    lock.lock();
    if (!unmapped) {
      range->kind = RangeKind::kStranded;
      return;
    }
    --stranded_count_;
    const std::uint32_t mapping = granules_.at(offset).mapping;
    if (mapping == kNone) {
      put_unmapped(range);  // Of a slot.
    } else {
      const std::uint32_t chunk = mappings_[mapping].chunk;
      remove_mapping(range);
      if (chunks_[chunk].first_mapping == kNone) keep_spare(chunk);
    }
    range = first_;  // The unmapped range may have merged into its neighbour.
  }
}

// Unmaps, in as few calls as there are gaps between them, the mappings that show only what is owned elsewhere
// and that no queued work may still use. None while a stream is being captured.
void ChunkedArena::drop_stale_mappings(Lock& lock) {
  if (capturing_count_ != 0) return;
  const auto stale = [this](std::size_t offset) {
    const GranuleTable::Entry* entry = granules_.find(offset);
    if (entry == nullptr || entry->range == nullptr || entry->mapping == kNone) return std::size_t{0};
    const Mapping& mapping = mappings_[entry->mapping];
    const std::size_t end = mapping.offset + chunks_[mapping.chunk].bytes;
    if (mapping.offset != offset) return std::size_t{0};
    for (const Range* range = entry->range; range != nullptr && range->offset < end; range = range->next) {
      if (range->kind != RangeKind::kShadow || unfinished(range->waits, range->epoch) != 0)
        return std::size_t{0};
    }
    return end - offset;
  };
  for (std::size_t offset = 0; offset < reserve_bytes_;) {
    // First, because it may let go of the lock.
    if (!reserve_ranges(lock, 64)) return;
    const Range* range = range_at(offset);
    if (range == nullptr) {  // Unmapped: on to what follows it.
      const Range* hole = holes_;
      while (hole->end() <= offset) hole = hole->bin_next;
      offset = hole->end();
      continue;
    }
    // One busy range for each mapping, as many of them as there are descriptors for.
    const std::size_t begin = offset;
    while (offset < reserve_bytes_ && pool_.available() >= kSplitsMax) {
      const std::size_t bytes = stale(offset);
      if (bytes == 0) break;
      isolate(offset, offset + bytes);
      offset += bytes;
    }
    if (offset > begin) {
      lock.unlock();
      ++driver_call_count_;
      const bool unmapped = backend_.unmap(base_ + begin, offset - begin).ok();
      lock.lock();
      for (std::size_t at = begin; at < offset;) {
        Range* gone = range_at(at);
        const std::uint32_t chunk = granules_.at(at).chunk;
        at = gone->end();
        if (unmapped) {
          remove_mapping(gone);
          if (chunks_[chunk].first_mapping == kNone) keep_spare(chunk);  // It was nobody's.
        } else {
          gone->waits = 0;
          gone->kind = RangeKind::kShadow;
        }
      }
      continue;
    }
    const GranuleTable::Entry* entry = granules_.find(offset);
    offset = entry->mapping == kNone
                 ? range->end()
                 : mappings_[entry->mapping].offset + chunks_[mappings_[entry->mapping].chunk].bytes;
  }
}

// At the low point of a step that is known to come again: if what is held exceeds what is ever live at once,
// everything that is free goes back to the device, and the next step is placed anew in the smallest chunks.
// Free chunks are interchangeable then, which the larger ones that served the first steps are not. Costs the
// driver calls of a cold start, once. While queued work may still use most of what is free nothing is done,
// and the next attempts come less and less often; the work is not waited for beyond kRefinePatience.
void ChunkedArena::refine() {
  const auto deadline = std::chrono::steady_clock::now() + kRefinePatience;
  std::unique_lock growth(growth_mutex_, std::defer_lock);
  Lock lock(mutex_, std::defer_lock);
  for (;;) {
    settle();
    growth.lock();
    lock.lock();
    if (!refine_due_ || !worth_refining()) return;
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
  refined_bytes_ = high_water();
  ++total_.refinement_count;
  (void)evict_all(lock);
  drop_stale_mappings(lock);
  while (spares_ != kNone && destroy_spare(lock, spares_).ok()) {
  }
  steps_.forget();
}

std::size_t ChunkedArena::trim() {
  settle();
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  recover_stranded(lock);
  const std::size_t before = total_.reserved_bytes;
  (void)evict_all(lock);
  drop_stale_mappings(lock);
  while (spares_ != kNone && destroy_spare(lock, spares_).ok()) {
  }
  return before - total_.reserved_bytes;
}

}  // namespace forebay::internal
