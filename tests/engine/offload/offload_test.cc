// Offloaded states give bit for bit the result of states on the device, within the planned memory.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <set>

#include "forebay/units.h"
#include "tests/engine/toy_cases.h"
#include "tests/offload/memory_store.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

ToyOptions offloaded(int stage, DataType type, int ranks) {
  ToyOptions options = options_for(stage, type, ranks);
  options.engine.offload = Offload::kOptimizer;
  options.engine.host_threads = 2;
  return options;
}

// The states to offload, their tier and the fraction.
struct Setting {
  Offload offload;
  Tier tier;
  double fraction;
};
constexpr Setting kSettings[] = {
    {Offload::kOptimizer, Tier::kPinned, 1.0},
    {Offload::kOptimizer, Tier::kFile, 1.0},
    {Offload::kOptimizer, Tier::kPinned, 0.6},
    {Offload::kOptimizer, Tier::kFile, 0.3},
    {Offload::kOptimizerAndParameters, Tier::kPinned, 1.0},
    {Offload::kOptimizerAndParameters, Tier::kFile, 1.0},
    {Offload::kOptimizerAndParameters, Tier::kFile, 0.6},
    {Offload::kOptimizerAndParameters, Tier::kPinned, 0.0},
};

std::string text_of(const Setting& setting) {
  return std::string(offload_name(setting.offload)) + " on " + tier_name(setting.tier) + ", fraction " +
         std::to_string(setting.fraction);
}

void apply(const Setting& setting, ToyOptions* options) {
  options->engine.offload = setting.offload;
  options->engine.tier = setting.tier;
  options->engine.offload_fraction = setting.fraction;
  options->engine.staging_bytes = 8u << 20;
  // Transfers end in a different order on each rank.
  options->hooks.make_store = [](int rank) {
    return make_memory_store({.alignment_bytes = 4096, .order_seed = static_cast<std::uint64_t>(rank) + 1});
  };
}

// All bytes equal the plan.
void expect_planned(const EngineStatistics& s, const std::string& what) {
  EXPECT_EQ(s.peak, s.planned) << what;
  EXPECT_EQ(s.peak_reserved_bytes, s.planned_reserved_bytes) << what;
  EXPECT_EQ(s.host_bytes, s.planned_host_bytes) << what;
  EXPECT_EQ(s.file_bytes, s.planned_file_bytes) << what;
}

struct Case {
  int ranks;
  DataType type;
  int micro_steps;
  Accumulate accumulate;
};
class OffloadContract : public ::testing::TestWithParam<Case> {};

