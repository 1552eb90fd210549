#include "forebay/store_pass.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "forebay/host_backend.h"
#include "tests/offload/memory_store.h"

namespace forebay {
namespace {

using testing::kGranule;

constexpr std::size_t kPartBytes = 3 * kGranule;

// `part_count` parts of three fields: one read and written, one read only, one written only.
class StorePassTest : public ::testing::Test {
 protected:
  void make(std::size_t part_count, std::size_t buffer_count, MemoryStoreOptions options = {}) {
    options.granule_bytes = kGranule;
    pass_.reset();
    buffers_.reset();
    pool_.reset();
    store_ = std::move(make_memory_store(options)).value();
    backend_ = std::move(HostBackend::create({})).value();
    pool_ = std::move(PinnedPool::create(*backend_, {.slab_bytes = 1})).value();
    buffers_ = std::move(StagingBuffers::create(
                             *pool_, {.buffer_bytes = 3 * kPartBytes, .buffer_count = buffer_count}))
                   .value();
    for (int i = 0; i < 3; ++i) {
      ranges_[i] = store_->create_range(std::to_string(i), part_count * kPartBytes - 100).value();
    }
    parts_.assign(part_count, {});
    for (std::size_t p = 0; p < part_count; ++p) {
      StorePassPart& part = parts_[p];
      for (int i = 0; i < 3; ++i) {
        const std::size_t bytes = p + 1 < part_count ? kPartBytes : kPartBytes - 100;
        part.fields[i] = {ranges_[i], p * kPartBytes, bytes, i != 2, i != 1};
      }
      part.field_count = 3;
    }
    pass_ = std::make_unique<StorePass>(*store_, *buffers_);
  }

  std::vector<const StorePassPart*> all() const {
    std::vector<const StorePassPart*> parts;
    for (const StorePassPart& part : parts_) parts.push_back(&part);
    return parts;
  }

  // Field 0 grows by one, field 2 doubles.
  Status run(const std::vector<const StorePassPart*>& parts, bool write = true) {
    pass_->begin(parts);
    for (const StorePassPart* part : parts) {
      const Result<std::byte*> memory = pass_->next();
      if (!memory.ok()) return memory.status();
      auto* read = reinterpret_cast<unsigned char*>(memory.value());
      auto* written = read + part->field_offset(2);
      for (std::size_t i = 0; i < part->fields[0].bytes; ++i) {
        written[i] = static_cast<unsigned char>(2 * read[i]);
        ++read[i];
      }
      const Status status = pass_->done(write);
      if (!status.ok()) return status;
    }
    return pass_->finish();
  }

  // Every byte of range `range`, or the one that differs.
  void expect_all(int range, unsigned char expected) {
    std::vector<std::byte> bytes(parts_.size() * kPartBytes - 100);
    const auto ticket = store_->read(ranges_[range], 0, bytes.data(), bytes.size());
    ASSERT_TRUE(store_->wait(ticket.value(), std::chrono::seconds(10)).ok());
    for (std::size_t i = 0; i < bytes.size(); ++i)
      ASSERT_EQ(bytes[i], std::byte{expected}) << "range " << range << ", byte " << i;
  }

  std::unique_ptr<Store> store_;
  std::unique_ptr<HostBackend> backend_;
  std::unique_ptr<PinnedPool> pool_;
  std::unique_ptr<StagingBuffers> buffers_;
  StoreRange ranges_[3];
  std::vector<StorePassPart> parts_;
  std::unique_ptr<StorePass> pass_;
};

TEST(StorePassPart, BeginsEachFieldOnAPage) {
  StorePassPart part;
  part.fields[0].bytes = 5000;
  part.fields[1].bytes = 4096;
  part.fields[2].bytes = 1;
  part.field_count = 3;

  EXPECT_EQ(part.field_offset(0), 0u);
  EXPECT_EQ(part.field_offset(1), 8192u);
  EXPECT_EQ(part.field_offset(2), 12288u);
  EXPECT_EQ(part.buffer_bytes(), 16384u);
}

TEST_F(StorePassTest, ChangesEveryPartOnceInAnyOrderOfCompletion) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (const std::size_t buffers : {1, 2, 5, 40}) {
      make(23, buffers, {.order_seed = seed});
      for (int pass = 0; pass < 3; ++pass) ASSERT_TRUE(run(all()).ok()) << "seed " << seed;
      expect_all(0, 3);
      expect_all(1, 0);
      expect_all(2, 4);
      EXPECT_EQ(buffers_->statistics().taken_count, 0u);
      EXPECT_LE(store_->statistics().most_transfers_in_flight, 2 * buffers);
    }
  }
}

