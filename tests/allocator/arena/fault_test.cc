// Aim: when any call on the Backend fails, or the host has no memory, the arena reports it or manages
// without; nothing is lost, and the next request works.
//
// Method: one scenario goes through everything that makes the arena call its Backend: growing, stitching, the
// breaking of large chunks, addresses that show the same memory and run out, slots, fixed blocks, a pausable
// tag, a capture, streams that wait for each other, trim, refining. It is run once for each call that it
// makes, and that call fails; and once for each allocation of host memory that the arena makes, which gets
// none. An operation that fails is repeated and must then succeed. Accounts and the contents of all blocks
// are compared after every operation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "forebay/arena.h"
#include "forebay/host_backend.h"
#include "forebay/units.h"
#include "runtime/device/forwarding_backend.h"

namespace forebay {
namespace {

constexpr std::size_t kChunk = 4_KiB;
constexpr std::size_t kLimit = 36 * kChunk;

// Allocations of host memory by the arena, on this thread. The `failing`th gets none; 0: all get some.
struct HostMemory {
  bool counts = false;
  int count = 0;
  int failing = 0;
  bool all_later = false;  // So do those that follow it in the same call.
  bool refusing = false;
  std::size_t previous = 0;

  bool failed() const { return failing != 0 && count >= failing; }
  // The second of two equal ones in a row does not count: the arena tries for memory before a vector takes
  // it.
  bool refuses(std::size_t bytes) {
    if (!counts) return false;
    if (!refusing && (std::exchange(previous, bytes) == bytes || ++count != failing)) return false;
    refusing = all_later || refusing;
    errno = ENOMEM;
    return true;
  }
};
thread_local HostMemory host_memory;

class CountAllocations {
 public:
  explicit CountAllocations(bool counts) : before_(std::exchange(host_memory.counts, counts)) {}
  CountAllocations(const CountAllocations&) = delete;
  CountAllocations& operator=(const CountAllocations&) = delete;
  ~CountAllocations() {
    if (!before_) host_memory.refusing = false;
    host_memory.counts = before_;
  }

 private:
  bool before_;
};

// Counts the calls, and fails one of them. Events complete at once, so that a run makes the same calls every
// time.
class FaultyBackend final : public ForwardingBackend {
 public:
  FaultyBackend(Backend& below, int failing_call, StatusCode code)
      : ForwardingBackend(below), failing_call_(failing_call), code_(code) {}

