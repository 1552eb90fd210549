// Whole processes that die: each rank is a process over gloo, one is killed at a random moment inside an
// operation or while nothing happens, and every other must fail with the same cause, naming it, long before
// the deadline of a minute. Leaving in order is no failure.
#include <gtest/gtest.h>

#include <ctime>
#include <iostream>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "tests/support/process.h"

namespace forebay::testing {
namespace {

using SteadyClock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int kRounds = 8;  // Rounds of each operation at each number of ranks.
// Far below the deadline of a minute, far above what a busy machine needs.
constexpr std::chrono::seconds kNoticeMax{20};

class PeerLoss : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const char* given = std::getenv("FOREBAY_SEED");
    const unsigned seed =
        given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
    std::cout << "FOREBAY_SEED=" << seed << "\n";
    random_.seed(seed);
  }

  int size() const { return GetParam(); }
  int pick(int first, int last) { return std::uniform_int_distribution<int>(first, last)(random_); }

  // Starts rank after rank with words(rank) and waits until all have met.
  template <typename Function>
  void start(const std::string& store, Function words) {
    launch(store, words);
    for (const auto& rank : ranks_) ASSERT_TRUE(rank->wait_for_output("ready\n"));
  }
  template <typename Function>
  void launch(const std::string& store, Function words, const std::string& deadline_ms = "60000") {
    ranks_.clear();
    for (int rank = 0; rank < size(); ++rank) {
      std::vector<std::string> command = words(rank);
      command.insert(command.begin(), FOREBAY_PEER_PROBE);
      ranks_.push_back(std::make_unique<Process>(
          command, Process::Variables{{"FOREBAY_LOG", "off"},  // Which ranks are late is not compared.
                                      {"FOREBAY_RANK", std::to_string(rank)},
                                      {"FOREBAY_SIZE", std::to_string(size())},
                                      {"FOREBAY_TEST_DEADLINE_MS", deadline_ms},
                                      {"FOREBAY_STORE", store}}));
    }
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<Process>> ranks_;
};

TEST_P(PeerLoss, EverySurvivorNamesTheKilledRankAtOnce) {
  for (int round = 0; round < kRounds; ++round) {
    for (const std::string operation : {"exchange", "reduce_scatter", "idle"}) {
      const TemporaryDirectory directory;
      start(directory / "store", [&](int) { return std::vector<std::string>{operation}; });
      if (HasFatalFailure()) return;
      const int dead = pick(0, size() - 1);
      const std::timespec moment{0, pick(0, 20'000) * 1000L};
      ::clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, nullptr);

      const SteadyClock::time_point killed = SteadyClock::now();
      ranks_[static_cast<std::size_t>(dead)]->signal(SIGKILL);

      SCOPED_TRACE(operation + ", rank " + std::to_string(dead) + " killed in round " +
                   std::to_string(round));
      std::string cause;
      for (int rank = 0; rank < size(); ++rank) {
        const Finished finished = ranks_[static_cast<std::size_t>(rank)]->finish();
        if (rank == dead) continue;
        EXPECT_EQ(finished.exit_code, 7);
        EXPECT_NE(finished.output.find("lost: "), std::string::npos) << finished.output;
        EXPECT_NE(finished.output.find(": rank " + std::to_string(dead) + " closed the connection"),
                  std::string::npos)
            << finished.output;
        if (cause.empty()) cause = finished.output;
        EXPECT_EQ(finished.output, cause) << "two first failures";
      }
      EXPECT_LT(SteadyClock::now() - killed, kNoticeMax);
    }
  }
}

TEST_P(PeerLoss, ARankThatHasLeftIsNotNamedWithOneThatDies) {
  if (size() < 3) GTEST_SKIP() << "it needs three ranks";
  for (int round = 0; round < kRounds; ++round) {
    const int first = pick(0, size() - 1);
    const int dead = (first + pick(1, size() - 1)) % size();
    SCOPED_TRACE("rank " + std::to_string(first) + " leaves, rank " + std::to_string(dead) + " is killed");
    const TemporaryDirectory directory;
    start(directory / "store", [&](int rank) {
      return rank == first ? std::vector<std::string>{"leave", "0"} : std::vector<std::string>{"idle"};
    });
    if (HasFatalFailure()) return;
    EXPECT_EQ(ranks_[static_cast<std::size_t>(first)]->finish().exit_code, 0);
    ranks_[static_cast<std::size_t>(dead)]->signal(SIGKILL);
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == first) continue;
      const Finished finished = ranks_[static_cast<std::size_t>(rank)]->finish();
      if (rank == dead) continue;
      EXPECT_NE(finished.output.find(": rank " + std::to_string(dead) + " closed the connection"),
                std::string::npos)
          << finished.output;
    }
  }
}

