// The numbered samples run with the commands in their first lines.

#include <gtest/gtest.h>

#include <cstdio>
#include <sstream>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

TEST(FirstTrainer, LearnsAndGivesOneDigestForBothStages) {
  const Finished finished = run_program({FIRST_TRAINER});

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  struct Line {
    int stage;
    double first_loss, last_loss;
    long bytes;
    std::string digest;
  };
  std::vector<Line> lines;
  std::istringstream output(finished.output);
  for (std::string text; std::getline(output, text);) {
    Line line{};
    char digest[33] = {};
    ASSERT_EQ(std::sscanf(text.c_str(),
                          "stage %d: loss %lf -> %lf, %ld bytes of model states per rank, digest %32s",
                          &line.stage, &line.first_loss, &line.last_loss, &line.bytes, digest),
              5)
        << text;
    line.digest = digest;
    lines.push_back(line);
  }
  ASSERT_EQ(lines.size(), 2u) << finished.output;
  for (const Line& line : lines) EXPECT_LT(line.last_loss, line.first_loss / 100);
  EXPECT_EQ(lines[0].digest, lines[1].digest);
  EXPECT_EQ(lines[0].bytes, 3 * lines[1].bytes) << "stage 3 holds a third of stage 0's bytes";
}

TEST(ActivationCheckpoints, TakeLessAndLessOfTheDeviceForTheSameGradients) {
  const Finished finished = run_program({ACTIVATION_CHECKPOINTS});

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  std::vector<long> device, host;
  std::istringstream output(finished.output);
  for (std::string text; std::getline(output, text);) {
    long on_device = 0, on_host = 0;
    ASSERT_EQ(std::sscanf(text.c_str(), "%*s %ld bytes on the device, %ld on the host", &on_device, &on_host),
              2)
        << text;
    EXPECT_NE(text.find("the same gradients"), std::string::npos) << text;
    device.push_back(on_device);
    host.push_back(on_host);
  }
  ASSERT_EQ(device.size(), 3u) << finished.output;
  EXPECT_LT(device[1], device[0]);
  EXPECT_LT(device[2], device[1]);
  EXPECT_EQ(host[1], 0);
  EXPECT_GT(host[2], 0);
}

}  // namespace
}  // namespace forebay::testing
