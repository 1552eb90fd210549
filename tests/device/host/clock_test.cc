#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "forebay/host_clock.h"

namespace forebay {
namespace {

using std::chrono::milliseconds;

TEST(HostClock, VirtualTimeJumpsToTheDeadlineAndNoFurther) {
  HostClock clock(HostClock::Mode::kVirtual);
  HostClock::Registration self(clock);
  self.adopt();
  std::unique_lock lock(clock.mutex());
  EXPECT_FALSE(clock.wait(
      lock, [] { return false; }, milliseconds(7)));
  lock.unlock();
  EXPECT_EQ(clock.now(), milliseconds(7));
}

TEST(HostClock, ConcurrentSleepsTakeTheLongestAndNotTheSum) {
  HostClock clock(HostClock::Mode::kVirtual);
  std::vector<std::thread> threads;
  std::vector<HostClock::Registration> registrations;
  for (int i = 0; i < 4; ++i) registrations.emplace_back(clock);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&clock, i, mine = std::move(registrations[static_cast<std::size_t>(i)])]() mutable {
      mine.adopt();
      for (int n = 0; n < 10; ++n) clock.sleep(milliseconds(i + 1));
      EXPECT_GE(clock.now(), milliseconds(10 * (i + 1)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(clock.now(), milliseconds(40));
}

// Four threads pass a turn round, each with a deadline that must never come: whoever makes the next ready and
// then waits must not let the time jump past it.
TEST(HostClock, PassingATurnTakesNoTime) {
  HostClock clock(HostClock::Mode::kVirtual);
  constexpr int kThreads = 4;
  constexpr int kRounds = 500;
  int turn = 0;
  int timeouts = 0;
  std::vector<HostClock::Registration> registrations;
  for (int i = 0; i < kThreads; ++i) registrations.emplace_back(clock);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i, mine = std::move(registrations[static_cast<std::size_t>(i)])]() mutable {
      mine.adopt();
      std::unique_lock lock(clock.mutex());
      for (int n = 0; n < kRounds; ++n) {
        const int goal = n * kThreads + i;
        if (!clock.wait(
                lock, [&] { return turn == goal; }, milliseconds(1)))
          ++timeouts;
        ++turn;
        clock.notify();
      }
      lock.unlock();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(timeouts, 0);
  EXPECT_EQ(turn, kThreads * kRounds);
  EXPECT_EQ(clock.now(), milliseconds(0));
}

TEST(HostClock, RealTimeReachesItsDeadline) {
  HostClock clock;
  std::unique_lock lock(clock.mutex());
  const auto deadline = clock.now() + milliseconds(2);
  EXPECT_FALSE(clock.wait(
      lock, [] { return false; }, deadline));
  EXPECT_GE(clock.now(), deadline);
}

}  // namespace
}  // namespace forebay
