// Any fault over NCCL, on any rank: all ranks end in time, with the same first failure, and
// nothing is left of any of them.
#include <barrier>
#include <latch>
#include <span>

#include "collectives/nccl/watch.h"
#include "tests/collectives/nccl/world.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/let_others_run.h"

namespace forebay::testing {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLongDeadline = 60s;
// The time beyond that for noticing and spreading a failure, on a machine that does other work too.
constexpr std::chrono::milliseconds kPatience = 5s;

using Program = std::function<Status(Member&, int rank)>;

struct Outcome {
  std::vector<Status> statuses;  // By rank, of joining or of the program.
  fake_nccl::FakeNcclAccount account;
  SteadyClock::duration took;

  bool all_ok() const {
    return std::all_of(statuses.begin(), statuses.end(), [](const Status& status) { return status.ok(); });
  }
  // The cause that all ranks have; fails the test when they differ.
  Status cause() const {
    for (const Status& status : statuses) EXPECT_EQ(status.to_string(), statuses[0].to_string());
    return statuses[0];
  }
};

// Runs the program on threads as ranks. The world's end checks that nothing is left.
Outcome run(int size, std::chrono::milliseconds deadline, const NcclWorldOptions& options,
            const Program& program) {
  Outcome outcome{.statuses = std::vector<Status>(static_cast<std::size_t>(size))};
  const SteadyClock::time_point start = SteadyClock::now();
  NcclWorld world(size, deadline, options);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Status& status = outcome.statuses[static_cast<std::size_t>(rank)];
      Member member(world.create_backend(rank));
      Result<std::unique_ptr<Communicator>> joined = world.join(rank, member.backend(), member.kernels());
      status = joined.status();
      if (!status.ok()) return;
      member.set_communicator(std::move(joined).value());
      status = program(member, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  outcome.took = SteadyClock::now() - start;
  outcome.account = world.account();
  return outcome;
}

NcclWorldOptions gpus_with(const fake_nccl::FakeNcclOptions& nccl) {
  NcclWorldOptions options;
  options.gpu = gpus(4);
  options.nccl = nccl;
  return options;
}

constexpr std::size_t kBytes = 2048;

Status gather(Member& member, std::size_t bytes = kBytes) {
  const auto ranks = static_cast<std::size_t>(member.communicator().size());
  return member.communicator().all_gather({.source = member.allocate(bytes),
                                           .target = member.allocate(bytes * ranks),
                                           .target_stride_bytes = bytes,
                                           .bytes = bytes},
                                          member.stream());
}

// The same bytes on each rank and for NCCL; on rank 2 they are of another type.
Status reduce_unlike(Member& member, int rank) {
  constexpr std::size_t kCount = 128;
  constexpr std::size_t kStride = kCount * sizeof(float);
  const auto ranks = static_cast<std::size_t>(member.communicator().size());
  const bool other = rank == 2;
  return member.communicator().reduce_scatter({.source = member.allocate_filled(ranks * kStride, 0),
                                               .source_stride_bytes = kStride,
                                               .count = other ? 2 * kCount : kCount,
                                               .type = other ? DataType::kBfloat16 : DataType::kFloat32,
                                               .receive = member.allocate(ranks * kStride),
                                               .target = member.allocate<float>(2 * kCount),
                                               .first = true},
                                              member.stream());
}

Status reduce(Member& member, bool first = true) {
  const auto ranks = static_cast<std::size_t>(member.communicator().size());
  return member.communicator().reduce_scatter({.source = member.allocate_filled(kBytes * ranks, 0),
                                               .source_stride_bytes = kBytes,
                                               .count = kBytes / sizeof(float),
                                               .type = DataType::kFloat32,
                                               .receive = member.allocate(kBytes * ranks),
                                               .target = member.allocate<float>(kBytes / sizeof(float)),
                                               .first = first},
                                              member.stream());
}

Status step(Member& member, int) {
  auto& communicator = dynamic_cast<NcclCommunicator&>(member.communicator());
  std::byte* const buffer = member.allocate(kBytes);
  FOREBAY_RETURN_IF_ERROR(communicator.register_buffer(buffer, kBytes));
  FOREBAY_RETURN_IF_ERROR(communicator.deregister_buffer(buffer));
  FOREBAY_RETURN_IF_ERROR(reduce(member));
  FOREBAY_RETURN_IF_ERROR(gather(member));
  FOREBAY_RETURN_IF_ERROR(member.finish());
  FOREBAY_RETURN_IF_ERROR(member.communicator().barrier());
  return member.communicator().status();
}

class NcclFault : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
};

TEST_P(NcclFault, AnyCallOfAnyRankMayFail) {
  // Enough to be far beyond the program, should it never get through.
  constexpr std::uint64_t kCallsMax = 200;
  for (int rank = 0; rank < size(); ++rank) {
    std::uint64_t call = 1;
    for (; call < kCallsMax; ++call) {
      SCOPED_TRACE("rank " + std::to_string(rank) + ", call " + std::to_string(call));
      fake_nccl::FakeNcclOptions nccl;
      nccl.fail_rank = rank;
      nccl.fail_call = call;
      const Outcome outcome = run(size(), kLongDeadline, gpus_with(nccl), step);
      EXPECT_LT(outcome.took, kPatience);
      if (outcome.account.faults == 0) {
        EXPECT_TRUE(outcome.all_ok()) << outcome.cause().to_string();
        break;
      }
      const Status cause = outcome.cause();
      if (cause.ok()) continue;  // It failed while the rank left: nobody is told any more.
      EXPECT_EQ(cause.code(), StatusCode::kIoError);
      EXPECT_NE(cause.message().find("rank " + std::to_string(rank) + ": cannot"), std::string::npos)
          << cause.message();
      EXPECT_NE(cause.message().find("call " + std::to_string(call)), std::string::npos) << cause.message();
    }
    EXPECT_GT(call, 10u);
    EXPECT_LT(call, kCallsMax);
  }
}

TEST_P(NcclFault, AnOperationThatHangsIsATimeoutOnAllRanks) {
  constexpr std::chrono::milliseconds kDeadline = 1500ms;  // Ranks connect within it too.
  // The first two connect the ranks.
  for (std::uint64_t operation = 0; operation < 4; ++operation) {
    SCOPED_TRACE("operation " + std::to_string(operation));
    fake_nccl::FakeNcclOptions nccl;
    nccl.hang_rank = size() - 1;
    nccl.hang_operation = operation;
    const Outcome outcome = run(size(), kDeadline, gpus_with(nccl), step);
    EXPECT_EQ(outcome.account.faults, 1u);
    const Status cause = outcome.cause();
    EXPECT_EQ(cause.code(), StatusCode::kTimeout) << cause.to_string();
    EXPECT_NE(cause.message().find("within 1500 ms"), std::string::npos) << cause.message();
    EXPECT_LT(outcome.took, kDeadline + kPatience);
  }
}

TEST_P(NcclFault, AnErrorBehindOurBackEndsAllRanksLongBeforeTheDeadline) {
  for (std::uint64_t operation = 0; operation < 4; ++operation) {
    SCOPED_TRACE("operation " + std::to_string(operation));
    fake_nccl::FakeNcclOptions nccl;
    nccl.hang_rank = 0;
    nccl.hang_operation = operation;
    nccl.hang_result = static_cast<int>(nccl::NcclResult::kRemoteError);
    const Outcome outcome = run(size(), kLongDeadline, gpus_with(nccl), step);
    const Status cause = outcome.cause();
    EXPECT_EQ(cause.code(), StatusCode::kPeerLost) << cause.to_string();
    EXPECT_NE(cause.message().find("ncclRemoteError"), std::string::npos) << cause.message();
    EXPECT_LT(outcome.took, kPatience);
  }
}

TEST_P(NcclFault, EveryCallMayBeInProgressForAWhile) {
  fake_nccl::FakeNcclOptions nccl;
  nccl.in_progress = 20;

  const Outcome outcome = run(size(), kLongDeadline, gpus_with(nccl), step);

  EXPECT_TRUE(outcome.all_ok()) << outcome.cause().to_string();
}

TEST_P(NcclFault, ACallThatStaysInProgressIsATimeout) {
  fake_nccl::FakeNcclOptions nccl;
  nccl.in_progress = 1'000'000'000;

  const Outcome outcome = run(size(), 300ms, gpus_with(nccl), step);

  const Status cause = outcome.cause();
  EXPECT_EQ(cause.code(), StatusCode::kTimeout) << cause.to_string();
  EXPECT_NE(cause.message().find("ncclCommInitRankConfig is not done"), std::string::npos) << cause.message();
}

TEST_P(NcclFault, ARankThatDoesNotComeIsNamedByAllRanks) {
  std::latch given_up(size() - 1);
  const int absent = size() - 1;

  const Outcome outcome = run(size(), 2s, gpus_with({}), [&](Member& member, int rank) {
    if (rank == absent) {
      given_up.wait();
      return gather(member);
    }
    static_cast<void>(gather(member));
    const Status status = member.finish();
    given_up.count_down();
    return status;
  });

  const Status cause = outcome.cause();
  EXPECT_EQ(cause.code(), StatusCode::kTimeout) << cause.to_string();
  EXPECT_NE(cause.message().find("rank " + std::to_string(absent) + " did not join"), std::string::npos)
      << cause.message();
}

TEST_P(NcclFault, ARankThatIsLateIsWaitedFor) {
  // By several heartbeats, from when all others wait.
  std::atomic<int> waiting{0};

  const Outcome outcome = run(size(), kLongDeadline, gpus_with({}), [&](Member& member, int rank) {
    if (rank != 0) {
      FOREBAY_RETURN_IF_ERROR(gather(member));
      waiting.fetch_add(1);
      return member.finish();
    }
    const SteadyClock::time_point later = SteadyClock::now() + 3 * internal::kNcclHeartbeat;
    while (waiting.load() < size() - 1 || SteadyClock::now() < later) testing::let_others_run();
    FOREBAY_RETURN_IF_ERROR(gather(member));
    return member.finish();
  });

  EXPECT_TRUE(outcome.all_ok()) << outcome.cause().to_string();
}

TEST_P(NcclFault, ARankThatIssuesSomethingElseIsNamedAtEveryPlace) {
  for (int place = 0; place < 3; ++place) {
    const Outcome outcome = run(size(), kLongDeadline, gpus_with({}), [&](Member& member, int rank) {
      for (int i = 0; i < 3; ++i) {
        const bool other = rank == size() - 1 && i == place;
        FOREBAY_RETURN_IF_ERROR(other ? gather(member, kBytes / 2) : gather(member));
      }
      return member.finish();
    });

    const Status cause = outcome.cause();
    EXPECT_EQ(cause.code(), StatusCode::kInvalidArgument) << cause.to_string();
    for (const std::string& word :
         {std::string("2048 bytes"), std::string("1024 bytes"), "rank " + std::to_string(size() - 1),
          "(operation " + std::to_string(place) + ")"}) {
      EXPECT_NE(cause.message().find(word), std::string::npos) << word << " is not in " << cause.message();
    }
    EXPECT_LT(outcome.took, kPatience);
  }
}

// `local`, but for one thing: once `dead` is set, the groups split from it find the last rank dead, as a
// communicator of processes does when a peer's is gone.
class MortalControl final : public ForwardingCommunicator {
 public:
  MortalControl(std::unique_ptr<Communicator> inner, std::shared_ptr<std::atomic<bool>> dead, bool is_watch)
      : ForwardingCommunicator(std::move(inner)), dead_(std::move(dead)), is_watch_(is_watch) {}

