// ChunkedArena: the implementation of Arena. How it works: allocator/README.md.
//
// Locks: `growth_mutex_` comes before `mutex_`. `mutex_` protects the books. It is never held across a
// Backend call. `growth_mutex_` serializes changes of mappings. It is held across the address-space calls
// (chunk, map, unmap, access), which by the Backend's contract never wait for queued work. Calls that may
// wait (events, streams) are made without any lock.
#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "allocator/arena/arena_mappings.h"
#include "allocator/arena/chunk_book.h"
#include "allocator/arena/learned.h"
#include "allocator/arena/range.h"
#include "allocator/arena/size_bins.h"
#include "allocator/arena/step_memory.h"
#include "allocator/arena/strangers.h"
#include "forebay/arena.h"
#include "forebay/units.h"

namespace forebay::internal {

// Each stream is one bit of a 64-bit mask. Further streams still work: free synchronizes them.
inline constexpr unsigned kStreamLimit = 64;
inline constexpr unsigned kNoStream = kStreamLimit;
// Classes of free ranges by the streams that may use them at once: class i, only stream i; kReadyClass, all;
// kMixedClass, none, because the range waits for several streams.
inline constexpr unsigned kReadyClass = kStreamLimit;
inline constexpr unsigned kMixedClass = kStreamLimit + 1;
inline constexpr unsigned kClassCount = kStreamLimit + 2;

// Regions: the two of arena.h share their chunks; the private ones after them share none.
inline constexpr unsigned kSharedRegionCount = 2;
inline constexpr unsigned kRegionCount = kSharedRegionCount + kPrivateRegionLimit;
inline constexpr std::uint8_t kPersistentRegion = static_cast<std::uint8_t>(Region::kPersistent);
inline constexpr std::uint8_t kTransientRegion = static_cast<std::uint8_t>(Region::kTransient);

// A fuzzer shortens all searches, so that ranges that a search leaves out are common.
#ifdef FOREBAY_SHORTEST_SEARCHES
inline constexpr bool kShortestSearches = true;
#else
inline constexpr bool kShortestSearches = false;
#endif
// Ranges looked at in one bin on the hot path. Larger: slower. Smaller: a slightly worse fit, since the sizes
// in one bin differ by at most 1/16.
inline constexpr std::size_t kBinScanMax = kShortestSearches ? 1 : 16;
// The same on a miss, and the most free ranges of one class that a miss gathers, the largest first. Larger: a
// miss takes longer. Smaller: blocks fit worse where there are more ranges than this.
inline constexpr std::size_t kMissScanMax = kShortestSearches ? 3 : 512;
// Refining begins when the memory held exceeds the high water (the most bytes ever live) by more than
// 1/kRefineWorth. It is repeated only when the high water has grown by 1/kRefineAgain.
inline constexpr std::size_t kRefineWorth = 256;
inline constexpr std::size_t kRefineAgain = 64;
// Repetitions after which a program counts as being in its main loop: more than a model has layers, fewer
// than training has steps. Its live bytes must rise and fall by 1/kRefineSwing of the high water.
inline constexpr std::uint32_t kRefineLaps = 100;
inline constexpr std::size_t kRefineSwing = 16;
// Blocks up to this part of a smallest chunk lie with the persistent ones, in any region: a small block that
// outlives the large blocks around it would keep a whole chunk from being used elsewhere.
inline constexpr std::size_t kSmallFraction = 32;
// Entries of shown_. A block with more parts that other addresses own is searched twice.
inline constexpr std::size_t kShownMax = kShortestSearches ? 1 : 64;
// The most descriptors that one block takes on the hot path, when it is cut from the middle of a range.
inline constexpr std::size_t kSplitsMax = 4;

// A checked AllocationRequest.
struct Placement {
  std::size_t bytes = 0;  // Rounded.
  std::size_t asked_bytes = 0;
  std::size_t alignment = kBlockGranule;
  std::uint64_t mine = 0;  // The bit of the request's stream, or 0 for the host.
  unsigned stream = kNoStream;
  std::uint8_t region = kTransientRegion;
  Tag tag = 0;
  bool fixed = false;
  bool stranger = false;
  bool shares = false;                       // Lies in a chunk with other blocks, if one has room.
  bool only_shares = false;                  // Is not stitched otherwise.
  bool uses_rests = false;                   // Shares if there are many rests.
  std::uint64_t kind = 0;                    // For StepMemory: the region, and whether the stream changes.
  std::size_t known = StepMemory::kUnknown;  // The offset of the same point of an earlier step.
};

// One stream that the arena has seen. Every free is stamped with the arena's epoch. An event recorded after
// epoch e ended covers every free stamped e or less. Each stream has one event, which is recorded again only
// when it has completed.
struct StreamState {
  Stream stream;
  Event event;
  bool known = false;
  bool claimed = false;             // A thread is recording or querying the event, without the lock.
  std::uint8_t capture_region = 0;  // While it is captured: its private region.
  std::uint64_t freed_epoch = 0;
  std::uint64_t recorded_epoch = 0;
  std::uint64_t completed_epoch = 0;
  ArenaStatistics account;
};

// How many requests go on with a stream's index while they have given mutex_ up. Changed without it: one that
// ends late only keeps the stream its place a moment longer.
using HeldStreams = std::atomic<std::uint32_t>[kStreamLimit];

// One of these requests. Without it another thread could give the place to another stream, whose memory the
// request would take for its own.
class StreamHold {
 public:
  explicit StreamHold(HeldStreams& held) : held_(held) {}
  StreamHold(const StreamHold&) = delete;
  StreamHold& operator=(const StreamHold&) = delete;
  ~StreamHold() {
    if (index_ != kNoStream) held_[index_].fetch_sub(1, std::memory_order_release);
  }
  // Before mutex_ is given up. mutex_ held. `index`: kNoStream for none.
  void take(unsigned index) {
    if (index_ != kNoStream || index == kNoStream) return;
    index_ = index;
    held_[index].fetch_add(1, std::memory_order_relaxed);
  }

