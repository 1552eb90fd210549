// A library for FAKE_CUDA_KERNELS: the sample's CUDA kernels, built for the host.
#include <array>
#include <utility>

#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/samples/simulated_kernels.h"

namespace forebay::gpt::kernels {
namespace {

template <std::size_t index>
void run(const fake_cuda::FakeLaunch& launch, void* const* arguments) {
  simulated_kernels()[index].kernel.function({launch.grid[0], launch.grid[1], launch.grid[2]},
                                             {launch.block[0], launch.block[1], launch.block[2]}, arguments);
}

template <std::size_t... indices>
std::array<fake_cuda::FakeKernel, kKernelCount> make_table(std::index_sequence<indices...>) {
  const SimulatedKernel* const kernels = simulated_kernels();
  return {{{kernels[indices].kernel.name, run<indices>, 1, &kernels[indices].argument_bytes}...}};
}

}  // namespace
}  // namespace forebay::gpt::kernels

extern "C" __attribute__((visibility("default"))) const forebay::fake_cuda::FakeKernelTable*
forebay_fake_kernels() {
  using namespace forebay::gpt::kernels;
  static const std::array<forebay::fake_cuda::FakeKernel, kKernelCount> kernels =
      make_table(std::make_index_sequence<kKernelCount>());
  static const forebay::fake_cuda::FakeKernelTable table = {kernels.data(), kernels.size()};
  return &table;
}
