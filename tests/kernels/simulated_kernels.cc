#include "tests/kernels/simulated_kernels.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "kernels/cuda/adafactor.h"
#include "kernels/cuda/blocks.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/muon.h"
#include "kernels/float_environment.h"
#include "tests/kernels/simt.h"

namespace forebay::cuda_kernels {
namespace {

template <typename Kernel>
void simulate_elements(const Dimensions& grid, const Dimensions& block, void* const* arguments) {
  const auto& launch = *static_cast<const ElementLaunch<typename Kernel::Arguments>*>(arguments[0]);
  const DefaultFloatEnvironment environment;
  for (unsigned index = 0; index < grid.x; ++index) {
    for (unsigned thread = 0; thread < block.x; ++thread) {
      run_elements<Kernel>(simt::ElementContext(thread, index, block.x, grid.x), launch);
    }
  }
}

template <typename Kernel>
void simulate_blocks(const Dimensions& grid, const Dimensions& block, void* const* arguments) {
  const DefaultFloatEnvironment environment;
  const std::string failure = simt::run_blocks(
      grid, block, sizeof(typename Kernel::Shared),
      [](const simt::BlockContext& context, void* shared, const void* launch) {
        Kernel::run(context, *static_cast<const typename Kernel::Launch*>(launch),
                    *static_cast<typename Kernel::Shared*>(shared));
      },
      arguments[0]);
  if (failure.empty()) return;
  std::fprintf(stderr, "simulated kernel: %s\n", failure.c_str());
  std::abort();
}

#define FOREBAY_SIMULATED_ELEMENTS(name, ...) \
  {#name, simulate_elements<__VA_ARGS__>, sizeof(ElementLaunch<__VA_ARGS__::Arguments>)},
#define FOREBAY_SIMULATED_BLOCKS(name, ...) \
  {#name, simulate_blocks<__VA_ARGS__>, sizeof(__VA_ARGS__::Launch)},

}  // namespace

const SimulatedKernel* simulated_kernels() noexcept {
  static constexpr SimulatedKernel kTable[kKernelCount] = {
      FOREBAY_ELEMENT_KERNELS(FOREBAY_SIMULATED_ELEMENTS) FOREBAY_BLOCK_KERNELS(FOREBAY_SIMULATED_BLOCKS)};
  return kTable;
}

}  // namespace forebay::cuda_kernels
