// A program for launch_test to start: without FOREBAY_RANK it launches itself, with it it behaves as told.
//
//   launch_probe SIZE GRACE_MS REPORT MODE...
//
// Each rank writes "rank size local_rank local_size pid parent-store" to REPORT.<rank>, whole, and then:
//   exit CODE...     ends with its rank's code (the last one when there are fewer)
//   hang RANK CODE   that rank ends with CODE, the others wait for a signal and end with 0 on SIGTERM
//   wait             waits for a signal; SIGINT ends it with 40 + rank, SIGTERM with 0
//   count            makes REPORT.interrupted.<rank> on SIGINT; SIGTERM ends it with the number of these
//   late RANK MS     waits for a signal and ends with 128 + it; that rank makes REPORT.done MS later first
//   stubborn         like wait, but ignores SIGTERM and SIGINT
//   kill RANK        that rank kills itself with SIGKILL, the others wait
//   fewer SIZE       with more than SIZE ranks, the last one kills itself and the others wait; else ends
//                    with 0. The launcher starts the ranks that are left again
//   claim            ends with 0 if it may print the error of all, with 1 if another rank does, with 2 if it
//   is
//                    not said who does
//   fewer SIZE dies  the same, and rank 0 takes no signal but dies of it; with another word it hears none
//   asked            waits for a signal, and the last rank then kills itself; a rank alone ends with 0. The
//                    launcher would start the ranks that are left again
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "forebay/bootstrap.h"

namespace {

int wait_for_signal(int rank) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  int signal = 0;
  sigwait(&set, &signal);
  return signal == SIGINT ? 40 + rank : 0;
}

int run_rank(const std::vector<std::string>& arguments) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, nullptr);

  const forebay::Result<forebay::LaunchEnvironment> read = forebay::read_launch_environment();
  if (!read.ok()) {
    std::fprintf(stderr, "%s\n", read.status().to_string().c_str());
    return 99;
  }
  const forebay::LaunchEnvironment& environment = read.value();
  const std::string& mode = arguments[3];
  // Each meeting of fewer ranks has reports of its own.
  const std::string reports =
      arguments[2] + (mode == "fewer" || mode == "asked" ? "." + std::to_string(environment.size) : "");
  const std::string report = reports + "." + std::to_string(environment.rank);
  if (std::FILE* file = std::fopen((report + ".part").c_str(), "w")) {
    std::fprintf(file, "%d %d %d %d %d %s\n", environment.rank, environment.size, environment.local_rank,
                 environment.local_size, static_cast<int>(getpid()), environment.store.c_str());
    std::fclose(file);
    std::rename((report + ".part").c_str(), report.c_str());
  }

  const bool is_too_many = mode == "fewer" && environment.size > std::atoi(arguments[4].c_str());
  if (mode == "hang" || mode == "kill" || is_too_many) {
    // A failure ends the others at once, so it waits until they have reported.
    for (int rank = 0; rank < environment.size; ++rank) {
      while (access((reports + "." + std::to_string(rank)).c_str(), F_OK) != 0) sched_yield();
    }
  }
  if (mode == "exit") {
    const std::size_t index = 4 + static_cast<std::size_t>(environment.rank);
    return std::atoi(arguments[index < arguments.size() ? index : arguments.size() - 1].c_str());
  }
  if (mode == "claim") {
    const std::optional<bool> claimed = forebay::claim_shared_error();
    return claimed ? (*claimed ? 0 : 1) : 2;
  }
  if (mode == "hang" && environment.rank == std::atoi(arguments[4].c_str()))
    return std::atoi(arguments[5].c_str());
  if (mode == "kill" && environment.rank == std::atoi(arguments[4].c_str())) raise(SIGKILL);
  if (mode == "fewer" && !is_too_many) return 0;
  if (is_too_many && environment.rank == environment.size - 1) raise(SIGKILL);
  if (is_too_many && arguments.size() > 5 && environment.rank == 0) {
    if (arguments[5] == "dies") sigprocmask(SIG_UNBLOCK, &set, nullptr);
    for (;;) pause();
  }
  if (mode == "asked") {
    if (environment.size == 1) return 0;
    const int code = wait_for_signal(environment.rank);
    if (environment.rank == environment.size - 1) raise(SIGKILL);
    return code;
  }
  if (mode == "count") {
    int interrupts = 0;
    for (int signal = 0;; ++interrupts) {
      sigwait(&set, &signal);
      if (signal == SIGTERM) return interrupts;
      const std::string path = arguments[2] + ".interrupted." + std::to_string(environment.rank);
      if (std::FILE* file = std::fopen(path.c_str(), "w")) std::fclose(file);
    }
  }
  if (mode == "late") {
    int signal = 0;
    sigwait(&set, &signal);
    if (environment.rank == std::atoi(arguments[4].c_str())) {
      usleep(static_cast<useconds_t>(std::atoi(arguments[5].c_str())) * 1000);
      if (std::FILE* file = std::fopen((arguments[2] + ".done").c_str(), "w")) std::fclose(file);
    }
    return 128 + signal;
  }
  if (mode == "stubborn") {
    for (;;) pause();
  }
  return wait_for_signal(environment.rank);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() < 4) return 98;
  if (std::getenv("FOREBAY_RANK") != nullptr) return run_rank(arguments);
  forebay::LaunchOptions options;
  options.size = std::atoi(arguments[0].c_str());
  options.grace = std::chrono::milliseconds(std::atoi(arguments[1].c_str()));
  if (arguments[3] == "fewer" || arguments[3] == "asked") {
    options.after_failure = [](int left, int exit_code) { return exit_code == 128 + SIGKILL ? left : 0; };
  }
  const forebay::Result<int> code = forebay::launch_local_ranks(arguments, options);
  if (!code.ok()) {
    std::fprintf(stderr, "%s\n", code.status().to_string().c_str());
    return 97;
  }
  return code.value();
}
