// RankGrid: ranks arranged along three dimensions, and the communicators along each of them.
//
// Tensor parallelism is the fastest dimension, then data parallelism, then pipeline parallelism:
//
//   rank = tensor + tensor_parallel * (data + data_parallel * pipeline)
//
// So the ranks that exchange activations in every layer are neighbours, on one host where launchers number
// ranks host by host; those that reduce gradients come next, and a pipeline's stages, which exchange least,
// lie farthest apart.
#pragma once

#include <memory>

#include "forebay/communicator.h"

namespace forebay {

struct RankGridOptions {
  int world_size = 1;
  int tensor_parallel = 1;
  int pipeline_parallel = 1;
};

// Where a rank is, from zero in each dimension.
struct GridCoordinates {
  int tensor = 0;
  int data = 0;
  int pipeline = 0;
  friend bool operator==(const GridCoordinates&, const GridCoordinates&) = default;
};

class RankGrid {
 public:
  RankGrid() = default;  // Of one rank.

  // The data-parallel size is what the others leave. Errors: kInvalidArgument naming what does not divide.
  static Result<RankGrid> create(const RankGridOptions& options);

  int world_size() const noexcept { return tensor_parallel_ * data_parallel_ * pipeline_parallel_; }
  int tensor_parallel() const noexcept { return tensor_parallel_; }
  int data_parallel() const noexcept { return data_parallel_; }
  int pipeline_parallel() const noexcept { return pipeline_parallel_; }

  // Requires: 0 <= rank < world_size().
  GridCoordinates coordinates(int rank) const;
  // Requires: each coordinate is within its dimension.
  int rank(const GridCoordinates& coordinates) const;

 private:
  RankGrid(int tensor_parallel, int data_parallel, int pipeline_parallel)
      : tensor_parallel_(tensor_parallel),
        data_parallel_(data_parallel),
        pipeline_parallel_(pipeline_parallel) {}

  int tensor_parallel_ = 1;
  int data_parallel_ = 1;
  int pipeline_parallel_ = 1;
};

// This rank's communicator along each dimension, whose ranks are coordinates along it. They fail together
// with the world, which lives on in them.
struct GridCommunicators {
  std::unique_ptr<Communicator> tensor;
  std::unique_ptr<Communicator> data;
  std::unique_ptr<Communicator> pipeline;
};

// Collective over `world`; blocking. Errors: kInvalidArgument when the grid is of another size; else what
// Communicator::split says.
Result<GridCommunicators> split_grid(Communicator& world, const RankGrid& grid);

}  // namespace forebay
