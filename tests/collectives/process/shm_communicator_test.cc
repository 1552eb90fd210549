// Ranks as threads of this process, each with the shared memory mapped for itself. shm_process_test has them
// as processes.
#include "forebay/shm_communicator.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <latch>
#include <random>

#include "collectives/process/shm_group.h"
#include "collectives/process/shm_segment.h"
#include "collectives/rendezvous/meeting.h"
#include "collectives/rendezvous/store_directory.h"
#include "forebay/local_communicator.h"
#include "runtime/device/host/script.h"
#include "tests/collectives/communicator_conformance.h"
#include "tests/support/let_others_run.h"
#include "tests/support/process.h"

namespace forebay::testing {
namespace {

using namespace std::chrono_literals;

class ShmWorld final : public CommunicatorWorld {
 public:
  ShmWorld(int size, std::chrono::milliseconds deadline) : size_(size), deadline_(deadline) {
    std::filesystem::permissions(store_.path(), std::filesystem::perms::owner_all);
  }
  Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels&) override {
    return create_shm_communicator(
        {.rank = rank, .size = size_, .store = store_.path(), .deadline = deadline_}, backend);
  }

 private:
  const int size_;
  const std::chrono::milliseconds deadline_;
  TemporaryDirectory store_;
};

class LocalWorld final : public CommunicatorWorld {
 public:
  LocalWorld(int size, std::chrono::milliseconds deadline)
      : group_(LocalGroup::create(size, {.deadline = deadline})) {}
  Result<std::unique_ptr<Communicator>> join(int rank, Backend& backend, Kernels& kernels) override {
    return group_->communicator(rank, backend, kernels);
  }

