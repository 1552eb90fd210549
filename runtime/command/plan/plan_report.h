// The figures of `forebay plan`: what the engine would hold and send, or what a published convention says it
// would. Numbers only; plan_print.h writes them down and plan_command.h reads the command line.
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

// Whose bookkeeping.
enum class Preset : std::uint8_t {
  kForebay,    // The engine's own plan, padding included: what a run will measure.
  kPaper,      // Rajbhandari et al., arXiv 1910.02054: the plain formulas.
  kDeepSpeed,  // DeepSpeed's estimate_zero2/3_model_states_mem_needs, nothing offloaded.
  kMegatron,   // Megatron-LM's table for its distributed optimizer.
};

const char* preset_name(Preset preset) noexcept;
std::optional<Preset> parse_preset(const std::string& name);

// "7.5B", "1.5e9", "124M", or plain digits; suffixes K, M, B, T are powers of 1000.
//
// Errors: kInvalidArgument for what is not a whole number of 1 to 2^52 parameters.
Result<std::uint64_t> parse_parameter_count(const std::string& text);

struct PlanRequest {
  std::uint64_t parameters = 0;  // Used when there is no shape.
  std::optional<TransformerShape> shape;
  std::uint64_t batch = 1;
  std::uint64_t sequence = 0;  // For the activations; 0: the shape's positions.
  // Instead of the estimate, where it is known how activations are kept (activation_report.h). Preset
  // forebay.
  std::optional<std::uint64_t> activation_bytes;
  PlanOptions options;  // `ranks` are the data-parallel ones; the others follow from `part`.
  ModelPart part;       // What ranks have of the shape. Of several parts: preset forebay, and a shape.
  Preset preset = Preset::kForebay;
};

// Bytes of one rank. None: not known from what was given, or not counted by the preset.
struct PlanFigures {
  std::uint64_t parameters = 0;
  std::uint64_t gradients = 0;
  std::uint64_t optimizer = 0;
  std::optional<std::uint64_t> gathered;
  std::optional<std::uint64_t> buckets;
  std::optional<std::uint64_t> activations;
  std::optional<std::uint64_t> reserved;  // In whole chunks: what the device budget must hold.
  std::optional<std::uint64_t> pinned;    // Page-locked host memory of what is offloaded: of `host`, all.
  std::optional<std::uint64_t> total;     // None while a part that the preset counts is not known.

  std::uint64_t model_states() const { return parameters + gradients + optimizer; }
  // What is surely needed: the sum of what is known.
  std::uint64_t known() const {
    return model_states() + gathered.value_or(0) + buckets.value_or(0) + activations.value_or(0);
  }
  // The best figure to hold against a budget: reserved, or else what is known.
  std::uint64_t needed() const { return reserved.value_or(known()); }
};

// A stage of a pipeline, on each of its ranks.
struct StageFigures {
  std::uint64_t layers = 0;
  std::uint64_t parameters = 0;
  PlanFigures bytes;
  WireBytes wire;
};

struct PlanReport {
  Preset preset = Preset::kForebay;
  std::uint64_t parameters = 0;       // Of the whole model.
  std::uint64_t part_parameters = 0;  // Psi of the formulas: those that a rank has some or all of.
  ModelPart part;
  std::uint64_t layers = 0;            // Of the shape, in this pipeline stage.
  std::vector<StageFigures> pipeline;  // All stages, by number; see worst_stage().
  PlanOptions options;
  PlanFigures bytes;
  HostBytes host;  // Of what is offloaded; zero where nothing is.
  FileBytes file;
  // Units that stay on the device, of how many. None: not known from a number of parameters.
  std::optional<int> device_units;
  int units = 0;
  WireBytes wire;
  bool exact = false;          // All but the activations is what the engine will hold and send, to the byte.
  std::string states_formula;  // Psi parameters, N ranks.
  std::string below_device_formula;  // Empty when nothing is offloaded.
  std::string wire_formula;
  std::vector<std::string> notes;
};

// All ranks of a plan.
int world_size(const PlanReport& report);

// Errors: kInvalidArgument naming the option; kUnsupported for a stage or type that the preset does not have.
Result<PlanReport> make_plan_report(const PlanRequest& request);

// Of the reports of all pipeline stages, in their order, the one that needs most, with the figures of all.
PlanReport worst_stage(const std::vector<PlanReport>& stages);

// One thing that has to hold the plan, and whether it does.
struct LimitVerdict {
  std::string name;
  std::string where;  // A file, or empty.
  std::uint64_t limit_bytes = 0;
  std::uint64_t needed_bytes = 0;
  bool fits() const { return needed_bytes <= limit_bytes; }
};

// Which pool is largest and which option makes it smaller: the end of every "does not fit" message.
std::string shrink_advice(const PlanReport& report);

// The memory limits of the host, held against `ranks_here` ranks of the plan: those that need most.
std::vector<LimitVerdict> judge_host(const PlanReport& report, const std::vector<HostLimit>& limits,
                                     std::uint64_t ranks_here);

}  // namespace forebay
