// `forebay plan`: the bytes of a model under a ZeRO stage, per rank and per step, before anything is
// allocated.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand. Parsing it sets `action`, which returns the exit code: 0 when a plan was made and fits
// the given limits, 1 when it does not fit, 2 for bad input.
void add_plan_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
