// An optimizer whose states live on the host gives the bits of one on the device, in the memory that was
// planned.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <limits>
#include <set>

#include "engine/toy_cases.h"
#include "forebay/units.h"

namespace forebay::testing {
namespace {

ToyOptions offloaded(int stage, DataType type, int ranks) {
  ToyOptions options = options_for(stage, type, ranks);
  options.engine.offload = Offload::kOptimizer;
  options.engine.host_threads = 2;
  return options;
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
  // Clipped in every step, and not applied in one.
  options.disturbance = [](int rank, int step) {
    return rank == 0 && step == 3 ? std::numeric_limits<float>::infinity() : 0.0f;
  };
  const ToyResult expected = reference_toy(options);
  ASSERT_TRUE(std::isnan(expected.grad_norms[3]));
  ASSERT_GT(expected.grad_norms[0], options.clip);
  for (int stage = 0; stage <= (c.accumulate == Accumulate::kLocal ? 1 : 3); ++stage) {
    for (const bool overlap : {true, false}) {
      options.engine.stage = stage;
      options.engine.overlap = overlap;
      const ToyResult actual = run_toy(options);
      expect_same(actual, expected,
                  "stage " + std::to_string(stage) + ", overlap " + (overlap ? "on" : "off"));
      const EngineStatistics& s = actual.statistics;
      EXPECT_EQ(s.applied_steps, 5u);
      EXPECT_EQ(s.peak, s.planned) << "stage " << stage;
      EXPECT_EQ(s.peak.optimizer, 0u);
      EXPECT_EQ(s.peak_reserved_bytes, s.planned_reserved_bytes) << "stage " << stage;
      EXPECT_GE(s.host_bytes, s.planned_host_bytes);
      EXPECT_LE(s.host_bytes, s.planned_host_bytes + 4096) << "stage " << stage;
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
  for (int stage = 0; stage < 4; ++stage) {
    ToyOptions options = offloaded(stage, DataType::kBfloat16, 3);
    options.engine.micro_steps = 2;
    options.skips = [](int rank, int step, int micro_step, int unit) {
      if (unit == 2) return step == 1 || (step == 2 && rank != 1);
      if (unit == 1) return step == 3 && rank == 0 && micro_step == 1;
      if (unit == 4) return step == 2 && rank == 2;
      return false;
    };
    expect_same(run_toy(options), reference_toy(options), "stage " + std::to_string(stage));
  }
}

TEST(Offload, AllocatesNothingFromTheBackendAfterTheFirstStep) {
  for (int stage = 0; stage < 4; ++stage) {
    const ToyOptions options = offloaded(stage, DataType::kBfloat16, 3);
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

// Twelve units of one size: what is bounded stays small beside what was moved.
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

TEST(Offload, StateGoesFromTheDeviceToTheHostAndBack) {
  std::string pattern = (std::filesystem::temp_directory_path() / "forebay-offload-XXXXXX").string();
  const std::string directory = ::mkdtemp(pattern.data());
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
    for (const bool starts_on_host : {false, true}) {
      ToyOptions options = options_for(2, type, 3);
      options.steps = 6;
      const ToyResult whole = run_toy(options);
      options.engine.offload = starts_on_host ? Offload::kOptimizer : Offload::kNone;
      run_ranks(3, {}, [&](Rank& rank) {
        ToyTrainer trainer(options, rank);
        trainer.initialize();
        for (int step = 0; step < 3; ++step) static_cast<void>(trainer.step(step));
        trainer.engine().save_state(directory, "there");
      });
      for (int stage = 0; stage < 4; ++stage) {
        ToyOptions resumed = options;
        resumed.engine.stage = stage;
        resumed.engine.offload = starts_on_host ? Offload::kNone : Offload::kOptimizer;
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
