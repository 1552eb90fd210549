// PinnedPool: pinned host memory in exact sizes, for copies to and from a device that the host does not wait
// for.
//
// Memory comes from the system in slabs. A slab is mapped near the device, in huge pages where the machine
// has them, touched, and pinned with one call. Blocks are cut from slabs in whole pages and are never rounded
// to powers of two. No block spans two slabs, because a device copies from one pinned range at a time.
//
// It does not limit memory that others pin, and it is not a tier: it moves no bytes.
//
// Threads: every function may be called from any thread.
// Cost:    allocate from held memory, and free with a null stream, make no system call and allocate no host
//          memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "forebay/backend.h"

namespace forebay {

struct PinnedPoolOptions {
  std::size_t limit_bytes = 0;  // The most memory to hold; 0: all that the host can give.
  // The most that is taken from the system at once, unless one block is larger.
  std::size_t slab_bytes = 1u << 30;
  int numa_node = -1;      // The node to place the memory on; -1: the nearest to the device, if known.
  bool huge_pages = true;  // Ask for huge pages, which make pinning about ten times as fast.
  // Blocks have addresses, and take memory only where they are touched. For a model backend, which copies no
  // bytes: a simulated host may be larger than this one.
  bool addresses_only = false;
};

struct PinnedPoolStatistics {
  std::size_t requested_bytes = 0;  // The live blocks, not rounded.
  std::size_t peak_requested_bytes = 0;
  std::size_t live_bytes = 0;     // The same blocks in whole pages.
  std::size_t pending_bytes = 0;  // Freed, but queued work may still use them.
  std::size_t held_bytes = 0;     // Pinned, in slabs.
  std::size_t peak_held_bytes = 0;
  std::size_t slab_count = 0;
  std::size_t huge_page_bytes = 0;     // The part of held_bytes that is in reserved huge pages.
  std::uint64_t allocation_count = 0;  // Calls of allocate that succeeded.
  std::uint64_t pin_count = 0;         // Calls of Backend::pin that succeeded.
};

class PinnedPool {
 public:
  // Takes no memory yet.
  // Requires: `backend` outlives the pool.
  // Errors:   kInvalidArgument if slab_bytes is zero.
  static Result<std::unique_ptr<PinnedPool>> create(Backend& backend, const PinnedPoolOptions& options = {});
  // Gives all memory back, live blocks included. Requires: no queued work still uses a block.
  virtual ~PinnedPool() = default;

  // Allocates a block of at least `bytes`, aligned to a page. Its contents are undefined. Zero bytes give a
  // distinct block of one page.
  // Order:  never waits for the device. Freed memory that queued work may still use counts as taken.
  // Cost:   takes memory from the system only when no held memory fits, which takes 0.1 to 0.4 seconds per
  //         GiB. prewarm can do that beforehand.
  // Errors: kOutOfMemory when `limit_bytes` or the host does not allow more; the Backend's error when it
  //         refuses to pin.
  virtual Result<std::byte*> allocate(std::size_t bytes) = 0;

  // Frees a block. A block that several streams use is freed on a stream that waits for the others.
  // Order:  the memory is used again once all work that is queued on `stream` by now has run; with a null
  //         stream, at once.
  // Errors: kInvalidArgument for an address that is not the start of a live block (a double free, a foreign
  //         pointer). The Backend's error when neither an event nor a synchronization of the stream works:
  //         the block is freed all the same, and its memory stays unused until the pool ends.
  virtual Status free(void* block, Stream stream) = 0;

  // Takes memory until `bytes` in all are held, live blocks included, and keeps that much until trim. Calling
  // it again changes nothing. `block_bytes`: the size of all blocks to come; slabs are then whole multiples
  // of it. 0: the sizes differ.
  // Threads: may run on its own thread while others allocate; they use the memory taken so far.
  // Errors:  as allocate; memory taken before the error stays.
  virtual Status prewarm(std::size_t bytes, std::size_t block_bytes = 0) = 0;

  // Gives slabs without a live or pending block back to the system. Returns their bytes.
  virtual std::size_t trim() = 0;

  // The size of a live block in whole pages, in bytes, or 0 if `block` is not the start of one.
  virtual std::size_t block_bytes(const void* block) const = 0;

  virtual PinnedPoolStatistics statistics() const = 0;
  virtual void reset_peaks() = 0;
  // Two lines for out-of-memory messages: how much is held, and in which slabs and blocks.
  virtual std::string report() const = 0;
};

}  // namespace forebay
