// The launcher, seen from outside: exit codes, signals, and that neither a process nor a directory is left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <thread>

#include "forebay/bootstrap.h"
#include "tests/support/let_others_run.h"
#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

using namespace std::chrono_literals;

struct Report {
  int rank = -1, size = 0, local_rank = -1, local_size = 0;
  pid_t pid = 0;
  std::string store;
};

class Launch : public ::testing::Test {
 protected:
  void SetUp() override { directory_ = testing::make_temporary_directory("launch"); }
  void TearDown() override {
    if (probe_ > 0) {
      kill(probe_, SIGKILL);
      waitpid(probe_, nullptr, 0);
    }
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  // Starts the probe; its store goes below this test's directory.
  void start(int size, std::chrono::milliseconds grace, const std::vector<std::string>& mode) {
    start(size, grace, mode, [] { return fork(); });
  }
  // `forks` may do more than fork().
  void start(int size, std::chrono::milliseconds grace, const std::vector<std::string>& mode,
             const std::function<pid_t()>& forks, bool ignores_interrupts = false) {
    std::vector<std::string> arguments = {FOREBAY_LAUNCH_PROBE, std::to_string(size),
                                          std::to_string(grace.count()), directory_ + "/report"};
    arguments.insert(arguments.end(), mode.begin(), mode.end());
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    std::filesystem::create_directory(directory_ + "/runtime");
    setenv("XDG_RUNTIME_DIR", (directory_ + "/runtime").c_str(), 1);
    size_ = size;
    probe_ = forks();
    ASSERT_GE(probe_, 0);
    if (probe_ == 0) {
      // Tests in the background of a shell ignore it.
      if (!ignores_interrupts) signal(SIGINT, SIG_DFL);
      execv(pointers[0], pointers.data());
      _exit(126);
    }
  }

  // Waits until every rank has made the file with its number at the end.
  void wait_for_files(const std::string& name) const {
    const auto limit = std::chrono::steady_clock::now() + 60s;
    for (int rank = 0; rank < size_; ++rank) {
      while (!std::filesystem::exists(name + std::to_string(rank)) &&
             std::chrono::steady_clock::now() < limit)
        testing::let_others_run();
    }
  }

  // Waits until every rank has written its report.
  std::vector<Report> reports() {
    std::vector<Report> result;
    wait_for_files(directory_ + "/report.");
    for (int rank = 0; rank < size_; ++rank) {
      Report report;
      std::ifstream(directory_ + "/report." + std::to_string(rank)) >> report.rank >> report.size >>
          report.local_rank >> report.local_size >> report.pid >> report.store;
      result.push_back(report);
    }
    return result;
  }

  // Waits until a rank has ended; the launcher has not looked for it yet.
  static void wait_for_end(pid_t rank) {
    const auto limit = std::chrono::steady_clock::now() + 60s;
    const auto has_ended = [&] {
      std::ifstream file("/proc/" + std::to_string(rank) + "/stat");
      std::string text;
      std::getline(file, text);
      return text.find(") Z ") != std::string::npos;
    };
    while (!has_ended() && std::chrono::steady_clock::now() < limit) testing::let_others_run();
  }

  // The exit code of the launcher, once it has ended.
  int wait() {
    int state = 0;
    EXPECT_EQ(waitpid(probe_, &state, 0), probe_);
    probe_ = -1;
    return WIFSIGNALED(state) ? 128 + WTERMSIG(state) : WEXITSTATUS(state);
  }

  void expect_nothing_left(const std::vector<Report>& ranks) {
    for (const Report& report : ranks) {
      EXPECT_TRUE(kill(report.pid, 0) == -1 && errno == ESRCH) << "rank " << report.rank << " is still there";
      EXPECT_FALSE(std::filesystem::exists(report.store));
    }
    EXPECT_TRUE(std::filesystem::is_empty(directory_ + "/runtime"));
  }

  std::string directory_;
  int size_ = 0;
  pid_t probe_ = -1;
};

TEST_F(Launch, GivesEachProcessItsRankAndOneStore) {
  start(3, 5s, {"exit", "0"});
  const std::vector<Report> ranks = reports();

  EXPECT_EQ(wait(), 0);
  for (int rank = 0; rank < 3; ++rank) {
    const Report& report = ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(report.rank, rank);
    EXPECT_EQ(report.size, 3);
    EXPECT_EQ(report.local_rank, rank);
    EXPECT_EQ(report.local_size, 3);
    EXPECT_EQ(report.store, ranks[0].store);
  }
  EXPECT_EQ(ranks[0].store.find(directory_), 0u);
  expect_nothing_left(ranks);
}

// As where a rank of another launcher launches ranks.
TEST_F(Launch, VariablesOfAnOuterLaunchAreReplaced) {
  const char* const outer[] = {"FOREBAY_SIZE", "FOREBAY_LOCAL_RANK", "FOREBAY_LOCAL_SIZE", "FOREBAY_STORE"};
  for (const char* name : outer) setenv(name, "1", 1);
  start(3, 5s, {"exit", "0"});
  for (const char* name : outer) unsetenv(name);
  const std::vector<Report> ranks = reports();

  EXPECT_EQ(wait(), 0);
  for (int rank = 0; rank < 3; ++rank) {
    const Report& report = ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(report.size, 3);
    EXPECT_EQ(report.local_rank, rank);
    EXPECT_EQ(report.local_size, 3);
    EXPECT_EQ(report.store.find(directory_), 0u);
  }
}

// As where a rank of another launcher launches ranks: it has a pipe of its own.
TEST_F(Launch, OneRankClaimsTheErrorOfAll) {
  for (const int size : {1, 2}) {
    setenv("FOREBAY_ERROR_PIPE", "0:1", 1);
    start(size, 5s, {"claim"});
    unsetenv("FOREBAY_ERROR_PIPE");

    EXPECT_EQ(wait(), size - 1) << "only one may have claimed it";
  }
}

// A rank's program may start another one, which has the variable and another file at the descriptor.
TEST(SharedError, IsClaimedOnceAndOnlyFromThePipeThatIsNamed) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_NONBLOCK | O_CLOEXEC), 0);
  ASSERT_EQ(write(ends[1], "", 1), 1);
  struct stat facts {};
  ASSERT_EQ(fstat(ends[0], &facts), 0);
  const auto claim = [&](std::uint64_t inode) {
    setenv("FOREBAY_ERROR_PIPE", (std::to_string(ends[0]) + ":" + std::to_string(inode)).c_str(), 1);
    const std::optional<bool> claimed = claim_shared_error();
    unsetenv("FOREBAY_ERROR_PIPE");
    return claimed;
  };

  EXPECT_EQ(claim_shared_error(), std::nullopt);
  EXPECT_EQ(claim(facts.st_ino + 1), std::nullopt);
  EXPECT_EQ(claim(facts.st_ino), true);
  EXPECT_EQ(claim(facts.st_ino), false);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(Launch, LeavesWithTheCodeOfTheFailedRank) {
  start(3, 5s, {"hang", "1", "7"});
  const std::vector<Report> ranks = reports();

  EXPECT_EQ(wait(), 7);
  expect_nothing_left(ranks);
}

