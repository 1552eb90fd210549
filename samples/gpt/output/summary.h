// The texts on stderr before and after a training. They print nothing with --quiet.
#pragma once

#include "output/report.h"
#include "trainer/rank_model.h"

namespace forebay::gpt {

// The model, the ranks, the sharding and the planned memory, on rank 0. Collective over all ranks. Order:
// after the weights are set, so that a run that is refused prints its error alone.
void show_opening(RankModel& model);

// The result, the memory beside the plan, and the files. Order: after all files are written, on the process
// of rank 0.
void show_closing(const TrainerOptions& options, const TrainingReport& report);

}  // namespace forebay::gpt