 private:
  HeldStreams& held_;
  unsigned index_ = kNoStream;
};

struct TagState {
  char name[32] = {};
  std::size_t limit_bytes = 0;
  std::uint8_t region = 0;  // The private region of a pausable tag; 0: none.
  ArenaStatistics account;
};

// The fewest and the most bytes that were live during one lap of StepMemory.
struct LiveBounds {
  std::uint32_t lap = 0;
  std::size_t low_bytes = SIZE_MAX;
  std::size_t high_bytes = 0;
};

// A block of a paused tag, and the position of its bytes in the copy.
struct KeptBlock {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  std::size_t copy_offset = 0;
};

// A region that shares no chunk with others. It belongs to a pausable tag or to a capture.
struct PrivateRegion {
  enum class Use : std::uint8_t { kNone, kPausable, kPaused, kCapturing, kCaptured };
  Use use = Use::kNone;
  Stream stream;                      // While capturing: the captured stream.
  std::vector<std::uint32_t> chunks;  // While paused: all its chunks.
  std::vector<KeptBlock> kept;        // While paused: the blocks in `copy`.
  std::byte* copy = nullptr;          // While paused: pinned host memory; null: no bytes are kept.
};

struct SlotState {
  std::vector<std::uint32_t> chunks;
  std::size_t live_bytes = 0;
  std::size_t asked_bytes = 0;
  std::size_t alias_count = 0;
  Tag tag = 0;
  bool live = false;
};

// Addresses at which to map new chunks so that a block fits: [begin, end), inside one unmapped range.
struct Site {
  Range* hole = nullptr;
  std::size_t begin = 0;
  std::size_t end = 0;
};

// Bytes [begin, end) of a chunk, free and owned by one address or more.
struct Extent {
  std::uint32_t chunk = kNone;
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t bytes() const noexcept { return end - begin; }
};

// An extent that is not a whole chunk, as gather finds it, and the next one of the same chunk.
struct Part {
  Extent extent;
  std::uint32_t next = kNone;
};

// Whole chunks of one size in wholes_: [first, first + count), less those that a stitch's beginning shows.
struct WholeChunks {
  std::size_t bytes = 0;
  std::size_t first = 0;
  std::size_t count = 0;
  std::size_t stamped_count = 0;
};

// Addresses that owned free memory until other addresses took it.
struct Origin {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  std::uint8_t region = 0;
};

// Memory that some addresses show, and the offset of the addresses that own it.
struct Shown {
  std::size_t bytes = 0;
  std::size_t owner_offset = 0;
};

// The shortest run of addresses found so far.
struct ShownSearch {
  const Placement& placement;
  std::size_t run_begin = 0;
  std::size_t run_bytes = SIZE_MAX;
};

// The streams that memory taken for a stitch waited for.
struct Taken {
  std::uint64_t waits = 0;
  std::uint64_t epoch = 0;
};

// How to make a block of free memory of several chunks: in the order of addresses, a run or a head or
// neither; whole chunks; new chunks; a tail.
struct Stitch {
  Range* hole = nullptr;      // With a run: the unmapped range behind it.
  std::size_t run_bytes = 0;  // Free ranges in front of `hole`, which keep their addresses.
  Extent head;                // The end of a chunk.
  std::vector<std::uint32_t> whole;
  std::uint32_t broken = kNone;  // A chunk to be replaced by smallest ones before anything else.
  std::size_t grown_bytes = 0;
  Extent tail;  // The beginning of a chunk.
  double cost = 0;
};

// A chunk as map_row needs it.
struct SizedChunk {
  Chunk handle;
  std::size_t bytes = 0;
};

std::string describe(DevicePtr address);

class ChunkedArena final : public Arena {
 public:
  ChunkedArena(Backend& backend, DevicePtr base, const ArenaOptions& options);
  ~ChunkedArena() override;

