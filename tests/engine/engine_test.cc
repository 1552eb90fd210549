// The engine against the numeric contract: every ZeRO stage, type, bucket size and way of accumulating gives
// bit for bit the result of the plain loops of toy.h.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <thread>

#include "forebay/units.h"
#include "tests/engine/toy_cases.h"
#include "tests/support/device_view.h"
#include "tests/support/let_others_run.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

struct Case {
  int ranks;
  DataType type;
  int micro_steps;
  Accumulate accumulate;
};
class EngineContract : public ::testing::TestWithParam<Case> {};

TEST_P(EngineContract, EveryStageGivesTheBitsOfThePlainLoops) {
  const Case& c = GetParam();
  ToyOptions options = options_for(0, c.type, c.ranks);
  options.engine.micro_steps = c.micro_steps;
  options.engine.accumulate = c.accumulate;
  const ToyResult expected = reference_toy(options);

  std::string digest;
  for (int stage = 0; stage <= (c.accumulate == Accumulate::kLocal ? 1 : 3); ++stage) {
    for (const bool overlap : {true, false}) {
      for (const std::uint64_t bucket : {1ull, 5000ull, 1ull << 24}) {
        if (overlap && bucket != 5000) continue;
        options.engine.stage = stage;
        options.engine.overlap = overlap;
        options.engine.bucket_bytes = bucket;
        const ToyResult actual = run_toy(options);
        expect_same(actual, expected,
                    "stage " + std::to_string(stage) + ", overlap " + (overlap ? "on" : "off") + ", bucket " +
                        std::to_string(bucket));
        if (digest.empty()) digest = actual.digest;
        EXPECT_EQ(actual.digest, digest);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, EngineContract,
                         ::testing::Values(Case{1, DataType::kFloat32, 1, Accumulate::kShard},
                                           Case{1, DataType::kBfloat16, 3, Accumulate::kShard},
                                           Case{3, DataType::kFloat32, 1, Accumulate::kShard},
                                           Case{3, DataType::kBfloat16, 1, Accumulate::kShard},
                                           Case{3, DataType::kFloat16, 3, Accumulate::kShard},
                                           Case{4, DataType::kBfloat16, 3, Accumulate::kShard},
                                           Case{4, DataType::kFloat16, 1, Accumulate::kShard},
                                           Case{3, DataType::kBfloat16, 3, Accumulate::kLocal},
                                           Case{4, DataType::kFloat32, 2, Accumulate::kLocal}),
                         [](const auto& info) {
                           return "N" + std::to_string(info.param.ranks) + "_" +
                                  data_type_name(info.param.type) + "_K" +
                                  std::to_string(info.param.micro_steps) +
                                  (info.param.accumulate == Accumulate::kShard ? "_shard" : "_local");
                         });

// Bias corrections are of a group. Two groups that differ in one constant have different ones.
TEST(Engine, GroupsMayDifferInOneConstantAlone) {
  for (const bool second : {false, true}) {
    ToyOptions options = options_for(0, DataType::kBfloat16, 2);
    (second ? options.groups[1].beta2 : options.groups[1].beta1) = 0.5;
    const ToyResult expected = reference_toy(options);
    for (int stage = 0; stage < 4; ++stage) {
      options.engine.stage = stage;
      expect_same(run_toy(options), expected, "stage " + std::to_string(stage));
    }
  }
}

// Ranks that share one device whose memory the host must not touch.
WorldOptions shared_device_world() {
  HostBackendOptions options{.name = "device", .granularity = 64u << 10};
  const std::shared_ptr<HostBackend> device = value_or_throw(HostBackend::create(options));
  return {.create_backend = [device](int rank) {
    return std::make_unique<DeviceView>(device, "device of rank " + std::to_string(rank));
  }};
}

TEST(Engine, GivesTheSameBitsWhereRanksShareADevice) {
  for (const int ranks : {1, 3}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
      for (const int micro_steps : {1, 2}) {
        for (int stage = 0; stage < 4; ++stage) {
          ToyOptions options = options_for(stage, type, ranks);
          options.engine.micro_steps = micro_steps;
          const ToyResult actual = run_toy(options, shared_device_world());
          expect_same(actual, reference_toy(options),
                      std::to_string(ranks) + " ranks, stage " + std::to_string(stage));
          EXPECT_EQ(actual.statistics.peak, actual.statistics.planned);
        }
      }
    }
  }
}

TEST(Engine, SkipsAnOverflowingStepOnEveryRankAndStage) {
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    ToyOptions options = options_for(0, type, 3);
    options.steps = 6;
    options.disturbance = [](int rank, int step) {
      return rank == 1 && step == 2 ? std::numeric_limits<float>::infinity() : 0.0f;
    };
    const ToyResult expected = reference_toy(options);
    ASSERT_TRUE(std::isnan(expected.grad_norms[2]));
    for (int stage = 0; stage < 4; ++stage) {
      options.engine.stage = stage;
      const ToyResult actual = run_toy(options);
      expect_same(actual, expected, std::string(data_type_name(type)) + " stage " + std::to_string(stage));
      EXPECT_EQ(actual.statistics.attempted_steps, 6u);
      EXPECT_EQ(actual.statistics.applied_steps, 5u);
    }
  }
}

TEST(Engine, AfterAnOverflowCountsAllStepsToTheNextGrowthOfTheLossScale) {
  for (const double factor : {1.0, 0.5}) {
    ToyOptions options = options_for(2, DataType::kFloat16, 2);
    options.engine.loss_scale.growth_interval = 3;
    options.gradient_factor = [=](int) { return factor; };
    options.disturbance = [](int rank, int step) {
      return rank == 1 && step == 2 ? std::numeric_limits<float>::infinity() : 0.0f;
    };
    run_ranks(2, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      std::vector<double> scales;
      for (int step = 0; step < 6; ++step) {
        EXPECT_EQ(trainer.step(step).skipped, step == 2);
        scales.push_back(trainer.engine().loss_scale());
      }
      EXPECT_EQ(scales, (std::vector<double>{1024, 1024, 512, 512, 512, 1024})) << "factor " << factor;
    });
  }
}

TEST(Engine, AnOverflowHalvesTheLossScaleToItsMinimumAtMost) {
  for (const double factor : {1.0, 0.5}) {
    ToyOptions options = options_for(2, DataType::kFloat16, 2);
    options.engine.loss_scale.minimum = 1000;
    options.gradient_factor = [=](int) { return factor; };
    options.disturbance = [](int, int) { return std::numeric_limits<float>::infinity(); };
    run_ranks(2, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      for (int step = 0; step < 2; ++step) {
        EXPECT_TRUE(trainer.step(step).skipped);
        EXPECT_EQ(trainer.engine().loss_scale(), 1000) << "factor " << factor;
      }
    });
  }
}

// At stage 3 a unit that is still gathered is read again, unless its weights have changed.
TEST(Engine, ReadsWeightsThatWereReplacedAfterASkippedStep) {
  const std::string directory = make_temporary_directory("state");
  for (const bool loads : {false, true}) {
    ToyOptions options = options_for(3, DataType::kFloat16, 2);
    options.units[3].parameters[2].frozen = false;  // load_state() sets frozen parameters one by one.
    options.disturbance = [](int, int step) {
      return step == 1 ? std::numeric_limits<float>::infinity() : 0.0f;
    };
    run_ranks(2, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      if (loads) trainer.engine().save_state(directory, "x");
      const double first = trainer.step(0).metric_sum;
      const StepResult second = trainer.step(1);
      EXPECT_TRUE(second.skipped);
      EXPECT_NE(second.metric_sum, first);
      if (loads) {
        trainer.engine().load_state(directory);
      } else {
        trainer.initialize();
      }
      EXPECT_EQ(trainer.step(2).metric_sum, first) << (loads ? "load_state()" : "set_parameter()");
    });
  }
  std::filesystem::remove_all(directory);
}

