// A store fails at every range and at every transfer of a short run. Either the failure is reported on its
// rank and on the peers, or the run ends bit for bit as an undisturbed one.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "tests/engine/toy_cases.h"
#include "tests/offload/memory_store.h"

namespace forebay::testing {
namespace {

// The requests of a store, and its answer to the n-th.
struct Script {
  std::uint64_t range = 0;  // The number, from 1, of the range without room; 0: there is room for all.
  std::vector<StoreFault> faults;
  // Counts requests. Threads: any.
  std::atomic<std::uint64_t> ranges{0}, reads{0}, writes{0};
};

// A store in memory that follows the script.
class ScriptedStore final : public Store {
 public:
  explicit ScriptedStore(Script& script)
      : script_(script),
        inner_(value_or_throw(make_memory_store({.alignment_bytes = 4096, .faults = script.faults}))) {}

  Result<StoreRange> create_range(std::string_view name, std::uint64_t bytes) override {
    if (++script_.ranges == script_.range) {
      return Status(StatusCode::kOutOfMemory, "cannot make range '" + std::string(name) +
                                                  "' in '/drive': No space left on device; free some or name "
                                                  "another directory");
    }
    return inner_->create_range(name, bytes);
  }
  Result<StoreTicket> submit(Span<const StoreTransfer> transfers) override {
    Result<StoreTicket> ticket = inner_->submit(transfers);
    if (!ticket.ok()) return ticket;
    for (const StoreTransfer& transfer : transfers)
      ++(transfer.direction == StoreDirection::kRead ? script_.reads : script_.writes);
    return ticket;
  }
  Result<bool> poll(StoreTicket ticket) override { return inner_->poll(ticket); }
  Status wait(StoreTicket ticket, std::chrono::milliseconds deadline) override {
    return inner_->wait(ticket, deadline);
  }
  Status register_memory(std::byte* memory, std::size_t bytes) override {
    return inner_->register_memory(memory, bytes);
  }
  StoreFacts facts() const override { return inner_->facts(); }
  StoreStatistics statistics() const override { return inner_->statistics(); }

 private:
  Script& script_;
  const std::unique_ptr<Store> inner_;
};

constexpr int kRanks = 2;
constexpr int kFaultyRank = 1;  // Not rank 0, which reports results.

struct Setting {
  const char* name;
  int stage;
  Offload offload;
  DataType type;
  Optimizer optimizer = Optimizer::kAdamW;
};

class OffloadFaults : public ::testing::TestWithParam<Setting> {
 protected:
  ToyOptions options(Script& script) const {
    ToyOptions options = options_for(GetParam().stage, GetParam().type, kRanks);
    options.engine.offload = GetParam().offload;
    options.engine.optimizer = GetParam().optimizer;
    options.units[0].parameters[0].shape = {35, 20};
    options.units[2].parameters[0].shape = {600, 5};
    options.engine.tier = Tier::kFile;
    options.engine.host_threads = 1;
    options.engine.staging_bytes = 8u << 20;
    options.hooks.make_store = [&script](int rank) -> Result<std::unique_ptr<Store>> {
      if (rank != kFaultyRank) return make_memory_store({});
      return std::unique_ptr<Store>(std::make_unique<ScriptedStore>(script));
    };
    options.steps = 3;
    return options;
  }

  // The errors of both ranks after training, and the result if there are none.
  struct Outcome {
    std::array<Status, kRanks> status;
    std::array<std::uint64_t, kRanks> committed_step{};
    std::vector<std::string> digests;  // Rank 0's shards: the initial ones, then after each step.
    std::string last_digest;           // After a failure.
    std::optional<ToyResult> result;
  };
  Outcome train(Script& script) const {
    const ToyOptions toy = options(script);
    Outcome outcome;
    std::array<ToyResult, kRanks> results;
    WorldOptions world;
    world.local.deadline = std::chrono::seconds(20);
    run_ranks(kRanks, world, [&](Rank& rank) {
      const auto index = static_cast<std::size_t>(rank.communicator->rank());
      ToyResult& result = results[index];
      std::optional<ToyTrainer> trainer_of_rank;
      try {
        ToyTrainer& trainer = trainer_of_rank.emplace(toy, rank);
        trainer.initialize();
        if (index == 0) outcome.digests.push_back(trainer.engine().shard_digest());
        for (int step = 0; step < toy.steps; ++step) {
          const StepResult done = trainer.step(step);
          result.grad_norms.push_back(done.grad_norm.value_or(std::nan("")));
          result.metrics.push_back(done.metric_sum);
          if (index == 0) outcome.digests.push_back(trainer.engine().shard_digest());
        }
        trainer.collect(result);
      } catch (const Error& error) {
        rank.communicator->abort(error.status());  // As a trainer that ends does.
        outcome.status[index] = error.status();
        if (!trainer_of_rank) return;
        outcome.committed_step[index] = trainer_of_rank->engine().committed_step();
        if (index == 0) outcome.last_digest = trainer_of_rank->engine().shard_digest();
      }
    });
    if (outcome.status[0].ok() && outcome.status[1].ok()) {
      EXPECT_TRUE(same_bits(results[0], results[1]));
      outcome.result = results[0];
    }
    return outcome;
  }

