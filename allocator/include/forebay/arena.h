// Arena: one reserved address range on a device, backed chunk by chunk, from which blocks are allocated in
// stream order. It is the memory defragmentation (MD) of ZeRO-R: physical memory moves by remapping, never by
// copying, so a pointer stays valid for the life of its block.
//
// It is not a cache in front of the driver's own pool, and not a quota. A tag only says to which account a
// block is charged. A region only says from which end of the address range a block comes. Free chunks serve
// all tags and regions, except private ones (pausable tags, captures).
//
// Threads: every function may be called from any thread. The arena holds no lock when it calls user code.
// Cost:    allocate from mapped memory and free make no system call and allocate no host memory.
// Source:  Rajbhandari et al., arXiv 1910.02054, section 6.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "forebay/backend.h"
#include "forebay/memory_snapshot.h"

namespace forebay {

// Block sizes are rounded to this, and every block is aligned to at least this.
inline constexpr std::size_t kBlockGranule = 512;

// How long a block lives, which decides where it lies. kPersistent: allocated once and packed without gaps,
// such as parameters, optimizer shards and communication buffers. kTransient: allocated and freed every step,
// such as activations and workspaces. Blocks up to a 32nd of a chunk lie with the persistent ones in any
// case.
enum class Region : std::uint8_t { kPersistent, kTransient };

// The account to which a block is charged; made by tag_create. Tag 0, "untagged", always exists.
using Tag = std::uint16_t;
inline constexpr std::size_t kTagLimit = 64;

// The most pausable tags and unreleased captures together.
inline constexpr std::size_t kPrivateRegionLimit = 14;

struct ArenaOptions {
  // Size of the address range. 0: sixteen times the limit, at most 16 TiB.
  std::size_t reserve_bytes = 0;
  // The most physical memory to take. 0: all that the device has.
  std::size_t limit_bytes = 0;
  // The smallest chunk, and the unit of slots. 0: the backend's granularity.
  std::size_t chunk_bytes = 0;
  // Bytes that the transient region takes from the device at a time. Larger: fewer driver calls. Smaller:
  // less memory is taken and not used. 0: a 512th of the limit, from one chunk to 32 MiB.
  std::size_t growth_bytes = 0;
  // The largest chunk to take from the device in one call. Larger: fewer driver calls. Smaller: more of the
  // free memory can be remapped. 0: 1 GiB for persistent blocks. For transient ones 128 MiB while fewer bytes
  // were freed than are live, then 16 MiB, and chunk_bytes once half of the limit is taken.
  std::size_t largest_chunk_bytes = 0;
  // How many of the latest events (allocations, frees, mappings) snapshot() returns. 0: none, at no cost.
  std::size_t history_count = 0;
  // Placements that an earlier run of the same program has learnt (Arena::learn_end): its blocks are placed
  // so from the first step on. Another program is served as without them. Read by Arena::create only.
  std::string_view learned;
};

struct AllocationRequest {
  std::size_t bytes = 0;
  std::size_t alignment = kBlockGranule;  // A power of two, at most chunk_bytes.
  Region region = Region::kTransient;
  Tag tag = 0;
  Stream stream{};  // The stream that uses the block first. Null: only the host does.
  // The block gets one chunk of its own, mapped once, so that it can be registered with a network card or
  // exported to another process. Its size is rounded up to chunk_bytes.
  bool fixed = false;
};

struct TagOptions {
  const char* name = "";        // Copied; at most 31 characters are kept. Empty: "unnamed".
  std::size_t limit_bytes = 0;  // The most live bytes; 0: no limit.
  bool pausable = false;        // pause() works; the tag's blocks share no chunk with other tags.
};

// A fixed row of chunks that no block shares. Aliases are mapped onto it.
struct Slot {
  std::uint32_t index = UINT32_MAX;
};

// The allocations that belong to one captured graph; see capture_begin.
struct Capture {
  std::uint32_t index = UINT32_MAX;
};

struct ArenaStatistics {
  // Allocated blocks and slots, rounded to kBlockGranule; fixed blocks to chunk_bytes.
  std::size_t live_bytes = 0;
  std::size_t peak_live_bytes = 0;
  std::size_t requested_bytes = 0;  // The same blocks and slots, not rounded.
  std::size_t peak_requested_bytes = 0;
  std::size_t reserved_bytes = 0;  // Physical memory held, in whole chunks. For a tag: only its slots.
  std::size_t peak_reserved_bytes = 0;
  std::uint64_t allocation_count = 0;  // Calls of allocate that succeeded.
  // The rest is counted for the whole arena only.
  std::uint64_t driver_call_count = 0;  // Chunk, map, unmap and access calls on the backend.
  std::uint64_t moved_chunk_count = 0;  // Chunks mapped at addresses besides their first.
  std::uint64_t recalled_count = 0;     // Blocks placed at the same addresses as in an earlier step.
  // How often the arena gave all free memory back between two steps, so that the next step needs less.
  std::uint64_t refinement_count = 0;
};

class Arena {
 public:
  // Requires: `backend` outlives the arena.
  // Errors: kInvalidArgument for options; kOutOfMemory; those of the Backend.
  static Result<std::unique_ptr<Arena>> create(Backend& backend, const ArenaOptions& options = {});
  // Gives all memory and addresses back. Requires: no queued work still uses a block.
  virtual ~Arena() = default;

