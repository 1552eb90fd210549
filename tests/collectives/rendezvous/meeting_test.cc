// Meeting in a directory, the ranks being threads. Over TCP: tcp_store_test.
#include "collectives/rendezvous/meeting.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/rendezvous/store_directory.h"
#include "forebay/process_communicator.h"
#include "tests/support/let_others_run.h"
#include "tests/support/process.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class DirectoryMeeting : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  // The result for each of the given ranks.
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
  const auto second = meet_all(ranks());  // The texts of the first meeting are there.
  for (std::size_t i = 0; i < first.size(); ++i) {
    ASSERT_TRUE(first[i].ok() && second[i].ok()) << first[i].status().to_string();
    EXPECT_EQ(first[i].value().generation, first[0].value().generation);
    EXPECT_EQ(second[i].value().generation, second[0].value().generation);
    EXPECT_TRUE(first[i].value().one_host);
  }
  EXPECT_NE(first[0].value().generation, second[0].value().generation);
}

TEST_P(DirectoryMeeting, TwoRanksThatDifferReportTheSame) {
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

TEST_P(DirectoryMeeting, ARankThatDoesNotJoinIsNamedByAll) {
  std::vector<Participant> some = ranks();
  some.pop_back();
  for (const Result<Meeting>& result : meet_all(some, 2s)) {
    EXPECT_EQ(result.status().code(), StatusCode::kTimeout);
    EXPECT_NE(result.status().message().find("rank " + std::to_string(size() - 1) + " did not join"),
              std::string::npos)
        << result.status().message();
  }
  // The next ranks to come do not find these.
  const std::unique_ptr<StoreDirectory> store = StoreDirectory::open(directory_ / "store").value();
  for (int rank = 0; rank < size(); ++rank) EXPECT_FALSE(store->read("rank." + std::to_string(rank)));
}

TEST(Card, IsReadWholeOrNotAtAll) {
  const Card card{{{1, 2, "same"}, "version", "host"}, "here", {3, 4}};
  const std::string text = encode(card);
  Card read;
  ASSERT_TRUE(decode(text, &read));
  EXPECT_EQ(read.numbers, card.numbers);
  EXPECT_EQ(read.presence, "here");

  for (std::size_t size = 0; size < text.size(); ++size)
    EXPECT_FALSE(decode(text.substr(0, size), &read)) << size;
  EXPECT_FALSE(decode(text + '\0', &read));
  EXPECT_FALSE(decode("forebay2" + text.substr(8), &read)) << "another protocol";
}

// --- which ranks are in a directory ---

std::unique_ptr<StoreDirectory> open_as(const std::string& path, int rank) {
  std::unique_ptr<StoreDirectory> store = StoreDirectory::open(path).value();
  const Status came = store->come({rank, 3, {}});
  EXPECT_TRUE(came.ok()) << came.to_string();
  return store;
}

// The first error of `store`; ok when it has none within `patience`, at the end of which it has
// looked at least once.
Status status_in_time(StoreDirectory& store, std::chrono::milliseconds patience) {
  const Clock::time_point limit = Clock::now() + patience;
  Status status = store.status();
  while (status.ok() && Clock::now() < limit) {
    testing::let_others_run();
    status = store.status();
  }
  return status.ok() ? store.status() : status;
}

// Another process that is rank 1, until this is destroyed or it is killed.
class OtherProcess {
 public:
  explicit OtherProcess(const std::string& path) {
    int came[2];
    int leave[2];
    EXPECT_EQ(::pipe(came) + ::pipe(leave), 0);
    id_ = ::fork();
    char byte = 0;
    if (id_ == 0) {
      ::close(leave[1]);
      {
        const std::unique_ptr<StoreDirectory> store = open_as(path, 1);
        static_cast<void>(!::write(came[1], &byte, 1));
        static_cast<void>(!::read(leave[0], &byte, 1));
      }
      ::_exit(0);
    }
    ::close(leave[0]);
    ::close(came[1]);
    EXPECT_EQ(::read(came[0], &byte, 1), 1);
    ::close(came[0]);
    leave_ = leave[1];
  }
  ~OtherProcess() { end(); }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  pid_t id() const { return id_; }
  void kill() {
    ::kill(id_, SIGKILL);
    end();
  }
  void end() {
    if (leave_ < 0) return;
    ::close(std::exchange(leave_, -1));
    ::waitpid(id_, nullptr, 0);
  }

 private:
  pid_t id_ = -1;
  int leave_ = -1;
};

// A store of the program, in which texts of others lie too.
class ProgramTexts final : public RendezvousTexts {
 public:
  Status set(const std::string& name, std::string_view text) override {
    texts[name] = text;
    return {};
  }
  std::optional<std::string> get(const std::string& name) override {
    const auto found = texts.find(name);
    if (found == texts.end()) return std::nullopt;
    return found->second;
  }
  Status set_if_absent(const std::string& name, std::string_view text) override {
    texts.emplace(name, text);
    return {};
  }
  void remove(const std::string& name) noexcept override { texts.erase(name); }

  std::map<std::string, std::string> texts;
};

TEST(ProgramStore, UsesOnlyTextsWithItsPrefix) {
  const auto program = std::make_shared<ProgramTexts>();
  const std::map<std::string, std::string> before = {{"a", "theirs"}, {"run/b", "first"}};
  program->texts = before;
  const auto limit = std::chrono::steady_clock::now();
  const auto store = open_rendezvous({"run", program, {0, 2, "same"}, "", limit}).value();

  EXPECT_EQ(store->read("a"), std::nullopt);
  EXPECT_EQ(store->write_once("b", "second"), "first");
  EXPECT_TRUE(store->write("a", "ours").ok());
  EXPECT_EQ(store->read("a"), "ours");
  EXPECT_EQ(program->texts.at("run/a"), "ours");
  store->remove("a");

  EXPECT_EQ(program->texts, before);
  EXPECT_EQ(open_rendezvous({"", program, {0, 2, "same"}, "", limit}).value()->read("a"), "theirs");
}

// A store that knows who is here.
class AttendedStore final : public RendezvousStore {
 public:
  explicit AttendedStore(Attendance here) : here_(std::move(here)) {}
  const std::string& where() const noexcept override { return where_; }
  Status write(const std::string&, std::string_view) override { return {}; }
  std::optional<std::string> read(const std::string&) override { return std::nullopt; }
  std::optional<std::string> write_once(const std::string&, std::string_view) override {
    return std::nullopt;
  }
  void remove(const std::string&) noexcept override {}
  std::optional<Attendance> attendance() override { return here_; }

 private:
  const std::string where_ = "memory";
  const Attendance here_;
};

TEST(AttendedMeeting, KnowsTheFirstRankOnAnotherHost) {
  const auto meet_on = [](const std::vector<std::string>& hosts) {
    AttendedStore store({.generation = "word", .came = {true, true, true, true}, .hosts = hosts});
    return meet(store, {0, 4, "same"}, Clock::now() + 30s, 30s).value();
  };
  const Meeting apart = meet_on({"a", "a", "b", "c"});
  EXPECT_EQ(apart.generation, "word");
  EXPECT_FALSE(apart.one_host);
  EXPECT_EQ(apart.first_host, "a");
  EXPECT_EQ(apart.other_host, "b");
  EXPECT_EQ(apart.other_host_rank, 2);
  EXPECT_TRUE(meet_on({"a", "a", "a", "a"}).one_host);
}

TEST(StoreDirectory, ARankThatIsKilledIsNamedAndOneThatLeavesIsNot) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "store";
  const std::unique_ptr<StoreDirectory> waits = open_as(path, 0);
  {
    OtherProcess leaves(path);
    EXPECT_TRUE(status_in_time(*waits, 100ms).ok());
  }
  EXPECT_TRUE(status_in_time(*waits, 100ms).ok()) << waits->status().to_string();
  OtherProcess victim(path);
  EXPECT_TRUE(status_in_time(*waits, 100ms).ok());
  const pid_t id = victim.id();
  victim.kill();
  const Status status = status_in_time(*waits, 60s);
  EXPECT_EQ(status.code(), StatusCode::kPeerLost) << status.to_string();
  EXPECT_NE(status.message().find("rank 1 died (process " + std::to_string(id) + " on "), std::string::npos)
      << status.message();

  // From an earlier run, for ranks that come later.
  const std::unique_ptr<StoreDirectory> later = open_as(path, 2);
  EXPECT_TRUE(status_in_time(*later, 100ms).ok()) << later->status().to_string();
}