TEST(Engine, GivesTheSameAnswerWhereALeaseAsksForAGradientTwice) {
  for (int stage = 0; stage < 4; ++stage) {
    run_ranks(2, {}, [&](Rank& rank) {
      EngineOptions options;
      options.stage = stage;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId unit = engine.add_unit("u");
      engine.add_parameter(unit, "p", 1000);
      const UnitId head = engine.add_unit("head");
      engine.add_parameter(head, "q", 10);
      engine.tie(head, {unit, 0});
      engine.commit();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      engine.step_begin();
      engine.micro_step_begin(0);
      for (const UnitId each : {unit, head}) static_cast<void>(engine.forward(each, stream));
      const auto expect_twice = [](Lease& lease, int index, bool expected) {
        DevicePtr addresses[2];
        for (DevicePtr& address : addresses) {
          bool accumulate = !expected;
          address = lease.gradient(index, &accumulate);
          EXPECT_EQ(accumulate, expected);
        }
        EXPECT_EQ(addresses[0], addresses[1]);
      };
      {
        Lease lease = engine.backward(head, stream);
        expect_twice(lease, 0, false);
        expect_twice(lease, 1, false);  // The tied parameter: this is its first gradient.
      }
      {
        Lease lease = engine.backward(unit, stream);
        expect_twice(lease, 0, true);
      }
      throw_if_error(rank.backend->stream_synchronize(stream));
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

TEST(Engine, AnEvaluationBeforeAStepReadsTheWeightsOfBeforeIt) {
  static constexpr std::size_t kCount = 20'000;
  for (const int stage : {1, 3}) {
    run_ranks(2, {}, [&](Rank& rank) {
      EngineOptions options;
      options.stage = stage;
      options.order_of_units = OrderOfUnits::kRecorded;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId unit = engine.add_unit("u");
      const ParameterId parameter = engine.add_parameter(unit, "p", kCount);
      engine.commit();
      engine.set_parameter(parameter, std::vector<float>(kCount, 1.0f));
      const Stream stream = value_or_throw(rank.backend->stream_create());
      engine.step_begin();
      engine.micro_step_begin(0);
      static_cast<void>(engine.forward(unit, stream));
      {
        Lease lease = engine.backward(unit, stream);
        bool accumulate = true;
        throw_if_error(
            rank.backend->fill_async(lease.gradient(0, &accumulate), 0, kCount * sizeof(float), stream));
      }
      std::vector<float> read(kCount);
      engine.evaluation_begin();
      {
        const Lease lease = engine.forward(unit, stream);
        const DevicePtr values = lease.parameter(0);
        throw_if_error(call_on(*rank.backend, stream, [&read, values] {
          std::this_thread::sleep_for(std::chrono::milliseconds(200));
          std::memcpy(read.data(), values, kCount * sizeof(float));
        }));
      }
      engine.evaluation_end();
      EXPECT_FALSE(engine.step({.groups = {{.lr = 0.5, .weight_decay = 0.5}}}).skipped);
      throw_if_error(rank.backend->stream_synchronize(stream));
      EXPECT_EQ(read, std::vector<float>(kCount, 1.0f)) << "stage " << stage;
      EXPECT_EQ(engine.get_parameter(parameter).front(), 0.75f);
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

TEST(Engine, TakesZerosFromRanksThatSkipAUnitAndKeepsOneThatAllSkip) {
  for (int stage = 0; stage < 4; ++stage) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, 3);
    options.engine.micro_steps = 2;
    // Nobody uses unit 2 in step 1, and only rank 1 in step 2. Rank 0 skips unit 1 in one micro-step. Rank 2
    // skips the head.
    options.skips = [](int rank, int step, int micro_step, int unit) {
      if (unit == 2) return step == 1 || (step == 2 && rank != 1);
      if (unit == 1) return step == 3 && rank == 0 && micro_step == 1;
      if (unit == 4) return step == 2 && rank == 2;
      return false;
    };
    expect_same(run_toy(options), reference_toy(options), "stage " + std::to_string(stage));
  }
}

TEST(Engine, MeasuresThePlannedBytes) {
  for (const int ranks : {1, 3, 4}) {
    for (int stage = 0; stage < 4; ++stage) {
      for (const int micro_steps : {1, 3}) {
        ToyOptions options = options_for(stage, DataType::kBfloat16, ranks);
        options.engine.micro_steps = micro_steps;
        options.steps = 3;
        const EngineStatistics s = run_toy(options).statistics;
        EXPECT_EQ(s.peak, s.planned) << "stage " << stage;
        EXPECT_EQ(s.peak_reserved_bytes, s.planned_reserved_bytes) << "stage " << stage;
        EXPECT_EQ(s.traffic.sent, 3 * s.planned_wire_per_step.sent)
            << "stage " << stage << " ranks " << ranks;
        EXPECT_EQ(s.traffic.received, 3 * s.planned_wire_per_step.received) << "stage " << stage;
      }
    }
  }
}

TEST(Engine, AllocatesNothingFromTheBackendAfterTheFirstStep) {
  for (int stage = 0; stage < 4; ++stage) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, 3);
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      static_cast<void>(trainer.step(0));
      const HostCall calls[] = {HostCall::kReserve,      HostCall::kChunkCreate, HostCall::kMap,
                                HostCall::kUnmap,        HostCall::kAlloc,       HostCall::kSetAccess,
                                HostCall::kStreamCreate, HostCall::kEventCreate};
      std::vector<std::uint64_t> before;
      for (const HostCall call : calls) before.push_back(rank.host_backend().call_count(call));
      for (int step = 1; step < 4; ++step) static_cast<void>(trainer.step(step));
      for (std::size_t i = 0; i < before.size(); ++i)
        EXPECT_EQ(rank.host_backend().call_count(calls[i]), before[i]) << i;
    });
  }
}

TEST(Engine, KeepsTheAddressesOfAUnitForItsLife) {
  for (int stage = 0; stage < 4; ++stage) {
    ToyOptions options = options_for(stage, DataType::kFloat32, 3);
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      std::vector<DevicePtr> first;
      for (int step = 0; step < 3; ++step) {
        std::vector<DevicePtr> seen;
        Engine& engine = trainer.engine();
        engine.step_begin();
        engine.micro_step_begin(0);
        for (int u = 0; u < 5; ++u) seen.push_back(engine.forward(u, stream).parameter(0));
        for (int u = 4; u >= 0; --u) {
          Lease lease = engine.backward(u, stream);
          bool accumulate = false;
          seen.push_back(lease.gradient(0, &accumulate));
          throw_if_error(rank.backend->fill_async(seen.back(), 0, 4, stream));
        }
        static_cast<void>(engine.step({.groups = options.groups}));
        if (first.empty()) first = seen;
        EXPECT_EQ(seen, first);
      }
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

TEST(Engine, RefusesABudgetOneChunkUnderThePlanAndNamesThePoolAndTheOption) {
  ToyOptions options = options_for(1, DataType::kBfloat16, 3);
  std::uint64_t reserved = 0;
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    if (rank.communicator->rank() == 0) reserved = trainer.engine().plan().reserved_bytes;
  });
  options.engine.memory_bytes = reserved;
  run_toy(options);

  options.engine.memory_bytes = reserved - (64u << 10);
  try {
    run_toy(options);
    FAIL() << "a budget below the plan was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kOutOfMemory);
    const std::string refused = error.what();
    for (const char* const part :
         {"the plan needs ", ", the budget is ", "; the largest parts are optimizer ",
          "; to shrink optimizer: more ranks, offload optimizer; or raise the option memory"})
      EXPECT_NE(refused.find(part), std::string::npos) << part << " is not in: " << refused;
    EXPECT_LT(refused.size(), 300u) << refused;
  }
  // The device has no more, whatever the budget says.
  options.engine.memory_bytes = std::uint64_t{1} << 50;
  WorldOptions small;
  small.backend.memory_bytes = reserved - (64u << 10);
  run_ranks(3, small, [&](Rank& rank) {
    try {
      const ToyTrainer trainer(options, rank);
      ADD_FAILURE() << "a device below the plan was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("the plan needs "), std::string::npos) << error.what();
    }
  });
}

// The advice for the pool that is largest. Each case makes another one the largest.
TEST(Engine, NamesTheOptionsThatShrinkTheLargestPool) {
  struct Case {
    const char* advice;
    std::uint64_t unit_count, unit_elements;
    std::function<void(EngineOptions&)> set;
    std::uint64_t activation_bytes = 0;
  };
  const auto offload = [](int stage, Offload offloaded, DataType type) {
    return [=](EngineOptions& options) {
      options.stage = stage;
      options.offload = offloaded;
      options.dtype = type;
    };
  };
  constexpr std::uint64_t kWide = 1u << 16;
  const Case cases[] = {
      {"optimizer: stage 1, offload optimizer", 8, kWide, offload(0, Offload::kNone, DataType::kFloat32)},
      {"optimizer: more ranks, offload optimizer", 8, kWide, offload(3, Offload::kNone, DataType::kFloat32)},
      {"optimizer: more ranks, a larger offload-fraction", 16, kWide,
       [](EngineOptions& options) {
         options.stage = 3;
         options.offload = Offload::kOptimizer;
         options.offload_fraction = 0.25;
       }},
      {"parameters: stage 3, dtype bf16", 8, kWide, offload(2, Offload::kOptimizer, DataType::kFloat32)},
      {"parameters: stage 3", 8, kWide, offload(2, Offload::kOptimizer, DataType::kBfloat16)},
      {"parameters: more ranks, offload optimizer+parameters, dtype bf16", 32, kWide,
       offload(3, Offload::kOptimizer, DataType::kFloat32)},
      {"gradients: stage 2, a single micro-step", 8, kWide,
       [](EngineOptions& options) {
         options.stage = 0;
         options.offload = Offload::kOptimizer;
         options.dtype = DataType::kBfloat16;
         options.micro_steps = 2;
       }},
      {"gathered: narrower layers", 1, 16 * kWide,
       offload(3, Offload::kOptimizerAndParameters, DataType::kFloat32)},
      {"buckets: a smaller bucket", 2, kWide,
       [](EngineOptions& options) {
         options.stage = 2;
         options.bucket_bytes = 64u << 20;
       }},
      {"activations: a smaller batch or sequence, recomputation, activations that are partitioned or "
       "offloaded",
       8, kWide, offload(3, Offload::kNone, DataType::kFloat32), 1u << 30},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.advice);
    run_ranks(2, {}, [&](Rank& rank) {
      EngineOptions options;
      options.bucket_bytes = 64u << 10;
      one.set(options);
      options.memory_bytes = 64u << 10;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      for (std::uint64_t u = 0; u < one.unit_count; ++u)
        engine.add_parameter(engine.add_unit("u" + std::to_string(u)), "p" + std::to_string(u),
                             one.unit_elements);
      engine.declare_activations(one.activation_bytes);
      try {
        engine.commit();
        ADD_FAILURE() << "a budget of one chunk was accepted";
      } catch (const Error& error) {
        const std::string refused = error.what();
        EXPECT_NE(refused.find(std::string("; to shrink ") + one.advice + "; or raise the option memory"),
                  std::string::npos)
            << refused;
      }
    });
  }
}

TEST(Engine, NamesTheOptionAndTheRanksThatDiffer) {
  const auto message_of = [](const std::function<void(int, ToyOptions&)>& change) {
    ToyOptions options = options_for(1, DataType::kBfloat16, 4);
    std::vector<std::string> messages(4);
    try {
      run_ranks(4, {}, [&](Rank& rank) {
        ToyOptions mine = options;
        const int r = rank.communicator->rank();
        change(r, mine);
        try {
          ToyTrainer trainer(mine, rank);
        } catch (const Error& error) {
          messages[static_cast<std::size_t>(r)] = error.status().message();
          throw;
        }
      });
    } catch (const Error&) {
    }
    for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
    return messages[0];
  };
  const std::string stage = message_of([](int r, ToyOptions& o) { o.engine.stage = r == 2 ? 2 : 1; });
  EXPECT_NE(stage.find("stage is 1 on ranks 0, 1, 3, 2 on rank 2"), std::string::npos) << stage;
  const std::string extra = message_of([](int r, ToyOptions& o) {
    o.engine.agreement = {{"seed", r == 0 ? "7" : "8"}};
  });
  EXPECT_NE(extra.find("seed is 7 on rank 0, 8 on ranks 1, 2, 3"), std::string::npos) << extra;
  const std::string shape = message_of([](int r, ToyOptions& o) {
    if (r == 3) o.units[2].parameters[0].count = 3001;
  });
  EXPECT_NE(shape.find("rank 3"), std::string::npos) << shape;
  const std::string missing = message_of([](int r, ToyOptions& o) {
    if (r > 0) o.engine.agreement = {{"seed", "7"}};
  });
  EXPECT_NE(missing.find("seed is 7 on ranks 1, 2, 3, nothing on rank 0"), std::string::npos) << missing;
  const std::string pass = message_of([](int r, ToyOptions& o) {
    if (r == 1) o.units[1].backward_reads_parameters = !o.units[1].backward_reads_parameters;
  });
  EXPECT_NE(pass.find("unit:unit1 is "), std::string::npos) << pass;
  EXPECT_NE(pass.find("gradient-only"), std::string::npos) << pass;

  // `change` is made on the last rank alone, `common` on all.
  const auto expect_named = [&](
                                const char* named, const std::function<void(ToyOptions&)>& change,
                                const std::function<void(ToyOptions&)>& common = [](ToyOptions&) {}) {
    const std::string message = message_of([&](int r, ToyOptions& o) {
      common(o);
      if (r == 3) change(o);
    });
    EXPECT_NE(message.find(named), std::string::npos) << named << ": " << message;
    EXPECT_NE(message.find("on rank 3"), std::string::npos) << named << ": " << message;
  };
  const auto muon = [](ToyOptions& o) {
    o.engine.optimizer = Optimizer::kMuon;
    o.units[2].parameters[0].shape = {600, 5};
  };
  const auto recorded = [](ToyOptions& o) { o.engine.order_of_units = OrderOfUnits::kRecorded; };
  expect_named("beta2 is", [](ToyOptions& o) { o.engine.beta2 = 0.5; });
  expect_named("epsilon is", [](ToyOptions& o) { o.engine.epsilon = 0.5; });
  expect_named("beta2 is", [](ToyOptions& o) { o.engine.beta2 = std::nextafter(o.engine.beta2, 0); });
  expect_named("loss-scale is", [](ToyOptions& o) { o.engine.loss_scale.initial = 2048; });
  expect_named("loss-scale is", [](ToyOptions& o) { ++o.engine.loss_scale.growth_interval; });
  expect_named("loss-scale is", [](ToyOptions& o) { o.engine.loss_scale.minimum = 2; });
  expect_named("unit:unit1 is", [](ToyOptions& o) { o.units[1].parameters[2].group = 1; });
  expect_named("unit:unit1 is", [](ToyOptions& o) { o.units[1].parameters[2].replicated = true; });
  expect_named("unit:unit4 is", [](ToyOptions& o) { o.units[4].tied.clear(); });
  expect_named(
      "unit:unit2 is", [](ToyOptions& o) { o.units[2].parameters[0].elementwise = true; }, muon);
  expect_named(
      "unit:unit2 is",
      [](ToyOptions& o) {
        o.units[2].parameters[0].shape = {300, 10};
      },
      muon);
  expect_named(
      "recorded-order is", [](ToyOptions& o) { o.engine.recorded_order = "0.1.1b.1r.0r///"; }, recorded);
}

TEST(Engine, RefusesMisuseWithWordsAndGoesOn) {
  ToyOptions options = options_for(3, DataType::kFloat32, 1);
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    Engine& engine = trainer.engine();
    const Stream stream = value_or_throw(rank.backend->stream_create());
    EXPECT_THROW(engine.commit(), Error);
    EXPECT_THROW(engine.micro_step_begin(0), Error);
    EXPECT_THROW(static_cast<void>(engine.step({})), Error);
    engine.step_begin();
    EXPECT_THROW(engine.step_begin(), Error);
    EXPECT_THROW(engine.micro_step_begin(1), Error);
    engine.micro_step_begin(0);
    EXPECT_THROW(static_cast<void>(engine.forward(1, stream)), Error);
    EXPECT_THROW(static_cast<void>(engine.backward(4, stream)), Error);
    for (int u = 0; u < 5; ++u) {
      Lease lease = engine.forward(u, stream);
      bool accumulate = false;
      EXPECT_THROW(lease.gradient(0, &accumulate), Error);
      EXPECT_THROW(static_cast<void>(lease.parameter(17)), Error);
      if (u < 4) {
        EXPECT_THROW(static_cast<void>(engine.forward(u + 1, stream)), Error);
      }
    }
    EXPECT_THROW(static_cast<void>(engine.backward(3, stream)), Error);
    for (int u = 4; u >= 0; --u) {
      Lease lease = engine.backward(u, stream);
      if (u == 0) {
        EXPECT_THROW(static_cast<void>(lease.parameter(0)), Error);
      }
    }
    EXPECT_THROW(static_cast<void>(engine.step({})), Error) << "no groups given";
    EXPECT_FALSE(engine.step({.groups = options.groups}).skipped);
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

TEST(Engine, ANullStreamChangesNothing) {
  ToyOptions options = options_for(3, DataType::kFloat32, 1);
  for (const OrderOfUnits order : {OrderOfUnits::kStrict, OrderOfUnits::kRecorded}) {
    run_ranks(1, {}, [&](Rank& rank) {
      options.engine.order_of_units = order;
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      Engine& engine = trainer.engine();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      const auto refused = [](auto call) {
        try {
          call();
          ADD_FAILURE() << "not refused";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
          EXPECT_NE(std::string(error.what()).find("stream that is null"), std::string::npos) << error.what();
        }
      };
      engine.step_begin();
      engine.micro_step_begin(0);
      for (int u = 0; u < 5; ++u) {
        refused([&] { static_cast<void>(engine.forward(u, Stream())); });
        static_cast<void>(engine.forward(u, stream));
      }
      for (int u = 4; u >= 0; --u) {
        refused([&] { static_cast<void>(engine.backward(u, Stream())); });
        static_cast<void>(engine.backward(u, stream));
      }
      EXPECT_FALSE(engine.step({.groups = options.groups}).skipped);
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

// A data loader forks, and its copy of the engine ends with it.
TEST(Engine, AForkedChildCannotUseItAndMayDestroyIt) {
  ToyOptions options = options_for(3, DataType::kFloat32, 1);
  run_ranks(1, {}, [&](Rank& rank) {
    auto trainer = std::make_unique<ToyTrainer>(options, rank);
    trainer->initialize();
    const Stream stream = value_or_throw(rank.backend->stream_create());
    trainer->engine().step_begin();
    trainer->engine().micro_step_begin(0);
    {
      std::optional<Lease> lease = trainer->engine().forward(0, stream);
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        alarm(20);
        int refusals = 0;
        const auto refused = [&](auto call) {
          try {
            call();
          } catch (const Error& error) {
            refusals += error.code() == StatusCode::kUnsupported;
          }
        };
        refused([&] { static_cast<void>(trainer->engine().forward(1, stream)); });
        refused([&] { static_cast<void>(trainer->engine().backward(4, stream)); });
        refused([&] { static_cast<void>(trainer->engine().step({.groups = options.groups})); });
        refused([&] { trainer->engine().step_begin(); });
        refused([&] { trainer->engine().spill(); });
        refused([&] { trainer->engine().fetch(); });
        refused([&] { static_cast<void>(trainer->engine().shard_digest()); });
        refused([&] { trainer->engine().abandon(1); });
        refused([&] { trainer->engine().evaluation_begin(); });
        lease.reset();
        trainer->engine().~Engine();
        _exit(refusals);
      }
      int state = 0;
      ASSERT_EQ(waitpid(child, &state, 0), child);
      EXPECT_TRUE(WIFEXITED(state)) << "ended by signal " << WTERMSIG(state);
      EXPECT_EQ(WEXITSTATUS(state), 9);
    }
    for (int u = 1; u < 5; ++u) static_cast<void>(trainer->engine().forward(u, stream));
    for (int u = 4; u >= 0; --u) static_cast<void>(trainer->engine().backward(u, stream));
    EXPECT_FALSE(trainer->engine().step({.groups = options.groups}).skipped);
    trainer.reset();
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

// Work is still queued on the trainer's stream when an exception or a failure ends the step.
TEST(Engine, EndsInTheMiddleOfAStep) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const bool backward : {false, true}) {
      ToyOptions options = options_for(stage, DataType::kBfloat16, 2);
      run_ranks(2, {}, [&](Rank& rank) {
        const Stream stream = value_or_throw(rank.backend->stream_create());
        std::atomic<bool> go{false};
        std::thread opener;
        {
          Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options.engine);
          const UnitId unit = engine.add_unit("u");
          engine.add_parameter(unit, "p", 5000);
          engine.commit();
          engine.step_begin();
          engine.micro_step_begin(0);
          std::optional<Lease> lease = engine.forward(unit, stream);
          if (backward) {
            lease.reset();
            lease = engine.backward(unit, stream);
          }
          bool accumulate = false;
          std::byte* const memory = backward ? lease->gradient(0, &accumulate) : lease->parameter(0);
          throw_if_error(call_on(*rank.backend, stream, [&go, memory, backward] {
            while (!go) testing::let_others_run();
            std::byte used[5000] = {};
            backward ? std::memcpy(memory, used, sizeof used) : std::memcpy(used, memory, sizeof used);
          }));
          opener = std::thread([&go] { go = true; });
        }
        opener.join();
        throw_if_error(rank.backend->stream_destroy(stream));
      });
    }
  }
}

class SavedState : public ::testing::Test {
 protected:
  SavedState() { directory_ = make_temporary_directory("state"); }
  ~SavedState() override { std::filesystem::remove_all(directory_); }

  std::string directory_;
};

TEST_F(SavedState, ResumesWithTheBitsOfARunThatDidNotStop) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const DataType type : {DataType::kFloat32, DataType::kFloat16}) {
      ToyOptions options = options_for(stage, type, 3);
      options.steps = 6;
      const ToyResult whole = run_toy(options);
      run_ranks(3, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 4; ++step) {
          static_cast<void>(trainer.step(step));
          if (step >= 2) trainer.engine().save_state(directory_, "cursor " + std::to_string(step));
        }
      });
      // Every ZeRO stage and other numbers of ranks load it.
      for (int other_stage = 0; other_stage < 4; ++other_stage) {
        ToyOptions resumed = options;
        resumed.engine.stage = other_stage;
        std::vector<ToyResult> results(3);
        run_ranks(3, {}, [&](Rank& rank) {
          ToyTrainer trainer(resumed, rank);
          EXPECT_EQ(trainer.engine().load_state(directory_), "cursor 3");
          for (int step = 4; step < 6; ++step) static_cast<void>(trainer.step(step));
          trainer.collect(results[static_cast<std::size_t>(rank.communicator->rank())]);
        });
        EXPECT_EQ(results[0].digest, whole.digest)
            << "saved at stage " << stage << ", resumed at " << other_stage;
      }
      std::filesystem::remove_all(directory_);
    }
  }
}