  // Allocates the first books. False if the host has no memory.
  bool start();
  void follow(LearnedPlacements learned);
  std::size_t transient_offset() const noexcept { return transient_offset_; }

  Result<DevicePtr> allocate(const AllocationRequest& request) override;
  Status free(DevicePtr block, Stream stream) override;
  Status record_stream(DevicePtr block, Stream stream) override;
  Status stream_retire(Stream stream) override;
  std::size_t block_bytes(DevicePtr block) const override;

  Result<Slot> slot_create(std::size_t bytes, Tag tag) override;
  Status slot_destroy(Slot slot) override;
  Result<DevicePtr> alias_create(Slot slot, std::size_t bytes) override;
  Status alias_move(DevicePtr alias, Slot slot) override;
  Status alias_destroy(DevicePtr alias) override;

  Result<Capture> capture_begin(Stream stream) override;
  Status capture_end(Capture capture) override;
  Status capture_release(Capture capture) override;
  Status pause(Tag tag, bool keep) override;
  Status resume(Tag tag) override;

  Result<Tag> tag_create(const TagOptions& options) override;
  ArenaStatistics statistics() const override;
  ArenaStatistics statistics(Tag tag) const override;
  ArenaStatistics statistics(Stream stream) const override;
  void reset_peaks() override;
  std::string report() const override;
  MemorySnapshot snapshot() const override;
  std::size_t trim() override;
  Status learn_begin() override;
  Result<std::string> learn_end() override;
  std::size_t chunk_bytes() const noexcept override { return chunk_bytes_; }
  ArenaMappings mappings() const;
  void set_mappings_max(std::size_t most);

 private:
  using Lock = std::unique_lock<std::mutex>;

