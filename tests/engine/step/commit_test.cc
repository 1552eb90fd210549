// On the virtual clock, a rank fails in one of several ways at every collective of a short run. Each time the
// surviving ranks end with the same first failure and have finished the same step: the last step of which any
// rank has all norms. Their masters are those that an undisturbed run has after this step.

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <tuple>
#include <vector>

#include "forebay/host_clock.h"
#include "tests/engine/toy_cases.h"

namespace forebay::testing {
namespace {

using namespace std::chrono_literals;

constexpr int kSteps = 3;

struct Outcome {
  Status cause;
  std::uint64_t committed_step = 0;
  std::vector<std::string> digests;  // The initial weights, then after each step.
  std::string last_digest;
  std::vector<std::uint64_t> operations;  // Issued up to that step.
};

std::uint64_t operation_count(Communicator& communicator) {
  std::uint64_t count = 0;
  for (const OperationTraffic& kind : communicator.operation_traffic()) {
    const std::string name = kind.operation;
    if (name == "reduce_scatter" || name == "all_gather") count += kind.count;
  }
  return count;
}

class CommitPoint : public ::testing::TestWithParam<std::tuple<int, int, Optimizer>> {
 protected:
  int stage() const { return std::get<0>(GetParam()); }
  int size() const { return std::get<1>(GetParam()); }

  std::vector<Outcome> run(const LocalFault& fault) const {
    ToyOptions options = options_for(stage(), DataType::kFloat16, size());
    options.engine.optimizer = std::get<2>(GetParam());
    options.units[0].parameters[0].shape = {35, 20};
    options.units[2].parameters[0].shape = {600, 5};
    HostClock clock(HostClock::Mode::kVirtual);
    WorldOptions world;
    world.clock = &clock;
    world.local.deadline = 30s;
    world.local.fault = fault;
    std::vector<Outcome> outcomes(static_cast<std::size_t>(size()));
    run_ranks(size(), world, [&](Rank& rank) {
      Outcome& outcome = outcomes[static_cast<std::size_t>(rank.communicator->rank())];
      ToyTrainer trainer(options, rank);
      const auto note = [&] {
        outcome.committed_step = trainer.engine().committed_step();
        outcome.last_digest = trainer.engine().shard_digest();
      };
      try {
        trainer.initialize();
        // No rank fails before all ranks have their weights.
        throw_if_error(rank.communicator->barrier());
        for (int step = 0; step <= kSteps; ++step) {
          if (step > 0) static_cast<void>(trainer.step(step));
          outcome.digests.push_back(trainer.engine().shard_digest());
          static_cast<void>(
              trainer.engine().statistics());  // Waits, so that all issued operations are counted.
          outcome.operations.push_back(operation_count(*rank.communicator));
        }
        throw_if_error(rank.communicator->barrier());
      } catch (const Error&) {
        outcome.cause = rank.communicator->status();
        EXPECT_FALSE(outcome.cause.ok() && rank.communicator->rank() != fault.rank);
      }
      note();
    });
    return outcomes;
  }

  // The steps that are committed when the first `count` operations of a rank have succeeded.
  std::uint64_t committed_by(const Outcome& undisturbed, std::uint64_t count) const {
    // At stages 1 and 2 the gathers of the five units' parameters follow the gather of norms.
    const std::uint64_t after = stage() == 1 || stage() == 2 ? awkward_units().size() : 0;
    std::uint64_t steps = 0;
    for (int step = 1; step <= kSteps; ++step) {
      if (undisturbed.operations[static_cast<std::size_t>(step)] - after <= count) ++steps;
    }
    return steps;
  }