  Status exchange(Span<const std::byte> mine, Span<std::byte> all) override {
    if (is_watch_ && *dead_) {
      abort(Status(StatusCode::kPeerLost,
                   "the process of rank " + std::to_string(size() - 1) + " has ended; see why"));
      return status();
    }
    return ForwardingCommunicator::exchange(mine, all);
  }
  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    Result<std::unique_ptr<Communicator>> part = ForwardingCommunicator::split(color, key);
    FOREBAY_RETURN_IF_ERROR(part.status());
    return std::unique_ptr<Communicator>(
        std::make_unique<MortalControl>(std::move(part).value(), dead_, true));
  }

 private:
  const std::shared_ptr<std::atomic<bool>> dead_;  // Shared by all ranks and their groups.
  const bool is_watch_;
};

TEST_P(NcclFault, ADeadRankEndsTheOthersWithinAHeartbeat) {
  const auto dead = std::make_shared<std::atomic<bool>>(false);
  NcclWorldOptions options = gpus_with({});
  options.wrap_control = [dead](std::unique_ptr<Communicator> control) {
    return std::make_unique<MortalControl>(std::move(control), dead, false);
  };

  const Outcome outcome = run(size(), kLongDeadline, options, [&](Member& member, int rank) {
    // The last rank never issues its part.
    if (rank != size() - 1) static_cast<void>(gather(member));
    *dead = true;
    while (member.communicator().status().ok()) testing::let_others_run();
    return member.finish();
  });

  const Status cause = outcome.cause();
  EXPECT_EQ(cause.code(), StatusCode::kPeerLost) << cause.to_string();
  EXPECT_NE(cause.message().find("the process of rank " + std::to_string(size() - 1)), std::string::npos)
      << cause.message();
  EXPECT_LT(outcome.took, kPatience);
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclFault, ::testing::Values(2, 3),
                         [](const auto& instance) { return std::to_string(instance.param) + "_ranks"; });

