// Aim: while several threads use one arena, every block keeps its bytes, on host memory and on the cuda
// backend.
//
// Method: each thread takes random operations on two streams of its own: blocks are written from a table of
// random bytes and compared with it before they are freed, when another stream uses them, when another thread
// has taken them over, and after a pause; captured graphs run many times, so that their memory would be
// overwritten if another request got it; slots are written through one alias and read through another.
// All of it is work queued on streams, which are held up at random by host functions that wait at a gate. The
// fake driver also delays operations, in an order drawn from the seed, and reports a hazard when memory is
// unmapped that queued work uses. Memory is so scarce that many requests are refused.
// FOREBAY_SEED repeats the choices of a run (not how its threads interleave), FOREBAY_OPERATIONS sets how
// many there are.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "forebay/arena.h"
#include "forebay/cuda_backend.h"
#include "forebay/host_backend.h"
#include "forebay/units.h"
#include "tests/device/cuda/fake_cuda_test.h"
#include "tests/support/slow.h"

namespace forebay {
namespace {

constexpr int kThreads = 3;
constexpr int kLanes = 2;
constexpr std::size_t kChunk = 4_KiB;
constexpr std::size_t kLimit = 224 * kChunk;
constexpr std::size_t kBlockBytesMax = 40 * kChunk;
constexpr std::size_t kBlocksMax = 48;  // For each thread.
constexpr std::size_t kTableBytes = kBlockBytesMax + 64_KiB;

std::uint64_t number_from(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Far less than a stream's queue holds, so that queueing never waits for a gate. Each operation queues
// several; the queues of a harsh fake driver are short.
const std::size_t kHeldOperationsMax = std::min<std::size_t>(40, number_from("FAKE_CUDA_HARSH", 640) / 16);

// Pinned host memory.
class Pinned {
 public:
  Pinned(Backend& backend, std::size_t bytes)
      : backend_(backend),
        bytes_(round_up(bytes, 4_KiB)),
        data_(static_cast<std::byte*>(std::aligned_alloc(4_KiB, bytes_))) {
    EXPECT_TRUE(backend_.pin(data_, bytes_).ok());
  }
  ~Pinned() {
    EXPECT_TRUE(backend_.unpin(data_).ok());
    std::free(data_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  std::byte* data() const { return data_; }

 private:
  Backend& backend_;
  const std::size_t bytes_;
  std::byte* const data_;
};

// The first comparisons that failed.
class WrongBytes {
 public:
  void note(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (count_++ < 5) text_ += what + "\n";
  }
  bool any() const { return count_ != 0; }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
  std::atomic<int> count_{0};
};

struct Figures {
  std::atomic<std::uint64_t> refused{0}, compared{0}, kept{0}, paused{0}, captured{0}, replayed{0},
      taken_over{0}, used_elsewhere{0};
};

struct Block {
  DevicePtr address = nullptr;
  std::size_t bytes = 0;  // As asked for.
  int tag = 0;
  int lane = 0;
  const std::byte* contents = nullptr;  // In the table. Null: never written.
};

// Shared by all threads.
struct Stage {
  Backend& backend;
  Arena& arena;
  const std::byte* table;
  Tag limited;
  WrongBytes wrong;
  Figures figures;
  std::atomic<bool> stop{false};

  struct Offer {
    Block block;
    Event written;  // Recorded behind all work queued for it so far.
  };
  std::mutex mutex;
  std::vector<Offer> offers;
  std::vector<Event> idle_events;

  // For calls that have no reason to fail.
  bool must(const Status& status) {
    if (status.ok()) return true;
    if (!stop.exchange(true)) ADD_FAILURE() << status.to_string();
    return false;
  }
};

// A stream, host memory that it copies to for comparisons, and a gate that holds it up.
class Lane {
 public:
  explicit Lane(Stage& stage)
      : stage_(stage),
        stream_(stage.backend.stream_create().value()),
        staging_(stage.backend, kBlockBytesMax) {}
  ~Lane() {
    open();
    EXPECT_TRUE(stage_.backend.stream_synchronize(stream_).ok());
    EXPECT_TRUE(stage_.arena.stream_retire(stream_).ok());
    EXPECT_TRUE(stage_.backend.stream_destroy(stream_).ok());
  }
  Stream stream() const { return stream_; }
  bool held() const { return held_; }

  void hold() {
    held_ = true;
    stage_.must(stage_.backend.call_host(stream_, &Lane::wait, this));
  }
  void open() {
    const std::lock_guard lock(mutex_);
    if (!held_) return;
    held_ = false;
    ++opened_count_;
    opened_.notify_all();
  }
  void synchronize() { stage_.must(stage_.backend.stream_synchronize(stream_)); }

  void write(DevicePtr address, const std::byte* contents, std::size_t bytes) {
    if (bytes > 0) stage_.must(stage_.backend.copy_async(address, contents, bytes, stream_));
  }
  // `what` is a literal.
  void compare(DevicePtr address, const std::byte* contents, std::size_t bytes, const char* what) {
    if (bytes == 0 || contents == nullptr) return;
    ++stage_.figures.compared;
    if (!stage_.must(stage_.backend.copy_async(staging_.data(), address, bytes, stream_))) return;
    auto* comparison = new Comparison{stage_.wrong, staging_.data(), contents, bytes, address, what};
    if (!stage_.must(stage_.backend.call_host(stream_, &Comparison::run, comparison))) delete comparison;
  }
  // Work queued on `later` from now on runs after all work queued on this lane's stream so far.
  void before(Lane& later) {
    const Event event = event_of();
    if (stage_.must(stage_.backend.event_record(event, stream_))) {
      stage_.must(stage_.backend.stream_wait(later.stream_, event));
    }
    put_back(event);
  }
  Event event_of() {
    const std::lock_guard lock(stage_.mutex);
    if (stage_.idle_events.empty()) return stage_.backend.event_create().value();
    const Event event = stage_.idle_events.back();
    stage_.idle_events.pop_back();
    return event;
  }
  void put_back(Event event) {
    const std::lock_guard lock(stage_.mutex);
    stage_.idle_events.push_back(event);
  }

 private:
  struct Comparison {
    WrongBytes& wrong;
    const std::byte* actual;
    const std::byte* expected;
    std::size_t bytes;
    DevicePtr address;
    const char* what;
    static void run(void* argument) {
      const std::unique_ptr<Comparison> self(static_cast<Comparison*>(argument));
      if (std::memcmp(self->actual, self->expected, self->bytes) == 0) return;
      const std::byte* at = std::mismatch(self->actual, self->actual + self->bytes, self->expected).first;
      char text[160];
      std::snprintf(text, sizeof(text), "%s: of %zu bytes at %p, byte %td is 0x%02x", self->what, self->bytes,
                    static_cast<void*>(self->address), at - self->actual, static_cast<unsigned>(*at));
      self->wrong.note(text);
    }
  };
  static void wait(void* argument) {
    auto* self = static_cast<Lane*>(argument);
    std::unique_lock lock(self->mutex_);
    const std::uint64_t turn = self->waited_count_++;
    self->opened_.wait(lock, [&] { return self->opened_count_ > turn; });
  }

  Stage& stage_;
  const Stream stream_;
  const Pinned staging_;
  bool held_ = false;  // Used only by the lane's thread.
  std::mutex mutex_;
  std::condition_variable opened_;
  std::uint64_t opened_count_ = 0;
  std::uint64_t waited_count_ = 0;
};

class Worker {
 public:
  Worker(Stage& stage, std::uint64_t seed, int index) : stage_(stage), random_(seed) {
    for (auto& lane : lanes_) lane = std::make_unique<Lane>(stage);
    const std::string name = "pausable " + std::to_string(index);
    tag_ = stage.arena.tag_create({.name = name.c_str(), .pausable = true}).value();
  }

  void run(std::uint64_t operation_count) {
    for (std::uint64_t i = 0; i < operation_count && !stage_.stop && !stage_.wrong.any(); ++i) step();
    open_all();
    if (graph_.live) release();
    while (!blocks_.empty()) free_block(blocks_.size() - 1);
    destroy_slot();
    open_all();
    synchronize();
  }
  void synchronize() {
    for (auto& lane : lanes_) lane->synchronize();
  }
  // Called when all threads have ended and all blocks without an owner are freed. False: freed memory waits
  // for an event that this try has recorded.
  bool finish() {
    if (!paused_) return true;
    const Status resumed = stage_.arena.resume(tag_);
    if (resumed.code() == StatusCode::kOutOfMemory) return false;
    stage_.must(resumed);
    paused_ = false;
    return true;
  }

 private:
  // The allocations of a capture, in their order. Blocks that were not freed in it are in blocks_.
  struct Graph {
    bool live = false;
    Capture capture;
    int lane = 0;
    std::vector<Block> script;
  };
  struct SlotState {
    bool live = false;
    Slot slot;
    std::size_t bytes = 0;
    const std::byte* contents = nullptr;
    std::vector<DevicePtr> aliases;  // Each shows the whole slot.
  };

  std::size_t pick(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_);
  }
  Lane& lane(int index) { return *lanes_[index]; }
  void open_all() {
    for (auto& lane : lanes_) lane->open();
  }
  void synchronize_all() {
    open_all();
    synchronize();
  }
  const std::byte* some_contents() { return stage_.table + pick(kTableBytes - kBlockBytesMax); }

  void step() {
    for (auto& lane : lanes_) {
      if (lane->held() && pick(kHeldOperationsMax / 2) == 0) lane->open();
    }
    if (++held_operations_ >= kHeldOperationsMax) {
      held_operations_ = 0;
      synchronize_all();
    }
    const std::size_t kind = pick(1000);
    if (kind < 400) {
      allocate();
    } else if (kind < 760) {
      if (!blocks_.empty()) free_block(pick(blocks_.size()));
    } else if (kind < 820) {
      use_elsewhere();
    } else if (kind < 850) {
      offer();
    } else if (kind < 890) {
      take_over();
    } else if (kind < 910) {
      Lane& some = lane(static_cast<int>(pick(kLanes)));
      if (!some.held()) some.hold();
    } else if (kind < 930) {
      pause_or_resume();
    } else if (kind < 945) {
      if (graph_.live) {
        release();
      } else {
        capture();
      }
    } else if (kind < 960) {
      if (graph_.live) replay();
    } else if (kind < 985) {
      slot();
    } else if (kind < 995) {
      stage_.arena.trim();
    } else {
      static_cast<void>(stage_.arena.report());
      static_cast<void>(stage_.arena.snapshot());
    }
  }

  std::size_t random_bytes() {
    const std::size_t kind = pick(10);
    if (kind == 0) return pick(3);
    if (kind < 5) return 1 + pick(kChunk);
    if (kind < 9) return 1 + pick(8 * kChunk);
    return 1 + pick(kBlockBytesMax);
  }

  Tag tag_of(int tag) const { return tag == 0 ? Tag{0} : tag == 1 ? stage_.limited : tag_; }

  bool try_allocate(Block* block, int lane_index, int tag) {
    AllocationRequest request;
    request.bytes = random_bytes();
    request.alignment = pick(5) == 0 ? std::size_t{512} << pick(4) : kBlockGranule;
    request.region = pick(4) == 0 ? Region::kPersistent : Region::kTransient;
    request.tag = tag_of(tag);
    request.stream = lane(lane_index).stream();
    request.fixed = pick(40) == 0;
    const Result<DevicePtr> address = stage_.arena.allocate(request);
    if (!address.ok()) {
      const StatusCode code = address.status().code();
      const bool right =
          tag == 2 && paused_ ? code == StatusCode::kUnavailable : code == StatusCode::kOutOfMemory;
      if (!right) stage_.must(address.status());
      if (code == StatusCode::kOutOfMemory) ++stage_.figures.refused;
      return false;
    }
    *block = {address.value(), request.bytes, tag, lane_index, nullptr};
    return true;
  }

  void allocate() {
    if (blocks_.size() >= kBlocksMax) free_block(pick(blocks_.size()));
    Block block;
    const int tag = pick(4) == 0 ? 2 : static_cast<int>(pick(2));
    if (!try_allocate(&block, static_cast<int>(pick(kLanes)), tag)) {
      for (int i = 0; i < 3 && !blocks_.empty(); ++i) free_block(pick(blocks_.size()));
      return;
    }
    // Some are never used.
    if (pick(16) != 0) write(block);
    blocks_.push_back(block);
  }
  void write(Block& block) {
    block.contents = some_contents();
    lane(block.lane).write(block.address, block.contents, block.bytes);
  }
  void compare(const Block& block, const char* what) {
    lane(block.lane).compare(block.address, block.contents, block.bytes, what);
  }
  bool resting(const Block& block) const { return block.tag == 2 && paused_; }

  void free_block(std::size_t index) {
    const Block block = blocks_[index];
    blocks_[index] = blocks_.back();
    blocks_.pop_back();
    if (!resting(block)) compare(block, "when freed");
    stage_.must(stage_.arena.free(block.address, lane(block.lane).stream()));
  }

  void use_elsewhere() {
    if (blocks_.empty()) return;
    const Block& block = blocks_[pick(blocks_.size())];
    if (resting(block)) return;
    Lane& other = lane((block.lane + 1) % kLanes);
    stage_.must(stage_.arena.record_stream(block.address, other.stream()));
    lane(block.lane).before(other);
    other.compare(block.address, block.contents, block.bytes, "on another stream");
    ++stage_.figures.used_elsewhere;
  }

  void offer() {
    if (blocks_.empty()) return;
    const std::size_t index = pick(blocks_.size());
    const Block block = blocks_[index];
    // Only its own thread knows when the blocks of a tag are not in use.
    if (block.tag == 2 || is_of_graph(block)) return;
    Lane& own = lane(block.lane);
    const Event event = own.event_of();
    stage_.must(stage_.backend.event_record(event, own.stream()));
    blocks_[index] = blocks_.back();
    blocks_.pop_back();
    const std::lock_guard lock(stage_.mutex);
    stage_.offers.push_back({block, event});
  }
  void take_over() {
    Stage::Offer offer;
    {
      const std::lock_guard lock(stage_.mutex);
      if (stage_.offers.empty()) return;
      const std::size_t index = pick(stage_.offers.size());
      offer = stage_.offers[index];
      stage_.offers[index] = stage_.offers.back();
      stage_.offers.pop_back();
    }
    Block& block = offer.block;
    block.lane = static_cast<int>(pick(kLanes));
    stage_.must(stage_.backend.stream_wait(lane(block.lane).stream(), offer.written));
    lane(block.lane).put_back(offer.written);
    compare(block, "taken over");
    blocks_.push_back(block);
    ++stage_.figures.taken_over;
  }

  void pause_or_resume() {
    if (!paused_) {
      // So that there is something to pause.
      Block block;
      if (blocks_.size() < kBlocksMax && try_allocate(&block, static_cast<int>(pick(kLanes)), 2)) {
        write(block);
        blocks_.push_back(block);
      }
      synchronize_all();
      keeps_ = pick(2) == 0;
      const Status status = stage_.arena.pause(tag_, keeps_);
      if (status.code() == StatusCode::kUnavailable) return;  // Another thread captures a stream.
      if (!stage_.must(status)) return;
      paused_ = true;
      ++stage_.figures.paused;
      return;
    }
    const Status status = stage_.arena.resume(tag_);
    if (status.code() == StatusCode::kOutOfMemory) return;
    if (!stage_.must(status)) return;
    paused_ = false;
    for (Block& block : blocks_) {
      if (block.tag != 2) continue;
      if (keeps_) {
        compare(block, "after a pause");
        ++stage_.figures.kept;
      } else if (block.contents != nullptr) {
        write(block);
      }
    }
  }

  bool is_of_graph(const Block& block) const {
    if (!graph_.live) return false;
    const auto same = [&](const Block& other) { return other.address == block.address; };
    return std::any_of(graph_.script.begin(), graph_.script.end(), same);
  }

  // Nothing is queued on the stream while it is being captured: the graph does the work, later.
  void capture() {
    graph_ = Graph();
    graph_.lane = static_cast<int>(pick(kLanes));
    Lane& captured = lane(graph_.lane);
    const Result<Capture> begun = stage_.arena.capture_begin(captured.stream());
    if (!stage_.must(begun.status())) return;
    graph_.live = true;
    graph_.capture = begun.value();
    std::vector<Block> alive;
    for (std::size_t left = 2 + pick(10); left > 0; --left) {
      Block block;
      if (alive.size() > 1 && pick(2) == 0) {
        stage_.must(stage_.arena.free(alive.back().address, captured.stream()));
        alive.pop_back();
      } else if (try_allocate(&block, graph_.lane, static_cast<int>(pick(2)))) {
        block.contents = some_contents();
        alive.push_back(block);
        graph_.script.push_back(block);
      }
    }
    while (alive.size() > 2) {
      stage_.must(stage_.arena.free(alive.back().address, captured.stream()));
      alive.pop_back();
    }
    stage_.must(stage_.arena.capture_end(graph_.capture));
    ++stage_.figures.captured;
    for (const Block& block : alive) graph_live_.push_back(block);
    replay();
  }
  void replay() {
    for (const Block& block : graph_.script) {
      lane(graph_.lane).write(block.address, block.contents, block.bytes);
      compare(block, "in a graph");
    }
    for (const Block& block : graph_live_) compare(block, "left by a graph");
    ++stage_.figures.replayed;
  }
  void release() {
    open_all();
    lane(graph_.lane).synchronize();
    stage_.must(stage_.arena.capture_release(graph_.capture));
    graph_ = Graph();
    blocks_.insert(blocks_.end(), graph_live_.begin(), graph_live_.end());
    graph_live_.clear();
  }

  void slot() {
    if (!slot_.live) {
      slot_.bytes = 1 + pick(6 * kChunk);
      const Result<Slot> slot = stage_.arena.slot_create(slot_.bytes, 0);
      if (!slot.ok()) {
        if (slot.status().code() != StatusCode::kOutOfMemory) stage_.must(slot.status());
        return;
      }
      slot_.slot = slot.value();
      slot_.live = true;
      slot_.contents = nullptr;
    }
    if (slot_.aliases.size() < 3) {
      const Result<DevicePtr> alias = stage_.arena.alias_create(slot_.slot, slot_.bytes);
      if (!stage_.must(alias.status())) return;
      slot_.aliases.push_back(alias.value());
    }
    // Written through one alias and read through the others, on one stream.
    for (const DevicePtr alias : slot_.aliases) {
      lane(0).compare(alias, slot_.contents, slot_.bytes, "in a slot");
    }
    slot_.contents = some_contents();
    lane(0).write(slot_.aliases[pick(slot_.aliases.size())], slot_.contents, slot_.bytes);
    for (const DevicePtr alias : slot_.aliases) {
      lane(0).compare(alias, slot_.contents, slot_.bytes, "in a slot");
    }
    if (pick(4) == 0) destroy_slot();
  }
  void destroy_slot() {
    if (!slot_.live) return;
    open_all();
    lane(0).synchronize();
    for (const DevicePtr alias : slot_.aliases) stage_.must(stage_.arena.alias_destroy(alias));
    stage_.must(stage_.arena.slot_destroy(slot_.slot));
    slot_ = SlotState();
  }

  Stage& stage_;
  std::mt19937_64 random_;
  std::unique_ptr<Lane> lanes_[kLanes];
  Tag tag_ = 0;
  bool paused_ = false;
  bool keeps_ = false;
  std::vector<Block> blocks_;
  Graph graph_;
  std::vector<Block> graph_live_;  // Blocks that are live after the capture.
  SlotState slot_;
  std::size_t held_operations_ = 0;
};

void run_on(Backend& backend, std::uint64_t seed, std::uint64_t operation_count, std::size_t largest_chunk) {
  ArenaOptions arena_options;
  arena_options.limit_bytes = kLimit;
  arena_options.largest_chunk_bytes = largest_chunk;
  arena_options.growth_bytes = 8 * kChunk;
  arena_options.history_count = 64;
  const std::unique_ptr<Arena> arena = std::move(Arena::create(backend, arena_options)).value();
  {
    const Pinned table(backend, kTableBytes);
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < kTableBytes; ++i) table.data()[i] = static_cast<std::byte>(random());
    Stage stage{backend, *arena, table.data(), arena->tag_create("limited", kLimit / 4).value()};
    {
      std::vector<std::unique_ptr<Worker>> workers;
      for (int t = 0; t < kThreads; ++t) workers.push_back(std::make_unique<Worker>(stage, random(), t));
      std::vector<std::thread> threads;
      for (auto& worker : workers) {
        threads.emplace_back([&worker, operation_count] { worker->run(operation_count / kThreads); });
      }
      for (std::thread& thread : threads) thread.join();
      for (const Stage::Offer& offer : stage.offers) {
        EXPECT_TRUE(arena->free(offer.block.address, {}).ok());
        EXPECT_TRUE(backend.event_destroy(offer.written).ok());
      }
      // A try ends one event of each stream and may record one more.
      bool finished = false;
      for (int tries = 0; tries < 4 && !finished; ++tries) {
        for (auto& worker : workers) worker->synchronize();
        finished = true;
        for (auto& worker : workers) finished = worker->finish() && finished;
      }
      EXPECT_TRUE(finished) << arena->report();
    }
    for (const Event event : stage.idle_events) EXPECT_TRUE(backend.event_destroy(event).ok());

    EXPECT_FALSE(stage.wrong.any()) << stage.wrong.text();
    const Figures& figures = stage.figures;
    const auto count = [](const std::atomic<std::uint64_t>& figure) {
      return static_cast<unsigned long long>(figure.load());
    };
    const ArenaStatistics statistics = arena->statistics();
    std::printf(
        "%llu blocks, %llu comparisons, %llu refused, %llu chunks moved, %llu pauses, %llu blocks kept over "
        "one, "
        "%llu captures run %llu times, %llu blocks taken over\n",
        static_cast<unsigned long long>(statistics.allocation_count), count(figures.compared),
        count(figures.refused), static_cast<unsigned long long>(statistics.moved_chunk_count),
        count(figures.paused), count(figures.kept), count(figures.captured), count(figures.replayed),
        count(figures.taken_over));
    EXPECT_GT(statistics.moved_chunk_count, 0u);
    for (const auto* figure :
         {&figures.compared, &figures.refused, &figures.paused, &figures.kept, &figures.captured,
          &figures.replayed, &figures.taken_over, &figures.used_elsewhere}) {
      EXPECT_GT(figure->load(), 0u) << "the run was too easy";
    }
    EXPECT_EQ(statistics.live_bytes, 0u);
    arena->trim();
    EXPECT_EQ(arena->statistics().reserved_bytes, 0u) << arena->report();
  }
}

// By the largest chunk: the smallest only, or as the arena likes.
class ArenaContentsTest : public ::testing::TestWithParam<std::size_t> {
 protected:
  std::uint64_t choose_seed() {
    const std::uint64_t seed = number_from("FOREBAY_SEED", std::random_device{}());
    std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    return seed;
  }
  static std::uint64_t operation_count() {
    return number_from("FOREBAY_OPERATIONS", testing::is_slow_test() ? 2'000'000 : 24'000);
  }
};

TEST_P(ArenaContentsTest, StayUnchangedOnHostMemory) {
  const std::uint64_t seed = choose_seed();
  HostBackendOptions options;
  options.granularity = kChunk;
  options.memory_bytes = kLimit + 16 * kChunk;
  const std::unique_ptr<HostBackend> backend = std::move(HostBackend::create(std::move(options))).value();

  run_on(*backend, seed, operation_count(), GetParam());

  EXPECT_EQ(backend->live_handle_count(), 0u);
  EXPECT_EQ(backend->charged_bytes(), 0u);
}

TEST_P(ArenaContentsTest, StayUnchangedOnTheCudaBackendWithReorderedStreams) {
  const std::uint64_t seed = choose_seed();
  const fake_cuda::FakeCuda fake = fake_cuda::choose_fake();
  fake_cuda::FakeOptions options = fake_cuda::strict_options();
  options.granularity = kChunk;
  options.memory_bytes = kLimit + 16 * kChunk;
  options.seed = seed | 1;
  fake_cuda::start_fake(fake, options);
  {
    const std::unique_ptr<Backend> backend = std::move(CudaBackend::create({.room_bytes = 0})).value();
    run_on(*backend, seed, operation_count(), GetParam());
  }
  fake_cuda::expect_nothing_left(fake);
}

std::string chunk_name(const ::testing::TestParamInfo<std::size_t>& info) {
  return info.param == 0 ? "AsNeeded" : "SmallestOnly";
}

INSTANTIATE_TEST_SUITE_P(ChunkSizes, ArenaContentsTest, ::testing::Values(std::size_t{0}, kChunk),
                         chunk_name);
INSTANTIATE_TEST_SUITE_P(Slow, ArenaContentsTest, ::testing::Values(std::size_t{0}, kChunk), chunk_name);

}  // namespace
}  // namespace forebay
