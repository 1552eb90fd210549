// Arena: one reserved address range on a device, backed chunk by chunk, from which blocks are handed out in
// stream order. ZeRO-R's memory defragmentation (MD): physical memory is moved by remapping, never by
// copying, so pointers stay valid for the life of their block.
//
// What it is not: a cache in front of the driver's own pool, and not a quota. A tag only says on whose
// account a block stands; a region only says which end of the address range it comes from. Free chunks serve
// any of them.
//
// Threads: every function may be called from any thread. No function is called back with a lock held. The hot
// paths (allocate from mapped memory, free) make no system call and allocate no host memory. Source:
// Rajbhandari et al., arXiv 1910.02054, section 6.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "forebay/backend.h"
#include "forebay/memory_snapshot.h"

namespace forebay {

// Block sizes are rounded to this, and every block is aligned to at least this.
inline constexpr std::size_t kBlockGranule = 512;

// Where a block lies, for the sake of how long it lives; what is small (a 32nd of a chunk) is kept together
// anyway. kPersistent: parameters, optimizer shards, communication buffers: allocated once, packed without
// gaps. kTransient: activations and workspaces that come and go every step.
enum class Region : std::uint8_t { kPersistent, kTransient };

// On whose account a block stands; made by tag_create. Tag 0 is "untagged" and always exists.
using Tag = std::uint16_t;
inline constexpr std::size_t kTagLimit = 64;

// Pausable tags and unreleased captures, together.
inline constexpr std::size_t kPrivateRegionLimit = 14;

struct ArenaOptions {
  std::size_t reserve_bytes = 0;  // Address range; 0: sixteen times the limit, at most 16 TiB.
  std::size_t limit_bytes = 0;    // Most physical memory to take; 0: what the device has.
  std::size_t chunk_bytes = 0;    // The smallest chunk, and the unit of slots; 0: the backend's granularity.
  // What the transient region takes from the device at a time while all it holds is in use. Larger: fewer
  // driver calls. Smaller: less is taken too much. 0: a 256th of the limit, from one chunk to 32 MiB.
  std::size_t growth_bytes = 0;
  // The largest chunk to take from the device in one call. Larger: fewer calls. Smaller: more of what is free
  // in pieces can be put together. 0: 1 GiB for persistent blocks; for the others 128 MiB while less was
  // freed than is live, then 16 MiB, and chunk_bytes once half of the limit is taken.
  std::size_t largest_chunk_bytes = 0;
  // Events (allocations, frees, mappings) that snapshot() can tell of, the latest; 0: none, which costs
  // nothing.
  std::size_t history_count = 0;
};

struct AllocationRequest {
  std::size_t bytes = 0;
  std::size_t alignment = kBlockGranule;  // A power of two, at most chunk_bytes.
  Region region = Region::kTransient;
  Tag tag = 0;
  Stream stream{};  // The stream that uses the block first. Null: the host only.
  // The block gets one chunk of its own, mapped once: for what is registered with a network card or exported
  // to another process. Rounded to chunk_bytes of physical memory.
  bool fixed = false;
};

struct TagOptions {
  const char* name = "";        // Copied, its first 31 characters. None: "unnamed".
  std::size_t limit_bytes = 0;  // Of live bytes; 0: no limit.
  bool pausable = false;        // Its blocks share no chunk with other tags, so that pause() can work.
};

// A fixed row of chunks that belongs to no block: what aliases are mapped onto.
struct Slot {
  std::uint32_t index = UINT32_MAX;
};

// The allocations of one stream that a graph is being captured from; see capture_begin.
struct Capture {
  std::uint32_t index = UINT32_MAX;
};

struct ArenaStatistics {
  // Blocks and slots handed out, rounded to kBlockGranule, and fixed blocks to chunk_bytes.
  std::size_t live_bytes = 0;
  std::size_t peak_live_bytes = 0;
  std::size_t requested_bytes = 0;  // The same as asked for, unrounded.
  std::size_t peak_requested_bytes = 0;
  std::size_t reserved_bytes = 0;  // Physical memory held, in whole chunks (one tag: only in its slots).
  std::size_t peak_reserved_bytes = 0;
  std::uint64_t allocation_count = 0;  // Calls of allocate that succeeded.
  // The rest is of the arena as a whole only.
  std::uint64_t driver_call_count = 0;  // Chunk, map, unmap and access calls on the backend.
  std::uint64_t moved_chunk_count = 0;  // Chunks mapped at addresses besides their first.
  std::uint64_t recalled_count = 0;     // Blocks placed where the same point of an earlier step had them.
  // How often all that was free between two steps went back to the device, so that the next one was placed
  // with less.
  std::uint64_t refinement_count = 0;
};

class Arena {
 public:
  // Requires: `backend` outlives the arena.
  static Result<std::unique_ptr<Arena>> create(Backend& backend, const ArenaOptions& options = {});
  // Gives everything back. Requires: no queued work still uses a block.
  virtual ~Arena() = default;

  // bytes == 0 gives a distinct block of kBlockGranule bytes.
  // Order:  never waits for the device. Memory whose events have not completed counts as taken; the message
  // of a
  //         kOutOfMemory says how much that is, so that a caller may synchronize and ask again.
  // Errors: kInvalidArgument (alignment, tag); kOutOfMemory with what was asked, what is free, and who holds
  // what;
  //         what the Backend returned when it failed otherwise.
  virtual Result<DevicePtr> allocate(const AllocationRequest& request) = 0;

