// A request that misses: makes room in the books, then tries one way after the other to serve it.
#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

namespace {

// Mappings of addresses that own no memory are kept until there are this many mappings for each chunk, and
// kMappingsMin in all.
constexpr std::size_t kMappingsPerChunk = 6;
constexpr std::size_t kMappingsMin = 8192;

}  // namespace

Result<DevicePtr> ChunkedArena::allocate_slowly(const Placement& placement, std::uint64_t key) {
  settle();
  Status cause;
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  if (!may_serve(placement.region)) {
    lock.unlock();
    return Status(StatusCode::kUnavailable, "cannot allocate " + format_bytes(placement.bytes) +
                                                ": its tag was paused, or its capture released, meanwhile");
  }
  recover_stranded(lock);
  if (mapping_count_ > kMappingsMin && mapping_count_ > kMappingsPerChunk * chunk_count_) {
    drop_stale_mappings(lock);
  }
  const auto finish = [&](Range* range, std::size_t start) -> Result<DevicePtr> {
    // Growing may have let go of the lock: others took descriptors, or used up the tag's limit.
    if (!reserve_ranges(lock)) {
      put_free(range);
      return no_books();
    }
    if (!within_tag_limit(placement.tag, placement.bytes)) {
      put_free(range);
      lock.unlock();
      return over_tag_limit("allocate", placement.bytes, placement.tag);
    }
    return make_block(range, start, placement, key);
  };
  const auto begin_of = [&](const Range* range) { return align_up(range->offset, placement.alignment); };

  const bool shared = placement.region < kSharedRegionCount;
  const auto other = static_cast<std::uint8_t>(1 - placement.region);
  if (!reserve_books(lock, placement.bytes)) return no_books();
  Range* range = nullptr;
  std::size_t start = 0;
  if (placement.fixed) {
    Status status = place_fixed(lock, placement, &range);
    if (status.ok()) return finish(range, range->offset);
    if (status.code() != StatusCode::kOutOfMemory) {
      lock.unlock();
      return status.with_context("cannot allocate " + format_bytes(placement.bytes));
    }
    lock.unlock();
    return out_of_memory("allocate", placement.bytes, placement.tag, placement, status);
  }

  // Mapped memory of its own region, then new memory if little is free, then mapped memory of the other
  // region; then what is free in pieces; and new memory in any case.
  if (Range* found = find_free(placement, placement.region, kNoScanLimit)) {
    take_free(found);
    return finish(found, begin_of(found));
  }
  if (Range* run = find_run(placement, placement.region)) return finish(run, begin_of(run));
  gather(placement, true);
  if (find_shown(placement, &start))
    return finish(own_here(start, start + placement.bytes, placement, 0), start);
  const auto failed = [&](const Status& status) {
    if (status.ok()) return false;
    if (status.code() != StatusCode::kOutOfMemory) return true;
    if (!status.message().empty()) cause = status;
    return false;
  };
  Status status = grow(lock, placement, false, &range);
  if (status.ok()) return finish(range, begin_of(range));
  if (!failed(status) && reserve_books(lock, placement.bytes)) {
    if (shared) {
      if (Range* found = find_free(placement, other, kNoScanLimit)) {
        take_free(found);
        return finish(found, begin_of(found));
      }
      gather(placement, false);
      if (find_shown(placement, &start)) {
        return finish(own_here(start, start + placement.bytes, placement, 0), start);
      }
    } else {
      gather(placement, true);
    }
    bool addresses_used_up = false;
    status = stitch(lock, placement, &range, &start, &addresses_used_up);
    if (status.ok()) return finish(range, start);
    if (addresses_used_up && !failed(status)) {
      drop_stale_mappings(lock);
      if (!reserve_books(lock, placement.bytes)) return no_books();
      gather(placement, !shared);
      status = stitch(lock, placement, &range, &start, &addresses_used_up);
      if (status.ok()) return finish(range, start);
    }
    if (!failed(status)) {
      status = grow(lock, placement, true, &range);
      if (status.ok()) return finish(range, begin_of(range));
    }
    // Last, without the addresses of all that is wholly free: they may be what is missing, or the memory may
    // be in a region that the request cannot be served from.
    if (!failed(status) && evict_all(lock)) {
      drop_stale_mappings(lock);
      if (!reserve_books(lock, placement.bytes)) return no_books();
      gather(placement, !shared);
      status = stitch(lock, placement, &range, &start, &addresses_used_up);
      if (status.ok()) return finish(range, start);
      if (!failed(status)) {
        status = grow(lock, placement, true, &range);
        if (status.ok()) return finish(range, begin_of(range));
      }
    }
  }
  if (failed(status)) {
    lock.unlock();
    return status.with_context("cannot allocate " + format_bytes(placement.bytes));
  }
  if (history_limit_ != 0) {
    note(SnapshotAction::kOutOfMemory, limit_bytes_ - total_.reserved_bytes, placement.bytes, Stream());
  }
  lock.unlock();
  return out_of_memory("allocate", placement.bytes, placement.tag, placement, cause);
}

// Makes room, without mutex_, for all that one request of `bytes` may enter into the books. False if the host
// has no memory.
bool ChunkedArena::reserve_books(Lock& lock, std::size_t bytes) {
  const std::size_t new_chunks = (bytes + largest_chunk_bytes_ + growth_bytes_) / chunk_bytes_ + 64;
  for (;;) {
    // Each piece that is taken may be cut from the middle of a free range.
    if (!reserve_ranges(lock, 2 * (free_count_ + bytes / chunk_bytes_) + 64)) return false;
    const std::size_t piece_count = free_count_ + mapping_count_ + chunk_count_ + 64;
    const bool pieces = pieces_.capacity() < piece_count;
    const bool chunks = chunks_.available() < new_chunks;
    const bool mappings = mappings_.available() < new_chunks + chunk_count_;
    if (!pieces && !chunks && !mappings) return true;
    const std::size_t chunk_limit = chunks_.size() + new_chunks;
    if ((chunks && chunks_.full()) || (mappings && mappings_.full())) return false;
    lock.unlock();
    if (pieces) {
      for (std::vector<Piece>* scratch : {&pieces_, &wholes_, &heads_, &tails_})
        scratch->reserve(2 * piece_count);
      places_.reserve(2 * piece_count);
    }
    first_piece_.reserve(2 * chunk_limit);
    PhysicalChunk* chunk_leaf = chunks ? EntryPool<PhysicalChunk>::make_leaf() : nullptr;
    Mapping* mapping_leaf = mappings ? EntryPool<Mapping>::make_leaf() : nullptr;
    lock.lock();
    if (chunk_leaf != nullptr) chunks_.add(chunk_leaf);
    if (mapping_leaf != nullptr) mappings_.add(mapping_leaf);
    if ((chunks && chunk_leaf == nullptr) || (mappings && mapping_leaf == nullptr)) return false;
  }
}

}  // namespace forebay::internal
