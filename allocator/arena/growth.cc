// Growing: chunks are made and mapped.
#include <algorithm>
#include <bit>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

namespace {

// A chunk for transient blocks is a part of the high water: while most blocks stay live, and later. Larger
// chunks: one small block that outlives its neighbours keeps more memory from being used elsewhere. Smaller:
// more driver calls.
constexpr std::size_t kEarlyChunkFraction = 512;
constexpr std::size_t kLateChunkFraction = 1024;
// A block of fewer smallest chunks, and of no whole number of them, has smallest ones: a larger one at its
// end would be kept by it from many others.
constexpr std::size_t kFewChunks = 8;
// The bounds of such a chunk.
constexpr std::size_t kTransientChunkMin = 2_MiB;
constexpr std::size_t kTransientChunkMax = 128_MiB;
// The largest chunk for persistent blocks. The bound lets a device that is almost full serve part of a
// request.
constexpr std::size_t kPersistentHandleBytes = std::size_t{1} << 30;
// New memory is preferred to stitching while the memory held exceeds the high water by no more than this
// part.
constexpr std::size_t kOverheadFraction = 400;
// Memory taken in bulk may exceed the high water by half of itself, or by this.
constexpr std::size_t kBulkSlackBytes = 4_MiB;

}  // namespace

// The site where the fewest bytes have to be mapped. Among equal ones, the request's own side of the address
// range counts, then the lowest address, so that persistent blocks alone leave no gap. Both locks held.
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

// Whether memory is worth more than driver calls: close to the limit, and after refining, when steps repeat
// and make their calls only once.
bool ChunkedArena::under_pressure() const {
  return refined() || total_.reserved_bytes > limit_bytes_ / 2;
}

// Whether steps are placed with no more memory than they have been seen to need.
bool ChunkedArena::refined() const {
  return refined_bytes_ != 0 && high_water() <= refined_bytes_ + refined_bytes_ / kRefineAgain;
}

// Whether the memory held stays near the high water if `grown_bytes` more are taken. Always true for
// persistent blocks: packed without a gap, they take no more than their sum.
bool ChunkedArena::worth_growing(const Placement& placement, std::size_t grown_bytes, bool in_bulk) const {
  if (placement.region == kPersistentRegion) return true;
  const std::size_t peak_bytes =
      std::max({high_water_bytes_, total_.peak_live_bytes, total_.live_bytes + placement.bytes});
  const std::size_t slack_bytes = std::max(grown_bytes / 2, std::min(grown_bytes, kBulkSlackBytes));
  std::size_t allowed_bytes = peak_bytes + (in_bulk ? slack_bytes : chunk_bytes_);
  if (!exact_growth_ && !under_pressure()) allowed_bytes += peak_bytes / kOverheadFraction;
  // The rounding of slots is no memory that blocks could use.
  return total_.reserved_bytes - slot_slack_bytes_ + grown_bytes <= allowed_bytes;
}

std::size_t ChunkedArena::handle_bytes_max(const Placement& placement) const {
  std::size_t bytes = chunk_bytes_;
  if (placement.region == kPersistentRegion) {
    bytes = kPersistentHandleBytes;
  } else if (!under_pressure()) {
    const bool early = freed_bytes_ < total_.live_bytes;
    const std::size_t held_bytes = std::max(high_water(), total_.live_bytes + placement.bytes);
    const std::size_t part_bytes = held_bytes / (early ? kEarlyChunkFraction : kLateChunkFraction);
    // Powers of two, so that chunks can stand for each other.
    bytes = std::clamp(std::bit_floor(part_bytes), kTransientChunkMin, kTransientChunkMax);
    const std::size_t count = placement.bytes / chunk_bytes_;
    const bool leaves_much = placement.bytes % chunk_bytes_ != 0 && count < kFewChunks;
    bytes = std::min(bytes, std::max(leaves_much ? chunk_bytes_ : count * chunk_bytes_, kTransientChunkMin));
  }
  bytes = std::min(bytes, handle_bytes_limit_) / chunk_bytes_ * chunk_bytes_;
  return std::max(chunk_bytes_, bytes);
}

