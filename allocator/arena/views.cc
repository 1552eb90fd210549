// Several addresses may show the same memory. This file finds addresses that can serve a request and hands
// memory from one address to another. mutex_ is held throughout; no driver call is made.
#include <algorithm>
#include <bit>

#include "allocator/arena/chunked_arena.h"
#include "allocator/arena/sort_by_key.h"

namespace forebay::internal {

namespace {

// A mapped range of which some memory may be free.
bool readable(const Range* range) {
  return range != nullptr && (range->kind == RangeKind::kFree || range->kind == RangeKind::kLive ||
                              range->kind == RangeKind::kShadow);
}

}  // namespace

// The range of the byte at `offset`, or null where nothing is mapped.
Range* ChunkedArena::range_at(std::size_t offset) const {
  const GranuleTable::Entry* entry = granules_.find(offset);
  if (entry == nullptr) return nullptr;
  Range* range = entry->range;
  while (range != nullptr && range->end() <= offset) range = range->next;
  return range;
}

// Makes one busy range, in no bin, of [begin, end), which is tiled by ranges that are free or shadows. Takes
// up to two descriptors.
Range* ChunkedArena::isolate(std::size_t begin, std::size_t end) {
  Range* range = range_at(begin);
  const auto claim = [this](Range* r) {
    const RangeKind kind = r->kind;
    FOREBAY_ASSERT(kind == RangeKind::kFree || kind == RangeKind::kShadow, "range of kind %d",
                   static_cast<int>(kind));
    if (kind == RangeKind::kFree) take_free(r);
    r->kind = RangeKind::kBusy;
    return kind;
  };
  const auto give_back = [this](Range* r, RangeKind kind) {
    if (kind == RangeKind::kFree) {
      put_free(r);
    } else {
      r->kind = kind;
    }
  };
  RangeKind kind = claim(range);
  if (range->offset < begin) {
    const auto [front, rest] = split(range, begin);
    give_back(front, kind);
    range = rest;
  }
  for (;;) {
    if (range->end() > end) {
      // The part beyond `end` is of this kind.
      const auto [kept, rest] = split(range, end);
      give_back(rest, kind);
      return kept;
    }
    if (range->end() == end) return range;
    Range* next = range->next;
    kind = claim(next);
    if (next->end() > end) {
      const auto [part, rest] = split(next, end);
      give_back(rest, kind);
      return absorb(range, part);
    }
    range = absorb(range, next);
  }
}

// The memory shown from `offset` (inside `range`) to at most `end` that one usable range owns, at these or at
// other addresses. Zero bytes if the first byte is not usable.
Shown ChunkedArena::shown_at(Range* range, std::size_t offset, std::size_t end, const Placement& placement) {
  if (usable(range, placement)) return {std::min(range->end(), end) - offset, offset};
  if (range->kind != RangeKind::kShadow) return {};
  const GranuleTable::Entry* entry = granules_.find(offset);
  PhysicalChunk& chunk = chunks_[entry->chunk];
  const std::size_t position = offset - mappings_[entry->mapping].offset;
  // Most often the mapping that owned it last. Each byte has one owner, free or live.
  const Range* owner = nullptr;
  std::size_t owner_offset = 0;
  const auto owned_at = [&](std::uint32_t mapping) {
    owner_offset = mappings_[mapping].offset + position;
    owner = range_at(owner_offset);
    return owner != nullptr && (owner->kind == RangeKind::kFree || owner->kind == RangeKind::kLive);
  };
  const bool hinted = chunk.owner != kNone && mappings_[chunk.owner].chunk == entry->chunk;
  if (!hinted || !owned_at(chunk.owner)) {
    std::uint32_t mapping = chunk.first_mapping;
    while (mapping != kNone && !owned_at(mapping)) mapping = mappings_[mapping].next;
    if (mapping == kNone) return {};
    chunk.owner = mapping;
  }
  if (!usable(owner, placement)) return {};
  end = std::min(end, offset + (owner->end() - owner_offset));
  while (range->end() < end) {
    range = range->next;
    if (range->kind != RangeKind::kShadow) end = range->offset;
  }
  // Only as far as both addresses show the same chunks side by side.
  const std::size_t begin = offset & ~(chunk_bytes_ - 1);
  const std::size_t count =
      granules_.alike(begin, owner_offset, align_up(end - begin, chunk_bytes_) / chunk_bytes_);
  end = std::min(end, begin + count * chunk_bytes_);
  return {end - offset, owner_offset};
}

// True if all memory that [begin, end) shows is free and usable, whichever addresses own it. shown_ then has
// the first kShownMax of its `*run_count` parts, for own_here.
bool ChunkedArena::shows_free(std::size_t begin, std::size_t end, const Placement& placement,
                              std::size_t* run_count) {
  *run_count = 0;
  Range* range = range_at(begin);
  for (std::size_t offset = begin; offset < end;) {
    while (range != nullptr && range->end() <= offset) range = range->next;
    if (range == nullptr) return false;
    const Shown shown = shown_at(range, offset, end, placement);
    if (shown.bytes == 0) return false;
    if (*run_count < kShownMax) shown_[*run_count] = shown;
    ++*run_count;
    offset += shown.bytes;
  }
  // No byte of a chunk may be shown twice. Each byte has one owner, so it would have been found twice.
  if (*run_count > kShownMax) return shows_once(begin, end);
  for (std::size_t i = 1; i < *run_count; ++i) {
    const std::size_t owner_end = shown_[i].owner_offset + shown_[i].bytes;
    for (std::size_t j = 0; j < i; ++j) {
      if (shown_[j].owner_offset < owner_end &&
          shown_[i].owner_offset < shown_[j].owner_offset + shown_[j].bytes) {
        return false;
      }
    }
  }
  return true;
}

// Whether [begin, end), all of it mapped, shows no byte of a chunk twice.
bool ChunkedArena::shows_once(std::size_t begin, std::size_t end) {
  ++stamp_;
  for (std::size_t offset = begin; offset < end;) {
    const Mapping& here = mappings_[granules_.find(offset)->mapping];
    PhysicalChunk& chunk = chunks_[here.chunk];
    const std::size_t from = offset - here.offset;
    const std::size_t to = std::min(end - here.offset, chunk.bytes);
    for (std::size_t before = begin; chunk.stamp == stamp_ && before < offset;) {
      const Mapping& other = mappings_[granules_.find(before)->mapping];
      const std::size_t other_from = before - other.offset;
      const std::size_t other_to = chunks_[other.chunk].bytes;
      if (other.chunk == here.chunk && from < other_to && other_from < to) return false;
      before = other.offset + other_to;
    }
    chunk.stamp = stamp_;
    offset = here.offset + to;
  }
  return true;
}

// Makes a shadow of [begin, end), which `range` owns. Adds the streams it waited for to `taken` and its
// addresses to origins_. growth_mutex_ held too.
Range* ChunkedArena::shade(const Range* range, std::size_t begin, std::size_t end, Taken* taken) {
  origins_.push_back({begin, end - begin, range->region});
  Range* shadow = isolate(begin, end);
  shadow->kind = RangeKind::kShadow;
  taken->waits |= shadow->waits;
  taken->epoch = std::max(taken->epoch, shadow->epoch);
  if (shadow->waits != 0) shadows_wait_ = true;
  return shadow;
}

// The same for the usable ranges that own this extent.
void ChunkedArena::shade(const Extent& extent, const Placement& placement, Taken* taken) {
  std::size_t left_bytes = extent.bytes();  // Each byte has one owner.
  for (std::uint32_t i = chunks_[extent.chunk].first_mapping; i != kNone && left_bytes > 0;
       i = mappings_[i].next) {
    const std::size_t begin = mappings_[i].offset + extent.begin;
    const std::size_t end = mappings_[i].offset + extent.end;
    for (const Range* range = range_at(begin); range != nullptr && range->offset < end; range = range->next) {
      if (!usable(range, placement)) continue;
      range = shade(range, std::max(range->offset, begin), std::min(range->end(), end), taken);
      left_bytes -= range->bytes;
    }
  }
}

// The same for the first of these whole chunks, and for those behind it that one range owns side by side with
// it. Returns their number; 0: no single range owns the first one, as far as the hint says.
std::size_t ChunkedArena::shade_row(std::span<const std::uint32_t> chunks, const Placement& placement,
                                    Taken* taken) {
  const std::uint32_t owner = chunks_[chunks[0]].owner;
  if (owner == kNone || mappings_[owner].chunk != chunks[0]) return 0;
  const std::size_t begin = mappings_[owner].offset;
  const Range* range = range_at(begin);
  if (!usable(range, placement)) return 0;
  std::size_t end = begin;
  std::size_t count = 0;
  while (count < chunks.size() && end < range->end() && granules_.find(end)->chunk == chunks[count] &&
         range->end() - end >= chunks_[chunks[count]].bytes) {
    end += chunks_[chunks[count++]].bytes;
  }
  if (count > 0) shade(range, begin, end, taken);
  return count;
}

// Requires: all memory that [begin, end) shows is free and usable. `run_count`: that of shows_free if it was
// the latest call; else 0. Returns [begin, end) as a busy range that owns its memory.
Range* ChunkedArena::own_here(std::size_t begin, std::size_t end, const Placement& placement,
                              std::size_t run_count) {
  std::uint64_t waits = 0;
  std::uint64_t epoch = 0;
  std::size_t i = 0;
  for (std::size_t offset = begin; offset < end; ++i) {
    const Shown shown =
        i < std::min(run_count, kShownMax) ? shown_[i] : shown_at(range_at(offset), offset, end, placement);
    FOREBAY_ASSERT(shown.bytes != 0, "memory shown at %zu is not free", offset);
    if (shown.owner_offset != offset) {
      Range* shadow = isolate(shown.owner_offset, shown.owner_offset + shown.bytes);
      shadow->kind = RangeKind::kShadow;
      waits |= shadow->waits;
      epoch = std::max(epoch, shadow->epoch);
      if (shadow->waits != 0) shadows_wait_ = true;
      const GranuleTable::Entry* entry = granules_.find(offset);
      chunks_[entry->chunk].owner = entry->mapping;
    }
    offset += shown.bytes;
  }
  Range* range = isolate(begin, end);
  range->region = placement.region;
  range->waits |= waits;
  range->epoch = std::max(range->epoch, epoch);
  return range;
}

// True if blocks of the same chunk lie on both sides, so that its memory can be joined to no other.
bool ChunkedArena::lies_among_blocks(const Range* range) const {
  const std::size_t inside = chunk_bytes_ - 1;
  const bool alone = (range->offset & inside) != 0 && (range->offset & inside) + range->bytes < chunk_bytes_;
  return alone && range->previous->kind == RangeKind::kLive && range->next->kind == RangeKind::kLive;
}

// Adds the usable extents of at most gather_max_ ranges of each class of one region. Leaves out extents that
// can neither hold the block nor be joined to another chunk's. False if there are more ranges. growth_mutex_
// held too.
bool ChunkedArena::gather_region(const Placement& placement, std::uint8_t region) {
  return for_each_usable(placement, region, gather_max_, [&](const Range* range) {
    if (range->bytes < placement.bytes && lies_among_blocks(range)) return;
    const GranuleTable::Entry* entry = granules_.find(range->offset);
    std::size_t chunk_begin = mappings_[entry->mapping].offset;
    for (std::size_t offset = range->offset;; entry = granules_.find(offset)) {
      const PhysicalChunk& chunk = chunks_[entry->chunk];
      const std::size_t bytes = chunk.bytes;
      repeated_ = repeated_ || chunk.views[1] != kNone;
      const std::size_t end = std::min(range->end(), chunk_begin + bytes);
      if (end - offset == bytes) {
        add_whole(entry->chunk);
      } else {
        found_parts_.push_back({{entry->chunk, offset - chunk_begin, end - chunk_begin}, kNone});
      }
      if (region != placement.region) other_chunks_.push_back(entry->chunk);
      if (end == range->end()) return;
      chunk_begin = offset = end;
    }
  });
}

void ChunkedArena::add_whole(std::uint32_t chunk) {
  if (whole_.has(chunk)) return;
  whole_.add(chunk);
  whole_bytes_ += chunks_[chunk].bytes;
  largest_whole_bytes_ = std::max(largest_whole_bytes_, chunks_[chunk].bytes);
}

// Joins neighbours of found_parts_ into parts_, in the order of their chunks. Leaves out those inside a chunk
// that cannot hold `bytes`. growth_mutex_ held too.
void ChunkedArena::join_parts(std::size_t bytes) {
  in_parts_.clear();
  for (std::size_t i = found_parts_.size(); i-- > 0;) {
    const std::uint32_t chunk = found_parts_[i].extent.chunk;
    found_parts_[i].next = in_parts_.has(chunk) ? chunks_[chunk].part : kNone;
    chunks_[chunk].part = static_cast<std::uint32_t>(i);
    in_parts_.add(chunk);
  }
  parts_.clear();
  const auto keep = [&](const Extent& part, std::size_t chunk_end) {
    if (part.bytes() == chunk_end) {
      add_whole(part.chunk);
    } else if (part.begin == 0 || part.end == chunk_end || part.bytes() >= bytes) {
      parts_.push_back(part);
    }
  };
  in_parts_.for_each([&](std::uint32_t index) {
    PhysicalChunk& chunk = chunks_[index];
    const std::size_t first = parts_.size();
    if (found_parts_[chunk.part].next == kNone) {
      keep(found_parts_[chunk.part].extent, chunk.bytes);
    } else {
      sort_scratch_.clear();
      for (std::uint32_t i = chunk.part; i != kNone; i = found_parts_[i].next)
        sort_scratch_.push_back(found_parts_[i].extent);
      std::sort(sort_scratch_.begin(), sort_scratch_.end(),
                [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
      for (auto part = sort_scratch_.begin(); part != sort_scratch_.end();) {
        Extent joined = *part++;
        for (; part != sort_scratch_.end() && part->begin == joined.end; ++part) joined.end = part->end;
        keep(joined, chunk.bytes);
      }
    }
    chunk.part = static_cast<std::uint32_t>(first);
    if (parts_.size() == first) in_parts_.remove(index);
  });
}

// Collects the usable extents of chunks: those of at most gather_max_ ranges of each class. Room has been
// made. True if the other region had some. growth_mutex_ held too.
bool ChunkedArena::gather(const Placement& placement, bool own_region_only) {
  // A miss gathers the request's own region first, then both. Most often nothing has changed in between.
  const bool own_gathered = gathered_at_ == free_changes_;
  bool more = !own_gathered;
  if (!own_gathered) {
    whole_.clear();
    whole_bytes_ = 0;
    largest_whole_bytes_ = 0;
    found_parts_.clear();
    other_chunks_.clear();
    gathered_other_ = false;
    repeated_ = false;
    gathered_all_ = gather_region(placement, placement.region);
    gathered_at_ = free_changes_;
  }
  if (!own_region_only && !gathered_other_ && placement.region < kSharedRegionCount) {
    const auto other = static_cast<std::uint8_t>(1 - placement.region);
    gathered_all_ = gather_region(placement, other) && gathered_all_;
    gathered_other_ = true;
    more = more || !other_chunks_.empty();
  }
  if (more) join_parts(placement.bytes);
  return !other_chunks_.empty();
}

// The gathered bytes that the addresses from `offset` on show side by side, where a mapping begins or ends.
// Stops at `bytes_max`.
std::size_t ChunkedArena::shown_from(std::size_t offset, std::size_t bytes_max) const {
  std::size_t bytes = 0;
  while (bytes < bytes_max && offset + bytes < reserve_bytes_) {
    const GranuleTable::Entry* entry = granules_.find(offset + bytes);
    if (entry == nullptr || entry->mapping == kNone) break;
    if (whole_.has(entry->chunk)) {
      bytes += chunks_[entry->chunk].bytes;
      continue;
    }
    if (!in_parts_.has(entry->chunk)) break;
    const Extent& first = parts_[chunks_[entry->chunk].part];
    return first.begin == 0 ? bytes + first.bytes() : bytes;
  }
  return bytes;
}

// The same for the addresses up to `offset`.
std::size_t ChunkedArena::shown_up_to(std::size_t offset, std::size_t bytes_max) const {
  std::size_t bytes = 0;
  while (bytes < bytes_max && bytes < offset) {
    const GranuleTable::Entry* entry = granules_.find(offset - bytes - 1);
    if (entry == nullptr || entry->mapping == kNone) break;
    if (whole_.has(entry->chunk)) {
      bytes += chunks_[entry->chunk].bytes;
      continue;
    }
    if (!in_parts_.has(entry->chunk)) break;
    std::size_t last = chunks_[entry->chunk].part;
    while (last + 1 < parts_.size() && parts_[last + 1].chunk == entry->chunk) ++last;
    return parts_[last].end == chunks_[entry->chunk].bytes ? bytes + parts_[last].bytes() : bytes;
  }
  return bytes;
}

// Searches the gathered memory that the latest addresses of an extent's chunk show side by side, if it has
// enough bytes. Looks only at addresses of the chunk that have a multiple of `distance`. growth_mutex_ held
// too.
void ChunkedArena::search_around(const Extent& extent, std::size_t distance, ShownSearch& search) {
  const PhysicalChunk& chunk = chunks_[extent.chunk];
  const std::size_t bytes = search.placement.bytes;
  for (const std::uint32_t view : chunk.views) {
    if (view == kNone) return;
    const std::size_t begin = view * chunk_bytes_;
    const std::size_t end = begin + chunk.bytes;
    if (align_up(begin, distance) >= end) continue;
    std::size_t row_bytes = extent.bytes();
    if (extent.end == chunk.bytes && row_bytes < bytes) row_bytes += shown_from(end, bytes - row_bytes);
    if (extent.begin == 0 && row_bytes < bytes) row_bytes += shown_up_to(begin, bytes - row_bytes);
    if (row_bytes < bytes) continue;
    const std::size_t first = begin + extent.begin;
    if (std::any_of(rows_.begin(), rows_.end(),
                    [&](const Extent& row) { return row.begin <= first && first < row.end; })) {
      continue;
    }
    const std::size_t before = extent.begin == 0 ? shown_up_to(begin, SIZE_MAX) : 0;
    const std::size_t after = extent.end == chunk.bytes ? shown_from(end, SIZE_MAX) : 0;
    rows_.push_back({kNone, first - before, begin + extent.end + after});
    search_row(rows_.back().begin, rows_.back().end, search);
  }
}

// The shortest run of [begin, end), which shows gathered memory only. A chunk's latest addresses count, and a
// run ends before a chunk that it shows already. growth_mutex_ held too.
void ChunkedArena::search_row(std::size_t begin, std::size_t end, ShownSearch& search) {
  const Placement& placement = search.placement;
  std::size_t run_begin = 0;
  std::size_t run_end = SIZE_MAX;
  const auto end_run = [&] {
    const std::size_t bytes = run_end - run_begin;
    ++stamp_;
    if (run_end == SIZE_MAX || !block_fits(run_begin, run_end, placement.bytes, placement.alignment)) return;
    if (bytes > search.run_bytes || (bytes == search.run_bytes && run_begin > search.run_begin)) return;
    search.run_begin = run_begin;
    search.run_bytes = bytes;
  };
  ++stamp_;
  for (std::size_t offset = begin; offset < end;) {
    const GranuleTable::Entry& entry = *granules_.find(offset);
    PhysicalChunk& chunk = chunks_[entry.chunk];
    const std::size_t chunk_begin = mappings_[entry.mapping].offset;
    const std::size_t piece_begin = offset;
    offset = std::min(end, chunk_begin + chunk.bytes);
    const auto view = static_cast<std::uint32_t>(chunk_begin / chunk_bytes_);
    if (std::find(chunk.views, chunk.views + kViewsMax, view) == chunk.views + kViewsMax) continue;
    // Only stranded addresses cannot be read.
    if (stranded_count_ != 0 && !readable(granules_.find(chunk_begin)->range)) continue;
    if (piece_begin != run_end || chunk.stamp == stamp_) {
      end_run();
      run_begin = piece_begin;
    }
    chunk.stamp = stamp_;
    run_end = offset;
  }
  end_run();
}

// After gather: the shortest run of mapped addresses that show only gathered memory and can hold the block,
// among the latest addresses of each chunk. growth_mutex_ held too.
//
// A run is the end of a chunk, whole chunks, and the beginning of a chunk, or one extent. A row of whole
// chunks contains a multiple of each smaller distance, so most often only the few addresses with a multiple
// are looked at. No sort is needed.
bool ChunkedArena::find_shown(const Placement& placement, std::size_t* start) {
  const std::size_t bytes = placement.bytes;
  ShownSearch search{placement};
  rows_.clear();
  const auto search_whole = [&](std::uint32_t chunk, std::size_t distance) {
    search_around({chunk, 0, chunks_[chunk].bytes}, distance, search);
  };
  if (gathered_other_ && none_shown_at_ == free_changes_) {
    // A run has memory of the other region, since without it there was none.
    for (const std::uint32_t chunk : other_chunks_) {
      if (whole_.has(chunk)) {
        search_whole(chunk, chunk_bytes_);
      } else if (in_parts_.has(chunk)) {
        for (std::size_t i = chunks_[chunk].part; i < parts_.size() && parts_[i].chunk == chunk; ++i)
          search_around(parts_[i], chunk_bytes_, search);
      }
    }
  } else {
    std::size_t head_bytes = 0;  // The longest end of a chunk.
    std::size_t tail_bytes = 0;  // The longest beginning of one.
    for (const Extent& part : parts_) {
      std::size_t& longest = part.begin == 0 ? tail_bytes : head_bytes;
      longest = std::max(longest, part.bytes());
    }
    if (bytes <= head_bytes + tail_bytes) {
      for (const Extent& part : parts_) search_around(part, chunk_bytes_, search);
    }
    const std::size_t missing_bytes = bytes - std::min(bytes, head_bytes + tail_bytes);
    const bool one_holds_all = largest_whole_bytes_ >= bytes;
    const std::size_t distance =
        one_holds_all ? chunk_bytes_ : std::max(chunk_bytes_, std::bit_floor(missing_bytes));
    if (missing_bytes <= whole_bytes_)
      whole_.for_each([&](std::uint32_t chunk) { search_whole(chunk, distance); });
  }
  if (search.run_bytes == SIZE_MAX) return false;
  *start = align_up(search.run_begin, placement.alignment);
  return true;
}

}  // namespace forebay::internal
