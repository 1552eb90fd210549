// StagingBuffers: bounded, allocated once, first come first served.
#include "forebay/staging_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/file_store.h"
#include "forebay/host_backend.h"
#include "tests/offload/store_support.h"
#include "tests/support/process.h"

namespace forebay {
namespace {

using std::chrono::milliseconds;
using testing::kPage;
using testing::kSoon;

constexpr std::size_t kBytes = 4 * kPage;
constexpr std::size_t kCount = 3;

class StagingBuffersTest : public ::testing::Test {
 protected:
  StagingBuffersTest()
      : backend_(std::move(HostBackend::create({})).value()),
        pool_(std::move(PinnedPool::create(*backend_)).value()),
        buffers_(StagingBuffers::create(*pool_, {.buffer_bytes = kBytes, .buffer_count = kCount}).value()) {}

  void wait_until_waiting(std::uint64_t count) {
    while (buffers_->statistics().wait_count < count) std::this_thread::yield();
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<PinnedPool> pool_;
  std::unique_ptr<StagingBuffers> buffers_;
};

TEST_F(StagingBuffersTest, AreAlignedApartAndBounded) {
  std::vector<StagingBuffer> taken;
  std::set<std::byte*> places;
  for (std::size_t i = 0; i < kCount; ++i) {
    taken.push_back(buffers_->try_take().value());
    std::byte* const data = taken.back().data();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % kPage, 0u);
    EXPECT_EQ(taken.back().bytes(), kBytes);
    EXPECT_GE(data, buffers_->memory().data());
    EXPECT_LE(data + kBytes, buffers_->memory().data() + buffers_->memory().size());
    std::memset(data, static_cast<int>(i), kBytes);
    places.insert(data);
  }

  EXPECT_EQ(places.size(), kCount);
  EXPECT_FALSE(buffers_->try_take().has_value());
  EXPECT_EQ(buffers_->take(milliseconds(0)).status().code(), StatusCode::kTimeout);
  taken.pop_back();
  EXPECT_TRUE(buffers_->try_take().has_value());
  const StagingBuffersStatistics statistics = buffers_->statistics();
  EXPECT_EQ(statistics.taken_count, kCount - 1);
  EXPECT_EQ(statistics.most_taken_count, kCount);
  EXPECT_EQ(statistics.take_count, kCount + 1);
  EXPECT_EQ(statistics.refused_count, 1u);
  EXPECT_EQ(statistics.wait_count, 1u);
}

TEST_F(StagingBuffersTest, AreTakenFromTheFirstOnAndTheWarmestAgain) {
  std::byte* const first = buffers_->memory().data();
  EXPECT_EQ(buffers_->memory().size(), kCount * kBytes);
  StagingBuffer one = buffers_->try_take().value();
  StagingBuffer other = buffers_->try_take().value();
  EXPECT_EQ(one.data(), first);
  EXPECT_EQ(other.data(), first + kBytes);

  one.give();
  other.give();

  EXPECT_EQ(buffers_->try_take().value().data(), first + kBytes);
}

TEST_F(StagingBuffersTest, SayHowLongNoneWasFree) {
  std::vector<StagingBuffer> taken;
  for (std::size_t i = 0; i < kCount; ++i) taken.push_back(buffers_->try_take().value());

  const Status status = buffers_->take(milliseconds(3)).status();

  EXPECT_EQ(
      status.message(),
      "no staging buffer within 3 ms: all 3 of 16.00 KiB are taken; see whether the drive still answers, "
      "or make more of them");
  EXPECT_GE(buffers_->statistics().wait_ns, 3'000'000u);
}

TEST_F(StagingBuffersTest, CanBeWaitedForWithoutADeadline) {
  std::vector<StagingBuffer> taken;
  for (std::size_t i = 0; i < kCount; ++i) taken.push_back(buffers_->try_take().value());
  std::thread waiting([&] { EXPECT_TRUE(buffers_->take(milliseconds::max()).ok()); });
  wait_until_waiting(1);
  EXPECT_EQ(buffers_->take(milliseconds(20)).status().code(), StatusCode::kTimeout);

  taken.pop_back();
  waiting.join();
}

TEST_F(StagingBuffersTest, MoveAndGiveThemselvesBackOnce) {
  StagingBuffer first = buffers_->try_take().value();
  std::byte* const place = first.data();

  StagingBuffer second = std::move(first);
  EXPECT_EQ(second.data(), place);
  first = buffers_->try_take().value();
  EXPECT_EQ(buffers_->statistics().taken_count, 2u);
  second = std::move(first);  // The earlier buffer of `second` goes back.
  EXPECT_EQ(buffers_->statistics().taken_count, 1u);
  EXPECT_EQ(second.bytes(), kBytes);
  EXPECT_EQ(first.bytes(), 0u);
  second.give();
  second.give();

  EXPECT_FALSE(second);
  EXPECT_EQ(buffers_->statistics().taken_count, 0u);
}

TEST_F(StagingBuffersTest, AreAllocatedOnceAndGivenBackToThePool) {
  const PinnedPoolStatistics before = pool_->statistics();
  EXPECT_EQ(before.requested_bytes, kBytes * kCount);
  EXPECT_EQ(before.allocation_count, 1u);

  for (int i = 0; i < 100; ++i) {
    const StagingBuffer one = buffers_->try_take().value();
    const StagingBuffer other = buffers_->take(kSoon).value();
  }

  EXPECT_EQ(pool_->statistics().allocation_count, 1u);
  EXPECT_EQ(pool_->statistics().pin_count, before.pin_count);
  buffers_.reset();
  EXPECT_EQ(pool_->statistics().live_bytes, 0u);
}

TEST_F(StagingBuffersTest, ServeWhoWaitsLongestBeforeWhoComesLater) {
  std::vector<StagingBuffer> taken;
  for (std::size_t i = 0; i < kCount; ++i) taken.push_back(buffers_->try_take().value());
  std::atomic<int> served{0};
  std::vector<int> order(3, -1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      StagingBuffer buffer = buffers_->take(kSoon).value();
      order[static_cast<std::size_t>(i)] = served++;
      buffer.give();
    });
    wait_until_waiting(static_cast<std::uint64_t>(i) + 1);
  }
  // One that gives up does not hold up those behind it.
  EXPECT_EQ(buffers_->take(milliseconds(1)).status().code(), StatusCode::kTimeout);

