// Spans of streams: events with times, read later, and given back.
#include "forebay/timeline.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

// The host's clock and the stream's events have no common time.
TEST_F(TimelineOfStreams, AreDroppedIfTheyBeginOnTheHost) {
  const std::size_t before = backend_->live_handle_count();
  timeline_.begin("track");
  timeline_.end("track", "from the host", *backend_, stream_);
  timeline_.begin("track", *backend_, stream_);
  timeline_.end("track", "to the host");
  synchronize();
  EXPECT_TRUE(timeline_.spans().empty());
  EXPECT_EQ(timeline_.dropped_count(), 0u);
  timeline_.release(*backend_);
  EXPECT_EQ(backend_->live_handle_count(), before);
}

// Times in microseconds from the first span of any rank on, tracks numbered in the order of their appearance.
TEST(TimelineText, HasEachSpanOfEachRank) {
  const auto span = [](const char* track, const char* name, int begin, int end) {
    return Timeline::Span{track, name, nanoseconds(begin), nanoseconds(end)};
  };
  const std::vector<std::vector<Timeline::Span>> by_rank = {
      {span("compute", "a", 5000, 7500), span("gather", "b", 6000, 6001), span("compute", "c", 9000, 9000)},
      {},
      {span("gather", "\xFF", 4000, 1'004'000)}};
  EXPECT_EQ(timeline_json(by_rank),
            R"({"displayTimeUnit":"ms","traceEvents":[)"
            R"({"dur":2.5,"name":"a","ph":"X","pid":0,"tid":0,"ts":1.0},)"
            R"({"dur":0.001,"name":"b","ph":"X","pid":0,"tid":1,"ts":2.0},)"
            R"({"dur":0.0,"name":"c","ph":"X","pid":0,"tid":0,"ts":5.0},)"
            R"({"args":{"name":"rank 0"},"name":"process_name","ph":"M","pid":0},)"
            R"({"args":{"name":"compute"},"name":"thread_name","ph":"M","pid":0,"tid":0},)"
            R"({"args":{"name":"gather"},"name":"thread_name","ph":"M","pid":0,"tid":1},)"
            "{\"dur\":1000.0,\"name\":\"\xEF\xBF\xBD\",\"ph\":\"X\",\"pid\":2,\"tid\":0,\"ts\":0.0},"
            R"({"args":{"name":"rank 2"},"name":"process_name","ph":"M","pid":2},)"
            R"({"args":{"name":"gather"},"name":"thread_name","ph":"M","pid":2,"tid":0}]})"
            "\n");
  EXPECT_EQ(timeline_json(std::vector<std::vector<Timeline::Span>>()),
            "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[]}\n");
}

// Spans as "track begin end"; the time of the busy track, and the part of it that nothing covers.
TEST(TimelineExposure, CountsTheTimeThatNothingCovers) {
  using Times = std::vector<std::pair<int, int>>;
  struct Case {
    Times busy;
    Times covers;
    int busy_time;
    int exposed_time;
  };
  const Case cases[] = {
      {{}, {{0, 9}}, 0, 0},
      {{{2, 6}}, {}, 4, 4},
      {{{2, 6}}, {{2, 6}}, 4, 0},
      {{{2, 6}}, {{0, 2}}, 4, 4},
      {{{6, 8}}, {{0, 2}, {3, 5}, {9, 10}}, 2, 2},
      {{{2, 6}}, {{6, 9}}, 4, 4},
      {{{2, 6}}, {{0, 3}}, 4, 3},
      {{{2, 6}}, {{5, 9}}, 4, 3},
      {{{2, 6}}, {{3, 4}, {4, 5}}, 4, 2},
      {{{2, 6}}, {{5, 9}, {0, 3}}, 4, 2},
      {{{2, 6}, {4, 8}}, {{3, 7}}, 6, 2},
      {{{2, 9}, {4, 6}}, {{8, 9}}, 7, 6},
      {{{2, 4}, {6, 8}}, {{3, 7}}, 4, 2},
      {{{2, 4}, {6, 8}, {20, 21}}, {{0, 30}}, 5, 0},
      {{{2, 4}, {6, 8}}, {{4, 6}, {8, 9}}, 4, 4},
  };
  for (const Case& one : cases) {
    std::vector<Timeline::Span> spans = {{"other", "", nanoseconds(0), nanoseconds(100)}};
    for (const auto& [begin, end] : one.busy)
      spans.push_back({"busy", "", nanoseconds(begin), nanoseconds(end)});
    for (const auto& [begin, end] : one.covers)
      spans.push_back({"cover", "", nanoseconds(begin), nanoseconds(end)});
    const Exposure found = exposure(spans, "busy", "cover");
    EXPECT_EQ(found.busy.count(), one.busy_time) << &one - cases;
    EXPECT_EQ(found.exposed.count(), one.exposed_time) << &one - cases;
  }
}

// A later end without a begin is no span, and spans of the host have the host's times.
TEST(TimelineOfTheHost, HasTimesOfItsClock) {
  nanoseconds now{10};
  Timeline timeline([&] { return now; });
  timeline.end("a", "none");
  timeline.begin("a");
  now = nanoseconds(15);
  timeline.begin("b");
  now = nanoseconds(25);
  timeline.end("a", "one");
  now = nanoseconds(40);
  timeline.end("b", "two");
  timeline.end("b", "none");
  const std::vector<Timeline::Span> spans = timeline.spans();

  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].track, "a");
  EXPECT_EQ(spans[0].name, "one");
  EXPECT_EQ(spans[0].begin, nanoseconds(10));
  EXPECT_EQ(spans[0].end, nanoseconds(25));
  EXPECT_EQ(spans[1].track, "b");
  EXPECT_EQ(spans[1].begin, nanoseconds(15));
  EXPECT_EQ(spans[1].end, nanoseconds(40));
  EXPECT_EQ(timeline.dropped_count(), 0u);
}

}  // namespace
}  // namespace forebay
