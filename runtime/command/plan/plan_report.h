// The figures of `forebay plan`: the bytes that the engine would hold and send, or the bytes by a published
// convention. Numbers only; plan_print.h prints them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forebay/model_shape.h"
#include "forebay/plan.h"
#include "forebay/status.h"
#include "runtime/command/host_limits.h"

namespace forebay {

// The convention by which bytes are counted.
enum class Preset : std::uint8_t {
  kForebay,    // The engine's own plan, padding included: a run measures the same bytes.
  kPaper,      // Rajbhandari et al., arXiv 1910.02054: the plain formulas.
  kDeepSpeed,  // DeepSpeed's estimate_zero2/3_model_states_mem_needs, nothing offloaded.
  kMegatron,   // Megatron-LM's table for its distributed optimizer.
};

const char* preset_name(Preset preset) noexcept;
std::optional<Preset> parse_preset(const std::string& name);

// "7.5B", "1.5e9", "124M", or plain digits; suffixes K, M, B, T are powers of 1000.
//
// Errors: kInvalidArgument if it is not a whole number of 1 to 2^52 parameters.
Result<std::uint64_t> parse_parameter_count(const std::string& text);

struct PlanRequest {
  std::uint64_t parameters = 0;  // Used when there is no shape.
  std::optional<TransformerShape> shape;
  std::uint64_t batch = 1;
  std::uint64_t sequence = 0;  // For the activations; 0: the shape's positions.
  bool fused_attention = false;
  // Replaces the estimate if the placement of activations is known (activation_report.h). Preset forebay.
  std::optional<std::uint64_t> activation_bytes;
  std::uint64_t host_activation_bytes = 0;  // Pinned, for activations that leave the device.
  PlanOptions options;  // `ranks` are the data-parallel ones; the others follow from `part`.
  ModelPart part;  // The part of the shape on a rank. One of several parts needs preset forebay and a shape.
  Preset preset = Preset::kForebay;
};

// Bytes of one rank. None: not known from the request, or not counted by the preset.
struct PlanFigures {
  std::uint64_t parameters = 0;
  std::uint64_t gradients = 0;
  std::uint64_t optimizer = 0;
  std::optional<std::uint64_t> gathered;
  std::optional<std::uint64_t> buckets;
  std::optional<std::uint64_t> activations;
  std::optional<std::uint64_t> reserved;  // The device budget must hold these; in whole chunks.
  std::optional<std::uint64_t> pinned;    // Pinned host memory of the offload: all of `host`.
  std::uint64_t host_activations = 0;     // Pinned too.
  std::optional<std::uint64_t> total;     // None while a part that the preset counts is not known.

  std::uint64_t model_states() const { return parameters + gradients + optimizer; }
  // A lower limit: the sum of the known figures.
  std::uint64_t known() const {
    return model_states() + gathered.value_or(0) + buckets.value_or(0) + activations.value_or(0);
  }
  // The best figure to compare with a budget: reserved, or else known().
  std::uint64_t needed() const { return reserved.value_or(known()); }
};

// A pipeline stage, on each of its ranks.
struct StageFigures {
  std::uint64_t layers = 0;
  std::uint64_t parameters = 0;
  PlanFigures bytes;
  WireBytes wire;
};

struct PlanReport {
  Preset preset = Preset::kForebay;
  std::uint64_t parameters = 0;       // The whole model's.
  std::uint64_t part_parameters = 0;  // Psi of the formulas: parameters that a rank has in part or whole.
  ModelPart part;
  std::uint64_t layers = 0;            // Layers of the shape in this pipeline stage.
  std::vector<StageFigures> pipeline;  // All pipeline stages, by number; see worst_stage().
  PlanOptions options;
  PlanFigures bytes;
  HostBytes host;  // For the offload and for saving; zero without them.
  FileBytes file;
  // Units that stay on the device, out of `units`. None: not known from a number of parameters.
  std::optional<int> device_units;
  int units = 0;
  WireBytes wire;
  WireBytes evaluation;              // A forward pass without gradients, after an update.
  bool exact = false;                // All but the activations equals the engine's bytes, to the byte.
  std::string states_formula;        // Psi parameters, N ranks.
  std::string below_device_formula;  // Empty when nothing is offloaded.
  std::string wire_formula;
  std::vector<std::string> notes;
};

// All ranks of a plan.
int world_size(const PlanReport& report);

// Errors: kInvalidArgument naming the option; kUnsupported for a ZeRO stage or type that the preset does not
// have.
Result<PlanReport> make_plan_report(const PlanRequest& request);

// The report of the pipeline stage that needs most memory, with the figures of all stages. Requires: `stages`
// in the order of the pipeline.
PlanReport worst_stage(const std::vector<PlanReport>& stages);

// One limit that the plan must fit in, and whether it does.
struct LimitVerdict {
  std::string name;
  std::string where;  // A file, or empty.
  std::uint64_t limit_bytes = 0;
  std::uint64_t needed_bytes = 0;
  bool fits() const { return needed_bytes <= limit_bytes; }
};

// Names the largest pool and an option that makes it smaller: the end of every "does not fit" message.
// `memory_bytes`: the budget; 0: none. Activations that exceed it by themselves come first: sharding
// does not help them.
std::string shrink_advice(const PlanReport& report, std::uint64_t memory_bytes = 0);

// Compares the memory limits of the host with the `ranks_here` ranks of the plan that need most.
std::vector<LimitVerdict> judge_host(const PlanReport& report, const std::vector<HostLimit>& limits,
                                     std::uint64_t ranks_here);

}  // namespace forebay
