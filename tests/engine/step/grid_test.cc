// Engines of a model divided over tensor- or pipeline-parallel ranks take one decision about each step.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/engine/toy_cases.h"

namespace forebay::testing {
namespace {

// The rank's communicator becomes that of every second rank. Returns the one of all.
std::unique_ptr<Communicator> split_in_two(Rank& rank) {
  std::unique_ptr<Communicator> world = std::move(rank.communicator);
  rank.communicator = value_or_throw(world->split(world->rank() % 2, world->rank()));
  return world;
}

// A grid of `parts` model parts times `replicas` data-parallel ranks. Consecutive ranks have different parts.
struct Grid {
  int parts = 2;
  int replicas = 2;
  int stage = 0;
  // The model of each part. The noise of a rank does not depend on its part.
  std::vector<std::vector<ToyUnit>> models;
  std::function<float(int part, int replica, int step)> disturbance = [](int, int, int) { return 0.0f; };
  bool first_counts_alone = false;  // Only the first part counts replicated parameters.
  std::function<void(EngineOptions&)> change = [](EngineOptions&) {};
};

struct GridResult {
  std::vector<double> norms;  // NaN where skipped.
  std::vector<double> metrics;
  std::vector<ToyResult> parts;  // Replica 0.
};

GridResult run_grid(const Grid& grid, int steps, const WorldOptions& world_options = {}) {
  GridResult result;
  result.parts.resize(static_cast<std::size_t>(grid.parts));
  run_ranks(grid.parts * grid.replicas, world_options, [&](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const int part = world_rank % grid.parts;
    const std::unique_ptr<Communicator> world = std::move(rank.communicator);
    rank.communicator = value_or_throw(world->split(part, world_rank));
    ToyOptions options = options_for(grid.stage, DataType::kFloat32, grid.replicas);
    options.units = grid.models[static_cast<std::size_t>(part)];
    options.engine.grid = world.get();
    options.engine.counts_replicated = !grid.first_counts_alone || part == 0;
    options.asks_norm = grid.stage % 2 == 1;
    options.disturbance = [&](int replica, int step) { return grid.disturbance(part, replica, step); };
    grid.change(options.engine);
    {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      for (int step = 0; step < steps; ++step) {
        const StepResult outcome = trainer.step(step);
        if (world_rank != 0) continue;
        result.norms.push_back(outcome.grad_norm.value_or(std::nan("")));
        result.metrics.push_back(outcome.metric_sum);
      }
      ToyResult mine;
      trainer.collect(mine);
      EXPECT_EQ(mine.statistics.peak, mine.statistics.planned);
      // After a skipped step fewer units are gathered.
      if (mine.statistics.applied_steps == mine.statistics.attempted_steps) {
        EXPECT_EQ(mine.statistics.traffic.sent,
                  static_cast<std::uint64_t>(steps) * mine.statistics.planned_wire_per_step.sent);
      }
      if (world_rank < grid.parts) result.parts[static_cast<std::size_t>(part)] = mine;
    }
  });
  return result;
}

ToyResult alone(int stage, int replicas, const std::vector<ToyUnit>& model, int steps) {
  ToyOptions options = options_for(stage, DataType::kFloat32, replicas);
  options.units = model;
  options.steps = steps;
  return run_toy(options);
}

std::vector<ToyUnit> replicated(std::vector<ToyUnit> units) {
  for (ToyUnit& unit : units) {
    for (ToyParameter& parameter : unit.parameters) parameter.replicated = true;
  }
  return units;
}

TEST(EngineGrid, CountsReplicatedParametersOnce) {
  for (const int replicas : {2, 3}) {
    for (int stage = 0; stage < 4; ++stage) {
      Grid grid;
      grid.replicas = replicas;
      grid.stage = stage;
      grid.models.assign(2, replicated(awkward_units()));
      grid.first_counts_alone = true;
      const GridResult actual = run_grid(grid, 3);
      const ToyResult expected = alone(stage, replicas, awkward_units(), 3);
      EXPECT_EQ(actual.norms, expected.grad_norms) << "stage " << stage;
      // Parameters that another rank counts are updated, too.
      for (const ToyResult& part : actual.parts) EXPECT_EQ(part.masters, expected.masters);
    }
  }
}

// Elements that another part counts are zero only while the norm is taken, which is slow on the virtual
// clock.
TEST(EngineGrid, SendsReplicatedParametersWhole) {
  for (int stage = 0; stage < 4; ++stage) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    world.local.latency = std::chrono::milliseconds(1);
    world.script.kernel_duration = [](const char* kernel) {
      return std::chrono::milliseconds(std::string_view(kernel) == "forebay_norm" ? 5 : 0);
    };
    Grid grid;
    grid.stage = stage;
    grid.models.assign(2, replicated(awkward_units()));
    grid.first_counts_alone = true;
    const GridResult actual = run_grid(grid, 2, world);
    const ToyResult expected = alone(stage, 2, awkward_units(), 2);
    EXPECT_EQ(actual.norms, expected.grad_norms) << "stage " << stage;
    for (const ToyResult& part : actual.parts) EXPECT_EQ(part.masters, expected.masters) << "stage " << stage;
  }
}

TEST(EngineGrid, CountsReplicatedPartsOfOffloadedUnitsOnce) {
  for (const int micro_steps : {1, 2}) {
    Grid grid;
    grid.stage = 2;
    grid.models.assign(2, replicated(awkward_units()));
    grid.first_counts_alone = true;
    grid.change = [&](EngineOptions& options) {
      options.micro_steps = micro_steps;
      options.offload = Offload::kOptimizer;
      options.host_threads = 1;
    };
    const GridResult actual = run_grid(grid, 3);
    ToyOptions options = options_for(2, DataType::kFloat32, 2);
    options.engine.micro_steps = micro_steps;
    options.steps = 3;
    const ToyResult expected = run_toy(options);
    EXPECT_EQ(actual.norms, expected.grad_norms);
    for (const ToyResult& part : actual.parts) EXPECT_EQ(part.masters, expected.masters);
  }
}

TEST(EngineGrid, CountsOnlySomeParametersTwice) {
  // The second parameter of each unit is replicated: the sum of squares is that of one whole model and of
  // another model without these parameters.
  std::vector<ToyUnit> units = {{{{900}, {333}, {64}}, {}, true}, {{{100}, {5000}, {7}}, {}, true}};
  for (ToyUnit& unit : units) unit.parameters[1].replicated = true;
  for (int stage = 0; stage < 4; ++stage) {
    Grid grid;
    grid.stage = stage;
    grid.models.assign(2, units);
    grid.first_counts_alone = true;
    const GridResult once = run_grid(grid, 1);
    grid.first_counts_alone = false;
    const GridResult twice = run_grid(grid, 1);
    const double whole = alone(stage, 2, units, 1).grad_norms[0];
    EXPECT_DOUBLE_EQ(twice.norms[0] * twice.norms[0], 2 * whole * whole);
    EXPECT_LT(once.norms[0], twice.norms[0] * 0.9);
    EXPECT_GT(once.norms[0], whole * 1.01);
  }
}

TEST(EngineGrid, TakesTheNormOverAllPartsAndSkipsForAll) {
  for (int stage = 0; stage < 4; ++stage) {
    Grid grid;
    grid.stage = stage;
    grid.replicas = 3;
    grid.models.assign(2, awkward_units());
    // Only one rank of the second part.
    grid.disturbance = [](int part, int replica, int step) {
      return part == 1 && replica == 2 && step == 1 ? std::numeric_limits<float>::infinity() : 0.0f;
    };
    const GridResult actual = run_grid(grid, 3);
    EXPECT_TRUE(std::isnan(actual.norms[1]));
    const ToyResult expected = alone(stage, 3, awkward_units(), 1);
    EXPECT_DOUBLE_EQ(actual.norms[0], std::sqrt(2.0) * expected.grad_norms[0]);
    EXPECT_DOUBLE_EQ(actual.metrics[0], 2 * expected.metrics[0]);
    for (const ToyResult& part : actual.parts) {
      EXPECT_EQ(part.statistics.attempted_steps, 3u);
      EXPECT_EQ(part.statistics.applied_steps, 2u);
    }
  }
}

TEST(EngineGrid, StopsAllPartsWhereOneRankAsks) {
  run_ranks(4, {}, [](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const std::unique_ptr<Communicator> world = split_in_two(rank);
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, EngineOptions{{}, world.get()});
    const UnitId unit = engine.add_unit("unit");
    engine.add_parameter(unit, "weight", 100);
    engine.commit();
    for (const bool asks : {false, true}) {
      engine.step_begin();
      engine.micro_step_begin(0);
      engine.skip(unit);
      Hyperparameters hyperparameters{.groups = {{}}};
      hyperparameters.stop = asks && world_rank == 3;
      EXPECT_EQ(engine.step(hyperparameters).stop, asks) << "rank " << world_rank;
    }
  });
}

