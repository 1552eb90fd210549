#include "collectives/local/world.h"

#include <chrono>
#include <cmath>
#include <utility>

namespace forebay::internal {
namespace {

// Saturates, so that a deadline of "never" stays one.
HostClock::Nanoseconds after(HostClock::Nanoseconds start, HostClock::Nanoseconds duration) {
  return duration > HostClock::kNever - start ? HostClock::kNever : start + duration;
}

}  // namespace

LocalWorld::LocalWorld(int size, const LocalOptions& options)
    : size_(size),
      own_clock_(options.clock == nullptr ? std::make_unique<HostClock>() : nullptr),
      options_(options),
      clock_(options.clock != nullptr ? *options.clock : *own_clock_) {}

HostClock::Nanoseconds LocalWorld::deadline() const {
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(HostClock::kNever);
  if (options_.deadline >= limit) return HostClock::kNever;
  return after(clock_.now(), options_.deadline);
}

void LocalWorld::fail(Status cause) {
  if (failure_.ok()) failure_ = std::move(cause);
  clock_.notify();
}

bool LocalWorld::await(Lock& lock, const LocalWait& wait, const std::function<bool()>& ready,
                       Nanoseconds limit) {
  struct Listed {
    Listed(std::vector<const LocalWait*>& list, const LocalWait& one) : waits(list), wait(one) {
      waits.push_back(&wait);
    }
    ~Listed() { std::erase(waits, &wait); }
    std::vector<const LocalWait*>& waits;
    const LocalWait& wait;
  };
  const Listed listed(waits_, wait);
  if (clock_.wait(lock, ready, limit)) return true;
  fail_late(wait, limit);
  return false;
}

void LocalWorld::fail_late(const LocalWait& wait, Nanoseconds now) {
  fail(explain_timeout(wait.rank, wait.describe(now), options_.deadline, [&](int rank) {
    std::vector<Wait> found;
    for (const LocalWait* other : waits_) {
      if (other->rank != rank) continue;
      if (Wait one = other->describe(now); !one.ranks.empty()) found.push_back(std::move(one));
    }
    return found;
  }));
}

void LocalWorld::pass_time(Lock& lock, Nanoseconds duration) {
  if (duration.count() <= 0) return;
  // In virtual time the clock takes its mutex to tell the time.
  lock.unlock();
  const Nanoseconds start = clock_.now();
  lock.lock();
  clock_.wait(
      lock, [this] { return has_failed(); }, after(start, duration));
}

void LocalWorld::pass_link_time(Lock& lock, std::uint64_t bytes) {
  Nanoseconds duration = options_.latency;
  if (options_.bytes_per_second > 0) {
    duration += Nanoseconds(std::llround(static_cast<double>(bytes) / options_.bytes_per_second * 1e9));
  }
  pass_time(lock, duration);
}

}  // namespace forebay::internal
