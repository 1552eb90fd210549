// The model backend in virtual time: the durations of queued work, shared resources, host functions that take
// time, and the account of a stream's time.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "forebay/model_backend.h"
#include "forebay/stream_call.h"

namespace forebay {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr int kCompute = 0;
constexpr int kDown = 1;
constexpr int kUp = 2;
constexpr int kFill = 3;

// 1 GB/s each way; a kernel of n bytes takes n nanoseconds.
class Timing : public ModelTiming {
 public:
  ModelWork copy(ModelCopy kind, std::uint64_t bytes) const override {
    copies.push_back(kind);
    ModelWork work{.name = kind == ModelCopy::kToHost ? "down" : "up"};
    work.add(kind == ModelCopy::kToHost ? kDown : kUp, static_cast<double>(bytes) * 1e-9);
    return work;
  }
  ModelWork fill(std::uint64_t bytes) const override {
    ModelWork work{.name = "fill"};
    work.add(kFill, static_cast<double>(bytes) * 1e-9);
    return work;
  }
  ModelWork fp32_products(const char* name, double m, double n, double k, double count) const override {
    return kernel(name, static_cast<std::uint64_t>(m * n * k * count));
  }
  ModelWork kernel(const char* name, std::uint64_t bytes) const override {
    ModelWork work{.name = name};
    work.add(kCompute, static_cast<double>(bytes) * 1e-9);
    return work;
  }
  nanoseconds queue_time() const override { return queue; }

  nanoseconds queue{0};
  mutable std::vector<ModelCopy> copies;
};

ModelWork compute(double milliseconds, const char* name = "compute") {
  ModelWork work{.name = name};
  work.add(kCompute, milliseconds * 1e-3);
  return work;
}

class ModelBackendTiming : public ::testing::Test {
 protected:
  ModelBackendTiming() : backend_(open()) {
    for (Stream& stream : streams_) stream = value_or_throw(backend_->stream_create());
  }
  std::unique_ptr<ModelBackend> open() {
    return value_or_throw(ModelBackend::create({.timing = &timing_, .clock = &clock_}));
  }
  Event recorded(Stream stream) {
    const Event event = value_or_throw(backend_->event_create());
    throw_if_error(backend_->event_record(event, stream));
    return event;
  }
  void work(double milliseconds, Stream stream, const char* name = "compute") {
    throw_if_error(backend_->work(compute(milliseconds, name), stream));
  }
  // Waits for the stream; the virtual time since the test began.
  double finish(Stream stream) {
    throw_if_error(backend_->stream_synchronize(stream));
    return std::chrono::duration<double, std::milli>(backend_->now()).count();
  }
  std::map<std::string, double> account() {
    std::map<std::string, double> times;
    for (const ModelStreamTime& one : backend_->watched())
      times[(one.own ? "own " : "") + one.name] +=
          std::chrono::duration<double, std::milli>(one.time).count();
    return times;
  }