  void expect_whole(const std::vector<Outcome>& undisturbed, const LocalFault& fault,
                    std::uint64_t committed) const {
    const std::vector<Outcome> outcomes = run(fault);
    const auto faulty = static_cast<std::size_t>(fault.rank);
    const std::size_t witness = faulty == 0 ? 1 : 0;
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      if (r == faulty && fault.kind == LocalFault::Kind::kDies) continue;
      const Outcome& outcome = outcomes[r];
      EXPECT_FALSE(outcome.cause.ok()) << "rank " << r;
      EXPECT_EQ(outcome.cause.to_string(), outcomes[witness].cause.to_string()) << "rank " << r;
      EXPECT_EQ(outcome.committed_step, committed) << "rank " << r << ": " << outcome.cause.to_string();
      ASSERT_LE(outcome.committed_step, static_cast<std::uint64_t>(kSteps));
      EXPECT_EQ(outcome.last_digest, undisturbed[r].digests[outcome.committed_step]) << "rank " << r;
    }
  }
};

std::string kind_name(LocalFault::Kind kind) {
  switch (kind) {
    case LocalFault::Kind::kFails:
      return "fails";
    case LocalFault::Kind::kFailsAfter:
      return "fails after";
    case LocalFault::Kind::kDies:
      return "dies";
    case LocalFault::Kind::kStalls:
      return "stalls";
    case LocalFault::Kind::kMismatches:
      return "mismatches";
    case LocalFault::Kind::kComesLate:
      return "comes late";
  }
  return {};
}

TEST_P(CommitPoint, AllFinishAStepOrNoneDoesWhereverARankFails) {
  using Kind = LocalFault::Kind;
  const std::vector<Outcome> undisturbed = run({});
  for (const Outcome& outcome : undisturbed) {
    ASSERT_TRUE(outcome.cause.ok()) << outcome.cause.to_string();
    ASSERT_EQ(outcome.committed_step, static_cast<std::uint64_t>(kSteps));
  }
  const std::uint64_t count = undisturbed[0].operations.back();
  ASSERT_GT(count, 20u);
  for (std::uint64_t operation = 0; operation < count; ++operation) {
    const int rank = static_cast<int>(operation % static_cast<std::uint64_t>(size()));
    for (const Kind kind : {Kind::kFails, Kind::kFailsAfter, Kind::kDies, Kind::kStalls, Kind::kMismatches}) {
      SCOPED_TRACE("rank " + std::to_string(rank) + " " + kind_name(kind) + " at operation " +
                   std::to_string(operation) + " of " + std::to_string(count));
      const bool last = kind == Kind::kFailsAfter && operation + 1 == count;
      if (last) continue;  // No rank is left that could notice.
      expect_whole(undisturbed,
                   {.rank = rank,
                    .operation = operation,
                    .kind = kind,
                    .cause = Status(StatusCode::kIoError, "the cable was pulled"),
                    .delay = 1ms},
                   committed_by(undisturbed[0], operation + (kind == Kind::kFailsAfter ? 1 : 0)));
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

TEST_P(CommitPoint, ARankThatComesLateChangesNothing) {
  const std::vector<Outcome> undisturbed = run({});
  const std::uint64_t count = undisturbed[0].operations.back();
  for (std::uint64_t operation = 0; operation < count; ++operation) {
    const std::vector<Outcome> outcomes = run({.rank = static_cast<int>(operation % 3),
                                               .operation = operation,
                                               .kind = LocalFault::Kind::kComesLate,
                                               .cause = {},
                                               .delay = 29s});
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
      ASSERT_TRUE(outcomes[r].cause.ok())
          << "at operation " << operation << ": " << outcomes[r].cause.to_string();
      ASSERT_EQ(outcomes[r].digests, undisturbed[r].digests) << "at operation " << operation;
    }
  }
}

std::string setting_name(const ::testing::TestParamInfo<CommitPoint::ParamType>& info) {
  return "stage" + std::to_string(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param)) +
         "_ranks";
}

INSTANTIATE_TEST_SUITE_P(Engine, CommitPoint,
                         ::testing::Combine(::testing::Range(0, 4), ::testing::Values(3, 4),
                                            ::testing::Values(Optimizer::kAdamW)),
                         setting_name);
// Both have collectives between the gather of norms and the commit point.
INSTANTIATE_TEST_SUITE_P(Adafactor, CommitPoint,
                         ::testing::Combine(::testing::Values(0), ::testing::Values(3),
                                            ::testing::Values(Optimizer::kAdafactor)),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(Muon, CommitPoint,
                         ::testing::Combine(::testing::Values(3), ::testing::Values(3),
                                            ::testing::Values(Optimizer::kMuon)),
                         setting_name);

}  // namespace
}  // namespace forebay::testing
