// Reports of training runs, side by side: what `forebay report` prints.
//
// A report is what forebay-gpt writes with --report. Each row sets what a run measured on its worst rank
// beside what its plan said and what the formulas of the ZeRO paper give.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/plan.h"

namespace forebay {

struct RunReport {
  std::string name;  // The file it came from: for messages.
  int world_size = 1;
  // What makes the same training, and what must be the same for equal results besides what follows.
  std::vector<std::pair<std::string, std::string>> training;
  int tensor_parallel = 1;
  int pipeline_parallel = 1;
  int group = 1;  // Ranks that gradients are added among first.
  bool shard_within_group = false;
  int stage = 0;
  std::string dtype = "fp32";
  std::uint64_t parameters = 0;
  std::uint64_t part_parameters = 0;  // Most that a rank has some or all of; 0: the report does not say.
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
  std::uint64_t sent_bytes_per_step = 0;  // Between data-parallel ranks.
  std::uint64_t received_bytes_per_step = 0;
  std::uint64_t tensor_sent_bytes_per_step = 0;
  std::uint64_t pipeline_sent_bytes_per_step = 0;
  // The inputs of recomputed blocks, where an ActivationCheckpointer has them, and what its gathers send.
  std::string recompute = "none";
  std::string activations = "keep";
  struct Saved {
    std::uint64_t device_bytes = 0;
    std::uint64_t host_bytes = 0;
    std::uint64_t file_bytes = 0;
    std::uint64_t sent_bytes_per_step = 0;
  };
  Saved saved;
  Saved planned_saved;

  int data_parallel() const { return world_size / (tensor_parallel * pipeline_parallel); }
};

// Psi of the formulas: parameters of the part of the model that a rank trains.
double part_parameters(const RunReport& run);

// Model-state bytes per rank on the device by the formulas (ARCHITECTURE.md, "The memory contract"). What is
// on its way to the host is bounded and left out.
double model_state_formula_bytes(const RunReport& run);

// Bytes that a rank sends to data-parallel ones per step by theory: exact at stages 0 to 2, at stage 3 the
// most there can be.
double wire_formula_bytes(const RunReport& run);

// Bytes that a rank sends to tensor-parallel ones per step by theory: the sums of activations and of their
// gradients. None where the report does not say what the model is, and for a pipeline's stages, which differ.
std::optional<double> tensor_formula_bytes(const RunReport& run);

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
