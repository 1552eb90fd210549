// Captured graphs: private memory, and mappings that do not change.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "forebay/arena.h"
#include "forebay/units.h"
#include "runtime/device/host/script.h"
#include "tests/allocator/arena/chunk.h"
#include "tests/allocator/arena/watched_backend.h"
#include "tests/support/thread_state.h"

namespace forebay {
namespace {

using testing::Extent;
using testing::kChunk;
using testing::WatchedBackend;

class ArenaCaptureTest : public ::testing::Test {
 protected:
  void SetUp() override {
    HostBackendOptions options;
    options.granularity = kChunk;
    options.memory_bytes = 256_MiB;
    backend_ = std::move(ScriptedHostBackend::create(std::move(options))).value();
    watched_ = std::make_unique<WatchedBackend>(*backend_);
    arena_ = std::move(Arena::create(*watched_, {.limit_bytes = 16 * kChunk, .largest_chunk_bytes = kChunk}))
                 .value();
    for (Stream& stream : streams_) stream = backend_->stream_create().value();
    watched_->on_event_record = [this](Stream stream) {
      EXPECT_FALSE(captured_ != Stream() && stream == captured_) << "an event in a capture";
    };
    watched_->on_unmap = [this](DevicePtr, std::size_t) {
      EXPECT_TRUE(captured_ == Stream()) << "unmapped during a capture";
    };
    watched_->on_map = [this](DevicePtr, std::size_t, bool mapped_elsewhere) {
      EXPECT_FALSE(captured_ != Stream() && mapped_elsewhere) << "mapped once more during a capture";
    };
  }
  void TearDown() override {
    captured_ = Stream();
    for (Stream stream : streams_) EXPECT_TRUE(backend_->stream_destroy(stream).ok());
    arena_.reset();
    EXPECT_EQ(backend_->live_handle_count(), 0u);
    EXPECT_EQ(backend_->charged_bytes(), 0u);
  }
  Capture begin(Stream stream) {
    auto capture = arena_->capture_begin(stream);
    EXPECT_TRUE(capture.ok()) << capture.status().to_string();
    captured_ = stream;
    return capture.value();
  }
  void end(Capture capture) {
    captured_ = Stream();
    EXPECT_TRUE(arena_->capture_end(capture).ok());
  }
  DevicePtr take(std::size_t bytes, Stream stream) {
    auto block = arena_->allocate({.bytes = bytes, .stream = stream});
    EXPECT_TRUE(block.ok()) << block.status().to_string();
    return block.ok() ? block.value() : nullptr;
  }
  StatusCode try_take(std::size_t bytes, Stream stream) {
    return arena_->allocate({.bytes = bytes, .stream = stream}).status().code();
  }
  void give(DevicePtr block, Stream stream) { EXPECT_TRUE(arena_->free(block, stream).ok()); }
  void synchronize() {
    for (Stream stream : streams_) ASSERT_TRUE(backend_->stream_synchronize(stream).ok());
  }
  // The first call may only record the events that the second finds completed.
  void trim_all() {
    arena_->trim();
    synchronize();
    arena_->trim();
  }
  // Everything that can be allocated, chunk by chunk, shows none of these bytes.
  void expect_nobody_gets(const std::vector<Extent>& memory) {
    std::vector<DevicePtr> blocks;
    for (Stream stream : {streams_[0], streams_[1], Stream()}) {
      for (auto block = arena_->allocate({.bytes = 512, .stream = stream}); block.ok();
           block = arena_->allocate({.bytes = 512, .stream = stream})) {
        blocks.push_back(block.value());
        const Extent got = watched_->shown(block.value(), 512).at(0);
        for (const Extent& extent : memory) {
          ASSERT_TRUE(got.end <= extent.begin || extent.end <= got.begin);
        }
      }
    }
    for (DevicePtr block : blocks) give(block, {});
  }

