// Which rank is named when ranks wait for ranks that wait.
#include "collectives/wait_graph.h"

#include <gtest/gtest.h>

#include <map>

#include "collectives/rendezvous/introduction.h"
#include "collectives/rendezvous/wait_monitor.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;

Wait wait_for(std::string what, std::vector<int> ranks, std::chrono::nanoseconds age = 4s,
              bool came = false) {
  return {.what = std::move(what), .ranks = std::move(ranks), .came = came, .age = age};
}

// The waits are by rank; a rank that is missing waits for nobody.
Status judged(std::map<int, std::vector<Wait>> waits, int rank = 0) {
  return explain_timeout(rank, waits.at(rank).front(), 4s, [&](int other) { return waits[other]; });
}

TEST(WaitGraph, NamesThoseThatDidNotComeThemselves) {
  const Status status = judged({{0, {wait_for("a", {1, 2, 3})}}, {2, {wait_for("b", {3})}}});
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(),
            "a on rank 0: ranks 1 and 3 did not join within 4000 ms; look there for the reason, or raise the "
            "deadline");
  EXPECT_NE(
      judged({{0, {wait_for("a", {1}, 4s, true)}}}).message().find("a on rank 0: rank 1 did not finish"),
      std::string::npos);
}

TEST(WaitGraph, FollowsTheGraphToTheRankThatWaitsForNobody) {
  const Status status =
      judged({{0, {wait_for("a", {1})}}, {1, {wait_for("b", {3})}}, {3, {wait_for("c", {5}, 4s, true)}}});
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(),
            "c on rank 3: rank 5 did not finish; this blocked rank 0 in a for 4000 ms; look there for the "
            "reason, or "
            "raise the deadline");
}

// A rank that has waited for a moment only does not block the others.
TEST(WaitGraph, FollowsLongWaitsBeforeShortOnes) {
  const Status status = judged({{0, {wait_for("a", {1})}},
                                {1, {wait_for("b", {2}), wait_for("c", {4}, 1ms)}},
                                {2, {wait_for("d", {3})}}});
  EXPECT_NE(status.message().find("d on rank 2: rank 3 did not join"), std::string::npos) << status.message();
  const Status half_as_long = judged({{0, {wait_for("a", {1})}},
                                      {1, {wait_for("b", {2}), wait_for("c", {4}, 1500ms)}},
                                      {2, {wait_for("d", {3})}}});
  EXPECT_NE(half_as_long.message().find("d on rank 2: rank 3 did not join"), std::string::npos)
      << half_as_long.message();
  const Status middling = judged({{0, {wait_for("a", {1})}}, {1, {wait_for("c", {4}, 1500ms)}}});
  EXPECT_NE(middling.message().find("c on rank 1: rank 4 did not join"), std::string::npos)
      << middling.message();
  const Status young = judged({{0, {wait_for("a", {1})}}, {1, {wait_for("c", {4}, 1ms)}}});
  EXPECT_NE(young.message().find("a on rank 0: rank 1 did not join"), std::string::npos) << young.message();
}

TEST(WaitGraph, FollowsTheOtherWaitsOfTheRankItself) {
  const Status status =
      judged({{0, {wait_for("a", {1}), wait_for("b", {2}, 3s)}}, {1, {wait_for("c", {0})}}});
  EXPECT_NE(status.message().find("b on rank 0: rank 2 did not join"), std::string::npos) << status.message();
}

TEST(WaitGraph, ACircleIsSaidToBeOne) {
  const Status status =
      judged({{0, {wait_for("a", {1})}}, {1, {wait_for("b", {2})}}, {2, {wait_for("c", {0, 1})}}});
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "ranks wait for each other (deadlock): rank 0 in a for rank 1, rank 1 in b for rank 2, rank 2 in "
            "c for ranks 0 "
            "and 1; every rank must issue the same operations in the same order");
}

TEST(WaitGraph, ACircleShowsFourOfItsRanks) {
  std::map<int, std::vector<Wait>> waits;
  for (int rank = 0; rank < 4; ++rank)
    waits[rank] = {wait_for(std::string(1, static_cast<char>('a' + rank)), {(rank + 1) % 4})};
  const std::string four =
      "ranks wait for each other (deadlock): rank 0 in a for rank 1, rank 1 in b for rank 2, rank 2 in c for "
      "rank 3, rank 3 in d for rank ";
  const std::string end = "; every rank must issue the same operations in the same order";
  EXPECT_EQ(judged(waits).message(), four + "0" + end);
  waits[3].front().ranks = {4};
  waits[4] = {wait_for("e", {0})};
  EXPECT_EQ(judged(waits).message(), four + "4, and others" + end);
}

