// `forebay bench-tiers` as text and as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forebay/topology.h"
#include "runtime/command/machine/offload_choice.h"
#include "runtime/command/machine/rank_measurement.h"
#include "runtime/command/machine/tier_measurement.h"

namespace forebay {

// The setting for a model, and the alternatives it was chosen from.
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
  Placement placement;  // Where the device's pinned memory and host threads are.
  std::uint64_t bytes = 0;
  CopyMeasurement copies;
  HostMeasurement host;
  std::vector<FileMeasurement> files;    // Each directory; with several, all of them striped, last.
  std::optional<RankMeasurement> ranks;  // With --save.
  LinkKind ranks_link = LinkKind::kShm;
  std::optional<BenchedModel> model;
};

std::string bench_tiers_text(const BenchTiersReport& report);
// Units: bytes per second, seconds. The keys are the words of the text, with underscores; parts that were not
// requested are null.
std::string bench_tiers_json(const BenchTiersReport& report);

}  // namespace forebay
