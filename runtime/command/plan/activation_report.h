// The activations of `forebay plan`: the literature's formulas beside what an ActivationCheckpointer would
// hold and send. Numbers only; activation_print.h writes them down.
#pragma once

#include <cstdint>
#include <optional>

#include "forebay/activation_formulas.h"
#include "forebay/activation_plan.h"
#include "forebay/model_shape.h"
#include "forebay/status.h"

namespace forebay {

struct ActivationRequest {
  TransformerShape shape;
  std::uint64_t batch = 1;
  std::uint64_t sequence = 0;  // 0: the shape's positions.
  DataType dtype = DataType::kBfloat16;
  ModelPart part;           // The layers of one pipeline stage, and the ranks that share them.
  int micro_steps = 1;      // Of a step: no more micro-batches than that are in flight.
  int recompute_every = 0;  // Of so many layers the first is computed again, alone; 0: none is.
  ActivationPlacement placement = ActivationPlacement::kKeep;  // Of the saved inputs.
  Tier tier = Tier::kPinned;
  std::uint64_t device_bytes = 0;  // kAuto: what saved inputs may take.
};

struct ActivationReport {
  ActivationRequest request;
  TransformerBlocks blocks;            // Of this stage.
  ActivationFormulas formulas;         // Of one micro-batch of it.
  std::optional<ActivationPlan> plan;  // None when none of the layers is recomputed: nothing is saved.

  // Micro-batches whose forward pass is over and whose backward pass is not: with one forward, one backward,
  // p - i at stage i of p.
  int in_flight = 1;

  // What is alive while a pass computes, beside saved inputs: all that the layers which are not recomputed
  // keep, for each of those, and one layer while it is computed again.
  std::uint64_t live_bytes() const {
    return static_cast<std::uint64_t>(in_flight) * formulas.kept + formulas.block;
  }
  // What goes to the neighbouring pipeline stages: an activation to the next one, a gradient to the one
  // before.
  std::uint64_t boundary_bytes() const;
  std::uint64_t device_bytes() const { return live_bytes() + (plan ? plan->device_bytes() : 0); }
};

// Errors: as complete_shape, activation_formulas and make_activation_plan.
Result<ActivationReport> make_activation_report(const ActivationRequest& request);

}  // namespace forebay