TEST_F(SavedState, KeepsThePlaceBetweenTwoGrowthsOfTheLossScale) {
  ToyOptions options = options_for(2, DataType::kFloat16, 2);
  options.engine.loss_scale.growth_interval = 3;
  const auto scales_from = [&](int first, int end, ToyTrainer& trainer) {
    std::vector<double> scales;
    for (int step = first; step < end; ++step) {
      static_cast<void>(trainer.step(step));
      scales.push_back(trainer.engine().loss_scale());
    }
    return scales;
  };
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    EXPECT_EQ(scales_from(0, 4, trainer), (std::vector<double>{1024, 1024, 2048, 2048}));
    trainer.engine().save_state(directory_, "x");
    EXPECT_EQ(scales_from(4, 7, trainer), (std::vector<double>{2048, 4096, 4096}));
  });
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    // The loaded values take the place of those that ranks gave before, which need not be the same.
    trainer.engine().set_parameter({0, 1},
                                   std::vector<float>(65, rank.communicator->rank() == 0 ? 1.0f : 2.0f));
    trainer.engine().load_state(directory_);
    EXPECT_EQ(trainer.engine().loss_scale(), 2048);
    EXPECT_EQ(scales_from(4, 7, trainer), (std::vector<double>{2048, 4096, 4096}));
  });
}

