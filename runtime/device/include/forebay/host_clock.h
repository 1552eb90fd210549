// HostClock: host streams, `local` ranks and modelled transfers wait on it.
//
// In real time it is a mutex with waiting threads. In virtual time it is a discrete-event clock: time stands
// still while any registered thread runs, and when all of them wait and none is ready, time jumps to the
// earliest deadline. Modelled durations then cost no real time, and overlap is exact on a noisy machine.
//
// State that readiness depends on is guarded by mutex(): change it with the mutex held, then call notify().
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "forebay/language.h"

namespace forebay {

class HostClock {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  enum class Mode : std::uint8_t { kReal, kVirtual };
  static constexpr Nanoseconds kNever = Nanoseconds::max();

  explicit HostClock(Mode mode = Mode::kReal) noexcept;
  HostClock(const HostClock&) = delete;
  HostClock& operator=(const HostClock&) = delete;

  Mode mode() const noexcept { return mode_; }

  // Time since the clock was made. Takes the mutex in virtual time.
  Nanoseconds now();
  // The same with the mutex held.
  Nanoseconds now_locked() const noexcept;

  std::mutex& mutex() noexcept { return mutex_; }

  // Waits, with `lock` on mutex(), until ready() is true or now() reaches `deadline`. Returns ready().
  // `ready` is called with the mutex held, by this thread and by notifying ones, and must not block.
  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready,
            Nanoseconds deadline = kNever);

  // Wakes the waiters that have become ready.
  // Requires: mutex() held. Cost: one call of `ready` per waiter that was not woken yet.
  void notify();

  // Waits for `duration`, in virtual or real time. Used for modelled durations.
  void sleep(Nanoseconds duration);

  // Virtual time: registers a thread. Time stands still while a registered thread does not wait here, so a
  // registered thread that blocks elsewhere (a join, another mutex) until time passes blocks for ever.
  // Register a thread before it starts, and move the Registration into the thread, which adopts it. Threads
  // that are not registered may wait too; they hold time back only from being woken until wait() returns. A
  // main thread that queues work at exact times registers itself and adopts. In real time a Registration does
  // nothing.
  //
  // Threads: an adopted Registration ends on the thread that adopted it. A thread adopts one at a time.
  class Registration {
   public:
    Registration() noexcept = default;
    // Requires: mutex() not held (so for the destructor).
    explicit Registration(HostClock& clock);
    Registration(Registration&& other) noexcept;
    Registration& operator=(Registration&& other) noexcept;
    ~Registration();

    // Makes the calling thread the registered one; wait() and sleep() called on it then count as waiting.
    void adopt();

   private:
    void end() noexcept;

    HostClock* clock_ = nullptr;  // Null: moved from, default-made, or of a real-time clock.
    bool adopted_ = false;
  };

 private:
  struct Waiter;

  void wake_locked(Waiter& waiter);
  bool wake_ready_locked();
  void advance_locked();

  const Mode mode_;
  const std::chrono::steady_clock::time_point start_;
  std::mutex mutex_;
  // Guarded by mutex_. The counts are kept in virtual time only.
  Nanoseconds virtual_now_{0};
  std::int64_t registered_count_ = 0;
  std::int64_t registered_waiting_count_ = 0;  // Registered threads inside wait() that were not woken.
  std::int64_t woken_count_ = 0;               // Waiters that were woken and have not run yet.
  std::vector<Waiter*> waiters_;
};

}  // namespace forebay
