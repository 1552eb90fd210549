// Behaviour of the Arena on the host backend.
#include "forebay/arena.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "forebay/units.h"
#include "runtime/device/forwarding_backend.h"
#include "runtime/device/host/script.h"
#include "tests/allocator/arena/chunk.h"
#include "tests/allocator/arena/watched_backend.h"
#include "tests/support/gate.h"

namespace forebay {
namespace {

using testing::Gate;
using testing::kChunk;
using testing::WatchedBackend;

class ArenaTest : public ::testing::Test {
 protected:
  void make(std::size_t limit_bytes, std::size_t memory_bytes = 256_MiB, std::size_t reserve_bytes = 0) {
    HostBackendOptions options;
    options.granularity = kChunk;
    options.memory_bytes = memory_bytes;
    auto backend = ScriptedHostBackend::create(std::move(options));
    ASSERT_TRUE(backend.ok()) << backend.status().to_string();
    backend_ = std::move(backend).value();
    auto arena = Arena::create(*backend_, {.reserve_bytes = reserve_bytes, .limit_bytes = limit_bytes});
    ASSERT_TRUE(arena.ok()) << arena.status().to_string();
    arena_ = std::move(arena).value();
    for (Stream& stream : streams_) stream = backend_->stream_create().value();
  }
  void SetUp() override { make(16 * kChunk); }
  void TearDown() override {
    gate_.open();
    for (Stream stream : streams_) EXPECT_TRUE(backend_->stream_destroy(stream).ok());
    arena_.reset();
    EXPECT_EQ(backend_->live_handle_count(), 0u);
    EXPECT_EQ(backend_->charged_bytes(), 0u);
  }
  void remake(std::size_t limit_bytes, std::size_t memory_bytes = 256_MiB, std::size_t reserve_bytes = 0) {
    TearDown();
    gate_.close();
    make(limit_bytes, memory_bytes, reserve_bytes);
  }