TEST_F(Launch, AKilledRankIs128PlusItsSignal) {
  start(3, 5s, {"kill", "2"});
  const std::vector<Report> ranks = reports();

  EXPECT_EQ(wait(), 128 + SIGKILL);
  expect_nothing_left(ranks);
}

TEST_F(Launch, PassesInterruptAndTerminateOn) {
  for (const int signal : {SIGINT, SIGTERM}) {
    start(2, 30s, {"wait"});
    const std::vector<Report> ranks = reports();
    kill(probe_, signal);

    const int code = wait();
    if (signal == SIGINT) {
      EXPECT_TRUE(code == 40 || code == 41) << code;
    } else {
      EXPECT_EQ(code, 0);
    }
    expect_nothing_left(ranks);
    for (int rank = 0; rank < 2; ++rank)
      std::filesystem::remove(directory_ + "/report." + std::to_string(rank));
  }
}

// As under nohup, and in the background of a shell.
TEST_F(Launch, ASignalThatTheLauncherWasToldToIgnoreIsNotPassedOn) {
  const auto ignoring = [] {
    const pid_t child = fork();
    if (child == 0) signal(SIGINT, SIG_IGN);
    return child;
  };
  start(2, 30s, {"wait"}, ignoring, /*ignores_interrupts=*/true);
  const std::vector<Report> ranks = reports();
  kill(probe_, SIGINT);
  kill(probe_, SIGTERM);

  EXPECT_EQ(wait(), 0);
  expect_nothing_left(ranks);
}

// The launcher stands still until the ranks have taken the interrupt, so a second one would be seen.
TEST_F(Launch, DoesNotPassOnTheInterruptThatTheTerminalSendsToAll) {
  int terminal = -1;
  start(2, 30s, {"count"}, [&] { return forkpty(&terminal, nullptr, nullptr, nullptr); });
  const std::vector<Report> ranks = reports();
  ASSERT_EQ(kill(probe_, SIGSTOP), 0);
  ASSERT_EQ(waitpid(probe_, nullptr, WUNTRACED), probe_);
  ASSERT_EQ(write(terminal, "\x03", 1), 1);
  wait_for_files(directory_ + "/report.interrupted.");
  kill(probe_, SIGTERM);
  kill(probe_, SIGCONT);

  EXPECT_EQ(wait(), 1) << "interrupts of a rank";
  expect_nothing_left(ranks);
  close(terminal);
}

