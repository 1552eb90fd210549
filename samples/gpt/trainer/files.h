// The files of a run, looked at before it trains: what would only be found out after hours.
#pragma once

#include "trainer/options.h"

namespace forebay::gpt {

// That the text can be read, and that the report, the exported weights and the state can be written, without
// replacing a state that the run does not go on from.
// Requires: resolved options.
// Errors: throws Error naming the option or the file.
void check_files(const TrainerOptions& options);

// Where a rank's timeline goes: --timeline, with .rank-N before its ending for ranks but the first.
std::string timeline_file(const TrainerOptions& options, int rank);
// Where a rank says what it was at, in --flight-recorder.
std::string flight_file(const TrainerOptions& options, int rank);

}  // namespace forebay::gpt
