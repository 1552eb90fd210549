#include "tests/device/backend_conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "forebay/backend.h"
#include "runtime/device/address_text.h"

namespace forebay {
namespace {

#define EXPECT_REFUSED(expression) EXPECT_EQ((expression).code(), StatusCode::kInvalidArgument)

TEST_P(BackendConformance, CapabilitiesAreUsable) {
  EXPECT_NE(granule_, 0u);
  EXPECT_EQ(granule_ & (granule_ - 1), 0u);
  EXPECT_NE(backend_->capabilities().name[0], '\0');
  EXPECT_EQ(backend_->memory_info().total_bytes, backend_->capabilities().memory_bytes);
}

TEST_P(BackendConformance, ReserveAlignsAndRefusesOddSizes) {
  const std::size_t alignment = granule_ * 8;
  const DevicePtr odd = backend_->reserve(granule_, 0).value();
  const DevicePtr base = backend_->reserve(granule_, alignment).value();
  EXPECT_TRUE(backend_->release(odd, granule_).ok());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(base) % alignment, 0u);
  EXPECT_REFUSED(backend_->reserve(0, 0).status());
  EXPECT_REFUSED(backend_->reserve(granule_ + 1, 0).status());
  EXPECT_REFUSED(backend_->reserve(granule_, granule_ * 3).status());
  EXPECT_REFUSED(backend_->release(base, granule_ * 2));
  EXPECT_REFUSED(backend_->release(base + granule_, granule_));
  EXPECT_TRUE(backend_->release(base, granule_).ok());
  EXPECT_REFUSED(backend_->release(base, granule_));
}

TEST_P(BackendConformance, RefusalsNameTheRequestTheFindingAndARemedy) {
  const auto refuses = [&](const Status& status, const std::string& what, const std::string& found_and_try) {
    EXPECT_REFUSED(status);
    EXPECT_EQ(status.message(),
              "cannot " + what + " on " + backend_->capabilities().name + ": " + found_and_try);
  };
  const std::string granule = format_bytes(granule_);
  const std::string odd = "reserve " + format_bytes(granule_ * 3 / 2) + " of addresses";
  refuses(backend_->reserve(granule_ * 3 / 2, 0).status(), odd,
          "not a multiple of the granularity; round up to " + granule);
  refuses(backend_->reserve(granule_, granule_ * 3).status(), "reserve " + granule + " of addresses",
          "an alignment of " + std::to_string(granule_ * 3) +
              " is not a power of two; give one, or 0 for the granularity");
  const DevicePtr base = backend_->reserve(granule_ * 4, 0).value();
  const auto at = [&](std::size_t index, std::size_t count) {
    return range_text(base + granule_ * index, granule_ * count);
  };
  refuses(backend_->release(base, granule_ * 2), "release " + at(0, 2),
          format_bytes(granule_ * 4) + " were reserved; release exactly those");
  refuses(backend_->release(base + granule_, granule_), "release " + at(1, 1),
          "no reservation starts there; give the address that reserve returned");

  const Chunk chunk = backend_->chunk_create(granule_).value();
  const Chunk wide = backend_->chunk_create(granule_ * 2).value();
  const auto map_at = [&](std::size_t offset) { return "map a chunk at " + hex(numeric(base + offset)); };
  refuses(backend_->map(base + granule_ * 3, wide), map_at(granule_ * 3),
          format_bytes(granule_ * 2) + " from there are not within one reservation; reserve them");
  refuses(backend_->map(base + granule_ * 64, chunk), map_at(granule_ * 64),
          granule + " from there are not within one reservation; reserve them");
  refuses(backend_->map(base + 512, wide), map_at(512),
          "not a multiple of the granularity, " + granule + "; align the address");
  ASSERT_TRUE(backend_->map(base + granule_, wide).ok());
  refuses(backend_->map(base + granule_ * 2, chunk), map_at(granule_ * 2),
          at(1, 2) + " are mapped already; unmap them first");
  refuses(backend_->release(base, granule_ * 4), "release " + at(0, 4),
          format_bytes(granule_ * 2) + " of it are still mapped; unmap them first");
  refuses(backend_->set_access(base, granule_ * 3), "set access to " + at(0, 3),
          "no mapping starts there; give whole mappings");
  refuses(backend_->set_access(base + granule_, granule_ * 3), "set access to " + at(1, 3),
          "part of the range is not mapped; give a range without holes");
  refuses(backend_->unmap(base + granule_, granule_), "unmap " + at(1, 1),
          "the range ends within a mapping; give whole mappings");
  refuses(backend_->unmap(base + granule_, granule_ + 1),
          "unmap " + range_text(base + granule_, granule_ + 1),
          "not a multiple of the granularity; give whole mappings");

  const DevicePtr block = backend_->alloc(granule_).value();
  refuses(backend_->unmap(block, granule_), "unmap " + range_text(block, granule_),
          "the range is not within one reservation; give a range from reserve");
  refuses(backend_->map(block, chunk), "map a chunk at " + hex(numeric(block)),
          "that is a block of alloc; map at an address from reserve");
  refuses(backend_->fill_async(nullptr, 1, 16, stream_), "fill " + range_text(nullptr, 16),
          "the address is null; give a valid one");
  refuses(backend_->fill_async(block, 1, SIZE_MAX, stream_), "fill " + range_text(block, SIZE_MAX),
          "the range wraps around; give its size in bytes");
  refuses(backend_->fill_async(base + granule_, 1, 16, stream_), "fill " + range_text(base + granule_, 16),
          "part of the range has no access; call set_access first");
  refuses(backend_->fill_async(base, 1, 16, stream_), "fill " + range_text(base, 16),
          "part of the range is not mapped; map a chunk first");
  refuses(backend_->alloc(0).status(), "allocate 0 bytes", "a block has at least 1 byte; ask for more");
  const Status all = backend_->alloc(SIZE_MAX).status();
  EXPECT_EQ(all.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(all.message().find("more than there are addresses; ask for less"), std::string::npos)
      << all.message();

  EXPECT_TRUE(backend_->free(block).ok());
  EXPECT_TRUE(backend_->unmap(base + granule_, granule_ * 2).ok());
  EXPECT_TRUE(backend_->chunk_destroy(wide).ok());
  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend_->release(base, granule_ * 4).ok());
}

TEST_P(BackendConformance, AStaleChunkIsNotTheOneThatTookItsPlace) {
  const DevicePtr base = backend_->reserve(granule_, 0).value();
  const Chunk stale = backend_->chunk_create(granule_).value();
  ASSERT_TRUE(backend_->chunk_destroy(stale).ok());
  const Chunk chunk = backend_->chunk_create(granule_).value();

  EXPECT_REFUSED(backend_->chunk_destroy(stale));
  EXPECT_REFUSED(backend_->map(base, stale));

  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend_->release(base, granule_).ok());
}

