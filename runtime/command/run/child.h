// A command that is run in the foreground for somebody else: with the same standard streams and terminal,
// signals passed on to it, and its exit code for an answer.
#pragma once

#include <signal.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// Holds the signals back that a command in the foreground may be sent, from its making until it goes: those
// that come before there is a command are its when it starts, and those that come when it has ended, while
// what it did is still being written down, end nobody. So is SIGPIPE, since whoever reads what this process
// says may go; and SIGXFSZ is ignored, so that a file beyond `ulimit -f` is one that cannot be written.
//
// What it is not: a handler. SIGKILL, SIGSTOP and SIGTSTP do what they do.
class ChildSignals {
 public:
  ChildSignals();
  ChildSignals(const ChildSignals&) = delete;
  ChildSignals& operator=(const ChildSignals&) = delete;
  ~ChildSignals();
  // Those to wait for.
  const sigset_t& waited() const { return waited_; }
  // In the command's process: makes everything as it was.
  void restore() const;

 private:
  sigset_t waited_;
  sigset_t before_;
  struct sigaction child_action_;
  struct sigaction file_size_action_;
};

// What is done while the command runs, on the thread that waits for it.
struct ChildWatch {
  // Of the signals below: what is done with it instead of passing it on.
  std::map<int, std::function<void()>> handlers;
  // Called ten times a second, or less often where it takes its time; null: nobody is.
  std::function<void()> poll;
};

struct ChildEnd {
  int exit_code = 0;
  bool was_started = true;  // False: there is no such command, or it cannot be executed.
};

// The exit code: the command's own, 128 + n when signal n ended it, 127 when there is no such command, 126
// when it cannot be executed. SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1 and SIGUSR2 go to the command; those
// that the terminal has sent it by itself are not sent twice. Errors: kInternal when no process can be made.
Result<ChildEnd> run_child(const std::vector<std::string>& command,
                           const std::map<std::string, std::string>& variables, const ChildSignals& signals,
                           const ChildWatch& watch = {});

// Where the shell would find the command; empty when it would not.
std::string find_command(const std::string& command);

// Why LD_PRELOAD will have no effect on the command, or on what its first line names if it is a script, in a
// sentence; empty when it will have one, or nobody can tell.
std::string preload_obstacle(const std::string& command);

}  // namespace forebay