// A scale of 1 would lose small gradients. A parameter that is a part of the saved one is another.
TEST_F(SavedState, OfAnotherTypeLeavesTheLossScaleAndOfAnotherSizeIsRefused) {
  const ToyOptions bf16 = options_for(2, DataType::kBfloat16, 1);
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(bf16, rank);
    trainer.initialize();
    trainer.engine().save_state(directory_, "x");
  });
  ToyOptions options = options_for(2, DataType::kFloat16, 1);
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.engine().load_state(directory_);
    EXPECT_EQ(trainer.engine().loss_scale(), 1024);
  });
  for (const std::uint64_t count : {2999u, 3001u}) {
    options.units[2].parameters[0].count = count;
    run_ranks(1, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      try {
        trainer.engine().load_state(directory_);
        ADD_FAILURE() << count << " elements were loaded";
      } catch (const Error& error) {
        EXPECT_NE(
            std::string(error.what()).find("has 3000 elements there and " + std::to_string(count) + " here"),
            std::string::npos)
            << error.what();
      }
    });
  }
}

TEST_F(SavedState, OfAnotherModelIsRefused) {
  const auto with_shape = [](std::vector<std::uint64_t> shape, Optimizer optimizer) {
    ToyOptions options = options_for(2, DataType::kFloat32, 2);
    options.engine.optimizer = optimizer;
    options.units[2].parameters[0].shape = std::move(shape);
    return options;
  };
  const auto save = [&](const ToyOptions& options) {
    run_ranks(2, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      trainer.engine().save_state(directory_, "x");
    });
  };
  const auto message_of_load = [&](const ToyOptions& options) -> std::string {
    try {
      run_ranks(2, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.engine().load_state(directory_);
      });
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  const auto expect_found = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
  };
  save(with_shape({5, 600}, Optimizer::kAdamW));
  EXPECT_EQ(message_of_load(with_shape({5, 600}, Optimizer::kAdamW)), "");
  EXPECT_EQ(message_of_load(with_shape({}, Optimizer::kAdamW)), "");
  expect_found(message_of_load(with_shape({600, 5}, Optimizer::kAdamW)),
               "p6 has the shape [5, 600] there and [600, 5] here");
  ToyOptions smaller = with_shape({5, 600}, Optimizer::kAdamW);
  smaller.units.pop_back();
  expect_found(message_of_load(smaller), "p12 is not one of this model");
  ToyOptions larger = with_shape({5, 600}, Optimizer::kAdamW);
  larger.units.push_back({{{10}}, {}, true});
  expect_found(message_of_load(larger), "it lacks p13, which has 10 elements here");

  save(with_shape({}, Optimizer::kAdamW));
  EXPECT_EQ(message_of_load(with_shape({5, 600}, Optimizer::kAdamW)), "");
  save(with_shape({}, Optimizer::kAdafactor));
  expect_found(message_of_load(with_shape({5, 600}, Optimizer::kAdafactor)),
               "p6 has 3000 factors there and 605 here");
}

