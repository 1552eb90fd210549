// The launcher of local processes.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <optional>

#include "collectives/launch/runtime_directory.h"
#include "forebay/bootstrap.h"
#include "forebay/standard_streams.h"
#include "forebay/terminal_signal.h"

extern char** environ;

namespace forebay {
namespace {

// Exit code of a child that could not run the program, as in shells.
constexpr int kExecFailed = 127;

// Takes SIGINT, SIGTERM, SIGHUP and SIGCHLD by waiting for them instead of by handlers, until destroyed.
class SignalQueue {
 public:
  SignalQueue() {
    sigemptyset(&taken_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action {};
      sigaction(signal, nullptr, &action);
      // A signal that was ignored before (nohup) stays ignored, here and in the children.
      if (action.sa_handler != SIG_IGN) sigaddset(&taken_, signal);
    }
    sigaddset(&taken_, SIGCHLD);
    // With SIGCHLD ignored, the system would reap the children unseen.
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &standard, &child_action_);
    pthread_sigmask(SIG_BLOCK, &taken_, &mask_);
  }
  ~SignalQueue() {
    sigaction(SIGCHLD, &child_action_, nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  // The mask from before, with which children start.
  const sigset_t& mask() const noexcept { return mask_; }

  // The next signal, or 0 after `timeout`, if it is given.
  int next(std::optional<std::chrono::nanoseconds> timeout, siginfo_t* info) const {
    for (;;) {
      int signal = 0;
      if (timeout) {
        const auto left = std::max(*timeout, std::chrono::nanoseconds(0));
        const timespec limit{.tv_sec = left.count() / 1'000'000'000, .tv_nsec = left.count() % 1'000'000'000};
        signal = sigtimedwait(&taken_, info, &limit);
      } else {
        signal = sigwaitinfo(&taken_, info);
      }
      if (signal > 0) return signal;
      if (errno == EAGAIN) return 0;
    }
  }

 private:
  sigset_t taken_;
  sigset_t mask_;
  struct sigaction child_action_ {};
};

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

constexpr const char* kErrorPipe = "FOREBAY_ERROR_PIPE";

// One byte in a pipe that all ranks inherit; one of them reads it. Named by descriptor and inode, since a
// program that a rank starts inherits the variable and may have another file at that descriptor.
class ErrorPipe {
 public:
  // Null, with errno, when there are no descriptors left.
  static std::unique_ptr<ErrorPipe> create() {
    int ends[2];
    if (pipe2(ends, O_NONBLOCK) != 0) return nullptr;
    struct stat facts {};
    const bool made = write(ends[1], "", 1) == 1 && fstat(ends[0], &facts) == 0;
    close(ends[1]);
    std::unique_ptr<ErrorPipe> pipe(new ErrorPipe(ends[0], facts.st_ino));
    return made ? std::move(pipe) : nullptr;
  }
  ~ErrorPipe() { close(end_); }
  ErrorPipe(const ErrorPipe&) = delete;
  ErrorPipe& operator=(const ErrorPipe&) = delete;

  std::string name() const { return std::to_string(end_) + ":" + std::to_string(inode_); }

  static std::optional<bool> claim(const char* name) {
    int end = -1;
    unsigned long long inode = 0;
    struct stat facts {};
    if (name == nullptr || std::sscanf(name, "%d:%llu", &end, &inode) != 2) return std::nullopt;
    if (fstat(end, &facts) != 0 || !S_ISFIFO(facts.st_mode) || facts.st_ino != inode) return std::nullopt;
    char byte = 0;
    return read(end, &byte, 1) == 1;
  }

 private:
  ErrorPipe(int end, ino_t inode) : end_(end), inode_(inode) {}

  const int end_;
  const ino_t inode_;
};

// The environment of one child: ours, without variables that would give it another rank.
std::vector<std::string> child_environment(int rank, int size, const std::string& store,
                                           const ErrorPipe& pipe) {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    bool ours = false;
    for (const char* name : {"FOREBAY_RANK=", "FOREBAY_SIZE=", "FOREBAY_LOCAL_RANK=", "FOREBAY_LOCAL_SIZE=",
                             "FOREBAY_STORE=", "FOREBAY_ERROR_PIPE="}) {
      ours = ours || text.starts_with(name);
    }
    if (!ours) result.push_back(text);
  }
  result.push_back("FOREBAY_RANK=" + std::to_string(rank));
  result.push_back("FOREBAY_SIZE=" + std::to_string(size));
  result.push_back("FOREBAY_LOCAL_RANK=" + std::to_string(rank));
  result.push_back("FOREBAY_LOCAL_SIZE=" + std::to_string(size));
  result.push_back("FOREBAY_STORE=" + store);
  result.push_back(kErrorPipe + ("=" + pipe.name()));
  return result;
}

class Children {
 public:
  // No child outlives this object.
  ~Children() {
    signal_all(SIGKILL);
    for (const pid_t child : running_) waitpid(child, nullptr, 0);
  }