  // The part of the scenario that makes the following calls.
  void begin(const std::string& what) { what_ = what; }
  int call_count() const { return call_count_; }
  // Calls of one kind made for `what`.
  int count(const std::string& what, const std::string& call) const {
    const auto found = counts_.find(what + ": " + call);
    return found == counts_.end() ? 0 : found->second;
  }
  // "stitching: map", the call that failed; empty until it has.
  const std::string& failed() const { return failed_; }

  Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) override {
    return call("reserve", [&] { return ForwardingBackend::reserve(bytes, alignment); });
  }
  Status release(DevicePtr base, std::size_t bytes) override {
    return call("release", [&] { return ForwardingBackend::release(base, bytes); });
  }
  Result<Chunk> chunk_create(std::size_t bytes) override {
    return call("chunk_create", [&] { return ForwardingBackend::chunk_create(bytes); });
  }
  Status chunk_destroy(Chunk chunk) override {
    return call("chunk_destroy", [&] { return ForwardingBackend::chunk_destroy(chunk); });
  }
  Status map(DevicePtr address, Chunk chunk) override {
    return call("map", [&] { return ForwardingBackend::map(address, chunk); });
  }
  Status unmap(DevicePtr address, std::size_t bytes) override {
    return call("unmap", [&] { return ForwardingBackend::unmap(address, bytes); });
  }
  Status set_access(DevicePtr address, std::size_t bytes) override {
    return call("set_access", [&] { return ForwardingBackend::set_access(address, bytes); });
  }
  Status pin(void* address, std::size_t bytes) override {
    return call("pin", [&] { return ForwardingBackend::pin(address, bytes); });
  }
  Status unpin(void* address) override {
    return call("unpin", [&] { return ForwardingBackend::unpin(address); });
  }
  Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) override {
    return call("copy_async", [&] { return ForwardingBackend::copy_async(target, source, bytes, stream); });
  }
  Result<Stream> stream_create() override {
    return call("stream_create", [&] { return ForwardingBackend::stream_create(); });
  }
  Status stream_destroy(Stream stream) override {
    return call("stream_destroy", [&] { return ForwardingBackend::stream_destroy(stream); });
  }
  Status stream_synchronize(Stream stream) override {
    // This test is about the arena's reaction to the answer, not about waiting.
    const CountAllocations pause(false);
    Status status = ForwardingBackend::stream_synchronize(stream);
    return call("stream_synchronize", [&] { return status; });
  }
  Result<Event> event_create() override {
    return call("event_create", [&] { return ForwardingBackend::event_create(); });
  }
  Status event_destroy(Event event) override {
    return call("event_destroy", [&] { return ForwardingBackend::event_destroy(event); });
  }
  Status event_record(Event event, Stream stream) override {
    return call("event_record", [&] {
      Status status = ForwardingBackend::event_record(event, stream);
      return status.ok() ? ForwardingBackend::event_synchronize(event) : status;
    });
  }
  Result<bool> event_query(Event event) override {
    return call("event_query", [&] { return ForwardingBackend::event_query(event); });
  }
  Status event_synchronize(Event event) override {
    return call("event_synchronize", [&] { return ForwardingBackend::event_synchronize(event); });
  }

 private:
  template <typename Call>
  std::invoke_result_t<Call> call(const char* name, Call call) {
    const CountAllocations pause(false);
    if (fails(name)) return Status(code_, "scripted");
    return call();
  }
  bool fails(const char* call) {
    ++counts_[what_ + ": " + call];
    if (++call_count_ != failing_call_) return false;
    failed_ = what_ + ": " + call;
    return true;
  }

  const int failing_call_;
  const StatusCode code_;
  int call_count_ = 0;
  std::string what_;
  std::string failed_;
  std::map<std::string, int> counts_;
};

class Scenario {
 public:
  // The `failing_call`th call fails with `code`; 0: none does.
  Scenario(int failing_call, StatusCode code) : code_(code) {
    HostBackendOptions options;
    options.granularity = kChunk;
    options.memory_bytes = kLimit + 4 * kChunk;
    device_ = std::move(HostBackend::create(std::move(options))).value();
    backend_ = std::make_unique<FaultyBackend>(*device_, failing_call, code);
    for (Stream& stream : streams_) stream = device_->stream_create().value();
  }

  void run() {
    make();
    hold_for_long();
    if (!failed()) stitch();
    if (!failed()) break_a_chunk();
    if (!failed()) change_streams();
    if (!failed()) capture();
    if (!failed()) pause(true);
    if (!failed()) pause(false);
    if (!failed()) use_up_addresses();
    if (!failed()) trim_among_live_blocks();
    if (!failed()) take_fixed_when_full();
    if (!failed()) give_all_back();
    end();
  }

  // Another one: a step that leaves gaps comes again and again.
  void run_steps() {
    make();
    for (int i = 0; i < 8 && !failed(); ++i) step();
    refinement_count_ = arena_->statistics().refinement_count;
    for (int i = 0; i < 2; ++i) trim();
    EXPECT_EQ(arena_->statistics().reserved_bytes, 0u) << arena_->report();
    end();
  }

  const FaultyBackend& backend() const { return *backend_; }
  std::uint64_t moved_by_stitching() const { return moved_by_stitching_; }
  std::uint64_t refinement_count() const { return refinement_count_; }

 private:
  struct Block {
    std::size_t bytes;
    int pattern;
  };

