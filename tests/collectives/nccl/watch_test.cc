#include "collectives/nccl/watch.h"

#include <gtest/gtest.h>

namespace forebay::internal {
namespace {

using std::chrono::milliseconds;

NcclOperation collective(std::uint64_t sequence, std::uint64_t bytes) {
  NcclOperation operation;
  operation.fingerprint = {.sequence = sequence, .count = bytes, .operation = Operation::kAllGather};
  return operation;
}

NcclOperation message(Operation kind, int peer, std::uint64_t sequence, std::uint64_t bytes,
                      std::uint32_t tag) {
  NcclOperation operation;
  operation.fingerprint = {.sequence = sequence, .count = bytes, .operation = kind};
  operation.peer = peer;
  operation.tag = tag;
  return operation;
}

// A rank that has issued `count` collectives, of which these operations are open. Others are of 64 bytes.
NcclHeartbeat heartbeat(std::uint64_t count, std::initializer_list<NcclOperation> open) {
  NcclHeartbeat result;
  result.collective_count = count;
  for (std::uint64_t n = result.last_begin(); n != count; ++n)
    result.last[n % kNcclBatch] = collective(n, 64).fingerprint;
  for (const NcclOperation& operation : open) {
    result.open[result.open_count++] = operation;
    if (is_collective(operation))
      result.last[operation.fingerprint.sequence % kNcclBatch] = operation.fingerprint;
  }
  return result;
}

void expect_words(const Status& status, StatusCode code, std::initializer_list<const char*> words) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const char* word : words)
    EXPECT_NE(status.message().find(word), std::string::npos) << word << " is not in: " << status.message();
}

TEST(NcclWatch, BytesThatCannotBeAHeartbeatAreRefused) {
  const NcclHeartbeat good = heartbeat(7, {collective(5, 64), message(Operation::kSend, 2, 0, 8, 1)});
  EXPECT_TRUE(check_heartbeat(good, 0, 3).ok());
  EXPECT_EQ(check_heartbeat(good, 0, 2).code(), StatusCode::kCorruption);  // There is no rank 2.

  NcclHeartbeat bad = good;
  bad.open_count = kNcclWindow + 1;
  EXPECT_EQ(check_heartbeat(bad, 0, 3).code(), StatusCode::kCorruption);
  bad = good;
  bad.state = static_cast<NcclMemberState>(9);
  EXPECT_EQ(check_heartbeat(bad, 0, 3).code(), StatusCode::kCorruption);
  bad.state = static_cast<NcclMemberState>(3);
  EXPECT_EQ(check_heartbeat(bad, 0, 3).code(), StatusCode::kCorruption);
  bad.state = NcclMemberState::kGone;
  EXPECT_TRUE(check_heartbeat(bad, 0, 3).ok());
  bad = good;
  bad.open[0].peer = 1;  // A collective has none.
  EXPECT_EQ(check_heartbeat(bad, 0, 3).code(), StatusCode::kCorruption);
  bad = good;
  bad.last[6].sequence = 5;
  EXPECT_EQ(check_heartbeat(bad, 0, 3).code(), StatusCode::kCorruption);
  bad = good;
  bad.open[1].peer = -1;
  EXPECT_EQ(check_heartbeat(bad, 0, 3).code(), StatusCode::kCorruption);
  bad = good;
  bad.open[1].peer = 3;  // Ranks are 0 to 2.
  EXPECT_EQ(check_heartbeat(bad, 0, 3).code(), StatusCode::kCorruption);

  NcclHeartbeat full = heartbeat(0, {});
  for (int i = 0; i < static_cast<int>(kNcclWindow); ++i)
    full.open[full.open_count++] = message(Operation::kRecv, 1, static_cast<std::uint64_t>(i), 8, 1);
  EXPECT_TRUE(check_heartbeat(full, 0, 3).ok());
}

TEST(NcclWatch, RanksThatIssuedTheSameAreFineWhereverTheyAre) {
  const NcclHeartbeat members[] = {heartbeat(7, {collective(5, 64), collective(6, 128)}),
                                   heartbeat(6, {collective(5, 64)}), heartbeat(5, {}), heartbeat(100, {})};

  EXPECT_TRUE(judge_heartbeats(members).ok());
}

TEST(NcclWatch, TheFirstDifferenceCountsAndNamesBothRanks) {
  const NcclHeartbeat members[] = {heartbeat(7, {collective(5, 64), collective(6, 128)}),
                                   heartbeat(7, {collective(5, 64), collective(6, 256)}),
                                   heartbeat(7, {collective(5, 32), collective(6, 512)})};

  expect_words(judge_heartbeats(members), StatusCode::kInvalidArgument,
               {"rank 0 issued all_gather of 64 bytes (operation 5)",
                "rank 2 issued all_gather of 32 bytes (operation 5)"});
}

TEST(NcclWatch, CollectivesThatAreDoneAreComparedToo) {
  NcclHeartbeat members[] = {heartbeat(107, {}), heartbeat(100, {}), heartbeat(106, {})};
  members[0].last[103 % kNcclBatch].type = 2;

  expect_words(judge_heartbeats(members), StatusCode::kInvalidArgument,
               {"rank 0", "rank 2", "(operation 103)"});
}

