// LocalWorld: the state that all local ranks of a run share: a clock, with the mutex that guards all state of
// the local communicators; the first failure; and the waits in progress.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "collectives/wait_graph.h"
#include "forebay/host_clock.h"
#include "forebay/local_communicator.h"
#include "forebay/status.h"

namespace forebay::internal {

// A wait in progress. `describe(now)` is called with the world's mutex held; its ranks are the world's.
struct LocalWait {
  int rank;  // The rank that waits, in the world.
  std::function<Wait(HostClock::Nanoseconds now)> describe;
};

class LocalWorld {
 public:
  using Nanoseconds = HostClock::Nanoseconds;
  using Lock = std::unique_lock<std::mutex>;

  LocalWorld(int size, const LocalOptions& options);

  int size() const noexcept { return size_; }
  const LocalOptions& options() const noexcept { return options_; }
  std::mutex& mutex() const noexcept { return clock_.mutex(); }

  // Takes the mutex in virtual time, as deadline() does.
  Nanoseconds now() const { return clock_.now(); }
  // When an operation that begins now comes to its deadline.
  Nanoseconds deadline() const;

  // --- with the mutex held ---
  const Status& failure() const noexcept { return failure_; }
  bool has_failed() const noexcept { return !failure_.ok(); }
  // Keeps the first failure and wakes everyone.
  void fail(Status cause);
  void notify() { clock_.notify(); }

  // Waits until ready(), without a deadline.
  void await(Lock& lock, const std::function<bool()>& ready) { clock_.wait(lock, ready); }
  // Waits until ready() or, failing the world, until `limit`. The other ranks see `wait` meanwhile. Returns
  // ready().
  bool await(Lock& lock, const LocalWait& wait, const std::function<bool()>& ready, Nanoseconds limit);

  // Each returns early when the world fails, and releases the mutex for a moment.
  void pass_time(Lock& lock, Nanoseconds duration);
  // The time that the modelled link takes for `bytes`.
  void pass_link_time(Lock& lock, std::uint64_t bytes);

 private:
  void fail_late(const LocalWait& wait, Nanoseconds now);

  const int size_;
  const std::unique_ptr<HostClock> own_clock_;  // Null where the options bring one.
  const LocalOptions options_;
  HostClock& clock_;
  // Guarded by mutex().
  Status failure_;
  std::vector<const LocalWait*> waits_;  // The oldest first.
};

}  // namespace forebay::internal