 private:
  const std::shared_ptr<LocalGroup> group_;
};

const CommunicatorFactory kShm{"shm", "", [](int size, std::chrono::milliseconds deadline) {
                                 return std::make_unique<ShmWorld>(size, deadline);
                               }};

// One thread per rank; an exception of any fails the test.
void run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_members(CommunicatorWorld& world, int size, const std::function<void(Member&, int)>& body) {
  run_ranks(size, [&](int rank) {
    Member member(world.create_backend(rank));
    member.set_communicator(value_or_throw(world.join(rank, member.backend(), member.kernels())));
    body(member, rank);
  });
}

std::vector<Status> join_all(const std::string& store, int size,
                             const std::function<void(Member&, int)>& body,
                             std::chrono::milliseconds deadline = 30s) {
  std::vector<Status> results(static_cast<std::size_t>(size));
  run_ranks(size, [&](int rank) {
    Member member(create_host_backend(rank));
    Result<std::unique_ptr<Communicator>> joined = create_shm_communicator(
        {.rank = rank, .size = size, .store = store, .deadline = deadline}, member.backend());
    results[static_cast<std::size_t>(rank)] = joined.status();
    if (!joined.ok()) return;
    member.set_communicator(std::move(joined).value());
    body(member, rank);
  });
  return results;
}

// A sum and then a gather of its result, with every address and stride off by some elements.
struct Shape {
  std::size_t count;
  std::size_t offset;  // Elements before each buffer.
  std::size_t gap;     // Elements between slices.
  DataType type;
  bool first;
};

struct Bits {
  std::vector<float> sums;
  std::vector<std::byte> gathered;
};

void expect_equal(const Bits& actual, const Bits& expected) {
  ASSERT_EQ(actual.sums.size(), expected.sums.size());
  for (std::size_t i = 0; i < expected.sums.size(); ++i)
    ASSERT_EQ(float_bits(actual.sums[i]), float_bits(expected.sums[i])) << "sum " << i;
  ASSERT_EQ(actual.gathered.size(), expected.gathered.size());
  for (std::size_t i = 0; i < expected.gathered.size(); ++i)
    ASSERT_EQ(actual.gathered[i], expected.gathered[i]) << "gathered byte " << i;
}

std::vector<Bits> bits_of(CommunicatorWorld& world, int size, const Shape& shape, std::uint64_t seed) {
  std::vector<Bits> results(static_cast<std::size_t>(size));
  run_members(world, size, [&](Member& member, int rank) {
    const std::size_t element = element_bytes(shape.type);
    const auto ranks = static_cast<std::size_t>(size);
    const std::size_t stride = (shape.count + shape.gap) * element;
    std::vector<std::byte> contribution(shape.offset * element + stride * ranks);
    for (std::size_t i = 0; i < contribution.size() / element; ++i)
      store(shape.type, contribution.data(), i, sample(seed, rank, i));
    std::byte* source = member.allocate_copy(contribution) + shape.offset * element;
    std::byte* receive = member.allocate(shape.count * element * ranks);
    const std::vector<float> before(shape.offset + shape.count, 0.375f);
    float* target = member.allocate_copy(before) + shape.offset;
    throw_if_error(member.communicator().reduce_scatter({.source = source,
                                                         .source_stride_bytes = stride,
                                                         .count = shape.count,
                                                         .type = shape.type,
                                                         .receive = receive,
                                                         .target = target,
                                                         .first = shape.first},
                                                        member.stream()));
    const std::size_t bytes = shape.count * sizeof(float) - 3;
    std::byte* gathered = member.allocate_filled(shape.offset + (bytes + shape.gap) * ranks, 0xCB);
    throw_if_error(member.communicator().all_gather({.source = reinterpret_cast<const std::byte*>(target) + 1,
                                                     .target = gathered + shape.offset,
                                                     .target_stride_bytes = bytes + shape.gap,
                                                     .bytes = bytes},
                                                    member.stream()));
    throw_if_error(member.finish());
    results[static_cast<std::size_t>(rank)] = {
        member.read(target, shape.count), member.read(gathered, shape.offset + (bytes + shape.gap) * ranks)};
  });
  return results;
}

TEST(ShmCommunicator, HasTheBitsOfLocalForAnyTypeCountAndOffset) {
  std::mt19937_64 random(test_seed());
  const auto pick = [&](std::size_t first, std::size_t last) {
    return std::uniform_int_distribution<std::size_t>(first, last)(random);
  };
  for (int size = 1; size <= 4; ++size) {
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
      // One of less than a vector, one of less than a slot, one of more rounds than there are slots.
      for (const std::size_t most_bytes : {std::size_t{36}, std::size_t{160'000}, std::size_t{1'400'000}}) {
        const std::size_t most = most_bytes / element_bytes(type);
        const Shape shape{.count = pick(most - most / 5, most),
                          .offset = pick(0, 17),
                          .gap = pick(0, 5),
                          .type = type,
                          .first = pick(0, 1) == 1};
        const std::uint64_t seed = random();
        ShmWorld shm(size, 60s);
        LocalWorld local(size, 60s);
        SCOPED_TRACE(std::to_string(size) + " ranks, " + std::to_string(shape.count) + " " +
                     data_type_name(type) + " at " + std::to_string(shape.offset) + ", gap " +
                     std::to_string(shape.gap) + (shape.first ? ", first" : ""));
        const std::vector<Bits> actual = bits_of(shm, size, shape, seed);
        const std::vector<Bits> expected = bits_of(local, size, shape, seed);
        for (std::size_t rank = 0; rank < expected.size(); ++rank) expect_equal(actual[rank], expected[rank]);
      }
    }
  }
}

TEST(ShmCommunicator, ASumMayReplaceTheOwnSliceOfItsSource) {
  constexpr std::size_t kCount = 300'001;
  ShmWorld world(3, 60s);
  run_members(world, 3, [&](Member& member, int rank) {
    std::vector<float> contribution(3 * kCount);
    for (std::size_t i = 0; i < contribution.size(); ++i) contribution[i] = sample(test_seed(), rank, i);
    float* source = member.allocate_copy(contribution);
    float* own = source + static_cast<std::size_t>(rank) * kCount;
    std::byte unused{};
    throw_if_error(member.communicator().reduce_scatter({.source = reinterpret_cast<const std::byte*>(source),
                                                         .source_stride_bytes = kCount * sizeof(float),
                                                         .count = kCount,
                                                         .type = DataType::kFloat32,
                                                         .receive = &unused,
                                                         .target = own,
                                                         .first = true},
                                                        member.stream()));
    throw_if_error(member.finish());
    const std::vector<float> actual = member.read(own, kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::size_t index = static_cast<std::size_t>(rank) * kCount + i;
      float expected = sample(test_seed(), 0, index);
      for (int r = 1; r < 3; ++r) expected += sample(test_seed(), r, index);
      ASSERT_EQ(float_bits(actual[i]), float_bits(expected)) << "element " << i;
    }
  });
}

TEST(ShmCommunicator, LargeMessagesAndExchangesGoInPieces) {
  constexpr std::size_t kBytes = (5u << 20) + 13;  // More than all slots hold.
  constexpr std::size_t kControlBytes = 100'003;
  ShmWorld world(3, 60s);
  run_members(world, 3, [&](Member& member, int rank) {
    const int right = (rank + 1) % 3;
    const int left = (rank + 2) % 3;
    std::vector<std::byte> out(kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) out[i] = std::byte(mix(i + static_cast<std::size_t>(rank)));
    std::byte* source = member.allocate_copy(out);
    std::byte* target = member.allocate(kBytes);
    for (const std::size_t bytes : {kBytes, std::size_t{0}, std::size_t{1}}) {
      for (int turn = 0; turn < 2; ++turn) {
        // Rank 0 sends first, so that somebody receives.
        if ((turn == 0) == (rank == 0)) {
          throw_if_error(member.communicator().send(source, bytes, right, 4, member.stream()));
        } else {
          throw_if_error(member.communicator().recv(target, bytes, left, 4, member.stream()));
        }
      }
    }
    std::vector<std::byte> mine(kControlBytes, std::byte(rank));
    std::vector<std::byte> all(3 * kControlBytes);
    throw_if_error(member.communicator().exchange(mine, all));
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(all[r * kControlBytes], std::byte(r));
      EXPECT_EQ(all[(r + 1) * kControlBytes - 1], std::byte(r));
    }
    throw_if_error(member.finish());
    const std::vector<std::byte> in = member.read(target, kBytes);
    for (std::size_t i = 0; i < kBytes; ++i)
      ASSERT_EQ(in[i], std::byte(mix(i + static_cast<std::size_t>(left)))) << "byte " << i;
  });
}

// Several times round the slots, with an end that fills none; from elsewhere and in place.
TEST(ShmCommunicator, LargeGathersGoInPieces) {
  constexpr std::size_t kBytes = (5u << 20) + 12'345;
  for (const int size : {2, 3, 4}) {
    for (const bool in_place : {false, true}) {
      SCOPED_TRACE(std::to_string(size) + " ranks" + (in_place ? ", in place" : ""));
      ShmWorld world(size, 60s);
      run_members(world, size, [&](Member& member, int rank) {
        const auto byte_of = [&](std::size_t r, std::size_t i) {
          return std::byte(mix(i + r * 7 + (in_place ? 1u : 0u)));
        };
        const auto ranks = static_cast<std::size_t>(size);
        const auto mine = static_cast<std::size_t>(rank);
        std::vector<std::byte> before(ranks * kBytes);
        std::vector<std::byte> out(kBytes);
        for (std::size_t i = 0; i < kBytes; ++i) out[i] = byte_of(mine, i);
        if (in_place) std::copy(out.begin(), out.end(), before.begin() + std::ptrdiff_t(mine * kBytes));
        std::byte* target = member.allocate_copy(before);
        const std::byte* source = in_place ? target + mine * kBytes : member.allocate_copy(out);
        throw_if_error(member.communicator().all_gather(
            {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
            member.stream()));
        throw_if_error(member.finish());
        const std::vector<std::byte> all = member.read(target, ranks * kBytes);
        for (std::size_t r = 0; r < ranks; ++r) {
          for (std::size_t i = 0; i < kBytes; ++i)
            ASSERT_EQ(all[r * kBytes + i], byte_of(r, i)) << "slice " << r << " byte " << i;
        }
      });
    }
  }
}

// Rank 2 copies into new memory and so takes longest, and rank 1's slices come last.
TEST(ShmCommunicator, AMessageWaitsForRanksThatStillReadTheSlots) {
  constexpr std::size_t kBytes =
      internal::ShmSegment::kSlotCount * internal::ShmSegment::slot_bytes(internal::kShmDataPlane);
  ShmWorld world(3, 60s);
  run_members(world, 3, [&](Member& member, int rank) {
    std::byte* const gathered = member.allocate(3 * kBytes);
    const std::byte* const source = member.allocate_filled(kBytes, static_cast<std::uint8_t>(rank));
    std::byte* const message = member.allocate_filled(kBytes, 0xCB);
    for (int round = 0; round < 10; ++round) {
      std::byte* const target = rank == 2 ? member.allocate(3 * kBytes) : gathered;
      throw_if_error(member.communicator().all_gather(
          {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
          member.stream()));
      if (rank == 1) throw_if_error(member.communicator().send(message, kBytes, 0, 0, member.stream()));
      if (rank == 0) throw_if_error(member.communicator().recv(message, kBytes, 1, 0, member.stream()));
      throw_if_error(member.finish());
      const std::vector<std::byte> all = member.read(target, 3 * kBytes);
      for (std::size_t i = 0; i < all.size(); i += 64)
        ASSERT_EQ(all[i], std::byte(i / kBytes)) << "round " << round << " byte " << i;
    }
  });
}

TEST(ShmCommunicator, AMessageInAnotherOrderIsAnErrorThatNamesBoth) {
  std::vector<Status> causes(2);
  ShmWorld world(2, 60s);
  run_members(world, 2, [&](Member& member, int rank) {
    std::byte* bytes = member.allocate(64);
    if (rank == 0) {
      static_cast<void>(member.communicator().send(bytes, 64, 1, 7, member.stream()));
    } else {
      static_cast<void>(member.communicator().recv(bytes, 64, 0, 9, member.stream()));
    }
    causes[static_cast<std::size_t>(rank)] = member.finish();
  });
  EXPECT_EQ(causes[0].code(), StatusCode::kInvalidArgument) << causes[0].to_string();
  EXPECT_EQ(causes[0].to_string(), causes[1].to_string());
  for (const char* word : {"tag 7", "tag 9", "rank 0", "rank 1"})
    EXPECT_NE(causes[0].message().find(word), std::string::npos) << causes[0].message();
}

TEST(ShmCommunicator, TheTimeoutOfAMessageNamesTheOperationsOfBothRanks) {
  std::vector<Status> causes(2);
  ShmWorld world(2, 2s);
  run_members(world, 2, [&](Member& member, int rank) {
    std::byte* bytes = member.allocate(64 * 3);
    if (rank == 0) {
      static_cast<void>(member.communicator().all_gather(
          {.source = bytes, .target = bytes + 64, .target_stride_bytes = 64, .bytes = 64}, member.stream()));
    } else {
      static_cast<void>(member.communicator().recv(bytes, 64, 0, 1, member.stream()));
    }
    causes[static_cast<std::size_t>(rank)] = member.finish();
  });
  EXPECT_EQ(causes[0].code(), StatusCode::kInvalidArgument) << causes[0].to_string();
  EXPECT_EQ(causes[0].to_string(), causes[1].to_string());
  for (const char* words : {"rank 0 in all_gather of 64 bytes", "rank 1 in recv of 64 bytes from rank 0"})
    EXPECT_NE(causes[0].message().find(words), std::string::npos) << causes[0].message();
}

TEST(ShmCommunicator, ASendToARankThatNeverReceivesEndsAtTheDeadline) {
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{16} << 20}) {
    ShmWorld world(2, 2s);
    std::atomic<bool> ended{false};
    run_members(world, 2, [&](Member& member, int rank) {
      if (rank == 0) {
        static_cast<void>(member.communicator().send(member.allocate(bytes), bytes, 1, 0, member.stream()));
        const Status cause = member.finish();
        EXPECT_EQ(cause.code(), StatusCode::kTimeout) << cause.to_string();
        EXPECT_NE(cause.message().find("rank 1"), std::string::npos) << cause.message();
        ended = true;
        return;
      }
      const auto limit = std::chrono::steady_clock::now() + 30s;
      while (!ended && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(1ms);
      if (!ended) member.communicator().abort(Status(StatusCode::kInternal, "the send has no deadline"));
    });
  }
}

TEST(ShmCommunicator, LeavesNothingInTheStoreNorOpenFiles) {
  const TemporaryDirectory store;
  const auto count_descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = count_descriptors();

  const std::vector<Status> results = join_all(store.path(), 3, [&](Member& member, int rank) {
    Result<std::unique_ptr<Communicator>> part = member.communicator().split(rank == 0 ? 0 : 1, rank);
    EXPECT_TRUE(part.ok()) << part.status().to_string();
    EXPECT_TRUE(member.communicator().barrier().ok());
  });

  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
  EXPECT_TRUE(std::filesystem::is_empty(store.path()));
  EXPECT_EQ(count_descriptors(), before);
}

TEST(ShmCommunicator, ARankThatLeavesFailsOnlyRanksThatNeedIt) {
  const TemporaryDirectory store;
  std::atomic<bool> left{false};
  join_all(store.path(), 3, [&](Member& member, int rank) {
    Result<std::unique_ptr<Communicator>> own = member.communicator().split(rank == 0 ? 0 : 1, rank);
    ASSERT_TRUE(own.ok()) << own.status().to_string();
    if (rank == 0) {
      member.set_communicator(nullptr);
      left = true;
      left.notify_all();
      return;
    }
    left.wait(false);
    for (int i = 0; i < 200; ++i) ASSERT_TRUE(own.value()->barrier().ok());
    EXPECT_TRUE(member.communicator().status().ok()) << member.communicator().status().to_string();
  });
}

TEST(ShmCommunicator, AFailureReachesARankThatWaitsForNothing) {
  const TemporaryDirectory store;
  join_all(store.path(), 3, [&](Member& member, int rank) {
    if (rank == 1) member.communicator().abort(Status(StatusCode::kIoError, "the disk of rank 1 is full"));
    const auto limit = std::chrono::steady_clock::now() + 20s;
    while (member.communicator().status().ok() && std::chrono::steady_clock::now() < limit)
      testing::let_others_run();
    EXPECT_EQ(member.communicator().status().to_string(),
              Status(StatusCode::kIoError, "the disk of rank 1 is full").to_string());
  });
}

TEST(ShmCommunicator, ACallThatCannotBeQueuedFailsEveryRank) {
  std::vector<Status> causes(3);
  ShmWorld world(3, 60s);
  run_members(world, 3, [&](Member& member, int rank) {
    if (rank == 1) {
      dynamic_cast<ScriptedHostBackend&>(member.backend())
          .add_fault(
              {.call = HostCall::kCallHost, .status = Status(StatusCode::kInternal, "the queue is broken")});
    }
    std::byte* const source = member.allocate(64);
    const Status queued = member.communicator().all_gather(
        {.source = source, .target = member.allocate(192), .target_stride_bytes = 64, .bytes = 64},
        member.stream());
    causes[static_cast<std::size_t>(rank)] = member.finish();
    if (rank != 1) return;
    EXPECT_EQ(queued.message(), "the queue is broken");
    ASSERT_EQ(member.communicator().last_operations().size(), 1u);
    EXPECT_EQ(member.communicator().last_operations()[0].state, OperationState::kFailed);
  });
  for (const Status& cause : causes) EXPECT_EQ(cause.message(), "rank 1: the queue is broken");
}

TEST(ShmCommunicator, ALongCauseIsTheSameOnEveryRank) {
  const TemporaryDirectory store;
  std::vector<std::string> messages(2);
  join_all(store.path(), 2, [&](Member& member, int rank) {
    if (rank == 0) member.communicator().abort(Status(StatusCode::kIoError, std::string(100'000, 'x')));
    messages[static_cast<std::size_t>(rank)] = member.communicator().barrier().message();
  });
  EXPECT_EQ(messages[0], messages[1]);
  EXPECT_GT(messages[0].size(), 1000u);
}

TEST(ShmCommunicator, RanksOfSeveralHostsAreToldSo) {
  const TemporaryDirectory store;
  std::vector<Status> results(2);
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      Member member(create_host_backend(rank));
      results[1] = create_shm_communicator({.rank = 1, .size = 2, .store = store.path(), .deadline = 30s},
                                           member.backend())
                       .status();
      return;
    }
    // The text that rank 0 of another host would leave.
    auto directory = value_or_throw(internal::StoreDirectory::open(store.path()));
    const std::chrono::steady_clock::time_point limit = std::chrono::steady_clock::now() + 30s;
    const internal::Participant me{0, 2, "shm "};
    throw_if_error(directory->come(me));  // Or rank 1 removes the cause when it leaves.
    const internal::Meeting meeting = value_or_throw(internal::meet(*directory, me, limit, 30s));
    throw_if_error(directory->write(meeting.generation + ".segment", "elsewhere pid:[1] user:[1]\n1 1 3\n"));
    while (!directory->read(meeting.generation + ".failed")) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << "rank 1 told nobody";
      testing::let_others_run();
    }
  });
  EXPECT_EQ(results[1].code(), StatusCode::kUnsupported) << results[1].to_string();
  EXPECT_NE(results[1].message().find("rank 0 is on elsewhere"), std::string::npos) << results[1].message();
}

TEST(ShmCommunicator, ARankThatCannotShareMemoryIsTheCauseOfAll) {
  const TemporaryDirectory store;
  std::vector<Status> results(2);
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      Member member(create_host_backend(rank));
      results[0] = create_shm_communicator({.rank = 0, .size = 2, .store = store.path(), .deadline = 30s},
                                           member.backend())
                       .status();
      return;
    }
    auto directory = value_or_throw(internal::StoreDirectory::open(store.path()));
    const internal::Meeting meeting = value_or_throw(
        internal::meet(*directory, {1, 2, "shm "}, std::chrono::steady_clock::now() + 30s, 30s));
    directory->write_once(meeting.generation + ".failed", "3\nrank 1 is elsewhere");
  });
  EXPECT_EQ(results[0].to_string(), "kUnsupported: rank 1 is elsewhere");
}