TEST_P(OffloadContract, EveryStageGivesTheBitsOfThePlainLoops) {
  const Case& c = GetParam();
  ToyOptions options = offloaded(0, c.type, c.ranks);
  options.engine.micro_steps = c.micro_steps;
  options.engine.accumulate = c.accumulate;
  options.steps = 6;
  // Every step is clipped, and one is skipped.
  options.disturbance = [](int rank, int step) {
    return rank == 0 && step == 3 ? std::numeric_limits<float>::infinity() : 0.0f;
  };
  const ToyResult expected = reference_toy(options);
  ASSERT_TRUE(std::isnan(expected.grad_norms[3]));
  ASSERT_GT(expected.grad_norms[0], options.clip);
  for (int stage = 0; stage <= (c.accumulate == Accumulate::kLocal ? 1 : 3); ++stage) {
    for (const Setting& setting : kSettings) {
      if (setting.offload == Offload::kOptimizerAndParameters && stage < 3) continue;
      apply(setting, &options);
      for (const bool overlap : {true, false}) {
        options.engine.stage = stage;
        options.engine.overlap = overlap;
        const std::string what = "stage " + std::to_string(stage) + ", overlap " + (overlap ? "on" : "off") +
                                 ", " + text_of(setting);
        const ToyResult actual = run_toy(options);
        expect_same(actual, expected, what);
        EXPECT_EQ(actual.statistics.applied_steps, 5u);
        expect_planned(actual.statistics, what);
        if (setting.fraction == 1.0) {
          EXPECT_EQ(actual.statistics.peak.optimizer, 0u);
        }
        if (setting.fraction == 1.0 && setting.offload == Offload::kOptimizerAndParameters) {
          EXPECT_EQ(actual.statistics.peak.parameters, 0u);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, OffloadContract,
                         ::testing::Values(Case{1, DataType::kFloat32, 1, Accumulate::kShard},
                                           Case{1, DataType::kBfloat16, 1, Accumulate::kShard},
                                           Case{1, DataType::kBfloat16, 3, Accumulate::kShard},
                                           Case{3, DataType::kFloat32, 1, Accumulate::kShard},
                                           Case{3, DataType::kBfloat16, 1, Accumulate::kShard},
                                           Case{3, DataType::kFloat16, 3, Accumulate::kShard},
                                           Case{4, DataType::kFloat32, 3, Accumulate::kShard},
                                           Case{4, DataType::kFloat16, 1, Accumulate::kShard},
                                           Case{3, DataType::kBfloat16, 3, Accumulate::kLocal}),
                         [](const auto& info) {
                           return "N" + std::to_string(info.param.ranks) + "_" +
                                  data_type_name(info.param.type) + "_K" +
                                  std::to_string(info.param.micro_steps) +
                                  (info.param.accumulate == Accumulate::kShard ? "_shard" : "_local");
                         });

TEST(Offload, KeepsUnitsThatNobodyUsed) {
  for (const auto& [stage, setting] : {std::pair(0, 0), std::pair(1, 1), std::pair(2, 0), std::pair(2, 3),
                                       std::pair(3, 1), std::pair(3, 4), std::pair(3, 5), std::pair(3, 6)}) {
    ToyOptions options = offloaded(stage, DataType::kBfloat16, 3);
    apply(kSettings[setting], &options);
    options.engine.micro_steps = 2;
    options.skips = [](int rank, int step, int micro_step, int unit) {
      if (unit == 2) return step == 1 || (step == 2 && rank != 1);
      if (unit == 1) return step == 3 && rank == 0 && micro_step == 1;
      if (unit == 4) return step == 2 && rank == 2;
      return false;
    };
    expect_same(run_toy(options), reference_toy(options),
                "stage " + std::to_string(stage) + ", " + text_of(kSettings[setting]));
  }
}

// The measurement writes a file of its own to the drive, and leaves nothing behind. With a moving average an
// element has more bytes in the file than the update alone needs.
TEST(Offload, AutoMeasuresTheDriveAndGivesTheBitsOfThePlainLoops) {
  for (const Offload states : {Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
    for (const double average : {0.0, 0.9}) {
      const TemporaryDirectory directory;
      ToyOptions options = offloaded(3, DataType::kBfloat16, 2);
      options.units.push_back({{{1 << 20}}, {}, true});
      options.engine.bucket_bytes = 1u << 20;
      options.engine.offload = states;
      options.engine.tier = Tier::kFile;
      options.engine.offload_auto = true;
      options.engine.ema = average;
      options.engine.offload_directories = {directory / ""};

      expect_same(run_toy(options), reference_toy(options), offload_name(states));

      EXPECT_TRUE(std::filesystem::is_empty(directory / "")) << "a file is left";
    }
  }
}

// On the virtual clock only rank 0's host is slow, so that it would keep all units on the device, and only
// rank 1 has a budget, for three of them.
TEST(Offload, AutoKeepsTheUnitsThatTheTightestRankHasRoomFor) {
  constexpr int kKept = 3;
  HostClock clock(HostClock::Mode::kVirtual);
  WorldOptions world;
  world.clock = &clock;
  ToyOptions options = offloaded(2, DataType::kBfloat16, 2);
  options.units.assign(12, ToyUnit{{{40000}}, {}, true});
  options.hooks.now = [&clock] { return std::chrono::nanoseconds(clock.now()); };
  std::vector<int> kept(2);
  run_ranks(2, world, [&](Rank& rank) {
    const int r = rank.communicator->rank();
    ToyOptions mine = options;
    if (r == 0)
      mine.hooks.before_host_update = [&clock](std::uint64_t) {
        clock.sleep(std::chrono::milliseconds(100));
      };
    if (r == 1) {
      Engine planner(*rank.backend, *rank.kernels, *rank.communicator, mine.engine);
      for (int u = 0; u < 12; ++u)
        planner.add_parameter(planner.add_unit("u" + std::to_string(u)), "p" + std::to_string(u), 40000);
      planner.declare_activations(1000);
      PlanOptions planned = planner.plan().options;
      planned.device_units = kKept;
      mine.engine.memory_bytes = value_or_throw(make_plan(planner.model(), planned)).reserved_bytes;
    }
    mine.engine.offload_auto = true;
    ToyTrainer trainer(mine, rank);
    kept[static_cast<std::size_t>(r)] = trainer.engine().plan().device_units;
  });
  EXPECT_EQ(kept, (std::vector<int>{kKept, kKept}));
}

// Units of several pieces, at every place where a piece may end.
TEST(Offload, PassesUnitsThroughHostMemoryInPieces) {
  // Without master weights the place of an element in its parameter decides how it is rounded.
  for (const auto& [type, master_weights] :
       {std::pair(DataType::kFloat32, true), std::pair(DataType::kBfloat16, true),
        std::pair(DataType::kBfloat16, false)}) {
    for (const Setting& setting : {kSettings[1], kSettings[5]}) {
      ToyOptions options = options_for(3, type, 2);
      options.engine.master_weights = master_weights;
      options.units = {ToyUnit{{{230000}, {13, 1}, {150000, 1}}, {}, true},
                       ToyUnit{{{100}, {400000, 0, true}, {262144, 1}}, {}, true}};
      const ToyResult expected = run_toy(options);
      apply(setting, &options);
      const ToyResult actual = run_toy(options);
      EXPECT_TRUE(same_bits(actual, expected)) << data_type_name(type) << ", " << text_of(setting)
                                               << (master_weights ? "" : ", no master weights");
      expect_planned(actual.statistics, text_of(setting));
      EXPECT_LE(actual.statistics.planned_host_bytes,
                (8u << 20) + element_bytes(type) * (230000 + 150000 + 262144 + 4096) / 2);
    }
  }
}

TEST(Offload, MovesThePlannedBytesThroughFiles) {
  for (const Setting& setting : {kSettings[1], kSettings[5]}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
      ToyOptions options = options_for(3, type, 2);
      options.units.assign(4, ToyUnit{{{1 << 18}}, {}, true});
      options.groups = {{1e-2, 0.1}};
      apply(setting, &options);
      run_ranks(2, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
        const EngineStatistics before = trainer.engine().statistics();
        for (int step = 2; step < 5; ++step) static_cast<void>(trainer.step(step));
        const EngineStatistics after = trainer.engine().statistics();
        const FileBytes planned = trainer.engine().plan().file_bytes;
        EXPECT_EQ(after.file_read_bytes - before.file_read_bytes, 3 * planned.read_per_step)
            << text_of(setting) << data_type_name(type);
        EXPECT_EQ(after.file_written_bytes - before.file_written_bytes, 3 * planned.written_per_step);
        // 12 bytes each way for an element of the optimizer. A 2-byte parameter is written once, and read for
        // every gather.
        const std::uint64_t elements = 4 * (1 << 18) / 2;
        EXPECT_EQ(planned.optimizer, 12 * elements);
        if (setting.offload == Offload::kOptimizer) {
          EXPECT_EQ(planned.read_per_step, 12 * elements);
          EXPECT_EQ(planned.written_per_step, 12 * elements);
        } else {
          // Two units stay in their slots between the passes.
          EXPECT_EQ(planned.read_per_step, (12 + element_bytes(type) * 6 / 4) * elements);
          EXPECT_EQ(planned.written_per_step, (12 + (type == DataType::kFloat32 ? 0 : 2)) * elements);
        }
      });
    }
  }
}

// Neighbours in a granule of a file stay as they are.
TEST(Offload, ParametersMayBeSetInAnyOrder) {
  for (const Setting& setting : {kSettings[0], kSettings[1], kSettings[5]}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
      ToyOptions options = options_for(3, type, 2);
      apply(setting, &options);
      run_ranks(2, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        Engine& engine = trainer.engine();
        const std::string digest = engine.digest();
        for (int unit = static_cast<int>(engine.model().units.size()) - 1; unit >= 0; --unit) {
          const auto& parameters = engine.model().units[static_cast<std::size_t>(unit)].parameters;
          for (int index = static_cast<int>(parameters.size()) - 1; index >= 0; --index) {
            const std::vector<float> values = engine.get_parameter({unit, index});
            engine.set_parameter({unit, index}, values);
          }
        }
        EXPECT_EQ(engine.digest(), digest) << text_of(setting) << data_type_name(type);
      });
    }
  }
}

// Parameters of two bytes take the place of gradients of four, a million at a time.
TEST(Offload, UpdatesMoreElementsThanAreRoundedAtATime) {
  ToyOptions options = options_for(1, DataType::kBfloat16, 1);
  options.units = {{{{(1 << 20) + 3000}}, {}, true}};
  options.groups = {{1e-2, 0.1}};
  options.engine.micro_steps = 2;
  options.steps = 2;
  const std::string expected = run_toy(options).digest;
  apply(kSettings[0], &options);
  EXPECT_EQ(run_toy(options).digest, expected);
}

// On the virtual clock updates and copies are so slow that the next step is queued before the last one's
// update begins. The second step uses another learning rate, and one unit of two.
TEST(Offload, TheNextStepMayBeQueuedBeforeAnUpdateBegins) {
  for (const Tier tier : {Tier::kPinned, Tier::kFile}) {
    const auto trained = [&](bool waits) {
      HostClock clock(HostClock::Mode::kVirtual);
      WorldOptions world;
      world.clock = &clock;
      world.script.copy_bytes_per_second = 1e6;
      std::vector<float> values;
      run_ranks(1, world, [&](Rank& rank) {
        internal::EngineHooks hooks;
        hooks.before_host_update = [&clock](std::uint64_t) { clock.sleep(std::chrono::milliseconds(100)); };
        hooks.make_store = [](int) { return make_memory_store({.alignment_bytes = 4096}); };
        EngineOptions options;
        options.stage = 1;
        options.offload = Offload::kOptimizer;
        options.tier = tier;
        options.staging_bytes = 8u << 20;
        options.host_threads = 1;
        options.hooks = &hooks;
        Engine engine(*rank.backend, *rank.kernels, *rank.communicator, options);
        std::vector<ParameterId> ids;
        for (const char* name : {"u", "v"})
          ids.push_back(engine.add_parameter(engine.add_unit(name), name, 1000));
        engine.commit();
        const Stream stream = value_or_throw(rank.backend->stream_create());
        for (int step = 0; step < 3; ++step) {
          engine.step_begin();
          engine.micro_step_begin(0);
          static_cast<void>(engine.forward(0, stream));
          if (step == 1) {
            engine.skip(1);
          } else {
            static_cast<void>(engine.forward(1, stream));
          }
          for (int unit = step == 1 ? 0 : 1; unit >= 0; --unit) {
            Lease lease = engine.backward(unit, stream);
            const Gradient gradient = lease.gradient(ids[static_cast<std::size_t>(unit)]);
            throw_if_error(rank.backend->fill_async(gradient.data, 0x3c, 1000 * sizeof(float), stream));
          }
          static_cast<void>(engine.step({.groups = {{.lr = step == 1 ? 0.5 : 0.125}}}));
          if (waits) static_cast<void>(engine.statistics());
        }
        for (const ParameterId id : ids) values.push_back(engine.get_parameter(id)[999]);
        throw_if_error(rank.backend->stream_destroy(stream));
      });
      return values;
    };
    EXPECT_EQ(trained(false), trained(true)) << tier_name(tier);
  }
}

// On the virtual clock one kind of work is slow, so that work that does not wait for it comes too early.
TEST(Offload, NoPartOfAStepOvertakesASlowerOne) {
  using std::chrono::milliseconds;
  WorldOptions slow_copies, slow_kernels, slow_link;
  slow_copies.script.copy_bytes_per_second = 1e6;
  slow_kernels.script.kernel_duration = [](const char*) { return milliseconds(1); };
  slow_link.local.latency = milliseconds(1);
  for (WorldOptions* world : {&slow_copies, &slow_kernels, &slow_link}) {
    for (const int stage : {1, 2, 3}) {
      for (const Setting& setting : {kSettings[0], kSettings[2], kSettings[5]}) {
        if (setting.offload == Offload::kOptimizerAndParameters && stage < 3) continue;
        for (const int micro_steps : {1, 2}) {
          ToyOptions options = offloaded(stage, DataType::kBfloat16, 3);
          apply(setting, &options);
          options.engine.micro_steps = micro_steps;
          options.steps = 2;
          HostClock clock(HostClock::Mode::kVirtual);
          world->clock = &clock;
          expect_same(run_toy(options, *world), reference_toy(options),
                      "stage " + std::to_string(stage) + ", " + text_of(setting));
        }
      }
    }
  }
}

// Small units end in the middle of a page.
TEST(Offload, PlansWholePagesOfFiles) {
  for (const Setting& setting : {kSettings[1], kSettings[5]}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
      ToyOptions options = options_for(3, type, 2);
      apply(setting, &options);
      run_ranks(2, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
        const EngineStatistics before = trainer.engine().statistics();
        static_cast<void>(trainer.step(2));
        const EngineStatistics after = trainer.engine().statistics();
        const FileBytes planned = trainer.engine().plan().file_bytes;
        EXPECT_EQ(after.file_bytes, planned.total()) << text_of(setting) << data_type_name(type);
        EXPECT_EQ(after.planned_file_bytes, planned.total());
        EXPECT_EQ(planned.total() % 4096, 0u);
        EXPECT_EQ(after.file_read_bytes - before.file_read_bytes, planned.read_per_step);
        EXPECT_EQ(after.file_written_bytes - before.file_written_bytes, planned.written_per_step);
      });
    }
  }
}

