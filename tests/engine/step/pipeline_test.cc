// Pipeline stages: forward passes that run ahead of backward passes, and a unit that several stages share.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/toy_cases.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

std::string described(const ToyOptions& options) {
  return std::string(data_type_name(options.engine.dtype)) + ", stage " +
         std::to_string(options.engine.stage) + ", " + std::to_string(options.engine.micro_steps) +
         " micro-steps, " + std::to_string(options.engine.forwards_ahead) + " forward passes ahead";
}

TEST(ForwardPassesAhead, ChangeNoBitAtAnyStage) {
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
    for (const int micro_steps : {1, 2, 5}) {
      for (int stage = 0; stage < 4; ++stage) {
        ToyOptions options = options_for(stage, type, 3);
        options.engine.micro_steps = micro_steps;
        const ToyResult expected = reference_toy(options);
        for (const int ahead : {1, 2, 7}) {
          options.engine.forwards_ahead = ahead;
          expect_same(run_toy(options), expected, described(options));
        }
      }
    }
  }
}

TEST(ForwardPassesAhead, ChangeNoBitWhereEachRankAddsForItself) {
  for (const int stage : {0, 1}) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, 2);
    options.engine.accumulate = Accumulate::kLocal;
    options.engine.micro_steps = 4;
    const ToyResult expected = reference_toy(options);
    options.engine.forwards_ahead = 2;
    expect_same(run_toy(options), expected, described(options));
  }
}

TEST(ForwardPassesAhead, ChangeNoBitBelowTheDevice) {
  for (int stage = 0; stage < 4; ++stage) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, 2);
    options.engine.micro_steps = 3;
    const ToyResult expected = reference_toy(options);
    options.engine.forwards_ahead = 1;
    options.engine.offload = stage == 3 ? Offload::kOptimizerAndParameters : Offload::kOptimizer;
    options.engine.host_threads = 1;
    expect_same(run_toy(options), expected, described(options));
  }
}

// Some ranks skip some units in some micro-steps, and some ranks skip a whole micro-step.
TEST(ForwardPassesAhead, MaySkipUnits) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const int ahead : {0, 1, 2}) {
      ToyOptions options = options_for(stage, DataType::kFloat32, 3);
      options.engine.micro_steps = 4;
      options.skips = [](int rank, int step, int micro_step, int unit) {
        if (rank == 1 && micro_step == 1) return true;
        if (rank == 2 && step == 1) return true;
        if (rank == 0 && micro_step >= 2) return unit == 4 || unit == 0;
        return (rank + step + micro_step + unit) % 3 == 0 && unit != 0;
      };
      const ToyResult expected = reference_toy(options);
      options.engine.forwards_ahead = ahead;
      expect_same(run_toy(options), expected, described(options));
    }
  }
}

TEST(ForwardPassesAhead, MoveThePlannedBytes) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const int ahead : {0, 1, 3}) {
      ToyOptions options = options_for(stage, DataType::kBfloat16, 3);
      options.engine.micro_steps = 4;
      options.engine.forwards_ahead = ahead;
      options.steps = 3;
      const EngineStatistics s = run_toy(options).statistics;
      EXPECT_EQ(s.peak, s.planned) << described(options);
      EXPECT_EQ(s.traffic.sent, 3 * s.planned_wire_per_step.sent) << described(options);
      EXPECT_EQ(s.traffic.received, 3 * s.planned_wire_per_step.received) << described(options);
    }
  }
}