  taken.pop_back();
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(buffers_->try_take().has_value());
  EXPECT_EQ(buffers_->statistics().wait_count, 4u);
  EXPECT_GT(buffers_->statistics().wait_ns, 0u);
}

TEST_F(StagingBuffersTest, AreNotTakenFromUnderWhoWaits) {
  std::vector<StagingBuffer> taken;
  for (std::size_t i = 0; i < kCount; ++i) taken.push_back(buffers_->try_take().value());
  std::atomic<bool> over{false};
  std::thread waiting([&] {
    const StagingBuffer buffer = buffers_->take(kSoon).value();
    while (!over) std::this_thread::yield();
  });
  wait_until_waiting(1);

  taken.pop_back();

  // It is for the one who waits, who may not have run yet.
  EXPECT_FALSE(buffers_->try_take().has_value());
  over = true;
  waiting.join();
}

// The first who waits may not have run yet when the next buffer comes back.
TEST_F(StagingBuffersTest, ServeAllWhoWaitWhenSeveralComeBackAtOnce) {
  for (std::uint64_t round = 1; round <= 20; ++round) {
    std::vector<StagingBuffer> taken;
    for (std::size_t i = 0; i < kCount; ++i) taken.push_back(buffers_->try_take().value());
    std::atomic<std::size_t> served{0};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < kCount; ++i) {
      threads.emplace_back([&] {
        const StagingBuffer buffer = buffers_->take(kSoon).value();
        ++served;
        while (served < kCount) std::this_thread::yield();
      });
    }
    wait_until_waiting(round * kCount);

    taken.clear();
    for (std::thread& thread : threads) thread.join();

    ASSERT_LT(buffers_->statistics().wait_ns, std::uint64_t(std::chrono::nanoseconds(kSoon).count()));
  }
}