// Each element of the optimizer takes 14 bytes of the host, 16 with the parameters, and 2 more where
// micro-steps add up on the host.
TEST(Offload, TakesThePapersBytesOfTheHost) {
  ModelShape model;
  model.units.assign(6, UnitShape{});
  std::uint64_t elements = 0;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    model.units[u].name = "u" + std::to_string(u);
    model.units[u].parameters.push_back({"p" + std::to_string(u), 3u << 20, 0, false});
    elements += 3u << 20;
  }
  for (const int ranks : {1, 3}) {
    for (const int micro_steps : {1, 4}) {
      for (const int stage : {1, 2, 3}) {
        PlanOptions options;
        options.stage = stage;
        options.ranks = ranks;
        options.dtype = DataType::kBfloat16;
        options.micro_steps = micro_steps;
        options.bucket_bytes = 1 << 20;
        options.offload = Offload::kOptimizer;
        const std::uint64_t more = micro_steps > 1 ? 2 : 0;
        const auto ranked = [&](std::uint64_t bytes) {
          return bytes * elements / static_cast<unsigned>(ranks);
        };
        Plan plan = value_or_throw(make_plan(model, options));
        EXPECT_EQ(plan.host_bytes.total() - plan.host_bytes.staging, ranked(14 + more));
        EXPECT_LE(plan.host_bytes.staging, 2u << 20);
        EXPECT_EQ(plan.bytes.optimizer, 0u);
        if (stage >= 2) {
          EXPECT_LE(plan.bytes.gradients, 2 * 4 * (3u << 20));
        }
        if (stage < 3) continue;
        options.offload = Offload::kOptimizerAndParameters;
        plan = value_or_throw(make_plan(model, options));
        EXPECT_EQ(plan.host_bytes.total() - plan.host_bytes.staging, ranked(16 + more));
        EXPECT_EQ(plan.bytes.parameters, 0u);
        options.tier = Tier::kFile;
        plan = value_or_throw(make_plan(model, options));
        EXPECT_EQ(plan.file_bytes.total(), ranked(14));
        EXPECT_EQ(plan.host_bytes.total() - plan.host_bytes.staging, ranked(2 + more));
        EXPECT_LE(plan.host_bytes.staging, options.staging_bytes + (2u << 20));
      }
    }
  }
}

