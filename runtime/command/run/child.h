// Runs a command in the foreground: with the same standard streams and terminal, with signals passed on to
// it, and with its exit code as the result.
#pragma once

#include <signal.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// Blocks, during its lifetime, the signals that a foreground command may be sent. Signals that arrive before
// the command starts are passed to it when it starts; signals that arrive after its end, while the results
// are still being written, end no process. SIGPIPE is blocked too, because the reader of this process's
// output may end; and SIGXFSZ is ignored, so that writing a file beyond `ulimit -f` fails instead.
//
// It installs no handlers: SIGKILL, SIGSTOP and SIGTSTP keep their effect.
class ChildSignals {
 public:
  ChildSignals();
  ChildSignals(const ChildSignals&) = delete;
  ChildSignals& operator=(const ChildSignals&) = delete;
  ~ChildSignals();
  // The signals to wait for.
  const sigset_t& waited() const { return waited_; }
  // Call in the command's process: restores the state from before the constructor.
  void restore() const;

 private:
  sigset_t waited_;
  sigset_t before_;
  struct sigaction child_action_;
  struct sigaction file_size_action_;
};

// Callbacks while the command runs, on the thread that waits for it.
struct ChildWatch {
  // By signal: called instead of passing the signal on.
  std::map<int, std::function<void()>> handlers;
  // Called ten times a second, or less often if it takes long; may be null.
  std::function<void()> poll;
};

struct ChildEnd {
  int exit_code = 0;
  bool was_started = true;  // False: the command does not exist or cannot be executed.
};

// The exit code is the command's own, 128 + n if signal n ended it, 127 if the command does not exist, 126 if
// it cannot be executed. Signals are passed to the command, with the value of sigqueue, but for SIGKILL,
// SIGXCPU, those of faults and those that stop a process. A signal that the terminal has already sent it is
// not sent twice. Errors: kInternal if no process can be made.
Result<ChildEnd> run_child(const std::vector<std::string>& command,
                           const std::map<std::string, std::string>& variables, const ChildSignals& signals,
                           const ChildWatch& watch = {});

// The path at which the shell would find the command; empty if it would not.
std::string find_command(const std::string& command);

// A sentence that says why LD_PRELOAD will have no effect on the command, or on the interpreter of a script;
// empty if it will have an effect or that is not known.
std::string preload_obstacle(const std::string& command);

}  // namespace forebay
