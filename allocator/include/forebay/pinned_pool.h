// PinnedPool: page-locked host memory in exact sizes, for copies to and from a device that the host does not
// wait for.
//
// Memory comes from the system in slabs: mapped near the device, in huge pages where the machine gives them,
// touched, and page-locked with one call. Blocks are cut from slabs in whole pages, never rounded to powers
// of two, and no block spans two slabs, because a device copies from one page-locked range at a time.
//
// What it is not: a limit on what others page-lock, and not a tier. It moves no bytes.
//
// Threads: every function may be called from any thread. Serving a request from memory that is held, and
// giving a block back on a null stream, make no system call and allocate no host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "forebay/backend.h"

namespace forebay {

struct PinnedPoolOptions {
  std::size_t limit_bytes = 0;  // Most memory to hold; 0: what the host can give.
  std::size_t slab_bytes =
      1u << 30;            // The most that is taken from the system at once, unless a request is larger.
  int numa_node = -1;      // Where the memory should be; -1: nearest the device, if it says so.
  bool huge_pages = true;  // Ask for huge pages. They make page-locking about ten times as fast.
};

struct PinnedPoolStatistics {
  std::size_t requested_bytes = 0;  // What the live blocks were asked to be.
  std::size_t peak_requested_bytes = 0;
  std::size_t live_bytes = 0;     // The same blocks in whole pages.
  std::size_t pending_bytes = 0;  // Freed; work queued on a stream may still use them.
  std::size_t held_bytes = 0;     // Page-locked, in slabs.
  std::size_t peak_held_bytes = 0;
  std::size_t slab_count = 0;
  std::size_t huge_page_bytes = 0;     // Of held_bytes: in slabs made of reserved huge pages.
  std::uint64_t allocation_count = 0;  // Calls of allocate that succeeded.
  std::uint64_t pin_count = 0;         // Calls of Backend::pin that succeeded.
};

class PinnedPool {
 public:
  // Takes no memory yet. Requires: `backend` outlives the pool. Errors: kInvalidArgument for slab_bytes of
  // zero.
  static Result<std::unique_ptr<PinnedPool>> create(Backend& backend, const PinnedPoolOptions& options = {});
  // Gives everything back, live blocks too. Requires: no queued work still uses a block.
  virtual ~PinnedPool() = default;

  // A block of at least `bytes`, aligned to a page, whose contents are whatever was there. Zero bytes give a
  // distinct block of one page. Order: never waits for the device. Memory whose events have not completed
  // counts as taken. Cost: takes memory from the system only when nothing held fits; then it costs 0.1 to 0.4
  // seconds a GiB, and prewarm can have paid it before. Errors: kOutOfMemory when `limit_bytes` or the host
  // does not allow more; the Backend's when it refuses to page-lock.
  virtual Result<std::byte*> allocate(std::size_t bytes) = 0;

  // The block is handed out again once all work that is queued on `stream` by now has run; with a null
  // stream, at once. A block that several streams use is freed on one that waits for the others. Errors:
  // kInvalidArgument for what is not the start of a live block (a double free, a foreign pointer). The
  // Backend's when neither an event nor a synchronization of the stream works: the block is gone all the
  // same, and its memory stays unused until the pool ends.
  virtual Status free(void* block, Stream stream) = 0;

  // Takes memory until `bytes` in all are held, live blocks included, so that calling it again changes
  // nothing, and keeps that much until trim. May run on a thread of its own while others allocate: what it
  // has taken so far serves them. `block_bytes`: the size that will be asked for, if it is one size; slabs
  // are then whole multiples of it. 0: a mix. Errors: as allocate; what was taken until then stays.
  virtual Status prewarm(std::size_t bytes, std::size_t block_bytes = 0) = 0;

  // Gives slabs without a live or pending block back to the system; returns their bytes.
  virtual std::size_t trim() = 0;

  // The whole pages of a live block in bytes, or 0 if `block` is not the start of one.
  virtual std::size_t block_bytes(const void* block) const = 0;

  virtual PinnedPoolStatistics statistics() const = 0;
  virtual void reset_peaks() = 0;
  // Two lines for out-of-memory messages: what is held, and by what.
  virtual std::string report() const = 0;
};

}  // namespace forebay
