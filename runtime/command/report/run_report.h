// Reports of training runs, side by side, as `forebay report` prints them.
//
// forebay-gpt writes a report with --report. Each row sets the figures measured on the run's worst rank
// beside the planned ones and those of the ZeRO paper's formulas.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/plan.h"

namespace forebay {

// The most on any rank.
struct MeasuredBytes {
  std::uint64_t measured = 0;
  std::uint64_t planned = 0;
};

struct RunReport {
  std::string name;  // The file it came from: for messages.
  int world_size = 1;
  // The settings of the training that must be equal for equal results, besides the members below.
  std::vector<std::pair<std::string, std::string>> training;
  int tensor_parallel = 1;
  int pipeline_parallel = 1;
  int group = 1;  // Ranks of an all-reduce group.
  bool shard_within_group = false;
  int stage = 0;
  std::string dtype = "fp32";
  std::uint64_t parameters = 0;
  std::uint64_t part_parameters = 0;  // Most that a rank has in part or whole; 0: not in the report.
  int steps = 0;
  int first_step = 0;  // Steps done before this run: 0 unless it was resumed.
  int micro_steps = 1;
  std::string accumulate = "shard";
  std::string optimizer = "adamw";
  std::string moments = "fp32";
  bool master_weights = true;
  double ema = 0;
  std::string offload = "none";
  std::string tier = "cpu";
  std::uint64_t offloaded_parameters = 0;         // Parameters of the offloaded units.
  std::string store;                              // Rank 0's, described; empty without files.
  std::vector<double> losses;                     // NaN if not finite.
  std::vector<std::optional<double>> grad_norms;  // None for a skipped step.
  std::string digest;
  double tokens_per_second = 0;
  PoolBytes peak;              // The largest of each pool over all ranks.
  PoolBytes planned;           // The largest of each pool over all ranks.
  MeasuredBytes model_states;  // The largest sum on one rank, not the sum of the largest pools.
  std::uint64_t reserved_bytes = 0;
  MeasuredBytes host;  // Pinned for the offload.
  MeasuredBytes file;
  MeasuredBytes file_read_per_step;
  MeasuredBytes file_written_per_step;
  std::uint64_t sent_bytes_per_step = 0;  // Between data-parallel ranks.
  std::uint64_t received_bytes_per_step = 0;
  std::uint64_t tensor_sent_bytes_per_step = 0;
  std::uint64_t pipeline_sent_bytes_per_step = 0;
  // The saved inputs of recomputed blocks in an ActivationCheckpointer, and the bytes that its gathers send.
  std::string recompute = "none";
  std::string activations = "keep";
  MeasuredBytes saved_device;
  MeasuredBytes saved_host;
  MeasuredBytes saved_file;
  MeasuredBytes saved_sent_per_step;

  int data_parallel() const { return world_size / (tensor_parallel * pipeline_parallel); }
};

// Psi of the formulas: the parameters of the part of the model that a rank trains.
double part_parameters(const RunReport& run);

// Model-state bytes per rank on the device by the formulas (ARCHITECTURE.md, "The memory contract"). Bytes in
// transit to the host are bounded and left out.
double model_state_formula_bytes(const RunReport& run);

// Bytes that a rank sends to data-parallel ranks per step by theory: exact at ZeRO stages 0 to 2, an upper
// limit at stage 3.
double wire_formula_bytes(const RunReport& run);

// Bytes that a rank sends to tensor-parallel ranks per step by theory: the sums of activations and of their
// gradients. None if the report does not describe the model, and for pipeline stages, which differ.
std::optional<double> tensor_formula_bytes(const RunReport& run);

// Errors: kIoError (cannot be read), kCorruption (not JSON, or a key is missing or of the wrong kind; the
// message names the key).
RunReport read_run_report(const std::string& path);

// The reason why two runs are not comparable, or the difference of their results; empty if the results are
// bit for bit the same.
struct RunComparison {
  bool comparable = true;
  std::string difference;
};
RunComparison compare_runs(const std::vector<RunReport>& runs);

void print_report_table(std::ostream& out, const std::vector<RunReport>& runs);
void print_report_json(std::ostream& out, const std::vector<RunReport>& runs);

}  // namespace forebay
