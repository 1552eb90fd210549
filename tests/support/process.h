// Programs as a person runs them: started with arguments and variables, watched, killed, and what they
// printed.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace forebay::testing {

struct Finished {
  int exit_code = -1;  // 128 + n for signal n; -1 if it had to be killed at the limit.
  std::string output;  // stdout and stderr, as they came.
};

// A child process in a process group of its own. Killed with its group if still running at the end.
class Process {
 public:
  using Variables = std::map<std::string, std::string>;

  explicit Process(const std::vector<std::string>& command, const Variables& variables = {}) {
    int pipe_ends[2];
    EXPECT_EQ(::pipe(pipe_ends), 0);
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    id_ = ::fork();
    if (id_ == 0) {
      ::setpgid(0, 0);
      // A shell's background job, or nohup, has them ignored.
      for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE}) ::signal(number, SIG_DFL);
      ::dup2(pipe_ends[1], STDOUT_FILENO);
      ::dup2(pipe_ends[1], STDERR_FILENO);
      ::close(pipe_ends[0]);
      ::close(pipe_ends[1]);
      for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
    ::setpgid(id_, id_);
    ::close(pipe_ends[1]);
    output_end_ = pipe_ends[0];
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (running_) {
      signal_group(SIGKILL);
      int ignored;
      ::waitpid(id_, &ignored, 0);
    }
    ::close(output_end_);
  }

  pid_t id() const { return id_; }
  void signal(int number) { ::kill(id_, number); }
  void signal_group(int number) { ::kill(-id_, number); }

  // Reads until `text` was printed. False at the end of the output or at the limit.
  bool wait_for_output(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(60)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (output_.find(text) == std::string::npos) {
      if (!read_some(deadline)) return false;
    }
    return true;
  }

  // Reads to the end of the output, which is when the last process that holds it has ended, then reaps.
  Finished finish(std::chrono::seconds limit = std::chrono::seconds(120)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (read_some(deadline)) {
    }
    Finished result;
    if (std::chrono::steady_clock::now() >= deadline) {
      ADD_FAILURE() << "still running after " << limit.count() << " s: " << output_;
      signal_group(SIGKILL);
    }
    int status = 0;
    ::waitpid(id_, &status, 0);
    running_ = false;
    if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result.exit_code = 128 + WTERMSIG(status);
    result.output = output_;
    return result;
  }

 private:
  bool read_some(std::chrono::steady_clock::time_point deadline) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd waiting{output_end_, POLLIN, 0};
    if (left.count() <= 0 || ::poll(&waiting, 1, static_cast<int>(left.count())) <= 0) return false;
    char buffer[4096];
    const ssize_t count = ::read(output_end_, buffer, sizeof(buffer));
    if (count <= 0) return false;
    output_.append(buffer, static_cast<std::size_t>(count));
    return true;
  }

  pid_t id_ = -1;
  int output_end_ = -1;
  bool running_ = true;
  std::string output_;
};

inline Finished run_program(const std::vector<std::string>& command,
                            const Process::Variables& variables = {}) {
  return Process(command, variables).finish();
}

}  // namespace forebay::testing