// The highest unmapped addresses of that size, claimed, or null. Stitches and aliases lie there, away from
// both growing ends. Both locks held.
Range* ChunkedArena::unmapped_from_top(std::size_t bytes) {
  Range* hole = last_hole_;
  while (hole != nullptr && hole->bytes < bytes) hole = hole->bin_previous;
  return hole == nullptr ? nullptr : claim_hole(hole, hole->end() - bytes, hole->end());
}

// Maps new memory so that `*grown`, in no bin, can hold the block. `freely`: even if worth_growing says no.
// kOutOfMemory with an empty message: not worth it, or the limit or the address range is used up; with a
// message: the device is full. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::grow(Lock& lock, const Placement& placement, bool freely, Range** grown) {
  Site site;
  if (!choose_site(placement, &site)) return Status(StatusCode::kOutOfMemory, "");
  const auto here = [&](const Range* range) { return usable_here(range, placement, placement.region); };
  if (site.begin == site.end) {  // Free neighbours suffice, but find_run has not looked at so many ranges.
    const Range* first = site.hole->previous;
    while (here(first->previous)) first = first->previous;
    *grown = isolate(first->offset, site.hole->offset);
    return Status();
  }
  const std::size_t room_bytes = limit_bytes_ - total_.reserved_bytes + spare_bytes_;
  const std::size_t missing_bytes = site.end - site.begin;
  if (missing_bytes > room_bytes) return Status(StatusCode::kOutOfMemory, "");
  const bool upwards = site.begin + missing_bytes < site.hole->end();
  bool grows = freely || worth_growing(placement, missing_bytes, false);
  if (upwards && placement.region != kPersistentRegion && !exact_growth_ && !under_pressure()) {
    // Ahead: as much as is still worth it, in as many whole blocks as it holds, so that each has chunks of
    // its own.
    const std::size_t unit_bytes = placement.bytes % chunk_bytes_ == 0 ? placement.bytes : chunk_bytes_;
    for (std::size_t part_bytes = growth_bytes_; part_bytes > missing_bytes;
         part_bytes = part_bytes / 2 / chunk_bytes_ * chunk_bytes_) {
      const std::size_t bytes = part_bytes / unit_bytes * unit_bytes;
      if (bytes <= missing_bytes) break;
      if (bytes > room_bytes || site.begin + bytes > site.hole->end()) continue;
      if (!worth_growing(placement, bytes, true)) continue;
      site.end = site.begin + bytes;
      grows = true;
      break;
    }
  }
  if (!grows) return Status(StatusCode::kOutOfMemory, "");

  const bool from_start = site.begin == site.hole->offset;
  const bool to_end = site.end == site.hole->end();
  Range* target = claim_hole(site.hole, site.begin, site.end);
  // The free neighbours that become part of the block are claimed too, so that no thread takes them
  // meanwhile.
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

  std::vector<std::uint32_t>& chunks = new_row_;
  chunks.clear();
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
  // Only one thread grows at a time, so all busy ranges are its own.
  for (Range* range = first_; range != nullptr; range = range->next) {
    if (!claimed(range)) continue;
    put_free(range);
    range = first_;
  }
  return status;
}

// Finds chunks, mapped nowhere, of `bytes` in all: spares, then new ones of at most `handle_bytes`. On
// failure `chunks` holds those found so far. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::acquire(Lock& lock, std::size_t bytes, std::size_t handle_bytes,
                             std::vector<std::uint32_t>* chunks) {
  if (!reserve_row(lock, chunks, bytes / chunk_bytes_)) return no_books();
  for (std::uint32_t chunk = kNone; bytes > 0 && take_spare(bytes, &chunk); bytes -= chunks_[chunk].bytes)
    chunks->push_back(chunk);
  return create_chunks(lock, bytes, handle_bytes, chunks);
}

// Makes room for `count` more chunks. False if the host has no memory. growth_mutex_ and mutex_ held; may
// release mutex_ meanwhile.
bool ChunkedArena::reserve_row(Lock& lock, std::vector<std::uint32_t>* chunks, std::size_t count) {
  if (chunks->capacity() - chunks->size() >= count) return true;
  lock.unlock();
  const bool made = make_vector_room(*chunks, chunks->size() + count);
  lock.lock();
  return made;
}