TEST_F(SavedState, LoadsAtAnotherNumberOfRanks) {
  ToyOptions options = options_for(3, DataType::kBfloat16, 4);
  std::string saved_digest;
  run_ranks(4, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(0));
    trainer.engine().save_state(directory_, "x");
    const std::string digest = trainer.engine().digest();
    if (rank.communicator->rank() == 0) saved_digest = digest;
  });
  for (const int ranks : {1, 2, 3}) {
    options.ranks = ranks;
    run_ranks(ranks, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.engine().load_state(directory_);
      EXPECT_EQ(trainer.engine().digest(), saved_digest);
    });
  }
}

TEST_F(SavedState, NamesTheDamagedFile) {
  ToyOptions options = options_for(2, DataType::kBfloat16, 2);
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().save_state(directory_, "x");
  });
  const std::filesystem::path state = directory_ + "/step-000000000000";
  const auto load = [&]() -> Status {
    try {
      run_ranks(2, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.engine().load_state(directory_);
      });
    } catch (const Error& error) {
      return error.status();
    }
    return Status();
  };
  ASSERT_TRUE(load().ok());
  const auto with_changed_file = [&](const std::string& name, const auto& change) {
    const std::filesystem::path file = state / name;
    const std::filesystem::path copy = directory_ + "/copy";
    std::filesystem::copy_file(file, copy);
    change(file);
    const Status status = load();
    std::filesystem::rename(copy, file);
    return status;
  };
  const Status truncated =
      with_changed_file("rank-1-of-2.safetensors", [](const std::filesystem::path& file) {
        std::filesystem::resize_file(file, std::filesystem::file_size(file) - 100);
      });
  EXPECT_EQ(truncated.code(), StatusCode::kCorruption) << truncated.to_string();
  const auto flip_at = [](std::uintmax_t offset) {
    return [offset](const std::filesystem::path& file) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(static_cast<std::streamoff>(offset));
      const char byte = static_cast<char>(stream.get() ^ 1);
      stream.seekp(static_cast<std::streamoff>(offset));
      stream.put(byte);
    };
  };
  const std::uintmax_t bytes = std::filesystem::file_size(state / "rank-0-of-2.safetensors");
  for (const std::uintmax_t offset :
       {std::uintmax_t{0}, std::uintmax_t{9}, bytes / 2, bytes - 300, bytes - 3}) {
    const Status flipped = with_changed_file("rank-0-of-2.safetensors", flip_at(offset));
    EXPECT_EQ(flipped.code(), StatusCode::kCorruption) << "offset " << offset << ": " << flipped.to_string();
  }
  EXPECT_EQ(with_changed_file("manifest.json", flip_at(60)).code(), StatusCode::kCorruption);
  EXPECT_EQ(
      with_changed_file("rank-0-of-2.safetensors", [](const auto& file) { std::filesystem::remove(file); })
          .code(),
      StatusCode::kIoError);
  ASSERT_TRUE(load().ok());

  ToyOptions other = options;
  options.units[1].parameters[0].count = 65;
  const Status another_model = load();
  EXPECT_EQ(another_model.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(another_model.message().find("p2"), std::string::npos) << another_model.message();
  options = other;

  const std::string saved = directory_;
  directory_ += "/nothing-here";
  EXPECT_EQ(load().code(), StatusCode::kIoError);
  directory_ = saved;
}

TEST_F(SavedState, NamesAByteThatChangedInAnyRun) {
  const ToyOptions options = options_for(2, DataType::kBfloat16, 1);
  const auto load = [&]() -> Status {
    try {
      run_ranks(1, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.engine().load_state(directory_);
      });
    } catch (const Error& error) {
      return error.status();
    }
    return Status();
  };
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().save_state(directory_, "x");
  });
  const std::string file = directory_ + "/step-000000000000/rank-0-of-1.safetensors";
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t length = 0;
  stream.read(reinterpret_cast<char*>(&length), sizeof length);
  std::string header(length, '\0');
  stream.read(header.data(), static_cast<std::streamsize>(length));
  const auto change = [&](std::uint64_t at) {
    stream.seekg(static_cast<std::streamoff>(at));
    const char byte = static_cast<char>(stream.get() ^ 1);
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(byte);
    stream.flush();
  };
  int runs = 0;
  const nlohmann::json tensors = nlohmann::json::parse(header);
  for (const auto& [name, run] : tensors.items()) {
    if (name == "__metadata__" || name == "checksums") continue;
    const auto data = sizeof length + length;
    const std::uint64_t begin = data + run.at("data_offsets").at(0).get<std::uint64_t>();
    const std::uint64_t end = data + run.at("data_offsets").at(1).get<std::uint64_t>();
    for (const std::uint64_t at : {begin, end - 1}) {
      change(at);
      const Status status = load();
      EXPECT_EQ(status.code(), StatusCode::kCorruption) << name << ", byte " << at;
      EXPECT_NE(status.message().find(name.substr(0, name.find('/'))), std::string::npos) << status.message();
      change(at);
    }
    ++runs;
  }
  EXPECT_GE(runs, 30);
  EXPECT_TRUE(load().ok());
}

TEST_F(SavedState, RemovesOnlyTheStatesThatItSupersedes) {
  namespace fs = std::filesystem;
  fs::create_directory(directory_ + "/step-by-step-notes");
  std::ofstream(directory_ + "/step-function.py") << "x";
  fs::create_directory(directory_ + "/step-000000000050");
  fs::create_directory(directory_ + "/.saving-step-000000000007");
  fs::create_directory(directory_ + "/.saving-step-000000000000");  // A killed run left it.
  std::ofstream(directory_ + "/.saving-step-000000000000/rank-0-of-1.safetensors") << "x";
  const ToyOptions options = options_for(1, DataType::kBfloat16, 2);
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    trainer.engine().save_state(directory_, "a");
    trainer.engine().save_state(directory_, "b");  // The same step is saved again.
    static_cast<void>(trainer.step(0));
    trainer.engine().save_state(directory_, "c");
    EXPECT_EQ(trainer.engine().load_state(directory_), "c");
  });
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory_))
    names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{".lock", "latest", "step-000000000001", "step-000000000050",
                                          "step-by-step-notes", "step-function.py"}));
}

// As a relative path, or a local disk with an older copy. The states differ in nothing but values.
TEST_F(SavedState, RanksThatFindDifferentStatesAreRefused) {
  const ToyOptions options = options_for(2, DataType::kBfloat16, 3);
  const std::string other = directory_ + "/other";
  std::string digest;
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(0));
    trainer.engine().save_state(directory_, "x");
    const std::string found = trainer.engine().digest();
    static_cast<void>(trainer.step(1));
    if (rank.communicator->rank() == 0) digest = found;
  });
  run_ranks(3, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(1));
    trainer.engine().save_state(other, "x");
    const int me = rank.communicator->rank();
    try {
      trainer.engine().load_state(me == 2 ? other : directory_);
      ADD_FAILURE() << "two states were loaded";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 2 found another state as"), std::string::npos)
          << error.what();
    }
    trainer.engine().load_state(directory_);
    const std::string loaded = trainer.engine().digest();
    EXPECT_EQ(loaded, digest);
  });
}