TEST(ForwardPassesAhead, ComeInOneOrderOnly) {
  ToyOptions options = options_for(3, DataType::kFloat32, 1);
  options.engine.micro_steps = 3;
  options.engine.forwards_ahead = 1;
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    Engine& engine = trainer.engine();
    const Stream stream = value_or_throw(rank.backend->stream_create());
    const auto message_of = [](const std::function<void()>& call) -> std::string {
      try {
        call();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
        return error.what();
      }
      return "nothing";
    };
    const auto expect_refused = [&](const std::function<void()>& call, const std::string& part) {
      const std::string message = message_of(call);
      EXPECT_NE(message.find(part), std::string::npos) << message;
    };
    const auto backward = [&] { static_cast<void>(engine.backward(4, stream)); };
    engine.step_begin();
    expect_refused(backward, "needs micro_step_begin()");
    trainer.forward_pass(0, 0);
    expect_refused(backward, "after the forward pass of micro-step 1");
    expect_refused([&] { engine.micro_step_begin(2); }, "the next of 3 micro-steps is 1");
    trainer.forward_pass(0, 1);
    expect_refused([&] { engine.micro_step_begin(2); }, "micro-step 0 has no backward pass");
    expect_refused([&] { static_cast<void>(engine.step({})); }, "micro-step 0 has no backward pass");
    trainer.backward_pass(0, 0);
    expect_refused(backward, "after the forward pass of micro-step 2");
    trainer.forward_pass(0, 2);
    trainer.backward_pass(0, 1);
    expect_refused([&] { engine.micro_step_begin(3); }, "micro-step 2 has no backward pass");
    trainer.backward_pass(0, 2);
    expect_refused([&] { engine.micro_step_begin(3); }, "the next of 3 micro-steps is 3");
    expect_refused(backward, "needs micro_step_begin()");
    EXPECT_FALSE(engine.step({.groups = options.groups}).skipped);
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

TEST(ForwardPassesAhead, AreNotFewerThanNone) {
  ToyOptions options = options_for(0, DataType::kFloat32, 1);
  options.engine.forwards_ahead = -1;
  EXPECT_THROW(run_toy(options), Error);
}

// A pipeline of two stages that share unit 0, each with `replicas` data-parallel ranks. The first ranks of
// the world are the first stage.
struct Pipeline {
  int replicas = 2;
  std::vector<std::vector<ToyUnit>> models;  // By stage.
  ToyOptions common;
  std::function<void(int stage, ToyOptions&)> change = [](int, ToyOptions&) {};
};

struct PipelineResult {
  std::vector<double> norms;
  std::vector<ToyResult> stages;
};

PipelineResult run_pipeline(const Pipeline& pipeline, int steps) {
  const auto stages = static_cast<int>(pipeline.models.size());
  PipelineResult result;
  result.stages.resize(pipeline.models.size());
  run_ranks(stages * pipeline.replicas, {}, [&](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const int stage = world_rank / pipeline.replicas;
    const int replica = world_rank % pipeline.replicas;
    const std::unique_ptr<Communicator> world = std::move(rank.communicator);
    rank.communicator = value_or_throw(world->split(stage, world_rank));
    const std::unique_ptr<Communicator> shared = value_or_throw(world->split(replica, stage));
    ToyOptions options = pipeline.common;
    options.units = pipeline.models[static_cast<std::size_t>(stage)];
    options.engine.grid = world.get();
    options.first_unit_shared_over = shared.get();
    options.asks_norm = options.engine.stage % 2 == 0;
    pipeline.change(stage, options);
    {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      for (int step = 0; step < steps; ++step) {
        const StepResult outcome = trainer.step(step);
        if (world_rank == 0) result.norms.push_back(outcome.grad_norm.value_or(std::nan("")));
      }
      ToyResult mine;
      trainer.collect(mine);
      EXPECT_EQ(mine.statistics.peak, mine.statistics.planned);
      const auto count = static_cast<std::uint64_t>(steps);
      EXPECT_EQ(mine.statistics.traffic.sent, count * mine.statistics.planned_wire_per_step.sent);
      EXPECT_EQ(mine.statistics.traffic.received, count * mine.statistics.planned_wire_per_step.received);
      if (replica == 0) result.stages[static_cast<std::size_t>(stage)] = mine;
    }
  });
  return result;
}

// Both stages give the shared unit the same gradient, so the sum is exactly twice as much: the gradient in
// one model in which another unit uses it a second time.
std::vector<ToyUnit> first_stage() {
  return {{{{1500}, {40}}, {}, false}, {{{700, 1}, {300}}, {}, true}};
}
std::vector<ToyUnit> last_stage() {
  return {{{{1500}, {40}}, {}, false}, {{{64}}, {}, true}, {{{9}}, {}, true}};
}
std::vector<ToyUnit> twice() {
  std::vector<ToyUnit> units = first_stage();
  units[1].tied = {{0, 0}, {0, 1}};
  return units;
}

class SharedUnits : public ::testing::TestWithParam<int> {};

TEST_P(SharedUnits, HaveTheSumOfTheStagesGradients) {
  const int replicas = GetParam();
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
    for (const int micro_steps : {1, 3}) {
      for (int stage = 0; stage < 4; ++stage) {
        for (const std::uint64_t bucket : {std::uint64_t{5000}, std::uint64_t{1} << 20}) {
          Pipeline pipeline;
          pipeline.replicas = replicas;
          pipeline.models = {first_stage(), last_stage()};
          pipeline.common = options_for(stage, type, replicas);
          pipeline.common.clip = 0;
          pipeline.common.engine.micro_steps = micro_steps;
          pipeline.common.engine.bucket_bytes = bucket;
          pipeline.change = [](int place, ToyOptions& o) {
            o.engine.forwards_ahead = place == 0 ? 1 : 0;
            // The second use reads the weights; the first stage's backward pass does not.
            o.units[0].backward_reads_parameters = true;
          };
          const PipelineResult actual = run_pipeline(pipeline, 3);

          ToyOptions whole = pipeline.common;
          whole.units = twice();
          whole.units[0].backward_reads_parameters = true;
          whole.steps = 3;
          const ToyResult expected = reference_toy(whole);
          const std::string what = described(pipeline.common);
          EXPECT_EQ(actual.stages[0].masters, expected.masters) << what;
          ASSERT_EQ(actual.stages[1].masters.size(), 4u);
          EXPECT_EQ(actual.stages[1].masters[0], expected.masters[0]) << what;
          EXPECT_EQ(actual.stages[1].masters[1], expected.masters[1]) << what;

          // The shared unit counts once: the rest is the norm of a model of the last stage's own units.
          ToyOptions rest = pipeline.common;
          rest.units = last_stage();
          rest.units[0].parameters = {{1, 0, true},
                                      {1, 0, true}};  // The other parameters keep their numbers.
          rest.steps = 1;
          const double own = reference_toy(rest).grad_norms[0];
          const double norm = std::sqrt(std::pow(expected.grad_norms[0], 2) + own * own);
          EXPECT_NEAR(actual.norms[0], norm, 1e-12 * norm) << what;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, SharedUnits, ::testing::Values(1, 2, 3));

TEST(SharedUnits, StayOnTheDeviceWithEveryOffload) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const int micro_steps : {1, 2}) {
      Pipeline pipeline;
      pipeline.models = {first_stage(), last_stage()};
      pipeline.common = options_for(stage, DataType::kBfloat16, 2);
      pipeline.common.engine.micro_steps = micro_steps;
      const PipelineResult expected = run_pipeline(pipeline, 3);
      pipeline.common.engine.offload = stage == 3 ? Offload::kOptimizerAndParameters : Offload::kOptimizer;
      pipeline.common.engine.host_threads = 1;
      const PipelineResult actual = run_pipeline(pipeline, 3);
      EXPECT_EQ(actual.norms, expected.norms) << "stage " << stage;
      for (std::size_t place : {0, 1})
        EXPECT_EQ(actual.stages[place].masters, expected.stages[place].masters) << "stage " << stage;
    }
  }
}

TEST(SharedUnits, HaveTheSameBitsInGroups) {
  Pipeline pipeline;
  pipeline.replicas = 4;
  pipeline.models = {first_stage(), last_stage()};
  pipeline.common = options_for(0, DataType::kBfloat16, 4);
  pipeline.common.engine.group = 2;
  const PipelineResult expected = run_pipeline(pipeline, 2);
  for (int stage = 1; stage < 4; ++stage) {
    pipeline.common.engine.stage = stage;
    pipeline.common.engine.shard_within_group = true;
    const PipelineResult actual = run_pipeline(pipeline, 2);
    EXPECT_EQ(actual.norms, expected.norms) << "stage " << stage;
    for (std::size_t place : {0, 1})
      EXPECT_EQ(actual.stages[place].masters, expected.stages[place].masters) << "stage " << stage;
  }
}

// Where the stages' gradients are equal, their sum needs no rounding.
TEST(SharedUnits, RoundTheSumOfDifferentGradientsAlikeAtEveryStage) {
  Pipeline pipeline;
  pipeline.models = {first_stage(), last_stage()};
  pipeline.common = options_for(0, DataType::kBfloat16, 2);
  pipeline.common.engine.micro_steps = 2;
  pipeline.change = [](int place, ToyOptions& o) {
    o.disturbance = [place](int, int) { return place == 1 ? 0.37f : 0.0f; };
  };
  const PipelineResult expected = run_pipeline(pipeline, 2);
  for (int stage = 1; stage < 4; ++stage) {
    pipeline.common.engine.stage = stage;
    const PipelineResult actual = run_pipeline(pipeline, 2);
    EXPECT_EQ(actual.norms, expected.norms) << "stage " << stage;
    for (std::size_t place : {0, 1})
      EXPECT_EQ(actual.stages[place].masters, expected.stages[place].masters) << "stage " << stage;
  }
}

TEST(SharedUnits, OverflowOnBothStagesWhereOneDoes) {
  Pipeline pipeline;
  pipeline.models = {first_stage(), last_stage()};
  pipeline.common = options_for(2, DataType::kFloat16, 2);
  pipeline.change = [](int place, ToyOptions& o) {
    o.disturbance = [place](int rank, int step) {
      return place == 1 && rank == 1 && step == 1 ? std::numeric_limits<float>::infinity() : 0.0f;
    };
  };
  const PipelineResult actual = run_pipeline(pipeline, 3);
  EXPECT_TRUE(std::isnan(actual.norms[1]));
  EXPECT_EQ(actual.stages[0].masters[0], actual.stages[1].masters[0]);
  for (const ToyResult& stage : actual.stages) EXPECT_EQ(stage.statistics.applied_steps, 2u);
}

void expect_refused_where_stages_differ(const std::function<void(ToyParameter&)>& change) {
  Pipeline pipeline;
  pipeline.replicas = 2;
  pipeline.models = {first_stage(), last_stage()};
  change(pipeline.models[1][0].parameters[0]);
  pipeline.common = options_for(1, DataType::kFloat32, 2);
  std::atomic<int> refused{0};
  run_ranks(4, {}, [&](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const std::unique_ptr<Communicator> world = std::move(rank.communicator);
    rank.communicator = value_or_throw(world->split(world_rank / 2, world_rank));
    const std::unique_ptr<Communicator> shared = value_or_throw(world->split(world_rank % 2, world_rank));
    ToyOptions options = pipeline.common;
    options.units = pipeline.models[static_cast<std::size_t>(world_rank / 2)];
    options.engine.grid = world.get();
    options.first_unit_shared_over = shared.get();
    try {
      ToyTrainer trainer(options, rank);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("unit:unit0"), std::string::npos) << error.what();
      ++refused;
    }
  });
  EXPECT_EQ(refused, 4);
}

