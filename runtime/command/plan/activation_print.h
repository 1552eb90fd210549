// Prints the activations of a plan: lines for people, JSON for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/command/plan/activation_report.h"

namespace forebay {

std::string activation_text(const ActivationReport& report);
nlohmann::ordered_json activation_json(const ActivationReport& report);

}  // namespace forebay
