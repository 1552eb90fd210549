// Pausable tags: memory goes back to the device and comes again at the same addresses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <tuple>
#include <vector>

#include "forebay/arena.h"
#include "forebay/units.h"
#include "runtime/device/forwarding_backend.h"
#include "runtime/device/host/script.h"
#include "tests/allocator/arena/chunk.h"
#include "tests/support/gate.h"

namespace forebay {
namespace {

using testing::Gate;
using testing::kChunk;

class ArenaPauseTest : public ::testing::Test {
 protected:
  void SetUp() override { make({.limit_bytes = 16 * kChunk}); }
  void make(ArenaOptions options) {
    HostBackendOptions backend_options;
    backend_options.granularity = kChunk;
    backend_options.memory_bytes = 256_MiB;
    backend_ = std::move(ScriptedHostBackend::create(std::move(backend_options))).value();
    arena_ = std::move(Arena::create(*backend_, options)).value();
    tag_ = arena_->tag_create({.name = "optimizer", .pausable = true}).value();
    stream_ = backend_->stream_create().value();
  }
  void TearDown() override {
    EXPECT_TRUE(backend_->stream_destroy(stream_).ok());
    arena_.reset();
    EXPECT_EQ(backend_->live_handle_count(), 0u);
    EXPECT_EQ(backend_->charged_bytes(), 0u);
  }
  void remake(ArenaOptions options) {
    TearDown();
    make(options);
  }
  DevicePtr take(std::size_t bytes, Tag tag, Stream stream = {}) {
    auto block = arena_->allocate({.bytes = bytes, .tag = tag, .stream = stream});
    EXPECT_TRUE(block.ok()) << block.status().to_string();
    return block.ok() ? block.value() : nullptr;
  }
  StatusCode try_take(std::size_t bytes, Tag tag) {
    return arena_->allocate({.bytes = bytes, .tag = tag}).status().code();
  }
  void give(DevicePtr block, Stream stream = {}) { EXPECT_TRUE(arena_->free(block, stream).ok()); }
  static bool has(DevicePtr block, int pattern, std::size_t bytes) {
    return std::all_of(block, block + bytes,
                       [&](std::byte byte) { return byte == static_cast<std::byte>(pattern); });
  }

  std::unique_ptr<ScriptedHostBackend> backend_;
  std::unique_ptr<Arena> arena_;
  Tag tag_ = 0;
  Stream stream_;
};

TEST_F(ArenaPauseTest, KeepsContentsAndAddresses) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 5; ++i) {
    blocks.push_back(take(kChunk + kChunk / 2 * i, tag_));
    std::memset(blocks.back(), 10 + i, kChunk + kChunk / 2 * i);
  }
  give(blocks[2]);
  DevicePtr other = take(kChunk, 0);
  std::memset(other, 99, kChunk);
  const std::size_t before = backend_->charged_bytes();

  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  EXPECT_EQ(backend_->charged_bytes(), kChunk);
  EXPECT_EQ(arena_->statistics().reserved_bytes, kChunk);
  EXPECT_TRUE(has(other, 99, kChunk));
  // The room is there for others meanwhile.
  DevicePtr guest = take(15 * kChunk, 0);
  std::memset(guest, 1, 15 * kChunk);
  give(guest);

  ASSERT_TRUE(arena_->resume(tag_).ok());
  EXPECT_EQ(arena_->statistics().reserved_bytes, backend_->charged_bytes());
  EXPECT_GE(backend_->charged_bytes(), before);
  for (const int i : {0, 1, 3, 4}) EXPECT_TRUE(has(blocks[i], 10 + i, kChunk + kChunk / 2 * i)) << i;
  EXPECT_TRUE(has(other, 99, kChunk));
  for (const int i : {0, 1, 3, 4}) give(blocks[i]);
  EXPECT_EQ(arena_->statistics(tag_).live_bytes, 0u);
}

