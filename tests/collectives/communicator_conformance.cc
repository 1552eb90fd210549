#include "tests/collectives/communicator_conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "forebay/communicator.h"
#include "forebay/error.h"
#include "forebay/grouped_communicator.h"
#include "forebay/host_backend.h"
#include "forebay/kernels.h"
#include "tests/support/elements.h"
#include "tests/support/let_others_run.h"

namespace forebay::testing {
namespace {

constexpr char kNeedsTwo[] = "it needs two ranks";
constexpr char kNeedsThree[] = "it needs three ranks";

TEST_P(CommunicatorConformance, KnowsItsPlace) {
  run([&](Member& member, int rank) {
    EXPECT_EQ(member.communicator().rank(), rank);
    EXPECT_EQ(member.communicator().size(), size());
    EXPECT_TRUE(member.communicator().status().ok());
    EXPECT_EQ(member.communicator().traffic().sent_bytes, 0u);
  });
}

TEST_P(CommunicatorConformance, ReduceScatterAddsInRankOrderToTheLastBit) {
  run([&](Member& member, int rank) {
    std::uint64_t seed = test_seed();
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
      for (const std::size_t count : {512u, 3u * 512u, 33u * 512u}) {
        for (const bool first : {true, false}) {
          check_sum(member, rank, {.count = count, .type = type, .first = first}, ++seed);
        }
      }
    }
  });
}

TEST_P(CommunicatorConformance, ReduceScatterTakesAColumnRangeOfALargerBuffer) {
  run([&](Member& member, int rank) {
    check_sum(member, rank, {.count = 512, .type = DataType::kBfloat16, .gap_bytes = 1024}, test_seed());
    check_sum(member, rank, {.count = 5 * 512, .type = DataType::kFloat32, .gap_bytes = 64}, test_seed() + 1);
  });
}

TEST_P(CommunicatorConformance, ReduceScatterOfLargeSlices) {
  run([&](Member& member, int rank) {
    check_sum(member, rank, {.count = 700 * 512 + 512, .type = DataType::kFloat32}, test_seed());
  });
}

TEST_P(CommunicatorConformance, ASumDoesNotDependOnHowItIsCutIntoOperations) {
  // The same 8 x 512 columns in one operation and in eight, queued without waiting between them.
  constexpr std::size_t kCount = 8 * 512;
  run([&](Member& member, int rank) {
    const auto ranks = static_cast<std::size_t>(size());
    std::vector<float> contribution(kCount * ranks);
    for (std::size_t i = 0; i < kCount * ranks; ++i) contribution[i] = sample(test_seed(), rank, i);
    const float* source = member.allocate_copy(contribution);
    std::byte* receive = member.allocate(kCount * ranks * sizeof(float));
    auto* whole = member.allocate<float>(kCount);
    auto* parts = member.allocate<float>(kCount);
    const auto reduce = [&](std::size_t begin, std::size_t count, float* target) {
      const Status status =
          member.communicator().reduce_scatter({.source = reinterpret_cast<const std::byte*>(source + begin),
                                                .source_stride_bytes = kCount * sizeof(float),
                                                .count = count,
                                                .type = DataType::kFloat32,
                                                .receive = receive,
                                                .target = target + begin,
                                                .first = true},
                                               member.stream());
      EXPECT_TRUE(status.ok()) << status.to_string();
    };
    reduce(0, kCount, whole);
    for (std::size_t begin = 0; begin < kCount; begin += 512) reduce(begin, 512, parts);
    ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
    EXPECT_EQ(std::memcmp(member.read(whole, kCount).data(), member.read(parts, kCount).data(),
                          kCount * sizeof(float)),
              0);
  });
}

TEST_P(CommunicatorConformance, AllGatherBringsEverySliceToItsPlace) {
  run([&](Member& member, int rank) {
    const auto ranks = static_cast<std::size_t>(size());
    for (const std::size_t bytes : {1u, 1024u, 3u * 1024u + 512u, 300'000u}) {
      for (const bool in_place : {false, true}) {
        const std::size_t stride = bytes + 192;
        const std::size_t place = static_cast<std::size_t>(rank) * stride;
        std::vector<std::byte> before(stride * ranks, std::byte{0xCB});
        if (in_place) std::memset(&before[place], 0x10 + rank, bytes);
        std::byte* target = member.allocate_copy(before);
        std::byte* source = in_place ? target + place : member.allocate_filled(bytes, 0x10 + rank);
        const Status queued = member.communicator().all_gather(
            {.source = source, .target = target, .target_stride_bytes = stride, .bytes = bytes},
            member.stream());
        ASSERT_TRUE(queued.ok()) << queued.to_string();
        ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
        const std::vector<std::byte> actual = member.read(target, stride * ranks);
        for (std::size_t r = 0; r < ranks; ++r) {
          for (std::size_t i = 0; i < stride; ++i) {
            const std::byte expected = i < bytes ? std::byte(0x10 + r) : std::byte{0xCB};
            ASSERT_EQ(actual[r * stride + i], expected) << "slice " << r << " byte " << i;
          }
        }
      }
    }
  });
}

TEST_P(CommunicatorConformance, ASourceMayBeWrittenAgainByTheNextQueuedWork) {
  run([&](Member& member, int rank) {
    constexpr std::size_t kBytes = 200'000;
    const auto ranks = static_cast<std::size_t>(size());
    std::byte* source = member.allocate(kBytes);
    std::vector<std::byte*> targets;
    for (int round = 0; round < 4; ++round) {
      targets.push_back(member.allocate(kBytes * ranks));
      const auto value = static_cast<std::uint8_t>(16 * round + rank);
      ASSERT_TRUE(member.backend().fill_async(source, value, kBytes, member.stream()).ok());
      ASSERT_TRUE(member.communicator()
                      .all_gather({.source = source,
                                   .target = targets.back(),
                                   .target_stride_bytes = kBytes,
                                   .bytes = kBytes},
                                  member.stream())
                      .ok());
    }
    ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
    for (std::size_t round = 0; round < targets.size(); ++round) {
      const std::vector<std::byte> actual = member.read(targets[round], kBytes * ranks);
      for (std::size_t i = 0; i < kBytes * ranks; ++i) {
        ASSERT_EQ(actual[i], std::byte(16 * round + i / kBytes)) << "round " << round << " byte " << i;
      }
    }
  });
}

TEST_P(CommunicatorConformance, TrafficIsExactOnEveryRank) {
  run([&](Member& member, int) {
    constexpr std::size_t kCount = 7 * 512;
    const auto ranks = static_cast<std::size_t>(size());
    std::byte* source = member.allocate_filled(kCount * 2 * ranks, 0);
    std::byte* receive = member.allocate(kCount * 2 * ranks);
    float* target = member.allocate<float>(kCount);
    ASSERT_TRUE(member.communicator()
                    .reduce_scatter({.source = source,
                                     .source_stride_bytes = kCount * 2,
                                     .count = kCount,
                                     .type = DataType::kBfloat16,
                                     .receive = receive,
                                     .target = target,
                                     .first = true},
                                    member.stream())
                    .ok());
    ASSERT_TRUE(member.finish().ok());
    const std::uint64_t slices = (ranks - 1) * kCount * 2;
    EXPECT_EQ(member.communicator().traffic().sent_bytes, slices);
    EXPECT_EQ(member.communicator().traffic().received_bytes, slices);

    ASSERT_TRUE(
        member.communicator()
            .all_gather(
                {.source = source, .target = receive, .target_stride_bytes = kCount * 2, .bytes = kCount * 2},
                member.stream())
            .ok());
    ASSERT_TRUE(member.finish().ok());
    EXPECT_EQ(member.communicator().traffic().sent_bytes, 2 * slices);
    EXPECT_EQ(member.communicator().traffic().received_bytes, 2 * slices);

    const std::vector<std::byte> mine(8);
    std::vector<std::byte> all(8 * ranks);
    ASSERT_TRUE(member.communicator().exchange(mine, all).ok());
    ASSERT_TRUE(member.communicator().barrier().ok());
    EXPECT_EQ(member.communicator().traffic().sent_bytes, 2 * slices + 8 * (ranks - 1));
    EXPECT_EQ(member.communicator().traffic().received_bytes, 2 * slices + 8 * (ranks - 1));
  });
}

TEST_P(CommunicatorConformance, TrafficIsKnownByOperationAndPeer) {
  run([&](Member& member, int rank) {
    Communicator& communicator = member.communicator();
    constexpr std::size_t kBytes = 4096;
    const auto ranks = static_cast<std::size_t>(size());
    std::byte* source = member.allocate_filled(kBytes, 0);
    std::byte* target = member.allocate(kBytes * ranks);
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(
          communicator
              .all_gather(
                  {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
                  member.stream())
              .ok());
    }
    if (size() > 1 && rank == 0) {
      ASSERT_TRUE(communicator.send(source, 100, 1, 5, member.stream()).ok());
    } else if (rank == 1) {
      ASSERT_TRUE(communicator.recv(target, 100, 0, 5, member.stream()).ok());
    }
    ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();

    std::vector<std::string> kinds;
    Traffic sum;
    for (const OperationTraffic& kind : communicator.operation_traffic()) {
      kinds.emplace_back(kind.operation);
      ASSERT_EQ(kind.peers.size(), ranks);
      for (int peer = 0; peer < size(); ++peer) {
        const Traffic& with_peer = kind.peers[static_cast<std::size_t>(peer)];
        sum.sent_bytes += with_peer.sent_bytes;
        sum.received_bytes += with_peer.received_bytes;
        Traffic expected;
        if (kinds.back() == "all_gather" && peer != rank) expected = {2 * kBytes, 2 * kBytes};
        if (kinds.back() == "send" && peer == 1) expected = {100, 0};
        if (kinds.back() == "recv" && peer == 0) expected = {0, 100};
        EXPECT_EQ(with_peer.sent_bytes, expected.sent_bytes) << kinds.back() << " with rank " << peer;
        EXPECT_EQ(with_peer.received_bytes, expected.received_bytes) << kinds.back() << " with rank " << peer;
      }
      EXPECT_EQ(kind.count, kinds.back() == "all_gather" ? 2u : 1u) << kinds.back();
    }
    std::vector<std::string> wanted{"all_gather"};
    if (size() > 1 && rank < 2) wanted.emplace_back(rank == 0 ? "send" : "recv");
    EXPECT_EQ(kinds, wanted);
    EXPECT_EQ(sum.sent_bytes, communicator.traffic().sent_bytes);
    EXPECT_EQ(sum.received_bytes, communicator.traffic().received_bytes);
  });
}

TEST_P(CommunicatorConformance, RemembersItsLastOperations) {
  run([&](Member& member, int) {
    Communicator& communicator = member.communicator();
    ASSERT_TRUE(communicator.barrier().ok());
    std::byte* source = member.allocate(64);
    std::byte* target = member.allocate(64 * static_cast<std::size_t>(size()));
    ASSERT_TRUE(communicator
                    .all_gather({.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64},
                                member.stream())
                    .ok());
    ASSERT_TRUE(member.finish().ok());
    const std::vector<OperationRecord> records = communicator.last_operations();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[0].what, "barrier (operation 0)");
    EXPECT_EQ(records[1].what, "all_gather of 64 bytes (operation 0)");
    for (const OperationRecord& record : records) {
      EXPECT_EQ(record.state, OperationState::kDone);
      EXPECT_LE(record.queued, record.begun);
      EXPECT_LE(record.begun, record.ended);
    }
  });
}

TEST_P(CommunicatorConformance, RemembersItsLastOperationsInOrderWhenTheyAreMany) {
  run([&](Member& member, int) {
    Communicator& communicator = member.communicator();
    constexpr int kBarriers = 100;
    for (int i = 0; i < kBarriers; ++i) ASSERT_TRUE(communicator.barrier().ok());

    const std::vector<OperationRecord> records = communicator.last_operations();

    ASSERT_LT(records.size(), static_cast<std::size_t>(kBarriers));
    for (std::size_t i = 0; i < records.size(); ++i)
      EXPECT_EQ(records[i].what,
                "barrier (operation " + std::to_string(kBarriers - records.size() + i) + ")");
  });
}

TEST_P(CommunicatorConformance, RemembersTheLastOperationsOfCommunicatorsSplitFromIt) {
  if (size() < 3) GTEST_SKIP() << kNeedsThree;
  run([&](Member& member, int rank) {
    Communicator& communicator = member.communicator();
    const std::unique_ptr<Communicator> part = value_or_throw(communicator.split(rank == 0 ? 0 : 1, -rank));
    ASSERT_TRUE(part->barrier().ok());
    const std::vector<OperationRecord> records = communicator.last_operations();
    ASSERT_EQ(records.back().what.find("barrier (operation"), 0u) << records.back().what;
    // Rank 0 is rank 0 in its part too.
    if (rank != 0) {
      EXPECT_NE(records.back().what, "barrier (operation 0)") << "it does not say whose it is";
    }
    EXPECT_EQ(records.back().state, OperationState::kDone);
    EXPECT_EQ(part->last_operations().size(), records.size());
    if (part->rank() > 1 || part->size() < 2) return;
    // Peers have their names in the world.
    std::byte* bytes = member.allocate(64);
    const bool sends = part->rank() == 0;
    ASSERT_TRUE(
        (sends ? part->send(bytes, 64, 1, 7, member.stream()) : part->recv(bytes, 64, 0, 7, member.stream()))
            .ok());
    ASSERT_TRUE(member.finish().ok());
    const std::string peer =
        sends ? "to rank " + std::to_string(size() - 2) : "from rank " + std::to_string(size() - 1);
    EXPECT_NE(communicator.last_operations().back().what.find(peer), std::string::npos)
        << communicator.last_operations().back().what;
  });
}

TEST_P(CommunicatorConformance, AVoteThatOneRankCastIsFoundByAllThatCouldNot) {
  const std::vector<std::byte> decision(16, std::byte{7});
  std::barrier together(size());
  run([&](Member& member, int rank) {
    Communicator& communicator = member.communicator();
    ASSERT_TRUE(communicator.vote(1, std::vector<std::byte>(16, std::byte{1})).ok());
    // Rank 0 has seen all of step 2 and nobody else has.
    if (rank == 0) {
      EXPECT_TRUE(communicator.vote(2, decision).ok());
    }
    together.arrive_and_wait();
    if (rank == size() - 1) communicator.abort(Status(StatusCode::kUnavailable, "given up"));
    while (communicator.status().ok()) testing::let_others_run();
    EXPECT_EQ(communicator.vote(2 + (rank == 0), decision).code(), StatusCode::kUnavailable);
    EXPECT_EQ(communicator.survivors_vote(2), std::optional(decision)) << "rank " << rank;
    EXPECT_EQ(communicator.survivors_vote(3), std::nullopt) << "rank " << rank;
    together.arrive_and_wait();
  });
}

TEST_P(CommunicatorConformance, NobodyFindsAVoteThatNobodyCast) {
  std::barrier together(size());
  run([&](Member& member, int rank) {
    Communicator& communicator = member.communicator();
    EXPECT_TRUE(communicator.vote(1, std::vector<std::byte>(kDecisionBytesMax, std::byte{1})).ok());
    EXPECT_EQ(communicator.vote(2, std::vector<std::byte>(kDecisionBytesMax + 1)).code(),
              StatusCode::kInvalidArgument);
    together.arrive_and_wait();
    if (rank == 0) communicator.abort(Status(StatusCode::kUnavailable, "given up"));
    EXPECT_EQ(communicator.barrier().code(), StatusCode::kUnavailable);
    EXPECT_FALSE(communicator.vote(2, {}).ok());
    EXPECT_EQ(communicator.survivors_vote(2), std::nullopt);
    together.arrive_and_wait();
  });
}

// A rank that votes while another fails: its vote was taken, and then all act on it, or refused.
TEST_P(CommunicatorConformance, AVoteAtTheMomentOfAFailureIsTakenForAllOrForNone) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  for (int round = 0; round < 10; ++round) {
    std::vector<char> acts(static_cast<std::size_t>(size()));
    std::barrier together(size());
    run([&](Member& member, int rank) {
      Communicator& communicator = member.communicator();
      const std::vector<std::byte> decision(8, std::byte{9});
      together.arrive_and_wait();
      if (rank == 0) communicator.abort(Status(StatusCode::kUnavailable, "given up"));
      const bool voted = rank != 0 && communicator.vote(1, decision).ok();
      acts[static_cast<std::size_t>(rank)] = voted || communicator.survivors_vote(1) == decision;
      // The others ask too before this one goes.
      together.arrive_and_wait();
    });
    EXPECT_EQ(std::count(acts.begin(), acts.end(), acts[0]), size()) << "round " << round;
  }
}