  DevicePtr take(std::size_t bytes, Stream stream = {}, Region region = Region::kTransient, Tag tag = 0) {
    auto block = arena_->allocate({.bytes = bytes, .region = region, .tag = tag, .stream = stream});
    EXPECT_TRUE(block.ok()) << block.status().to_string();
    return block.ok() ? block.value() : nullptr;
  }
  StatusCode try_take(std::size_t bytes, Stream stream = {}) {
    return arena_->allocate({.bytes = bytes, .stream = stream}).status().code();
  }
  // The first request may only have recorded the event of `freed_on`; the second finds it completed.
  DevicePtr take_after_event(std::size_t bytes, Stream stream, Stream freed_on) {
    auto block = arena_->allocate({.bytes = bytes, .stream = stream});
    if (block.ok()) return block.value();
    EXPECT_TRUE(backend_->stream_synchronize(freed_on).ok());
    return take(bytes, stream);
  }
  void give(DevicePtr block, Stream stream = {}) {
    const Status status = arena_->free(block, stream);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  void hold(Stream stream) { ASSERT_TRUE(backend_->call_host(stream, &Gate::wait, &gate_).ok()); }
  std::size_t reserved() const { return arena_->statistics().reserved_bytes; }

  Gate gate_;  // Outlives the streams that wait at it.
  std::unique_ptr<ScriptedHostBackend> backend_;
  std::unique_ptr<Arena> arena_;
  Stream streams_[2];
};

TEST_F(ArenaTest, PersistentBlocksReserveTheirSumRoundedToOneChunk) {
  std::size_t live_bytes = 0;
  for (const std::size_t bytes :
       {std::size_t{1}, 3 * kChunk, std::size_t{0}, kChunk / 2, kChunk - 512, 5 * kChunk + 7}) {
    take(bytes, streams_[0], Region::kPersistent);
    live_bytes += std::max<std::size_t>(round_up(bytes, kBlockGranule), kBlockGranule);

    EXPECT_EQ(arena_->statistics().live_bytes, live_bytes);
    EXPECT_EQ(reserved(), round_up(live_bytes, kChunk));
    EXPECT_EQ(backend_->charged_bytes(), reserved());
  }
  ASSERT_TRUE(arena_->slot_create(kChunk + 1, 0).ok());
  EXPECT_EQ(reserved(), round_up(live_bytes, kChunk) + 2 * kChunk);
  take(2 * kChunk, streams_[0], Region::kPersistent);
  EXPECT_EQ(reserved(), round_up(live_bytes + 2 * kChunk, kChunk) + 2 * kChunk);
}

TEST_F(ArenaTest, PersistentBlocksPackInTheOrderOfTheirAllocation) {
  DevicePtr first = take(1000, {}, Region::kPersistent);
  take(2 * kChunk);
  DevicePtr second = take(3 * kChunk, {}, Region::kPersistent);

  EXPECT_EQ(second, first + 1024);
  EXPECT_EQ(arena_->block_bytes(first), 1024u);
}

TEST_F(ArenaTest, AZeroByteBlockIsDistinct) {
  DevicePtr first = take(0);
  DevicePtr second = take(0);

  EXPECT_NE(first, second);
  EXPECT_EQ(arena_->block_bytes(first), kBlockGranule);
}

TEST_F(ArenaTest, AlignsBlocksUpToAChunk) {
  take(512);
  for (std::size_t alignment = 1; alignment <= kChunk; alignment *= 2) {
    auto block = arena_->allocate({.bytes = 700, .alignment = alignment});
    ASSERT_TRUE(block.ok());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.value()) % std::max(alignment, kBlockGranule), 0u);
  }
  EXPECT_EQ(arena_->allocate({.bytes = 1, .alignment = 2 * kChunk}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->allocate({.bytes = 1, .alignment = 768}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->allocate({.bytes = 1, .alignment = 0}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->allocate({.bytes = 1, .tag = 9}).status().code(), StatusCode::kInvalidArgument);
  for (const int region : {2, 3, 77}) {
    EXPECT_EQ(arena_->allocate({.bytes = 1, .region = static_cast<Region>(region)}).status().code(),
              StatusCode::kInvalidArgument);
  }
}

// Each of them would keep a chunk from being used for larger blocks.
TEST_F(ArenaTest, KeepsSmallBlocksTogether) {
  remake(64 * kChunk);
  std::vector<DevicePtr> large, small;
  for (int i = 0; i < 30; ++i) {
    small.push_back(take(512));
    large.push_back(take(kChunk / 4 * 3));
  }
  for (const DevicePtr block : large) give(block);
  EXPECT_NE(take(24 * kChunk), nullptr);
  EXPECT_LE(arena_->statistics().peak_reserved_bytes, 26 * kChunk);
}

TEST_F(ArenaTest, RefusesInvalidSizes) {
  for (int shift = 58; shift < 64; ++shift) {
    for (const std::size_t limit_bytes : {std::size_t{0}, SIZE_MAX}) {
      const ArenaOptions options{.limit_bytes = limit_bytes, .chunk_bytes = std::size_t{1} << shift};
      EXPECT_FALSE(Arena::create(*backend_, options).ok()) << shift;
    }
  }
  EXPECT_EQ(Arena::create(*backend_, {.limit_bytes = kChunk - 1}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST_F(ArenaTest, RefusesAddressesThatAreNotTheStartOfALiveBlock) {
  DevicePtr block = take(2048);
  std::byte local;

  EXPECT_NE(arena_->free(block + 512, {}).message().find("inside a live block"), std::string::npos);
  EXPECT_NE(arena_->free(&local, {})
                .message()
                .find("the arena does not own that address; free it where it was allocated"),
            std::string::npos);
  EXPECT_EQ(arena_->free(nullptr, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->record_stream(block + 512, streams_[0]).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->block_bytes(block + 512), 0u);
  give(block);
  EXPECT_EQ(arena_->block_bytes(block), 0u);
  const Status again = arena_->free(block, {});
  EXPECT_EQ(again.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(again.message().find("freed already"), std::string::npos) << again.message();
}

TEST_F(ArenaTest, CoalescesFreedBlocksAcrossChunks) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(take(kChunk / 2 + 512, streams_[0]));
  const std::size_t before = reserved();
  for (const int i : {1, 3, 5, 7, 0, 2, 4, 6}) give(blocks[i], streams_[0]);

  EXPECT_EQ(take(8 * (kChunk / 2 + 512), streams_[0]), blocks[0]);
  EXPECT_EQ(reserved(), before);
}

TEST_F(ArenaTest, ReusesABlockAtOnceOnItsStreamOnly) {
  DevicePtr block = take(4 * kChunk, streams_[0]);
  hold(streams_[0]);
  give(block, streams_[0]);

  DevicePtr other = take(4 * kChunk, streams_[1]);
  DevicePtr host = take(4 * kChunk);
  EXPECT_NE(other, block);
  EXPECT_NE(host, block);
  EXPECT_EQ(take(4 * kChunk, streams_[0]), block);
  gate_.open();
}

TEST_F(ArenaTest, ReusesABlockOnAnotherStreamAfterItsEvent) {
  DevicePtr block = take(16 * kChunk, streams_[0]);
  hold(streams_[0]);
  give(block, streams_[0]);

  EXPECT_EQ(try_take(16 * kChunk, streams_[1]), StatusCode::kOutOfMemory);
  EXPECT_EQ(try_take(16 * kChunk), StatusCode::kOutOfMemory);
  gate_.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
  EXPECT_EQ(take(16 * kChunk, streams_[1]), block);
}

// A device whose streams have nothing to do: each event is reached a moment after it was recorded.
class IdleDevice final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  Status event_record(Event event, Stream stream) override {
    asked_count_ = 0;
    return ForwardingBackend::event_record(event, stream);
  }
  Result<bool> event_query(Event event) override {
    if (++asked_count_ < 3) return false;
    FOREBAY_RETURN_IF_ERROR(ForwardingBackend::event_synchronize(event));
    return ForwardingBackend::event_query(event);
  }

 private:
  int asked_count_ = 0;
};

// As of cuMemAlloc() and cuMemFreeAsync() in a program with one stream.
TEST_F(ArenaTest, ARequestWithoutAStreamUsesWhatTheOnlyStreamFreed) {
  IdleDevice device(*backend_);
  const auto arena = Arena::create(device).value();
  std::vector<DevicePtr> blocks;
  std::uint32_t random = 1;
  for (int i = 0; i < 60000; ++i) {
    random = random * 1103515245 + 12345;
    const std::size_t bytes = 1 + (random >> 8) % (kChunk / (i % 2 == 0 ? 4 : 64));
    blocks.push_back(arena->allocate({.bytes = bytes}).value());
    if (blocks.size() < 16) continue;
    ASSERT_TRUE(arena->free(blocks.front(), streams_[0]).ok());
    blocks.erase(blocks.begin());
  }
  const ArenaStatistics found = arena->statistics();
  EXPECT_LE(found.reserved_bytes, 8 * found.peak_live_bytes) << "else it grows with the number of requests";
  for (const DevicePtr block : blocks) ASSERT_TRUE(arena->free(block, {}).ok());
}

TEST_F(ArenaTest, ReuseWaitsForARecordedStreamToo) {
  DevicePtr block = take(16 * kChunk, streams_[0]);
  ASSERT_TRUE(arena_->record_stream(block, streams_[1]).ok());
  hold(streams_[1]);
  give(block, streams_[0]);

  EXPECT_EQ(try_take(16 * kChunk, streams_[0]), StatusCode::kOutOfMemory);
  gate_.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[1]).ok());
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
  EXPECT_EQ(take(16 * kChunk), block);
}

TEST_F(ArenaTest, ABlockFreedByTheHostWaitsOnlyForRecordedStreams) {
  DevicePtr block = take(16 * kChunk);
  give(block);
  EXPECT_EQ(take(16 * kChunk, streams_[0]), block);

  ASSERT_TRUE(arena_->record_stream(block, streams_[1]).ok());
  ASSERT_TRUE(arena_->record_stream(block, {}).ok());
  hold(streams_[1]);
  give(block);
  EXPECT_EQ(try_take(16 * kChunk), StatusCode::kOutOfMemory);
  EXPECT_EQ(take(16 * kChunk, streams_[1]), block);
}

// A block that was reused on its stream and then freed by the host still waits for work queued before it was
// allocated.
TEST_F(ArenaTest, ABlockKeepsTheStreamsItsMemoryWaitedFor) {
  DevicePtr block = take(16 * kChunk, streams_[0]);
  hold(streams_[0]);
  give(block, streams_[0]);
  ASSERT_EQ(take(16 * kChunk, streams_[0]), block);
  give(block);

  EXPECT_EQ(try_take(16 * kChunk), StatusCode::kOutOfMemory);
  EXPECT_EQ(try_take(16 * kChunk, streams_[1]), StatusCode::kOutOfMemory);
  gate_.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
  EXPECT_EQ(take(16 * kChunk), block);
}

// A capture took the event that was recorded first: its query fails until it is recorded again.
class CapturedEventBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  Status event_record(Event event, Stream stream) override {
    ++record_count;
    return ForwardingBackend::event_record(event, stream);
  }
  Result<bool> event_query(Event event) override {
    if (record_count == 1) return Status(StatusCode::kUnavailable, "a CUDA graph is being captured");
    return ForwardingBackend::event_query(event);
  }
  int record_count = 0;
};

TEST_F(ArenaTest, AnEventThatACaptureTookIsRecordedAgain) {
  CapturedEventBackend backend(*backend_);
  auto arena = Arena::create(backend, {.limit_bytes = 16 * kChunk}).value();
  const DevicePtr block = arena->allocate({.bytes = 16 * kChunk, .stream = streams_[0]}).value();
  ASSERT_TRUE(arena->free(block, streams_[0]).ok());
  const auto take = [&] { return arena->allocate({.bytes = 16 * kChunk, .stream = streams_[1]}); };

  // The event may have been recorded, and recorded again, without being seen to complete.
  Result<DevicePtr> again = take();
  for (int i = 0; i < 3 && !again.ok(); ++i) {
    ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
    again = take();
  }
  EXPECT_EQ(backend.record_count, 2);
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  ASSERT_TRUE(arena->free(again.value(), streams_[1]).ok());
}

TEST_F(ArenaTest, RecordsOneEventForManyFrees) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(take(16 * kChunk / 64, streams_[0]));
  for (DevicePtr block : blocks) give(block, streams_[0]);
  EXPECT_EQ(backend_->call_count(HostCall::kEventRecord), 0u);

  EXPECT_EQ(take_after_event(16 * kChunk, streams_[1], streams_[0]), blocks[0]);
  EXPECT_EQ(backend_->call_count(HostCall::kEventRecord), 1u);
}

// Neighbours freed on a stream and never used are not merged when freed, but one request can use both.
TEST_F(ArenaTest, JoinsNeighboursOfDifferentStreamsForARequestThatMayUseBoth) {
  DevicePtr first = take(8 * kChunk, streams_[0]);
  DevicePtr second = take(8 * kChunk, streams_[0]);
  hold(streams_[0]);
  give(first, streams_[0]);
  give(second);

  EXPECT_EQ(try_take(16 * kChunk, streams_[1]), StatusCode::kOutOfMemory);
  EXPECT_EQ(take(16 * kChunk, streams_[0]), first);
}

// With one stream, free neighbours are joined though only one of them waits. The union has the later free's
// time, which the event of the earlier free does not cover.
TEST_F(ArenaTest, ABlockFreedByTheHostBesideAWaitingOneIsGivenBackWithIt) {
  const DevicePtr first = take(8 * kChunk, streams_[0]);
  const DevicePtr second = take(8 * kChunk, streams_[0]);
  hold(streams_[0]);
  give(first, streams_[0]);
  EXPECT_EQ(arena_->trim(), 0u) << "now the event of the first free is recorded";
  give(second);
  EXPECT_EQ(arena_->trim(), 0u);
  gate_.open();
  for (int i = 0; i < 3 && reserved() != 0; ++i) {
    ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
    arena_->trim();
  }
  EXPECT_EQ(reserved(), 0u);
}

// A range that waits for nobody has no time to hand on to the waiting range that it is joined to.
TEST_F(ArenaTest, ABlockFreedByTheHostNeedsNoEventWhenItIsJoinedToAWaitingOne) {
  const DevicePtr other = take(kChunk, streams_[1]);
  const DevicePtr first = take(8 * kChunk, streams_[0]);
  const DevicePtr second = take(6 * kChunk, streams_[0]);
  hold(streams_[0]);
  give(first, streams_[0]);
  EXPECT_EQ(arena_->trim(), 0u);
  EXPECT_EQ(backend_->call_count(HostCall::kEventRecord), 1u);
  give(second);
  const DevicePtr joined = take(10 * kChunk, streams_[0]);
  EXPECT_EQ(joined, first) << "it takes the first and a part of the second";
  gate_.open();
  ASSERT_TRUE(backend_->stream_synchronize(streams_[0]).ok());
  EXPECT_EQ(arena_->trim(), 4 * kChunk);
  EXPECT_EQ(backend_->call_count(HostCall::kEventRecord), 1u);
  give(joined);
  give(other);
}

// Two ranges fit alike: the stream takes its own, which nobody else can use yet.
TEST_F(ArenaTest, AStreamTakesItsOwnFreedMemoryBeforeMemoryThatServesAll) {
  const DevicePtr other = take(kChunk, streams_[1]);
  const DevicePtr own = take(6 * kChunk, streams_[0]);
  const DevicePtr for_all = take(6 * kChunk, streams_[0]);
  hold(streams_[0]);
  give(own, streams_[0]);
  give(for_all);
  EXPECT_EQ(take(6 * kChunk, streams_[0]), own);
  EXPECT_EQ(take(6 * kChunk, streams_[1]), for_all);
  give(other);
}

TEST_F(ArenaTest, MemoryFreedOnARetiredStreamIsFreeForAll) {
  Stream stream = backend_->stream_create().value();
  DevicePtr block = take(16 * kChunk, stream);
  DevicePtr still_live = nullptr;
  give(block, stream);
  ASSERT_TRUE(backend_->stream_synchronize(stream).ok());
  ASSERT_TRUE(arena_->stream_retire(stream).ok());
  ASSERT_TRUE(backend_->stream_destroy(stream).ok());

  still_live = take(16 * kChunk, streams_[1]);
  EXPECT_EQ(still_live, block);
  EXPECT_EQ(backend_->call_count(HostCall::kEventRecord), 0u);
  EXPECT_TRUE(arena_->stream_retire(stream).ok()) << "a stream it does not know";
}

// A live block forgets the stream too: as one that used it, and as one that its memory waited for.
TEST_F(ArenaTest, ALiveBlockForgetsARetiredStream) {
  for (const bool recorded : {true, false}) {
    remake(16 * kChunk);
    const Stream stream = backend_->stream_create().value();
    DevicePtr block = take(15 * kChunk, stream);
    const DevicePtr other = take(512);
    if (recorded) {
      ASSERT_TRUE(arena_->record_stream(block, stream).ok());
    } else {
      give(block, stream);
      block = take(15 * kChunk, stream);
    }
    ASSERT_TRUE(backend_->stream_synchronize(stream).ok());
    ASSERT_TRUE(arena_->stream_retire(stream).ok());
    ASSERT_TRUE(backend_->stream_destroy(stream).ok());
    // The next stream gets its place.
    ASSERT_TRUE(arena_->record_stream(other, streams_[0]).ok());
    hold(streams_[0]);

    give(block);

    EXPECT_EQ(take(15 * kChunk, streams_[1]), block) << recorded;
    give(other);
  }
}

TEST_F(ArenaTest, StreamsBeyondTheTableStillFree) {
  std::vector<Stream> streams;
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 70; ++i) {
    streams.push_back(backend_->stream_create().value());
    blocks.push_back(take(512));
  }
  DevicePtr recorded = take(512);
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(arena_->record_stream(recorded, streams[i]).ok());
  EXPECT_EQ(arena_->record_stream(recorded, streams[69]).code(), StatusCode::kUnavailable);
  for (int i = 0; i < 70; ++i) give(blocks[i], streams[i]);
  give(recorded, streams[0]);
  for (Stream stream : streams) {
    ASSERT_TRUE(arena_->stream_retire(stream).ok());
    ASSERT_TRUE(backend_->stream_destroy(stream).ok());
  }
  take(16 * kChunk);
}

// A backend that opens a gate when a stream is waited for.
class GateOpeningBackend final : public ForwardingBackend {
 public:
  GateOpeningBackend(Backend& below, Gate& gate) : ForwardingBackend(below), gate_(gate) {}
  Status stream_synchronize(Stream stream) override {
    gate_.open();
    return ForwardingBackend::stream_synchronize(stream);
  }

