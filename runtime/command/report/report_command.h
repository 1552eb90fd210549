// `forebay report FILE...`: prints reports of runs in one table, and says whether their results are the same.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code.
void add_report_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
