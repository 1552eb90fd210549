#include "forebay/bootstrap.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <optional>
#include <system_error>

#include "forebay/standard_streams.h"

extern char** environ;

namespace forebay {
namespace {

using Variables = std::map<std::string, std::string>;

// Exit code of a child that could not run the program, as shells have it.
constexpr int kExecFailed = 127;
// Longest job name kept as it is in a file name; a longer one is cut and made unique again by its hash.
constexpr std::size_t kJobNameMax = 96;

std::optional<std::string> find(const Variables& variables, const char* name) {
  const auto found = variables.find(name);
  // An empty variable is how shells unset one for a single command.
  if (found == variables.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

bool has(const Variables& variables, const char* name) {
  return find(variables, name).has_value();
}

Status invalid(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

// A whole number from 0 on.
Result<int> number(const Variables& variables, const char* name) {
  const std::string text = find(variables, name).value_or("");
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    return invalid(std::string(name) + " is \"" + text +
                   "\", which is not a whole number from 0 on; look at the launcher that set it");
  }
  return value;
}

Status read_number(const Variables& variables, const char* name, int* value) {
  Result<int> read = number(variables, name);
  FOREBAY_RETURN_IF_ERROR(read.status());
  *value = read.value();
  return {};
}

// The names under which a launcher tells the same four things. A null one is not told.
struct Names {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

Status check_range(const char* name, int value, int size, const char* size_name) {
  if (value < size) return {};
  return invalid(std::string(name) + " is " + std::to_string(value) + ", but " + size_name + " is " +
                 std::to_string(size) + "; ranks are 0 to " + std::to_string(size - 1));
}

Status read_names(const Variables& variables, const Names& names, LaunchEnvironment* environment) {
  for (const auto& [present, absent] :
       {std::pair(names.rank, names.size), std::pair(names.size, names.rank)}) {
    if (has(variables, present) && !has(variables, absent)) {
      return invalid(std::string(present) + " is set, but " + absent + " is not; set both or none");
    }
  }
  FOREBAY_RETURN_IF_ERROR(read_number(variables, names.rank, &environment->rank));
  FOREBAY_RETURN_IF_ERROR(read_number(variables, names.size, &environment->size));
  if (environment->size == 0)
    return invalid(std::string(names.size) + " is 0; a run needs at least one rank");
  FOREBAY_RETURN_IF_ERROR(check_range(names.rank, environment->rank, environment->size, names.size));

  const bool has_local_size = names.local_size != nullptr && has(variables, names.local_size);
  if (has_local_size) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, names.local_size, &environment->local_size));
    if (environment->local_size == 0 || environment->local_size > environment->size) {
      return invalid(std::string(names.local_size) + " is " + std::to_string(environment->local_size) +
                     ", but " + names.size + " is " + std::to_string(environment->size) +
                     "; it must be from 1 to that number");
    }
  }
  if (names.local_rank != nullptr && has(variables, names.local_rank)) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, names.local_rank, &environment->local_rank));
    const char* limit_name = has_local_size ? names.local_size : names.size;
    const int limit = has_local_size ? environment->local_size : environment->size;
    FOREBAY_RETURN_IF_ERROR(check_range(names.local_rank, environment->local_rank, limit, limit_name));
  }
  return {};
}

std::uint64_t hash(const std::string& text) {
  std::uint64_t value = 14695981039346656037u;  // FNV-1a
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return value;
}

// `job` as a file name; different jobs keep different names.
std::string job_name(const std::string& job) {
  std::string name = job;
  for (char& c : name) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    if (!plain) c = '_';
  }
  if (name == job && name.size() <= kJobNameMax) return name;
  name.resize(std::min(name.size(), kJobNameMax));
  return name + "-" + std::to_string(hash(job));
}

// Where directories of this user's runs on this host go.
std::string runtime_directory(const Variables& variables) {
  const std::optional<std::string> directory = find(variables, "XDG_RUNTIME_DIR");
  struct stat facts {};
  // Containers often keep the variable and lose the directory.
  const bool usable = directory && stat(directory->c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) &&
                      facts.st_uid == geteuid();
  return usable ? *directory : "/tmp";
}