TEST(Offload, AllocatesNothingFromTheBackendAfterTheFirstStep) {
  for (const auto& [stage, setting] :
       {std::pair(0, 0), std::pair(1, 1), std::pair(2, 0), std::pair(3, 4), std::pair(3, 5)}) {
    ToyOptions options = offloaded(stage, DataType::kBfloat16, 3);
    apply(kSettings[setting], &options);
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      trainer.initialize();
      static_cast<void>(trainer.step(0));
      const HostCall calls[] = {HostCall::kReserve,      HostCall::kChunkCreate, HostCall::kMap,
                                HostCall::kUnmap,        HostCall::kAlloc,       HostCall::kSetAccess,
                                HostCall::kStreamCreate, HostCall::kEventCreate, HostCall::kPin};
      std::vector<std::uint64_t> before;
      for (const HostCall call : calls) before.push_back(rank.host_backend().call_count(call));
      for (int step = 1; step < 4; ++step) static_cast<void>(trainer.step(step));
      for (std::size_t i = 0; i < before.size(); ++i)
        EXPECT_EQ(rank.host_backend().call_count(calls[i]), before[i]) << i;
    });
  }
}

// Twelve units of one size: staging memory stays small beside the bytes that pass through it.
ToyOptions deep(int stage, int ranks) {
  ToyOptions options = options_for(stage, DataType::kBfloat16, ranks);
  options.units.assign(12, ToyUnit{{{40000}}, {}, true});
  options.groups = {{1e-2, 0.1}};
  return options;
}

