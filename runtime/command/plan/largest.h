// The largest model of a family, and the largest batch of a model, that a device holds: the plan, asked many
// times.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/command/plan/activation_report.h"
#include "runtime/command/plan/plan_print.h"

namespace forebay {

// One ZeRO stage.
struct LargestFigures {
  int stage = 0;
  // The largest model of the shape's width that fits; 0: not even one layer. At most 10,000 are tried.
  std::uint64_t layers = 0;
  std::uint64_t parameters = 0;
  std::uint64_t batch = 0;  // The largest of the model as it was given; 0: not even one sequence.
};

// The largest number of 1 to `most` for which `holds` is true; 0 if it is false for 1.
// Requires: where it is false for a number, it is false for all larger ones.
std::uint64_t largest_number(std::uint64_t most, const std::function<bool(std::uint64_t)>& holds);

// Plans one ZeRO stage of a request, and its activations where they are planned.
using PlanStage =
    std::function<Result<PlanReport>(const PlanRequest& request, std::optional<ActivationRequest> kept)>;

// Grows the layers of the shape, and then the batch, as far as the plan fits into the budget.
// Requires: the request has a shape.
LargestFigures find_largest(PlanRequest request, std::optional<ActivationRequest> kept,
                            const PlanBudget& budget, const PlanStage& plan);

std::string largest_text(const std::vector<LargestFigures>& figures, const PlanBudget& budget,
                         const std::string& description);
std::string largest_json(const std::vector<LargestFigures>& figures, const PlanBudget& budget);

}  // namespace forebay