 private:
  Gate& gate_;
};

// A table of all streams that a block may be used by, with streams to spare.
class ArenaStreamsTest : public ArenaTest {
 protected:
  void SetUp() override {
    ArenaTest::SetUp();
    for (int i = 0; i < 65; ++i) many_.push_back(backend_->stream_create().value());
  }
  void TearDown() override {
    gate_.open();
    for (const Stream stream : many_) EXPECT_TRUE(backend_->stream_destroy(stream).ok());
    ArenaTest::TearDown();
  }

  std::vector<Stream> many_;
};

TEST_F(ArenaStreamsTest, AFreeOnAStreamBeyondTheTableWaitsForItsWork) {
  GateOpeningBackend backend(*backend_, gate_);
  const auto arena = Arena::create(backend, {.limit_bytes = 4 * kChunk}).value();
  const DevicePtr recorded = arena->allocate({.bytes = 512}).value();
  const DevicePtr block = arena->allocate({.bytes = kChunk}).value();
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(arena->record_stream(recorded, many_[i]).ok());
  bool has_run = false;
  hold(many_[64]);
  const HostFunction set = [](void* flag) { *static_cast<bool*>(flag) = true; };
  ASSERT_TRUE(backend_->call_host(many_[64], set, &has_run).ok());

  EXPECT_TRUE(arena->free(block, many_[64]).ok());

  gate_.open();
  EXPECT_TRUE(has_run) << "the memory is free for all while the stream may still use it";
  EXPECT_EQ(arena->block_bytes(block), 0u);
}

// A request without a block yet gives the lock up while it settles events.
TEST_F(ArenaStreamsTest, AStreamOfARequestKeepsItsPlace) {
  GateOpeningBackend opening(*backend_, gate_);
  WatchedBackend backend(opening);
  const auto arena = Arena::create(backend, {.limit_bytes = 8 * kChunk}).value();
  for (int i = 0; i < 63; ++i) ASSERT_TRUE(arena->allocate({.bytes = 512, .stream = many_[i]}).ok());
  const DevicePtr block = arena->allocate({.bytes = 4 * kChunk, .stream = many_[0]}).value();
  const DevicePtr pending = arena->allocate({.bytes = 512, .stream = many_[1]}).value();
  hold(many_[1]);
  ASSERT_TRUE(arena->free(pending, many_[1]).ok());
  hold(many_[64]);
  std::atomic<bool> has_run{false};
  const HostFunction set = [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; };
  ASSERT_TRUE(backend.call_host(many_[64], set, &has_run).ok());
  bool freed = false;
  backend.on_event_record = [&](Stream) {
    if (std::exchange(freed, true)) return;
    EXPECT_TRUE(arena->free(block, many_[64]).ok());
  };

  const auto taken = arena->allocate({.bytes = 4 * kChunk, .stream = many_[63]});

  EXPECT_TRUE(freed);
  ASSERT_TRUE(taken.ok()) << taken.status().to_string();
  EXPECT_TRUE(taken.value() != block || has_run) << "it has memory that another stream uses";
}

// Its blocks belong to a graph, though no memory refers to it yet.
TEST_F(ArenaStreamsTest, AStreamThatIsCapturedKeepsItsPlace) {
  const Capture capture = arena_->capture_begin(many_[0]).value();
  const DevicePtr block = take(512);
  for (int i = 1; i < 64; ++i) ASSERT_TRUE(arena_->record_stream(block, many_[i]).ok());
  EXPECT_EQ(arena_->record_stream(block, many_[64]).code(), StatusCode::kUnavailable);
  ASSERT_TRUE(arena_->capture_end(capture).ok());
  EXPECT_TRUE(arena_->record_stream(block, many_[64]).ok());
}

// Its account counts them.
TEST_F(ArenaStreamsTest, AStreamThatHasBlocksKeepsItsPlace) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(take(512, many_[i]));
  EXPECT_EQ(arena_->record_stream(blocks[0], many_[64]).code(), StatusCode::kUnavailable);
  EXPECT_EQ(arena_->statistics(many_[63]).live_bytes, 512u);
  give(blocks[63]);
  EXPECT_TRUE(arena_->record_stream(blocks[0], many_[64]).ok());
}

TEST_F(ArenaTest, EnforcesItsLimitAndReportsTheHolders) {
  const Tag tag = arena_->tag_create("activations", 0).value();
  take(10 * kChunk, {}, Region::kTransient, tag);
  auto refused = arena_->allocate({.bytes = 7 * kChunk, .tag = tag});

  ASSERT_EQ(refused.status().code(), StatusCode::kOutOfMemory);
  const std::string message = refused.status().message();
  EXPECT_EQ(message.find("cannot allocate 448.00 KiB for 'activations': of the limit of 1.00 MiB, 640.00 KiB "
                         "are live, 0 B free now, 0 B waiting for other streams, 0 B held but not mapped, "
                         "384.00 KiB not taken yet; free blocks, or raise the limit "
                         "(ArenaOptions::limit_bytes; the device has 256.00 MiB)\n"),
            0u)
      << message;
  EXPECT_NE(message.find("limit 1.00 MiB, reserved 640.00 KiB"), std::string::npos) << message;
  EXPECT_NE(message.find("untagged"), std::string::npos) << message;
  EXPECT_EQ(reserved(), 10 * kChunk);
  take(6 * kChunk);
  EXPECT_EQ(reserved(), 16 * kChunk);
  EXPECT_EQ(try_take(SIZE_MAX), StatusCode::kOutOfMemory);
}

TEST_F(ArenaTest, AFullDeviceIsReportedWithTheDevicesMessage) {
  remake(0, 8 * kChunk);
  DevicePtr block = take(5 * kChunk);
  DevicePtr other = backend_->alloc(2 * kChunk).value();
  auto refused = arena_->allocate({.bytes = 2 * kChunk});
  EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory);
  const std::string message = refused.status().message();
  EXPECT_NE(message.find("; the device says: "), std::string::npos) << message;
  EXPECT_NE(message.find("; free blocks, or end other programs that use the device's memory\n"),
            std::string::npos)
      << message;

  ASSERT_TRUE(backend_->free(other).ok());
  take(3 * kChunk);
  give(block);
}

