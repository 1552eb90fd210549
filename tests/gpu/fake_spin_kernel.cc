// The kernel of gpu-questions for the fake driver. It keeps its stream busy for a time, then writes.
#include <chrono>
#include <cstdint>
#include <thread>

#include "tests/fakes/cuda/fake_cuda.h"

namespace {

using forebay::fake_cuda::FakeKernel;
using forebay::fake_cuda::FakeKernelTable;
using forebay::fake_cuda::FakeLaunch;

void spin(const FakeLaunch&, void* const* arguments) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(*static_cast<std::uint64_t*>(arguments[0])));
  if (auto* target = *static_cast<std::uint32_t**>(arguments[1])) *target = 1;
}

constexpr std::size_t kArgumentBytes[] = {sizeof(std::uint64_t), sizeof(std::uint64_t)};
const FakeKernel kKernel = {"forebay_spin", spin, 2, kArgumentBytes};
const FakeKernelTable kTable = {&kKernel, 1};

}  // namespace

extern "C" __attribute__((visibility("default"))) const FakeKernelTable* forebay_fake_kernels() {
  return &kTable;
}
