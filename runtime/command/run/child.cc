#include "runtime/command/run/child.h"

#include <elf.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "forebay/terminal_signal.h"
#include "forebay/text.h"

namespace forebay {
namespace {

// Signals that other processes send. SIGKILL cannot be passed on, SIGXCPU comes for this process's own time,
// and SIGSEGV and its kin for its own faults.
std::vector<int> signals_to_pass() {
  std::vector<int> numbers = {SIGHUP,  SIGINT,    SIGQUIT, SIGTERM, SIGUSR1,  SIGUSR2,  SIGALRM,
                              SIGPROF, SIGVTALRM, SIGIO,   SIGPWR,  SIGWINCH, SIGSTKFLT};
  for (int number = SIGRTMIN; number <= SIGRTMAX; ++number) numbers.push_back(number);
  return numbers;
}

void send_on(pid_t child, int number, const siginfo_t& info) {
  if (info.si_code == SI_QUEUE) {
    (void)::sigqueue(child, number, info.si_value);
  } else {
    (void)::kill(child, number);
  }
}

// Scripts may name scripts; the system follows as many.
constexpr int kScriptLimit = 4;
// The interval between two looks at the records. Shorter: more of a core. Longer: a program that dies of
// out-of-memory may be gone before the next look, which loses nothing but the time of the notice.
constexpr long kPollNs = 100'000'000;
// The interval is also at least this many times the duration of a look, which is long with thousands of
// processes.
constexpr long kPollPauses = 10;
constexpr int kNotExecutable = 126;
constexpr int kNotFound = 127;

// An executable without a loader of its own is linked statically.
bool is_static(int file) {
  Elf64_Ehdr header{};
  if (::pread(file, &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header) ||
      std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_phentsize != sizeof(Elf64_Phdr)) {
    return false;
  }
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    const auto offset = static_cast<off_t>(header.e_phoff + static_cast<std::size_t>(i) * sizeof segment);
    if (::pread(file, &segment, sizeof segment, offset) != static_cast<ssize_t>(sizeof segment)) return false;
    if (segment.p_type == PT_INTERP) return false;
  }
  return true;
}

int wait_and_pass_on(pid_t child, const sigset_t& signals, const ChildWatch& watch) {
  using Clock = std::chrono::steady_clock;
  long pause_ns = kPollNs;
  while (true) {
    siginfo_t info{};
    int number = 0;
    if (watch.poll) {
      const timespec pause{.tv_sec = pause_ns / 1'000'000'000, .tv_nsec = pause_ns % 1'000'000'000};
      number = ::sigtimedwait(&signals, &info, &pause);
      if (number < 0 && errno == EAGAIN) {
        const Clock::time_point begin = Clock::now();
        watch.poll();
        const std::chrono::nanoseconds took = Clock::now() - begin;
        pause_ns = std::max(kPollNs, kPollPauses * static_cast<long>(took.count()));
      }
    } else {
      number = ::sigwaitinfo(&signals, &info);
    }
    if (number < 0) continue;  // Nothing, or interrupted by a signal that nobody waits for.
    if (const auto handler = watch.handlers.find(number); handler != watch.handlers.end()) {
      handler->second();
      continue;
    }
    if (number != SIGCHLD) {
      if (!internal::all_were_sent(info)) send_on(child, number, info);
      continue;
    }
    int status = 0;
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended != child) continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
}

// Passes on the signals that arrived before the command started, also the terminal's. If the terminal has
// sent the signal to the command as well, both are one pending signal.
void pass_on_earlier(pid_t child, const ChildWatch& watch) {
  sigset_t earlier;
  ::sigpending(&earlier);
  for (const int number : signals_to_pass()) {
    if (::sigismember(&earlier, number) != 1 || watch.handlers.count(number) != 0) continue;
    sigset_t one;
    ::sigemptyset(&one);
    ::sigaddset(&one, number);
    const timespec now{};
    siginfo_t info{};
    if (::sigtimedwait(&one, &info, &now) == number) send_on(child, number, info);
  }
}

// The interpreter that a script's first line names; empty if the file is no script.
std::string interpreter_of(int file) {
  char text[256] = {};
  const ssize_t count = ::pread(file, text, sizeof text - 1, 0);
  if (count < 2 || text[0] != '#' || text[1] != '!') return {};
  const std::string line(text + 2, ::strcspn(text + 2, "\r\n"));
  const std::size_t begin = line.find_first_not_of(" \t");
  if (begin == std::string::npos) return {};
  return line.substr(begin, line.find_first_of(" \t", begin) - begin);
}

// `interpreter`: set to the file's interpreter if it is a script.
std::string obstacle_of(const std::string& path, std::string* interpreter) {
  // A pipe of that name would make us wait for a writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return {};
  struct stat facts {};
  std::string obstacle;
  if (::fstat(file, &facts) == 0 && S_ISREG(facts.st_mode)) {
    *interpreter = interpreter_of(file);
    // Rights count for programs, not for scripts.
    const bool has_rights = ((facts.st_mode & S_ISUID) != 0 && facts.st_uid != ::getuid()) ||
                            ((facts.st_mode & S_ISGID) != 0 && facts.st_gid != ::getgid());
    // The kernel ignores capabilities of a file for root, who has them all.
    const bool has_capabilities = ::getuid() != 0 && ::fgetxattr(file, "security.capability", nullptr, 0) > 0;
    if (is_static(file)) {
      obstacle = path + " is linked statically, and nothing can be preloaded under it";
    } else if (has_rights && interpreter->empty()) {
      obstacle =
          path +
          " runs with another user's or group's rights (set-uid), and the system preloads nothing under it";
    } else if (has_capabilities && interpreter->empty()) {
      obstacle =
          path + " has capabilities of its own (getcap shows them), and the system preloads nothing under it";
    }
  }
  ::close(file);
  return obstacle;
}

}  // namespace