// On a shared file system a host may not see the locks of another host, whose ranks live all the same.
// As a data loader's process does.
TEST(StoreDirectory, AChildThatOutlivesAKilledRankDoesNotStandForIt) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "store";
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t rank = ::fork();
  if (rank == 0) {
    const std::unique_ptr<StoreDirectory> store = open_as(path, 1);
    const pid_t child = ::fork();
    if (child != 0) static_cast<void>(!::write(ends[1], &child, sizeof child));
    for (;;) ::pause();
  }
  pid_t child = -1;
  ASSERT_EQ(::read(ends[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
  ::kill(rank, SIGKILL);
  ::waitpid(rank, nullptr, 0);
  const std::unique_ptr<StoreDirectory> store = StoreDirectory::open(path).value();
  const Status came = store->come({1, 3, {}});
  ::kill(child, SIGKILL);
  ::close(ends[0]);
  ::close(ends[1]);
  EXPECT_TRUE(came.ok()) << came.to_string();
}

TEST(StoreDirectory, ARankOfAnotherHostNeedsNoLockThatThisHostSees) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "store";
  const std::unique_ptr<StoreDirectory> waits = open_as(path, 0);
  const auto come_without_lock = [&](int rank, const std::string& presence) {
    std::ofstream(path + "/here." + std::to_string(rank)) << presence;
    waits->expect(rank, presence);
  };

  come_without_lock(1, "0123456789abcdef:another-boot-id process 1 on another-host");
  EXPECT_TRUE(status_in_time(*waits, 100ms).ok()) << waits->status().to_string();

  const std::string mine = waits->presence();
  come_without_lock(2, "0123456789abcdef" + mine.substr(mine.find(':')));
  EXPECT_EQ(status_in_time(*waits, 60s).code(), StatusCode::kPeerLost);
}

TEST(StoreDirectory, TheLastOneToLeaveRemovesTheFilesOfAFailedRun) {
  const testing::TemporaryDirectory directory;
  std::ofstream(directory / "here.txt") << "the user's";
  std::ofstream(directory / "rank.txt") << "the user's";
  std::ofstream(directory / "twice.1") << "a word\nanother";
  std::filesystem::permissions(directory.path(), std::filesystem::perms::owner_all);
  std::unique_ptr<StoreDirectory> first = open_as(directory.path(), 0);
  std::unique_ptr<StoreDirectory> last = open_as(directory.path(), 2);
  {
    OtherProcess victim(directory.path());
    victim.kill();
  }
  ASSERT_TRUE(std::filesystem::exists(directory / "here.1"));
  ASSERT_TRUE(last->write("rank.2", "a card").ok());
  ASSERT_TRUE(first->write_once("0123456789abcdef.failed", "rank 1 died"));
  ASSERT_TRUE(first->write("0123456789abcdef.vote.0", "a vote").ok());
  ASSERT_TRUE(last->write("0123456789abcdef.vote.2", "a vote").ok());

  first.reset();
  EXPECT_EQ(last->read("0123456789abcdef.failed"), "rank 1 died") << "a rank that looks late";
  last.reset();
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path()))
    left.push_back(entry.path().filename());
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, (std::vector<std::string>{"here.txt", "rank.txt"}));
}