TEST_P(CommunicatorConformance, SendAndRecvMatchByPeerAndTagInOrder) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  run([&](Member& member, int rank) {
    // A ring: everyone but rank 0 receives first. Two messages of one tag keep their order.
    const int right = (rank + 1) % size();
    const int left = (rank + size() - 1) % size();
    int* out = member.allocate_copy(std::vector<int>{100 * rank, 100 * rank + 1, 100 * rank + 2});
    int* in = member.allocate<int>(3);
    const auto send = [&] {
      for (const auto& [index, tag] : {std::pair(0, 7u), std::pair(1, 7u), std::pair(2, 9u)}) {
        const Status status = member.communicator().send(reinterpret_cast<std::byte*>(out + index),
                                                         sizeof(int), right, tag, member.stream());
        EXPECT_TRUE(status.ok()) << status.to_string();
      }
    };
    const auto recv = [&] {
      for (const auto& [index, tag] : {std::pair(0, 7u), std::pair(1, 7u), std::pair(2, 9u)}) {
        const Status status = member.communicator().recv(reinterpret_cast<std::byte*>(in + index),
                                                         sizeof(int), left, tag, member.stream());
        EXPECT_TRUE(status.ok()) << status.to_string();
      }
    };
    if (rank == 0) {
      send();
      recv();
    } else {
      recv();
      send();
    }
    ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
    EXPECT_EQ(member.read(in, 3), (std::vector<int>{100 * left, 100 * left + 1, 100 * left + 2}));
    EXPECT_EQ(member.communicator().traffic().sent_bytes, 3 * sizeof(int));
    EXPECT_EQ(member.communicator().traffic().received_bytes, 3 * sizeof(int));
  });
}

