// The device side of every kernel: a wrapper around its body.
#include "kernels/cuda/adafactor.h"
#include "kernels/cuda/blocks.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/kernel_list.h"
#include "kernels/cuda/muon.h"

namespace forebay::cuda_kernels {
namespace {

struct DeviceContext {
  static __device__ unsigned thread() { return threadIdx.x; }
  static __device__ unsigned block() { return blockIdx.x; }
  static __device__ unsigned block_size() { return blockDim.x; }
  static __device__ unsigned grid_size() { return gridDim.x; }
  static __device__ void barrier() { __syncthreads(); }
  static __device__ double shuffle_down(double value, unsigned delta) {
    return __shfl_down_sync(0xFFFFFFFFu, value, delta);
  }
};

}  // namespace

#define FOREBAY_DEFINE_ELEMENT_KERNEL(name, ...)                                     \
  extern "C" __global__ void __launch_bounds__(kBlockSize, kBlocksPerMultiprocessor) \
      name(const __grid_constant__ ElementLaunch<__VA_ARGS__::Arguments> launch) {   \
    run_elements<__VA_ARGS__>(DeviceContext(), launch);                              \
  }
FOREBAY_ELEMENT_KERNELS(FOREBAY_DEFINE_ELEMENT_KERNEL)

#define FOREBAY_DEFINE_BLOCK_KERNEL(name, ...)                            \
  extern "C" __global__ void __launch_bounds__(kBlockSize)                \
      name(const __grid_constant__ typename __VA_ARGS__::Launch launch) { \
    __shared__ __VA_ARGS__::Shared shared;                                \
    __VA_ARGS__::run(DeviceContext(), launch, shared);                    \
  }
FOREBAY_BLOCK_KERNELS(FOREBAY_DEFINE_BLOCK_KERNEL)

}  // namespace forebay::cuda_kernels
