// Common parts of the communicator benchmarks: ranks as processes of this program, the time of the slowest
// rank, and medians.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "forebay/communicator.h"
#include "forebay/error.h"

namespace forebay::bench {

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Milliseconds that `function` takes on the slowest rank; all begin together.
template <typename Function>
double slowest_ms(Communicator& communicator, Function function) {
  using Clock = std::chrono::steady_clock;
  throw_if_error(communicator.barrier());
  const Clock::time_point start = Clock::now();
  function();
  const double mine = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  std::vector<double> all(static_cast<std::size_t>(communicator.size()));
  throw_if_error(
      communicator.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  return *std::max_element(all.begin(), all.end());
}

constexpr int kWarmUpRounds = 8;  // Not measured, here and in mpi_peer.c.

// Measures two functions in turns; they take turns in being first.
struct Paired {
  std::vector<double> one_ms, other_ms, quotients;
};
template <typename One, typename Other>
Paired measure_in_turns(int rounds, One one, Other other) {
  for (int round = 0; round < kWarmUpRounds; ++round) {
    one();
    other();
  }
  Paired times;
  for (int round = 0; round < rounds; ++round) {
    if (round % 2 == 0) times.one_ms.push_back(one());
    times.other_ms.push_back(other());
    if (round % 2 == 1) times.one_ms.push_back(one());
    times.quotients.push_back(times.one_ms.back() / times.other_ms.back());
  }
  return times;
}

// Runs rank_body(rank, directory) in `size` processes, with a temporary directory. Returns the program's exit
// code.
template <typename Function>
int run_ranks(const char* program, int size, Function rank_body) {
  std::string directory = (std::filesystem::temp_directory_path() / "forebay-bench-XXXXXX").string();
  if (mkdtemp(directory.data()) == nullptr) return 1;
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    try {
      rank_body(rank, directory);
      std::fflush(stdout);
      _exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", program, error.what());
      _exit(1);
    }
  }
  int code = 0;
  for (const pid_t child : children) {
    int state = 0;
    if (waitpid(child, &state, 0) != child || state != 0) code = 1;
  }
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
  return code;
}

}  // namespace forebay::bench
