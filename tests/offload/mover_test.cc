#include "forebay/mover.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/host_backend.h"
#include "tests/offload/memory_store.h"

namespace forebay {
namespace {

using testing::kGranule;

class MoverTest : public ::testing::Test {
 protected:
  void make(std::size_t buffer_count, MemoryStoreOptions options = {}) {
    mover_.reset();
    buffers_.reset();
    pool_.reset();
    options.granule_bytes = kGranule;
    store_ = std::move(make_memory_store(options)).value();
    backend_ = std::move(HostBackend::create({.memory_bytes = 64u << 20})).value();
    pool_ = std::move(PinnedPool::create(*backend_, {.slab_bytes = 1})).value();
    buffers_ = std::move(StagingBuffers::create(*pool_,
                                                {.buffer_bytes = 2 * kGranule, .buffer_count = buffer_count}))
                   .value();
    failures_.clear();
    mover_ = std::move(Mover::create(*backend_, *store_, *buffers_, [this](const Status& status) {
               failures_.push_back(status.message());
             })).value();
  }
  Status drain() {
    EXPECT_TRUE(backend_->stream_synchronize(mover_->stream()).ok());
    return mover_->status();
  }

  std::unique_ptr<Store> store_;
  std::unique_ptr<HostBackend> backend_;
  std::unique_ptr<PinnedPool> pool_;
  std::unique_ptr<StagingBuffers> buffers_;
  std::unique_ptr<Mover> mover_;
  std::vector<std::string> failures_;  // Failures that the mover has told of.
};

TEST_F(MoverTest, BringsBackWhatItTookAway) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    for (const std::size_t buffer_count : {1, 2, 3, 8}) {
      make(buffer_count, {.order_seed = seed});
      std::mt19937_64 random(seed);
      const std::size_t sizes[] = {1, kGranule, 2 * kGranule, 2 * kGranule + 1, 11 * kGranule - 7, 40000};
      for (std::size_t i = 0; i < std::size(sizes); ++i) {
        const std::size_t bytes = sizes[i];
        const std::size_t offset = kGranule * (random() % 3);
        const std::uint64_t range_bytes = offset + bytes + random() % 9000;
        const StoreRange range = store_->create_range(std::to_string(i), range_bytes).value();
        const StoredBytes stored{range, offset, bytes, range_bytes};
        const DevicePtr device = backend_->alloc(bytes).value();
        for (std::size_t b = 0; b < bytes; ++b) device[b] = std::byte(random());
        const std::vector<std::byte> kept(device, device + bytes);
        ASSERT_TRUE(mover_->spill(device, stored).ok());
        ASSERT_TRUE(backend_->fill_async(device, 0xAA, bytes, mover_->stream()).ok());
        ASSERT_TRUE(mover_->fetch(stored, device).ok());
        ASSERT_TRUE(drain().ok()) << drain().message();
        ASSERT_EQ(std::memcmp(device, kept.data(), bytes), 0) << bytes << " bytes, seed " << seed;
      }
    }
  }
}

TEST_F(MoverTest, KeepsTheOrderOfItsStream) {
  make(2);
  const StoreRange range = store_->create_range("r", 20 * kGranule).value();
  const DevicePtr device = backend_->alloc(20 * kGranule).value();
  const StoredBytes stored{range, 0, 20 * kGranule, 20 * kGranule};
  for (int round = 1; round <= 20; ++round) {
    ASSERT_TRUE(
        backend_->fill_async(device, static_cast<std::uint8_t>(round), 20 * kGranule, mover_->stream()).ok());
    ASSERT_TRUE(mover_->spill(device, stored).ok());
    ASSERT_TRUE(backend_->fill_async(device, 0, 20 * kGranule, mover_->stream()).ok());
    ASSERT_TRUE(mover_->fetch(stored, device).ok());
  }
  ASSERT_TRUE(drain().ok());
  for (std::size_t i = 0; i < 20 * kGranule; ++i) ASSERT_EQ(device[i], std::byte{20});
}

TEST_F(MoverTest, HasAsManyPiecesUnderWayAsBuffers) {
  make(4);
  const StoreRange range = store_->create_range("r", 40 * kGranule).value();
  const DevicePtr device = backend_->alloc(40 * kGranule).value();
  ASSERT_TRUE(mover_->fetch({range, 0, 40 * kGranule, 40 * kGranule}, device).ok());
  ASSERT_TRUE(drain().ok());
  EXPECT_EQ(store_->statistics().most_transfers_in_flight, 4u);
}