TEST(ShmCommunicator, NamesTheRanksThatNeverCame) {
  const TemporaryDirectory store;
  Member member(create_host_backend(0));
  const Status status =
      create_shm_communicator({.rank = 0, .size = 3, .store = store.path(), .deadline = 200ms},
                              member.backend())
          .status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
  EXPECT_NE(status.message().find("ranks 1 and 2 did not join"), std::string::npos) << status.message();
  EXPECT_TRUE(std::filesystem::is_empty(store.path()));
}

TEST(ShmCommunicator, RanksThatComeLateHaveADeadlineOfTheirOwn) {
  const TemporaryDirectory store;
  std::latch failed(1);
  run_ranks(2, [&](int rank) {
    Member member(create_host_backend(rank));
    if (rank == 1) std::this_thread::sleep_for(1500ms);
    const ProcessOptions options{
        .rank = rank, .size = 2, .store = store.path(), .deadline = 1000ms, .join_deadline = 60s};
    member.set_communicator(value_or_throw(create_shm_communicator(options, member.backend())));
    // From here on it is the shorter deadline that counts.
    if (rank == 1) return failed.wait();
    const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(member.communicator().barrier().ok());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
    failed.count_down();
  });

  Member alone(create_host_backend(0));
  const ProcessOptions impatient{
      .rank = 0, .size = 2, .store = store.path(), .deadline = 60s, .join_deadline = 100ms};
  const Status status = create_shm_communicator(impatient, alone.backend()).status();
  EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
  EXPECT_NE(status.message().find("waited 100 ms"), std::string::npos) << status.message();
}