  // --- books (arena.cc); mutex_ held ---
  bool reserve_ranges(Lock& lock, std::size_t count = kSplitsMax) {
    return pool_.available() >= count || make_ranges(lock, count);
  }
  bool make_ranges(Lock& lock, std::size_t count);
  Range* find_block(DevicePtr block) const;
  SizeBins& bins_of(std::uint8_t region, std::uint64_t waits) const;
  struct Halves {
    Range* lower;
    Range* upper;
  };
  Halves split(Range* range, std::size_t offset);
  Range* absorb(Range* lower, Range* upper);
  void put_free(Range* range);
  void take_free(Range* range);
  void insert_hole(Range* range, Range* before);
  Range* hole_before(const Range* range) const;
  void remove_hole(Range* range);
  Range* claim_hole(Range* hole, std::size_t begin, std::size_t end);
  void put_unmapped(Range* range);
  void push_pending(Range* range);
  void remove_pending(Range* range);
  bool usable(const Range* range, const Placement& placement) const;
  bool usable_here(const Range* range, const Placement& placement, std::uint8_t region) const;
  // Visits at most `count_max` ranges of each of the two classes, the largest first. False if there are more.
  template <typename Visit>
  bool for_each_usable(const Placement& placement, std::uint8_t region, std::size_t count_max,
                       Visit visit) const {
    const auto visit_some = [&](const SizeBins& bins) {
      std::size_t left = count_max;
      return bins.for_each_from_largest([&](Range* range) {
        if (left == 0) return false;
        --left;
        visit(range);
        return true;
      });
    };
    const bool all = visit_some(bins_of(region, 0));
    return (placement.mine == 0 || visit_some(bins_of(region, placement.mine))) && all;
  }
  Range* find_free(const Placement& placement, std::uint8_t region, std::size_t scan_count_max) const;
  Range* find_run(const Placement& placement, std::uint8_t region);
  inline bool choose_region(const AllocationRequest& request, Placement* placement);
  Range* recall(const Placement& placement, std::size_t offset, std::size_t* missing_count);
  DevicePtr make_block(Range* range, std::size_t start, const Placement& placement, std::uint64_t key);
  bool within_tag_limit(Tag tag, std::size_t bytes) const;
  std::size_t high_water() const { return std::max(high_water_bytes_, total_.peak_live_bytes); }
  bool worth_refining() const;
  void charge(Tag tag, unsigned stream, std::size_t bytes, std::size_t asked_bytes);
  void discharge(Tag tag, unsigned stream, std::size_t bytes, std::size_t asked_bytes);
  void add_reserved(std::size_t bytes);
  unsigned find_stream(Stream stream) const;
  bool is_in_use(unsigned index) const;
  unsigned add_stream(Stream stream);
  std::uint64_t unfinished(std::uint64_t waits, std::uint64_t epoch) const;
  void finish_pending();
  bool captured(std::uint8_t region) const {
    return private_regions_[region].use == PrivateRegion::Use::kCapturing ||
           private_regions_[region].use == PrivateRegion::Use::kCaptured;
  }
  // False for a private region after its tag was paused or its capture released.
  bool may_serve(std::uint8_t region) const {
    return region < kSharedRegionCount || (private_regions_[region].use != PrivateRegion::Use::kNone &&
                                           private_regions_[region].use != PrivateRegion::Use::kPaused);
  }
  std::uint8_t take_private_region(PrivateRegion::Use use);
  void note(SnapshotAction action, std::size_t offset, std::size_t bytes, Stream stream);

  // --- addresses that show the same memory (arena/views.cc); mutex_ held ---
  Range* range_at(std::size_t offset) const;
  Range* isolate(std::size_t begin, std::size_t end);
  Shown shown_at(Range* range, std::size_t offset, std::size_t end, const Placement& placement);
  bool shows_free(std::size_t begin, std::size_t end, const Placement& placement, std::size_t* run_count);
  bool shows_once(std::size_t begin, std::size_t end);
  Range* own_here(std::size_t begin, std::size_t end, const Placement& placement, std::size_t run_count);
  Range* shade(const Range* range, std::size_t begin, std::size_t end, Taken* taken);
  void shade(const Extent& extent, const Placement& placement, Taken* taken);
  std::size_t shade_row(std::span<const std::uint32_t> chunks, const Placement& placement, Taken* taken);
  bool lies_among_blocks(const Range* range) const;
  bool gather(const Placement& placement, bool own_region_only);
  bool gather_region(const Placement& placement, std::uint8_t region);
  void join_parts(std::size_t bytes);
  void add_whole(std::uint32_t chunk);
  std::size_t shown_from(std::size_t offset, std::size_t bytes_max) const;
  std::size_t shown_up_to(std::size_t offset, std::size_t bytes_max) const;
  void search_around(const Extent& extent, std::size_t distance, ShownSearch& search);
  void search_row(std::size_t begin, std::size_t end, ShownSearch& search);
  bool find_shown(const Placement& placement, std::size_t* start);

