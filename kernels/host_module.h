// The kernels as a host module: the table that Backend::load_module takes, and the arguments that a launch
// passes to its functions.
#pragma once

#include <type_traits>

#include "forebay/backend.h"
#include "forebay/block_runner.h"
#include "forebay/kernels.h"
#include "kernels/host_kernels.h"

namespace forebay {

// State that the launches of one Kernels object share. A host kernel is a plain function, so each launch
// carries a pointer.
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