TEST(ShmCommunicator, RefusesRanksThatDoNotExist) {
  Member member(create_host_backend(0));
  for (const auto& [rank, size] : {std::pair(2, 2), std::pair(0, 0), std::pair(0, kShmRanksMax + 1)}) {
    EXPECT_EQ(create_shm_communicator({.rank = rank, .size = size}, member.backend()).status().code(),
              StatusCode::kInvalidArgument);
  }
}

TEST(ShmSegment, ItsBytesAreThoseOfTheHeader) {
  for (const int size : {1, 2, 4, 64})
    EXPECT_EQ(internal::shm_segment_bytes(size), 8192u + static_cast<std::size_t>(size) * (2084u << 10));
}

TEST(ShmSegment, OthersMemoryIsNotTakenForOurs) {
  const auto owner = value_or_throw(internal::this_process());
  auto segment = value_or_throw(internal::ShmSegment::create(2, "this"));
  const auto open = [&](int descriptor, int size, const std::string& generation) {
    return internal::ShmSegment::open(owner, descriptor, size, generation).status().code();
  };
  EXPECT_EQ(open(segment->descriptor(), 2, "this"), StatusCode::kOk);
  EXPECT_EQ(open(segment->descriptor(), 2, "other"), StatusCode::kCorruption);
  EXPECT_EQ(open(segment->descriptor(), 3, "this"), StatusCode::kCorruption);
  EXPECT_EQ(open(1'000'000, 2, "this"), StatusCode::kUnsupported);
  internal::ProcessIdentity gone = owner;
  gone.start_time += 1;
  EXPECT_FALSE(internal::is_running(gone));
  EXPECT_EQ(internal::ShmSegment::open(gone, 1'000'000, 2, "this").status().code(), StatusCode::kPeerLost);
  EXPECT_TRUE(internal::is_running(owner));
}