TEST_P(CommunicatorConformance, OperationsOfNothingAreOperationsToo) {
  run([&](Member& member, int rank) {
    Communicator& communicator = member.communicator();
    throw_if_error(communicator.reduce_scatter({.type = DataType::kFloat32}, member.stream()));
    throw_if_error(communicator.all_gather({}, member.stream()));
    if (size() > 1 && rank < 2) {
      throw_if_error(rank == 0 ? communicator.send(nullptr, 0, 1, 7, member.stream())
                               : communicator.recv(nullptr, 0, 0, 7, member.stream()));
    }
    throw_if_error(member.finish());
    throw_if_error(communicator.exchange({}, {}));
    std::byte* const bytes = member.allocate_filled(64 * static_cast<std::size_t>(size()), 0xCB);
    throw_if_error(communicator.all_gather({.source = member.allocate_filled(64, 0x10 + rank),
                                            .target = bytes,
                                            .target_stride_bytes = 64,
                                            .bytes = 64},
                                           member.stream()));
    throw_if_error(member.finish());
    const std::vector<std::byte> all = member.read(bytes, 64 * static_cast<std::size_t>(size()));
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], std::byte(0x10 + i / 64));
    EXPECT_EQ(communicator.traffic().sent_bytes, 64u * static_cast<std::size_t>(size() - 1));
    throw_if_error(communicator.barrier());
  });
}

TEST_P(CommunicatorConformance, ExchangeGivesAllPiecesInRankOrder) {
  run([&](Member& member, int rank) {
    for (int round = 0; round < 20; ++round) {
      const double mine = 1000.0 * round + rank;
      std::vector<double> all(static_cast<std::size_t>(size()));
      const Status status = member.communicator().exchange(std::as_bytes(std::span(&mine, 1)),
                                                           std::as_writable_bytes(std::span(all)));
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (int r = 0; r < size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], 1000.0 * round + r);
    }
  });
}