TEST(SharedUnits, AreRefusedWhereStagesDiffer) {
  expect_refused_where_stages_differ([](ToyParameter& parameter) { parameter.count = 1501; });
  expect_refused_where_stages_differ([](ToyParameter& parameter) { parameter.group = 1; });
  expect_refused_where_stages_differ([](ToyParameter& parameter) { parameter.frozen = true; });
}

// Data-parallel ranks compare their values, and stages that share a unit do too.
TEST(SharedUnits, AreRefusedWhereStagesWereGivenOtherValues) {
  const TemporaryDirectory directory;
  const std::function<void(Engine&, int)> changes[] = {
      [](Engine& engine, int stage) {
        engine.set_parameter({0, 0}, std::vector<float>(engine.get_parameter({0, 0}).size(), 1.0f + stage));
      },
      [](Engine& engine, int stage) {
        if (stage == 0) return;
        for (const bool frozen : {true, false}) engine.freeze({0, 0}, frozen);
      },
      [](Engine& engine, int stage) {
        if (stage == 1) engine.reset_moments();
      }};
  for (std::size_t i = 0; i < 6; ++i) {
    const bool saves = i % 2 == 1;
    Pipeline pipeline;
    pipeline.replicas = 2;
    pipeline.models = {first_stage(), last_stage()};
    pipeline.common = options_for(1, DataType::kFloat32, 2);
    std::atomic<int> refused{0};
    run_ranks(4, {}, [&](Rank& rank) {
      const int world_rank = rank.communicator->rank();
      const int stage = world_rank / 2;
      const std::unique_ptr<Communicator> world = std::move(rank.communicator);
      rank.communicator = value_or_throw(world->split(stage, world_rank));
      const std::unique_ptr<Communicator> shared = value_or_throw(world->split(world_rank % 2, world_rank));
      ToyOptions options = pipeline.common;
      options.units = pipeline.models[static_cast<std::size_t>(stage)];
      options.engine.grid = world.get();
      options.first_unit_shared_over = shared.get();
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      Engine& engine = trainer.engine();
      changes[i / 2](engine, stage);
      try {
        if (saves) {
          engine.save_state(directory.path(), "");
        } else {
          static_cast<void>(trainer.step(0));
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find("ranks 0 and 2 of the grid"), std::string::npos)
            << error.what();
        ++refused;
      }
      if (i != 1) return;
      engine.set_parameter({0, 0}, std::vector<float>(engine.get_parameter({0, 0}).size(), 3.0f));
      EXPECT_FALSE(trainer.step(0).skipped) << "the engine goes on, with equal values";
    });
    EXPECT_EQ(refused, 4) << i;
  }
}

