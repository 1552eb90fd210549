// The `forebay` command. Each subcommand lives in a file of its own and is added by one function.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/standard_streams.h"
#include "forebay/version.h"
#include "runtime/command/command_line.h"
#include "runtime/command/machine/bench_tiers_command.h"
#include "runtime/command/machine/devices_command.h"
#include "runtime/command/plan/plan_command.h"
#include "runtime/command/replay/replay_command.h"
#include "runtime/command/report/report_command.h"
#include "runtime/command/run/run_command.h"
#include "runtime/command/shown_text.h"
#include "runtime/command/traces/explain_command.h"

namespace {

// CLI11 would only say that a subcommand is missing.
bool is_unknown_word(const CLI::App& app, const std::string& word) {
  if (word.empty() || word[0] == '-') return word.empty();
  const std::vector<const CLI::App*> known = app.get_subcommands({});
  return std::none_of(known.begin(), known.end(), [&](const CLI::App* one) { return one->check_name(word); });
}

// What CLI11 says, which begins with what it found: words of the command line are in it.
void complain(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream nothing, said;
  (void)app.exit(error, nothing, said);
  std::string text = said.str();
  const std::string found = error.what();
  if (text.rfind(found, 0) == 0) text.replace(0, found.size(), forebay::shown_text(found));
  std::fputs(text.c_str(), stderr);
}

int run(int argc, char** argv) {
  CLI::App app("forebay: a memory and offload runtime for training large models", "forebay");
  app.set_version_flag("--version", std::string("forebay ") + forebay::version(), "Print the version");
  app.require_subcommand(1);
  std::function<int()> action;
  forebay::add_devices_command(app, action);
  forebay::add_plan_command(app, action);
  forebay::add_report_command(app, action);
  forebay::add_replay_command(app, action);
  forebay::add_explain_command(app, action);
  std::vector<std::string> command;  // Of `forebay run`.
  forebay::add_run_command(app, action, command);
  forebay::add_bench_tiers_command(app, action);
  if (argc > 1 && is_unknown_word(app, argv[1])) {
    std::fprintf(stderr,
                 "forebay: there is no subcommand '%s'; use devices, plan, report, replay, explain, run or "
                 "bench-tiers (--help describes them)\n",
                 forebay::shown_text(argv[1]).c_str());
    return forebay::kBadUsage;
  }
  std::vector<std::string> arguments(argv, argv + argc);
  if (const std::optional<int> refused = forebay::take_run_command(app, &arguments, &command)) {
    return *refused;
  }
  std::vector<const char*> words;
  for (const std::string& argument : arguments) words.push_back(argument.c_str());
  try {
    app.parse(static_cast<int>(words.size()), words.data());
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    complain(app, error);
    return forebay::kBadUsage;
  }
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  forebay::keep_standard_streams();
  try {
    return run(argc, argv);
  } catch (const forebay::Error& error) {
    std::fprintf(stderr, "forebay: %s\n", forebay::shown_text(error.status().message()).c_str());
    return forebay::kFailed;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "forebay: %s\n", forebay::shown_text(error.what()).c_str());
    return forebay::kFailed;
  }
}
