// Blocks, streams and accounts of the arena: the code that maps and unmaps nothing. A request that finds no
// free range continues in arena/miss.cc.
#include "forebay/arena.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "allocator/arena/chunked_arena.h"

namespace forebay {
namespace internal {
namespace {

// Descriptors made at a time. Larger: the request that makes them takes longer. Smaller: more requests do.
constexpr std::size_t kSlabCount = 1024;
// Cells of the first table of ranges, half as many ranges. A larger one is made under the lock.
constexpr std::size_t kFirstCellCount = std::size_t{1} << 17;
// With several streams, events are recorded and queried after this many frees, or at a miss. Smaller: more
// calls. Larger: free neighbours stay apart longer, and fit worse.
constexpr unsigned kUnsettledFreesMax = 128;
constexpr std::size_t kReserveBytesMax = std::size_t{16} << 40;
constexpr std::size_t kReserveFactor = 16;
// The transient region grows by a 512th of the limit, but by no more than this: large enough that a cold
// start of tens of gigabytes makes hundreds of driver calls, small enough to be nothing beside them.
constexpr std::size_t kGrowthBytesMax = 32_MiB;
constexpr std::size_t kGrowthFraction = 512;

// Rests of chunks are used up first if they are this part of the memory held. Larger: more driver calls.
constexpr std::size_t kRestFraction = 64;
// And only after so many requests in a row that no earlier step had. Smaller: a step that repeats most of an
// earlier one makes driver calls.
constexpr std::uint64_t kSearchedMin = kShortestSearches ? 0 : 32;
// They are counted again when free ranges have changed so often: where they were more than half as many, and
// elsewhere. Smaller: slower. Larger: blocks use up rests later.
constexpr std::uint64_t kManyRestsChanges = kShortestSearches ? 1 : 16;
constexpr std::uint64_t kFewRestsChanges = kShortestSearches ? 1 : 256;

// A range that a large block would leave partly empty.
constexpr std::size_t kLargeBytes = 1_MiB;
bool poor_fit(const Range* range, std::size_t bytes) {
  return bytes >= kLargeBytes && range->bytes - bytes > bytes / 8;
}

std::size_t growth_bytes(const ArenaOptions& options) {
  if (options.growth_bytes != 0) return round_up(options.growth_bytes, options.chunk_bytes);
  const std::size_t part = options.limit_bytes / kGrowthFraction / options.chunk_bytes * options.chunk_bytes;
  return std::max(options.chunk_bytes, std::min(part, kGrowthBytesMax));
}

}  // namespace

// --- construction ------------------------------------------------

ChunkedArena::ChunkedArena(Backend& backend, DevicePtr base, const ArenaOptions& options)
    : backend_(backend),
      base_(base),
      reserve_bytes_(options.reserve_bytes),
      limit_bytes_(options.limit_bytes),
      chunk_bytes_(options.chunk_bytes),
      growth_bytes_(growth_bytes(options)),
      exact_growth_(growth_bytes_ == chunk_bytes_),
      handle_bytes_limit_(
          options.largest_chunk_bytes == 0 ? SIZE_MAX : round_up(options.largest_chunk_bytes, chunk_bytes_)),
      transient_offset_(reserve_bytes_ / 4 / chunk_bytes_ * chunk_bytes_),
      history_limit_(options.history_count),
      granules_(chunk_bytes_) {
  std::snprintf(tags_[0].name, sizeof tags_[0].name, "untagged");
}

bool ChunkedArena::start() {
  bins_.reset(static_cast<SizeBins*>(std::calloc(kRegionCount * kClassCount, sizeof(SizeBins))));
  if (bins_ == nullptr || !granules_.start(reserve_bytes_) || !steps_.start()) return false;
  if (history_limit_ != 0) {
    auto* events = static_cast<SnapshotEvent*>(std::calloc(history_limit_, sizeof(SnapshotEvent)));
    if (events == nullptr) return false;
    history_.reset(events);
  }
  Lock lock(mutex_);
  if (!reserve_ranges(lock)) return false;
  first_ = pool_.take();
  first_->bytes = reserve_bytes_;
  ranges_.insert(first_);
  insert_hole(first_, nullptr);
  return true;
}

ChunkedArena::~ChunkedArena() {
  // Releasing cannot fail: memory that the Backend refuses to take back is leaked.
  for (unsigned i = 0; i < stream_count_; ++i) {
    if (streams_[i].event != Event()) (void)backend_.event_destroy(streams_[i].event);
  }
  for (Range* range = first_; range != nullptr;) {
    const auto mapped = [](const Range* r) {
      if (r->kind == RangeKind::kAlias) return r->slot != Slot().index;
      return r->kind != RangeKind::kUnmapped && r->kind != RangeKind::kPaused;
    };
    if (!mapped(range)) {
      range = range->next;
      continue;
    }
    const std::size_t begin = range->offset;
    std::size_t end = begin;
    for (; range != nullptr && mapped(range); range = range->next) end = range->end();
    (void)backend_.unmap(base_ + begin, end - begin);
  }
  for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].held && !chunks_[i].paused) (void)backend_.chunk_destroy(chunks_[i].handle);
  }
  for (unsigned i = kSharedRegionCount; i < kRegionCount; ++i) {
    // A resume that failed may have mapped some chunks.
    if (private_regions_[i].use != PrivateRegion::Use::kPaused) continue;
    for (const std::uint32_t chunk : private_regions_[i].chunks) {
      for (std::uint32_t j = chunks_[chunk].first_mapping; j != kNone; j = mappings_[j].next) {
        if (mappings_[j].made) (void)backend_.unmap(base_ + mappings_[j].offset, chunks_[chunk].bytes);
      }
    }
  }
  for (unsigned i = 0; i < kRegionCount; ++i) drop_copy(static_cast<std::uint8_t>(i));
  (void)backend_.release(base_, reserve_bytes_);
}

// --- books -------------------------------------------------------

