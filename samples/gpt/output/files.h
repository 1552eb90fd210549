// Checks of the files of a run before it trains, so that a wrong path does not fail it after hours.
#pragma once

#include "trainer/options.h"

namespace forebay::gpt {

// Checks that the text can be read and that every output file and directory can be written. Refuses a
// --save-state that would replace a state which the run does not go on from. Requires: resolved options.
// Errors: throws Error naming the option or the file.
void check_files(const TrainerOptions& options);

// With --resume, sets load_state to save_state if a state is saved there; --initial then gives no weights.
void find_state_to_resume(TrainerOptions& options);

// The path of a rank's timeline: --timeline, with .rank-N before its extension except for rank 0.
std::string timeline_file(const TrainerOptions& options, int rank);
// The path of a rank's flight record in the directory of --flight-recorder.
std::string flight_file(const TrainerOptions& options, int rank);

}  // namespace forebay::gpt
