// Memory at several addresses: stitching beside live blocks, and repeated steps.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "allocator/arena/arena_mappings.h"
#include "allocator/arena/learned.h"
#include "forebay/arena.h"
#include "forebay/memory_snapshot.h"
#include "forebay/model_backend.h"
#include "forebay/units.h"
#include "runtime/device/host/script.h"
#include "tests/allocator/arena/chunk.h"
#include "tests/allocator/arena/watched_backend.h"
#include "tests/support/gate.h"

namespace forebay {
namespace {

using testing::Extent;
using testing::Gate;
using testing::kChunk;
using testing::WatchedBackend;

struct StepEvent {
  bool is_free = false;
  std::size_t bytes = 0;  // The size of an allocation.
  std::size_t index = 0;  // Which allocation a free is of.
};

// A step of blocks of half a chunk to four chunks, at most six chunks at a time, all of which end in it.
std::vector<StepEvent> make_chunk_step(std::mt19937_64& random) {
  std::vector<StepEvent> step;
  std::vector<std::pair<std::size_t, std::size_t>> live;
  std::size_t live_bytes = 0;
  const auto drop = [&](std::size_t at) {
    step.push_back({true, 0, live[at].first});
    live_bytes -= live[at].second;
    live[at] = live.back();
    live.pop_back();
  };
  for (std::size_t next = 0; next < 24; ++next) {
    const std::size_t bytes = kChunk / 2 * (1 + random() % 8);
    while (live_bytes + bytes > 6 * kChunk || (!live.empty() && random() % 3 == 0))
      drop(random() % live.size());
    step.push_back({false, bytes, next});
    live.emplace_back(next, bytes);
    live_bytes += bytes;
  }
  while (!live.empty()) drop(random() % live.size());
  return step;
}

// Four chunks of four smallest ones each make the limit.
class ArenaViewsTest : public ::testing::Test {
 protected:
  void make(ArenaOptions options) {
    HostBackendOptions backend_options;
    backend_options.granularity = kChunk;
    backend_options.memory_bytes = 256_MiB;
    backend_ = std::move(ScriptedHostBackend::create(std::move(backend_options))).value();
    watched_ = std::make_unique<WatchedBackend>(*backend_);
    auto arena = Arena::create(*watched_, options);
    ASSERT_TRUE(arena.ok()) << arena.status().to_string();
    arena_ = std::move(arena).value();
    for (Stream& stream : streams_) stream = backend_->stream_create().value();
  }
  void TearDown() override {
    for (Stream stream : streams_) EXPECT_TRUE(backend_->stream_destroy(stream).ok());
    arena_.reset();
    EXPECT_EQ(backend_->live_handle_count(), 0u);
    EXPECT_EQ(backend_->charged_bytes(), 0u);
  }
  DevicePtr take(std::size_t bytes, Stream stream = {}, Region region = Region::kTransient) {
    auto block = arena_->allocate({.bytes = bytes, .region = region, .stream = stream});
    EXPECT_TRUE(block.ok()) << block.status().to_string();
    return block.ok() ? block.value() : nullptr;
  }
  void give(DevicePtr block, Stream stream = {}) {
    const Status status = arena_->free(block, stream);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  void fill(DevicePtr block, int pattern, std::size_t bytes) {
    std::memset(block, pattern, bytes);
    contents_[block] = {pattern, bytes};
  }
  // All blocks still have their bytes.
  void check_contents() const {
    for (const auto& [block, content] : contents_) {
      const auto wrong = std::find_if(
          block, block + content.bytes,
          [pattern = content.pattern](std::byte byte) { return byte != static_cast<std::byte>(pattern); });
      EXPECT_EQ(wrong - block, static_cast<std::ptrdiff_t>(content.bytes)) << "pattern " << content.pattern;
    }
  }
  // Trims until all work of the first stream is known to have ended. No memory goes back.
  void trim_to(std::size_t mapping_count) {
    // An event of earlier frees ends, then one is recorded for the later ones, and then that ends.
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
      EXPECT_EQ(arena_->trim(), 0u);
    }
    EXPECT_EQ(watched_->mapping_count(), mapping_count);
    EXPECT_EQ(mappings_of(*arena_).count, mapping_count);
  }
  // The chunks that these addresses show.
  std::set<std::uint64_t> chunks_of(DevicePtr address, std::size_t count) const {
    std::set<std::uint64_t> chunks;
    for (std::size_t i = 0; i < count; ++i) chunks.insert(watched_->chunk_at(address + i * kChunk).begin);
    return chunks;
  }
  void expect_only_for_first_stream(std::size_t bytes) {
    for (const Stream stream : {Stream(), streams_[1]}) {
      EXPECT_EQ(arena_->allocate({.bytes = bytes, .stream = stream}).status().code(),
                StatusCode::kOutOfMemory);
    }
  }
  std::uint64_t driver_calls() const { return arena_->statistics().driver_call_count; }