// Free memory is reported by the reason why it is not usable, and the parts add up to the limit.
TEST_F(ArenaTest, ReportsFreeWaitingAndUnmappedMemory) {
  const Tag pausable = arena_->tag_create({.name = "rollout", .pausable = true}).value();
  const Slot slot = arena_->slot_create(2 * kChunk, 0).value();
  const DevicePtr rollout = take(kChunk, {}, Region::kTransient, pausable);
  take(4 * kChunk, streams_[1]);
  const DevicePtr usable = take(kChunk, streams_[1]);
  take(kChunk, streams_[1]);
  const DevicePtr waiting = take(3 * kChunk, streams_[0]);
  ASSERT_TRUE(arena_->slot_destroy(slot).ok());
  hold(streams_[0]);
  hold(streams_[1]);
  give(rollout);
  give(waiting, streams_[0]);
  give(usable, streams_[1]);

  const std::string message =
      arena_->allocate({.bytes = 14 * kChunk, .stream = streams_[1]}).status().message();
  EXPECT_NE(message.find("of the limit of 1.00 MiB, 320.00 KiB are live, 64.00 KiB free now in pieces of at "
                         "most 64.00 KiB, 192.00 KiB waiting for other streams, 192.00 KiB held but not "
                         "mapped, 256.00 KiB not taken yet; synchronize the streams that use freed blocks "
                         "and ask again, free blocks, or raise"),
            std::string::npos)
      << message;
}

// More free ranges than a first search looks at, all larger than those that can serve a request together.
class ManyRangesTest : public ArenaTest {
 protected:
  void SetUp() override {
    constexpr std::size_t kRangeCount = 600;
    make((kRangeCount + 2) * kChunk);
    for (std::size_t i = 0; i < kRangeCount; ++i) {
      take(kChunk / 16);
      inner_.push_back(take(kChunk * 14 / 16));
      take(kChunk / 16, streams_[1]);
    }
  }
  // They lie inside chunks, so they can be joined to nothing.
  void free_inner() {
    for (const DevicePtr block : inner_) give(block);
  }
  // Frees the beginning of a chunk. The end of another is left, for the first stream to free.
  DevicePtr make_ends() {
    const DevicePtr beginning = take(kChunk * 3 / 4);
    take(kChunk / 2);
    const DevicePtr end = take(kChunk * 3 / 4);
    free_inner();
    hold(streams_[0]);
    give(beginning);
    return end;
  }
  void refuse_twice(std::size_t bytes, Stream stream) {
    for (int i = 0; i < 2; ++i) EXPECT_EQ(try_take(bytes, stream), StatusCode::kOutOfMemory);
  }

  std::vector<DevicePtr> inner_;
};

TEST_F(ManyRangesTest, ARefusedRequestIsServedAfterAFree) {
  const DevicePtr end = make_ends();
  refuse_twice(kChunk, streams_[0]);
  give(end, streams_[0]);
  take(kChunk, streams_[0]);
}

TEST_F(ManyRangesTest, ASmallerRequestThanARefusedOneIsServed) {
  give(make_ends(), streams_[0]);
  refuse_twice(2 * kChunk, streams_[0]);
  take(kChunk, streams_[0]);
}

TEST_F(ManyRangesTest, ARequestOfAnotherStreamThanARefusedOneIsServed) {
  give(make_ends(), streams_[0]);
  refuse_twice(kChunk, streams_[1]);
  take(kChunk, streams_[0]);
}

// Nothing has to be mapped for them, though the strategy that finds them is the one that maps more.
TEST_F(ManyRangesTest, NeighboursInFrontOfUnmappedAddressesServeAsTheyAre) {
  const DevicePtr ready = take(kChunk / 2, streams_[1]);
  const DevicePtr own = take(kChunk / 2);
  free_inner();
  hold(streams_[0]);
  give(ready);
  give(own, streams_[0]);

  const std::size_t before = reserved();
  EXPECT_EQ(take(kChunk, streams_[0]), ready);
  EXPECT_EQ(reserved(), before);
}

TEST_F(ArenaTest, ReportsFreeMemoryInChunksOfLiveBlocks) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 32; ++i) blocks.push_back(take(kChunk / 2));
  for (std::size_t i = 0; i < blocks.size(); i += 2) give(blocks[i]);

  const std::string message = arena_->allocate({.bytes = 2 * kChunk}).status().message();
  EXPECT_NE(message.find("512.00 KiB free now in pieces of at most 32.00 KiB"), std::string::npos) << message;
  EXPECT_NE(message.find("free the blocks that share chunks with free memory"), std::string::npos) << message;
  // As many bytes are free as are asked for, in pieces; of one granule more there are too few.
  const std::string enough = arena_->allocate({.bytes = 8 * kChunk}).status().message();
  EXPECT_NE(enough.find("0 B not taken yet; free the blocks that share chunks with free memory, or raise"),
            std::string::npos)
      << enough;
  const std::string more = arena_->allocate({.bytes = 8 * kChunk + 512}).status().message();
  EXPECT_NE(more.find("0 B not taken yet; free blocks, or raise"), std::string::npos) << more;
}

// Each figure is one that no other has.
TEST_F(ArenaTest, ReportsEachFigureInItsPlace) {
  give(take(14 * kChunk + 512));
  arena_->trim();
  const Tag buckets = arena_->tag_create("buckets", 6 * kChunk).value();
  const Tag rollout = arena_->tag_create({.name = "rollout", .pausable = true}).value();
  const Tag longest = arena_->tag_create("a-name-of-thirty-one-characters-and-more", 0).value();
  ASSERT_TRUE(arena_->slot_create(kChunk + 1024, buckets).ok());
  give(take(kChunk / 2, {}, Region::kTransient, buckets));
  const DevicePtr rolled = take(2 * kChunk + kChunk / 2, {}, Region::kTransient, rollout);
  take(kChunk / 2, {}, Region::kTransient, rollout);
  give(rolled);
  take(512);
  take(4 * kChunk, streams_[1], Region::kTransient, longest);
  const DevicePtr waiting = take(2 * kChunk, streams_[0]);
  take(kChunk + 512, streams_[1]);
  hold(streams_[0]);
  give(waiting, streams_[0]);

  EXPECT_EQ(
      arena_->report(),
      "arena on host: limit 1.00 MiB, reserved 896.00 KiB (peak 960.00 KiB), live 418.00 KiB (peak "
      "896.50 KiB)\n"
      "  free 127.00 KiB in pieces of at most 63.50 KiB, 128.00 KiB waiting for streams, 160.00 KiB of "
      "pausable tags and captures, 0 B not mapped, 0 B lost to failed calls\n"
      "  tag                                     live         peak        limit     in slots  "
      "allocations\n"
      "  untagged                           65.00 KiB   896.50 KiB            -          0 B            "
      "4\n"
      "  buckets                            65.00 KiB    97.00 KiB   384.00 KiB   128.00 KiB            "
      "1\n"
      "  rollout                            32.00 KiB   192.00 KiB            -          0 B            "
      "2\n"
      "  a-name-of-thirty-one-characters   256.00 KiB   256.00 KiB            -          0 B            "
      "1\n");
  const std::string message = arena_->allocate({.bytes = 15 * kChunk}).status().message();
  EXPECT_NE(message.find("0 B held but not mapped, 128.00 KiB not taken yet, 160.00 KiB kept for other "
                         "pausable tags and captures; synchronize the streams that use freed blocks and ask "
                         "again, free blocks, or raise"),
            std::string::npos)
      << message;
}

// While a stream is captured nothing is mapped anew, however much is free.
TEST_F(ArenaTest, OutOfMemoryDuringACaptureSaysSo) {
  const Capture capture = arena_->capture_begin(streams_[0]).value();
  take(10 * kChunk);
  const DevicePtr between = take(2 * kChunk);
  take(kChunk);
  give(between);

  const std::string message = arena_->allocate({.bytes = 4 * kChunk}).status().message();
  EXPECT_NE(
      message.find("128.00 KiB free now in pieces of at most 128.00 KiB, 0 B waiting for other streams, 0 B "
                   "held but not mapped, 192.00 KiB not taken yet; end the capture, during which nothing is "
                   "mapped anew, free blocks, or raise"),
      std::string::npos)
      << message;
  ASSERT_TRUE(arena_->capture_end(capture).ok());
}

// The limit can be raised by a chunk or more, or not at all.
TEST_F(ArenaTest, AdvisesToRaiseTheLimitOnlyWhereTheDeviceHasMore) {
  const auto advice = [&](std::size_t memory_bytes) {
    remake(16 * kChunk, memory_bytes);
    take(16 * kChunk);
    const std::string message = arena_->allocate({.bytes = 1}).status().message();
    return message.substr(message.find("not taken yet"), message.find('\n') - message.find("not taken yet"));
  };

  EXPECT_EQ(advice(16 * kChunk), "not taken yet; free blocks");
  EXPECT_EQ(advice(17 * kChunk),
            "not taken yet; free blocks, or raise the limit (ArenaOptions::limit_bytes; the device has 1.06 "
            "MiB)");
}

