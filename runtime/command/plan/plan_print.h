// Writes plans down: a table for people, JSON for programs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/command/plan/activation_report.h"
#include "runtime/command/plan/plan_report.h"

namespace forebay {

// What the plan is held against.
struct PlanBudget {
  std::uint64_t memory_bytes = 0;  // Device budget of one rank; 0: none was given.
  std::uint64_t host_ranks = 0;    // Ranks on this host; 0: the host is not judged.
  std::vector<HostLimit> host_limits;
};

// Whether every limit of the budget holds the plan.
bool plan_fits(const PlanReport& report, const PlanBudget& budget);

// A column for each report. `left_out` says why the stages that are missing are. `activations`: of each
// pipeline stage, of which that of the first report is shown; empty where nothing was said about them.
std::string plan_text(const std::vector<PlanReport>& reports, const std::vector<std::string>& left_out,
                      const std::string& model, const PlanBudget& budget,
                      const std::vector<ActivationReport>& activations = {});

std::string plan_json(const PlanReport& report, const PlanBudget& budget,
                      const std::vector<ActivationReport>& activations = {});

}  // namespace forebay
