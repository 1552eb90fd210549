// The figures of `forebay compare`: many settings of one model on one cluster, each planned, and simulated if
// its plan fits. Numbers only; comparison_print.h prints them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "forebay/activation_plan.h"
#include "forebay/sharding_options.h"
#include "runtime/command/simulate/simulation.h"

namespace forebay {

enum class Objective : std::uint8_t { kTime, kMemory, kCost };

// The settings: every combination of these values that the model and the cluster can have. Empty lists take
// the defaults of default_choices().
struct ComparisonChoices {
  std::vector<int> stages;
  std::vector<Offload> offloads;
  std::vector<Tier> tiers;
  std::vector<double> fractions;
  std::vector<int> recompute;
  std::vector<int> tensor_parallel;
  std::vector<int> pipeline_parallel;
  std::vector<ActivationChoice> activations;  // For recomputed layers.
  std::vector<std::uint64_t> batches;         // Sequences of a micro-step.
  std::vector<std::uint64_t> buckets;
  std::vector<int> groups;  // All-reduce groups; 1: none.
};

struct ComparisonRequest {
  SimulationRequest base;          // Model, cluster, ranks, type and everything that is not swept.
  std::uint64_t global_batch = 0;  // Sequences of a step, over all ranks.
  ComparisonChoices choices;
  std::size_t limit = 0;  // Settings to simulate at most; 0: all that fit.
  int threads = 1;
  // Called from one thread at a time. `verb`: planned, then simulated.
  std::function<void(const char* verb, std::size_t done, std::size_t all)> progress;
};

struct Setting {
  SimulationRequest request;
  std::uint64_t device_bytes = 0;  // By the plan, in chunks.
  std::uint64_t device_limit = 0;
  std::uint64_t host_bytes = 0;  // One rank.
  std::uint64_t host_limit = 0;
  bool simulated = false;
  Status failure;  // Why a setting that fits could not be simulated: this host has too little memory, say.
  double step_seconds = 0;
  double tokens_per_second = 0;
  double model_flops_used = 0;
  std::string bottleneck;

  // Bytes that are missing on the device and on the host; 0: it fits.
  std::uint64_t missing_bytes() const {
    return (device_bytes > device_limit ? device_bytes - device_limit : 0) +
           (host_bytes > host_limit ? host_bytes - host_limit : 0);
  }
  bool fits() const { return missing_bytes() == 0; }
};

struct Comparison {
  std::vector<Setting> settings;  // In the order of the choices.
  std::size_t left_out = 0;       // Settings that fit and were not simulated, because of the limit.
};

// The values that are worth a try for this model and cluster.
ComparisonChoices default_choices(const SimulationRequest& base, std::uint64_t global_batch);

// Plans all settings and simulates those that fit. The result does not depend on the number of threads.
//
// Errors: kInvalidArgument where no setting is possible at all.
Result<Comparison> compare_settings(const ComparisonRequest& request);

// Indices of the simulated settings, the best one first. `price`: of a device for an hour.
std::vector<std::size_t> best_first(const Comparison& comparison, Objective objective);
// Indices of the settings that no other one beats in both step time and device memory, by memory.
std::vector<std::size_t> pareto_front(const Comparison& comparison);
// Indices of the settings that fit and could not be simulated.
std::vector<std::size_t> failures(const Comparison& comparison);
// Indices of the settings that do not fit, the nearest first.
std::vector<std::size_t> nearest_misses(const Comparison& comparison);

// "stage 3, offload optimizer, micro-batch 4 x 2": the swept values that differ from the plainest ones.
std::string setting_text(const Setting& setting);
// The same as command-line options of `forebay simulate`.
std::string setting_options(const Setting& setting);

}  // namespace forebay