TEST_F(ArenaTest, ReportsThatARequestCanNeverFit) {
  const auto refusal = [&](const AllocationRequest& request) {
    return arena_->allocate(request).status().message();
  };
  EXPECT_EQ(refusal({.bytes = 16 * kChunk + 1})
                .find("cannot allocate 1.00 MiB for 'untagged': that can never fit: the arena may take 1.00 "
                      "MiB of the 256.00 MiB of host; raise its limit (ArenaOptions::limit_bytes)"),
            0u)
      << refusal({.bytes = 16 * kChunk + 1});
  EXPECT_NE(refusal({.bytes = 257_MiB}).find("that can never fit: host has 256.00 MiB in all"),
            std::string::npos);
  EXPECT_NE(refusal({.bytes = SIZE_MAX}).find("that can never fit: host has"), std::string::npos);
  EXPECT_NE(refusal({.bytes = 17 * kChunk, .fixed = true}).find("that can never fit"), std::string::npos);
  EXPECT_NE(arena_->slot_create(17 * kChunk, 0).status().message().find("that can never fit"),
            std::string::npos);
  const Tag tag = arena_->tag_create("buckets", 2 * kChunk).value();
  EXPECT_NE(refusal({.bytes = 3 * kChunk, .tag = tag}).find("its limit is 128.00 KiB, so that can never fit"),
            std::string::npos);
  remake(16 * kChunk, 256_MiB, 8 * kChunk);
  EXPECT_NE(refusal({.bytes = 9 * kChunk}).find("addresses for 512.00 KiB; reserve more"), std::string::npos);
  // All there is would fit if nothing were live.
  for (const auto& [limit, memory, reserve] : {std::tuple{16 * kChunk, 256_MiB, std::size_t{0}},
                                               {std::size_t{0}, 16 * kChunk, std::size_t{0}},
                                               {16 * kChunk, 256_MiB, 16 * kChunk}}) {
    remake(limit, memory, reserve);
    take(kChunk);
    EXPECT_EQ(refusal({.bytes = 16 * kChunk})
                  .find("cannot allocate 1.00 MiB for 'untagged': of the limit of 1.00 MiB,"),
              0u)
        << refusal({.bytes = 16 * kChunk});
  }
}

// A message names the request, the finding and a remedy.
TEST_F(ArenaTest, RefusalsAreToldExactly) {
  const Tag pausable = arena_->tag_create({.name = "rollout", .pausable = true}).value();
  const Slot slot = arena_->slot_create(2 * kChunk, 0).value();
  const DevicePtr alias = arena_->alias_create(slot, kChunk).value();
  ASSERT_TRUE(arena_->pause(pausable, false).ok());
  const auto at = [](DevicePtr address) {
    char text[32];
    std::snprintf(text, sizeof text, "%p", static_cast<void*>(address));
    return std::string(text);
  };
  const auto no_tag = [](const std::string& request) {
    return "cannot " + request + " for tag 2: there is no such tag; make it with tag_create";
  };
  const std::string alignment =
      "it is not a power of two up to the chunk size 65536; ask for less, or for larger chunks "
      "(ArenaOptions::chunk_bytes)";
  const std::string no_alias =
      ": there is no such alias or slot, or the slot is smaller; use an alias of alias_create and a slot "
      "that is "
      "at least as large";
  const std::pair<Status, std::string> cases[] = {
      {arena_->allocate({.bytes = 1, .tag = 2}).status(), no_tag("allocate")},
      {arena_->slot_create(1, 2).status(), no_tag("create a slot")},
      {arena_->pause(2, false), no_tag("pause")},
      {arena_->resume(2), no_tag("resume")},
      {arena_->pause(0, false),
       "cannot pause tag 0: it is not pausable; create it so (TagOptions::pausable)"},
      {arena_->pause(pausable, false), "cannot pause tag 1: it is paused already; resume it first"},
      {arena_->resume(0), "cannot resume tag 0: it is not paused; pause it first"},
      {arena_->allocate({.bytes = 700, .tag = pausable}).status(),
       "cannot allocate 1.00 KiB for tag 1: the tag is paused; resume it first"},
      {arena_->allocate({.bytes = 1, .alignment = 768}).status(),
       "cannot allocate with alignment 768: " + alignment},
      {arena_->allocate({.bytes = 1, .alignment = 2 * kChunk}).status(),
       "cannot allocate with alignment 131072: " + alignment},
      {arena_->allocate({.bytes = 1, .region = Region{2}}).status(),
       "cannot allocate in region 2: there is no such region; give Region::kPersistent or "
       "Region::kTransient"},
      {arena_->allocate({.bytes = 1, .alignment = kChunk, .region = Region{2}}).status(),
       "cannot allocate in region 2: there is no such region; give Region::kPersistent or "
       "Region::kTransient"},
      {arena_->slot_create(0, 0).status(),
       "cannot create a slot of no bytes: it would have no chunk; ask for one"},
      {arena_->slot_destroy({1}), "cannot destroy slot 1: there is no such slot; was it destroyed already?"},
      {arena_->slot_destroy(slot), "cannot destroy slot 0: 1 alias shows it; destroy its aliases first"},
      {arena_->alias_create({1}, 1).status(),
       "cannot create an alias of slot 1: there is no such slot; make it with slot_create"},
      {arena_->alias_create(slot, 2 * kChunk + 1).status(),
       "cannot create an alias of 128.00 KiB: the slot has 128.00 KiB; ask for one byte up to that"},
      {arena_->alias_move(alias, {1}), "cannot move the alias at " + at(alias) + " to slot 1" + no_alias},
      {arena_->alias_move(alias + kChunk, slot),
       "cannot move the alias at " + at(alias + kChunk) + " to slot 0" + no_alias},
      {arena_->alias_destroy(alias + 512), "cannot destroy the alias at " + at(alias + 512) +
                                               ": no alias begins there; was it destroyed already?"},
      {arena_->free(alias, {}),
       "cannot free " + at(alias) + ": it belongs to an alias of a slot; use alias_destroy"},
      {arena_->record_stream(alias + 512, streams_[0]),
       "cannot record a stream for " + at(alias + 512) +
           ": it belongs to an alias of a slot; use alias_destroy"},
      {arena_->capture_begin({}).status(),
       "cannot begin a capture: the stream is null; pass the one that is captured"},
      {arena_->capture_end({3}), "cannot end capture 3: it is not going on; was it ended already?"},
      {arena_->capture_release({3}),
       "cannot release capture 3: it was not ended, or was released already; end it first (capture_end)"},
      {arena_->learn_begin(), "cannot learn placements: 128.00 KiB are live; begin where nothing is"},
      {arena_->learn_end().status(), "cannot learn placements: call learn_begin first"},
  };
  for (const auto& [status, message] : cases) EXPECT_EQ(status.message(), message);
  // A slot may be asked for again after its destruction.
  ASSERT_TRUE(arena_->alias_destroy(alias).ok());
  ASSERT_TRUE(arena_->slot_destroy(slot).ok());
  EXPECT_EQ(arena_->alias_create(slot, 1).status().message(),
            "cannot create an alias of slot 0: there is no such slot; make it with slot_create");
}

TEST_F(ArenaTest, ATagWithoutANameIsCalledUnnamed) {
  for (const char* none : {static_cast<const char*>(nullptr), ""}) {
    const Tag tag = arena_->tag_create({.name = none}).value();
    const std::string message = arena_->allocate({.bytes = 17 * kChunk, .tag = tag}).status().message();
    EXPECT_NE(message.find("for 'unnamed'"), std::string::npos) << message;
  }
  EXPECT_NE(arena_->report().find("\n  unnamed "), std::string::npos) << arena_->report();
}

TEST_F(ArenaTest, EnforcesTheLimitOfATagOverBlocksAndSlots) {
  const Tag tag = arena_->tag_create("buckets", 2 * kChunk).value();
  DevicePtr block = take(kChunk, {}, Region::kTransient, tag);
  const Slot slot = arena_->slot_create(kChunk / 2, tag).value();
  auto refused = arena_->allocate({.bytes = kChunk, .tag = tag});
  EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(refused.status().message().find(
                "cannot allocate 64.00 KiB for 'buckets': its limit is 128.00 KiB, of which 96.00 KiB is "
                "live; free some of it or raise the limit of the tag\narena on host: limit 1.00 MiB"),
            0u)
      << refused.status().message();
  // As much as the limit does not count as more than the limit.
  const std::string all = arena_->allocate({.bytes = 2 * kChunk, .tag = tag}).status().message();
  EXPECT_NE(all.find("its limit is 128.00 KiB, of which 96.00 KiB is live"), std::string::npos) << all;
  const std::string slot_refusal = arena_->slot_create(kChunk, tag).status().message();
  EXPECT_EQ(
      slot_refusal.find("cannot create a slot of 64.00 KiB for 'buckets': its limit is 128.00 KiB, of "), 0u)
      << slot_refusal;
  EXPECT_EQ(arena_->slot_create(kChunk, tag).status().code(), StatusCode::kOutOfMemory);

  give(block);
  take(kChunk + kChunk / 2, {}, Region::kTransient, tag);
  EXPECT_TRUE(arena_->slot_destroy(slot).ok());
}

