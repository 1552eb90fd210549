// The subcommands of `forebay`, and the functions that they share.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "forebay/command_line.h"
#include "forebay/status.h"

namespace forebay {

// Exit codes.
constexpr int kFailed = 1;
constexpr int kBadUsage = 2;  // Arguments or files that cannot be used.

inline bool given(const CLI::Option* option) {
  return option->count() > 0;
}

inline Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

// Adds an option or a positional with a value. `type`: its placeholder in help texts.
template <typename Target>
CLI::Option* add_value(CLI::App& command, const char* name, Target& target, const char* type,
                       const char* help) {
  CLI::Option* const option = command.add_option(name, target, help)->type_name(type);
  // CLI11 would take the largest number in its place.
  if constexpr (std::is_same_v<Target, std::int64_t> || std::is_same_v<Target, std::optional<std::int64_t>> ||
                std::is_same_v<Target, std::vector<std::int64_t>>) {
    option->check([](const std::string& word) {
      std::int64_t number = 0;
      const auto parsed = std::from_chars(word.data(), word.data() + word.size(), number);
      return parsed.ec == std::errc::result_out_of_range ? word + " is no number of 64 bits" : std::string();
    });
  }
  return option;
}

// Prints "PROGRAM: MESSAGE" to standard error and returns `exit_code`.
int complain(const std::string& program, const std::string& message, int exit_code);

// Errors: kIoError if not all of the text can be written.
Status write_standard_output(const std::string& text);

// Each adds one subcommand. Parsing it sets `action`, which returns the exit code: 0 for success, kBadUsage
// for bad input, kFailed where the rest is said.
using Action = std::function<int()>;
void add_bench_tiers_command(CLI::App& app, Action& action);  // 1: this machine cannot be measured.
void add_compare_command(CLI::App& app, Action& action);      // 1: no setting fits.
void add_devices_command(CLI::App& app, Action& action);
void add_explain_command(CLI::App& app, Action& action);
void add_plan_command(CLI::App& app, Action& action);      // 1: the plan does not fit.
void add_replay_command(CLI::App& app, Action& action);    // 1: the arena did not complete a trace.
void add_report_command(CLI::App& app, Action& action);    // 1: the runs differ or cannot be compared.
void add_simulate_command(CLI::App& app, Action& action);  // 1: the plan does not fit.
void add_state_command(CLI::App& app, Action& action);     // 1: a state is damaged or cannot be read.
// The exit code is that of `command`, the words to run. They are there before parsing and until the action
// has been called.
void add_run_command(CLI::App& app, Action& action, const std::vector<std::string>& command);

// Moves the command to run out of the arguments of `forebay run`: everything after the first `--`, or from
// the first word that is neither an option nor the value of one. `called`: the subcommand that was given;
// `arguments`: the program's, without its name. Returns the exit code after a complaint; none otherwise, as
// for another subcommand.
std::optional<int> take_run_command(const CommandText& called, std::vector<std::string>* arguments,
                                    std::vector<std::string>* command);

}  // namespace forebay
