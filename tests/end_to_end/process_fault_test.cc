// A process of a training run is killed, stopped, ends or issues something else, at one of its collectives:
// within the deadline and a moment every other ends, with one first failure, with the same step committed and
// with the masters that this step left. Over shared memory and over TCP.
//
// `./dev test` does it at the first, a middle and the last collective, under the label slow at each of them.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "forebay/gloo_communicator.h"
#include "tests/end_to_end/fault_run.h"
#include "tests/support/slow.h"

namespace forebay::testing {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kSteps = 3;
constexpr milliseconds kDeadlineMin{3'000};
constexpr milliseconds kUndisturbedDeadline{60'000};
// From the deadline to the end: votes are waited for, and processes start and end.
constexpr milliseconds kMomentMin{6'000};

// The stage, and behind a slash the ranks of a group that it is sharded within.
class ProcessFault : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  std::string transport() const { return std::get<0>(GetParam()); }
  std::string arrangement() const { return std::get<1>(GetParam()); }
  int stage() const { return std::stoi(arrangement()); }
  bool in_groups() const { return arrangement().size() > 1; }

  void SetUp() override {
    if (transport() == "gloo" && !gloo_available())
      GTEST_SKIP() << "this forebay was built without Gloo (libgloo-dev)";
  }

  std::vector<std::unique_ptr<Process>> start(int size, const std::string& store, milliseconds deadline,
                                              const std::vector<std::string>& fault) const {
    std::vector<std::string> words{FOREBAY_FAULT_PROBE, transport(), arrangement(), std::to_string(kSteps),
                                   std::to_string(deadline.count())};
    words.insert(words.end(), fault.begin(), fault.end());
    std::vector<std::unique_ptr<Process>> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(
          std::make_unique<Process>(words, Process::Variables{{"FOREBAY_RANK", std::to_string(rank)},
                                                              {"FOREBAY_SIZE", std::to_string(size)},
                                                              {"FOREBAY_STORE", store}}));
    }
    return ranks;
  }

  // Its duration tells how fast this machine is now.
  std::vector<Told> run_undisturbed(int size) {
    const TemporaryDirectory directory;
    const SteadyClock::time_point begun = SteadyClock::now();
    std::vector<Told> told;
    for (const auto& rank : start(size, directory / "store", kUndisturbedDeadline, {})) {
      const Finished finished = rank->finish();
      told.push_back(read_told(finished.output));
      EXPECT_TRUE(told.back().done) << finished.output;
    }
    EXPECT_FALSE(std::filesystem::exists(directory / "store"));
    const auto took = std::chrono::ceil<milliseconds>(SteadyClock::now() - begun);
    deadline_ = std::max(kDeadlineMin, 3 * took);
    moment_ = std::max(kMomentMin, 6 * took);
    return told;
  }

  void check(const std::vector<Told>& undisturbed, const std::string& kind, unsigned long long operation) {
    const int size = static_cast<int>(undisturbed.size());
    const int faulty = static_cast<int>(operation % undisturbed.size());
    SCOPED_TRACE(transport() + ": rank " + std::to_string(faulty) + " of " + std::to_string(size) + ", " +
                 kind + " at collective " + std::to_string(operation) + " of " +
                 std::to_string(undisturbed[0].operations.back()));
    const TemporaryDirectory directory;
    const auto ranks = start(size, directory / "store", deadline_,
                             {kind, std::to_string(faulty), std::to_string(operation)});
    const SteadyClock::time_point begun = SteadyClock::now();
    std::vector<Finished> finished(ranks.size());
    const bool ends = kind != "stop";
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (static_cast<int>(r) == faulty && !ends) continue;
      finished[r] = ranks[r]->finish(std::chrono::ceil<std::chrono::seconds>(2 * (deadline_ + moment_)));
    }
    EXPECT_LT(SteadyClock::now() - begun, deadline_ + moment_);
    if (!ends) {
      ranks[static_cast<std::size_t>(faulty)]->signal(SIGKILL);
      static_cast<void>(ranks[static_cast<std::size_t>(faulty)]->finish());
    }
    // A rank that is killed while it is stopped leaves last, and cannot remove its files.
    if (ends) {
      EXPECT_FALSE(std::filesystem::exists(directory / "store")) << "files are left behind";
    }
    const Told survivors = expect_whole(undisturbed, finished, kind == "mismatch" ? -1 : faulty);
    // Over TCP, the last bytes of a rank that has ended may be lost.
    const unsigned long long expected = committed_by(undisturbed[0], stage(), operation);
    EXPECT_LE(survivors.committed_step, expected) << survivors.cause;
    EXPECT_GE(survivors.committed_step + (transport() == "gloo" && expected > 0), expected)
        << survivors.cause;
    // In a group it may be called by its number there, and the group is said.
    if (!in_groups() || survivors.cause.find("group of ranks") == std::string::npos) {
      EXPECT_NE(survivors.cause.find("rank " + std::to_string(faulty)), std::string::npos) << survivors.cause;
    }
  }

  void check_all(const std::string& kind) {
    std::vector<int> sizes{3 + stage() % 2};
    if (is_slow_test()) sizes = {3, 4};
    if (in_groups()) sizes = {4};
    for (const int size : sizes) {
      const std::vector<Told> undisturbed = run_undisturbed(size);
      if (HasFailure()) return;
      const unsigned long long count = undisturbed[0].operations.back();
      std::set<unsigned long long> operations{0, count / 2, count - 1};
      for (unsigned long long i = 0; is_slow_test() && i < count; ++i) operations.insert(i);
      for (const unsigned long long operation : operations) {
        check(undisturbed, kind, operation);
        if (HasFailure()) return;
      }
    }
  }

  milliseconds deadline_ = kDeadlineMin;
  milliseconds moment_ = kMomentMin;
};

TEST_P(ProcessFault, OneIsKilled) {
  check_all("kill");
}

TEST_P(ProcessFault, OneEndsWithoutAWord) {
  check_all("exit");
}

TEST_P(ProcessFault, OneStops) {
  check_all("stop");
}

TEST_P(ProcessFault, OneIssuesSomethingElse) {
  check_all("mismatch");
}

std::string case_name(const ::testing::TestParamInfo<std::tuple<const char*, const char*>>& info) {
  return std::string(std::get<0>(info.param)) + "_stage" + std::string(std::get<1>(info.param)).substr(0, 1);
}

const auto kStages =
    ::testing::Combine(::testing::Values("shm", "gloo"), ::testing::Values("0", "1", "2", "3"));

INSTANTIATE_TEST_SUITE_P(Processes, ProcessFault, kStages, case_name);
INSTANTIATE_TEST_SUITE_P(Slow, ProcessFault, kStages, case_name);

class ProcessFaultInGroups : public ProcessFault {};

TEST_P(ProcessFaultInGroups, OneIsKilled) {
  check_all("kill");
}

TEST_P(ProcessFaultInGroups, OneIssuesSomethingElse) {
  check_all("mismatch");
}

const auto kGroups = ::testing::Combine(::testing::Values("shm", "gloo"), ::testing::Values("2/2", "3/2"));

INSTANTIATE_TEST_SUITE_P(Processes, ProcessFaultInGroups, kGroups, case_name);
INSTANTIATE_TEST_SUITE_P(Slow, ProcessFaultInGroups, kGroups, case_name);

// Under the label slow only.
class SilentFaultInGroups : public ProcessFault {};

TEST_P(SilentFaultInGroups, OneEndsWithoutAWord) {
  check_all("exit");
}

TEST_P(SilentFaultInGroups, OneStops) {
  check_all("stop");
}

INSTANTIATE_TEST_SUITE_P(Slow, SilentFaultInGroups, kGroups, case_name);

}  // namespace
}  // namespace forebay::testing