  // The block may be handed out again at once to work queued on `stream` after this call, and to other
  // streams once an event recorded on `stream` (and on every stream named by record_stream) has completed. A
  // null stream: only the host used the block, apart from the streams named by record_stream. Requires:
  // `stream` stays valid until stream_retire: the event is recorded when another stream wants the memory.
  // Cost:   no system call, except at the end of a step of a program that repeats itself, at most once as
  // long
  //         as it needs no more memory: then all that is free goes back to the device (see refinement_count).
  // Errors: kInvalidArgument for an address that is not the start of a live block (a double free, a foreign
  // pointer).
  virtual Status free(DevicePtr block, Stream stream) = 0;

  // `stream` uses the block too: reuse waits for it as well.
  virtual Status record_stream(DevicePtr block, Stream stream) = 0;

  // To be called before `stream` is destroyed, when all its work has run: the arena forgets the handle, and
  // memory freed on it is free for all. A stream the arena does not know is fine.
  virtual Status stream_retire(Stream stream) = 0;

  // The size a live block was rounded to, or 0 if `block` is not one.
  virtual std::size_t block_bytes(DevicePtr block) const = 0;

  // --- slots and aliases: fixed physical memory at several addresses ---
  // Takes ceil(bytes / chunk_bytes) chunks that no block will ever share. Live bytes: `bytes` rounded to the
  // granule. Errors: kInvalidArgument (no bytes, no such tag); kOutOfMemory as allocate.
  virtual Result<Slot> slot_create(std::size_t bytes, Tag tag) = 0;
  // Requires: no queued work uses the slot. Errors: kInvalidArgument while it has an alias, or twice.
  virtual Status slot_destroy(Slot slot) = 0;
  // Maps the slot's first ceil(bytes / chunk_bytes) chunks at addresses of their own, for good: every alias
  // of a slot shows the same bytes. Takes no physical memory. Errors: kInvalidArgument (no such slot, zero
  // bytes or more than it has); kOutOfMemory when the addresses are used up.
  virtual Result<DevicePtr> alias_create(Slot slot, std::size_t bytes) = 0;
  // Requires: no queued work uses the alias.
  virtual Status alias_destroy(DevicePtr alias) = 0;

  // --- captured graphs ---
  // From here to capture_end the stream's work goes into a graph that may run again and again. What is
  // allocated for `stream` meanwhile comes from memory of the capture's own, which nobody else gets, and
  // whose mapping does not change, until capture_release. No event is recorded on the stream or queried for
  // it. Errors: kInvalidArgument (null stream, or one that is being captured); kUnavailable when there are
  // kPrivateRegionLimit captures and pausable tags.
  virtual Result<Capture> capture_begin(Stream stream) = 0;
  virtual Status capture_end(Capture capture) = 0;
  // The graph is gone and has run for the last time: its memory, live blocks apart, is free for all.
  virtual Status capture_release(Capture capture) = 0;

  // --- pausing ---
  // Gives the physical memory of a pausable tag's blocks back to the device; addresses stay. Until resume the
  // blocks must not be used, and the tag allocates nothing (kUnavailable). `keep`: their bytes are copied to
  // page-locked host memory, and back by resume; otherwise they come back undefined.
  // Requires: no queued work uses the blocks. Order: waits for the copies, and for queued work that may still
  // use blocks of the tag that were freed.
  // Errors: kInvalidArgument (no such tag, not pausable, paused already); kUnavailable when a stream that is
  // being captured freed blocks of it; kOutOfMemory (no host memory for the copy). What fails leaves
  // everything as it was.
  virtual Status pause(Tag tag, bool keep) = 0;
  // Errors: kInvalidArgument (not paused); kOutOfMemory when the device or the limit has not enough: the tag
  // stays paused and nothing is lost.
  virtual Status resume(Tag tag) = 0;

  // --- accounts ---
  // A block beyond the tag's limit is refused with kOutOfMemory that names the tag. Errors: kInvalidArgument
  // when there are kTagLimit tags; kUnavailable as capture_begin.
  virtual Result<Tag> tag_create(const TagOptions& options) = 0;
  Result<Tag> tag_create(const char* name, std::size_t limit_bytes) {
    return tag_create(TagOptions{name, limit_bytes, false});
  }
  virtual ArenaStatistics statistics() const = 0;
  virtual ArenaStatistics statistics(Tag tag) const = 0;
  // Of the blocks allocated for `stream`: bytes and allocations. Zeros for a stream the arena does not know.
  virtual ArenaStatistics statistics(Stream stream) const = 0;
  virtual void reset_peaks() = 0;
  // Several lines: limit, reserved, live and largest free, then a line per tag. For out-of-memory messages.
  virtual std::string report() const = 0;
  // Every mapped range and, with history_count, the latest events: for write_memory_snapshot. Cost: allocates
  // host memory, without the arena's lock.
  virtual MemorySnapshot snapshot() const = 0;

  // Gives wholly free chunks whose events have completed back to the device, and unmaps addresses that only
  // show what is mapped elsewhere too; returns the bytes given back.
  virtual std::size_t trim() = 0;

  virtual std::size_t chunk_bytes() const noexcept = 0;
};

}  // namespace forebay