  std::unique_ptr<ScriptedHostBackend> backend_;
  std::unique_ptr<WatchedBackend> watched_;
  std::unique_ptr<Arena> arena_;
  Stream streams_[2];
  Stream captured_;
};

TEST_F(ArenaCaptureTest, AllocatesFromPrivateMemoryUntilRelease) {
  // There is free memory, but not for the capture.
  give(take(4 * kChunk, streams_[0]), streams_[0]);
  synchronize();
  const Capture capture = begin(streams_[0]);
  DevicePtr first = take(kChunk / 2, streams_[0]);
  DevicePtr second = take(2 * kChunk, streams_[0]);
  EXPECT_EQ(backend_->charged_bytes(), 7 * kChunk);
  const std::vector<Extent> one = watched_->shown(first, kChunk / 2);
  const std::vector<Extent> two = watched_->shown(second, 2 * kChunk);
  give(first, streams_[0]);
  EXPECT_EQ(take(kChunk / 2, streams_[0]), first) << "in the same capture at once";
  give(first, streams_[0]);
  give(second, streams_[0]);
  std::vector<Extent> memory = one;
  memory.insert(memory.end(), two.begin(), two.end());
  end(capture);
  trim_all();
  expect_nobody_gets(memory);
  EXPECT_EQ(watched_->shown(second, 2 * kChunk).front().begin, two.front().begin) << "still mapped";

  ASSERT_TRUE(arena_->capture_release(capture).ok());
  trim_all();
  EXPECT_NE(take(16 * kChunk, streams_[1]), nullptr);
}

TEST_F(ArenaCaptureTest, ChangesNoMappingAndRecordsNoEventDuringACapture) {
  DevicePtr blocks[16];
  for (DevicePtr& block : blocks) block = take(kChunk, streams_[0]);
  for (int i = 0; i < 16; i += 2) give(blocks[i], streams_[0]);
  synchronize();
  // A view, and old mappings that trim would remove.
  give(take(4 * kChunk, streams_[0]), streams_[0]);
  const Capture capture = begin(streams_[0]);
  // Together they are large enough, but a capture allows no stitching.
  EXPECT_EQ(try_take(6 * kChunk, streams_[1]), StatusCode::kOutOfMemory);
  EXPECT_EQ(try_take(6 * kChunk, streams_[0]), StatusCode::kOutOfMemory);
  EXPECT_EQ(arena_->trim(), 0u);
  end(capture);
  ASSERT_TRUE(arena_->capture_release(capture).ok());
  synchronize();
  // The first request may only record the event.
  if (try_take(8 * kChunk, streams_[1]) == StatusCode::kOk) return;
  synchronize();
  EXPECT_EQ(try_take(8 * kChunk, streams_[1]), StatusCode::kOk);
}

// The host freed it, so no queued work keeps it from being mapped elsewhere; only the capture does.
TEST_F(ArenaCaptureTest, MemoryThatWaitsForNothingStaysWhereItIsDuringACapture) {
  DevicePtr blocks[16];
  for (DevicePtr& block : blocks) block = take(kChunk, {});
  for (int i = 0; i < 16; i += 2) give(blocks[i], {});
  give(take(4 * kChunk, {}), {});
  const Capture capture = begin(streams_[0]);
  EXPECT_EQ(try_take(6 * kChunk, streams_[1]), StatusCode::kOutOfMemory);
  EXPECT_EQ(arena_->trim(), 0u);
  end(capture);
  ASSERT_TRUE(arena_->capture_release(capture).ok());
  take(6 * kChunk, streams_[1]);
}

TEST_F(ArenaCaptureTest, AMappingThatWasSetAsideStaysDuringACapture) {
  backend_->add_fault({HostCall::kSetAccess, 1, Status(StatusCode::kInternal, "scripted")});
  backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(try_take(4 * kChunk, streams_[1]), StatusCode::kInternal);
  const Capture capture = begin(streams_[0]);
  DevicePtr block = take(2 * kChunk, streams_[1]);
  EXPECT_EQ(arena_->trim(), 0u);
  end(capture);
  ASSERT_TRUE(arena_->capture_release(capture).ok());
  EXPECT_EQ(arena_->trim(), 4 * kChunk);
  give(block, streams_[1]);
}

// An event that is recorded on a captured stream would become part of the graph.
TEST_F(ArenaCaptureTest, ACaptureBeginsOnlyAfterAnEventWasRecorded) {
  give(take(kChunk, streams_[0]), streams_[0]);
  Capture capture;
  std::atomic<pid_t> number{0};
  std::atomic<bool> has_begun{false};
  std::thread other;
  watched_->on_event_record = [&](Stream) {
    if (other.joinable()) return;
    other = std::thread([&] {
      number = ::gettid();
      capture = arena_->capture_begin(streams_[0]).value();
      has_begun = true;
    });
    while (!has_begun && (number == 0 || !testing::is_waiting(number))) std::this_thread::yield();
    EXPECT_FALSE(has_begun);
  };
  arena_->trim();
  ASSERT_TRUE(other.joinable());
  other.join();
  end(capture);
}

TEST_F(ArenaCaptureTest, MemoryFreedOnACapturedStreamWaitsForItsEnd) {
  DevicePtr block = take(16 * kChunk, streams_[0]);
  const Capture capture = begin(streams_[0]);
  give(block, streams_[0]);
  EXPECT_EQ(try_take(16 * kChunk, streams_[1]), StatusCode::kOutOfMemory);
  EXPECT_EQ(try_take(512, streams_[1]), StatusCode::kOutOfMemory);
  end(capture);
  ASSERT_TRUE(arena_->capture_release(capture).ok());
  if (try_take(16 * kChunk, streams_[1]) != StatusCode::kOk) {
    synchronize();
    EXPECT_EQ(try_take(16 * kChunk, streams_[1]), StatusCode::kOk);
  }
}

TEST_F(ArenaCaptureTest, OtherStreamsAllocateAsUsual) {
  const Capture capture = begin(streams_[0]);
  DevicePtr mine = take(kChunk / 4, streams_[0]);
  DevicePtr theirs = take(kChunk / 4, streams_[1]);
  EXPECT_NE(watched_->chunk_at(mine).begin, watched_->chunk_at(theirs).begin);
  give(theirs, streams_[1]);
  EXPECT_EQ(take(kChunk / 4, streams_[1]), theirs);
  end(capture);
}

// The graph's own results outlive the graph.
TEST_F(ArenaCaptureTest, LiveBlocksSurviveTheRelease) {
  const Capture capture = begin(streams_[0]);
  DevicePtr result = take(kChunk, streams_[0]);
  DevicePtr scratch = take(3 * kChunk, streams_[0]);
  give(scratch, streams_[0]);
  end(capture);
  ASSERT_TRUE(arena_->capture_release(capture).ok());
  EXPECT_EQ(arena_->block_bytes(result), kChunk);
  trim_all();
  EXPECT_EQ(backend_->charged_bytes(), kChunk);
  give(result, streams_[0]);
  trim_all();
  EXPECT_EQ(backend_->charged_bytes(), 0u);
}

// A thread releases the capture while another one maps memory for a block of it. The block must not end in a
// region that a later tag takes over and pauses.
TEST_F(ArenaCaptureTest, ABlockMappedDuringTheReleaseOfItsCaptureStaysItsOwn) {
  const Capture capture = arena_->capture_begin(streams_[0]).value();
  std::atomic<bool> ended{false};
  std::thread other;
  watched_->on_map = [&](DevicePtr, std::size_t, bool) {
    if (other.joinable()) return;
    other = std::thread([&] {
      EXPECT_TRUE(arena_->capture_end(capture).ok());
      ended = true;
      EXPECT_TRUE(arena_->capture_release(capture).ok());
    });
    while (!ended) std::this_thread::yield();
  };
  DevicePtr block = take(2 * kChunk, streams_[0]);
  other.join();
  watched_->on_map = nullptr;
  std::memset(block, 1, 2 * kChunk);

  const Tag tag = arena_->tag_create({.name = "rollout", .pausable = true}).value();
  const DevicePtr own = arena_->allocate({.bytes = kChunk, .tag = tag}).value();
  ASSERT_TRUE(arena_->pause(tag, false).ok());
  EXPECT_EQ(arena_->statistics().reserved_bytes, 2 * kChunk) << "the block went with the tag";
  (void)watched_->shown(block, 2 * kChunk);  // Fails the test where nothing is mapped.
  ASSERT_TRUE(arena_->resume(tag).ok());
  give(own, Stream());
  give(block, streams_[0]);
}

TEST_F(ArenaCaptureTest, RefusesInvalidRequests) {
  EXPECT_EQ(arena_->capture_begin({}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->capture_end({}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->capture_release({}).code(), StatusCode::kInvalidArgument);
  for (const std::uint32_t index : {0u, 1u, 2u, 16u, 17u}) {
    EXPECT_EQ(arena_->capture_end(Capture{index}).code(), StatusCode::kInvalidArgument) << index;
    EXPECT_EQ(arena_->capture_release(Capture{index}).code(), StatusCode::kInvalidArgument) << index;
  }
  const Capture capture = begin(streams_[0]);
  EXPECT_EQ(arena_->capture_begin(streams_[0]).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->capture_release(capture).code(), StatusCode::kInvalidArgument) << "it goes on";
  end(capture);
  EXPECT_EQ(arena_->capture_end(capture).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(arena_->capture_release(capture).ok());
  EXPECT_EQ(arena_->capture_release(capture).code(), StatusCode::kInvalidArgument);
}

TEST_F(ArenaCaptureTest, CapturesAndPausableTagsHaveALimit) {
  std::vector<Capture> captures;
  ASSERT_TRUE(arena_->tag_create({.name = "pausable", .pausable = true}).ok());
  for (std::size_t i = 1; i < kPrivateRegionLimit; ++i) {
    captures.push_back(begin(streams_[0]));
    take(512, streams_[0]);
    end(captures.back());
  }
  const auto refused = arena_->capture_begin(streams_[0]);
  EXPECT_EQ(refused.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.status().message().find("release captures"), std::string::npos);
  EXPECT_EQ(arena_->tag_create({.name = "more", .pausable = true}).status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(arena_->tag_create("plain", 0).ok());
  ASSERT_TRUE(arena_->capture_release(captures[3]).ok());
  captures[3] = begin(streams_[0]);
  end(captures[3]);
  for (const Capture capture : captures) EXPECT_TRUE(arena_->capture_release(capture).ok());
}

TEST_F(ArenaCaptureTest, TwoStreamsAreCapturedAtOnce) {
  const Capture first = arena_->capture_begin(streams_[0]).value();
  const Capture second = arena_->capture_begin(streams_[1]).value();
  DevicePtr one = take(kChunk / 4, streams_[0]);
  DevicePtr two = take(kChunk / 4, streams_[1]);
  EXPECT_NE(watched_->chunk_at(one).begin, watched_->chunk_at(two).begin);
  ASSERT_TRUE(arena_->capture_end(first).ok());
  // The other capture still goes on.
  captured_ = streams_[1];
  EXPECT_EQ(arena_->trim(), 0u);
  captured_ = Stream();
  ASSERT_TRUE(arena_->capture_end(second).ok());
  ASSERT_TRUE(arena_->capture_release(second).ok());
  ASSERT_TRUE(arena_->capture_release(first).ok());
}

}  // namespace
}  // namespace forebay
