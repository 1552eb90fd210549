// forebay-gpt against gpt_reference.py, a second implementation in double precision that was written from
// samples/gpt/README.md alone: the same initial weights from the same seed, then the same losses and gradient
// norms. So the sample agrees with its documentation, and so does the part of forebay below it.

#include <gtest/gtest.h>

#include <fstream>
#include <iostream>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

using Words = std::vector<std::string>;

Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

const Words kShape = {"--layers", "2", "--hidden", "48", "--heads", "3", "--sequence", "24", "--batch", "2"};
// The decay is so strong that losses show which parameters decay, and some gradients are clipped. The
// learning rate is low, and epsilon is above the rounding errors of gradients that are nearly 0; otherwise
// fp32 rounding alone soon changes losses by more than the limits below.
const Words kSensitive = {"--lr", "0.0005",  "--weight-decay", "10",        "--clip", "1.8",    "--beta1",
                          "0.8",  "--beta2", "0.97",           "--epsilon", "1e-4",   "--seed", "20261121"};
// Relative limits. fp32 differs by about 1e-8 (losses) and 1e-6 (norms). At 1e-4, a clipping factor with 1e-2
// added to the norm would pass.
const Words kLimits = {"--tolerance", "1e-5", "--first-tolerance", "1e-6"};

// The first Python that has NumPy, or "". The distribution's Python is tried too if another one comes first.
std::string python_with_numpy() {
  for (const Words& candidate : {Words{"/usr/bin/env", "python3"}, Words{"/usr/bin/python3"}}) {
    const Finished finished =
        run_program(candidate + Words{"-c", "import sys, numpy; print('python=' + sys.executable)"});
    const std::size_t found = finished.output.rfind("python=");
    if (finished.exit_code != 0 || found == std::string::npos) continue;
    const std::size_t begin = found + std::string("python=").size();
    return finished.output.substr(begin, finished.output.find('\n', begin) - begin);
  }
  return "";
}

class GptReference : public ::testing::Test {
 protected:
  void SetUp() override {
    python_ = python_with_numpy();
    if (python_.empty())
      GTEST_SKIP() << "no python3 with NumPy here, so nothing was compared (Debian: apt-get install "
                      "python3-numpy)";
    std::ofstream squares(squares_);
    for (int i = 0; i < 500; ++i) squares << i << " times " << i << " is " << i * i << "\n";
  }

  // The sample's arguments: first those that both programs understand, then its own.
  void train(const Words& common, const Words& own = {}) {
    const Finished finished =
        run_program(Words{FOREBAY_GPT} + kShape + text_ + common + own + Words{"--threads", "1", "--quiet"});
    ASSERT_EQ(finished.exit_code, 0) << finished.output;
  }
  Finished compare(const Words& arguments) {
    // Products this small are slower on more threads.
    const Finished finished =
        run_program(Words{python_, FOREBAY_REFERENCE} + kShape + text_ + kLimits + arguments,
                    {{"OPENBLAS_NUM_THREADS", "1"}, {"OMP_NUM_THREADS", "1"}});
    std::cout << finished.output;  // The differences found, for the test's log.
    return finished;
  }

  // Twenty steps of both from the sample's own initial weights, which are compared as well.
  void expect_agreement(const Words& common, const Words& own = {}) {
    ASSERT_NO_FATAL_FAILURE(train(common, own + Words{"--steps", "0", "--export", initial_}));
    ASSERT_NO_FATAL_FAILURE(train(common, own + Words{"--steps", "20", "--report", report_}));

    const Finished finished = compare(
        common + Words{"--steps", "20", "--initial", initial_, "--check-initial", "--expect", report_});

    EXPECT_EQ(finished.exit_code, 0) << finished.output;
  }

  std::string python_;
  TemporaryDirectory directory_;
  const std::string squares_ = directory_ / "squares.txt";
  const Words text_ = {"--text", squares_, FOREBAY_LICENSE};  // Two files: their order counts.
  const std::string initial_ = directory_ / "initial.safetensors";
  const std::string report_ = directory_ / "report.json";
};

TEST_F(GptReference, AgreesWithOneRankAndItsDefaults) {
  expect_agreement({});
}

TEST_F(GptReference, AgreesWithOneRank) {
  expect_agreement(kSensitive);
}

TEST_F(GptReference, AgreesWithThreeRanksThatShardEverything) {
  expect_agreement(kSensitive + Words{"--ranks", "3"}, {"--stage", "3"});
}

TEST_F(GptReference, AgreesWithFourRanksThatShardGradientsAndAccumulate) {
  expect_agreement(kSensitive + Words{"--ranks", "4", "--micro-steps", "2"}, {"--stage", "2"});
}

// Initial weights are small and all biases 0, where softmax and GELU are nearly linear. These weights are
// not.
TEST_F(GptReference, AgreesFromWeightsThatHaveLearned) {
  ASSERT_NO_FATAL_FAILURE(train({"--lr", "0.005", "--steps", "300"}, {"--export", initial_}));
  ASSERT_NO_FATAL_FAILURE(
      train(kSensitive + Words{"--steps", "20", "--initial", initial_}, {"--report", report_}));

  const Finished finished =
      compare(kSensitive + Words{"--steps", "20", "--initial", initial_, "--expect", report_});

  EXPECT_EQ(finished.exit_code, 0) << finished.output;
}

// The comparison itself can fail.
TEST_F(GptReference, DiffersFromARunOfAnotherLearningRateOrSeed) {
  ASSERT_NO_FATAL_FAILURE(train({}, {"--steps", "0", "--export", initial_}));
  ASSERT_NO_FATAL_FAILURE(train({"--steps", "5"}, {"--report", report_}));
  const Words common = {"--steps", "5", "--initial", initial_};

  const Finished same = compare(common + Words{"--check-initial", "--expect", report_});
  const Finished faster = compare(common + Words{"--expect", report_, "--lr", "0.00101"});
  const Finished other_samples = compare(common + Words{"--expect", report_, "--seed", "2"});
  const Finished other_weights = compare(common + Words{"--check-initial", "--seed", "2"});

  EXPECT_EQ(same.exit_code, 0) << same.output;
  EXPECT_EQ(faster.exit_code, 1) << faster.output;
  EXPECT_EQ(other_samples.exit_code, 1) << other_samples.output;
  EXPECT_EQ(other_weights.exit_code, 1) << other_weights.output;
}

}  // namespace
}  // namespace forebay::testing
