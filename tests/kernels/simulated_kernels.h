// The CUDA kernels built for the host, by their names in the image. A fake driver launches them.
#pragma once

#include <cstddef>

#include "forebay/backend.h"
#include "kernels/cuda/kernel_list.h"

namespace forebay::cuda_kernels {

struct SimulatedKernel {
  const char* name;
  // Runs a launch: the one argument is the launch struct. A defect of the kernel (a divergent barrier, a
  // wide access that is not aligned) ends the program with a message.
  void (*function)(const Dimensions& grid, const Dimensions& block, void* const* arguments);
  std::size_t argument_bytes;
};

#define FOREBAY_ONE_MORE(name, ...) +1
inline constexpr std::size_t kKernelCount =
    0 FOREBAY_ELEMENT_KERNELS(FOREBAY_ONE_MORE) FOREBAY_BLOCK_KERNELS(FOREBAY_ONE_MORE);
#undef FOREBAY_ONE_MORE

// kKernelCount of them.
const SimulatedKernel* simulated_kernels() noexcept;

}  // namespace forebay::cuda_kernels
