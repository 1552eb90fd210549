// The description of this machine for `forebay simulate --cluster`: measured rates, and the efficiency of
// matrix products that makes the simulation of measured runs of one rank take as long as they took.
#pragma once

#include <string>
#include <vector>

#include "forebay/status.h"
#include "runtime/command/machine/bench_tiers_print.h"
#include "runtime/command/machine/rank_measurement.h"
#include "runtime/command/simulate/simulation.h"

namespace forebay {

// A training run of one rank. The request's cluster is empty.
struct MeasuredRun {
  std::string name;  // The report's path.
  SimulationRequest request;
  double step_seconds = 0;
};

// Reads a report of forebay-gpt (--report). Errors: kIoError; kInvalidArgument naming the figure, for a run
// of several ranks, with offload or recomputation, too.
Result<MeasuredRun> read_measured_run(const std::string& path);

struct MachineFigures {
  RankMeasurement rank;
  LinkKind link = LinkKind::kShm;
  int processors = 1;                   // That the ranks share.
  std::uint64_t host_memory_bytes = 0;  // All of the host's.
  double drive_read_bytes_per_second = 0;
  double drive_write_bytes_per_second = 0;
};

// Descriptions of describe_machine() begin with this, and no others that are installed.
inline constexpr char kMachineBeginning[] = "{\n  \"name\": \"this\"";

// The JSON text of the description.
// Requires: one run or more. Errors: those of simulate(), with the run's name.
Result<std::string> describe_machine(const MachineFigures& figures, const std::vector<MeasuredRun>& runs);

}  // namespace forebay
