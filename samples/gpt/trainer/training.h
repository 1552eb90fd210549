// The whole training: every rank as a thread of this process, or one rank of several processes.
#pragma once

#include <vector>

#include "forebay/bootstrap.h"
#include "forebay/error.h"
#include "output/report.h"
#include "trainer/options.h"
#include "trainer/stop_request.h"

namespace forebay::gpt {

// Trains with options.ranks ranks as threads of this process. Requires: resolved options.
// Errors: throws Error with the first failure.
TrainingReport run_training(const TrainerOptions& options);
// The same for by_rank.size() ranks, each with its own options.
TrainingReport run_training(const std::vector<TrainerOptions>& by_rank);

// This rank could not join the others, so perhaps no other rank knows why.
class JoinError : public Error {
 public:
  explicit JoinError(const Status& status) : Error(status) {}
};

// Trains as one rank of several processes. All ranks return the same report; only rank 0 writes files.
// Errors: throws JoinError before the ranks have met, and Error with the first failure afterwards.
TrainingReport run_training_rank(const TrainerOptions& options, const LaunchEnvironment& environment);

}  // namespace forebay::gpt
