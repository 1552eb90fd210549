// Growing: chunks are made and mapped.
#include <algorithm>

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

}  // namespace

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
