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
  // Most often the mapping that owned it last.
  const Range* owner = nullptr;
  std::size_t owner_offset = 0;
  const auto owned_at = [&](std::uint32_t mapping) {
    owner_offset = mappings_[mapping].offset + position;
    owner = range_at(owner_offset);
    return usable(owner, placement);
  };
  const bool hinted = chunk.owner != kNone && mappings_[chunk.owner].chunk == entry->chunk;
  if (!hinted || !owned_at(chunk.owner)) {
    std::uint32_t mapping = chunk.first_mapping;
    while (mapping != kNone && !owned_at(mapping)) mapping = mappings_[mapping].next;
    if (mapping == kNone) return {};
    chunk.owner = mapping;
  }
  end = std::min(end, offset + (owner->end() - owner_offset));
  while (range->end() < end) {
    range = range->next;
    if (range->kind != RangeKind::kShadow) end = range->offset;
  }
  // Only as far as both addresses show the same chunks side by side.
  for (std::size_t next = align_up(offset + 1, chunk_bytes_); next < end; next += chunk_bytes_) {
    if (granules_.at(next).chunk != granules_.at(next - offset + owner_offset).chunk) end = next;
  }
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

// Collects the usable extents of chunks in extents_, sorted, neighbours joined: those of at most gather_max_
// ranges of each class. Leaves out extents that can neither hold the block nor be joined to another chunk's.
// Room has been made. True if the other region had some. growth_mutex_ held too.
bool ChunkedArena::gather(const Placement& placement, bool own_region_only) {
  const auto add_ranges = [&](std::uint8_t region, std::vector<Extent>& extents) {
    extents.clear();
    const bool all = for_each_usable(placement, region, gather_max_, [&](const Range* range) {
      if (range->bytes < placement.bytes && lies_among_blocks(range)) return;
      for (std::size_t offset = range->offset; offset < range->end();) {
        const Mapping& here = mappings_[granules_.find(offset)->mapping];
        const std::size_t to = std::min(range->end() - here.offset, chunks_[here.chunk].bytes);
        extents.push_back({here.chunk, offset - here.offset, to});
        offset = here.offset + to;
      }
    });
    const auto chunk = [](const Extent& extent) -> std::uint64_t { return extent.chunk; };
    const auto before = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
    sort_by_key(extents, sort_scratch_, chunk, before);
    return all;
  };
  // A miss gathers the request's own region first, then both. Most often nothing has changed in between.
  const bool own_gathered = own_gathered_at_ == free_changes_;
  if (!own_gathered) {
    gathered_all_ = add_ranges(placement.region, own_extents_);
    own_gathered_at_ = free_changes_;
  }
  other_extents_.clear();
  if (!own_region_only && placement.region < kSharedRegionCount) {
    const auto other = static_cast<std::uint8_t>(1 - placement.region);
    gathered_all_ = add_ranges(other, other_extents_) && gathered_all_;
  }
  if (own_gathered && other_extents_.empty()) return false;

  extents_.resize(own_extents_.size() + other_extents_.size());
  std::merge(own_extents_.begin(), own_extents_.end(), other_extents_.begin(), other_extents_.end(),
             extents_.begin(), [](const Extent& a, const Extent& b) {
               return a.chunk != b.chunk ? a.chunk < b.chunk : a.begin < b.begin;
             });
  std::size_t count = 0;
  for (std::size_t i = 0; i < extents_.size();) {
    Extent extent = extents_[i++];
    for (; i < extents_.size() && extents_[i].chunk == extent.chunk && extents_[i].begin == extent.end; ++i) {
      extent.end = extents_[i].end;
    }
    const bool inside = extent.begin > 0 && extent.end < chunks_[extent.chunk].bytes;
    if (inside && extent.bytes() < placement.bytes) continue;
    extents_[count++] = extent;
  }
  extents_.resize(count);
  return !other_extents_.empty();
}

