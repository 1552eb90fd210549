// What happens when a request misses: chunks are made, mapped, mapped again elsewhere, and taken apart.
#include <algorithm>
#include <chrono>
#include <thread>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

namespace {

// The largest chunk that one call makes for short-lived data: at first, when all that is asked for stays, and
// later. Larger ones would seldom be wholly free.
constexpr std::size_t kEarlyHandleBytes = 128_MiB;
constexpr std::size_t kTransientHandleBytes = 16_MiB;
// For long-lived data. The bound only keeps a refused request from being all or nothing.
constexpr std::size_t kPersistentHandleBytes = std::size_t{1} << 30;
// New memory is taken before free pieces are put together as long as all that is held is no more than this
// much above the most that ever was live.
constexpr std::size_t kOverheadPerMille = 10;
// Memory that is taken in bulk may exceed what was ever live by half of itself, or by this.
constexpr std::size_t kBulkSlackBytes = 16_MiB;
// Addresses that only show what is owned elsewhere are kept until there are this many mappings for each
// chunk, and kMappingsMin in all.
constexpr std::size_t kMappingsPerChunk = 6;
constexpr std::size_t kMappingsMin = 8192;
// Longer than an event takes that was recorded on an idle stream.
constexpr std::chrono::milliseconds kRefinePatience{1};
// The most steps between two attempts to refine.
constexpr std::uint32_t kRefinePauseMax = 1023;

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

// --- where, and how much -----------------------------------------

// The place where the fewest bytes have to be mapped. Of equals: the request's own side of the address
// range, then the lowest address, so that persistent blocks alone leave no gap.
bool ChunkedArena::choose_site(const Placement& placement, Site* site) const {
  const std::size_t bytes = placement.bytes;
  const bool transient = placement.region != kPersistentRegion;
  const auto here = [&](const Range* range) { return usable_here(range, placement, placement.region); };
  std::size_t best_bytes = SIZE_MAX;
  bool best_foreign = true;
  const auto consider = [&](Range* hole, std::size_t begin, std::size_t end) {
    const bool foreign = (begin >= transient_offset_) != transient;
    if (end - begin > best_bytes || (end - begin == best_bytes && (foreign || !best_foreign))) return;
    best_bytes = end - begin;
    best_foreign = foreign;
    *site = {hole, begin, end};
  };
  for (Range* hole = holes_; hole != nullptr; hole = hole->bin_next) {
    std::size_t front = hole->offset;
    for (Range* range = hole->previous; here(range); range = range->previous) front = range->offset;
    std::size_t back = hole->end();
    for (Range* range = hole->next; here(range); range = range->next) back = range->end();

    const std::size_t end = align_up(front, placement.alignment) + bytes;
    if (end <= hole->end()) {
      consider(hole, hole->offset, align_up(end, chunk_bytes_));
      if (front == hole->offset && front < transient_offset_ && transient_offset_ + bytes <= hole->end()) {
        consider(hole, transient_offset_, transient_offset_ + align_up(bytes, chunk_bytes_));
      }
    } else if (end <= back) {
      consider(hole, hole->offset, hole->end());
    }
    if (back > hole->end() && back >= bytes) {
      const std::size_t begin =
          (back - bytes) / placement.alignment * placement.alignment / chunk_bytes_ * chunk_bytes_;
      if (begin >= hole->offset && begin < hole->end()) consider(hole, begin, hole->end());
    }
  }
  return best_bytes != SIZE_MAX;
}

// Close to the limit memory is worth more than driver calls, and where steps repeat they are made but once.
bool ChunkedArena::under_pressure() const {
  return refined() || total_.reserved_bytes > limit_bytes_ / 2;
}

// What the steps need has been seen, and they are being placed with no more than that.
bool ChunkedArena::refined() const {
  return refined_bytes_ != 0 && high_water() <= refined_bytes_ + refined_bytes_ / kRefineAgain;
}

// Whether taking `grown_bytes` more leaves what is held near what is live at most. Persistent blocks always
// grow behind those before them: packed without a gap, they take no more than their sum.
bool ChunkedArena::worth_growing(const Placement& placement, std::size_t grown_bytes, bool in_bulk) const {
  if (placement.region == kPersistentRegion) return true;
  const std::size_t peak_bytes =
      std::max({high_water_bytes_, total_.peak_live_bytes, total_.live_bytes + placement.bytes});
  const std::size_t slack_bytes = std::max(grown_bytes / 2, std::min(grown_bytes, kBulkSlackBytes));
  std::size_t allowed_bytes = peak_bytes + (in_bulk ? slack_bytes : chunk_bytes_);
  if (!exact_growth_ && !under_pressure()) allowed_bytes += peak_bytes / 1000 * kOverheadPerMille;
  // What slots round up to is nobody's to use.
  return total_.reserved_bytes - slot_slack_bytes_ + grown_bytes <= allowed_bytes;
}

std::size_t ChunkedArena::handle_bytes_max(const Placement& placement) const {
  std::size_t bytes = chunk_bytes_;
  if (placement.region == kPersistentRegion) {
    bytes = kPersistentHandleBytes;
  } else if (!under_pressure()) {
    bytes = freed_bytes_ < total_.live_bytes ? kEarlyHandleBytes : kTransientHandleBytes;
  }
  return std::max(chunk_bytes_, std::min(bytes, handle_bytes_limit_));
}

// The highest unmapped addresses of that size, claimed. Null if there are none. Views lie up there, away from
// both growing ends.
Range* ChunkedArena::unmapped_from_top(std::size_t bytes) {
  Range* highest = nullptr;
  for (Range* hole = holes_; hole != nullptr; hole = hole->bin_next) {
    if (hole->bytes >= bytes) highest = hole;
  }
  return highest == nullptr ? nullptr : claim_hole(highest, highest->end() - bytes, highest->end());
}

// --- growing -----------------------------------------------------

// Maps new memory so that `*grown`, in no bin, can hold the block. `freely`: however much is free elsewhere.
// kOutOfMemory with an empty message: not worth it, or the limit or the address range is used up; with a
// message: the device is full.
Status ChunkedArena::grow(Lock& lock, const Placement& placement, bool freely, Range** grown) {
  Site site;
  if (!choose_site(placement, &site)) return Status(StatusCode::kOutOfMemory, "");
  const std::size_t room_bytes = limit_bytes_ - total_.reserved_bytes + spare_bytes_;
  const std::size_t missing_bytes = site.end - site.begin;
  if (missing_bytes > room_bytes) return Status(StatusCode::kOutOfMemory, "");
  const bool upwards = site.begin + missing_bytes < site.hole->end();
  bool grows = freely || worth_growing(placement, missing_bytes, false);
  if (upwards && placement.region != kPersistentRegion && !exact_growth_ && !under_pressure()) {
    // As much at a time as is still worth it.
    for (std::size_t bytes = growth_bytes_; bytes > missing_bytes;
         bytes = bytes / 2 / chunk_bytes_ * chunk_bytes_) {
      if (bytes > room_bytes || site.begin + bytes > site.hole->end()) continue;
      if (!worth_growing(placement, bytes, true)) continue;
      site.end = site.begin + bytes;
      grows = true;
      break;
    }
  }
  if (!grows) return Status(StatusCode::kOutOfMemory, "");

  const auto here = [&](const Range* range) { return usable_here(range, placement, placement.region); };
  const bool from_start = site.begin == site.hole->offset;
  const bool to_end = site.end == site.hole->end();
  Range* target = claim_hole(site.hole, site.begin, site.end);
  // The neighbours the block will reach into are claimed too, so that nobody takes them meanwhile.
  const auto claim = [&](Range* range) {
    take_free(range);
    range->kind = RangeKind::kBusy;
  };
  if (from_start) {
    for (Range* range = target->previous; here(range); range = range->previous) claim(range);
  }
  if (to_end) {
    for (Range* range = target->next; here(range); range = range->next) claim(range);
  }

  std::vector<std::uint32_t> chunks;
  Status status = acquire(lock, target->bytes, handle_bytes_max(placement), &chunks);
  if (status.ok()) {
    status = map_chunks(lock, target, chunks);
  } else {
    for (const std::uint32_t chunk : chunks) keep_spare(chunk);
    put_unmapped(target);
    target = nullptr;
  }
  const auto claimed = [](const Range* range) { return range != nullptr && range->kind == RangeKind::kBusy; };
  if (status.ok()) {
    target->region = placement.region;
    target->waits = 0;
    while (claimed(target->previous)) target = absorb(target->previous, target);
    while (claimed(target->next)) target = absorb(target, target->next);
    *grown = target;
    return Status();
  }
  // Nothing else is claimed: only one thread grows at a time.
  for (Range* range = first_; range != nullptr; range = range->next) {
    if (!claimed(range)) continue;
    put_free(range);
    range = first_;
  }
  return status;
}

// Chunks, mapped nowhere, of `bytes` in all: spares, then new ones of at most `handle_bytes`. On failure
// `chunks` holds what was found. mutex_ held on entry and exit, let go of in between.
Status ChunkedArena::acquire(Lock& lock, std::size_t bytes, std::size_t handle_bytes,
                             std::vector<std::uint32_t>* chunks) {
  while (bytes > 0) {
    std::uint32_t chunk = kNone;
    if (!take_spare(bytes, &chunk)) {
      FOREBAY_RETURN_IF_ERROR(create_chunk(lock, std::min(bytes, handle_bytes), &chunk));
    }
    bytes -= chunks_[chunk].bytes;
    lock.unlock();
    chunks->push_back(chunk);
    lock.lock();
  }
  return Status();
}

// mutex_ held on entry and exit, let go of in between. The entry has been made room for.
Status ChunkedArena::create_chunk(Lock& lock, std::size_t bytes, std::uint32_t* chunk) {
  if (bytes > limit_bytes_ - total_.reserved_bytes) return Status(StatusCode::kOutOfMemory, "");
  lock.unlock();
  ++driver_call_count_;
  Result<Chunk> created = backend_.chunk_create(bytes);
  lock.lock();
  if (!created.ok()) return created.status();
  *chunk = chunks_.take();
  PhysicalChunk& entry = chunks_[*chunk];
  entry.handle = created.value();
  entry.bytes = bytes;
  entry.held = true;
  ++chunk_count_;
  largest_chunk_bytes_ = std::max(largest_chunk_bytes_, bytes);
  add_reserved(bytes);
  return Status();
}

void ChunkedArena::keep_spare(std::uint32_t chunk) {
  chunks_[chunk].next = spares_;
  spares_ = chunk;
  spare_bytes_ += chunks_[chunk].bytes;
}

void ChunkedArena::remove_spare(std::uint32_t chunk) {
  std::uint32_t* link = &spares_;
  while (*link != chunk) link = &chunks_[*link].next;
  *link = chunks_[chunk].next;
  spare_bytes_ -= chunks_[chunk].bytes;
}

// The largest spare of at most that size.
bool ChunkedArena::take_spare(std::size_t bytes_max, std::uint32_t* chunk) {
  *chunk = kNone;
  for (std::uint32_t i = spares_; i != kNone; i = chunks_[i].next) {
    if (chunks_[i].bytes > bytes_max) continue;
    if (*chunk == kNone || chunks_[i].bytes > chunks_[*chunk].bytes) *chunk = i;
  }
  if (*chunk == kNone) return false;
  remove_spare(*chunk);
  return true;
}

// Gives a spare's memory back. On failure it stays a spare.
Status ChunkedArena::destroy_spare(Lock& lock, std::uint32_t chunk) {
  remove_spare(chunk);
  const Chunk handle = chunks_[chunk].handle;
  lock.unlock();
  ++driver_call_count_;
  Status status = backend_.chunk_destroy(handle);
  lock.lock();
  if (!status.ok()) {
    keep_spare(chunk);
    return status;
  }
  total_.reserved_bytes -= chunks_[chunk].bytes;
  chunks_.give(chunk);
  --chunk_count_;
  return Status();
}

// Replaces an evictable chunk, or a spare, by chunks of the smallest size. They are mapped where it was, so
// that a step that was recorded before still finds memory there. Those of a spare are spares; so are those
// made under pressure, where they may not join what is free beside them and be cut anew across their borders;
// and so is what cannot be mapped. What cannot be made again is gone from what is held. kUnavailable: the
// chunk is in use by now.
Status ChunkedArena::break_chunk(Lock& lock, std::uint32_t chunk) {
  const std::size_t bytes = chunks_[chunk].bytes;
  const bool mapped = chunks_[chunk].first_mapping != kNone;
  const bool in_place = mapped && !under_pressure();
  std::size_t place = 0;
  std::uint8_t region = kTransientRegion;
  if (mapped) {
    // Of its addresses, some that own memory.
    for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) {
      place = mappings_[i].offset;
      const Range* range = range_at(place);
      region = range->region;
      if (range->kind == RangeKind::kFree) break;
    }
    FOREBAY_RETURN_IF_ERROR(evict(lock, chunk));
  }
  FOREBAY_RETURN_IF_ERROR(destroy_spare(lock, chunk));
  std::vector<std::uint32_t> parts;
  lock.unlock();
  parts.reserve(bytes / chunk_bytes_);
  lock.lock();
  Status status;
  while (status.ok() && parts.size() < bytes / chunk_bytes_) {
    std::uint32_t part = kNone;
    status = create_chunk(lock, chunk_bytes_, &part);
    if (status.ok()) parts.push_back(part);
  }
  if (!status.ok() || !in_place || !reserve_ranges(lock)) {
    for (const std::uint32_t part : parts) keep_spare(part);
    return status;
  }
  Range* hole = holes_;
  while (hole->end() <= place) hole = hole->bin_next;
  Range* target = claim_hole(hole, place, place + bytes);
  FOREBAY_RETURN_IF_ERROR(map_chunks(lock, target, parts));
  target->region = region;
  target->waits = 0;
  put_free(target);
  return status;
}

