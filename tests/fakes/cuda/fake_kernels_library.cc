// A library of host kernels as FAKE_CUDA_KERNELS names it, for the test of that.
#include "tests/fakes/cuda/fake_cuda.h"

namespace {

constexpr std::size_t kBytes[] = {sizeof(int*), sizeof(int)};
constexpr forebay::fake_cuda::FakeKernel kKernel[] = {
    {"add_from_library",
     [](const forebay::fake_cuda::FakeLaunch& launch, void* const* arguments) {
       **static_cast<int**>(arguments[0]) +=
           *static_cast<int*>(arguments[1]) * static_cast<int>(launch.grid[0]);
     },
     2, kBytes}};
constexpr forebay::fake_cuda::FakeKernelTable kTable{kKernel, 1};

}  // namespace

extern "C" [[gnu::visibility("default")]] const forebay::fake_cuda::FakeKernelTable* forebay_fake_kernels() {
  return &kTable;
}
