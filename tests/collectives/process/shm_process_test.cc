// Whole processes over shm: right bits; one that is killed at a random moment, that stops, or that does
// something else is the same first failure on every other; and nothing is left of any of them.
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <set>

#include "forebay/gloo_communicator.h"
#include "forebay/shm_communicator.h"
#include "tests/support/process.h"

namespace forebay::testing {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kRounds = 4;  // Rounds of each operation at each number of ranks.
// Far below the deadline of a minute, far above what a busy machine needs.
constexpr std::chrono::seconds kNoticeMax{20};

// The names in the file system of shared memory.
std::set<std::string> named_memory() {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored))
    if (const std::string name = entry.path().filename().string(); name.find("forebay") != std::string::npos)
      names.insert(name);
  return names;
}

class ShmProcesses : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const char* given = std::getenv("FOREBAY_SEED");
    seed_ =
        given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
    std::cout << "FOREBAY_SEED=" << seed_ << "\n";
    random_.seed(seed_);
  }

  int size() const { return GetParam(); }
  int pick(int first, int last) { return std::uniform_int_distribution<int>(first, last)(random_); }

  void start(const std::string& store, std::vector<std::string> words) {
    ranks_.clear();
    words.insert(words.begin(), FOREBAY_SHM_PROBE);
    for (int rank = 0; rank < size(); ++rank) {
      ranks_.push_back(std::make_unique<Process>(
          words, Process::Variables{{"FOREBAY_LOG", "off"},  // Which ranks are late is not compared.
                                    {"FOREBAY_RANK", std::to_string(rank)},
                                    {"FOREBAY_SIZE", std::to_string(size())},
                                    {"FOREBAY_STORE", store}}));
    }
    for (const auto& rank : ranks_) ASSERT_TRUE(rank->wait_for_output("ready\n"));
  }

  // That all but `except` end with one and the same cause; gives it.
  std::string expect_one_cause(int except = -1) {
    std::string cause;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == except) continue;
      const Finished finished = ranks_[static_cast<std::size_t>(rank)]->finish();
      EXPECT_EQ(finished.exit_code, 7) << finished.output;
      if (cause.empty()) cause = finished.output;
      EXPECT_EQ(finished.output, cause) << "two first failures";
    }
    return cause;
  }

  unsigned seed_ = 0;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Process>> ranks_;
};

TEST_P(ShmProcesses, HaveTheBitsOfTheDefinition) {
  const TemporaryDirectory directory;
  start(directory / "store", {"bits", std::to_string(seed_)});
  if (HasFatalFailure()) return;
  for (const auto& rank : ranks_) {
    const Finished finished = rank->finish();
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
  }
}

