// `forebay bench-tiers`: what this machine's tiers deliver, and which offload setting a model should use on
// it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code: 0 when
// everything was measured, 2 for bad input, 1 for what this machine cannot do or does not have room for.
void add_bench_tiers_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
