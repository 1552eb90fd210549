// The options of `forebay plan` that say how ranks share the model and how activations are kept between the
// passes.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "forebay/status.h"
#include "runtime/command/plan/activation_report.h"

namespace forebay {

// As it was typed.
struct ActivationArguments {
  std::int64_t tensor_parallel = 1;
  std::int64_t pipeline_parallel = 1;
  std::string recompute;  // Empty: "block" where a placement was given, otherwise "none".
  std::string placement;  // Empty: "keep".
  const CLI::Option* tensor_parallel_option = nullptr;
  const CLI::Option* pipeline_parallel_option = nullptr;

  bool given() const;
};

// Requires: `arguments` outlives the parsing.
void add_activation_options(CLI::App& command, ActivationArguments& arguments);

// The placement, what is recomputed, and the part of pipeline stage 0; the model is the caller's to fill in.
// Errors: kInvalidArgument naming the option and what it may be.
Result<ActivationRequest> read_activations(const ActivationArguments& arguments);

}  // namespace forebay
