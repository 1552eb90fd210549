// TimedWork: the work under way on a model backend in virtual time, and the resources that it shares. It says
// when the next piece of work ends and moves the clock there.
//
// Work on one resource shares it evenly, so a piece of work that joins makes the others slower from then on.
// Streams and their order are the backend's.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "forebay/host_clock.h"
#include "forebay/model_backend.h"

namespace forebay::internal {

// Pieces of work, one after the other.
class Task {
 public:
  using Nanoseconds = HostClock::Nanoseconds;

  void add(const ModelWork& work) { phases_.push_back({work, Nanoseconds(0), nullptr}); }
  // Ends not before `time`.
  void add_until(Nanoseconds time, const char* name) {
    phases_.push_back({ModelWork{.name = name}, time, nullptr});
  }
  void add_signal(std::shared_ptr<const ModelSignal> signal, const char* name) {
    phases_.push_back({ModelWork{.name = name}, Nanoseconds(0), std::move(signal)});
  }
  bool empty() const noexcept { return phases_.empty(); }
  const char* name() const noexcept { return phases_.empty() ? "" : phases_.front().work.name; }
  // The time at which it would end, if it began at `begin` and shared nothing.
  Nanoseconds end_alone(Nanoseconds begin) const;

 private:
  friend class TimedWork;
  struct Phase {
    ModelWork work;
    Nanoseconds until;
    std::shared_ptr<const ModelSignal> signal;  // Not null: ends when it is announced.
  };

  std::deque<Phase> phases_;  // The phases that have not ended.
  // The first phase, once it has begun.
  bool begun_ = false;
  bool delayed_ = false;  // Until delay_end_.
  Nanoseconds delay_end_{0};
  std::array<double, 4> left_ns_{};  // By part, alone.
};

// Threads: one at a time.
class TimedWork {
 public:
  using Nanoseconds = HostClock::Nanoseconds;

  explicit TimedWork(HostClock& clock) : clock_(clock) {}

  Nanoseconds now() { return clock_.now(); }
  // Requires: `task` is not empty and stays until it has ended.
  void begin(Task& task);
  bool any() const noexcept { return !active_.empty(); }
  // Moves to the next change of any task, but not past `limit`. The tasks that have ended are empty then.
  // Returns the time that passed. Requires: any(), or a limit.
  Nanoseconds advance(Nanoseconds limit = HostClock::kNever);
  // The tasks that the last advance() ended.
  std::size_t ended_count() const noexcept { return ended_count_; }
  const std::array<double, kModelResourcesMax>& busy_seconds() const noexcept { return busy_; }
  void clear_busy() noexcept { busy_.fill(0); }

 private:
  void begin_phase(Task& task, Nanoseconds now);
  void count_parts(const Task& task);
  bool has_ended(const Task& task, Nanoseconds now) const;
  static bool is_announced(const Task& task);
  // Lets the time pass up to `end`, or to the first announcement of a signal. Returns the new time.
  Nanoseconds pass(Nanoseconds begin, Nanoseconds end);

  HostClock& clock_;
  std::vector<Task*> active_;  // In the order they began.
  std::size_t ended_count_ = 0;
  std::array<int, kModelResourcesMax> users_{};
  std::array<double, kModelResourcesMax> busy_{};
};

}  // namespace forebay::internal
