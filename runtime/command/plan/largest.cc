#include "runtime/command/plan/largest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "forebay/units.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

// A plan's time is proportional to its layers. Larger: tens of seconds for a model of tiny layers.
constexpr std::uint64_t kLayersMost = 10'000;
constexpr std::uint64_t kBatchMost = std::uint64_t{1} << 24;

}  // namespace

std::uint64_t largest_number(std::uint64_t most, const std::function<bool(std::uint64_t)>& holds) {
  std::uint64_t good = 0;
  std::uint64_t bad = 1;
  while (holds(bad)) {
    if (bad == most) return most;
    good = bad;
    bad = std::min(2 * bad, most);
  }
  while (bad - good > 1) {
    const std::uint64_t middle = good + (bad - good) / 2;
    (holds(middle) ? good : bad) = middle;
  }
  return good;
}

LargestFigures find_largest(PlanRequest request, std::optional<ActivationRequest> kept,
                            const PlanBudget& budget, const PlanStage& plan) {
  LargestFigures figures{.stage = request.options.stage};
  const auto fits = [&](const PlanRequest& one) {
    if (kept) {
      kept->shape = *one.shape;
      kept->batch = one.batch;
    }
    const Result<PlanReport> report = plan(one, kept);
    return report.ok() && plan_fits(report.value(), budget);
  };
  PlanRequest grown = request;
  const auto with_layers = [&](std::uint64_t layers) {
    grown.shape->layers = layers;
    return fits(grown);
  };
  figures.layers = largest_number(kLayersMost, with_layers);
  if (figures.layers > 0) {
    grown.shape->layers = figures.layers;
    grown.part.pipeline_stage = 0;
    const Result<PlanReport> report = plan(grown, kept);
    if (report.ok()) figures.parameters = report.value().parameters;
  }
  grown = request;
  figures.batch = largest_number(kBatchMost, [&](std::uint64_t batch) {
    grown.batch = batch;
    return fits(grown);
  });
  return figures;
}

std::string largest_text(const std::vector<LargestFigures>& figures, const PlanBudget& budget,
                         const std::string& description) {
  std::vector<TableRow> rows = {
      {""}, {"largest model, parameters"}, {"its layers"}, {"largest batch as given"}};
  for (const LargestFigures& one : figures) {
    rows[0].push_back("stage " + std::to_string(one.stage));
    const std::string bound = one.layers == kLayersMost ? "at least " : "";
    rows[1].push_back(one.layers == 0 ? "none fits" : bound + grouped(one.parameters));
    rows[2].push_back(bound + grouped(one.layers));
    rows[3].push_back(one.batch == 0 ? "none fits" : grouped(one.batch));
  }
  return description + "\ngrown in layers, then in sequences, on devices of " +
         format_bytes(budget.memory_bytes) + "\n\n" + table_text(rows);
}

std::string largest_json(const std::vector<LargestFigures>& figures, const PlanBudget& budget) {
  nlohmann::ordered_json json;
  json["memory_bytes"] = budget.memory_bytes;
  for (const LargestFigures& one : figures) {
    json["stages"].push_back(
        {{"stage", one.stage}, {"layers", one.layers}, {"parameters", one.parameters}, {"batch", one.batch}});
  }
  return json.dump(2) + "\n";
}

}  // namespace forebay