// Makes `count` descriptors available. Releases mutex_ meanwhile, so it comes before any look-up.
bool ChunkedArena::make_ranges(Lock& lock, std::size_t count) {
  while (pool_.available() < count) {
    const std::size_t slab_count = std::max(kSlabCount, count - pool_.available());
    const std::size_t range_count = pool_.capacity() + slab_count;
    std::size_t cell_count = std::max(ranges_.capacity(), kFirstCellCount);
    while (cell_count < 2 * range_count) cell_count *= 4;
    const bool needs_cells = cell_count > ranges_.capacity();
    lock.unlock();
    RangePool::Slab* slab = RangePool::make_slab(slab_count);
    Range** cells = needs_cells ? RangeTable::make_cells(cell_count) : nullptr;
    lock.lock();
    const bool made = slab != nullptr && (cells != nullptr || !needs_cells);
    // If two threads come here, the later one's cells may be too few by now.
    if (made && cells != nullptr && cell_count > ranges_.capacity()) cells = ranges_.adopt(cells, cell_count);
    if (made && ranges_.capacity() >= 2 * (pool_.capacity() + slab_count)) {
      pool_.add(slab);
      slab = nullptr;
    }
    if (slab != nullptr || cells != nullptr) {
      lock.unlock();
      std::free(slab);
      std::free(cells);
      lock.lock();
    }
    if (!made) return false;
  }
  return true;
}

Range* ChunkedArena::find_block(DevicePtr block) const {
  const auto offset = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(block) -
                                               reinterpret_cast<std::uintptr_t>(base_));
  if (offset >= reserve_bytes_) return nullptr;
  Range* range = ranges_.find(offset);
  return range != nullptr && is_block(range) ? range : nullptr;
}

SizeBins& ChunkedArena::bins_of(std::uint8_t region, std::uint64_t waits) const {
  unsigned index = kMixedClass;
  if (waits == 0) {
    index = kReadyClass;
  } else if ((waits & (waits - 1)) == 0) {
    index = static_cast<unsigned>(std::countr_zero(waits));
  }
  return bins_[region * kClassCount + index];
}

// Cuts `range`, which is in no bin, at `offset`. Both parts are alike in everything else; the smaller one
// gets the new descriptor.
ChunkedArena::Halves ChunkedArena::split(Range* range, std::size_t offset) {
  FOREBAY_ASSERT(offset > range->offset && offset < range->end(), "empty part at %zu", offset);
  Range* added = pool_.take();
  added->waits = range->waits;
  added->epoch = range->epoch;
  added->kind = range->kind;
  added->region = range->region;
  const bool add_upper = range->end() - offset <= offset - range->offset;
  const std::size_t end = range->end();
  if (add_upper) {
    added->offset = offset;
    added->bytes = end - offset;
    range->bytes = offset - range->offset;
    added->previous = range;
    added->next = range->next;
    if (added->next != nullptr) added->next->previous = added;
    range->next = added;
    ranges_.insert(added);
  } else {
    added->offset = range->offset;
    added->bytes = offset - range->offset;
    ranges_.replace(range, added);
    range->offset = offset;
    range->bytes = end - offset;
    ranges_.insert(range);
    added->next = range;
    added->previous = range->previous;
    if (added->previous != nullptr) added->previous->next = added;
    if (first_ == range) first_ = added;
    range->previous = added;
  }
  if (added->kind != RangeKind::kUnmapped) {
    granules_.own(added);
  } else {
    insert_hole(added, add_upper ? range : range->bin_previous);
  }
  return add_upper ? Halves{range, added} : Halves{added, range};
}

// Joins two neighbours that are in no bin. The union waits for the streams of both; the smaller one's
// descriptor becomes available.
Range* ChunkedArena::absorb(Range* lower, Range* upper) {
  const bool keep_lower = lower->bytes >= upper->bytes;
  Range* kept = keep_lower ? lower : upper;
  Range* gone = keep_lower ? upper : lower;
  if (kept->kind != RangeKind::kUnmapped) {
    // The granules that begin in the smaller part change hands.
    granules_.own(kept, gone->offset, gone->end());
  } else {
    remove_hole(gone);
  }
  const bool alike = kept->waits == gone->waits;
  kept->waits |= gone->waits;
  kept->epoch = std::max(kept->epoch, gone->epoch);
  if (!alike) {
    // All streams of the union now need an event that covers the later epoch.
    for (std::uint64_t rest = kept->waits; rest != 0; rest &= rest - 1) {
      std::uint64_t& freed_epoch = streams_[std::countr_zero(rest)].freed_epoch;
      freed_epoch = std::max(freed_epoch, kept->epoch);
    }
  }
  ranges_.erase(upper);
  if (keep_lower) {
    kept->next = gone->next;
    if (kept->next != nullptr) kept->next->previous = kept;
  } else {
    ranges_.replace(gone, kept);
    kept->offset = gone->offset;
    kept->previous = gone->previous;
    if (kept->previous != nullptr) kept->previous->next = kept;
    if (first_ == gone) first_ = kept;
  }
  kept->bytes += gone->bytes;
  pool_.give(gone);
  return kept;
}

void ChunkedArena::push_pending(Range* range) {
  range->pending_previous = nullptr;
  range->pending_next = pending_;
  if (pending_ != nullptr) pending_->pending_previous = range;
  pending_ = range;
}

void ChunkedArena::remove_pending(Range* range) {
  if (range->pending_next != nullptr) range->pending_next->pending_previous = range->pending_previous;
  if (range->pending_previous != nullptr) {
    range->pending_previous->pending_next = range->pending_next;
  } else {
    pending_ = range->pending_next;
  }
}

void ChunkedArena::take_free(Range* range) {
  bins_of(range->region, range->waits).remove(range);
  free_bytes_[range->region] -= range->bytes;
  --free_count_;
  ++free_changes_;
  if (range->waits != 0) remove_pending(range);
}

