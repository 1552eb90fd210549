// Rank: the device, the kernels and the communicator of one rank, opened in the order in which they need each
// other. rank_model.h puts the model and the engine on top.
#pragma once

#include <functional>
#include <memory>

#include "forebay/backend.h"
#include "forebay/bootstrap.h"
#include "forebay/communicator.h"
#include "forebay/kernels.h"
#include "trainer/options.h"

namespace forebay::gpt {

struct Rank {
  LaunchEnvironment place;  // `launcher` is empty where the ranks are threads of one process.
  int threads = 1;          // Compute threads.
  int ordinal = -1;         // The GPU's; -1 on the host.
  // With NCCL, control operations go over a communicator in host memory, which uses these two. Null without
  // NCCL.
  std::unique_ptr<Backend> control_backend;
  std::unique_ptr<Kernels> control_kernels;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Kernels> kernels;
  std::unique_ptr<Communicator> communicator;

  bool on_gpu() const { return ordinal >= 0; }
};

using CommunicatorMaker = std::function<Result<std::unique_ptr<Communicator>>(Backend&, Kernels&)>;

// Opens the rank's device and joins the other ranks by `make`. With NCCL, `make` gives the control
// communicator, and go_over_nccl() must follow. Errors: throws Error; the other ranks hear of it where the
// communicator exists already.
Rank open_rank(const TrainerOptions& options, const LaunchEnvironment& place, const CommunicatorMaker& make);

// Replaces the rank's communicator by one over NCCL that keeps it for control operations. Collective: all
// ranks succeed or all fail. Says on stderr which library it is. Requires: a rank on a GPU.
void go_over_nccl(const TrainerOptions& options, Rank& rank);

}  // namespace forebay::gpt
