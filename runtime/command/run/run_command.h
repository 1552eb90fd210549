// `forebay run`: starts a command with the preload under it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code: the
// command's own, 2 for options that cannot be. `command`: the words to run, there before parsing and until
// the action has been called.
void add_run_command(CLI::App& app, std::function<int()>& action, const std::vector<std::string>& command);

// Moves what is to be run out of the arguments of `forebay run`: everything behind the first `--`, or from
// the first word on that is no option nor an option's value; all that is the command's and nothing of it is
// ours. `arguments`: as main() has them. Returns the exit code after a complaint; none when there is nothing
// to complain about, as where another subcommand is given.
std::optional<int> take_run_command(const CLI::App& app, std::vector<std::string>* arguments,
                                    std::vector<std::string>* command);

}  // namespace forebay
