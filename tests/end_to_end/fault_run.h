// Ranks of fault_probe as processes, and checks of the ranks that are left after one has failed.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace forebay::testing {

// The lines that one rank has printed.
struct Told {
  std::vector<std::string> digests;            // After each step, from 0 on.
  std::vector<unsigned long long> operations;  // Issued by then.
  std::string cause;
  unsigned long long committed_step = 0;
  std::string committed_digest;
  bool done = false;
};

inline Told read_told(const std::string& output) {
  Told told;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "step") {
      unsigned long long number = 0;
      unsigned long long operations = 0;
      std::string digest;
      words >> number >> digest >> operations;
      told.digests.push_back(digest);
      told.operations.push_back(operations);
    } else if (what == "failed") {
      told.cause = line.substr(line.find(' ') + 1);
    } else if (what == "committed") {
      words >> told.committed_step >> told.committed_digest;
    } else if (what == "done") {
      told.done = true;
    }
  }
  return told;
}

// The steps that are committed once the first `count` collectives have ended well. The five units' parameters
// are gathered after the norms at stages 1 and 2.
inline unsigned long long committed_by(const Told& undisturbed, int stage, unsigned long long count) {
  const unsigned long long after = stage == 1 || stage == 2 ? 5 : 0;
  unsigned long long steps = 0;
  for (std::size_t step = 1; step < undisturbed.operations.size(); ++step) {
    if (undisturbed.operations[step] - after <= count) ++steps;
  }
  return steps;
}

// Checks that all ranks except `except` ended with one failure and one committed step, and hold the masters
// of that step. Returns the lines of the first of them.
inline Told expect_whole(const std::vector<Told>& undisturbed, const std::vector<Finished>& ranks,
                         int except = -1) {
  constexpr int kFailedExit = 7;
  Told first;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) == except) continue;
    const Told told = read_told(ranks[r].output);
    EXPECT_EQ(ranks[r].exit_code, kFailedExit) << "rank " << r << ": " << ranks[r].output;
    if (first.cause.empty()) first = told;
    EXPECT_EQ(told.cause, first.cause) << "rank " << r << " has another first failure";
    EXPECT_EQ(told.committed_step, first.committed_step) << "rank " << r << ", after " << told.cause;
    if (told.committed_step < undisturbed[r].digests.size()) {
      EXPECT_EQ(told.committed_digest, undisturbed[r].digests[told.committed_step])
          << "rank " << r << " after step " << told.committed_step;
    } else {
      ADD_FAILURE() << "rank " << r << " committed step " << told.committed_step;
    }
  }
  EXPECT_FALSE(first.cause.empty());
  return first;
}

}  // namespace forebay::testing
