#include <gtest/gtest.h>

#include "forebay/local_communicator.h"
#include "runtime/device/host/script.h"
#include "tests/collectives/communicator_conformance.h"
#include "tests/support/device_view.h"

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

std::shared_ptr<HostBackend> create_device(HostClock* clock = nullptr) {
  HostBackendOptions options{.name = "device", .granularity = 64u << 10, .clock = clock};
  return value_or_throw(HostBackend::create(options));
}

// Ranks that share one device whose memory the host does not reach.
class SharedDeviceWorld final : public CommunicatorWorld {
 public:
  SharedDeviceWorld(int size, std::chrono::milliseconds deadline)
      : group_(LocalGroup::create(size, {.deadline = deadline})) {}
  std::unique_ptr<Backend> create_backend(int rank) override {
    return std::make_unique<DeviceView>(device_, "device of rank " + std::to_string(rank));
  }
  Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels& kernels) override {
    return group_->communicator(rank, backend, kernels);
  }

 private:
  const std::shared_ptr<HostBackend> device_ = create_device();  // Shared with the ranks' views.
  const std::shared_ptr<LocalGroup> group_;                      // Shared with the communicators.
};

const CommunicatorFactory kLocalOnSharedDevice{"local_on_a_shared_device", "",
                                               [](int size, std::chrono::milliseconds deadline) {
                                                 return std::make_unique<SharedDeviceWorld>(size, deadline);
                                               },
                                               true};