TEST(Offload, TrainsWithinABudgetThatTheWholeWouldNeedTwice) {
  for (const auto& [stage, ranks] : {std::pair(2, 1), std::pair(3, 1), std::pair(2, 3), std::pair(3, 3)}) {
    ToyOptions roomy = deep(stage, ranks);
    const ToyResult expected = run_toy(roomy);
    ToyOptions tight = deep(stage, ranks);
    tight.engine.offload = Offload::kOptimizer;
    tight.engine.memory_bytes = run_toy(tight).statistics.planned_reserved_bytes;
    const ToyResult actual = run_toy(tight);
    EXPECT_TRUE(same_bits(actual, expected)) << "stage " << stage << ", " << ranks << " ranks";
    EXPECT_EQ(actual.statistics.peak_reserved_bytes, tight.engine.memory_bytes);
    if (ranks == 1) {
      EXPECT_GE(expected.statistics.planned.total(), 2 * actual.statistics.planned.total())
          << "stage " << stage;
    }
    roomy.engine.memory_bytes = tight.engine.memory_bytes;
    EXPECT_THROW(static_cast<void>(run_toy(roomy)), Error) << "stage " << stage << ", " << ranks << " ranks";
  }
}

TEST(Offload, TrainsWithOffloadedParametersInAQuarterOfTheBudget) {
  for (const Setting& setting : {kSettings[4], kSettings[5]}) {
    for (const int ranks : {1, 3}) {
      ToyOptions roomy = deep(3, ranks);
      const ToyResult expected = run_toy(roomy);
      ToyOptions tight = deep(3, ranks);
      apply(setting, &tight);
      tight.engine.memory_bytes = run_toy(tight).statistics.planned_reserved_bytes;
      const ToyResult actual = run_toy(tight);
      EXPECT_TRUE(same_bits(actual, expected)) << text_of(setting) << ", " << ranks << " ranks";
      EXPECT_EQ(actual.statistics.peak_reserved_bytes, tight.engine.memory_bytes);
      if (ranks == 1) {
        EXPECT_GE(expected.statistics.planned.total(), 4 * actual.statistics.planned.total());
      }
      roomy.engine.memory_bytes = tight.engine.memory_bytes;
      EXPECT_THROW(static_cast<void>(run_toy(roomy)), Error) << ranks << " ranks";
    }
  }
}

