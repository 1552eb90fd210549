// A miss: no mapped memory of its own serves the request at once. A list of strategies is tried in order.
//
// Every strategy is called with growth_mutex_ and mutex_ held and returns with both held. A strategy that
// calls the Backend releases mutex_ meanwhile, so others may allocate and free in between.
#include <chrono>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

namespace {

// Shadow mappings are kept until there are this many mappings for each chunk, and kMappingsMin in all.
// Larger: more host memory, about 200 bytes each, and a miss looks at more addresses of a chunk. Smaller: the
// first pass of a long program loses addresses that the next one could use.
constexpr std::size_t kMappingsPerChunk = 32;
constexpr std::size_t kMappingsMin = 8192;

// How long a request may wait for events of streams that freed memory: before new memory is mapped, which
// takes longer, before that is done although much more is held than was ever live, and before the request is
// refused. An idle stream reaches an event a few microseconds after it was recorded.
constexpr std::chrono::microseconds kWaitBeforeGrowth{30};
constexpr std::chrono::microseconds kWaitBeforeMuchGrowth{2000};
constexpr std::chrono::microseconds kWaitBeforeRefusal{2000};

}  // namespace

enum class ChunkedArena::Outcome : std::uint8_t {
  kServed,  // Miss::range holds the block.
  kNext,    // Not this way; the next strategy may do.
  kFailed,  // Miss::failure is final.
  kWait,    // Try all again after events had Miss::wait to be reached.
};

struct ChunkedArena::Miss {
  Lock& lock;  // Holds mutex_.
  const Placement& placement;
  // Served: a range in no bin, and the offset in the address range at which the block begins.
  Range* range = nullptr;
  std::size_t start = 0;
  Status device_full;  // The device's latest out-of-memory message. OK: it had none.
  Status failure;
  bool addresses_used_up = false;      // The latest stitch lacked nothing but addresses.
  std::chrono::microseconds waited{};  // The longest time so far.
  std::chrono::microseconds wait{};

  bool shared() const { return placement.region < kSharedRegionCount; }
  Outcome serve(Range* found) {
    range = found;
    start = align_up(found->offset, placement.alignment);
    return Outcome::kServed;
  }
  Outcome fail(Status status) {
    failure = std::move(status);
    return Outcome::kFailed;
  }
  // kOutOfMemory leads to the next strategy; any other error ends the list.
  Outcome refused(const Status& status) {
    if (status.code() != StatusCode::kOutOfMemory) {
      return fail(status.with_context("cannot allocate " + format_bytes(placement.bytes)));
    }
    if (!status.message().empty()) device_full = status;
    return Outcome::kNext;
  }
};

// Mapped memory comes before new memory, and the request's own region before the other one. New memory comes
// before stitching only while little more is held than was ever live.
// clang-format off
const ChunkedArena::Strategy ChunkedArena::kStrategies[] = {
    &ChunkedArena::serve_as_learned,
    &ChunkedArena::serve_by_sharing,
    &ChunkedArena::serve_from_free_range,
    &ChunkedArena::serve_from_adjacent_ranges,
    &ChunkedArena::serve_from_shown_memory,
    &ChunkedArena::serve_after_events,
    &ChunkedArena::serve_by_growing_if_worthwhile,
    &ChunkedArena::serve_from_other_region,
    &ChunkedArena::serve_from_memory_shown_by_both_regions,
    &ChunkedArena::serve_by_stitching,
    &ChunkedArena::serve_by_growing,
    &ChunkedArena::serve_by_evicting,
};
// clang-format on