TEST_F(MoverTest, SaysWhatFailedAndDoesNothingMore) {
  for (const StoreDirection direction : {StoreDirection::kRead, StoreDirection::kWrite}) {
    for (std::uint64_t nth = 1; nth <= 5; ++nth) {
      make(2, {.faults = {{direction, nth, Status(StatusCode::kIoError, "scripted")}}});
      const StoreRange range = store_->create_range("r", 10 * kGranule).value();
      const DevicePtr device = backend_->alloc(10 * kGranule).value();
      const StoredBytes stored{range, 0, 10 * kGranule, 10 * kGranule};
      ASSERT_TRUE(mover_->spill(device, stored).ok());
      ASSERT_TRUE(mover_->fetch(stored, device).ok());
      EXPECT_EQ(drain().code(), StatusCode::kIoError);
      const std::uint64_t moved = store_->statistics().read_bytes;
      ASSERT_TRUE(mover_->fetch(stored, device).ok());
      EXPECT_EQ(drain().code(), StatusCode::kIoError);
      EXPECT_EQ(store_->statistics().read_bytes, moved);
      EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);
    }
  }
}

TEST_F(MoverTest, TellsOfTheFirstFailureAlone) {
  make(2, {.faults = {{StoreDirection::kRead, 1, Status(StatusCode::kIoError, "first")},
                      {StoreDirection::kRead, 2, Status(StatusCode::kIoError, "second")}}});
  const StoreRange range = store_->create_range("r", 10 * kGranule).value();
  const DevicePtr device = backend_->alloc(10 * kGranule).value();

  ASSERT_TRUE(mover_->fetch({range, 0, 10 * kGranule, 10 * kGranule}, device).ok());

  EXPECT_EQ(drain().message(), "cannot read 8192 bytes at 0 of range 'r': first");
  EXPECT_EQ(failures_, std::vector<std::string>{drain().message()});
  EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);
}

TEST_F(MoverTest, TellsOfATransferThatTheStoreRefuses) {
  for (const bool fetches : {true, false}) {
    make(2);
    const DevicePtr device = backend_->alloc(kGranule).value();
    const StoredBytes nowhere{StoreRange{7}, 0, kGranule, kGranule};

    ASSERT_TRUE((fetches ? mover_->fetch(nowhere, device) : mover_->spill(device, nowhere)).ok());

    EXPECT_EQ(drain().message(), "no range has the index 7; the store has 0, from create_range");
    EXPECT_EQ(failures_.size(), 1u);
  }
}

TEST_F(MoverTest, EndsItsStream) {
  make(2);
  const std::size_t before = backend_->live_handle_count();

  mover_.reset();

  EXPECT_EQ(backend_->live_handle_count(), before - 1);
}

TEST_F(MoverTest, WaitsWhereTheStoreHasNoRoom) {
  make(4, {.transfer_limit = 1});
  const StoreRange range = store_->create_range("r", 40 * kGranule).value();
  const DevicePtr device = backend_->alloc(40 * kGranule).value();
  const StoredBytes stored{range, 0, 40 * kGranule, 40 * kGranule};
  std::memset(device, 7, 40 * kGranule);
  ASSERT_TRUE(mover_->spill(device, stored).ok());
  ASSERT_TRUE(backend_->fill_async(device, 0, 40 * kGranule, mover_->stream()).ok());
  ASSERT_TRUE(mover_->fetch(stored, device).ok());
  ASSERT_TRUE(drain().ok()) << drain().message();
  for (std::size_t i = 0; i < 40 * kGranule; ++i) ASSERT_EQ(device[i], std::byte{7});
}

// The store has room for one transfer, which is another's until the mover has asked in vain.
TEST_F(MoverTest, WaitsUntilOthersLeaveItRoomInTheStore) {
  make(2, {.transfer_limit = 1});
  const StoreRange range = store_->create_range("r", 3 * kGranule).value();
  const DevicePtr device = backend_->alloc(3 * kGranule).value();
  std::byte theirs[kGranule];
  const StoreTicket ticket = store_->read(range, 0, theirs, kGranule).value();

  ASSERT_TRUE(mover_->spill(device, {range, 0, 3 * kGranule, 3 * kGranule}).ok());
  while (store_->statistics().refused_count == 0 && mover_->status().ok()) std::this_thread::yield();
  ASSERT_TRUE(store_->wait(ticket, std::chrono::seconds(10)).ok());

  EXPECT_TRUE(drain().ok()) << drain().message();
  EXPECT_EQ(store_->statistics().written_bytes, 3 * kGranule);
}

TEST_F(MoverTest, RefusesBuffersThatDoNotFit) {
  make(2);
  EXPECT_EQ(Mover::create(*backend_, *store_, *buffers_).status().message(),
            "a mover cannot use staging buffers that others have taken some of; give it its own");
  auto other = std::move(make_memory_store({.granule_bytes = 64 << 10})).value();
  auto small = std::move(StagingBuffers::create(*pool_, {.buffer_bytes = 4096, .buffer_count = 2})).value();
  const Status refused = Mover::create(*backend_, *other, *small).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(),
            "a mover cannot use staging buffers of 4096 bytes; the store's granule is 65536 bytes, give a "
            "multiple of it");
}

}  // namespace
}  // namespace forebay
