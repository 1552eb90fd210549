// The numbered samples run as their first lines say.

#include <gtest/gtest.h>

#include <regex>

#include "support/process.h"

namespace forebay::testing {
namespace {

TEST(FirstTrainer, LearnsAndGivesOneDigestForBothStages) {
  const Finished finished = run_program({FIRST_TRAINER});

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  const std::regex line("stage (\\d): loss ([0-9.]+) -> ([0-9.]+), (\\d+) bytes .* digest ([0-9a-f]{32})");
  std::vector<std::smatch> matches;
  for (std::sregex_iterator at(finished.output.begin(), finished.output.end(), line), end; at != end; ++at) {
    matches.push_back(*at);
  }
  ASSERT_EQ(matches.size(), 2u) << finished.output;
  for (const std::smatch& match : matches) EXPECT_LT(std::stod(match[3]), std::stod(match[2]) / 100);
  EXPECT_EQ(matches[0][5], matches[1][5]);
  EXPECT_EQ(std::stol(matches[0][4]), 3 * std::stol(matches[1][4]))
      << "stage 3 holds a third of stage 0's bytes";
}

}  // namespace
}  // namespace forebay::testing
