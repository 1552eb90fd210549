// forebay-gpt: the command line.

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/error.h"
#include "forebay/saved_state.h"
#include "forebay/standard_streams.h"
#include "forebay/text.h"
#include "output/files.h"
#include "output/output_file.h"
#include "output/summary.h"
#include "parallel/parted_state.h"
#include "trainer/launcher_watch.h"
#include "trainer/options.h"
#include "trainer/training.h"

namespace forebay::gpt {
namespace {

constexpr int kFailureExit = 1;
constexpr int kUsageExit = 2;
// This rank was well and another, or the way to it, was not: started again, from the last saved state, the
// run may go on (EX_TEMPFAIL of sysexits.h).
constexpr int kPeerFailureExit = 75;

// Signals this close together are one: a launcher sends it to a rank and `timeout` to its process group, or
// one of them to both. Longer: a person has to press again; shorter: two signals of a busy machine count as a
// person's. One sender makes both in no time; two senders wait for a processor.
constexpr std::int64_t kSameSignalNs = 500'000'000;
constexpr std::int64_t kSameSenderNs = 50'000'000;

std::atomic<std::int64_t> first_signal_ns{0};
std::atomic<int> first_sender{0};
// The signal that stopped this rank. Before one arrives: the signal that stopped another rank is taken to be
// SIGTERM.
std::atomic<int> first_signal{SIGTERM};
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "a signal handler uses it");
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler uses it");

// Before the first step there is nothing to end in order, and a person does not wait. A launcher ends all
// ranks because one has failed; the others have this long to say why. Shorter: no rank does. Longer: the
// launcher kills them.
constexpr unsigned kLastWordsSeconds = 2;

void end_by(int signal) {
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // Takes effect when the handler returns.
}

void on_alarm(int) {
  if (!has_begun_steps()) end_by(first_signal);
}

// The first signal asks for an end after the step; the second ends the program at once.
void on_signal(int signal, siginfo_t* info, void*) {
  const int sender = info->si_pid;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const std::int64_t now_ns = std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  std::int64_t first_ns = 0;
  if (first_signal_ns.compare_exchange_strong(first_ns, now_ns)) {
    first_signal = signal;
    first_sender = sender;
    if (request_stop()) return;
    if (signal == SIGINT) return end_by(signal);
    ::alarm(kLastWordsSeconds);
  } else if (now_ns - first_ns > (sender == first_sender ? kSameSenderNs : kSameSignalNs)) {
    end_by(signal);
  }
}

// Called before training; until then a signal ends the program as usual.
void stop_on_signals() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  action.sa_flags = SA_RESTART;
  action.sa_handler = on_alarm;
  sigaction(SIGALRM, &action, nullptr);
}

// Warnings about a run that succeeded.
void warn_about(const TrainerOptions& options, const TrainingReport& report) {
  const bool uses_weights = options.generate > 0 || options.evaluates();
  if (!options.load_state.empty() && report.first_step >= options.steps && !uses_weights) {
    std::fprintf(stderr,
                 "forebay-gpt: nothing is left to do: the state in %s is at step %llu and --steps is %llu\n",
                 options.load_state.c_str(), static_cast<unsigned long long>(report.first_step),
                 static_cast<unsigned long long>(options.steps));
  }
  if (const std::optional<std::uint64_t> step = first_step_of_lost_loss(report)) {
    std::fprintf(stderr, "forebay-gpt: warning: the loss is not finite since step %llu; try a smaller --lr\n",
                 static_cast<unsigned long long>(*step));
  }
}

int finish(const TrainerOptions& options, const TrainingReport& report, bool writes) {
  if (writes) {
    if (!options.report_file.empty()) write_file(options.report_file, report_json(report));
    show_closing(options, report);
    warn_about(options, report);
    if (report.interrupted) {
      std::fprintf(stderr, "forebay-gpt: stopped after step %llu of %llu%s\n",
                   static_cast<unsigned long long>(report.steps),
                   static_cast<unsigned long long>(options.steps),
                   options.save_state.empty() ? "" : ("; state saved in " + options.save_state).c_str());
    }
  }
  if (report.interrupted) return 128 + first_signal;
  return output_failed() ? kFailureExit : 0;
}

bool is_of_a_peer(const Error& error) {
  return error.code() == StatusCode::kPeerLost || error.code() == StatusCode::kTimeout;
}

// One rank reports an error that the others would repeat. Ranks of another launcher may each have a log of
// their own, and any of them may be lost: all of them report the loss of a peer.
bool speaks(int rank, const Error& error) {
  return claim_shared_error().value_or(is_of_a_peer(error) || rank == 0);
}

int run_rank(const TrainerOptions& options, const LaunchEnvironment& environment) {
  if (options.device.cuda && options.communicator != "nccl") {
    throw Error(StatusCode::kUnsupported, "--device cuda: ranks on GPUs are threads of one process, and " +
                                              environment.launcher +
                                              " started several processes; add --communicator nccl, with a "
                                              "GPU for each rank, or start one process with --ranks");
  }
  if (options.communicator == "local") {
    throw Error(
        StatusCode::kInvalidArgument,
        "--communicator local: ranks that " + environment.launcher +
            " started are processes, and local ranks are threads of one; use auto, or start one process");
  }
  try {
    if (environment.rank == 0) check_files(options);
    stop_on_signals();
    // Our own launcher ends its ranks when it ends; another launcher is watched.
    std::jthread watch;
    if (environment.launcher != "forebay") watch = watch_launcher();
    return finish(options, run_training_rank(options, environment), environment.rank == 0);
  } catch (const Error& error) {
    const bool is_own = dynamic_cast<const JoinError*>(&error) != nullptr && !is_of_a_peer(error);
    if (is_own || speaks(environment.rank, error))
      std::fprintf(stderr, "forebay-gpt: %s\n", error.status().message().c_str());
    return is_of_a_peer(error) ? kPeerFailureExit : kFailureExit;
  }
}