TEST_P(BackendConformance, AChunkKeepsItsBytesWhileItIsNotMapped) {
  const DevicePtr base = backend_->reserve(granule_ * 2, 0).value();
  const Chunk chunk = backend_->chunk_create(granule_).value();
  ASSERT_TRUE(backend_->map(base, chunk).ok());
  ASSERT_TRUE(backend_->set_access(base, granule_).ok());
  write(base, 0x2B, granule_);
  ASSERT_TRUE(backend_->unmap(base, granule_).ok());

  ASSERT_TRUE(backend_->map(base + granule_, chunk).ok());
  ASSERT_TRUE(backend_->set_access(base + granule_, granule_).ok());

  expect_byte(base + granule_, 0x2B);
  expect_byte(base + granule_ * 2 - 1, 0x2B);
  EXPECT_TRUE(backend_->unmap(base + granule_, granule_).ok());
  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend_->release(base, granule_ * 2).ok());
}

TEST_P(BackendConformance, ChunksAreChargedAndRefusedBeyondTheDevice) {
  const std::size_t before = backend_->memory_info().free_bytes;
  EXPECT_REFUSED(backend_->chunk_create(0).status());
  EXPECT_REFUSED(backend_->chunk_create(granule_ - 1).status());
  const Chunk chunk = backend_->chunk_create(granule_).value();
  EXPECT_EQ(backend_->memory_info().free_bytes, before - granule_);
  const Status refused = backend_->chunk_create(backend_->memory_info().total_bytes + granule_).status();
  EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(backend_->memory_info().free_bytes, before - granule_);
  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_REFUSED(backend_->chunk_destroy(chunk));
  EXPECT_EQ(backend_->memory_info().free_bytes, before);
}

TEST_P(BackendConformance, AliasesShowTheSameBytes) {
  const DevicePtr base = backend_->reserve(granule_ * 4, 0).value();
  const Chunk chunk = backend_->chunk_create(granule_).value();
  const DevicePtr alias = base + granule_ * 3;
  ASSERT_TRUE(backend_->map(base, chunk).ok());
  ASSERT_TRUE(backend_->map(alias, chunk).ok());
  ASSERT_TRUE(backend_->set_access(base, granule_).ok());
  ASSERT_TRUE(backend_->set_access(alias, granule_).ok());

  write(base, 0x5A, granule_);
  expect_byte(alias, 0x5A);
  expect_byte(alias + granule_ - 1, 0x5A);
  write(alias + 7, 0x33, 1);
  expect_byte(base + 7, 0x33);

  EXPECT_TRUE(backend_->unmap(base, granule_).ok());
  expect_byte(alias + 7, 0x33);
  EXPECT_TRUE(backend_->unmap(alias, granule_).ok());
  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend_->release(base, granule_ * 4).ok());
}