TEST(NcclFaultAlone, OperationsOfNothingAreComparedToo) {
  const Outcome same = run(3, kLongDeadline, gpus_with({}), [](Member& member, int) {
    FOREBAY_RETURN_IF_ERROR(member.communicator().all_gather(
        {.source = nullptr, .target = nullptr, .target_stride_bytes = 64, .bytes = 0}, member.stream()));
    return member.finish();
  });
  EXPECT_TRUE(same.all_ok()) << same.cause().to_string();

  const Outcome different = run(3, kLongDeadline, gpus_with({}), [](Member& member, int rank) {
    static_cast<void>(gather(member, rank == 1 ? 0 : 64));
    return member.finish();
  });
  EXPECT_EQ(different.cause().code(), StatusCode::kInvalidArgument) << different.cause().to_string();
}

// NCCL knows no tags, and the bytes arrive.
TEST(NcclFaultAlone, MessagesOfOneSizeAndTwoTagsAreOneError) {
  const Outcome outcome = run(2, kLongDeadline, gpus_with({}), [](Member& member, int rank) {
    std::byte* const memory = member.allocate(64);
    FOREBAY_RETURN_IF_ERROR(rank == 0 ? member.communicator().send(memory, 64, 1, 7, member.stream())
                                      : member.communicator().recv(memory, 64, 0, 9, member.stream()));
    FOREBAY_RETURN_IF_ERROR(member.finish());
    if (rank == 0) return member.communicator().barrier();
    return member.communicator().status();
  });

  const Status& receiver = outcome.statuses[1];
  EXPECT_EQ(receiver.code(), StatusCode::kInvalidArgument) << receiver.to_string();
  EXPECT_NE(receiver.message().find("with tag 9 on rank 1, but rank 0 sends 64 bytes with tag 7"),
            std::string::npos)
      << receiver.message();
}

