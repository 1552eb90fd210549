// `forebay explain`: what a snapshot or trace says about why memory ran out.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand. When it is chosen, `action` becomes what it does; its result is the exit code.
void add_explain_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