// Called without a lock.
Result<DevicePtr> ChunkedArena::allocate_slowly(const Placement& placement, std::uint64_t key) {
  settle();
  Lock lock(mutex_);
  if (Range* range = find_without_growth(lock, placement)) {
    return make_block(range, align_up(range->offset, placement.alignment), placement, key);
  }
  Miss miss{lock, placement};
  Outcome outcome = Outcome::kWait;
  std::unique_lock growth(growth_mutex_, std::defer_lock);
  while (outcome == Outcome::kWait) {
    lock.unlock();
    if (miss.wait != miss.waited) {
      await_events(placement, miss.wait);
      miss.waited = miss.wait;
    }
    growth.lock();
    lock.lock();
    if (!may_serve(placement.region)) {
      return Status(StatusCode::kUnavailable, "cannot allocate ", format_bytes(placement.bytes),
                    ": its tag was paused, or its capture released, meanwhile; resume it, or use another tag "
                    "or stream");
    }
    recover_stranded(lock);
    limit_mappings(lock, placement);
    if (!reserve_books(lock, placement.bytes)) return no_books();
    gather_max_ = kMissScanMax;
    gathered_at_ = 0;
    none_shown_at_ = 0;
    outcome = try_strategies(miss);
    if (outcome == Outcome::kNext) outcome = wait_for_events(miss, kWaitBeforeRefusal);
    if (outcome == Outcome::kWait) growth.unlock();
  }
  if (outcome == Outcome::kServed) return finish(miss, key);
  if (outcome == Outcome::kFailed) return std::move(miss.failure);
  if (history_limit_ != 0 && !placement.fixed) {
    note(SnapshotAction::kOutOfMemory, limit_bytes_ - total_.reserved_bytes, placement.bytes, Stream());
  }
  lock.unlock();
  if (growth.owns_lock()) growth.unlock();
  return out_of_memory("allocate", placement.bytes, placement.tag, placement, miss.device_full);
}

// Both locks held; may release mutex_ meanwhile.
ChunkedArena::Outcome ChunkedArena::try_strategies(Miss& miss) {
  if (miss.placement.fixed) return serve_fixed(miss);
  for (const Strategy strategy : kStrategies) {
    const Outcome outcome = (this->*strategy)(miss);
    if (outcome != Outcome::kNext) return outcome;
  }
  return Outcome::kNext;
}

// Whether memory waits for events of other streams than the request's. mutex_ held.
bool ChunkedArena::others_wait(const Placement& placement) const {
  if (pending_ == nullptr && !shadows_wait_) return false;
  for (unsigned i = 0; i < stream_count_; ++i) {
    const StreamState& state = streams_[i];
    if (!state.known || state.capture_region != 0 || (placement.mine >> i & 1) != 0) continue;
    if (state.freed_epoch > state.completed_epoch) return true;
  }
  return false;
}

// kWait if the request has not waited as long and there is something to wait for. Both locks held.
ChunkedArena::Outcome ChunkedArena::wait_for_events(Miss& miss, std::chrono::microseconds limit) {
  if (miss.waited >= limit || !others_wait(miss.placement)) return Outcome::kNext;
  miss.wait = limit;
  return Outcome::kWait;
}

// Called without a lock: recording an event may wait for room in a queue.
void ChunkedArena::await_events(const Placement& placement, std::chrono::microseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  bool waits = true;
  while (waits && std::chrono::steady_clock::now() < end) {
    settle();
    const Lock lock(mutex_);
    waits = others_wait(placement);
  }
}

// Unmaps addresses that own no memory if there are too many mappings. A step that is known to come again gets
// as many as it needs, up to mappings_max_, since it would map again in each repeat. Both locks held; may
// release mutex_.
void ChunkedArena::limit_mappings(Lock& lock, const Placement& placement) {
  const std::size_t usual_count = std::max(kMappingsMin, kMappingsPerChunk * chunk_count_);
  if (mapping_count_ <= std::max(std::min(usual_count, mappings_max_), mappings_to_keep_)) return;
  if (placement.known != StepMemory::kUnknown && mapping_count_ < mappings_max_) {
    mappings_to_keep_ = std::min(2 * mapping_count_, mappings_max_);
    return;
  }
  const std::size_t before_count = mapping_count_;
  drop_stale_mappings(lock);
  dropped_mapping_count_ += before_count - mapping_count_;
  // If most are in use, the next walk over all of them waits until there are as many again.
  mappings_to_keep_ = 2 * mapping_count_;
}

