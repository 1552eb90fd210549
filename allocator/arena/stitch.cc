// Stitching: a block is made of memory that is free in several chunks, mapped side by side at new addresses.
#include <algorithm>

#include "allocator/arena/chunked_arena.h"
#include "allocator/arena/sort_by_key.h"

namespace forebay::internal {

namespace {

// Costs are in bytes. New memory is by far the worst. Bytes left over of a chunk that was whole count as
// lost; bytes that fill a chunk that was not whole count as gained. Each chunk shared with other blocks costs
// a fixed part of a smallest chunk, because it becomes whole again only when all of them are freed. The
// weights were found by replaying recorded traces. With a smaller kSharingWeight blocks scatter over many
// chunks; with a larger one whole chunks are used up first.
constexpr double kGrowthWeight = 16;
constexpr double kSharingWeight = 0.5;
// Heads and tails looked at. More: slower, and no better.
constexpr std::size_t kHeadsMax = kShortestSearches ? 1 : 256;
constexpr std::size_t kTailsMax = 2;

}  // namespace

// After gather: the search for the cheapest way to put one block together. A stitch is, in the order of its
// addresses: a beginning that is free already, whole chunks, new chunks, and the free beginning of a last
// chunk. growth_mutex_ and mutex_ held; calls no Backend.
struct ChunkedArena::StitchSearch {
  // Nothing; or the free end of a chunk; or free ranges in front of a hole, which keep their addresses.
  struct Beginning {
    Range* hole = nullptr;
    std::size_t run_bytes = 0;
    const Extent* head = nullptr;
    std::size_t bytes() const { return run_bytes + (head != nullptr ? head->bytes() : 0); }
  };
  // The middle: whole chunks, then part of a chunk that is broken for it, then new memory.
  struct Middle {
    std::size_t whole_bytes = 0;
    std::uint32_t broken = kNone;
    std::size_t broken_bytes = 0;
    std::size_t grown_bytes = 0;
    std::size_t bytes() const { return whole_bytes + broken_bytes + grown_bytes; }
  };

  ChunkedArena& arena;
  const Placement& placement;
  const std::size_t room_bytes;  // The most new memory.
  Stitch& best;
  const std::size_t granule = arena.chunk_bytes_;
  bool found = false;
  bool ties_win = false;        // The best so far begins with a longer head than the one that is tried.
  std::size_t shown_count = 0;  // Chunks that the current beginning shows.

  // Sorts the gathered extents: whole chunks, the largest first and the latest of one size; ends (heads) and
  // beginnings (tails) of chunks, the shortest first.
  void sort_extents() {
    for (std::uint32_t i = arena.spares_; i != kNone; i = arena.chunks_[i].next) arena.whole_.add(i);
    sort_wholes();
    for (std::uint32_t i = arena.spares_; i != kNone; i = arena.chunks_[i].next) arena.whole_.remove(i);
    arena.heads_.clear();
    arena.tails_.clear();
    for (const Extent& part : arena.parts_) {
      if (part.begin == 0) {
        arena.tails_.push_back(part);
      } else if (part.end == arena.chunks_[part.chunk].bytes) {
        arena.heads_.push_back(part);
      }
    }
    const auto blocks = [](const Extent& part) -> std::uint64_t { return part.bytes() / kBlockGranule; };
    const auto earlier_chunk = [](const Extent& a, const Extent& b) { return a.chunk < b.chunk; };
    for (std::vector<Extent>* parts : {&arena.heads_, &arena.tails_})
      sort_by_key(*parts, arena.sort_scratch_, blocks, earlier_chunk);
  }

