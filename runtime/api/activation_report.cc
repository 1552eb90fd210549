#include "activation_report.h"

#include <vector>

namespace forebay {

Result<ActivationReport> make_activation_report(const ActivationRequest& request) {
  Result<TransformerShape> completed = complete_shape(request.shape);
  FOREBAY_RETURN_IF_ERROR(completed.status());
  const TransformerShape& shape = completed.value();
  ActivationReport report;
  report.request = request;
  report.blocks = {.layers = shape.layers,
                   .hidden = shape.hidden,
                   .heads = shape.heads,
                   .sequence = request.sequence == 0 ? shape.positions : request.sequence,
                   .batch = request.batch,
                   .tensor_parallel = request.tensor_parallel,
                   .element_bytes = element_bytes(request.dtype),
                   .recompute_every = request.recompute_every == 0 ? 1 : request.recompute_every};
  if (shape.heads % static_cast<std::uint64_t>(request.tensor_parallel) != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "--tensor-parallel is " + std::to_string(request.tensor_parallel) + " and the model has " +
                      std::to_string(shape.heads) + " heads, which it does not divide; use a divisor");
  }
  Result<ActivationFormulas> formulas = activation_formulas(report.blocks);
  FOREBAY_RETURN_IF_ERROR(formulas.status());
  report.formulas = formulas.value();
  if (request.recompute_every == 0) return report;

  ActivationPlanOptions options;
  options.ranks = request.tensor_parallel;
  options.tier = request.tier;
  options.device_bytes = request.device_bytes;
  std::vector<ActivationSlot> slots;
  for (std::uint64_t i = 0; i < report.formulas.saved_count; ++i) {
    slots.push_back({.unit = static_cast<int>(i),
                     .bytes = report.formulas.saved / report.formulas.saved_count,
                     .placement = request.placement});
  }
  Result<ActivationPlan> plan = make_activation_plan(slots, options);
  FOREBAY_RETURN_IF_ERROR(plan.status());
  report.plan = std::move(plan).value();
  return report;
}

}  // namespace forebay