TEST_P(CommunicatorConformance, NobodyPassesABarrierBeforeAllHaveCome) {
  std::atomic<int> come{0};
  run([&](Member& member, int) {
    for (int round = 1; round <= 5; ++round) {
      come.fetch_add(1);
      ASSERT_TRUE(member.communicator().barrier().ok());
      EXPECT_GE(come.load(), round * size());
      ASSERT_TRUE(member.communicator().barrier().ok());
    }
  });
}

TEST_P(CommunicatorConformance, ThePlanesWorkSideBySide) {
  run([&](Member& member, int rank) {
    constexpr std::size_t kBytes = 50'000;
    const auto ranks = static_cast<std::size_t>(size());
    std::byte* source = member.allocate_filled(kBytes, rank);
    std::byte* target = member.allocate(kBytes * ranks);
    for (int round = 0; round < 10; ++round) {
      ASSERT_TRUE(
          member.communicator()
              .all_gather(
                  {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
                  member.stream())
              .ok());
      const int mine = rank + round;
      std::vector<int> all(ranks);
      ASSERT_TRUE(member.communicator()
                      .exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)))
                      .ok());
      for (int r = 0; r < size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], r + round);
    }
    ASSERT_TRUE(member.finish().ok()) << member.finish().to_string();
    const std::vector<std::byte> actual = member.read(target, kBytes * ranks);
    for (std::size_t r = 0; r < ranks; ++r) EXPECT_EQ(actual[r * kBytes + kBytes - 1], std::byte(r));
  });
}

TEST_P(CommunicatorConformance, SplitOrdersByKeyThenRankAndKeepsGroupsApart) {
  run([&](Member& member, int rank) {
    // Even and odd ranks, each in descending order.
    Result<std::unique_ptr<Communicator>> result = member.communicator().split(rank % 2, -rank);
    ASSERT_TRUE(result.ok()) << result.status().to_string();
    Communicator& part = *result.value();
    const int part_size = rank % 2 == 0 ? (size() + 1) / 2 : size() / 2;
    ASSERT_EQ(part.size(), part_size);
    EXPECT_EQ(part.rank(), part_size - 1 - rank / 2);
    std::vector<int> all(static_cast<std::size_t>(part_size));
    ASSERT_TRUE(
        part.exchange(std::as_bytes(std::span(&rank, 1)), std::as_writable_bytes(std::span(all))).ok());
    for (int r = 0; r < part_size; ++r) {
      EXPECT_EQ(all[static_cast<std::size_t>(r)], 2 * (part_size - 1 - r) + rank % 2);
    }
    // The parent goes on, and the group outlives it.
    ASSERT_TRUE(member.communicator().barrier().ok());
    member.set_communicator(nullptr);
    EXPECT_TRUE(part.barrier().ok()) << part.status().to_string();
    member.set_communicator(std::move(result).value());
  });
}

TEST_P(CommunicatorConformance, AGroupAndThoseSplitFromItFailTogether) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  // Where it fails, and on which rank: rank 0 is in none of the groups in which others wait.
  for (const auto& [in_part, failing] :
       {std::pair(true, size() - 1), std::pair(false, size() - 1), std::pair(false, 0)}) {
    std::barrier together(size());
    expect_one_cause(
        StatusCode::kIoError, {"the disk is full"},
        [&, in_part = in_part, failing = failing](Member& member, int rank) {
          // Two parts, of which the first has one rank, and a part of a part.
          std::unique_ptr<Communicator> part =
              value_or_throw(member.communicator().split(rank == 0 ? 0 : 1, rank));
          std::unique_ptr<Communicator> smaller = value_or_throw(part->split(0, 0));
          // A rank that waits in a split communicator hears of it, whichever failed.
          std::byte* byte = member.allocate(64);
          const int peer = (part->rank() + 1) % part->size();
          if (part->size() > 1 && rank != failing && !waits_for_peers()) {
            static_cast<void>(smaller->recv(byte, 1, peer, 1, member.stream()));
          }
          together.arrive_and_wait();
          const Status full(StatusCode::kIoError, "the disk is full");
          if (rank == failing) (in_part ? *smaller : member.communicator()).abort(full);
          const auto begun = std::chrono::steady_clock::now();
          static_cast<void>(member.backend().stream_synchronize(member.stream()));
          EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
          together.arrive_and_wait();  // Its peers are still there when it hears of it.
          while (smaller->status().ok() || part->status().ok() || member.communicator().status().ok())
            testing::let_others_run();
          EXPECT_EQ(part->barrier().to_string(), smaller->status().to_string());
          EXPECT_EQ(part->status().to_string(), member.communicator().status().to_string());
          return member.communicator().status();
        });
  }
}

// The last rank is rank 0 of its group.
TEST_P(CommunicatorConformance, AnAbortOfAGroupWithoutACauseNamesTheRankOfTheWorld) {
  if (size() < 3) GTEST_SKIP() << kNeedsThree;
  const std::string last = "rank " + std::to_string(size() - 1);
  std::barrier together(size());  // Nobody fails the others while they split.
  expect_one_cause(StatusCode::kPeerLost, {last, "aborted the communicator without a cause; see its output"},
                   [&](Member& member, int rank) {
                     const std::unique_ptr<Communicator> group =
                         value_or_throw(member.communicator().split(rank > 0, -rank));
                     together.arrive_and_wait();
                     if (rank == size() - 1) group->abort(Status());
                     while (member.communicator().status().ok()) testing::let_others_run();
                     together.arrive_and_wait();
                     const std::string text = member.communicator().status().message();
                     EXPECT_EQ(text.find("rank 0"), std::string::npos) << text;
                     return member.communicator().status();
                   });
}

