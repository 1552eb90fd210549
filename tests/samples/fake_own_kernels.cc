// A library for FAKE_CUDA_KERNELS: the kernels of samples/07-own-kernels, built for the host. Their threads
// run one after the other, which is enough for kernels without a barrier.
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "tests/fakes/cuda/fake_cuda.h"

namespace {

struct Index {
  unsigned x;
};
thread_local Index blockIdx, blockDim, threadIdx;

}  // namespace

#define __device__
#define __global__
#include "samples/07-own-kernels/own_kernels.cu"

namespace {

using namespace forebay::fake_cuda;

template <auto kernel, typename... Arguments, std::size_t... indices>
void run_threads(void (*)(Arguments...), const FakeLaunch& launch, void* const* arguments,
                 std::index_sequence<indices...>) {
  blockDim.x = launch.block[0];
  for (blockIdx.x = 0; blockIdx.x < launch.grid[0]; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < launch.block[0]; ++threadIdx.x)
      kernel(*static_cast<Arguments*>(arguments[indices])...);
  }
}

// All arguments are pointers.
constexpr std::size_t kPointerBytes[5] = {sizeof(void*), sizeof(void*), sizeof(void*), sizeof(void*),
                                          sizeof(void*)};

template <auto kernel, typename... Arguments>
constexpr FakeKernel describe(const char* name, void (*)(Arguments...)) {
  return {name,
          [](const FakeLaunch& launch, void* const* arguments) {
            run_threads<kernel>(kernel, launch, arguments, std::index_sequence_for<Arguments...>());
          },
          sizeof...(Arguments), kPointerBytes};
}

#define FOREBAY_FAKE(name) describe<name>(#name, name)
constexpr FakeKernel kKernels[] = {FOREBAY_FAKE(first_layer_forward), FOREBAY_FAKE(second_layer_forward),
                                   FOREBAY_FAKE(second_layer_backward), FOREBAY_FAKE(first_layer_backward)};
constexpr FakeKernelTable kTable{kKernels, std::size(kKernels)};

}  // namespace

extern "C" __attribute__((visibility("default"))) const FakeKernelTable* forebay_fake_kernels() {
  return &kTable;
}