// Fills in store. `job` names the job among all of this user's on this host; empty when nothing
// does.
Status choose_store(const Variables& variables, const std::string& job, LaunchEnvironment* environment) {
  if (const auto given = find(variables, "FOREBAY_STORE")) {
    environment->store = *given;
    return {};
  }
  if (environment->size == 1) return {};
  const std::string ranks = std::to_string(environment->size) + " ranks started by " + environment->launcher;
  if (environment->local_size < environment->size) {
    return invalid(
        ranks + ", " + std::to_string(environment->local_size) +
        " of them on this host, need a place to meet; set FOREBAY_STORE to a directory that all hosts "
        "share, new for each run");
  }
  if (job.empty()) {
    return invalid(ranks +
                   " need a place to meet, and nothing names this job; set FOREBAY_STORE to a directory that "
                   "all ranks see, new for each run");
  }
  environment->store = runtime_directory(variables) + "/forebay-" + std::to_string(geteuid()) +
                                 "/" + environment->launcher + "-" + job_name(job);
  return {};
}

Result<LaunchEnvironment> read_forebay(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "forebay"};
  FOREBAY_RETURN_IF_ERROR(read_names(
      variables, {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_LOCAL_RANK", "FOREBAY_LOCAL_SIZE"}, &environment));
  // Set by hand, they usually are all on one host.
  if (!has(variables, "FOREBAY_LOCAL_SIZE")) environment.local_size = environment.size;
  if (!has(variables, "FOREBAY_LOCAL_RANK"))
    environment.local_rank = environment.rank % environment.local_size;
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, "", &environment));
  return environment;
}

// MASTER_PORT is only part of a name here: torchrun's own agent may be listening on it.
Result<LaunchEnvironment> read_torchrun(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "torchrun"};
  FOREBAY_RETURN_IF_ERROR(
      read_names(variables, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, &environment));
  const std::optional<std::string> run = find(variables, "TORCHELASTIC_RUN_ID");
  const std::optional<std::string> port = find(variables, "MASTER_PORT");
  std::string job;
  if (run || port) {
    // The run id may be the default "none" of several jobs, whose ports then differ.
    job = run.value_or("") + "." + find(variables, "MASTER_ADDR").value_or("") + "." + port.value_or("") +
          "." + find(variables, "TORCHELASTIC_RESTART_COUNT").value_or("0");
  }
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, job, &environment));
  return environment;
}

Result<LaunchEnvironment> read_open_mpi(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "open-mpi"};
  FOREBAY_RETURN_IF_ERROR(read_names(variables,
                                     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                      "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                                     &environment));
  std::string job;
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"}) {
    if (job.empty()) job = find(variables, name).value_or("");
  }
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, job, &environment));
  return environment;
}

// Slurm tells how many nodes, not how many tasks each has ("4(x2)" needs the list of nodes too): on one node
// all tasks are local.
Status read_slurm_locality(const Variables& variables, LaunchEnvironment* environment) {
  for (const char* name : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"}) {
    if (!has(variables, name)) continue;
    int node_count = 0;
    FOREBAY_RETURN_IF_ERROR(read_number(variables, name, &node_count));
    if (node_count == 1) environment->local_size = environment->size;
    break;
  }
  if (has(variables, "SLURM_NTASKS_PER_NODE") && environment->local_size == 1) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, "SLURM_NTASKS_PER_NODE", &environment->local_size));
    environment->local_size = std::clamp(environment->local_size, 1, environment->size);
  }
  if (has(variables, "SLURM_LOCALID")) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, "SLURM_LOCALID", &environment->local_rank));
    FOREBAY_RETURN_IF_ERROR(
        check_range("SLURM_LOCALID", environment->local_rank, environment->size, "the number of tasks"));
    environment->local_size = std::max(environment->local_size, environment->local_rank + 1);
  }
  return {};
}

std::string slurm_job(const Variables& variables) {
  std::string job = find(variables, "SLURM_JOB_ID").value_or("");
  if (job.empty()) return job;
  for (const char* name : {"SLURM_STEP_ID", "SLURM_RESTART_COUNT"}) {
    job += "." + find(variables, name).value_or("0");
  }
  return job;
}