  // --- slow paths; no lock held on entry ---
  void settle();
  struct EventState;
  std::uint64_t claim_waiting_streams(EventState* states, std::uint64_t* ended_epoch);
  void advance(EventState& state, std::uint64_t ended_epoch);
  Result<DevicePtr> allocate_slowly(const Placement& placement, std::uint64_t key);
  void refine();

  // Makes one driver call without mutex_.
  template <typename Call>
  auto call_unlocked(Lock& lock, Call call) {
    lock.unlock();
    ++driver_call_count_;
    auto result = call();
    lock.lock();
    return result;
  }
  Status unmap_unlocked(Lock& lock, std::size_t offset, std::size_t bytes) {
    return call_unlocked(lock, [&] { return backend_.unmap(base_ + offset, bytes); });
  }

  // --- slow paths; growth_mutex_ and mutex_ held, unless the definition says otherwise. Functions that
  // take a Lock& release mutex_ meanwhile.

  // The strategies of a miss (arena/miss.cc).
  struct Miss;
  enum class Outcome : std::uint8_t;
  using Strategy = Outcome (ChunkedArena::*)(Miss& miss);
  static const Strategy kStrategies[];
  Range* find_without_growth(Lock& lock, const Placement& placement);
  Outcome serve_by_sharing(Miss& miss);
  void count_rests();
  Outcome serve_as_learned(Miss& miss);
  Outcome serve_from_free_range(Miss& miss);
  Outcome serve_from_adjacent_ranges(Miss& miss);
  Outcome serve_from_shown_memory(Miss& miss);
  Outcome serve_after_events(Miss& miss);
  Outcome serve_by_growing_if_worthwhile(Miss& miss);
  Outcome serve_from_other_region(Miss& miss);
  Outcome serve_from_memory_shown_by_both_regions(Miss& miss);
  Outcome serve_by_stitching(Miss& miss);
  Outcome serve_by_growing(Miss& miss);
  Outcome serve_by_evicting(Miss& miss);
  bool was_refused(const Miss& miss) const;
  Outcome serve_fixed(Miss& miss);
  Outcome take_shown(Miss& miss);
  Outcome take_grown(Miss& miss, bool freely);
  Outcome take_stitched(Miss& miss);
  Outcome stitch_again(Miss& miss);
  Result<DevicePtr> finish(Miss& miss, std::uint64_t key);
  bool reserve_books(Lock& lock, std::size_t bytes);
  Outcome try_strategies(Miss& miss);
  bool others_wait(const Placement& placement) const;
  Outcome wait_for_events(Miss& miss, std::chrono::microseconds limit);
  void await_events(const Placement& placement, std::chrono::microseconds limit);
  void limit_mappings(Lock& lock, const Placement& placement);

  // Placements of an earlier run (arena/learned.cc).
  void note_placement(const Placement& placement, std::size_t offset);
  std::uint32_t learned_chunk(std::uint32_t learned) const;
  bool learned_and_missing(std::size_t begin, std::size_t end) const;
  Range* place_as_learned(Lock& lock, const Placement& placement);
  bool map_as_learned(Lock& lock, const Placement& placement, std::size_t begin, std::size_t end);
  bool map_learned_row(Lock& lock, const Placement& placement, std::size_t begin, std::size_t end,
                       const std::vector<std::uint32_t>& chunks);

  void keep_earlier(Lock& lock);
  void return_to_earlier(Lock& lock);
  // Stitching (arena/stitch.cc).
  struct StitchSearch;
  bool choose_stitch(const Placement& placement, std::size_t room_bytes);
  Status stitch(Lock& lock, const Placement& placement, Range** stitched, std::size_t* start,
                bool* addresses_used_up);
  Status plan_stitch(Lock& lock, const Placement& placement);
  Range* claim_view();
  Taken take_stitch_memory(const Placement& placement);
  Status map_stitch(Lock& lock, const Placement& placement, Range* view);
  Range* cut_view(Range* view);
  Status break_chunk(Lock& lock, std::uint32_t chunk);

