// The `forebay` command. Each subcommand lives in a file of its own and is added by one function.

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "forebay/command_line.h"
#include "forebay/error.h"
#include "forebay/standard_streams.h"
#include "forebay/text.h"
#include "forebay/version.h"
#include "runtime/command/command_line.h"

namespace forebay {

int complain(const std::string& program, const std::string& message, int exit_code) {
  std::fprintf(stderr, "%s: %s\n", program.c_str(), shown_text(message).c_str());
  return exit_code;
}

Status write_standard_output(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  return flush_standard_output();
}

namespace {

// The subcommand that the arguments begin with, otherwise the program.
const CommandText& called_by(const CommandText& program, const std::vector<std::string>& arguments) {
  const auto called =
      std::find_if(program.commands.begin(), program.commands.end(), [&](const CommandText& one) {
        return !arguments.empty() && one.name == program.name + " " + arguments[0];
      });
  return called == program.commands.end() ? program : *called;
}

// "help plan" is "plan --help".
void read_help_command(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "help") return;
  arguments.erase(arguments.begin());
  arguments.push_back("--help");
}

// The first option with an empty value, as that of a shell variable that is not set.
std::string empty_option(const CLI::App& app) {
  for (const CLI::App* const sub : app.get_subcommands()) {
    for (const CLI::Option* const option : sub->get_options()) {
      const std::vector<std::string>& values = option->results();
      if (std::find(values.begin(), values.end(), "") != values.end()) return option->get_name();
    }
  }
  return {};
}

int run(std::vector<std::string> arguments) {
  CLI::App app("A memory and offload runtime for training large models", "forebay");
  const std::string version = std::string("forebay ") + forebay::version();
  app.set_version_flag("--version", version, "Print the version");
  app.require_subcommand(1);
  app.footer("'forebay help COMMAND' describes a command. Sizes: " + std::string(kBytesSyntax) + ".");
  Action action;
  add_devices_command(app, action);
  add_plan_command(app, action);
  add_simulate_command(app, action);
  add_compare_command(app, action);
  add_report_command(app, action);
  add_replay_command(app, action);
  add_explain_command(app, action);
  std::vector<std::string> command;  // The words behind `forebay run`.
  add_run_command(app, action, command);
  add_bench_tiers_command(app, action);
  add_state_command(app, action);
  for (CLI::App* const sub : app.get_subcommands([](CLI::App*) { return true; }))
    sub->set_version_flag("--version", version, "Print the version");
  const CommandText description = describe_command(app, "forebay");
  if (arguments.size() == 2 && arguments[0] == "--write-manual") {
    throw_if_error(write_manual(description, arguments[1]));
    return 0;
  }
  read_help_command(arguments);
  const CommandText& called = called_by(description, arguments);
  const std::string& program = called.name;
  if (&called == &description && !arguments.empty() && (arguments[0].empty() || arguments[0][0] != '-'))
    return complain(program, unknown_word_text(description, arguments[0]), kBadUsage);
  if (const std::optional<int> refused = take_run_command(called, &arguments, &command)) return *refused;
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // As CLI11 wants them.
  } catch (const CLI::CallForHelp&) {
    std::fputs(help_text(called, terminal_width()).c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::vector<std::string> unknown = app.remaining(true);
    return complain(program,
                    unknown.empty() ? parse_error_text(error.what(), program)
                                    : unknown_word_text(called, unknown.front()),
                    kBadUsage);
  }
  if (const std::string empty = empty_option(app); !empty.empty())
    return complain(program, empty + " is empty; give a value, or leave it out", kBadUsage);
  // Writing a file beyond `ulimit -f` fails then, and what was begun is removed. A program that is run has
  // the default action.
  if (command.empty()) (void)::signal(SIGXFSZ, SIG_IGN);
  try {
    return action();
  } catch (const Error& error) {
    return complain(program, error.status().message(), kFailed);
  } catch (const std::exception& error) {
    return complain(program, error.what(), kFailed);
  }
}

}  // namespace
}  // namespace forebay

// The command's main function. C, and visible, because a standalone build has it in libforebay-c.so.
extern "C" __attribute__((visibility("default"))) int forebay_command_main(int argc, char** argv) {
  const bool output_is_closed = ::fcntl(STDOUT_FILENO, F_GETFD) < 0;
  forebay::keep_standard_streams();
  if (output_is_closed) {  // Writing to it shall fail. open() returns the lowest free number.
    ::close(STDOUT_FILENO);
    (void)::open("/dev/null", O_RDONLY);
  }
  try {
    const int exit_code = forebay::run(std::vector<std::string>(argv + std::min(argc, 1), argv + argc));
    const forebay::Status written = forebay::flush_standard_output();
    if (exit_code != 0 || written.ok()) return exit_code;
    return forebay::complain("forebay", written.message(), forebay::kFailed);
  } catch (const std::exception& error) {
    return forebay::complain("forebay", error.what(), forebay::kFailed);
  }
}
