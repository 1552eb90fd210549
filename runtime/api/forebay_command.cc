// The `forebay` command. Each subcommand lives in a file of its own and is added by one function.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <functional>

#include "forebay/version.h"
#include "runtime/api/plan_command.h"
#include "runtime/api/report_command.h"

namespace {

constexpr int kFailed = 1;
constexpr int kBadUsage = 2;

int run(int argc, char** argv) {
  CLI::App app("forebay: a memory and offload runtime for training large models", "forebay");
  app.set_version_flag("--version", std::string("forebay ") + forebay::version(), "Print the version");
  app.require_subcommand(1);
  std::function<int()> action;
  forebay::add_plan_command(app, action);
  forebay::add_report_command(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kBadUsage;
  }
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "forebay: %s\n", error.what());
    return kFailed;
  }
}