TEST_P(BackendConformance, AMappedChunkOutlivesItsHandle) {
  const std::size_t before = backend_->memory_info().free_bytes;
  const DevicePtr base = backend_->reserve(granule_ * 2, 0).value();
  const Chunk chunk = backend_->chunk_create(granule_).value();
  ASSERT_TRUE(backend_->map(base, chunk).ok());
  ASSERT_TRUE(backend_->set_access(base, granule_).ok());
  write(base, 0x11, 16);
  ASSERT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_EQ(backend_->memory_info().free_bytes, before - granule_);
  expect_byte(base, 0x11);
  EXPECT_REFUSED(backend_->map(base + granule_, chunk));
  EXPECT_TRUE(backend_->unmap(base, granule_).ok());
  EXPECT_EQ(backend_->memory_info().free_bytes, before);
  EXPECT_TRUE(backend_->release(base, granule_ * 2).ok());
}

TEST_P(BackendConformance, MappingRulesAreRefusedWithoutEffect) {
  const DevicePtr base = backend_->reserve(granule_ * 4, 0).value();
  const Chunk wide = backend_->chunk_create(granule_ * 2).value();
  const Chunk chunk = backend_->chunk_create(granule_).value();

  EXPECT_REFUSED(backend_->map(base + 512, chunk));          // Unaligned.
  EXPECT_REFUSED(backend_->map(base + granule_ * 3, wide));  // Leaves the reservation.
  EXPECT_REFUSED(backend_->map(base, Chunk{}));              // No such chunk.
  ASSERT_TRUE(backend_->map(base + granule_, wide).ok());
  EXPECT_REFUSED(backend_->map(base + granule_, chunk));                // The start of another mapping.
  EXPECT_REFUSED(backend_->map(base + granule_ * 2, chunk));            // The inside of another.
  EXPECT_REFUSED(backend_->map(base, wide));                            // Runs into another.
  EXPECT_REFUSED(backend_->set_access(base, granule_ * 3));             // A hole in front.
  EXPECT_REFUSED(backend_->set_access(base + granule_, granule_ * 3));  // A hole behind.
  EXPECT_REFUSED(backend_->unmap(base + granule_, granule_));           // The first half of a mapping.
  EXPECT_REFUSED(backend_->unmap(base + granule_ * 2, granule_));       // The second.
  EXPECT_REFUSED(backend_->unmap(base + granule_, 0));
  EXPECT_REFUSED(backend_->release(base, granule_ * 4));  // Holds a mapping.

  ASSERT_TRUE(backend_->map(base, chunk).ok());
  EXPECT_TRUE(backend_->set_access(base, granule_ * 3).ok());  // Several mappings in one call.
  write(base + granule_ - 8, 0x77, 16);                        // Across two of them.
  expect_byte(base + granule_, 0x77);
  EXPECT_TRUE(backend_->unmap(base, granule_ * 3).ok());
  EXPECT_TRUE(backend_->chunk_destroy(wide).ok());
  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend_->release(base, granule_ * 4).ok());
}

TEST_P(BackendConformance, AllocIsAlignedChargedAndFreedOnce) {
  const std::size_t before = backend_->memory_info().free_bytes;
  const DevicePtr block = backend_->alloc(1000).value();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 512, 0u);
  EXPECT_LT(backend_->memory_info().free_bytes, before);
  ASSERT_TRUE(backend_->fill_async(block, 0x42, 1000, stream_).ok());
  expect_byte(block + 999, 0x42);
  EXPECT_REFUSED(backend_->alloc(0).status());
  EXPECT_REFUSED(backend_->free(block + 512));
  EXPECT_TRUE(backend_->free(block).ok());
  EXPECT_REFUSED(backend_->free(block));
  EXPECT_EQ(backend_->memory_info().free_bytes, before);
}

TEST_P(BackendConformance, ABlockIsNotAReservation) {
  const DevicePtr block = backend_->alloc(granule_).value();
  const Chunk chunk = backend_->chunk_create(granule_).value();
  EXPECT_REFUSED(backend_->map(block, chunk));
  EXPECT_REFUSED(backend_->unmap(block, granule_));
  EXPECT_REFUSED(backend_->set_access(block, granule_));
  EXPECT_REFUSED(backend_->release(block, granule_));
  EXPECT_REFUSED(backend_->fill_async(block, 1, granule_ + 1, stream_));  // Runs out of the block.
  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend_->free(block).ok());
}

