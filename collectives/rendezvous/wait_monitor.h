// WaitKeeper: where a thread cannot look around while it waits, one thread of the process does it for all. It
// tells the other ranks what this one waits in, through the rendezvous store, and judges a wait at its
// deadline by what they tell (wait_graph.h).
//
// A rank tells nothing before it has waited for a beat, so a run that goes well tells nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "collectives/operation_book.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/wait_graph.h"

namespace forebay::internal {

// What a rank tells: how often it has told before, and its waits, the oldest first.
struct WaitReport {
  std::uint64_t beat = 0;
  std::vector<Wait> waits;
};
inline constexpr std::size_t kReportedWaitsMax = 8;
inline constexpr std::size_t kWaitTextMax = 256;
std::string encode(const WaitReport& report);
// False for what encode() did not make.
bool decode(std::string_view bytes, WaitReport* report);

class WaitKeeper {
 public:
  // Of `rank` of the world. Texts are called `prefix` and a rank.
  WaitKeeper(int rank, std::chrono::milliseconds deadline, std::shared_ptr<RendezvousStore> store,
             std::string prefix);
  ~WaitKeeper();
  WaitKeeper(const WaitKeeper&) = delete;
  WaitKeeper& operator=(const WaitKeeper&) = delete;

  // Errors: kUnavailable when there is no thread to be had.
  Status start();

  // An operation that a thread waits in, until destroyed. Ranks are the world's.
  class Waiting {
   public:
    // `group` is what messages call the group, empty for all ranks; it lives as long. `wake` is called when
    // there is a verdict: the thread then has no more to wait for.
    Waiting(WaitKeeper& keeper, const Issued& issued, const std::string& group, std::vector<int> ranks,
            std::function<void()> wake);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    // It waits for these now, and for nobody else.
    void expect(std::vector<int> ranks);
    void came(int rank);
    // All have come; these have not finished.
    void finish(std::vector<int> ranks);
    // Ok until the deadline has passed.
    Status verdict() const;

   private:
    friend class WaitKeeper;
    WaitKeeper& keeper_;
    const Issued issued_;
    const std::string& group_;
    const std::function<void()> wake_;
    const std::chrono::steady_clock::time_point begin_;
    // Guarded by the keeper's mutex.
    std::vector<int> ranks_;
    bool came_ = false;
    Status verdict_;
  };

  // Whether the rank that serves the store still does: ok, or the error that names it. Where the store is no
  // rank's, always ok. Waits for an answer at most as long as a report holds.
  Status server_status();

 private:
  using Clock = std::chrono::steady_clock;
  struct Heard {
    WaitReport report;
    Clock::time_point changed;  // When its beat was another the last time.
  };

  void run() noexcept;
  void tell(Clock::time_point now);
  void judge_late(Clock::time_point now);
  std::vector<Wait> own_waits(Clock::time_point now, std::chrono::nanoseconds age_min);
  // What `rank` has told lately.
  std::vector<Wait> hear(int rank, Clock::time_point now);
  Status judge_one(const Wait& wait, Clock::time_point now);
  std::string name(int rank) const { return prefix_ + std::to_string(rank); }
  void post(const WaitReport& report);
  // Whether what this rank has told last is in the store.
  bool is_heard();
  Status silent_server();
  static Wait wait_of(const Waiting& waiting, Clock::time_point now);

  const int rank_;
  const std::chrono::milliseconds deadline_;
  const WaitRhythm rhythm_;
  const std::shared_ptr<RendezvousStore> store_;
  const std::string prefix_;
  std::thread thread_;
  // Of the keeper's thread.
  std::map<int, Heard> heard_;
  bool told_ = false;

  std::mutex post_mutex_;
  // Guarded by post_mutex_.
  std::uint64_t beat_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool ending_ = false;
  std::vector<Waiting*> waiting_;  // The oldest first.
};

}  // namespace forebay::internal