TEST_F(ArenaPauseTest, WithoutKeepingOnlyAddressesStay) {
  DevicePtr block = take(5 * kChunk, tag_);
  std::memset(block, 7, 5 * kChunk);
  ASSERT_TRUE(arena_->pause(tag_, false).ok());
  EXPECT_EQ(backend_->charged_bytes(), 0u);
  EXPECT_EQ(backend_->call_count(HostCall::kPin), 0u);
  EXPECT_EQ(arena_->block_bytes(block), 5 * kChunk);
  EXPECT_EQ(arena_->statistics(tag_).live_bytes, 5 * kChunk);
  ASSERT_TRUE(arena_->resume(tag_).ok());
  EXPECT_EQ(backend_->charged_bytes(), 5 * kChunk);
  std::memset(block, 8, 5 * kChunk);
  EXPECT_TRUE(has(block, 8, 5 * kChunk));
}

TEST_F(ArenaPauseTest, RefusesInvalidRequests) {
  const Tag plain = arena_->tag_create("plain", 0).value();
  EXPECT_EQ(arena_->pause(plain, true).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->pause(0, true).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->pause(60, true).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->resume(60).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->resume(tag_).code(), StatusCode::kInvalidArgument);
  take(kChunk, tag_);
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  const Status again = arena_->pause(tag_, true);
  EXPECT_EQ(again.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(again.message().find("paused already"), std::string::npos) << again.message();
  EXPECT_EQ(try_take(512, tag_), StatusCode::kUnavailable);
  EXPECT_EQ(arena_->allocate({.bytes = 1, .tag = tag_, .fixed = true}).status().code(),
            StatusCode::kUnavailable);
  EXPECT_EQ(try_take(512, plain), StatusCode::kOk);
  ASSERT_TRUE(arena_->resume(tag_).ok());
  EXPECT_EQ(arena_->resume(tag_).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(try_take(512, tag_), StatusCode::kOk);
}

TEST_F(ArenaPauseTest, AnEmptyTagPausesAndResumes) {
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  ASSERT_TRUE(arena_->resume(tag_).ok());
  take(kChunk, tag_);
}

TEST_F(ArenaPauseTest, BlocksFreedWhilePausedAreFreeAfterResume) {
  DevicePtr first = take(4 * kChunk, tag_, stream_);
  DevicePtr second = take(4 * kChunk, tag_, stream_);
  std::memset(second, 5, 4 * kChunk);
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  give(first, stream_);
  EXPECT_EQ(arena_->free(first, stream_).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->block_bytes(first), 0u);
  EXPECT_EQ(arena_->statistics(tag_).live_bytes, 4 * kChunk);
  ASSERT_TRUE(arena_->resume(tag_).ok());
  EXPECT_TRUE(has(second, 5, 4 * kChunk));
  EXPECT_EQ(take(4 * kChunk, tag_), first);
}

// The stream a block was allocated for may end while the tag is paused.
TEST_F(ArenaPauseTest, AStreamMayEndDuringAPause) {
  Stream ends = backend_->stream_create().value();
  DevicePtr block = take(kChunk, tag_, ends);
  ASSERT_TRUE(backend_->stream_synchronize(ends).ok());
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  ASSERT_TRUE(arena_->stream_retire(ends).ok());
  ASSERT_TRUE(backend_->stream_destroy(ends).ok());
  Stream next = backend_->stream_create().value();
  DevicePtr other = take(kChunk, 0, next);
  ASSERT_TRUE(arena_->resume(tag_).ok());
  give(block);
  EXPECT_EQ(arena_->statistics(next).live_bytes, kChunk);
  give(other);
  ASSERT_TRUE(backend_->stream_synchronize(next).ok());
  ASSERT_TRUE(arena_->stream_retire(next).ok());
  ASSERT_TRUE(backend_->stream_destroy(next).ok());
}

TEST_F(ArenaPauseTest, ResumesOnlyWhenThereIsRoom) {
  DevicePtr block = take(10 * kChunk, tag_);
  std::memset(block, 3, 10 * kChunk);
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  DevicePtr guest = take(8 * kChunk, 0);
  std::memset(guest, 4, 8 * kChunk);
  for (int attempt = 0; attempt < 3; ++attempt) {
    const Status status = arena_->resume(tag_);
    EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
    EXPECT_EQ(status.message(),
              "cannot resume tag " + std::to_string(tag_) +
                  ": 640.00 KiB are needed and 512.00 KiB of the limit of 1.00 MiB are free; free "
                  "blocks or pause other tags");
    EXPECT_EQ(arena_->statistics().reserved_bytes, 8 * kChunk);
    EXPECT_EQ(try_take(512, tag_), StatusCode::kUnavailable);
    EXPECT_TRUE(has(guest, 4, 8 * kChunk));
  }
  give(guest);
  ASSERT_TRUE(arena_->resume(tag_).ok());
  EXPECT_TRUE(has(block, 3, 10 * kChunk));
  EXPECT_EQ(backend_->charged_bytes(), 10 * kChunk) << "the guest's chunks made room";
}

// The first try may only have recorded the event that the second finds completed, as allocate does.
TEST_F(ArenaPauseTest, ResumesOnceQueuedWorkHasFreedRoom) {
  take(8 * kChunk, tag_);
  ASSERT_TRUE(arena_->pause(tag_, false).ok());
  DevicePtr other = take(12 * kChunk, 0, stream_);
  give(other, stream_);
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());

  Status resumed = arena_->resume(tag_);
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  if (!resumed.ok()) resumed = arena_->resume(tag_);

  EXPECT_TRUE(resumed.ok()) << resumed.to_string();
}

TEST_F(ArenaPauseTest, TwoTagsTakeTurns) {
  const Tag other = arena_->tag_create({.name = "generation", .pausable = true}).value();
  DevicePtr train = take(14 * kChunk, tag_);
  std::memset(train, 1, 14 * kChunk);
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  DevicePtr generate = take(12 * kChunk, other);
  std::memset(generate, 2, 12 * kChunk);
  for (int turn = 0; turn < 5; ++turn) {
    ASSERT_TRUE(arena_->pause(other, true).ok());
    ASSERT_TRUE(arena_->resume(tag_).ok());
    EXPECT_TRUE(has(train, 1, 14 * kChunk));
    EXPECT_EQ(backend_->charged_bytes(), 14 * kChunk);
    ASSERT_TRUE(arena_->pause(tag_, true).ok());
    ASSERT_TRUE(arena_->resume(other).ok());
    EXPECT_TRUE(has(generate, 2, 12 * kChunk));
    EXPECT_EQ(backend_->charged_bytes(), 12 * kChunk);
  }
}

// A tag's chunks are its own while a block is in them; free ones serve all.
TEST_F(ArenaPauseTest, FreeChunksServeOtherTagsAndComeBack) {
  DevicePtr block = take(16 * kChunk, 0);
  give(block);
  block = take(16 * kChunk, tag_);
  give(block);
  block = take(16 * kChunk, 0);
  EXPECT_EQ(try_take(512, tag_), StatusCode::kOutOfMemory);
  give(block);
  EXPECT_LE(backend_->charged_bytes(), 16 * kChunk);
}

TEST_F(ArenaPauseTest, SharesNoChunkWithOthers) {
  DevicePtr mine = take(kChunk / 2, tag_);
  DevicePtr theirs = take(kChunk / 4, 0);
  EXPECT_EQ(backend_->charged_bytes(), 2 * kChunk);
  std::memset(theirs, 9, kChunk / 4);
  ASSERT_TRUE(arena_->pause(tag_, false).ok());
  EXPECT_TRUE(has(theirs, 9, kChunk / 4));
  EXPECT_EQ(backend_->charged_bytes(), kChunk);
  ASSERT_TRUE(arena_->resume(tag_).ok());
  std::memset(mine, 1, kChunk / 2);
}

// Stitched blocks pause like others.
TEST_F(ArenaPauseTest, StitchedBlocksKeepTheirContents) {
  remake({.limit_bytes = 8 * kChunk, .largest_chunk_bytes = kChunk});
  DevicePtr blocks[8];
  for (DevicePtr& block : blocks) block = take(kChunk, tag_);
  for (int i = 0; i < 8; i += 2) give(blocks[i]);
  DevicePtr large = take(4 * kChunk, tag_);
  for (int i = 1; i < 8; i += 2) std::memset(blocks[i], i, kChunk);
  for (int i = 0; i < 4; ++i) std::memset(large + i * kChunk, 100 + i, kChunk);
  for (int turn = 0; turn < 3; ++turn) {
    ASSERT_TRUE(arena_->pause(tag_, true).ok());
    EXPECT_EQ(backend_->charged_bytes(), 0u);
    ASSERT_TRUE(arena_->resume(tag_).ok());
    for (int i = 1; i < 8; i += 2) EXPECT_TRUE(has(blocks[i], i, kChunk));
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(has(large + i * kChunk, 100 + i, kChunk));
  }
  EXPECT_EQ(try_take(512, tag_), StatusCode::kOutOfMemory);
}

TEST_F(ArenaPauseTest, AnArenaCanEndWhileATagIsPaused) {
  take(3 * kChunk, tag_);
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
}

TEST_F(ArenaPauseTest, WaitsUntilFreedBlocksAreOutOfUse) {
  DevicePtr used = take(2 * kChunk, tag_, stream_);
  DevicePtr stays = take(2 * kChunk, tag_);
  std::memset(stays, 6, 2 * kChunk);
  Gate gate;
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &gate).ok());
  ASSERT_TRUE(backend_->fill_async(used, 1, 2 * kChunk, stream_).ok());
  give(used, stream_);
  // Unmapped too early, the fill would end the process.
  std::thread opener([&gate] { gate.open(); });
  EXPECT_TRUE(arena_->pause(tag_, true).ok());
  opener.join();
  ASSERT_TRUE(arena_->resume(tag_).ok());
  EXPECT_TRUE(has(stays, 6, 2 * kChunk));
}