// Another user may have the memory of spilled states; fetched states are as before.
TEST(Offload, GivesDeviceMemoryBackBetweenStepsAndTakesItAgain) {
  for (const auto& [stage, setting] : {std::pair(0, -1), std::pair(1, -1), std::pair(2, 0), std::pair(3, -1),
                                       std::pair(3, 2), std::pair(3, 5)}) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, 3);
    options.engine.micro_steps = stage == 2 ? 2 : 1;
    options.engine.optimizer = stage == 0 || setting == 2 ? Optimizer::kAdafactor : Optimizer::kAdamW;
    options.steps = 5;
    const ToyResult expected = reference_toy(options);
    if (setting >= 0) apply(kSettings[setting], &options);
    options.engine.spillable = true;
    std::vector<ToyResult> results(3);
    run_ranks(3, {}, [&](Rank& rank) {
      ToyTrainer trainer(options, rank);
      Engine& engine = trainer.engine();
      trainer.initialize();
      ToyResult& result = results[static_cast<std::size_t>(rank.communicator->rank())];
      const Plan plan = engine.plan();
      for (int step = 0; step < options.steps; ++step) {
        const StepResult done = trainer.step(step);
        result.grad_norms.push_back(done.grad_norm.value_or(std::nan("")));
        result.metrics.push_back(done.metric_sum);
        const std::size_t before = rank.host_backend().charged_bytes();
        if (step % 2 == 0) {
          engine.spill({.parameters = false, .optimizer = false});
          const std::uint64_t chunk = plan.options.chunk_bytes;
          EXPECT_EQ(before - rank.host_backend().charged_bytes(), round_up(plan.bytes.gradients, chunk) +
                                                                      round_up(plan.bytes.buckets, chunk) +
                                                                      round_up(plan.bytes.activations, chunk))
              << stage;
        }
        engine.spill();
        std::uint64_t slots = 0;
        for (const std::uint64_t bytes : plan.slots.slot_bytes)
          slots += round_up(bytes, plan.options.chunk_bytes);
        EXPECT_EQ(before - rank.host_backend().charged_bytes(), plan.reserved_bytes - slots) << stage;
        EXPECT_THROW(engine.step_begin(), Error);
        EXPECT_THROW(static_cast<void>(engine.digest()), Error);
        // Another user writes over the freed memory.
        const DevicePtr other = value_or_throw(rank.backend->alloc(plan.reserved_bytes - slots));
        std::memset(other, 0x7F, plan.reserved_bytes - slots);
        throw_if_error(rank.backend->free(other));
        engine.fetch();
        engine.fetch();
        EXPECT_EQ(rank.host_backend().charged_bytes(), before);
      }
      trainer.collect(result);
      EXPECT_EQ(result.statistics.peak_reserved_bytes, result.statistics.planned_reserved_bytes);
    });
    expect_same(results[0], expected, "stage " + std::to_string(stage));
  }
}

