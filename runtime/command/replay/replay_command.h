// `forebay replay`: allocation traces played against the arena.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand. When it is chosen, parsing sets `action`, which returns the exit code.
void add_replay_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
