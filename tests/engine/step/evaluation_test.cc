// Evaluations in strict order: they change no bit of the training, and send the bytes that the plan says.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "tests/engine/toy_cases.h"
#include "tests/offload/memory_store.h"

namespace forebay::testing {
namespace {

struct Below {
  Offload offload;
  Tier tier;
  double fraction;
};
constexpr Below kBelow[] = {{Offload::kNone, Tier::kPinned, 1.0},
                            {Offload::kOptimizer, Tier::kPinned, 0.5},
                            {Offload::kOptimizer, Tier::kFile, 1.0},
                            {Offload::kOptimizerAndParameters, Tier::kPinned, 1.0},
                            {Offload::kOptimizerAndParameters, Tier::kFile, 0.6}};

class Evaluation : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, Evaluation, ::testing::Range(0, 4));

// Passes before each step, and after the last.
constexpr int kPasses[] = {1, 0, 3, 2, 1};

// Compares the engine's traffic with the plan's. A step that follows an evaluation is spared some gathers.
void expect_planned(Engine& engine, const std::string& what) {
  const EngineStatistics measured = engine.statistics();
  const EvaluationBytes& planned = engine.plan().evaluation;
  std::uint64_t evaluations = 0;
  std::uint64_t steps = 0;
  for (std::size_t i = 0; i < std::size(kPasses); ++i) {
    const bool has_step = i + 1 < std::size(kPasses);
    if (kPasses[i] > 0) {
      const auto more = static_cast<std::uint64_t>(kPasses[i]) - 1;
      evaluations += planned.first.wire.sent + more * planned.next.wire.sent;
      if (has_step) steps -= planned.spared.wire.sent;
    }
    if (has_step) steps += measured.planned_wire_per_step.sent;
  }
  EXPECT_EQ(measured.evaluation_traffic.sent, evaluations) << what;
  EXPECT_EQ(measured.evaluation_traffic.received, evaluations) << what;
  EXPECT_EQ(measured.traffic.sent, steps) << what;
  EXPECT_EQ(measured.traffic.received, steps) << what;
  EXPECT_EQ(measured.peak, measured.planned) << what;
}

// The next update writes the parameters that it reads. The virtual clock moves on only while all threads
// wait.
TEST(EvaluationEnd, WaitsForTheTrainersStream) {
  ToyOptions options = options_for(1, DataType::kFloat32, 1);
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  run_ranks(1, world, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    const Stream stream = value_or_throw(rank.backend->stream_create());
    std::atomic<bool> has_read{false};
    trainer.engine().evaluation_begin();
    {
      const Lease lease = trainer.engine().forward(0, stream);
      throw_if_error(call_on(*rank.backend, stream, [&] {
        clock.sleep(std::chrono::milliseconds(1));
        has_read = true;
      }));
    }
    trainer.engine().evaluation_end();
    EXPECT_TRUE(has_read);
    throw_if_error(rank.backend->stream_synchronize(stream));
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

void check(const ToyOptions& options, const std::string& what) {
  SCOPED_TRACE(what);
  const ToyResult trained = run_toy(options);
  expect_same(trained, reference_toy(options), what);
  ToyResult evaluated;
  run_ranks(options.ranks, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    ToyResult mine;
    for (int step = 0; step <= options.steps; ++step) {
      for (int pass = 0; pass < kPasses[step]; ++pass) trainer.evaluate_all();
      if (step == options.steps) break;
      const StepResult outcome = trainer.step(step);
      mine.grad_norms.push_back(outcome.grad_norm.value_or(std::nan("")));
      mine.metrics.push_back(outcome.metric_sum);
    }
    expect_planned(trainer.engine(), what);
    trainer.collect(mine);
    if (rank.communicator->rank() == 0) evaluated = mine;
  });
  expect_same(evaluated, trained, what);
  EXPECT_EQ(evaluated.digest, trained.digest) << what;
}

TEST_P(Evaluation, ChangesNoBitAndSendsThePlannedBytes) {
  for (const Below& below : kBelow) {
    if (below.offload == Offload::kOptimizerAndParameters && GetParam() < 3) continue;
    for (const int ranks : {1, 3, 4}) {
      for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
        if (type == DataType::kBfloat16 && ranks == 4) continue;
        ToyOptions options = options_for(GetParam(), type, ranks);
        options.engine.offload = below.offload;
        options.engine.tier = below.tier;
        options.engine.offload_fraction = below.fraction;
        options.engine.staging_bytes = 8u << 20;
        options.hooks.make_store = [](int rank) {
          return make_memory_store(
              {.alignment_bytes = 4096, .order_seed = static_cast<std::uint64_t>(rank) + 1});
        };
        options.engine.micro_steps = ranks == 3 ? 2 : 1;
        options.engine.overlap = ranks != 4;
        check(options, "stage " + std::to_string(GetParam()) + ", " + std::to_string(ranks) + " ranks, " +
                           data_type_name(type) + ", " + offload_name(below.offload) + " to " +
                           tier_name(below.tier));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Evaluation, GoesBetweenStepsOfAPipelineStage) {
  ToyOptions options = options_for(GetParam(), DataType::kFloat32, 3);
  options.engine.micro_steps = 4;
  options.engine.forwards_ahead = 2;
  check(options, "two forward passes ahead");
}

TEST_P(Evaluation, GoesInHybridSharding) {
  ToyOptions options = options_for(GetParam(), DataType::kFloat32, 4);
  options.engine.group = 2;
  options.engine.shard_within_group = true;
  check(options, "groups of 2");
}

// A pass over units of 4096 elements: Psi (N-1)/N elements of 2 bytes are sent.
TEST(EvaluationBytes, AreThoseOfThePapersGather) {
  ModelShape model;
  for (int u = 0; u < 6; ++u)
    model.units.push_back({"u" + std::to_string(u), {{"p" + std::to_string(u), 4096}}});
  for (const int stage : {0, 1, 2, 3}) {
    PlanOptions options;
    options.ranks = 4;
    options.stage = stage;
    options.dtype = DataType::kBfloat16;
    const Plan plan = value_or_throw(make_plan(model, options));
    EXPECT_EQ(plan.evaluation.first.wire.sent, stage < 3 ? 0u : 6u * 4096 * 3 / 4 * 2) << stage;
    EXPECT_EQ(plan.evaluation.first.wire.received, plan.evaluation.first.wire.sent) << stage;
    // Two slots: the next pass finds its first units replaced.
    EXPECT_EQ(plan.evaluation.next.wire.sent, plan.evaluation.first.wire.sent) << stage;
  }
}

TEST(EvaluationCalls, OutOfTurnChangeNothing) {
  run_ranks(1, {}, [](Rank& rank) {
    EngineOptions options;
    options.optional_gradients = true;
    Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
    for (const char* name : {"u", "v"}) engine.add_parameter(engine.add_unit(name), name, 100);
    engine.commit();
    const Stream stream = value_or_throw(rank.backend->stream_create());
    const auto refused = [](const char* part, auto call) {
      try {
        call();
        ADD_FAILURE() << "not refused: " << part;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      }
    };
    const Hyperparameters hyperparameters{.groups = {{}}};
    refused("evaluation_end() needs", [&] { engine.evaluation_end(); });
    engine.evaluation_begin();
    refused("evaluation_begin() twice", [&] { engine.evaluation_begin(); });
    refused("out of order", [&] { static_cast<void>(engine.forward(1, stream)); });
    {
      const Lease lease = engine.forward(0, stream);
      refused("alive", [&] { engine.evaluation_end(); });
    }
    refused("in an evaluation", [&] { static_cast<void>(engine.backward(0, stream)); });
    refused("in an evaluation", [&] { engine.step_begin(); });
    refused("in an evaluation", [&] { static_cast<void>(engine.digest()); });
    refused("evaluation_end() is missing", [&] { engine.micro_step_begin(0); });
    refused("evaluation_end() is missing", [&] { static_cast<void>(engine.step(hyperparameters)); });
    engine.evaluation_end();  // After one unit of two.
    engine.step_begin();
    refused("is open", [&] { engine.evaluation_begin(); });
    engine.micro_step_begin(0);
    for (const int unit : {0, 1}) static_cast<void>(engine.forward(unit, stream));
    refused("is open", [&] { engine.evaluation_begin(); });
    for (const int unit : {1, 0}) static_cast<void>(engine.backward(unit, stream));
    EXPECT_EQ(engine.step(hyperparameters).grad_norm, 0.0);
    engine.evaluation_begin();
    engine.skip(0);
    static_cast<void>(engine.forward(1, stream));
    engine.evaluation_end();
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

}  // namespace
}  // namespace forebay::testing
