// What the engine makes of a store that fails: at every range that is made, at every transfer of a short run.
// Either the failure is told, on the rank that met it and on its peers, or the run ends with the bits of an
// undisturbed one.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <optional>

#include "offload/memory_store.h"
#include "tests/engine/toy_cases.h"

namespace forebay::testing {
namespace {

// What a store was asked for, and what it answers the n-th time.
struct Script {
  std::uint64_t range = 0;  // The range that there is no room for, from 1; 0: there is for all.
  std::vector<StoreFault> faults;
  // Counted as asked for. Any thread.
  std::atomic<std::uint64_t> ranges{0}, reads{0}, writes{0};
};

// A store in memory that does as scripted.
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
  Result<StoreTicket> submit(std::span<const StoreTransfer> transfers) override {
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
constexpr int kFaultyRank = 1;  // Not the one that everybody looks at.

struct Setting {
  const char* name;
  int stage;
  Offload offload;
  DataType type;
};

class OffloadFaults : public ::testing::TestWithParam<Setting> {
 protected:
  ToyOptions options(Script& script) const {
    ToyOptions options = options_for(GetParam().stage, GetParam().type, kRanks);
    options.engine.offload = GetParam().offload;
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

  // Trains on both ranks. What each of them was told, and the result where none was told of a failure.
  struct Outcome {
    std::array<Status, kRanks> status;
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
      try {
        ToyTrainer trainer(toy, rank);
        trainer.initialize();
        for (int step = 0; step < toy.steps; ++step) {
          const StepResult done = trainer.step(step);
          result.grad_norms.push_back(done.grad_norm.value_or(std::nan("")));
          result.metrics.push_back(done.metric_sum);
        }
        trainer.collect(result);
      } catch (const Error& error) {
        rank.communicator->abort(error.status());  // As a trainer does that ends.
        outcome.status[index] = error.status();
      }
    });
    if (outcome.status[0].ok() && outcome.status[1].ok()) {
      EXPECT_TRUE(same_bits(results[0], results[1]));
      outcome.result = results[0];
    }
    return outcome;
  }

  // What is scripted was told, or nothing came of it.
  void expect_told_or_same(const Outcome& outcome, const ToyResult& expected, const std::string& cause,
                           const std::string& what, int* told) const {
    if (outcome.result) {
      EXPECT_TRUE(same_bits(*outcome.result, expected)) << what << ": other bits, and nobody was told";
      return;
    }
    ++*told;
    const std::string mine = outcome.status[kFaultyRank].message();
    EXPECT_NE(mine.find(cause), std::string::npos) << what << ": " << mine;
    EXPECT_NE(mine.find("range '"), std::string::npos) << what << ": " << mine;
    EXPECT_FALSE(outcome.status[0].ok()) << what << ": the peer was told nothing";
    EXPECT_NE(outcome.status[0].message().find(cause), std::string::npos)
        << what << ": " << outcome.status[0].message();
  }
};

TEST_P(OffloadFaults, ADiskThatIsFullAtAnyRangeIsNamedOnEveryRank) {
  Script clean;
  ASSERT_TRUE(train(clean).result.has_value());
  ASSERT_GE(clean.ranges, 15u);

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
  ASSERT_GE(reads, 40u);

  int told = 0;
  for (std::uint64_t n = 1; n <= reads; ++n) {
    Script script;
    script.faults = {{StoreDirection::kRead, n, Status(StatusCode::kIoError, "the drive is gone")}};
    expect_told_or_same(train(script), *undisturbed.result, "the drive is gone", "read " + std::to_string(n),
                        &told);
  }
  // What is read ahead for a step that does not come may fail unseen.
  EXPECT_GE(told, static_cast<int>(reads / 2));
}

TEST_P(OffloadFaults, AnyWriteThatFailsIsToldOrChangesNothing) {
  Script clean;
  const Outcome undisturbed = train(clean);
  ASSERT_TRUE(undisturbed.result.has_value());
  const std::uint64_t writes = clean.writes;
  ASSERT_GE(writes, 40u);

  int told = 0;
  for (std::uint64_t n = 1; n <= writes; ++n) {
    Script script;
    const bool full = n % 3 == 0;  // Where a file system cannot reserve, a full disk is met here.
    script.faults = {{StoreDirection::kWrite, n,
                      Status(full ? StatusCode::kOutOfMemory : StatusCode::kIoError, "the drive is gone"),
                      n % 2 == 0}};
    expect_told_or_same(train(script), *undisturbed.result, "the drive is gone", "write " + std::to_string(n),
                        &told);
  }
  EXPECT_EQ(told, static_cast<int>(writes)) << "what was not written is missing later";
}

INSTANTIATE_TEST_SUITE_P(Settings, OffloadFaults,
                         ::testing::Values(Setting{"Optimizer", 2, Offload::kOptimizer, DataType::kBfloat16},
                                           Setting{"OptimizerAndParameters", 3,
                                                   Offload::kOptimizerAndParameters, DataType::kBfloat16},
                                           Setting{"OptimizerAndParametersInFp32", 3,
                                                   Offload::kOptimizerAndParameters, DataType::kFloat32}),
                         [](const auto& info) { return info.param.name; });

// A rank whose store fails between steps is told by what it does next, and goes no further.
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
