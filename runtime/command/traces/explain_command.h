// `forebay explain`: finds in a snapshot or trace the reason why memory ran out.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand. When it is chosen, parsing sets `action`, which returns the exit code.
void add_explain_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
