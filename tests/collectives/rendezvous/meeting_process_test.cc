// Ranks as processes that meet over TCP: by hand, and under Open MPI's mpirun where that is installed. Each
// fault ends every survivor within its deadline, with the same first failure.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <thread>

#include "collectives/rendezvous/authentication.h"
#include "collectives/rendezvous/store_address.h"
#include "tests/support/process.h"

namespace forebay {
namespace {

using namespace std::chrono_literals;
using testing::Finished;
using testing::Process;

class Meetings : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    port_ = internal::local_end(internal::listen_at({"127.0.0.1", 0, {}}).value().number()).port();
  }

  int size() const { return GetParam(); }
  std::string store() const { return "tcp://127.0.0.1:" + std::to_string(port_); }

  std::unique_ptr<Process> start(int rank, const std::vector<std::string>& arguments,
                                 const Process::Variables& more = {},
                                 const std::string& program = FOREBAY_MEETING_PROBE) {
    Process::Variables variables = {{"FOREBAY_RANK", std::to_string(rank)},
                                    {"FOREBAY_SIZE", std::to_string(size())},
                                    {"FOREBAY_STORE", store()},
                                    {"FOREBAY_SECRET", std::string(64, 's')}};
    for (const auto& [name, value] : more) variables[name] = value;
    std::vector<std::string> command = {program};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return std::make_unique<Process>(command, variables);
  }

  std::vector<std::unique_ptr<Process>> start_all(const std::vector<std::string>& arguments) {
    std::vector<std::unique_ptr<Process>> ranks;
    for (int rank = 0; rank < size(); ++rank) ranks.push_back(start(rank, arguments));
    return ranks;
  }