TEST(EngineGrid, HasPartsOfDifferentUnits) {
  const std::vector<ToyUnit> units = awkward_units();
  for (int stage = 0; stage < 4; ++stage) {
    Grid grid;
    grid.stage = stage;
    grid.parts = 3;
    grid.models = {{units[1], units[2]}, {units[3]}, {units[1], units[2], units[3], units[2]}};
    const GridResult actual = run_grid(grid, 1);
    double squares = 0;
    for (const auto& model : grid.models) squares += std::pow(alone(stage, 2, model, 1).grad_norms[0], 2);
    EXPECT_NEAR(actual.norms[0], std::sqrt(squares), 1e-12 * std::sqrt(squares)) << "stage " << stage;
  }
}

TEST(EngineGrid, TellsAllPartsThatOneHasTooLittleMemory) {
  std::atomic<int> refused{0};
  run_ranks(4, {}, [&](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const std::unique_ptr<Communicator> world = split_in_two(rank);
    ToyOptions options = options_for(0, DataType::kFloat32, 2);
    options.engine.grid = world.get();
    if (world_rank % 2 == 1) options.engine.memory_bytes = 1;
    try {
      ToyTrainer trainer(options, rank);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kOutOfMemory) << error.what();
      ++refused;
    }
  });
  EXPECT_EQ(refused, 4);
}

