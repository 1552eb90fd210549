// StagingBuffers: a fixed number of equal, pinned, page-aligned buffers between a file store and a device.
// They are allocated once. While all are taken, take() waits; that bounds the bytes on their way.
//
// It is not an allocator: no buffer is made, split or joined later.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "forebay/pinned_pool.h"
#include "forebay/span.h"
#include "forebay/status.h"

namespace forebay {

struct StagingBuffersOptions {
  std::size_t buffer_bytes = 0;  // The size of each; a multiple of the page.
  std::size_t buffer_count = 0;  // Smaller: transfers wait for each other. Larger: more pinned memory.
};

struct StagingBuffersStatistics {
  std::size_t taken_count = 0;       // Buffers taken now.
  std::size_t most_taken_count = 0;  // The most at the same time.
  std::uint64_t take_count = 0;      // Buffers taken since the beginning.
  std::uint64_t refused_count = 0;   // Calls of try_take that found none.
  std::uint64_t wait_count = 0;      // Calls of take that had to wait.
  std::uint64_t wait_ns = 0;         // The sum of their waits.
};

class StagingBuffers;

// A taken buffer; its destructor gives it back. Its contents are undefined at first.
class StagingBuffer {
 public:
  StagingBuffer() noexcept = default;
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  ~StagingBuffer();

  // Null when it was moved from, given back or never taken.
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

  // Gives the buffer back. Requires: no queued work and no transfer still uses it.
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
  // Allocates all buffers as one block of the pool.
  // Requires: the pool outlives them. Errors: kInvalidArgument for a count of zero, or a size that is zero or
  // no multiple of the page; those of the pool.
  static Result<std::unique_ptr<StagingBuffers>> create(PinnedPool& pool,
                                                        const StagingBuffersOptions& options);
  // Requires: every buffer has been given back.
  virtual ~StagingBuffers() = default;
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  // A buffer if there is one. Never waits.
  virtual std::optional<StagingBuffer> try_take() = 0;
  // Waits for a buffer, in real time: on a virtual clock, use try_take.
  // Order: the longest wait is served first, and before any try_take. Errors: kTimeout when `deadline` (from
  // now on) passes first.
  virtual Result<StagingBuffer> take(std::chrono::milliseconds deadline) = 0;

  // All buffers, one behind the other: for Store::register_memory.
  virtual Span<std::byte> memory() const noexcept = 0;
  // The options given to create().
  virtual const StagingBuffersOptions& options() const noexcept = 0;
  // Figures of all calls so far.
  virtual StagingBuffersStatistics statistics() const = 0;

 private:
  friend class StagingBuffer;
  virtual void give(std::byte* data) noexcept = 0;

 protected:
  StagingBuffers() = default;
  StagingBuffer make_buffer(std::byte* data, std::size_t bytes) noexcept { return {this, data, bytes}; }
};

}  // namespace forebay
