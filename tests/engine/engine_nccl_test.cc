// The engine over the fake NCCL, on a fake GPU for each rank. Results are bit for bit those of the `local`
// communicator on the host. When a collective fails, in any way, the surviving ranks end with one first
// failure after the same step, with the masters that an undisturbed run has after this step.
//
// Under the label slow every collective fails in turn; otherwise the first, the middle and the last one, and
// those around each step's commit point.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/nccl/abi.h"
#include "forebay/nccl_communicator.h"
#include "tests/engine/toy_cases.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/fake_nccl_library.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/slow.h"

namespace forebay::testing {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

// The deadline of runs in which nothing waits for it.
constexpr std::chrono::milliseconds kLongDeadline = 60s;

std::unique_ptr<Communicator> over_nccl(std::unique_ptr<Communicator> control, Rank& rank,
                                        std::chrono::milliseconds deadline) {
  return value_or_throw(create_nccl_communicator(std::move(control), static_cast<CudaBackend&>(*rank.backend),
                                                 *rank.kernels, {.library = {}, .deadline = deadline}));
}

class EngineOverNccl : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(EngineOverNccl, GivesTheBitsOfLocalRanksOnTheHost) {
  const auto [stage, ranks] = GetParam();
  struct Case {
    DataType type;
    int micro_steps;
    bool in_groups;
  };
  for (const auto& [type, micro_steps, in_groups] :
       {Case{DataType::kBfloat16, 1, false}, Case{DataType::kFloat32, 3, false},
        Case{DataType::kBfloat16, 2, true}}) {
    ToyOptions options = options_for(stage, type, ranks);
    options.engine.micro_steps = micro_steps;
    if (in_groups) {
      options.engine.group = ranks % 2 == 0 ? 2 : ranks;
      options.engine.shard_within_group = stage % 2 == 1;
    }
    const ToyResult expected = run_toy(options);
    FakeGpu gpu(gpus(ranks));
    const FakeNcclLibrary nccl;
    WorldOptions world;
    world.create_backend = [&](int rank) { return gpu.create_backend(rank); };
    world.connect = [](std::unique_ptr<Communicator> local, Rank& rank) {
      return over_nccl(std::move(local), rank, kLongDeadline);
    };

    const ToyResult actual = run_toy(options, world);

    const std::string what =
        std::string(data_type_name(type)) + ", " + std::to_string(micro_steps) + " micro-steps";
    expect_same(actual, expected, what);
    EXPECT_EQ(actual.digest, expected.digest) << what;
    EXPECT_EQ(actual.statistics.traffic.sent, expected.statistics.traffic.sent) << what;
    EXPECT_EQ(actual.statistics.traffic.received, expected.statistics.traffic.received) << what;
    EXPECT_GT(nccl.controls().accounts().launches, 0u) << "nothing went over NCCL";
  }
}

INSTANTIATE_TEST_SUITE_P(Toy, EngineOverNccl,
                         ::testing::Combine(::testing::Range(0, 4), ::testing::Values(3, 4)),
                         [](const auto& info) {
                           return "stage" + std::to_string(std::get<0>(info.param)) + "_" +
                                  std::to_string(std::get<1>(info.param)) + "_ranks";
                         });

// --- faults ---

constexpr int kRanks = 3;
constexpr int kSteps = 3;
// Deadlines: of operations that never end, and beyond the time in which a failure is noticed and spread. The
// time of an undisturbed run is added to both, because ranks are late on a busy machine.
constexpr std::chrono::milliseconds kShortDeadline = 1500ms;
constexpr std::chrono::milliseconds kPatience = 10s;
// The operations that connect the ranks, before the engine's first operation.
constexpr std::uint64_t kConnecting = 2;

// The least number of calls into NCCL before the engine's first operation, and after its last.
constexpr std::uint64_t kCallsToJoin = 20;
constexpr std::uint64_t kCallsToLeave = 10;

enum class Kind {
  kNone,
  kFails,    // The rank fails in place of the operation.
  kRefused,  // A call into NCCL fails there.
  kBreaks,   // NCCL finds an error behind our back while the operation runs.
  kHangs,    // NCCL never ends it, on any rank.
  kGives,    // The other ranks receive the rank's bytes; it receives nothing.
  kOther,    // The rank issues something else.
};

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kFails:
      return "fails";
    case Kind::kRefused:
      return "is refused by NCCL";
    case Kind::kBreaks:
      return "hears of an error";
    case Kind::kHangs:
      return "hangs";
    case Kind::kGives:
      return "gives and hangs";
    case Kind::kOther:
      return "issues something else";
    default:
      return "is well";
  }
}

struct Fault {
  Kind kind = Kind::kNone;
  int rank = 0;
  std::uint64_t operation = 0;  // Number among the engine's operations on that rank, from 0.
  std::uint64_t call = 0;       // kRefused: number among the rank's calls into NCCL.
};

