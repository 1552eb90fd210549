// `forebay devices`: the machine as the library sees it: the CUDA driver and its devices, the host, the
// topology, and the directories that the file tier could use.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace forebay {

// Adds the subcommand; when it is the one given, parsing sets `action`, which returns the exit code: 0 also
// where there is no driver, 1 when the output cannot be written.
void add_devices_command(CLI::App& app, std::function<int()>& action);

}  // namespace forebay