// The kernel tells the leader of the session alone, as the launcher is under `ssh -t`.
TEST_F(Launch, PassesOnThatTheTerminalWasClosed) {
  int terminal = -1;
  start(2, 30s, {"wait"}, [&] {
    const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
    if (child == 0) signal(SIGHUP, SIG_DFL);  // Ignored under nohup.
    return child;
  });
  const std::vector<Report> ranks = reports();
  close(terminal);

  EXPECT_EQ(wait(), 128 + SIGHUP);
  expect_nothing_left(ranks);
}

// A rank that is asked to end may be in a long step, or save its state: it is killed at the second request.
TEST_F(Launch, KillsWhatDoesNotListenAfterTheSecondSignalAndTheGrace) {
  start(2, 50ms, {"stubborn"});
  const std::vector<Report> ranks = reports();
  kill(probe_, SIGTERM);
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(waitpid(probe_, nullptr, WNOHANG), 0);
  for (const Report& rank : ranks) EXPECT_EQ(kill(rank.pid, 0), 0);
  kill(probe_, SIGTERM);

  EXPECT_EQ(wait(), 128 + SIGKILL);
  expect_nothing_left(ranks);
}

TEST_F(Launch, WaitsForARankThatEndsLaterThanTheOthersWhenAsked) {
  start(2, 50ms, {"late", "1", "500"});
  const std::vector<Report> ranks = reports();
  kill(probe_, SIGINT);

  EXPECT_EQ(wait(), 128 + SIGINT);
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/report.done")) << "it was not left to end";
  expect_nothing_left(ranks);
}

TEST_F(Launch, AFailureAfterASignalEndsTheRun) {
  start(2, 50ms, {"stubborn"});
  const std::vector<Report> ranks = reports();
  kill(probe_, SIGINT);
  kill(ranks[0].pid, SIGKILL);

  EXPECT_EQ(wait(), 128 + SIGKILL);
  expect_nothing_left(ranks);
}

TEST_F(Launch, AKilledRankFromOutsideEndsTheRun) {
  start(3, 5s, {"wait"});
  const std::vector<Report> ranks = reports();
  kill(ranks[1].pid, SIGKILL);

  EXPECT_EQ(wait(), 128 + SIGKILL);
  expect_nothing_left(ranks);
}

// The launcher stands still until both ranks have ended, so it finds them in one look.
TEST_F(Launch, OfRanksThatEndTogetherAKilledOneCountsAsTheFirst) {
  start(2, 5s, {"wait"});
  const std::vector<Report> ranks = reports();
  ASSERT_EQ(kill(probe_, SIGSTOP), 0);
  ASSERT_EQ(waitpid(probe_, nullptr, WUNTRACED), probe_);
  kill(ranks[0].pid, SIGINT);
  kill(ranks[1].pid, SIGKILL);
  for (const Report& rank : ranks) wait_for_end(rank.pid);
  kill(probe_, SIGCONT);

  EXPECT_EQ(wait(), 128 + SIGKILL);
  expect_nothing_left(ranks);
}

TEST_F(Launch, RanksDieWithALauncherThatIsKilled) {
  start(2, 5s, {"stubborn"});
  const std::vector<Report> ranks = reports();
  kill(probe_, SIGKILL);

  EXPECT_EQ(wait(), 128 + SIGKILL);
  // The kernel kills them; nobody can wait for another's children, so this looks until they are gone.
  const auto limit = std::chrono::steady_clock::now() + 60s;
  for (const Report& report : ranks) {
    const auto gone = [&] {
      std::ifstream status("/proc/" + std::to_string(report.pid) + "/stat");
      std::string pid, name, state;
      return !(status >> pid >> name >> state) || state == "Z";
    };
    while (!gone() && std::chrono::steady_clock::now() < limit) testing::let_others_run();
    EXPECT_TRUE(gone()) << "rank " << report.rank << " outlived its launcher";
  }
}

