// `forebay plan`: what a model takes under a ZeRO stage, per rank and per step, before anything is allocated.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code: 0 when a
// plan was made, whether or not it fits, 2 for bad input.
void add_plan_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
