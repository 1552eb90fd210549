// The kernels' image, embedded when the library is built: a fat binary where nvcc was found, otherwise a text
// that no driver takes.
#pragma once

#include <cstddef>

namespace forebay::cuda_kernels {

struct KernelImage {
  const void* data;
  std::size_t bytes;
  // "sm_80 sm_90 and PTX compute_90, CUDA 12.4"; null when there was no nvcc.
  const char* targets;
};

KernelImage kernel_image() noexcept;

}  // namespace forebay::cuda_kernels