  void make() {
    ArenaOptions options;
    options.limit_bytes = kLimit;
    options.reserve_bytes = 4 * kLimit;
    options.growth_bytes = 8 * kChunk;
    options.largest_chunk_bytes = 8 * kChunk;
    backend_->begin("making the arena");
    arena_ = std::move(twice([&] { return Arena::create(*backend_, options); })).value();
    pausable_ = arena_->tag_create({.name = "pausable", .pausable = true}).value();
  }

  static bool failed() { return ::testing::Test::HasFailure(); }

  void begin(const std::string& what) { backend_->begin(what); }
  static Status status_of(const Status& status) { return status; }
  template <typename Value>
  static Status status_of(const Result<Value>& result) {
    return result.status();
  }

  // Whether the call, or the allocation of host memory, that is to fail has failed.
  bool reached() const { return !backend_->failed().empty() || host_memory.failed(); }
  template <typename Call>
  std::invoke_result_t<Call> counted(Call call) {
    const CountAllocations count(arena_ != nullptr);
    return call();
  }

  // Only the call that fails is an excuse, and only once.
  template <typename Call>
  std::invoke_result_t<Call> twice(Call call) {
    const bool excused = !reached();
    auto first = counted(call);
    if (status_of(first).ok()) return first;
    EXPECT_TRUE(excused && reached()) << status_of(first).to_string();
    // A failed mapping or event may be reported as its consequence: no memory.
    EXPECT_TRUE(status_of(first).code() == code_ || status_of(first).code() == StatusCode::kOutOfMemory)
        << status_of(first).to_string();
    if (arena_ != nullptr) check("after a failure");
    auto second = call();
    EXPECT_TRUE(status_of(second).ok()) << "the next try: " << status_of(second).to_string();
    return second;
  }

  DevicePtr take(std::size_t bytes, AllocationRequest request = {}) {
    if (failed()) return nullptr;
    request.bytes = bytes;
    const Result<DevicePtr> block = twice([&] { return arena_->allocate(request); });
    if (!block.ok()) return nullptr;
    next_pattern_ = next_pattern_ % 250 + 1;
    std::memset(block.value(), next_pattern_, bytes);
    const std::size_t unit = request.fixed ? kChunk : kBlockGranule;
    live_bytes_ += round_up(bytes, unit);
    (request.tag == pausable_ ? resting_ : blocks_)[block.value()] = {bytes, next_pattern_};
    check("after taking");
    return block.value();
  }
  DevicePtr take_on(int stream, std::size_t bytes) { return take(bytes, {.stream = streams_[stream]}); }

  void give(DevicePtr block, Stream stream = {}) {
    if (failed()) return;
    live_bytes_ -= arena_->block_bytes(block);
    blocks_.erase(block);
    resting_.erase(block);
    EXPECT_TRUE(counted([&] { return arena_->free(block, stream); }).ok());
    check("after giving");
  }

  void trim() {
    counted([&] { arena_->trim(); });
  }

  static void check_pattern(const std::map<DevicePtr, Block>& blocks, const char* when) {
    for (const auto& [address, block] : blocks) {
      const bool same = address[0] == static_cast<std::byte>(block.pattern) &&
                        std::memcmp(address, address + 1, block.bytes - 1) == 0;
      EXPECT_TRUE(same) << when << ": a block of " << block.bytes << " bytes has lost some";
    }
  }
  void check(const char* when) {
    if (failed()) return;
    const ArenaStatistics statistics = arena_->statistics();
    EXPECT_EQ(statistics.live_bytes, live_bytes_) << when;
    EXPECT_EQ(statistics.reserved_bytes, device_->charged_bytes()) << when << "\n" << arena_->report();
    EXPECT_LE(statistics.reserved_bytes, kLimit) << when;
    check_pattern(blocks_, when);
    if (!paused_) check_pattern(resting_, when);
  }

