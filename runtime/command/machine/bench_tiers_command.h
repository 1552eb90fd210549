// `forebay bench-tiers`: measures the rates of this machine's tiers, and chooses the offload setting that a
// model should use on it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code: 0 when
// everything was measured, 2 for bad input, 1 for a measurement that this machine does not support or has no
// room for.
void add_bench_tiers_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
