// The library for FAKE_CUDA_KERNELS: the CUDA kernels, built for the host.
#include <array>
#include <utility>

#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/kernels/simulated_kernels.h"

namespace forebay::cuda_kernels {
namespace {

template <std::size_t index>
void run(const fake_cuda::FakeLaunch& launch, void* const* arguments) {
  simulated_kernels()[index].function({launch.grid[0], launch.grid[1], launch.grid[2]},
                                      {launch.block[0], launch.block[1], launch.block[2]}, arguments);
}

// Every kernel takes one struct.
template <std::size_t... indices>
std::array<fake_cuda::FakeKernel, kKernelCount> make_table(std::index_sequence<indices...>) {
  const SimulatedKernel* const kernels = simulated_kernels();
  return {{{kernels[indices].name, run<indices>, 1, &kernels[indices].argument_bytes}...}};
}

}  // namespace
}  // namespace forebay::cuda_kernels

extern "C" __attribute__((visibility("default"))) const forebay::fake_cuda::FakeKernelTable*
forebay_fake_kernels() {
  using namespace forebay::cuda_kernels;
  static const std::array<forebay::fake_cuda::FakeKernel, kKernelCount> kernels =
      make_table(std::make_index_sequence<kKernelCount>());
  static const forebay::fake_cuda::FakeKernelTable table = {kernels.data(), kernels.size()};
  return &table;
}