  // 8 chunks stay for most of the scenario: packed, in a slot that two aliases show, and fixed.
  void hold_for_long() {
    begin("persistent blocks");
    persistent_ = take(3 * kChunk + kChunk / 2, {.region = Region::kPersistent});
    begin("a slot");
    slot_ = twice([&] { return arena_->slot_create(2 * kChunk, 0); }).value();
    live_bytes_ += 2 * kChunk;
    for (const std::size_t bytes : {2 * kChunk, kChunk}) {
      aliases_.push_back(twice([&] { return arena_->alias_create(slot_, bytes); }).value());
    }
    aliases_[0][5] = std::byte{9};
    EXPECT_EQ(aliases_[1][5], std::byte{9});
    begin("a fixed block");
    fixed_ = take(kChunk + kChunk / 2, {.fixed = true});
  }

  // Twenty-eight chunks, all in use: two large ones with a wall between them, and eight of the smallest.
  void stitch() {
    begin("growing");
    low_ = take(8 * kChunk, {.region = Region::kPersistent});
    wall_ = take(4 * kChunk, {.region = Region::kPersistent});
    high_ = take(8 * kChunk, {.region = Region::kPersistent});
    for (DevicePtr& single : singles_) single = take(kChunk);
    EXPECT_TRUE(failed() || arena_->statistics().reserved_bytes == kLimit);

    begin("stitching");
    const std::uint64_t moved = arena_->statistics().moved_chunk_count;
    for (int i = 0; i < 8; i += 2) give(singles_[i]);
    const DevicePtr large = take(4 * kChunk);
    moved_by_stitching_ = arena_->statistics().moved_chunk_count - moved;
    give(large);
    begin("memory that is shown elsewhere");
    for (int i = 0; i < 8; i += 2) singles_[i] = take(kChunk);
  }

  void break_a_chunk() {
    begin("breaking a chunk");
    give(low_);
    give(high_);
    low_ = take(10 * kChunk);
    high_ = take(6 * kChunk);
  }

  // One stream requests memory that the other freed.
  void change_streams() {
    begin("changing streams");
    give(low_);
    give(high_);
    DevicePtr first = take_on(0, 7 * kChunk);
    const DevicePtr second = take_on(0, 4 * kChunk);
    if (failed()) return;
    EXPECT_TRUE(arena_->record_stream(second, streams_[1]).ok());
    give(first, streams_[0]);
    give(second, streams_[0]);
    first = take_on(1, 16 * kChunk);
    give(first, streams_[1]);
    first = take_on(0, 13 * kChunk);
    give(first, streams_[0]);
    low_ = take(16 * kChunk);
  }

  void capture() {
    give(low_);
    // A capture remaps nothing, so the memory for it must still be with the device.
    trim();
    trim();
    begin("a capture");
    const Result<Capture> capture = twice([&] { return arena_->capture_begin(streams_[1]); });
    if (!capture.ok()) return;
    const DevicePtr first = take_on(1, kChunk + kChunk / 2);
    const DevicePtr second = take_on(1, kChunk / 2);
    give(second, streams_[1]);
    const DevicePtr third = take_on(1, kChunk / 4);
    if (failed()) return;
    EXPECT_TRUE(arena_->capture_end(capture.value()).ok());
    give(first, streams_[1]);
    EXPECT_TRUE(arena_->capture_release(capture.value()).ok());
    give(third, streams_[1]);
    low_ = take(16 * kChunk);
  }

  // The tag's blocks are stitched, and others use the room that they leave.
  void pause(bool keep) {
    begin("a pausable tag");
    give(low_);
    DevicePtr mine[4];
    for (DevicePtr& block : mine) block = take(kChunk, {.tag = pausable_});
    give(mine[1]);
    give(mine[3]);
    mine[1] = take(2 * kChunk, {.tag = pausable_});
    const std::string how = keep ? ", with a copy" : ", without a copy";
    begin("pausing" + how);
    const std::size_t before = arena_->statistics().reserved_bytes;
    EXPECT_TRUE(twice([&] { return arena_->pause(pausable_, keep); }).ok());
    if (failed()) return;
    paused_ = true;
    EXPECT_LT(arena_->statistics().reserved_bytes, before);
    check("after pausing");
    begin("while a tag is paused");
    low_ = take(15 * kChunk);
    give(low_);
    begin("resuming" + how);
    EXPECT_TRUE(twice([&] { return arena_->resume(pausable_); }).ok());
    if (failed()) return;
    paused_ = false;
    if (!keep) {
      for (const auto& [address, block] : resting_) std::memset(address, block.pattern, block.bytes);
    }
    check("after resuming");
    begin("after a pause");
    for (const DevicePtr block : {mine[0], mine[1], mine[2]}) give(block);
    low_ = take(16 * kChunk);
  }

