// Ranks that meet in a rendezvous store of the program, and their operations.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "forebay/gloo_communicator.h"
#include "tests/api/fixture.h"

namespace forebay::api {
namespace {

// A store in this process, as a launcher's would be.
struct Texts {
  std::mutex mutex;
  std::map<std::string, std::string> texts;
  std::atomic<int> released{0};

  forebay_store_calls calls() {
    return {sizeof(forebay_store_calls), this, set, get, set_if_absent, remove, release};
  }
  static Texts& of(void* user) { return *static_cast<Texts*>(user); }
  static std::int32_t set(void* user, const char* name, const void* text, std::uint64_t bytes) {
    const std::lock_guard lock(of(user).mutex);
    of(user).texts[name].assign(static_cast<const char*>(text), bytes);
    return 0;
  }
  static std::int32_t get(void* user, const char* name, void* text, std::uint64_t capacity,
                          std::uint64_t* bytes) {
    const std::lock_guard lock(of(user).mutex);
    const auto found = of(user).texts.find(name);
    *bytes = found == of(user).texts.end() ? FOREBAY_ABSENT : found->second.size();
    if (found != of(user).texts.end() && *bytes <= capacity)
      std::memcpy(text, found->second.data(), found->second.size());
    return 0;
  }
  static std::int32_t set_if_absent(void* user, const char* name, const void* text, std::uint64_t bytes) {
    const std::lock_guard lock(of(user).mutex);
    of(user).texts.emplace(name, std::string(static_cast<const char*>(text), bytes));
    return 0;
  }
  static void remove(void* user, const char* name) {
    const std::lock_guard lock(of(user).mutex);
    of(user).texts.erase(name);
  }
  static void release(void* user) { ++of(user).released; }
};

class CApiRanks : public ::testing::TestWithParam<const char*> {};

TEST_P(CApiRanks, MeetInTheStoreOfTheProgramTwice) {
  if (GetParam() == std::string("gloo") && !gloo_available()) GTEST_SKIP() << "this build has no Gloo";
  constexpr int kRanks = 3;
  Texts texts;
  for (const char* const run : {"first", "second"}) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        const c::Options options{{"rank", std::to_string(rank)},
                                 {"size", std::to_string(kRanks)},
                                 {"store-prefix", run},
                                 {"communicator", GetParam()},
                                 {"deadline", "20000"}};
        forebay_store_calls calls = texts.calls();
        const auto device = c::make<c::Device>(forebay_device_open, "host", options);
        forebay_communicator* made = nullptr;
        ASSERT_OK(forebay_communicator_create(device, options, &calls, nullptr, &made));
        const c::Communicator ranks(made);
        float value = static_cast<float>(rank + 1);
        std::uint64_t bytes = 0;
        ASSERT_OK(forebay_all_reduce_staging(kRanks, 64, FOREBAY_FP32, &bytes));
        std::vector<std::byte> staging(bytes);
        ASSERT_OK(
            forebay_communicator_all_reduce(ranks, &value, 1, FOREBAY_FP32, staging.data(), 64, nullptr));
        ASSERT_OK(forebay_stream_synchronize(device, nullptr));
        EXPECT_EQ(value, 6.0f);
        std::int32_t all[kRanks];
        ASSERT_OK(forebay_communicator_exchange(ranks, &rank, sizeof(rank), all));
        for (int r = 0; r < kRanks; ++r) EXPECT_EQ(all[r], r);
        EXPECT_OK(forebay_communicator_status(ranks));
        const std::string report = c::get<const char*>(forebay_communicator_report, ranks);
        EXPECT_NE(report.find("\"size\": 3"), std::string::npos) << report;
        const std::string name = GetParam() == std::string("gloo") ? "gloo" : "shm";
        EXPECT_NE(report.find("\"name\": \"" + name + "\""), std::string::npos) << report;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(texts.released, 2 * kRanks);
}

INSTANTIATE_TEST_SUITE_P(Over, CApiRanks, ::testing::Values("auto", "shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST(CApiRanksAlone, NeedAllFunctionsOfAStore) {
  const One one;
  Texts texts;
  forebay_store_calls calls = texts.calls();
  calls.get = nullptr;
  forebay_communicator* made = nullptr;
  EXPECT_EQ(forebay_communicator_create(one.device, nullptr, &calls, nullptr, &made),
            FOREBAY_INVALID_ARGUMENT);
  EXPECT_NE(last_error().find("store lacks one of"), std::string::npos) << last_error();
  calls = texts.calls();
  calls.size = 8;
  EXPECT_EQ(forebay_communicator_create(one.device, nullptr, &calls, nullptr, &made),
            FOREBAY_INVALID_ARGUMENT);
}

TEST(CApiRanksAlone, AreToldThatTheStoreFailed) {
  const c::Options options{{"rank", "0"}, {"size", "2"}, {"deadline", "3000"}};
  const auto device = c::make<c::Device>(forebay_device_open, "host", options);
  Texts texts;
  forebay_store_calls calls = texts.calls();
  calls.get = [](void*, const char*, void*, std::uint64_t, std::uint64_t*) -> std::int32_t { return -1; };
  forebay_communicator* made = nullptr;
  EXPECT_EQ(forebay_communicator_create(device, options, &calls, nullptr, &made), FOREBAY_UNAVAILABLE);
  EXPECT_NE(last_error().find("the program's rendezvous store failed: get("), std::string::npos)
      << last_error();
  EXPECT_NE(last_error().find("returned -1"), std::string::npos) << last_error();
  calls.get = [](void*, const char*, void*, std::uint64_t, std::uint64_t* bytes) -> std::int32_t {
    *bytes = (1 << 24) + 1;
    return 0;
  };
  EXPECT_EQ(forebay_communicator_create(device, options, &calls, nullptr, &made), FOREBAY_UNAVAILABLE);
  EXPECT_NE(last_error().find("gave 16777217 bytes; use at most 16777216"), std::string::npos)
      << last_error();
  calls.get = [](void*, const char*, void*, std::uint64_t, std::uint64_t* bytes) -> std::int32_t {
    *bytes = 1 << 24;
    return 0;
  };
  EXPECT_NE(forebay_communicator_create(device, options, &calls, nullptr, &made), FOREBAY_OK);
  EXPECT_EQ(last_error().find("gave"), std::string::npos) << "the longest text: " << last_error();
  calls = texts.calls();
  calls.set = [](void*, const char*, const void*, std::uint64_t) -> std::int32_t { return 5; };
  EXPECT_EQ(forebay_communicator_create(device, options, &calls, nullptr, &made), FOREBAY_UNAVAILABLE);
  EXPECT_NE(last_error().find(": set("), std::string::npos) << last_error();
  EXPECT_NE(last_error().find("returned 5"), std::string::npos) << last_error();
}

TEST(CApiRanksAlone, AreToldThatOneRankFailed) {
  const One one;
  EXPECT_OK(forebay_communicator_abort(one.ranks, FOREBAY_PEER_LOST, "the power went out"));
  EXPECT_EQ(forebay_communicator_status(one.ranks), FOREBAY_PEER_LOST);
  EXPECT_NE(last_error().find("the power went out"), std::string::npos) << last_error();

  const One without_words;
  EXPECT_OK(forebay_communicator_abort(without_words.ranks, FOREBAY_PEER_LOST, ""));
  EXPECT_EQ(forebay_communicator_status(without_words.ranks), FOREBAY_PEER_LOST);
  EXPECT_NE(last_error().find("the program gave no reason"), std::string::npos) << last_error();
}

}  // namespace
}  // namespace forebay::api
