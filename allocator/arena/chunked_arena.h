// ChunkedArena: the arena's books and what its source files share. How it works: allocator/README.md.
//
// Locks. `growth_mutex_` comes before `mutex_`. `mutex_` protects the books and is never held across a
// Backend call or a malloc. `growth_mutex_` serializes those who change what is mapped, and is held across
// the address-space calls (chunk, map, unmap, access), which by the Backend's contract never wait for queued
// work; calls that may wait (events, streams) are made with no lock held at all.
#pragma once

#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "allocator/arena/chunk_book.h"
#include "allocator/arena/range.h"
#include "allocator/arena/size_bins.h"
#include "allocator/arena/step_memory.h"
#include "forebay/arena.h"
#include "forebay/units.h"

namespace forebay::internal {

// A bit of a 64-bit mask each. More streams than this still work: they are synchronized when they free.
inline constexpr unsigned kStreamLimit = 64;
inline constexpr unsigned kNoStream = kStreamLimit;
// Free ranges by who may use them at once: stream i alone, everybody, or nobody (several streams still to
// wait for).
inline constexpr unsigned kReadyClass = kStreamLimit;
inline constexpr unsigned kMixedClass = kStreamLimit + 1;
inline constexpr unsigned kClassCount = kStreamLimit + 2;

// Regions: the two of arena.h, whose chunks serve both, then the private ones, which share no chunk.
inline constexpr unsigned kSharedRegionCount = 2;
inline constexpr unsigned kRegionCount = kSharedRegionCount + kPrivateRegionLimit;
inline constexpr std::uint8_t kPersistentRegion = static_cast<std::uint8_t>(Region::kPersistent);
inline constexpr std::uint8_t kTransientRegion = static_cast<std::uint8_t>(Region::kTransient);

// Ranges looked at in one bin on the hot path. A bin spans 1/16 of its size, so stopping early costs little
// fit.
inline constexpr std::size_t kBinScanMax = 16;
inline constexpr std::size_t kNoScanLimit = SIZE_MAX;
// Steps are placed anew when more than this part of the most that was live at once is held beyond it, and
// again only when that has grown by the other part.
inline constexpr std::size_t kRefineWorth = 256;
inline constexpr std::size_t kRefineAgain = 64;
// Laps after which a program is taken to be in its main loop: more than a model has layers, fewer than
// training has steps. And the part of the high water by which its live bytes rise and fall at least.
inline constexpr std::uint32_t kRefineLaps = 100;
inline constexpr std::size_t kRefineSwing = 16;
// Blocks up to this part of a smallest chunk lie with the persistent ones, whatever their region: one that
// outlives the large blocks around it would keep a chunk from being used elsewhere.
inline constexpr std::size_t kSmallFraction = 32;
// Pieces of a block owned elsewhere that are kept from their search to their taking; more are searched twice.
inline constexpr std::size_t kShownMax = 64;
// The most descriptors that one block takes on the hot path: it is cut from the middle.
inline constexpr std::size_t kSplitsMax = 4;

// What a request becomes once it has been looked at.
struct Placement {
  std::size_t bytes = 0;  // Rounded.
  std::size_t asked_bytes = 0;
  std::size_t alignment = kBlockGranule;
  std::uint64_t mine = 0;  // The bit of the stream that asks, or 0 for the host.
  unsigned stream = kNoStream;
  std::uint8_t region = kTransientRegion;
  Tag tag = 0;
  bool fixed = false;
};

// One stream the arena has seen. Frees are stamped with the arena's epoch; an event recorded after epoch e
// ended covers every free stamped e or less. One event per stream, recorded again only when it has completed.
struct StreamState {
  Stream stream;
  Event event;
  bool known = false;
  bool claimed = false;             // Somebody is recording or querying the event, without the lock.
  std::uint8_t capture_region = 0;  // Being captured: the private region it allocates from.
  std::uint64_t freed_epoch = 0;
  std::uint64_t recorded_epoch = 0;
  std::uint64_t completed_epoch = 0;
  ArenaStatistics account;
};

struct TagState {
  char name[32] = {};
  std::size_t limit_bytes = 0;
  std::uint8_t region = 0;  // A pausable tag's own; 0: none.
  ArenaStatistics account;
};

// The fewest and the most bytes that were live during one lap of StepMemory.
struct LiveBounds {
  std::uint32_t lap = 0;
  std::size_t low_bytes = SIZE_MAX;
  std::size_t high_bytes = 0;
};

// A block of a paused tag, and where its bytes are in the copy.
struct KeptBlock {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  std::size_t copy_offset = 0;
};

// A region that shares no chunk with others: a pausable tag's, or a capture's.
struct PrivateRegion {
  enum class Use : std::uint8_t { kNone, kPausable, kPaused, kCapturing, kCaptured };
  Use use = Use::kNone;
  Stream stream;                      // Capturing: from this one.
  std::vector<std::uint32_t> chunks;  // Paused: all it has.
  std::vector<KeptBlock> kept;        // Paused: what is in the copy.
  std::byte* copy = nullptr;          // Paused: in page-locked host memory; null: nothing is kept.
};

struct SlotState {
  std::vector<std::uint32_t> chunks;
  std::size_t live_bytes = 0;
  std::size_t asked_bytes = 0;
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

// Bytes [begin, end) of a chunk.
struct Piece {
  std::uint32_t chunk = kNone;
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t bytes() const noexcept { return end - begin; }
};

// Addresses that owned free memory until it was taken for elsewhere.
struct Place {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  std::uint8_t region = 0;
};

// Memory shown somewhere, and where the addresses that own it begin.
struct Shown {
  std::size_t bytes = 0;
  std::size_t owner_offset = 0;
};

// What was taken, and whom it waited for.
struct Taken {
  std::uint64_t waits = 0;
  std::uint64_t epoch = 0;
  std::vector<Place>* places = nullptr;  // Where from.
};

// A block made of memory from several places, mapped side by side at new addresses.
struct Stitch {
  Range* run = nullptr;       // Free ranges that end at an unmapped hole are its beginning, or
  std::size_t run_bytes = 0;  // nothing, and
  Piece head;                 // the end of this chunk is.
  std::vector<std::uint32_t> whole;
  std::uint32_t broken = kNone;  // A whole chunk to be replaced by smallest ones first.
  std::size_t grown_bytes = 0;   // New memory.
  Piece tail;                    // The beginning of this chunk is its end.
  double cost = 0;
};

std::string describe(DevicePtr address);

class ChunkedArena final : public Arena {
 public:
  ChunkedArena(Backend& backend, DevicePtr base, const ArenaOptions& options);
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
  std::size_t chunk_bytes() const noexcept override { return chunk_bytes_; }

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
  void remove_hole(Range* range);
  Range* claim_hole(Range* hole, std::size_t begin, std::size_t end);
  void put_unmapped(Range* range);
  void push_pending(Range* range);
  void remove_pending(Range* range);
  bool usable(const Range* range, const Placement& placement) const;
  bool usable_here(const Range* range, const Placement& placement, std::uint8_t region) const;
  template <typename Visit>
  void for_each_usable(const Placement& placement, std::uint8_t region, Visit visit) const {
    bins_of(region, 0).for_each(visit);
    if (placement.mine != 0) bins_of(region, placement.mine).for_each(visit);
  }
  Range* find_free(const Placement& placement, std::uint8_t region, std::size_t scan_count_max) const;
  Range* find_run(const Placement& placement, std::uint8_t region);
  Range* recall(const Placement& placement, std::size_t offset, std::size_t* missing_count);
  DevicePtr make_block(Range* range, std::size_t start, const Placement& placement, std::uint64_t key);
  bool within_tag_limit(Tag tag, std::size_t bytes) const;
  std::size_t high_water() const { return std::max(high_water_bytes_, total_.peak_live_bytes); }
  bool worth_refining() const;
  void charge(Tag tag, unsigned stream, std::size_t bytes, std::size_t asked_bytes);
  void discharge(Tag tag, unsigned stream, std::size_t bytes, std::size_t asked_bytes);
  void add_reserved(std::size_t bytes);
  unsigned find_stream(Stream stream) const;
  unsigned add_stream(Stream stream);
  std::uint64_t unfinished(std::uint64_t waits, std::uint64_t epoch) const;
  void finish_pending();
  bool captured(std::uint8_t region) const {
    return private_regions_[region].use == PrivateRegion::Use::kCapturing ||
           private_regions_[region].use == PrivateRegion::Use::kCaptured;
  }
  // False for a private region whose tag was paused or whose capture was released.
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
  void shade(const Piece& piece, const Placement& placement, Taken* taken);
  void gather(const Placement& placement, bool own_region_only);
  bool find_shown(const Placement& placement, std::size_t* start);
  bool choose_stitch(const Placement& placement, std::size_t room_bytes, Stitch* stitch);