TEST_F(StorePassTest, ReadsChangesAndWritesAtTheSameTime) {
  make(10, 6);
  pass_->begin(all());
  EXPECT_EQ(buffers_->statistics().taken_count, 6u);
  ASSERT_TRUE(pass_->next().ok());
  ASSERT_TRUE(pass_->done(true).ok());
  // One is written, one is out, and four more are read.
  ASSERT_TRUE(pass_->next().ok());
  EXPECT_EQ(buffers_->statistics().taken_count, 6u);
  ASSERT_TRUE(pass_->done(true).ok());
  pass_->drop();
  ASSERT_TRUE(pass_->finish().ok());
}

TEST_F(StorePassTest, LeavesWhatIsNotToBeWritten) {
  make(4, 2);
  ASSERT_TRUE(run(all(), false).ok());
  expect_all(0, 0);
  EXPECT_EQ(store_->statistics().written_bytes, 0u);
}

TEST_F(StorePassTest, ReadsOnceWhatWasReadAhead) {
  make(8, 4);
  pass_->begin(all());
  const std::uint64_t ahead = store_->statistics().read_bytes;
  ASSERT_TRUE(run(all()).ok());
  expect_all(0, 1);
  (void)ahead;
  EXPECT_EQ(store_->statistics().read_bytes - (8 * kPartBytes - 100), 2 * (8 * kPartBytes - 100))
      << "expect_all's, and fields 0 and 1 once each";
}

TEST_F(StorePassTest, DropsWhatWasReadAheadForNothing) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    make(12, 4, {.order_seed = seed});
    std::mt19937_64 random(seed);
    std::vector<unsigned char> expected(12, 0);
    for (int pass = 0; pass < 8; ++pass) {
      pass_->begin(all());
      if (random() % 4 == 0) pass_->drop();
      std::vector<const StorePassPart*> some;
      for (std::size_t p = 0; p < 12; ++p) {
        if (random() % 3 == 0) continue;
        some.push_back(&parts_[p]);
        ++expected[p];
      }
      ASSERT_TRUE(run(some).ok());
    }
    for (std::size_t p = 0; p < 12; ++p) {
      std::byte first[kGranule];
      const auto ticket = store_->read(ranges_[0], p * kPartBytes, first, kGranule);
      ASSERT_TRUE(store_->wait(ticket.value(), std::chrono::seconds(10)).ok());
      EXPECT_EQ(first[0], std::byte{expected[p]}) << "part " << p << ", seed " << seed;
    }
  }
}

TEST_F(StorePassTest, WaitsWhereTheStoreHasNoRoom) {
  make(9, 6, {.transfer_limit = 3});
  for (int pass = 0; pass < 3; ++pass) ASSERT_TRUE(run(all()).ok());
  expect_all(0, 3);
  EXPECT_LE(store_->statistics().most_transfers_in_flight, 3u);
}

// A part has more to write than was read for it, and the store is full of reads for later parts.
TEST_F(StorePassTest, AWriteWaitsForReadsThatFillTheStore) {
  for (const std::uint64_t seed : {0, 1, 2}) {
    make(9, 6, {.transfer_limit = 2, .order_seed = seed});
    for (StorePassPart& part : parts_) part.fields[1].read = false;
    for (int pass = 0; pass < 3; ++pass) {
      const Status status = run(all());
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    expect_all(0, 3);
    expect_all(2, 4);
    EXPECT_EQ(store_->statistics().most_transfers_in_flight, 2u);
  }
}

TEST_F(StorePassTest, AFailedReadOfALaterPartEndsAWriteThatWaitsForIt) {
  make(4, 4,
       {.transfer_limit = 2, .faults = {{StoreDirection::kRead, 2, Status(StatusCode::kIoError, "bad")}}});
  for (StorePassPart& part : parts_) part.fields[1].read = false;
  pass_->begin(all());
  ASSERT_TRUE(pass_->next().ok());

  const Status status = pass_->done(true);

  EXPECT_EQ(status.code(), StatusCode::kIoError) << status.to_string();
  EXPECT_NE(status.message().find("bad"), std::string::npos) << status.message();
  EXPECT_EQ(store_->statistics().written_bytes, 0u);
}

TEST_F(StorePassTest, SaysWhichReadOrWriteFailed) {
  for (const StoreDirection direction : {StoreDirection::kRead, StoreDirection::kWrite}) {
    for (std::uint64_t nth = 1; nth <= 12; ++nth) {
      make(6, 3, {.faults = {{direction, nth, Status(StatusCode::kIoError, "scripted")}}});
      const Status status = run(all());
      EXPECT_EQ(status.code(), StatusCode::kIoError) << nth;
      EXPECT_NE(status.message().find("scripted"), std::string::npos);
      // And ever after.
      pass_->drop();
      EXPECT_FALSE(pass_->finish().ok());
      pass_.reset();
      EXPECT_EQ(buffers_->statistics().taken_count, 0u);
    }
  }
}

TEST_F(StorePassTest, KeepsTheFirstFailure) {
  for (const StoreDirection direction : {StoreDirection::kRead, StoreDirection::kWrite}) {
    make(6, 6,
         {.faults = {{direction, 1, Status(StatusCode::kIoError, "first")},
                     {direction, 3, Status(StatusCode::kIoError, "second")}}});
    if (direction == StoreDirection::kRead) {
      pass_->begin(all());
      pass_->wait_for_reads();
    } else {
      EXPECT_FALSE(run(all()).ok());
    }

    for (int i = 0; i < 2; ++i) {
      EXPECT_NE(pass_->finish().message().find("first"), std::string::npos) << pass_->finish().message();
    }
    pass_.reset();
    EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);
  }
}

