// BlockRunner: spreads the elements of a host kernel over threads, in blocks.
#pragma once

#include <cstddef>
#include <memory>

#include "forebay/span.h"
#include "forebay/status.h"

namespace forebay {

// Cuts a count into fixed blocks and runs them on a bounded number of threads (a TBB arena of its own). The
// blocks do not depend on the number of threads, and the result of a kernel does not depend on the blocks.
//
// Threads: run() may be called from several threads at once; they share the same threads.
class BlockRunner {
 public:
  // `thread_count` 0: as many as the machine has. The thread that calls run() is one of them. Under
  // ThreadSanitizer always 1: TBB's synchronization is not instrumented, so every block would look like a
  // race.
  explicit BlockRunner(int thread_count);
  ~BlockRunner();
  BlockRunner(const BlockRunner&) = delete;
  BlockRunner& operator=(const BlockRunner&) = delete;

  // Keeps the threads, also the one that calls run(), on `processors` (the kernel's numbers) while they work,
  // for example near the memory of a NUMA node. A thread gets its earlier processors back when it leaves.
  // `thread_count` 0: one thread per processor.
  // Errors: kInvalidArgument for no processors, one that this process may not use, or one named twice.
  static Result<std::unique_ptr<BlockRunner>> create_on(Span<const int> processors, int thread_count = 0);

  int thread_count() const noexcept { return thread_count_; }

  // Calls function(context, begin, end) over all of [0, count), cut at multiples of `block`, with the
  // floating-point environment that kernels are defined in (round to nearest, subnormals kept). Returns when
  // all calls have.
  void run(std::size_t count, std::size_t block,
           void (*function)(const void* context, std::size_t begin, std::size_t end),
           const void* context) const;
  // The same for a closure: calls function(begin, end).
  template <typename Function>
  void run(std::size_t count, std::size_t block, const Function& function) const {
    run(
        count, block,
        [](const void* context, std::size_t begin, std::size_t end) {
          (*static_cast<const Function*>(context))(begin, end);
        },
        &function);
  }

 private:
  struct Arena;
  explicit BlockRunner(std::unique_ptr<Arena> arena);

  std::unique_ptr<Arena> arena_;  // Null: blocks run on the calling thread, on any processor.
  int thread_count_;
};

}  // namespace forebay
