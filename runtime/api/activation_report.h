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
  int tensor_parallel = 1;
  int recompute_every = 0;  // Layers that are computed again together, from one saved input; 0: none are.
  ActivationPlacement placement = ActivationPlacement::kKeep;  // Of the saved inputs.
  Tier tier = Tier::kPinned;
  std::uint64_t device_bytes = 0;  // kAuto: what saved inputs may take.
};

struct ActivationReport {
  ActivationRequest request;
  TransformerBlocks blocks;
  ActivationFormulas formulas;
  std::optional<ActivationPlan> plan;  // None when nothing is recomputed: then nothing is saved.

  // What is alive while a pass computes: all of it, or one segment while it is computed again.
  std::uint64_t live_bytes() const { return plan ? formulas.segment : formulas.all; }
  std::uint64_t device_bytes() const { return live_bytes() + (plan ? plan->device_bytes() : 0); }
};

// Errors: as complete_shape, activation_formulas and make_activation_plan.
Result<ActivationReport> make_activation_report(const ActivationRequest& request);

}  // namespace forebay