TEST_P(BackendConformance, PinTakesWholePagesOnce) {
  constexpr std::size_t kPage = 4096;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kPage, 4 * kPage), &std::free);
  auto* const pages = static_cast<std::byte*>(memory.get());
  EXPECT_REFUSED(backend_->pin(pages + 1, kPage));
  EXPECT_REFUSED(backend_->pin(pages, kPage + 1));
  EXPECT_REFUSED(backend_->pin(pages, 0));
  EXPECT_REFUSED(backend_->pin(nullptr, kPage));
  EXPECT_REFUSED(backend_->pin(pages, SIZE_MAX / kPage * kPage));
  ASSERT_TRUE(backend_->pin(pages, 2 * kPage).ok());
  EXPECT_REFUSED(backend_->pin(pages + kPage, kPage));
  // Beside it there is room.
  ASSERT_TRUE(backend_->pin(pages + 2 * kPage, kPage).ok());
  EXPECT_TRUE(backend_->unpin(pages).ok());
  EXPECT_REFUSED(backend_->pin(pages, 4 * kPage));  // Around a pinned page.
  EXPECT_TRUE(backend_->pin(pages, 2 * kPage).ok());
  EXPECT_TRUE(backend_->unpin(pages + 2 * kPage).ok());
  EXPECT_TRUE(backend_->unpin(pages).ok());
  EXPECT_REFUSED(backend_->unpin(pages));
}

TEST_P(BackendConformance, EventsNeverRecordedAreReached) {
  const Event event = backend_->event_create().value();
  EXPECT_TRUE(backend_->event_query(event).value());
  EXPECT_TRUE(backend_->event_synchronize(event).ok());
  EXPECT_TRUE(backend_->stream_wait(stream_, event).ok());
  EXPECT_TRUE(backend_->stream_synchronize(stream_).ok());
  EXPECT_TRUE(backend_->event_destroy(event).ok());
  EXPECT_REFUSED(backend_->event_destroy(event));
}

TEST_P(BackendConformance, TimedEventsTellTheTimeBetweenThem) {
  using std::chrono::milliseconds;
  const Event begin = backend_->timed_event_create().value();
  const Event end = backend_->timed_event_create().value();
  EXPECT_REFUSED(backend_->elapsed(begin, end).status());
  EXPECT_EQ(backend_->elapsed(begin, end).status().message(),
            std::string("cannot read a time on ") + backend_->capabilities().name +
                ": an event was never recorded; record both first");
  Gate gate;
  const HostFunction sleep = [](void*) { std::this_thread::sleep_for(milliseconds(2)); };
  ASSERT_TRUE(backend_->event_record(begin, stream_).ok());
  EXPECT_REFUSED(backend_->elapsed(begin, end).status());
  EXPECT_REFUSED(backend_->elapsed(end, begin).status());
  ASSERT_TRUE(backend_->event_synchronize(begin).ok());
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &gate).ok());
  ASSERT_TRUE(backend_->call_host(stream_, sleep, nullptr).ok());
  ASSERT_TRUE(backend_->event_record(end, stream_).ok());
  EXPECT_EQ(backend_->elapsed(begin, end).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(backend_->elapsed(end, begin).status().code(), StatusCode::kUnavailable);
  gate.release();
  ASSERT_TRUE(backend_->event_synchronize(end).ok());

  const std::chrono::nanoseconds time = backend_->elapsed(begin, end).value();

  EXPECT_GE(time, milliseconds(2));
  EXPECT_LT(time, std::chrono::minutes(1));
  EXPECT_EQ(backend_->elapsed(end, end).value().count(), 0);
  EXPECT_LE(backend_->elapsed(end, begin).value(), milliseconds(-2));
  EXPECT_TRUE(backend_->event_destroy(begin).ok());
  EXPECT_REFUSED(backend_->elapsed(begin, end).status());
  EXPECT_TRUE(backend_->event_destroy(end).ok());
}

TEST_P(BackendConformance, AnUrgentStreamIsAStream) {
  const DevicePtr block = backend_->alloc(64).value();
  const Stream urgent = backend_->urgent_stream_create().value();
  const Event event = backend_->event_create().value();
  ASSERT_TRUE(backend_->fill_async(block, 0x3A, 64, urgent).ok());
  ASSERT_TRUE(backend_->event_record(event, urgent).ok());
  ASSERT_TRUE(backend_->stream_wait(stream_, event).ok());
  expect_byte(block, 0x3A);
  EXPECT_TRUE(backend_->event_destroy(event).ok());
  EXPECT_TRUE(backend_->stream_destroy(urgent).ok());
  EXPECT_REFUSED(backend_->stream_synchronize(urgent));
  EXPECT_TRUE(backend_->free(block).ok());
}

TEST_P(BackendConformance, RecordingAgainMovesTheEventButNotWhoWaits) {
  Gate first;
  Gate second;
  const Stream waiter = backend_->stream_create().value();
  const Event event = backend_->event_create().value();
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &first).ok());
  ASSERT_TRUE(backend_->event_record(event, stream_).ok());
  ASSERT_TRUE(backend_->stream_wait(waiter, event).ok());
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &second).ok());
  ASSERT_TRUE(backend_->event_record(event, stream_).ok());
  EXPECT_FALSE(backend_->event_query(event).value());

  first.release();
  EXPECT_TRUE(backend_->stream_synchronize(waiter).ok());  // Waits for the first record alone.
  EXPECT_FALSE(backend_->event_query(event).value());
  second.release();
  EXPECT_TRUE(backend_->event_synchronize(event).ok());
  EXPECT_TRUE(backend_->event_query(event).value());
  EXPECT_TRUE(backend_->event_destroy(event).ok());
  EXPECT_TRUE(backend_->stream_destroy(waiter).ok());
}

