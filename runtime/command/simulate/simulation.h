// The figures of `forebay simulate`: one rank of each pipeline stage of a training run, by the real engine on
// a model backend in virtual time. Numbers only; simulation_print.h prints them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "forebay/activation_plan.h"
#include "forebay/engine.h"
#include "forebay/model_shape.h"
#include "runtime/command/plan/activation_report.h"
#include "runtime/command/simulate/machine.h"

namespace forebay {

struct SimulationRequest {
  TransformerShape shape;
  std::uint64_t batch = 1;     // Sequences of a micro-step and data-parallel rank.
  std::uint64_t sequence = 0;  // 0: the shape's positions.
  int ranks = 1;               // All of them.
  ModelPart part;              // Its pipeline_stage is not read.
  ShardingOptions options;     // memory_bytes 0: the device's.
  int recompute_every = 0;
  ActivationPlacement activations = ActivationPlacement::kKeep;  // Not kAuto.
  Tier activation_tier = Tier::kPinned;
  bool fused_attention = true;
  // By pipeline stage. None: by the formulas of `forebay plan`.
  std::optional<std::uint64_t> activation_bytes;
  ClusterDescription cluster;
  bool with_timeline = false;
  // Called by one thread at a time, thousands of times a second: what is simulated ("a step"), and the part
  // of it that is done, 0 to 1.
  std::function<void(const std::string& subject, double done)> progress;
};

// Time of the measured step in which the trainer's stream did, or waited for, one thing.
struct SimulatedTime {
  std::string cause;     // "forward", "parameter gathers"
  bool exposed = false;  // It waited.
  double seconds = 0;
};

// A change of the machine, and the time of a step with it.
struct SimulatedChange {
  std::string change;  // "twice the network"
  double step_seconds = 0;
};

struct SimulationResult {
  double step_seconds = 0;
  std::uint64_t tokens_per_step = 0;  // All ranks.
  double model_flops = 0;             // A rank's in a step, without recomputation,
  double hardware_flops = 0;          // and with it.
  double peak_flops = 0;              // The device, a second.
  std::vector<SimulatedTime> times;   // They add up to the step.
  std::uint64_t parameters = 0;       // The whole model's.
  int pipeline_stage = 0;             // The one that needs most memory; the figures are its own.
  EngineStatistics statistics;
  std::uint64_t sent_bytes_per_step = 0;  // To the data-parallel ranks.
  std::uint64_t device_bytes = 0;         // The budget.
  std::uint64_t host_memory_bytes = 0;    // A rank's share of its host.
  std::vector<Timeline::Span> spans;
  // The busy part of a step, 0 to 1.
  double compute_busy = 0;
  double bus_busy = 0;
  double host_busy = 0;
  std::vector<double> link_busy;  // By level.

  double tokens_per_second() const { return static_cast<double>(tokens_per_step) / step_seconds; }
  double model_flops_used() const { return model_flops / step_seconds / peak_flops; }
  double hardware_flops_per_second() const { return hardware_flops / step_seconds; }
};

// The activations of each pipeline stage. Errors: those of make_activation_report.
Result<std::vector<ActivationReport>> activations_of_stages(const SimulationRequest& request);

// The result is the same for the same request, to the last digit.
//
// Errors: kInvalidArgument naming the option; kOutOfMemory where the plan does not fit into the device;
//         kUnsupported for a type that the device does not have.
Result<SimulationResult> simulate(const SimulationRequest& request);

// The cause that takes the most time of the step.
const SimulatedTime& bottleneck(const SimulationResult& result);

// The same step on machines of which one part is better, the best one first.
Result<std::vector<SimulatedChange>> simulate_changes(const SimulationRequest& request);

}  // namespace forebay