INSTANTIATE_TEST_SUITE_P(Local, CommunicatorConformance,
                         ::testing::Combine(::testing::Values(kLocal, kLocalOnSharedDevice),
                                            ::testing::Values(1, 2, 3, 4)),
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
            Member member(create_host_backend(rank, &clock));
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
  std::byte* source = member.allocate_filled(bytes, 0);
  std::byte* target = member.allocate(bytes * static_cast<std::size_t>(size));
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

TEST(LocalCommunicator, AModelledReduceScatterTakesTheTimeOfARing) {
  const HostClock::Nanoseconds end = run_virtual(4, {.bytes_per_second = 2e9}, [](Member& member, int) {
    constexpr std::size_t kCount = 512 * 1000;
    std::byte* source = member.allocate_filled(kCount * 2 * 4, 0);
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

TEST(LocalCommunicator, AModelledMessageTakesLatencyAndBytesOverBandwidth) {
  const HostClock::Nanoseconds end =
      run_virtual(2, {.latency = 5us, .bytes_per_second = 1e9}, [](Member& member, int rank) {
        std::byte* memory = member.allocate(1'000'000);
        ASSERT_TRUE((rank == 0 ? member.communicator().send(memory, 1'000'000, 1, 3, member.stream())
                               : member.communicator().recv(memory, 1'000'000, 0, 3, member.stream()))
                        .ok());
        ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
      });
  EXPECT_EQ(end, 5us + 1ms);
}

TEST(LocalCommunicator, ADeadlineNearTheEndOfTimeIsNotOver) {
  const auto never = std::chrono::duration_cast<std::chrono::milliseconds>(HostClock::kNever);
  run_virtual(2, {.deadline = never - 1ms}, [&](Member& member, int rank) {
    dynamic_cast<HostBackend&>(member.backend()).clock().sleep(rank == 0 ? 1h : 2h);
    const Status status = member.communicator().barrier();
    EXPECT_TRUE(status.ok()) << status.to_string();
  });
}

TEST(LocalCommunicator, AScriptedFaultStrikesARankThatIsAlone) {
  const Status cause(StatusCode::kIoError, "scripted");
  run_virtual(1, {.fault = {.rank = 0, .operation = 0, .cause = cause}}, [&](Member& member, int) {
    std::byte* source = member.allocate_filled(64, 0);
    static_cast<void>(member.communicator().reduce_scatter({.source = source,
                                                            .source_stride_bytes = 64,
                                                            .count = 16,
                                                            .type = DataType::kFloat32,
                                                            .receive = member.allocate(64),
                                                            .target = member.allocate<float>(16),
                                                            .first = true},
                                                           member.stream()));
    EXPECT_EQ(member.finish().message(), "scripted");
  });
}

// A script counts the operations of the communicator that it was written for.
TEST(LocalCommunicator, AScriptedFaultStrikesNoGroupThatIsSplitOff) {
  const Status cause(StatusCode::kIoError, "scripted");
  run_virtual(2, {.fault = {.rank = 0, .operation = 0, .cause = cause}}, [&](Member& member, int rank) {
    const std::unique_ptr<Communicator> part = value_or_throw(member.communicator().split(0, rank));
    std::byte* const target = member.allocate(128);
    ASSERT_TRUE(
        part->all_gather(
                {.source = member.allocate(64), .target = target, .target_stride_bytes = 64, .bytes = 64},
                member.stream())
            .ok());
    EXPECT_TRUE(member.finish().ok()) << member.finish().to_string();
    static_cast<void>(part->barrier());  // A slow rank may learn here of the fault that follows.

    static_cast<void>(queue_gather(member, 2, 64));
    EXPECT_EQ(member.finish().message(), "scripted");
  });
}

TEST(LocalCommunicator, TheDeadDoNotSpeak) {
  std::vector<Status> causes(2);
  run_virtual(2, {.fault = {.rank = 1, .operation = 0, .kind = LocalFault::Kind::kDies}},
              [&](Member& member, int rank) {
                static_cast<void>(queue_gather(member, 2, 64));
                static_cast<void>(member.finish());
                if (rank == 1) member.communicator().abort(Status(StatusCode::kIoError, "from beyond"));
                causes[static_cast<std::size_t>(rank)] = member.finish();
              });
  EXPECT_EQ(causes[0].code(), StatusCode::kPeerLost);
  EXPECT_NE(causes[0].message().find("rank 1 has left the communicator"), std::string::npos)
      << causes[0].message();
}

TEST(LocalCommunicator, ADeadlineCostsNoRealTimeOnAVirtualClock) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Status> causes(3);
  const HostClock::Nanoseconds end =
      run_virtual(3, {.deadline = std::chrono::milliseconds(1h)}, [&](Member& member, int rank) {
        if (rank == 1) {
          // Comes two hours late.
          dynamic_cast<HostBackend&>(member.backend()).clock().sleep(2h);
        }
        causes[static_cast<std::size_t>(rank)] = member.communicator().barrier();
      });
  EXPECT_EQ(end, 2h);
  for (const Status& cause : causes) {
    EXPECT_EQ(cause.code(), StatusCode::kTimeout);
    EXPECT_NE(cause.message().find("rank 1 did not join"), std::string::npos) << cause.message();
    EXPECT_EQ(cause.message(), causes[0].message());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 60s);
}

TEST(LocalCommunicator, AScriptedFaultIsTheFirstCauseOfEveryRankWhereverItHappens) {
  constexpr int kOperations = 6;
  for (int size = 1; size <= 3; ++size) {
    for (int fault_rank = 0; fault_rank < size; ++fault_rank) {
      for (int k = 0; k < kOperations; ++k) {
        const Status cause(StatusCode::kIoError, "scripted at " + std::to_string(k));
        const LocalOptions options{
            .fault = {.rank = fault_rank, .operation = static_cast<std::uint64_t>(k), .cause = cause}};
        std::atomic<int> finished{0};
        run_virtual(size, options, [&](Member& member, int rank) {
          const auto ranks = static_cast<std::size_t>(size);
          std::byte* source = member.allocate_filled(64, rank + 1);
          for (int i = 0; i < kOperations; ++i) {
            std::byte* target = member.allocate(64 * ranks);
            const Status queued = member.communicator().all_gather(
                {.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64},
                member.stream());
            const Status status = queued.ok() ? member.finish() : queued;
            if (i >= k) {
              ASSERT_EQ(status.to_string(), cause.to_string());
              continue;
            }
            // The operations before the fault are carried out; a rank that looks late may hear of the fault
            // with them.
            ASSERT_TRUE(status.ok() || status.to_string() == cause.to_string()) << status.to_string();
            const std::vector<std::byte> actual = member.read(target, 64 * ranks);
            for (std::size_t r = 0; r < ranks; ++r) ASSERT_EQ(actual[r * 64 + 63], std::byte(r + 1));
          }
          finished.fetch_add(1);
        });
        EXPECT_EQ(finished.load(), size) << "fault on rank " << fault_rank << " at operation " << k;
      }
    }
  }
}

TEST(LocalCommunicator, HandsOutEachRankOnce) {
  Member member(create_host_backend(0));
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(2);

  EXPECT_EQ(group->communicator(2, member.backend(), member.kernels()).status().message(),
            "a local group of 2 has no rank 2; ranks are 0..1");
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
      dynamic_cast<ScriptedHostBackend&>(member.backend())
          .add_fault(
              {.call = HostCall::kCallHost, .status = Status(StatusCode::kInternal, "the queue is broken")});
    }
    static_cast<void>(queue_gather(member, 3, 64));
    causes[static_cast<std::size_t>(rank)] = member.finish();
    if (rank == 1) {
      const std::vector<OperationRecord> records = member.communicator().last_operations();
      ASSERT_EQ(records.size(), 1u);
      EXPECT_EQ(records[0].state, OperationState::kFailed);
    }
    EXPECT_TRUE(member.communicator().operation_traffic().empty());
  });
  for (const Status& cause : causes) EXPECT_EQ(cause.message(), "rank 1: the queue is broken");
}