// While the others wait for its addresses, or for its end of a connection.
TEST_P(PeerLoss, ARankThatIsKilledWhileRanksConnectIsNamedAtOnce) {
  for (const std::string stops : {"before", "after"}) {
    for (int dead = 0; dead < size(); ++dead) {
      SCOPED_TRACE("rank " + std::to_string(dead) + ", killed " + stops + " it gave its addresses");
      const TemporaryDirectory directory;
      launch(directory / "store", [&](int rank) {
        return std::vector<std::string>{rank == dead ? "met" : "idle", stops};
      });
      Process& gone = *ranks_[static_cast<std::size_t>(dead)];
      ASSERT_TRUE(gone.wait_for_output("met\n"));
      const SteadyClock::time_point killed = SteadyClock::now();
      gone.signal(SIGKILL);
      std::set<std::string> causes;
      for (int rank = 0; rank < size(); ++rank) {
        const Finished finished = ranks_[static_cast<std::size_t>(rank)]->finish();
        if (rank == dead) continue;
        EXPECT_EQ(finished.exit_code, 99);
        causes.insert(finished.output);
      }
      EXPECT_EQ(causes.size(), 1u) << "several first failures";
      EXPECT_NE(causes.begin()->find("rank " + std::to_string(dead) + " "), std::string::npos)
          << *causes.begin();
      EXPECT_LT(SteadyClock::now() - killed, kNoticeMax);
    }
  }
}

// Then the others cannot all connect to each other either, but are not named.
TEST_P(PeerLoss, ARankThatStopsWhileRanksConnectIsNamedByAll) {
  for (const std::string stops : {"before", "after"}) {
    for (int silent = 0; silent < size(); ++silent) {
      SCOPED_TRACE("rank " + std::to_string(silent) + ", stopped " + stops + " it gave its addresses");
      const TemporaryDirectory directory;
      launch(
          directory / "store",
          [&](int rank) {
            return std::vector<std::string>{rank == silent ? "met" : "idle", stops};
          },
          "3000");
      Process& stopped = *ranks_[static_cast<std::size_t>(silent)];
      ASSERT_TRUE(stopped.wait_for_output("met\n"));
      std::set<std::string> causes;
      for (int rank = 0; rank < size(); ++rank) {
        if (rank == silent) continue;
        const Finished finished = ranks_[static_cast<std::size_t>(rank)]->finish();
        EXPECT_EQ(finished.exit_code, 99);
        causes.insert(finished.output);
      }
      stopped.signal(SIGKILL);
      EXPECT_EQ(causes.size(), 1u) << "several first failures";
      EXPECT_NE(causes.begin()->find(": rank " + std::to_string(silent) + " did not join"), std::string::npos)
          << *causes.begin();
    }
  }
}

TEST_P(PeerLoss, LeavingInOrderIsNoFailure) {
  for (int round = 0; round < kRounds; ++round) {
    const TemporaryDirectory directory;
    const std::string store = directory / "store";
    std::filesystem::create_directory(store);
    std::filesystem::permissions(store, std::filesystem::perms::owner_all);
    start(store, [&](int) {
      return std::vector<std::string>{"leave", std::to_string(pick(0, 1) * pick(0, 20'000))};
    });
    if (HasFatalFailure()) return;
    for (const auto& rank : ranks_) {
      const Finished finished = rank->finish();
      EXPECT_EQ(finished.exit_code, 0) << finished.output;
      EXPECT_EQ(finished.output, "ready\n");
    }
    EXPECT_TRUE(std::filesystem::is_empty(store));
  }
}

INSTANTIATE_TEST_SUITE_P(Gloo, PeerLoss, ::testing::Values(2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "_ranks"; });

}  // namespace
}  // namespace forebay::testing