  // The scripted failure was reported, or it had no effect.
  void expect_told_or_same(const Outcome& outcome, const Outcome& undisturbed, const std::string& cause,
                           const std::string& what, int* told) const {
    if (outcome.result) {
      EXPECT_TRUE(same_bits(*outcome.result, *undisturbed.result))
          << what << ": the result differs, and no rank reported a failure";
      return;
    }
    ++*told;
    const std::string mine = outcome.status[kFaultyRank].message();
    // A read may meet what a write left before the write's failure is told.
    const auto is_named = [&](const std::string& message) {
      return message.find(cause) != message.npos ||
             message.find("a write to this place failed") != message.npos;
    };
    EXPECT_TRUE(is_named(mine)) << what << ": " << mine;
    EXPECT_NE(mine.find("range '"), std::string::npos) << what << ": " << mine;
    EXPECT_FALSE(outcome.status[0].ok()) << what << ": the peer reported nothing";
    EXPECT_TRUE(is_named(outcome.status[0].message())) << what << ": " << outcome.status[0].message();
    EXPECT_EQ(outcome.committed_step[0], outcome.committed_step[1]) << what;
    // A step that is committed is whole on the peer.
    if (outcome.digests.empty()) return;
    ASSERT_LT(outcome.committed_step[0], undisturbed.digests.size()) << what;
    EXPECT_EQ(outcome.last_digest, undisturbed.digests[outcome.committed_step[0]]) << what;
  }
};

TEST_P(OffloadFaults, ADiskThatIsFullAtAnyRangeIsNamedOnEveryRank) {
  Script clean;
  ASSERT_TRUE(train(clean).result.has_value());
  ASSERT_GE(clean.ranges, 10u);

  for (std::uint64_t n = 1; n <= clean.ranges; ++n) {
    Script script;
    script.range = n;
    const Outcome outcome = train(script);
    for (const Status& status : outcome.status) {
      EXPECT_EQ(status.code(), StatusCode::kOutOfMemory) << n << ": " << status.to_string();
      for (const char* words : {"'/drive'", "No space left on device", "name another directory"})
        EXPECT_NE(status.message().find(words), std::string::npos) << n << ": " << status.message();
    }
    EXPECT_EQ(script.writes, 0u) << "nothing may begin before all has room";
  }
}

TEST_P(OffloadFaults, AnyReadThatFailsIsToldOrChangesNothing) {
  Script clean;
  const Outcome undisturbed = train(clean);
  ASSERT_TRUE(undisturbed.result.has_value());
  const std::uint64_t reads = clean.reads;
  ASSERT_GE(reads, 30u);

  int told = 0;
  for (std::uint64_t n = 1; n <= reads; ++n) {
    Script script;
    script.faults = {{StoreDirection::kRead, n, Status(StatusCode::kIoError, "the drive is gone")}};
    expect_told_or_same(train(script), undisturbed, "the drive is gone", "read " + std::to_string(n), &told);
  }
  // Reads ahead for a step that never comes may fail unseen.
  EXPECT_GE(told, static_cast<int>(reads / 2));
}

TEST_P(OffloadFaults, AnyWriteThatFailsIsToldOrChangesNothing) {
  Script clean;
  const Outcome undisturbed = train(clean);
  ASSERT_TRUE(undisturbed.result.has_value());
  const std::uint64_t writes = clean.writes;
  ASSERT_GE(writes, 30u);

  int told = 0;
  for (std::uint64_t n = 1; n <= writes; ++n) {
    Script script;
    const bool full = n % 3 == 0;  // On a file system that cannot reserve space, the disk is full here.
    script.faults = {{StoreDirection::kWrite, n,
                      Status(full ? StatusCode::kOutOfMemory : StatusCode::kIoError, "the drive is gone"),
                      n % 2 == 0}};
    expect_told_or_same(train(script), undisturbed, "the drive is gone", "write " + std::to_string(n), &told);
  }
  EXPECT_EQ(told, static_cast<int>(writes)) << "a failed write loses bytes, so it must be reported";
}

INSTANTIATE_TEST_SUITE_P(Settings, OffloadFaults,
                         ::testing::Values(Setting{"Optimizer", 2, Offload::kOptimizer, DataType::kBfloat16},
                                           Setting{"OptimizerAndParameters", 3,
                                                   Offload::kOptimizerAndParameters, DataType::kBfloat16},
                                           Setting{"OptimizerAndParametersInFp32", 3,
                                                   Offload::kOptimizerAndParameters, DataType::kFloat32},
                                           // It reads files before the commit point too.
                                           Setting{"Muon", 2, Offload::kOptimizer, DataType::kBfloat16,
                                                   Optimizer::kMuon},
                                           Setting{"MuonWithParameters", 3, Offload::kOptimizerAndParameters,
                                                   DataType::kFloat32, Optimizer::kMuon}),
                         [](const auto& info) { return info.param.name; });

// A rank alone asks no other, and drops the step all the same.
TEST(OffloadFault, AParameterThatCannotBeReadCommitsNoStep) {
  int met = 0;
  for (std::uint64_t n = 1; n <= 100; ++n) {
    Script script;
    script.faults = {{StoreDirection::kRead, n, Status(StatusCode::kIoError, "the drive is gone")}};
    ToyOptions toy = options_for(3, DataType::kBfloat16, 1);
    toy.engine.offload = Offload::kOptimizerAndParameters;
    toy.engine.tier = Tier::kFile;
    toy.engine.staging_bytes = 8u << 20;
    toy.hooks.make_store = [&script](int) -> Result<std::unique_ptr<Store>> {
      return std::unique_ptr<Store>(std::make_unique<ScriptedStore>(script));
    };
    run_ranks(1, {}, [&](Rank& rank) {
      ToyTrainer trainer(toy, rank);
      std::uint64_t step = 0;
      try {
        trainer.initialize();
        for (; step < 3; ++step) static_cast<void>(trainer.step(static_cast<int>(step)));
      } catch (const Error& error) {
        if (step == 0 && trainer.engine().committed_step() == 0) return;  // Perhaps before the first step.
        if (error.status().message().find("parameters'") == std::string::npos) return;
        ++met;
        EXPECT_EQ(trainer.engine().committed_step(), step) << n << ": " << error.what();
      }
    });
  }
  EXPECT_GE(met, 3);
}

TEST(OffloadFault, AStoreWhoseGranuleCutsStatesIsRefused) {
  for (const auto& [granule_bytes, is_refused] : {std::pair(64u << 10, false), {128u << 10, true}}) {
    ToyOptions toy = options_for(1, DataType::kFloat32, 2);
    toy.engine.offload = Offload::kOptimizer;
    toy.engine.tier = Tier::kFile;
    toy.engine.staging_bytes = 8u << 20;
    toy.hooks.make_store = [granule_bytes = granule_bytes](int) {
      return make_memory_store({.granule_bytes = granule_bytes});
    };
    std::string message;
    try {
      run_ranks(2, {}, [&](Rank& rank) { const ToyTrainer trainer(toy, rank); });
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      message = error.what();
    }
    EXPECT_EQ(message.find("granule of 131072 bytes does not divide 64 KiB") != std::string::npos, is_refused)
        << message;
  }
}

// When a store fails between steps, the rank's next call says so, and the rank ends.
TEST(OffloadFault, LeavesTheEngineFailed) {
  Script script;
  script.faults = {{StoreDirection::kWrite, 1, Status(StatusCode::kIoError, "the drive is gone")}};
  ToyOptions toy = options_for(1, DataType::kFloat32, 1);
  toy.engine.offload = Offload::kOptimizer;
  toy.engine.tier = Tier::kFile;
  toy.engine.staging_bytes = 8u << 20;
  toy.hooks.make_store = [&script](int) -> Result<std::unique_ptr<Store>> {
    return std::unique_ptr<Store>(std::make_unique<ScriptedStore>(script));
  };
  run_ranks(1, {}, [&](Rank& rank) {
    ToyTrainer trainer(toy, rank);
    EXPECT_THROW(trainer.initialize(), Error);
    for (int again = 0; again < 2; ++again) {
      try {
        trainer.engine().step_begin();
        ADD_FAILURE() << "a failed engine began a step";
      } catch (const Error& error) {
        EXPECT_NE(error.status().message().find("the engine failed earlier"), std::string::npos)
            << error.what();
        EXPECT_NE(error.status().message().find("the drive is gone"), std::string::npos) << error.what();
      }
    }
  });
}

}  // namespace
}  // namespace forebay::testing