// Frees `range`, which is in no bin, together with the free neighbours that wait for the same streams.
void ChunkedArena::put_free(Range* range) {
  // With one stream, ranges that wait for it and ranges that wait for none serve the same requests.
  const bool one_taker = stream_count_ <= 1;
  const auto mergeable = [one_taker](const Range* one, const Range* neighbour) {
    return neighbour != nullptr && neighbour->kind == RangeKind::kFree && neighbour->region == one->region &&
           (one_taker || neighbour->waits == one->waits);
  };
  range->kind = RangeKind::kFree;
  range->recorded = 0;
  if (mergeable(range, range->next)) {
    take_free(range->next);
    range = absorb(range, range->next);
  }
  if (mergeable(range, range->previous)) {
    take_free(range->previous);
    range = absorb(range->previous, range);
  }
  // A range that waits for no stream must not pass an old epoch on when it is joined: no event would ever
  // cover it.
  if (range->waits == 0) range->epoch = 0;
  bins_of(range->region, range->waits).insert(range);
  free_bytes_[range->region] += range->bytes;
  ++free_count_;
  ++free_changes_;
  if (range->waits != 0) push_pending(range);
}

// Enters `range` into the list of holes, behind `before`, or as the first if that is null.
void ChunkedArena::insert_hole(Range* range, Range* before) {
  Range*& link = before == nullptr ? holes_ : before->bin_next;
  range->bin_previous = before;
  range->bin_next = link;
  (link == nullptr ? last_hole_ : link->bin_previous) = range;
  link = range;
}

// The nearest hole below `range`, which touches none. It is looked for among the holes, from the lowest on,
// and among the ranges on both sides at once: the way is short if there are few holes, and if there are many.
Range* ChunkedArena::hole_before(const Range* range) const {
  Range* hole = holes_;
  Range* below = range->previous;
  const Range* above = range->next;
  for (;;) {
    if (hole == nullptr || hole->offset > range->offset)
      return hole == nullptr ? last_hole_ : hole->bin_previous;
    if (below == nullptr) return nullptr;
    if (below->kind == RangeKind::kUnmapped) return below;
    if (above == nullptr) return last_hole_;
    if (above->kind == RangeKind::kUnmapped) return above->bin_previous;
    hole = hole->bin_next;
    below = below->previous;
    above = above->next;
  }
}

void ChunkedArena::remove_hole(Range* range) {
  (range->bin_next == nullptr ? last_hole_ : range->bin_next->bin_previous) = range->bin_previous;
  (range->bin_previous == nullptr ? holes_ : range->bin_previous->bin_next) = range->bin_next;
}

// Takes [begin, end) out of an unmapped range, as a busy one. Takes up to two descriptors.
Range* ChunkedArena::claim_hole(Range* hole, std::size_t begin, std::size_t end) {
  FOREBAY_ASSERT(hole->kind == RangeKind::kUnmapped, "range of kind %d", static_cast<int>(hole->kind));
  if (begin > hole->offset) hole = split(hole, begin).upper;
  if (end < hole->end()) hole = split(hole, end).lower;
  remove_hole(hole);
  hole->kind = RangeKind::kBusy;
  return hole;
}

void ChunkedArena::put_unmapped(Range* range) {
  granules_.clear(range->offset, range->end());
  range->kind = RangeKind::kUnmapped;
  range->slot = UINT32_MAX;
  range->waits = 0;
  range->epoch = 0;
  const auto is_hole = [](const Range* r) { return r != nullptr && r->kind == RangeKind::kUnmapped; };
  Range* before = nullptr;
  if (is_hole(range->next)) {
    before = range->next->bin_previous;
  } else if (is_hole(range->previous)) {
    before = range->previous;
  } else {
    before = hole_before(range);
  }
  insert_hole(range, before);
  if (is_hole(range->next)) range = absorb(range, range->next);
  if (is_hole(range->previous)) absorb(range->previous, range);
}

// A free range of this region that waits for no stream but the request's.
bool ChunkedArena::usable_here(const Range* range, const Placement& placement, std::uint8_t region) const {
  return range != nullptr && range->kind == RangeKind::kFree && range->region == region &&
         (range->waits & ~placement.mine) == 0;
}

// The same, in any region that shares chunks with the request's.
bool ChunkedArena::usable(const Range* range, const Placement& placement) const {
  if (range == nullptr || range->kind != RangeKind::kFree || (range->waits & ~placement.mine) != 0)
    return false;
  return range->region == placement.region ||
         (range->region < kSharedRegionCount && placement.region < kSharedRegionCount);
}

Range* ChunkedArena::find_free(const Placement& placement, std::uint8_t region,
                               std::size_t scan_count_max) const {
  Range* ready = bins_of(region, 0).find(placement.bytes, placement.alignment, scan_count_max);
  if (placement.mine == 0) return ready;
  Range* own = bins_of(region, placement.mine).find(placement.bytes, placement.alignment, scan_count_max);
  if (own == nullptr) return ready;
  if (ready == nullptr) return own;
  // On a tie the stream's own range is better: no other stream can use it yet.
  return ready->bytes < own->bytes ? ready : own;
}

// Neighbours that wait for different streams are not merged when they are freed, since the union would serve
// fewer requests. Here the request is known: the first run of ranges that it may use and that is large enough
// becomes one range, in no bin. Null if none of the largest ranges begins one.
Range* ChunkedArena::find_run(const Placement& placement, std::uint8_t region) {
  // With one stream, put_free joins all neighbours.
  if (stream_count_ <= 1) return nullptr;
  std::size_t begin = SIZE_MAX;
  std::size_t end = 0;
  for_each_usable(placement, region, kMissScanMax, [&](const Range* first) {
    if (first->offset >= begin || usable_here(first->previous, placement, region)) return;
    const Range* last = first;
    while (usable_here(last->next, placement, region)) last = last->next;
    if (!block_fits(first->offset, last->end(), placement.bytes, placement.alignment)) return;
    begin = first->offset;
    end = last->end();
  });
  return begin == SIZE_MAX ? nullptr : isolate(begin, end);
}

