// A block of CUDA threads on the CPU: the context that the kernels' bodies are written against, so that their
// logic runs and is tested without a device.
//
// Each thread is a fiber that runs until it reaches a barrier or a shuffle; when all of its block, or of its
// warp, are there, they go on. Threads that cannot meet (one has ended, or waits elsewhere) are reported
// as a defect, as they are on a device. Shared memory is poisoned when a block begins. One block runs after
// the other; the order of threads turns around at every barrier, so that a missing one shows. Slow: about a
// microsecond for a thread to reach a barrier.
//
// Kernels without barriers need none of it: a loop over ElementContext is enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "forebay/backend.h"

namespace forebay::simt {

// Where a barrier or shuffle is in the source.
struct Site {
  const char* file = "";
  int line = 0;
};

// A thread's place, for kernels without barriers.
class ElementContext {
 public:
  ElementContext(unsigned thread, unsigned block, unsigned block_size, unsigned grid_size) noexcept
      : thread_(thread), block_(block), block_size_(block_size), grid_size_(grid_size) {}

  unsigned thread() const noexcept { return thread_; }
  unsigned block() const noexcept { return block_; }
  unsigned block_size() const noexcept { return block_size_; }
  unsigned grid_size() const noexcept { return grid_size_; }

 private:
  unsigned thread_, block_, block_size_, grid_size_;
};

class Block;

// A thread's place, and the ways to meet the others.
class BlockContext : public ElementContext {
 public:
  BlockContext(Block& simulated, unsigned thread, unsigned block, unsigned block_size,
               unsigned grid_size) noexcept
      : ElementContext(thread, block, block_size, grid_size), simulated_(&simulated) {}

  // Every thread of the block has to come to the same barrier.
  void barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const;

  // The value that the thread `delta` further in the same warp passes to the same call; this thread's own
  // value where there is none. Every thread of the warp has to come.
  template <typename T>
  T shuffle_down(T value, unsigned delta, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) const {
    static_assert(sizeof(T) <= sizeof(std::uint64_t));
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = shuffle(bits, delta, {file, line});
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

 private:
  std::uint64_t shuffle(std::uint64_t bits, unsigned delta, const Site& site) const;

  Block* simulated_;
};

// The bytes that fill shared memory when a block begins.
inline constexpr unsigned char kSharedPoison = 0xCD;

using BlockBody = void (*)(const BlockContext& context, void* shared, const void* launch);

// Runs `body` for every thread of a grid of one-dimensional blocks. Returns nothing when all went well,
// otherwise a sentence on the threads that could not meet; the grid is then left where it was.
std::string run_blocks(const Dimensions& grid, const Dimensions& block, std::size_t shared_bytes,
                       BlockBody body, const void* launch);

}  // namespace forebay::simt