// Runs `body` on one thread per rank, each on its own view of one device.
void run_on_shared_device(int size, const LocalOptions& options, const std::shared_ptr<HostBackend>& device,
                          const std::function<void(Member&, DeviceView&, int)>& body) {
  const std::shared_ptr<LocalGroup> group = LocalGroup::create(size, options);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto view = std::make_unique<DeviceView>(device, "device of rank " + std::to_string(rank));
        DeviceView& backend = *view;
        Member member(std::move(view));
        member.set_communicator(
            value_or_throw(group->communicator(rank, member.backend(), member.kernels())));
        body(member, backend, rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A closed gate holds a stream back.
struct Gate {
  std::atomic<bool> open{false};
  void release() {
    open = true;
    open.notify_all();
  }
  static void wait(void* gate) { static_cast<Gate*>(gate)->open.wait(false); }
};

TEST(LocalCommunicatorOnADevice, TheDeviceAndNotTheHostWaitsForALateSource) {
  // Rank 1's stream is held back before it writes its source, and only opened when every rank has issued its
  // gather: so issuing waits for the peers' hosts and not for their streams, and nobody copies too early.
  constexpr int kRanks = 3;
  constexpr std::size_t kBytes = 10'000;
  Gate gate;
  std::atomic<int> issued{0};
  run_on_shared_device(kRanks, {}, create_device(), [&](Member& member, DeviceView&, int rank) {
    std::byte* source = member.allocate_filled(kBytes, 0xCB);
    std::byte* target = member.allocate_filled(kBytes * kRanks, 0xCB);
    if (rank == 1) throw_if_error(member.backend().call_host(member.stream(), Gate::wait, &gate));
    throw_if_error(
        member.backend().fill_async(source, static_cast<std::uint8_t>(rank + 1), kBytes, member.stream()));
    throw_if_error(member.communicator().all_gather(
        {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
        member.stream()));
    if (issued.fetch_add(1) + 1 == kRanks) gate.release();
    throw_if_error(member.finish());
    const std::vector<std::byte> actual = member.read(target, kBytes * kRanks);
    for (std::size_t i = 0; i < actual.size(); ++i) ASSERT_EQ(actual[i], std::byte(1 + i / kBytes)) << i;
  });
}

TEST(LocalCommunicatorOnADevice, ASourceIsNotWrittenAgainBeforeALatePeerHasCopiedIt) {
  // Rank 2's stream is held back, so it copies last of all; rank 0 and 1 overwrite their sources at once.
  constexpr int kRanks = 3;
  constexpr std::size_t kBytes = 10'000;
  Gate gate;
  std::atomic<int> issued{0};
  run_on_shared_device(kRanks, {}, create_device(), [&](Member& member, DeviceView&, int rank) {
    std::byte* source = member.allocate_filled(kBytes, rank + 1);
    std::byte* target = member.allocate_filled(kBytes * kRanks, 0xCB);
    if (rank == 2) throw_if_error(member.backend().call_host(member.stream(), Gate::wait, &gate));
    throw_if_error(member.communicator().all_gather(
        {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
        member.stream()));
    throw_if_error(member.backend().fill_async(source, 0xEE, kBytes, member.stream()));
    if (issued.fetch_add(1) + 1 == kRanks) gate.release();
    throw_if_error(member.finish());
    const std::vector<std::byte> actual = member.read(target, kBytes * kRanks);
    for (std::size_t i = 0; i < actual.size(); ++i) ASSERT_EQ(actual[i], std::byte(1 + i / kBytes)) << i;
  });
}

TEST(LocalCommunicatorOnADevice, AMessageIsReadBeforeItsSourceIsWrittenAgain) {
  constexpr std::size_t kBytes = 10'000;
  Gate gate;
  std::atomic<int> issued{0};
  run_on_shared_device(2, {}, create_device(), [&](Member& member, DeviceView&, int rank) {
    std::byte* memory = member.allocate_filled(kBytes, rank == 0 ? 7 : 0xCB);
    if (rank == 0) {
      throw_if_error(member.communicator().send(memory, kBytes, 1, 3, member.stream()));
      throw_if_error(member.backend().fill_async(memory, 0xEE, kBytes, member.stream()));
    } else {
      throw_if_error(member.backend().call_host(member.stream(), Gate::wait, &gate));
      throw_if_error(member.communicator().recv(memory, kBytes, 0, 3, member.stream()));
    }
    if (issued.fetch_add(1) + 1 == 2) gate.release();
    throw_if_error(member.finish());
    if (rank == 0) return;
    for (const std::byte byte : member.read(memory, kBytes)) ASSERT_EQ(byte, std::byte{7});
  });
}

// The ranks give their memory back at once: a copy that was queued before the failure must not read it then.
TEST(LocalCommunicatorOnADevice, ACallThatOneBackendRefusesFailsEveryRankWithItsName) {
  constexpr std::size_t kBytes = 1u << 20;
  const auto refuse = [](HostCall call, std::uint64_t nth, int refusing_rank) {
    std::vector<Status> causes(3);
    run_on_shared_device(3, {}, create_device(), [&](Member& member, DeviceView& view, int rank) {
      std::byte* source = member.allocate_filled(kBytes, rank);
      std::byte* target = member.allocate(kBytes * 3);
      if (rank == refusing_rank) view.fail(call, nth, Status(StatusCode::kInternal, "the driver said no"));
      const Status queued = member.communicator().all_gather(
          {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
          member.stream());
      const Status finished = member.finish();
      EXPECT_EQ(queued.to_string(), finished.to_string());
      causes[static_cast<std::size_t>(rank)] = finished;
    });
    for (const Status& cause : causes) {
      EXPECT_EQ(cause.message(), "rank " + std::to_string(refusing_rank) + ": the driver said no");
    }
  };
  for (int rank = 0; rank < 3; ++rank) {
    for (const std::uint64_t nth : {1u, 2u}) refuse(HostCall::kEventRecord, nth, rank);
    for (const std::uint64_t nth : {1u, 2u, 3u, 4u}) refuse(HostCall::kStreamWait, nth, rank);
    for (const std::uint64_t nth : {1u, 2u, 3u}) refuse(HostCall::kCopyAsync, nth, rank);
  }
}

TEST(LocalCommunicatorOnADevice, ACallRefusedForAMessageFailsBothEnds) {
  constexpr std::size_t kBytes = 1u << 20;
  const auto refuse = [](HostCall call, int refusing_rank) {
    std::vector<Status> causes(2);
    run_on_shared_device(2, {}, create_device(), [&](Member& member, DeviceView& view, int rank) {
      std::byte* memory = member.allocate_filled(kBytes, rank);
      if (rank == refusing_rank) view.fail(call, 1, Status(StatusCode::kInternal, "the driver said no"));
      const Status queued = rank == 0 ? member.communicator().send(memory, kBytes, 1, 3, member.stream())
                                      : member.communicator().recv(memory, kBytes, 0, 3, member.stream());
      causes[static_cast<std::size_t>(rank)] = member.finish();
      EXPECT_EQ(queued.to_string(), causes[static_cast<std::size_t>(rank)].to_string());
    });
    for (const Status& cause : causes) {
      EXPECT_EQ(cause.message(), "rank " + std::to_string(refusing_rank) + ": the driver said no");
    }
  };
  for (const HostCall call : {HostCall::kEventRecord, HostCall::kStreamWait}) {
    for (const int rank : {0, 1}) refuse(call, rank);
  }
  refuse(HostCall::kCopyAsync, 1);
}

TEST(LocalCommunicatorOnADevice, ADeadlineNamesTheRankThatDidNotIssue) {
  std::vector<Status> causes(3);
  std::atomic<int> waiting{2};
  run_on_shared_device(3, {.deadline = 2s}, create_device(), [&](Member& member, DeviceView&, int rank) {
    if (rank == 2) {
      for (int left = waiting.load(); left > 0; left = waiting.load()) waiting.wait(left);
      return;
    }
    std::byte* source = member.allocate(64);
    std::byte* target = member.allocate(64 * 3);
    causes[static_cast<std::size_t>(rank)] = member.communicator().all_gather(
        {.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64}, member.stream());
    waiting.fetch_sub(1);
    waiting.notify_all();
  });
  for (int rank = 0; rank < 2; ++rank) {
    const Status& cause = causes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(cause.code(), StatusCode::kTimeout) << cause.to_string();
    EXPECT_NE(cause.message().find("rank 2 did not join"), std::string::npos) << cause.message();
  }
}

TEST(LocalCommunicatorOnADevice, GivesItsEventsBack) {
  const std::shared_ptr<HostBackend> device = create_device();
  const std::size_t before = device->live_handle_count();
  run_on_shared_device(3, {}, device, [&](Member& member, DeviceView&, int) {
    ASSERT_TRUE(member.communicator().barrier().ok());
    ASSERT_TRUE(queue_gather(member, 3, 64).ok());
    ASSERT_TRUE(member.finish().ok());
  });
  EXPECT_EQ(device->live_handle_count(), before);

  const std::shared_ptr<LocalGroup> group = LocalGroup::create(1);
  DeviceView view(device, "device of rank 0");
  const auto kernels = value_or_throw(Kernels::create(view, {.thread_count = 1}));
  const std::size_t with_kernels = device->live_handle_count();
  view.fail(HostCall::kEventCreate, 2, Status(StatusCode::kUnavailable, "no more events"));
  EXPECT_EQ(group->communicator(0, view, *kernels).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(device->live_handle_count(), with_kernels);
}

TEST(LocalCommunicatorOnADevice, RefusesMixedBackendsAndAModelledLink) {
  const std::shared_ptr<HostBackend> device = create_device();
  DeviceView view(device, "device");
  const auto view_kernels = value_or_throw(Kernels::create(view, {.thread_count = 1}));
  Member host(create_host_backend(0));

  const std::shared_ptr<LocalGroup> mixed = LocalGroup::create(2);
  const auto first = mixed->communicator(0, view, *view_kernels);
  ASSERT_TRUE(first.ok()) << first.status().to_string();
  const Status second = mixed->communicator(1, host.backend(), host.kernels()).status();
  EXPECT_EQ(second.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(second.message().find("the same kind of backend"), std::string::npos) << second.message();

  const std::shared_ptr<LocalGroup> modelled = LocalGroup::create(2, {.latency = 1us});
  EXPECT_EQ(modelled->communicator(0, view, *view_kernels).status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace forebay::testing