TEST_F(SavedState, GoesOnAfterASaveThatFailed) {
  const ToyOptions options = options_for(2, DataType::kBfloat16, 2);
  std::ofstream(directory_ + "/file") << "x";
  const auto expect_nothing_unfinished = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(directory_))
      EXPECT_NE(entry.path().filename().string().find(".saving-"), 0U) << entry.path();
  };
  run_ranks(2, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    EXPECT_THROW(trainer.engine().save_state(directory_ + "/file", "a"), Error);
    EXPECT_THROW(trainer.engine().save_state(directory_, "not text: \xff"), Error);
    if (rank.communicator->rank() == 0) expect_nothing_unfinished();
    EXPECT_THROW(trainer.engine().save_state(directory_, "a", 0), Error);
    EXPECT_THROW(trainer.engine().load_state(directory_), Error) << "there is none yet";
    EXPECT_FALSE(trainer.step(0).skipped);
    trainer.engine().save_state(directory_, "b");
    EXPECT_EQ(trainer.engine().load_state(directory_), "b");
  });
  expect_nothing_unfinished();
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/step-000000000000"));
}

// As where a program reads the weights in the engine's dtype, changes a few and gives all back.
TEST(Engine, ElementsThatAreGivenUnchangedKeepTheirMasterAndAverage) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const DataType dtype : {DataType::kFloat32, DataType::kBfloat16}) {
      for (const bool has_masters : {true, false}) {
        if (dtype == DataType::kFloat32 && !has_masters) continue;
        const std::string trace = "stage " + std::to_string(stage) + (has_masters ? "" : " without masters");
        run_ranks(3, {}, [&](Rank& rank) {
          ToyOptions options = options_for(stage, dtype, 3);
          options.engine.ema = 0.5;
          options.engine.master_weights = has_masters;
          ToyTrainer trainer(options, rank);
          trainer.initialize();
          for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
          Engine& engine = trainer.engine();
          const ParameterId id{0, 0};
          const std::vector<float> masters = engine.get_parameter(id), averages = engine.get_average(id);
          std::vector<float> given = masters;
          if (dtype == DataType::kBfloat16)
            for (float& value : given) value = bfloat16_to_float(float_to_bfloat16(value));
          engine.set_changed_part(id, 0, given);
          EXPECT_TRUE(engine.get_parameter(id) == masters) << trace;
          EXPECT_TRUE(engine.get_average(id) == averages) << trace;

          const std::size_t changed = given.size() / 2;
          given[changed] = 3;
          engine.set_changed_part(id, 1, Span<const float>(given).subspan(1));
          std::vector<float> expected = masters, expected_averages = averages;
          expected[changed] = expected_averages[changed] = 3;
          EXPECT_TRUE(engine.get_parameter(id) == expected) << trace;
          EXPECT_TRUE(engine.get_average(id) == expected_averages) << trace;
          EXPECT_FALSE(trainer.step(2).skipped);

          engine.set_parameter(id, given);
          EXPECT_TRUE(engine.get_parameter(id) == given) << trace;
          EXPECT_TRUE(engine.get_average(id) == given) << trace;
        });
      }
    }
  }
}

TEST(Engine, PlacesManySmallUnits) {
  for (int stage = 0; stage < 4; ++stage) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, 2);
    options.units.assign(100, {{{20}}, {}, true});
    options.steps = 2;
    expect_same(run_toy(options), reference_toy(options), "stage " + std::to_string(stage));
  }
}

// The slice of a rank takes two pieces on the control plane.
TEST(Engine, AParameterOfSeveralPiecesComesBack) {
  for (const int stage : {1, 3}) {
    run_ranks(2, {}, [&](Rank& rank) {
      EngineOptions options;
      options.stage = stage;
      options.ema = 0.5;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      const UnitId unit = engine.add_unit("u");
      const ParameterId large = engine.add_parameter(unit, "large", 2'200'000);
      const ParameterId frozen = engine.add_parameter(unit, "frozen", 2'200'000, 0, /*frozen=*/true);
      engine.commit();
      std::vector<float> values(2'200'000);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
      engine.set_parameter(large, values);
      const std::vector<float> frozen_values(values.rbegin(), values.rend());
      engine.set_parameter(frozen, frozen_values);
      EXPECT_TRUE(engine.get_parameter(large) == values) << "stage " << stage;
      EXPECT_TRUE(engine.get_parameter(frozen) == frozen_values) << "stage " << stage;
      EXPECT_TRUE(engine.get_average(frozen) == frozen_values) << "stage " << stage;
      engine.swap_average();
      EXPECT_TRUE(engine.get_average(large) == values) << "stage " << stage;
      EXPECT_THROW(engine.set_parameter_part(large, 2'200'001, Span<const float>(values).first(1)), Error);
      EXPECT_THROW(engine.set_parameter_part(large, 2'199'999, Span<const float>(values).first(2)), Error);
    });
  }
}

TEST(Engine, RefusesValuesOutOfRange) {
  const auto refused = [](const std::function<void(ToyOptions&)>& change) {
    ToyOptions options = options_for(1, DataType::kFloat32, 1);
    change(options);
    try {
      run_toy(options);
    } catch (const Error& error) {
      return error.code() == StatusCode::kInvalidArgument;
    }
    return false;
  };
  EXPECT_TRUE(refused([](ToyOptions& o) { o.units[1].parameters[0].group = 1 << 30; }));
  EXPECT_TRUE(refused([](ToyOptions& o) { o.engine.beta2 = 1.0; }));
  EXPECT_TRUE(refused([](ToyOptions& o) { o.engine.beta2 = 1.0 - 1e-9; })) << "1 in fp32";
  EXPECT_TRUE(refused([](ToyOptions& o) { o.engine.epsilon = 1e-60; }));
  EXPECT_TRUE(refused([](ToyOptions& o) { o.engine.epsilon = 1e39; })) << "infinite in fp32";
  EXPECT_FALSE(refused([](ToyOptions& o) { o.engine.beta1 = 0.0; }));
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  for (const double value : {std::nan(""), kInfinite, 0.0, -1.0}) {
    EXPECT_TRUE(refused([=](ToyOptions& o) { o.engine.loss_scale.initial = value; })) << value;
    EXPECT_TRUE(refused([=](ToyOptions& o) { o.engine.loss_scale.minimum = value; })) << value;
  }
  EXPECT_TRUE(refused([](ToyOptions& o) { o.engine.loss_scale.growth_interval = 0; }));
  EXPECT_FALSE(refused([](ToyOptions& o) { o.engine.loss_scale.growth_interval = 1; }));
  for (const auto& [threads, is_refused] : {std::pair(-1, true), {0, false}, {4096, false}, {4097, true}})
    EXPECT_EQ(refused([threads = threads](ToyOptions& o) { o.engine.host_threads = threads; }), is_refused)
        << threads;
  for (const double value : {std::nan(""), kInfinite, -1.0})
    EXPECT_TRUE(refused([=](ToyOptions& o) { o.gradient_factor = [=](int) { return value; }; })) << value;
  for (const double value : {std::nan(""), 1e39, -1e308}) {  // Infinite in fp32.
    EXPECT_TRUE(refused([=](ToyOptions& o) { o.groups[1].lr = value; })) << value;
    EXPECT_TRUE(refused([=](ToyOptions& o) { o.groups[1].weight_decay = value; })) << value;
  }
  for (const double value : {-1.0, std::nan("")})
    EXPECT_TRUE(refused([=](ToyOptions& o) { o.clip = value; })) << value;
  run_ranks(1, {}, [&](Rank& rank) {
    const ToyOptions options = options_for(3, DataType::kFloat32, 1);
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    Engine& engine = trainer.engine();
    const std::vector<float> values(700);
    for (const ParameterId id :
         {ParameterId{50, 0}, ParameterId{-1, 0}, ParameterId{0, 7}, ParameterId{0, -1}}) {
      EXPECT_THROW(engine.set_parameter(id, values), Error);
      EXPECT_THROW(engine.get_parameter(id), Error);
    }
    const Stream stream = value_or_throw(rank.backend->stream_create());
    engine.step_begin();
    engine.micro_step_begin(0);
    for (int u = 0; u < 5; ++u) engine.skip(u);
    EXPECT_THROW(engine.skip(5), Error);
    EXPECT_THROW(static_cast<void>(engine.forward(5, stream)), Error);
    EXPECT_FALSE(engine.step({.groups = options.groups}).skipped);
    throw_if_error(rank.backend->stream_destroy(stream));
  });
}

