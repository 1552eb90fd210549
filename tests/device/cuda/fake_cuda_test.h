// Shared by the tests of the cuda backend on the fake driver: the fake, a kernel for it, and the question
// whether everything was given back.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "forebay/cuda_backend.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace forebay::fake_cuda {

// PTX of `store(int* target, int value)`: *target = value. A real driver compiles it for its device; the fake
// goes by the kernel's name.
inline constexpr char kStorePtx[] = R"(.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 target, .param .u32 value) {
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [target];
  ld.param.u32 %r1, [value];
  cvta.to.global.u64 %rd2, %rd1;
  st.global.u32 [%rd2], %r1;
  ret;
}
)";
inline constexpr ModuleImage kStoreImage{.image = kStorePtx, .image_bytes = sizeof(kStorePtx) - 1};

inline const FakeKernelTable& store_kernels() {
  static constexpr std::size_t kBytes[] = {sizeof(int*), sizeof(int)};
  static constexpr FakeKernel kKernels[] = {{"store",
                                             [](const FakeLaunch&, void* const* arguments) {
                                               **static_cast<int**>(arguments[0]) =
                                                   *static_cast<int*>(arguments[1]);
                                             },
                                             2, kBytes}};
  static constexpr FakeKernelTable kTable{kKernels, 1};
  return kTable;
}

// The fake of this build, as the driver that the backend opens in this process.
inline FakeCuda choose_fake() {
  ::setenv("FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA, 1);
  return FakeCuda::open(FOREBAY_FAKE_LIBCUDA);
}

// Small and strict: touching device memory from the host kills the test.
inline FakeOptions strict_options() {
  FakeOptions options;
  options.memory_bytes = 64u << 20;
  options.granularity = 64u << 10;
  options.host_access = HostAccess::kDenied;
  return options;
}

// The driver that FOREBAY_LIBCUDA names, as it is before cuInit, with these options and the kernel above.
inline void start_fake(const FakeCuda& fake, const FakeOptions& options) {
  fake.reset();
  ASSERT_EQ(fake.configure(options), 0);
  fake.register_kernels(store_kernels());
}

inline void expect_nothing_left(const FakeCuda& fake) {
  const FakeAccount account = fake.accounts();
  EXPECT_EQ(account.live_handles(), 0u)
      << "contexts " << account.contexts << ", streams " << account.streams << ", events " << account.events
      << ", modules " << account.modules << ", reservations " << account.reservations << ", chunks "
      << account.chunks << ", mappings " << account.mappings << ", allocations " << account.allocations
      << ", pinned " << account.host_registrations;
  EXPECT_EQ(account.device_bytes, 0u);
  EXPECT_EQ(account.operations, 0u);
  EXPECT_EQ(account.orphans, 0u);
  EXPECT_EQ(account.hazards, 0u);
  EXPECT_EQ(account.forbidden_calls, 0u);
}

}  // namespace forebay::fake_cuda