// Two parts of two ranks. `change` changes the options of the `odd` ranks.
void expect_refusal(const std::string& named, const std::function<bool(int)>& odd,
                    const std::function<void(EngineOptions&)>& change) {
  SCOPED_TRACE(named);
  std::atomic<int> refused{0};
  run_ranks(4, {}, [&](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const int part = world_rank % 2;
    const std::unique_ptr<Communicator> world = std::move(rank.communicator);
    rank.communicator = value_or_throw(world->split(part, world_rank));
    ToyOptions options = options_for(2, DataType::kFloat32, 2);
    options.engine.grid = world.get();
    options.engine.agreement = {{"--text", "42"}};
    if (odd(world_rank)) change(options.engine);
    try {
      const ToyTrainer trainer(options, rank);
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), StatusCode::kInvalidArgument);
      EXPECT_NE(error.status().message().find(named), std::string::npos) << error.status().message();
      ++refused;
    }
    EXPECT_TRUE(world->barrier().ok()) << "a refused commit breaks the communicator";
  });
  EXPECT_EQ(refused, 4);
}

TEST(EngineGrid, TellsAllPartsWhichOptionDiffersInOne) {
  const auto last = [](int rank) { return rank == 3; };
  const auto second_part = [](int rank) { return rank % 2 == 1; };
  for (const std::function<bool(int)>& odd : {std::function<bool(int)>(last), std::function(second_part)}) {
    expect_refusal("beta1", odd, [](EngineOptions& options) { options.beta1 = 0.5; });
    expect_refusal("stage", odd, [](EngineOptions& options) { options.stage = 1; });
    expect_refusal("micro-steps", odd, [](EngineOptions& options) { ++options.micro_steps; });
    expect_refusal("--text", odd, [](EngineOptions& options) { options.agreement[0].second = "43"; });
  }
}

TEST(EngineGrid, TellsAllPartsThatOneGaveOtherHyperparameters) {
  const auto refusals = [](const std::function<void(Hyperparameters&)>& change) {
    std::atomic<int> refused{0};
    run_ranks(4, {}, [&](Rank& rank) {
      const int world_rank = rank.communicator->rank();
      const std::unique_ptr<Communicator> world = split_in_two(rank);
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, EngineOptions{{}, world.get()});
      const UnitId unit = engine.add_unit("unit");
      engine.add_parameter(unit, "weight", 100);
      engine.commit();
      // Parts have different weights.
      engine.set_parameter({unit, 0}, std::vector<float>(100, static_cast<float>(world_rank % 2)));
      engine.step_begin();
      engine.micro_step_begin(0);
      engine.skip(unit);
      Hyperparameters hyperparameters{.groups = {{}}};
      if (world_rank % 2 == 1) change(hyperparameters);
      try {
        static_cast<void>(engine.step(hyperparameters));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find("the ranks of the grid gave different values"),
                  std::string::npos)
            << error.what();
        ++refused;
      }
    });
    return refused.load();
  };
  EXPECT_EQ(refusals([](Hyperparameters& hyperparameters) { hyperparameters.groups[0].lr = 0.5; }), 4);
  EXPECT_EQ(refusals([](Hyperparameters& hyperparameters) { hyperparameters.clip = 0.5; }), 4);
  EXPECT_EQ(refusals([](Hyperparameters&) {}), 0);
}

