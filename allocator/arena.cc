// The arena. How it works, what it costs and what it does not do yet: allocator/README.md.
//
// Locks. `growth_mutex_` comes before `mutex_`. `mutex_` protects the books and is never held across a
// Backend call or a malloc. `growth_mutex_` serializes those who change what is mapped, and is held across
// the address-space calls (chunk, map, unmap, access), which by the Backend's contract never wait for queued
// work; calls that may wait (events, streams) are made with no lock held at all.
#include "forebay/arena.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "forebay/units.h"
#include "range.h"
#include "size_bins.h"

namespace forebay {
namespace {

using internal::block_fits;
using internal::BlockTable;
using internal::Range;
using internal::RangeKind;
using internal::RangePool;
using internal::SizeBins;

// A bit of a 64-bit mask each. More streams than this still work: they are synchronized when they free.
constexpr unsigned kStreamLimit = 64;
// Free ranges by who may use them at once: stream i alone, everybody, or nobody (several streams still to
// wait for).
constexpr unsigned kReadyClass = kStreamLimit;
constexpr unsigned kMixedClass = kStreamLimit + 1;
constexpr unsigned kClassCount = kStreamLimit + 2;
constexpr unsigned kRegionCount = 2;

// Ranges looked at in one bin on the hot path. A bin spans 1/16 of its size, so stopping early costs little
// fit.
constexpr std::size_t kBinScanMax = 16;
constexpr std::size_t kNoScanLimit = SIZE_MAX;
constexpr std::size_t kFirstSlabCount = 1024;
// The most descriptors that one step under the lock takes: a block cut from the middle, or a carved hole.
constexpr std::size_t kSplitsMax = 4;
constexpr std::size_t kReserveBytesMax = std::size_t{16} << 40;
constexpr std::size_t kReserveFactor = 4;
constexpr unsigned kNoStream = kStreamLimit;

std::string describe(DevicePtr address) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", static_cast<void*>(address));
  return text;
}

// Which chunk is mapped at which chunk of the address range by the arena itself (aliases are kept by their
// slots). Two levels, so that a large reservation costs nothing until it is used.
class ChunkTable {
 public:
  explicit ChunkTable(std::size_t chunk_count) : leaves_(ceil_div(chunk_count, kLeafChunks)) {}

  Chunk get(std::size_t index) const noexcept {
    const auto& leaf = leaves_[index / kLeafChunks];
    return leaf == nullptr ? Chunk() : leaf[index % kLeafChunks];
  }
  // Null if the host has no memory for the leaf.
  Chunk* at(std::size_t index) noexcept {
    auto& leaf = leaves_[index / kLeafChunks];
    if (leaf == nullptr) leaf.reset(new (std::nothrow) Chunk[kLeafChunks]);
    return leaf == nullptr ? nullptr : &leaf[index % kLeafChunks];
  }

 private:
  static constexpr std::size_t kLeafChunks = 4096;
  std::vector<std::unique_ptr<Chunk[]>> leaves_;
};

// One stream the arena has seen. Frees are stamped with the arena's epoch; an event recorded after epoch e
// ended covers every free stamped e or less. One event per stream, recorded again only when it has completed.
struct StreamState {
  Stream stream;
  Event event;
  bool known = false;
  bool claimed = false;  // Somebody is recording or querying the event, without the lock.
  std::uint64_t freed_epoch = 0;
  std::uint64_t recorded_epoch = 0;
  std::uint64_t completed_epoch = 0;
};

struct TagState {
  char name[32] = {};
  std::size_t limit_bytes = 0;
  ArenaStatistics statistics;
};

struct SlotState {
  std::vector<Chunk> chunks;
  std::size_t live_bytes = 0;
  std::size_t alias_count = 0;
  Tag tag = 0;
  bool live = false;
};

// Where to map chunks so that a block fits: [begin, end), inside one unmapped range.
struct Site {
  Range* hole = nullptr;
  std::size_t begin = 0;
  std::size_t end = 0;
};

class ChunkedArena final : public Arena {
 public:
  ChunkedArena(Backend& backend, DevicePtr base, std::size_t reserve_bytes, std::size_t limit_bytes,
               std::size_t chunk_bytes)
      : backend_(backend),
        base_(base),
        reserve_bytes_(reserve_bytes),
        limit_bytes_(limit_bytes),
        chunk_bytes_(chunk_bytes),
        transient_offset_(reserve_bytes / 4 / chunk_bytes * chunk_bytes),
        chunks_(reserve_bytes / chunk_bytes) {
    std::snprintf(tags_[0].name, sizeof tags_[0].name, "untagged");
  }
  ~ChunkedArena() override;

  // Makes the first books. False if the host has no memory.
  bool start();

  Result<DevicePtr> allocate(const AllocationRequest& request) override;
  Status free(DevicePtr block, Stream stream) override;
  Status record_stream(DevicePtr block, Stream stream) override;
  Status stream_retire(Stream stream) override;
  std::size_t block_bytes(DevicePtr block) const override;

  Result<Slot> slot_create(std::size_t bytes, Tag tag) override;
  Status slot_destroy(Slot slot) override;
  Result<DevicePtr> alias_create(Slot slot, std::size_t bytes) override;
  Status alias_destroy(DevicePtr alias) override;