const char* slurm_size_name(const Variables& variables) {
  return has(variables, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
}

Result<LaunchEnvironment> read_pmix(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "pmix"};
  const char* size_name = has(variables, "FOREBAY_SIZE") ? "FOREBAY_SIZE" : slurm_size_name(variables);
  if (!has(variables, size_name)) {
    return invalid("PMIX_RANK is set, but nothing tells the number of ranks; set FOREBAY_SIZE to it");
  }
  FOREBAY_RETURN_IF_ERROR(read_names(variables, {"PMIX_RANK", size_name, nullptr, nullptr}, &environment));
  FOREBAY_RETURN_IF_ERROR(read_slurm_locality(variables, &environment));
  FOREBAY_RETURN_IF_ERROR(
      choose_store(variables, find(variables, "PMIX_NAMESPACE").value_or(""), &environment));
  return environment;
}

Result<LaunchEnvironment> read_slurm(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "slurm"};
  FOREBAY_RETURN_IF_ERROR(
      read_names(variables, {"SLURM_PROCID", slurm_size_name(variables), nullptr, nullptr}, &environment));
  FOREBAY_RETURN_IF_ERROR(read_slurm_locality(variables, &environment));
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, slurm_job(variables), &environment));
  return environment;
}

// A batch script without srun has SLURM_PROCID=0 and perhaps no number of tasks: that is one process, not
// half a launch.
bool started_by_slurm(const Variables& variables) {
  const std::optional<std::string> rank = find(variables, "SLURM_PROCID");
  return rank && (*rank != "0" || has(variables, slurm_size_name(variables)));
}

}  // namespace

Result<LaunchEnvironment> read_launch_environment(const std::map<std::string, std::string>& variables) {
  const bool pmix = has(variables, "PMIX_RANK");
  if (has(variables, "FOREBAY_RANK") || (has(variables, "FOREBAY_SIZE") && !pmix))
    return read_forebay(variables);
  if (has(variables, "RANK") || has(variables, "WORLD_SIZE")) return read_torchrun(variables);
  if (has(variables, "OMPI_COMM_WORLD_RANK") || has(variables, "OMPI_COMM_WORLD_SIZE")) {
    return read_open_mpi(variables);
  }
  if (pmix) return read_pmix(variables);
  if (started_by_slurm(variables)) return read_slurm(variables);
  LaunchEnvironment environment{.launcher = "none"};
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, "", &environment));
  return environment;
}

Result<LaunchEnvironment> read_launch_environment() {
  Variables variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return read_launch_environment(variables);
}

namespace {

// A new private directory, removed with all that is in it.
class TemporaryStore {
 public:
  static Result<std::unique_ptr<TemporaryStore>> create() {
    Variables variables;
    if (const char* directory = std::getenv("XDG_RUNTIME_DIR")) variables["XDG_RUNTIME_DIR"] = directory;
    std::string path = runtime_directory(variables) + "/forebay-XXXXXX";
    if (mkdtemp(path.data()) == nullptr) {
      return Status(StatusCode::kIoError, "cannot make a directory like " + path +
                                              " for the ranks to meet: " + std::strerror(errno) +
                                              "; free some space or set XDG_RUNTIME_DIR");
    }
    return std::unique_ptr<TemporaryStore>(new TemporaryStore(std::move(path)));
  }
  ~TemporaryStore() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryStore(const TemporaryStore&) = delete;
  TemporaryStore& operator=(const TemporaryStore&) = delete;

  const std::string& path() const noexcept { return path_; }