TEST(ShmSegment, HasItsMemoryUntilItsEndAndNobodyCutsIt) {
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("forebay-shm") != std::string::npos;
    return count;
  };
  const int before = mappings();
  {
    const auto segment = internal::ShmSegment::create(3, "run").value();
    EXPECT_EQ(mappings(), before + 1);
    struct stat facts {};
    ASSERT_EQ(::fstat(segment->descriptor(), &facts), 0);
    EXPECT_GE(static_cast<std::size_t>(facts.st_blocks) * 512, internal::shm_segment_bytes(3));
    EXPECT_NE(::ftruncate(segment->descriptor(), 4096), 0);
  }
  EXPECT_EQ(mappings(), before);
}

// Rank 1 has begun to write the first failure. If it has ended, its place is taken; if it was stopped, it is
// not waited for.
TEST(ShmGroup, AFailureThatIsHalfWrittenKeepsNobody) {
  const internal::ProcessIdentity running = internal::this_process().value();
  internal::ProcessIdentity ended = running;
  ended.start_time += 1;
  const Status cause(StatusCode::kIoError, "the disk is full");
  for (const bool has_ended : {true, false}) {
    auto segment = internal::ShmSegment::create(3, "run").value();
    for (int rank = 0; rank < 3; ++rank)
      segment->rank(rank).process = rank == 1 && has_ended ? ended : running;
    internal::ShmFailure& failure = segment->failure();
    constexpr std::uint32_t kByRank1 = internal::ShmFailure::kWriting + 1;
    failure.state = kByRank1;
    const auto group = std::make_shared<internal::ShmGroup>(
        internal::Membership{.rank = 2, .size = 3, .deadline = 60s}, std::move(segment));

    EXPECT_EQ(group->fail(cause).to_string(), cause.to_string());
    EXPECT_EQ(group->status().to_string(), cause.to_string());
    EXPECT_EQ(failure.state, has_ended ? internal::ShmFailure::kThere : kByRank1);
  }
}