TEST(Offload, StaysSpilledWhileTheDeviceIsTaken) {
  ToyOptions options = options_for(1, DataType::kFloat32, 1);
  options.engine.spillable = true;
  WorldOptions world;
  world.backend.memory_bytes = 64u << 20;
  run_ranks(1, world, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(0));
    const std::string digest = trainer.engine().digest();
    trainer.engine().spill();
    const std::size_t left = rank.backend->memory_info().free_bytes;
    const DevicePtr other = value_or_throw(rank.backend->alloc(left));
    EXPECT_THROW(trainer.engine().fetch(), Error);
    EXPECT_THROW(trainer.engine().step_begin(), Error);
    EXPECT_THROW(static_cast<void>(trainer.engine().shard_digest()), Error);
    throw_if_error(rank.backend->free(other));
    trainer.engine().fetch();
    EXPECT_EQ(trainer.engine().digest(), digest);
    static_cast<void>(trainer.step(1));
  });
  options.engine.spillable = false;
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    EXPECT_THROW(trainer.engine().spill(), Error);
    static_cast<void>(trainer.step(0));
  });
}

TEST(Offload, StateGoesFromTheDeviceToTheHostAndBack) {
  const std::string directory = make_temporary_directory("offload");
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
    for (const bool starts_on_host : {false, true}) {
      ToyOptions options = options_for(2, type, 3);
      options.steps = 6;
      const ToyResult whole = run_toy(options);
      if (starts_on_host) apply(kSettings[type == DataType::kFloat32 ? 0 : 1], &options);
      run_ranks(3, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 3; ++step) static_cast<void>(trainer.step(step));
        trainer.engine().save_state(directory, "there");
      });
      for (int stage = 0; stage < 4; ++stage) {
        ToyOptions resumed = options;
        resumed.engine.stage = stage;
        resumed.engine.offload = Offload::kNone;
        if (!starts_on_host) apply(kSettings[stage < 3 ? stage % 2 : 5], &resumed);
        std::vector<ToyResult> results(3);
        run_ranks(3, {}, [&](Rank& rank) {
          ToyTrainer trainer(resumed, rank);
          EXPECT_EQ(trainer.engine().load_state(directory), "there");
          for (int step = 3; step < 6; ++step) static_cast<void>(trainer.step(step));
          trainer.collect(results[static_cast<std::size_t>(rank.communicator->rank())]);
        });
        EXPECT_EQ(results[0].digest, whole.digest)
            << "from " << (starts_on_host ? "host" : "device") << " to stage " << stage;
      }
      std::filesystem::remove_all(directory);
    }
  }
}

}  // namespace
}  // namespace forebay::testing
