#include "tests/samples/simulated_kernels.h"

#include <array>
#include <cstring>
#include <memory>

#include "cuda/kernels.h"

namespace forebay::gpt::kernels {
namespace {

// A block whose threads run one after the other in each phase.
class SimulatedBlock {
 public:
  template <typename T>
  class Private {
   public:
    // Values that a kernel forgets to write show up as this pattern.
    Private() { std::memset(static_cast<void*>(values_), 0xCD, sizeof values_); }
    T& operator[](unsigned thread) { return values_[thread]; }

   private:
    T values_[kThreads];
  };

  SimulatedBlock(unsigned index, unsigned count) : index_(index), count_(count) {}

  unsigned index() const { return index_; }
  unsigned count() const { return count_; }

  template <typename Function>
  void each(Function f) {
    for (unsigned thread = 0; thread < kThreads; ++thread) f(thread);
  }

  void fold(float* values) {
    for (float* warp = values; warp != values + kThreads; warp += kLanes) {
      for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
        for (std::size_t lane = 0; lane < width; ++lane) warp[lane] += warp[lane + width];
      }
    }
  }

 private:
  unsigned index_, count_;
};

template <typename Arguments, typename Shared>
void simulate(const Dimensions& grid, const Dimensions&, void* const* arguments) {
  const auto& argument = *static_cast<const Arguments*>(arguments[0]);
  for (unsigned index = 0; index < grid.x; ++index) {
    Shared shared;
    std::memset(static_cast<void*>(&shared), 0xCD, sizeof shared);
    SimulatedBlock block(index, grid.x);
    run(block, argument, shared);
  }
}

#define FOREBAY_SIMULATED_KERNEL(name, Arguments, Shared) \
  {{#name, simulate<Arguments, Shared>}, sizeof(Arguments)},
constexpr SimulatedKernel kKernels[] = {FOREBAY_GPT_KERNELS(FOREBAY_SIMULATED_KERNEL)};
static_assert(std::size(kKernels) == kKernelCount);

#define FOREBAY_HOST_KERNEL(name, Arguments, Shared) {#name, simulate<Arguments, Shared>},
constexpr HostKernel kTable[] = {FOREBAY_GPT_KERNELS(FOREBAY_HOST_KERNEL){nullptr, nullptr}};

}  // namespace

const SimulatedKernel* simulated_kernels() noexcept {
  return kKernels;
}
const HostKernel* simulated_kernel_table() noexcept {
  return kTable;
}

}  // namespace forebay::gpt::kernels