  // Allocates a block. Zero bytes give a distinct block of kBlockGranule bytes.
  // Order:  waits 30 us at most for other streams' events before it takes new memory, 2 ms before it takes
  //         much more than was ever live or refuses, and never for their work. Freed memory that queued work
  //         may still use counts as taken. The message of kOutOfMemory says how much that is; the caller may
  //         synchronize and ask again.
  // Errors: kInvalidArgument for the alignment, region or tag; kUnavailable for a paused tag; kOutOfMemory,
  //         with the request, the free memory and the tags that hold memory; the Backend's error if it fails.
  virtual Result<DevicePtr> allocate(const AllocationRequest& request) = 0;

  // Frees a block. Its last use is queued on `stream`; null: only the host used it, apart from the streams
  // named by record_stream.
  // Order:    work queued on `stream` after this call may use the memory at once. Other streams get it once
  //           an event recorded on `stream`, and on every stream named by record_stream, has completed.
  // Requires: `stream` stays valid until stream_retire. The event is recorded when another stream wants the
  //           memory.
  // Cost:     no system call, except at the end of a repeated step, where all free memory may go back to the
  //           device (see refinement_count). That happens at most once unless the program needs more memory.
  // Errors:   kInvalidArgument for an address that is not the start of a live block (a double free, a foreign
  //           pointer).
  virtual Status free(DevicePtr block, Stream stream) = 0;

  // Says that `stream` uses the block too: its memory is reused only after that work.
  // Errors: kInvalidArgument as free; kUnavailable when 64 streams are in use.
  virtual Status record_stream(DevicePtr block, Stream stream) = 0;

  // Forgets a stream; memory freed on it is free for all. A stream that the arena does not know is no error.
  // Requires: all work of `stream` has run. To be called before the stream is destroyed.
  virtual Status stream_retire(Stream stream) = 0;

  // The size of a live block, rounded, or 0 if `block` is not the start of one.
  virtual std::size_t block_bytes(DevicePtr block) const = 0;

  // --- slots and aliases: fixed physical memory at several addresses ---
  // Takes ceil(bytes / chunk_bytes) chunks that no block will ever share. `bytes`, rounded to the granule,
  // count as live.
  // Errors: kInvalidArgument for zero bytes or an unknown tag; kOutOfMemory as allocate.
  virtual Result<Slot> slot_create(std::size_t bytes, Tag tag) = 0;
  // Requires: no queued work uses the slot.
  // Errors:   kInvalidArgument for a slot that has an alias or was destroyed.
  virtual Status slot_destroy(Slot slot) = 0;
  // Maps the slot's first ceil(bytes / chunk_bytes) chunks at new addresses, until alias_destroy. Every alias
  // of a slot shows the same bytes. Takes no physical memory.
  // Errors: kInvalidArgument for an unknown slot, zero bytes, or more bytes than the slot has; kOutOfMemory
  //         when the addresses are used up.
  virtual Result<DevicePtr> alias_create(Slot slot, std::size_t bytes) = 0;
  // Maps an alias onto another slot; its address stays. A default Slot: onto none, and the address is
  // inaccessible until the next alias_move.
  // Requires: no queued work uses the alias.
  // Errors:   kInvalidArgument for an unknown alias or slot, or a slot with fewer chunks than the alias;
  //           nothing changes then. If the old mapping cannot be removed, the alias keeps its slot. If the
  //           new one cannot be made, the alias has none; if a part of it cannot be removed either, the alias
  //           is destroyed.
  virtual Status alias_move(DevicePtr alias, Slot slot) = 0;
  // Requires: no queued work uses the alias.
  // Errors:   kInvalidArgument for an unknown alias.
  virtual Status alias_destroy(DevicePtr alias) = 0;

