// The kernels as a host module: the table that Backend::load_module takes, and what a launch hands to its
// functions.
#pragma once

#include <memory>
#include <string>
#include <type_traits>

#include "forebay/backend.h"
#include "forebay/kernels.h"
#include "host_kernels.h"

namespace forebay {

// Cuts a count into fixed blocks and runs them on a bounded number of threads. The blocks do not depend on
// the number of threads, and no kernel's bits depend on the blocks.
//
// Threads: run() may be called from several streams' threads at once; they share the same threads.
class BlockRunner {
 public:
  // `thread_count` 0: as many as the machine has. Under ThreadSanitizer always 1: TBB's own synchronization
  // is not instrumented, so every block would look like a race.
  explicit BlockRunner(int thread_count);
  ~BlockRunner();
  BlockRunner(const BlockRunner&) = delete;
  BlockRunner& operator=(const BlockRunner&) = delete;

  int thread_count() const noexcept { return thread_count_; }

  // Calls function(context, begin, end) over all of [0, count), cut at multiples of `block`.
  void run(std::size_t count, std::size_t block,
           void (*function)(const void* context, std::size_t begin, std::size_t end),
           const void* context) const;

 private:
  struct Arena;
  std::unique_ptr<Arena> arena_;  // Null when one thread is all there is.
  int thread_count_;
};

// What the launches of one Kernels object share. A host kernel is a plain function, so each launch carries a
// pointer.
struct HostContext {
  explicit HostContext(const KernelOptions& options)
      : kernels(host_kernels::simd_kernels()), runner(options.thread_count) {}

  const host_kernels::RangeKernels& kernels;
  BlockRunner runner;
};

// The one argument of a launch.
template <typename Arguments>
struct HostLaunch {
  const HostContext* context;
  Arguments arguments;
  static_assert(std::is_trivially_copyable_v<Arguments>);
};

// Ends with a null name.
const HostKernel* host_kernel_table() noexcept;

}  // namespace forebay
