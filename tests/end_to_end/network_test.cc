// Training over a network of hosts that the test makes and that share nothing but their cables. The bytes
// sent in the report agree with the kernel's count and with theory. When a host or its cable fails, the
// others end with one first failure and one committed step. Slow tests put a fault at every collective, and
// measure steps over slow cables.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/end_to_end/fault_run.h"
#include "tests/support/network_hosts.h"
#include "tests/support/slow.h"

namespace forebay::testing {
namespace {

using Json = nlohmann::json;
using SteadyClock = std::chrono::steady_clock;

constexpr int kHosts = 4;

class Network : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = NetworkHosts::unavailable(); !reason.empty()) GTEST_SKIP() << reason;
    if (!FOREBAY_TEST_GLOO) GTEST_SKIP() << "this forebay was built without Gloo (libgloo-dev)";
    hosts_ = std::make_unique<NetworkHosts>(kHosts);
  }

  std::unique_ptr<Process> start(int host, int size, const std::vector<std::string>& command) const {
    return std::make_unique<Process>(
        hosts_->on(host, command),
        Process::Variables{
            {"FOREBAY_RANK", std::to_string(host)},
            {"FOREBAY_SIZE", std::to_string(size)},
            {"FOREBAY_LOCAL_RANK", "0"},
            {"FOREBAY_LOCAL_SIZE", "1"},
            {"FOREBAY_STORE", "tcp://" + NetworkHosts::address(0) + ":7077"},
            {"FOREBAY_SECRET", "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"}});
  }

  TemporaryDirectory directory_;
  std::unique_ptr<NetworkHosts> hosts_;
};

// --- overlap ---

class SlowLink : public Network, public ::testing::WithParamInterface<int> {};

// Compute is sleep and the cables take nearly all the time of a collective, so other work on this machine
// matters little. The theory: each pass takes as long as its compute or its collectives, whichever is longer,
// and the first gather and the last reduction have nothing to hide behind.
TEST_P(SlowLink, HidesAllThatComputeCanHide) {
  constexpr int kRanks = 3;
  constexpr int kUnits = 8;
  constexpr int kElements = kRanks * 512 * 128;
  const int stage = GetParam();
  for (int host = 0; host < kRanks; ++host) hosts_->slow_down(host, "200mbit");
  std::vector<std::unique_ptr<Process>> ranks;
  for (int host = 0; host < kRanks; ++host) {
    ranks.push_back(start(host, kRanks,
                          {FOREBAY_OVERLAP_PROBE, std::to_string(stage), std::to_string(kUnits),
                           std::to_string(kElements), "0.25", "0.5", "0.9", "2", "4"}));
  }
  std::vector<Finished> finished;
  for (const auto& rank : ranks) finished.push_back(rank->finish(std::chrono::seconds(120)));
  for (const Finished& one : finished) ASSERT_EQ(one.exit_code, 0) << one.output;

  std::istringstream lines(finished[0].output);
  int steps = 0;
  for (std::string line; std::getline(lines, line);) {
    double gather = 0;
    double reduce = 0;
    double forward = 0;
    double measured = 0;
    if (std::sscanf(line.c_str(), "gather %lf reduce %lf forward %lf step %lf", &gather, &reduce, &forward,
                    &measured) != 4)
      continue;
    ++steps;
    // At stage 3 two units are still there when the backward pass begins.
    const double ahead = kUnits * gather;
    const double behind = kUnits * reduce + (stage == 3 ? (kUnits - 2) * gather : 0);
    const double expected =
        std::max(ahead, kUnits * forward) + std::max(behind, kUnits * 2 * forward) + gather + reduce;
    std::printf(
        "stage %d, a gather takes %.2f of a unit's forward pass: step %.1f ms, theory %.1f ms (%.3f)\n",
        stage, gather / forward, measured, expected, measured / expected);
    EXPECT_NEAR(measured, expected, 0.1 * expected) << "stage " << stage << ", forward " << forward << " ms";
  }
  EXPECT_EQ(steps, 5);
}

INSTANTIATE_TEST_SUITE_P(Slow, SlowLink, ::testing::Values(1, 2, 3),
                         [](const auto& info) { return "stage" + std::to_string(info.param); });

// --- bytes ---

struct Model {
  int layers;
  int hidden;
};

struct Measured {
  std::vector<InterfaceBytes> kernel;  // By host, of the whole run.
  Json report;
};

