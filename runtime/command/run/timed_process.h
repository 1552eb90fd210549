// Runs a process under a time limit, with its output in a file: for programs that may crash or hang.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

struct TimedProcess {
  std::vector<std::string> command;
  std::map<std::string, std::string> set;  // Variables with their new values.
  std::vector<std::string> unset;          // Variables to remove; `set` wins.
  std::string output;                      // A file for its output; truncated first.
  std::chrono::milliseconds limit{0};
};

struct TimedEnd {
  bool timed_out = false;  // It was killed at the time limit.
  int interrupted = 0;  // The signal (SIGINT, SIGTERM, SIGHUP) that interrupted this process; it was killed.
  int exit_code = 0;    // 127: it could not be executed.
  int signal = 0;       // The signal that ended it.
};

// Runs it in a process group of its own, without standard input. At its end the rest of that group is killed.
// If this process dies first, it is killed too. Errors: kInternal if no process can be made.
Result<TimedEnd> run_timed(const TimedProcess& process);

}  // namespace forebay
