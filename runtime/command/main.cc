// The `forebay` command. Each subcommand lives in a file of its own and is added by one function.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "forebay/command_line.h"
#include "forebay/error.h"
#include "forebay/standard_streams.h"
#include "forebay/text.h"
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

// The subcommand that the arguments begin with, otherwise the program.
const forebay::CommandText& called_by(const forebay::CommandText& program,
                                      const std::vector<std::string>& arguments) {
  const auto called =
      std::find_if(program.commands.begin(), program.commands.end(), [&](const forebay::CommandText& one) {
        return !arguments.empty() && one.name == program.name + " " + arguments[0];
      });
  return called == program.commands.end() ? program : *called;
}

int complain(const std::string& program, const std::string& message, int exit_code) {
  std::fprintf(stderr, "%s: %s\n", program.c_str(), forebay::shown_text(message).c_str());
  return exit_code;
}

// "help plan" is "plan --help".
void read_help_command(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "help") return;
  arguments.erase(arguments.begin());
  arguments.push_back("--help");
}

int run(std::vector<std::string> arguments) {
  CLI::App app("A memory and offload runtime for training large models", "forebay");
  const std::string version = std::string("forebay ") + forebay::version();
  app.set_version_flag("--version", version, "Print the version");
  app.require_subcommand(1);
  app.footer("'forebay help COMMAND' describes a command. Sizes: " + std::string(forebay::kBytesSyntax) +
             ".");
  std::function<int()> action;
  forebay::add_devices_command(app, action);
  forebay::add_plan_command(app, action);
  forebay::add_report_command(app, action);
  forebay::add_replay_command(app, action);
  forebay::add_explain_command(app, action);
  std::vector<std::string> command;  // The words behind `forebay run`.
  forebay::add_run_command(app, action, command);
  forebay::add_bench_tiers_command(app, action);
  for (CLI::App* const sub : app.get_subcommands([](CLI::App*) { return true; }))
    sub->set_version_flag("--version", version, "Print the version");
  const forebay::CommandText description = forebay::describe_command(app, "forebay");
  if (arguments.size() == 2 && arguments[0] == "--write-manual") {
    forebay::throw_if_error(forebay::write_manual(description, arguments[1]));
    return 0;
  }
  read_help_command(arguments);
  const forebay::CommandText& called = called_by(description, arguments);
  const std::string& program = called.name;
  if (&called == &description && !arguments.empty() && (arguments[0].empty() || arguments[0][0] != '-'))
    return complain(program, forebay::unknown_word_text(description, arguments[0]), forebay::kBadUsage);
  if (const std::optional<int> refused = forebay::take_run_command(called, &arguments, &command))
    return *refused;
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // As CLI11 wants them.
  } catch (const CLI::CallForHelp&) {
    std::fputs(forebay::help_text(called, forebay::terminal_width()).c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::vector<std::string> unknown = app.remaining(true);
    return complain(program,
                    unknown.empty()
                        ? std::string(error.what()) + " (" + program + " --help lists the options)"
                        : forebay::unknown_word_text(called, unknown.front()),
                    forebay::kBadUsage);
  }
  try {
    return action();
  } catch (const forebay::Error& error) {
    return complain(program, error.status().message(), forebay::kFailed);
  } catch (const std::exception& error) {
    return complain(program, error.what(), forebay::kFailed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  forebay::keep_standard_streams();
  try {
    return run(std::vector<std::string>(argv + std::min(argc, 1), argv + argc));
  } catch (const std::exception& error) {
    return complain("forebay", error.what(), forebay::kFailed);
  }
}
