// Which rank is named when ranks wait for ranks that wait.
#include "collectives/wait_graph.h"

#include <gtest/gtest.h>

#include <map>

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
}

}  // namespace
}  // namespace forebay::internal
