// Training on the fake driver with every kernel executed as it was compiled: forebay's own and the sample's.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>

#include "cuda/image.h"
#include "forebay/kernels.h"
#include "kernels/cuda/image.h"
#include "tests/end_to_end/small_run.h"
#include "tests/support/fake_gpu.h"

namespace forebay::testing {
namespace {

void expect_the_bits_of_the_host(const Words& more) {
  if (cuda_kernels::kernel_image().targets == nullptr || !gpt::kernels::kernel_image_is_compiled()) {
    GTEST_SKIP() << "nvcc was not found when this was built, so there is no PTX to execute";
  }
  const Words words = kSmall + Words{"--ranks", "2", "--stage", "3"} + more;
  const gpt::TrainingReport host = train(words + kOnHost);
  const FakeGpu gpu;

  const gpt::TrainingReport report = train(words + Words{"--device", "cuda"});

  EXPECT_EQ(report.digest, host.digest);
  EXPECT_EQ(report.loss, host.loss);
  EXPECT_EQ(report.grad_norm, host.grad_norm);
  const std::uint64_t launches = gpu.controls().call_count("cuLaunchKernel");
  std::printf("digest %s, %llu launches\n", report.digest.c_str(), static_cast<unsigned long long>(launches));
  EXPECT_GT(launches, 500u);
}

TEST(PtxTraining, FiveStepsAtStage3GiveTheBitsOfTheHost) {
  expect_the_bits_of_the_host({"--dtype", "bf16"});
}

TEST(PtxTraining, WithDropoutRecomputationAndFp16GivesTheBitsOfTheHost) {
  expect_the_bits_of_the_host({"--dtype", "fp16", "--dropout", "0.1", "--recompute", "every:2"});
}

TEST(PtxTraining, WithMuonGivesTheBitsOfTheHost) {
  expect_the_bits_of_the_host({"--dtype", "bf16", "--optimizer", "muon"});
}

TEST(PtxTraining, WithAdafactorGivesTheBitsOfTheHost) {
  expect_the_bits_of_the_host({"--dtype", "bf16", "--optimizer", "adafactor"});
}

// Machine code for 7.5 to 9.0, 10.0 and 12.0, or PTX, which later devices of an architecture take too.
TEST(CompiledImage, HasCodeForEveryDeviceFromTuringOn) {
  if (cuda_kernels::kernel_image().targets == nullptr)
    GTEST_SKIP() << "nvcc was not found when this was built, so there is no image";
  for (const int capability : {70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
    fake_cuda::FakeOptions options = strict_gpu();
    options.compute_capability = capability;
    FakeGpu gpu(options);
    const std::unique_ptr<Backend> backend = gpu.create_backend();
    const Status status = Kernels::create(*backend).status();
    EXPECT_EQ(status.ok(), capability >= 75) << capability << ": " << status.message();
  }
}

}  // namespace
}  // namespace forebay::testing
