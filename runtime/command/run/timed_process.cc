#include "runtime/command/run/timed_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace forebay {
namespace {

constexpr int kEnding[] = {SIGHUP, SIGINT, SIGTERM};
constexpr int kNotExecuted = 127;

[[noreturn]] void become(const TimedProcess& process, pid_t parent, const sigset_t& mask,
                         const struct sigaction& child_action) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(kNotExecuted);  // It died before it could be watched.
  const int nothing = ::open("/dev/null", O_RDONLY);
  const int output = ::open(process.output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ::dup2(nothing, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  if (nothing > STDERR_FILENO) ::close(nothing);
  if (output > STDERR_FILENO) ::close(output);
  ::sigaction(SIGCHLD, &child_action, nullptr);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  for (const std::string& name : process.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : process.set) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (const std::string& word : process.command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  ::dprintf(STDERR_FILENO, "cannot run %s: %s\n", arguments[0], std::strerror(errno));
  ::_exit(kNotExecuted);
}

// Waits for the child, the time limit or a signal. `status` is the child's, as waitpid gives it.
TimedEnd wait_for(pid_t child, const sigset_t& signals, std::chrono::milliseconds limit, int* status) {
  using Clock = std::chrono::steady_clock;
  TimedEnd end;
  const Clock::time_point deadline = Clock::now() + limit;
  while (true) {
    if (::waitpid(child, status, WNOHANG) != 0) return end;
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
    end.timed_out = left <= 0;
    if (!end.timed_out) {
      const timespec wait{.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
      const int number = ::sigtimedwait(&signals, nullptr, &wait);
      if (number != SIGCHLD && number > 0) end.interrupted = number;
    }
    if (end.timed_out || end.interrupted != 0) {
      ::kill(-child, SIGKILL);
      ::waitpid(child, status, 0);
      return end;
    }
  }
}

}  // namespace

Result<TimedEnd> run_timed(const TimedProcess& process) {
  sigset_t signals, before;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGCHLD);
  for (const int number : kEnding) ::sigaddset(&signals, number);
  // Blocked before there is a child, so that none is lost; and whoever ignores the end of children is not
  // told.
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  struct sigaction child_action {
  }, default_action{};
  default_action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &default_action, &child_action);
  const auto restore = [&] {
    ::sigaction(SIGCHLD, &child_action, nullptr);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
  };
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) become(process, parent, before, child_action);
  if (child < 0) {
    const int error = errno;
    restore();
    return Status(StatusCode::kInternal, std::string("cannot start a process: ") + std::strerror(error));
  }
  ::setpgid(child, child);  // Both processes call it: either may be first.
  int status = 0;
  TimedEnd end = wait_for(child, signals, process.limit, &status);
  ::kill(-child, SIGKILL);
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  restore();
  return end;
}

}  // namespace forebay