// A free range in no bin for a request that does not have to wait until another thread has mapped memory.
// Null if there is none. mutex_ held; may release it meanwhile.
Range* ChunkedArena::find_without_growth(Lock& lock, const Placement& placement) {
  const bool elsewhere = placement.fixed || placement.shares || placement.uses_rests ||
                         (learned_ != nullptr && placement.known != StepMemory::kUnknown);
  if (elsewhere || !reserve_ranges(lock) || !may_serve(placement.region) ||
      !within_tag_limit(placement.tag, placement.bytes)) {
    return nullptr;
  }
  Range* range = find_free(placement, placement.region, kMissScanMax);
  if (range != nullptr) take_free(range);
  return range;
}

// Makes the block. Checks again the descriptors and the tag's limit, which other threads may have used up
// while mutex_ was released. Both locks held; releases mutex_ when it fails.
Result<DevicePtr> ChunkedArena::finish(Miss& miss, std::uint64_t key) {
  const Placement& placement = miss.placement;
  if (!reserve_ranges(miss.lock)) {
    put_free(miss.range);
    return no_books();
  }
  if (!within_tag_limit(placement.tag, placement.bytes)) {
    put_free(miss.range);
    miss.lock.unlock();
    return over_tag_limit("allocate", placement.bytes, placement.tag);
  }
  return make_block(miss.range, miss.start, placement, key);
}

// The addresses that an earlier run of the program had. May release mutex_ meanwhile.
ChunkedArena::Outcome ChunkedArena::serve_as_learned(Miss& miss) {
  if (learned_ == nullptr) return Outcome::kNext;
  miss.range = place_as_learned(miss.lock, miss.placement);
  miss.start = miss.placement.known;
  if (miss.range != nullptr) return Outcome::kServed;
  return reserve_books(miss.lock, miss.placement.bytes) ? Outcome::kNext : miss.fail(no_books());
}

// A stitch that begins or ends in a chunk with other blocks. Releases mutex_ meanwhile.
ChunkedArena::Outcome ChunkedArena::serve_by_sharing(Miss& miss) {
  Placement placement = miss.placement;
  if (!placement.shares && !placement.uses_rests) return Outcome::kNext;
  placement.only_shares = true;
  gather(placement, !miss.shared());
  count_rests();
  if (!placement.shares && !has_many_rests(placement)) return Outcome::kNext;
  bool addresses_used_up = false;
  const Status status = stitch(miss.lock, placement, &miss.range, &miss.start, &addresses_used_up);
  if (status.ok()) return Outcome::kServed;
  const Outcome outcome = miss.refused(status);
  if (outcome != Outcome::kNext) return outcome;
  return reserve_books(miss.lock, placement.bytes) ? Outcome::kNext : miss.fail(no_books());
}

// After gather.
void ChunkedArena::count_rests() {
  rests_ = {free_changes_, 0, whole_bytes_};
  for (const Extent& part : parts_) rests_.bytes += part.bytes();
}

// A free range of any size class, of more ranges than the hot path looks at.
ChunkedArena::Outcome ChunkedArena::serve_from_free_range(Miss& miss) {
  Range* found = find_free(miss.placement, miss.placement.region, kMissScanMax);
  if (found == nullptr) return Outcome::kNext;
  take_free(found);
  return miss.serve(found);
}

// Free neighbours that wait for different streams, each of which this request may use.
ChunkedArena::Outcome ChunkedArena::serve_from_adjacent_ranges(Miss& miss) {
  Range* run = find_run(miss.placement, miss.placement.region);
  return run == nullptr ? Outcome::kNext : miss.serve(run);
}

// Addresses that show nothing but free memory of the request's region, whichever addresses own it.
ChunkedArena::Outcome ChunkedArena::serve_from_shown_memory(Miss& miss) {
  // Where no chunk has two addresses, the strategies before have looked at all of them.
  const bool looked_at_all = stream_count_ <= 1 || free_count_ <= kMissScanMax;
  if (repeated_count_ > 0 || !looked_at_all) {
    gather(miss.placement, true);
    const Outcome outcome = repeated_ || !looked_at_all ? take_shown(miss) : Outcome::kNext;
    if (outcome != Outcome::kNext) return outcome;
  }
  none_shown_at_ = free_changes_;
  return Outcome::kNext;
}

