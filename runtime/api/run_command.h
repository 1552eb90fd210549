// `forebay run`: starts a command with the preload under it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code: the
// command's own, 2 for options that cannot be.
void add_run_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
