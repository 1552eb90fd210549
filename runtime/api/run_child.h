// A command that is run in the foreground for somebody else: with the same standard streams and terminal,
// signals passed on to it, and its exit code for an answer.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// What is done while the command runs, on the thread that waits for it.
struct ChildWatch {
  // Of the signals below: what is done with it instead of passing it on. Once the command has ended they are
  // ignored.
  std::map<int, std::function<void()>> handlers;
  // Called ten times a second; null: nobody is.
  std::function<void()> poll;
};

// The exit code: the command's own, 128 + n when signal n ended it, 127 when there is no such command, 126
// when it cannot be executed. SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1 and SIGUSR2 go to the command; those
// that the terminal has sent it by itself are not sent twice. Errors: kInternal when no process can be made.
Result<int> run_child(const std::vector<std::string>& command,
                      const std::map<std::string, std::string>& variables, const ChildWatch& watch = {});

// Where the shell would find the command; empty when it would not.
std::string find_command(const std::string& command);

// Why LD_PRELOAD will have no effect on the command, in a sentence; empty when it will have one, or nobody
// can tell.
std::string preload_obstacle(const std::string& command);

}  // namespace forebay
