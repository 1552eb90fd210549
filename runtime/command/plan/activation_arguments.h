// The options of `forebay plan` for tensor and pipeline parallelism and for activations.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "forebay/status.h"
#include "runtime/command/plan/activation_report.h"

namespace forebay {

// The options as typed.
struct ActivationArguments {
  std::int64_t tensor_parallel = 1;
  std::int64_t pipeline_parallel = 1;
  std::string recompute;  // Empty: "block" where a placement was given, otherwise "none".
  std::string placement;  // Empty: "keep".
  std::string attention = "fused";
  const CLI::Option* tensor_parallel_option = nullptr;
  const CLI::Option* pipeline_parallel_option = nullptr;

  bool given() const;
};

// Requires: `arguments` outlives the parsing.
void add_activation_options(CLI::App& command, ActivationArguments& arguments);

// Errors: kInvalidArgument unless it is "fused" or "plain".
Result<bool> read_fused_attention(const std::string& attention);

// Errors: kInvalidArgument for an optimizer that needs whole matrices where --tensor-parallel splits them.
Status check_optimizer(Optimizer optimizer, const ModelPart& part);

// The placement, the recomputed layers, and the part of pipeline stage 0; the caller fills in the model.
// Errors: kInvalidArgument naming the option and its allowed values.
Result<ActivationRequest> read_activations(const ActivationArguments& arguments);

}  // namespace forebay