TEST(NcclFaultAlone, OperationsThatMoveTheSameBytesAreComparedByTheNextHeartbeat) {
  const Outcome outcome = run(3, kLongDeadline, gpus_with({}), [](Member& member, int rank) {
    FOREBAY_RETURN_IF_ERROR(gather(member));
    FOREBAY_RETURN_IF_ERROR(reduce_unlike(member, rank));
    FOREBAY_RETURN_IF_ERROR(member.backend().stream_synchronize(member.stream()));
    const SteadyClock::time_point late = SteadyClock::now() + kPatience;
    while (member.communicator().status().ok() && SteadyClock::now() < late) testing::let_others_run();
    return member.communicator().status();
  });

  const Status cause = outcome.cause();
  EXPECT_EQ(cause.code(), StatusCode::kInvalidArgument) << cause.to_string();
  for (const char* word :
       {"reduce_scatter of 128 fp32 (operation 1)", "rank 2 issued reduce_scatter of 256 bf16"})
    EXPECT_NE(cause.message().find(word), std::string::npos) << word << " is not in " << cause.message();
}

// NCCL moves the bytes and nothing hangs, long before a heartbeat.
TEST(NcclFaultAlone, NothingIsVotedForAfterDifferentOperations) {
  struct Vote {
    Communicator& communicator;
    Status taken;
  };
  const Outcome outcome = run(3, kLongDeadline, gpus_with({}), [](Member& member, int rank) {
    FOREBAY_RETURN_IF_ERROR(reduce_unlike(member, rank));
    FOREBAY_RETURN_IF_ERROR(member.communicator().all_gather({.source = member.allocate(64),
                                                              .target = member.allocate(3 * 64),
                                                              .target_stride_bytes = 64,
                                                              .bytes = 64,
                                                              .decides = true},
                                                             member.stream()));
    Vote vote{member.communicator(), {}};
    FOREBAY_RETURN_IF_ERROR(member.backend().call_host(
        member.stream(),
        [](void* argument) {
          auto& given = *static_cast<Vote*>(argument);
          given.taken = given.communicator.vote(1, std::as_bytes(std::span("one", 3)));
        },
        &vote));
    static_cast<void>(member.finish());
    EXPECT_FALSE(member.communicator().survivors_vote(1).has_value());
    return vote.taken;
  });

  EXPECT_EQ(outcome.cause().code(), StatusCode::kInvalidArgument) << outcome.cause().to_string();
}

