// Reductions in two levels and hybrid sharding: the result of their definition at every ZeRO stage, the bytes
// of the plan, and training state that moves from one arrangement to another.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "tests/engine/toy_cases.h"
#include "tests/support/temporary_directory.h"

namespace forebay::testing {
namespace {

struct Arrangement {
  int ranks;
  int group;
};

class EngineGroups : public ::testing::TestWithParam<Arrangement> {
 protected:
  static ToyOptions grouped(int stage, DataType type, bool shard_within_group) {
    ToyOptions options = options_for(stage, type, GetParam().ranks);
    options.engine.group = GetParam().group;
    options.engine.shard_within_group = shard_within_group;
    return options;
  }
};

TEST_P(EngineGroups, GiveTheBitsOfTheDefinitionAtEveryStage) {
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    for (const int micro_steps : {1, 2}) {
      ToyOptions options = grouped(0, type, false);
      options.engine.micro_steps = micro_steps;
      const ToyResult expected = reference_toy(options);
      for (int stage = 0; stage < 4; ++stage) {
        for (const bool within : {false, true}) {
          options.engine.stage = stage;
          options.engine.shard_within_group = within;
          options.asks_norm = within;
          options.engine.bucket_bytes = stage % 2 == 0 ? 5000 : 1u << 20;
          expect_same(run_toy(options), expected,
                      std::string(data_type_name(type)) + ", stage " + std::to_string(stage) + ", " +
                          std::to_string(micro_steps) + " micro-steps" + (within ? ", within groups" : ""));
        }
      }
    }
  }
}

TEST_P(EngineGroups, GiveTheSameBitsWithTheOptimizerOffloaded) {
  for (const int micro_steps : {1, 2}) {
    for (int stage = 0; stage < 4; ++stage) {
      ToyOptions options = grouped(stage, DataType::kBfloat16, true);
      options.engine.micro_steps = micro_steps;
      const ToyResult expected = reference_toy(options);
      options.engine.offload = stage == 3 ? Offload::kOptimizerAndParameters : Offload::kOptimizer;
      options.engine.host_threads = 1;
      expect_same(run_toy(options), expected, "stage " + std::to_string(stage));
    }
  }
}

TEST_P(EngineGroups, MeasureThePlannedBytes) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const bool within : {false, true}) {
      for (const int micro_steps : {1, 2}) {
        ToyOptions options = grouped(stage, DataType::kBfloat16, within);
        options.engine.micro_steps = micro_steps;
        options.steps = 3;
        const EngineStatistics s = run_toy(options).statistics;
        const std::string what = "stage " + std::to_string(stage) + (within ? " within groups" : "");
        EXPECT_EQ(s.peak, s.planned) << what;
        EXPECT_EQ(s.peak_reserved_bytes, s.planned_reserved_bytes) << what;
        EXPECT_EQ(s.traffic.sent, 3 * s.planned_wire_per_step.sent) << what;
        EXPECT_EQ(s.traffic.received, 3 * s.planned_wire_per_step.received) << what;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Arrangements, EngineGroups,
                         ::testing::Values(Arrangement{4, 2}, Arrangement{6, 2}, Arrangement{6, 3},
                                           Arrangement{3, 3}),
                         [](const auto& info) {
                           return "N" + std::to_string(info.param.ranks) + "_in_groups_of_" +
                                  std::to_string(info.param.group);
                         });

TEST(Groups, KeepAGroupsShareOfTheStates) {
  ToyOptions options = options_for(3, DataType::kBfloat16, 4);
  const EngineStatistics all = run_toy(options).statistics;
  options.engine.group = 2;
  options.engine.shard_within_group = true;
  const EngineStatistics within = run_toy(options).statistics;
  EXPECT_EQ(within.peak.optimizer, 2 * all.peak.optimizer);
  EXPECT_EQ(within.peak.parameters, 2 * all.peak.parameters);
  EXPECT_EQ(within.peak.gradients, 2 * all.peak.gradients);
}

TEST(Groups, AccountForEveryPeer) {
  ToyOptions options = options_for(3, DataType::kBfloat16, 4);
  options.engine.group = 2;
  options.engine.shard_within_group = true;
  run_ranks(4, {}, [&](Rank& rank) {
    ToyTrainer trainer(options, rank);
    trainer.initialize();
    static_cast<void>(trainer.step(0));
    static_cast<void>(trainer.engine().statistics());  // Waits.
    const int me = rank.communicator->rank();
    for (const OperationTraffic& operation : trainer.engine().operation_traffic()) {
      ASSERT_EQ(operation.peers.size(), 4u);
      EXPECT_EQ(operation.peers[static_cast<std::size_t>(me)].sent_bytes, 0u);
      if (std::string(operation.operation) != "reduce_scatter") continue;
      // Its neighbour, and the rank with its place in the other all-reduce group.
      EXPECT_GT(operation.peers[static_cast<std::size_t>(me ^ 1)].sent_bytes, 0u);
      EXPECT_GT(operation.peers[static_cast<std::size_t>(me ^ 2)].sent_bytes, 0u);
      EXPECT_EQ(operation.peers[static_cast<std::size_t>(me ^ 3)].sent_bytes, 0u);
    }
  });
}

TEST(Groups, LoadStatesOfOtherArrangements) {
  const std::string directory = make_temporary_directory("groups");
  const auto arrange = [](int stage, int ranks, int group, bool within) {
    ToyOptions options = options_for(stage, DataType::kBfloat16, ranks);
    options.engine.group = group;
    options.engine.shard_within_group = within;
    return options;
  };
  std::string digest;
  const ToyOptions first = arrange(3, 4, 2, true);
  run_ranks(4, {}, [&](Rank& rank) {
    ToyTrainer trainer(first, rank);
    trainer.initialize();
    for (int step = 0; step < 2; ++step) static_cast<void>(trainer.step(step));
    trainer.engine().save_state(directory, "here");
    const std::string mine = trainer.engine().digest();
    if (rank.communicator->rank() == 0) digest = mine;
  });
  for (const ToyOptions& other :
       {arrange(3, 4, 1, false), arrange(2, 6, 3, true), arrange(0, 1, 1, false), arrange(1, 4, 4, true)}) {
    run_ranks(other.ranks, {}, [&](Rank& rank) {
      ToyTrainer trainer(other, rank);
      EXPECT_EQ(trainer.engine().load_state(directory), "here");
      EXPECT_EQ(trainer.engine().digest(), digest);
      trainer.engine().save_state(directory, "here");
    });
  }
  std::filesystem::remove_all(directory);
}

TEST(Groups, AreRefusedWhereTheyDoNotDivideTheRanks) {
  ToyOptions options = options_for(1, DataType::kFloat32, 3);
  options.engine.group = 2;
  EXPECT_THROW(
      {
        try {
          run_toy(options);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
          EXPECT_NE(std::string(error.what()).find("groups of 2 ranks do not divide 3 ranks"),
                    std::string::npos)
              << error.what();
          throw;
        }
      },
      Error);
}

}  // namespace
}  // namespace forebay::testing