// A backend that opens a gate when an event is waited for.
class OpeningBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  Status event_synchronize(Event event) override {
    gate.open();
    return ForwardingBackend::event_synchronize(event);
  }
  Gate gate;
};

// The freed blocks' memory has gone to a block elsewhere, and queued work still uses their own addresses.
TEST_F(ArenaPauseTest, WaitsUntilAddressesWithoutMemoryAreOutOfUse) {
  OpeningBackend backend(*backend_);
  auto arena =
      std::move(Arena::create(backend, {.limit_bytes = 4 * kChunk, .largest_chunk_bytes = kChunk})).value();
  const Tag tag = arena->tag_create({.name = "optimizer", .pausable = true}).value();
  DevicePtr blocks[4];
  for (DevicePtr& block : blocks)
    block = arena->allocate({.bytes = kChunk, .tag = tag, .stream = stream_}).value();
  ASSERT_TRUE(backend_->call_host(stream_, &Gate::wait, &backend.gate).ok());
  for (const int i : {0, 2}) {
    ASSERT_TRUE(backend_->fill_async(blocks[i], 1, kChunk, stream_).ok());
    ASSERT_TRUE(arena->free(blocks[i], stream_).ok());
  }
  ASSERT_TRUE(arena->allocate({.bytes = 2 * kChunk, .tag = tag, .stream = stream_}).ok());
  std::memset(blocks[1], 6, kChunk);

  EXPECT_TRUE(arena->pause(tag, true).ok());

  backend.gate.open();
  ASSERT_TRUE(backend_->stream_synchronize(stream_).ok());
  ASSERT_TRUE(arena->resume(tag).ok());
  EXPECT_TRUE(has(blocks[1], 6, kChunk));
}