TEST(WaitGraph, ARankOfACircleThatWaitsTwiceIsInItOnce) {
  const Status status =
      judged({{0, {wait_for("a", {1}), wait_for("b", {1}, 3s)}}, {1, {wait_for("c", {0})}}});
  EXPECT_EQ(
      status.message(),
      "ranks wait for each other (deadlock): rank 0 in a for rank 1, rank 1 in c for rank 0; every rank "
      "must issue the same operations in the same order");
}

TEST(WaitGraph, AWaitIsOfTheSameAgeAsItsLimit) {
  // Half of the deadline is long enough to be followed first, and a quarter, at most a second, to be a wait.
  const Status followed = judged({{0, {wait_for("a", {1})}},
                                  {1, {wait_for("c", {4}, 2s), wait_for("b", {2}, 1500ms)}},
                                  {2, {wait_for("d", {3})}}});
  EXPECT_TRUE(followed.message().starts_with("c on rank 1: rank 4 did not join")) << followed.message();
  const Status waits = judged({{0, {wait_for("a", {1})}}, {1, {wait_for("c", {4}, 1s)}}});
  EXPECT_TRUE(waits.message().starts_with("c on rank 1")) << waits.message();
}

TEST(WaitGraph, WaitsAreReportedEightTimesAsLongAsTheyAreValid) {
  for (const auto& [deadline, validity] :
       {std::pair(4000ms, 1000ms), std::pair(60'000ms, 1000ms), std::pair(400ms, 100ms)}) {
    EXPECT_EQ(wait_reporting(deadline).validity, validity);
    EXPECT_EQ(wait_reporting(deadline).period, std::chrono::nanoseconds(validity) / 8);
  }
}

TEST(WaitGraph, RanksInOneOperationThatDoNotHearEachOtherAreAllNamed) {
  const Status status =
      judged({{0, {wait_for("a", {1, 2})}}, {1, {wait_for("a", {0})}}, {2, {wait_for("a", {0, 1})}}});
  EXPECT_TRUE(status.message().starts_with("a on rank 0: ranks 1 and 2 did not join")) << status.message();
}

TEST(WaitGraph, RanksInOneOperationThatDoNotHearEachOtherAreNoCircle) {
  const Status status = judged({{0, {wait_for("a", {1})}}, {1, {wait_for("a", {0})}}});
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_NE(status.message().find("a on rank 0: rank 1 did not join"), std::string::npos) << status.message();
}

TEST(WaitGraph, AReportIsReadAsItWasWrittenAndNothingElseIs) {
  const WaitReport report{.number = 7, .waits = {wait_for("a", {1, 300}, 5s, true), wait_for("b", {})}};
  const std::string bytes = encode(report);
  WaitReport read;
  ASSERT_TRUE(decode(bytes, &read));
  EXPECT_EQ(encode(read), bytes);
  EXPECT_EQ(read.number, 7u);
  ASSERT_EQ(read.waits.size(), 2u);
  EXPECT_EQ(read.waits[0].ranks, (std::vector<int>{1, 300}));
  EXPECT_TRUE(read.waits[0].came);
  EXPECT_EQ(read.waits[0].age, 5s);
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decode(std::string_view(bytes).substr(0, length), &read)) << length;
  EXPECT_FALSE(decode(bytes + "x", &read));

  std::string neither = bytes;  // Neither that the bytes came nor that they did not.
  neither.at(8 + 1 + 4 + 1) = 2;
  EXPECT_FALSE(decode(neither, &read));
  const WaitReport far{.number = 1, .waits = {wait_for("a", {kRanksMax})}};
  EXPECT_FALSE(decode(encode(far), &read));
  const WaitReport last{.number = 1, .waits = {wait_for("a", {kRanksMax - 1})}};
  EXPECT_TRUE(decode(encode(last), &read));
}

TEST(WaitGraph, AReportIsCutToWhatIsRead) {
  WaitReport report{.number = 1};
  for (int i = 0; i < 100; ++i)
    report.waits.push_back(wait_for(std::string(5000, 'x'), std::vector<int>(300, 7)));
  WaitReport read;

  ASSERT_TRUE(decode(encode(report), &read));

  EXPECT_EQ(read.waits.size(), kReportedWaitsMax);
  EXPECT_EQ(read.waits[0].what, std::string(kWaitTextMax, 'x'));
  EXPECT_EQ(read.waits[0].ranks.size(), 64u);
}

}  // namespace
}  // namespace forebay::internal
