// StagingBuffers: a fixed number of equal, page-locked, page-aligned buffers that bytes pass through between
// a Store and a device. They are allocated once; who needs one while all are taken has to wait, which is what
// bounds the bytes on their way.
//
// What it is not: an allocator. Nothing is made, split or joined after the beginning.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "forebay/pinned_pool.h"
#include "forebay/status.h"

namespace forebay {

struct StagingBuffersOptions {
  std::size_t buffer_bytes = 0;  // Of each; a multiple of the page.
  std::size_t buffer_count = 0;  // Smaller: transfers wait for each other. Larger: more memory page-locked.
};

struct StagingBuffersStatistics {
  std::size_t taken_count = 0;       // Buffers out now.
  std::size_t most_taken_count = 0;  // The most there have been at the same time.
  std::uint64_t take_count = 0;      // Buffers given out since the beginning.
  std::uint64_t refused_count = 0;   // Calls of try_take that found none.
  std::uint64_t wait_count = 0;      // Calls of take that found none at first.
  std::uint64_t wait_ns = 0;         // What they waited, all together.
};

class StagingBuffers;

// One buffer that is taken; gives itself back. Its contents are whatever was there.
class StagingBuffer {
 public:
  StagingBuffer() noexcept = default;
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  ~StagingBuffer();

  // Null for one that was moved from, given back or never taken.
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

  // Back to the others, for whoever waits. Requires: no queued work and no transfer still uses it.
  void give() noexcept;

 private:
  friend class StagingBuffers;
  StagingBuffer(StagingBuffers* owner, std::byte* data, std::size_t bytes) noexcept
      : owner_(owner), data_(data), bytes_(bytes) {}

  StagingBuffers* owner_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Threads: every function may be called from any thread; a StagingBuffer is one thread's at a time.
class StagingBuffers {
 public:
  // Allocates all of them, as one block of the pool. Requires: the pool outlives them. Errors:
  // kInvalidArgument for a count of zero, or a size that is zero or no multiple of the page; the pool's.
  static Result<std::unique_ptr<StagingBuffers>> create(PinnedPool& pool,
                                                        const StagingBuffersOptions& options);
  // Requires: every buffer has been given back.
  virtual ~StagingBuffers() = default;
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  // A buffer if there is one. Never waits.
  virtual std::optional<StagingBuffer> try_take() = 0;
  // Waits for a buffer. Order: who waits longest is served first, and before any try_take. Real time: on a
  // virtual clock, use try_take. Errors: kTimeout when `deadline` (from now on) passes first.
  virtual Result<StagingBuffer> take(std::chrono::milliseconds deadline) = 0;

  // All buffers, one behind the other: for Store::register_memory.
  virtual std::span<std::byte> memory() const noexcept = 0;
  virtual const StagingBuffersOptions& options() const noexcept = 0;
  virtual StagingBuffersStatistics statistics() const = 0;

 private:
  friend class StagingBuffer;
  virtual void give(std::byte* data) noexcept = 0;

 protected:
  StagingBuffers() = default;
  StagingBuffer make_buffer(std::byte* data, std::size_t bytes) noexcept { return {this, data, bytes}; }
};

}  // namespace forebay