// A range in no bin that holds the block at `offset`, where the same point of an earlier step had it. Null if
// its memory is not free. `*missing_count`, if set: null only because this many descriptors are needed.
Range* ChunkedArena::recall(const Placement& placement, std::size_t offset, std::size_t* missing_count) {
  if (offset == StepMemory::kUnknown || (offset & (placement.alignment - 1)) != 0) return nullptr;
  Range* range = ranges_.find(offset);
  if (range != nullptr && range->bytes >= placement.bytes &&
      usable_here(range, placement, placement.region)) {
    take_free(range);
    return range;
  }
  // Other addresses may own its memory.
  std::size_t run_count = 0;
  if (offset + placement.bytes > reserve_bytes_) return nullptr;
  if (!shows_free(offset, offset + placement.bytes, placement, &run_count)) return nullptr;
  const std::size_t needed_count = 2 * run_count + kSplitsMax;
  if (pool_.available() < needed_count) {
    *missing_count = needed_count;
    return nullptr;
  }
  return own_here(offset, offset + placement.bytes, placement, run_count);
}

// Cuts a block from `range`, which is in no bin and large enough; the rest becomes free.
DevicePtr ChunkedArena::make_block(Range* range, std::size_t start, const Placement& placement,
                                   std::uint64_t key) {
  // The parts cut off keep the region of the range.
  range->kind = RangeKind::kBusy;
  if (start > range->offset) {
    const auto [rest, kept] = split(range, start);
    put_free(rest);
    range = kept;
  }
  if (range->bytes > placement.bytes) {
    const auto [kept, rest] = split(range, start + placement.bytes);
    put_free(rest);
    range = kept;
  }
  range->kind = RangeKind::kLive;
  range->region = placement.region;
  range->tag = placement.tag;
  range->stream = static_cast<std::uint8_t>(placement.stream);
  range->slack = placement.bytes - placement.asked_bytes;
  range->recorded = 0;
  range->stranger = placement.stranger ? strangers_.enter() : 0;
  if (!placement.fixed) {
    if (noted_ != nullptr) [[unlikely]]
      note_placement(placement, start);
    steps_.set_key(key);
    steps_.store(placement.bytes, start);
  }
  charge(placement.tag, placement.stream, placement.bytes, placement.asked_bytes);
  ++total_.allocation_count;
  ++tags_[placement.tag].account.allocation_count;
  if (placement.stream != kNoStream) ++streams_[placement.stream].account.allocation_count;
  if (history_limit_ != 0) {
    note(SnapshotAction::kAlloc, start, placement.bytes,
         placement.stream == kNoStream ? Stream() : streams_[placement.stream].stream);
  }
  return base_ + start;
}

bool ChunkedArena::within_tag_limit(Tag tag, std::size_t bytes) const {
  const TagState& state = tags_[tag];
  return state.limit_bytes == 0 || (state.account.live_bytes <= state.limit_bytes &&
                                    bytes <= state.limit_bytes - state.account.live_bytes);
}

void ChunkedArena::charge(Tag tag, unsigned stream, std::size_t bytes, std::size_t asked_bytes) {
  const auto charge_one = [&](ArenaStatistics& account) {
    account.live_bytes += bytes;
    account.peak_live_bytes = std::max(account.peak_live_bytes, account.live_bytes);
    account.requested_bytes += asked_bytes;
    account.peak_requested_bytes = std::max(account.peak_requested_bytes, account.requested_bytes);
  };
  charge_one(total_);
  charge_one(tags_[tag].account);
  if (stream != kNoStream) charge_one(streams_[stream].account);
}

void ChunkedArena::discharge(Tag tag, unsigned stream, std::size_t bytes, std::size_t asked_bytes) {
  const auto discharge_one = [&](ArenaStatistics& account) {
    account.live_bytes -= bytes;
    account.requested_bytes -= asked_bytes;
  };
  discharge_one(total_);
  discharge_one(tags_[tag].account);
  if (stream != kNoStream) discharge_one(streams_[stream].account);
  freed_bytes_ += bytes;

  if (lap_.lap != steps_.lap_count()) {
    previous_lap_ = lap_;
    lap_ = LiveBounds();
    lap_.lap = steps_.lap_count();
  }
  lap_.low_bytes = std::min(lap_.low_bytes, total_.live_bytes);
  lap_.high_bytes = std::max(lap_.high_bytes, total_.live_bytes + bytes);
  // The low point of the main loop, as far as known. A loop within a step reaches no high water or frees
  // little.
  const std::size_t high_bytes = high_water();
  const bool in_main_loop = lap_.lap > kRefineLaps && total_.live_bytes <= previous_lap_.low_bytes &&
                            previous_lap_.high_bytes >= high_bytes - high_bytes / kRefineAgain &&
                            total_.live_bytes <= high_bytes - high_bytes / kRefineSwing;
  if (total_.live_bytes != 0 && !in_main_loop) return;
  if (troughs_to_skip_ > 0) {
    --troughs_to_skip_;
  } else {
    refine_due_ = worth_refining();
  }
}

// Whether so much more is held than was ever live that placing a step anew pays. True once for each high
// water: a second time would not help. True also when nothing is live for the first time since a loop was
// refined: a program that starts again would fill the memory that the loop left in another order, and mix its
// placements with those of the loop's record. And true when a pass after a refining has ended that was as
// large as the ones before: it tells whether refining was better.
bool ChunkedArena::worth_refining() const {
  const std::size_t high_bytes = high_water();
  if (total_.live_bytes == 0 && capturing_count_ == 0) {
    if (refined_in_loop_) return true;
    if (earlier_ != nullptr && total_.reserved_bytes >= high_bytes - high_bytes / kRefineAgain) return true;
  }
  // A run that is placed as an earlier one was has nothing to gain.
  if (learned_ != nullptr && total_.reserved_bytes <= learned_->held_bytes &&
      high_bytes >= learned_->peak_live_bytes - learned_->peak_live_bytes / kRefineAgain) {
    return false;
  }
  return !exact_growth_ && capturing_count_ == 0 &&
         high_bytes > refined_bytes_ + refined_bytes_ / kRefineAgain &&
         total_.reserved_bytes - slot_slack_bytes_ >
             high_bytes + std::max(high_bytes / kRefineWorth, 2 * chunk_bytes_);
}

