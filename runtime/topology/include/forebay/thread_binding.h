// ThreadBinding: the calling thread, and the threads it starts meanwhile, on given processors.
//
// For plain threads: those of a file store (its threads are started by the one who makes the store), of a
// backend's streams, of a trainer. Threads of host kernels are TBB's, which come and go: these are placed by
// BlockRunner::create_on.
#pragma once

#include <span>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// Threads: made and ended on one thread.
class ThreadBinding {
 public:
  // Errors: kInvalidArgument when there are none or one is negative; kUnsupported when the system refuses,
  // because none of them is there or may be used. The thread is then where it was.
  static Result<ThreadBinding> create(std::span<const int> processors);

  ThreadBinding(ThreadBinding&& other) noexcept;
  ThreadBinding& operator=(ThreadBinding&& other) noexcept;
  // The thread may use again what it might before. Threads that were started meanwhile stay where they are.
  ~ThreadBinding();

 private:
  explicit ThreadBinding(std::vector<unsigned long> previous) : previous_(std::move(previous)) {}

  std::vector<unsigned long> previous_;  // As the system writes them; empty: nothing to undo.
};

// The processors that the calling thread may use, in ascending order; empty when the system does not say.
std::vector<int> usable_processors_of_thread();

}  // namespace forebay