  // --- slow paths; no lock held on entry unless the name says so ---
  void settle();
  Result<DevicePtr> allocate_slowly(const Placement& placement, std::uint64_t key);
  void refine();
  // The rest: growth_mutex_ held (arena/growth.cc).
  bool reserve_books(Lock& lock, std::size_t bytes);
  bool choose_site(const Placement& placement, Site* site) const;
  bool worth_growing(const Placement& placement, std::size_t grown_bytes, bool in_bulk) const;
  bool under_pressure() const;
  bool refined() const;
  std::size_t handle_bytes_max(const Placement& placement) const;
  Range* unmapped_from_top(std::size_t bytes);
  Status grow(Lock& lock, const Placement& placement, bool freely, Range** grown);
  Status stitch(Lock& lock, const Placement& placement, Range** grown, std::size_t* start,
                bool* addresses_used_up);
  Status place_fixed(Lock& lock, const Placement& placement, Range** grown);
  Status acquire(Lock& lock, std::size_t bytes, std::size_t handle_bytes, std::vector<std::uint32_t>* chunks);
  Status create_chunk(Lock& lock, std::size_t bytes, std::uint32_t* chunk);
  void keep_spare(std::uint32_t chunk);
  void remove_spare(std::uint32_t chunk);
  bool take_spare(std::size_t bytes_max, std::uint32_t* chunk);
  Status destroy_spare(Lock& lock, std::uint32_t chunk);
  Status break_chunk(Lock& lock, std::uint32_t chunk);
  Status map_chunks(Lock& lock, Range* range, const std::vector<std::uint32_t>& chunks);
  void remove_mapping(Range* range);
  bool evictable(std::uint32_t chunk) const;
  Status evict(Lock& lock, std::uint32_t chunk);
  bool evict_all(Lock& lock);
  bool make_room(Lock& lock, std::size_t bytes);
  void recover_stranded(Lock& lock);
  void drop_stale_mappings(Lock& lock);
  // Slots (arena/slots.cc).
  Status acquire_slot(Lock& lock, std::size_t bytes, std::vector<std::uint32_t>* chunks);
  // Private regions (arena/private.cc).
  void wait_for_freed(std::uint8_t region);
  Status unmake(Lock& lock, std::uint8_t region);
  Status remake(Lock& lock, std::uint8_t region);
  void wake(std::uint8_t region);
  Status keep_copy(Lock& lock, std::uint8_t region);
  void drop_copy(std::uint8_t region);
  Status copy_blocks(const PrivateRegion& region, bool out);

