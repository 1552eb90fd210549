// The placements of a plan. This is the only code that decides where a buffer of the engine lies; the engine
// adds base addresses. It allocates nothing.
#pragma once

#include <vector>

#include "forebay/plan.h"

namespace forebay {

// Places every buffer of the engine: its own buffers first, then the buffers of each unit.
//
// Requires: `plan` is complete but for its placements, bytes and traffic.
std::vector<StatePlacement> make_placements(const ModelShape& model, const Plan& plan);

// Sets the plan's bytes, host_bytes and file_bytes to the sums over its placements. The traffic of files is
// zero afterwards.
void add_up_placements(Plan& plan);

}  // namespace forebay
