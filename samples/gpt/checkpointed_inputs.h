// CheckpointedInputs: the inputs of recomputed blocks in an ActivationCheckpointer: cut over the ranks that
// share layers, and below the device where that is asked for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "block_inputs.h"
#include "forebay/activation_checkpointer.h"
#include "grid.h"
#include "options.h"

namespace forebay::gpt {

class CheckpointedInputs final : public BlockInputs {
 public:
  // `stream`: the model's. All that is referred to outlives this.
  CheckpointedInputs(const TrainerOptions& options, Backend& backend, Communicator& communicator,
                     Stream stream, Timeline* timeline);

  // Device memory that it needs.
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

}  // namespace forebay::gpt
