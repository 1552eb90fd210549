// HostClock: what host streams, `local` ranks and modelled transfers wait on.
//
// In real time it is one mutex and the threads that wait under it. In virtual time it is a discrete-event clock: the
// time stands still while any registered thread runs, and when all of them wait and none is ready it jumps to the
// earliest deadline. Scripted durations then cost no real time, and overlap is measured exactly on a noisy machine.
//
// State that readiness depends on is guarded by mutex(): change it with the mutex held, then call notify().
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>

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

  std::mutex& mutex() noexcept { return mutex_; }

  // Waits, with `lock` on mutex(), until ready() is true or now() reaches `deadline`. Returns ready().
  // `ready` is called with the mutex held, by this thread and by notifying ones, and must not block.
  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready, Nanoseconds deadline = kNever);

  // Wakes the waiters that have become ready. Requires: mutex() held.
  void notify();

  // Waits for `duration` (virtual: lets the time pass; real: does wait). Used for scripted durations.
  void sleep(Nanoseconds duration);

  // Virtual time: a thread that takes part. Time stands still while a registered thread does not wait. A thread that
  // creates participants registers them before they start (Registration is adopted by moving it into the thread).
  // Threads that are not registered may wait too; they then never hold time back.
  class Registration {
   public:
    Registration() noexcept = default;
    explicit Registration(HostClock& clock);
    Registration(Registration&& other) noexcept;
    Registration& operator=(Registration&& other) noexcept;
    ~Registration();

    // Makes the calling thread the registered one; wait() and sleep() called on it then count as waiting.
    void adopt();

   private:
    HostClock* clock_ = nullptr;
  };

 private:
  struct Waiter;

  Nanoseconds now_locked() const noexcept;
  void advance_locked();

  const Mode mode_;
  const std::chrono::steady_clock::time_point start_;
  std::mutex mutex_;
  // Guarded by mutex_.
  Nanoseconds virtual_now_{0};
  std::int64_t registered_count_ = 0;
  std::int64_t registered_waiting_count_ = 0;
  std::list<Waiter*> waiters_;
};

}  // namespace forebay
