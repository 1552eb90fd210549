// Placement: where every byte of the engine lies, decided once, in the plan.
#pragma once

#include <vector>

#include "forebay/plan.h"

namespace forebay {

// The placements of a plan, the engine's first, then those of each unit in turn.
//
// Requires: all of `plan` but its placements and byte counts.
std::vector<Placement> make_placements(const ModelShape& model, const Plan& plan);

// Sets the plan's bytes, host_bytes and file_bytes (but not its traffic) to the sums over its placements.
void add_up_placements(Plan& plan);

}  // namespace forebay