ChildSignals::ChildSignals() {
  ::sigemptyset(&waited_);
  ::sigaddset(&waited_, SIGCHLD);
  for (const int number : signals_to_pass()) ::sigaddset(&waited_, number);
  sigset_t held = waited_;
  ::sigaddset(&held, SIGPIPE);
  ::sigprocmask(SIG_BLOCK, &held, &before_);
  // A process that ignores SIGCHLD would not be told of the child's end.
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &action, &child_action_);
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGXFSZ, &action, &file_size_action_);
}

void ChildSignals::restore() const {
  ::sigaction(SIGXFSZ, &file_size_action_, nullptr);
  ::sigaction(SIGCHLD, &child_action_, nullptr);
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

ChildSignals::~ChildSignals() {
  sigset_t held = waited_;
  ::sigaddset(&held, SIGPIPE);
  const timespec now{};
  while (::sigtimedwait(&held, nullptr, &now) > 0) {
  }
  restore();
}

std::string find_command(const std::string& command) {
  if (command.find('/') != std::string::npos) return command;
  const char* path = std::getenv("PATH");
  const std::string directories = path != nullptr ? path : "/bin:/usr/bin";
  for (std::size_t begin = 0; begin <= directories.size();) {
    const std::size_t end = std::min(directories.find(':', begin), directories.size());
    const std::string directory = end == begin ? "." : directories.substr(begin, end - begin);
    const std::string candidate = directory + "/" + command;
    std::error_code error;
    if (::access(candidate.c_str(), X_OK) == 0 && !std::filesystem::is_directory(candidate, error))
      return candidate;
    begin = end + 1;
  }
  return {};
}

std::string preload_obstacle(const std::string& command) {
  std::string path = find_command(command);
  std::string obstacle;
  for (int i = 0; i <= kScriptLimit && !path.empty() && obstacle.empty(); ++i) {
    std::string interpreter;
    obstacle = obstacle_of(path, &interpreter);
    path = interpreter;
  }
  return obstacle;
}

Result<ChildEnd> run_child(const std::vector<std::string>& command,
                           const std::map<std::string, std::string>& variables, const ChildSignals& signals,
                           const ChildWatch& watch) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const std::string shown = shown_text(command.front());
  int failure[2];  // Closed by a successful start; otherwise one byte comes.
  if (::pipe2(failure, O_CLOEXEC) != 0) {
    return Status(StatusCode::kInternal, std::string("cannot make a pipe: ") + std::strerror(errno));
  }
  const pid_t child = ::fork();
  if (child < 0) {
    const int error = errno;
    for (const int end : failure) ::close(end);
    errno = error;
    return Status(StatusCode::kInternal, std::string("cannot start a process: ") + std::strerror(errno));
  }
  if (child == 0) {
    signals.restore();
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    ::execvp(arguments[0], arguments.data());
    const int error = errno;
    ::dprintf(STDERR_FILENO, "forebay run: cannot run %s: %s\n", shown.c_str(), std::strerror(error));
    (void)!::write(failure[1], "", 1);
    ::_exit(error == ENOENT ? kNotFound : kNotExecutable);
  }
  pass_on_earlier(child, watch);
  ::close(failure[1]);
  const int exit_code = wait_and_pass_on(child, signals.waited(), watch);
  char byte;
  const bool was_started = ::read(failure[0], &byte, 1) != 1;
  ::close(failure[0]);
  return ChildEnd{exit_code, was_started};
}

}  // namespace forebay
