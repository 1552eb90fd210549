// How a process learns which rank it is: explicit arguments, or the environment of the launcher that started
// it. And, for convenience on one host, a launcher of local processes.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

struct LaunchEnvironment {
  std::string launcher;  // "forebay", "torchrun", "open-mpi", "pmix", "mpich", "slurm" or "none".
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  // Where the ranks meet: FOREBAY_STORE, else a directory named after the launcher's job when all ranks share
  // this host, else tcp://HOST:FOREBAY_STORE_PORT where the launcher names rank 0's host, else pmix:// where
  // the launcher has PMIx.
  std::string store;
  std::string interface;  // FOREBAY_INTERFACE: the network that the hosts share, by name or address.
};

// Reads the process environment: FOREBAY_RANK/FOREBAY_SIZE, torchrun, Open MPI, PMIx, MPICH, Slurm, in that
// order.
// Errors: kInvalidArgument naming the variable when it is not a number, out of range or half present, or
// saying what to set for ranks that have no place to meet.
Result<LaunchEnvironment> read_launch_environment();
// The same over given variables: for tests.
Result<LaunchEnvironment> read_launch_environment(const std::map<std::string, std::string>& variables);

struct LaunchOptions {
  int size = 1;
  // From the first failure, or the second signal, until what is left is killed.
  std::chrono::milliseconds grace{5'000};
};

// Starts `size` processes of this very program with `arguments` and the variables that
// read_launch_environment wants, waits for them, and returns the exit code to leave with: 0 when all were 0,
// else the first failing one's (128 + n for a signal). SIGINT and SIGTERM go on to all of them, which may
// take what time they need to end (with 128 + n, if they were not done); when one fails the others get
// SIGTERM, then SIGKILL after `grace`. Children die with the parent. The directory it makes for them to meet
// is removed at the end, or by the next launcher if this one is killed.
Result<int> launch_local_ranks(const std::vector<std::string>& arguments, const LaunchOptions& options);

// For an error that all ranks meet alike, of those that launch_local_ranks started: true for the first that
// asks, which tells it, and false for the others. So it is told once, whichever ranks are left. Nothing in a
// process that something else started.
std::optional<bool> claim_shared_error();

}  // namespace forebay
