// Buckets: small units share one, a large unit takes several, and the next is on the wire while the sum of
// one is averaged. The result does not change by a bit.

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>

#include "tests/engine/toy_cases.h"

namespace forebay::testing {
namespace {

using namespace std::chrono_literals;

// A large unit among forty of a few hundred elements, one of them frozen, one tied.
ToyOptions many_units(int stage, DataType type, int ranks) {
  ToyOptions options = options_for(stage, type, ranks);
  options.units.clear();
  options.steps = 2;
  for (int u = 0; u < 40; ++u) {
    ToyUnit unit{{{static_cast<std::uint64_t>(300 + 7 * u), u % 2}}, {}, u != 0};
    if (u == 20) unit.parameters.push_back({200'000});
    if (u == 30) unit.parameters[0].frozen = true;
    options.units.push_back(unit);
  }
  options.units.push_back({{{5, 1}}, {{0, 0}}, true});
  return options;
}

struct Counted {
  ToyResult result;
  std::uint64_t reductions = 0;  // On rank 0, in all steps.
};

Counted run_counted(const ToyOptions& options) {
  Counted counted;
  run_ranks(options.ranks, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    ToyResult result;
    for (int step = 0; step < options.steps; ++step) {
      const StepResult outcome = trainer.step(step);
      result.grad_norms.push_back(outcome.grad_norm.value_or(std::nan("")));
      result.metrics.push_back(outcome.metric_sum);
    }
    trainer.collect(result);
    if (rank.communicator->rank() != 0) return;
    counted.result = result;
    for (const OperationTraffic& operation : trainer.engine().operation_traffic()) {
      if (std::strcmp(operation.operation, "reduce_scatter") == 0) counted.reductions = operation.count;
    }
  });
  return counted;
}

TEST(EngineBuckets, SmallUnitsShareOneWithTheSameBits) {
  for (const auto& [type, micro_steps, accumulate] :
       {std::tuple(DataType::kBfloat16, 1, Accumulate::kShard),
        std::tuple(DataType::kFloat32, 3, Accumulate::kShard),
        std::tuple(DataType::kBfloat16, 2, Accumulate::kShard),
        std::tuple(DataType::kFloat16, 2, Accumulate::kLocal)}) {
    for (const int ranks : {3, 4}) {
      for (int stage = 0; stage <= (accumulate == Accumulate::kLocal ? 1 : 3); ++stage) {
        ToyOptions options = many_units(stage, type, ranks);
        options.engine.micro_steps = micro_steps;
        options.engine.accumulate = accumulate;
        options.engine.bucket_bytes = 1u << 20;
        const std::string what = std::string(data_type_name(type)) + ", stage " + std::to_string(stage) +
                                 ", " + std::to_string(ranks) + " ranks, " + std::to_string(micro_steps) +
                                 " micro-steps";
        const Counted shared = run_counted(options);
        expect_same(shared.result, reference_toy(options), what);
        EXPECT_EQ(shared.result.statistics.peak, shared.result.statistics.planned) << what;
        EXPECT_EQ(
            shared.result.statistics.traffic.sent,
            static_cast<std::uint64_t>(options.steps) * shared.result.statistics.planned_wire_per_step.sent)
            << what;
        const auto reductions_of_a_unit =
            static_cast<std::uint64_t>(options.steps * (accumulate == Accumulate::kLocal ? 1 : micro_steps));
        // The reductions of the large unit, and a few for all others.
        EXPECT_LE(shared.reductions, 5 * reductions_of_a_unit) << what;

        options.engine.bucket_bytes = 1;
        const Counted alone = run_counted(options);
        EXPECT_TRUE(same_bits(alone.result, shared.result)) << what;
        EXPECT_GT(alone.reductions, 40 * reductions_of_a_unit) << what;
      }
    }
  }
}

TEST(EngineBuckets, SmallUnitsShareOneInGroupsToo) {
  for (const bool within : {false, true}) {
    for (int stage = 0; stage < 4; ++stage) {
      ToyOptions options = many_units(stage, DataType::kBfloat16, 4);
      options.engine.group = 2;
      options.engine.shard_within_group = within;
      options.engine.bucket_bytes = 1u << 20;
      expect_same(run_toy(options), reference_toy(options), "stage " + std::to_string(stage));
    }
  }
}

// On the virtual clock.
std::chrono::nanoseconds step_time(const ToyOptions& options, WorldOptions world) {
  HostClock clock(HostClock::Mode::kVirtual);
  world.clock = &clock;
  std::chrono::nanoseconds time{0};
  run_ranks(options.ranks, world, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(0));
    static_cast<void>(trainer.engine().statistics());
    throw_if_error(rank.communicator->barrier());
    const std::chrono::nanoseconds begin = clock.now();
    static_cast<void>(trainer.step(1));
    if (rank.communicator->rank() == 0) time = clock.now() - begin;
  });
  return time;
}

TEST(EngineBuckets, AnAverageRunsWhileTheNextBucketIsOnTheWire) {
  constexpr int kBuckets = 16;
  ToyOptions options = options_for(2, DataType::kBfloat16, 3);
  options.units = {{{{3 * 512 * kBuckets}}, {}, true}};
  options.engine.bucket_bytes = 1;
  WorldOptions slow_averages;
  slow_averages.script.kernel_duration = [](const char* kernel) {
    return std::strcmp(kernel, "forebay_scale") == 0 ? HostClock::Nanoseconds(1ms)
                                                     : HostClock::Nanoseconds(0);
  };
  WorldOptions slow_link;
  slow_link.local.latency = 1ms;
  WorldOptions both = slow_averages;
  both.local.latency = 1ms;
  const auto averages = step_time(options, slow_averages);
  const auto link = step_time(options, slow_link);
  EXPECT_GE(averages, kBuckets * 1ms);
  EXPECT_GE(link, kBuckets * 1ms);
  // One after the other they would take the sum of both times.
  EXPECT_LE(step_time(options, both), std::max(averages, link) + 2ms);
}

// On the virtual clock averages are slower than reductions, so a bucket is full again before the sums of the
// one before it have been averaged.
TEST(EngineBuckets, WaitForTheAveragesOfTheOneBefore) {
  WorldOptions world;
  world.script.kernel_duration = [](const char* kernel) {
    const bool averages =
        std::strcmp(kernel, "forebay_scale") == 0 || std::strcmp(kernel, "forebay_add") == 0;
    return HostClock::Nanoseconds(averages ? 1ms : 0ms);
  };
  for (const int stage : {0, 2}) {
    for (const int micro_steps : {1, 3}) {
      ToyOptions options = many_units(stage, DataType::kFloat32, 3);
      options.engine.micro_steps = micro_steps;
      options.engine.bucket_bytes = 100'000;  // Some units share one.
      HostClock clock(HostClock::Mode::kVirtual);
      world.clock = &clock;
      const ToyResult actual = run_toy(options, world);
      expect_same(actual, reference_toy(options), "stage " + std::to_string(stage));
    }
  }
}

// Rank 1 uses no unit in the step after, so nothing there but the end of the earlier step waits.
TEST(EngineBuckets, AverageOfAStepThatWasGivenUpChangesNoGradientOfTheNext) {
  for (int stage = 0; stage <= 3; ++stage) {
    ToyOptions options = options_for(stage, DataType::kFloat32, 2);
    options.units = {{{{3 * 512 * 16}}, {}, true}};
    options.engine.order_of_units = OrderOfUnits::kRecorded;
    options.engine.micro_steps = 1;
    options.engine.bucket_bytes = 1;
    options.steps = 4;
    options.abandons = [](int, int step) { return step == 1; };
    options.forwards = options.backwards = [](int rank, int step, int) {
      return rank == 1 && step == 2 ? std::vector<int>{} : std::vector<int>{0};
    };
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    world.script.kernel_duration = [](const char* kernel) {
      return HostClock::Nanoseconds(std::strcmp(kernel, "forebay_scale") == 0 ? 1ms : 0ms);
    };
    expect_same(run_toy(options, world), reference_toy(options), "stage " + std::to_string(stage));
  }
}

TEST(EngineBuckets, SmallUnitsPayOneLatency) {
  ToyOptions options = many_units(2, DataType::kBfloat16, 3);
  options.engine.bucket_bytes = 1u << 20;
  WorldOptions world;
  world.local.latency = 1ms;
  const auto shared = step_time(options, world);
  options.engine.bucket_bytes = 1;
  EXPECT_LT(shared + 35 * 1ms, step_time(options, world));
}

}  // namespace
}  // namespace forebay::testing