  struct Content {
    int pattern;
    std::size_t bytes;
  };
  std::unique_ptr<ScriptedHostBackend> backend_;
  std::unique_ptr<WatchedBackend> watched_;
  std::unique_ptr<Arena> arena_;
  Stream streams_[2];
  std::map<DevicePtr, Content> contents_;
};

// Eight chunks, of which the end of one, two whole ones and the beginning of a fourth are free and nowhere
// neighbours: a block of exactly their sum takes them all.
TEST_F(ArenaViewsTest, StitchesAnEndWholeChunksAndABeginningBesideLiveBlocks) {
  make({.limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  const std::size_t half = kChunk / 2;
  DevicePtr blocks[16];
  for (int i = 0; i < 16; ++i) fill(blocks[i] = take(half), i + 1, half);
  // Chunk 0 keeps its first half, 1 goes back, 2 stays, 3 goes back, 4 stays, 5 keeps its second half.
  for (const int i : {1, 2, 3, 6, 7, 10}) {
    give(blocks[i]);
    contents_.erase(blocks[i]);
  }
  // Half a chunk in front of a whole one lies side by side already: 1, 2 and 3; the rest has to be put there.
  const std::size_t bytes = 6 * half;
  const std::uint64_t moved = arena_->statistics().moved_chunk_count;
  DevicePtr large = take(bytes);
  ASSERT_NE(large, nullptr);

  EXPECT_GT(arena_->statistics().moved_chunk_count, moved);
  EXPECT_EQ(arena_->statistics().reserved_bytes, 8 * kChunk);
  EXPECT_EQ(arena_->statistics().live_bytes, 8 * kChunk);
  EXPECT_EQ(backend_->charged_bytes(), 8 * kChunk);
  fill(large, 0xEE, bytes);
  check_contents();
  EXPECT_EQ(arena_->allocate({.bytes = 512}).status().code(), StatusCode::kOutOfMemory);
  give(large);
  contents_.erase(large);
  // The memory serves its first addresses again, and still no neighbour is hurt.
  for (const int i : {1, 2, 3, 6, 7, 10}) fill(take(half), 100 + i, half);
  check_contents();
}

TEST_F(ArenaViewsTest, CountsDriverCallsExactly) {
  make({.limit_bytes = 8 * kChunk, .growth_bytes = kChunk, .largest_chunk_bytes = kChunk});
  DevicePtr blocks[8];
  for (DevicePtr& block : blocks) block = take(kChunk);
  // Each: a chunk, a mapping, access.
  EXPECT_EQ(driver_calls(), 24u);
  for (int i = 0; i < 8; i += 2) give(blocks[i]);
  EXPECT_EQ(driver_calls(), 24u);
  DevicePtr large = take(4 * kChunk);
  // Four mappings side by side, and access for all of them at once. (The first free chunk may serve in
  // place.)
  EXPECT_EQ(driver_calls(), 29u);
  const std::uint64_t calls = driver_calls();
  give(large);
  for (int i = 0; i < 8; i += 2) blocks[i] = take(kChunk);
  EXPECT_EQ(driver_calls(), calls);
  for (DevicePtr block : blocks) give(block);
  EXPECT_EQ(arena_->trim(), 8 * kChunk);
  EXPECT_EQ(watched_->mapping_count(), 0u);
  EXPECT_EQ(arena_->trim(), 0u);
}

// A chunk that is too large for a stitch is replaced by smaller ones.
TEST_F(ArenaViewsTest, BreaksALargeChunkWhenItNeedsAPartOfIt) {
  make({.limit_bytes = 16 * kChunk, .growth_bytes = 8 * kChunk, .largest_chunk_bytes = 8 * kChunk});
  DevicePtr low = take(8 * kChunk);
  DevicePtr wall = take(4 * kChunk);
  DevicePtr high = take(4 * kChunk);
  fill(wall, 1, 4 * kChunk);
  give(low);
  give(high);
  DevicePtr large = take(10 * kChunk);
  ASSERT_NE(large, nullptr);
  fill(large, 2, 10 * kChunk);
  check_contents();
  DevicePtr rest = take(2 * kChunk);
  ASSERT_NE(rest, nullptr);
  fill(rest, 3, 2 * kChunk);
  check_contents();
  EXPECT_EQ(backend_->charged_bytes(), 16 * kChunk);
}

TEST_F(ArenaViewsTest, SeveralThreadsNeverGetTheSameMemoryAtTwoAddresses) {
  make({.limit_bytes = 32 * kChunk, .growth_bytes = 4 * kChunk});
  std::mutex mutex;
  std::map<std::uint64_t, std::uint64_t> taken;  // Extents.
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(1234 + static_cast<unsigned>(t));
      std::vector<std::pair<DevicePtr, std::vector<Extent>>> mine;
      const auto drop = [&](std::size_t at) {
        {
          const std::lock_guard lock(mutex);
          for (const Extent& extent : mine[at].second) taken.erase(extent.begin);
        }
        EXPECT_TRUE(arena_->free(mine[at].first, {}).ok());
        mine[at] = mine.back();
        mine.pop_back();
      };
      for (int i = 0; i < 800; ++i) {
        if (mine.size() > 5 || (!mine.empty() && random() % 3 == 0)) drop(random() % mine.size());
        const std::size_t bytes = 512 * (1 + random() % 600);
        auto block = arena_->allocate({.bytes = bytes});
        if (!block.ok()) continue;
        auto extents = watched_->shown(block.value(), bytes);
        const std::lock_guard lock(mutex);
        for (const Extent& extent : extents) {
          auto next = taken.lower_bound(extent.begin);
          EXPECT_TRUE(next == taken.end() || next->first >= extent.end);
          EXPECT_TRUE(next == taken.begin() || std::prev(next)->second <= extent.begin);
          taken[extent.begin] = extent.end;
        }
        mine.emplace_back(block.value(), std::move(extents));
      }
      while (!mine.empty()) drop(0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(arena_->statistics().moved_chunk_count, 0u);
}

// Memory freed on a stream may go to other addresses for the same stream at once. But its old addresses must
// stay mapped until the stream's work is done with them, even if the arena is trimmed.
TEST_F(ArenaViewsTest, AddressesThatQueuedWorkMayStillUseStayMapped) {
  make({.limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  Gate gate;
  DevicePtr blocks[8];
  for (DevicePtr& block : blocks) block = take(kChunk, streams_[0]);
  ASSERT_TRUE(backend_->call_host(streams_[0], &Gate::wait, &gate).ok());
  for (int i = 0; i < 8; i += 2) {
    ASSERT_TRUE(backend_->fill_async(blocks[i], static_cast<std::uint8_t>(i), kChunk, streams_[0]).ok());
    give(blocks[i], streams_[0]);
  }
  watched_->on_unmap = [&](DevicePtr address, std::size_t bytes) {
    for (DevicePtr block : blocks) {
      EXPECT_TRUE(address + bytes <= block || block + kChunk <= address) << "queued work uses it";
    }
  };
  EXPECT_EQ(arena_->allocate({.bytes = 4 * kChunk, .stream = streams_[1]}).status().code(),
            StatusCode::kOutOfMemory);
  DevicePtr large = take(4 * kChunk, streams_[0]);
  ASSERT_NE(large, nullptr);
  ASSERT_TRUE(backend_->fill_async(large, 0x77, 4 * kChunk, streams_[0]).ok());
  give(large, streams_[0]);
  EXPECT_EQ(arena_->trim(), 0u);
  gate.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
  watched_->on_unmap = nullptr;
  // The first call may only record the event that the second finds completed.
  std::size_t given_back = arena_->trim();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
  given_back += arena_->trim();
  EXPECT_GT(given_back, 0u);
}

// The host frees it, so only the memory itself says which work has to end.
TEST_F(ArenaViewsTest, AStitchedBlockKeepsTheStreamsItsMemoryWaitedFor) {
  make({.limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  Gate gate;
  DevicePtr blocks[8];
  for (int i = 0; i < 8; ++i) blocks[i] = take(kChunk, streams_[i % 2]);
  ASSERT_TRUE(backend_->call_host(streams_[0], &Gate::wait, &gate).ok());
  for (int i = 0; i < 8; i += 2) give(blocks[i], streams_[0]);
  give(take(4 * kChunk, streams_[0]));

  expect_only_for_first_stream(4 * kChunk);
  gate.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
}

// Two of its chunks come from other addresses, where work may still use them; one was free for all.
TEST_F(ArenaViewsTest, ABlockOfShownMemoryKeepsTheStreamsItsMemoryWaitedFor) {
  make({.limit_bytes = 4 * kChunk, .largest_chunk_bytes = kChunk});
  Gate gate;
  DevicePtr blocks[4];
  for (int i = 0; i < 4; ++i) blocks[i] = take(kChunk, streams_[i % 2]);
  give(blocks[0]);
  give(blocks[2]);
  DevicePtr large = take(2 * kChunk, streams_[0]);
  ASSERT_TRUE(backend_->call_host(streams_[0], &Gate::wait, &gate).ok());
  give(blocks[1]);
  give(large, streams_[0]);
  DevicePtr row = take(3 * kChunk, streams_[0]);
  EXPECT_EQ(row, blocks[0]);
  give(row);

  expect_only_for_first_stream(3 * kChunk);
  gate.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
}

// Their memory is live at other addresses all the time, so no free memory waits for the stream.
TEST_F(ArenaViewsTest, TrimUnmapsAddressesWhoseMemoryIsLiveElsewhere) {
  make({.limit_bytes = 4 * kChunk, .largest_chunk_bytes = kChunk});
  Gate gates[2];
  DevicePtr blocks[4];
  for (DevicePtr& block : blocks) block = take(kChunk, streams_[0]);
  ASSERT_TRUE(backend_->call_host(streams_[0], &Gate::wait, &gates[0]).ok());
  give(blocks[0], streams_[0]);
  give(blocks[2], streams_[0]);
  DevicePtr large = take(2 * kChunk, streams_[0]);
  EXPECT_EQ(watched_->mapping_count(), 6u);
  EXPECT_EQ(arena_->trim(), 0u);
  EXPECT_EQ(watched_->mapping_count(), 6u) << "queued work may use the old addresses";
  // Back to the old addresses, which are still mapped.
  give(large, streams_[0]);
  give(blocks[1], streams_[0]);
  DevicePtr row = take(3 * kChunk, streams_[0]);
  EXPECT_EQ(row, blocks[0]);
  gates[0].open();
  trim_to(4);

  ASSERT_TRUE(backend_->call_host(streams_[0], &Gate::wait, &gates[1]).ok());
  give(row, streams_[0]);
  blocks[0] = take(kChunk, streams_[0]);
  blocks[1] = take(kChunk, streams_[0]);
  blocks[2] = take(kChunk, streams_[0]);
  give(blocks[0], streams_[0]);
  give(blocks[2], streams_[0]);
  std::memset(take(2 * kChunk, streams_[0]), 1, 2 * kChunk);
  EXPECT_EQ(watched_->mapping_count(), 6u);
  gates[1].open();
  trim_to(4);
}

// No memory has waited for the stream before, so only the block itself tells that addresses wait for it.
TEST_F(ArenaViewsTest, TrimUnmapsAddressesFromWhichABlockTookTheMemoryThatTheyShow) {
  make({.limit_bytes = 4 * kChunk, .largest_chunk_bytes = kChunk});
  Gate gate;
  DevicePtr blocks[4];
  for (DevicePtr& block : blocks) block = take(kChunk);
  give(blocks[0]);
  give(blocks[2]);
  DevicePtr large = take(2 * kChunk, streams_[0]);
  EXPECT_EQ(watched_->mapping_count(), 6u);
  ASSERT_TRUE(backend_->call_host(streams_[0], &Gate::wait, &gate).ok());
  give(large, streams_[0]);
  give(blocks[1]);
  EXPECT_EQ(take(3 * kChunk, streams_[0]), blocks[0]);

  gate.open();
  trim_to(4);
}

// --- other threads act while a request has released its lock -------

TEST_F(ArenaViewsTest, ATagsLimitHoldsAfterMemoryWasMapped) {
  make({.limit_bytes = 16 * kChunk});
  const Tag tag = arena_->tag_create("part", 5 * kChunk).value();
  take(kChunk);
  DevicePtr gap = take(2 * kChunk);
  take(kChunk);
  give(gap);
  bool done = false;
  watched_->on_map = [&](DevicePtr, std::size_t, bool) {
    if (std::exchange(done, true)) return;
    EXPECT_TRUE(arena_->allocate({.bytes = 2 * kChunk, .tag = tag}).ok());
  };
  // Persistent, so that it gets new memory and leaves the gap alone.
  const AllocationRequest request{.bytes = 4 * kChunk, .region = Region::kPersistent, .tag = tag};
  EXPECT_EQ(arena_->allocate(request).status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(arena_->statistics(tag).live_bytes, 2 * kChunk);

  const std::uint64_t calls = driver_calls();
  take(4 * kChunk, {}, Region::kPersistent);
  EXPECT_EQ(driver_calls(), calls) << "the mapped memory was lost";
}

TEST_F(ArenaViewsTest, ATagsLimitHoldsAfterEventsWereRecorded) {
  make({.limit_bytes = 16 * kChunk});
  const Tag tag = arena_->tag_create("part", 5 * kChunk).value();
  take(kChunk);
  DevicePtr gap = take(2 * kChunk);
  take(kChunk);
  DevicePtr fitting = take(4 * kChunk);
  take(kChunk);
  DevicePtr waiting = take(kChunk, streams_[0]);
  give(gap);
  give(waiting, streams_[0]);
  bool done = false;
  watched_->on_event_record = [&](Stream) {
    if (std::exchange(done, true)) return;
    EXPECT_TRUE(arena_->allocate({.bytes = 2 * kChunk, .tag = tag}).ok());
    give(fitting);
  };
  EXPECT_EQ(arena_->allocate({.bytes = 4 * kChunk, .tag = tag, .stream = streams_[1]}).status().code(),
            StatusCode::kOutOfMemory);
  EXPECT_TRUE(done);
  EXPECT_EQ(arena_->statistics(tag).live_bytes, 2 * kChunk);
}

TEST_F(ArenaViewsTest, ATagThatIsPausedMeanwhileGetsNoBlock) {
  make({.limit_bytes = 16 * kChunk});
  const Tag tag = arena_->tag_create({.name = "rollout", .pausable = true}).value();
  give(take(kChunk, streams_[0]), streams_[0]);
  bool done = false;
  watched_->on_event_record = [&](Stream) {
    if (std::exchange(done, true)) return;
    EXPECT_TRUE(arena_->pause(tag, true).ok());
  };
  EXPECT_EQ(arena_->allocate({.bytes = 4 * kChunk, .tag = tag, .stream = streams_[1]}).status().code(),
            StatusCode::kUnavailable);
  EXPECT_TRUE(done);
  EXPECT_EQ(arena_->statistics(tag).live_bytes, 0u);
  EXPECT_TRUE(arena_->resume(tag).ok());
}

// The Backend lets the new addresses go at the third attempt. They show free memory meanwhile.
TEST_F(ArenaViewsTest, AStitchThatCannotBeUndoneServesNoBlock) {
  make({.limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  DevicePtr blocks[8];
  for (DevicePtr& block : blocks) block = take(kChunk);
  for (int i = 0; i < 8; i += 2) give(blocks[i]);
  backend_->add_fault({HostCall::kSetAccess, 1, Status(StatusCode::kInternal, "scripted")});
  backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
  backend_->add_fault({HostCall::kUnmap, 2, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(arena_->allocate({.bytes = 4 * kChunk}).status().code(), StatusCode::kInternal);

  DevicePtr block = take(4 * kChunk);

  EXPECT_EQ(watched_->shown(block, 4 * kChunk).size(), 4u);
  std::memset(block, 1, 4 * kChunk);
}

// The beginning of the block keeps its addresses, which lie in front of unmapped ones.
TEST_F(ArenaViewsTest, AStitchThatFailsBehindFreeMemoryLosesNone) {
  make({.limit_bytes = 8 * kChunk, .growth_bytes = kChunk, .largest_chunk_bytes = kChunk});
  DevicePtr blocks[7];
  for (DevicePtr& block : blocks) block = take(kChunk);
  take(kChunk / 4);
  DevicePtr const last = take(3 * kChunk / 4);
  give(last);
  for (const int i : {1, 3, 5}) give(blocks[i]);
  const AllocationRequest request{.bytes = 15 * kChunk / 4, .alignment = 1024};
  backend_->add_fault({HostCall::kSetAccess, 1, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(arena_->allocate(request).status().code(), StatusCode::kInternal);

  DevicePtr const beginning = take(3 * kChunk / 4);
  EXPECT_EQ(beginning, last);
  give(beginning);
  const auto block = arena_->allocate(request);
  ASSERT_TRUE(block.ok()) << block.status().to_string();
  EXPECT_EQ(block.value(), last) << "the block does not begin in front of unmapped addresses";
}

// The address range is twice the limit, so the addresses of old stitches have to be used again.
TEST_F(ArenaViewsTest, ReusesTheAddressesOfOldStitches) {
  make({.reserve_bytes = 20 * kChunk, .limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  DevicePtr blocks[8];
  for (int i = 0; i < 8; ++i) fill(blocks[i] = take(kChunk), i, kChunk);
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    // Any four of them make one block, without a request refused.
    int order[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    std::shuffle(order, order + 8, random);
    for (int i = 0; i < 4; ++i) {
      contents_.erase(blocks[order[i]]);
      give(blocks[order[i]]);
    }
    DevicePtr large = take(4 * kChunk);
    ASSERT_NE(large, nullptr) << "in round " << round;
    fill(large, 0xA0 + round % 16, 4 * kChunk);
    check_contents();
    contents_.erase(large);
    give(large);
    for (int i = 0; i < 4; ++i) fill(blocks[order[i]] = take(kChunk), order[i], kChunk);
  }
  check_contents();
}

// Addresses are scarce, so other chunks come to the addresses that a block had in an earlier step, and one
// chunk may then be there twice. No block gets such addresses again.
TEST_F(ArenaViewsTest, NoBlockShowsAByteTwice) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    if (arena_ != nullptr) TearDown();
    make({.reserve_bytes = 16 * kChunk, .limit_bytes = 6 * kChunk, .largest_chunk_bytes = kChunk});
    std::mt19937_64 random(seed);
    const std::vector<StepEvent> steps[] = {make_chunk_step(random), make_chunk_step(random),
                                            make_chunk_step(random)};
    for (int pass = 0; pass < 60; ++pass) {
      std::map<std::size_t, std::pair<DevicePtr, std::vector<Extent>>> live;
      std::map<std::uint64_t, std::uint64_t> taken;
      for (const StepEvent& event : steps[random() % 3]) {
        if (event.is_free) {
          const auto freed = live.find(event.index);
          if (freed == live.end()) continue;
          for (const Extent& extent : freed->second.second) taken.erase(extent.begin);
          give(freed->second.first);
          live.erase(freed);
          continue;
        }
        const auto block = arena_->allocate({.bytes = event.bytes});
        if (!block.ok()) continue;
        auto extents = watched_->shown(block.value(), event.bytes);
        for (const Extent& extent : extents) {
          const auto next = taken.lower_bound(extent.begin);
          ASSERT_TRUE(next == taken.end() || next->first >= extent.end) << "pass " << pass;
          ASSERT_TRUE(next == taken.begin() || std::prev(next)->second <= extent.begin) << "pass " << pass;
          taken[extent.begin] = extent.end;
        }
        live[event.index] = {block.value(), std::move(extents)};
      }
    }
  }
}

// A file of learned placements by hand: the addresses of the second block show 70 chunks in the order in
// which no others do, and then the last of them once more.
TEST_F(ArenaViewsTest, AddressesOfManyChunksServeNoBlockIfTheyShowTheLastOneTwice) {
  constexpr std::size_t kCount = 70;
  make({.limit_bytes = 80 * kChunk, .largest_chunk_bytes = kChunk});
  ASSERT_TRUE(arena_->learn_begin().ok());
  give(take(kCount * kChunk));
  give(take((kCount + 1) * kChunk));
  internal::LearnedPlacements learned =
      internal::LearnedPlacements::decode(arena_->learn_end().value()).value();
  ASSERT_EQ(learned.placements.size(), 2u);
  const std::size_t first = learned.transient_offset;
  const std::size_t second = first + 2 * kCount * kChunk;
  learned.chunk_bytes.assign(kCount, kChunk);
  learned.mappings.clear();
  for (std::uint32_t i = 0; i < kCount; ++i) learned.mappings.push_back({first + i * kChunk, i});
  for (std::uint32_t i = 0; i < kCount; ++i)
    learned.mappings.push_back({second + i * kChunk, static_cast<std::uint32_t>(kCount) - 1 - i});
  learned.mappings.push_back({second + kCount * kChunk, 0});
  learned.placements[0].offset = first;
  learned.placements[1].offset = second;
  const std::string text = learned.encode();
  TearDown();
  make({.limit_bytes = 80 * kChunk, .largest_chunk_bytes = kChunk, .learned = text});
  DevicePtr const earlier = take(kCount * kChunk);
  const std::set<std::uint64_t> chunks = chunks_of(earlier, kCount);
  give(earlier);

  DevicePtr const block = take((kCount + 1) * kChunk);

  EXPECT_EQ(chunks.size(), kCount);
  EXPECT_NE(watched_->chunk_at(earlier + (second - first)).end, 0u) << "the file was not followed";
  EXPECT_EQ(chunks_of(block, kCount + 1).size(), kCount + 1);
}

// The memory is wholly free and may serve the tag once its old addresses are unmapped. There are addresses
// for the block once the shadows are unmapped too.
TEST_F(ArenaViewsTest, ServesAtTheFirstCallIfItCanServeAtAll) {
  make({.reserve_bytes = 20 * kChunk, .limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  const Tag tag = arena_->tag_create({.name = "pausable", .pausable = true}).value();
  give(take(3 * kChunk / 2));
  give(take(13 * kChunk / 2, {}, Region::kPersistent));
  take(kChunk, {}, Region::kPersistent);

  const auto block = arena_->allocate({.bytes = 13 * kChunk / 2, .tag = tag});

  EXPECT_TRUE(block.ok()) << block.status().to_string();
}

TEST_F(ArenaViewsTest, AFixedBlockHasOneChunkOfItsOwnThatNeverMoves) {
  make({.limit_bytes = 16 * kChunk});
  auto fixed = arena_->allocate({.bytes = kChunk + 512, .fixed = true});
  ASSERT_TRUE(fixed.ok()) << fixed.status().to_string();
  EXPECT_EQ(backend_->charged_bytes(), 2 * kChunk);
  EXPECT_EQ(backend_->call_count(HostCall::kChunkCreate), 1u);
  EXPECT_EQ(arena_->block_bytes(fixed.value()), 2 * kChunk);
  EXPECT_EQ(arena_->statistics().live_bytes, 2 * kChunk);
  EXPECT_EQ(arena_->statistics().requested_bytes, kChunk + 512);
  fill(fixed.value(), 9, kChunk + 512);
  const Extent chunk = watched_->chunk_at(fixed.value());
  EXPECT_EQ(chunk.end - chunk.begin, 2 * kChunk);

  // No other block gets a byte of its chunk, even if memory is scarce.
  std::mt19937_64 random(11);
  std::vector<std::pair<DevicePtr, std::size_t>> blocks;
  for (int i = 0; i < 2000; ++i) {
    if (!blocks.empty() && random() % 2 == 0) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      give(blocks.back().first);
      blocks.pop_back();
    }
    const std::size_t bytes = 512 * (1 + random() % 500);
    auto block = arena_->allocate({.bytes = bytes});
    if (!block.ok()) continue;
    for (const Extent& extent : watched_->shown(block.value(), bytes)) {
      ASSERT_TRUE(extent.end <= chunk.begin || chunk.end <= extent.begin);
    }
    blocks.emplace_back(block.value(), bytes);
  }
  int mapping_count = 0;
  const Extent after = watched_->chunk_at(fixed.value(), &mapping_count);
  EXPECT_EQ(after.begin, chunk.begin);
  EXPECT_EQ(mapping_count, 1);
  check_contents();
  give(fixed.value());
  EXPECT_EQ(arena_->statistics().requested_bytes,
            arena_->statistics().live_bytes);  // All others are whole granules.
}

TEST_F(ArenaViewsTest, AFixedBlockReplacesFreeChunks) {
  make({.limit_bytes = 8 * kChunk});
  DevicePtr all = take(8 * kChunk);
  EXPECT_EQ(arena_->allocate({.bytes = 1, .fixed = true}).status().code(), StatusCode::kOutOfMemory);
  give(all);
  EXPECT_TRUE(arena_->allocate({.bytes = 3 * kChunk, .fixed = true}).ok());
  EXPECT_LE(backend_->charged_bytes(), 8 * kChunk);
  EXPECT_EQ(arena_->allocate({.bytes = 9 * kChunk, .fixed = true}).status().code(), StatusCode::kOutOfMemory);
}

TEST_F(ArenaViewsTest, AFixedBlockThatIsRefusedLeavesFreeMemoryMapped) {
  make({.limit_bytes = 8 * kChunk});
  DevicePtr low = take(4 * kChunk);
  take(4 * kChunk);
  give(low);
  const std::uint64_t calls = driver_calls();
  EXPECT_EQ(arena_->allocate({.bytes = 5 * kChunk, .fixed = true}).status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(driver_calls(), calls) << "it cannot suffice";

  backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(arena_->allocate({.bytes = 4 * kChunk, .fixed = true}).status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(take(4 * kChunk), low);
}

// --- steps that repeat, on a device too large for this machine ----

// A step of `count` allocations of random sizes and lifetimes, at most `limit` bytes at a time.
std::vector<StepEvent> make_step(std::uint64_t seed, int count, std::size_t limit) {
  std::mt19937_64 random(seed);
  std::vector<StepEvent> step;
  std::vector<std::pair<std::size_t, std::size_t>> live;
  std::size_t live_bytes = 0;
  std::size_t next = 0;
  const auto drop = [&](std::size_t at) {
    step.push_back({true, 0, live[at].first});
    live_bytes -= live[at].second;
    live[at] = live.back();
    live.pop_back();
  };
  for (int i = 0; i < count; ++i) {
    // One draw in a statement: the order of two in an expression is the compiler's choice.
    const std::uint64_t draw = random();
    const std::size_t bytes = 512 * (1 + draw % (random() % 8 == 0 ? 900'000 : 30'000));
    while (live_bytes + bytes > limit || (!live.empty() && random() % 3 == 0)) drop(random() % live.size());
    step.push_back({false, bytes, next});
    live.emplace_back(next++, bytes);
    live_bytes += bytes;
  }
  while (!live.empty()) drop(random() % live.size());
  return step;
}

class ArenaStepsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    backend_ = std::move(ModelBackend::create({.memory_bytes = std::size_t{64} << 30})).value();
    watched_ = std::make_unique<WatchedBackend>(*backend_);
    arena_ = std::move(Arena::create(*watched_, {.limit_bytes = std::size_t{8} << 30})).value();
    stream_ = backend_->stream_create().value();
  }
  void TearDown() override {
    arena_->trim();
    arena_->trim();
    EXPECT_EQ(arena_->statistics().live_bytes, 0u);
    EXPECT_EQ(backend_->charged_bytes(), 0u);
    EXPECT_EQ(watched_->mapping_count(), 0u);
    EXPECT_TRUE(backend_->stream_destroy(stream_).ok());
    arena_.reset();
    EXPECT_EQ(backend_->live_handle_count(), 0u);
  }
  void restart() {
    TearDown();
    SetUp();
  }
  // Returns the driver calls it took.
  std::uint64_t run(const std::vector<StepEvent>& step) {
    const std::uint64_t before = arena_->statistics().driver_call_count;
    std::map<std::size_t, std::pair<DevicePtr, std::vector<Extent>>> live;
    std::map<std::uint64_t, std::uint64_t> taken;
    for (const StepEvent& event : step) {
      if (event.is_free) {
        for (const Extent& extent : live[event.index].second) taken.erase(extent.begin);
        EXPECT_TRUE(arena_->free(live[event.index].first, stream_).ok());
        live.erase(event.index);
        continue;
      }
      auto block = arena_->allocate({.bytes = event.bytes, .stream = stream_});
      if (!block.ok()) {
        ADD_FAILURE() << block.status().to_string();
        return 0;
      }
      auto extents = watched_->shown(block.value(), event.bytes);
      for (const Extent& extent : extents) {
        auto next = taken.lower_bound(extent.begin);
        EXPECT_TRUE(next == taken.end() || next->first >= extent.end) << "memory handed out twice";
        EXPECT_TRUE(next == taken.begin() || std::prev(next)->second <= extent.begin) << "handed out twice";
        taken[extent.begin] = extent.end;
      }
      live[event.index] = {block.value(), std::move(extents)};
    }
    return arena_->statistics().driver_call_count - before;
  }
  std::uint64_t recalled() const { return arena_->statistics().recalled_count; }

  std::unique_ptr<ModelBackend> backend_;
  std::unique_ptr<WatchedBackend> watched_;
  std::unique_ptr<Arena> arena_;
  Stream stream_;
};

constexpr int kStepCount = 600;
constexpr std::size_t kStepBytes = std::size_t{7} << 30;

// The first pass starts without memory, the second with the memory of the first, placed for another need, and
// the third may still change mappings. From the third repeat on there are no driver calls.
TEST_F(ArenaStepsTest, ARepeatedStepMakesNoDriverCallFromItsThirdPassOn) {
  for (const std::size_t limit : {std::size_t{5} << 30, std::size_t{7} << 30}) {
    // The last four once made calls in their third pass.
    for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6, 11, 23, 31, 36}) {
      SCOPED_TRACE("step seed " + std::to_string(seed) + ", limit " + std::to_string(limit >> 30));
      restart();
      const std::vector<StepEvent> step = make_step(seed, kStepCount, limit);
      EXPECT_GT(run(step), 0u);
      run(step);
      for (int pass = 3; pass <= 5; ++pass) {
        const std::uint64_t before = recalled();
        EXPECT_EQ(run(step), 0u) << "pass " << pass;
        if (pass > 3) {
          EXPECT_EQ(recalled() - before, static_cast<std::uint64_t>(kStepCount)) << "pass " << pass;
        }
      }
    }
  }
}

// Four kinds of steps, one after the other and then in turn, close to the limit.
TEST_F(ArenaStepsTest, RemembersSeveralSteps) {
  std::vector<std::vector<StepEvent>> steps;
  for (std::uint64_t seed = 21; seed < 25; ++seed) steps.push_back(make_step(seed, kStepCount, kStepBytes));
  for (int round = 0; round < 6; ++round) {
    for (const auto& step : steps) run(step);
  }
  for (const auto& step : steps) EXPECT_EQ(run(step), 0u);
}

TEST_F(ArenaStepsTest, AStepThatDivergesIsServedAndTheOldOneIsStillKnown) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("step seed " + std::to_string(seed));
    restart();
    const std::vector<StepEvent> step = make_step(seed, kStepCount, std::size_t{5} << 30);
    for (int pass = 0; pass < 4; ++pass) run(step);
    ASSERT_EQ(run(step), 0u);
    // The same beginning, and then each other size is another one.
    std::vector<StepEvent> other = step;
    for (std::size_t i = other.size() / 2; i < other.size(); i += 2) {
      if (!other[i].is_free && other[i].bytes > 4096) other[i].bytes -= 1024;
    }
    const std::uint64_t before = recalled();
    run(other);
    EXPECT_GT(recalled() - before, 100u) << "the common beginning";
    EXPECT_LT(recalled() - before, static_cast<std::uint64_t>(kStepCount)) << "the other end";
    for (int pass = 0; pass < 3; ++pass) run(step);
    EXPECT_EQ(run(step), 0u);
    EXPECT_EQ(run(step), 0u);
  }
}

TEST_F(ArenaStepsTest, AnotherStepInBetweenIsNoReasonToForget) {
  const std::vector<StepEvent> step = make_step(5, kStepCount, kStepBytes);
  const std::vector<StepEvent> evaluation = make_step(6, kStepCount / 2, kStepBytes / 2);
  for (int pass = 0; pass < 4; ++pass) run(step);
  run(evaluation);
  const std::uint64_t before = recalled();
  run(step);
  EXPECT_GE(recalled() - before, static_cast<std::uint64_t>(kStepCount) * 9 / 10);
  for (int pass = 0; pass < 3; ++pass) {
    run(evaluation);
    run(step);
  }
  EXPECT_EQ(run(evaluation) + run(step), 0u);
}

// As in training: the long-lived blocks exist before the first step.
TEST_F(ArenaStepsTest, AStepThatBeginsWithLiveBlocksIsRecognised) {
  auto parameters = arena_->allocate({.bytes = 700_MiB, .region = Region::kPersistent, .stream = stream_});
  ASSERT_TRUE(parameters.ok());
  const std::vector<StepEvent> step = make_step(7, kStepCount, std::size_t{6} << 30);
  for (int pass = 0; pass < 4; ++pass) run(step);
  const std::uint64_t before = recalled();
  EXPECT_EQ(run(step), 0u);
  EXPECT_GE(recalled() - before, static_cast<std::uint64_t>(kStepCount) - 8);
  EXPECT_TRUE(arena_->free(parameters.value(), stream_).ok());
}

// The recorded addresses may be unmapped: then the step is placed anew.
TEST_F(ArenaStepsTest, AStepAfterATrimIsPlacedAnew) {
  const std::vector<StepEvent> step = make_step(8, kStepCount, kStepBytes);
  for (int pass = 0; pass < 3; ++pass) run(step);
  arena_->trim();
  EXPECT_EQ(backend_->charged_bytes(), 0u);
  EXPECT_GT(run(step), 0u);
  for (int pass = 0; pass < 2; ++pass) run(step);
  EXPECT_EQ(run(step), 0u);
}

// Another block became live and may lie at recorded addresses.
TEST_F(ArenaStepsTest, ANewLongLivedBlockDisturbsNoStep) {
  const std::vector<StepEvent> step = make_step(9, kStepCount, kStepBytes);
  for (int pass = 0; pass < 3; ++pass) run(step);
  auto stays = arena_->allocate({.bytes = 300_MiB, .stream = stream_});
  ASSERT_TRUE(stays.ok());
  const auto memory = watched_->shown(stays.value(), 300_MiB);
  for (int pass = 0; pass < 3; ++pass) run(step);
  EXPECT_EQ(run(step), 0u);
  const auto after = watched_->shown(stays.value(), 300_MiB);
  ASSERT_EQ(after.size(), memory.size());
  EXPECT_EQ(after.front().begin, memory.front().begin);
  EXPECT_TRUE(arena_->free(stays.value(), stream_).ok());
}

// --- snapshots and statistics ------------------------------------

TEST_F(ArenaViewsTest, ASnapshotTilesOwnedMemoryAndAddsUp) {
  make({.limit_bytes = 16 * kChunk, .largest_chunk_bytes = kChunk, .history_count = 64});
  std::mt19937_64 random(21);
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 400; ++i) {
    if (!blocks.empty() && random() % 2 == 0) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      give(blocks.back(), random() % 2 == 0 ? streams_[0] : Stream());
      blocks.pop_back();
    }
    auto block = arena_->allocate({.bytes = 1 + random() % (3 * kChunk), .stream = streams_[0]});
    if (block.ok()) blocks.push_back(block.value());
    if (i % 20 != 0) continue;
    const MemorySnapshot snapshot = arena_->snapshot();
    const ArenaStatistics statistics = arena_->statistics();
    std::uint64_t total = 0, allocated = 0, requested = 0, segment_end = 0;
    for (const SnapshotSegment& segment : snapshot.segments) {
      EXPECT_GE(segment.address, segment_end);
      segment_end = segment.address + segment.total_size;
      std::uint64_t at = segment.address, block_allocated = 0, block_active = 0;
      for (const SnapshotBlock& part : segment.blocks) {
        EXPECT_EQ(part.address, at);
        at += part.size;
        if (part.state == SnapshotBlockState::kActiveAllocated) block_allocated += part.size;
        if (part.state != SnapshotBlockState::kInactive) block_active += part.size;
      }
      EXPECT_EQ(at, segment_end);
      EXPECT_EQ(segment.allocated_size, block_allocated);
      EXPECT_EQ(segment.active_size, block_active);
      total += segment.total_size;
      allocated += segment.allocated_size;
      requested += segment.requested_size;
    }
    EXPECT_EQ(allocated, statistics.live_bytes);
    EXPECT_EQ(requested, statistics.requested_bytes);
    EXPECT_LE(total, statistics.reserved_bytes);
    EXPECT_GE(total + kChunk * 16, statistics.reserved_bytes);
    ASSERT_EQ(snapshot.device_traces.size(), 1u);
    const auto& trace = snapshot.device_traces[0];
    EXPECT_LE(trace.size(), 64u);
    for (std::size_t j = 1; j < trace.size(); ++j) EXPECT_LE(trace[j - 1].time_us, trace[j].time_us);
  }
  for (DevicePtr block : blocks) give(block, streams_[0]);
}

TEST_F(ArenaViewsTest, HistoryTellsTheLatestEventsInOrder) {
  make({.limit_bytes = 4 * kChunk, .history_count = 6});
  DevicePtr first = take(kChunk, streams_[0]);
  DevicePtr second = take(2 * kChunk, streams_[0]);
  EXPECT_EQ(arena_->allocate({.bytes = 5 * kChunk}).status().code(), StatusCode::kOutOfMemory);
  give(first, streams_[0]);
  give(second);
  const std::vector<SnapshotEvent> events = arena_->snapshot().device_traces.at(0);
  const auto address = [](DevicePtr block) { return reinterpret_cast<std::uintptr_t>(block); };
  const auto stream = reinterpret_cast<std::uintptr_t>(streams_[0].handle);
  ASSERT_EQ(events.size(), 6u);  // The mapping of the first is forgotten.
  EXPECT_EQ(events[0].action, SnapshotAction::kAlloc);
  EXPECT_EQ(events[0].address, address(first));
  EXPECT_EQ(events[0].size, kChunk);
  EXPECT_EQ(events[0].stream, stream);
  EXPECT_EQ(events[1].action, SnapshotAction::kSegmentMap);
  EXPECT_EQ(events[1].address, address(second));
  EXPECT_EQ(events[1].size, 2 * kChunk);
  EXPECT_EQ(events[1].stream, 0u);
  EXPECT_EQ(events[2].action, SnapshotAction::kAlloc);
  EXPECT_EQ(events[2].address, address(second));
  EXPECT_EQ(events[3].action, SnapshotAction::kOutOfMemory);
  EXPECT_EQ(events[3].size, 5 * kChunk);
  EXPECT_EQ(events[3].address, kChunk) << "what is left of the limit";
  EXPECT_EQ(events[4].action, SnapshotAction::kFreeCompleted);
  EXPECT_EQ(events[4].address, address(first));
  EXPECT_EQ(events[4].stream, stream);
  EXPECT_EQ(events[5].action, SnapshotAction::kFreeCompleted);
  EXPECT_EQ(events[5].address, address(second));
  EXPECT_EQ(events[5].size, 2 * kChunk);
  EXPECT_EQ(events[5].stream, 0u);
  const auto now_us = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(
                                                     std::chrono::system_clock::now().time_since_epoch())
                                                     .count());
  EXPECT_LE(events[5].time_us, now_us);
  EXPECT_GT(events[5].time_us + 3'600'000'000, now_us) << "an hour ago";
  // The first attempt may only record the event of the stream.
  std::size_t trimmed_bytes = 0;
  for (int i = 0; i < 3; ++i) {
    trimmed_bytes += arena_->trim();
    ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
  }
  ASSERT_EQ(trimmed_bytes, 3 * kChunk);
  const std::vector<SnapshotEvent> later = arena_->snapshot().device_traces.at(0);
  EXPECT_EQ(later.back().action, SnapshotAction::kSegmentUnmap);
  std::uint64_t unmapped = 0;
  for (const SnapshotEvent& event : later)
    unmapped += event.action == SnapshotAction::kSegmentUnmap ? event.size : 0;
  EXPECT_EQ(unmapped, 3 * kChunk);
}

TEST_F(ArenaViewsTest, ASnapshotTellsEachBlock) {
  make({.limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  const DevicePtr first = take(kChunk - 100, streams_[0]);
  const DevicePtr second = take(2 * kChunk, streams_[1]);
  const DevicePtr third = take(kChunk, streams_[1]);
  Gate gate;
  ASSERT_TRUE(backend_->call_host(streams_[1], &Gate::wait, &gate).ok());
  give(second, streams_[1]);
  const MemorySnapshot snapshot = arena_->snapshot();
  gate.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[1]).ok());

  const auto address = [](DevicePtr block) { return reinterpret_cast<std::uintptr_t>(block); };
  ASSERT_EQ(snapshot.segments.size(), 1u);
  const SnapshotSegment& segment = snapshot.segments[0];
  EXPECT_EQ(segment.address, address(first));
  EXPECT_EQ(segment.stream, reinterpret_cast<std::uintptr_t>(streams_[0].handle));
  EXPECT_EQ(segment.total_size, 4 * kChunk);
  EXPECT_EQ(segment.allocated_size, 2 * kChunk);
  EXPECT_EQ(segment.active_size, 4 * kChunk);
  EXPECT_EQ(segment.requested_size, 2 * kChunk - 100);
  ASSERT_EQ(segment.blocks.size(), 3u);
  EXPECT_EQ(segment.blocks[0].requested_size, kChunk - 100);
  EXPECT_EQ(segment.blocks[0].state, SnapshotBlockState::kActiveAllocated);
  EXPECT_EQ(segment.blocks[1].address, address(second));
  EXPECT_EQ(segment.blocks[1].size, 2 * kChunk);
  EXPECT_EQ(segment.blocks[1].requested_size, 0u);
  EXPECT_EQ(segment.blocks[1].state, SnapshotBlockState::kActivePendingFree);
  EXPECT_EQ(segment.blocks[2].requested_size, kChunk);
  ASSERT_EQ(snapshot.allocator_settings.size(), 3u);
  EXPECT_EQ(std::get<std::int64_t>(snapshot.allocator_settings[1].value), 8 * kChunk);
  EXPECT_EQ(std::get<std::int64_t>(snapshot.allocator_settings[2].value), kChunk);
  // A segment that begins with a free block, or with a block of the host, is no stream's.
  give(first, streams_[0]);
  EXPECT_EQ(arena_->snapshot().segments.at(0).stream, 0u);
  const DevicePtr host = take(512);
  for (const SnapshotSegment& each : arena_->snapshot().segments) EXPECT_EQ(each.stream, 0u);
  give(host);
  give(third, streams_[1]);
}

TEST_F(ArenaViewsTest, CountsPerStream) {
  make({.limit_bytes = 8 * kChunk});
  DevicePtr first = take(1000, streams_[0]);
  take(kChunk, streams_[1]);
  take(512);
  EXPECT_EQ(arena_->statistics(streams_[0]).live_bytes, 1024u);
  EXPECT_EQ(arena_->statistics(streams_[0]).requested_bytes, 1000u);
  EXPECT_EQ(arena_->statistics(streams_[1]).live_bytes, kChunk);
  EXPECT_EQ(arena_->statistics(Stream()).live_bytes, 0u);
  give(first, streams_[1]);
  EXPECT_EQ(arena_->statistics(streams_[0]).live_bytes, 0u) << "whom it was allocated for";
  EXPECT_EQ(arena_->statistics(streams_[0]).peak_live_bytes, 1024u);
  EXPECT_EQ(arena_->statistics(streams_[0]).allocation_count, 1u);
  EXPECT_EQ(arena_->statistics(streams_[0]).requested_bytes, 0u);
  EXPECT_EQ(arena_->statistics(streams_[0]).peak_requested_bytes, 1000u);
  arena_->reset_peaks();
  EXPECT_EQ(arena_->statistics(streams_[0]).peak_live_bytes, 0u);
  EXPECT_EQ(arena_->statistics(streams_[0]).peak_requested_bytes, 0u);
  EXPECT_EQ(arena_->statistics(streams_[1]).peak_live_bytes, kChunk);
}

constexpr const char* kPython = R"(
import pickle, sys
s = pickle.load(open(sys.argv[1], 'rb'))
assert s['segments'] and len(s['device_traces']) == 1
live = 0
for segment in s['segments']:
    at = segment['address']
    for block in segment['blocks']:
        assert block['address'] == at
        at += block['size']
        live += block['size'] if block['state'] == 'active_allocated' else 0
    assert at == segment['address'] + segment['total_size']
assert live == int(sys.argv[2]), live
actions = [e['action'] for e in s['device_traces'][0]]
assert 'alloc' in actions and 'free_completed' in actions and 'segment_map' in actions, actions
assert s['allocator_settings']['chunk_bytes'] == 65536
)";

TEST_F(ArenaViewsTest, PythonReadsItsSnapshot) {
  if (std::system("python3 -c 'import pickle' >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "python3 is not there to read the snapshot";
  }
  make({.limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk, .history_count = 100});
  DevicePtr blocks[8];
  for (DevicePtr& block : blocks) block = take(kChunk, streams_[0]);
  for (int i = 0; i < 8; i += 2) give(blocks[i], streams_[0]);
  take(3 * kChunk, streams_[0]);
  char snapshot[] = "/tmp/arena_snapshotXXXXXX";
  char script[] = "/tmp/arena_scriptXXXXXX";
  const int file = mkstemp(snapshot);
  const int script_file = mkstemp(script);
  ASSERT_GE(file, 0);
  ASSERT_GE(script_file, 0);
  ASSERT_TRUE(write_memory_snapshot(arena_->snapshot(), file).ok());
  std::ofstream(script) << kPython;
  EXPECT_EQ(std::system((std::string("python3 ") + script + " " + snapshot + " " +
                         std::to_string(arena_->statistics().live_bytes))
                            .c_str()),
            0);
  close(file);
  close(script_file);
  unlink(snapshot);
  unlink(script);
}

}  // namespace
}  // namespace forebay