TEST_F(StagingBuffersTest, ServeManyThreadsEachWithABufferOfItsOwn) {
  std::vector<std::thread> threads;
  std::atomic<int> mixed{0};
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 200; ++round) {
        StagingBuffer buffer = buffers_->take(kSoon).value();
        std::memset(buffer.data(), i, 256);
        std::this_thread::yield();
        for (int k = 0; k < 256; ++k) mixed += buffer.data()[k] != static_cast<std::byte>(i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(mixed, 0);
  EXPECT_EQ(buffers_->statistics().taken_count, 0u);
  EXPECT_EQ(buffers_->statistics().take_count, 1200u);
  EXPECT_LE(buffers_->statistics().most_taken_count, kCount);
}

// The way down and up again: device, staging buffer, file, with two pieces under way at any time.
TEST_F(StagingBuffersTest, CarryBytesBetweenADeviceAndAFile) {
  const testing::TemporaryDirectory directory;
  FileStoreOptions options;
  options.directories = {directory.path()};
  options.granule_bytes = kPage;
  options.block_bytes = 2 * kPage;
  auto store = make_file_store(options).value();
  ASSERT_TRUE(store->register_memory(buffers_->memory().data(), buffers_->memory().size()).ok());
  constexpr std::size_t kAll = 7 * kBytes + 123;
  const StoreRange range = store->create_range("spilled", kAll).value();
  const Stream stream = backend_->stream_create().value();
  auto* const device = static_cast<std::byte*>(backend_->alloc(kAll).value());
  testing::Memory host(kAll);
  testing::fill_pattern(host.bytes(), 1);
  ASSERT_TRUE(backend_->copy_async(device, host.data(), kAll, stream).ok());

  struct Piece {
    StagingBuffer buffer;
    StoreTicket ticket;
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  const auto move = [&](StoreDirection direction) {
    std::deque<Piece> under_way;
    const auto finish = [&] {
      Piece& piece = under_way.front();
      ASSERT_TRUE(store->wait(piece.ticket, kSoon).ok());
      if (direction == StoreDirection::kRead) {
        ASSERT_TRUE(
            backend_->copy_async(device + piece.offset, piece.buffer.data(), piece.bytes, stream).ok());
        ASSERT_TRUE(backend_->stream_synchronize(stream).ok());
      }
      under_way.pop_front();
    };
    for (std::size_t offset = 0; offset < kAll; offset += kBytes) {
      if (under_way.size() == 2) finish();
      Piece piece{buffers_->try_take().value(), {}, offset, std::min(kBytes, kAll - offset)};
      if (direction == StoreDirection::kWrite) {
        ASSERT_TRUE(backend_->copy_async(piece.buffer.data(), device + offset, piece.bytes, stream).ok());
        ASSERT_TRUE(backend_->stream_synchronize(stream).ok());
      }
      const StoreTransfer transfer{direction, range, offset, piece.buffer.data(), piece.bytes};
      piece.ticket = store->submit({&transfer, 1}).value();
      under_way.push_back(std::move(piece));
    }
    while (!under_way.empty()) finish();
  };
  move(StoreDirection::kWrite);
  ASSERT_TRUE(backend_->fill_async(device, 0, kAll, stream).ok());
  move(StoreDirection::kRead);

  testing::Memory back(kAll);
  ASSERT_TRUE(backend_->copy_async(back.data(), device, kAll, stream).ok());
  ASSERT_TRUE(backend_->stream_synchronize(stream).ok());
  EXPECT_TRUE(testing::equal(host.bytes(), back.bytes()));
  EXPECT_EQ(buffers_->statistics().taken_count, 0u);
  EXPECT_LE(buffers_->statistics().most_taken_count, 2u);
  ASSERT_TRUE(backend_->free(device).ok());
  ASSERT_TRUE(backend_->stream_destroy(stream).ok());
}

TEST_F(StagingBuffersTest, AreRefusedWhereTheyCannotBe) {
  const auto code = [&](std::size_t bytes, std::size_t count) {
    return StagingBuffers::create(*pool_, {.buffer_bytes = bytes, .buffer_count = count}).status().code();
  };
  EXPECT_EQ(code(kBytes, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kPage + 1, 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(SIZE_MAX / kPage * kPage, 2), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      StagingBuffers::create(*pool_, {.buffer_bytes = 5000, .buffer_count = 2}).status().message(),
      "cannot make 2 staging buffers of 5000 bytes: the size must be a multiple of the page, 4096 bytes");
  auto small = PinnedPool::create(*backend_, {.limit_bytes = 4 << 20}).value();
  const auto refused = StagingBuffers::create(*small, {.buffer_bytes = 1 << 20, .buffer_count = 64});
  EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory) << refused.status().to_string();
  EXPECT_TRUE(refused.status().message().starts_with("cannot make 64 staging buffers of 1.00 MiB"))
      << refused.status().message();
}

TEST_F(StagingBuffersTest, DyingBuffersThatAreStillTakenIsADefect) {
  EXPECT_DEATH(
      {
        auto taken = buffers_->try_take();
        buffers_.reset();
      },
      "1 staging buffers were not given back");
}

}  // namespace
}  // namespace forebay