TEST_P(CommunicatorConformance, BadArgumentsAreRefusedAndChangeNothing) {
  run([&](Member& member, int rank) {
    Communicator& communicator = member.communicator();
    float* target = member.allocate<float>(512);
    const ReduceScatterArguments none{.source = nullptr,
                                      .source_stride_bytes = 2048,
                                      .count = 512,
                                      .type = DataType::kFloat32,
                                      .receive = nullptr,
                                      .target = target,
                                      .first = true};
    EXPECT_EQ(communicator.reduce_scatter(none, member.stream()).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(communicator
                  .all_gather({.source = nullptr, .target = nullptr, .target_stride_bytes = 4, .bytes = 4},
                              member.stream())
                  .code(),
              StatusCode::kInvalidArgument);
    std::byte byte{};
    for (const int peer : {-1, size(), rank}) {
      EXPECT_EQ(communicator.send(&byte, 1, peer, 0, member.stream()).code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(communicator.recv(&byte, 1, peer, 0, member.stream()).code(), StatusCode::kInvalidArgument);
    }
    std::vector<std::byte> wrong(static_cast<std::size_t>(size()) + 1);
    EXPECT_EQ(communicator.exchange(std::span(&byte, 1), wrong).code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(communicator.status().ok());
    EXPECT_TRUE(communicator.barrier().ok());
  });
}

TEST_P(CommunicatorConformance, DifferentOperationsAreOneErrorThatNamesBoth) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  expect_one_cause(
      StatusCode::kInvalidArgument, {"all_gather", "reduce_scatter of 512 bf16"},
      [&](Member& member, int rank) {
        const auto ranks = static_cast<std::size_t>(size());
        std::byte* source = member.allocate_filled(1024 * ranks, 0);
        std::byte* receive = member.allocate(1024 * ranks);
        if (rank == size() - 1) {
          static_cast<void>(member.communicator().all_gather(
              {.source = source, .target = receive, .target_stride_bytes = 1024, .bytes = 1024},
              member.stream()));
        } else {
          static_cast<void>(member.communicator().reduce_scatter({.source = source,
                                                                  .source_stride_bytes = 1024,
                                                                  .count = 512,
                                                                  .type = DataType::kBfloat16,
                                                                  .receive = receive,
                                                                  .target = member.allocate<float>(512),
                                                                  .first = true},
                                                                 member.stream()));
        }
        return member.finish();
      });
}

// Both have as many bytes. Before the ranks decide at the latest.
TEST_P(CommunicatorConformance, DifferentTypesAreOneErrorThatNamesBoth) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  expect_one_cause(
      StatusCode::kInvalidArgument, {"fp16", "bf16", "rank " + std::to_string(size() - 1)},
      [&](Member& member, int rank) {
        const auto ranks = static_cast<std::size_t>(size());
        std::byte* source = member.allocate_filled(1024 * ranks, 0);
        std::byte* receive = member.allocate(1024 * ranks);
        static_cast<void>(member.communicator().reduce_scatter(
            {.source = source,
             .source_stride_bytes = 1024,
             .count = 512,
             .type = rank == size() - 1 ? DataType::kFloat16 : DataType::kBfloat16,
             .receive = receive,
             .target = member.allocate<float>(512),
             .first = true},
            member.stream()));
        static_cast<void>(member.communicator().all_gather({.source = member.allocate(64),
                                                            .target = member.allocate(64 * ranks),
                                                            .target_stride_bytes = 64,
                                                            .bytes = 64,
                                                            .decides = true},
                                                           member.stream()));
        return member.finish();
      });
}

TEST_P(CommunicatorConformance, DifferentCountsAreOneErrorAndNoOverrun) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  expect_one_cause(StatusCode::kInvalidArgument, {"1024 bytes", "4096 bytes"}, [&](Member& member, int rank) {
    const std::size_t bytes = rank == 0 ? 1024 : 4096;
    const auto ranks = static_cast<std::size_t>(size());
    std::byte* target = member.allocate_filled(bytes * ranks + 8192, 0xCB);
    static_cast<void>(member.communicator().all_gather(
        {.source = member.allocate(bytes), .target = target, .target_stride_bytes = bytes, .bytes = bytes},
        member.stream()));
    Status status = member.finish();
    for (const std::byte byte : member.read(target + bytes * ranks, 8192)) EXPECT_EQ(byte, std::byte{0xCB});
    return status;
  });
}

TEST_P(CommunicatorConformance, DifferentControlOperationsAreOneError) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  expect_one_cause(StatusCode::kInvalidArgument, {"barrier", "exchange of 8 bytes"},
                   [&](Member& member, int rank) {
                     if (rank == 0) return member.communicator().barrier();
                     const std::vector<std::byte> mine(8);
                     std::vector<std::byte> all(8 * static_cast<std::size_t>(size()));
                     return member.communicator().exchange(mine, all);
                   });
}

TEST_P(CommunicatorConformance, AMessageOfAnotherSizeIsRefused) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  run([&](Member& member, int rank) {
    if (rank > 1) return;
    std::byte* bytes = member.allocate(64);
    if (rank == 0) {
      static_cast<void>(member.communicator().send(bytes, 64, 1, 3, member.stream()));
    } else {
      static_cast<void>(member.communicator().recv(bytes, 32, 0, 3, member.stream()));
    }
    const Status status = member.finish();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_NE(status.message().find("64 bytes"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("32 bytes"), std::string::npos) << status.message();
  });
}

TEST_P(CommunicatorConformance, AbortReachesEveryRankAndStays) {
  std::atomic<int> reached{0};
  expect_one_cause(StatusCode::kIoError, {"the disk of rank 0 is full"}, [&](Member& member, int rank) {
    Communicator& communicator = member.communicator();
    if (rank == 0) {
      communicator.abort(Status(StatusCode::kIoError, "the disk of rank 0 is full"));
      communicator.abort(Status(StatusCode::kInternal, "a later failure"));
    }
    const Status first = communicator.barrier();
    // Poisoned: nothing is queued and nothing blocks any more, and the cause stays the same.
    std::byte byte{};
    EXPECT_EQ(communicator.barrier().to_string(), first.to_string());
    EXPECT_EQ(communicator.exchange({}, {}).to_string(), first.to_string());
    EXPECT_EQ(communicator.split(0, 0).status().to_string(), first.to_string());
    EXPECT_EQ(communicator
                  .all_gather({.source = &byte, .target = &byte, .target_stride_bytes = 1, .bytes = 1},
                              member.stream())
                  .to_string(),
              first.to_string());
    if (size() > 1) {
      EXPECT_EQ(communicator.send(&byte, 1, (rank + 1) % size(), 0, member.stream()).to_string(),
                first.to_string());
    }
    reached.fetch_add(1);
    return communicator.status();
  });
  EXPECT_EQ(reached.load(), size());
}

TEST_P(CommunicatorConformance, AbortEndsAWaitInProgress) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  expect_one_cause(StatusCode::kUnavailable, {"given up"}, [&](Member& member, int rank) {
    std::byte* bytes = member.allocate(64);
    if (rank > 0) return member.communicator().barrier();
    // Nobody ever sends this: the recv is under way or queued when the abort comes.
    const Status given_up(StatusCode::kUnavailable, "given up");
    if (waits_for_peers()) {
      std::thread aborter([&] { member.communicator().abort(given_up); });
      EXPECT_EQ(member.communicator().recv(bytes, 64, 1, 5, member.stream()).to_string(),
                given_up.to_string());
      aborter.join();
    } else {
      EXPECT_TRUE(member.communicator().recv(bytes, 64, 1, 5, member.stream()).ok());
      member.communicator().abort(given_up);
    }
    return member.finish();
  });
}

