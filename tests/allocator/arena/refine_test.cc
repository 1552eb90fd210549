// Repeated steps: the arena gives the memory back that the first one did not need, and places the next one
// anew.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "allocator/arena/step_memory.h"
#include "forebay/arena.h"
#include "forebay/host_backend.h"
#include "forebay/units.h"
#include "tests/allocator/arena/chunk.h"
#include "tests/support/gate.h"

namespace forebay {
namespace {

using testing::Gate;
using testing::kChunk;

class ArenaRefineTest : public ::testing::Test {
 protected:
  void make(ArenaOptions options = {}) {
    HostBackendOptions backend_options;
    backend_options.granularity = kChunk;
    backend_options.memory_bytes = 512_MiB;
    backend_ = std::move(HostBackend::create(std::move(backend_options))).value();
    auto arena = Arena::create(*backend_, options);
    ASSERT_TRUE(arena.ok()) << arena.status().to_string();
    arena_ = std::move(arena).value();
    stream_ = backend_->stream_create().value();
  }
  void TearDown() override {
    EXPECT_TRUE(backend_->stream_destroy(stream_).ok());
    arena_.reset();
    EXPECT_EQ(backend_->live_handle_count(), 0u);
    EXPECT_EQ(backend_->charged_bytes(), 0u);
  }

  DevicePtr take(std::size_t bytes) {
    auto block = arena_->allocate({.bytes = bytes, .stream = stream_});
    EXPECT_TRUE(block.ok()) << block.status().to_string();
    return block.ok() ? block.value() : nullptr;
  }
  void give(DevicePtr block) {
    ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
    const Status status = arena_->free(block, stream_);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  // Blocks of many sizes that come and go, always the same ones, in a way that leaves gaps.
  void step() {
    std::mt19937 random(7);
    std::vector<DevicePtr> blocks;
    for (int round = 0; round < 12; ++round) {
      for (int i = 0; i < 12; ++i) blocks.push_back(take(512 + random() % 900_KiB));
      for (int i = 0; i < 7; ++i) {
        const std::size_t index = random() % blocks.size();
        give(blocks[index]);
        blocks[index] = blocks.back();
        blocks.pop_back();
      }
    }
    while (!blocks.empty()) {
      give(blocks.back());
      blocks.pop_back();
    }
  }
  // An attempt is given up when the stream's event takes longer than usual, so a busy machine needs several.
  void step_until_refined(std::uint64_t count) {
    for (int i = 0; i < 5000 && refinements() < count; ++i) step();
    ASSERT_EQ(refinements(), count);
  }
  std::size_t waste() const {
    const ArenaStatistics statistics = arena_->statistics();
    return statistics.reserved_bytes - std::min(statistics.reserved_bytes, statistics.peak_live_bytes);
  }
  std::size_t peak_waste() const {
    const ArenaStatistics statistics = arena_->statistics();
    return statistics.peak_reserved_bytes - statistics.peak_live_bytes;
  }
  std::uint64_t driver_calls() const { return arena_->statistics().driver_call_count; }
  std::uint64_t refinements() const { return arena_->statistics().refinement_count; }

  std::unique_ptr<HostBackend> backend_;
  std::unique_ptr<Arena> arena_;
  Stream stream_;
};

TEST_F(ArenaRefineTest, AStepAfterWhichNothingIsLiveIsRefined) {
  make();
  step_until_refined(1);
  const std::size_t first_waste = peak_waste();
  ASSERT_GT(first_waste, 4 * kChunk) << "this step leaves nothing to be improved";
  EXPECT_EQ(arena_->statistics().reserved_bytes, 0u);
  arena_->reset_peaks();
  step();
  EXPECT_LT(peak_waste(), first_waste);
  const std::uint64_t calls = driver_calls();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(driver_calls(), calls) << "the third step is the second one again";
  EXPECT_EQ(refinements(), 1u) << "what did not help enough once is not tried again";
}

TEST_F(ArenaRefineTest, AMainLoopThatNeverFreesEverythingIsRefinedOnce) {
  make();
  const DevicePtr weights = take(8_MiB);
  for (int i = 0; i < 100; ++i) step();
  EXPECT_EQ(refinements(), 0u) << "a hundred rounds may be the layers of one step";
  const std::size_t first_waste = waste();
  ASSERT_GT(first_waste, 4 * kChunk) << "this step leaves nothing to be improved";
  step_until_refined(1);
  for (int i = 0; i < 2; ++i) step();
  EXPECT_LT(waste(), first_waste);
  const std::uint64_t calls = driver_calls();
  for (int i = 0; i < 200; ++i) step();
  EXPECT_EQ(driver_calls(), calls);
  EXPECT_EQ(refinements(), 1u);
  give(weights);
}

TEST_F(ArenaRefineTest, ALargerStepIsRefinedAgain) {
  make();
  step_until_refined(1);
  const DevicePtr more = take(64_MiB);
  step();
  EXPECT_EQ(refinements(), 1u);
  give(more);
  step_until_refined(2);
}

TEST_F(ArenaRefineTest, RefiningDoesNotWaitForQueuedWork) {
  make();
  Gate gate;
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 40; ++i) blocks.push_back(take((i % 5 + 1) * 100_KiB));
  for (int i = 0; i < 40; i += 2) {
    ASSERT_TRUE(arena_->free(blocks[static_cast<std::size_t>(i)], stream_).ok());
    blocks[static_cast<std::size_t>(i)] = take((i % 7 + 1) * 90_KiB);
  }
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &gate).ok());
  for (const DevicePtr block : blocks) ASSERT_TRUE(arena_->free(block, stream_).ok());
  const ArenaStatistics statistics = arena_->statistics();
  EXPECT_EQ(statistics.live_bytes, 0u);
  EXPECT_EQ(statistics.refinement_count, 0u);
  EXPECT_GT(statistics.reserved_bytes, 0u) << "memory was taken away under queued work";
  gate.open();
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());  // The gate's end.
}

