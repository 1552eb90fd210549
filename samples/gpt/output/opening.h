// The text on stderr before the first step: the model, the ranks, the sharding and the planned memory.
#pragma once

#include "trainer/rank_model.h"

namespace forebay::gpt {

// Prints on rank 0, unless --quiet. Collective over all ranks. Order: after the weights are set, so that a
// run that is refused prints its error alone.
void show_opening(RankModel& model);

}  // namespace forebay::gpt