TEST_P(CommunicatorConformance, QueuedOperationsOfAFailedCommunicatorDoNothing) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  run([&](Member& member, int rank) {
    constexpr std::size_t kBytes = 4096;
    const auto ranks = static_cast<std::size_t>(size());
    std::byte* target = member.allocate_filled(kBytes * ranks, 0xCB);
    std::byte* source = member.allocate(kBytes);
    const auto abort = [&] { member.communicator().abort(Status(StatusCode::kUnavailable, "given up")); };
    // Rank 0 waits for a message that is never sent, so its gathers are still queued at the abort.
    std::thread aborter;
    if (rank == 0) {
      if (waits_for_peers()) aborter = std::thread(abort);
      const Status queued = member.communicator().recv(source, 1, 1, 1, member.stream());
      EXPECT_EQ(queued.ok(), !waits_for_peers()) << queued.to_string();
    }
    for (int i = 0; i < 3; ++i) {
      const Status queued = member.communicator().all_gather(
          {.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
          member.stream());
      EXPECT_TRUE(queued.ok() || rank != 0 || waits_for_peers()) << queued.to_string();
    }
    if (aborter.joinable()) {
      aborter.join();
    } else if (rank == 0) {
      abort();
    }
    EXPECT_EQ(member.finish().code(), StatusCode::kUnavailable);
    if (rank != 0) return;
    for (const std::byte byte : member.read(target, kBytes * ranks)) ASSERT_EQ(byte, std::byte{0xCB});
  });
}

TEST_P(CommunicatorConformance, ADeadlineNamesTheRankThatDidNotCome) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  const int absent = size() - 1;
  std::vector<Status> causes(static_cast<std::size_t>(size()));
  std::atomic<int> waiting{size() - 1};
  run(
      [&](Member& member, int rank) {
        if (rank != absent) {
          causes[static_cast<std::size_t>(rank)] = member.communicator().barrier();
          waiting.fetch_sub(1);
          waiting.notify_all();
          return;
        }
        // Stays, so that it is late and not lost, until the others have given up.
        for (int left = waiting.load(); left > 0; left = waiting.load()) waiting.wait(left);
      },
      kShortDeadline);
  for (int rank = 0; rank < absent; ++rank) {
    const Status& cause = causes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(cause.code(), StatusCode::kTimeout) << cause.to_string();
    EXPECT_NE(cause.message().find("rank " + std::to_string(absent) + " did not join"), std::string::npos)
        << cause.message();
    EXPECT_EQ(cause.to_string(), causes[0].to_string());
  }
}

// Rank 0 waits for rank 1 in one group, which waits in another for the last one, which does nothing.
TEST_P(CommunicatorConformance, ARankThatWaitsInAnotherGroupIsNotBlamed) {
  if (size() < 3) GTEST_SKIP() << kNeedsThree;
  const int idle = size() - 1;
  std::vector<Status> causes(static_cast<std::size_t>(size()));
  std::atomic<bool> first_waits{false};
  std::atomic<int> waiting{size() - 1};
  run(
      [&](Member& member, int rank) {
        const std::unique_ptr<Communicator> low = value_or_throw(member.communicator().split(rank < 2, rank));
        const std::unique_ptr<Communicator> high =
            value_or_throw(member.communicator().split(rank > 0, rank));
        if (rank == idle) {
          for (int left = waiting.load(); left > 0; left = waiting.load()) waiting.wait(left);
          return;
        }
        if (rank == 0) {
          first_waits = true;
          first_waits.notify_all();
        } else {
          first_waits.wait(false);
        }
        causes[static_cast<std::size_t>(rank)] = (rank == 0 ? low : high)->barrier();
        waiting.fetch_sub(1);
        waiting.notify_all();
      },
      std::chrono::seconds(3));
  for (int rank = 0; rank < idle; ++rank) {
    const Status& cause = causes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(cause.code(), StatusCode::kTimeout) << cause.to_string();
    EXPECT_NE(cause.message().find(": rank " + std::to_string(idle) + " did not join"), std::string::npos)
        << cause.message();
    EXPECT_EQ(cause.to_string(), causes[0].to_string());
  }
}

TEST_P(CommunicatorConformance, RanksThatWaitForEachOtherInTwoGroupsAreToldSo) {
  if (size() < 3) GTEST_SKIP() << kNeedsThree;
  std::vector<Status> causes(3);
  run(
      [&](Member& member, int rank) {
        // Rank 0 waits for 1, 1 for 2 and 2 for 0.
        std::vector<std::unique_ptr<Communicator>> pairs;
        for (int i = 0; i < 3; ++i) {
          const bool in = rank == i || rank == (i + 1) % 3;
          pairs.push_back(value_or_throw(member.communicator().split(in ? 0 : 1 + rank, rank)));
        }
        if (rank < 3) {
          causes[static_cast<std::size_t>(rank)] = pairs[static_cast<std::size_t>(rank)]->barrier();
        } else {
          while (member.communicator().status().ok()) testing::let_others_run();
        }
      },
      std::chrono::seconds(3));
  for (const Status& cause : causes) {
    EXPECT_EQ(cause.code(), StatusCode::kInvalidArgument) << cause.to_string();
    EXPECT_EQ(cause.to_string(), causes[0].to_string());
    EXPECT_NE(cause.message().find("ranks wait for each other"), std::string::npos) << cause.message();
    EXPECT_NE(cause.message().find("in the group of ranks 1 and 2 for rank 2"), std::string::npos)
        << cause.message();
  }
}

TEST_P(CommunicatorConformance, AMismatchInAGroupNamesTheRanksAsAllKnowThem) {
  if (size() < 3) GTEST_SKIP() << kNeedsThree;
  std::barrier together(size());  // Nobody fails the others while they split.
  expect_one_cause(StatusCode::kInvalidArgument,
                   {"in the group of ranks 1", "rank 1 issued barrier", "rank 2 issued exchange"},
                   [&](Member& member, int rank) {
                     const std::unique_ptr<Communicator> group =
                         value_or_throw(member.communicator().split(rank > 0, rank));
                     together.arrive_and_wait();
                     if (rank == 2) {
                       const std::byte mine{};
                       std::vector<std::byte> all(static_cast<std::size_t>(group->size()));
                       static_cast<void>(group->exchange(std::span(&mine, 1), all));
                     } else if (rank == 1) {
                       static_cast<void>(group->barrier());
                     }
                     while (member.communicator().status().ok()) testing::let_others_run();
                     return member.communicator().status();
                   });
}

