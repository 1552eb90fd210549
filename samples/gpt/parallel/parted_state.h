// The training state of a model in parts. The ranks that hold a part save it in a directory of its own, and
// one file names the step that all parts have saved.
//
//   DIR/step-12/part-0, part-1, ...    the files of Engine::save_state(), part by part
//   DIR/parts                          "step-12 tensor-parallel 2 pipeline-parallel 1"
//
// `parts` is replaced once every part is complete, so a kill at any moment leaves the state that it names. A
// model in one part is saved in DIR itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "parallel/grid.h"

namespace forebay::gpt {

// Makes the directory that this rank's part of the state of `step` is saved in.
std::string part_to_save(Grid& grid, const std::string& directory, std::uint64_t step);

// Names the state of `step`, and keeps the newest `keep` steps. The engine does both for a model in one part.
// Order: when this rank's part is saved. Collective over the grid's world.
void name_saved_parts(Grid& grid, const std::string& directory, std::uint64_t step, int keep);

// The directory of this rank's part of the newest state in `directory`, or of that of `step`. Errors: throws
// Error(kIoError) if no such state in parts is saved there, kInvalidArgument for other numbers of parts,
// kCorruption for a damaged `parts`.
std::string saved_part(Grid& grid, const std::string& directory, std::optional<std::uint64_t> step);

// Whether a state is saved in `directory`, in parts or in one.
bool holds_state(const std::string& directory);

}  // namespace forebay::gpt
