// Sample 06: the port of a trainer in C is a small diff, has the losses of the plain program, and one digest
// at every ZeRO stage.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

using Words = std::vector<std::string>;

struct Training {
  std::vector<double> losses;
  std::string digest;
};

Training training_of(const std::string& output) {
  Training training;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (const std::size_t at = line.find("loss "); at != std::string::npos)
      training.losses.push_back(std::stod(line.substr(at + 5)));
    if (line.rfind("digest ", 0) == 0) training.digest = line.substr(7);
  }
  return training;
}

Training train(const std::string& program, const Words& options, int ranks = 1) {
  const TemporaryDirectory store;
  std::vector<std::unique_ptr<Process>> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    Words command = {program, PORT_TEXT};
    command.insert(command.end(), options.begin(), options.end());
    processes.push_back(
        std::make_unique<Process>(command, Process::Variables{{"FOREBAY_RANK", std::to_string(rank)},
                                                              {"FOREBAY_SIZE", std::to_string(ranks)},
                                                              {"FOREBAY_STORE", store.path()}}));
  }
  Training first;
  for (int rank = 0; rank < ranks; ++rank) {
    const Finished finished = processes[static_cast<std::size_t>(rank)]->finish();
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    if (rank == 0) first = training_of(finished.output);
  }
  return first;
}

TEST(Port, IsADiffOfAtMost60Lines) {
  const Finished finished =
      run_program({"/usr/bin/diff", PORT_FOLDER "/gpt2.c", PORT_FOLDER "/gpt2_forebay.c"});
  ASSERT_EQ(finished.exit_code, 1);
  int changed = 0;
  std::istringstream lines(finished.output);
  for (std::string line; std::getline(lines, line);) changed += line[0] == '<' || line[0] == '>' ? 1 : 0;
  EXPECT_LE(changed, 60) << finished.output;
}

TEST(Port, RefusesAnOptionWithoutAValue) {
  const Finished finished = run_program({GPT2_FOREBAY, PORT_TEXT, "stage", "3", "offload"});
  EXPECT_NE(finished.exit_code, 0);
  EXPECT_NE(finished.output.find("value is null"), std::string::npos) << finished.output;
}

TEST(Port, HasTheLossesOfThePlainProgram) {
  const Training plain = train(GPT2_PLAIN, {});
  ASSERT_EQ(plain.losses.size(), 40U);
  EXPECT_LT(plain.losses.back(), plain.losses.front() - 1);

  std::string digest;
  for (const Words& options : {Words{"stage", "0"}, Words{"stage", "1"}, Words{"stage", "2"},
                               Words{"stage", "3"}, Words{"stage", "2", "offload", "optimizer"},
                               Words{"stage", "3", "offload", "optimizer+parameters"}}) {
    const Training ported = train(GPT2_FOREBAY, options);
    ASSERT_EQ(ported.losses.size(), plain.losses.size());
    for (std::size_t i = 0; i < plain.losses.size(); ++i)
      EXPECT_NEAR(ported.losses[i], plain.losses[i], 1e-5) << "step " << i;
    EXPECT_EQ(ported.digest.size(), 32U);
    if (digest.empty()) digest = ported.digest;
    EXPECT_EQ(ported.digest, digest);
  }
}

TEST(Port, HasOneDigestOnThreeRanks) {
  const std::string digest = train(GPT2_FOREBAY, {"stage", "0"}, 3).digest;
  EXPECT_EQ(digest.size(), 32U);
  for (const Words& options : {Words{"stage", "1"}, Words{"stage", "3", "offload", "optimizer"}})
    EXPECT_EQ(train(GPT2_FOREBAY, options, 3).digest, digest);
}

}  // namespace
}  // namespace forebay::testing