TEST_F(ArenaTest, CountsLiveAndPeakBytesPerTag) {
  const Tag tag = arena_->tag_create("gradients", 0).value();
  DevicePtr block = take(3000, {}, Region::kTransient, tag);
  const Slot slot = arena_->slot_create(kChunk + 100, tag).value();
  take(512);
  EXPECT_EQ(arena_->statistics(tag).live_bytes, 3072 + kChunk + 512);
  EXPECT_EQ(arena_->statistics(tag).reserved_bytes, 2 * kChunk);
  EXPECT_EQ(arena_->statistics(tag).allocation_count, 1u);
  EXPECT_EQ(arena_->statistics().allocation_count, 2u);
  EXPECT_EQ(arena_->statistics().live_bytes, 3072 + kChunk + 512 + 512);

  give(block);
  ASSERT_TRUE(arena_->slot_destroy(slot).ok());
  EXPECT_EQ(arena_->statistics(tag).live_bytes, 0u);
  EXPECT_EQ(arena_->statistics(tag).requested_bytes, 0u);
  EXPECT_EQ(arena_->statistics(tag).peak_live_bytes, 3072 + kChunk + 512);
  EXPECT_EQ(arena_->statistics(tag).peak_requested_bytes, 3000 + kChunk + 100);
  EXPECT_EQ(arena_->statistics(tag).reserved_bytes, 0u);
  EXPECT_EQ(arena_->statistics(tag).peak_reserved_bytes, 2 * kChunk);
  arena_->reset_peaks();
  EXPECT_EQ(arena_->statistics(tag).peak_live_bytes, 0u);
  EXPECT_EQ(arena_->statistics().peak_live_bytes, 512u);
  EXPECT_EQ(arena_->statistics().peak_requested_bytes, 512u);
  EXPECT_EQ(arena_->statistics(tag).peak_requested_bytes, 0u);
  EXPECT_EQ(arena_->statistics(tag).peak_reserved_bytes, 0u);
  // Two for the slot, one for small blocks, one for the others.
  EXPECT_EQ(arena_->statistics().peak_reserved_bytes, 4 * kChunk);

  const std::string report = arena_->report();
  EXPECT_NE(report.find("gradients"), std::string::npos);
  EXPECT_EQ(arena_->statistics(63).live_bytes, 0u);
  for (Tag next = tag + 1; next < kTagLimit; ++next) ASSERT_EQ(arena_->tag_create("more", 0).value(), next);
  EXPECT_EQ(arena_->tag_create("too many", 0).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(ArenaTest, MakesNoDriverCallForMappedMemory) {
  for (int i = 0; i < 4; ++i) give(take((i + 1) * kChunk, streams_[0]), streams_[0]);
  const std::uint64_t calls = arena_->statistics().driver_call_count;
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 4; ++i) give(take((i + 1) * kChunk, streams_[0]), streams_[0]);
  }
  EXPECT_EQ(arena_->statistics().driver_call_count, calls);
}

TEST_F(ArenaTest, GrowsOnlyByTheMissingBytes) {
  give(take(3 * kChunk, streams_[0]), streams_[0]);
  take(5 * kChunk, streams_[0]);

  EXPECT_EQ(reserved(), 5 * kChunk);
}

// The rounding of live slots alone is no memory that blocks could use.
TEST_F(ArenaTest, GrowsAfterSlotsWereDestroyedAsIfThereHadBeenNone) {
  const auto calls_to_grow = [&] {
    const std::uint64_t calls = arena_->statistics().driver_call_count;
    for (int i = 0; i < 64; ++i) take(kChunk);
    return arena_->statistics().driver_call_count - calls;
  };
  remake(256_MiB, 512_MiB);
  const std::uint64_t calls = calls_to_grow();

  remake(256_MiB, 512_MiB);
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(arena_->slot_destroy(arena_->slot_create(1, 0).value()).ok());
  arena_->trim();

  EXPECT_EQ(calls_to_grow(), calls);
}

// Sixteen chunks, every second one free: no two are neighbours, and the limit allows no more. Remapping must
// make one large range of them without touching live blocks.
TEST_F(ArenaTest, RemapsScatteredFreeChunksBeforeItFails) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 16; ++i) {
    blocks.push_back(take(kChunk));
    std::memset(blocks.back(), i, kChunk);
  }
  for (int i = 0; i < 16; i += 2) give(blocks[i]);

  DevicePtr large = take(8 * kChunk);
  ASSERT_NE(large, nullptr);
  std::memset(large, 0xEE, 8 * kChunk);
  EXPECT_EQ(reserved(), 16 * kChunk);
  EXPECT_EQ(backend_->charged_bytes(), 16 * kChunk);
  for (int i = 1; i < 16; i += 2) {
    for (std::size_t j = 0; j < kChunk; ++j) ASSERT_EQ(static_cast<int>(blocks[i][j]), i);
  }
}

TEST_F(ArenaTest, FreeChunksOfOneRegionServeTheOther) {
  DevicePtr persistent = take(12 * kChunk, {}, Region::kPersistent);
  give(persistent);
  take(14 * kChunk, {}, Region::kTransient);
  EXPECT_EQ(reserved(), 14 * kChunk);
  take(2 * kChunk, {}, Region::kTransient);
  EXPECT_EQ(reserved(), 16 * kChunk);
}

TEST_F(ArenaTest, ASmallBlockUsesTheOtherRegionBeforeItFails) {
  take(15 * kChunk + kChunk / 2, {}, Region::kPersistent);
  take(kChunk / 4, {}, Region::kTransient);
}

TEST_F(ArenaTest, DoesNotRemapMemoryThatQueuedWorkMayStillUse) {
  DevicePtr block = take(10 * kChunk, streams_[0]);
  take(512);
  hold(streams_[0]);
  give(block, streams_[0]);

  EXPECT_EQ(try_take(12 * kChunk, streams_[1]), StatusCode::kOutOfMemory);
  gate_.open();
  ASSERT_NE(take_after_event(12 * kChunk, streams_[1], streams_[0]), nullptr);
  EXPECT_EQ(reserved(), 13 * kChunk);
}

