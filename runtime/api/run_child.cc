#include "run_child.h"

#include <elf.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace forebay {
namespace {

constexpr int kPassedOn[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
// How long what a process tells may go unnoticed. Shorter: more of a core. Longer: a program that dies of
// out-of-memory may be gone before anybody has looked, which loses nothing but the time of the notice.
constexpr long kPollNs = 100'000'000;
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
  while (true) {
    siginfo_t info{};
    int number = 0;
    if (watch.poll) {
      const timespec pause{.tv_sec = 0, .tv_nsec = kPollNs};
      number = ::sigtimedwait(&signals, &info, &pause);
      if (number < 0) watch.poll();
    } else {
      number = ::sigwaitinfo(&signals, &info);
    }
    if (number < 0) continue;  // Nothing, or interrupted by a signal that nobody waits for.
    if (const auto handler = watch.handlers.find(number); handler != watch.handlers.end()) {
      handler->second();
      continue;
    }
    if (number != SIGCHLD) {
      // From the terminal it went to the whole group, the command included.
      if (info.si_code != SI_KERNEL) (void)::kill(child, number);
      continue;
    }
    int status = 0;
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended != child) continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
}

}  // namespace

std::string find_command(const std::string& command) {
  if (command.find('/') != std::string::npos) return command;
  const char* path = std::getenv("PATH");
  std::string rest = path != nullptr ? path : "/bin:/usr/bin";
  while (!rest.empty()) {
    const std::size_t colon = std::min(rest.find(':'), rest.size());
    const std::string directory = colon == 0 ? "." : rest.substr(0, colon);
    rest.erase(0, colon + 1);
    const std::string candidate = directory + "/" + command;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {};
}

std::string preload_obstacle(const std::string& command) {
  const std::string path = find_command(command);
  if (path.empty()) return {};
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  struct stat facts {};
  std::string obstacle;
  if (is_static(file)) {
    obstacle = path + " is linked statically, and nothing can be preloaded under it";
  } else if (::fstat(file, &facts) == 0 && (((facts.st_mode & S_ISUID) != 0 && facts.st_uid != ::getuid()) ||
                                            ((facts.st_mode & S_ISGID) != 0 && facts.st_gid != ::getgid()))) {
    obstacle =
        path +
        " runs with another user's or group's rights (set-uid), and the system preloads nothing under it";
  }
  ::close(file);
  return obstacle;
}

Result<int> run_child(const std::vector<std::string>& command,
                      const std::map<std::string, std::string>& variables, const ChildWatch& watch) {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGCHLD);
  for (const int number : kPassedOn) ::sigaddset(&signals, number);
  sigset_t before;
  // Blocked before there is a child, so that none is lost.
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  if (child < 0) {
    const int error = errno;
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    return Status(StatusCode::kInternal, std::string("cannot start a process: ") + std::strerror(error));
  }
  if (child == 0) {
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    ::execvp(arguments[0], arguments.data());
    const int error = errno;
    ::dprintf(STDERR_FILENO, "forebay run: cannot run %s: %s\n", arguments[0], std::strerror(error));
    ::_exit(error == ENOENT ? kNotFound : kNotExecutable);
  }
  const int exit_code = wait_and_pass_on(child, signals, watch);
  // What comes too late to be handled is not to end us instead.
  for (const auto& entry : watch.handlers) (void)::signal(entry.first, SIG_IGN);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return exit_code;
}

}  // namespace forebay
