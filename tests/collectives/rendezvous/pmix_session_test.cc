// The launcher's key-value space over the fake PMIx: values, answers that are late, and each call that fails.
#include "collectives/rendezvous/pmix_session.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "collectives/rendezvous/rendezvous_store.h"
#include "tests/fakes/pmix/fake_pmix.h"

namespace forebay::internal {
namespace {

using fake_pmix::FakePmix;
using fake_pmix::kRefused;

class PmixSessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    library_ = dlopen(FOREBAY_FAKE_LIBPMIX, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    fake_ = reinterpret_cast<decltype(&::fake_pmix)>(dlsym(library_, "fake_pmix"))(true);
  }
  void TearDown() override {
    if (library_ != nullptr) dlclose(library_);
  }

  std::unique_ptr<PmixSession> open(int rank) {
    fake_->rank = static_cast<std::uint32_t>(rank);
    Result<std::unique_ptr<PmixSession>> session = PmixSession::open();
    EXPECT_TRUE(session.ok()) << session.status().to_string();
    return std::move(session).value();
  }
  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
  static std::chrono::steady_clock::time_point never() { return now() + std::chrono::hours(1); }

  void* library_ = nullptr;
  FakePmix* fake_ = nullptr;
};

TEST_F(PmixSessionTest, EachRankFetchesTheValueOfTheRankItNames) {
  for (const int size : {3, 4}) {
    std::vector<std::unique_ptr<PmixSession>> sessions;
    fake_->finalize_count = 0;
    for (int rank = 0; rank < size; ++rank) {
      sessions.push_back(open(rank));
      EXPECT_EQ(sessions.back()->rank(), rank);
      EXPECT_TRUE(sessions.back()->publish("key", "value of " + std::to_string(rank)).ok());
    }

    for (const auto& session : sessions) {
      for (int rank = 0; rank < size; ++rank) {
        const Result<std::string> value = session->fetch(rank, "key", never());
        ASSERT_TRUE(value.ok()) << value.status().to_string();
        EXPECT_EQ(value.value(), "value of " + std::to_string(rank));
      }
    }

    sessions.clear();
    EXPECT_EQ(fake_->finalize_count, size);
  }
}

TEST_F(PmixSessionTest, AValueThatIsNotThereYetIsAskedForAgainUntilTheLimit) {
  const std::unique_ptr<PmixSession> session = open(0);
  ASSERT_TRUE(session->publish("key", "value").ok());
  fake_->not_found_count = 3;

  EXPECT_EQ(session->fetch(0, "key", never()).value(), "value");
  EXPECT_EQ(fake_->get_count, 4);

  fake_->get_count = 0;
  EXPECT_EQ(session->fetch(0, "key", now()).status().code(), StatusCode::kTimeout);
  EXPECT_EQ(fake_->get_count, 1);
}

TEST_F(PmixSessionTest, AnAnswerMayComeWhenNobodyWaitsAnyMore) {
  std::unique_ptr<PmixSession> session = open(0);
  ASSERT_TRUE(session->publish("key", "value").ok());
  fake_->keeps_answers = true;

  const Status late = session->fetch(2, "key", now()).status();
  EXPECT_EQ(late.code(), StatusCode::kTimeout);
  EXPECT_NE(late.message().find("from rank 2"), std::string::npos) << late.message();
  session.reset();

  ASSERT_EQ(fake_->kept.size(), 1u);
  fake_->kept[0].first(pmix::kNotFound, nullptr, fake_->kept[0].second);
}

TEST_F(PmixSessionTest, AnAnswerWithoutATextIsNoValue) {
  const std::unique_ptr<PmixSession> session = open(0);
  ASSERT_TRUE(session->publish("key", "value").ok());

  fake_->type = pmix::kString + 1;
  EXPECT_EQ(session->fetch(0, "key", never()).status().code(), StatusCode::kUnavailable);
  fake_->type = pmix::kString;
  fake_->has_text = false;
  EXPECT_EQ(session->fetch(0, "key", never()).status().code(), StatusCode::kUnavailable);
}

TEST_F(PmixSessionTest, EachCallThatFailsIsToldWithPmixsWords) {
  const auto expect_refused = [](const Status& status, const std::string& action) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.to_string();
    EXPECT_EQ(status.message().find("cannot " + action + ": PMIx says REFUSED (-1); set FOREBAY_STORE"), 0u)
        << status.message();
  };
  fake_->init_result = kRefused;
  expect_refused(PmixSession::open().status(), "ask the launcher where the ranks meet");
  fake_->init_result = pmix::kSuccess;
  const std::unique_ptr<PmixSession> session = open(0);

  fake_->put_result = kRefused;
  expect_refused(session->publish("key", "value"), "tell the other ranks where to meet");
  fake_->put_result = pmix::kSuccess;
  fake_->commit_result = kRefused;
  expect_refused(session->publish("key", "value"), "tell the other ranks where to meet");
  fake_->get_result = kRefused;
  expect_refused(session->fetch(1, "key", never()).status(), "learn from rank 1 where the ranks meet");
}

TEST_F(PmixSessionTest, EveryMeetingOfAProgramHasAnAddressOfItsOwn) {
  fake_->rank = 0;
  for (int meeting = 0; meeting < 2; ++meeting) {
    const auto store = open_rendezvous({"pmix://job", nullptr, {0, 1, "same"}, "lo", never()});
    EXPECT_TRUE(store.ok()) << store.status().to_string();
  }

  EXPECT_EQ(fake_->committed.size(), 2u);
}

// Before any rank connects.
TEST_F(PmixSessionTest, ARankThatTheLauncherCallsOtherwiseIsRefused) {
  fake_->rank = 2;
  const auto opened = [](int rank) {
    return open_rendezvous({"pmix://job", nullptr, {rank, 3, "same"}, "lo", never()}).status();
  };

  const Status status = opened(1);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
  EXPECT_NE(status.message().find("is rank 1, but the launcher calls it rank 2"), std::string::npos)
      << status.message();

  // Every rank counts its meetings, so the key is one of many.
  for (int meeting = 0; meeting < 100; ++meeting)
    fake_->committed[{0, "forebay.store." + std::to_string(meeting)}] = "a secret and no port";
  EXPECT_EQ(opened(2).code(), StatusCode::kCorruption);
}

}  // namespace
}  // namespace forebay::internal
