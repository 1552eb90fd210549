// Grid: this rank's place among tensor-parallel, pipeline-parallel and data-parallel ranks, and its
// communicators along each dimension.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "forebay/activation_plan.h"
#include "forebay/communicator.h"
#include "forebay/rank_grid.h"
#include "model/shape.h"

namespace forebay::gpt {

class Grid {
 public:
  struct Options {
    int tensor_parallel = 1;
    int pipeline_parallel = 1;
    // Unless kKeep, an ActivationCheckpointer needs a communicator.
    ActivationPlacement activations = ActivationPlacement::kKeep;
  };

  // Collective over `world`, which outlives this. If the model has one part, data() is the world. Errors:
  // throws Error(kInvalidArgument) naming the option that does not divide the ranks, or the ranks that have
  // other options.
  Grid(Communicator& world, const Options& options);

  const RankGrid& shape() const { return shape_; }
  GridCoordinates at() const { return at_; }
  // Parts of the model. Each is held by all ranks of one data-parallel dimension.
  int part_count() const { return shape_.tensor_parallel() * shape_.pipeline_parallel(); }
  int part() const { return at_.tensor + shape_.tensor_parallel() * at_.pipeline; }
  TensorPart tensor_part() const {
    return {static_cast<std::size_t>(at_.tensor), static_cast<std::size_t>(shape_.tensor_parallel())};
  }

  PipelineStage stage() const {
    return {static_cast<std::size_t>(at_.pipeline), static_cast<std::size_t>(shape_.pipeline_parallel())};
  }

  Communicator& world() { return world_; }
  Communicator& data() { return communicators_.data != nullptr ? *communicators_.data : world_; }
  // Null if that dimension has one rank.
  Communicator* tensor() { return shape_.tensor_parallel() > 1 ? communicators_.tensor.get() : nullptr; }

  // The pipeline stages: one communicator for activations, one for gradients. ends() has the first and the
  // last stage. Null with one stage.
  Communicator* forward() { return shape_.pipeline_parallel() > 1 ? communicators_.pipeline.get() : nullptr; }
  Communicator* backward() { return backward_.get(); }
  Communicator* ends() { return ends_.get(); }

  // The tensor-parallel ranks again, even if there is only one, for an ActivationCheckpointer. Null if
  // Options::activations is kKeep.
  Communicator* activations() { return activations_.get(); }

  // The counts of all communicators of this rank, with peers as ranks of the world. `data` has the engine's
  // counts, with peers as data-parallel ranks.
  std::vector<OperationTraffic> operation_traffic(const std::vector<OperationTraffic>& data);
  // Returns a text of each part, in order. `mine` is the same on all ranks of a part. Collective.
  std::vector<std::string> of_each_part(const std::string& mine);

 private:
  Communicator& world_;
  const RankGrid shape_;
  const GridCoordinates at_;
  GridCommunicators communicators_;
  std::unique_ptr<Communicator> activations_;
  std::unique_ptr<Communicator> backward_;
  std::unique_ptr<Communicator> ends_;
};

// Errors: kInvalidArgument naming the option that does not divide `ranks`.
Status check_grid(int ranks, const Grid::Options& options);
// The same for all-reduce groups of `group` data-parallel ranks. Requires: check_grid() is ok.
Status check_order_group(int ranks, const Grid::Options& options, int group);

}  // namespace forebay::gpt