  // A chunk must not be shown twice in one stitch. The chunks that its beginning shows are stamped.
  bool stamped(std::uint32_t chunk) const { return arena.chunks_[chunk].stamp == arena.stamp_; }
  void stamp_shown(std::size_t begin, std::size_t end) {
    ++arena.stamp_;
    shown_count = 0;
    for (std::size_t offset = begin; offset < end; ++shown_count) {
      const Mapping& here = arena.mappings_[arena.granules_.find(offset)->mapping];
      arena.chunks_[here.chunk].stamp = arena.stamp_;
      offset = here.offset + arena.chunks_[here.chunk].bytes;
    }
    count_stamped();
  }

  // The answer is kept: the same chunk is asked about many times.
  bool breakable(std::uint32_t index) {
    PhysicalChunk& chunk = arena.chunks_[index];
    if (chunk.breakable < 0) chunk.breakable = chunk.first_mapping == kNone || arena.evictable(index) ? 1 : 0;
    return chunk.breakable == 1;
  }

  // The whole chunks in groups of one size. A chunk that is stamped at this time counts as stamped.
  void sort_wholes() {
    std::vector<WholeChunks>& groups = arena.whole_groups_;
    groups.clear();
    std::size_t latest = 0;
    const auto group_of = [&](std::size_t bytes) {
      if (latest < groups.size() && groups[latest].bytes == bytes) return latest;
      const auto larger = [](const WholeChunks& group, std::size_t value) { return group.bytes > value; };
      const auto place = std::lower_bound(groups.begin(), groups.end(), bytes, larger);
      latest = static_cast<std::size_t>(place - groups.begin());
      if (place == groups.end() || place->bytes != bytes) groups.insert(place, {bytes, 0, 0, 0});
      return latest;
    };
    arena.whole_.for_each([&](std::uint32_t index) {
      PhysicalChunk& chunk = arena.chunks_[index];
      chunk.breakable = -1;
      ++groups[group_of(chunk.bytes)].count;
    });
    std::size_t end = 0;
    for (WholeChunks& group : groups) group.first = end += group.count;
    arena.wholes_.resize(end);
    // Each group is filled from its end on.
    arena.whole_.for_each([&](std::uint32_t index) {
      arena.wholes_[--groups[group_of(arena.chunks_[index].bytes)].first] = index;
    });
  }
  void count_stamped() {
    for (WholeChunks& group : arena.whole_groups_) group.stamped_count = 0;
    if (shown_count == 0) return;
    for (WholeChunks& group : arena.whole_groups_) {
      for (std::size_t i = group.first; i < group.first + group.count; ++i) {
        group.stamped_count += stamped(arena.wholes_[i]) ? 1 : 0;
      }
    }
  }

  // Takes whole chunks for `missing` bytes, the largest first. The rest comes from breaking the smallest
  // chunk that is too large, or else is new. `chosen`: receives the whole chunks, if not null.
  Middle fill(std::size_t missing, std::vector<std::uint32_t>* chosen) {
    Middle middle;
    std::size_t left = missing;
    std::uint32_t larger = kNone;
    for (const WholeChunks& group : arena.whole_groups_) {
      if (left == 0) break;
      const std::size_t count = group.count - group.stamped_count;
      const std::size_t fitting = (group.bytes == granule ? round_up(left, granule) : left) / group.bytes;
      const std::size_t taken = std::min(count, fitting);
      left -= std::min(left, taken * group.bytes);
      middle.whole_bytes += taken * group.bytes;
      if (chosen != nullptr) {
        for (std::size_t i = group.first, n = taken; n > 0; ++i) {
          if (stamped(arena.wholes_[i])) continue;
          chosen->push_back(arena.wholes_[i]);
          --n;
        }
      }
      if (left > 0 && taken < count) {
        std::size_t last = group.first + group.count - 1;
        while (stamped(arena.wholes_[last])) --last;
        larger = arena.wholes_[last];
      }
    }
    if (left > 0 && larger != kNone && breakable(larger)) {
      middle.broken = larger;
      middle.broken_bytes = round_up(left, granule);
      left = 0;
    }
    middle.grown_bytes = round_up(left, granule);
    return middle;
  }

