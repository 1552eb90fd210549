// Handles: ends in any order, ends twice, and one call at a time.

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "tests/api/fixture.h"
#include "tests/support/thread_state.h"

namespace forebay::api {
namespace {

TEST(CApiHandles, MayBeDestroyedInAnyOrder) {
  std::array<int, 4> order{0, 1, 2, 3};
  do {
    One one;
    one.commit();
    one.step(1);
    c::call(forebay_step_begin, one.engine);
    c::call(forebay_micro_step_begin, one.engine, 0);
    c::call(forebay_acquire, one.engine, one.first, 0, nullptr);  // Alive to the end.
    for (const int which : order) {
      if (which == 0) one.device = {};
      if (which == 1) one.group = {};
      if (which == 2) one.ranks = {};
      if (which == 3) one.engine = {};
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(CApiHandles, ThatWereDestroyedAreRefusedAndSoIsASecondDestruction) {
  forebay_timeline* timeline = nullptr;
  ASSERT_OK(forebay_timeline_create(&timeline));
  forebay_timeline_destroy(timeline);
  EXPECT_EQ(forebay_timeline_begin(timeline, "track"), FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("forebay_timeline_begin: timeline was destroyed"), std::string::npos)
      << last_error();
  forebay_timeline_destroy(timeline);
  EXPECT_NE(last_error().find("destroyed before"), std::string::npos) << last_error();
  // The record is used again, under another name.
  forebay_timeline* next = nullptr;
  ASSERT_OK(forebay_timeline_create(&next));
  EXPECT_NE(next, timeline);
  EXPECT_EQ(forebay_timeline_begin(timeline, "track"), FOREBAY_INVALID_ARGUMENT);
  forebay_timeline_destroy(next);
}

// Cancelled within the call, it would leave locks behind, and the process would end.
TEST(CApiThreads, ACancelledThreadEndsAfterItsCall) {
  const c::Options options = {{"deadline", "30000"}};
  const auto device = c::make<c::Device>(forebay_device_open, "host", options);
  const auto group = c::make<c::LocalGroup>(forebay_local_group_create, 2, options);
  struct Waiting {
    c::Communicator ranks;
    std::atomic<pid_t> thread{0};
    std::int32_t result = -1;
  } waiting{c::make<c::Communicator>(forebay_local_group_communicator, group, 0, device)};
  const auto other = c::make<c::Communicator>(forebay_local_group_communicator, group, 1, device);
  pthread_t thread;
  const auto wait = [](void* given) -> void* {
    auto& mine = *static_cast<Waiting*>(given);
    mine.thread = ::gettid();
    mine.result = forebay_communicator_barrier(mine.ranks);
    ::pthread_testcancel();
    return nullptr;
  };
  ASSERT_EQ(::pthread_create(&thread, nullptr, wait, &waiting), 0);
  while (waiting.thread == 0 || !forebay::testing::is_waiting(waiting.thread)) std::this_thread::yield();
  EXPECT_OK(forebay_communicator_status(waiting.ranks)) << "any thread may ask while one waits";
  ASSERT_EQ(::pthread_cancel(thread), 0);

  EXPECT_OK(forebay_communicator_barrier(other));

  void* ended = nullptr;
  ASSERT_EQ(::pthread_join(thread, &ended), 0);
  EXPECT_EQ(ended, PTHREAD_CANCELED);
  EXPECT_EQ(waiting.result, FOREBAY_OK);
}

TEST(CApiThreads, AThreadThatExitsInAVisitorLeavesTheEngineUsable) {
  One one;
  one.commit();
  std::thread([&] {
    forebay_engine_visit(
        one.engine,
        [](void*, std::int32_t, std::int32_t, const char*, const float*, std::uint64_t) {
          ::pthread_exit(nullptr);
        },
        nullptr);
  }).join();
  one.step(1);
}

TEST(CApiThreads, AThreadThatCannotBeMadeIsNoDefect) {
  One one;
  one.commit();
  const std::int32_t code = forebay_engine_visit(
      one.engine,
      [](void*, std::int32_t, std::int32_t, const char*, const float*, std::uint64_t) {
        throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
      },
      nullptr);
  EXPECT_EQ(code, FOREBAY_UNAVAILABLE);
  EXPECT_NE(last_error().find("too many threads (ulimit -u)"), std::string::npos) << last_error();
}

TEST(CApiThreads, AnotherSystemErrorIsNotTakenForIt) {
  One one;
  one.commit();
  const std::int32_t code = forebay_engine_visit(
      one.engine,
      [](void*, std::int32_t, std::int32_t, const char*, const float*, std::uint64_t) {
        throw std::system_error(std::make_error_code(std::errc::permission_denied));
      },
      nullptr);
  EXPECT_EQ(code, FOREBAY_INTERNAL);
  EXPECT_EQ(last_error().find("ulimit"), std::string::npos) << last_error();
}

TEST(CApiThreads, AnAllocationThatFailsIsALackOfMemory) {
  One one;
  one.commit();
  std::int32_t code = forebay_engine_visit(
      one.engine,
      [](void*, std::int32_t, std::int32_t, const char*, const float*, std::uint64_t) {
        throw std::bad_alloc();
      },
      nullptr);
  EXPECT_EQ(code, FOREBAY_OUT_OF_MEMORY);
  EXPECT_EQ(last_error(), "forebay_engine_visit: the host has no memory for it; free some");
  code = forebay_engine_visit(
      one.engine,
      [](void*, std::int32_t, std::int32_t, const char*, const float*, std::uint64_t) {
        throw std::length_error("vector");
      },
      nullptr);
  EXPECT_EQ(code, FOREBAY_OUT_OF_MEMORY);
  EXPECT_EQ(last_error(), "forebay_engine_visit: a size is larger than any memory; give a smaller one");
}

// The threads of a device and an engine do not exist in a process that was forked.
TEST(CApiHandles, OfTheProcessThatForkedAreRefused) {
  One one{{{"deadline", "3000"}, {"stage", "3"}, {"offload", "optimizer"}}};
  one.commit();
  const c::Options options;
  c::Timeline timelines[2];
  for (c::Timeline& timeline : timelines) timeline = c::make<c::Timeline>(forebay_timeline_create);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    bool right = forebay_step_begin(one.engine) == FOREBAY_INVALID_ARGUMENT &&
                 last_error().find("engine was made before fork()") != std::string::npos;
    forebay_engine_destroy(one.engine);
    right = right && last_error().find("nothing was destroyed") != std::string::npos;
    forebay_device_close(one.device);
    // Options and timelines are plain data, and new handles work, also after these were destroyed.
    right = right && forebay_options_set(options, "stage", "2") == FOREBAY_OK;
    right = right && forebay_timeline_begin(timelines[0], "track") == FOREBAY_OK;
    for (c::Timeline& timeline : timelines) timeline = {};
    One own;
    own.commit();
    own.step(1);
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  one.step(1);
}

TEST(CApiHandles, OfAnotherKindAreRefused) {
  const One one;
  auto* const wrong = reinterpret_cast<forebay_engine*>(static_cast<forebay_device*>(one.device));
  EXPECT_EQ(forebay_engine_commit(wrong), FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(last_error(),
            "forebay_engine_commit: engine is a handle of another kind; give a handle of this kind");
  forebay_engine_destroy(wrong);
  const char* json = nullptr;
  EXPECT_OK(forebay_device_report(one.device, &json));
}

TEST(CApiHandles, AreInOneCallAtATime) {
  One one;
  one.commit();
  struct Seen {
    forebay_engine* engine;
    std::int32_t inside = 0;
    std::int32_t outside = 0;
    std::string text;
  } seen{one.engine};
  ASSERT_OK(forebay_engine_visit(
      one.engine,
      [](void* user, std::int32_t, std::int32_t, const char*, const float*, std::uint64_t) {
        auto& s = *static_cast<Seen*>(user);
        s.inside = forebay_step_begin(s.engine);
        std::thread([&s] {
          s.outside = forebay_step_begin(s.engine);
          s.text = forebay_last_error();
        }).join();
      },
      &seen));
  EXPECT_EQ(seen.inside, FOREBAY_INVALID_ARGUMENT);
  EXPECT_EQ(seen.outside, FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(seen.text.find("is in another call"), std::string::npos) << seen.text;
  EXPECT_OK(forebay_step_begin(one.engine));
}

TEST(CApiHandles, AreUsedByOneThreadAfterAnother) {
  One one;
  std::thread([&] { one.commit(); }).join();
  forebay_step_result result{};
  std::thread([&] { result = one.step(1); }).join();
  EXPECT_GT(result.grad_norm, 0);
}

TEST(CApiHandles, KeepTheErrorOfEachThread) {
  EXPECT_EQ(forebay_engine_commit(nullptr), FOREBAY_INVALID_ARGUMENT);
  const std::string mine = last_error();
  EXPECT_EQ(mine, "forebay_engine_commit: engine is null; give a handle that was made before");
  std::thread([] {
    EXPECT_EQ(last_error(), "");
    EXPECT_EQ(forebay_device_open(nullptr, nullptr, nullptr), FOREBAY_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(last_error(), mine);
}

TEST(CApiHandles, AreSafeWhileThreadsMakeUseAndDestroyThem) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 2000; ++i) {
        forebay_options* options = nullptr;
        ASSERT_OK(forebay_options_create(&options));
        ASSERT_OK(forebay_options_set(options, "stage", "3"));
        forebay_options_destroy(options);
        EXPECT_EQ(forebay_options_set(options, "stage", "3"), FOREBAY_INVALID_ARGUMENT);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace forebay::api
