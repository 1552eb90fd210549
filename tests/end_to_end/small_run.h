// A small training of the sample with plain products, given as command-line words.
#pragma once

#include <string>
#include <vector>

#include "trainer/options.h"
#include "trainer/training.h"

namespace forebay::testing {

using Words = std::vector<std::string>;

inline Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

inline const Words kModel = {"--layers", "2", "--hidden",  "48", "--heads", "3", "--sequence", "24",
                             "--batch",  "2", "--threads", "1",  "--quiet"};
inline const Words kSmall = kModel + Words{"--steps", "5", "--matmul", "plain"};
inline const Words kOnHost = {"--device", "host", "--communicator", "local"};

// Ranks as threads of this process.
inline gpt::TrainingReport train(const Words& words) {
  const gpt::ParsedCommand parsed = gpt::parse_command(words);
  return gpt::run_training(gpt::resolve_options(parsed.options.value()));
}

}  // namespace forebay::testing