TEST(StoreDirectory, TwoProcessesOfARankAndTheOthersAreTold) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "store";
  const std::unique_ptr<StoreDirectory> other = open_as(path, 0);
  const std::unique_ptr<StoreDirectory> first = open_as(path, 1);
  EXPECT_TRUE(status_in_time(*other, 100ms).ok());
  const std::unique_ptr<StoreDirectory> second = StoreDirectory::open(path).value();

  const Status refused = second->come({1, 3, {}});

  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument) << refused.to_string();
  EXPECT_NE(refused.message().find("two processes came to " + path + " as rank 1"), std::string::npos)
      << refused.message();
  for (StoreDirectory* told : {second.get(), first.get(), other.get()})
    EXPECT_EQ(status_in_time(*told, 60s).to_string(), refused.to_string());
}

TEST(StoreDirectory, TwoProcessesOfARankAreToldOfThoughBothHaveLeft) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "store";
  std::unique_ptr<StoreDirectory> other = open_as(path, 0);
  std::string refused;
  {
    const std::unique_ptr<StoreDirectory> first = open_as(path, 1);
    EXPECT_TRUE(status_in_time(*other, 100ms).ok());
    refused = StoreDirectory::open(path).value()->come({1, 3, {}}).to_string();
  }
  EXPECT_NE(refused.find("as rank 1"), std::string::npos) << refused;
  EXPECT_EQ(status_in_time(*other, 60s).to_string(), refused);

  other.reset();
  EXPECT_FALSE(std::filesystem::exists(path)) << "the last one to leave left something";
}

