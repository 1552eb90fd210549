#include "checkpointed_inputs.h"

namespace forebay::gpt {
namespace {

ActivationCheckpointerOptions checkpointer_options(const TrainerOptions& o, Timeline* timeline) {
  ActivationCheckpointerOptions options;
  options.plan.tier = o.activation_tier;
  options.directories = o.activation_directories;
  if (!o.timeline_file.empty()) options.timeline = timeline;
  return options;
}

}  // namespace

CheckpointedInputs::CheckpointedInputs(const TrainerOptions& options, Backend& backend,
                                       Communicator& communicator, Stream stream, Timeline* timeline)
    : bytes_(options.batch * options.model.sequence * options.model.hidden * sizeof(float)),
      stream_(stream),
      checkpointer_(backend, communicator, checkpointer_options(options, timeline)) {
  for (std::size_t layer = 0; layer < options.model.layers; layer += options.recompute_every) {
    checkpointer_.declare(
        {.unit = static_cast<int>(layer), .bytes = bytes_, .placement = options.activations});
  }
}

void CheckpointedInputs::save(std::size_t layer, std::uint64_t micro_step, const float* input) {
  checkpointer_.save(key(layer, micro_step), reinterpret_cast<const std::byte*>(input), bytes_, stream_);
}

const float* CheckpointedInputs::load(std::size_t layer, std::uint64_t micro_step) {
  lease_.emplace(checkpointer_.load(key(layer, micro_step), stream_));
  return reinterpret_cast<const float*>(lease_->data());
}

}  // namespace forebay::gpt