  // The cost of using `used` bytes of the end or the beginning of a chunk that stays shared.
  double sharing_cost(std::size_t used) const {
    return kSharingWeight * static_cast<double>(granule) - static_cast<double>(used);
  }

  // Keeps this combination if it is possible and cheaper than the best so far. `tail` may be null.
  void consider(const Beginning& beginning, const Extent* tail) {
    const std::size_t have = beginning.bytes();
    const std::size_t tail_bytes = tail != nullptr ? tail->bytes() : 0;
    const std::size_t missing = placement.bytes > have + tail_bytes ? placement.bytes - have - tail_bytes : 0;
    const Middle middle = fill(missing, nullptr);
    if (middle.grown_bytes > room_bytes) return;
    const bool shares = beginning.head != nullptr || tail != nullptr;
    if (placement.only_shares && (!shares || middle.grown_bytes > 0)) return;
    const std::size_t over = have + middle.bytes() + tail_bytes - placement.bytes;
    double cost = kGrowthWeight * static_cast<double>(middle.grown_bytes);
    if (beginning.head != nullptr) cost += sharing_cost(beginning.head->bytes());
    if (beginning.run_bytes % granule != 0) cost += sharing_cost(beginning.run_bytes % granule);
    if (tail != nullptr) {
      if (over >= tail_bytes) return;
      cost += sharing_cost(tail_bytes - over);
    } else if (over > 0) {
      cost += static_cast<double>(over) + kSharingWeight * static_cast<double>(granule);
    }
    if (found && (cost > best.cost || (cost == best.cost && !ties_win))) return;
    found = true;
    ties_win = false;
    best.cost = cost;
    best.hole = beginning.hole;
    best.run_bytes = beginning.run_bytes;
    best.head = beginning.head != nullptr ? *beginning.head : Extent();
    best.tail = tail != nullptr ? *tail : Extent();
  }

  // Tries one beginning without a tail, and with the tails that fit best: those that hold all missing bytes,
  // those that hold the bytes that whole chunks would leave missing, and the longest ones.
  void try_tails(const Beginning& beginning) {
    const std::size_t have = beginning.bytes();
    if (have >= placement.bytes) return;  // A search among mapped addresses has found that already.
    consider(beginning, nullptr);
    const auto usable_tail = [&](const Extent& tail) {
      return !stamped(tail.chunk) && (beginning.head == nullptr || tail.chunk != beginning.head->chunk);
    };
    const std::vector<Extent>& tails = arena.tails_;
    const auto try_from = [&](std::size_t wanted) {
      auto tail =
          std::lower_bound(tails.begin(), tails.end(), wanted,
                           [](const Extent& extent, std::size_t value) { return extent.bytes() < value; });
      for (std::size_t i = 0; i < kTailsMax && tail != tails.end(); ++i, ++tail) {
        if (usable_tail(*tail)) consider(beginning, &*tail);
      }
    };
    try_from(placement.bytes - have);
    try_from((placement.bytes - have) % granule);
    for (std::size_t i = 0; i < kTailsMax && i < tails.size(); ++i) {
      const Extent& tail = tails[tails.size() - 1 - i];
      if (usable_tail(tail)) consider(beginning, &tail);
    }
  }

  // Stitches that begin with a chunk, or with the end of one. An end begins anywhere in its chunk, so it is
  // of no use for a larger alignment.
  void try_heads() {
    stamp_shown(0, 0);
    try_tails({});
    if (placement.alignment > kBlockGranule) return;
    // The longest ones: a head that is used up is gained. Among equal costs the shortest head counts.
    const std::vector<Extent>& heads = arena.heads_;
    const std::size_t first = heads.size() - std::min(heads.size(), kHeadsMax);
    const double longest_tail = arena.tails_.empty() ? 0 : static_cast<double>(arena.tails_.back().bytes());
    const double tail_cost = std::min(0.0, kSharingWeight * static_cast<double>(granule) - longest_tail);
    bool any = false;
    for (std::size_t i = heads.size(); i-- > first;) {
      if (i > first && heads[i - 1].bytes() == heads[i].bytes()) continue;
      // With the longest tail and nothing left over it would still cost more; so would all shorter ones.
      if (found && sharing_cost(heads[i].bytes()) + tail_cost > best.cost) break;
      ties_win = any;
      try_tails({nullptr, 0, &heads[i]});
      any = any || best.head.chunk != kNone;
    }
    ties_win = false;
  }