TEST(NcclWatch, AMessageIsComparedWithItsOwnCounterpart) {
  const NcclOperation send = message(Operation::kSend, 1, 4, 64, 3);
  const auto judged = [&](const NcclOperation& recv) {
    const NcclHeartbeat members[] = {heartbeat(0, {send}), heartbeat(0, {recv})};
    return judge_heartbeats(members);
  };

  EXPECT_TRUE(judged(message(Operation::kRecv, 0, 4, 64, 3)).ok());
  EXPECT_TRUE(judged(message(Operation::kRecv, 0, 5, 32, 3)).ok());  // Another one.
  expect_words(judged(message(Operation::kRecv, 0, 4, 32, 3)), StatusCode::kInvalidArgument,
               {"recv of 32 bytes from rank 0 with tag 3 on rank 1", "rank 0 sends 64 bytes"});
  expect_words(judged(message(Operation::kRecv, 0, 4, 64, 9)), StatusCode::kInvalidArgument,
               {"tag 9", "64 bytes with tag 3"});
  // One from another rank.
  const NcclHeartbeat three[] = {heartbeat(0, {send}), heartbeat(0, {message(Operation::kRecv, 2, 4, 32, 3)}),
                                 heartbeat(0, {})};
  EXPECT_TRUE(judge_heartbeats(three).ok());
}

TEST(NcclWatch, ARankThatLeftBeforeACollectiveIsNamed) {
  NcclHeartbeat left = heartbeat(5, {});
  left.state = NcclMemberState::kLeaving;
  const NcclHeartbeat members[] = {heartbeat(5, {}), heartbeat(6, {collective(5, 64)}), left};

  expect_words(judge_heartbeats(members), StatusCode::kPeerLost,
               {"all_gather of 64 bytes (operation 5) on rank 1", "rank 2 left"});
  // Rank 1 is beyond it already: the operation that rank 2 misses is another one.
  const NcclHeartbeat beyond[] = {heartbeat(5, {}), heartbeat(7, {collective(6, 128)}), left};
  EXPECT_EQ(judge_heartbeats(beyond).message(),
            "a collective (operation 5) on rank 1: rank 2 left before it; see why it ended");
}

TEST(NcclWatch, ARankMayLeaveWhenAllItTookPartInIsIssued) {
  NcclHeartbeat left = heartbeat(5, {});
  left.state = NcclMemberState::kGone;
  const NcclHeartbeat members[] = {heartbeat(5, {collective(4, 64)}), left};

  EXPECT_TRUE(judge_heartbeats(members).ok());
}

TEST(NcclWatch, ATimeoutNamesTheRanksThatHaveNotIssuedIt) {
  const NcclHeartbeat members[] = {heartbeat(6, {collective(5, 64)}), heartbeat(5, {}),
                                   heartbeat(6, {collective(5, 64)}), heartbeat(2, {})};

  expect_words(operation_timeout(0, members[0].open[0], members, milliseconds(300)), StatusCode::kTimeout,
               {"operation 5", "on rank 0: ranks 1 and 3 did not join within 300 ms"});
  const NcclHeartbeat all[] = {members[0], members[2]};
  expect_words(operation_timeout(1, members[0].open[0], all, milliseconds(300)), StatusCode::kTimeout,
               {"all ranks have issued it"});
  // The rank itself is not among those that it waits for.
  const NcclHeartbeat behind[] = {heartbeat(5, {}), members[2]};
  expect_words(operation_timeout(0, members[0].open[0], behind, milliseconds(300)), StatusCode::kTimeout,
               {"all ranks have issued it, and it is not done within 300 ms"});
}

// Ranks 0 to 2 of a group are ranks 4, 7 and 9 of the world.
TEST(NcclWatch, RanksOfAGroupHaveTheirNumbersInTheWorld) {
  const int numbers[] = {4, 7, 9};
  const NcclHeartbeat unlike[] = {heartbeat(1, {collective(0, 64)}), heartbeat(1, {collective(0, 64)}),
                                  heartbeat(1, {collective(0, 32)})};
  expect_words(judge_heartbeats(unlike, numbers), StatusCode::kInvalidArgument,
               {"rank 4 issued all_gather of 64", "rank 9 issued all_gather of 32"});

  const NcclHeartbeat messages[] = {heartbeat(0, {message(Operation::kSend, 1, 0, 64, 3)}),
                                    heartbeat(0, {message(Operation::kRecv, 0, 0, 32, 3)}), heartbeat(0, {})};
  expect_words(judge_heartbeats(messages, numbers), StatusCode::kInvalidArgument,
               {"recv of 32 bytes from rank 4 with tag 3 on rank 7, but rank 4 sends 64 bytes"});

  NcclHeartbeat left = heartbeat(0, {});
  left.state = NcclMemberState::kLeaving;
  const NcclHeartbeat departed[] = {heartbeat(0, {}), heartbeat(1, {collective(0, 64)}), left};
  expect_words(judge_heartbeats(departed, numbers), StatusCode::kPeerLost, {"on rank 7: rank 9 left"});

  expect_words(operation_timeout(1, collective(0, 64), departed, milliseconds(300), numbers),
               StatusCode::kTimeout, {"on rank 7: ranks 4 and 9 did not join"});
  expect_words(
      operation_timeout(1, message(Operation::kRecv, 0, 0, 32, 3), messages, milliseconds(300), numbers),
      StatusCode::kTimeout, {"recv of 32 bytes from rank 4 with tag 3 on rank 7: rank 4 did not join"});
}

TEST(NcclWatch, TheFingerprintsOfACollectiveAreComparedWhole) {
  NcclOperation mine = collective(3, 1024);
  NcclOperation theirs = mine;
  EXPECT_TRUE(compare_operations(0, mine, 1, theirs).ok());

  theirs.fingerprint.type = 2;

  EXPECT_EQ(compare_operations(0, mine, 1, theirs).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay::internal