// A ring of streams, each waiting for the one before it, again and again: the numbers come out in order.
TEST_P(BackendConformance, StreamsWaitForEachOther) {
  for (const std::size_t stream_count : {3u, 4u}) {
    std::vector<Stream> streams(stream_count);
    for (Stream& stream : streams) stream = backend_->stream_create().value();
    const Event event = backend_->event_create().value();
    constexpr int kCount = 200;
    struct Step {
      std::vector<int>* order;
      int value;
    };
    std::vector<int> order;
    std::vector<Step> steps;
    for (int i = 0; i < kCount; ++i) steps.push_back({&order, i});
    for (int i = 0; i < kCount; ++i) {
      const Stream stream = streams[static_cast<std::size_t>(i) % stream_count];
      ASSERT_TRUE(backend_->stream_wait(stream, event).ok());
      const HostFunction append = [](void* step) {
        static_cast<Step*>(step)->order->push_back(static_cast<Step*>(step)->value);
      };
      ASSERT_TRUE(backend_->call_host(stream, append, &steps[static_cast<std::size_t>(i)]).ok());
      ASSERT_TRUE(backend_->event_record(event, stream).ok());
    }
    ASSERT_TRUE(backend_->event_synchronize(event).ok());
    ASSERT_EQ(order.size(), static_cast<std::size_t>(kCount));
    for (int i = 0; i < kCount; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
    EXPECT_TRUE(backend_->event_destroy(event).ok());
    for (const Stream stream : streams) EXPECT_TRUE(backend_->stream_destroy(stream).ok());
  }
}

TEST_P(BackendConformance, AHostFunctionThatCallsTheBackendFailsItsStreamForGood) {
  const Stream stream = backend_->stream_create().value();
  const Event before = backend_->event_create().value();
  const Event behind = backend_->event_create().value();
  ASSERT_TRUE(backend_->event_record(before, stream).ok());
  const HostFunction call = [](void* backend) { static_cast<Backend*>(backend)->memory_info(); };
  ASSERT_TRUE(backend_->call_host(stream, call, backend_.get()).ok());
  ASSERT_TRUE(backend_->event_record(behind, stream).ok());
  EXPECT_EQ(backend_->stream_synchronize(stream).code(), StatusCode::kInternal);
  EXPECT_EQ(backend_->stream_synchronize(stream).code(), StatusCode::kInternal);
  EXPECT_EQ(backend_->event_synchronize(behind).code(), StatusCode::kInternal);
  EXPECT_TRUE(backend_->event_synchronize(before).ok());
  ASSERT_TRUE(backend_->event_record(behind, stream_).ok());
  EXPECT_TRUE(backend_->event_synchronize(behind).ok());    // Recorded again, it is another stream's.
  EXPECT_TRUE(backend_->stream_synchronize(stream_).ok());  // Another stream is not touched.
  EXPECT_TRUE(backend_->stream_destroy(stream).ok());
  EXPECT_TRUE(backend_->event_destroy(before).ok());
  EXPECT_TRUE(backend_->event_destroy(behind).ok());
}

TEST_P(BackendConformance, AHostFunctionThatTakesLongHoldsBackItsOwnStreamAlone) {
  const Stream other = backend_->stream_create().value();
  const HostFunction add = [](void* count) { ++*static_cast<std::atomic<int>*>(count); };
  std::atomic<int> run{0};
  Gate gate;
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &gate).ok());
  ASSERT_TRUE(backend_->call_host(stream_, add, &run).ok());

  // Enough for a driver that takes few operations ahead.
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(backend_->call_host(other, add, &run).ok());
  EXPECT_TRUE(backend_->stream_synchronize(other).ok());
  EXPECT_EQ(run, 100);
  gate.release();
  EXPECT_TRUE(backend_->stream_synchronize(stream_).ok());
  EXPECT_EQ(run, 101);
  EXPECT_TRUE(backend_->stream_destroy(other).ok());
}

TEST_P(BackendConformance, QueueingBeyondTheLimitWaitsAndLosesNothing) {
  Gate gate;
  std::atomic<std::size_t> queued{0};
  std::atomic<std::size_t> run{0};
  const std::size_t limit = GetParam().queue_limit;
  const std::size_t count = limit == 0 ? 5000 : limit * 3;
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &gate).ok());
  std::thread producer([&] {
    for (std::size_t i = 0; i < count; ++i) {
      const HostFunction add = [](void* counter) { ++*static_cast<std::atomic<std::size_t>*>(counter); };
      EXPECT_TRUE(backend_->call_host(stream_, add, &run).ok());
      ++queued;
    }
  });
  while (queued + 1 < limit) std::this_thread::yield();
  if (limit != 0) {
    EXPECT_LE(queued, limit);
  }
  EXPECT_EQ(run, 0u);
  gate.release();
  producer.join();
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  EXPECT_EQ(run, count);
}

