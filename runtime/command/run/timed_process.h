// A process that is given so long and no longer, with its output in a file: for questions to programs that
// may crash or hang.
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
  std::vector<std::string> unset;          // Variables that it does not get; those set win.
  std::string output;                      // A file for what it prints, made anew.
  std::chrono::milliseconds limit{0};
};

struct TimedEnd {
  bool timed_out = false;  // It was killed, since it was not done in time.
  int interrupted = 0;  // The signal (SIGINT, SIGTERM, SIGHUP) by which we were told to end; it was killed.
  int exit_code = 0;    // 127: it could not be executed.
  int signal = 0;       // By which it ended.
};

// Runs it in a process group of its own, without standard input; what is left of the group is killed at its
// end. Should this process die first, it is killed too. Errors: kInternal when no process can be made.
Result<TimedEnd> run_timed(const TimedProcess& process);

}  // namespace forebay
