// Stitching: a block is made of memory that is free in several chunks, mapped side by side at new addresses.
#include <algorithm>

#include "allocator/arena/chunked_arena.h"

namespace forebay::internal {

namespace {

// Weights of choose_stitch. Taking new memory is by far the worst. What is left over of a chunk that was
// whole counts as lost, what fills a chunk that was not counts as gained, and each chunk that is shared with
// other blocks costs a fixed part of a smallest chunk, because it will be whole again only when all are
// freed. Found by replaying recorded traces: without the last, blocks scatter over many chunks.
constexpr double kGrowthWeight = 16;
constexpr double kSharingWeight = 0.5;
// Heads and tails looked at, of different sizes. More would not be better, only slower.
constexpr std::size_t kHeadsMax = 256;
constexpr std::size_t kTailsMax = 2;

}  // namespace

// After gather: the cheapest way to put the block together from the end of one chunk, whole chunks and the
// beginning of another, with at most `room_bytes` of new memory.
bool ChunkedArena::choose_stitch(const Placement& placement, std::size_t room_bytes, Stitch* stitch) {
  const std::size_t bytes = placement.bytes;
  const std::size_t granule = chunk_bytes_;
  // Wholes by size, largest first; heads and tails by length.
  std::vector<Piece>& wholes = wholes_;
  std::vector<Piece>& heads = heads_;
  std::vector<Piece>& tails = tails_;
  wholes.clear();
  heads.clear();
  tails.clear();
  for (const Piece& piece : pieces_) {
    const std::size_t chunk_end = chunks_[piece.chunk].bytes;
    if (piece.begin == 0 && piece.end == chunk_end) {
      wholes.push_back(piece);
    } else if (piece.end == chunk_end) {
      heads.push_back(piece);
    } else if (piece.begin == 0) {
      tails.push_back(piece);
    }
  }
  for (std::uint32_t i = spares_; i != kNone; i = chunks_[i].next) wholes.push_back({i, 0, chunks_[i].bytes});
  for (const Piece& whole : wholes) chunks_[whole.chunk].breakable = -1;
  const auto breakable = [&](std::uint32_t index) {
    PhysicalChunk& chunk = chunks_[index];
    if (chunk.breakable < 0) chunk.breakable = chunk.first_mapping == kNone || evictable(index) ? 1 : 0;
    return chunk.breakable == 1;
  };
  const auto shorter = [](const Piece& a, const Piece& b) {
    return a.bytes() != b.bytes() ? a.bytes() < b.bytes() : a.chunk < b.chunk;
  };
  std::sort(wholes.begin(), wholes.end(), [&](const Piece& a, const Piece& b) { return shorter(b, a); });
  std::sort(heads.begin(), heads.end(), shorter);
  std::sort(tails.begin(), tails.end(), shorter);

  // Takes whole chunks for `missing` bytes, the largest first; then breaks one if that helps; the rest must
  // be new. Blocked chunks, which the stitch's beginning shows already, are marked by the stamp.
  struct Filling {
    std::size_t whole_bytes = 0;
    std::uint32_t broken = kNone;
    std::size_t broken_count = 0;
    std::size_t grown_bytes = 0;
  };
  const auto fill = [&](std::size_t missing, std::vector<std::uint32_t>* chosen) {
    Filling filling;
    std::size_t left = missing;
    std::uint32_t larger = kNone;
    for (const Piece& whole : wholes) {
      if (left == 0) break;
      if (chunks_[whole.chunk].stamp == stamp_) continue;
      if (whole.bytes() <= left || whole.bytes() == granule) {
        left -= std::min(left, whole.bytes());
        filling.whole_bytes += whole.bytes();
        if (chosen != nullptr) chosen->push_back(whole.chunk);
      } else {
        larger = whole.chunk;  // The smallest that is too large, in the end.
      }
    }
    if (left > 0 && larger != kNone && breakable(larger)) {
      filling.broken = larger;
      filling.broken_count = ceil_div(left, granule);
      left = 0;
    }
    filling.grown_bytes = round_up(left, granule);
    return filling;
  };
  // What it costs to use `used` bytes of the end or the beginning of a chunk that is shared.
  const auto share = [&](std::size_t used) {
    return kSharingWeight * static_cast<double>(granule) - static_cast<double>(used);
  };

  stitch->cost = -1;
  bool found = false;
  const auto consider = [&](Range* run, std::size_t run_bytes, const Piece* head, const Piece* tail) {
    std::size_t have = run_bytes + (head != nullptr ? head->bytes() : 0);
    if (have >= bytes) return;  // A search among mapped addresses has found that already.
    std::size_t tail_bytes = tail != nullptr ? tail->bytes() : 0;
    const std::size_t missing = bytes > have + tail_bytes ? bytes - have - tail_bytes : 0;
    const Filling filling = fill(missing, nullptr);
    if (filling.grown_bytes > room_bytes) return;
    const std::size_t filled = filling.whole_bytes + filling.broken_count * granule + filling.grown_bytes;
    const std::size_t over = have + filled + tail_bytes - bytes;
    double cost = kGrowthWeight * static_cast<double>(filling.grown_bytes);
    if (head != nullptr) cost += share(head->bytes());
    if (run != nullptr && run_bytes % granule != 0) cost += share(run_bytes % granule);
    if (tail != nullptr) {
      if (over >= tail_bytes) return;
      cost += share(tail_bytes - over);
    } else if (over > 0) {
      cost += static_cast<double>(over) + kSharingWeight * static_cast<double>(granule);
    }
    if (found && cost >= stitch->cost) return;
    found = true;
    stitch->cost = cost;
    stitch->run = run;
    stitch->run_bytes = run_bytes;
    stitch->head = head != nullptr ? *head : Piece();
    stitch->tail = tail != nullptr ? *tail : Piece();
  };
  const auto with_tails = [&](Range* run, std::size_t run_bytes, const Piece* head) {
    const std::size_t have = run_bytes + (head != nullptr ? head->bytes() : 0);
    if (have >= bytes) return;
    consider(run, run_bytes, head, nullptr);
    const auto usable_tail = [&](const Piece& tail) {
      return chunks_[tail.chunk].stamp != stamp_ && (head == nullptr || tail.chunk != head->chunk);
    };
    const auto try_from = [&](std::size_t wanted) {
      auto tail =
          std::lower_bound(tails.begin(), tails.end(), wanted,
                           [](const Piece& piece, std::size_t value) { return piece.bytes() < value; });
      for (std::size_t i = 0; i < kTailsMax && tail != tails.end(); ++i, ++tail) {
        if (usable_tail(*tail)) consider(run, run_bytes, head, &*tail);
      }
    };
    try_from(bytes - have);
    try_from((bytes - have) % granule);
    for (std::size_t i = 0; i < kTailsMax && i < tails.size(); ++i) {
      const Piece& tail = tails[tails.size() - 1 - i];
      if (usable_tail(tail)) consider(run, run_bytes, head, &tail);
    }
  };

  ++stamp_;
  if (placement.alignment <= kBlockGranule) {
    with_tails(nullptr, 0, nullptr);
    std::size_t head_count = 0;
    std::size_t last_bytes = 0;
    for (const Piece& head : heads) {
      if (head.bytes() == last_bytes || ++head_count > kHeadsMax) continue;
      last_bytes = head.bytes();
      with_tails(nullptr, 0, &head);
    }
  } else {
    with_tails(nullptr, 0, nullptr);
  }
  // Free ranges in front of unmapped addresses need no new mapping themselves.
  for (Range* hole = holes_; hole != nullptr; hole = hole->bin_next) {
    if (!usable(hole->previous, placement)) continue;
    ++stamp_;
    Range* first = hole->previous;
    while (usable(first->previous, placement)) first = first->previous;
    const std::size_t begin = align_up(first->offset, placement.alignment);
    if (begin >= hole->offset) continue;
    // The chunks that this extent shows may not be shown in it once more.
    for (std::size_t offset = first->offset; offset < hole->offset;) {
      const Mapping& here = mappings_[granules_.find(offset)->mapping];
      chunks_[here.chunk].stamp = stamp_;
      offset = here.offset + chunks_[here.chunk].bytes;
    }
    Stitch best = *stitch;
    const bool found_before = found;
    with_tails(hole, hole->offset - begin, nullptr);
    if (found && stitch->run == hole && hole->bytes < placement.bytes + 2 * largest_chunk_bytes_) {
      *stitch = best;  // Not enough addresses behind it.
      found = found_before;
    }
  }
  if (!found) return false;

  // Once more for the winner, with what it consists of.
  ++stamp_;
  std::size_t have = stitch->head.bytes() + stitch->run_bytes;
  if (stitch->run != nullptr) {
    for (std::size_t offset = stitch->run->offset - stitch->run_bytes; offset < stitch->run->offset;) {
      const Mapping& here = mappings_[granules_.find(offset)->mapping];
      chunks_[here.chunk].stamp = stamp_;
      offset = here.offset + chunks_[here.chunk].bytes;
    }
  }
  const std::size_t tail_bytes = stitch->tail.bytes();
  const std::size_t missing = bytes > have + tail_bytes ? bytes - have - tail_bytes : 0;
  stitch->whole.clear();
  const Filling filling = fill(missing, &stitch->whole);
  // In the order in which most of them lie elsewhere: neighbours change hands in one piece.
  std::sort(stitch->whole.begin(), stitch->whole.end());
  stitch->broken = filling.broken;
  stitch->grown_bytes = filling.grown_bytes;
  have += filling.whole_bytes + filling.broken_count * granule + filling.grown_bytes;
  if (stitch->tail.chunk != kNone) stitch->tail.end = bytes - have;
  return true;
}

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

}  // namespace forebay::internal
