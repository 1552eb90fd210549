// Training runs over grids of ranks, small enough for many of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "forebay/error.h"
#include "tests/end_to_end/small_run.h"
#include "tests/support/process.h"

namespace forebay::testing {

// Six heads, which 2 and 3 ranks can share.
inline const Words kGridModel = {
    "--layers", "2",    "--hidden",  "24",    "--heads", "6",    "--sequence",    "10",
    "--batch",  "2",    "--threads", "1",     "--steps", "4",    "--micro-steps", "2",
    "--bucket", "3000", "--matmul",  "plain", "--lr",    "0.01", "--quiet",       "--communicator",
    "local"};

// `words` with these options replaced or appended. Requires: each has a value.
inline Words with(Words words, const Words& changes) {
  for (std::size_t i = 0; i + 1 < changes.size(); i += 2) {
    const auto place = std::find(words.begin(), words.end(), changes[i]);
    if (place != words.end()) {
      *(place + 1) = changes[i + 1];
    } else {
      words.insert(words.end(), {changes[i], changes[i + 1]});
    }
  }
  return words;
}

struct GridWords {
  int ranks = 1;
  int tensor = 1;
  int pipeline = 1;

  Words words() const {
    return {"--ranks",
            std::to_string(ranks),
            "--tensor-parallel",
            std::to_string(tensor),
            "--pipeline-parallel",
            std::to_string(pipeline)};
  }
  std::string text() const {
    return std::to_string(ranks) + " ranks, tensor-parallel " + std::to_string(tensor) +
           ", pipeline-parallel " + std::to_string(pipeline);
  }
};

inline bool skips_none(const gpt::TrainingReport& report) {
  return std::all_of(report.grad_norm.begin(), report.grad_norm.end(),
                     [](const auto& norm) { return norm.has_value(); });
}

inline void expect_same_bits(const gpt::TrainingReport& actual, const gpt::TrainingReport& expected) {
  EXPECT_EQ(actual.digest, expected.digest);
  EXPECT_EQ(actual.loss, expected.loss);
  EXPECT_EQ(actual.grad_norm, expected.grad_norm);
}

// The message of a run that must fail.
inline std::string error_of(const Words& words) {
  try {
    train(words);
  } catch (const Error& error) {
    return error.status().message();
  }
  return "no error";
}

// The program exits as misused, with one line that contains `named`.
inline void expect_usage_error(const Words& program, const std::string& named) {
  const Finished finished = run_program(program);
  EXPECT_EQ(finished.exit_code, 2) << finished.output;
  EXPECT_NE(finished.output.find(named), std::string::npos) << named << " is not in " << finished.output;
  EXPECT_EQ(std::count(finished.output.begin(), finished.output.end(), '\n'), 1) << finished.output;
}

}  // namespace forebay::testing
