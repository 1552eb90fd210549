// FakeGpu: the fake CUDA driver of this build as the one that cuda backends of this process open, with the
// product's own CUDA kernels built for the host. Small, and strict: a host that touches device memory dies.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "forebay/cuda_backend.h"
#include "forebay/error.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace forebay::testing {

inline fake_cuda::FakeOptions strict_gpu() {
  fake_cuda::FakeOptions options;
  options.memory_bytes = std::size_t{256} << 20;
  options.granularity = 64u << 10;
  options.host_access = fake_cuda::HostAccess::kDenied;
  return options;
}

inline fake_cuda::FakeOptions gpus(int count) {
  fake_cuda::FakeOptions options = strict_gpu();
  options.device_count = count;
  return options;
}

// Alive, one at a time, longer than any backend.
class FakeGpu {
 public:
  explicit FakeGpu(const fake_cuda::FakeOptions& options = strict_gpu()) {
    ::setenv("FAKE_CUDA_KERNELS", FOREBAY_FAKE_KERNELS, 1);
    ::setenv("FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA, 1);
    fake_ = fake_cuda::FakeCuda::open(FOREBAY_FAKE_LIBCUDA);
    fake_.reset();
    EXPECT_EQ(fake_.configure(options), 0);
  }
  // Everything was given back, and nothing was touched that was not there.
  ~FakeGpu() {
    const fake_cuda::FakeAccount account = fake_.accounts();
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
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  std::unique_ptr<Backend> create_backend(int ordinal = 0) {
    return value_or_throw(CudaBackend::create({.ordinal = ordinal}));
  }
  const fake_cuda::FakeCuda& controls() const { return fake_; }

 private:
  fake_cuda::FakeCuda fake_;
};

}  // namespace forebay::testing