TEST_P(BackendConformance, LaunchCopiesItsArguments) {
  const Module module = backend_->load_module(GetParam().module).value();
  const Status missing = backend_->get_kernel(module, "no_such_kernel").status();
  EXPECT_EQ(missing.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(missing.message().find("no_such_kernel"), std::string::npos);
  const Kernel kernel = backend_->get_kernel(module, GetParam().store_kernel).value();
  const DevicePtr block = backend_->alloc(sizeof(int)).value();
  Gate gate;
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &gate).ok());
  {
    DevicePtr target = block;
    int value = 4711;
    const void* arguments[] = {&target, &value};
    const std::size_t bytes[] = {sizeof(target), sizeof(value)};
    ASSERT_TRUE(backend_->launch(kernel, {}, {}, arguments, bytes, 2, stream_).ok());
    EXPECT_REFUSED(backend_->launch(Kernel{}, {}, {}, arguments, bytes, 2, stream_));
    value = 0;
    target = nullptr;
  }
  gate.release();
  int result = 0;
  ASSERT_TRUE(backend_->copy_async(&result, block, sizeof(result), stream_).ok());
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  if (GetParam().keeps_bytes) {
    EXPECT_EQ(result, 4711);
  }
  EXPECT_TRUE(backend_->unload_module(module).ok());
  EXPECT_REFUSED(backend_->unload_module(module));
  EXPECT_TRUE(backend_->free(block).ok());
}

