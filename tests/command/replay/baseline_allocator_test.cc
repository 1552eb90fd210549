#include "runtime/command/replay/baseline_allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "forebay/model_backend.h"
#include "forebay/units.h"
#include "runtime/command/replay/counting_backend.h"

namespace forebay {
namespace {

class BaselineAllocatorTest : public ::testing::Test {
 protected:
  void make(std::size_t memory_bytes) {
    ModelBackendOptions options;
    options.memory_bytes = memory_bytes;
    backend_ = ModelBackend::create(options).value();
    allocator_ = std::make_unique<BaselineAllocator>(*backend_);
  }
  DevicePtr allocate(std::size_t bytes, std::uint32_t stream = 0) {
    const Result<DevicePtr> block = allocator_->allocate(bytes, stream);
    return block.ok() ? block.value() : nullptr;
  }

  std::unique_ptr<ModelBackend> backend_;
  std::unique_ptr<BaselineAllocator> allocator_;
};

TEST_F(BaselineAllocatorTest, TakesSegmentsBySizeClass) {
  make(1_GiB);
  ASSERT_NE(allocate(0), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 2_MiB);
  ASSERT_NE(allocate(1_MiB), nullptr);  // Shares the small segment.
  EXPECT_EQ(backend_->charged_bytes(), 2_MiB);
  ASSERT_NE(allocate(1_MiB + 1), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 22_MiB);
  ASSERT_NE(allocate(9_MiB), nullptr);  // Shares the middle segment.
  EXPECT_EQ(backend_->charged_bytes(), 22_MiB);
  ASSERT_NE(allocate(33_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 22_MiB + 34_MiB);
}

TEST_F(BaselineAllocatorTest, JoinsNeighboursAndUsesTheBestFit) {
  make(1_GiB);
  const DevicePtr a = allocate(4_MiB);
  const DevicePtr b = allocate(4_MiB);
  const DevicePtr c = allocate(4_MiB);
  const DevicePtr d = allocate(7_MiB);
  EXPECT_EQ(b, a + 4_MiB);
  ASSERT_TRUE(allocator_->free(a).ok());
  ASSERT_TRUE(allocator_->free(c).ok());
  ASSERT_TRUE(allocator_->free(b).ok());
  EXPECT_EQ(allocate(9_MiB), a);  // Only the three together are large enough.
  ASSERT_TRUE(allocator_->free(d).ok());
  EXPECT_EQ(backend_->charged_bytes(), 20_MiB);
}

TEST_F(BaselineAllocatorTest, KeepsStreamsApart) {
  make(1_GiB);
  const DevicePtr a = allocate(16_MiB, 1);
  ASSERT_TRUE(allocator_->free(a).ok());
  EXPECT_NE(allocate(16_MiB, 2), a);
  EXPECT_EQ(allocate(16_MiB, 1), a);
}

TEST_F(BaselineAllocatorTest, GivesBackWhatItCachedBeforeItIsOutOfMemory) {
  make(32_MiB);
  const DevicePtr a = allocate(20_MiB);
  EXPECT_EQ(allocate(20_MiB), nullptr);
  ASSERT_TRUE(allocator_->free(a).ok());
  EXPECT_NE(allocate(30_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 30_MiB);
}

TEST_F(BaselineAllocatorTest, RefusesWhatIsNotALiveBlock) {
  make(1_GiB);
  const DevicePtr a = allocate(512);
  EXPECT_EQ(allocator_->free(a + 512).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(allocator_->free(a).ok());
  EXPECT_EQ(allocator_->free(a).code(), StatusCode::kInvalidArgument);
  allocator_.reset();
  EXPECT_EQ(backend_->charged_bytes(), 0u);
}

TEST_F(BaselineAllocatorTest, RoundsAndSplitsAtItsLimits) {
  make(1_GiB);
  const DevicePtr a = allocate(1);
  EXPECT_EQ(allocate(512), a + 512);
  EXPECT_EQ(allocate(513), a + 1024);
  EXPECT_EQ(allocate(1), a + 2048);
  // A part of more than 1 MiB stays free; one of 1 MiB goes with its block.
  const DevicePtr b = allocate(19_MiB);
  EXPECT_EQ(backend_->charged_bytes(), 22_MiB);
  ASSERT_TRUE(allocator_->free(b).ok());
  EXPECT_EQ(allocate(19_MiB - 512), b);
  const DevicePtr c = allocate(1_MiB + 512);
  EXPECT_EQ(c, b + 19_MiB - 512);
  EXPECT_EQ(backend_->charged_bytes(), 22_MiB);
  ASSERT_TRUE(allocator_->free(c).ok());
  EXPECT_NE(allocate(1_MiB), c);  // A small block comes from the small segment.
  EXPECT_EQ(backend_->charged_bytes(), 22_MiB);
  // 10 MiB is the least that has a segment of its own size.
  ASSERT_NE(allocate(10_MiB - 512), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 42_MiB);
  ASSERT_NE(allocate(10_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 42_MiB);
  ASSERT_NE(allocate(10_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 52_MiB);
  ASSERT_NE(allocate(40_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 92_MiB);
}

TEST_F(BaselineAllocatorTest, RefusesMoreThanThereAreAddresses) {
  make(1_GiB);
  for (const std::size_t bytes : {SIZE_MAX, SIZE_MAX - 2_MiB + 1})
    EXPECT_EQ(allocator_->allocate(bytes, 0).status().code(), StatusCode::kInvalidArgument) << bytes;
  EXPECT_EQ(allocator_->allocate(SIZE_MAX - 2_MiB, 0).status().code(), StatusCode::kOutOfMemory);
}

TEST_F(BaselineAllocatorTest, GivesBackSmallSegmentsToo) {
  make(32_MiB);
  const DevicePtr small = allocate(512);
  ASSERT_TRUE(allocator_->free(small).ok());
  EXPECT_NE(allocate(32_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 32_MiB);
  EXPECT_EQ(allocate(512), nullptr);
}

TEST_F(BaselineAllocatorTest, GivesBackSmallAndLargeSegmentsAtOnce) {
  make(32_MiB);
  const DevicePtr small = allocate(512);
  const DevicePtr large = allocate(20_MiB);
  ASSERT_TRUE(allocator_->free(small).ok());
  ASSERT_TRUE(allocator_->free(large).ok());
  EXPECT_NE(allocate(32_MiB), nullptr);
}

TEST_F(BaselineAllocatorTest, OnlyWholeSegmentsAreGivenBack) {
  make(40_MiB);
  const DevicePtr a = allocate(8_MiB);
  const DevicePtr b = allocate(8_MiB);
  ASSERT_TRUE(allocator_->free(a).ok());
  EXPECT_EQ(allocate(34_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 20_MiB);
  EXPECT_EQ(allocate(8_MiB), a);
  ASSERT_TRUE(allocator_->free(b).ok());
  EXPECT_EQ(allocate(34_MiB), nullptr);
  EXPECT_EQ(backend_->charged_bytes(), 20_MiB);
}

TEST_F(BaselineAllocatorTest, TheLastBytesOfASegmentAreUsed) {
  make(1_GiB);
  const DevicePtr a = allocate(1_MiB);
  ASSERT_EQ(allocate(1_MiB - 512), a + 1_MiB);
  EXPECT_EQ(allocate(512), a + 2_MiB - 512);
  EXPECT_EQ(backend_->charged_bytes(), 2_MiB);
}

TEST_F(BaselineAllocatorTest, JoinsTheRestOfABlockWithTheNext) {
  make(1_GiB);
  const DevicePtr a = allocate(4_MiB);
  const DevicePtr b = allocate(8_MiB);
  const DevicePtr c = allocate(8_MiB);
  ASSERT_EQ(c, a + 12_MiB);
  ASSERT_TRUE(allocator_->free(b).ok());
  ASSERT_EQ(allocate(4_MiB), b);
  ASSERT_TRUE(allocator_->free(c).ok());
  EXPECT_EQ(allocate(12_MiB), b + 4_MiB);
  EXPECT_EQ(backend_->charged_bytes(), 20_MiB);
}

TEST(CountingBackendTest, CountsCallsAndTheBytesHeld) {
  const auto below = ModelBackend::create({.memory_bytes = 64_MiB}).value();
  CountingBackend backend(*below);
  const DevicePtr block = backend.alloc(4_MiB).value();
  const Chunk chunk = backend.chunk_create(2_MiB).value();
  EXPECT_FALSE(backend.alloc(64_MiB).ok());
  EXPECT_FALSE(backend.chunk_create(64_MiB).ok());
  EXPECT_EQ(backend.held_bytes(), 6_MiB);
  EXPECT_TRUE(backend.chunk_destroy(chunk).ok());
  EXPECT_EQ(backend.held_bytes(), 4_MiB);
  EXPECT_EQ(backend.peak_held_bytes(), 6_MiB);
  backend.reset_peak();
  EXPECT_EQ(backend.peak_held_bytes(), 4_MiB);
  EXPECT_TRUE(backend.free(block).ok());
  EXPECT_EQ(backend.held_bytes(), 0u);
  EXPECT_EQ(backend.peak_held_bytes(), 4_MiB);
  const DriverCalls calls = backend.calls();
  EXPECT_EQ(calls.create, 2u);
  EXPECT_EQ(calls.destroy, 1u);
  EXPECT_EQ(calls.alloc, 2u);
  EXPECT_EQ(calls.free, 1u);
  EXPECT_EQ(calls.map + calls.unmap + calls.set_access, 0u);
  EXPECT_EQ(backend.call_count(), 6u);
  EXPECT_EQ(backend.call_ns(), 0u);
}

}  // namespace
}  // namespace forebay