TEST(ShmBallot, OnlyTheLastVoteBeforeItsCloseCounts) {
  const auto vote = [](char text) { return std::vector<std::byte>{static_cast<std::byte>(text)}; };
  EXPECT_EQ(internal::ShmBallot().close(0), std::nullopt);
  internal::ShmBallot first;
  EXPECT_TRUE(first.cast(0, vote('z')));
  EXPECT_EQ(first.close(0), vote('z'));

  internal::ShmBallot ballot;
  EXPECT_TRUE(ballot.cast(4, vote('a')));
  EXPECT_TRUE(ballot.cast(5, vote('b')));
  EXPECT_EQ(ballot.close(4), std::nullopt);
  EXPECT_EQ(ballot.close(5), vote('b'));
  EXPECT_FALSE(ballot.cast(6, vote('c')));
  EXPECT_EQ(ballot.close(5), vote('b'));
}

TEST(ShmWaitSign, AWaitIsSeenUntilItEndsOrIsOld) {
  const auto segment = internal::ShmSegment::create(2, "run").value();
  internal::ShmRank& rank = segment->rank(1);
  {
    internal::ShmWaitSign sign(rank, std::chrono::steady_clock::now() - 1s);
    sign.say({.what = "barrier", .ranks = {0, 64}, .came = true});
    const std::vector<internal::Wait> waits = internal::read_waits(rank, 1h);
    ASSERT_EQ(waits.size(), 1u);
    EXPECT_EQ(waits[0].ranks, (std::vector<int>{0, 64}));
    EXPECT_TRUE(internal::read_waits(rank, 0ns).empty());
  }
  EXPECT_TRUE(internal::read_waits(rank, 1h).empty());
}