TEST_F(ArenaPauseTest, ATagWhoseFreedBlocksACapturedStreamUsesIsNotPaused) {
  DevicePtr stays = take(kChunk, tag_);
  DevicePtr used = take(kChunk, tag_, stream_);
  std::memset(stays, 6, kChunk);
  const Capture capture = arena_->capture_begin(stream_).value();
  give(used, stream_);
  const Status status = arena_->pause(tag_, true);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("end the capture of the stream"), std::string::npos) << status.message();
  EXPECT_EQ(backend_->charged_bytes(), 2 * kChunk);

  ASSERT_TRUE(arena_->capture_end(capture).ok());
  ASSERT_TRUE(arena_->pause(tag_, true).ok());
  EXPECT_EQ(backend_->charged_bytes(), 0u);
  ASSERT_TRUE(arena_->resume(tag_).ok());
  EXPECT_TRUE(has(stays, 6, kChunk));
}

// A backend on which waiting for a stream can fail.
class FailingWaitBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  Status stream_synchronize(Stream stream) override {
    const Status status = ForwardingBackend::stream_synchronize(stream);
    return fails ? Status(StatusCode::kInternal, "scripted") : status;
  }
  bool fails = false;
};

TEST_F(ArenaPauseTest, CopiesCountOnceTheirStreamHasEndedThem) {
  FailingWaitBackend backend(*backend_);
  auto arena = Arena::create(backend, {.limit_bytes = 16 * kChunk}).value();
  const Tag tag = arena->tag_create({.name = "optimizer", .pausable = true}).value();
  DevicePtr block = arena->allocate({.bytes = kChunk, .tag = tag}).value();
  std::memset(block, 5, kChunk);
  backend.fails = true;
  EXPECT_EQ(arena->pause(tag, true).code(), StatusCode::kInternal);
  EXPECT_TRUE(has(block, 5, kChunk));
  backend.fails = false;
  ASSERT_TRUE(arena->pause(tag, true).ok());
  backend.fails = true;
  EXPECT_EQ(arena->resume(tag).code(), StatusCode::kInternal);
  backend.fails = false;
  ASSERT_TRUE(arena->resume(tag).ok());
  EXPECT_TRUE(has(block, 5, kChunk));
}

