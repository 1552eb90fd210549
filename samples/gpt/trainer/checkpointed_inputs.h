// CheckpointedInputs: the inputs of recomputed blocks in an ActivationCheckpointer: cut over the ranks that
// share layers, and below the device where that is asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "forebay/activation_checkpointer.h"
#include "model/block_inputs.h"
#include "trainer/grid.h"
#include "trainer/options.h"

namespace forebay::gpt {

class CheckpointedInputs final : public BlockInputs {
 public:
  // Of the blocks of `stage`, for as many passes as it has in flight. `stream`: the model's. All that is
  // referred to outlives this. Requires: recomputed_layers() of the stage.
  // `device_bytes`: the most that device_bytes() may be, for --activations auto; 0: no limit.
  CheckpointedInputs(const TrainerOptions& options, const PipelineStage& stage, Backend& backend,
                     Communicator& communicator, Stream stream, Timeline* timeline,
                     std::uint64_t device_bytes = 0);

  // Device memory that it needs. Errors: throws Error(kOutOfMemory) where that must be more than it may.
  std::uint64_t device_bytes() const { return checkpointer_.plan().device_bytes(); }
  // `region`, aligned to 512 bytes, holds device_bytes(). Collective.
  void use_memory(DevicePtr region) { checkpointer_.commit(region); }

  void save(std::size_t layer, std::uint64_t micro_step, const float* input) override;
  const float* load(std::size_t layer, std::uint64_t micro_step) override;
  void release() override { lease_.reset(); }

  // Throws what has failed, once the stream has been waited for.
  void check() { checkpointer_.check(); }
  ActivationStatistics statistics() { return checkpointer_.statistics(); }
  const ActivationPlan& plan() const { return checkpointer_.committed_plan(); }

 private:
  static ActivationKey key(std::size_t layer, std::uint64_t micro_step) {
    return {.unit = static_cast<int>(layer), .micro_batch = static_cast<int>(micro_step)};
  }

  const std::uint64_t bytes_;  // Of one input.
  const Stream stream_;
  ActivationCheckpointer checkpointer_;
  std::optional<ActivationLease> lease_;
};

// The device's bytes for all activations, the model's own included, with each placement of those inputs.
struct ActivationNeeds {
  std::uint64_t keep = 0;       // Kept by the model.
  std::uint64_t elsewhere = 0;  // Of the model that does not keep them; what keeps them comes besides.
};

// What --activations auto comes to where `room` bytes are left for activations: keep (none), or the most that
// CheckpointedInputs may take, which then does no more than it must.
// Errors: throws Error(kOutOfMemory) with what each placement takes where none fits.
std::optional<std::uint64_t> choose_activations(const TrainerOptions& options, const PipelineStage& stage,
                                                const ActivationNeeds& needs, std::uint64_t room);

// "keep", "partition", "partition+cpu" or "partition+nvme": as far from keep as any slot is.
std::string activations_name(const ActivationPlan& plan);
// The choice in a line for a person.
std::string describe_choice(const ActivationPlan& plan);

}  // namespace forebay::gpt