  // Only async-signal-safe calls between fork and exec.
  Status start(char* const* arguments, char* const* environment, const sigset_t& mask) {
    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child < 0) {
      return Status(StatusCode::kUnavailable, "cannot start a process: ", std::strerror(errno),
                    "; start fewer ranks or raise the limit of processes (ulimit -u)");
    }
    if (child > 0) {
      running_.push_back(child);
      ranks_[child] = static_cast<int>(ranks_.size());
      return {};
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(kExecFailed);  // The parent ended before the line above.
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    execve("/proc/self/exe", arguments, environment);
    static constexpr char kMessage[] = "forebay: cannot run this program again through /proc/self/exe\n";
    static_cast<void>(!write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1));
    _exit(kExecFailed);
  }

  bool empty() const noexcept { return running_.empty(); }

  void signal_all(int signal) const noexcept {
    for (const pid_t child : running_) kill(child, signal);
  }

  // Called after they had `grace` to end.
  void kill_all(std::chrono::milliseconds grace) noexcept {
    if (!killed_) {
      for (const pid_t child : running_) {
        std::fprintf(stderr, "%s: rank %d (process %d) had not ended after %g s more, and was killed\n",
                     program_invocation_short_name, ranks_.at(child), child,
                     std::chrono::duration<double>(grace).count());
      }
    }
    killed_ = true;
    signal_all(SIGKILL);
  }

  // Reaps the children that have ended. Returns whether one of them failed; exit_code() keeps the first
  // failure of all. Among those that one call finds, one that a signal ended counts as the first: the others
  // failed because of it.
  bool reap() {
    const bool open = exit_code_ == 0;
    bool failed = false;
    bool signalled = false;
    for (std::size_t i = 0; i < running_.size();) {
      int state = 0;
      if (waitpid(running_[i], &state, WNOHANG) != running_[i]) {
        ++i;
        continue;
      }
      const pid_t ended = running_[i];
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      const int code = WIFSIGNALED(state) ? 128 + WTERMSIG(state) : WEXITSTATUS(state);
      if (code == 0) continue;
      failed = true;
      const bool is_lost = WIFSIGNALED(state) && WTERMSIG(state) != SIGINT && WTERMSIG(state) != SIGTERM;
      if (is_lost) ++(killed_ ? killed_count_ : lost_count_);
      const bool first_signal = open && WIFSIGNALED(state) && !signalled;
      signalled = signalled || WIFSIGNALED(state);
      // A killed rank prints nothing, and the others may have no time to.
      const bool is_asked =
          WTERMSIG(state) == SIGINT || WTERMSIG(state) == SIGTERM || (WTERMSIG(state) == SIGKILL && killed_);
      if (first_signal && !is_asked) {
        std::fprintf(stderr, "%s: rank %d (process %d) was ended by signal %d: %s\n",
                     program_invocation_short_name, ranks_.at(ended), ended, WTERMSIG(state),
                     strsignal(WTERMSIG(state)));
      }
      if (exit_code_ == 0 || first_signal) exit_code_ = code;
    }
    return failed;
  }