  // Growing (arena/growth.cc).
  bool choose_site(const Placement& placement, Site* site) const;
  bool worth_growing(const Placement& placement, std::size_t grown_bytes, bool in_bulk) const;
  bool under_pressure() const;
  bool refined() const;
  std::size_t handle_bytes_max(const Placement& placement) const;
  Range* unmapped_from_top(std::size_t bytes);
  Status grow(Lock& lock, const Placement& placement, bool freely, Range** grown);
  Status place_fixed(Lock& lock, const Placement& placement, Range** grown);
  Status acquire(Lock& lock, std::size_t bytes, std::size_t handle_bytes, std::vector<std::uint32_t>* chunks);
  bool reserve_row(Lock& lock, std::vector<std::uint32_t>* chunks, std::size_t count);
  Status create_chunks(Lock& lock, std::size_t bytes, std::size_t handle_bytes,
                       std::vector<std::uint32_t>* chunks);
  void keep_spare(std::uint32_t chunk);
  void remove_spare(std::uint32_t chunk);
  bool take_spare(std::size_t bytes_max, std::uint32_t* chunk);
  Status destroy_spare(Lock& lock, std::uint32_t chunk);
  // Chunks that map_row has mapped side by side.
  struct MappedRow {
    Status status;
    std::size_t count = 0;
    std::size_t bytes = 0;
    bool stranded = false;  // A call failed, and the chunks mapped so far could not be unmapped.
    std::vector<std::pair<std::size_t, GranuleTable::Entry*>> leaves;  // To be installed in granules_.
  };
  Status map_chunks(Lock& lock, Range* range, const std::vector<std::uint32_t>& chunks);
  MappedRow map_row(std::size_t begin, std::size_t end, const std::vector<SizedChunk>& row);
  void install_leaves(const MappedRow& mapped);
  void enter_mappings(std::size_t offset, const std::vector<std::uint32_t>& chunks, std::size_t count);
  void strand_mappings(Range* range, const std::vector<std::uint32_t>& chunks, const MappedRow& mapped);

  // Unmapping (arena/eviction.cc).
  bool remove_mapping(Range* range);
  bool evictable(std::uint32_t chunk) const;
  void isolate_mappings(std::uint32_t chunk);
  std::size_t count_mappings(std::uint32_t chunk) const;
  Status evict(Lock& lock, std::uint32_t chunk);
  bool evict_all(Lock& lock);
  bool isolate_all_evictable(Lock& lock);
  bool unmap_claimed(Lock& lock, bool* refused);
  void give_back_claimed();
  bool make_room(Lock& lock, std::size_t bytes);
  void recover_stranded(Lock& lock);
  std::size_t stale_mapping_bytes(std::size_t offset) const;
  void drop_stale_mappings(Lock& lock);
  void unmap_stale(Lock& lock, std::size_t begin, std::size_t end);
  void give_back_all_free(Lock& lock);

  // Slots (arena/slots.cc).
  void strand_alias(Range* range, const MappedRow& mapped);
  Range* find_alias(DevicePtr address);
  Status unmap_alias(Lock& lock, Range* range);
  Status acquire_slot(Lock& lock, std::size_t bytes, std::vector<std::uint32_t>* chunks);
  bool reserve_slot(Lock& lock);
  MappedRow map_alias(Lock& lock, std::size_t begin, std::size_t bytes, const SlotState& slot);
  // Private regions (arena/private.cc).
  void wait_for_freed(std::uint8_t region);
  bool freed_memory_in_use(std::uint8_t region) const;
  void mark_paused(std::uint8_t region);
  Status unmake(Lock& lock, std::uint8_t region);
  Status remake(Lock& lock, std::uint8_t region);
  void wake(std::uint8_t region);
  Status keep_copy(Lock& lock, std::uint8_t region);
  void drop_copy(std::uint8_t region);
  Status copy_blocks(const PrivateRegion& region, bool out);

