#include "parallel/checkpointed_inputs.h"

#include <algorithm>
#include <vector>

#include "forebay/error.h"
#include "forebay/units.h"

namespace forebay::gpt {
namespace {

std::uint64_t input_bytes(const TrainerOptions& o) {
  return o.batch * o.model.sequence * o.model.hidden * sizeof(float);
}

std::vector<ActivationSlot> input_slots(const TrainerOptions& o, const PipelineStage& stage,
                                        ActivationPlacement placement) {
  std::vector<ActivationSlot> slots;
  for (const std::size_t layer : recomputed_layers(o, stage))
    slots.push_back({.unit = static_cast<int>(layer), .bytes = input_bytes(o), .placement = placement});
  return slots;
}

ActivationCheckpointerOptions checkpointer_options(const TrainerOptions& o, const PipelineStage& stage,
                                                   Timeline* timeline, std::uint64_t device_bytes) {
  ActivationCheckpointerOptions options;
  options.in_region = true;
  options.plan.micro_batches = passes_in_flight(o, stage);
  options.plan.tier = o.activation_tier;
  options.plan.device_bytes = device_bytes;
  options.directories = o.activation_directories;
  if (!o.timeline_file.empty()) options.timeline = timeline;
  return options;
}

// The placement of the slot that is furthest from the device.
ActivationPlacement furthest_placement(const ActivationPlan& plan) {
  ActivationPlacement furthest = ActivationPlacement::kKeep;
  for (const ActivationSlot& slot : plan.slots) furthest = std::max(furthest, slot.placement);
  return furthest;
}

}  // namespace

CheckpointedInputs::CheckpointedInputs(const TrainerOptions& options, const PipelineStage& stage,
                                       Backend& backend, Communicator& communicator, Stream stream,
                                       Timeline* timeline, std::uint64_t device_bytes)
    : bytes_(input_bytes(options)),
      stream_(stream),
      checkpointer_(backend, communicator, checkpointer_options(options, stage, timeline, device_bytes)) {
  for (const ActivationSlot& slot : input_slots(options, stage, options.activations))
    checkpointer_.declare(slot);
}

void CheckpointedInputs::save(std::size_t layer, std::uint64_t micro_step, const float* input) {
  checkpointer_.save(key(layer, micro_step), reinterpret_cast<const std::byte*>(input), bytes_, stream_);
}

const float* CheckpointedInputs::load(std::size_t layer, std::uint64_t micro_step) {
  lease_.emplace(checkpointer_.load(key(layer, micro_step), stream_));
  return reinterpret_cast<const float*>(lease_->data());
}

std::optional<std::uint64_t> choose_activations(const TrainerOptions& options, const PipelineStage& stage,
                                                const ActivationNeeds& needs, std::uint64_t room) {
  if (needs.keep <= room) return std::nullopt;
  ActivationPlanOptions plan{
      .ranks = options.tensor_parallel, .micro_batches = passes_in_flight(options, stage), .chunk_bytes = 1};
  const auto bytes_with = [&](ActivationPlacement placement) {
    return needs.elsewhere +
           value_or_throw(make_activation_plan(input_slots(options, stage, placement), plan)).device_bytes();
  };
  const std::uint64_t partitioned = bytes_with(ActivationPlacement::kPartition);
  const std::uint64_t spilled = bytes_with(ActivationPlacement::kPartitionAndSpill);
  if (needs.elsewhere < room) {
    plan.device_bytes = room - needs.elsewhere;
    if (make_activation_plan(input_slots(options, stage, ActivationPlacement::kAuto), plan).ok())
      return plan.device_bytes;
  }
  const auto shown = [](std::uint64_t bytes) {
    return format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes)";
  };
  throw Error(StatusCode::kOutOfMemory, "--activations auto: the rest of the plan leaves " + shown(room) +
                                            " of the device for activations, and they take " +
                                            shown(needs.keep) +
                                            " with the inputs of recomputed blocks kept, " +
                                            shown(partitioned) + " with them partitioned, " + shown(spilled) +
                                            " with partition+cpu; make --batch or --sequence smaller, with "
                                            "more --micro-steps, or raise --memory");
}

std::string activations_name(const ActivationPlan& plan) {
  return forebay::activations_name(furthest_placement(plan), plan.options.tier);
}

std::string describe_choice(const ActivationPlan& plan) {
  std::uint64_t whole = 0;
  std::size_t cut = 0;
  for (const ActivationPlace& place : plan.places) {
    whole += place.slice_bytes;
    if (place.ways > 1) ++cut;
  }
  const std::uint64_t spilled = plan.spilled_bytes_per_micro_batch;
  std::string text = activations_name(plan) + ": the inputs of " + std::to_string(cut) + " of " +
                     std::to_string(plan.slots.size()) + " recomputed blocks are cut over " +
                     std::to_string(plan.options.ranks) + " ranks";
  if (spilled > 0) {
    text +=
        ", and " + format_bytes(spilled) + " of each rank's " + format_bytes(whole) + " wait in host memory";
  }
  return text;
}

}  // namespace forebay::gpt
