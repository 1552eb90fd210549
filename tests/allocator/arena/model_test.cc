// Aim: in any order of calls, live blocks keep their bytes, never overlap, and are not reused before the work
// that may still use them has run. A request that the limit and the free chunks allow is never refused.
//
// Method: random allocate, free, record_stream, slot, alias and trim over three streams, against a model that
// holds every live interval, and every freed one together with the points its streams have to reach first.
// Streams are held up at random by host functions that wait at a gate, so that frees stay pending for many
// operations. Blocks are filled, and checked when freed, by work queued on their own streams: memory reused
// too early shows as a wrong byte as well as in the model.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "forebay/arena.h"
#include "forebay/host_backend.h"
#include "forebay/units.h"

namespace forebay {
namespace {

constexpr int kOperations = 200'000;
constexpr int kStreams = 3;
constexpr std::size_t kChunk = 4_KiB;
constexpr std::size_t kLimit = 256 * kChunk;
constexpr std::size_t kBlocksMax = 160;
// Far less than a stream's queue holds, so that queueing never waits for a gate that only this thread can
// open.
constexpr int kHeldOperationsMax = 60;

std::uint64_t choose_seed() {
  const char* text = std::getenv("FOREBAY_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
}

std::atomic<int> wrong_byte_count{0};

void check_pattern(const std::byte* bytes, std::size_t count, std::uint8_t pattern) {
  if (count == 0) return;
  const bool same = bytes[0] == std::byte{pattern} && std::memcmp(bytes, bytes + 1, count - 1) == 0;
  if (!same) ++wrong_byte_count;
}

// Work that checks a block in stream order.
struct Check {
  const std::byte* bytes;
  std::size_t count;
  std::uint8_t pattern;
  static void run(void* argument) {
    std::unique_ptr<Check> check(static_cast<Check*>(argument));
    check_pattern(check->bytes, check->count, check->pattern);
  }
};

// A stream with a gate that holds it up and a counter of the points it has passed.
class HeldStream {
 public:
  explicit HeldStream(Backend& backend) : backend_(backend), stream_(backend.stream_create().value()) {
    event_ = backend.event_create().value();
  }
  ~HeldStream() {
    open();
    EXPECT_TRUE(backend_.stream_destroy(stream_).ok());
    EXPECT_TRUE(backend_.event_destroy(event_).ok());
  }
  Stream stream() const { return stream_; }
  Event event() const { return event_; }
  bool held() const { return held_; }

  void hold() {
    held_ = true;
    EXPECT_TRUE(backend_.call_host(stream_, &HeldStream::wait, this).ok());
  }
  void open() {
    std::lock_guard lock(mutex_);
    ++opened_count_;
    held_ = false;
    opened_.notify_all();
  }
  // A point behind all work queued so far.
  std::uint64_t mark() {
    EXPECT_TRUE(backend_.call_host(stream_, &HeldStream::pass, this).ok());
    return ++marked_count_;
  }
  bool passed(std::uint64_t point) const { return passed_count_.load() >= point; }

 private:
  static void wait(void* argument) {
    auto* self = static_cast<HeldStream*>(argument);
    std::unique_lock lock(self->mutex_);
    const std::uint64_t turn = self->waited_count_++;
    self->opened_.wait(lock, [&] { return self->opened_count_ > turn; });
  }
  static void pass(void* argument) { ++static_cast<HeldStream*>(argument)->passed_count_; }

  Backend& backend_;
  Stream stream_;
  Event event_;
  bool held_ = false;
  std::uint64_t marked_count_ = 0;
  std::atomic<std::uint64_t> passed_count_{0};
  std::mutex mutex_;
  std::condition_variable opened_;
  std::uint64_t opened_count_ = 0;
  std::uint64_t waited_count_ = 0;
};

struct Block {
  DevicePtr address = nullptr;
  std::size_t bytes = 0;
  int stream = -1;  // -1: the host's.
  bool recorded[kStreams] = {};
  bool filled = false;
  std::uint8_t pattern = 0;
};

// A freed interval, and the point that each stream has to pass before another stream may use it (0: none).
struct Pending {
  DevicePtr begin;
  DevicePtr end;
  std::uint64_t points[kStreams];
};

struct AliasModel {
  DevicePtr address;
  std::size_t bytes;
};

struct SlotModel {
  Slot slot;
  std::size_t bytes;
  std::uint8_t pattern;
  std::vector<AliasModel> aliases;
};

class ArenaModel {
 public:
  // `exact`: all chunks have the smallest size, so wholly free chunks must be usable.
  ArenaModel(std::uint64_t seed, bool exact) : random_(seed), exact_(exact) {
    HostBackendOptions options;
    options.granularity = kChunk;
    options.memory_bytes = kLimit + 64 * kChunk;
    backend_ = std::move(HostBackend::create(std::move(options))).value();
    ArenaOptions arena_options;
    arena_options.reserve_bytes = 16 * kLimit;
    arena_options.limit_bytes = kLimit;
    arena_options.growth_bytes = exact ? 0 : 8 * kChunk;
    arena_options.largest_chunk_bytes = exact ? kChunk : 0;
    arena_ = std::move(Arena::create(*backend_, arena_options)).value();
    for (int i = 0; i < kStreams; ++i) streams_.push_back(std::make_unique<HeldStream>(*backend_));
    tags_[1] = arena_->tag_create("limited", kLimit / 4).value();
    tags_[2] = arena_->tag_create("free", 0).value();
  }

  void run() {
    for (int i = 0; i < kOperations && !::testing::Test::HasFailure(); ++i) {
      step();
      check_accounts();
      EXPECT_EQ(wrong_byte_count.load(), 0) << "after operation " << i;
    }
  }

  // Frees everything; nothing may be left, neither here nor in the backend.
  void finish() {
    while (!blocks_.empty()) free_block(blocks_.size() - 1);
    while (!slots_.empty()) destroy_slot(slots_.size() - 1);
    synchronize_all();
    EXPECT_EQ(arena_->statistics().live_bytes, 0u);
    EXPECT_EQ(arena_->statistics(tags_[1]).live_bytes, 0u);
    // The first call may only record the events that the second one finds completed.
    arena_->trim();
    synchronize_all();
    arena_->trim();
    EXPECT_EQ(arena_->statistics().reserved_bytes, 0u);
    EXPECT_EQ(wrong_byte_count.load(), 0);
    EXPECT_EQ(backend_->charged_bytes(), 0u);
    std::printf(
        "%llu blocks handed out, %d requests refused, %d of them provably servable and served after a wait, "
        "%llu driver calls\n",
        static_cast<unsigned long long>(arena_->statistics().allocation_count), refused_count_,
        retried_count_, static_cast<unsigned long long>(arena_->statistics().driver_call_count));
    EXPECT_GT(refused_count_, 0) << "the limit was never reached: the test is too easy";
    if (exact_) {
      EXPECT_GT(retried_count_, 0);
    }
    arena_.reset();
    streams_.clear();
    EXPECT_EQ(backend_->live_handle_count(), 0u);
  }

 private:
  // A stream may wait for an event of one that is held, so all are opened before any is waited for.
  void synchronize_all() {
    for (auto& stream : streams_) {
      if (stream->held()) stream->open();
    }
    for (auto& stream : streams_) EXPECT_TRUE(backend_->stream_synchronize(stream->stream()).ok());
  }

  std::size_t pick(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_);
  }
  bool chance(int percent) { return static_cast<int>(pick(100)) < percent; }

  void step() {
    for (auto& stream : streams_) {
      if (stream->held() && pick(kHeldOperationsMax / 2) == 0) stream->open();
    }
    if (++held_operations_ >= kHeldOperationsMax) {
      held_operations_ = 0;
      synchronize_all();
    }
    const std::size_t kind = pick(1000);
    if (kind < 440) {
      allocate_block();
    } else if (kind < 860) {
      if (!blocks_.empty()) free_block(pick(blocks_.size()));
    } else if (kind < 920) {
      if (!blocks_.empty()) use_on_another_stream(blocks_[pick(blocks_.size())]);
    } else if (kind < 950) {
      HeldStream& stream = *streams_[pick(kStreams)];
      if (!stream.held()) stream.hold();
    } else if (kind < 960) {
      if (slots_.size() < 4) create_slot();
    } else if (kind < 967) {
      if (!slots_.empty()) destroy_slot(pick(slots_.size()));
    } else if (kind < 985) {
      if (!slots_.empty()) create_alias(slots_[pick(slots_.size())]);
    } else if (kind < 992) {
      if (!slots_.empty()) destroy_alias(slots_[pick(slots_.size())]);
    } else if (kind < 997) {
      misuse();
    } else {
      arena_->trim();
    }
  }

  std::size_t random_bytes() {
    const std::size_t kind = pick(10);
    if (kind == 0) return pick(2);
    if (kind < 6) return 1 + pick(kChunk);
    if (kind < 9) return 1 + pick(8 * kChunk);
    return 1 + pick(48 * kChunk);
  }

  void allocate_block() {
    if (blocks_.size() >= kBlocksMax) free_block(pick(blocks_.size()));
    AllocationRequest request;
    request.bytes = random_bytes();
    request.alignment = chance(80) ? kBlockGranule : std::size_t{1} << pick(13);
    request.region = chance(30) ? Region::kPersistent : Region::kTransient;
    request.tag = tags_[pick(3)];
    Block block;
    block.stream = static_cast<int>(pick(kStreams + 1)) - 1;
    if (block.stream >= 0) request.stream = streams_[block.stream]->stream();
    Result<DevicePtr> address = arena_->allocate(request);
    if (!address.ok()) address = after_refusal(request, address);
    if (!address.ok()) return;

    block.address = address.value();
    block.bytes = std::max<std::size_t>(round_up(request.bytes, kBlockGranule), kBlockGranule);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.address) % std::max(request.alignment, kBlockGranule),
              0u);
    EXPECT_EQ(arena_->block_bytes(block.address), block.bytes);
    take_interval(block.address, block.bytes);
    check_not_early(block);
    // Some blocks are never used; the streams that their memory waited for still count.
    block.filled = chance(90);
    block.pattern = static_cast<std::uint8_t>(1 + pick(255));
    if (block.filled && block.stream >= 0) {
      EXPECT_TRUE(backend_->fill_async(block.address, block.pattern, block.bytes, request.stream).ok());
    } else if (block.filled) {
      std::memset(block.address, block.pattern, block.bytes);
    }
    live_bytes_ += block.bytes;
    block_tags_[block.address] = request.tag;
    tag_live_bytes_[request.tag] += block.bytes;
    blocks_.push_back(block);
  }