void ChunkedArena::add_reserved(std::size_t bytes) {
  total_.reserved_bytes += bytes;
  total_.peak_reserved_bytes = std::max(total_.peak_reserved_bytes, total_.reserved_bytes);
}

// --- streams -----------------------------------------------------

unsigned ChunkedArena::find_stream(Stream stream) const {
  if (stream == Stream()) return kNoStream;
  for (unsigned i = 0; i < stream_count_; ++i) {
    if (streams_[i].stream == stream && streams_[i].known) return i;
  }
  return kNoStream;
}

// Whether a thread or a capture needs the place of this stream, though no memory may refer to it.
bool ChunkedArena::is_in_use(unsigned index) const {
  return streams_[index].claimed || streams_[index].capture_region != 0 ||
         held_streams_[index].load(std::memory_order_acquire) != 0;
}

// The stream's index, made if there is none. kNoStream if blocks, free ranges or requests still refer to all
// kStreamLimit streams.
unsigned ChunkedArena::add_stream(Stream stream) {
  if (const unsigned index = find_stream(stream); index != kNoStream) return index;
  unsigned index = stream_count_;
  for (unsigned i = 0; i < stream_count_; ++i) {
    if (!streams_[i].known && !is_in_use(i)) index = i;
  }
  if (index == kStreamLimit) {
    std::uint64_t referred = 0;
    for (Range* range = first_; range != nullptr; range = range->next) {
      range->waits = range->kind == RangeKind::kLive ? unfinished(range->waits, range->epoch) : range->waits;
      referred |= range->waits | range->recorded;
      if (is_block(range) && range->stream < kStreamLimit) referred |= std::uint64_t{1} << range->stream;
    }
    for (unsigned i = 0; i < kStreamLimit; ++i) {
      if ((referred >> i & 1) == 0 && !is_in_use(i)) index = i;
    }
    if (index == kStreamLimit) return kNoStream;
  }
  if (index == stream_count_) ++stream_count_;
  StreamState& state = streams_[index];
  const Event event = state.event;  // An event belongs to no stream, so it is used again.
  state = StreamState();
  state.event = event;
  state.stream = stream;
  state.known = true;
  // The event was last recorded on the previous stream and says nothing about this one.
  state.recorded_epoch = state.completed_epoch = epoch_ - 1;
  return index;
}

std::uint64_t ChunkedArena::unfinished(std::uint64_t waits, std::uint64_t epoch) const {
  std::uint64_t left = 0;
  for (std::uint64_t rest = waits; rest != 0; rest &= rest - 1) {
    if (streams_[std::countr_zero(rest)].completed_epoch < epoch) left |= rest & -rest;
  }
  return left;
}

// Moves every pending range that waits for fewer streams now to its new class.
void ChunkedArena::finish_pending() {
  for (Range* range = pending_; range != nullptr;) {
    Range* next = range->pending_next;
    const std::uint64_t left = unfinished(range->waits, range->epoch);
    if (left != range->waits) {
      take_free(range);
      range->waits = left;
      // put_free joins neighbours that wait for the same streams, and `next` may be one of them, unless none
      // is left to wait for. So start again. Each restart has made one range wait for less, so this ends.
      put_free(range);
      if (left != 0) next = pending_;
    }
    range = next;
  }
}

// The part of a StreamState that settle works on without the lock.
struct ChunkedArena::EventState {
  Stream stream;
  Event event;
  std::uint64_t freed_epoch;
  std::uint64_t recorded_epoch;
  std::uint64_t completed_epoch;
};

// Finds out which events have completed and records those that are due. Called without a lock. Never waits
// for the device, except for room in a stream's queue while recording.
void ChunkedArena::settle() {
  EventState states[kStreamLimit];
  std::uint64_t ended_epoch = 0;
  const std::uint64_t claimed = claim_waiting_streams(states, &ended_epoch);
  if (claimed == 0) return;
  for (std::uint64_t rest = claimed; rest != 0; rest &= rest - 1) {
    advance(states[std::countr_zero(rest)], ended_epoch);
  }
  Lock lock(mutex_);
  bool any_completed = false;
  for (std::uint64_t rest = claimed; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<unsigned>(std::countr_zero(rest));
    StreamState& state = streams_[i];
    state.event = states[i].event;
    state.recorded_epoch = std::max(state.recorded_epoch, states[i].recorded_epoch);
    any_completed = any_completed || states[i].completed_epoch > state.completed_epoch;
    state.completed_epoch = std::max(state.completed_epoch, states[i].completed_epoch);
    state.claimed = false;
  }
  if (any_completed) finish_pending();
  settled_.notify_all();
}

// Claims the streams that memory waits for, and ends the epoch: events recorded from now on cover all its
// frees. Returns the streams' bits. Called without a lock.
std::uint64_t ChunkedArena::claim_waiting_streams(EventState* states, std::uint64_t* ended_epoch) {
  Lock lock(mutex_);
  if (pending_ == nullptr && !shadows_wait_) return 0;
  std::uint64_t claimed = 0;
  bool any_waits = false;
  for (unsigned i = 0; i < stream_count_; ++i) {
    StreamState& state = streams_[i];
    if (!state.known || state.freed_epoch <= state.completed_epoch) continue;
    any_waits = true;
    // An event recorded on a captured stream would become part of the graph.
    if (state.claimed || state.capture_region != 0) continue;
    state.claimed = true;
    claimed |= std::uint64_t{1} << i;
    states[i] = {state.stream, state.event, state.freed_epoch, state.recorded_epoch, state.completed_epoch};
  }
  shadows_wait_ = shadows_wait_ && any_waits;
  if (claimed == 0) return 0;
  *ended_epoch = epoch_++;
  unsettled_free_count_ = 0;
  return claimed;
}