TEST(ShmWaitSign, TheOldestWaitComesFirstAndThereIsRoomForEight) {
  const auto segment = internal::ShmSegment::create(2, "run").value();
  internal::ShmRank& rank = segment->rank(1);
  const auto now = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<internal::ShmWaitSign>> signs;
  for (int i = 0; i < 9; ++i) {
    signs.push_back(std::make_unique<internal::ShmWaitSign>(rank, now - (i + 1) * 1s));
    signs.back()->say({.what = std::string(i == 7 ? 300 : 1, static_cast<char>('a' + i)), .ranks = {0}});
  }

  std::vector<internal::Wait> waits = internal::read_waits(rank, 1h);
  ASSERT_EQ(waits.size(), internal::kShmWaitCount);
  EXPECT_EQ(waits.front().what, std::string(internal::ShmWait::kTextMax, 'h'));
  EXPECT_GE(waits.front().age, 8s);
  EXPECT_EQ(waits.back().what, "a");

  // A place is free again when its wait ends.
  signs[0].reset();
  signs[8]->say({.what = "i", .ranks = {0}});
  waits = internal::read_waits(rank, 1h);
  ASSERT_EQ(waits.size(), internal::kShmWaitCount);
  EXPECT_EQ(waits.front().what, "i");
}

TEST(ShmAnnouncement, NumbersThatNoRankHasAreRefused) {
  const std::string text = encode(internal::ShmAnnouncement{"host", {7, 8}, 9});
  ASSERT_TRUE(internal::decode_shm_announcement(text));

  EXPECT_FALSE(internal::decode_shm_announcement(text + "more"));
  EXPECT_FALSE(internal::decode_shm_announcement("host\n0 8 9\n"));
  EXPECT_FALSE(internal::decode_shm_announcement("host\n7 8 -1\n"));
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Shm, CommunicatorConformance,
                         ::testing::Combine(::testing::Values(kShm), ::testing::Values(1, 2, 3, 4)),
                         conformance_name);

}  // namespace forebay::testing