// Whether so many ranks can be arranged as the options say.
Status check_ranks(const TrainerOptions& options, int ranks) {
  Status status = check_grid(ranks, grid_options(options));
  return status.ok() ? check_order_group(ranks, grid_options(options), options.group) : status;
}

// Decides for --elastic, after each failure, how many ranks go on from the last saved state.
class Elastic {
 public:
  explicit Elastic(const TrainerOptions& options) : options_(options), ranks_(options.ranks) {}

  // 0: the run ends.
  int ranks_to_go_on(int left, int exit_code) {
    const bool lost_some = left < ranks_ && exit_code > 128;
    if (exit_code != kPeerFailureExit && !lost_some)
      return 0;  // A failure of its own, or a rank was asked to end.
    int ranks = left;
    while (ranks > 0 && !check_ranks(options_, ranks).ok()) --ranks;
    if (ranks == 0) {
      std::fprintf(stderr, "forebay-gpt: --elastic: of %d ranks, %d are left, and cannot be arranged: %s\n",
                   options_.ranks, left, check_ranks(options_, left).message().c_str());
      return 0;
    }
    const bool has_state = holds_state(options_.save_state);
    if (ranks == ranks_ && !may_repeat(has_state)) {
      std::fprintf(stderr,
                   "forebay-gpt: --elastic: no rank was lost, and %d starts saved no new state; find out why "
                   "ranks are late, or raise --deadline\n",
                   kMostRepeats);
      return 0;
    }
    ranks_ = ranks;
    std::fprintf(stderr, "forebay-gpt: --elastic: this run %s %d rank%s%s %s\n",
                 has_state ? "goes on with" : "begins again with", ranks, ranks == 1 ? "" : "s",
                 has_state ? " from the last state in" : ", for no state is saved yet in",
                 shown_path(options_.save_state).c_str());
    return ranks;
  }

 private:
  static constexpr int kMostRepeats = 3;

  // As many ranks as before may fail in the same way again and again.
  bool may_repeat(bool has_state) {
    std::vector<std::string> states;
    if (has_state) states = saved_state_names(options_.save_state);
    if (states != states_) repeats_ = 0;
    states_ = std::move(states);
    return ++repeats_ <= kMostRepeats;
  }

  const TrainerOptions& options_;
  int ranks_;
  int repeats_ = 0;                  // Starts of as many ranks as before, without a new state.
  std::vector<std::string> states_;  // At the last of these.
};

int launch(const TrainerOptions& options, const std::vector<std::string>& arguments) {
  LaunchOptions launch{.size = options.ranks};
  Elastic elastic(options);
  if (options.elastic)
    launch.after_failure = [&](int left, int exit_code) { return elastic.ranks_to_go_on(left, exit_code); };
  return value_or_throw(launch_local_ranks(arguments, launch));
}

int run(const TrainerOptions& parsed, const std::vector<std::string>& arguments) {
  const LaunchEnvironment environment = value_or_throw(read_launch_environment());
  if (environment.launcher == "none" && !environment.store.empty()) {
    throw Error(
        StatusCode::kInvalidArgument,
        "FOREBAY_STORE is set, and nothing says which rank this process is, so it would train alone; set "
        "FOREBAY_RANK and FOREBAY_SIZE, or unset FOREBAY_STORE");
  }
  const bool launched =
      environment.launcher != "none" && (environment.size > 1 || environment.launcher == "forebay");
  TrainerOptions options = parsed;
  if (launched) options.ranks = environment.size;
  if (launched && options.communicator.empty()) options.communicator = "auto";
  options = resolve_options(std::move(options));
  find_state_to_resume(options);
  const Status status = check_ranks(options, options.ranks);
  if (!status.ok()) {
    if (environment.rank == 0) std::fprintf(stderr, "forebay-gpt: %s\n", status.message().c_str());
    return kUsageExit;
  }
  if (launched) return run_rank(options, environment);

  check_files(options);
  if (starts_processes(options.communicator)) return launch(options, arguments);
  if (options.elastic && options.ranks > 1) {
    throw Error(StatusCode::kInvalidArgument,
                "--elastic needs ranks that are processes, and with --communicator " + options.communicator +
                    " they are threads of one; use auto, shm, gloo or nccl");
  }
  stop_on_signals();
  return finish(options, run_training(options), true);
}

}  // namespace
}  // namespace forebay::gpt

int main(int argc, char** argv) {
  using namespace forebay::gpt;
  const bool output_is_closed = ::fcntl(STDOUT_FILENO, F_GETFD) < 0;
  forebay::keep_standard_streams();
  // A file at its limit (ulimit -f) is then an error that can be told.
  std::signal(SIGXFSZ, SIG_IGN);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const ParsedCommand command = parse_command(arguments);
  try {
    if (output_is_closed && command.options && command.options->generate > 0) {
      throw forebay::Error(
          forebay::StatusCode::kInvalidArgument,
          "--generate writes to standard output, which is closed; open it, or leave the option out");
    }
    const int exit_code = command.options ? run(*command.options, arguments) : command.exit_code;
    if (exit_code == 0) forebay::throw_if_error(forebay::flush_standard_output());
    return exit_code;
  } catch (const forebay::Error& error) {
    std::fprintf(stderr, "forebay-gpt: %s\n", error.status().message().c_str());
    return kFailureExit;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "forebay-gpt: %s\n", error.what());
    return kFailureExit;
  }
}
