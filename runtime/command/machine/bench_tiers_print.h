// `forebay bench-tiers` as text and as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forebay/topology.h"
#include "runtime/command/machine/offload_choice.h"
#include "runtime/command/machine/tier_measurement.h"

namespace forebay {

// The setting for a model, and what it was chosen from.
struct BenchedModel {
  std::string description;  // "GPT-2 kind: 4 layers, ..."
  std::uint64_t parameters = 0;
  PlanOptions options;
  TierLimits limits;
  OffloadChoice choice;
};

struct BenchTiersReport {
  std::string device;  // "host", "cuda:0 NVIDIA H200"
  bool device_in_host = false;
  std::string topology_source;
  Placement placement;  // Of the device's host side.
  std::uint64_t bytes = 0;
  CopyMeasurement copies;
  HostMeasurement host;
  std::vector<FileMeasurement> files;  // Each directory; with several, all of them striped, last.
  std::optional<BenchedModel> model;
};

std::string bench_tiers_text(const BenchTiersReport& report);
// The keys are those of the text, with underscores; rates are in bytes per second, times in seconds; what was
// not asked for is null.
std::string bench_tiers_json(const BenchTiersReport& report);

}  // namespace forebay
