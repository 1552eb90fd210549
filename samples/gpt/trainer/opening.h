// The lines on stderr before the first step: the choices that the run has made.
#pragma once

#include "trainer/rank_model.h"

namespace forebay::gpt {

// Says on rank 0 how the run was set up. Collective over all ranks; prints nothing with --quiet.
void show_opening(RankModel& model);

}  // namespace forebay::gpt