 private:
  explicit TemporaryStore(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

// Takes SIGINT, SIGTERM, SIGHUP and SIGCHLD by waiting for them instead of by handlers, until destroyed.
class SignalQueue {
 public:
  SignalQueue() {
    sigemptyset(&taken_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action {};
      sigaction(signal, nullptr, &action);
      // What the one who started us had ignored (nohup) stays ignored, here and in the children.
      if (action.sa_handler != SIG_IGN) sigaddset(&taken_, signal);
    }
    sigaddset(&taken_, SIGCHLD);
    // An ignored SIGCHLD would reap the children behind our back.
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

  // The mask from before: what children start with.
  const sigset_t& mask() const noexcept { return mask_; }

  // The next signal, or 0 after `timeout` (nothing: however long it takes).
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

// The environment of one child: ours, without what would say another rank.
std::vector<std::string> child_environment(int rank, int size, const std::string& store) {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    bool ours = false;
    for (const char* name :
         {"FOREBAY_RANK=", "FOREBAY_SIZE=", "FOREBAY_LOCAL_RANK=", "FOREBAY_LOCAL_SIZE=", "FOREBAY_STORE="}) {
      ours = ours || text.starts_with(name);
    }
    if (!ours) result.push_back(text);
  }
  result.push_back("FOREBAY_RANK=" + std::to_string(rank));
  result.push_back("FOREBAY_SIZE=" + std::to_string(size));
  result.push_back("FOREBAY_LOCAL_RANK=" + std::to_string(rank));
  result.push_back("FOREBAY_LOCAL_SIZE=" + std::to_string(size));
  result.push_back("FOREBAY_STORE=" + store);
  return result;
}

class Children {
 public:
  // Whatever happens, no child outlives this object.
  ~Children() {
    signal_all(SIGKILL);
    for (const pid_t child : running_) waitpid(child, nullptr, 0);
  }

  // Only async-signal-safe calls between fork and exec.
  Status start(char* const* arguments, char* const* environment, const sigset_t& mask) {
    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child < 0) {
      return Status(StatusCode::kUnavailable,
                    std::string("cannot start a process: ") + std::strerror(errno) +
                        "; start fewer ranks or raise the limit of processes (ulimit -u)");
    }
    if (child > 0) {
      running_.push_back(child);
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

  // Takes those that have ended. Returns whether one failed now; the first failure ever is kept in
  // exit_code(). Of those that one call finds, one that a signal ended is the first: the others saw it go.
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
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      const int code = WIFSIGNALED(state) ? 128 + WTERMSIG(state) : WEXITSTATUS(state);
      if (code == 0) continue;
      failed = true;
      const bool first_signal = open && WIFSIGNALED(state) && !signalled;
      signalled = signalled || WIFSIGNALED(state);
      if (exit_code_ == 0 || first_signal) exit_code_ = code;
    }
    return failed;
  }

  int exit_code() const noexcept { return exit_code_; }

 private:
  std::vector<pid_t> running_;
  int exit_code_ = 0;
};

}  // namespace

Result<int> launch_local_ranks(const std::vector<std::string>& arguments, const LaunchOptions& options) {
  if (options.size < 1) {
    return invalid("cannot start " + std::to_string(options.size) + " ranks; give at least 1");
  }
  keep_standard_streams();
  // From here on a signal waits until everything it must end is known.
  const SignalQueue signals;
  Result<std::unique_ptr<TemporaryStore>> store = TemporaryStore::create();
  FOREBAY_RETURN_IF_ERROR(store.status());

  std::vector<std::string> child_arguments{program_invocation_name};
  child_arguments.insert(child_arguments.end(), arguments.begin(), arguments.end());
  Children children;
  for (int rank = 0; rank < options.size; ++rank) {
    std::vector<std::string> environment = child_environment(rank, options.size, store.value()->path());
    FOREBAY_RETURN_IF_ERROR(
        children.start(pointers(child_arguments).data(), pointers(environment).data(), signals.mask()));
  }

  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> end;  // When what is left is killed.
  while (!children.empty()) {
    std::optional<std::chrono::nanoseconds> timeout;
    if (end) timeout = *end - Clock::now();
    siginfo_t info{};
    const int signal = signals.next(timeout, &info);
    bool ending = false;
    if (signal == 0) {
      children.signal_all(SIGKILL);
      end = Clock::now() + options.grace;
    } else if (signal == SIGCHLD) {
      ending = children.reap();
      if (ending && !end) children.signal_all(SIGTERM);
    } else {
      // The terminal sends Ctrl-C to the children itself; twice would look like impatience to them.
      if (info.si_code != SI_KERNEL) children.signal_all(signal);
      ending = true;
    }
    if (ending && !end) end = Clock::now() + options.grace;
  }
  return children.exit_code();
}

}  // namespace forebay