// --- mapping -----------------------------------------------------

// Maps `chunks` side by side over the claimed range, makes it accessible and enters it into the books. On
// failure nothing is mapped there, what could not be unmapped is stranded, the range is gone, and those of
// the chunks that nobody shows any more are spares. mutex_ held on entry and exit, let go of in between.
Status ChunkedArena::map_chunks(Lock& lock, Range* range, const std::vector<std::uint32_t>& chunks) {
  const std::size_t begin = range->offset;
  const std::size_t end = range->end();
  std::vector<Chunk> handles;
  std::vector<std::size_t> sizes;
  lock.unlock();
  handles.reserve(chunks.size());
  sizes.reserve(chunks.size());
  lock.lock();
  for (const std::uint32_t chunk : chunks) {
    handles.push_back(chunks_[chunk].handle);
    sizes.push_back(chunks_[chunk].bytes);
  }
  lock.unlock();
  Status status;
  std::size_t mapped_count = 0;
  std::size_t mapped_end = begin;
  std::vector<std::pair<std::size_t, GranuleTable::Entry*>> leaves;
  if (!granules_.make_leaves(begin, end, &leaves)) status = no_books();
  while (status.ok() && mapped_count < chunks.size()) {
    ++driver_call_count_;
    status = backend_.map(base_ + mapped_end, handles[mapped_count]);
    if (status.ok()) mapped_end += sizes[mapped_count++];
  }
  if (status.ok()) {
    ++driver_call_count_;
    status = backend_.set_access(base_ + begin, end - begin);
  }
  bool unmapped = true;
  if (!status.ok() && mapped_end > begin) {
    ++driver_call_count_;
    unmapped = backend_.unmap(base_ + begin, mapped_end - begin).ok();
  }
  lock.lock();
  // Others may have taken the descriptors that were made room for.
  if (!unmapped) (void)reserve_ranges(lock, mapped_count + kSplitsMax);
  for (const auto& [index, leaf] : leaves) granules_.install(index, leaf);
  if (status.ok() || !unmapped) {
    std::size_t offset = begin;
    for (std::size_t i = 0; i < mapped_count; ++i) {
      const std::uint32_t mapping = mappings_.take();
      PhysicalChunk& chunk = chunks_[chunks[i]];
      mappings_[mapping] = {offset, chunks[i], chunk.first_mapping};
      if (chunk.first_mapping != kNone) ++total_.moved_chunk_count;
      chunk.first_mapping = mapping;
      ++mapping_count_;
      for (std::size_t g = offset; g < offset + chunk.bytes; g += chunk_bytes_) {
        GranuleTable::Entry& entry = granules_.at(g);
        entry.mapping = mapping;
        entry.chunk = chunks[i];
      }
      offset += chunk.bytes;
    }
  }
  if (status.ok()) {
    granules_.own(range);
    if (history_limit_ != 0) note(SnapshotAction::kSegmentMap, begin, end - begin, Stream());
    return status;
  }
  for (std::size_t i = unmapped ? 0 : mapped_count; i < chunks.size(); ++i) {
    if (chunks_[chunks[i]].first_mapping == kNone) keep_spare(chunks[i]);
  }
  if (unmapped) {
    put_unmapped(range);
    return status;
  }
  // One stranded range for each mapping.
  if (mapped_end < end) {
    const auto [stranded, rest] = split(range, mapped_end);
    put_unmapped(rest);
    range = stranded;
  }
  granules_.own(range);
  for (std::size_t i = 0; i < mapped_count; ++i) {
    range->kind = RangeKind::kStranded;
    ++stranded_count_;
    if (i + 1 < mapped_count) range = split(range, range->offset + chunks_[chunks[i]].bytes).upper;
  }
  return status;
}

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