TEST_P(CommunicatorConformance, ARankThatLeavesIsNamedLongBeforeTheDeadline) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  const auto start = std::chrono::steady_clock::now();
  std::vector<Status> causes(static_cast<std::size_t>(size()));
  run([&](Member& member, int rank) {
    if (rank == 0) return;  // Leaves at once: its communicator is destroyed.
    std::byte* source = member.allocate(64);
    std::byte* target = member.allocate(64 * static_cast<std::size_t>(size()));
    static_cast<void>(member.communicator().all_gather(
        {.source = source, .target = target, .target_stride_bytes = 64, .bytes = 64}, member.stream()));
    causes[static_cast<std::size_t>(rank)] = member.finish();
  });
  for (int rank = 1; rank < size(); ++rank) {
    const Status& cause = causes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(cause.code(), StatusCode::kPeerLost) << cause.to_string();
    EXPECT_NE(cause.message().find("rank 0"), std::string::npos) << cause.message();
    EXPECT_EQ(cause.to_string(), causes[1].to_string());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, kDeadline / 2);
}

TEST_P(CommunicatorConformance, AMessageFromARankThatLeftIsAnErrorLongBeforeTheDeadline) {
  if (size() == 1) GTEST_SKIP() << kNeedsTwo;
  const auto start = std::chrono::steady_clock::now();
  run([&](Member& member, int rank) {
    if (rank != size() - 1) return;  // They leave at once.
    static_cast<void>(member.communicator().recv(member.allocate(64), 64, 0, 5, member.stream()));
    const Status cause = member.finish();
    EXPECT_EQ(cause.code(), StatusCode::kPeerLost) << cause.to_string();
    EXPECT_NE(cause.message().find("recv of 64 bytes from rank 0 with tag 5"), std::string::npos)
        << cause.message();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, kDeadline / 2);
}

TEST_P(CommunicatorConformance, OperationsQueuedBeforeLeavingStillHappen) {
  run([&](Member& member, int rank) {
    constexpr std::size_t kBytes = 100'000;
    const auto ranks = static_cast<std::size_t>(size());
    std::byte* source = member.allocate_filled(kBytes, rank + 1);
    std::byte* target = member.allocate(kBytes * ranks);
    ASSERT_TRUE(
        member.communicator()
            .all_gather({.source = source, .target = target, .target_stride_bytes = kBytes, .bytes = kBytes},
                        member.stream())
            .ok());
    member.set_communicator(nullptr);
    ASSERT_TRUE(member.backend().stream_synchronize(member.stream()).ok());
    const std::vector<std::byte> actual = member.read(target, kBytes * ranks);
    for (std::size_t r = 0; r < ranks; ++r) EXPECT_EQ(actual[r * kBytes + kBytes - 1], std::byte(r + 1));
  });
}

// Every division of the ranks into groups, each with the two layouts of the result.
TEST_P(CommunicatorConformance, GroupedSumsAreThoseOfEachGroupAddedInTheirOrder) {
  run([&](Member& member, int rank) {
    std::uint64_t seed = test_seed();
    for (int group = 1; group <= size(); ++group) {
      if (size() % group != 0) continue;
      for (const bool replicate : {false, true}) {
        const std::unique_ptr<Communicator> grouped = value_or_throw(
            create_grouped_communicator(member.communicator(), {.group = group, .replicate = replicate}));
        ASSERT_EQ(grouped->size(), replicate ? group : size());
        ASSERT_EQ(grouped->rank(), replicate ? rank % group : rank);
        for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
          for (const bool first : {true, false}) {
            const std::size_t count = 512 * 12;
            const auto slices = static_cast<std::size_t>(grouped->size());
            const std::size_t stride = count * element_bytes(type) + 64;
            std::vector<std::byte> contribution(stride * slices, std::byte{0xCB});
            ++seed;
            for (std::size_t r = 0; r < slices; ++r) {
              for (std::size_t i = 0; i < count; ++i)
                store(type, &contribution[r * stride], i, sample(seed, rank, r * count + i));
            }
            const std::byte* source = member.allocate_copy(contribution);
            std::byte* receive = member.allocate(grouped->staging_bytes(count, type));
            float* target = member.allocate_copy(std::vector<float>(count, 0.5f));
            throw_if_error(grouped->reduce_scatter({.source = source,
                                                    .source_stride_bytes = stride,
                                                    .count = count,
                                                    .type = type,
                                                    .receive = receive,
                                                    .target = target,
                                                    .first = first},
                                                   member.stream()));
            throw_if_error(member.finish());
            const std::vector<float> actual = member.read(target, count);
            for (std::size_t i = 0; i < count; ++i) {
              const std::size_t index = static_cast<std::size_t>(grouped->rank()) * count + i;
              float expected = 0;
              for (int g = 0; g < size(); g += group) {
                float partial = round_to(type, sample(seed, g, index));
                for (int r = g + 1; r < g + group; ++r) partial += round_to(type, sample(seed, r, index));
                expected = g == 0 ? partial : expected + partial;
              }
              if (!first) expected = 0.5f + expected;
              ASSERT_EQ(float_bits(actual[i]), float_bits(expected))
                  << "rank " << rank << " element " << i << " groups of " << group
                  << (replicate ? ", replicated, " : ", ") << data_type_name(type);
            }
          }
        }
        // The result of a gather does not depend on the order, but on the place.
        constexpr std::size_t kBytes = 3000;
        const auto slices = static_cast<std::size_t>(grouped->size());
        std::byte* gathered = member.allocate_filled((kBytes + 8) * slices, 0xCB);
        std::byte* mine = member.allocate_filled(kBytes, 0x20 + rank);
        throw_if_error(grouped->all_gather(
            {.source = mine, .target = gathered, .target_stride_bytes = kBytes + 8, .bytes = kBytes},
            member.stream()));
        throw_if_error(member.finish());
        const std::vector<std::byte> all = member.read(gathered, (kBytes + 8) * slices);
        for (std::size_t i = 0; i < all.size(); ++i) {
          const std::size_t slice = i / (kBytes + 8);
          const std::size_t owner =
              replicate ? static_cast<std::size_t>(rank / group * group) + slice : slice;
          ASSERT_EQ(all[i], i % (kBytes + 8) < kBytes ? std::byte(0x20 + owner) : std::byte{0xCB})
              << "byte " << i << ", groups of " << group;
        }
      }
    }
  });
}