TEST(SharedUnits, NeedAGridAndAreNotSkipped) {
  run_ranks(2, {}, [](Rank& rank) {
    const int world_rank = rank.communicator->rank();
    const std::unique_ptr<Communicator> world = std::move(rank.communicator);
    rank.communicator = value_or_throw(world->split(world_rank, 0));
    const std::unique_ptr<Communicator> shared = value_or_throw(world->split(0, world_rank));
    ToyOptions options = options_for(1, DataType::kFloat32, 1);
    options.units = first_stage();
    options.first_unit_shared_over = shared.get();
    EXPECT_THROW(ToyTrainer(options, rank), Error);
    options.engine.grid = world.get();
    options.engine.order_of_units = OrderOfUnits::kRecorded;
    EXPECT_THROW(ToyTrainer(options, rank), Error);
    options.engine.order_of_units = OrderOfUnits::kStrict;
    {
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options.engine);
      const UnitId unit = engine.add_unit("u");
      for (const UnitId missing : {unit - 1, unit + 1}) EXPECT_THROW(engine.share(missing, *shared), Error);
      engine.share(unit, *shared);
      EXPECT_THROW(engine.share(unit, *shared), Error) << "twice";
    }
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().step_begin();
    trainer.engine().micro_step_begin(0);
    EXPECT_THROW(trainer.engine().skip(0), Error);
    throw_if_error(world->barrier());
  });
}

}  // namespace
}  // namespace forebay::testing
