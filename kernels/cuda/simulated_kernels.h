// The CUDA kernels built for the host, by the names they have in the image: what a fake driver launches.
#pragma once

#include <cstddef>

#include "forebay/backend.h"

namespace forebay::cuda_kernels {

struct SimulatedKernel {
  const char* name;
  // Runs a launch: the one argument is the launch struct. A defect of the kernel (a divergent barrier, a
  // wide access that is not aligned) ends the program with a message.
  void (*function)(const Dimensions& grid, const Dimensions& block, void* const* arguments);
  std::size_t argument_bytes;
};

// Ends with a null name.
const SimulatedKernel* simulated_kernels() noexcept;

}  // namespace forebay::cuda_kernels