  Status bad_block(DevicePtr block, const char* verb) const;
  struct FreeMemory;
  FreeMemory count_free(const Placement& placement) const;
  bool leaves_rest(const Placement& placement) const;
  bool has_many_rests(const Placement& placement) const;
  bool may_use_rests(const Placement& placement) const;
  Status out_of_memory(const char* what, std::size_t bytes, Tag tag, const Placement& placement,
                       const Status& cause) const;
  std::string never_fits(std::size_t bytes) const;
  Status over_tag_limit(const char* what, std::size_t bytes, Tag tag) const;
  Status malformed(const AllocationRequest& request) const;
  Status paused(std::size_t bytes, Tag tag) const;
  Status no_such_tag(const char* what, Tag tag) const;
  Status no_books() const;
  Status no_private_region(const std::string& what) const;

  // Constant after construction.
  Backend& backend_;
  const DevicePtr base_;
  const std::size_t reserve_bytes_;
  const std::size_t limit_bytes_;
  const std::size_t chunk_bytes_;
  const std::size_t growth_bytes_;
  const bool exact_growth_;  // growth_bytes_ is one chunk, so nothing is taken ahead.
  const std::size_t handle_bytes_limit_;
  const std::size_t transient_offset_;  // The transient region grows upwards from here.
  const std::size_t history_limit_;

  // Has its own synchronization.
  std::atomic<std::uint64_t> driver_call_count_{0};

  mutable std::mutex growth_mutex_;
  // Guarded by growth_mutex_.
  std::vector<SlotState> slots_;
  // Scratch of a search; room is made without mutex_. gather finds chunks that are free as a whole, and
  // joined parts of others in the order of their chunks.
  ChunkSet whole_;
  ChunkSet in_parts_;              // Chunks with entries of found_parts_.
  std::vector<Part> found_parts_;  // As found.
  std::vector<Extent> parts_;
  std::size_t whole_bytes_ = 0;
  std::size_t largest_whole_bytes_ = 0;
  std::vector<std::uint32_t> other_chunks_;  // Chunks of which the other region has free memory.
  std::uint64_t gathered_at_ = 0;            // The value of free_changes_ then; 0: not in this miss.
  bool gathered_other_ = false;              // The other region too.
  bool repeated_ = false;                    // A chunk of gathered memory has two addresses.
  std::uint64_t none_shown_at_ = 0;        // The same when no address showed enough of the request's region.
  std::size_t gather_max_ = kMissScanMax;  // SIZE_MAX: before a request is refused.
  bool gathered_all_ = true;               // The latest gather left no range out.
  // The latest request that was refused after a search of all free memory, and the state then.
  struct Refused {
    std::uint64_t free_changes = 0;
    std::size_t reserved_bytes = 0;
    std::size_t bytes = 0;
    std::size_t alignment = 0;
    std::uint64_t mine = 0;
    std::uint8_t region = 0;
  } refused_;
  std::vector<Extent> rows_;           // Addresses that have been searched for a run.
  std::vector<std::uint32_t> wholes_;  // Whole chunks for a stitch, sorted.
  std::vector<Extent> heads_, tails_;
  std::vector<Extent> sort_scratch_;
  std::vector<WholeChunks> whole_groups_;
  std::vector<Origin> origins_;
  std::size_t largest_chunk_bytes_ = 0;
  Stitch stitch_;                       // The one being made.
  std::vector<std::uint32_t> new_row_;  // The chunks that are being mapped.
  std::vector<SizedChunk> row_;