TEST_F(StorePassTest, LeavesNothingUnderWay) {
  make(6, 3);
  pass_->begin(all());
  EXPECT_GT(store_->statistics().transfers_in_flight, 0u);
  pass_->drop();
  EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);

  pass_->begin(all());
  pass_->begin({});
  EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);

  // The writes of ended parts, too, without finish().
  make(6, 6);
  pass_->begin(all());
  ASSERT_TRUE(pass_->next().ok());
  ASSERT_TRUE(pass_->done(true).ok());
  pass_.reset();
  EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);
  EXPECT_EQ(store_->statistics().written_bytes, 2 * kPartBytes);
  EXPECT_EQ(buffers_->statistics().taken_count, 0u);
}

TEST_F(StorePassTest, ReadsNothingBetweenADropAndTheNextBegin) {
  make(6, 2);
  pass_->begin(all());
  pass_->drop();
  const std::uint64_t dropped = store_->statistics().read_bytes;

  ASSERT_TRUE(pass_->finish().ok());
  pass_->begin({});

  EXPECT_EQ(store_->statistics().read_bytes, dropped);
  EXPECT_EQ(buffers_->statistics().taken_count, 0u);
}

TEST_F(StorePassTest, WritesNothingAfterAFailure) {
  make(6, 6, {.faults = {{StoreDirection::kWrite, 1, Status(StatusCode::kIoError, "scripted")}}});
  pass_->begin(all());
  ASSERT_TRUE(pass_->next().ok());
  ASSERT_TRUE(pass_->done(true).ok());
  ASSERT_TRUE(pass_->next().ok());
  EXPECT_EQ(pass_->finish().code(), StatusCode::kIoError);

  EXPECT_EQ(pass_->done(true).code(), StatusCode::kIoError);

  EXPECT_EQ(pass_->finish().code(), StatusCode::kIoError);
  EXPECT_EQ(store_->statistics().written_bytes, 0u);
}

TEST_F(StorePassTest, FinishWaitsForTheWritesOfAllEndedParts) {
  make(4, 4);
  pass_->begin(all());
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(pass_->next().ok());
    ASSERT_TRUE(pass_->done(true).ok());
  }

  ASSERT_TRUE(pass_->finish().ok());

  EXPECT_EQ(store_->statistics().transfers_in_flight, 0u);
  EXPECT_EQ(store_->statistics().written_bytes, 2 * (4 * kPartBytes - 100));
}

TEST_F(StorePassTest, SaysThatTheStoreRefusesAPart) {
  make(2, 2);
  parts_[0].fields[0].range = StoreRange{7};

  EXPECT_EQ(run(all()).message(), "no range has the index 7; the store has 3, from create_range");
  EXPECT_EQ(pass_->finish().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(buffers_->statistics().taken_count, 0u);
}

TEST_F(StorePassTest, SaysThatTheStoreRefusesAWrite) {
  make(2, 2);
  // One is read only, and the other is written to a range that there is not.
  parts_[0].fields[2].range = StoreRange{7};

  EXPECT_EQ(run(all()).message(), "no range has the index 7; the store has 3, from create_range");
  EXPECT_EQ(pass_->finish().code(), StatusCode::kInvalidArgument);
}

using StorePassDeathTest = StorePassTest;

TEST_F(StorePassDeathTest, APartIsNoLargerThanABuffer) {
  make(2, 2);
  parts_[0].fields[3] = {ranges_[0], 0, kGranule, true, true};
  parts_[0].field_count = 4;

  EXPECT_DEATH(pass_->begin(all()), "a part of 40960 bytes in a buffer of 36864");
}

}  // namespace
}  // namespace forebay
