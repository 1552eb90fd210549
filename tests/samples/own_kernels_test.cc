// samples/07-own-kernels on the fake driver: own kernels train to the weights of samples/01-first-trainer.

#include <gtest/gtest.h>

#include <string>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

// The text behind the last "digest ".
std::string digest_of(const std::string& output) {
  const std::size_t at = output.rfind("digest ");
  return at == std::string::npos ? "none in " + output : output.substr(at + 7, 32);
}

TEST(OwnKernels, TrainToTheDigestOfTheFirstTrainer) {
  const Finished host = run_program({FIRST_TRAINER});
  ASSERT_EQ(host.exit_code, 0) << host.output;

  // Strict: a host that touches device memory dies, as on a GPU.
  const Finished device = run_program(
      {OWN_KERNELS},
      {{"FOREBAY_LIBCUDA", FAKE_CUDA}, {"FAKE_CUDA_STRICT", "1"}, {"FAKE_CUDA_KERNELS", FAKE_KERNELS}});

  ASSERT_EQ(device.exit_code, 0) << device.output;
  EXPECT_EQ(digest_of(device.output), digest_of(host.output)) << device.output;
  // Both stages printed it.
  EXPECT_NE(device.output.find(digest_of(host.output)), device.output.rfind(digest_of(host.output)));
}

TEST(OwnKernels, NameAnImageThatIsNoFile) {
  for (const std::string path : {"/missing.fatbin", "/tmp", "/dev/zero"}) {
    const Finished finished = run_program({OWN_KERNELS, path});
    EXPECT_EQ(finished.exit_code, 1);
    EXPECT_NE(finished.output.find("cannot read kernels from " + path), std::string::npos) << finished.output;
  }
}

}  // namespace
}  // namespace forebay::testing