TEST(StoreDirectory, AnEmptiedDirectoryIsNotTakenForAnotherProcess) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "store";
  const std::unique_ptr<StoreDirectory> store = open_as(path, 0);
  std::thread emptier([&] {
    while (!std::filesystem::exists(path + "/rank.0")) testing::let_others_run();
    std::filesystem::remove(path + "/rank.0");
  });
  const Result<Meeting> met = meet(*store, {0, 3, {}}, Clock::now() + 60s, 60s);
  emptier.join();
  EXPECT_EQ(met.status().code(), StatusCode::kIoError) << met.status().to_string();
  EXPECT_NE(met.status().message().find("the text that rank 0 wrote to " + path + " is gone"),
            std::string::npos)
      << met.status().message();
}

// A card of another process in place of this rank's, though the directory has not told of two processes: a
// network file system whose locks are not seen on other hosts, say.
TEST(StoreDirectory, ACardOfAnotherProcessInPlaceOfOnesOwnIsNoticed) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "store";
  const std::unique_ptr<StoreDirectory> store = open_as(path, 0);
  std::thread other([&] {
    while (!std::filesystem::exists(path + "/rank.0")) testing::let_others_run();
    const Card card{{{0, 3, ""}, "version", "host"}, "here", {1, 2, 3}};
    std::ofstream(path + "/other.card", std::ios::binary) << encode(card);
    std::filesystem::rename(path + "/other.card", path + "/rank.0");
  });
  const Result<Meeting> met = meet(*store, {0, 3, {}}, Clock::now() + 60s, 60s);
  other.join();
  EXPECT_EQ(met.status().code(), StatusCode::kInvalidArgument) << met.status().to_string();
  EXPECT_EQ(met.status().message(),
            "another process came to " + path +
                " as rank 0 too; give every process a rank of its own, and every run a store of its own");
}

TEST(StoreDirectory, ALinkIsCalledOne) {
  const testing::TemporaryDirectory directory;
  std::filesystem::create_directory_symlink(directory.path(), directory / "link");
  const Status status = StoreDirectory::open(directory / "link").status();
  EXPECT_NE(status.message().find("is a link"), std::string::npos) << status.message();
}

// Another user may come to a directory that all share, such as /tmp, before the ranks do.
TEST(StoreDirectory, ALinkOfAnotherUserIsNotFollowed) {
  const testing::TemporaryDirectory directory;
  const std::string target = directory / "target", link = directory / "link";
  std::filesystem::create_directory(target);
  ASSERT_EQ(chmod(target.c_str(), 0700), 0);
  std::filesystem::create_directory_symlink(target, link);
  EXPECT_TRUE(StoreDirectory::open(link + "/job").ok()) << "a link of one's own";
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a link to another user";
  for (const bool dangles : {false, true}) {
    if (dangles) std::filesystem::remove(target);
    ASSERT_EQ(lchown(link.c_str(), 12345, 12345), 0);

    const Status status = StoreDirectory::open(link + "/job").status();

    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(link + ", the parent of the store directory, is a link of user 12345"),
              std::string::npos)
        << status.message();
    EXPECT_TRUE(dangles || std::filesystem::is_empty(target)) << "it was written to";
  }
}

TEST(StoreDirectory, AParentOfAnotherUserIsRefusedWithItsOwner) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a directory to another user";
  const testing::TemporaryDirectory directory;
  const std::string parent = directory / "parent";
  std::filesystem::create_directory(parent);
  ASSERT_EQ(chown(parent.c_str(), 12345, 12345), 0);

  const Status status = StoreDirectory::open(parent + "/job").status();

  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  for (const std::string& part :
       {parent + ", the parent of the store directory, belongs to user 12345, not to " +
            std::to_string(geteuid()),
        std::string("set XDG_RUNTIME_DIR")})
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  EXPECT_TRUE(std::filesystem::is_empty(parent)) << "it was written to";
}

}  // namespace
}  // namespace forebay::internal