  // Stitches that begin with free ranges in front of a hole, which need no new mapping themselves.
  void try_runs() {
    for (Range* hole = arena.holes_; hole != nullptr; hole = hole->bin_next) {
      if (!arena.usable(hole->previous, placement)) continue;
      const bool room_behind = hole->bytes >= placement.bytes + 2 * arena.largest_chunk_bytes_;
      if (!room_behind) continue;
      Range* first = hole->previous;
      while (arena.usable(first->previous, placement)) first = first->previous;
      const std::size_t begin = align_up(first->offset, placement.alignment);
      if (begin >= hole->offset) continue;
      stamp_shown(first->offset, hole->offset);
      try_tails({hole, hole->offset - begin, nullptr});
    }
  }

  // Fills the best combination once more and notes its chunks.
  void complete() {
    stamp_shown(best.hole == nullptr ? 0 : best.hole->offset - best.run_bytes,
                best.hole == nullptr ? 0 : best.hole->offset);
    const std::size_t have = best.head.bytes() + best.run_bytes;
    const std::size_t tail_bytes = best.tail.bytes();
    const std::size_t missing = placement.bytes > have + tail_bytes ? placement.bytes - have - tail_bytes : 0;
    best.whole.clear();
    const Middle middle = fill(missing, &best.whole);
    // Chunks that lie side by side elsewhere are neighbours here too, and change hands in one piece.
    std::sort(best.whole.begin(), best.whole.end());
    best.broken = middle.broken;
    best.grown_bytes = middle.grown_bytes;
    if (best.tail.chunk != kNone) best.tail.end = placement.bytes - have - middle.bytes();
  }
};

// Chooses stitch_. Both locks held.
bool ChunkedArena::choose_stitch(const Placement& placement, std::size_t room_bytes) {
  std::vector<std::uint32_t> whole = std::move(stitch_.whole);  // reserve_books has made room for all chunks.
  stitch_ = Stitch();
  stitch_.whole = std::move(whole);
  StitchSearch search{*this, placement, room_bytes, stitch_};
  search.sort_extents();
  search.try_heads();
  search.try_runs();
  if (search.found) search.complete();
  return search.found;
}

// After gather: makes the block of memory that is free in several chunks. `*stitched`, in no bin, can hold it
// from `*start` on. `*addresses_used_up`: only addresses were missing. growth_mutex_ and mutex_ held;
// releases mutex_ meanwhile.
Status ChunkedArena::stitch(Lock& lock, const Placement& placement, Range** stitched, std::size_t* start,
                            bool* addresses_used_up) {
  FOREBAY_RETURN_IF_ERROR(plan_stitch(lock, placement));
  Range* view = claim_view();
  if (view == nullptr) {
    *addresses_used_up = true;
    return Status(StatusCode::kOutOfMemory, "");
  }
  view->region = placement.region;
  // All of its memory is claimed before mutex_ is released.
  Range* run = nullptr;
  if (stitch_.run_bytes != 0) run = isolate(view->offset - stitch_.run_bytes, view->offset);
  const Taken taken = take_stitch_memory(placement);
  const Status status = map_stitch(lock, placement, view);
  if (!status.ok()) {
    // The memory goes back to the addresses it came from.
    if (run != nullptr) put_free(run);
    for (const Origin& origin : origins_) {
      Range* range = isolate(origin.offset, origin.offset + origin.bytes);
      range->region = origin.region;
      put_free(range);
    }
    return status;
  }
  Range* range = cut_view(view);
  range->waits = taken.waits;
  range->epoch = taken.epoch;
  if (run != nullptr) range = absorb(run, range);
  range->region = placement.region;
  *stitched = range;
  *start = align_up(range->offset, placement.alignment);
  return Status();
}

// Chooses stitch_, and breaks large chunks until it needs no other broken. kOutOfMemory with an empty
// message: there is none, or growing is as good. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::plan_stitch(Lock& lock, const Placement& placement) {
  for (;;) {
    const std::size_t room_bytes = limit_bytes_ - total_.reserved_bytes;
    if (capturing_count_ != 0 || !choose_stitch(placement, room_bytes)) {
      return Status(StatusCode::kOutOfMemory, "");
    }
    if (stitch_.grown_bytes > 0) {
      // New memory behind a free range costs no more, and its rest stays beside later blocks.
      Site site;
      if (choose_site(placement, &site) && site.end - site.begin <= stitch_.grown_bytes) {
        return Status(StatusCode::kOutOfMemory, "");
      }
    }
    if (stitch_.broken == kNone) return Status();
    // Each time there is one large chunk less, so this ends.
    const Status status = break_chunk(lock, stitch_.broken);
    if (!status.ok()) {
      return status.code() == StatusCode::kUnavailable ? Status(StatusCode::kOutOfMemory, "") : status;
    }
    if (!reserve_books(lock, placement.bytes)) return no_books();
    gather(placement, placement.region >= kSharedRegionCount);
  }
}