// Queries the event of one claimed stream. If it has completed and does not cover all frees, records it again
// for the epoch that has ended. Called without a lock.
void ChunkedArena::advance(EventState& state, std::uint64_t ended_epoch) {
  if (state.recorded_epoch > state.completed_epoch) {
    Result<bool> reached = backend_.event_query(state.event);
    if (reached.ok()) {
      if (!reached.value()) return;
      state.completed_epoch = state.recorded_epoch;
      if (state.freed_epoch <= state.completed_epoch) return;
    } else if (reached.status().code() != StatusCode::kUnavailable) {
      return;  // The stream has failed; memory freed on it stays unused.
    }
    // A capture that began between the backend's check and the record took the event, and every query of it
    // fails until it is recorded again.
  }
  if (state.event == Event()) {
    Result<Event> event = backend_.event_create();
    if (!event.ok()) return;
    state.event = event.value();
  }
  if (!backend_.event_record(state.event, state.stream).ok()) {
    state.recorded_epoch = state.completed_epoch;  // A capture may have it, and a query would end that.
    return;
  }
  state.recorded_epoch = ended_epoch;
  Result<bool> reached = backend_.event_query(state.event);
  if (reached.ok() && reached.value()) state.completed_epoch = ended_epoch;
}

Status ChunkedArena::stream_retire(Stream stream) {
  Lock lock(mutex_);
  unsigned index = find_stream(stream);
  // A thread that is recording an event still uses the handle.
  settled_.wait(lock, [&] {
    index = find_stream(stream);
    return index == kNoStream || !streams_[index].claimed;
  });
  if (index == kNoStream) return Status();
  StreamState& state = streams_[index];
  state.known = false;
  state.account = ArenaStatistics();
  state.completed_epoch = UINT64_MAX;
  const std::uint64_t others = ~(std::uint64_t{1} << index);
  for (Range* range = first_; range != nullptr; range = range->next) {
    range->recorded &= others;
    if (range->kind != RangeKind::kFree) range->waits &= others;
    if (is_block(range) && range->stream == index) range->stream = kNoStream;
  }
  finish_pending();
  return Status();
}

// --- blocks ------------------------------------------------------

namespace {

bool well_formed(const AllocationRequest& request, std::size_t chunk_bytes) {
  // Not std::has_single_bit: without a machine's own instruction that is a call.
  const bool alignment = request.alignment != 0 && (request.alignment & (request.alignment - 1)) == 0 &&
                         request.alignment <= chunk_bytes;
  return alignment && (request.region == Region::kPersistent || request.region == Region::kTransient);
}

}  // namespace

// Sets region and stream. False if the tag is paused. mutex_ held.
inline bool ChunkedArena::choose_region(const AllocationRequest& request, Placement* placement) {
  placement->region = static_cast<std::uint8_t>(request.region);
  if (placement->bytes <= chunk_bytes_ / kSmallFraction) placement->region = kPersistentRegion;
  if (const std::uint8_t own = tags_[request.tag].region; own != 0) {
    if (private_regions_[own].use == PrivateRegion::Use::kPaused) return false;
    placement->region = own;
  }
  if (request.stream == Stream()) return true;
  placement->stream = add_stream(request.stream);
  if (placement->stream == kNoStream) return true;
  placement->mine = std::uint64_t{1} << placement->stream;
  const std::uint8_t captured = streams_[placement->stream].capture_region;
  if (captured != 0 && placement->region < kSharedRegionCount) placement->region = captured;
  return true;
}

// Whether the block leaves a rest that others could use, as one of whole chunks does not, nor one of less
// than a chunk. Not if it has a place of an earlier step.
bool ChunkedArena::leaves_rest(const Placement& placement) const {
  return placement.known == StepMemory::kUnknown && placement.region == kTransientRegion &&
         placement.bytes > chunk_bytes_ && placement.bytes % chunk_bytes_ != 0;
}

// Whether the rests of chunks were so many, when they were last counted, that a block should use one or two
// of them rather than break whole chunks: a 64th of the memory held, and as large a part of all free memory
// as such a block is expected to take from rests. (It begins in one and ends in another, which together hold
// its own rest and most often a chunk more: the weight of 3/4 was found by replaying made-up jobs.) mutex_
// held.
bool ChunkedArena::has_many_rests(const Placement& placement) const {
  const std::size_t used_bytes = (placement.bytes % chunk_bytes_ + chunk_bytes_) / 4 * 3;
  const double part = static_cast<double>(used_bytes) / static_cast<double>(placement.bytes);
  const double free_bytes = static_cast<double>(rests_.bytes + rests_.whole_bytes);
  return rests_.bytes >= total_.reserved_bytes / kRestFraction &&
         static_cast<double>(rests_.bytes) >= part * free_bytes;
}

// The same, or they have not been counted for long. mutex_ held.
bool ChunkedArena::may_use_rests(const Placement& placement) const {
  if (searched_count_ <= kSearchedMin) return false;
  const bool were_many = rests_.bytes >= total_.reserved_bytes / kRestFraction / 2;
  const std::uint64_t changes = free_changes_ - rests_.free_changes;
  if (changes < (were_many ? kManyRestsChanges : kFewRestsChanges)) return has_many_rests(placement);
  return free_bytes_[kPersistentRegion] + free_bytes_[kTransientRegion] >=
         total_.reserved_bytes / kRestFraction;
}

