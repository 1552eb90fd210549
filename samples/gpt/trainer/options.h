// The options of a run of forebay-gpt, and how its command line is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/activation_plan.h"
#include "forebay/sharding_options.h"
#include "model/byte_pairs.h"
#include "model/shape.h"
#include "model/text.h"
#include "parallel/grid.h"
#include "trainer/schedule.h"

namespace forebay::gpt {

// The device on which ranks keep their memory and compute.
struct DeviceChoice {
  bool cuda = false;
  std::optional<int> ordinal;  // None: ranks take the devices in turn.
  friend bool operator==(const DeviceChoice&, const DeviceChoice&) = default;
};

struct TrainerOptions : ShardingOptions {
  GptShape model;

  int ranks = 1;
  DeviceChoice device;
  // As on the command line; empty: "auto" for more than one rank on the host, otherwise "local".
  std::string communicator;
  std::string nccl_library;  // A path; empty: as nccl_library() finds it.
  std::string matmul;        // "library" or "plain"; empty: the library, on the host where it is built in.
  int threads = 0;           // Compute threads per rank; 0: the host's cores, shared by the ranks on it.
  int deadline_seconds = 60;
  int join_deadline_seconds = 0;  // 0: deadline_seconds.

  int tensor_parallel = 1;          // Ranks that share every layer.
  int pipeline_parallel = 1;        // Stages of consecutive layers.
  std::size_t recompute_every = 0;  // See Gpt::Options.
  // Where the inputs of recomputed blocks wait for the backward pass.
  ActivationPlacement activations = ActivationPlacement::kKeep;
  Tier activation_tier = Tier::kPinned;
  std::vector<std::string> activation_directories;  // Tier kFile.
  double dropout = 0;

  std::size_t batch = 8;      // Samples per data-parallel rank and micro-step.
  std::uint64_t steps = 100;  // In all, including those before a resume.
  double lr = 1e-3;           // The peak of the schedule.
  Schedule schedule = Schedule::kConstant;
  std::uint64_t warmup = 0;  // Steps.
  double last_lr = 0;
  double weight_decay = 0.1;
  double clip = 1.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double loss_scale = 65536;  // The initial one, for fp16.
  std::uint64_t seed = 1;
  std::vector<std::string> text;               // Empty: default_text_files().
  std::string data;                            // A file of tokens in place of text.
  std::shared_ptr<const BytePairs> tokenizer;  // Shared by copies of the options. Null: tokens are bytes.

  // Evaluations and generated text use the weights and leave the training as it is.
  std::vector<std::string> evaluation_text;  // Files.
  std::string evaluation_data;               // A file of tokens in place of them.
  std::uint64_t evaluate_every = 0;          // Steps; 0: at the end only.
  std::uint64_t evaluation_samples = 0;      // At most; 0: the whole text.
  std::uint64_t generate = 0;                // Tokens of text, at the end.
  std::string prompt = "\n";
  double temperature = 0.8;

  bool fast_order = false;  // NCCL adds gradients in an order of its own.

  std::string save_state;
  std::uint64_t save_every = 0;
  int keep = 1;  // States in save_state.
  std::string load_state;
  std::uint64_t load_step = 0;           // 0: the newest.
  bool resume = false;                   // Load from save_state once it holds a state.
  bool elastic = false;                  // After a loss, the ranks that are left go on from save_state.
  std::string initial_file;              // Or a directory with a model.
  std::string export_file;               // Or a directory.
  std::uint64_t export_shard_bytes = 0;  // A file in that directory has at most so many; 0: one file.
  std::string logits_file;
  std::string tokens_file;
  std::string report_file;
  std::string timeline_file;
  std::string flight_recorder;  // A directory.
  bool progress = true;         // Lines on stderr.

  bool evaluates() const { return !evaluation_text.empty() || !evaluation_data.empty(); }
};

// Parses the command line, without the program's name. Returns the options, or the exit code: 0 after --help
// or
// --version (printed on stdout), 2 after a mistake (one line on stderr).
struct ParsedCommand {
  std::optional<TrainerOptions> options;
  int exit_code = 0;
};
ParsedCommand parse_command(const std::vector<std::string>& arguments);

// The text to train on. Errors: those of Text.
Text training_text(const TrainerOptions& options);
// The text to evaluate; empty if there is none. Errors: those of Text.
Text evaluation_text(const TrainerOptions& options);

// The learning rates of the steps.
ScheduleOptions schedule_of(const TrainerOptions& options);

// The arrangement of the ranks.
Grid::Options grid_options(const TrainerOptions& options);

// Forward passes of a pipeline stage that run ahead of its backward passes, and passes in flight there: with
// one-forward-one-backward, one for each later stage, and one more.
int forwards_ahead(const PipelineStage& stage);
int passes_in_flight(const TrainerOptions& options, const PipelineStage& stage);
// The blocks of a pipeline stage that the backward pass computes again.
std::vector<std::size_t> recomputed_layers(const TrainerOptions& options, const PipelineStage& stage);

// Replaces empty options by the program's choice.
TrainerOptions resolve_options(TrainerOptions options);

// Whether this --communicator connects processes.
bool starts_processes(const std::string& communicator);
// Whether ranks have a GPU each and reach each other over NCCL.
bool uses_nccl(const std::string& communicator);

// The values of --recompute and --activations, without directories.
std::string recompute_name(const TrainerOptions& options);
std::string activations_name(const TrainerOptions& options);

// The options that decide which operations ranks begin with, for ProcessOptions::configuration. Ranks compare
// them when they meet, so that a difference is reported by name and not as operations that do not match.
std::string configuration_of(const TrainerOptions& options);

// The options that decide the result: runs with other values may differ, at every stage. Names are those of
// the command line, without dashes.
std::vector<std::pair<std::string, std::string>> training_of(const TrainerOptions& options);

// The options that must be equal on all ranks, for EngineOptions::agreement.
std::vector<std::pair<std::string, std::string>> agreement_of(const TrainerOptions& options);

}  // namespace forebay::gpt
