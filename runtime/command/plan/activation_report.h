// The activations of `forebay plan`: the literature's formulas beside the bytes that an
// ActivationCheckpointer would hold and send. Numbers only; activation_print.h prints them.
#pragma once

#include <algorithm>
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
  ModelPart part;                // The layers of one pipeline stage, and the ranks that share them.
  int micro_steps = 1;           // Micro-steps of a step: a limit of the micro-batches in flight.
  int recompute_every = 0;       // The first of every recompute_every layers is recomputed; 0: none is.
  bool fused_attention = false;  // Attention keeps no scores.
  ActivationPlacement placement = ActivationPlacement::kKeep;  // Where saved inputs are.
  Tier tier = Tier::kPinned;
  std::uint64_t device_bytes = 0;  // kAuto: the most that saved inputs may take.
};

struct ActivationReport {
  ActivationRequest request;
  TransformerBlocks blocks;            // The blocks of this pipeline stage.
  ActivationFormulas formulas;         // For one micro-batch of this pipeline stage.
  std::optional<ActivationPlan> plan;  // None if no layer is recomputed: nothing is saved.

  // Micro-batches between their forward and their backward pass: in the one-forward-one-backward schedule,
  // p - i at pipeline stage i of p.
  int in_flight = 1;

  // Bytes that are live during a pass, besides saved inputs: the activations of the layers that are not
  // recomputed, for each micro-batch in flight, and those of the loss or of one recomputed layer, whichever
  // has more.
  std::uint64_t live_bytes() const {
    return static_cast<std::uint64_t>(in_flight) * formulas.kept + std::max(formulas.block, formulas.loss);
  }
  // Bytes sent to the neighbouring pipeline stages: an activation to the next one, a gradient to the previous
  // one.
  std::uint64_t boundary_bytes() const;
  std::uint64_t device_bytes() const { return live_bytes() + (plan ? plan->device_bytes() : 0); }
};

// Errors: as complete_shape, activation_formulas and make_activation_plan.
Result<ActivationReport> make_activation_report(const ActivationRequest& request);

}  // namespace forebay