  // Read from the kernel's table: to bind the port or to connect to it could come in rank 0's way.
  bool listens_within(std::chrono::seconds limit) const {
    char listening[64];
    std::snprintf(listening, sizeof(listening), " 0100007F:%04X 00000000:0000 0A ", port_);
    const auto end = std::chrono::steady_clock::now() + limit;
    do {
      std::ifstream table("/proc/net/tcp");
      const std::string text{std::istreambuf_iterator<char>(table), {}};
      if (text.find(listening) != std::string::npos) return true;
      std::this_thread::sleep_for(1ms);
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  // The text after "failed rank R: ", which is the same for all ranks.
  static std::string one_cause(const std::vector<Finished>& ranks) {
    std::set<std::string> causes;
    for (const Finished& rank : ranks) {
      EXPECT_EQ(rank.exit_code, 3) << rank.output;
      const std::size_t begin = rank.output.find("failed rank ");
      causes.insert(begin == std::string::npos ? "none" : rank.output.substr(begin + 15));
    }
    EXPECT_EQ(causes.size(), 1u) << *causes.begin() << *causes.rbegin();
    return *causes.begin();
  }

  std::uint16_t port_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Ranks, Meetings, ::testing::Values(3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(Meetings, ProcessesMeet) {
  std::set<std::string> generations;
  for (const auto& rank : start_all({"60000", "meet"})) {
    const Finished finished = rank->finish();
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    generations.insert(finished.output.substr(0, finished.output.find(" of rank")));
  }
  EXPECT_EQ(generations.size(), 1u);
}

TEST_P(Meetings, ARankThatEndsBeforeItBeginsIsNamedByTheOthers) {
  const int gone = size() - 1;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Finished> others;
  for (const auto& rank : start_all({"2000", "absent", std::to_string(gone)}))
    others.push_back(rank->finish());
  EXPECT_EQ(others.back().exit_code, 0);
  others.pop_back();

  const std::string cause = one_cause(others);
  EXPECT_NE(cause.find("rank " + std::to_string(gone) + " did not join"), std::string::npos) << cause;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

TEST_P(Meetings, ADifferingOptionIsNamedByAll) {
  std::vector<Finished> all;
  for (const auto& rank : start_all({"60000", "different", "1"})) all.push_back(rank->finish(30s));
  const std::string cause = one_cause(all);
  EXPECT_NE(cause.find("rank 0 was configured as \"same\", rank 1 as \"other\""), std::string::npos) << cause;
}

#ifdef FOREBAY_OTHER_VERSION_PROBE
// Whether rank 0 or another one is of the other version. A text in a directory may be an old one, so ranks
// wait there for a better one until the deadline, and those that come late find none: over TCP all name it.
TEST_P(Meetings, ARankOfAnotherVersionIsNamed) {
  for (const int other : {0, 1}) {
    for (const bool in_directory : {false, true}) {
      SCOPED_TRACE("rank " + std::to_string(other) + (in_directory ? ", directory" : ", TCP"));
      SetUp();  // A port of its own.
      const testing::TemporaryDirectory directory;
      Process::Variables more;
      if (in_directory) more["FOREBAY_STORE"] = directory / "store";
      std::vector<std::unique_ptr<Process>> ranks;
      for (int rank = 0; rank < size(); ++rank) {
        ranks.push_back(start(rank, {in_directory ? "2000" : "30000", "meet"}, more,
                              rank == other ? FOREBAY_OTHER_VERSION_PROBE : FOREBAY_MEETING_PROBE));
      }
      std::vector<Finished> all;
      for (const auto& rank : ranks) all.push_back(rank->finish(60s));
      int naming = 0;
      for (const Finished& rank : all) {
        EXPECT_EQ(rank.exit_code, 3) << rank.output;
        naming += rank.output.find("runs forebay 0.0.9") != std::string::npos &&
                          rank.output.find("install the same version everywhere") != std::string::npos
                      ? 1
                      : 0;
      }
      EXPECT_GE(naming, in_directory ? 1 : size()) << all[0].output;
      if (!in_directory) static_cast<void>(one_cause(all));
    }
  }
}
#endif

TEST_P(Meetings, AKilledRankIsNamedByTheOthers) {
  const int victim = 1;
  const auto ranks = start_all({"60000", "hold"});
  for (const auto& rank : ranks) ASSERT_TRUE(rank->wait_for_output("met "));
  ranks[victim]->signal(SIGKILL);

  std::vector<Finished> others;
  for (int rank = 0; rank < size(); ++rank) {
    const Finished finished = ranks[static_cast<std::size_t>(rank)]->finish(30s);
    if (rank != victim) others.push_back(finished);
  }
  const std::string cause = one_cause(others);
  EXPECT_NE(cause.find("rank 1 at 127.0.0.1 ended"), std::string::npos) << cause;
}

TEST_P(Meetings, AKilledServerIsNamedByTheOthers) {
  const auto ranks = start_all({"60000", "hold"});
  for (const auto& rank : ranks) ASSERT_TRUE(rank->wait_for_output("met "));
  ranks[0]->signal(SIGKILL);

  std::vector<Finished> others;
  for (int rank = 1; rank < size(); ++rank)
    others.push_back(ranks[static_cast<std::size_t>(rank)]->finish(30s));
  const std::string cause = one_cause(others);
  EXPECT_NE(cause.find("kPeerLost: rank 0, which serves the store at " + store()), std::string::npos)
      << cause;
}

TEST_P(Meetings, AServerThatIsStoppedIsNamedAtTheDeadline) {
  const auto zero = start(0, {"60000", "hold"});
  const auto one = start(1, {"60000", "hold"});
  ASSERT_TRUE(listens_within(30s));
  zero->signal(SIGSTOP);
  const auto begin = std::chrono::steady_clock::now();
  const Finished late = start(2, {"1000", "meet"})->finish(30s);

  EXPECT_EQ(late.exit_code, 3) << late.output;
  // The store gets the rest of its deadline.
  const std::string told = "rank 2 could not reach the rendezvous store at " + store() + " within ";
  const std::size_t at = late.output.find(told);
  ASSERT_NE(at, std::string::npos) << late.output;
  EXPECT_LE(std::stoi(late.output.substr(at + told.size())), 1000) << late.output;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

// In a network of its own, where the kernel has few ports to choose from: that of a store where nobody
// listens yet is one.
TEST_P(Meetings, ARankThatComesFirstDoesNotTakeItselfForTheStore) {
  if (testing::run_program({"/bin/sh", "-c", "unshare --net ip link set lo up"}).exit_code != 0)
    GTEST_SKIP() << "network namespaces cannot be made here (unshare --net, as root, and ip of iproute2)";
  const std::string script =
      "ip link set lo up && echo 40000 40007 >/proc/sys/net/ipv4/ip_local_port_range || exit 9\n"
      "for rank in $(seq $((FOREBAY_SIZE - 1))); do FOREBAY_RANK=$rank " FOREBAY_MEETING_PROBE
      " 30000 meet & done\n"
      "sleep 0.3; FOREBAY_RANK=0 " FOREBAY_MEETING_PROBE " 30000 meet & wait\n";
  const Finished finished = testing::run_program({"/usr/bin/unshare", "--net", "sh", "-c", script},
                                                 {{"FOREBAY_SIZE", std::to_string(size())},
                                                  {"FOREBAY_STORE", "tcp://127.0.0.1:40002"},
                                                  {"FOREBAY_SECRET", std::string(64, 's')}});
  EXPECT_EQ(finished.exit_code, 0);
  for (int rank = 0; rank < size(); ++rank)
    EXPECT_NE(finished.output.find(" of rank " + std::to_string(rank)), std::string::npos) << finished.output;
}

TEST_P(Meetings, NoSecretNoStore) {
  for (const int rank : {0, 1}) {
    const Finished finished = start(rank, {"1000", "meet"}, {{"FOREBAY_SECRET", ""}})->finish();
    EXPECT_EQ(finished.exit_code, 3) << finished.output;
    EXPECT_NE(finished.output.find("openssl rand -hex 32"), std::string::npos) << finished.output;
  }
}

TEST_P(Meetings, RankZeroSaysThatItsPortIsTaken) {
  const internal::Descriptor other = internal::listen_at({"127.0.0.1", port_, {}}).value();
  const Finished finished = start(0, {"1000", "meet"})->finish();
  EXPECT_EQ(finished.exit_code, 3) << finished.output;
  EXPECT_NE(finished.output.find("give another port"), std::string::npos) << finished.output;
}

// --- under mpirun ---

class Mpirun : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kMpirun)) GTEST_SKIP() << kMpirun << " is not installed (openmpi-bin)";
    const Finished version = testing::run_program({kMpirun, "--version"}, variables());
    if (version.output.find("Open MPI") == std::string::npos) GTEST_SKIP() << kMpirun << " is not Open MPI's";
    if (testing::run_program(command({"/bin/true"}), variables()).exit_code != 0)
      GTEST_SKIP() << kMpirun << " cannot start processes here";
  }

  Process::Variables variables() const {
    // Each mpirun that ends removes the directory of sessions, which others are about to use.
    return {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
            {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
            {"TMPDIR", directory_.path()},
            {"FOREBAY_INTERFACE", "lo"}};
  }
  static std::vector<std::string> command(const std::vector<std::string>& program, int size = 1) {
    std::vector<std::string> words = {kMpirun, "--oversubscribe", "-np", std::to_string(size)};
    words.insert(words.end(), program.begin(), program.end());
    return words;
  }
  Finished run(const std::vector<std::string>& arguments, const std::string& store) {
    std::vector<std::string> program = {FOREBAY_MEETING_PROBE};
    program.insert(program.end(), arguments.begin(), arguments.end());
    Process::Variables all = variables();
    if (!store.empty()) all["FOREBAY_STORE"] = store;
    all["XDG_RUNTIME_DIR"] = directory_.path();
    return testing::run_program(command(program, GetParam()), all);
  }
  static int count(const std::string& text, const std::string& word) {
    int found = 0;
    for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++found;
    return found;
  }

  testing::TemporaryDirectory directory_;
  static constexpr char kMpirun[] = "/usr/bin/mpirun";
};

INSTANTIATE_TEST_SUITE_P(Ranks, Mpirun, ::testing::Values(3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(Mpirun, RanksOfOneHostMeetInADirectory) {
  const Finished finished = run({"60000", "meet"}, "");
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_EQ(count(finished.output, "/open-mpi-"), GetParam()) << finished.output;
}

// Ranks on several hosts, when no variable says where to meet.
TEST_P(Mpirun, RanksMeetWhereTheLauncherTellsThem) {
  const Finished finished = run({"60000", "meet"}, "pmix://job");
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_EQ(count(finished.output, "at tcp://127.0.0.1:"), GetParam()) << finished.output;
}

TEST_P(Mpirun, RanksThatDifferFailWithOneCauseThere) {
  const Finished finished = run({"60000", "different", "1"}, "pmix://job");
  EXPECT_NE(finished.exit_code, 0);
  EXPECT_NE(finished.output.find("rank 0 was configured as \"same\", rank 1 as \"other\""), std::string::npos)
      << finished.output;
}

TEST(Pmix, WithoutALauncherItNamesTheVariablesToSet) {
  const Finished finished =
      testing::run_program({FOREBAY_MEETING_PROBE, "1000", "meet"},
                           {{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_STORE", "pmix://job"}});
  EXPECT_EQ(finished.exit_code, 3) << finished.output;
  EXPECT_NE(finished.output.find("cannot ask the launcher where the ranks meet"), std::string::npos)
      << finished.output;
  EXPECT_NE(finished.output.find("set FOREBAY_STORE"), std::string::npos) << finished.output;
}

}  // namespace
}  // namespace forebay
