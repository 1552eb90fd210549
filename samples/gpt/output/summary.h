// The texts on stderr before and after a training. They print nothing with --quiet.
#pragma once

#include <string_view>

#include "output/report.h"
#include "trainer/evaluation.h"
#include "trainer/rank_model.h"

namespace forebay::gpt {

// The model, the ranks, the sharding and the planned memory, on rank 0. Collective over all ranks. Order:
// after the weights are set, so that a run that is refused prints its error alone.
void show_opening(RankModel& model, const Evaluation& evaluation);

// The result, the memory beside the plan, and the files. Order: after all files are written, on the process
// of rank 0.
void show_closing(const TrainerOptions& options, const TrainingReport& report);

// Prints generated text on stdout, also with --quiet. On a terminal, control characters are shown as "?".
void show_generated(std::string_view text);

}  // namespace forebay::gpt
