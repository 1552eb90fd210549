// Reports of training runs, side by side: what `forebay report` prints.
//
// A report is what forebay-gpt writes with --report. Each row sets what a run measured on its worst rank
// beside what its plan said and what the formulas of the ZeRO paper give.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/plan.h"

namespace forebay {

struct RunReport {
  std::string name;  // The file it came from: for messages.
  int world_size = 1;
  int stage = 0;
  std::string dtype = "fp32";
  std::uint64_t parameters = 0;
  int steps = 0;
  int first_step = 0;  // Steps done before this run: 0 unless it was resumed.
  int micro_steps = 1;
  std::string accumulate = "shard";
  std::string offload = "none";
  std::string tier = "cpu";
  std::uint64_t offloaded_parameters = 0;         // In units that are not on the device.
  std::string store;                              // Rank 0's, described; empty without files.
  std::vector<double> losses;                     // NaN where it was not finite.
  std::vector<std::optional<double>> grad_norms;  // None where the step was skipped.
  std::string digest;
  double tokens_per_second = 0;
  PoolBytes peak;                       // Over ranks: the largest of each pool.
  PoolBytes planned;                    // The same.
  std::uint64_t peak_model_states = 0;  // The largest sum on one rank, not the sum of the largest.
  std::uint64_t planned_model_states = 0;
  std::uint64_t reserved_bytes = 0;
  std::uint64_t host_bytes = 0;  // Page-locked for what is offloaded.
  std::uint64_t planned_host_bytes = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t planned_file_bytes = 0;
  std::uint64_t file_read_bytes_per_step = 0;
  std::uint64_t planned_file_read_bytes_per_step = 0;
  std::uint64_t file_written_bytes_per_step = 0;
  std::uint64_t planned_file_written_bytes_per_step = 0;
  std::uint64_t sent_bytes_per_step = 0;
  std::uint64_t received_bytes_per_step = 0;
};

// Model-state bytes per rank on the device by the formulas (ARCHITECTURE.md, "The memory contract"). What is
// on its way to the host is bounded and left out.
double model_state_formula_bytes(const RunReport& run);

// Bytes sent per rank and step by theory: exact at stages 0 to 2, at stage 3 the most there can be.
double wire_formula_bytes(const RunReport& run);

// Errors: kIoError (cannot be read), kCorruption (not JSON, or a key is missing or of the wrong kind: named).
RunReport read_run_report(const std::string& path);

// What makes two runs incomparable, or how their results differ; empty when they are the same to the last
// bit.
struct Comparison {
  bool comparable = true;
  std::string difference;
};
Comparison compare_runs(const std::vector<RunReport>& runs);

void print_report_table(std::ostream& out, const std::vector<RunReport>& runs);
void print_report_json(std::ostream& out, const std::vector<RunReport>& runs);

}  // namespace forebay