  mutable std::mutex mutex_;
  std::condition_variable settled_;  // With mutex_: a StreamState is no longer claimed.
  // Guarded by mutex_. Chunks and mappings change only while growth_mutex_ is held too.
  EntryPool<PhysicalChunk> chunks_;
  EntryPool<Mapping> mappings_;
  GranuleTable granules_;
  std::uint32_t spares_ = kNone;
  std::size_t chunk_count_ = 0;
  std::size_t mapping_count_ = 0;
  std::size_t repeated_count_ = 0;  // Mappings of chunks that have another one.
  std::size_t mappings_max_ = ArenaMappings().most;
  std::uint64_t dropped_mapping_count_ = 0;
  std::size_t mappings_to_keep_ = 0;  // Stale mappings are kept while there are at most this many in all.
  std::size_t free_count_ = 0;        // Free ranges.
  std::size_t free_bytes_[kRegionCount] = {};
  std::uint64_t free_changes_ = 1;    // How often a range became free or was taken.
  std::uint64_t searched_count_ = 0;  // Requests since the latest that had the addresses of an earlier step.
  // Free memory when it was last counted: parts of chunks that hold blocks, too, and whole chunks.
  struct Rests {
    std::uint64_t free_changes = 0;
    std::size_t bytes = 0;
    std::size_t whole_bytes = 0;
  } rests_;
  std::uint32_t stamp_ = 0;
  Shown shown_[kShownMax];  // The latest result of shows_free.
  RangePool pool_;
  RangeTable ranges_;
  StepMemory steps_;
  Strangers strangers_;
  // Placements of an earlier run that are being followed, and the chunks that stand for its chunks.
  struct Learned {
    struct LearnedChunk {
      std::size_t bytes = 0;
      std::uint32_t index = kNone;  // Into chunks_, if its `learned` says so too.
      std::uint32_t counted = 0;    // Scratch of map_as_learned: a value of stamp_.
    };
    std::vector<LearnedChunk> chunks;
    std::vector<LearnedMapping> mappings;  // In the order of addresses.
    std::size_t held_bytes = 0;            // The most memory to take for them.
    std::size_t peak_live_bytes = 0;

    std::size_t bytes_of(const LearnedMapping& mapping) const { return chunks[mapping.chunk].bytes; }
    std::size_t end_of(const LearnedMapping& mapping) const { return mapping.offset + bytes_of(mapping); }
    std::size_t mapping_at(std::size_t offset) const;
  };
  std::unique_ptr<Learned> learned_;
  // The placements before the latest refining, until it is known whether that was better.
  struct Earlier {
    StepMemory steps;
    Learned placed;
  };
  std::unique_ptr<Earlier> earlier_;
  std::unique_ptr<std::vector<LearnedPlacement>> noted_;  // Since learn_begin; null: nothing is noted.
  struct FreeDeleter {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<SizeBins[], FreeDeleter> bins_;  // kRegionCount × kClassCount.
  Range* first_ = nullptr;                         // Lowest address.
  Range* holes_ = nullptr;                         // The unmapped ranges, from the lowest address on.
  Range* last_hole_ = nullptr;
  Range* pending_ = nullptr;
  std::size_t stranded_count_ = 0;
  std::size_t spare_bytes_ = 0;
  std::size_t slot_slack_bytes_ = 0;  // Bytes of slots' chunks beyond the slots' live bytes.
  bool shadows_wait_ = false;         // Queued work may still use some shadows.
  std::uint64_t epoch_ = 1;
  unsigned stream_count_ = 0;  // Entries of streams_ in use or used once.
  unsigned capturing_count_ = 0;
  unsigned latest_stream_ = kNoStream;  // That of the latest request.
  unsigned unsettled_free_count_ = 0;
  StreamState streams_[kStreamLimit];
  HeldStreams held_streams_ = {};
  unsigned tag_count_ = 1;
  TagState tags_[kTagLimit];
  PrivateRegion private_regions_[kRegionCount];
  ArenaStatistics total_;
  std::size_t high_water_bytes_ = 0;  // The most live bytes before the latest reset_peaks.
  std::uint64_t freed_bytes_ = 0;     // Since the arena was made.
  LiveBounds lap_;                    // In the current lap of steps_.
  LiveBounds previous_lap_;
  bool refine_due_ = false;
  std::uint32_t refine_pause_ = 0;  // Low points to skip after the next attempt that fails.
  std::uint32_t troughs_to_skip_ = 0;
  std::size_t refined_bytes_ = 0;  // The high water at the latest refining; 0: never refined.
  bool refined_in_loop_ = false;   // Blocks were live then, so the record lacks the beginning of the program.
  std::unique_ptr<SnapshotEvent[], FreeDeleter> history_;
  std::uint64_t history_end_ = 0;
};

}  // namespace forebay::internal