// Counts a rank's data operations. The faulty one fails, or another is issued in its place.
class Disturbed final : public ForwardingCommunicator {
 public:
  Disturbed(std::unique_ptr<Communicator> inner, const Fault& fault)
      : ForwardingCommunicator(std::move(inner)), fault_(fault) {}

  std::uint64_t issued() const noexcept { return issued_; }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    const Kind kind = next();
    if (kind == Kind::kFails) return fail();
    ReduceScatterArguments given = arguments;
    if (kind == Kind::kOther) given.count /= 2;
    return ForwardingCommunicator::reduce_scatter(given, stream);
  }
  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    const Kind kind = next();
    if (kind == Kind::kFails) return fail();
    AllGatherArguments given = arguments;
    if (kind == Kind::kOther) given.bytes /= 2;
    return ForwardingCommunicator::all_gather(given, stream);
  }

 private:
  Kind next() {
    const bool strikes = rank() == fault_.rank && issued_ == fault_.operation;
    ++issued_;
    return strikes ? fault_.kind : Kind::kNone;
  }
  Status fail() {
    abort(Status(StatusCode::kIoError, "the cable was pulled"));
    return status();
  }

  const Fault fault_;
  std::uint64_t issued_ = 0;  // One thread at a time.
};

struct Outcome {
  Status cause;
  std::uint64_t committed_step = 0;
  std::vector<std::string> digests;  // The initial weights, then after each step.
  std::string last_digest;
  std::vector<std::uint64_t> operations;  // Issued up to that step.
};

struct Account {
  std::vector<Outcome> ranks;
  std::uint64_t calls_of_a_rank = 0;
  SteadyClock::duration took{};
};

class CommitPointOverNccl : public ::testing::TestWithParam<std::tuple<int, Kind>> {
 protected:
  int stage() const { return std::get<0>(GetParam()); }
  Kind kind() const { return std::get<1>(GetParam()); }
  bool waits_for_the_deadline() const { return kind() == Kind::kHangs || kind() == Kind::kGives; }

  Account run(const Fault& fault, std::chrono::milliseconds deadline) const {
    const ToyOptions options = options_for(stage(), DataType::kFloat16, kRanks);
    fake_nccl::FakeNcclOptions script;
    if (fault.kind == Kind::kRefused) {
      script.fail_rank = fault.rank;
      script.fail_call = fault.call;
    }
    if (fault.kind == Kind::kBreaks || fault.kind == Kind::kHangs || fault.kind == Kind::kGives) {
      script.hang_sends = fault.kind == Kind::kGives;
      script.hang_rank = fault.rank;
      script.hang_operation = kConnecting + fault.operation;
      if (fault.kind == Kind::kBreaks) script.hang_result = static_cast<int>(nccl::NcclResult::kRemoteError);
    }
    Account result;
    result.ranks.resize(kRanks);
    FakeGpu gpu(gpus(kRanks));
    const FakeNcclLibrary nccl(script);
    WorldOptions world;
    world.create_backend = [&](int rank) { return gpu.create_backend(rank); };
    world.connect = [&](std::unique_ptr<Communicator> local, Rank& rank) {
      return std::make_unique<Disturbed>(over_nccl(std::move(local), rank, deadline), fault);
    };
    const SteadyClock::time_point start = SteadyClock::now();
    run_ranks(kRanks, world, [&](Rank& rank) {
      train(options, rank, result.ranks[static_cast<std::size_t>(rank.communicator->rank())]);
    });
    result.took = SteadyClock::now() - start;
    result.calls_of_a_rank = nccl.controls().accounts().calls / kRanks;
    return result;
  }

  // The faulty operations, from the operations of each step in `undisturbed`.
  std::set<std::uint64_t> places(const Outcome& undisturbed) const {
    const std::uint64_t count = undisturbed.operations.back();
    std::set<std::uint64_t> chosen{0, count / 2, count - 1};
    if (is_slow_test()) {
      for (std::uint64_t operation = 0; operation < count; ++operation) chosen.insert(operation);
      return chosen;
    }
    for (int step = 1; step <= kSteps; ++step) {
      // A hang costs a deadline, so only the gather of norms of one step hangs.
      if (waits_for_the_deadline() && step != 2) continue;
      const std::uint64_t norms = undisturbed.operations[static_cast<std::size_t>(step)] - after() - 1;
      chosen.insert(norms);
      if (waits_for_the_deadline()) continue;
      chosen.insert(norms - 1);
      if (norms + 1 < count) chosen.insert(norms + 1);
    }
    return chosen;
  }

  // The steps that are committed when the first `count` operations of a rank have succeeded.
  std::uint64_t committed_by(const Outcome& undisturbed, std::uint64_t count) const {
    std::uint64_t steps = 0;
    for (int step = 1; step <= kSteps; ++step) {
      if (undisturbed.operations[static_cast<std::size_t>(step)] - after() <= count) ++steps;
    }
    return steps;
  }