TEST_P(CommunicatorConformance, GroupedTrafficIsByRankOfTheWorld) {
  if (size() != 4) GTEST_SKIP() << "two groups of two";
  run([&](Member& member, int rank) {
    const std::unique_ptr<Communicator> grouped =
        value_or_throw(create_grouped_communicator(member.communicator(), {.group = 2}));
    const std::byte* mine = member.allocate_filled(100, rank);
    std::byte* gathered = member.allocate(400);
    // Once across the groups, and then once within for each group.
    for (int i = 0; i < 2; ++i) {
      throw_if_error(grouped->all_gather(
          {.source = mine, .target = gathered, .target_stride_bytes = 100, .bytes = 100}, member.stream()));
    }
    throw_if_error(member.finish());

    EXPECT_EQ(grouped->traffic().sent_bytes, 600u);
    EXPECT_EQ(grouped->traffic().received_bytes, 600u);
    const std::vector<OperationTraffic> operations = grouped->operation_traffic();
    ASSERT_EQ(operations.size(), 1u);
    EXPECT_STREQ(operations[0].operation, "all_gather");
    EXPECT_EQ(operations[0].count, 6u);
    ASSERT_EQ(operations[0].peers.size(), 4u);
    for (int peer = 0; peer < 4; ++peer) {
      const std::uint64_t bytes = peer == (rank ^ 1) ? 400 : peer == (rank ^ 2) ? 200 : 0;
      EXPECT_EQ(operations[0].peers[static_cast<std::size_t>(peer)].sent_bytes, bytes) << peer;
      EXPECT_EQ(operations[0].peers[static_cast<std::size_t>(peer)].received_bytes, bytes) << peer;
    }
    throw_if_error(member.communicator().barrier());
  });
}

TEST_P(CommunicatorConformance, GroupedOperationsOfNothingAreNotIssued) {
  if (size() != 4) GTEST_SKIP() << "two groups of two";
  run([&](Member& member, int) {
    const std::unique_ptr<Communicator> grouped =
        value_or_throw(create_grouped_communicator(member.communicator(), {.group = 2, .replicate = true}));
    const std::size_t issued = grouped->last_operations().size();
    throw_if_error(grouped->reduce_scatter({}, member.stream()));
    throw_if_error(grouped->all_gather({}, member.stream()));

    std::byte* memory = member.allocate(64);
    const Status odd = grouped->reduce_scatter({.source = memory,
                                                .source_stride_bytes = 16,
                                                .count = 3,
                                                .type = DataType::kFloat32,
                                                .receive = memory,
                                                .target = reinterpret_cast<float*>(memory),
                                                .first = true},
                                               member.stream());
    EXPECT_EQ(
        odd.message(),
        "reduce_scatter: 3 elements are not a multiple of the 2 groups that add them; pad the slices to "
        "one");
    const Status null = grouped->reduce_scatter({.source = memory,
                                                 .source_stride_bytes = 16,
                                                 .count = 4,
                                                 .type = DataType::kFloat32,
                                                 .target = reinterpret_cast<float*>(memory),
                                                 .first = true},
                                                member.stream());
    EXPECT_EQ(null.message(), "reduce_scatter: receive is null; give staging for 2 slices");

    EXPECT_EQ(grouped->last_operations().size(), issued);
    throw_if_error(member.communicator().barrier());
  });
}

// Replicated, the ranks are those of the group; else those of the world.
TEST_P(CommunicatorConformance, GroupedMessagesAndSplitsAreAmongTheRanksOfTheResult) {
  if (size() != 4) GTEST_SKIP() << "two groups of two";
  run([&](Member& member, int rank) {
    for (const bool replicate : {false, true}) {
      SCOPED_TRACE(replicate ? "replicated" : "whole");
      const std::unique_ptr<Communicator> grouped = value_or_throw(
          create_grouped_communicator(member.communicator(), {.group = 2, .replicate = replicate}));
      EXPECT_STREQ(grouped->name(), member.communicator().name());
      const int partner = grouped->size() - 1 - grouped->rank();
      const int partner_in_world = replicate ? rank ^ 1 : 3 - rank;
      std::byte* out = member.allocate_filled(64, 0x30 + rank);
      std::byte* in = member.allocate_filled(64, 0xCB);
      const auto send = [&] { throw_if_error(grouped->send(out, 64, partner, 7, member.stream())); };
      if (grouped->rank() < partner) send();
      throw_if_error(grouped->recv(in, 64, partner, 7, member.stream()));
      if (grouped->rank() > partner) send();
      throw_if_error(member.finish());
      EXPECT_EQ(member.read(in, 64), std::vector<std::byte>(64, std::byte(0x30 + partner_in_world)));
      EXPECT_FALSE(grouped->send(out, 64, grouped->size(), 7, member.stream()).ok());
      throw_if_error(grouped->barrier());

      const std::unique_ptr<Communicator> part = value_or_throw(grouped->split(0, -rank));
      ASSERT_EQ(part->size(), grouped->size());
      EXPECT_EQ(part->rank(), partner);
      std::vector<int> all(static_cast<std::size_t>(part->size()));
      throw_if_error(
          part->exchange(std::as_bytes(std::span(&rank, 1)), std::as_writable_bytes(std::span(all))));
      EXPECT_EQ(all, replicate ? (std::vector<int>{rank | 1, rank & ~1}) : (std::vector<int>{3, 2, 1, 0}));
      throw_if_error(member.communicator().barrier());
    }
  });
}

// A group hears of the other's failure, and of its vote.
TEST_P(CommunicatorConformance, GroupedFailuresAndVotesAreThoseOfTheWorld) {
  if (size() != 4) GTEST_SKIP() << "two groups of two";
  const std::vector<std::byte> decision(16, std::byte{7});
  for (const bool replicate : {false, true}) {
    std::barrier together(size());
    run([&](Member& member, int rank) {
      const std::unique_ptr<Communicator> grouped = value_or_throw(
          create_grouped_communicator(member.communicator(), {.group = 2, .replicate = replicate}));
      EXPECT_TRUE(grouped->status().ok());
      if (rank == 0) {
        EXPECT_TRUE(grouped->vote(1, decision).ok());
      }
      together.arrive_and_wait();
      if (rank == 3) grouped->abort(Status(StatusCode::kUnavailable, "given up"));
      while (member.communicator().status().ok()) testing::let_others_run();
      EXPECT_EQ(grouped->status().to_string(), member.communicator().status().to_string());
      EXPECT_EQ(grouped->vote(1 + (rank == 0), decision).code(), StatusCode::kUnavailable);
      EXPECT_EQ(grouped->survivors_vote(1), std::optional(decision)) << "rank " << rank;
      EXPECT_EQ(grouped->survivors_vote(2), std::nullopt) << "rank " << rank;
      together.arrive_and_wait();
    });
  }
}

TEST_P(CommunicatorConformance, GroupsThatDoNotDivideTheRanksAreRefused) {
  run([&](Member& member, int) {
    std::vector<int> groups{0, size() + 1};
    if (size() > 2) groups.push_back(size() - 1);
    for (const int group : groups) {
      const Status refused =
          create_grouped_communicator(member.communicator(), {.group = group, .replicate = false}).status();
      EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(refused.message().find("groups of " + std::to_string(group)), std::string::npos)
          << refused.message();
    }
  });
}

}  // namespace
}  // namespace forebay::testing
