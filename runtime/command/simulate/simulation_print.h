// Prints simulations: text for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

#include "runtime/command/simulate/simulation.h"

namespace forebay {

// `description`: the model, in words. `changes`: empty if they were not asked for.
std::string simulation_text(const SimulationRequest& request, const SimulationResult& result,
                            const std::vector<SimulatedChange>& changes, const std::string& description);
std::string simulation_json(const SimulationRequest& request, const SimulationResult& result,
                            const std::vector<SimulatedChange>& changes);

}  // namespace forebay