class NetworkBytes : public Network, public ::testing::WithParamInterface<int> {
 protected:
  Measured run(const Model& model, int stage, int steps) {
    std::vector<InterfaceBytes> before;
    for (int host = 0; host < kHosts; ++host) before.push_back(hosts_->bytes(host));
    const std::string path = directory_ / ("report-" + std::to_string(steps));
    std::vector<std::unique_ptr<Process>> ranks;
    for (int host = 0; host < kHosts; ++host) {
      ranks.push_back(start(host, kHosts,
                            {FOREBAY_GPT,
                             "--layers",
                             std::to_string(model.layers),
                             "--hidden",
                             std::to_string(model.hidden),
                             "--heads",
                             "2",
                             "--sequence",
                             "8",
                             "--batch",
                             "1",
                             "--threads",
                             "1",
                             "--stage",
                             std::to_string(stage),
                             "--steps",
                             std::to_string(steps),
                             "--quiet",
                             "--report",
                             path}));
    }
    for (const auto& rank : ranks) {
      const Finished finished = rank->finish();
      EXPECT_EQ(finished.exit_code, 0) << finished.output;
    }
    Measured result;
    for (int host = 0; host < kHosts; ++host) {
      const InterfaceBytes after = hosts_->bytes(host);
      const InterfaceBytes& first = before[static_cast<std::size_t>(host)];
      result.kernel.push_back({after.sent - first.sent, after.received - first.received});
    }
    std::ifstream file(path);
    result.report = Json::parse(file, nullptr, false);
    return result;
  }
};

TEST_P(NetworkBytes, AreThoseOfTheReportAndOfTheory) {
  const int stage = GetParam();
  constexpr int kShort = 1;
  constexpr int kLong = 3;
  constexpr double kPerStep = 1.0 / (kLong - kShort);
  for (const Model model : {Model{40, 96}, Model{32, 128}}) {
    SCOPED_TRACE(std::to_string(model.layers) + " layers of " + std::to_string(model.hidden));
    // The bytes before the first step and after the last cancel out.
    const Measured less = run(model, stage, kShort);
    const Measured more = run(model, stage, kLong);
    if (HasFailure()) return;
    ASSERT_EQ(more.report["communicator"], "gloo") << more.report.dump();
    const double psi = more.report["parameters"].get<double>() * 4;
    const double theory = (stage == 3 ? 3 : 2) * psi * (kHosts - 1) / kHosts;
    double mean_sent = 0;
    double mean_received = 0;
    for (int host = 0; host < kHosts; ++host) {
      const auto h = static_cast<std::size_t>(host);
      const double sent = static_cast<double>(more.kernel[h].sent - less.kernel[h].sent) * kPerStep;
      const double received =
          static_cast<double>(more.kernel[h].received - less.kernel[h].received) * kPerStep;
      const Json& rank = more.report["ranks"][h];
      const double told_sent = rank["sent_bytes_per_step"].get<double>();
      const double told_received = rank["received_bytes_per_step"].get<double>();
      EXPECT_NEAR(sent / told_sent, 1.0, 0.02) << "host " << host;
      EXPECT_NEAR(received / told_received, 1.0, 0.02) << "host " << host;
      EXPECT_NEAR(sent / theory, 1.0, 0.05) << "host " << host;
      EXPECT_NEAR(received / theory, 1.0, 0.05) << "host " << host;
      mean_sent += sent / kHosts;
      mean_received += received / kHosts;
      std::cout << "stage " << stage << ", host " << host << ": sent " << sent / theory << ", received "
                << received / theory << " of theory\n";
    }
    EXPECT_NEAR(mean_sent / theory, 1.0, 0.03);
    EXPECT_NEAR(mean_received / theory, 1.0, 0.03);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, NetworkBytes, ::testing::Values(0, 2, 3),
                         [](const auto& info) { return "stage" + std::to_string(info.param); });

// --- faults ---

constexpr int kSteps = 3;
constexpr std::chrono::milliseconds kDeadline{4'000};
constexpr std::chrono::seconds kMoment{8};

class NetworkFault : public Network {
 protected:
  static constexpr int kRanks = 3;
  static constexpr int kStage = 2;

  std::unique_ptr<Process> probe(int rank, const std::vector<std::string>& fault,
                                 std::chrono::milliseconds deadline = kDeadline) const {
    std::vector<std::string> words{FOREBAY_FAULT_PROBE, "auto", std::to_string(kStage),
                                   std::to_string(kSteps), std::to_string(deadline.count())};
    words.insert(words.end(), fault.begin(), fault.end());
    return start(rank, kRanks, words);
  }

  std::vector<Told> run_undisturbed(std::chrono::milliseconds deadline = kDeadline) const {
    std::vector<std::unique_ptr<Process>> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(probe(rank, {}, deadline));
    std::vector<Told> told;
    for (const auto& rank : ranks) {
      const Finished finished = rank->finish();
      EXPECT_NE(finished.output.find("ready gloo"), std::string::npos) << finished.output;
      told.push_back(read_told(finished.output));
      EXPECT_TRUE(told.back().done) << finished.output;
    }
    return told;
  }

  // Does `what` to host 1 at the first, a middle and the last collective, or at every one. `isolated`: the
  // host itself hears nothing of the others any more, and may name any rank.
  void check(const std::vector<std::string>& kind, bool isolated, const std::function<void(int)>& what) {
    constexpr int kFaulty = 1;
    const std::vector<Told> undisturbed = run_undisturbed();
    if (HasFailure()) return;
    const unsigned long long count = undisturbed[0].operations.back();
    std::set<unsigned long long> operations{0, count / 2, count - 1};
    for (unsigned long long i = 0; is_slow_test() && i < count; ++i) operations.insert(i);
    for (const unsigned long long operation : operations) {
      SCOPED_TRACE(kind[0] + " at collective " + std::to_string(operation) + " of " + std::to_string(count));
      const std::string go = directory_ / ("go-" + std::to_string(operation));
      std::vector<std::unique_ptr<Process>> ranks;
      for (int rank = 0; rank < kRanks; ++rank)
        ranks.push_back(probe(rank, {kind[0], std::to_string(kFaulty), std::to_string(operation), go}));
      if (kind[0] == "pause") {
        ASSERT_TRUE(ranks[kFaulty]->wait_for_output("paused\n"));
        what(kFaulty);
        std::ofstream(go) << "go";
      }
      const SteadyClock::time_point begun = SteadyClock::now();
      std::vector<Finished> finished;
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank == kFaulty && kind[0] == "stop") {
          finished.emplace_back();
          continue;
        }
        finished.push_back(ranks[static_cast<std::size_t>(rank)]->finish(std::chrono::seconds(40)));
      }
      EXPECT_LT(SteadyClock::now() - begun, kDeadline + kMoment);
      const Told survivors = expect_whole(undisturbed, finished, isolated ? kFaulty : -1);
      EXPECT_NE(survivors.cause.find("rank 1"), std::string::npos) << survivors.cause;
      const unsigned long long expected = committed_by(undisturbed[0], kStage, operation);
      EXPECT_LE(survivors.committed_step, expected) << survivors.cause;
      EXPECT_GE(survivors.committed_step + 1, expected) << survivors.cause;
      ranks.clear();
      if (HasFailure()) return;
      hosts_ = nullptr;  // The next run has whole cables.
      hosts_ = std::make_unique<NetworkHosts>(kHosts);
    }
  }

  void lose_a_host() { check({"kill"}, true, {}); }
  void hang_a_host() { check({"stop"}, true, {}); }
  void partition_the_network() {
    check({"pause"}, true, [&](int host) { hosts_->partition(host); });
  }
  void reset_all_connections() {
    check({"pause"}, false, [&](int host) { hosts_->reset_connections(host); });
  }
};

