#include "forebay/rank_grid.h"

#include <string>
#include <utility>

#include "forebay/check.h"

namespace forebay {

Result<RankGrid> RankGrid::create(const RankGridOptions& o) {
  const auto must_be_positive = [&](const char* what, int value) {
    return invalid_argument("a grid of ranks with ", what, " ", value, "; use 1 or more");
  };
  if (o.world_size < 1) return must_be_positive("world size", o.world_size);
  if (o.tensor_parallel < 1) return must_be_positive("tensor-parallel size", o.tensor_parallel);
  if (o.pipeline_parallel < 1) return must_be_positive("pipeline-parallel size", o.pipeline_parallel);
  const auto not_divided = [&](int whole, const std::string& what, int by, const char* dimension) {
    return invalid_argument("the ", dimension, "-parallel size ", by, " does not divide ", what, " ", whole,
                            "; give a divisor of it");
  };
  if (o.world_size % o.tensor_parallel != 0)
    return not_divided(o.world_size, "the number of ranks,", o.tensor_parallel, "tensor");
  const int groups = o.world_size / o.tensor_parallel;
  if (groups % o.pipeline_parallel != 0) {
    return not_divided(groups,
                       o.tensor_parallel == 1 ? "the number of ranks,"
                                              : "the number of tensor-parallel groups of " +
                                                    std::to_string(o.world_size) + " ranks,",
                       o.pipeline_parallel, "pipeline");
  }
  return RankGrid(o.tensor_parallel, groups / o.pipeline_parallel, o.pipeline_parallel);
}

GridCoordinates RankGrid::coordinates(int rank) const {
  FOREBAY_CHECK(rank >= 0 && rank < world_size(), "rank %d of a grid of %d", rank, world_size());
  const int group = rank / tensor_parallel_;
  return {
      .tensor = rank % tensor_parallel_, .data = group % data_parallel_, .pipeline = group / data_parallel_};
}

int RankGrid::rank(const GridCoordinates& c) const {
  FOREBAY_CHECK(c.tensor >= 0 && c.tensor < tensor_parallel_ && c.data >= 0 && c.data < data_parallel_ &&
                    c.pipeline >= 0 && c.pipeline < pipeline_parallel_,
                "(%d, %d, %d) in a grid of %d x %d x %d", c.tensor, c.data, c.pipeline, tensor_parallel_,
                data_parallel_, pipeline_parallel_);
  return c.tensor + tensor_parallel_ * (c.data + data_parallel_ * c.pipeline);
}

Result<GridCommunicators> split_grid(Communicator& world, const RankGrid& grid) {
  if (world.size() != grid.world_size()) {
    return invalid_argument("a grid of ", grid.world_size(), " ranks over a communicator of ", world.size(),
                            "; make one of that size");
  }
  // A line of ranks along a dimension is named by the rank at its beginning.
  const GridCoordinates mine = grid.coordinates(world.rank());
  const auto along = [&](int GridCoordinates::*dimension) {
    GridCoordinates first = mine;
    first.*dimension = 0;
    return world.split(grid.rank(first), mine.*dimension);
  };
  GridCommunicators all;
  for (const auto& [dimension, communicator] :
       {std::pair{&GridCoordinates::tensor, &all.tensor}, std::pair{&GridCoordinates::data, &all.data},
        std::pair{&GridCoordinates::pipeline, &all.pipeline}}) {
    FOREBAY_ASSIGN_OR_RETURN(*communicator, along(dimension));
  }
  return all;
}

}  // namespace forebay
