// Which offload setting a model should use on a machine: what fits, what each costs a step at given rates,
// and which is chosen. A function of numbers: nothing is measured or allocated here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "forebay/plan.h"

namespace forebay {

// What the tiers deliver. 0: not measured; what would need it costs nothing.
struct TierRates {
  double to_device_bytes_per_second = 0;
  double from_device_bytes_per_second = 0;
  double both_bytes_per_second = 0;      // Both directions at once, their sum.
  double adamw_elements_per_second = 0;  // Of the whole host.
  double file_read_bytes_per_second = 0;
  double file_write_bytes_per_second = 0;
};

struct TierLimits {
  std::uint64_t device_bytes = 0;  // The budget of one rank.
  std::uint64_t host_bytes = 0;    // For all ranks of this host.
  std::uint64_t file_bytes = 0;    // The same.
  std::uint64_t host_ranks = 1;    // Ranks that share the host's cores, memory and drives.
  // The device is the host's memory: its bytes count there too, and its copies share that memory's rate.
  bool device_in_host = false;
};

// One setting. Bytes are per rank, seconds per rank and step.
struct OffloadEstimate {
  Offload offload = Offload::kNone;
  Tier tier = Tier::kPinned;
  std::uint64_t device_bytes = 0;  // In whole chunks: what the budget must hold.
  PoolBytes pools;                 // What it is made of.
  std::uint64_t host_bytes = 0;
  std::uint64_t file_bytes = 0;
  bool fits = false;
  std::string lacks;  // Why it does not fit: "1.50 GiB of device memory, and the budget is 1.00 GiB".
  double down_seconds = 0;
  double up_seconds = 0;
  double both_seconds = 0;  // Down and up, sharing what both directions deliver at once.
  double adamw_seconds = 0;
  double file_seconds = 0;
  double added_seconds = 0;  // The longest of these: they are under way at the same time.
  std::string bound_by;      // Which that is: "gradients down", "file", ...; empty for nothing.
};

struct OffloadChoice {
  std::vector<OffloadEstimate> estimates;  // In the order none, optimizer on cpu, on nvme, and so on.
  int chosen = -1;                         // Index; -1: nothing fits.
  std::string reason;                      // What speaks for it; or what is missing, and what to try.
};

// "none", "optimizer on cpu".
std::string setting_name(Offload offload, Tier tier);

// The settings there are at that stage: of those that fit, the one that adds least to a step; the first where
// two add the same. `options` without its offload and tier.
//
// Errors: make_plan's.
Result<OffloadChoice> choose_offload(const ModelShape& model, const PlanOptions& options,
                                     const TierLimits& limits, const TierRates& rates);

// How an estimate is made, line by line, for people.
std::vector<std::string> offload_formulas();

}  // namespace forebay