  HostClock clock_{HostClock::Mode::kVirtual};
  Timing timing_;
  std::unique_ptr<ModelBackend> backend_;
  Stream streams_[3];
};

TEST_F(ModelBackendTiming, NeedsAVirtualClock) {
  HostClock real;
  EXPECT_EQ(ModelBackend::create({.timing = &timing_}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ModelBackend::create({.timing = &timing_, .clock = &real}).status().code(),
            StatusCode::kInvalidArgument);
  const auto untimed = value_or_throw(ModelBackend::create({}));
  const Stream stream = value_or_throw(untimed->stream_create());
  EXPECT_EQ(untimed->work(compute(1), stream).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      untimed->wait_for(std::make_shared<ModelSignal>(clock_), "recv", stream).message(),
      "cannot wait for a signal on model: nothing takes time here; give ModelBackendOptions a timing and "
      "a virtual clock");
  // Its time is that of the machine.
  const nanoseconds begin = std::chrono::steady_clock::now().time_since_epoch();
  const nanoseconds now = untimed->now();
  EXPECT_GE(now, begin);
  EXPECT_LE(now, nanoseconds(std::chrono::steady_clock::now().time_since_epoch()));
  throw_if_error(untimed->stream_destroy(stream));
}

TEST_F(ModelBackendTiming, QueueingTakesNoTimeAndWaitingDoes) {
  work(3, streams_[0]);
  work(4, streams_[0]);
  EXPECT_EQ(backend_->now(), nanoseconds(0));
  EXPECT_DOUBLE_EQ(finish(streams_[0]), 7);
  EXPECT_EQ(clock_.now(), milliseconds(7));
}

TEST_F(ModelBackendTiming, StreamsOnDifferentResourcesOverlap) {
  std::byte* const block = value_or_throw(backend_->alloc(10'000'000));
  std::vector<std::byte> host(10'000'000);
  throw_if_error(backend_->copy_async(block, host.data(), host.size(), streams_[1]));
  throw_if_error(backend_->copy_async(host.data(), block, host.size(), streams_[2]));
  work(10, streams_[0]);
  finish(streams_[0]);
  finish(streams_[1]);
  EXPECT_DOUBLE_EQ(finish(streams_[2]), 10);
  throw_if_error(backend_->free(block));
}

TEST_F(ModelBackendTiming, CopiesAndFillsTakeTheTimeOfTheirKind) {
  std::byte* const block = value_or_throw(backend_->alloc(4'000'000));
  std::vector<std::byte> host(2'000'000);
  for (const auto& [target, source] :
       std::vector<std::pair<std::byte*, std::byte*>>{{block, host.data()},
                                                      {host.data(), block},
                                                      {block, block + 2'000'000},
                                                      {host.data(), host.data() + 1'000'000}}) {
    throw_if_error(backend_->copy_async(target, source, 1'000'000, streams_[0]));
  }
  throw_if_error(backend_->fill_async(block, 0, 3'000'000, streams_[0]));

  EXPECT_DOUBLE_EQ(finish(streams_[0]), 7);

  EXPECT_EQ(timing_.copies, (std::vector<ModelCopy>{ModelCopy::kToDevice, ModelCopy::kToHost,
                                                    ModelCopy::kOnDevice, ModelCopy::kOnHost}));
  throw_if_error(backend_->free(block));
}

// The figures of an empty copy would be those of its call alone.
TEST_F(ModelBackendTiming, NoBytesTakeNoTime) {
  std::byte bytes[2] = {};
  throw_if_error(backend_->copy_async(bytes, bytes + 1, 0, streams_[0]));
  throw_if_error(backend_->fill_async(nullptr, 0, 0, streams_[0]));

  EXPECT_DOUBLE_EQ(finish(streams_[0]), 0);

  EXPECT_TRUE(timing_.copies.empty());
}

TEST_F(ModelBackendTiming, AFailedStreamTakesNoMoreTime) {
  std::byte* const block = value_or_throw(backend_->alloc(1'000'000));
  throw_if_error(backend_->call_host(
      streams_[0], [](void*) { throw Error(Status(StatusCode::kInternal, "x")); }, nullptr));
  work(5, streams_[0]);
  throw_if_error(backend_->fill_async(block, 0, 1'000'000, streams_[0]));

  EXPECT_EQ(backend_->stream_synchronize(streams_[0]).code(), StatusCode::kInternal);

  EXPECT_EQ(backend_->now(), nanoseconds(0));
  throw_if_error(backend_->free(block));
}

// A nanosecond is not lost, and rounding makes none.
TEST_F(ModelBackendTiming, CountsSingleNanoseconds) {
  for (const int ns : {1, 3, 7, 11, 1000}) {
    const nanoseconds before = backend_->now();
    work(ns * 1e-6, streams_[0]);
    finish(streams_[0]);
    EXPECT_EQ(backend_->now() - before, nanoseconds(ns));
  }
  const nanoseconds before = backend_->now();
  throw_if_error(backend_->work({.name = "late", .delay_seconds = 1.6e-9}, streams_[0]));
  finish(streams_[0]);
  EXPECT_EQ(backend_->now() - before, nanoseconds(2));
}

TEST_F(ModelBackendTiming, NothingTakesTimeAfterTheEndOfTime) {
  const nanoseconds end = kModelTimeEnd + milliseconds(4);
  std::vector<nanoseconds> seen;
  throw_if_error(call_on(*backend_, streams_[0], [&] {
    ModelWork wide = compute(1);
    wide.add(kDown, 4e-3);
    wide.add(kUp, 2e-3);
    backend_->spend(wide);
    seen.push_back(backend_->now());  // The longest part.
    backend_->spend(compute(1e300));
    backend_->spend(compute(1));
    seen.push_back(backend_->now());
  }));
  finish(streams_[0]);
  EXPECT_EQ(seen, (std::vector<nanoseconds>{milliseconds(4), end}));
  EXPECT_EQ(backend_->now(), end);

  work(5, streams_[1]);
  ModelWork late{.name = "late", .delay_seconds = 3};
  throw_if_error(backend_->work(late, streams_[1]));
  finish(streams_[1]);
  EXPECT_EQ(backend_->now(), end);
}

// 10 ms and 4 ms at once on one resource: both at half speed for 8 ms, then 6 ms alone.
TEST_F(ModelBackendTiming, WorkOnOneResourceSharesIt) {
  work(10, streams_[0]);
  work(4, streams_[1]);
  EXPECT_DOUBLE_EQ(finish(streams_[1]), 8);
  EXPECT_DOUBLE_EQ(finish(streams_[0]), 14);
}

TEST_F(ModelBackendTiming, TheDelaySharesNothing) {
  ModelWork late = compute(2);
  late.delay_seconds = 5e-3;
  throw_if_error(backend_->work(late, streams_[0]));
  work(5, streams_[1]);
  EXPECT_DOUBLE_EQ(finish(streams_[1]), 5);
  EXPECT_DOUBLE_EQ(finish(streams_[0]), 7);
}

TEST_F(ModelBackendTiming, EventsOrderStreamsAndTellTheTime) {
  const Event begin = recorded(streams_[0]);
  work(3, streams_[0]);
  const Event middle = recorded(streams_[0]);
  throw_if_error(backend_->stream_wait(streams_[1], middle));
  work(2, streams_[1]);
  const Event end = recorded(streams_[1]);
  EXPECT_FALSE(value_or_throw(backend_->event_query(end)));
  throw_if_error(backend_->event_synchronize(end));
  EXPECT_EQ(value_or_throw(backend_->elapsed(begin, end)), milliseconds(5));
  EXPECT_EQ(value_or_throw(backend_->elapsed(begin, middle)), milliseconds(3));
}

TEST_F(ModelBackendTiming, AHostFunctionTakesTheTimeThatItSpends) {
  std::vector<nanoseconds> seen;
  work(1, streams_[0]);
  throw_if_error(call_on(*backend_, streams_[0], [&] {
    seen.push_back(backend_->now());
    backend_->spend(compute(4));
    backend_->spend_until(milliseconds(9), "drive");
    seen.push_back(backend_->now());
  }));
  work(1, streams_[0]);
  work(6, streams_[1]);
  // Both share the device all the time: 6 ms of work each.
  EXPECT_DOUBLE_EQ(finish(streams_[1]), 12);
  EXPECT_DOUBLE_EQ(finish(streams_[0]), 12);
  EXPECT_EQ(seen, (std::vector<nanoseconds>{milliseconds(2), milliseconds(9)}));
}

TEST_F(ModelBackendTiming, TheHostSpendsTimeWhileStreamsGoOn) {
  timing_.queue = nanoseconds(500'000);
  work(2, streams_[0]);
  work(2, streams_[0]);
  EXPECT_EQ(backend_->now(), milliseconds(1));
  recorded(streams_[1]);  // Takes no time to queue.
  EXPECT_EQ(backend_->now(), milliseconds(1));
  backend_->spend_until(milliseconds(3), "exchange");
  EXPECT_EQ(backend_->now(), milliseconds(3));
  EXPECT_DOUBLE_EQ(finish(streams_[0]), 4.5);
}

TEST_F(ModelBackendTiming, TheAccountSaysWhatAStreamWaitedFor) {
  backend_->watch(streams_[0]);
  work(2, streams_[0], "forward");
  throw_if_error(backend_->event_synchronize(recorded(streams_[0])));
  backend_->spend_until(milliseconds(3), "exchange");
  work(1, streams_[2], "update");
  throw_if_error(backend_->stream_wait(streams_[1], recorded(streams_[2])));
  ModelWork gather{.name = "gather"};
  gather.add(kDown, 5e-3);
  throw_if_error(backend_->work(gather, streams_[1]));
  throw_if_error(backend_->stream_wait(streams_[0], recorded(streams_[1])));
  work(4, streams_[0], "backward");
  EXPECT_DOUBLE_EQ(finish(streams_[0]), 13);
  EXPECT_EQ(account(),
            (std::map<std::string, double>{
                {"own forward", 2}, {"exchange", 1}, {"update", 1}, {"gather", 5}, {"own backward", 4}}));
  const auto busy = backend_->busy_seconds();
  EXPECT_DOUBLE_EQ(busy[kCompute], 7e-3);
  EXPECT_DOUBLE_EQ(busy[kDown], 5e-3);
}

TEST_F(ModelBackendTiming, TheAccountTellsOwnWorkFromOthersAndAddsUp) {
  backend_->watch(streams_[0]);
  work(2, streams_[0], "x");
  throw_if_error(backend_->event_synchronize(recorded(streams_[0])));
  work(3, streams_[1], "x");
  throw_if_error(backend_->stream_wait(streams_[0], recorded(streams_[1])));
  work(1, streams_[0], "y");
  work(4, streams_[0], "x");
  finish(streams_[0]);
  timing_.queue = milliseconds(1);
  work(1, streams_[0], "x");
  timing_.queue = nanoseconds(0);
  finish(streams_[0]);

  EXPECT_EQ(account(),
            (std::map<std::string, double>{{"own x", 7}, {"x", 3}, {"own y", 1}, {"queueing", 1}}));
  EXPECT_EQ(backend_->watched().size(), 4u);
  backend_->watch(streams_[0]);
  EXPECT_TRUE(backend_->watched().empty());
  EXPECT_DOUBLE_EQ(backend_->busy_seconds()[kCompute], 0);
}

TEST_F(ModelBackendTiming, TheSameCallsTakeTheSameTime) {
  const auto run = [&] {
    HostClock clock(HostClock::Mode::kVirtual);
    const auto backend = value_or_throw(ModelBackend::create({.timing = &timing_, .clock = &clock}));
    Stream streams[4];
    for (Stream& stream : streams) stream = value_or_throw(backend->stream_create());
    std::vector<Event> events;
    for (int i = 0; i < 1000; ++i) {
      ModelWork work{.name = "x", .delay_seconds = 1e-6 * (i % 3)};
      work.add(i % 3, 1e-5 / (i % 7 + 1));
      work.add((i + 1) % 3, 1.7e-5 / (i % 5 + 1));
      throw_if_error(backend->work(work, streams[i % 4]));
      const Event event = value_or_throw(backend->event_create());
      throw_if_error(backend->event_record(event, streams[i % 4]));
      throw_if_error(backend->stream_wait(streams[(i * i + 1) % 4], event));
    }
    for (const Stream stream : streams) throw_if_error(backend->stream_synchronize(stream));
    return backend->now();
  };
  const nanoseconds first = run();
  EXPECT_GT(first, nanoseconds(0));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run(), first);
}

// Two backends on one clock, each on a thread: the second one's work waits for the first one's signal, while
// its other stream goes on.
TEST(ModelSignalTest, IsReachedWhenTheOtherBackendAnnouncesIt) {
  HostClock clock(HostClock::Mode::kVirtual);
  Timing timing;
  const auto signal = std::make_shared<ModelSignal>(clock);
  const auto open = [&] {
    return value_or_throw(ModelBackend::create({.timing = &timing, .clock = &clock}));
  };
  const auto ms = [&] { return std::chrono::duration<double, std::milli>(clock.now()).count(); };
  HostClock::Registration registrations[] = {HostClock::Registration(clock), HostClock::Registration(clock)};
  double received = 0;
  double other = 0;
  std::thread sender([&, registration = std::move(registrations[0])]() mutable {
    registration.adopt();
    const HostClock::Registration held = std::move(registration);
    const std::unique_ptr<ModelBackend> backend = open();
    const Stream stream = value_or_throw(backend->stream_create());
    throw_if_error(backend->work(compute(7), stream));
    throw_if_error(backend->call_host(
        stream, [](void* given) { static_cast<ModelSignal*>(given)->announce(); }, signal.get()));
    throw_if_error(backend->stream_destroy(stream));
  });
  std::thread receiver([&, registration = std::move(registrations[1])]() mutable {
    registration.adopt();
    const HostClock::Registration held = std::move(registration);
    const std::unique_ptr<ModelBackend> backend = open();
    const Stream waiting = value_or_throw(backend->stream_create());
    const Stream beside = value_or_throw(backend->stream_create());
    throw_if_error(backend->wait_for(signal, "recv", waiting));
    throw_if_error(backend->work(compute(3), waiting));
    throw_if_error(backend->work(compute(2), beside));
    throw_if_error(backend->stream_synchronize(beside));
    other = ms();
    throw_if_error(backend->stream_synchronize(waiting));
    received = ms();
    throw_if_error(backend->wait_for(signal, "recv", waiting));  // Announced already.
    throw_if_error(backend->stream_destroy(waiting));
    throw_if_error(backend->stream_destroy(beside));
  });
  sender.join();
  receiver.join();
  EXPECT_DOUBLE_EQ(other, 2);
  EXPECT_DOUBLE_EQ(received, 10);
}

}  // namespace
}  // namespace forebay