  Result<Tag> tag_create(const char* name, std::size_t limit_bytes) override;
  ArenaStatistics statistics() const override;
  ArenaStatistics statistics(Tag tag) const override;
  void reset_peaks() override;
  std::string report() const override;
  std::size_t trim() override;
  std::size_t chunk_bytes() const noexcept override { return chunk_bytes_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // --- books; mutex_ held ---
  bool reserve_ranges(Lock& lock);
  Range* find_block(DevicePtr block) const;
  SizeBins& bins_of(Region region, std::uint64_t waits) const;
  Range* split(Range* range, std::size_t offset);
  void absorb_next(Range* range);
  void put_free(Range* range);
  void take_free(Range* range);
  void put_unmapped(Range* range);
  void push_pending(Range* range);
  void remove_pending(Range* range);
  bool usable(const Range* range, Region region, std::uint64_t mine) const;
  Range* find_free(Region region, unsigned stream, std::size_t bytes, std::size_t alignment,
                   std::size_t scan_count_max) const;
  Range* find_run(Region region, std::uint64_t mine, std::size_t bytes, std::size_t alignment);
  Range* join(Range* first, Range* last);
  DevicePtr make_block(Range* range, std::size_t bytes, const AllocationRequest& request);
  bool within_tag_limit(Tag tag, std::size_t bytes) const;
  void charge(Tag tag, std::size_t bytes);
  void discharge(Tag tag, std::size_t bytes);
  void add_reserved(std::size_t bytes);
  unsigned find_stream(Stream stream) const;
  unsigned add_stream(Stream stream);
  std::uint64_t unfinished(std::uint64_t waits, std::uint64_t epoch) const;
  void finish_pending();

  // --- slow paths; no lock held on entry unless the name says so ---
  void settle();
  Result<DevicePtr> allocate_slowly(const AllocationRequest& request, std::size_t bytes);
  // The rest: growth_mutex_ held.
  bool choose_site(Region region, std::uint64_t mine, std::size_t bytes, std::size_t alignment,
                   Site* site) const;
  Status grow(Lock& lock, Region region, std::uint64_t mine, const AllocationRequest& request,
              std::size_t bytes, Range** grown);
  Status acquire_chunks(Lock& lock, std::size_t count, std::vector<Chunk>* chunks);
  Status steal_chunks(Lock& lock, std::size_t count_max, std::vector<Chunk>* chunks);
  Status unmap_range(Lock& lock, Range* range, std::vector<Chunk>* chunks);
  Status map_range(Range* range, const std::vector<Chunk>& chunks, std::size_t* mapped_count);
  void abandon_mapping(Lock& lock, Range* range, std::size_t mapped_count, std::vector<Chunk>* chunks);
  void recover_stranded(Lock& lock);
  std::size_t stealable_chunk_count() const;
  std::size_t whole_chunk_count(const Range* range) const;
  void keep_spare(std::vector<Chunk>* chunks);

  Status bad_block(DevicePtr block, const char* verb) const;
  Status out_of_memory(const char* what, std::size_t bytes, Tag tag, const Status& cause) const;
  Status over_tag_limit(const char* what, std::size_t bytes, Tag tag) const;
  Status no_such_tag(const char* what, Tag tag) const {
    return Status(StatusCode::kInvalidArgument, std::string("cannot ") + what + " for tag " +
                                                    std::to_string(tag) +
                                                    ": there is no such tag; make it with tag_create");
  }
  Status no_books() const {
    return Status(StatusCode::kOutOfMemory,
                  "cannot keep the arena's books: the host has no memory left; free host memory");
  }

  // Constant after construction.
  Backend& backend_;
  const DevicePtr base_;
  const std::size_t reserve_bytes_;
  const std::size_t limit_bytes_;
  const std::size_t chunk_bytes_;
  const std::size_t transient_offset_;  // Where the transient region begins to grow.

  // Has its own synchronization.
  std::atomic<std::uint64_t> driver_call_count_{0};

  mutable std::mutex growth_mutex_;
  // Guarded by growth_mutex_.
  ChunkTable chunks_;
  std::vector<Chunk> spare_;  // Held, mapped nowhere.
  std::vector<SlotState> slots_;

  mutable std::mutex mutex_;
  std::condition_variable settled_;  // With mutex_: a StreamState is no longer claimed.
  // Guarded by mutex_.
  RangePool pool_;
  BlockTable blocks_;
  struct FreeDeleter {
    void operator()(SizeBins* bins) const noexcept { std::free(bins); }
  };
  std::unique_ptr<SizeBins[], FreeDeleter> bins_;  // kRegionCount × kClassCount.
  Range* first_ = nullptr;                         // Lowest address.
  Range* pending_ = nullptr;
  std::size_t stranded_count_ = 0;
  std::size_t spare_bytes_ = 0;
  std::uint64_t epoch_ = 1;
  unsigned stream_count_ = 0;  // Entries of streams_ in use or used once.
  StreamState streams_[kStreamLimit];
  unsigned tag_count_ = 1;
  TagState tags_[kTagLimit];
  ArenaStatistics total_;
};

// --- construction ------------------------------------------------

bool ChunkedArena::start() {
  bins_.reset(static_cast<SizeBins*>(std::calloc(kRegionCount * kClassCount, sizeof(SizeBins))));
  if (bins_ == nullptr) return false;
  Lock lock(mutex_);
  if (!reserve_ranges(lock)) return false;
  first_ = pool_.take();
  first_->bytes = reserve_bytes_;
  return true;
}

ChunkedArena::~ChunkedArena() {
  // Release paths do not fail: what the Backend refuses here is leaked.
  for (unsigned i = 0; i < stream_count_; ++i) {
    if (streams_[i].event != Event()) (void)backend_.event_destroy(streams_[i].event);
  }
  for (Range* range = first_; range != nullptr;) {
    if (range->kind == RangeKind::kUnmapped) {
      range = range->next;
      continue;
    }
    const std::size_t begin = range->offset;
    std::size_t end = begin;
    for (; range != nullptr && range->kind != RangeKind::kUnmapped; range = range->next) end = range->end();
    (void)backend_.unmap(base_ + begin, end - begin);
    for (std::size_t offset = begin; offset < end; offset += chunk_bytes_) {
      const Chunk chunk = chunks_.get(offset / chunk_bytes_);
      if (chunk != Chunk()) (void)backend_.chunk_destroy(chunk);
    }
  }
  for (const Chunk chunk : spare_) (void)backend_.chunk_destroy(chunk);
  for (const SlotState& slot : slots_) {
    for (const Chunk chunk : slot.chunks) (void)backend_.chunk_destroy(chunk);
  }
  (void)backend_.release(base_, reserve_bytes_);
}

// --- books -------------------------------------------------------

// Makes sure that kSplitsMax descriptors are there. May let go of the lock, so it comes before any look-up.
bool ChunkedArena::reserve_ranges(Lock& lock) {
  while (pool_.available() < kSplitsMax) {
    const std::size_t slab_count = std::max(kFirstSlabCount, pool_.capacity());
    const std::size_t cell_count = std::bit_ceil(2 * (pool_.capacity() + slab_count));
    lock.unlock();
    RangePool::Slab* slab = RangePool::make_slab(slab_count);
    Range** cells = BlockTable::make_cells(cell_count);
    lock.lock();
    // Two threads may both have come here: the later one's cells can be too few by now.
    const bool made = slab != nullptr && cells != nullptr;
    if (made && cell_count >= 2 * (pool_.capacity() + slab_count)) {
      pool_.add(slab);
      slab = nullptr;
      cells = blocks_.adopt(cells, cell_count);
    }
    lock.unlock();
    std::free(slab);
    std::free(cells);
    lock.lock();
    if (!made) return false;
  }
  return true;
}

Range* ChunkedArena::find_block(DevicePtr block) const {
  const auto offset = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(block) -
                                               reinterpret_cast<std::uintptr_t>(base_));
  if (offset >= reserve_bytes_) return nullptr;
  Range* range = blocks_.find(offset);
  return range != nullptr && range->kind == RangeKind::kLive ? range : nullptr;
}

SizeBins& ChunkedArena::bins_of(Region region, std::uint64_t waits) const {
  unsigned index = kMixedClass;
  if (waits == 0) {
    index = kReadyClass;
  } else if (std::has_single_bit(waits)) {
    index = static_cast<unsigned>(std::countr_zero(waits));
  }
  return bins_[static_cast<unsigned>(region) * kClassCount + index];
}

// Cuts `range`, which is in no bin, at `offset`; returns the upper part, alike in everything else.
Range* ChunkedArena::split(Range* range, std::size_t offset) {
  FOREBAY_ASSERT(offset > range->offset, "empty lower part at %zu", offset);
  FOREBAY_ASSERT(offset < range->end(), "empty upper part at %zu", offset);
  Range* upper = pool_.take();
  upper->offset = offset;
  upper->bytes = range->end() - offset;
  upper->waits = range->waits;
  upper->epoch = range->epoch;
  upper->kind = range->kind;
  upper->region = range->region;
  upper->previous = range;
  upper->next = range->next;
  if (upper->next != nullptr) upper->next->previous = upper;
  range->next = upper;
  range->bytes -= upper->bytes;
  return upper;
}

// Joins the next range, which is in no bin, to `range`. The union waits for what either waited for.
void ChunkedArena::absorb_next(Range* range) {
  Range* next = range->next;
  range->bytes += next->bytes;
  range->waits |= next->waits;
  range->epoch = std::max(range->epoch, next->epoch);
  range->next = next->next;
  if (range->next != nullptr) range->next->previous = range;
  pool_.give(next);
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
  if (range->waits != 0) remove_pending(range);
}

// Frees `range`, which is in no bin, together with the free neighbours that wait for the same streams.
void ChunkedArena::put_free(Range* range) {
  const auto mergeable = [range](const Range* neighbour) {
    return neighbour != nullptr && neighbour->kind == RangeKind::kFree &&
           neighbour->region == range->region && neighbour->waits == range->waits;
  };
  if (mergeable(range->next)) {
    take_free(range->next);
    absorb_next(range);
  }
  if (mergeable(range->previous)) {
    Range* previous = range->previous;
    take_free(previous);
    absorb_next(previous);
    range = previous;
  }
  range->kind = RangeKind::kFree;
  range->recorded = 0;
  // What waits for nobody must not hand its old epoch to a range it is joined to: no event would ever cover
  // it.
  if (range->waits == 0) range->epoch = 0;
  bins_of(range->region, range->waits).insert(range);
  if (range->waits != 0) push_pending(range);
}

void ChunkedArena::put_unmapped(Range* range) {
  range->kind = RangeKind::kUnmapped;
  range->slot = UINT32_MAX;
  range->waits = 0;
  range->epoch = 0;
  if (range->next != nullptr && range->next->kind == RangeKind::kUnmapped) absorb_next(range);
  if (range->previous != nullptr && range->previous->kind == RangeKind::kUnmapped)
    absorb_next(range->previous);
}

// `mine`: the bit of the stream that asks, or 0 for the host.
bool ChunkedArena::usable(const Range* range, Region region, std::uint64_t mine) const {
  return range != nullptr && range->kind == RangeKind::kFree && range->region == region &&
         (range->waits & ~mine) == 0;
}

Range* ChunkedArena::find_free(Region region, unsigned stream, std::size_t bytes, std::size_t alignment,
                               std::size_t scan_count_max) const {
  Range* ready = bins_of(region, 0).find(bytes, alignment, scan_count_max);
  if (stream == kNoStream) return ready;
  Range* own = bins_of(region, std::uint64_t{1} << stream).find(bytes, alignment, scan_count_max);
  if (own == nullptr) return ready;
  if (ready == nullptr) return own;
  // On a tie the stream keeps to its own, which nobody else can use yet.
  return ready->bytes < own->bytes ? ready : own;
}

// Neighbours that wait for different sets of streams are not merged when they are freed, since the union
// would suit fewer takers. Here a taker is known: the first run of ranges that all suit it and together
// suffice becomes one.
Range* ChunkedArena::find_run(Region region, std::uint64_t mine, std::size_t bytes, std::size_t alignment) {
  for (Range* first = first_; first != nullptr; first = first->next) {
    if (!usable(first, region, mine)) continue;
    Range* last = first;
    while (usable(last->next, region, mine)) last = last->next;
    if (block_fits(first->offset, last->end(), bytes, alignment)) {
      for (Range* range = first;; range = range->next) {
        take_free(range);
        range->kind = RangeKind::kBusy;
        if (range == last) break;
      }
      return join(first, last);
    }
    first = last;
  }
  return nullptr;
}

Range* ChunkedArena::join(Range* first, Range* last) {
  const std::size_t end = last->end();
  while (first->end() < end) absorb_next(first);
  return first;
}

// Cuts a block from `range`, which is in no bin and large enough; the rest becomes free.
DevicePtr ChunkedArena::make_block(Range* range, std::size_t bytes, const AllocationRequest& request) {
  range->kind = RangeKind::kLive;
  const std::size_t start = round_up(range->offset, request.alignment);
  if (start > range->offset) {
    Range* front = range;
    range = split(front, start);
    put_free(front);
  }
  if (range->bytes > bytes) put_free(split(range, start + bytes));
  range->tag = request.tag;
  range->recorded = 0;
  blocks_.insert(range);
  charge(request.tag, bytes);
  ++total_.allocation_count;
  ++tags_[request.tag].statistics.allocation_count;
  return base_ + start;
}

bool ChunkedArena::within_tag_limit(Tag tag, std::size_t bytes) const {
  const TagState& state = tags_[tag];
  return state.limit_bytes == 0 || (state.statistics.live_bytes <= state.limit_bytes &&
                                    bytes <= state.limit_bytes - state.statistics.live_bytes);
}

void ChunkedArena::charge(Tag tag, std::size_t bytes) {
  for (ArenaStatistics* account : {&total_, &tags_[tag].statistics}) {
    account->live_bytes += bytes;
    account->peak_live_bytes = std::max(account->peak_live_bytes, account->live_bytes);
  }
}

void ChunkedArena::discharge(Tag tag, std::size_t bytes) {
  total_.live_bytes -= bytes;
  tags_[tag].statistics.live_bytes -= bytes;
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

// kNoStream if there are kStreamLimit streams that blocks or free ranges still refer to.
unsigned ChunkedArena::add_stream(Stream stream) {
  if (const unsigned index = find_stream(stream); index != kNoStream) return index;
  unsigned index = stream_count_;
  for (unsigned i = 0; i < stream_count_; ++i) {
    if (!streams_[i].known && !streams_[i].claimed) index = i;
  }
  if (index == kStreamLimit) {
    std::uint64_t referred = 0;
    for (Range* range = first_; range != nullptr; range = range->next) {
      range->waits = range->kind == RangeKind::kLive ? unfinished(range->waits, range->epoch) : range->waits;
      referred |= range->waits | range->recorded;
    }
    for (unsigned i = 0; i < kStreamLimit; ++i) {
      if ((referred >> i & 1) == 0 && !streams_[i].claimed) index = i;
    }
    if (index == kStreamLimit) return kNoStream;
  }
  if (index == stream_count_) ++stream_count_;
  StreamState& state = streams_[index];
  const Event event = state.event;  // An event belongs to no stream: the next one uses it on.
  state = StreamState();
  state.event = event;
  state.stream = stream;
  state.known = true;
  // The event's last record was for the stream before and has nothing to say about this one.
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

// Gives every pending range that no longer waits for all it waited for to its new class.
void ChunkedArena::finish_pending() {
  for (Range* range = pending_; range != nullptr;) {
    Range* next = range->pending_next;
    const std::uint64_t left = unfinished(range->waits, range->epoch);
    if (left != range->waits) {
      take_free(range);
      range->waits = left;
      // Merging takes neighbours that wait for the same streams. `next` may be one of them, unless nothing is
      // left to wait for; then start again. Each restart has made one range wait for less, so this ends.
      put_free(range);
      if (left != 0) next = pending_;
    }
    range = next;
  }
}

// Learns which events have completed and records those that are due. Never waits for the device, except for
// back-pressure while recording.
void ChunkedArena::settle() {
  struct Work {
    StreamState state;
    bool in_flight;
  };
  Work work[kStreamLimit];
  std::uint64_t claimed = 0;
  std::uint64_t snapshot = 0;
  {
    Lock lock(mutex_);
    if (pending_ == nullptr) return;
    for (unsigned i = 0; i < stream_count_; ++i) {
      StreamState& state = streams_[i];
      if (!state.known || state.claimed || state.freed_epoch <= state.completed_epoch) continue;
      state.claimed = true;
      claimed |= std::uint64_t{1} << i;
      work[i] = {state, state.recorded_epoch > state.completed_epoch};
    }
    if (claimed == 0) return;
    // Frees from here on belong to the next epoch: the events below need not cover them.
    snapshot = epoch_++;
  }
  for (std::uint64_t rest = claimed; rest != 0; rest &= rest - 1) {
    auto& [state, in_flight] = work[std::countr_zero(rest)];
    if (in_flight) {
      Result<bool> reached = backend_.event_query(state.event);
      // A failed query says that the stream failed; its memory stays with it.
      if (!reached.ok() || !reached.value()) continue;
      state.completed_epoch = state.recorded_epoch;
      if (state.freed_epoch <= state.completed_epoch) continue;
    }
    if (state.event == Event()) {
      Result<Event> event = backend_.event_create();
      if (!event.ok()) continue;
      state.event = event.value();
    }
    if (!backend_.event_record(state.event, state.stream).ok()) continue;
    state.recorded_epoch = snapshot;
    Result<bool> reached = backend_.event_query(state.event);
    if (reached.ok() && reached.value()) state.completed_epoch = snapshot;
  }
  Lock lock(mutex_);
  for (std::uint64_t rest = claimed; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<unsigned>(std::countr_zero(rest));
    StreamState& state = streams_[i];
    state.event = work[i].state.event;
    state.recorded_epoch = std::max(state.recorded_epoch, work[i].state.recorded_epoch);
    state.completed_epoch = std::max(state.completed_epoch, work[i].state.completed_epoch);
    state.claimed = false;
  }
  finish_pending();
  settled_.notify_all();
}

Status ChunkedArena::stream_retire(Stream stream) {
  Lock lock(mutex_);
  unsigned index = find_stream(stream);
  // A thread that records an event right now still uses the handle.
  settled_.wait(lock, [&] {
    index = find_stream(stream);
    return index == kNoStream || !streams_[index].claimed;
  });
  if (index == kNoStream) return Status();
  StreamState& state = streams_[index];
  state.known = false;
  state.completed_epoch = UINT64_MAX;
  const std::uint64_t others = ~(std::uint64_t{1} << index);
  for (Range* range = first_; range != nullptr; range = range->next) {
    range->recorded &= others;
    if (range->kind != RangeKind::kFree) range->waits &= others;
  }
  finish_pending();
  return Status();
}

// --- blocks ------------------------------------------------------

Result<DevicePtr> ChunkedArena::allocate(const AllocationRequest& request) {
  if (!std::has_single_bit(request.alignment) || request.alignment > chunk_bytes_) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot allocate with alignment " + std::to_string(request.alignment) +
                      ": it is not a power of two up to the chunk size " + std::to_string(chunk_bytes_) +
                      "; ask for less, or for larger chunks (ArenaOptions::chunk_bytes)");
  }
  AllocationRequest rounded = request;
  rounded.alignment = std::max(request.alignment, kBlockGranule);
  Lock lock(mutex_);
  if (request.tag >= tag_count_) {
    lock.unlock();
    return no_such_tag("allocate", request.tag);
  }
  if (request.bytes > reserve_bytes_) {
    lock.unlock();
    return out_of_memory("allocate", request.bytes, request.tag, Status());
  }
  const std::size_t bytes = std::max<std::size_t>(round_up(request.bytes, kBlockGranule), kBlockGranule);
  if (!reserve_ranges(lock)) {
    lock.unlock();
    return no_books();
  }
  if (!within_tag_limit(request.tag, bytes)) {
    lock.unlock();
    return over_tag_limit("allocate", bytes, request.tag);
  }
  if (Range* range =
          find_free(request.region, find_stream(request.stream), bytes, rounded.alignment, kBinScanMax)) {
    take_free(range);
    return make_block(range, bytes, rounded);
  }
  lock.unlock();
  return allocate_slowly(rounded, bytes);
}

Result<DevicePtr> ChunkedArena::allocate_slowly(const AllocationRequest& request, std::size_t bytes) {
  settle();
  const Region other = request.region == Region::kPersistent ? Region::kTransient : Region::kPersistent;
  Status cause;
  {
    std::lock_guard growth(growth_mutex_);
    Lock lock(mutex_);
    recover_stranded(lock);
    // The other region comes last: it costs packing, but no request fails while memory lies free there.
    for (const Region region : {request.region, other}) {
      if (!reserve_ranges(lock)) return no_books();
      const unsigned stream = find_stream(request.stream);
      const std::uint64_t mine = stream == kNoStream ? 0 : std::uint64_t{1} << stream;
      Range* range = find_free(region, stream, bytes, request.alignment, kNoScanLimit);
      if (range != nullptr) {
        take_free(range);
        range->kind = RangeKind::kBusy;
      } else {
        range = find_run(region, mine, bytes, request.alignment);
      }
      if (range == nullptr) {
        Status status = grow(lock, region, mine, request, bytes, &range);
        if (!status.ok() && status.code() != StatusCode::kOutOfMemory) {
          lock.unlock();
          return status.with_context("cannot allocate " + format_bytes(bytes));
        }
        if (!status.ok()) {
          if (!status.message().empty()) cause = std::move(status);
          continue;
        }
        // Growing let go of the lock, and others took descriptors.
        if (!reserve_ranges(lock)) {
          put_free(range);
          return no_books();
        }
      }
      // The lock may have been let go of, so another thread may have used up the tag's limit.
      if (!within_tag_limit(request.tag, bytes)) {
        put_free(range);
        lock.unlock();
        return over_tag_limit("allocate", bytes, request.tag);
      }
      return make_block(range, bytes, request);
    }
  }
  return out_of_memory("allocate", bytes, request.tag, cause);
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
      // More streams than there are bits: wait here, and nobody has to wait later.
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
  blocks_.erase(range);
  discharge(range->tag, range->bytes);
  range->waits = unfinished(range->waits, range->epoch) | range->recorded | mine;
  range->epoch = epoch_;
  for (std::uint64_t rest = range->waits; rest != 0; rest &= rest - 1) {
    streams_[std::countr_zero(rest)].freed_epoch = epoch_;
  }
  put_free(range);
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
    return Status(StatusCode::kUnavailable,
                  "cannot record a stream: " + std::to_string(kStreamLimit) +
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

// --- growth ------------------------------------------------------

// The place where the fewest chunks have to be mapped. Of equals: the request's own side of the address
// range, then the lowest address, so that persistent blocks alone leave no gap.
bool ChunkedArena::choose_site(Region region, std::uint64_t mine, std::size_t bytes, std::size_t alignment,
                               Site* site) const {
  std::size_t best_bytes = SIZE_MAX;
  bool best_foreign = true;
  const auto consider = [&](Range* hole, std::size_t begin, std::size_t end) {
    const bool foreign = (begin >= transient_offset_) != (region == Region::kTransient);
    if (end - begin > best_bytes || (end - begin == best_bytes && (foreign || !best_foreign))) return;
    best_bytes = end - begin;
    best_foreign = foreign;
    *site = {hole, begin, end};
  };
  for (Range* hole = first_; hole != nullptr; hole = hole->next) {
    if (hole->kind != RangeKind::kUnmapped) continue;
    std::size_t front = hole->offset;
    for (Range* range = hole->previous; usable(range, region, mine); range = range->previous)
      front = range->offset;
    std::size_t back = hole->end();
    for (Range* range = hole->next; usable(range, region, mine); range = range->next) back = range->end();

    const std::size_t end = round_up(front, alignment) + bytes;
    if (end <= hole->end()) {
      consider(hole, hole->offset, round_up(end, chunk_bytes_));
      if (front == hole->offset && front < transient_offset_ && transient_offset_ + bytes <= hole->end()) {
        consider(hole, transient_offset_, transient_offset_ + round_up(bytes, chunk_bytes_));
      }
    } else if (end <= back) {
      consider(hole, hole->offset, hole->end());
    }
    if (back > hole->end() && back >= bytes) {
      const std::size_t begin = (back - bytes) / chunk_bytes_ * chunk_bytes_;
      if (begin >= hole->offset && begin < hole->end()) consider(hole, begin, hole->end());
    }
  }
  return best_bytes != SIZE_MAX;
}

// Maps chunks so that `*grown`, in no bin, can hold the block. kOutOfMemory with an empty message: the limit
// or the address range is used up; with a message: the device is full.
Status ChunkedArena::grow(Lock& lock, Region region, std::uint64_t mine, const AllocationRequest& request,
                          std::size_t bytes, Range** grown) {
  Site site;
  if (!choose_site(region, mine, bytes, request.alignment, &site))
    return Status(StatusCode::kOutOfMemory, "");
  Range* target = site.hole;
  const bool from_start = site.begin == target->offset;
  const bool to_end = site.end == target->end();
  if (!from_start) target = split(target, site.begin);
  if (!to_end) split(target, site.end);
  target->kind = RangeKind::kBusy;
  // The neighbours the block will reach into are claimed too, so that nobody takes them meanwhile.
  const auto claim = [](Range* range) { range->kind = RangeKind::kBusy; };
  if (from_start) {
    for (Range* range = target->previous; usable(range, region, mine); range = range->previous) {
      take_free(range);
      claim(range);
    }
  }
  if (to_end) {
    for (Range* range = target->next; usable(range, region, mine); range = range->next) {
      take_free(range);
      claim(range);
    }
  }

  std::vector<Chunk> chunks;
  Status status = acquire_chunks(lock, target->bytes / chunk_bytes_, &chunks);
  std::size_t mapped_count = 0;
  if (status.ok()) {
    lock.unlock();
    status = map_range(target, chunks, &mapped_count);
    lock.lock();
  }

  const auto claimed = [](const Range* range) { return range != nullptr && range->kind == RangeKind::kBusy; };
  if (status.ok()) {
    target->region = region;
    target->waits = 0;
    Range* first = target;
    Range* last = target;
    while (claimed(first->previous)) first = first->previous;
    while (claimed(last->next)) last = last->next;
    *grown = join(first, last);
    return Status();
  }
  // Unclaimed neighbours may be merged away by the next line, claimed ones not.
  Range* lower = claimed(target->previous) ? target->previous : nullptr;
  Range* upper = claimed(target->next) ? target->next : nullptr;
  abandon_mapping(lock, target, mapped_count, &chunks);
  while (lower != nullptr) {
    Range* range = lower;
    lower = claimed(range->previous) ? range->previous : nullptr;
    put_free(range);
  }
  while (upper != nullptr) {
    Range* range = upper;
    upper = claimed(range->next) ? range->next : nullptr;
    put_free(range);
  }
  return status;
}

std::size_t ChunkedArena::whole_chunk_count(const Range* range) const {
  const std::size_t begin = round_up(range->offset, chunk_bytes_);
  const std::size_t end = range->end() / chunk_bytes_ * chunk_bytes_;
  return end > begin ? (end - begin) / chunk_bytes_ : 0;
}

std::size_t ChunkedArena::stealable_chunk_count() const {
  std::size_t count = 0;
  for (const Range* range = first_; range != nullptr; range = range->next) {
    if (range->kind == RangeKind::kFree && range->waits == 0) count += whole_chunk_count(range);
  }
  return count;
}

// mutex_ held on entry and exit, let go of in between. On failure `chunks` holds what was found.
Status ChunkedArena::acquire_chunks(Lock& lock, std::size_t count, std::vector<Chunk>* chunks) {
  std::size_t room_count = (limit_bytes_ - total_.reserved_bytes) / chunk_bytes_;
  // Counted first, so that a hopeless request does not take mapped memory apart.
  if (spare_.size() + room_count + stealable_chunk_count() < count)
    return Status(StatusCode::kOutOfMemory, "");
  Status device_full(StatusCode::kOutOfMemory, "");
  while (chunks->size() < count) {
    if (!spare_.empty()) {
      spare_bytes_ -= chunk_bytes_;
      lock.unlock();
      chunks->push_back(spare_.back());
      spare_.pop_back();
      lock.lock();
    } else if (room_count > 0) {
      lock.unlock();
      ++driver_call_count_;
      Result<Chunk> chunk = backend_.chunk_create(chunk_bytes_);
      const Status created = chunk.status();
      if (created.ok()) chunks->push_back(chunk.value());
      const bool full = created.code() == StatusCode::kOutOfMemory;
      if (full) device_full = created;
      lock.lock();
      if (created.ok()) {
        add_reserved(chunk_bytes_);
        --room_count;
      } else if (full) {
        room_count = 0;
      } else {
        return created;
      }
    } else {
      const std::size_t count_before = chunks->size();
      FOREBAY_RETURN_IF_ERROR(steal_chunks(lock, count - count_before, chunks));
      if (chunks->size() == count_before) return device_full;
    }
  }
  return Status();
}

// Unmaps up to `count_max` chunks from the far end of the free range that has the most whole ones and waits
// for nobody. Takes nothing if there is none.
Status ChunkedArena::steal_chunks(Lock& lock, std::size_t count_max, std::vector<Chunk>* chunks) {
  if (!reserve_ranges(lock)) return no_books();
  Range* victim = nullptr;
  std::size_t victim_count = 0;
  for (Range* range = first_; range != nullptr; range = range->next) {
    if (range->kind != RangeKind::kFree || range->waits != 0) continue;
    if (const std::size_t count = whole_chunk_count(range); count > victim_count) {
      victim = range;
      victim_count = count;
    }
  }
  if (victim == nullptr) return Status();
  take_free(victim);
  victim->kind = RangeKind::kBusy;
  const std::size_t end = victim->end() / chunk_bytes_ * chunk_bytes_;
  const std::size_t begin = end - std::min(victim_count, count_max) * chunk_bytes_;
  if (end < victim->end()) put_free(split(victim, end));
  if (begin > victim->offset) {
    Range* rest = victim;
    victim = split(rest, begin);
    put_free(rest);
  }
  Status status = unmap_range(lock, victim, chunks);
  if (!status.ok()) put_free(victim);
  return status;
}

// Unmaps a claimed range; its chunks, unless they are a slot's, are added to `chunks`. On failure it is
// unchanged.
Status ChunkedArena::unmap_range(Lock& lock, Range* range, std::vector<Chunk>* chunks) {
  lock.unlock();
  ++driver_call_count_;
  Status status = backend_.unmap(base_ + range->offset, range->bytes);
  if (status.ok()) {
    for (std::size_t offset = range->offset; offset < range->end(); offset += chunk_bytes_) {
      const std::size_t index = offset / chunk_bytes_;
      if (chunks_.get(index) == Chunk()) continue;
      chunks->push_back(chunks_.get(index));
      *chunks_.at(index) = Chunk();
    }
  }
  lock.lock();
  if (status.ok()) put_unmapped(range);
  return status;
}

// Maps `chunks` over the claimed range and makes it accessible. Called without mutex_. `*mapped_count` says
// how many are mapped if it fails.
Status ChunkedArena::map_range(Range* range, const std::vector<Chunk>& chunks, std::size_t* mapped_count) {
  const std::size_t begin = range->offset;
  const std::size_t count = range->bytes / chunk_bytes_;
  for (; *mapped_count < count; ++*mapped_count) {
    ++driver_call_count_;
    FOREBAY_RETURN_IF_ERROR(
        backend_.map(base_ + begin + *mapped_count * chunk_bytes_, chunks[*mapped_count]));
    if (range->slot != UINT32_MAX) continue;
    Chunk* entry = chunks_.at((begin + *mapped_count * chunk_bytes_) / chunk_bytes_);
    if (entry == nullptr) {
      ++*mapped_count;
      return no_books();
    }
    *entry = chunks[*mapped_count];
  }
  ++driver_call_count_;
  return backend_.set_access(base_ + begin, range->bytes);
}

// Undoes map_range. mutex_ held on entry and exit. What cannot be unmapped is stranded.
void ChunkedArena::abandon_mapping(Lock& lock, Range* range, std::size_t mapped_count,
                                   std::vector<Chunk>* chunks) {
  const bool own_chunks = range->slot == UINT32_MAX;
  range->slot = UINT32_MAX;
  if (mapped_count == 0) {
    put_unmapped(range);
  } else {
    const std::size_t mapped_end = range->offset + mapped_count * chunk_bytes_;
    if (mapped_end < range->end() && reserve_ranges(lock)) put_unmapped(split(range, mapped_end));
    lock.unlock();
    ++driver_call_count_;
    const bool unmapped = backend_.unmap(base_ + range->offset, mapped_count * chunk_bytes_).ok();
    if (own_chunks) {
      for (std::size_t i = 0; i < mapped_count; ++i) {
        Chunk* entry = chunks_.at(range->offset / chunk_bytes_ + i);
        if (unmapped && entry != nullptr) *entry = Chunk();
      }
      if (!unmapped)
        chunks->erase(chunks->begin(), chunks->begin() + static_cast<std::ptrdiff_t>(mapped_count));
    }
    lock.lock();
    if (unmapped) {
      put_unmapped(range);
    } else {
      range->kind = RangeKind::kStranded;
      ++stranded_count_;
    }
  }
  if (own_chunks) {
    spare_bytes_ += chunks->size() * chunk_bytes_;
    keep_spare(chunks);
  }
}

void ChunkedArena::keep_spare(std::vector<Chunk>* chunks) {
  spare_.insert(spare_.end(), chunks->begin(), chunks->end());
  chunks->clear();
}

void ChunkedArena::recover_stranded(Lock& lock) {
  if (stranded_count_ == 0) return;
  for (Range* range = first_; range != nullptr;) {
    if (range->kind != RangeKind::kStranded) {
      range = range->next;
      continue;
    }
    range->kind = RangeKind::kBusy;
    std::vector<Chunk> chunks;
    if (!unmap_range(lock, range, &chunks).ok()) {
      range->kind = RangeKind::kStranded;
      return;
    }
    --stranded_count_;
    spare_bytes_ += chunks.size() * chunk_bytes_;
    keep_spare(&chunks);
    range = first_;  // The unmapped range may have merged into its neighbour.
  }
}

std::size_t ChunkedArena::trim() {
  settle();
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  recover_stranded(lock);
  std::vector<Chunk> chunks;
  for (bool more = true; more;) {
    const std::size_t count_before = chunks.size();
    more = steal_chunks(lock, SIZE_MAX, &chunks).ok() && chunks.size() > count_before;
  }
  spare_bytes_ = 0;
  lock.unlock();
  keep_spare(&chunks);
  std::size_t given_count = 0;
  for (std::size_t i = spare_.size(); i-- > 0;) {
    ++driver_call_count_;
    if (!backend_.chunk_destroy(spare_[i]).ok()) break;
    spare_.pop_back();
    ++given_count;
  }
  lock.lock();
  spare_bytes_ = spare_.size() * chunk_bytes_;
  total_.reserved_bytes -= given_count * chunk_bytes_;
  return given_count * chunk_bytes_;
}

// --- slots and aliases -------------------------------------------

Result<Slot> ChunkedArena::slot_create(std::size_t bytes, Tag tag) {
  if (bytes == 0) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot create a slot of no bytes: it would have no chunk; ask for one");
  }
  settle();
  Status cause;
  {
    std::lock_guard growth(growth_mutex_);
    Lock lock(mutex_);
    if (tag >= tag_count_) {
      lock.unlock();
      return no_such_tag("create a slot", tag);
    }
    if (bytes > limit_bytes_) {
      cause = Status(StatusCode::kOutOfMemory, "");
    } else {
      const std::size_t live_bytes = round_up(bytes, kBlockGranule);
      std::vector<Chunk> chunks;
      recover_stranded(lock);
      if (within_tag_limit(tag, live_bytes)) {
        cause = acquire_chunks(lock, ceil_div(bytes, chunk_bytes_), &chunks);
      }
      // The lock was let go of in between: the tag is looked at again.
      const bool allowed = within_tag_limit(tag, live_bytes);
      if (!cause.ok() || !allowed) {
        spare_bytes_ += chunks.size() * chunk_bytes_;
        lock.unlock();
        keep_spare(&chunks);
      }
      if (!allowed) return over_tag_limit("create a slot of", live_bytes, tag);
      if (cause.ok()) {
        charge(tag, live_bytes);
        ArenaStatistics& account = tags_[tag].statistics;
        account.reserved_bytes += chunks.size() * chunk_bytes_;
        account.peak_reserved_bytes = std::max(account.peak_reserved_bytes, account.reserved_bytes);
        lock.unlock();
        slots_.push_back({std::move(chunks), live_bytes, 0, tag, true});
        return Slot{static_cast<std::uint32_t>(slots_.size() - 1)};
      }
    }
  }
  if (cause.code() == StatusCode::kOutOfMemory) return out_of_memory("create a slot of", bytes, tag, cause);
  return cause.with_context("cannot create a slot of " + format_bytes(bytes));
}

Status ChunkedArena::slot_destroy(Slot slot) {
  std::lock_guard growth(growth_mutex_);
  if (slot.index >= slots_.size() || !slots_[slot.index].live) {
    return Status(StatusCode::kInvalidArgument, "cannot destroy slot " + std::to_string(slot.index) +
                                                    ": there is no such slot; was it destroyed already?");
  }
  SlotState& state = slots_[slot.index];
  if (state.alias_count != 0) {
    return Status(StatusCode::kInvalidArgument, "cannot destroy slot " + std::to_string(slot.index) + ": " +
                                                    std::to_string(state.alias_count) +
                                                    " aliases show it; destroy them first");
  }
  const std::size_t slot_bytes = state.chunks.size() * chunk_bytes_;
  keep_spare(&state.chunks);
  state.live = false;
  Lock lock(mutex_);
  spare_bytes_ += slot_bytes;
  discharge(state.tag, state.live_bytes);
  tags_[state.tag].statistics.reserved_bytes -= slot_bytes;
  return Status();
}

Result<DevicePtr> ChunkedArena::alias_create(Slot slot, std::size_t bytes) {
  std::lock_guard growth(growth_mutex_);
  if (slot.index >= slots_.size() || !slots_[slot.index].live) {
    return Status(StatusCode::kInvalidArgument, "cannot create an alias of slot " +
                                                    std::to_string(slot.index) +
                                                    ": there is no such slot; make it with slot_create");
  }
  SlotState& state = slots_[slot.index];
  const std::size_t slot_bytes = state.chunks.size() * chunk_bytes_;
  if (bytes == 0 || bytes > slot_bytes) {
    return Status(StatusCode::kInvalidArgument, "cannot create an alias of " + format_bytes(bytes) +
                                                    ": the slot has " + format_bytes(slot_bytes) +
                                                    "; ask for one byte up to that");
  }
  const std::size_t alias_bytes = round_up(bytes, chunk_bytes_);
  Lock lock(mutex_);
  recover_stranded(lock);
  if (!reserve_ranges(lock)) return no_books();
  // Aliases come from the top of the address range, away from both growing ends.
  Range* target = nullptr;
  for (Range* range = first_; range != nullptr; range = range->next) {
    if (range->kind == RangeKind::kUnmapped && range->bytes >= alias_bytes) target = range;
  }
  if (target == nullptr) {
    return Status(StatusCode::kOutOfMemory, "cannot create an alias of " + format_bytes(alias_bytes) +
                                                ": no unmapped addresses of that size are left of " +
                                                format_bytes(reserve_bytes_) +
                                                "; reserve more (ArenaOptions::reserve_bytes)");
  }
  if (target->bytes > alias_bytes) target = split(target, target->end() - alias_bytes);
  target->kind = RangeKind::kBusy;
  target->slot = slot.index;
  lock.unlock();
  std::size_t mapped_count = 0;
  Status status = map_range(target, state.chunks, &mapped_count);
  lock.lock();
  if (!status.ok()) {
    abandon_mapping(lock, target, mapped_count, nullptr);
    return status.with_context("cannot create an alias of " + format_bytes(alias_bytes));
  }
  target->kind = RangeKind::kAlias;
  blocks_.insert(target);
  ++state.alias_count;
  return base_ + target->offset;
}

Status ChunkedArena::alias_destroy(DevicePtr alias) {
  std::lock_guard growth(growth_mutex_);
  Lock lock(mutex_);
  const auto offset = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(alias) -
                                               reinterpret_cast<std::uintptr_t>(base_));
  Range* range = offset < reserve_bytes_ ? blocks_.find(offset) : nullptr;
  if (range == nullptr || range->kind != RangeKind::kAlias) {
    lock.unlock();
    return Status(StatusCode::kInvalidArgument, "cannot destroy the alias at " + describe(alias) +
                                                    ": no alias begins there; was it destroyed already?");
  }
  const std::uint32_t slot = range->slot;
  blocks_.erase(range);
  range->kind = RangeKind::kBusy;
  std::vector<Chunk> none;
  Status status = unmap_range(lock, range, &none);
  if (!status.ok()) {
    range->kind = RangeKind::kAlias;
    blocks_.insert(range);
    return status.with_context("cannot destroy the alias at " + describe(alias));
  }
  --slots_[slot].alias_count;
  return Status();
}

// --- accounts and messages ---------------------------------------

Result<Tag> ChunkedArena::tag_create(const char* name, std::size_t limit_bytes) {
  Lock lock(mutex_);
  if (tag_count_ == kTagLimit) {
    lock.unlock();
    return Status(StatusCode::kInvalidArgument,
                  std::string("cannot create tag '") + (name == nullptr ? "" : name) +
                      "': " + std::to_string(kTagLimit) + " tags exist; share one of them");
  }
  TagState& state = tags_[tag_count_];
  std::snprintf(state.name, sizeof state.name, "%s", name == nullptr ? "" : name);
  state.limit_bytes = limit_bytes;
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
  return tag < tag_count_ ? tags_[tag].statistics : ArenaStatistics();
}

void ChunkedArena::reset_peaks() {
  Lock lock(mutex_);
  const auto reset = [](ArenaStatistics& statistics) {
    statistics.peak_live_bytes = statistics.live_bytes;
    statistics.peak_reserved_bytes = statistics.reserved_bytes;
  };
  reset(total_);
  for (unsigned i = 0; i < tag_count_; ++i) reset(tags_[i].statistics);
}

std::string ChunkedArena::report() const {
  ArenaStatistics total;
  TagState tags[kTagLimit];
  unsigned tag_count = 0;
  std::size_t free_bytes = 0;
  std::size_t largest_bytes = 0;
  std::size_t pending_bytes = 0;
  std::size_t stranded_bytes = 0;
  std::size_t spare_bytes = 0;
  {
    Lock lock(mutex_);
    total = total_;
    tag_count = tag_count_;
    std::copy(tags_, tags_ + tag_count_, tags);
    spare_bytes = spare_bytes_;
    for (const Range* range = first_; range != nullptr; range = range->next) {
      if (range->kind == RangeKind::kStranded) stranded_bytes += range->bytes;
      if (range->kind != RangeKind::kFree) continue;
      free_bytes += range->bytes;
      largest_bytes = std::max(largest_bytes, range->bytes);
      if (range->waits != 0) pending_bytes += range->bytes;
    }
  }
  std::string text = std::string("arena on ") + backend_.capabilities().name + ": limit " +
                     format_bytes(limit_bytes_) + ", reserved " + format_bytes(total.reserved_bytes) +
                     " (peak " + format_bytes(total.peak_reserved_bytes) + "), live " +
                     format_bytes(total.live_bytes) + " (peak " + format_bytes(total.peak_live_bytes) +
                     ")\n  free " + format_bytes(free_bytes + spare_bytes) + ": largest piece " +
                     format_bytes(largest_bytes) + ", " + format_bytes(pending_bytes) +
                     " waits for events, " + format_bytes(spare_bytes) + " not mapped, " +
                     format_bytes(stranded_bytes) + " lost to failed calls\n";
  char line[160];
  std::snprintf(line, sizeof line, "  %-31s %12s %12s %12s %12s %12s\n", "tag", "live", "peak", "limit",
                "in slots", "allocations");
  text += line;
  for (unsigned i = 0; i < tag_count; ++i) {
    const ArenaStatistics& statistics = tags[i].statistics;
    std::snprintf(line, sizeof line, "  %-31.31s %12s %12s %12s %12s %12" PRIu64 "\n", tags[i].name,
                  format_bytes(statistics.live_bytes).c_str(),
                  format_bytes(statistics.peak_live_bytes).c_str(),
                  tags[i].limit_bytes == 0 ? "-" : format_bytes(tags[i].limit_bytes).c_str(),
                  format_bytes(statistics.reserved_bytes).c_str(), statistics.allocation_count);
    text += line;
  }
  return text;
}

Status ChunkedArena::out_of_memory(const char* what, std::size_t bytes, Tag tag, const Status& cause) const {
  std::size_t free_bytes = 0;
  std::size_t largest_bytes = 0;
  std::size_t pending_bytes = 0;
  std::size_t untaken_bytes = 0;
  char name[sizeof TagState::name];
  {
    Lock lock(mutex_);
    std::memcpy(name, tags_[tag].name, sizeof name);
    free_bytes = spare_bytes_;
    untaken_bytes = limit_bytes_ - total_.reserved_bytes;
    for (const Range* range = first_; range != nullptr; range = range->next) {
      if (range->kind != RangeKind::kFree) continue;
      free_bytes += range->bytes;
      largest_bytes = std::max(largest_bytes, range->bytes);
      if (range->waits != 0) pending_bytes += range->bytes;
    }
  }
  std::string message = std::string("cannot ") + what + " " + format_bytes(bytes) + " for '" + name +
                        "': " + format_bytes(free_bytes) + " free, the largest piece " +
                        format_bytes(largest_bytes) + ", " + format_bytes(pending_bytes) +
                        " of it waits for events; " + format_bytes(untaken_bytes) + " of the limit of " +
                        format_bytes(limit_bytes_) + " not taken yet";
  if (!cause.message().empty()) message += ", but the device says: " + cause.message();
  message +=
      "; free blocks, synchronize the streams that use freed ones, or raise ArenaOptions::limit_bytes\n";
  return Status(StatusCode::kOutOfMemory, message + report());
}

Status ChunkedArena::over_tag_limit(const char* what, std::size_t bytes, Tag tag) const {
  TagState state;
  {
    Lock lock(mutex_);
    state = tags_[tag];
  }
  return Status(StatusCode::kOutOfMemory,
                std::string("cannot ") + what + " " + format_bytes(bytes) + " for '" + state.name +
                    "': its limit is " + format_bytes(state.limit_bytes) + ", of which " +
                    format_bytes(state.statistics.live_bytes) +
                    " is live; free some of it or raise the limit of the tag\n" + report());
}

Status ChunkedArena::bad_block(DevicePtr block, const char* verb) const {
  const char* found = "the arena does not own that address; free it where it was allocated";
  const auto offset = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(block) -
                                               reinterpret_cast<std::uintptr_t>(base_));
  if (offset < reserve_bytes_) {
    Lock lock(mutex_);
    const Range* range = first_;
    while (range->end() <= offset) range = range->next;
    if (range->kind == RangeKind::kAlias) {
      found = "it belongs to an alias of a slot; use alias_destroy";
    } else if (range->kind == RangeKind::kLive) {
      found = "it lies inside a live block; pass the address that allocate returned";
    } else {
      found = "no live block is there; was it freed already?";
    }
  }
  return Status(StatusCode::kInvalidArgument,
                std::string("cannot ") + verb + " " + describe(block) + ": " + found);
}

