#include <algorithm>
#include <utility>

#include "forebay/check.h"
#include "forebay/host_clock.h"

namespace forebay {
namespace {

// The clock the calling thread takes part in. One is enough: everything on a thread shares its clock.
thread_local const HostClock* adopted_clock = nullptr;

}  // namespace

struct HostClock::Waiter {
  const std::function<bool()>& ready;
  const Nanoseconds deadline;
  const bool registered;
  std::size_t index;   // Its place in waiters_.
  bool woken = false;  // Told to look again, and has not run since.
  std::condition_variable condition;
};

HostClock::HostClock(Mode mode) noexcept : mode_(mode), start_(std::chrono::steady_clock::now()) {}

HostClock::Nanoseconds HostClock::now_locked() const noexcept {
  return mode_ == Mode::kVirtual ? virtual_now_ : std::chrono::steady_clock::now() - start_;
}

HostClock::Nanoseconds HostClock::now() {
  if (mode_ == Mode::kReal) return now_locked();
  const std::lock_guard lock(mutex_);
  return now_locked();
}

bool HostClock::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready,
                     Nanoseconds deadline) {
  FOREBAY_ASSERT(lock.owns_lock() && lock.mutex() == &mutex_, "wait() needs a lock on the clock's mutex");
  if (ready()) return true;
  if (deadline != kNever && now_locked() >= deadline) return false;

  const bool is_virtual = mode_ == Mode::kVirtual;
  Waiter waiter{.ready = ready,
                .deadline = deadline,
                .registered = adopted_clock == this,
                .index = waiters_.size(),
                .condition = {}};
  waiters_.push_back(&waiter);
  const auto is_woken = [&waiter] { return waiter.woken; };
  bool is_ready = false;
  for (;;) {
    if (is_virtual) {
      if (waiter.registered) ++registered_waiting_count_;
      advance_locked();
      waiter.condition.wait(lock, is_woken);
      --woken_count_;
    } else if (deadline == kNever) {
      waiter.condition.wait(lock, is_woken);
    } else {
      waiter.condition.wait_until(lock, start_ + deadline, is_woken);
    }
    waiter.woken = false;
    // A woken waiter may find that another thread was faster and it is no longer ready; then it waits on.
    is_ready = ready();
    if (is_ready || (deadline != kNever && now_locked() >= deadline)) break;
  }
  waiters_.back()->index = waiter.index;
  std::swap(waiters_[waiter.index], waiters_.back());
  waiters_.pop_back();
  // A registered thread runs now and time stands still. An unregistered one has held it since it was woken,
  // and nobody else may come by to move it on.
  if (is_virtual && !waiter.registered) advance_locked();
  return is_ready;
}

void HostClock::wake_locked(Waiter& waiter) {
  waiter.woken = true;
  if (mode_ == Mode::kVirtual) {
    ++woken_count_;
    if (waiter.registered) --registered_waiting_count_;
  }
  waiter.condition.notify_one();
}

bool HostClock::wake_ready_locked() {
  bool any = false;
  for (Waiter* waiter : waiters_) {
    if (waiter->woken || !waiter->ready()) continue;
    wake_locked(*waiter);
    any = true;
  }
  return any;
}

void HostClock::notify() {
  wake_ready_locked();
}

// Moves the time to the earliest deadline if nothing else can happen. A waiter that is ready but has not been
// told, or has been told but has not run, can happen: without looking for those, a thread that makes another
// ready and then waits itself would let the time jump past the other's work.
void HostClock::advance_locked() {
  if (mode_ == Mode::kReal || woken_count_ > 0 || registered_waiting_count_ < registered_count_) return;
  if (wake_ready_locked()) return;
  Nanoseconds earliest = kNever;
  for (const Waiter* waiter : waiters_) earliest = std::min(earliest, waiter->deadline);
  if (earliest == kNever) return;  // Only a thread that is not registered can change anything now.
  virtual_now_ = std::max(virtual_now_, earliest);
  for (Waiter* waiter : waiters_) {
    if (waiter->deadline <= virtual_now_) wake_locked(*waiter);
  }
}

void HostClock::sleep(Nanoseconds duration) {
  if (duration <= Nanoseconds::zero()) return;
  std::unique_lock lock(mutex_);
  const Nanoseconds now = now_locked();
  const Nanoseconds deadline = duration < kNever - now ? now + duration : kNever;
  if (mode_ == Mode::kVirtual && deadline != kNever && waiters_.empty() &&
      registered_count_ == (adopted_clock == this ? 1 : 0)) {
    virtual_now_ = deadline;  // Nobody else can act before.
    return;
  }
  wait(
      lock, [] { return false; }, deadline);
}

HostClock::Registration::Registration(HostClock& clock) {
  if (clock.mode_ == Mode::kReal) return;
  clock_ = &clock;
  const std::lock_guard lock(clock.mutex_);
  ++clock.registered_count_;
}

HostClock::Registration::Registration(Registration&& other) noexcept
    : clock_(std::exchange(other.clock_, nullptr)), adopted_(std::exchange(other.adopted_, false)) {}

HostClock::Registration& HostClock::Registration::operator=(Registration&& other) noexcept {
  if (this != &other) {
    end();
    clock_ = std::exchange(other.clock_, nullptr);
    adopted_ = std::exchange(other.adopted_, false);
  }
  return *this;
}

HostClock::Registration::~Registration() {
  end();
}

void HostClock::Registration::adopt() {
  if (clock_ == nullptr || adopted_) return;
  FOREBAY_CHECK(adopted_clock == nullptr, "this thread takes part in a clock already");
  adopted_clock = clock_;
  adopted_ = true;
}

void HostClock::Registration::end() noexcept {
  if (clock_ == nullptr) return;
  if (adopted_) {
    FOREBAY_CHECK(adopted_clock == clock_, "an adopted Registration must end on the thread that adopted it");
    adopted_clock = nullptr;
  }
  HostClock& clock = *std::exchange(clock_, nullptr);
  adopted_ = false;
  const std::lock_guard lock(clock.mutex_);
  --clock.registered_count_;
  clock.advance_locked();
}

}  // namespace forebay