// Creates chunks of `bytes` in all, each of at most `handle_bytes`, for which room in the books has been
// made, and appends them to `chunks`, also those made before a failure. growth_mutex_ and mutex_ held;
// releases mutex_ meanwhile.
Status ChunkedArena::create_chunks(Lock& lock, std::size_t bytes, std::size_t handle_bytes,
                                   std::vector<std::uint32_t>* chunks) {
  if (bytes == 0) return Status();
  std::size_t room_bytes = limit_bytes_ - total_.reserved_bytes;
  Status status;
  lock.unlock();
  row_.clear();
  const std::size_t count_max = ceil_div(std::min(bytes, room_bytes), handle_bytes) + 1;
  if (!make_vector_room(row_, count_max) || !make_vector_room(*chunks, chunks->size() + count_max))
    status = no_books();
  while (status.ok() && bytes > 0) {
    const std::size_t part_bytes = std::min(bytes, handle_bytes);
    if (part_bytes > room_bytes) {
      status = Status(StatusCode::kOutOfMemory, "");
      break;
    }
    ++driver_call_count_;
    Result<Chunk> created = backend_.chunk_create(part_bytes);
    if (created.ok()) row_.push_back({created.value(), part_bytes});
    status = created.status();
    bytes -= part_bytes;
    room_bytes -= part_bytes;
  }
  lock.lock();
  for (const SizedChunk& made : row_) {
    const std::uint32_t chunk = chunks_.take();
    PhysicalChunk& entry = chunks_[chunk];
    entry.handle = made.handle;
    entry.bytes = made.bytes;
    entry.held = true;
    ++chunk_count_;
    largest_chunk_bytes_ = std::max(largest_chunk_bytes_, made.bytes);
    add_reserved(made.bytes);
    chunks->push_back(chunk);
  }
  return status;
}

void ChunkedArena::keep_spare(std::uint32_t chunk) {
  chunks_[chunk].previous = kNone;
  chunks_[chunk].next = spares_;
  if (spares_ != kNone) chunks_[spares_].previous = chunk;
  spares_ = chunk;
  spare_bytes_ += chunks_[chunk].bytes;
}

void ChunkedArena::remove_spare(std::uint32_t chunk) {
  const auto [next, previous] = std::pair(chunks_[chunk].next, chunks_[chunk].previous);
  if (next != kNone) chunks_[next].previous = previous;
  (previous == kNone ? spares_ : chunks_[previous].next) = next;
  spare_bytes_ -= chunks_[chunk].bytes;
}

// Takes the largest spare of at most that size. False if there is none. Both locks held.
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

// Gives a spare back to the device. On failure it stays a spare. Both locks held; releases mutex_ meanwhile.
Status ChunkedArena::destroy_spare(Lock& lock, std::uint32_t chunk) {
  remove_spare(chunk);
  const Chunk handle = chunks_[chunk].handle;
  Status status = call_unlocked(lock, [&] { return backend_.chunk_destroy(handle); });
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
// failure the range is gone; chunks that no address shows are spares, and mappings that could not be undone
// are stranded. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::map_chunks(Lock& lock, Range* range, const std::vector<std::uint32_t>& chunks) {
  const std::size_t begin = range->offset;
  const std::size_t end = range->end();
  lock.unlock();
  row_.clear();
  MappedRow mapped;
  if (make_vector_room(row_, chunks.size())) {
    for (const std::uint32_t chunk : chunks) row_.push_back({chunks_[chunk].handle, chunks_[chunk].bytes});
    mapped = map_row(begin, end, row_);
  } else {
    mapped.status = no_books();
  }
  lock.lock();
  // Others may have taken the descriptors that were made room for.
  if (mapped.stranded) (void)reserve_ranges(lock, mapped.count + kSplitsMax);
  install_leaves(mapped);
  if (mapped.status.ok() || mapped.stranded) enter_mappings(begin, chunks, mapped.count);
  if (mapped.status.ok()) {
    granules_.own(range);
    if (history_limit_ != 0) note(SnapshotAction::kSegmentMap, begin, range->bytes, Stream());
    return Status();
  }
  for (std::size_t i = mapped.stranded ? mapped.count : 0; i < chunks.size(); ++i) {
    if (chunks_[chunks[i]].first_mapping == kNone) keep_spare(chunks[i]);
  }
  if (mapped.stranded) {
    strand_mappings(range, chunks, mapped);
  } else {
    put_unmapped(range);
  }
  return std::move(mapped.status);
}