  // New stitches until the addresses are used up.
  void use_up_addresses() {
    begin("running out of addresses");
    std::mt19937 random(7);
    int order[] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int round = 0; round < 40 && !failed(); ++round) {
      std::shuffle(order, order + 8, random);
      for (int i = 0; i < 4; ++i) give(singles_[order[i]]);
      const DevicePtr large = take(4 * kChunk);
      give(large);
      for (int i = 0; i < 4; ++i) singles_[order[i]] = take(kChunk);
    }
  }

  // Chunks that are mapped at many addresses, in runs between blocks that stay.
  void trim_among_live_blocks() {
    begin("trimming among live blocks");
    give(low_);
    for (const int i : {0, 3, 4, 6}) give(singles_[i]);
    trim();
    check("after a trim among live blocks");
    trim();
    check("after another");
    low_ = take(16 * kChunk);
    for (const int i : {0, 3, 4, 6}) singles_[i] = take(kChunk);
  }

  // Persistent blocks grow behind one another, even if memory is free elsewhere.
  void step() {
    begin("a step that leaves gaps");
    DevicePtr blocks[4];
    constexpr std::size_t kChunks[] = {3, 2, 3, 2};
    for (int i = 0; i < 4; ++i) blocks[i] = take_on(0, kChunks[i] * kChunk + kChunk / 2);
    for (const int i : {0, 2}) give(blocks[i], streams_[0]);
    const DevicePtr persistent = take(5 * kChunk, {.region = Region::kPersistent});
    blocks[0] = take_on(0, 4 * kChunk);
    blocks[2] = take_on(1, kChunk);
    for (const int i : {0, 1, 2}) give(blocks[i], streams_[i == 2 ? 1 : 0]);
    give(persistent);
    begin("a step's end");
    give(blocks[3], streams_[0]);
    check("after a step");
  }

  // Wholly free chunks make room for a chunk of its own.
  void take_fixed_when_full() {
    begin("a fixed block in a full device");
    give(low_);
    give(wall_);
    const DevicePtr block = take(14 * kChunk, {.fixed = true});
    give(block);
  }

  void give_all_back() {
    begin("giving back");
    for (const DevicePtr single : singles_) give(single);
    give(fixed_);
    give(persistent_);
    for (const DevicePtr alias : aliases_) {
      EXPECT_TRUE(twice([&] { return arena_->alias_destroy(alias); }).ok());
    }
    EXPECT_TRUE(twice([&] { return arena_->slot_destroy(slot_); }).ok());
    if (failed()) return;
    live_bytes_ -= 2 * kChunk;
    check("with nothing live");
    begin("trimming");
    // One call of it may fail.
    trim();
    check("after a trim");
    trim();
    EXPECT_EQ(arena_->statistics().reserved_bytes, 0u) << arena_->report();
    EXPECT_EQ(arena_->statistics().live_bytes, 0u);
  }

  void end() {
    begin("ending the arena");
    arena_.reset();
    for (Stream stream : streams_) EXPECT_TRUE(device_->stream_destroy(stream).ok());
    // Memory that the system refuses to take back at the very end is lost.
    const std::string& failed_call = backend_->failed();
    const bool excused = failed_call.rfind("ending the arena", 0) == 0 ||
                         failed_call.find(": unpin") != std::string::npos ||
                         failed_call.find(": stream_destroy") != std::string::npos;
    EXPECT_TRUE(excused || failed() || device_->live_handle_count() == 0)
        << device_->live_handle_count() << " handles are left";
    EXPECT_TRUE(excused || failed() || device_->charged_bytes() == 0);
  }

  const StatusCode code_;
  std::unique_ptr<HostBackend> device_;
  std::unique_ptr<FaultyBackend> backend_;
  std::unique_ptr<Arena> arena_;
  Stream streams_[2];
  Tag pausable_ = kTagLimit;
  bool paused_ = false;
  std::map<DevicePtr, Block> blocks_;
  std::map<DevicePtr, Block> resting_;  // Blocks of the pausable tag.
  std::size_t live_bytes_ = 0;
  int next_pattern_ = 0;
  std::uint64_t moved_by_stitching_ = 0;
  std::uint64_t refinement_count_ = 0;

  DevicePtr persistent_ = nullptr;
  DevicePtr fixed_ = nullptr;
  Slot slot_;
  std::vector<DevicePtr> aliases_;
  DevicePtr low_ = nullptr;
  DevicePtr wall_ = nullptr;
  DevicePtr high_ = nullptr;
  DevicePtr singles_[8] = {};
};