// After gather.
ChunkedArena::Outcome ChunkedArena::take_shown(Miss& miss) {
  std::size_t start = 0;
  if (!find_shown(miss.placement, &start)) return Outcome::kNext;
  miss.range = own_here(start, start + miss.placement.bytes, miss.placement, 0);
  miss.start = start;
  return Outcome::kServed;
}

// Memory that another stream freed a moment ago.
ChunkedArena::Outcome ChunkedArena::serve_after_events(Miss& miss) {
  // Any growth for persistent blocks is worthwhile.
  const bool much =
      miss.placement.region == kPersistentRegion && total_.reserved_bytes / 2 > total_.peak_live_bytes;
  return wait_for_events(miss, much ? kWaitBeforeMuchGrowth : kWaitBeforeGrowth);
}

// New memory, unless much more would be held than was ever live. Releases mutex_ meanwhile.
ChunkedArena::Outcome ChunkedArena::serve_by_growing_if_worthwhile(Miss& miss) {
  const Outcome outcome = take_grown(miss, false);
  if (outcome != Outcome::kNext) return outcome;
  return reserve_books(miss.lock, miss.placement.bytes) ? Outcome::kNext : miss.fail(no_books());
}

ChunkedArena::Outcome ChunkedArena::take_grown(Miss& miss, bool freely) {
  const Status status = grow(miss.lock, miss.placement, freely, &miss.range);
  return status.ok() ? miss.serve(miss.range) : miss.refused(status);
}

// A free range of the other shared region. A private region has no other.
ChunkedArena::Outcome ChunkedArena::serve_from_other_region(Miss& miss) {
  if (!miss.shared()) return Outcome::kNext;
  const auto other = static_cast<std::uint8_t>(1 - miss.placement.region);
  Range* found = find_free(miss.placement, other, kMissScanMax);
  if (found == nullptr) return Outcome::kNext;
  take_free(found);
  return miss.serve(found);
}

// Addresses that show nothing but free memory of either shared region. A private region is only gathered
// again, for the strategies that follow.
ChunkedArena::Outcome ChunkedArena::serve_from_memory_shown_by_both_regions(Miss& miss) {
  const bool found_more = gather(miss.placement, !miss.shared());
  return found_more ? take_shown(miss) : Outcome::kNext;
}

// After gather: free parts of several chunks, mapped side by side. If only addresses are missing, those that
// own no memory are unmapped and it is tried once more. Releases mutex_ meanwhile.
ChunkedArena::Outcome ChunkedArena::serve_by_stitching(Miss& miss) {
  const Outcome outcome = take_stitched(miss);
  if (outcome != Outcome::kNext || !miss.addresses_used_up) return outcome;
  return stitch_again(miss);
}

ChunkedArena::Outcome ChunkedArena::take_stitched(Miss& miss) {
  const Status status = stitch(miss.lock, miss.placement, &miss.range, &miss.start, &miss.addresses_used_up);
  return status.ok() ? Outcome::kServed : miss.refused(status);
}

ChunkedArena::Outcome ChunkedArena::stitch_again(Miss& miss) {
  drop_stale_mappings(miss.lock);
  if (!reserve_books(miss.lock, miss.placement.bytes)) return miss.fail(no_books());
  gather(miss.placement, !miss.shared());
  return take_stitched(miss);
}

// New memory, however much is held. Releases mutex_ meanwhile.
ChunkedArena::Outcome ChunkedArena::serve_by_growing(Miss& miss) {
  const Outcome outcome = wait_for_events(miss, kWaitBeforeMuchGrowth);
  return outcome == Outcome::kNext ? take_grown(miss, true) : outcome;
}

