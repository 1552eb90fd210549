#include "runtime/command/plan/activation_report.h"

#include <algorithm>
#include <vector>

namespace forebay {

std::uint64_t ActivationReport::boundary_bytes() const {
  const ModelPart& part = request.part;
  const int neighbours =
      (part.pipeline_stage > 0 ? 1 : 0) + (part.pipeline_stage + 1 < part.pipeline_parallel ? 1 : 0);
  return static_cast<std::uint64_t>(neighbours) * blocks.sequence * blocks.batch * blocks.hidden *
         blocks.element_bytes;
}

Result<ActivationReport> make_activation_report(const ActivationRequest& request) {
  FOREBAY_ASSIGN_OR_RETURN(const TransformerShape shape, complete_shape(request.shape));
  ActivationReport report;
  report.request = request;
  FOREBAY_RETURN_IF_ERROR(make_model_shape(shape, request.part).status());  // Checks the part.
  report.in_flight =
      std::min(request.part.pipeline_parallel - request.part.pipeline_stage, request.micro_steps);
  const LayerRange layers = stage_layers(shape.layers, request.part);
  report.blocks = {.layers = layers.count,
                   .first_layer = layers.first,
                   .hidden = shape.hidden,
                   .heads = shape.heads,
                   .sequence = request.sequence == 0 ? shape.positions : request.sequence,
                   .batch = request.batch,
                   .tensor_parallel = request.part.tensor_parallel,
                   .element_bytes = element_bytes(request.dtype),
                   .keeps_scores = !request.fused_attention,
                   .has_embedding = request.part.pipeline_stage == 0,
                   .has_output = request.part.pipeline_stage + 1 == request.part.pipeline_parallel,
                   .vocabulary = shape.vocabulary,
                   .recompute_every = request.recompute_every};
  FOREBAY_ASSIGN_OR_RETURN(report.formulas, activation_formulas(report.blocks));
  if (report.formulas.saved_count == 0) return report;

  ActivationPlanOptions options;
  options.ranks = request.part.tensor_parallel;
  options.micro_batches = report.in_flight;
  options.tier = request.tier;
  options.device_bytes = request.device_bytes;
  std::vector<ActivationSlot> slots;
  for (std::uint64_t i = 0; i < report.formulas.saved_count; ++i) {
    slots.push_back({.unit = static_cast<int>(i),
                     .bytes = report.formulas.saved / report.formulas.saved_count,
                     .placement = request.placement});
  }
  FOREBAY_ASSIGN_OR_RETURN(report.plan, make_activation_plan(slots, options));
  return report;
}

}  // namespace forebay