// Otherwise the other tests prove nothing.
TEST(ArenaFault, TheScenarioMakesEveryKindOfBackendCall) {
  Scenario scenario(0, StatusCode::kInternal);
  scenario.run();

  const FaultyBackend& backend = scenario.backend();
  EXPECT_GT(scenario.moved_by_stitching(), 0u);
  const std::pair<const char*, const char*> expected[] = {
      {"making the arena", "reserve"},
      {"persistent blocks", "chunk_create"},
      {"a slot", "map"},
      {"a fixed block", "chunk_create"},
      {"growing", "set_access"},
      {"stitching", "map"},
      {"breaking a chunk", "chunk_destroy"},
      {"breaking a chunk", "chunk_create"},
      {"changing streams", "event_create"},
      {"changing streams", "event_record"},
      {"changing streams", "event_query"},
      {"a capture", "map"},
      {"a pausable tag", "map"},
      {"pausing, with a copy", "pin"},
      {"pausing, with a copy", "copy_async"},
      {"pausing, with a copy", "unmap"},
      {"pausing, with a copy", "chunk_destroy"},
      {"resuming, with a copy", "chunk_create"},
      {"resuming, with a copy", "map"},
      {"resuming, with a copy", "set_access"},
      {"resuming, with a copy", "copy_async"},
      {"resuming, with a copy", "unpin"},
      {"pausing, without a copy", "unmap"},
      {"resuming, without a copy", "map"},
      {"running out of addresses", "unmap"},
      {"trimming among live blocks", "unmap"},
      {"trimming among live blocks", "chunk_destroy"},
      {"a fixed block in a full device", "chunk_destroy"},
      {"giving back", "unmap"},
      {"trimming", "unmap"},
      {"trimming", "chunk_destroy"},
      {"ending the arena", "release"},
  };
  for (const auto& [what, call] : expected) EXPECT_GT(backend.count(what, call), 0) << what << ": " << call;
  EXPECT_EQ(backend.count("memory that is shown elsewhere", "map"), 0);
  Scenario steps(0, StatusCode::kInternal);
  steps.run_steps();
  EXPECT_GT(steps.refinement_count(), 0u);
  EXPECT_GT(steps.backend().count("a step's end", "unmap"), 0);
  EXPECT_GT(steps.backend().count("a step's end", "chunk_destroy"), 0);
  std::printf("%d and %d calls\n", backend.call_count(), steps.backend().call_count());
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // malloc is theirs.
TEST(ArenaFault, AnAllocationWithoutHostMemoryLosesNothingAndTheNextRequestWorks) {
  const auto fail_each = [](void (Scenario::*run)(), bool all_later) {
    int failing = 0;
    do {
      Scenario scenario(0, StatusCode::kOutOfMemory);
      host_memory = {.failing = ++failing, .all_later = all_later};
      (scenario.*run)();
      ASSERT_FALSE(HasFailure()) << "when allocation " << failing << " of " << host_memory.count << " failed";
    } while (host_memory.failed());
    host_memory = {};
    std::printf("%d allocations\n", failing - 1);
    EXPECT_GT(failing, 20);
  };

  for (const bool all_later : {false, true}) {
    fail_each(&Scenario::run, all_later);
    fail_each(&Scenario::run_steps, all_later);
  }
}

TEST(ArenaFault, AStreamIsRefusedWithoutHostMemory) {
  const std::unique_ptr<HostBackend> backend = std::move(HostBackend::create({})).value();
  int failing = 0;
  do {
    host_memory = {.failing = ++failing};
    const Result<Stream> stream = [&] {
      const CountAllocations count(true);
      return backend->stream_create();
    }();
    EXPECT_EQ(stream.ok(), !host_memory.failed()) << failing;
    if (stream.ok()) {
      EXPECT_TRUE(backend->stream_destroy(stream.value()).ok());
    } else {  // kUnavailable: the memory was for the thread.
      EXPECT_TRUE(stream.status().code() == StatusCode::kOutOfMemory ||
                  stream.status().code() == StatusCode::kUnavailable)
          << stream.status().to_string();
    }
  } while (host_memory.failed());
  host_memory = {};
  EXPECT_GT(failing, 2);
}
#endif

// By the status that the call returns, and in quarters that can run at once.
constexpr int kQuarters = 4;
class ArenaFaultTest : public ::testing::TestWithParam<std::tuple<StatusCode, int>> {};

TEST_P(ArenaFaultTest, AFailedCallLosesNothingAndTheNextRequestWorks) {
  const auto [code, quarter] = GetParam();
  int reached = 0;
  for (int failing_call = 1 + quarter;; failing_call += kQuarters) {
    Scenario scenario(failing_call, code);
    scenario.run();
    const std::string& failed = scenario.backend().failed();
    ASSERT_FALSE(HasFailure()) << "when call " << failing_call << " failed (" << failed << ")";
    if (failed.empty()) break;
    ++reached;
  }
  EXPECT_GT(reached, 50);
}

TEST_P(ArenaFaultTest, ARefinedStepSurvivesAnyFailedCall) {
  const auto [code, quarter] = GetParam();
  int reached = 0;
  for (int failing_call = 1 + quarter;; failing_call += kQuarters) {
    Scenario scenario(failing_call, code);
    scenario.run_steps();
    const std::string& failed = scenario.backend().failed();
    ASSERT_FALSE(HasFailure()) << "when call " << failing_call << " failed (" << failed << ")";
    if (failed.empty()) break;
    ++reached;
  }
  EXPECT_GT(reached, 10);
}

INSTANTIATE_TEST_SUITE_P(EveryCall, ArenaFaultTest,
                         ::testing::Combine(::testing::Values(StatusCode::kInternal,
                                                              StatusCode::kOutOfMemory),
                                            ::testing::Range(0, kQuarters)),
                         [](const auto& info) {
                           const bool internal = std::get<0>(info.param) == StatusCode::kInternal;
                           return (internal ? "Internal" : "OutOfMemory") +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace

}  // namespace forebay

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" {
void* __libc_malloc(std::size_t bytes) noexcept;
void* __libc_calloc(std::size_t count, std::size_t bytes) noexcept;
void* __libc_memalign(std::size_t alignment, std::size_t bytes) noexcept;

void* malloc(std::size_t bytes) noexcept {
  return forebay::host_memory.refuses(bytes) ? nullptr : __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) noexcept {
  return forebay::host_memory.refuses(count * bytes) ? nullptr : __libc_calloc(count, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  return forebay::host_memory.refuses(bytes) ? nullptr : __libc_memalign(alignment, bytes);
}
}
#endif
