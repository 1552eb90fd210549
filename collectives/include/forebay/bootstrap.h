// How a process learns which rank it is: from the environment of the launcher that started it. And, for
// convenience on one host, a launcher of local processes.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

struct LaunchEnvironment {
  // "forebay", "torchrun", "open-mpi", "mvapich", "jsrun", "flux", "pmix", "mpich", "pals", "slurm" or
  // "none".
  std::string launcher;
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // Among the ranks of this host.
  int local_size = 1;
  // The rendezvous store, for ProcessOptions::store: FOREBAY_STORE if it is set; else a directory named after
  // the launcher's job when all ranks share this host; else tcp://HOST:FOREBAY_STORE_PORT where the launcher
  // names rank 0's host; else pmix:// where the launcher has PMIx. Empty for one rank.
  std::string store;
  std::string interface;  // FOREBAY_INTERFACE: the network that the hosts share, by name or address.
};

// Reads the process environment: FOREBAY_RANK and FOREBAY_SIZE, torchrun, Open MPI, MVAPICH, jsrun, Flux,
// PMIx, MPICH, PALS, Slurm, in that order. Without any of them, this is the only rank.
//
// Errors: kInvalidArgument for a variable that is not a number or out of range, or when only half of a pair
//         is set; for ranks that have no place to meet, the message tells which variables to set.
Result<LaunchEnvironment> read_launch_environment();

struct LaunchOptions {
  int size = 1;
  // From the first failure, or the second signal, until the remaining processes are killed.
  std::chrono::milliseconds grace{5'000};
  // Called after a failure. `left`: the ranks that were not lost, at least 1; a rank is lost if a signal
  // ended it that did not come through this launcher, and all may be left. `exit_code`: that of the first
  // failure. Returns how many ranks to start again in another meeting, with the same arguments; 0 for none.
  // Empty: none.
  std::function<int(int left, int exit_code)> after_failure;
};

// Starts `size` processes of this very program with `arguments` and the variables that
// read_launch_environment() reads, waits for them, and returns the exit code to leave with: 0 when all
// processes returned 0, else that of the first that failed (128 + n for signal n).
//
// SIGINT and SIGTERM are passed on to all processes, which may take the time they need to end; the exit code
// is then 128 + n, unless they were done. When one process fails, the others get SIGTERM, and SIGKILL after
// `grace`. The processes die with their parent. The directory in which they meet is removed at the end, or by
// the next launcher if this one is killed. With `after_failure` all this may happen several times.
//
// Requires: one call at a time.
// Errors:   kInvalidArgument for a size below 1; kIoError or kUnavailable when a process cannot be started.
Result<int> launch_local_ranks(const std::vector<std::string>& arguments, const LaunchOptions& options);

// Decides which of the ranks that launch_local_ranks started prints an error that all ranks report: true for
// the first rank that asks, false for the others. So the error is printed once, whichever ranks are left.
// Nothing in a process that was started otherwise.
std::optional<bool> claim_shared_error();

}  // namespace forebay
