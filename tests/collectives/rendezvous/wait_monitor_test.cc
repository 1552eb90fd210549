// Reports of waits over a store in memory: which of them are believed, and what a silent server leads to.
#include "collectives/rendezvous/wait_monitor.h"

#include <gtest/gtest.h>

#include <future>
#include <map>

#include "collectives/rendezvous/introduction.h"
#include "tests/support/let_others_run.h"

namespace forebay::internal {
namespace {

using namespace std::chrono_literals;

// The texts of all ranks. `server`: the rank that serves them, or -1.
class MemoryStore final : public RendezvousStore {
 public:
  explicit MemoryStore(int server) : server_(server) {}

  const std::string& where() const noexcept override { return where_; }
  Status write(const std::string& name, std::string_view content) override {
    const std::lock_guard lock(mutex_);
    if (!is_deaf_) texts_[name] = content;
    return {};
  }
  std::optional<std::string> read(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    const auto found = texts_.find(name);
    if (found == texts_.end()) return std::nullopt;
    return found->second;
  }
  std::optional<std::string> write_once(const std::string&, std::string_view) override { return {}; }
  void remove(const std::string& name) noexcept override {
    const std::lock_guard lock(mutex_);
    texts_.erase(name);
  }
  void post(const std::string& name, std::string_view content) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      ++post_count_;
    }
    static_cast<void>(write(name, content));
  }
  int server_rank() const noexcept override { return server_; }
  void abandon(const Status& cause) noexcept override {
    const std::lock_guard lock(mutex_);
    status_ = cause;
  }
  Status status() override {
    const std::lock_guard lock(mutex_);
    return status_;
  }

  void fail(StatusCode code) {
    const std::lock_guard lock(mutex_);
    status_ = Status(code, "the run has failed");
  }
  // From now on it takes no text.
  void be_deaf() {
    const std::lock_guard lock(mutex_);
    is_deaf_ = true;
  }
  int post_count() {
    const std::lock_guard lock(mutex_);
    return post_count_;
  }

 private:
  const std::string where_ = "memory";
  const int server_;
  std::mutex mutex_;
  std::map<std::string, std::string> texts_;
  Status status_;
  bool is_deaf_ = false;
  int post_count_ = 0;
};

const Issued kBarrier{.fingerprint = {.operation = Operation::kBarrier}};
const std::string kNoGroup;

// A wait for one rank, and the verdict on it.
class OneWait {
 public:
  OneWait(WaitMonitor& monitor, int rank) : OneWait(monitor, std::vector<int>{rank}) {}
  OneWait(WaitMonitor& monitor, const std::vector<int>& ranks)
      : waiting_(monitor, kBarrier, kNoGroup, ranks, [this] { woken_.set_value(); }) {}

  Status verdict() {
    EXPECT_EQ(is_over_.wait_for(60s), std::future_status::ready);
    return waiting_.verdict();
  }
  Status verdict_so_far() const { return waiting_.verdict(); }
  WaitMonitor::Waiting& waiting() { return waiting_; }

 private:
  std::promise<void> woken_;
  std::future<void> is_over_ = woken_.get_future();
  WaitMonitor::Waiting waiting_;
};

// Rank 1 waited for rank 2 when it was stopped. Its report is there still, and rank 1 is the one to name.
TEST(WaitMonitor, OnlyReportsThatGoOnAreBelieved) {
  const auto verdict_of_rank_0 = [](bool goes_on) {
    const auto store = std::make_shared<MemoryStore>(-1);
    WaitMonitor mine(0, 2s, store, "wait.");
    WaitMonitor other(1, 2s, store, "wait.");
    EXPECT_TRUE(mine.start().ok());
    if (goes_on) {
      EXPECT_TRUE(other.start().ok());
    } else {
      const WaitReport last{.number = 7, .waits = {{.what = "barrier", .ranks = {2}, .age = 2s}}};
      EXPECT_TRUE(store->write("wait.1", encode(last)).ok());
    }
    OneWait its(other, 2);
    OneWait wait(mine, 1);
    return wait.verdict();
  };

  const Status stopped = verdict_of_rank_0(false);
  EXPECT_EQ(stopped.code(), StatusCode::kTimeout);
  EXPECT_NE(stopped.message().find("on rank 0: rank 1 did not join"), std::string::npos) << stopped.message();
  const Status waits = verdict_of_rank_0(true);
  EXPECT_NE(waits.message().find("on rank 1: rank 2 did not join"), std::string::npos) << waits.message();
}

TEST(WaitMonitor, AWaitThatBeganLaterHasItsOwnDeadline) {
  const auto store = std::make_shared<MemoryStore>(-1);
  WaitMonitor monitor(0, 2s, store, "wait.");
  ASSERT_TRUE(monitor.start().ok());
  OneWait first(monitor, 1);
  // Its report shows that half of the time has passed.
  for (WaitReport report; report.waits.empty() || report.waits[0].age < 1s; testing::let_others_run()) {
    if (const auto text = store->read("wait.0")) {
      ASSERT_TRUE(decode(*text, &report));
    }
  }

  OneWait second(monitor, 1);
  EXPECT_FALSE(first.verdict().ok());
  EXPECT_TRUE(second.verdict_so_far().ok());
  EXPECT_FALSE(second.verdict().ok());
}