class SlowNetworkFault : public NetworkFault {};

TEST_F(NetworkFault, AHostIsLost) {
  lose_a_host();
}
TEST_F(SlowNetworkFault, AHostIsLost) {
  lose_a_host();
}

TEST_F(NetworkFault, AHostHangs) {
  hang_a_host();
}
TEST_F(SlowNetworkFault, AHostHangs) {
  hang_a_host();
}

TEST_F(NetworkFault, TheNetworkIsPartitioned) {
  partition_the_network();
}
TEST_F(SlowNetworkFault, TheNetworkIsPartitioned) {
  partition_the_network();
}

TEST_F(NetworkFault, AllConnectionsOfAHostAreReset) {
  reset_all_connections();
}
TEST_F(SlowNetworkFault, AllConnectionsOfAHostAreReset) {
  reset_all_connections();
}

TEST_F(NetworkFault, ACableThatLosesATwentiethChangesNoBit) {
  if (const std::string reason = NetworkHosts::lossy_unavailable(); !reason.empty()) GTEST_SKIP() << reason;
  constexpr std::chrono::milliseconds kPatient{60'000};
  const std::vector<Told> undisturbed = run_undisturbed(kPatient);
  if (HasFailure()) return;
  const unsigned seed = std::random_device{}();
  std::cout << "FOREBAY_SEED=" << seed << "\n";
  hosts_->make_lossy(1, 0.05, std::chrono::milliseconds(5), seed);
  const std::vector<Told> lossy = run_undisturbed(kPatient);
  for (std::size_t rank = 0; rank < lossy.size(); ++rank)
    EXPECT_EQ(lossy[rank].digests, undisturbed[rank].digests);
  EXPECT_GT(hosts_->lost_count(), 0u);
}

}  // namespace
}  // namespace forebay::testing