TEST(Engine, NamesTheRankThatGaveOtherValues) {
  for (const bool weights : {true, false}) {
    std::vector<std::string> messages(3);
    EXPECT_THROW(run_ranks(3, {},
                           [&](Rank& rank) {
                             const int r = rank.communicator->rank();
                             ToyOptions options = options_for(1, DataType::kFloat32, 3);
                             if (!weights && r == 2) options.groups[0].lr = 0.5;
                             ToyTrainer trainer(options, rank);
                             trainer.initialize();
                             if (weights && r == 2)
                               trainer.engine().set_parameter({0, 1}, std::vector<float>(65));
                             try {
                               static_cast<void>(trainer.step(0));
                             } catch (const Error& error) {
                               messages[static_cast<std::size_t>(r)] = error.what();
                               throw;
                             }
                           }),
                 Error);
    for (const std::string& message : messages)
      EXPECT_NE(message.find("rank 2"), std::string::npos) << message;
  }
}

// The ranks compare a fingerprint of their values. One of a few bits would miss some of these.
TEST(Engine, NoticesASingleBitThatDiffersBetweenRanks) {
  constexpr int kBits = 52;  // The fraction of a double has them.
  for (int bit = 0; bit < kBits; ++bit) {
    ToyOptions options;
    options.units = {{{{64}}, {}, true}};
    options.ranks = 2;
    options.groups = {{1e-2, 0.1, 0.9, 0.999, 1e-8}};
    EXPECT_THROW(run_ranks(2, {},
                           [&](Rank& rank) {
                             ToyOptions mine = options;
                             if (rank.communicator->rank() == 1) {
                               const auto flipped = [bit](double value) {
                                 return std::bit_cast<double>(std::bit_cast<std::uint64_t>(value) ^
                                                              std::uint64_t{1} << bit);
                               };
                               GroupHyperparameters& group = mine.groups[0];
                               std::function<void()> const changes[] = {
                                   [&] { group.lr = flipped(group.lr); },
                                   [&] { mine.clip = flipped(mine.clip); },
                                   [&] { group.weight_decay = flipped(group.weight_decay); },
                                   [&] { group.beta1 = flipped(0.9); },
                                   [&] { group.beta2 = flipped(0.999); },
                                   [&] { group.epsilon = flipped(1e-8); },
                                   [&] { mine.gradient_factor = [=](int) { return flipped(1.0); }; }};
                               changes[bit % 7]();
                             }
                             ToyTrainer trainer(mine, rank);
                             trainer.initialize();
                             static_cast<void>(trainer.step(0));
                           }),
                 Error)
        << "bit " << bit << " of value " << bit % 7;
  }
}

// The ranks give the same numbers, and one gives them to another parameter, or to other elements of it.
TEST(Engine, NoticesTheSameValuesInAnotherPlace) {
  const std::vector<float> values(20, 1.0f);
  const std::function<void(Engine&, bool)> changes[] = {
      [&](Engine& engine, bool second) {
        engine.set_parameter_part({1, second ? 1 : 0}, 0, values);
      },
      [&](Engine& engine, bool second) {
        engine.set_parameter_part({1, 0}, second ? 1 : 0, values);
      },
      [&](Engine& engine, bool second) {
        engine.freeze({1, second ? 1 : 0});
      },
      [&](Engine& engine, bool second) {
        engine.freeze({1, 0}, second);
      }};
  for (const auto& change : changes) {
    const ToyOptions options = options_for(1, DataType::kFloat32, 2);
    std::vector<std::string> messages(2);
    run_ranks(2, {}, [&](Rank& rank) {
      const int r = rank.communicator->rank();
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      change(trainer.engine(), r == 1);
      trainer.engine().step_begin();
      trainer.engine().micro_step_begin(0);
      for (int u = 0; u < 5; ++u) trainer.engine().skip(u);
      try {
        static_cast<void>(trainer.engine().step({.groups = options.groups}));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
        messages[static_cast<std::size_t>(r)] = error.what();
      }
    });
    const auto number = &change - changes;
    EXPECT_NE(messages[0].find("rank 1"), std::string::npos) << number << ": " << messages[0];
    EXPECT_EQ(messages[1], messages[0]) << number;
    const bool names_parameter = number < 2;
    EXPECT_EQ(messages[0].find("given to parameter p2") != std::string::npos, names_parameter)
        << number << ": " << messages[0];
  }
}

// Values are compared, not the calls that gave them. Older values count until all of them are replaced.
TEST(Engine, ComparesGivenValuesNotTheCalls) {
  using Give = std::function<void(int from, int to, float offset, bool changed)>;
  using Calls = std::function<void(ToyTrainer & trainer, const Give& give)>;
  struct Case {
    const char* name;
    bool is_equal;
    Calls first, second;  // By ranks 0 and 1, and by rank 2.
  };
  // give(): elements of a parameter of 20.
  const Case cases[] = {
      {"pieces in another order", true, [](ToyTrainer&, const Give& give) { give(0, 20, 0, false); },
       [](ToyTrainer&, const Give& give) {
         give(13, 20, 0, false);
         give(0, 7, 0, false);
         give(7, 13, 0, false);
       }},
      {"others before", true, [](ToyTrainer&, const Give& give) { give(0, 20, 0, false); },
       [](ToyTrainer&, const Give& give) {
         give(3, 9, 5, false);
         give(0, 20, 6, false);
         give(0, 5, 0, false);
         give(5, 20, 0, false);
       }},
      {"a part alone", false, [](ToyTrainer&, const Give& give) { give(0, 20, 0, false); },
       [](ToyTrainer&, const Give& give) {
         give(0, 20, 0, false);
         give(3, 9, 5, false);
       }},
      {"two values of each part in another order", false,
       [](ToyTrainer&, const Give& give) {
         for (const float offset : {1.0f, 2.0f}) {
           give(0, 5, offset, false);
           give(5, 10, offset, false);
         }
       },
       [](ToyTrainer&, const Give& give) {
         for (const float offset : {2.0f, 1.0f}) {
           give(0, 5, offset, false);
           give(5, 10, offset, false);
         }
       }},
      {"other parts", false, [](ToyTrainer&, const Give& give) { give(0, 5, 1, false); },
       [](ToyTrainer&, const Give& give) { give(1, 6, 1, false); }},
      {"masters that are kept", false,
       [](ToyTrainer&, const Give& give) {
         give(0, 20, 0, false);
         give(0, 20, 1, true);
       },
       [](ToyTrainer&, const Give& give) {
         give(0, 20, 0.001f, false);
         give(0, 20, 1, true);
       }},
      {"masters that are kept, or not", false, [](ToyTrainer&, const Give& give) { give(0, 20, 1, true); },
       [](ToyTrainer&, const Give& give) { give(0, 20, 1, false); }},
      {"the first values again, after a step, on one rank", false,
       [](ToyTrainer& trainer, const Give& give) {
         give(0, 20, 1, false);
         static_cast<void>(trainer.step(0));
       },
       [](ToyTrainer& trainer, const Give& give) {
         give(0, 20, 1, false);
         static_cast<void>(trainer.step(0));
         give(0, 20, 1, false);
       }},
      {"equal values after a step", true,
       [](ToyTrainer& trainer, const Give& give) {
         give(0, 20, 1, false);
         static_cast<void>(trainer.step(0));
         give(0, 20, 2, false);
       },
       [](ToyTrainer& trainer, const Give& give) {
         give(0, 20, 3, false);
         give(0, 20, 1, false);
         static_cast<void>(trainer.step(0));
         give(10, 20, 2, false);
         give(0, 10, 2, false);
       }},
      {"masters that were kept", true,
       [](ToyTrainer&, const Give& give) {
         give(0, 20, 1, true);
         give(0, 20, 2, false);
       },
       [](ToyTrainer&, const Give& give) { give(0, 20, 2, false); }}};
  for (const Case& one : cases) {
    for (const int stage : {0, 3}) {
      ToyOptions options = options_for(stage, DataType::kBfloat16, 3);
      options.units = {{{{20}}, {}, true}};
      std::atomic<int> refused{0};
      run_ranks(3, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        Engine& engine = trainer.engine();
        const auto give = [&](int from, int to, float offset, bool changed) {
          std::vector<float> values;
          for (int i = from; i < to; ++i) values.push_back(static_cast<float>(i) + offset);
          const auto first = static_cast<std::uint64_t>(from);
          changed ? engine.set_changed_part({0, 0}, first, values)
                  : engine.set_parameter_part({0, 0}, first, values);
        };
        (rank.communicator->rank() < 2 ? one.first : one.second)(trainer, give);
        try {
          static_cast<void>(trainer.step(1));
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), StatusCode::kInvalidArgument) << error.what();
          ++refused;
        }
      });
      EXPECT_EQ(refused, one.is_equal ? 0 : 3) << one.name << ", stage " << stage;
    }
  }
}