// The driver refuses a call of rank 1: the record of an event before the operation or after it, or the kernel
// that adds, which comes after that of NCCL.
TEST(NcclFaultAlone, ARefusalOfTheDriverIsToldToAllRanks) {
  struct Case {
    const char* entry;
    std::uint64_t call;
    NcclOrder order;
  };
  for (const Case& one :
       {Case{"cuEventRecord", 1, NcclOrder::kRank}, Case{"cuEventRecord", 2, NcclOrder::kRank},
        Case{"cuLaunchKernel", 2, NcclOrder::kRank}, Case{"cuLaunchKernel", 2, NcclOrder::kFast}}) {
    SCOPED_TRACE(std::string(one.entry) + " " + std::to_string(one.call));
    NcclWorldOptions options = gpus_with({});
    options.order = one.order;
    std::barrier together(3);
    const Outcome outcome = run(3, kLongDeadline, options, [&](Member& member, int rank) {
      together.arrive_and_wait();
      if (rank == 1) {
        constexpr int kUnknown = 999;
        EXPECT_EQ(fake_cuda::FakeCuda::open(FOREBAY_FAKE_LIBCUDA).fail(one.entry, one.call, kUnknown), 0);
        EXPECT_FALSE(reduce(member, false).ok());
      }
      together.arrive_and_wait();
      const SteadyClock::time_point late = SteadyClock::now() + kPatience;
      while (member.communicator().status().ok() && SteadyClock::now() < late) testing::let_others_run();
      return member.communicator().status();
    });

    EXPECT_EQ(outcome.cause().message().find("rank 1: "), 0u) << outcome.cause().to_string();
  }
}