// After gather: false if no run of mapped addresses shows only gathered memory and has `bytes`. True if one
// may. growth_mutex_ held too.
//
// A run is the end of a chunk, whole chunks, and the beginning of a chunk, or one extent. Most requests that
// miss are so large that a run for them has more whole chunks than lie side by side anywhere. A row of them
// contains a multiple of each smaller distance, so only the few addresses with a multiple are looked at, and
// no sort is needed.
bool ChunkedArena::may_be_shown(std::size_t bytes) {
  std::size_t head_bytes = 0;    // The longest end of a chunk.
  std::size_t tail_bytes = 0;    // The longest beginning of one.
  std::size_t inside_bytes = 0;  // The longest other part.
  std::size_t whole_bytes = 0;
  std::size_t largest_bytes = 0;  // The largest whole chunk.
  ++stamp_;
  for (const Extent& extent : extents_) {
    PhysicalChunk& chunk = chunks_[extent.chunk];
    const bool at_end = extent.end == chunk.bytes;
    if (at_end && extent.begin == 0) {
      whole_bytes += extent.bytes();
      largest_bytes = std::max(largest_bytes, chunk.bytes);
      chunk.stamp = stamp_;
    } else if (at_end) {
      head_bytes = std::max(head_bytes, extent.bytes());
    } else if (extent.begin == 0) {
      tail_bytes = std::max(tail_bytes, extent.bytes());
    } else {
      inside_bytes = std::max(inside_bytes, extent.bytes());
    }
  }
  if (bytes <= std::max({inside_bytes, largest_bytes, head_bytes + tail_bytes})) return true;
  const std::size_t missing_bytes = bytes - head_bytes - tail_bytes;
  if (missing_bytes > whole_bytes) return false;
  // With fewer than eight chunks too many addresses have one.
  const std::size_t distance = std::bit_floor(missing_bytes);
  if (distance < 8 * largest_bytes) return true;
  // The mapping at this address, if it shows a whole chunk. Older addresses of a chunk than a search looks
  // at, and a chunk that a row shows twice, make the row too long here, which costs time only.
  const auto whole_at = [&](std::size_t offset) -> const Mapping* {
    const GranuleTable::Entry* entry = offset < reserve_bytes_ ? granules_.find(offset) : nullptr;
    if (entry == nullptr || entry->mapping == kNone || chunks_[entry->chunk].stamp != stamp_) return nullptr;
    return &mappings_[entry->mapping];
  };
  for (const Extent& extent : extents_) {
    const PhysicalChunk& chunk = chunks_[extent.chunk];
    if (chunk.stamp != stamp_) continue;
    for (const std::uint32_t view : chunk.views) {
      if (view == kNone) break;
      std::size_t begin = view * chunk_bytes_;
      std::size_t end = begin + chunk.bytes;
      if (align_up(begin, distance) >= end) continue;
      const Mapping* here = nullptr;
      while (end - begin < missing_bytes && (here = whole_at(end)) != nullptr)
        end += chunks_[here->chunk].bytes;
      while (end - begin < missing_bytes && begin > 0 && (here = whole_at(begin - 1)) != nullptr)
        begin = here->offset;
      if (end - begin >= missing_bytes) return true;
    }
  }
  return false;
}

// After gather: the shortest run of mapped addresses that show only gathered memory and can hold the block,
// among the latest addresses of each chunk.
// growth_mutex_ held too.
bool ChunkedArena::find_shown(const Placement& placement, std::size_t* start) {
  if (!may_be_shown(placement.bytes)) return false;
  // All addresses that show gathered memory, in their order. Only stranded ones cannot be read.
  const bool all_readable = stranded_count_ == 0;
  views_.clear();
  for (const Extent& extent : extents_) {
    for (const std::uint32_t view : chunks_[extent.chunk].views) {
      if (view == kNone || views_.size() == views_.capacity()) break;
      const std::size_t offset = view * chunk_bytes_;
      if (!all_readable && !readable(granules_.find(offset)->range)) continue;
      views_.push_back({extent.chunk, offset + extent.begin, offset + extent.end});
    }
  }
  const auto granule = [shift = std::countr_zero(chunk_bytes_)](const Extent& view) -> std::uint64_t {
    return view.begin >> shift;
  };
  const auto before = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  sort_by_key(views_, sort_scratch_, granule, before);
  std::size_t best_bytes = SIZE_MAX;
  std::size_t run_begin = 0;
  std::size_t run_end = SIZE_MAX;
  const auto end_run = [&] {
    if (run_end != SIZE_MAX && block_fits(run_begin, run_end, placement.bytes, placement.alignment) &&
        run_end - run_begin < best_bytes) {
      best_bytes = run_end - run_begin;
      *start = align_up(run_begin, placement.alignment);
    }
    ++stamp_;
  };
  ++stamp_;
  for (const Extent& view : views_) {
    // A gap ends a run, and so does a chunk that it shows already.
    PhysicalChunk& chunk = chunks_[view.chunk];
    if (view.begin != run_end || chunk.stamp == stamp_) {
      end_run();
      run_begin = view.begin;
    }
    chunk.stamp = stamp_;
    run_end = view.end;
  }
  end_run();
  return best_bytes != SIZE_MAX;
}

}  // namespace forebay::internal