TEST(Engine, FailsWithThePeersFirstFailureWhenARankIsLost) {
  for (int stage = 0; stage < 4; ++stage) {
    for (std::uint64_t operation = 0; operation < 6; ++operation) {
      ToyOptions options = options_for(stage, DataType::kBfloat16, 3);
      WorldOptions world;
      world.local.fault = {.rank = 1,
                           .operation = operation,
                           .cause = Status(StatusCode::kIoError, "the cable of rank 1 was pulled")};
      std::vector<std::string> messages(3);
      EXPECT_THROW(run_ranks(3, world,
                             [&](Rank& rank) {
                               try {
                                 ToyTrainer trainer(options, rank);
                                 trainer.initialize();
                                 for (int step = 0; step < 4; ++step) static_cast<void>(trainer.step(step));
                               } catch (const Error& error) {
                                 messages[static_cast<std::size_t>(rank.communicator->rank())] = error.what();
                                 throw;
                               }
                             }),
                   Error);
      for (const std::string& message : messages) {
        EXPECT_NE(message.find("the cable of rank 1 was pulled"), std::string::npos)
            << "stage " << stage << " operation " << operation << ": " << message;
      }
    }
  }
}

// On the virtual clock a collective takes the scripted time, so the right bucket is known.
TEST(Engine, ChoosesTheBucketByTheLinkAndKeepsTheBits) {
  using namespace std::chrono_literals;
  const ToyOptions given = options_for(2, DataType::kBfloat16, 4);
  const ToyResult expected = run_toy(given);
  struct Link {
    std::chrono::nanoseconds latency;
    double bytes_per_second;
    std::uint64_t bucket_bytes;  // All ranks' slices: 19 latencies, rounded to a power of two.
  };
  for (const Link& link :
       {Link{1us, 1e9, 256u << 10}, Link{100us, 1e9, 4u << 20}, Link{1ms, 1e10, 64u << 20}}) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    world.local.latency = link.latency;
    world.local.bytes_per_second = link.bytes_per_second;
    ToyOptions options = given;
    options.engine.bucket_auto = true;
    options.hooks.now = [&clock] { return std::chrono::nanoseconds(clock.now()); };
    run_ranks(4, world, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      EXPECT_EQ(trainer.engine().plan().options.bucket_bytes, link.bucket_bytes);
      const WireSpeed speed = trainer.engine().statistics().wire_speed;
      EXPECT_NEAR(speed.latency_seconds, std::chrono::duration<double>(link.latency).count(), 1e-7);
      // Three of four slices are sent.
      EXPECT_NEAR(speed.bytes_per_second * 3 / 4 / link.bytes_per_second, 1.0, 0.01);
    });
    expect_same(run_toy(options, world), expected, "bucket chosen");
  }
}

// On the virtual clock each unit computes for 2 ms forward and 4 ms backward. A collective over it takes as
// long as its bytes do on a modelled link. With overlap only the first gather and the last reduction cost
// time.
TEST(Engine, HidesGathersAndReductionsBehindCompute) {
  using std::chrono::microseconds;
  using std::chrono::milliseconds;
  constexpr int kRanks = 3;
  constexpr int kUnits = 6;
  constexpr std::uint64_t kElements = 3 * 512 * 4;                  // No padding: 4 leaves a slice.
  constexpr std::uint64_t kSentBytes = 2 * kElements / kRanks * 4;  // One rank, per gather of a unit.
  const auto step_time = [&](int stage, bool overlap) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    world.local.bytes_per_second = static_cast<double>(kSentBytes) / 0.001;  // 1 ms per unit.
    std::vector<HostClock::Nanoseconds> times(kRanks);
    run_ranks(kRanks, world, [&](Rank& rank) {
      EngineOptions options;
      options.stage = stage;
      options.overlap = overlap;
      options.optional_gradients = true;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      for (int u = 0; u < kUnits; ++u)
        engine.add_parameter(engine.add_unit("u" + std::to_string(u)), "p" + std::to_string(u), kElements);
      engine.commit();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      const auto compute = [&](milliseconds duration) {
        throw_if_error(call_on(*rank.backend, stream, [&clock, duration] { clock.sleep(duration); }));
      };
      throw_if_error(rank.communicator->barrier());
      const HostClock::Nanoseconds begin = clock.now();
      engine.step_begin();
      engine.micro_step_begin(0);
      for (int u = 0; u < kUnits; ++u) {
        const Lease lease = engine.forward(u, stream);
        compute(milliseconds(2));
      }
      for (int u = kUnits - 1; u >= 0; --u) {
        const Lease lease = engine.backward(u, stream);
        compute(milliseconds(4));
      }
      static_cast<void>(engine.step({.groups = {{}}}));
      static_cast<void>(engine.statistics());  // Waits for the work that step() queued.
      times[static_cast<std::size_t>(rank.communicator->rank())] = clock.now() - begin;
      throw_if_error(rank.backend->stream_destroy(stream));
    });
    return std::chrono::duration_cast<microseconds>(times[0]);
  };
  const auto near = [](microseconds actual, milliseconds expected) {
    // Only the exchange of norms, a message of a few dozen bytes, is not counted.
    return actual >= expected && actual <= expected + microseconds(100);
  };
  constexpr milliseconds kCompute(kUnits * (2 + 4));
  // Stage 3: the first gather, compute, the last reduction. Without overlap: 6 gathers forward, 4 backward
  // (the last two units are still there), 6 reductions.
  const microseconds hidden3 = step_time(3, true);
  const microseconds exposed3 = step_time(3, false);
  EXPECT_TRUE(near(hidden3, kCompute + milliseconds(2))) << hidden3.count() << " us";
  EXPECT_TRUE(near(exposed3, kCompute + milliseconds(6 + 4 + 6))) << exposed3.count() << " us";
  // Stage 2: the last reduction, and the gather of the updated parameters, which no next step hides here.
  const microseconds hidden2 = step_time(2, true);
  const microseconds exposed2 = step_time(2, false);
  EXPECT_TRUE(near(hidden2, kCompute + milliseconds(1 + 6))) << hidden2.count() << " us";
  EXPECT_TRUE(near(exposed2, kCompute + milliseconds(6 + 6))) << exposed2.count() << " us";
}

// On the virtual clock, the host goes on before time passes if it can. Backward computes until 10 ms, a norm
// takes no time, the update of a unit takes 100 ms.
TEST(Engine, QueuesTheUpdateBeforeTheNormIsKnownAndDoesNotWaitForIt) {
  using std::chrono::milliseconds;
  for (int stage = 0; stage < 4; ++stage) {
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    world.script.kernel_duration = [](const char* kernel) {
      return milliseconds(std::string_view(kernel) == "forebay_adamw_controlled" ? 100 : 0);
    };
    run_ranks(3, world, [&](Rank& rank) {
      EngineOptions options;
      options.stage = stage;
      options.dtype = DataType::kBfloat16;
      options.optional_gradients = true;
      Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
      for (int u = 0; u < 2; ++u)
        engine.add_parameter(engine.add_unit("u" + std::to_string(u)), "p" + std::to_string(u), 5000);
      engine.commit();
      const Stream stream = value_or_throw(rank.backend->stream_create());
      engine.step_begin();
      engine.micro_step_begin(0);
      for (int u = 0; u < 2; ++u) static_cast<void>(engine.forward(u, stream));
      throw_if_error(rank.communicator->barrier());
      const HostClock::Nanoseconds begin = clock.now();
      for (int u = 1; u >= 0; --u) {
        const Lease lease = engine.backward(u, stream);
        throw_if_error(call_on(*rank.backend, stream, [&clock] { clock.sleep(milliseconds(5)); }));
      }
      std::uint64_t launches_at_5_ms = 0;
      std::thread observer([&, registration = HostClock::Registration(clock)]() mutable {
        registration.adopt();
        const HostClock::Registration taking_part = std::move(registration);
        clock.sleep(milliseconds(5));
        launches_at_5_ms = rank.host_backend().call_count(HostCall::kLaunch);
      });

      const StepResult result = engine.step({.groups = {{}}});
      const HostClock::Nanoseconds returned = clock.now() - begin;
      observer.join();
      static_cast<void>(engine.statistics());  // Waits for the update.
      const HostClock::Nanoseconds updated = clock.now() - begin;

      EXPECT_FALSE(result.skipped);
      EXPECT_EQ(launches_at_5_ms, rank.host_backend().call_count(HostCall::kLaunch)) << "stage " << stage;
      EXPECT_EQ(returned, milliseconds(10)) << "stage " << stage;
      EXPECT_EQ(updated, milliseconds(210)) << "stage " << stage;
      throw_if_error(rank.backend->stream_destroy(stream));
    });
  }
}

}  // namespace
}  // namespace forebay::testing