std::size_t saturating_multiply(std::size_t a, std::size_t b) {
  return a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

}  // namespace

Result<std::unique_ptr<Arena>> Arena::create(Backend& backend, const ArenaOptions& options) {
  const Capabilities& capabilities = backend.capabilities();
  const std::size_t chunk_bytes = options.chunk_bytes == 0 ? capabilities.granularity : options.chunk_bytes;
  if (!std::has_single_bit(chunk_bytes) || chunk_bytes % capabilities.granularity != 0 ||
      chunk_bytes < kBlockGranule) {
    return Status(StatusCode::kInvalidArgument,
                  "cannot make an arena with chunks of " + format_bytes(chunk_bytes) + ": " +
                      capabilities.name + " maps multiples of " + format_bytes(capabilities.granularity) +
                      "; choose a power of two that is one");
  }
  const std::size_t limit_bytes = options.limit_bytes == 0 ? capabilities.memory_bytes : options.limit_bytes;
  // A smaller address range than the default still holds everything until it fragments, so where addresses
  // are scarce (a limit on virtual memory, a sanitizer) the default halves, down to what the limit needs.
  const bool chosen = options.reserve_bytes != 0;
  std::size_t reserve_bytes =
      chosen ? options.reserve_bytes
             : std::min(saturating_multiply(std::max(limit_bytes, 4 * chunk_bytes), kReserveFactor),
                        kReserveBytesMax);
  if (reserve_bytes > SIZE_MAX - chunk_bytes) {
    return Status(StatusCode::kInvalidArgument, "cannot reserve " + format_bytes(reserve_bytes) +
                                                    ": that is all addresses there are; lower reserve_bytes");
  }
  reserve_bytes = round_up(reserve_bytes, chunk_bytes);
  Result<DevicePtr> base = backend.reserve(reserve_bytes, chunk_bytes);
  while (!base.ok() && !chosen &&
         reserve_bytes / 2 >= std::max(std::min(limit_bytes, kReserveBytesMax / 256), 4 * chunk_bytes)) {
    reserve_bytes = round_up(reserve_bytes / 2, chunk_bytes);
    base = backend.reserve(reserve_bytes, chunk_bytes);
  }
  if (!base.ok()) return base.status().with_context("cannot make an arena");
  auto* arena = new (std::nothrow) ChunkedArena(backend, base.value(), reserve_bytes,
                                                limit_bytes / chunk_bytes * chunk_bytes, chunk_bytes);
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
  return owner;
}

}  // namespace forebay