TEST_P(ShmProcesses, EverySurvivorNamesTheKilledRankAtOnce) {
  if (size() == 1) GTEST_SKIP() << "it needs two ranks";
  const std::set<std::string> before = named_memory();
  for (int round = 0; round < kRounds; ++round) {
    for (const std::string operation : {"exchange", "reduce_scatter", "all_gather", "idle"}) {
      const TemporaryDirectory directory;
      start(directory / "store", {operation});
      if (HasFatalFailure()) return;
      const int dead = pick(0, size() - 1);
      const std::timespec moment{0, pick(0, 20'000) * 1000L};
      ::clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, nullptr);

      const SteadyClock::time_point killed = SteadyClock::now();
      ranks_[static_cast<std::size_t>(dead)]->signal(SIGKILL);

      SCOPED_TRACE(operation + ", rank " + std::to_string(dead) + " killed in round " +
                   std::to_string(round));
      const std::string cause = expect_one_cause(dead);
      EXPECT_LT(SteadyClock::now() - killed, kNoticeMax);
      EXPECT_NE(cause.find("lost: "), std::string::npos) << cause;
      EXPECT_NE(cause.find(": rank " + std::to_string(dead) + " died"), std::string::npos) << cause;
      static_cast<void>(ranks_[static_cast<std::size_t>(dead)]->finish());
    }
  }
  EXPECT_EQ(named_memory(), before);
}

TEST_P(ShmProcesses, AnotherOperationIsOneCauseThatNamesBoth) {
  if (size() == 1) GTEST_SKIP() << "it needs two ranks";
  const TemporaryDirectory directory;
  start(directory / "store", {"mismatch"});
  if (HasFatalFailure()) return;
  const std::string cause = expect_one_cause();
  EXPECT_NE(cause.find("rank 1 issued all_gather of"), std::string::npos) << cause;
  EXPECT_NE(cause.find("issued reduce_scatter of"), std::string::npos) << cause;
}

TEST_P(ShmProcesses, AStoppedRankIsNamedAtTheDeadline) {
  if (size() == 1) GTEST_SKIP() << "it needs two ranks";
  const TemporaryDirectory directory;
  start(directory / "store", {"late", "2000"});
  if (HasFatalFailure()) return;
  const int stopped = size() - 1;
  const std::string cause = expect_one_cause(stopped);
  EXPECT_NE(cause.find("failed: "), std::string::npos) << cause;
  EXPECT_NE(cause.find(": rank " + std::to_string(stopped) + " did not join within 2000 ms"),
            std::string::npos)
      << cause;
  // It goes on, and learns the cause of the others.
  ranks_.back()->signal(SIGCONT);
  EXPECT_EQ(ranks_.back()->finish().output, cause);
}

TEST_P(ShmProcesses, LeavingInOrderIsNoFailureAndLeavesNothing) {
  for (int round = 0; round < kRounds; ++round) {
    const TemporaryDirectory directory;
    const std::string store = directory / "store";
    std::filesystem::create_directory(store);
    std::filesystem::permissions(store, std::filesystem::perms::owner_all);
    start(store, {"leave"});
    if (HasFatalFailure()) return;
    for (const auto& rank : ranks_) {
      const Finished finished = rank->finish();
      EXPECT_EQ(finished.exit_code, 0) << finished.output;
      EXPECT_EQ(finished.output, "ready\n");
    }
    EXPECT_TRUE(std::filesystem::is_empty(store));
  }
}

// The transport of each of three ranks if rank `elsewhere` has the boot id of another host; -1: none has.
std::vector<std::string> transports(int elsewhere) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "boot") << "00000000-0000-4000-8000-000000000001\n";
  std::vector<std::unique_ptr<Process>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<std::string> words{FOREBAY_SHM_PROBE, "place"};
    if (rank == elsewhere) {
      const std::string script =
          "mount --bind '" + (directory / "boot") + "' /proc/sys/kernel/random/boot_id && exec \"$@\"";
      words.insert(words.begin(), {"/usr/bin/unshare", "-m", "/bin/sh", "-c", script, "sh"});
    }
    ranks.push_back(std::make_unique<Process>(
        words, Process::Variables{{"FOREBAY_LOG", "off"},  // Which ranks are late is not compared.
                                  {"FOREBAY_RANK", std::to_string(rank)},
                                  {"FOREBAY_SIZE", "3"},
                                  {"FOREBAY_INTERFACE", "127.0.0.1"},
                                  {"FOREBAY_STORE", directory / "store"}}));
  }
  std::vector<std::string> names;
  for (const auto& rank : ranks) names.push_back(rank->finish().output);
  return names;
}

TEST(ProcessesByPlace, ShareMemoryOnlyIfNoRankIsElsewhere) {
  EXPECT_EQ(transports(-1), std::vector<std::string>(3, "shm\n"));
  if (!gloo_available()) GTEST_SKIP() << "this forebay was built without Gloo (libgloo-dev)";
  const Finished tried = run_program(
      {"/usr/bin/unshare", "-m", "/bin/sh", "-c", "mount --bind /dev/null /proc/sys/kernel/random/boot_id"});
  if (tried.exit_code != 0) GTEST_SKIP() << "this process cannot give another boot id: " << tried.output;
  for (const int elsewhere : {0, 1, 2})
    EXPECT_EQ(transports(elsewhere), std::vector<std::string>(3, "gloo\n")) << "rank " << elsewhere;
}

INSTANTIATE_TEST_SUITE_P(Shm, ShmProcesses, ::testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "_ranks"; });

}  // namespace
}  // namespace forebay::testing
