// forebay-gpt: the command line.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/error.h"
#include "options.h"
#include "text.h"
#include "trainer.h"

namespace forebay::gpt {
namespace {

constexpr int kFailureExit = 1;
constexpr int kInterruptedExit = 130;

void stop_on_signals() {
  struct sigaction action = {};
  action.sa_handler = [](int) { request_stop(); };
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

// What would only be found out after the training.
void check_can_be_written(const char* option, const std::string& path) {
  if (path.empty()) return;
  const std::filesystem::path parent = std::filesystem::absolute(path).parent_path();
  std::error_code error;
  if (std::filesystem::is_directory(parent, error)) return;
  throw Error(StatusCode::kIoError, std::string(option) + " " + path + ": there is no directory " +
                                        parent.string() + "; make it or give another path");
}

void check_files(const TrainerOptions& options) {
  check_can_be_written("--export", options.export_file);
  check_can_be_written("--report", options.report_file);
  check_can_be_written("--save-state", options.save_state);
  static_cast<void>(Text::read(options.text));
}

int finish(const TrainerOptions& options, const TrainingReport& report, bool writes) {
  if (writes) {
    if (!options.report_file.empty()) write_file(options.report_file, report_json(report));
    if (report.interrupted) {
      std::fprintf(stderr, "forebay-gpt: stopped after step %llu of %llu%s\n",
                   static_cast<unsigned long long>(report.steps),
                   static_cast<unsigned long long>(options.steps),
                   options.save_state.empty() ? "" : ("; state saved in " + options.save_state).c_str());
    }
  }
  return report.interrupted ? kInterruptedExit : 0;
}

// The ranks that `message`, the cause of a lost peer or a timeout, says are gone or late: the list before
// "closed the connection", "did not come" or "did not finish it".
std::set<int> named_as_lost(const std::string& message) {
  static const std::regex kLost(
      "ranks? ([0-9, and]*[0-9]) (closed the connection|did not come|did not finish)");
  static const std::regex kNumber("[0-9]+");
  std::set<int> ranks;
  std::smatch lost;
  if (!std::regex_search(message, lost, kLost)) return ranks;
  const std::string list = lost[1];
  for (std::sregex_iterator number(list.begin(), list.end(), kNumber), end; number != end; ++number)
    ranks.insert(std::atoi(number->str().c_str()));
  return ranks;
}

// One rank of several says it; the others would only repeat it. That is the first rank that is not the one
// that is gone, and every rank when nobody knows who that is.
bool speaks(int rank, const Error& error) {
  if (error.code() != StatusCode::kPeerLost && error.code() != StatusCode::kTimeout) return rank == 0;
  const std::set<int> lost = named_as_lost(error.status().message());
  if (lost.empty()) return true;
  int speaker = 0;
  while (lost.count(speaker) > 0) ++speaker;
  return rank == speaker;
}

int run_rank(const TrainerOptions& options, const LaunchEnvironment& environment) {
  if (options.communicator == "local") {
    throw Error(
        StatusCode::kInvalidArgument,
        "--communicator local: ranks that " + environment.launcher +
            " started are processes, and local ranks are threads of one; use gloo, or start one process");
  }
  try {
    if (environment.rank == 0) check_files(options);
    return finish(options, run_training_rank(options, environment), environment.rank == 0);
  } catch (const Error& error) {
    if (speaks(environment.rank, error))
      std::fprintf(stderr, "forebay-gpt: %s\n", error.status().message().c_str());
    return kFailureExit;
  }
}

int run(const TrainerOptions& parsed, const std::vector<std::string>& arguments) {
  const LaunchEnvironment environment = value_or_throw(read_launch_environment());
  const bool launched =
      environment.launcher != "none" && (environment.size > 1 || environment.launcher == "forebay");
  TrainerOptions options = parsed;
  if (launched) options.ranks = environment.size;
  if (launched && options.communicator.empty()) options.communicator = "gloo";
  options = resolve_options(std::move(options));
  if (launched) return run_rank(options, environment);

  check_files(options);
  if (options.communicator == "gloo") {
    return value_or_throw(launch_local_ranks(arguments, {.size = options.ranks}));
  }
  return finish(options, run_training(options), true);
}

}  // namespace
}  // namespace forebay::gpt

int main(int argc, char** argv) {
  using namespace forebay::gpt;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const ParsedCommand command = parse_command(arguments);
  if (!command.options) return command.exit_code;
  stop_on_signals();
  try {
    return run(*command.options, arguments);
  } catch (const forebay::Error& error) {
    std::fprintf(stderr, "forebay-gpt: %s\n", error.status().message().c_str());
    return kFailureExit;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "forebay-gpt: %s\n", error.what());
    return kFailureExit;
  }
}