// The hot path, one function from top to bottom: a hit makes no other call than those of the books.
Result<DevicePtr> ChunkedArena::allocate(const AllocationRequest& request) {
  if (!well_formed(request, chunk_bytes_)) return malformed(request);
  Placement placement;
  placement.asked_bytes = request.bytes;
  placement.alignment = std::max(request.alignment, kBlockGranule);
  placement.tag = request.tag;
  placement.fixed = request.fixed;
  Lock lock(mutex_);
  if (request.tag >= tag_count_) return no_such_tag("allocate", request.tag);
  if (request.bytes > reserve_bytes_) {
    lock.unlock();
    return out_of_memory("allocate", request.bytes, request.tag, placement, Status());
  }
  const std::size_t unit = request.fixed ? chunk_bytes_ : kBlockGranule;
  placement.bytes = std::max(align_up(request.bytes, unit), unit);
  if (!reserve_ranges(lock)) return no_books();
  if (!within_tag_limit(request.tag, placement.bytes)) {
    lock.unlock();
    return over_tag_limit("allocate", placement.bytes, request.tag);
  }
  if (!choose_region(request, &placement)) return paused(placement.bytes, request.tag);
  StreamHold hold(held_streams_);
  if (placement.fixed) {
    hold.take(placement.stream);
    lock.unlock();
    return allocate_slowly(placement, 0);
  }
  // With nothing live a step begins.
  const bool same_stream = placement.stream == latest_stream_ || total_.live_bytes == 0;
  placement.kind = std::uint64_t{placement.region} << 1 | (same_stream ? 1 : 0);
  latest_stream_ = placement.stream;
  placement.known = steps_.find(placement.bytes, total_.live_bytes, placement.kind);
  const std::uint64_t key = steps_.key();
  ++searched_count_;
  if (strangers_.meet(placement.bytes)) [[unlikely]] {
    placement.stranger = leaves_rest(placement);
    placement.shares = placement.stranger && strangers_.stay();
  }
  for (bool settled = stream_count_ <= 1;;) {
    // May have become false while mutex_ was released. The slow path then says why.
    if (!may_serve(placement.region) || !within_tag_limit(placement.tag, placement.bytes)) break;
    std::size_t missing_count = 0;
    if (Range* range = recall(placement, placement.known, &missing_count)) {
      ++total_.recalled_count;
      searched_count_ = 0;
      return make_block(range, placement.known, placement, key);
    }
    if (missing_count != 0) {
      hold.take(placement.stream);
      if (reserve_ranges(lock, missing_count)) continue;
      return no_books();
    }
    if (learned_ != nullptr && placement.known != StepMemory::kUnknown &&
        learned_and_missing(placement.known, placement.known + placement.bytes)) {
      break;
    }
    if (placement.shares) break;
    Range* range = find_free(placement, placement.region, kBinScanMax);
    const bool fits_well = range != nullptr && !poor_fit(range, placement.bytes);
    const bool wanting = !fits_well || placement.known != StepMemory::kUnknown;
    if (wanting && !settled && unsettled_free_count_ > 0) {
      // A better range may wait for an event that has completed by now.
      settled = true;
      hold.take(placement.stream);
      lock.unlock();
      settle();
      lock.lock();
      if (reserve_ranges(lock)) continue;
      return no_books();
    }
    placement.uses_rests = !fits_well && leaves_rest(placement) && may_use_rests(placement);
    if (range == nullptr || placement.uses_rests) break;
    take_free(range);
    return make_block(range, align_up(range->offset, placement.alignment), placement, key);
  }
  hold.take(placement.stream);
  lock.unlock();
  return allocate_slowly(placement, key);
}

Status ChunkedArena::free(DevicePtr block, Stream stream) {
  Lock lock(mutex_);
  Range* range = find_block(block);
  if (range == nullptr) {
    lock.unlock();
    return bad_block(block, "free");
  }
  std::uint64_t mine = 0;
  if (stream != Stream()) {
    const unsigned index = add_stream(stream);
    if (index != kNoStream) {
      mine = std::uint64_t{1} << index;
    } else {
      // More streams than bits: wait here, so that no request has to wait later.
      lock.unlock();
      FOREBAY_RETURN_IF_ERROR(backend_.stream_synchronize(stream));
      lock.lock();
      range = find_block(block);
      if (range == nullptr) {
        lock.unlock();
        return bad_block(block, "free");
      }
    }
  }
  discharge(range->tag, range->stream, range->bytes, range->bytes - range->slack);
  strangers_.leave(range->stranger);
  if (history_limit_ != 0) note(SnapshotAction::kFreeCompleted, range->offset, range->bytes, stream);
  if (range->kind == RangeKind::kPaused) {
    // It has no memory while the tag is paused. After resume it is free.
    range->paused_kind = RangeKind::kFree;
    return Status();
  }
  range->waits = unfinished(range->waits, range->epoch) | range->recorded | mine;
  range->epoch = epoch_;
  for (std::uint64_t rest = range->waits; rest != 0; rest &= rest - 1) {
    streams_[std::countr_zero(rest)].freed_epoch = epoch_;
  }
  put_free(range);
  if (refine_due_) {
    lock.unlock();
    refine();
    return Status();
  }
  // Querying events now and then lets neighbours that waited for different streams be joined.
  if (++unsettled_free_count_ < kUnsettledFreesMax || stream_count_ <= 1) return Status();
  lock.unlock();
  settle();
  return Status();
}

Status ChunkedArena::record_stream(DevicePtr block, Stream stream) {
  Lock lock(mutex_);
  Range* range = find_block(block);
  if (range == nullptr) {
    lock.unlock();
    return bad_block(block, "record a stream for");
  }
  if (stream == Stream()) return Status();
  const unsigned index = add_stream(stream);
  if (index == kNoStream) {
    return Status(StatusCode::kUnavailable, "cannot record a stream: ", kStreamLimit,
                  " streams are in use; retire those that ended (stream_retire)");
  }
  range->recorded |= std::uint64_t{1} << index;
  return Status();
}

std::size_t ChunkedArena::block_bytes(DevicePtr block) const {
  Lock lock(mutex_);
  const Range* range = find_block(block);
  return range == nullptr ? 0 : range->bytes;
}

// --- accounts ----------------------------------------------------

Result<Tag> ChunkedArena::tag_create(const TagOptions& options) {
  const char* name = options.name == nullptr || *options.name == '\0' ? "unnamed" : options.name;
  Lock lock(mutex_);
  if (tag_count_ == kTagLimit) {
    return invalid_argument("cannot create tag '", name, "': ", kTagLimit, " tags exist; share one of them");
  }
  std::uint8_t region = 0;
  if (options.pausable) {
    region = take_private_region(PrivateRegion::Use::kPausable);
    if (region == 0) return no_private_region(std::string("create pausable tag '") + name + "'");
  }
  TagState& state = tags_[tag_count_];
  std::snprintf(state.name, sizeof state.name, "%s", name);
  state.limit_bytes = options.limit_bytes;
  state.region = region;
  return static_cast<Tag>(tag_count_++);
}