 private:
  // At stages 1 and 2 the gathers of the units' parameters follow the gather of norms.
  std::uint64_t after() const { return stage() == 1 || stage() == 2 ? awkward_units().size() : 0; }

  static void train(const ToyOptions& options, Rank& rank, Outcome& outcome) {
    ToyTrainer trainer(options, rank);
    const auto& disturbed = dynamic_cast<const Disturbed&>(*rank.communicator);
    trainer.initialize();
    try {
      // All ranks have their weights before the first operation fails.
      throw_if_error(rank.communicator->barrier());
      for (int step = 0; step <= kSteps; ++step) {
        if (step > 0) static_cast<void>(trainer.step(step));
        outcome.digests.push_back(trainer.engine().shard_digest());
        outcome.operations.push_back(disturbed.issued());
      }
      throw_if_error(rank.communicator->barrier());
    } catch (const Error&) {
      outcome.cause = rank.communicator->status();
      EXPECT_FALSE(outcome.cause.ok());
    }
    outcome.committed_step = trainer.engine().committed_step();
    outcome.last_digest = trainer.engine().shard_digest();
  }
};

TEST_P(CommitPointOverNccl, AllFinishAStepOrNoneDoes) {
  const Account undisturbed = run({}, kLongDeadline);
  const auto lateness = std::chrono::duration_cast<std::chrono::milliseconds>(undisturbed.took);
  const auto deadline = waits_for_the_deadline() ? kShortDeadline + lateness : kLongDeadline;
  const auto patience = (waits_for_the_deadline() ? 2 * deadline : 0ms) + kPatience + 2 * lateness;
  for (const Outcome& outcome : undisturbed.ranks) {
    ASSERT_TRUE(outcome.cause.ok()) << outcome.cause.to_string();
    ASSERT_EQ(outcome.committed_step, static_cast<std::uint64_t>(kSteps));
  }
  const Outcome& first = undisturbed.ranks[0];
  const std::uint64_t count = first.operations.back();
  ASSERT_GT(count, 20u);
  for (const std::uint64_t operation : places(first)) {
    // The first calls make the communicator. The last ones belong to a rank that leaves; nobody notices them.
    const Fault fault{
        .kind = kind(),
        .rank = static_cast<int>(operation % kRanks),
        .operation = operation,
        .call = kCallsToJoin + 1 +
                operation * (undisturbed.calls_of_a_rank - kCallsToJoin - kCallsToLeave) / count};
    SCOPED_TRACE("rank " + std::to_string(fault.rank) + " " + kind_name(fault.kind) + " at operation " +
                 std::to_string(operation) + " of " + std::to_string(count));

    const Account disturbed = run(fault, deadline);

    EXPECT_LT(disturbed.took, patience);
    const std::uint64_t committed = disturbed.ranks[0].committed_step;
    ASSERT_LE(committed, static_cast<std::uint64_t>(kSteps));
    // All other ranks have the norms, so the step is decided. This rank takes the decision from them.
    const std::uint64_t expected = committed_by(first, operation + (kind() == Kind::kGives ? 1 : 0));
    if (waits_for_the_deadline()) {
      EXPECT_EQ(committed, expected);
    } else if (kind() != Kind::kRefused) {
      // The rank issues operations ahead of its stream.
      EXPECT_LE(committed, expected);
    }
    for (std::size_t r = 0; r < disturbed.ranks.size(); ++r) {
      const Outcome& outcome = disturbed.ranks[r];
      EXPECT_FALSE(outcome.cause.ok()) << "rank " << r;
      EXPECT_EQ(outcome.cause.to_string(), disturbed.ranks[0].cause.to_string()) << "rank " << r;
      EXPECT_EQ(outcome.committed_step, committed) << "rank " << r << ": " << outcome.cause.to_string();
      EXPECT_EQ(outcome.last_digest, undisturbed.ranks[r].digests[committed]) << "rank " << r;
    }
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

const auto kStagesAndKinds = ::testing::Combine(
    ::testing::Values(1, 3),
    ::testing::Values(Kind::kFails, Kind::kRefused, Kind::kBreaks, Kind::kHangs, Kind::kGives, Kind::kOther));

std::string case_name(const ::testing::TestParamInfo<std::tuple<int, Kind>>& info) {
  std::string name =
      "stage" + std::to_string(std::get<0>(info.param)) + "_" + kind_name(std::get<1>(info.param));
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Engine, CommitPointOverNccl, kStagesAndKinds, case_name);
INSTANTIATE_TEST_SUITE_P(Slow, CommitPointOverNccl, kStagesAndKinds, case_name);

}  // namespace
}  // namespace forebay::testing
