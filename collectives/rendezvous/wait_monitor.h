// WaitMonitor: one thread of a rank that watches the waits of all its other threads, for communicators whose
// threads cannot look around while they wait. It reports the waits to the other ranks through the rendezvous
// store, and ends a wait at its deadline with an error that names the blocking rank (wait_graph.h).
//
// A rank reports nothing before it has waited for a reporting period, so a run without delays reports
// nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "collectives/operation_book.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "collectives/wait_graph.h"

namespace forebay::internal {

// The waits that a rank reports to the others through the rendezvous store.
struct WaitReport {
  std::uint64_t number = 0;  // Reports of this rank before this one.
  std::vector<Wait> waits;   // The oldest first.
};

inline constexpr std::size_t kReportedWaitsMax = 8;
inline constexpr std::size_t kWaitTextMax = 256;

// Leaves out waits, ranks and text beyond the limits.
std::string encode(const WaitReport& report);
// False for bytes that encode() did not make.
bool decode(std::string_view bytes, WaitReport* report);

class WaitMonitor {
 public:
  // For `rank` of the world. The report of rank r is the store's text `prefix` + r.
  WaitMonitor(int rank, std::chrono::milliseconds deadline, std::shared_ptr<RendezvousStore> store,
              std::string prefix);
  ~WaitMonitor();
  WaitMonitor(const WaitMonitor&) = delete;
  WaitMonitor& operator=(const WaitMonitor&) = delete;

  // Errors: kUnavailable when no thread can be started.
  Status start();

  // An operation that a thread waits in, until destroyed. Rank numbers are those of the world.
  class Waiting {
   public:
    // `group` names the group of ranks in messages, is empty for all ranks, and outlives this. `wake` is
    // called when there is a verdict: the thread then has nothing more to wait for.
    Waiting(WaitMonitor& monitor, const Issued& issued, const std::string& group, std::vector<int> ranks,
            std::function<void()> wake);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    // It waits for these ranks now, and for no others.
    void expect(std::vector<int> ranks);
    // `rank` has come.
    void came(int rank);
    // All ranks have come; these have not finished.
    void finish(std::vector<int> ranks);
    // Ok until the deadline has passed, then the error.
    Status verdict() const;

   private:
    friend class WaitMonitor;
    WaitMonitor& monitor_;
    const Issued issued_;
    const std::string& group_;
    const std::function<void()> wake_;
    const std::chrono::steady_clock::time_point begin_;
    // Guarded by the monitor's mutex.
    std::vector<int> ranks_;
    bool came_ = false;
    Status verdict_;
  };

  // Ok if the rank that serves the store answers, or if no rank serves it; else the error that names that
  // rank. Waits for an answer at most as long as a report is valid.
  Status server_status();

 private:
  using Clock = std::chrono::steady_clock;
  struct Seen {
    WaitReport report;
    Clock::time_point changed;  // When a report with a new number was read.
  };

  void run() noexcept;
  void report(Clock::time_point now);
  void end_late_waits(Clock::time_point now);
  std::vector<Wait> own_waits(Clock::time_point now, std::chrono::nanoseconds age_min);
  // The waits that `rank` has reported lately.
  std::vector<Wait> waits_of(int rank, Clock::time_point now);
  std::string name(int rank) const { return prefix_ + std::to_string(rank); }
  void post(const WaitReport& report);
  // Whether the last report of this rank is in the store.
  bool is_acknowledged();
  Status silent_server();
  static Wait wait_of(const Waiting& waiting, Clock::time_point now);

  const int rank_;
  const std::chrono::milliseconds deadline_;
  const WaitReporting reporting_;
  const std::shared_ptr<RendezvousStore> store_;
  const std::string prefix_;
  std::thread thread_;
  // Used by the monitor's thread alone.
  std::map<int, Seen> seen_;  // By rank.
  bool reported_ = false;     // The last report had waits.

  std::mutex post_mutex_;
  // Guarded by post_mutex_.
  std::uint64_t report_number_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool ending_ = false;
  std::vector<Waiting*> waiting_;  // The oldest first.
};

}  // namespace forebay::internal
