#include "forebay/rank_grid.h"

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "tests/support/local_world.h"

namespace forebay::testing {
namespace {

RankGrid grid_of(int world, int tensor, int pipeline) {
  return value_or_throw(
      RankGrid::create({.world_size = world, .tensor_parallel = tensor, .pipeline_parallel = pipeline}));
}

TEST(RankGrid, NumbersTensorRanksFirstThenDataThenPipeline) {
  const RankGrid grid = grid_of(12, 2, 3);

  EXPECT_EQ(grid.data_parallel(), 2);
  EXPECT_EQ(grid.world_size(), 12);
  EXPECT_EQ(grid.coordinates(0), (GridCoordinates{0, 0, 0}));
  EXPECT_EQ(grid.coordinates(1), (GridCoordinates{1, 0, 0}));
  EXPECT_EQ(grid.coordinates(2), (GridCoordinates{0, 1, 0}));
  EXPECT_EQ(grid.coordinates(4), (GridCoordinates{0, 0, 1}));
  EXPECT_EQ(grid.coordinates(11), (GridCoordinates{1, 1, 2}));
}

TEST(RankGrid, CoordinatesAndRanksAreInverse) {
  for (const int world : {1, 4, 6, 8, 12}) {
    for (int tensor = 1; tensor <= world; ++tensor) {
      for (int pipeline = 1; pipeline <= world; ++pipeline) {
        if (world % (tensor * pipeline) != 0) continue;
        const RankGrid grid = grid_of(world, tensor, pipeline);
        for (int rank = 0; rank < world; ++rank) EXPECT_EQ(grid.rank(grid.coordinates(rank)), rank);
      }
    }
  }
}

TEST(RankGrid, NamesTheSizeThatDoesNotDivide) {
  const struct {
    RankGridOptions options;
    std::string words;
  } cases[] = {
      {{0, 1, 1}, "world size 0; use 1 or more"},
      {{4, 0, 1}, "tensor-parallel size 0"},
      {{4, 1, -1}, "pipeline-parallel size -1"},
      {{6, 4, 1}, "the tensor-parallel size 4 does not divide the number of ranks, 6"},
      {{6, 1, 4}, "the pipeline-parallel size 4 does not divide the number of ranks, 6"},
      {{12, 4, 2},
       "the pipeline-parallel size 2 does not divide the number of tensor-parallel groups of 12 ranks, 3"},
  };
  for (const auto& [options, words] : cases) {
    const Status status = RankGrid::create(options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  }
}

// The world ranks that `communicator` joins, in its order.
std::vector<int> members(Communicator& communicator, int world_rank) {
  std::vector<int> all(static_cast<std::size_t>(communicator.size()));
  throw_if_error(communicator.exchange(std::as_bytes(std::span(&world_rank, 1)),
                                       std::as_writable_bytes(std::span(all))));
  return all;
}

TEST(RankGrid, SplitsTheWorldAlongEveryDimension) {
  const int grids[][3] = {{4, 2, 1}, {4, 2, 2}, {4, 1, 2}, {4, 4, 1},  {6, 3, 1},
                          {6, 2, 3}, {8, 2, 2}, {8, 1, 1}, {12, 2, 3}, {12, 3, 2}};
  for (const auto& [world, tensor, pipeline] : grids) {
    SCOPED_TRACE(std::to_string(world) + " ranks, " + std::to_string(tensor) + " tensor-parallel, " +
                 std::to_string(pipeline) + " pipeline-parallel");
    const RankGrid grid = grid_of(world, tensor, pipeline);
    run_ranks(world, {}, [&](Rank& rank) {
      const int mine = rank.communicator->rank();
      const GridCoordinates at = grid.coordinates(mine);

      const GridCommunicators all = value_or_throw(split_grid(*rank.communicator, grid));

      EXPECT_EQ(all.tensor->rank(), at.tensor);
      EXPECT_EQ(all.data->rank(), at.data);
      EXPECT_EQ(all.pipeline->rank(), at.pipeline);
      std::vector<int> expected;
      for (int i = 0; i < grid.tensor_parallel(); ++i)
        expected.push_back(grid.rank({i, at.data, at.pipeline}));
      EXPECT_EQ(members(*all.tensor, mine), expected);
      expected.clear();
      for (int i = 0; i < grid.data_parallel(); ++i)
        expected.push_back(grid.rank({at.tensor, i, at.pipeline}));
      EXPECT_EQ(members(*all.data, mine), expected);
      expected.clear();
      for (int i = 0; i < grid.pipeline_parallel(); ++i)
        expected.push_back(grid.rank({at.tensor, at.data, i}));
      EXPECT_EQ(members(*all.pipeline, mine), expected);
    });
  }
}

TEST(RankGrid, RefusesAWorldOfAnotherSize) {
  run_ranks(2, {}, [](Rank& rank) {
    const Status status = split_grid(*rank.communicator, grid_of(4, 2, 1)).status();

    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("a grid of 4 ranks over a communicator of 2"), std::string::npos)
        << status.message();
  });
}

}  // namespace
}  // namespace forebay::testing