  // A refusal is right only while queued work is in the way. Now and then the test waits for all work; then a
  // request that the wholly free chunks can hold must be served.
  Result<DevicePtr> after_refusal(const AllocationRequest& request, Result<DevicePtr> refused) {
    EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory) << refused.status().to_string();
    ++refused_count_;
    const std::size_t bytes = std::max<std::size_t>(round_up(request.bytes, kBlockGranule), kBlockGranule);
    if (request.tag == tags_[1] && tag_live_bytes_[request.tag] + bytes > kLimit / 4) return refused;
    if (!exact_ || !chance(20)) return refused;
    for (int attempt = 0; attempt < 3; ++attempt) {
      synchronize_all();
      Result<DevicePtr> address = arena_->allocate(request);
      if (address.ok()) {
        ++retried_count_;
        return address;
      }
    }
    std::size_t slot_chunk_count = 0;
    for (const SlotModel& slot : slots_) slot_chunk_count += ceil_div(slot.bytes, kChunk);
    std::map<std::uintptr_t, bool> touched;
    for (const Block& block : blocks_) {
      const auto begin = reinterpret_cast<std::uintptr_t>(block.address);
      for (std::uintptr_t at = begin / kChunk; at <= (begin + block.bytes - 1) / kChunk; ++at)
        touched[at] = true;
    }
    EXPECT_GT(touched.size() + slot_chunk_count + ceil_div(bytes, kChunk), kLimit / kChunk)
        << "refused " << bytes << " bytes though enough chunks are wholly free\n"
        << arena_->report();
    return refused;
  }

  void take_interval(DevicePtr address, std::size_t bytes) {
    auto next = live_.lower_bound(address);
    if (next != live_.end()) {
      EXPECT_GE(next->first, address + bytes) << "overlaps the next";
    }
    if (next != live_.begin()) {
      --next;
      EXPECT_LE(next->first + next->second, address) << "overlaps the one before";
    }
    live_[address] = bytes;
  }

  // All streams but the block's own must be done with the memory freed there.
  void check_not_early(const Block& block) {
    for (std::size_t i = 0; i < pending_.size();) {
      const Pending& pending = pending_[i];
      bool done = true;
      bool early = false;
      for (int s = 0; s < kStreams; ++s) {
        if (pending.points[s] == 0 || streams_[s]->passed(pending.points[s])) continue;
        done = false;
        if (s != block.stream) early = true;
      }
      if (early && pending.begin < block.address + block.bytes && block.address < pending.end) {
        ADD_FAILURE() << "handed out to stream " << block.stream
                      << " while another still has work to do with it";
      }
      if (done) {
        pending_[i] = pending_.back();
        pending_.pop_back();
      } else {
        ++i;
      }
    }
  }

  void check_on(int stream, const Block& block) {
    auto* check = new Check{block.address, block.bytes, block.pattern};
    EXPECT_TRUE(backend_->call_host(streams_[stream]->stream(), &Check::run, check).ok());
  }

  void use_on_another_stream(Block& block) {
    const int other = static_cast<int>(pick(kStreams));
    HeldStream& stream = *streams_[other];
    EXPECT_TRUE(arena_->record_stream(block.address, stream.stream()).ok());
    block.recorded[other] = true;
    if (!block.filled) return;
    if (block.stream >= 0 && block.stream != other) {
      HeldStream& owner = *streams_[block.stream];
      EXPECT_TRUE(backend_->event_record(owner.event(), owner.stream()).ok());
      EXPECT_TRUE(backend_->stream_wait(stream.stream(), owner.event()).ok());
    }
    check_on(other, block);
  }

  void free_block(std::size_t index) {
    const Block block = blocks_[index];
    blocks_[index] = blocks_.back();
    blocks_.pop_back();
    // A block that its stream never used may be freed by the host.
    const int stream = block.filled ? block.stream : (chance(50) ? -1 : block.stream);
    if (block.filled && stream >= 0) check_on(stream, block);
    if (block.filled && stream < 0) check_pattern(block.address, block.bytes, block.pattern);
    Pending pending{block.address, block.address + block.bytes, {}};
    bool waits = false;
    for (int s = 0; s < kStreams; ++s) {
      if (s != stream && !block.recorded[s]) continue;
      pending.points[s] = streams_[s]->mark();
      waits = true;
    }
    if (waits) pending_.push_back(pending);
    live_.erase(block.address);
    live_bytes_ -= block.bytes;
    tag_live_bytes_[block_tags_[block.address]] -= block.bytes;
    const Status status = arena_->free(block.address, stream >= 0 ? streams_[stream]->stream() : Stream());
    EXPECT_TRUE(status.ok()) << status.to_string();
  }

  void create_slot() {
    SlotModel model;
    model.bytes = 1 + pick(6 * kChunk);
    model.pattern = 0;
    auto slot = arena_->slot_create(model.bytes, 0);
    if (!slot.ok()) {
      EXPECT_EQ(slot.status().code(), StatusCode::kOutOfMemory);
      return;
    }
    model.slot = slot.value();
    live_bytes_ += round_up(model.bytes, kBlockGranule);
    slots_.push_back(model);
  }

  void destroy_slot(std::size_t index) {
    SlotModel& model = slots_[index];
    while (!model.aliases.empty()) destroy_alias(model);
    EXPECT_TRUE(arena_->slot_destroy(model.slot).ok());
    live_bytes_ -= round_up(model.bytes, kBlockGranule);
    std::swap(slots_[index], slots_.back());
    slots_.pop_back();
  }

  void create_alias(SlotModel& model) {
    if (model.aliases.size() >= 4) destroy_alias(model);
    const std::size_t slot_bytes = round_up(model.bytes, kChunk);
    const std::size_t bytes = model.pattern == 0 ? slot_bytes : 1 + pick(slot_bytes);
    auto alias = arena_->alias_create(model.slot, bytes);
    ASSERT_TRUE(alias.ok()) << alias.status().to_string();
    const std::size_t mapped_bytes = round_up(bytes, kChunk);
    take_interval(alias.value(), mapped_bytes);
    // The first alias covers the slot and gives it its bytes; every other one must show them.
    if (model.pattern == 0) {
      model.pattern = static_cast<std::uint8_t>(1 + pick(255));
      std::memset(alias.value(), model.pattern, mapped_bytes);
    }
    check_pattern(alias.value(), mapped_bytes, model.pattern);
    model.aliases.push_back({alias.value(), mapped_bytes});
  }

  void destroy_alias(SlotModel& model) {
    if (model.aliases.empty()) return;
    const std::size_t index = pick(model.aliases.size());
    const AliasModel alias = model.aliases[index];
    check_pattern(alias.address, alias.bytes, model.pattern);
    model.aliases[index] = model.aliases.back();
    model.aliases.pop_back();
    live_.erase(alias.address);
    EXPECT_TRUE(arena_->alias_destroy(alias.address).ok());
  }

  void misuse() {
    if (blocks_.empty()) return;
    const Block& block = blocks_[pick(blocks_.size())];
    if (block.bytes > kBlockGranule) {
      EXPECT_EQ(arena_->free(block.address + kBlockGranule, {}).code(), StatusCode::kInvalidArgument);
    }
    EXPECT_EQ(arena_->alias_destroy(block.address).code(), StatusCode::kInvalidArgument);
    if (!slots_.empty() && !slots_[0].aliases.empty()) {
      EXPECT_EQ(arena_->free(slots_[0].aliases[0].address, {}).code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(arena_->slot_destroy(slots_[0].slot).code(), StatusCode::kInvalidArgument);
    }
  }

  void check_accounts() {
    const ArenaStatistics statistics = arena_->statistics();
    EXPECT_EQ(statistics.live_bytes, live_bytes_);
    EXPECT_LE(statistics.reserved_bytes, kLimit);
    EXPECT_EQ(statistics.reserved_bytes, backend_->charged_bytes());
    EXPECT_GE(statistics.reserved_bytes, live_bytes_);
    EXPECT_EQ(arena_->statistics(tags_[1]).live_bytes, tag_live_bytes_[tags_[1]]);
    EXPECT_LE(tag_live_bytes_[tags_[1]], kLimit / 4);
  }

  std::mt19937_64 random_;
  const bool exact_;
  std::unique_ptr<HostBackend> backend_;
  std::unique_ptr<Arena> arena_;
  std::vector<std::unique_ptr<HeldStream>> streams_;
  Tag tags_[3] = {};
  std::vector<Block> blocks_;
  std::vector<Pending> pending_;
  std::vector<SlotModel> slots_;
  std::map<DevicePtr, std::size_t> live_;
  std::map<DevicePtr, Tag> block_tags_;
  std::size_t tag_live_bytes_[kTagLimit] = {};
  std::size_t live_bytes_ = 0;
  int held_operations_ = 0;
  int refused_count_ = 0;
  int retried_count_ = 0;
};

class ArenaModelTest : public ::testing::TestWithParam<bool> {};

TEST_P(ArenaModelTest, HoldsItsInvariantsUnderRandomOperations) {
  const std::uint64_t seed = choose_seed();
  SCOPED_TRACE("FOREBAY_SEED=" + std::to_string(seed));
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  wrong_byte_count = 0;
  ArenaModel model(seed, GetParam());

  model.run();
  model.finish();
}

INSTANTIATE_TEST_SUITE_P(ChunkSizes, ArenaModelTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "SmallestOnly" : "AsNeeded"; });

}  // namespace
}  // namespace forebay
