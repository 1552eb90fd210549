// States of a model in parts, as forebay-gpt saved them in format 1. They are loaded, and no longer written.
//
//   DIR/step-12/part-0, part-1, ...    a state of Engine::save_state() for each part
//   DIR/parts                          "step-12 tensor-parallel 2 pipeline-parallel 1"
//
// Only a run with the same numbers of parts can load one. The state that it saves then has all parts, and any
// run can load that.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "parallel/grid.h"

namespace forebay::gpt {

// The directory for Engine::load_state(): `directory` itself, or that of this rank's part of the newest state
// in parts, or of that of `step`. Errors: throws Error(kIoError) if there is no such state in parts,
// kInvalidArgument for other numbers of parts, kCorruption for a damaged `parts`.
std::string directory_to_load(Grid& grid, const std::string& directory, std::optional<std::uint64_t> step);

// Whether a state is saved in `directory`, in parts or in one.
bool holds_state(const std::string& directory);

}  // namespace forebay::gpt