ArenaStatistics ChunkedArena::statistics() const {
  Lock lock(mutex_);
  ArenaStatistics statistics = total_;
  statistics.driver_call_count = driver_call_count_.load(std::memory_order_relaxed);
  return statistics;
}

ArenaStatistics ChunkedArena::statistics(Tag tag) const {
  Lock lock(mutex_);
  return tag < tag_count_ ? tags_[tag].account : ArenaStatistics();
}

ArenaStatistics ChunkedArena::statistics(Stream stream) const {
  Lock lock(mutex_);
  const unsigned index = find_stream(stream);
  return index == kNoStream ? ArenaStatistics() : streams_[index].account;
}

ArenaMappings ChunkedArena::mappings() const {
  Lock lock(mutex_);
  return {mapping_count_, mappings_max_, dropped_mapping_count_};
}

void ChunkedArena::set_mappings_max(std::size_t most) {
  Lock lock(mutex_);
  mappings_max_ = most;
}

void ChunkedArena::reset_peaks() {
  Lock lock(mutex_);
  const auto reset = [](ArenaStatistics& statistics) {
    statistics.peak_live_bytes = statistics.live_bytes;
    statistics.peak_reserved_bytes = statistics.reserved_bytes;
    statistics.peak_requested_bytes = statistics.requested_bytes;
  };
  high_water_bytes_ = std::max(high_water_bytes_, total_.peak_live_bytes);
  reset(total_);
  for (unsigned i = 0; i < tag_count_; ++i) reset(tags_[i].account);
  for (unsigned i = 0; i < stream_count_; ++i) reset(streams_[i].account);
}

}  // namespace internal

namespace {

std::size_t saturating_multiply(std::size_t a, std::size_t b) {
  return a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

}  // namespace

ArenaMappings mappings_of(const Arena& arena) {
  return static_cast<const internal::ChunkedArena&>(arena).mappings();
}

void limit_mappings(Arena& arena, std::size_t most) {
  static_cast<internal::ChunkedArena&>(arena).set_mappings_max(most);
}

Result<std::unique_ptr<Arena>> Arena::create(Backend& backend, const ArenaOptions& options) {
  const Capabilities& capabilities = backend.capabilities();
  const std::size_t chunk_bytes = options.chunk_bytes == 0 ? capabilities.granularity : options.chunk_bytes;
  if (!std::has_single_bit(chunk_bytes) || chunk_bytes % capabilities.granularity != 0 ||
      chunk_bytes < kBlockGranule) {
    return invalid_argument("cannot make an arena with chunks of ", format_bytes(chunk_bytes), ": ",
                            capabilities.name, " maps multiples of ", format_bytes(capabilities.granularity),
                            "; choose a power of two that is one");
  }
  const std::size_t limit_bytes = options.limit_bytes == 0 ? capabilities.memory_bytes : options.limit_bytes;
  if (limit_bytes < chunk_bytes) {
    return invalid_argument("cannot make an arena of at most ", format_bytes(limit_bytes), " on ",
                            capabilities.name, ": memory is taken in chunks of ", format_bytes(chunk_bytes),
                            "; raise limit_bytes");
  }
  internal::LearnedPlacements learned;
  if (!options.learned.empty()) {
    FOREBAY_ASSIGN_OR_RETURN(learned, internal::LearnedPlacements::decode(options.learned));
  }
  // Where addresses are scarce (a limit on virtual memory, a sanitizer) the default is halved, down to the
  // limit. A smaller range still holds all memory; only fragmentation needs more addresses.
  const bool chosen = options.reserve_bytes != 0;
  std::size_t reserve_bytes =
      chosen ? options.reserve_bytes
             : std::min(saturating_multiply(std::max(limit_bytes, saturating_multiply(chunk_bytes, 4)),
                                            internal::kReserveFactor),
                        internal::kReserveBytesMax);
  if (reserve_bytes > SIZE_MAX - chunk_bytes) {
    return invalid_argument("cannot reserve ", format_bytes(reserve_bytes),
                            ": that is all addresses there are; lower reserve_bytes");
  }
  reserve_bytes = round_up(reserve_bytes, chunk_bytes);
  Result<DevicePtr> base = backend.reserve(reserve_bytes, chunk_bytes);
  while (!base.ok() && !chosen &&
         reserve_bytes / 2 >= std::max(std::min(limit_bytes, internal::kReserveBytesMax / 256),
                                       saturating_multiply(chunk_bytes, 4))) {
    reserve_bytes = round_up(reserve_bytes / 2, chunk_bytes);
    base = backend.reserve(reserve_bytes, chunk_bytes);
  }
  if (!base.ok()) return base.status().with_context("cannot make an arena");
  ArenaOptions chosen_options = options;
  chosen_options.reserve_bytes = reserve_bytes;
  chosen_options.limit_bytes = limit_bytes / chunk_bytes * chunk_bytes;
  chosen_options.chunk_bytes = chunk_bytes;
  auto* arena = new (std::nothrow) internal::ChunkedArena(backend, base.value(), chosen_options);
  if (arena == nullptr) {
    (void)backend.release(base.value(), reserve_bytes);
    return Status(StatusCode::kOutOfMemory,
                  "cannot make an arena: the host has no memory left; free host memory");
  }
  std::unique_ptr<Arena> owner(arena);
  if (!arena->start()) {
    return Status(StatusCode::kOutOfMemory,
                  "cannot make an arena: the host has no memory left; free host memory");
  }
  if (!options.learned.empty()) {
    FOREBAY_RETURN_IF_ERROR(learned.move_to(chunk_bytes, reserve_bytes, arena->transient_offset()));
    arena->follow(std::move(learned));
  }
  return owner;
}

}  // namespace forebay