TEST_F(ArenaTest, AliasesOfASlotShowTheSameBytes) {
  const Slot slot = arena_->slot_create(3 * kChunk - 5, 0).value();
  EXPECT_EQ(reserved(), 3 * kChunk);
  DevicePtr whole = arena_->alias_create(slot, 3 * kChunk).value();
  DevicePtr part = arena_->alias_create(slot, kChunk + 1).value();
  EXPECT_EQ(reserved(), 3 * kChunk);
  EXPECT_EQ(arena_->statistics().live_bytes, round_up(3 * kChunk - 5, kBlockGranule));

  std::memset(whole, 0x5A, 3 * kChunk);
  part[2 * kChunk - 1] = std::byte{7};
  EXPECT_EQ(part[0], std::byte{0x5A});
  EXPECT_EQ(whole[2 * kChunk - 1], std::byte{7});

  EXPECT_EQ(arena_->block_bytes(whole), 0u);
  EXPECT_NE(arena_->free(whole, {}).message().find("alias"), std::string::npos);
  EXPECT_EQ(arena_->alias_create(slot, 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->alias_create(slot, 3 * kChunk + 1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->alias_create({}, 1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->slot_create(0, 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->slot_create(17 * kChunk, 0).status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(arena_->slot_destroy(slot).code(), StatusCode::kInvalidArgument) << "it has aliases";
  EXPECT_EQ(arena_->alias_destroy(whole + kChunk).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(arena_->alias_destroy(whole).ok());
  EXPECT_EQ(part[0], std::byte{0x5A});
  EXPECT_TRUE(arena_->alias_destroy(part).ok());
  EXPECT_EQ(arena_->alias_destroy(part).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(arena_->slot_destroy(slot).ok());
  EXPECT_EQ(arena_->slot_destroy(slot).code(), StatusCode::kInvalidArgument);
  // Its chunks serve blocks again.
  take(16 * kChunk);
  EXPECT_EQ(reserved(), 16 * kChunk);
}

// The engine shows units far larger than the device through few slots.
TEST_F(ArenaTest, AliasesTakeAddressesAndNoMemory) {
  const Slot slot = arena_->slot_create(kChunk, 0).value();
  std::set<DevicePtr> aliases;
  for (int i = 0; i < 40; ++i) aliases.insert(arena_->alias_create(slot, kChunk).value());

  EXPECT_EQ(aliases.size(), 40u);
  EXPECT_EQ(backend_->charged_bytes(), kChunk);
  for (DevicePtr alias : aliases) {
    *alias = std::byte{1};
    EXPECT_TRUE(arena_->alias_destroy(alias).ok());
  }
}

TEST_F(ArenaTest, AnAliasMovesToAnotherSlotAndKeepsItsAddress) {
  const Slot first = arena_->slot_create(2 * kChunk, 0).value();
  const Slot second = arena_->slot_create(2 * kChunk, 0).value();
  const Slot small = arena_->slot_create(kChunk, 0).value();
  const DevicePtr alias = arena_->alias_create(first, 2 * kChunk).value();
  const DevicePtr other = arena_->alias_create(second, 2 * kChunk).value();
  *alias = std::byte{1};
  *other = std::byte{2};
  EXPECT_EQ(arena_->alias_move(alias, small).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena_->alias_move(alias + kChunk, second).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(*alias, std::byte{1});
  ASSERT_TRUE(arena_->alias_move(alias, second).ok());
  EXPECT_EQ(*alias, std::byte{2});
  ASSERT_TRUE(arena_->slot_destroy(first).ok());
  // Onto no slot: the slot that it showed may be destroyed, and the alias finds another one.
  ASSERT_TRUE(arena_->alias_move(other, {}).ok());
  ASSERT_TRUE(arena_->alias_move(alias, {}).ok());
  EXPECT_TRUE(arena_->slot_destroy(second).ok());
  const Slot third = arena_->slot_create(2 * kChunk, 0).value();
  ASSERT_TRUE(arena_->alias_move(alias, third).ok());
  *alias = std::byte{3};
  EXPECT_TRUE(arena_->alias_destroy(alias).ok());
  EXPECT_TRUE(arena_->alias_destroy(other).ok());
}

TEST_F(ArenaTest, RefusesAnAliasWhenTheAddressesAreUsedUp) {
  remake(4 * kChunk, 256_MiB, 8 * kChunk);
  const Slot slot = arena_->slot_create(2 * kChunk, 0).value();
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(arena_->alias_create(slot, 2 * kChunk).ok());
  auto refused = arena_->alias_create(slot, kChunk);
  EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory);
  EXPECT_NE(refused.status().message().find("reserve_bytes"), std::string::npos);
  EXPECT_EQ(try_take(1), StatusCode::kOutOfMemory);
}

// The chunks of a block mapped where an alias was are the arena's, not the slot's.
TEST_F(ArenaTest, AddressesOfADestroyedAliasServeBlocks) {
  remake(4 * kChunk, 256_MiB, 8 * kChunk);
  const Slot slot = arena_->slot_create(kChunk, 0).value();
  std::vector<DevicePtr> aliases;
  for (int i = 0; i < 8; ++i) aliases.push_back(arena_->alias_create(slot, kChunk).value());
  ASSERT_TRUE(arena_->alias_destroy(aliases[3]).ok());

  DevicePtr block = take(kChunk);
  EXPECT_EQ(block, aliases[3]);
  give(block);
  EXPECT_EQ(arena_->trim(), kChunk);
  EXPECT_EQ(reserved(), kChunk);
}

TEST_F(ArenaTest, TrimGivesWhollyFreeChunksBack) {
  DevicePtr first = take(4 * kChunk, streams_[0]);
  DevicePtr second = take(kChunk / 2, streams_[0]);
  const Slot slot = arena_->slot_create(kChunk, 0).value();
  ASSERT_TRUE(arena_->slot_destroy(slot).ok());
  give(first);
  EXPECT_EQ(reserved(), 6 * kChunk);

  EXPECT_EQ(arena_->trim(), 5 * kChunk);
  EXPECT_EQ(reserved(), kChunk);
  EXPECT_EQ(backend_->charged_bytes(), kChunk);
  EXPECT_EQ(arena_->trim(), 0u);
  std::memset(second, 1, kChunk / 2);
  take(10 * kChunk);
}

TEST_F(ArenaTest, TrimUnmapsNeighboursInOneCall) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(take(kChunk));
  const std::size_t before = backend_->call_count(HostCall::kUnmap);
  for (const int i : {0, 1, 3, 4, 5}) give(blocks[i]);
  EXPECT_EQ(arena_->trim(), 5 * kChunk);
  EXPECT_EQ(backend_->call_count(HostCall::kUnmap) - before, 2u);
  std::memset(blocks[2], 1, kChunk);
}

TEST_F(ArenaTest, MemoryThatTrimCannotUnmapStaysUsable) {
  std::vector<DevicePtr> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(take(kChunk));
  for (const int i : {0, 1, 3, 4, 5}) give(blocks[i]);
  backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(arena_->trim(), 3 * kChunk);
  EXPECT_EQ(reserved(), 3 * kChunk);
  DevicePtr again = take(2 * kChunk);
  std::memset(again, 1, 2 * kChunk);
  EXPECT_EQ(reserved(), 3 * kChunk);
  give(again);
  EXPECT_EQ(arena_->trim(), 2 * kChunk);
}

TEST_F(ArenaTest, RefusesChunksTheBackendCannotMap) {
  EXPECT_EQ(Arena::create(*backend_, {.chunk_bytes = kChunk / 2}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Arena::create(*backend_, {.chunk_bytes = 3 * kChunk}).status().code(),
            StatusCode::kInvalidArgument);
  auto larger = Arena::create(*backend_, {.limit_bytes = 8 * kChunk, .chunk_bytes = 4 * kChunk});
  ASSERT_TRUE(larger.ok());
  EXPECT_EQ(larger.value()->chunk_bytes(), 4 * kChunk);
  EXPECT_TRUE(larger.value()->allocate({.bytes = 1, .alignment = 4 * kChunk}).ok());
  EXPECT_EQ(larger.value()->statistics().reserved_bytes, 4 * kChunk);
}

// A mapping that cannot be undone is set aside, and used again once the Backend lets it go.
TEST_F(ArenaTest, SetsAsideAMappingItCannotUndoAndTriesAgain) {
  backend_->add_fault({HostCall::kSetAccess, 1, Status(StatusCode::kInternal, "scripted")});
  backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(try_take(4 * kChunk), StatusCode::kInternal);
  EXPECT_NE(arena_->report().find("256.00 KiB lost to failed calls"), std::string::npos) << arena_->report();

  take(16 * kChunk);
  EXPECT_EQ(reserved(), 16 * kChunk);
}

// The Backend lets it go at the third attempt. Until then no block gets its addresses.
TEST_F(ArenaTest, AMappingThatStaysInPlaceServesNoBlockUntilItIsTrimmed) {
  backend_->add_fault({HostCall::kSetAccess, 1, Status(StatusCode::kInternal, "scripted")});
  backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
  backend_->add_fault({HostCall::kUnmap, 2, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(try_take(4 * kChunk), StatusCode::kInternal);
  DevicePtr block = take(4 * kChunk);
  std::memset(block, 1, 4 * kChunk);
  EXPECT_NE(arena_->report().find("256.00 KiB lost to failed calls"), std::string::npos) << arena_->report();
  EXPECT_EQ(reserved(), 8 * kChunk);

  EXPECT_EQ(arena_->trim(), 4 * kChunk);
  EXPECT_EQ(backend_->charged_bytes(), 4 * kChunk);
  std::memset(block, 2, 4 * kChunk);
}

TEST_F(ArenaTest, AChunkThatCouldNotBeMappedServesNoSmallerBlock) {
  backend_->add_fault({HostCall::kMap, 1, Status(StatusCode::kInternal, "scripted")});
  EXPECT_EQ(arena_->allocate({.bytes = 4 * kChunk, .region = Region::kPersistent}).status().code(),
            StatusCode::kInternal);
  std::memset(take(2 * kChunk, {}, Region::kPersistent), 1, 2 * kChunk);
  EXPECT_EQ(reserved(), 6 * kChunk);
  std::memset(take(4 * kChunk, {}, Region::kPersistent), 2, 4 * kChunk);
  EXPECT_EQ(reserved(), 6 * kChunk);
}

TEST_F(ArenaTest, CreateFailsWithoutAddresses) {
  backend_->add_fault({HostCall::kReserve, 1, Status(StatusCode::kOutOfMemory, "scripted")});
  auto refused = Arena::create(*backend_, {.reserve_bytes = 16 * kChunk, .limit_bytes = 4 * kChunk});
  EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory);
  EXPECT_TRUE(Arena::create(*backend_, {.reserve_bytes = 16 * kChunk, .limit_bytes = 4 * kChunk}).ok());
}

// A backend that has few addresses.
class ScarceAddressesBackend final : public ForwardingBackend {
 public:
  ScarceAddressesBackend(Backend& below, std::size_t most) : ForwardingBackend(below), most_(most) {}
  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    if (bytes > most_) return Status(StatusCode::kOutOfMemory, "scarce");
    return ForwardingBackend::reserve(bytes, alignment);
  }

 private:
  const std::size_t most_;
};

TEST_F(ArenaTest, TakesFewerAddressesWhereTheyAreScarceAndNeverFewerThanItsLimit) {
  for (const std::size_t most : {300 * kChunk, 256 * kChunk, 255 * kChunk, 16 * kChunk, 15 * kChunk}) {
    ScarceAddressesBackend backend(*backend_, most);
    const Result<std::unique_ptr<Arena>> arena = Arena::create(backend, {.limit_bytes = 16 * kChunk});
    EXPECT_EQ(arena.ok(), most >= 16 * kChunk) << most;
    if (!arena.ok()) {
      EXPECT_EQ(arena.status().message(), "cannot make an arena: scarce");
    } else {
      EXPECT_TRUE(arena.value()->allocate({.bytes = 16 * kChunk}).ok()) << most;
    }
    // A wish is not halved.
    EXPECT_EQ(Arena::create(backend, {.reserve_bytes = 256 * kChunk, .limit_bytes = 16 * kChunk}).ok(),
              most >= 256 * kChunk)
        << most;
  }
}

TEST_F(ArenaTest, ALimitIsThatOfItsWholeChunks) {
  const auto arena = Arena::create(*backend_, {.limit_bytes = 3 * kChunk - 1}).value();
  EXPECT_NE(arena->report().find("limit 128.00 KiB, "), std::string::npos) << arena->report();
  EXPECT_TRUE(arena->allocate({.bytes = 2 * kChunk}).ok());
  const std::string message = arena->allocate({.bytes = 1}).status().message();
  EXPECT_NE(message.find(" 0 B not taken yet"), std::string::npos) << message;
}

// A reading of peaks must not change where blocks lie.
TEST_F(ArenaTest, ResetPeaksDoNotChangeWhetherMemoryIsTaken) {
  for (const bool resets : {false, true}) {
    remake(64 * kChunk);
    std::vector<DevicePtr> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(take(kChunk));
    for (int i = 10; i < 20; ++i) give(blocks[i]);
    EXPECT_EQ(arena_->trim(), 10 * kChunk);
    if (resets) arena_->reset_peaks();
    for (const int i : {1, 3}) give(blocks[i]);

    take(2 * kChunk);

    EXPECT_EQ(arena_->statistics().moved_chunk_count, 0u) << resets;
    EXPECT_EQ(reserved(), 12 * kChunk) << resets;
  }
}

// --- aliases of which a call fails ---

TEST_F(ArenaTest, AnAliasThatCouldNotBeMovedShowsNothingAndMovesAgain) {
  const Slot first = arena_->slot_create(2 * kChunk, 0).value();
  const Slot second = arena_->slot_create(2 * kChunk, 0).value();
  const DevicePtr alias = arena_->alias_create(first, 2 * kChunk).value();
  const DevicePtr witness = arena_->alias_create(second, 2 * kChunk).value();
  *witness = std::byte{7};

  // It still shows the first slot.
  backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
  const Status stuck = arena_->alias_move(alias, second);
  EXPECT_EQ(stuck.code(), StatusCode::kInternal);
  EXPECT_EQ(stuck.message().find("cannot move the alias at "), 0u) << stuck.message();
  *alias = std::byte{5};
  EXPECT_EQ(arena_->slot_destroy(first).code(), StatusCode::kInvalidArgument);

  for (const HostCall call : {HostCall::kMap, HostCall::kSetAccess}) {
    backend_->add_fault({call, 1, Status(StatusCode::kInternal, "scripted")});
    EXPECT_EQ(arena_->alias_move(alias, second).code(), StatusCode::kInternal);
  }
  EXPECT_TRUE(arena_->slot_destroy(first).ok()) << "nothing shows it";
  ASSERT_TRUE(arena_->alias_move(alias, second).ok());
  EXPECT_EQ(*alias, std::byte{7});
  EXPECT_TRUE(arena_->alias_destroy(alias).ok());
  EXPECT_TRUE(arena_->alias_destroy(witness).ok());
  EXPECT_TRUE(arena_->slot_destroy(second).ok());
}

// The addresses of an alias of which even the mapping could not be undone are used again later.
TEST_F(ArenaTest, AddressesThatAnAliasLeftMappedComeBack) {
  for (const bool moves : {false, true}) {
    remake(4 * kChunk, 256_MiB, 8 * kChunk);
    const Slot slot = arena_->slot_create(2 * kChunk, 0).value();
    const DevicePtr alias = moves ? arena_->alias_create(slot, 2 * kChunk).value() : nullptr;
    if (moves) {
      ASSERT_TRUE(arena_->alias_move(alias, {}).ok());
    }
    backend_->add_fault({HostCall::kSetAccess, 1, Status(StatusCode::kInternal, "scripted")});
    backend_->add_fault({HostCall::kUnmap, 1, Status(StatusCode::kInternal, "scripted")});
    EXPECT_EQ(moves ? arena_->alias_move(alias, slot).code()
                    : arena_->alias_create(slot, 2 * kChunk).status().code(),
              StatusCode::kInternal);
    EXPECT_NE(arena_->report().find("128.00 KiB lost to failed calls"), std::string::npos)
        << arena_->report();
    if (moves) {
      EXPECT_EQ(arena_->alias_destroy(alias).code(), StatusCode::kInvalidArgument)
          << "it is destroyed already";
    }

    std::vector<DevicePtr> aliases;
    for (int i = 0; i < 4; ++i) {
      const Result<DevicePtr> made = arena_->alias_create(slot, 2 * kChunk);
      ASSERT_TRUE(made.ok()) << made.status().to_string();
      aliases.push_back(made.value());
      *aliases.back() = std::byte{1};
    }
    EXPECT_NE(arena_->report().find(" 0 B lost to failed calls"), std::string::npos) << arena_->report();
    for (const DevicePtr one : aliases) EXPECT_TRUE(arena_->alias_destroy(one).ok());
    EXPECT_TRUE(arena_->slot_destroy(slot).ok());
  }
}

// Addresses that own no memory are given up where an alias or a fixed block finds no others.
TEST_F(ArenaTest, AliasesAndFixedBlocksGetTheAddressesOfOldMappings) {
  for (const bool fixed : {false, true}) {
    remake(6 * kChunk, 256_MiB, 8 * kChunk);
    const Slot slot = arena_->slot_create(kChunk, 0).value();
    const Slot spare = arena_->slot_create(kChunk, 0).value();
    std::vector<DevicePtr> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(take(kChunk));
    for (const int i : {0, 2}) give(blocks[i]);
    take(2 * kChunk);
    ASSERT_EQ(arena_->statistics().moved_chunk_count, 2u) << "six addresses are mapped";
    ASSERT_TRUE(arena_->slot_destroy(spare).ok());
    std::vector<DevicePtr> aliases;
    for (int i = 0; i < 2; ++i) aliases.push_back(arena_->alias_create(slot, kChunk).value());

    if (fixed) {
      const Result<DevicePtr> block = arena_->allocate({.bytes = 1, .fixed = true});
      EXPECT_TRUE(block.ok()) << block.status().to_string();
    } else {
      const Result<DevicePtr> alias = arena_->alias_create(slot, kChunk);
      EXPECT_TRUE(alias.ok()) << alias.status().to_string();
      if (alias.ok()) aliases.push_back(alias.value());
    }

    for (const DevicePtr alias : aliases) EXPECT_TRUE(arena_->alias_destroy(alias).ok());
  }
}

TEST_F(ArenaTest, ServesManyThreadsAtOnce) {
  remake(64 * kChunk);
  constexpr int kThreads = 4;
  constexpr int kRounds = 1500;
  std::atomic<int> overlap_count{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::pair<DevicePtr, std::size_t>> mine;
      std::uint32_t state = 12345u + static_cast<std::uint32_t>(t);
      const auto next = [&state] { return state = state * 1664525u + 1013904223u, state >> 8; };
      const auto drop = [&](std::size_t i) {
        auto [block, bytes] = mine[i];
        for (const std::size_t at : {std::size_t{0}, bytes / 2, bytes - 1}) {
          if (block[at] != static_cast<std::byte>(t)) ++overlap_count;
        }
        EXPECT_TRUE(arena_->free(block, {}).ok());
        mine[i] = mine.back();
        mine.pop_back();
      };
      for (int i = 0; i < kRounds; ++i) {
        if (mine.size() > 6) drop(next() % mine.size());
        const std::size_t bytes = 1 + next() % (3 * kChunk);
        auto block = arena_->allocate(
            {.bytes = bytes, .region = next() % 4 == 0 ? Region::kPersistent : Region::kTransient});
        if (block.ok()) {
          std::memset(block.value(), t, bytes);
          mine.emplace_back(block.value(), bytes);
        }
        if (next() % 128 == 0) arena_->trim();
        if (next() % 64 == 0) (void)arena_->report();
        if (next() % 64 == 0) {
          auto slot = arena_->slot_create(kChunk, 0);
          if (slot.ok()) {
            auto alias = arena_->alias_create(slot.value(), kChunk);
            EXPECT_TRUE(alias.ok());
            if (alias.ok()) {
              EXPECT_TRUE(arena_->alias_destroy(alias.value()).ok());
            }
            EXPECT_TRUE(arena_->slot_destroy(slot.value()).ok());
          }
        }
      }
      while (!mine.empty()) drop(mine.size() - 1);
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(overlap_count.load(), 0);
  EXPECT_EQ(arena_->statistics().live_bytes, 0u);
  take(64 * kChunk);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // These end the program there.
TEST_F(ArenaTest, ASlotWhoseListHasNoMemoryLeavesTheArenaInUse) {
  remake(SIZE_MAX, 256_MiB, 64 * kChunk);

  EXPECT_EQ(arena_->slot_create(SIZE_MAX / 2, 0).status().code(), StatusCode::kOutOfMemory);

  ASSERT_TRUE(arena_->slot_create(kChunk, 0).ok());
  give(take(kChunk));
}
#endif

}  // namespace
}  // namespace forebay