// Threads allocate, write, compare and free blocks while free memory goes back to the device.
TEST_F(ArenaRefineTest, BlocksOfOtherThreadsKeepTheirBytes) {
  make();
  std::atomic<bool> stop{false};
  std::atomic<int> wrong_count{0};
  std::vector<std::thread> others;
  for (int index = 0; index < 3; ++index) {
    others.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      while (!stop) {
        const std::size_t bytes = 1 + random() % (index == 0 ? 900 : 300_KiB);
        auto block = arena_->allocate({.bytes = bytes});
        if (!block.ok()) {
          ++wrong_count;
          continue;
        }
        std::memset(block.value(), index + 1, bytes);
        if (random() % 16 == 0) arena_->trim();
        const std::byte* data = block.value();
        if (data[0] != std::byte(index + 1) || std::memcmp(data, data + 1, bytes - 1) != 0) ++wrong_count;
        if (!arena_->free(block.value(), {}).ok()) ++wrong_count;
        for (int i = 0; i < 50; ++i) std::this_thread::yield();
      }
    });
  }
  for (int i = 0; i < 5000 && refinements() < 1; ++i) step();
  for (int i = 0; i < 10; ++i) step();
  stop = true;
  for (std::thread& other : others) other.join();

  EXPECT_GE(refinements(), 1u);
  EXPECT_EQ(wrong_count, 0);
}

TEST_F(ArenaRefineTest, NothingIsRefinedDuringACapture) {
  make();
  const Stream captured = backend_->stream_create().value();
  const Capture capture = arena_->capture_begin(captured).value();
  step();
  EXPECT_EQ(refinements(), 0u);
  EXPECT_GT(arena_->statistics().reserved_bytes, 0u);
  ASSERT_TRUE(arena_->capture_end(capture).ok());
  ASSERT_TRUE(arena_->capture_release(capture).ok());
  step_until_refined(1);
  ASSERT_TRUE(arena_->stream_retire(captured).ok());
  ASSERT_TRUE(backend_->stream_destroy(captured).ok());
}

TEST_F(ArenaRefineTest, AnArenaThatTakesNothingAheadIsNotRefined) {
  make({.growth_bytes = kChunk});
  step();
  EXPECT_EQ(refinements(), 0u);
  EXPECT_GT(arena_->statistics().reserved_bytes, 0u);
}

// --- recognising that a step repeats ---

class Steps {
 public:
  Steps() { EXPECT_TRUE(memory_.start()); }
  void run(const std::vector<std::size_t>& sizes) {
    for (const std::size_t bytes : sizes) {
      static_cast<void>(memory_.find(bytes, live_bytes_, 0));
      memory_.store(bytes, live_bytes_);
      live_bytes_ += bytes;
    }
    live_bytes_ = base_bytes_;
  }
  std::uint32_t laps() const { return memory_.lap_count(); }
  internal::StepMemory& memory() { return memory_; }

 private:
  internal::StepMemory memory_;
  std::size_t base_bytes_ = 4096;  // Something is always live.
  std::size_t live_bytes_ = base_bytes_;
};

std::vector<std::size_t> some_sizes(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::size_t> sizes(300);
  for (std::size_t& bytes : sizes) bytes = 512 * (1 + random() % 1000);
  return sizes;
}

TEST(StepMemory, CountsALapEachTimeAllRequestsRepeat) {
  Steps steps;
  const auto sizes = some_sizes(1);
  steps.run(sizes);
  EXPECT_EQ(steps.laps(), 0u);
  steps.run(sizes);
  EXPECT_EQ(steps.laps(), 0u) << "recognized somewhat after its beginning, so not yet all the way round";
  for (std::uint32_t round = 1; round < 20; ++round) {
    steps.run(sizes);
    EXPECT_EQ(steps.laps(), round);
  }
}

TEST(StepMemory, CountsFromZeroAfterAStepThatDiffers) {
  Steps steps;
  const auto sizes = some_sizes(2);
  for (int i = 0; i < 5; ++i) steps.run(sizes);
  EXPECT_GT(steps.laps(), 0u);
  auto other = sizes;
  other[200] += 512;
  steps.run(other);
  EXPECT_EQ(steps.laps(), 0u);
  // An older record may be followed first, until it comes to the step that differed.
  for (int i = 0; i < 20; ++i) steps.run(sizes);
  EXPECT_GT(steps.laps(), 0u);
}

TEST(StepMemory, ForgetsItsRecord) {
  Steps steps;
  const auto sizes = some_sizes(3);
  for (int i = 0; i < 4; ++i) steps.run(sizes);
  EXPECT_GT(steps.laps(), 0u);
  steps.memory().forget();
  EXPECT_EQ(steps.laps(), 0u);
  std::size_t live_bytes = 4096;
  for (const std::size_t bytes : sizes) {
    EXPECT_EQ(steps.memory().find(bytes, live_bytes, 0), internal::StepMemory::kUnknown);
    steps.memory().store(bytes, live_bytes);
    live_bytes += bytes;
  }
}

}  // namespace
}  // namespace forebay
