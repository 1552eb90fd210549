// What one run of forebay-gpt is asked to do, and how the command line says it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "forebay/activation_plan.h"
#include "forebay/sharding_options.h"
#include "model/shape.h"
#include "trainer/grid.h"

namespace forebay::gpt {

// Where a rank keeps its memory and computes.
struct DeviceChoice {
  bool cuda = false;
  std::optional<int> ordinal;  // None: ranks take the devices in turn.
  friend bool operator==(const DeviceChoice&, const DeviceChoice&) = default;
};

struct TrainerOptions : ShardingOptions {
  GptShape model;

  int ranks = 1;
  DeviceChoice device;
  // As the command line has it; empty: "auto" for more than one rank on the host, otherwise "local".
  std::string communicator;
  std::string nccl_library;  // A path; empty: found as nccl_library() says.
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
  std::vector<std::string> activation_directories;  // Of tier kFile.
  double dropout = 0;

  std::size_t batch = 8;      // Samples per data-parallel rank and micro-step.
  std::uint64_t steps = 100;  // In all, those before a resume included.
  double lr = 1e-3;
  double weight_decay = 0.1;
  double clip = 1.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double loss_scale = 65536;  // The first, for fp16.
  std::uint64_t seed = 1;
  std::vector<std::string> text;  // Empty: default_text_files().

  bool fast_order = false;  // NCCL adds gradients in an order of its own.

  std::string save_state;
  std::uint64_t save_every = 0;
  std::string load_state;
  std::string initial_file;
  std::string export_file;
  std::string report_file;
  std::string timeline_file;
  std::string flight_recorder;  // A directory.
  bool progress = true;         // Lines on stderr.
};

// The command line, without the program's name. A value: what to do. Otherwise the exit code: 0 after --help
// (printed on stdout), 2 after a mistake (one line on stderr).
struct ParsedCommand {
  std::optional<TrainerOptions> options;
  int exit_code = 0;
};
ParsedCommand parse_command(const std::vector<std::string>& arguments);

// Checks what does not need other ranks or files.
// Errors: throws Error(kInvalidArgument) naming the option and what it may be.
void check_options(const TrainerOptions& options);

// How the ranks are arranged.
Grid::Options grid_options(const TrainerOptions& options);

// Forward passes of a stage that run ahead of its backward ones, and passes that are in flight there: the
// stages after it, and itself, with one-forward-one-backward.
int forwards_ahead(const PipelineStage& stage);
int passes_in_flight(const TrainerOptions& options, const PipelineStage& stage);
// The blocks of a stage that are computed again in the backward pass.
std::vector<std::size_t> recomputed_layers(const TrainerOptions& options, const PipelineStage& stage);

// Fills in what was left to choose.
TrainerOptions resolve_options(TrainerOptions options);

// Whether ranks are processes with this --communicator.
bool starts_processes(const std::string& communicator);
// Whether ranks have a GPU each and reach each other over NCCL.
bool uses_nccl(const std::string& communicator);

// --recompute and --activations as the command line has them; directories are left out.
std::string recompute_name(const TrainerOptions& options);
std::string activations_name(const TrainerOptions& options);

// Those that decide which operations ranks begin with, for ProcessOptions::configuration: what differs is
// told when they meet, where later it would be operations that do not match.
std::string configuration_of(const TrainerOptions& options);

// The options that make the same training: with others, results need not be the same, whatever the stage.
// Names are those of the command line, without dashes before them.
std::vector<std::pair<std::string, std::string>> training_of(const TrainerOptions& options);

// The options that must be the same on every rank, for EngineOptions::agreement.
std::vector<std::pair<std::string, std::string>> agreement_of(const TrainerOptions& options);

}  // namespace forebay::gpt
