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

namespace forebay {

// Block sizes are rounded to this, and every block is aligned to at least this.
inline constexpr std::size_t kBlockGranule = 512;

// kPersistent: parameters, optimizer shards, communication buffers: allocated once, packed without gaps.
// kTransient: activations and workspaces that come and go every step.
enum class Region : std::uint8_t { kPersistent, kTransient };

// On whose account a block stands; made by tag_create. Tag 0 is "untagged" and always exists.
using Tag = std::uint16_t;
inline constexpr std::size_t kTagLimit = 64;

struct ArenaOptions {
  std::size_t reserve_bytes = 0;  // Address range; 0: four times what the device can hold, at most 16 TiB.
  std::size_t limit_bytes = 0;    // Most physical memory to take; 0: what the device has.
  std::size_t chunk_bytes = 0;    // 0: the backend's granularity.
};

struct AllocationRequest {
  std::size_t bytes = 0;
  std::size_t alignment = kBlockGranule;  // A power of two, at most chunk_bytes.
  Region region = Region::kTransient;
  Tag tag = 0;
  Stream stream;  // The stream that uses the block first. Null: the host only.
};

// A fixed row of chunks that belongs to no block: what aliases are mapped onto.
struct Slot {
  std::uint32_t index = UINT32_MAX;
};

struct ArenaStatistics {
  std::size_t live_bytes = 0;  // Blocks and slots handed out, rounded to kBlockGranule.
  std::size_t peak_live_bytes = 0;
  std::size_t reserved_bytes = 0;  // Physical memory held, in whole chunks (one tag: only in its slots).
  std::size_t peak_reserved_bytes = 0;
  std::uint64_t allocation_count = 0;   // Calls of allocate that succeeded.
  std::uint64_t driver_call_count = 0;  // Chunk, map, unmap and access calls on the backend. Arena-wide only.
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

  // --- accounts ---
  // `limit_bytes` bounds the tag's live bytes (0: no limit); a block beyond it is refused with kOutOfMemory
  // that names the tag. `name` is copied, its first 31 characters. Errors: kInvalidArgument when there are
  // kTagLimit tags.
  virtual Result<Tag> tag_create(const char* name, std::size_t limit_bytes) = 0;
  virtual ArenaStatistics statistics() const = 0;
  virtual ArenaStatistics statistics(Tag tag) const = 0;
  virtual void reset_peaks() = 0;
  // Several lines: limit, reserved, live and largest free, then a line per tag. For out-of-memory messages.
  virtual std::string report() const = 0;

  // Gives wholly free chunks whose events have completed back to the device; returns the bytes given back.
  virtual std::size_t trim() = 0;

  virtual std::size_t chunk_bytes() const noexcept = 0;
};

}  // namespace forebay