// Aim: a call that fails during pause or resume loses nothing and the next try works. Method: the nth call of
// a kind fails once; contents, addresses and accounts are compared.
class ArenaPauseFaultTest : public ArenaPauseTest,
                            public ::testing::WithParamInterface<std::tuple<HostCall, int, bool>> {};

TEST_P(ArenaPauseFaultTest, AFailedCallLosesNothingAndTheNextTryWorks) {
  const HostCall call = std::get<0>(GetParam());
  const int nth = std::get<1>(GetParam());
  const bool during_pause = std::get<2>(GetParam());
  remake({.limit_bytes = 16 * kChunk, .largest_chunk_bytes = kChunk});
  DevicePtr blocks[6];
  for (DevicePtr& block : blocks) block = take(kChunk, tag_);
  give(blocks[0]);
  give(blocks[2]);
  DevicePtr large = take(2 * kChunk, tag_);
  for (const int i : {1, 3, 4, 5}) std::memset(blocks[i], i, kChunk);
  std::memset(large, 77, 2 * kChunk);
  const auto intact = [&] {
    return has(large, 77, 2 * kChunk) && has(blocks[1], 1, kChunk) && has(blocks[3], 3, kChunk) &&
           has(blocks[4], 4, kChunk) && has(blocks[5], 5, kChunk);
  };
  const auto fault = [&] {
    backend_->add_fault({call, static_cast<std::uint64_t>(nth), Status(StatusCode::kInternal, "scripted")});
  };
  const std::size_t held = backend_->charged_bytes();
  int failure_count = 0;

  if (during_pause) fault();
  Status paused = arena_->pause(tag_, true);
  if (!paused.ok()) {
    ++failure_count;
    EXPECT_NE(paused.message().find("scripted"), std::string::npos) << paused.message();
    EXPECT_EQ(backend_->charged_bytes(), held);
    EXPECT_EQ(arena_->statistics().reserved_bytes, held);
    ASSERT_TRUE(intact());
    // It is not paused.
    DevicePtr more = take(512, tag_);
    give(more);
    ASSERT_TRUE(arena_->trim() <= held);
    paused = arena_->pause(tag_, true);
  }
  ASSERT_TRUE(paused.ok()) << paused.to_string();
  EXPECT_EQ(backend_->charged_bytes(), 0u);
  if (!during_pause) fault();
  Status resumed = arena_->resume(tag_);
  if (!resumed.ok()) {
    ++failure_count;
    EXPECT_EQ(arena_->statistics().reserved_bytes, backend_->charged_bytes());
    EXPECT_EQ(try_take(512, tag_), StatusCode::kUnavailable);
    resumed = arena_->resume(tag_);
  }
  ASSERT_TRUE(resumed.ok()) << resumed.to_string();
  EXPECT_TRUE(intact());
  EXPECT_EQ(arena_->statistics().reserved_bytes, backend_->charged_bytes());
  EXPECT_LE(backend_->charged_bytes(), held);
  EXPECT_EQ(failure_count, 1) << "the fault was not reached";
  for (const int i : {1, 3, 4, 5}) give(blocks[i]);
  give(large);
  arena_->trim();
  EXPECT_EQ(backend_->charged_bytes(), 0u);
}