// --- stitching ---------------------------------------------------

// After gather: makes the block of memory that is free in pieces, mapped side by side at new addresses.
// `*grown`, in no bin, can hold it from `*start` on. `*addresses_used_up`: only addresses were missing.
Status ChunkedArena::stitch(Lock& lock, const Placement& placement, Range** grown, std::size_t* start,
                            bool* addresses_used_up) {
  Stitch& plan = stitch_;
  for (;;) {
    plan = Stitch();
    const std::size_t room_bytes = limit_bytes_ - total_.reserved_bytes;
    if (capturing_count_ != 0 || !choose_stitch(placement, room_bytes, &plan)) {
      return Status(StatusCode::kOutOfMemory, "");
    }
    if (plan.grown_bytes > 0) {
      // New memory behind what is free costs no more, and its rest stays beside what comes next.
      Site site;
      if (choose_site(placement, &site) && site.end - site.begin <= plan.grown_bytes) {
        return Status(StatusCode::kOutOfMemory, "");
      }
    }
    if (plan.broken == kNone) break;
    // Each time there is one large chunk less, so this ends.
    const Status status = break_chunk(lock, plan.broken);
    if (!status.ok()) {
      return status.code() == StatusCode::kUnavailable ? Status(StatusCode::kOutOfMemory, "") : status;
    }
    if (!reserve_books(lock, placement.bytes)) return no_books();
    gather(placement, placement.region >= kSharedRegionCount);
  }
  std::vector<std::uint32_t>& chunks = stitch_chunks_;
  chunks.clear();
  std::size_t view_bytes = plan.grown_bytes;
  for (const Piece* piece : {&plan.head, &plan.tail}) {
    if (piece->chunk != kNone) view_bytes += chunks_[piece->chunk].bytes;
  }
  for (const std::uint32_t chunk : plan.whole) view_bytes += chunks_[chunk].bytes;
  Range* target = nullptr;
  if (plan.run != nullptr) {
    FOREBAY_CHECK(plan.run->bytes >= view_bytes, "a stitch of %zu bytes into a hole of %zu", view_bytes,
                  plan.run->bytes);
    target = claim_hole(plan.run, plan.run->offset, plan.run->offset + view_bytes);
  } else {
    target = unmapped_from_top(view_bytes);
    if (target == nullptr) {
      *addresses_used_up = true;
      return Status(StatusCode::kOutOfMemory, "");
    }
  }

  target->region = placement.region;

  // All of it is claimed before the lock is let go of.
  places_.clear();
  Taken taken;
  taken.places = &places_;
  Range* run_first = nullptr;
  if (plan.run_bytes != 0) {
    const std::size_t run_begin = target->offset - plan.run_bytes;
    run_first = isolate(run_begin, target->offset);
  }
  const auto take = [&](const Piece& piece) {
    if (piece.chunk == kNone) return;
    if (chunks_[piece.chunk].first_mapping == kNone) {
      remove_spare(piece.chunk);
    } else {
      shade(piece, placement, &taken);
    }
  };
  take(plan.head);
  for (const std::uint32_t chunk : plan.whole) take({chunk, 0, chunks_[chunk].bytes});
  take(plan.tail);

  Status status;
  const auto add = [&](std::uint32_t chunk) { chunks.push_back(chunk); };
  if (plan.head.chunk != kNone) add(plan.head.chunk);
  for (const std::uint32_t chunk : plan.whole) add(chunk);
  const std::size_t handle_bytes = handle_bytes_max(placement);
  for (std::size_t left = plan.grown_bytes; status.ok() && left > 0;) {
    std::uint32_t chunk = kNone;
    status = create_chunk(lock, std::min(left, handle_bytes), &chunk);
    if (!status.ok()) break;
    left -= chunks_[chunk].bytes;
    add(chunk);
  }
  const std::size_t begin = target->offset;
  bool mapped = false;
  if (status.ok()) {
    if (plan.tail.chunk != kNone) add(plan.tail.chunk);
    status = map_chunks(lock, target, chunks);
    mapped = status.ok();
  } else {
    for (const std::uint32_t chunk : chunks) {
      if (chunks_[chunk].first_mapping == kNone) keep_spare(chunk);
    }
    if (plan.tail.chunk != kNone && chunks_[plan.tail.chunk].first_mapping == kNone)
      keep_spare(plan.tail.chunk);
    put_unmapped(target);
  }
  // For the ends of the new addresses that show memory of other blocks.
  if (mapped && !reserve_ranges(lock)) {
    status = no_books();
    target = range_at(begin);
    target->waits = 0;
    target->kind = RangeKind::kShadow;
  }
  if (!status.ok()) {
    // What was taken goes back to the addresses it came from, whose ranges are as they were.
    if (run_first != nullptr) put_free(range_at(begin - plan.run_bytes));
    for (const Place& place : places_) {
      Range* range = isolate(place.offset, place.offset + place.bytes);
      range->region = place.region;
      put_free(range);
    }
    return status;
  }
  Range* range = range_at(begin);
  if (plan.head.begin > 0) {
    const auto [shadow, rest] = split(range, begin + plan.head.begin);
    shadow->kind = RangeKind::kShadow;
    range = rest;
  }
  if (plan.tail.chunk != kNone && plan.tail.end < chunks_[plan.tail.chunk].bytes) {
    const std::size_t end = begin + view_bytes - chunks_[plan.tail.chunk].bytes + plan.tail.end;
    const auto [rest, shadow] = split(range, end);
    shadow->kind = RangeKind::kShadow;
    range = rest;
  }
  range->waits = taken.waits;
  range->epoch = taken.epoch;
  if (run_first != nullptr) range = absorb(range->previous, range);
  range->region = placement.region;
  *grown = range;
  *start = align_up(range->offset, placement.alignment);
  return Status();
}

// A chunk of its own for one block, mapped once.
Status ChunkedArena::place_fixed(Lock& lock, const Placement& placement, Range** grown) {
  const std::size_t bytes = align_up(placement.bytes, chunk_bytes_);
  if (bytes > limit_bytes_ || !make_room(lock, bytes)) return Status(StatusCode::kOutOfMemory, "");
  if (!reserve_books(lock, bytes)) return no_books();
  Range* target = unmapped_from_top(bytes);
  if (target == nullptr) {
    drop_stale_mappings(lock);
    if (!reserve_books(lock, bytes)) return no_books();
    target = unmapped_from_top(bytes);
  }
  if (target == nullptr) return Status(StatusCode::kOutOfMemory, "");
  std::uint32_t chunk = kNone;
  Status status = create_chunk(lock, bytes, &chunk);
  if (!status.ok()) {
    put_unmapped(target);
    return status;
  }
  std::vector<std::uint32_t> chunks;
  lock.unlock();
  chunks.push_back(chunk);
  lock.lock();
  FOREBAY_RETURN_IF_ERROR(map_chunks(lock, target, chunks));
  target->region = placement.region;
  *grown = target;
  return Status();
}

}  // namespace forebay::internal
