// The model's kernels built for the host. A HostBackend or the fake driver loads them.
#pragma once

#include <cstddef>

#include "forebay/backend.h"

namespace forebay::gpt::kernels {

struct SimulatedKernel {
  HostKernel kernel;
  std::size_t argument_bytes;  // Each kernel takes one struct.
};

inline constexpr std::size_t kKernelCount = 23;

// An array of kKernelCount.
const SimulatedKernel* simulated_kernels() noexcept;
// The same, ended by a null name: for Backend::load_module.
const HostKernel* simulated_kernel_table() noexcept;

}  // namespace forebay::gpt::kernels