TEST_F(Launch, RemovesWhatAKilledLauncherLeftAndNothingOfALivingOne) {
  start(1, 5s, {"stubborn"});
  const Report killed = reports()[0];
  kill(probe_, SIGKILL);
  EXPECT_EQ(wait(), 128 + SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(killed.store));
  std::filesystem::remove(directory_ + "/report.0");
  // A directory of another program with a similar name.
  const std::string other = directory_ + "/runtime/forebay-of-another";
  const std::string link = directory_ + "/runtime/forebay-meeting-link00";
  std::filesystem::create_directory(other);
  std::filesystem::create_directory_symlink(other, link);

  start(1, 30s, {"wait"});
  const pid_t living = probe_;
  const Report lives = reports()[0];
  EXPECT_FALSE(std::filesystem::exists(killed.store));
  std::filesystem::rename(directory_ + "/report.0", directory_ + "/report.living");
  start(1, 5s, {"exit", "0"});
  const Report third = reports()[0];
  EXPECT_EQ(wait(), 0);

  EXPECT_TRUE(std::filesystem::exists(lives.store));
  EXPECT_TRUE(std::filesystem::exists(other));
  EXPECT_TRUE(std::filesystem::remove(link));
  EXPECT_TRUE(std::filesystem::remove(other));
  probe_ = living;
  kill(probe_, SIGTERM);
  EXPECT_EQ(wait(), 0);
  expect_nothing_left({lives, third});
}

TEST_F(Launch, KeepsDirectoriesOfTheUserWithNamesLikeItsOwn) {
  // One has the marker of another directory, as a copy would.
  start(1, 5s, {"stubborn"});
  const Report killed = reports()[0];
  const std::string notes = directory_ + "/runtime/forebay-meeting-notes";
  const std::string copy = directory_ + "/runtime/forebay-meeting-copied";
  std::filesystem::create_directory(notes);
  std::ofstream(notes + "/thesis.txt") << "four years";
  std::filesystem::copy(killed.store, copy, std::filesystem::copy_options::recursive);
  std::ofstream(copy + "/thesis.txt") << "four years";
  kill(probe_, SIGKILL);
  EXPECT_EQ(wait(), 128 + SIGKILL);
  std::filesystem::remove(directory_ + "/report.0");

  start(1, 5s, {"exit", "0"});
  EXPECT_EQ(wait(), 0);

  EXPECT_FALSE(std::filesystem::exists(killed.store));
  EXPECT_TRUE(std::filesystem::exists(notes + "/thesis.txt"));
  EXPECT_TRUE(std::filesystem::exists(copy + "/thesis.txt"));
  std::filesystem::remove_all(notes);
  std::filesystem::remove_all(copy);
}

// Each meeting loses its last rank until two are left.
TEST_F(Launch, StartsTheRanksThatAreLeftAgainIfItIsTold) {
  start(4, 5s, {"fewer", "2"});
  const int code = wait();

  EXPECT_EQ(code, 0);
  for (const int size : {4, 3, 2}) {
    for (int rank = 0; rank < size; ++rank) {
      Report report;
      std::ifstream(directory_ + "/report." + std::to_string(size) + "." + std::to_string(rank)) >>
          report.rank >> report.size >> report.local_rank >> report.local_size >> report.pid >> report.store;
      EXPECT_EQ(report.rank, rank);
      EXPECT_EQ(report.size, size);
      EXPECT_EQ(report.local_size, size);
      expect_nothing_left({report});
    }
  }
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/report.1.0"));
}

TEST_F(Launch, StartsNothingAgainAfterItWasAskedToEnd) {
  start(2, 30s, {"asked"});
  wait_for_files(directory_ + "/report.2.");
  kill(probe_, SIGTERM);

  EXPECT_EQ(wait(), 128 + SIGKILL);
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/report.1.0"));
}

// The launcher itself has to kill rank 0 then.
TEST_F(Launch, RanksThatItKillsAreNotLost) {
  start(4, 200ms, {"fewer", "2", "rank 0 hears nothing"});

  EXPECT_EQ(wait(), 0);
  for (const int size : {4, 3, 2})
    EXPECT_TRUE(std::filesystem::exists(directory_ + "/report." + std::to_string(size) + ".0")) << size;
}

// Rank 0 has no handler, so that the launcher's request ends it.
TEST_F(Launch, RanksThatDieOfItsRequestAreNotLost) {
  start(4, 5s, {"fewer", "2", "dies"});

  EXPECT_EQ(wait(), 0);
  for (const int size : {4, 3, 2})
    EXPECT_TRUE(std::filesystem::exists(directory_ + "/report." + std::to_string(size) + ".0")) << size;
}

// No rank is left, so nothing is started again.
TEST_F(Launch, EndsWithItsLastRank) {
  start(1, 5s, {"fewer", "0"});

  EXPECT_EQ(wait(), 128 + SIGKILL);
}

TEST_F(Launch, NeedsAtLeastOneRank) {
  EXPECT_EQ(launch_local_ranks({}, {.size = 0}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