  Status bad_block(DevicePtr block, const char* verb) const;
  struct FreeMemory;
  FreeMemory count_free(const Placement& placement) const;
  Status out_of_memory(const char* what, std::size_t bytes, Tag tag, const Placement& placement,
                       const Status& cause) const;
  std::string never_fits(std::size_t bytes) const;
  Status over_tag_limit(const char* what, std::size_t bytes, Tag tag) const;
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
  const bool exact_growth_;  // growth_bytes_ is one chunk: take no more than is missing.
  const std::size_t handle_bytes_limit_;
  const std::size_t transient_offset_;  // Where the transient region begins to grow.
  const std::size_t history_limit_;

  // Has its own synchronization.
  std::atomic<std::uint64_t> driver_call_count_{0};

  mutable std::mutex growth_mutex_;
  // Guarded by growth_mutex_.
  std::vector<SlotState> slots_;
  std::vector<Piece> pieces_;               // Scratch of a search, sorted; room is made without mutex_.
  std::vector<std::uint32_t> first_piece_;  // By chunk; kNone: it has none.
  std::vector<Piece> wholes_, heads_, tails_;
  std::vector<Place> places_;
  std::size_t largest_chunk_bytes_ = 0;
  Stitch stitch_;
  std::vector<std::uint32_t> stitch_chunks_;

  mutable std::mutex mutex_;
  std::condition_variable settled_;  // With mutex_: a StreamState is no longer claimed.
  // Guarded by mutex_; what is mapped, and which chunks there are, changes only under growth_mutex_ too.
  EntryPool<PhysicalChunk> chunks_;
  EntryPool<Mapping> mappings_;
  GranuleTable granules_;
  std::uint32_t spares_ = kNone;
  std::size_t chunk_count_ = 0;
  std::size_t mapping_count_ = 0;
  std::size_t free_count_ = 0;  // Free ranges.
  std::uint32_t stamp_ = 0;
  Shown shown_[kShownMax];  // What shows_free found.
  RangePool pool_;
  RangeTable ranges_;
  StepMemory steps_;
  struct FreeDeleter {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<SizeBins[], FreeDeleter> bins_;  // kRegionCount × kClassCount.
  Range* first_ = nullptr;                         // Lowest address.
  Range* holes_ = nullptr;                         // The unmapped ranges, from the lowest address on.
  Range* pending_ = nullptr;
  std::size_t stranded_count_ = 0;
  std::size_t spare_bytes_ = 0;
  std::size_t slot_slack_bytes_ = 0;  // Of slots' chunks, beyond their live bytes.
  bool shadows_wait_ = false;         // There may be shadows that queued work may still use.
  std::uint64_t epoch_ = 1;
  unsigned stream_count_ = 0;  // Entries of streams_ in use or used once.
  unsigned capturing_count_ = 0;
  unsigned unsettled_free_count_ = 0;
  StreamState streams_[kStreamLimit];
  unsigned tag_count_ = 1;
  TagState tags_[kTagLimit];
  PrivateRegion private_regions_[kRegionCount];
  ArenaStatistics total_;
  std::size_t high_water_bytes_ = 0;  // The most live bytes that reset_peaks forgot.
  std::uint64_t freed_bytes_ = 0;     // Of all blocks ever.
  LiveBounds lap_;                    // Of this lap of steps_
  LiveBounds previous_lap_;           // and of the one before.
  bool refine_due_ = false;
  std::uint32_t refine_pause_ = 0;  // Troughs to let pass after the next attempt that fails.
  std::uint32_t troughs_to_skip_ = 0;
  std::size_t refined_bytes_ = 0;  // The high water when refine took memory apart; 0: never.
  std::unique_ptr<SnapshotEvent[], FreeDeleter> history_;
  std::uint64_t history_end_ = 0;
};

}  // namespace forebay::internal
