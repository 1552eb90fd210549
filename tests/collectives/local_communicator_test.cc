#include "forebay/local_communicator.h"

#include <gtest/gtest.h>

#include "communicator_conformance.h"

namespace forebay::testing {
namespace {

using namespace std::chrono_literals;

class LocalWorld final : public CommunicatorWorld {
 public:
  explicit LocalWorld(std::shared_ptr<LocalGroup> group) : group_(std::move(group)) {}
  Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels& kernels) override {
    return group_->communicator(rank, backend, kernels);
  }

 private:
  const std::shared_ptr<LocalGroup> group_;  // Shared with the communicators it hands out.
};

const CommunicatorFactory kLocal{
    "local", "", [](int size, std::chrono::milliseconds deadline) {
      return std::make_unique<LocalWorld>(LocalGroup::create(size, {.deadline = deadline}));
    }};

INSTANTIATE_TEST_SUITE_P(Local, CommunicatorConformance,
                         ::testing::Combine(::testing::Values(kLocal), ::testing::Values(1, 2, 3, 4)),
                         conformance_name);

// Runs `body` on one thread per rank, all taking part in a virtual clock, and returns the time at the end.
HostClock::Nanoseconds run_virtual(int size, LocalOptions options,
                                   const std::function<void(Member&, int)>& body) {
  HostClock clock(HostClock::Mode::kVirtual);
  options.clock = &clock;
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(size, options);
  std::vector<std::thread> threads;
  std::vector<HostClock::Registration> registrations;
  for (int rank = 0; rank < size; ++rank) registrations.emplace_back(clock);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back(
        [&, rank, registration = std::move(registrations[static_cast<std::size_t>(rank)])]() mutable {
          registration.adopt();
          try {
            Member member(rank, &clock);
            member.set_communicator(
                value_or_throw(group->communicator(rank, member.backend(), member.kernels())));
            body(member, rank);
          } catch (const std::exception& error) {
            ADD_FAILURE() << "rank " << rank << ": " << error.what();
          }
          registration = {};
        });
  }
  for (std::thread& thread : threads) thread.join();
  return clock.now();
}

Status queue_gather(Member& member, int size, std::size_t bytes) {
  std::byte* source = member.allocate(bytes);
  std::byte* target = member.allocate(bytes * static_cast<std::size_t>(size));
  std::memset(source, 0, bytes);
  return member.communicator().all_gather(
      {.source = source, .target = target, .target_stride_bytes = bytes, .bytes = bytes}, member.stream());
}

TEST(LocalCommunicator, AModelledLinkTakesLatencyAndBytesOverBandwidthExactly) {
  const HostClock::Nanoseconds end =
      run_virtual(4, {.latency = 5us, .bytes_per_second = 1e9}, [](Member& member, int) {
        for (int i = 0; i < 10; ++i) ASSERT_TRUE(queue_gather(member, 4, 1'000'000).ok());
        ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
      });
  EXPECT_EQ(end, 10 * (5us + 3ms));
}

TEST(LocalCommunicator, AModelledReduceScatterTakesWhatARingWould) {
  const HostClock::Nanoseconds end = run_virtual(4, {.bytes_per_second = 2e9}, [](Member& member, int) {
    constexpr std::size_t kCount = 512 * 1000;
    std::byte* source = member.allocate(kCount * 2 * 4);
    std::memset(source, 0, kCount * 2 * 4);
    ASSERT_TRUE(member.communicator()
                    .reduce_scatter({.source = source,
                                     .source_stride_bytes = kCount * 2,
                                     .count = kCount,
                                     .type = DataType::kBfloat16,
                                     .receive = member.allocate(kCount * 2 * 4),
                                     .target = member.allocate<float>(kCount),
                                     .first = true},
                                    member.stream())
                    .ok());
    ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
  });
  EXPECT_EQ(end, 1536us);  // 3 slices of 1024000 bytes at 2 GB/s.
}

TEST(LocalCommunicator, ADeadlineCostsNoRealTimeOnAVirtualClock) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Status> causes(3);
  const HostClock::Nanoseconds end =
      run_virtual(3, {.deadline = std::chrono::milliseconds(1h)}, [&](Member& member, int rank) {
        if (rank == 1) {
          // Comes two hours late.
          HostClock& clock = member.backend().clock();
          clock.sleep(2h);
        }
        causes[static_cast<std::size_t>(rank)] = member.communicator().barrier();
      });
  EXPECT_EQ(end, 2h);
  for (const Status& cause : causes) {
    EXPECT_EQ(cause.code(), StatusCode::kTimeout);
    EXPECT_NE(cause.message().find("rank 1 did not come"), std::string::npos) << cause.message();
    EXPECT_EQ(cause.message(), causes[0].message());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 60s);
}

TEST(LocalCommunicator, AScriptedFaultIsTheFirstCauseOfEveryRankWhereverItHappens) {
  constexpr int kOperations = 6;
  for (int size = 1; size <= 3; ++size) {
    for (int fault_rank = 0; fault_rank < size; ++fault_rank) {
      for (int k = 0; k < kOperations; ++k) {
        LocalOptions options{.fault_rank = fault_rank,
                             .fault_operation = static_cast<std::uint64_t>(k),
                             .fault = Status(StatusCode::kIoError, "scripted at " + std::to_string(k))};
        std::atomic<int> finished{0};
        run_virtual(size, options, [&](Member& member, int rank) {
          const auto ranks = static_cast<std::size_t>(size);
          std::byte* source = member.allocate(64);
          std::memset(source, rank + 1, 64);
          for (int i = 0; i < kOperations; ++i) {
            std::byte* target = member.allocate(64 * ranks);
            const Status queued = member.communicator().all_gather(
                {.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64},
                member.stream());
            const Status status = queued.ok() ? member.finish() : queued;
            if (i >= k) {
              ASSERT_EQ(status.to_string(), options.fault.to_string());
              continue;
            }
            // What comes before the fault happens; a rank that is slow to look may hear of the fault with it.
            ASSERT_TRUE(status.ok() || status.to_string() == options.fault.to_string()) << status.to_string();
            for (std::size_t r = 0; r < ranks; ++r) ASSERT_EQ(target[r * 64 + 63], std::byte(r + 1));
          }
          finished.fetch_add(1);
        });
        EXPECT_EQ(finished.load(), size) << "fault on rank " << fault_rank << " at operation " << k;
      }
    }
  }
}

TEST(LocalCommunicator, HandsOutEachRankOnce) {
  Member member(0);
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(2);

  EXPECT_EQ(group->communicator(2, member.backend(), member.kernels()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(group->communicator(-1, member.backend(), member.kernels()).status().code(),
            StatusCode::kInvalidArgument);
  const auto first = group->communicator(0, member.backend(), member.kernels());
  EXPECT_TRUE(first.ok());
  EXPECT_EQ(group->communicator(0, member.backend(), member.kernels()).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(LocalCommunicator, ACallThatCannotBeQueuedFailsEveryRank) {
  std::vector<Status> causes(3);
  run_virtual(3, {}, [&](Member& member, int rank) {
    if (rank == 1) {
      member.backend().add_fault(
          {.call = HostCall::kCallHost, .status = Status(StatusCode::kInternal, "the queue is broken")});
    }
    static_cast<void>(queue_gather(member, 3, 64));
    causes[static_cast<std::size_t>(rank)] = member.finish();
  });
  for (const Status& cause : causes) EXPECT_EQ(cause.message(), "rank 1: the queue is broken");
}

}  // namespace
}  // namespace forebay::testing
