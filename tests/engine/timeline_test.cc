// Spans of streams: events with times, read later, and given back.
#include "forebay/timeline.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "forebay/error.h"
#include "runtime/device/host/script.h"

namespace forebay {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

class TimelineOfStreams : public ::testing::Test {
 protected:
  TimelineOfStreams()
      : backend_(value_or_throw(ScriptedHostBackend::create({.clock = &clock_}))),
        stream_(value_or_throw(backend_->stream_create())) {}
  ~TimelineOfStreams() override { EXPECT_TRUE(backend_->stream_destroy(stream_).ok()); }

  // Queues work that takes this time.
  void work(nanoseconds time) {
    struct Work {
      HostClock* clock;
      nanoseconds time;
    };
    const HostFunction function = [](void* argument) {
      const std::unique_ptr<Work> queued(static_cast<Work*>(argument));
      queued->clock->sleep(queued->time);
    };
    ++work_count_;
    ASSERT_TRUE(backend_->call_host(stream_, function, new Work{&clock_, time}).ok());
  }
  void synchronize() { ASSERT_TRUE(backend_->stream_synchronize(stream_).ok()); }

  HostClock clock_{HostClock::Mode::kVirtual};
  Timeline timeline_{[this] { return clock_.now(); }};
  std::unique_ptr<ScriptedHostBackend> backend_;
  Stream stream_;
  std::uint64_t work_count_ = 0;
};

TEST_F(TimelineOfStreams, HaveTheTimesOfTheirStreamAndQueueNoHostFunctions) {
  timeline_.begin("track", *backend_, stream_);
  work(milliseconds(3));
  timeline_.begin("track", *backend_, stream_);
  work(milliseconds(5));
  timeline_.end("track", "inner", *backend_, stream_);
  timeline_.end("track", "outer", *backend_, stream_);
  synchronize();

  const std::vector<Timeline::Span> spans = timeline_.spans();

  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].name, "inner");
  EXPECT_EQ(spans[0].begin, milliseconds(3));
  EXPECT_EQ(spans[0].end, milliseconds(8));
  EXPECT_EQ(spans[1].name, "outer");
  EXPECT_EQ(spans[1].begin, milliseconds(0));
  EXPECT_EQ(spans[1].end, milliseconds(8));
  EXPECT_EQ(backend_->call_count(HostCall::kCallHost), work_count_);
  timeline_.release(*backend_);
}

TEST_F(TimelineOfStreams, UseTheirEventsAgain) {
  constexpr int kSpans = 5000;
  for (int i = 0; i < kSpans; ++i) {
    timeline_.begin("track", *backend_, stream_);
    work(milliseconds(1));
    timeline_.end("track", std::to_string(i), *backend_, stream_);
    if (i % 20 == 0) synchronize();
  }
  synchronize();

  const std::vector<Timeline::Span> spans = timeline_.spans();

  ASSERT_EQ(spans.size(), std::size_t{kSpans});
  for (int i = 0; i < kSpans; ++i) {
    const Timeline::Span& span = spans[static_cast<std::size_t>(i)];
    ASSERT_EQ(span.name, std::to_string(i));
    ASSERT_EQ(span.end - span.begin, milliseconds(1)) << i;
  }
  EXPECT_LT(backend_->call_count(HostCall::kEventCreate), 600u);
  timeline_.release(*backend_);
}

// Spans whose work has not run yet count too.
TEST_F(TimelineOfStreams, BeyondTheLimitAreDroppedAndCounted) {
  constexpr std::size_t kLimit = 3;
  Timeline timeline([this] { return clock_.now(); }, kLimit);
  const auto span = [&](const char* name) {
    timeline.begin("track", *backend_, stream_);
    work(milliseconds(1));
    timeline.end("track", name, *backend_, stream_);
  };
  for (const char* name : {"a", "b", "c", "d"}) span(name);
  synchronize();

  ASSERT_EQ(timeline.spans().size(), kLimit);
  EXPECT_EQ(timeline.spans().back().name, "c");
  EXPECT_EQ(timeline.dropped_count(), 1u);
  span("e");
  EXPECT_EQ(timeline.dropped_count(), 2u);
  timeline.release(*backend_);
}

TEST_F(TimelineOfStreams, AreGivenBackWithTheBackend) {
  const std::size_t before = backend_->live_handle_count();
  timeline_.begin("track", *backend_, stream_);
  timeline_.end("track", "ended", *backend_, stream_);
  timeline_.begin("track", *backend_, stream_);  // Never ends.
  synchronize();

  timeline_.release(*backend_);

  EXPECT_EQ(backend_->live_handle_count(), before);
  timeline_.end("track", "late", *backend_, stream_);  // Its begin is gone.
  ASSERT_EQ(timeline_.spans().size(), 1u);
  EXPECT_EQ(timeline_.spans()[0].name, "ended");
  timeline_.release(*backend_);
  EXPECT_EQ(backend_->live_handle_count(), before);
}

TEST_F(TimelineOfStreams, AreDroppedWhereTheBackendRefuses) {
  const Status full(StatusCode::kOutOfMemory, "no more events");
  backend_->add_fault({HostCall::kEventRecord, 2, full});
  for (const char* name : {"refused", "whole"}) {
    timeline_.begin("track", *backend_, stream_);
    timeline_.end("track", name, *backend_, stream_);
  }
  synchronize();
  ASSERT_EQ(timeline_.spans().size(), 1u);
  EXPECT_EQ(timeline_.spans()[0].name, "whole");
  timeline_.release(*backend_);
}

}  // namespace
}  // namespace forebay