TEST(EngineGrid, AbandonsAStepOnAllPartsWhereOneDoes) {
  WorldOptions world_options;
  world_options.local.deadline = std::chrono::seconds(5);
  run_ranks(4, world_options, [](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const int part = world_rank % 2;
    const std::unique_ptr<Communicator> world = std::move(rank.communicator);
    rank.communicator = value_or_throw(world->split(part, world_rank));
    ToyOptions options = options_for(2, DataType::kFloat32, 2);
    options.engine.order_of_units = OrderOfUnits::kRecorded;
    options.engine.grid = world.get();
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    EXPECT_FALSE(trainer.step(0).abandoned);
    const std::string digest = trainer.engine().digest();
    trainer.engine().step_begin();
    trainer.run_recorded_passes(1);
    if (part == 1) {
      trainer.engine().abandon();
    } else {
      EXPECT_TRUE(trainer.engine().step({.groups = options.groups}).abandoned);
    }
    EXPECT_EQ(trainer.engine().attempted_steps(), 1u);
    EXPECT_EQ(trainer.engine().digest(), digest);
    EXPECT_FALSE(trainer.step(2).abandoned);
    throw_if_error(world->barrier());
  });
}

// On the virtual clock a call of the clock takes a millisecond on each rank but one, as if the link were
// slower. The first rank of a part measures for the others.
TEST(EngineGrid, TakesTheSmallestBucketThatAPartChooses) {
  using namespace std::chrono_literals;
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world_options;
  world_options.clock = &clock;
  world_options.local.latency = 100us;
  world_options.local.bytes_per_second = 1e9;
  std::vector<std::uint64_t> buckets(4);
  std::vector<double> latencies(4);
  run_ranks(4, world_options, [&](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const std::unique_ptr<Communicator> world = split_in_two(rank);
    ToyOptions options = options_for(2, DataType::kFloat32, 2);
    options.engine.grid = world.get();
    options.engine.bucket_auto = true;
    int calls = 0;
    options.hooks.now = [&] {
      return std::chrono::nanoseconds(clock.now()) + (world_rank == 0 ? 0 : ++calls) * 1ms;
    };
    {
      ToyTrainer trainer(options, rank);
      buckets[static_cast<std::size_t>(world_rank)] = trainer.engine().plan().options.bucket_bytes;
      latencies[static_cast<std::size_t>(world_rank)] =
          trainer.engine().statistics().wire_speed.latency_seconds;
    }
    throw_if_error(world->barrier());
  });
  EXPECT_LT(latencies[0], 0.5e-3);
  EXPECT_EQ(latencies[2], latencies[0]);
  EXPECT_GT(latencies[1], 1e-3);
  EXPECT_EQ(latencies[3], latencies[1]);
  EXPECT_EQ(buckets, std::vector<std::uint64_t>(4, 4u << 20));
}

TEST(EngineGrid, LeavesActivationsTheRoomOfTheTightestRank) {
  std::vector<std::uint64_t> rooms(6);
  for (const std::uint64_t more : {0, 1}) {
    std::atomic<int> refused{0};
    run_ranks(6, {}, [&](Rank& rank) {
      const int world_rank = rank.communicator->rank();
      const std::unique_ptr<Communicator> world = std::move(rank.communicator);
      rank.communicator = value_or_throw(world->split(world_rank % 3, world_rank));
      EngineOptions options{{.stage = 2}, world.get()};
      // The part of one unit has the least room, and gathers the norms of all units of the others.
      const auto part = static_cast<std::uint64_t>(world_rank % 3);
      options.memory_bytes =
          (8u << 20) + part * (16u << 20) + static_cast<std::uint64_t>(world_rank) * 100'000;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      for (std::uint64_t u = 0; u <= 100 * part; ++u)
        engine.add_parameter(engine.add_unit("unit" + std::to_string(u)), "weight" + std::to_string(u), 64);

      const std::uint64_t room = engine.activation_room();
      engine.declare_activations(room + more);
      try {
        engine.commit();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kOutOfMemory) << error.what();
        ++refused;
      }

      rooms[static_cast<std::size_t>(world_rank)] = room;
    });
    EXPECT_EQ(refused, more == 0 ? 0 : 6);
    EXPECT_GT(rooms[0], 0u);
    EXPECT_EQ(rooms, std::vector<std::uint64_t>(6, rooms[0]));
  }
}

}  // namespace
}  // namespace forebay::testing
