// ThreadBinding: keeps the calling thread, and the threads that it starts meanwhile, on given processors.
//
// It is for plain threads: those of a file store (started by the thread that makes the store), of a backend's
// streams, of a trainer. The threads of host kernels are TBB's, which come and go: BlockRunner::create_on
// places them.
#pragma once

#include <vector>

#include "forebay/span.h"
#include "forebay/status.h"

namespace forebay {

// Threads: created and destroyed on the same thread.
class ThreadBinding {
 public:
  // Errors: kInvalidArgument for no processors or a negative one; kUnsupported when the system refuses,
  // because none of them exists or may be used. The thread is not moved then.
  static Result<ThreadBinding> create(Span<const int> processors);

  ThreadBinding(ThreadBinding&& other) noexcept;
  // The thread may use its earlier processors again. Threads that were started meanwhile stay bound.
  ~ThreadBinding();

 private:
  explicit ThreadBinding(std::vector<unsigned long> previous) : previous_(std::move(previous)) {}

  std::vector<unsigned long> previous_;  // In the form of the system; empty: nothing to undo.
};

// The processors that the calling thread may use, in ascending order; empty when the system does not say.
std::vector<int> usable_processors_of_thread();

}  // namespace forebay
