// Meeting in a directory, the ranks being threads. Over TCP: tcp_store_test.
#include "collectives/meeting.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "collectives/store_directory.h"
#include "support/process.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class DirectoryMeeting : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  // What each of the given ranks hears.
  std::vector<Result<Meeting>> meet_all(const std::vector<Participant>& ranks,
                                        std::chrono::milliseconds deadline = 30s) {
    std::vector<Result<Meeting>> results(ranks.size(), Status(StatusCode::kInternal, "did not run"));
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      threads.emplace_back([&, i] {
        Result<std::unique_ptr<StoreDirectory>> store = StoreDirectory::open(directory_ / "store");
        results[i] = meet(*store.value(), ranks[i], Clock::now() + deadline, deadline);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }

  std::vector<Participant> ranks() const {
    std::vector<Participant> all;
    for (int rank = 0; rank < size(); ++rank) all.push_back({rank, size(), "same"});
    return all;
  }

  testing::TemporaryDirectory directory_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, DirectoryMeeting, ::testing::Values(3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(DirectoryMeeting, AllHearOneGenerationAndAnotherRunAnother) {
  const auto first = meet_all(ranks());
  const auto second = meet_all(ranks());  // What the first left is there.
  for (std::size_t i = 0; i < first.size(); ++i) {
    ASSERT_TRUE(first[i].ok() && second[i].ok()) << first[i].status().to_string();
    EXPECT_EQ(first[i].value().generation, first[0].value().generation);
    EXPECT_EQ(second[i].value().generation, second[0].value().generation);
    EXPECT_TRUE(first[i].value().one_host);
  }
  EXPECT_NE(first[0].value().generation, second[0].value().generation);
}

TEST_P(DirectoryMeeting, BothWhoDifferSayTheSame) {
  struct Difference {
    std::function<void(Participant&)> make;
    std::string words;
  };
  for (const Difference& difference :
       {Difference{[](Participant& rank) { rank.size += 1; },
                   "rank 0 was started as one of " + std::to_string(size()) + " ranks, rank 1 as one of " +
                       std::to_string(size() + 1)},
        Difference{[](Participant& rank) { rank.configuration = "other"; },
                   "rank 0 was configured as \"same\", rank 1 as \"other\""}}) {
    std::vector<Participant> both = {ranks()[0], ranks()[1]};
    difference.make(both[1]);
    for (const Result<Meeting>& result : meet_all(both)) {
      EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
      EXPECT_NE(result.status().message().find(difference.words), std::string::npos)
          << result.status().message();
    }
  }
}

TEST_P(DirectoryMeeting, WhoDoesNotComeIsNamedByAll) {
  std::vector<Participant> some = ranks();
  some.pop_back();
  for (const Result<Meeting>& result : meet_all(some, 300ms)) {
    EXPECT_EQ(result.status().code(), StatusCode::kTimeout);
    EXPECT_NE(result.status().message().find("rank " + std::to_string(size() - 1) + " did not come"),
              std::string::npos)
        << result.status().message();
  }
}

}  // namespace
}  // namespace forebay::internal