  int exit_code() const noexcept { return exit_code_; }
  // Ranks that signals of others ended; if there is none, those that had to be killed.
  int lost_count() const noexcept { return lost_count_ > 0 ? lost_count_ : killed_count_; }

 private:
  std::vector<pid_t> running_;
  std::map<pid_t, int> ranks_;
  int exit_code_ = 0;
  bool killed_ = false;
  int lost_count_ = 0;
  int killed_count_ = 0;
};

// The end of one meeting of ranks.
struct RunEnd {
  int exit_code = 0;
  int lost_count = 0;
  bool asked = false;  // By a signal to this launcher.
};

Result<RunEnd> run_ranks(const std::vector<std::string>& arguments, int size, std::chrono::milliseconds grace,
                         const SignalQueue& signals) {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  FOREBAY_ASSIGN_OR_RETURN(
      std::unique_ptr<internal::MeetingDirectory> store,
      internal::MeetingDirectory::create(internal::runtime_directory(runtime == nullptr ? "" : runtime)));

  const std::unique_ptr<ErrorPipe> pipe = ErrorPipe::create();
  if (pipe == nullptr) {
    return Status(StatusCode::kUnavailable, "cannot make a pipe for the ranks: ", std::strerror(errno),
                  "; raise ulimit -n");
  }
  std::vector<std::string> child_arguments{program_invocation_name};
  child_arguments.insert(child_arguments.end(), arguments.begin(), arguments.end());
  Children children;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> environment = child_environment(rank, size, store->path(), *pipe);
    FOREBAY_RETURN_IF_ERROR(
        children.start(pointers(child_arguments).data(), pointers(environment).data(), signals.mask()));
  }

  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> end;  // When the remaining processes are killed.
  int asked = 0;                         // The last signal that asked for the end.
  while (!children.empty()) {
    std::optional<std::chrono::nanoseconds> timeout;
    if (end) timeout = *end - Clock::now();
    siginfo_t info{};
    const int signal = signals.next(timeout, &info);
    bool ending = false;
    if (signal == 0) {
      children.kill_all(grace);
      end = Clock::now() + grace;
    } else if (signal == SIGCHLD) {
      ending = children.reap() && (asked == 0 || children.exit_code() != 128 + asked);
      // Children that were asked already would take another signal for impatience.
      if (ending && !end && asked == 0) children.signal_all(SIGTERM);
    } else {
      // A second Ctrl-C would look like impatience.
      if (!internal::all_were_sent(info)) children.signal_all(signal);
      ending = asked != 0;
      asked = signal;
    }
    if (ending && !end) end = Clock::now() + grace;
  }
  return RunEnd{children.exit_code(), children.lost_count(), asked != 0};
}

}  // namespace

std::optional<bool> claim_shared_error() {
  return ErrorPipe::claim(std::getenv(kErrorPipe));
}

Result<int> launch_local_ranks(const std::vector<std::string>& arguments, const LaunchOptions& options) {
  if (options.size < 1) return invalid_argument("cannot start ", options.size, " ranks; give at least 1");
  keep_standard_streams();
  // From here on a signal waits until all processes that it must end are known.
  const SignalQueue signals;
  for (int size = options.size;;) {
    FOREBAY_ASSIGN_OR_RETURN(const RunEnd end, run_ranks(arguments, size, options.grace, signals));
    const int left = size - end.lost_count;
    const bool may_go_on = options.after_failure && end.exit_code != 0 && left > 0 && !end.asked;
    size = may_go_on ? options.after_failure(left, end.exit_code) : 0;
    if (size < 1) return end.exit_code;
  }
}

}  // namespace forebay
