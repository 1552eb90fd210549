// The device side of the model's kernels: a block of threads, and a wrapper around each body.
#include "cuda/kernels.h"

namespace forebay::gpt::kernels {
namespace {

struct DeviceBlock {
  template <typename T>
  struct Private {
    T value;
    __device__ T& operator[](unsigned) { return value; }
  };

  static __device__ unsigned index() { return blockIdx.x; }
  static __device__ unsigned count() { return gridDim.x; }

  template <typename Function>
  static __device__ void each(Function f) {
    f(threadIdx.x);
    __syncthreads();
  }

  // Folds the lanes of every warp: values[32 w] becomes the sum of the 32 from there on.
  static __device__ void fold(float* values) {
    float value = values[threadIdx.x];
    for (unsigned width = kLanes / 2; width > 0; width /= 2)
      value += __shfl_down_sync(0xFFFFFFFFu, value, width);
    values[threadIdx.x] = value;
    __syncthreads();
  }
};

}  // namespace

#define FOREBAY_DEFINE_KERNEL(name, Arguments, Shared)                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ Arguments arguments) { \
    __shared__ Shared shared;                                                                          \
    DeviceBlock block;                                                                                 \
    run(block, arguments, shared);                                                                     \
  }
FOREBAY_GPT_KERNELS(FOREBAY_DEFINE_KERNEL)

}  // namespace forebay::gpt::kernels