// The new addresses of stitch_, claimed. Null if there are too few unmapped ones. Both locks held.
Range* ChunkedArena::claim_view() {
  std::size_t bytes = stitch_.grown_bytes;
  for (const Extent* extent : {&stitch_.head, &stitch_.tail}) {
    if (extent->chunk != kNone) bytes += chunks_[extent->chunk].bytes;
  }
  for (const std::uint32_t chunk : stitch_.whole) bytes += chunks_[chunk].bytes;
  Range* hole = stitch_.hole;
  if (hole == nullptr) return unmapped_from_top(bytes);
  FOREBAY_CHECK(hole->bytes >= bytes, "a stitch of %zu bytes into a hole of %zu", bytes, hole->bytes);
  return claim_hole(hole, hole->offset, hole->offset + bytes);
}

// Takes the memory of stitch_ from the addresses that own it; origins_ has them. Both locks held.
Taken ChunkedArena::take_stitch_memory(const Placement& placement) {
  origins_.clear();
  Taken taken;
  const auto take = [&](const Extent& extent) {
    if (extent.chunk == kNone) return;
    if (chunks_[extent.chunk].first_mapping == kNone) {
      remove_spare(extent.chunk);
    } else {
      shade(extent, placement, &taken);
    }
  };
  take(stitch_.head);
  for (std::span<const std::uint32_t> whole = stitch_.whole; !whole.empty();) {
    const std::size_t count = shade_row(whole, placement, &taken);
    if (count == 0) take({whole[0], 0, chunks_[whole[0]].bytes});
    whole = whole.subspan(std::max<std::size_t>(count, 1));
  }
  take(stitch_.tail);
  return taken;
}