// Maps the chunks side by side over [begin, end) and makes that accessible. If a call fails, unmaps the
// chunks mapped so far. growth_mutex_ held, mutex_ not.
ChunkedArena::MappedRow ChunkedArena::map_row(std::size_t begin, std::size_t end,
                                              const std::vector<SizedChunk>& row) {
  MappedRow mapped;
  if (!granules_.make_leaves(begin, end, &mapped.leaves)) mapped.status = no_books();
  while (mapped.status.ok() && mapped.count < row.size()) {
    ++driver_call_count_;
    mapped.status = backend_.map(base_ + begin + mapped.bytes, row[mapped.count].handle);
    if (mapped.status.ok()) mapped.bytes += row[mapped.count++].bytes;
  }
  if (mapped.status.ok()) {
    ++driver_call_count_;
    mapped.status = backend_.set_access(base_ + begin, end - begin);
  }
  if (!mapped.status.ok() && mapped.count > 0) {
    ++driver_call_count_;
    mapped.stranded = !backend_.unmap(base_ + begin, mapped.bytes).ok();
  }
  return mapped;
}

// After map_row. mutex_ held.
void ChunkedArena::install_leaves(const MappedRow& mapped) {
  for (const auto& [index, leaf] : mapped.leaves) granules_.install(index, leaf);
}

// Enters the first `count` chunks as mapped side by side from `offset` on. mutex_ held.
void ChunkedArena::enter_mappings(std::size_t offset, const std::vector<std::uint32_t>& chunks,
                                  std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t mapping = mappings_.take();
    PhysicalChunk& chunk = chunks_[chunks[i]];
    mappings_[mapping] = {offset, chunks[i], chunk.first_mapping};
    if (chunk.first_mapping != kNone) {
      ++total_.moved_chunk_count;
      ++repeated_count_;
    }
    chunk.first_mapping = mapping;
    std::copy_backward(chunk.views, chunk.views + kViewsMax - 1, chunk.views + kViewsMax);
    chunk.views[0] = static_cast<std::uint32_t>(offset / chunk_bytes_);
    chunk.owner = mapping;  // It is mapped for a block there.
    ++mapping_count_;
    for (std::size_t g = offset; g < offset + chunk.bytes; g += chunk_bytes_) {
      GranuleTable::Entry& entry = granules_.at(g);
      entry.mapping = mapping;
      entry.chunk = chunks[i];
    }
    offset += chunk.bytes;
  }
}

// One stranded range for each mapping that could not be undone; the rest of `range` is unmapped. mutex_ held.
void ChunkedArena::strand_mappings(Range* range, const std::vector<std::uint32_t>& chunks,
                                   const MappedRow& mapped) {
  if (mapped.bytes < range->bytes) {
    const auto [lower, rest] = split(range, range->offset + mapped.bytes);
    put_unmapped(rest);
    range = lower;
  }
  granules_.own(range);
  for (std::size_t i = 0; i < mapped.count; ++i) {
    range->kind = RangeKind::kStranded;
    ++stranded_count_;
    if (i + 1 < mapped.count) range = split(range, range->offset + chunks_[chunks[i]].bytes).upper;
  }
}

// Maps a chunk of its own for one fixed block. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
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
  new_row_.clear();
  Status status = create_chunks(lock, bytes, bytes, &new_row_);
  if (!status.ok()) {
    put_unmapped(target);
    return status;
  }
  FOREBAY_RETURN_IF_ERROR(map_chunks(lock, target, new_row_));
  target->region = placement.region;
  *grown = target;
  return Status();
}

}  // namespace forebay::internal
