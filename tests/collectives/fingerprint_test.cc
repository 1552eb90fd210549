// Words for operations and ranks, and the text in which a failure travels.
#include "collectives/fingerprint.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/operation_book.h"

namespace forebay::internal {
namespace {

Fingerprint made(Operation operation, std::uint64_t sequence, std::uint64_t count, std::uint32_t type = 0) {
  return {.sequence = sequence, .count = count, .operation = operation, .type = type};
}

TEST(Fingerprint, IsDescribedByItsOperation) {
  const auto bfloat16 = static_cast<std::uint32_t>(DataType::kBfloat16);
  EXPECT_EQ(describe(made(Operation::kReduceScatter, 3, 12, bfloat16)),
            "reduce_scatter of 12 bf16 (operation 3)");
  EXPECT_EQ(describe(made(Operation::kAllGather, 4, 12)), "all_gather of 12 bytes (operation 4)");
  EXPECT_EQ(describe(made(Operation::kAllGather, 4, 8, 1)),
            "all_gather of 8 bytes that decides (operation 4)");
  EXPECT_EQ(describe(made(Operation::kExchange, 5, 8, 1)), "exchange of 8 bytes (operation 5)");
  EXPECT_EQ(describe(made(Operation::kBarrier, 6, 0)), "barrier (operation 6)");
  EXPECT_EQ(describe(made(Operation::kSplit, 7, 12)), "split (operation 7)");
  EXPECT_EQ(describe(made(Operation::kBarrier, kConnectSequence - 1, 0)),
            "barrier (operation " + std::to_string(kConnectSequence - 1) + ")");
  EXPECT_EQ(describe(made(Operation::kBarrier, kConnectSequence, 0)), "connecting");
  EXPECT_EQ(describe(made(static_cast<Operation>(99), 0, 1)),
            "an unknown operation of 1 bytes (operation 0)");
  EXPECT_EQ(describe(issued_message(Operation::kSend, 64, 3, 7)), "send of 64 bytes to rank 3 with tag 7");
  EXPECT_EQ(describe(issued_message(Operation::kRecv, 64, 3, 7)), "recv of 64 bytes from rank 3 with tag 7");
}

TEST(Fingerprint, ADifferenceIsToldFromTheLowerRank) {
  const std::string text =
      "ranks disagree about an operation: rank 1 issued barrier (operation 2), rank 4 issued exchange of 8 "
      "bytes (operation 2); every rank must issue the same operations in the same order with the same "
      "options";
  EXPECT_EQ(mismatch(1, made(Operation::kBarrier, 2, 0), 4, made(Operation::kExchange, 2, 8)).message(),
            text);
  EXPECT_EQ(mismatch(4, made(Operation::kExchange, 2, 8), 1, made(Operation::kBarrier, 2, 0)).message(),
            text);
}

TEST(OperationBook, AnOperationThatEndsLateChangesNoRecordOfALaterOne) {
  OperationBook book(0, 2);
  const Issued issued{.fingerprint = made(Operation::kBarrier, 0, 0)};
  const std::uint64_t late = book.issue(issued);
  for (std::size_t i = 0; i < OperationBook::kRecordCount; ++i) book.issue(issued);

  book.begin(late);
  book.end(late, issued, false);

  ASSERT_EQ(book.last_operations().size(), OperationBook::kRecordCount);
  for (const OperationRecord& record : book.last_operations()) {
    EXPECT_EQ(record.state, OperationState::kQueued);
    EXPECT_EQ(record.ended.count(), 0);
  }
}

TEST(OperationBook, ASplitIsCountedAndHasNoPayload) {
  OperationBook book(0, 3);
  const Issued issued{.fingerprint = made(Operation::kSplit, 0, 12)};

  book.end(book.issue(issued), issued, true);

  ASSERT_EQ(book.operation_traffic().size(), 1u);
  EXPECT_EQ(book.operation_traffic()[0].count, 1u);
  EXPECT_EQ(book.traffic().sent_bytes, 0u);
  EXPECT_EQ(book.traffic().received_bytes, 0u);
}

TEST(RankList, ShowsTheFirstThirtyTwo) {
  std::vector<int> ranks(33);
  std::iota(ranks.begin(), ranks.end(), 0);
  EXPECT_EQ(rank_list({5}), "rank 5");
  EXPECT_EQ(rank_list({5, 7}), "ranks 5 and 7");
  EXPECT_EQ(rank_list({5, 7, 9}), "ranks 5, 7 and 9");
  EXPECT_TRUE(rank_list(ranks).ends_with(", 30, 31 and 1 more")) << rank_list(ranks);
  ranks.pop_back();
  EXPECT_TRUE(rank_list(ranks).ends_with(", 30 and 31")) << rank_list(ranks);
}

TEST(GroupText, ShowsUpToEightRanksAndThenTheEnds) {
  EXPECT_EQ(describe_group({0, 1, 2}, 3), "");
  EXPECT_EQ(describe_group({0, 1, 2}, 4), "in the group of ranks 0, 1 and 2");
  EXPECT_EQ(describe_group({1, 0}, 2), "in the group of ranks 1 and 0");
  EXPECT_EQ(describe_group({1, 2, 3, 4, 5, 6, 7, 8}, 16), "in the group of ranks 1, 2, 3, 4, 5, 6, 7 and 8");
  EXPECT_EQ(describe_group({1, 2, 3, 4, 5, 6, 7, 8, 12}, 16), "in the group of 9 ranks from 1 to 12");
}

TEST(Failure, ArrivesAsItWasSentAndNothingElseIsTaken) {
  const Status cause(StatusCode::kCorruption, "first line\nsecond line");
  EXPECT_EQ(decode_failure(encode_failure(cause)).to_string(), cause.to_string());
  const Status last(StatusCode::kInternal, "x");
  EXPECT_EQ(decode_failure(encode_failure(last)).to_string(), last.to_string());

  const std::string beyond = std::to_string(static_cast<int>(StatusCode::kInternal) + 1) + "\nx";
  for (const std::string& text : {std::string(), std::string("3"), std::string("0\nfine"), beyond}) {
    EXPECT_EQ(decode_failure(text).message(),
              "another rank failed, and its message is damaged; see the output of the other ranks")
        << text;
  }
}

TEST(Arguments, AreRefusedWithTheirFigures) {
  std::byte memory[64];
  ReduceScatterArguments reduce{.source = memory,
                                .source_stride_bytes = 7,
                                .count = 4,
                                .type = DataType::kBfloat16,
                                .receive = memory,
                                .target = reinterpret_cast<float*>(memory)};
  EXPECT_EQ(
      check_arguments(reduce, 3).message(),
      "reduce_scatter: a stride of 7 bytes makes slices of 8 bytes overlap; the stride must be at least "
      "the slice");
  EXPECT_TRUE(check_arguments(reduce, 1).ok());
  reduce.source_stride_bytes = 8;
  EXPECT_TRUE(check_arguments(reduce, 3).ok());
  reduce.receive = nullptr;
  EXPECT_EQ(check_arguments(reduce, 3).message(),
            "reduce_scatter: receive is null; give staging for 3 slices");
  EXPECT_TRUE(check_arguments(reduce, 1).ok());
  reduce = {};
  EXPECT_TRUE(check_arguments(reduce, 3).ok());  // Nothing is moved.

  AllGatherArguments gather{.source = memory, .target = memory, .target_stride_bytes = 7, .bytes = 8};
  EXPECT_EQ(
      check_arguments(gather, 3).message(),
      "all_gather: a stride of 7 bytes makes slices of 8 bytes overlap; the stride must be at least the "
      "slice");
  EXPECT_TRUE(check_arguments(gather, 1).ok());
  gather.target_stride_bytes = 8;
  EXPECT_TRUE(check_arguments(gather, 3).ok());

  EXPECT_EQ(check_peer("send", memory, 4, 4, 1, 4).message(),
            "send: peer 4 is not another rank of 0..3 seen from rank 1; give the number of another rank");
  EXPECT_FALSE(check_peer("send", memory, 4, 1, 1, 4).ok());
  EXPECT_TRUE(check_peer("send", nullptr, 0, 3, 1, 4).ok());
  EXPECT_EQ(check_peer("recv", nullptr, 4, 3, 1, 4).message(), "recv: the address is null; give 4 bytes");

  const std::vector<std::byte> mine(3);
  std::vector<std::byte> all(5);
  EXPECT_EQ(check_exchange(mine, all, 2).message(),
            "exchange: `all` has 5 bytes; 2 ranks with 3 bytes each need 6; make `all` that large");
  all.resize(6);
  EXPECT_TRUE(check_exchange(mine, all, 2).ok());

  std::vector<std::byte> decision(kDecisionBytesMax);
  EXPECT_TRUE(check_vote(decision).ok());
  decision.push_back({});
  EXPECT_EQ(check_vote(decision).message(), "vote: a decision of " + std::to_string(kDecisionBytesMax + 1) +
                                                " bytes; give at most " + std::to_string(kDecisionBytesMax));

  using std::chrono::milliseconds;
  EXPECT_EQ(clamp_deadline(milliseconds(0)), milliseconds(1));
  EXPECT_EQ(clamp_deadline(milliseconds(-5)), milliseconds(1));
  EXPECT_EQ(clamp_deadline(milliseconds(7)), milliseconds(7));
  EXPECT_EQ(clamp_deadline(milliseconds::max()), kDeadlineMax);
  EXPECT_EQ(cause_of_abort(Status(), 7).message(),
            "rank 7 aborted the communicator without a cause; see its output");
}

TEST(SplitMembers, AreOfOneColorByKeyAndThenByRank) {
  std::vector<int> ranks;
  for (const SplitWish& wish : split_members({{1, 5, 0}, {2, 0, 1}, {1, 3, 2}, {1, 3, 3}, {1, -1, 4}}, 1))
    ranks.push_back(wish.rank);

  EXPECT_EQ(ranks, (std::vector<int>{4, 2, 3, 0}));
}

}  // namespace
}  // namespace forebay::internal