TEST(WaitMonitor, NamesTheRanksThatAreStillMissing) {
  const auto store = std::make_shared<MemoryStore>(-1);
  WaitMonitor monitor(0, 400ms, store, "wait.");
  ASSERT_TRUE(monitor.start().ok());
  {
    OneWait wait(monitor, {1, 2});
    wait.waiting().came(1);
    const std::string text = wait.verdict().message();
    EXPECT_NE(text.find(": rank 2 did not join"), std::string::npos) << text;
  }
  OneWait wait(monitor, {1, 2});
  wait.waiting().came(1);
  wait.waiting().came(2);
  wait.waiting().finish({1});
  const std::string text = wait.verdict().message();
  EXPECT_NE(text.find(": rank 1 did not finish"), std::string::npos) << text;
}

TEST(WaitMonitor, AReportGoesWithItsWaitOrWithItsMonitor) {
  const auto store = std::make_shared<MemoryStore>(-1);
  {
    WaitMonitor monitor(0, 2s, store, "wait.");
    ASSERT_TRUE(monitor.start().ok());
    {
      const OneWait wait(monitor, 1);
      while (!store->read("wait.0")) testing::let_others_run();
    }
    for (const auto limit = std::chrono::steady_clock::now() + 20s;
         store->read("wait.0") && std::chrono::steady_clock::now() < limit;)
      testing::let_others_run();
    EXPECT_FALSE(store->read("wait.0"));
    const OneWait wait(monitor, 1);
    while (!store->read("wait.0")) testing::let_others_run();
  }
  EXPECT_FALSE(store->read("wait.0"));
}

TEST(WaitMonitor, AServerThatSendsNoReportBackIsNamedAndAskedNoMore) {
  const auto store = std::make_shared<MemoryStore>(0);
  WaitMonitor monitor(1, 2s, store, "wait.");
  EXPECT_TRUE(monitor.server_status().ok());

  store->be_deaf();
  const Status silent = monitor.server_status();
  EXPECT_EQ(silent.code(), StatusCode::kTimeout);
  EXPECT_NE(silent.message().find("rank 0, which serves it, did not answer"), std::string::npos)
      << silent.message();
  EXPECT_EQ(store->status().code(), StatusCode::kTimeout);

  store->fail(StatusCode::kPeerLost);
  EXPECT_EQ(monitor.server_status().code(), StatusCode::kPeerLost);
  // The reports that a silent server has not taken do not fill its connection.
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(monitor.server_status().ok());
  EXPECT_LT(store->post_count(), 32);
  // The rank that serves the store does not ask itself.
  EXPECT_TRUE(WaitMonitor(0, 2s, store, "wait.").server_status().ok());
}

TEST(WaitReport, BytesThatNoReportHasAreRefused) {
  const WaitReport report{.number = 3,
                          .waits = {{.what = "barrier", .ranks = {1, 2}, .came = true, .age = 5s}}};
  const std::string bytes = encode(report);
  WaitReport read;
  ASSERT_TRUE(decode(bytes, &read));
  EXPECT_EQ(read.number, 3u);
  ASSERT_EQ(read.waits.size(), 1u);
  EXPECT_EQ(read.waits[0].ranks, report.waits[0].ranks);
  EXPECT_EQ(read.waits[0].age, 5s);

  EXPECT_FALSE(decode(bytes + '\0', &read));
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(decode(bytes.substr(0, size), &read)) << size;
  WaitReport beyond = report;
  beyond.waits[0].ranks = {kRanksMax};
  EXPECT_FALSE(decode(encode(beyond), &read));
  beyond.waits[0].ranks = {kRanksMax - 1};
  EXPECT_TRUE(decode(encode(beyond), &read));
  const std::size_t came_at = bytes.find("barrier") + 7;
  std::string both = bytes;
  both[came_at] = 2;
  EXPECT_FALSE(decode(both, &read));
  // Waits beyond the limit are left out, and a report that claims more is refused.
  beyond.waits.assign(kReportedWaitsMax + 1, {.what = "barrier", .ranks = {1}});
  ASSERT_TRUE(decode(encode(beyond), &read));
  EXPECT_EQ(read.waits.size(), kReportedWaitsMax);
  beyond.waits.pop_back();
  std::string more = encode(beyond);
  const std::string one = encode(WaitReport{.waits = {beyond.waits[0]}}).substr(9);
  more[8] = static_cast<char>(kReportedWaitsMax + 1);
  EXPECT_FALSE(decode(more + one, &read));
}

}  // namespace
}  // namespace forebay::internal
