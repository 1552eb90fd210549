// `forebay run`: starts a command with the preload under it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "forebay/command_line.h"

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code: the
// command's own, 2 for options that cannot be. `command`: the words to run, there before parsing and until
// the action has been called.
void add_run_command(CLI::App& app, std::function<int()>& action, const std::vector<std::string>& command);

// Moves the command to run out of the arguments of `forebay run`: everything after the first `--`, or from
// the first word that is neither an option nor the value of one. `called`: the subcommand that was given;
// `arguments`: the program's, without its name. Returns the exit code after a complaint; none otherwise, as
// for another subcommand.
std::optional<int> take_run_command(const CommandText& called, std::vector<std::string>* arguments,
                                    std::vector<std::string>* command);

}  // namespace forebay