TEST_P(BackendConformance, ThreadsCallAtTheSameTime) {
  const std::size_t before = backend_->memory_info().free_bytes;
  std::vector<std::thread> threads;
  for (unsigned char t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      const Stream stream = backend_->stream_create().value();
      for (int i = 0; i < 20; ++i) {
        const DevicePtr block = backend_->alloc(granule_).value();
        unsigned char value = 0;
        EXPECT_TRUE(backend_->fill_async(block, t, granule_, stream).ok());
        EXPECT_TRUE(backend_->copy_async(&value, block + granule_ - 1, 1, stream).ok());
        EXPECT_TRUE(backend_->stream_synchronize(stream).ok());
        if (GetParam().keeps_bytes) {
          EXPECT_EQ(value, t);
        }
        EXPECT_TRUE(backend_->free(block).ok());
      }
      EXPECT_TRUE(backend_->stream_destroy(stream).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(backend_->memory_info().free_bytes, before);
}

TEST_P(BackendConformance, HandlesThatAreNullOrGoneAreRefused) {
  const DevicePtr block = backend_->alloc(64).value();
  const Stream gone_stream = backend_->stream_create().value();
  const Event event = backend_->event_create().value();
  const Event gone_event = backend_->event_create().value();
  ASSERT_TRUE(backend_->stream_destroy(gone_stream).ok());
  ASSERT_TRUE(backend_->event_destroy(gone_event).ok());

  const HostFunction nothing = [](void*) {};
  for (const Stream stream : {Stream{}, gone_stream}) {
    EXPECT_REFUSED(backend_->fill_async(block, 1, 64, stream));
    EXPECT_REFUSED(backend_->copy_async(block, block + 32, 32, stream));
    EXPECT_REFUSED(backend_->copy_async(block, block + 32, 0, stream));
    EXPECT_REFUSED(backend_->event_record(event, stream));
    EXPECT_REFUSED(backend_->stream_wait(stream, event));
    EXPECT_REFUSED(backend_->call_host(stream, nothing, nullptr));
    EXPECT_REFUSED(backend_->stream_synchronize(stream));
    EXPECT_REFUSED(backend_->stream_destroy(stream));
  }
  for (const Event other : {Event{}, gone_event}) {
    EXPECT_REFUSED(backend_->event_record(other, stream_));
    EXPECT_REFUSED(backend_->event_query(other).status());
    EXPECT_REFUSED(backend_->event_synchronize(other));
    EXPECT_REFUSED(backend_->stream_wait(stream_, other));
    EXPECT_REFUSED(backend_->event_destroy(other));
  }
  EXPECT_REFUSED(backend_->call_host(stream_, nullptr, nullptr));
  EXPECT_REFUSED(backend_->get_kernel(Module{}, "any").status());
  EXPECT_REFUSED(backend_->unload_module(Module{}));
  EXPECT_REFUSED(backend_->free(nullptr));
  EXPECT_REFUSED(backend_->unpin(nullptr));

  EXPECT_TRUE(backend_->event_query(event).value());  // None of these recorded it.
  EXPECT_TRUE(backend_->stream_synchronize(stream_).ok());
  EXPECT_TRUE(backend_->event_destroy(event).ok());
  EXPECT_TRUE(backend_->free(block).ok());
}

TEST_P(BackendConformance, AStreamMadeAfterAnotherEndedHasNothingOfIt) {
  const Stream first = backend_->stream_create().value();
  const HostFunction call = [](void* backend) { static_cast<Backend*>(backend)->memory_info(); };
  ASSERT_TRUE(backend_->call_host(first, call, backend_.get()).ok());
  ASSERT_TRUE(backend_->stream_destroy(first).ok());
  const Stream second = backend_->stream_create().value();
  EXPECT_TRUE(backend_->stream_synchronize(second).ok());
  EXPECT_TRUE(backend_->stream_destroy(second).ok());
}

TEST_P(BackendConformance, DestroyingAStreamWaitsForItsWork) {
  const DevicePtr block = backend_->alloc(granule_).value();
  const Stream stream = backend_->stream_create().value();
  Gate gate;
  std::atomic<bool> destroying{false};
  std::atomic<bool> run{false};
  const HostFunction set = [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; };
  ASSERT_TRUE(backend_->call_host(stream, &Gate::wait, &gate).ok());
  ASSERT_TRUE(backend_->fill_async(block, 0x5C, granule_, stream).ok());
  ASSERT_TRUE(backend_->call_host(stream, set, &run).ok());
  std::thread destroyer([&] {
    destroying = true;
    destroying.notify_all();
    EXPECT_TRUE(backend_->stream_destroy(stream).ok());
    EXPECT_TRUE(run);
  });
  destroying.wait(false);
  EXPECT_FALSE(run);
  gate.release();
  destroyer.join();
  expect_byte(block + granule_ - 1, 0x5C);
  EXPECT_TRUE(backend_->free(block).ok());
}

TEST_P(BackendConformance, CopiesGoInEveryDirection) {
  constexpr std::size_t kBytes = 3 * 4096;
  const std::unique_ptr<void, decltype(&std::free)> pages(std::aligned_alloc(4096, 2 * kBytes), &std::free);
  auto* const pinned = static_cast<std::byte*>(pages.get());
  ASSERT_TRUE(backend_->pin(pinned, 2 * kBytes).ok());
  std::vector<std::byte> pageable(kBytes);
  const DevicePtr first = backend_->alloc(kBytes).value();
  const DevicePtr second = backend_->alloc(kBytes).value();
  const auto pattern = [](std::size_t i, std::size_t seed) { return static_cast<std::byte>(i * 7 + seed); };
  const auto fill = [&](std::byte* target, std::size_t seed) {
    for (std::size_t i = 0; i < kBytes; ++i) target[i] = pattern(i, seed);
  };
  const auto expect = [&](const std::byte* found, std::size_t begin, std::size_t count, std::size_t seed) {
    if (!GetParam().keeps_bytes) return;
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(found[i], pattern(begin + i, seed)) << "byte " << i;
  };
  const auto copy = [&](void* target, const void* source, std::size_t bytes) {
    EXPECT_TRUE(backend_->copy_async(target, source, bytes, stream_).ok());
  };

  fill(pinned, 1);
  copy(first, pinned, kBytes);
  copy(second, first, kBytes);
  copy(pinned + kBytes, second, kBytes);
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  expect(pinned + kBytes, 0, kBytes, 1);

  fill(pageable.data(), 2);
  copy(pinned, pageable.data(), kBytes);
  copy(first, pageable.data(), kBytes);
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  expect(pinned, 0, kBytes, 2);
  std::fill(pageable.begin(), pageable.end(), std::byte{0});
  copy(pageable.data(), first, kBytes);
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  expect(pageable.data(), 0, kBytes, 2);

  // Odd addresses and sizes, and not a byte more.
  copy(second + 1, first + 3, 4097);
  copy(pinned + 5, second + 1, 4097);
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  expect(pinned, 0, 5, 2);
  expect(pinned + 5, 3, 4097, 2);
  expect(pinned + 5 + 4097, 5 + 4097, 64, 2);

  EXPECT_TRUE(backend_->unpin(pinned).ok());
  EXPECT_TRUE(backend_->free(first).ok());
  EXPECT_TRUE(backend_->free(second).ok());
}

TEST_P(BackendConformance, CopiesThatMakeNoSenseAreRefused) {
  const DevicePtr block = backend_->alloc(256).value();
  ASSERT_TRUE(backend_->fill_async(block, 0x21, 256, stream_).ok());
  EXPECT_REFUSED(backend_->copy_async(block, block + 100, 101, stream_));
  EXPECT_REFUSED(backend_->copy_async(block + 100, block, 101, stream_));
  EXPECT_TRUE(backend_->copy_async(block, block + 100, 100, stream_).ok());
  EXPECT_TRUE(backend_->copy_async(block, block, 0, stream_).ok());
  EXPECT_TRUE(backend_->fill_async(block, 0x99, 0, stream_).ok());
  expect_byte(block, 0x21);
  EXPECT_TRUE(backend_->free(block).ok());
}

TEST_P(BackendConformance, NothingIsReadOrWrittenWithoutAccess) {
  const DevicePtr base = backend_->reserve(granule_ * 4, 0).value();
  const Chunk chunk = backend_->chunk_create(granule_).value();
  const DevicePtr block = backend_->alloc(granule_ * 2).value();
  const auto expect_refused = [&](DevicePtr address, std::size_t bytes) {
    EXPECT_REFUSED(backend_->copy_async(address, block, bytes, stream_));
    EXPECT_REFUSED(backend_->copy_async(block, address, bytes, stream_));
    EXPECT_REFUSED(backend_->fill_async(address, 1, bytes, stream_));
  };

  expect_refused(base, 16);  // Not mapped.
  ASSERT_TRUE(backend_->map(base + granule_, chunk).ok());
  expect_refused(base + granule_, 16);  // Mapped, without access.
  ASSERT_TRUE(backend_->set_access(base + granule_, granule_).ok());
  EXPECT_TRUE(backend_->fill_async(base + granule_, 1, granule_, stream_).ok());
  expect_refused(base + granule_ - 1, 2);       // Begins before the mapping.
  expect_refused(base + granule_ * 2 - 1, 2);   // Ends behind it.
  expect_refused(base + granule_ * 4 - 8, 16);  // Ends behind the reservation.
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  ASSERT_TRUE(backend_->unmap(base + granule_, granule_).ok());
  expect_refused(base + granule_, 16);  // No longer mapped.
  ASSERT_TRUE(backend_->map(base, chunk).ok());
  expect_refused(base, 16);  // A new mapping begins without access.
  ASSERT_TRUE(backend_->set_access(base, granule_).ok());
  expect_refused(base - 8, 16);  // Begins before the reservation.
  EXPECT_TRUE(backend_->stream_synchronize(stream_).ok());

  EXPECT_TRUE(backend_->unmap(base, granule_).ok());
  EXPECT_TRUE(backend_->chunk_destroy(chunk).ok());
  EXPECT_TRUE(backend_->release(base, granule_ * 4).ok());
  EXPECT_TRUE(backend_->free(block).ok());
}

TEST_P(BackendConformance, AModuleForAnotherKindIsUnsupported) {
  if (GetParam().keeps_bytes) {  // A model runs nothing and takes any.
    EXPECT_EQ(backend_->load_module(GetParam().foreign_module).status().code(), StatusCode::kUnsupported);
  }
  EXPECT_REFUSED(backend_->load_module({}).status());
}

TEST_P(BackendConformance, LaunchesThatMakeNoSenseAreRefused) {
  const Module module = backend_->load_module(GetParam().module).value();
  const Kernel kernel = backend_->get_kernel(module, GetParam().store_kernel).value();
  const DevicePtr block = backend_->alloc(sizeof(int)).value();
  ASSERT_TRUE(backend_->fill_async(block, 0, sizeof(int), stream_).ok());
  const int value = 1;
  const void* arguments[] = {&block, &value};
  const void* null_arguments[] = {&block, nullptr};
  const std::size_t bytes[] = {sizeof(block), sizeof(value)};
  const std::size_t empty_bytes[] = {sizeof(block), 0};
  for (const Dimensions& none : {Dimensions{0, 1, 1}, Dimensions{1, 0, 1}, Dimensions{1, 1, 0}}) {
    EXPECT_REFUSED(backend_->launch(kernel, none, {}, arguments, bytes, 2, stream_));
    EXPECT_REFUSED(backend_->launch(kernel, {}, none, arguments, bytes, 2, stream_));
  }
  EXPECT_REFUSED(backend_->launch(kernel, {}, {}, arguments, nullptr, 2, stream_));
  EXPECT_EQ(backend_->launch(kernel, {}, {}, arguments, empty_bytes, 2, stream_).message(),
            std::string("cannot launch a kernel on ") + backend_->capabilities().name +
                ": argument 1 is null or empty; give its value");
  EXPECT_REFUSED(backend_->launch(kernel, {}, {}, nullptr, bytes, 2, stream_));
  EXPECT_REFUSED(backend_->launch(kernel, {}, {}, null_arguments, bytes, 2, stream_));
  EXPECT_REFUSED(backend_->launch(kernel, {}, {}, arguments, bytes, 2, Stream{}));
  expect_byte(block, 0);
  EXPECT_TRUE(backend_->unload_module(module).ok());
  const Status gone = backend_->launch(kernel, {}, {}, arguments, bytes, 2, stream_);
  EXPECT_REFUSED(gone);
  EXPECT_EQ(gone.message(), std::string("cannot launch a kernel on ") + backend_->capabilities().name +
                                ": there is no such kernel; give one that get_kernel returned");
  EXPECT_REFUSED(backend_->get_kernel(module, GetParam().store_kernel).status());
  EXPECT_TRUE(backend_->free(block).ok());
}

}  // namespace
}  // namespace forebay
