// Local ranks on cuda backends over the fake driver: one GPU that all share, and one for each.

#include <gtest/gtest.h>

#include "forebay/local_communicator.h"
#include "tests/collectives/communicator_conformance.h"
#include "tests/support/fake_gpu.h"

namespace forebay::testing {
namespace {

class CudaWorld final : public CommunicatorWorld {
 public:
  CudaWorld(int size, std::chrono::milliseconds deadline, const fake_cuda::FakeOptions& options)
      : gpu_(options),
        device_count_(options.device_count),
        group_(LocalGroup::create(size, {.deadline = deadline})) {}
  std::unique_ptr<Backend> create_backend(int rank) override {
    return gpu_.create_backend(rank % device_count_);
  }
  Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels& kernels) override {
    return group_->communicator(rank, backend, kernels);
  }

 private:
  FakeGpu gpu_;
  const int device_count_;
  const std::shared_ptr<LocalGroup> group_;  // Shared with the communicators it hands out.
};

CommunicatorFactory factory(const std::string& name, const fake_cuda::FakeOptions& options) {
  return {name, "",
          [options](int size, std::chrono::milliseconds deadline) {
            return std::make_unique<CudaWorld>(size, deadline, options);
          },
          true};
}

fake_cuda::FakeOptions reordering() {
  fake_cuda::FakeOptions options = strict_gpu();
  options.seed = test_seed();
  return options;
}

fake_cuda::FakeOptions three_devices() {
  fake_cuda::FakeOptions options = strict_gpu();
  options.device_count = 3;
  return options;
}

INSTANTIATE_TEST_SUITE_P(LocalOnCuda, CommunicatorConformance,
                         ::testing::Combine(::testing::Values(factory("one_gpu", strict_gpu()),
                                                              factory("one_gpu_reordering", reordering()),
                                                              factory("three_gpus", three_devices())),
                                            ::testing::Values(1, 2, 3, 4)),
                         conformance_name);

}  // namespace
}  // namespace forebay::testing