  // --- captured graphs ---
  // From here to capture_end the stream's work goes into a graph that may run many times. Blocks allocated
  // for `stream` meanwhile come from a private region: no other request gets its memory, and its mapping does
  // not change, until capture_release. No event is recorded on the stream or queried for it.
  // Errors: kInvalidArgument for a null stream or one that is being captured; kUnavailable when there are
  //         kPrivateRegionLimit captures and pausable tags.
  virtual Result<Capture> capture_begin(Stream stream) = 0;
  virtual Status capture_end(Capture capture) = 0;
  // Makes the capture's memory, apart from live blocks, free for all.
  // Requires: the graph has run for the last time.
  virtual Status capture_release(Capture capture) = 0;

  // --- pausing ---
  // Gives the physical memory of a pausable tag's blocks back to the device; their addresses stay. Until
  // resume the blocks must not be used, and the tag allocates nothing (kUnavailable). `keep`: the bytes are
  // copied to pinned host memory, and back by resume. Otherwise they are undefined after resume.
  // Requires: no queued work uses the blocks.
  // Order:    waits for the copies, and for queued work that may still use freed blocks of the tag.
  // Errors:   kInvalidArgument for a tag that is unknown, not pausable or paused already; kUnavailable when a
  //           stream that is being captured freed blocks of it; kOutOfMemory when the host has no memory for
  //           the copy. A call that fails changes nothing.
  virtual Status pause(Tag tag, bool keep) = 0;
  // Takes the memory again and maps it at the same addresses.
  // Errors: kInvalidArgument for a tag that is not paused; kOutOfMemory when the device or the limit has not
  //         enough memory: the tag stays paused and nothing is lost.
  virtual Status resume(Tag tag) = 0;

  // --- accounts ---
  // Makes a tag. A block beyond its limit is refused with kOutOfMemory, and the message names the tag.
  // Errors: kInvalidArgument when there are kTagLimit tags; kUnavailable as capture_begin.
  virtual Result<Tag> tag_create(const TagOptions& options) = 0;
  Result<Tag> tag_create(const char* name, std::size_t limit_bytes) {
    return tag_create(TagOptions{name, limit_bytes, false});
  }
  virtual ArenaStatistics statistics() const = 0;
  virtual ArenaStatistics statistics(Tag tag) const = 0;
  // Bytes and allocations of the blocks allocated for `stream`. Zeros for a stream that the arena does not
  // know.
  virtual ArenaStatistics statistics(Stream stream) const = 0;
  virtual void reset_peaks() = 0;
  // Several lines for out-of-memory messages: limit, reserved, live and largest free, then a line per tag.
  virtual std::string report() const = 0;
  // Every mapped range and, with history_count, the latest events, for write_memory_snapshot.
  // Cost: allocates host memory, without the arena's lock.
  virtual MemorySnapshot snapshot() const = 0;

  // Gives wholly free chunks back to the device if no queued work may still use them, and unmaps addresses
  // that own no memory. Returns the bytes given back.
  virtual std::size_t trim() = 0;

  virtual std::size_t chunk_bytes() const noexcept = 0;

  // --- knowledge for a later run ---
  // Begins to note where blocks are placed. To be called between two steps that are equal, when the arena
  // makes no driver call any more.
  // Errors: kInvalidArgument if anything is live.
  virtual Status learn_begin() = 0;
  // The placements since learn_begin, for ArenaOptions::learned: the first 262,143 of them. A file of them is
  // valid for the same version of forebay, on any device with enough memory.
  // Errors: kInvalidArgument without learn_begin.
  virtual Result<std::string> learn_end() = 0;
};

// Whether ArenaOptions::learned would take these bytes. Errors: kInvalidArgument, with the reason.
Status check_learned_placements(std::string_view learned);

}  // namespace forebay
