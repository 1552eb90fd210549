// The numbered samples about offload run with the commands in their first lines.

#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

class OffloadSamples : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(std::filesystem::is_empty(directory_.path())); }

  TemporaryDirectory directory_;
};

TEST_F(OffloadSamples, ABufferComesBackFromItsFile) {
  const Finished finished = run_program({SPILL_AND_FETCH, directory_.path()});

  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("the same bytes"), std::string::npos) << finished.output;
  EXPECT_NE(finished.output.find("in " + directory_.path()), std::string::npos) << finished.output;
}

TEST_F(OffloadSamples, AnOptimizerInFilesGivesTheBitsOfOneInMemory) {
  const Finished finished = run_program({ADAM_IN_FILES, directory_.path()});

  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("bit for bit the same as with states in memory"), std::string::npos)
      << finished.output;
}

TEST_F(OffloadSamples, AModelBeyondTheDeviceTrainsToOneDigest) {
  const Finished finished = run_program({BEYOND_THE_DEVICE, directory_.path()});

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  std::vector<std::string> digests;
  std::istringstream lines(finished.output);
  for (std::string line; std::getline(lines, line);) {
    if (const std::size_t at = line.find("digest "); at != std::string::npos)
      digests.push_back(line.substr(at + 7));
  }
  ASSERT_EQ(digests.size(), 3u) << finished.output;
  EXPECT_EQ(digests[0].size(), 32u);
  EXPECT_EQ(digests[1], digests[0]);
  EXPECT_EQ(digests[2], digests[0]);
  EXPECT_NE(finished.output.find("nothing offloaded:           the plan needs"), std::string::npos)
      << finished.output;
}

TEST_F(OffloadSamples, NameADirectoryThatIsNotThere) {
  for (const char* sample : {SPILL_AND_FETCH, ADAM_IN_FILES, BEYOND_THE_DEVICE}) {
    const Finished finished = run_program({sample, directory_ / "missing"});
    EXPECT_EQ(finished.exit_code, 1) << finished.output;
    EXPECT_NE(finished.output.find(directory_ / "missing"), std::string::npos) << finished.output;
  }
}

}  // namespace
}  // namespace forebay::testing
