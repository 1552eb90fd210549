// BlockRunner: threads that a kernel's elements are spread over, in blocks. Host only.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "forebay/status.h"

namespace forebay {

// Cuts a count into fixed blocks and runs them on a bounded number of threads (a TBB arena of its own). The
// blocks do not depend on the number of threads, and no kernel's bits depend on the blocks.
//
// Threads: run() may be called from several threads at once; they share the same threads.
class BlockRunner {
 public:
  // `thread_count` 0: as many as the machine has. The thread that calls run() is one of them. Under
  // ThreadSanitizer always 1: TBB's own synchronization is not instrumented, so every block would look like a
  // race.
  explicit BlockRunner(int thread_count);
  ~BlockRunner();
  BlockRunner(const BlockRunner&) = delete;
  BlockRunner& operator=(const BlockRunner&) = delete;

  // One thread for each of `processors` (numbers as the kernel counts them), and all of them, the one that
  // calls run() included, kept to those processors while they work: how a step is kept beside the memory of
  // its NUMA node. A thread gets back the processors it had when it leaves.
  // Errors: kInvalidArgument when there are none, one that this process may not use, or one named twice.
  static Result<std::unique_ptr<BlockRunner>> create_on(std::span<const int> processors);

  int thread_count() const noexcept { return thread_count_; }

  // Calls function(context, begin, end) over all of [0, count), cut at multiples of `block`, with the
  // floating-point environment that kernels are defined in (round to nearest, subnormals kept). Returns when
  // all calls have.
  void run(std::size_t count, std::size_t block,
           void (*function)(const void* context, std::size_t begin, std::size_t end),
           const void* context) const;

 private:
  struct Arena;
  explicit BlockRunner(std::unique_ptr<Arena> arena);

  std::unique_ptr<Arena> arena_;  // Null when blocks run on the calling thread, wherever it is.
  int thread_count_;
};

}  // namespace forebay
