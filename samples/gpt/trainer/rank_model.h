// RankModel: the model of one rank under an engine, ready to train: the grid, the streams, the operations,
// the engine with its memory committed, and the batches. The trainer runs steps on it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "forebay/engine.h"
#include "forebay/timeline.h"
#include "model/batch_feed.h"
#include "model/gpt.h"
#include "model/tensor_group.h"
#include "model/text.h"
#include "parallel/checkpointed_inputs.h"
#include "parallel/grid.h"
#include "parallel/pipeline_group.h"
#include "trainer/compute_stream.h"
#include "trainer/engine_model.h"
#include "trainer/rank_setup.h"

namespace forebay::gpt {

// The members are in the order in which they need each other. They are public because the trainer, the export
// and the measurements each use a few of them; nobody replaces one.
struct RankModel {
  // Commits the engine. Collective over the ranks of `rank.communicator`; both arguments outlive this.
  // Errors: throws Error, also for a text that is shorter than a sample.
  RankModel(const TrainerOptions& options, const Rank& rank);
  // Waits for the work that is still queued, which uses the members.
  ~RankModel();
  RankModel(const RankModel&) = delete;
  RankModel& operator=(const RankModel&) = delete;

  // Where this rank keeps a parameter of the whole model; none if it has no part of it.
  std::optional<ParameterId> find_parameter(const GptParameter& parameter) const;
  // Elements of this rank's offloaded units.
  std::uint64_t offloaded_parameters() const;
  bool offloads_to_files() const;
  std::uint64_t samples_per_step() const;
  double tokens_per_step() const;
  // A text of each pipeline stage, in order: `mine` is the same on all ranks of a stage. Collective.
  std::vector<std::string> of_each_stage(const std::string& mine);

  const TrainerOptions& options;
  const Rank& rank;
  Communicator& communicator;
  Grid grid;
  const Text text;
  const Text evaluation_text;  // Empty: none was given.
  const std::vector<GptUnit> whole_units;
  const std::vector<GptUnit> units;  // This rank's part of them.
  ComputeStream compute;             // Outlives the engine.
  const std::unique_ptr<Operations> operations;
  TensorGroup tensor_group;
  Timeline timeline;  // Outlives the engine.
  PipelineGroup pipeline;
  Engine engine;
  EngineModel engine_model;
  std::unique_ptr<CheckpointedInputs> inputs;  // In the engine's memory. Null: the model keeps its inputs.
  Gpt gpt;
  BatchFeed feed;

 private:
  Gpt make_gpt(BlockInputs* block_inputs);
  std::unique_ptr<CheckpointedInputs> make_inputs(std::uint64_t device_bytes);
  std::unique_ptr<CheckpointedInputs> place_inputs();
  std::unique_ptr<CheckpointedInputs> place_inputs_in(std::uint64_t room);
  std::optional<std::uint64_t> choose_device_bytes(std::uint64_t room);
};

}  // namespace forebay::gpt