// Unmaps all wholly free chunks first: their addresses may be missing, or they may lie in a region that
// cannot serve the request. Then all free memory counts, however many ranges it is in. Releases mutex_
// meanwhile.
ChunkedArena::Outcome ChunkedArena::serve_by_evicting(Miss& miss) {
  const bool evicted = evict_all(miss.lock);
  if (!evicted && (gathered_all_ || was_refused(miss))) return Outcome::kNext;
  gather_max_ = SIZE_MAX;
  gathered_at_ = 0;
  Outcome outcome = stitch_again(miss);
  if (outcome == Outcome::kNext) outcome = take_grown(miss, true);
  if (outcome == Outcome::kNext) {
    refused_ = {free_changes_,       total_.reserved_bytes, miss.placement.bytes, miss.placement.alignment,
                miss.placement.mine, miss.placement.region};
  }
  return outcome;
}

// Whether all free memory was searched for as little before, and nothing has changed since: a program may ask
// again and again. After a refusal by the device it is searched again, since others may have freed memory.
bool ChunkedArena::was_refused(const Miss& miss) const {
  const Placement& placement = miss.placement;
  return miss.device_full.ok() && refused_.free_changes == free_changes_ &&
         refused_.reserved_bytes == total_.reserved_bytes && refused_.region == placement.region &&
         refused_.mine == placement.mine && refused_.bytes <= placement.bytes &&
         refused_.alignment <= placement.alignment;
}

// A chunk of its own. Releases mutex_ meanwhile.
ChunkedArena::Outcome ChunkedArena::serve_fixed(Miss& miss) {
  const Status status = place_fixed(miss.lock, miss.placement, &miss.range);
  if (!status.ok()) return miss.refused(status);
  miss.start = miss.range->offset;
  return Outcome::kServed;
}

// Makes room in the books for all that one request of `bytes` may enter. False if the host has no memory.
// growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
bool ChunkedArena::reserve_books(Lock& lock, std::size_t bytes) {
  const std::size_t new_chunks = (bytes + largest_chunk_bytes_ + growth_bytes_) / chunk_bytes_ + 64;
  for (;;) {
    // Each extent that is taken may be cut from the middle of a free range.
    if (!reserve_ranges(lock, 2 * (free_count_ + bytes / chunk_bytes_) + 64)) return false;
    const std::size_t extent_count = free_count_ + mapping_count_ + chunk_count_ + 64;
    const bool extents = parts_.capacity() < extent_count;
    const bool chunks = chunks_.available() < new_chunks;
    const bool mappings = mappings_.available() < new_chunks + chunk_count_;
    const std::size_t chunk_room =
        chunks_.size() + chunks_.available() + (chunks ? EntryPool<PhysicalChunk>::kLeafCount : 0);
    const bool sets = whole_.room() < chunk_room;
    if (!extents && !chunks && !mappings && !sets) return true;
    if ((chunks && chunks_.full()) || (mappings && mappings_.full())) return false;
    lock.unlock();
    bool made = true;
    if (extents) {
      const auto reserve = [&](auto&... scratch) {
        return (make_vector_room(scratch, 2 * extent_count) && ...);
      };
      // parts_ comes last: its capacity stands for that of all.
      made = reserve(rows_, heads_, tails_, sort_scratch_, wholes_, found_parts_, other_chunks_,
                     whole_groups_, origins_, parts_);
    }
    // whole_ comes last for the same reason.
    if (sets) {
      made = made && make_vector_room(new_row_, chunk_room) && make_vector_room(stitch_.whole, chunk_room) &&
             in_parts_.reserve(chunk_room) && whole_.reserve(chunk_room);
    }
    PhysicalChunk* chunk_leaf = chunks ? EntryPool<PhysicalChunk>::make_leaf() : nullptr;
    Mapping* mapping_leaf = mappings ? EntryPool<Mapping>::make_leaf() : nullptr;
    lock.lock();
    if (chunk_leaf != nullptr) chunks_.add(chunk_leaf);
    if (mapping_leaf != nullptr) mappings_.add(mapping_leaf);
    if (!made || (chunks && chunk_leaf == nullptr) || (mappings && mapping_leaf == nullptr)) return false;
  }
}

}  // namespace forebay::internal
