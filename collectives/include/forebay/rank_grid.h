// RankGrid: ranks arranged along three dimensions, and a communicator along each of them.
//
// Tensor parallelism is the fastest dimension, then data parallelism, then pipeline parallelism:
//
//   rank = tensor + tensor_parallel * (data + data_parallel * pipeline)
//
// So the ranks that exchange activations in every layer are neighbours, on one host where launchers number
// ranks host by host. The ranks that reduce gradients come next. Pipeline stages, which exchange least, lie
// farthest apart.
#pragma once

#include <memory>

#include "forebay/communicator.h"

namespace forebay {

struct RankGridOptions {
  int world_size = 1;
  int tensor_parallel = 1;
  int pipeline_parallel = 1;
};

// The place of a rank, from zero in each dimension.
struct GridCoordinates {
  int tensor = 0;
  int data = 0;
  int pipeline = 0;
  friend constexpr bool operator==(const GridCoordinates& a, const GridCoordinates& b) noexcept {
    return a.tensor == b.tensor && a.data == b.data && a.pipeline == b.pipeline;
  }
  friend constexpr bool operator!=(const GridCoordinates& a, const GridCoordinates& b) noexcept {
    return !(a == b);
  }
};

// Threads: any; it does not change.
class RankGrid {
 public:
  RankGrid() = default;  // One rank.

  // The data-parallel size is world_size / (tensor_parallel * pipeline_parallel).
  // Errors: kInvalidArgument naming the size that does not divide, or that is below 1.
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

// This rank's communicator along each dimension; a rank's number in one is its coordinate along that
// dimension. They fail together with the world, which may be destroyed before them.
struct GridCommunicators {
  std::unique_ptr<Communicator> tensor;
  std::unique_ptr<Communicator> data;
  std::unique_ptr<Communicator> pipeline;
};

// Splits `world` along the grid.
// Order:  collective over `world`; blocks.
// Errors: kInvalidArgument when the grid has another size than the world; those of Communicator::split.
Result<GridCommunicators> split_grid(Communicator& world, const RankGrid& grid);

}  // namespace forebay