// Fingerprints travel through a ring of batches. An operation that has not run does not have those of its
// batch's last use.
TEST(NcclFaultAlone, AVoteDoesNotReadFingerprintsOfEarlierOperations) {
  constexpr int kRing = internal::kNcclInFlightMax / static_cast<int>(internal::kNcclBatch);
  struct Vote {
    Communicator& communicator;
    std::latch gate{1};
    Status taken{};
  };
  const Outcome outcome = run(3, kLongDeadline, gpus_with({}), [](Member& member, int) {
    std::byte* const source = member.allocate(64);
    std::byte* const target = member.allocate(3 * 64);
    const auto decide = [&] {
      return member.communicator().all_gather(
          {.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64, .decides = true},
          member.stream());
    };
    for (int i = 0; i < kRing; ++i) FOREBAY_RETURN_IF_ERROR(decide());
    FOREBAY_RETURN_IF_ERROR(member.finish());
    Vote vote{member.communicator()};
    const Status queued = member.backend().call_host(
        member.stream(),
        [](void* argument) {
          auto& given = *static_cast<Vote*>(argument);
          given.gate.wait();
          given.taken = given.communicator.vote(1, std::as_bytes(std::span("one", 3)));
        },
        &vote);
    const Status later = decide();
    vote.gate.count_down();
    FOREBAY_RETURN_IF_ERROR(queued);
    FOREBAY_RETURN_IF_ERROR(later);
    FOREBAY_RETURN_IF_ERROR(member.finish());
    return vote.taken;
  });

  EXPECT_TRUE(outcome.all_ok()) << outcome.cause().to_string();
}

// Messages have a slot each, and operations that carry fingerprints a batch each.
TEST(NcclFaultAlone, NoMoreOperationsAreInFlightThanHaveRoom) {
  constexpr int kBatches = internal::kNcclInFlightMax / static_cast<int>(internal::kNcclBatch);
  for (const bool is_message : {true, false}) {
    std::barrier full(2);
    const Outcome outcome = run(2, 2s, gpus_with({}), [&](Member& member, int rank) {
      std::byte* const memory = member.allocate(3 * 64);
      std::latch gate(1);
      const Status queued = member.backend().call_host(
          member.stream(), [](void* argument) { static_cast<std::latch*>(argument)->wait(); }, &gate);
      const auto operate = [&] {
        Communicator& communicator = member.communicator();
        if (is_message) {
          return rank == 0 ? communicator.send(memory, 64, 1, 7, member.stream())
                           : communicator.recv(memory, 64, 0, 7, member.stream());
        }
        return communicator.all_gather({.source = memory,
                                        .target = memory + 64,
                                        .target_stride_bytes = 64,
                                        .bytes = 64,
                                        .decides = true},
                                       member.stream());
      };
      for (int i = 0; i < (is_message ? internal::kNcclInFlightMax : kBatches); ++i) {
        const Status status = operate();
        EXPECT_TRUE(status.ok()) << i << ": " << status.to_string();
      }
      full.arrive_and_wait();
      const Status beyond = operate();
      gate.count_down();
      static_cast<void>(member.finish());
      EXPECT_TRUE(queued.ok());
      return beyond;
    });

    EXPECT_EQ(outcome.cause().code(), StatusCode::kTimeout);
    EXPECT_NE(outcome.cause().message().find("none of the 64 before it was done within 2000 ms"),
              std::string::npos)
        << outcome.cause().to_string();
  }
}

TEST(NcclFaultAlone, AllQueuedOperationsOfAFailedRankEnd) {
  fake_nccl::FakeNcclOptions nccl;
  nccl.hang_rank = 0;
  nccl.hang_operation = 2;

  const Outcome outcome = run(2, 300ms, gpus_with(nccl), [](Member& member, int) {
    for (int i = 0; i < 3 * internal::kNcclInFlightMax; ++i) {
      // More than may be in flight: the last ones are refused once the first has failed.
      if (!gather(member, 64).ok()) break;
    }
    return member.finish();
  });

  EXPECT_EQ(outcome.cause().code(), StatusCode::kTimeout) << outcome.cause().to_string();
}

}  // namespace
}  // namespace forebay::testing
