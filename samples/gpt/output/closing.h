// The text on stderr after a training: its result, its memory beside the plan, and its files.
#pragma once

#include "output/report.h"
#include "trainer/options.h"

namespace forebay::gpt {

// Prints, unless --quiet. Order: after all files are written, on the process of rank 0.
void show_closing(const TrainerOptions& options, const TrainingReport& report);

}  // namespace forebay::gpt
