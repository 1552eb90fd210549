// Prints plans: a table for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

#include "runtime/command/plan/activation_report.h"
#include "runtime/command/plan/plan_report.h"

namespace forebay {

// The memory that the plan must fit in.
struct PlanBudget {
  std::uint64_t memory_bytes = 0;  // Device budget of one rank; 0: none was given.
  std::uint64_t room_bytes = 0;    // Kept for the driver, and not among memory_bytes; 0: none was given.
  std::uint64_t host_ranks = 0;    // Ranks on this host; 0: the host is not judged.
  std::vector<HostLimit> host_limits;
};

// Whether the plan fits in every limit of the budget.
bool plan_fits(const PlanReport& report, const PlanBudget& budget);

// A column for each report. `left_out` gives the reasons for the ZeRO stages that are missing. `activations`
// has an entry per pipeline stage, and the first report's is shown; empty: the user gave no options for them.
std::string plan_text(const std::vector<PlanReport>& reports, const std::vector<std::string>& left_out,
                      const std::string& model, const PlanBudget& budget,
                      const std::vector<ActivationReport>& activations = {});

std::string plan_json(const PlanReport& report, const PlanBudget& budget,
                      const std::vector<ActivationReport>& activations = {});

}  // namespace forebay