// The arena ends after a resume that failed half-way: TearDown sees whether anything leaked.
TEST_P(ArenaPauseFaultTest, AnArenaThatEndsAfterAFailedResumeLeaksNothing) {
  const HostCall call = std::get<0>(GetParam());
  const int nth = std::get<1>(GetParam());
  const bool during_pause = std::get<2>(GetParam());
  remake({.limit_bytes = 16 * kChunk, .largest_chunk_bytes = kChunk});
  for (int i = 0; i < 6; ++i) take(kChunk, tag_);
  const auto fault = [&] {
    backend_->add_fault({call, static_cast<std::uint64_t>(nth), Status(StatusCode::kInternal, "scripted")});
  };
  if (during_pause) fault();
  Status status = arena_->pause(tag_, true);
  if (during_pause) {
    EXPECT_FALSE(status.ok());
    return;
  }
  ASSERT_TRUE(status.ok());
  fault();
  EXPECT_FALSE(arena_->resume(tag_).ok());
}

std::vector<std::tuple<HostCall, int, bool>> faults() {
  std::vector<std::tuple<HostCall, int, bool>> all;
  for (int nth = 1; nth <= 6; ++nth) {
    all.emplace_back(HostCall::kUnmap, nth, true);
    all.emplace_back(HostCall::kChunkCreate, nth, false);
    all.emplace_back(HostCall::kMap, nth, false);
    all.emplace_back(HostCall::kSetAccess, nth, false);
  }
  for (int nth = 1; nth <= 5; ++nth) {
    all.emplace_back(HostCall::kCopyAsync, nth, true);
    all.emplace_back(HostCall::kCopyAsync, nth, false);
  }
  all.emplace_back(HostCall::kPin, 1, true);
  all.emplace_back(HostCall::kStreamCreate, 1, true);
  all.emplace_back(HostCall::kStreamCreate, 1, false);
  return all;
}

INSTANTIATE_TEST_SUITE_P(EveryCall, ArenaPauseFaultTest, ::testing::ValuesIn(faults()));

}  // namespace
}  // namespace forebay