// Creates the new chunks of stitch_ and maps all of it over `view`. On failure `view` is gone or a shadow,
// and chunks that are mapped nowhere are spares. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::map_stitch(Lock& lock, const Placement& placement, Range* view) {
  std::vector<std::uint32_t>& chunks = new_row_;  // reserve_books has made room for all chunks.
  chunks.clear();
  if (stitch_.head.chunk != kNone) chunks.push_back(stitch_.head.chunk);
  chunks.insert(chunks.end(), stitch_.whole.begin(), stitch_.whole.end());
  Status status = create_chunks(lock, stitch_.grown_bytes, handle_bytes_max(placement), &chunks);
  if (stitch_.tail.chunk != kNone) chunks.push_back(stitch_.tail.chunk);
  if (!status.ok()) {
    for (const std::uint32_t chunk : chunks) {
      if (chunks_[chunk].first_mapping == kNone) keep_spare(chunk);
    }
    put_unmapped(view);
    return status;
  }
  FOREBAY_RETURN_IF_ERROR(map_chunks(lock, view, chunks));
  // For cut_view.
  if (reserve_ranges(lock)) return status;
  view->waits = 0;
  view->kind = RangeKind::kShadow;
  return no_books();
}

// Cuts off the ends of the mapped view that show memory of other blocks; they become shadows. Returns the
// rest. mutex_ held; takes up to two descriptors.
Range* ChunkedArena::cut_view(Range* view) {
  const std::size_t end = view->end();
  if (stitch_.head.begin > 0) {
    const auto [shadow, rest] = split(view, view->offset + stitch_.head.begin);
    shadow->kind = RangeKind::kShadow;
    view = rest;
  }
  if (const Extent& tail = stitch_.tail; tail.chunk != kNone && tail.end < chunks_[tail.chunk].bytes) {
    const auto [rest, shadow] = split(view, end - chunks_[tail.chunk].bytes + tail.end);
    shadow->kind = RangeKind::kShadow;
    view = rest;
  }
  return view;
}

// Replaces an evictable chunk, or a spare, by chunks of the smallest size. They are mapped wherever it was,
// so that a step recorded before still finds memory there. They are spares instead if the chunk was one, or
// if they cannot be mapped. Chunks that cannot be created again are lost to the arena. kUnavailable: the
// chunk is in use by now. growth_mutex_ and mutex_ held; releases mutex_ meanwhile.
Status ChunkedArena::break_chunk(Lock& lock, std::uint32_t chunk) {
  const std::size_t bytes = chunks_[chunk].bytes;
  const bool mapped = chunks_[chunk].first_mapping != kNone;
  std::vector<std::size_t> offsets;
  std::vector<std::uint32_t> parts;
  const std::size_t offset_count = count_mappings(chunk);
  lock.unlock();
  const bool room = make_vector_room(offsets, offset_count);
  lock.lock();
  if (!room) return no_books();
  std::uint8_t region = kTransientRegion;
  if (mapped) {
    for (std::uint32_t i = chunks_[chunk].first_mapping; i != kNone; i = mappings_[i].next) {
      offsets.push_back(mappings_[i].offset);
      // Addresses that own its memory come first, if possible.
      const Range* range = range_at(offsets.back());
      if (range->kind == RangeKind::kFree) std::swap(offsets.front(), offsets.back());
    }
    region = range_at(offsets.front())->region;
    FOREBAY_RETURN_IF_ERROR(evict(lock, chunk));
  }
  FOREBAY_RETURN_IF_ERROR(destroy_spare(lock, chunk));
  Status status = create_chunks(lock, bytes, chunk_bytes_, &parts);
  if (!status.ok() || !mapped || !reserve_ranges(lock)) {
    for (const std::uint32_t part : parts) keep_spare(part);
    return status;
  }
  for (const std::size_t offset : offsets) {
    // The first mapping has room in the books; the others are made while there is some.
    const bool first = offset == offsets.front();
    if (!first && (mappings_.available() < parts.size() || !reserve_ranges(lock))) break;
    Range* hole = holes_;
    while (hole->end() <= offset) hole = hole->bin_next;
    Range* target = claim_hole(hole, offset, offset + bytes);
    status = map_chunks(lock, target, parts);
    if (!status.ok()) return first ? status : Status();
    target->region = region;
    target->waits = 0;
    if (first) {
      put_free(target);
    } else {
      target->kind = RangeKind::kShadow;
    }
  }
  return status;
}

}  // namespace forebay::internal
