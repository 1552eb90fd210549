// CheckpointedInputs: keeps the inputs of recomputed blocks in an ActivationCheckpointer, partitioned over
// the tensor-parallel ranks and offloaded if the options say so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "forebay/activation_checkpointer.h"
#include "model/block_inputs.h"
#include "parallel/grid.h"
#include "trainer/options.h"

namespace forebay::gpt {

class CheckpointedInputs final : public BlockInputs {
 public:
  // Has room for the recomputed blocks of the pipeline stage `stage`, for all its passes in flight. `stream`
  // is the model's; the references outlive this. `device_bytes` limits device_bytes(), for --activations
  // auto; 0: no limit. Requires: recomputed_layers() of the stage is not empty.
  CheckpointedInputs(const TrainerOptions& options, const PipelineStage& stage, Backend& backend,
                     Communicator& communicator, Stream stream, Timeline* timeline,
                     std::uint64_t device_bytes = 0);

  // The device memory that it needs. Errors: throws Error(kOutOfMemory) if that exceeds the limit.
  std::uint64_t device_bytes() const { return checkpointer_.plan().device_bytes(); }
  // `region`, aligned to 512 bytes, holds device_bytes(). Collective.
  void use_memory(DevicePtr region) { checkpointer_.commit(region); }

  void save(std::size_t layer, std::uint64_t micro_step, const float* input) override;
  const float* load(std::size_t layer, std::uint64_t micro_step) override;
  void release() override { lease_.reset(); }

  // Order: after waiting for the stream. Errors: throws the Error of a failed save or load.
  void check() { checkpointer_.check(); }
  ActivationStatistics statistics() { return checkpointer_.statistics(); }
  const ActivationPlan& plan() const { return checkpointer_.committed_plan(); }

 private:
  static ActivationKey key(std::size_t layer, std::uint64_t micro_step) {
    return {.unit = static_cast<int>(layer), .micro_batch = static_cast<int>(micro_step)};
  }

  const std::uint64_t bytes_;  // Bytes of one input.
  const Stream stream_;
  ActivationCheckpointer checkpointer_;
  std::optional<ActivationLease> lease_;
};

// Device bytes of all activations, for two placements of the inputs of recomputed blocks.
struct ActivationNeeds {
  std::uint64_t keep = 0;  // The model keeps the inputs.
  std::uint64_t elsewhere =
      0;  // The model does not keep them; a CheckpointedInputs needs its own memory in addition.
};

// Decides for --activations auto, with `room` device bytes for activations. Returns none if the model can
// keep the inputs, otherwise the limit for CheckpointedInputs, which then partitions and offloads only as
// much as it must. Errors: throws Error(kOutOfMemory), with the bytes of each placement, if none fits.
std::optional<std::uint64_t> choose_activations(const TrainerOptions& options, const PipelineStage& stage,
                                                const ActivationNeeds& needs, std::uint64_t room);

// "keep", "partition", "partition+cpu" or "partition+nvme": the placement of the slot that is furthest from
// the device.
std::string activations_name(const ActivationPlan& plan);
// The choice as one line for the user.
std::string describe_choice(const ActivationPlan& plan);

}  // namespace forebay::gpt
