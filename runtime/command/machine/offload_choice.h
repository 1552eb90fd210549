// Chooses the offload setting that a model should use on a machine: the settings that fit, their cost per
// step at given rates, and the best one. A function of numbers: nothing is measured or allocated here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "forebay/plan.h"

namespace forebay {

// Rates of the tiers. 0: not measured; transfers at that rate count as free.
struct TierRates {
  double to_device_bytes_per_second = 0;
  double from_device_bytes_per_second = 0;
  double both_bytes_per_second = 0;      // Both directions at once, their sum.
  double adamw_elements_per_second = 0;  // The whole host together.
  double file_read_bytes_per_second = 0;
  double file_write_bytes_per_second = 0;
};

struct TierLimits {
  std::uint64_t device_bytes = 0;  // The budget of one rank.
  std::uint64_t host_bytes = 0;    // For all ranks of this host.
  std::uint64_t file_bytes = 0;    // For all ranks of this host.
  std::uint64_t host_ranks = 1;    // Ranks that share the host's cores, memory and drives.
  // The device lies in host memory: its bytes count there too, and its copies share that memory's rate.
  bool device_in_host = false;
};

// One setting. Bytes are per rank, seconds per rank and step.
struct OffloadEstimate {
  Offload offload = Offload::kNone;
  Tier tier = Tier::kPinned;
  std::uint64_t device_bytes = 0;  // The budget must hold these; in whole chunks.
  PoolBytes pools;                 // device_bytes by pool.
  std::uint64_t host_bytes = 0;
  std::uint64_t file_bytes = 0;
  bool fits = false;
  std::string
      lacks;  // The reason if it does not fit: "1.50 GiB of device memory, and the budget is 1.00 GiB".
  double down_seconds = 0;
  double up_seconds = 0;
  double both_seconds = 0;  // Down and up together, at the rate of both directions at once.
  double adamw_seconds = 0;
  double file_seconds = 0;
  double added_seconds = 0;  // The longest of these: they run at the same time.
  std::string bound_by;      // The name of the longest: "gradients down", "file", ...; empty for none.
};

struct OffloadChoice {
  std::vector<OffloadEstimate> estimates;  // In the order none, optimizer on cpu, on nvme, and so on.
  int chosen = -1;                         // Index; -1: nothing fits.
  std::string reason;                      // Why it is best; or why nothing fits, and a remedy.
};

// "none", "optimizer on cpu".
std::string setting_name(Offload offload, Tier tier);

// Estimates every setting of that ZeRO stage and chooses, among those that fit, the one that adds least time
// to a step; the first if two add the same. The offload and tier in `options` are ignored.
//
// Errors: make_plan's.
Result<OffloadChoice> choose_offload(const ModelShape& model, const PlanOptions& options,
                                     const TierLimits& limits, const TierRates& rates);

// The formulas of an estimate, line by line, for people.
std::vector<std::string> offload_formulas();

}  // namespace forebay
