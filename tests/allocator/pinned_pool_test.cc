// PinnedPool on the host backend: waste, order, failures and threads.
#include "forebay/pinned_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forebay/units.h"
#include "runtime/device/forwarding_backend.h"
#include "runtime/device/host/script.h"

namespace forebay {
namespace {

const std::size_t kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));

std::uint64_t choose_seed() {
  const char* text = std::getenv("FOREBAY_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
}

// A stream whose work waits while it is held.
class Gate {
 public:
  explicit Gate(Backend& backend) : backend_(backend), stream_(backend.stream_create().value()) {}
  ~Gate() {
    open();
    EXPECT_TRUE(backend_.stream_destroy(stream_).ok());
  }
  Stream stream() const { return stream_; }

  void hold() {
    {
      const std::lock_guard lock(mutex_);
      held_ = true;
    }
    EXPECT_TRUE(backend_.call_host(stream_, &Gate::wait, this).ok());
  }
  void open() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    opened_.notify_all();
  }
  void drain() {
    open();
    EXPECT_TRUE(backend_.stream_synchronize(stream_).ok());
  }

 private:
  static void wait(void* argument) {
    auto* self = static_cast<Gate*>(argument);
    std::unique_lock lock(self->mutex_);
    self->opened_.wait(lock, [self] { return !self->held_; });
  }

  Backend& backend_;
  Stream stream_;
  std::mutex mutex_;
  std::condition_variable opened_;
  bool held_ = false;
};

class QueryCountingBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  Result<bool> event_query(Event event) override {
    ++query_count;
    if (fails) return Status(StatusCode::kInternal, "scripted");
    return ForwardingBackend::event_query(event);
  }
  int query_count = 0;
  bool fails = false;
};

class PinRefusingBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  Status pin(void* address, std::size_t) override {
    refused = address;
    return Status(StatusCode::kUnsupported, "no more locked pages");
  }
  void* refused = nullptr;
};

class PinnedPoolTest : public ::testing::Test {
 protected:
  explicit PinnedPoolTest(PinnedPoolOptions options = {}) { make(options); }
  void TearDown() override {
    pool_.reset();
    EXPECT_EQ(backend_->live_handle_count(), 0u) << "events leak";
  }
  void make(const PinnedPoolOptions& options) {
    pool_.reset();
    if (backend_ == nullptr) backend_ = std::move(ScriptedHostBackend::create({})).value();
    pool_ = std::move(PinnedPool::create(*backend_, options)).value();
  }
  void fail_next(HostCall call, StatusCode code, const char* message) {
    backend_->add_fault({.call = call, .nth = 1, .status = Status(code, message)});
  }

  std::unique_ptr<ScriptedHostBackend> backend_;
  std::unique_ptr<PinnedPool> pool_;
};

TEST_F(PinnedPoolTest, PinsPagesOnceAndReleasesThem) {
  std::byte* block = pool_->allocate(100'000).value();

  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % kPage, 0u);
  EXPECT_EQ(pool_->block_bytes(block), round_up(100'000, kPage));
  EXPECT_EQ(backend_->pin(block, kPage).code(), StatusCode::kInvalidArgument) << "it is not locked";
  std::memset(block, 1, 100'000);
  EXPECT_TRUE(pool_->free(block, {}).ok());
  EXPECT_EQ(pool_->block_bytes(block), 0u);
  EXPECT_GT(pool_->trim(), 0u);
  EXPECT_EQ(pool_->statistics().held_bytes, 0u);
}

TEST_F(PinnedPoolTest, ZeroBytesGiveDistinctBlocks) {
  std::byte* a = pool_->allocate(0).value();
  std::byte* b = pool_->allocate(0).value();

  EXPECT_NE(a, b);
  EXPECT_EQ(pool_->block_bytes(a), kPage);
  EXPECT_EQ(pool_->statistics().requested_bytes, 0u);
}

TEST_F(PinnedPoolTest, RefusesAddressesThatAreNoLiveBlock) {
  std::byte* block = pool_->allocate(3 * kPage).value();
  int foreign = 0;

  EXPECT_EQ(pool_->free(block + kPage, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool_->free(block + 1, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool_->free(&foreign, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(pool_->free(nullptr, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(pool_->free(block, {}).ok());
  const Status twice = pool_->free(block, {});
  EXPECT_EQ(twice.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(twice.message().find("no live pinned block"), std::string::npos) << twice.message();
}

TEST_F(PinnedPoolTest, ReusesABlockOnlyAfterItsStream) {
  Gate gate(*backend_);
  std::byte* first = pool_->allocate(4_MiB).value();
  gate.hold();
  EXPECT_TRUE(pool_->free(first, gate.stream()).ok());

  std::byte* second = pool_->allocate(4_MiB).value();
  EXPECT_NE(second, first) << "the stream has not come to the end of its work";
  EXPECT_EQ(pool_->statistics().pending_bytes, 4_MiB);
  gate.drain();
  std::byte* third = pool_->allocate(4_MiB).value();

  EXPECT_EQ(third, first);
  EXPECT_EQ(pool_->statistics().pending_bytes, 0u);
  EXPECT_EQ(pool_->free(first, {}).code(), StatusCode::kOk);
  EXPECT_TRUE(pool_->free(second, {}).ok());
}

TEST_F(PinnedPoolTest, ABlockedStreamDelaysNoOther) {
  Gate slow(*backend_);
  Gate quick(*backend_);
  std::byte* a = pool_->allocate(4_MiB).value();
  std::byte* b = pool_->allocate(4_MiB).value();
  slow.hold();
  EXPECT_TRUE(pool_->free(a, slow.stream()).ok());
  EXPECT_TRUE(pool_->free(b, quick.stream()).ok());
  quick.drain();

  EXPECT_EQ(pool_->allocate(4_MiB).value(), b);
}

TEST_F(PinnedPoolTest, JoinsNeighboursInAnyOrderOfTheirFrees) {
  make({.limit_bytes = 32_MiB});
  ASSERT_TRUE(pool_->prewarm(32_MiB).ok());
  for (const auto& order : {std::array{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}}) {
    std::byte* blocks[3];
    for (std::byte*& block : blocks) block = pool_->allocate(10_MiB).value();
    for (const int i : order) EXPECT_TRUE(pool_->free(blocks[i], {}).ok());

    const Result<std::byte*> whole = pool_->allocate(32_MiB);
    ASSERT_TRUE(whole.ok()) << whole.status().to_string();
    EXPECT_TRUE(pool_->free(whole.value(), {}).ok());
  }
}

TEST_F(PinnedPoolTest, TakesTheSmallestRangeThatFits) {
  make({.limit_bytes = 64_MiB});
  ASSERT_TRUE(pool_->prewarm(64_MiB).ok());
  std::vector<std::byte*> blocks;
  for (const std::size_t bytes : {12_MiB, 1_MiB, 9_MiB, 1_MiB, 10_MiB, 31_MiB}) {
    blocks.push_back(pool_->allocate(bytes).value());
  }
  for (const int i : {0, 2, 4}) EXPECT_TRUE(pool_->free(blocks[i], {}).ok());

  EXPECT_EQ(pool_->allocate(10_MiB - kPage).value(), blocks[4]);
  EXPECT_EQ(pool_->allocate(9_MiB).value(), blocks[2]);
  EXPECT_EQ(pool_->allocate(11_MiB).value(), blocks[0]);
}

// --- memory held for the requested bytes --------------------------

struct Mix {
  const char* name;
  std::vector<std::size_t> layer_bytes;  // The tensors that a layer offloads, in order.
  int layer_count;
};

// Shapes and depths of real models, at fewer tokens than real ones, so that a test machine has room for them.
const Mix kMixes[] = {
    // Checkpoints of one size, not a multiple of a page: 1023 tokens of width 5120.
    {"checkpoints of one size", {1023 * 5120 * 2}, 36},
    // GPT-2 XL: input, QKV, attention output, statistics of two norms in fp32, MLP wide and narrow.
    {"GPT layers",
     {128 * 1600 * 2, 128 * 4800 * 2, 128 * 1600 * 2, 128 * 8, 128 * 8, 128 * 6400 * 2, 128 * 1600 * 2},
     48},
    // Llama 8B: grouped queries, a gated MLP of 14336.
    {"gated layers",
     {97 * 4096 * 2, 97 * 4096 * 2, 97 * 1024 * 2, 97 * 1024 * 2, 97 * 14336 * 2, 97 * 14336 * 2, 97 * 4},
     32},
    // Optimizer state of units: master, m and v of matrices and of vectors.
    {"optimizer units",
     {3 * 1152 * 384 * 4, 3 * 384 * 384 * 4, 3 * 1536 * 384 * 4, 3 * 384 * 1536 * 4, 3 * 4992 * 4},
     12},
};

double held_over_asked(const PinnedPool& pool) {
  const PinnedPoolStatistics statistics = pool.statistics();
  return static_cast<double>(statistics.peak_held_bytes) /
         static_cast<double>(statistics.peak_requested_bytes);
}

class PinnedPoolMix : public PinnedPoolTest, public ::testing::WithParamInterface<Mix> {};

TEST_P(PinnedPoolMix, HoldsAtMostAFiftiethMoreThanRequested) {
  const Mix& mix = GetParam();
  Gate gate(*backend_);
  std::uint64_t pin_count = 0;
  for (int step = 0; step < 5; ++step) {
    if (step == 3) pin_count = pool_->statistics().pin_count;
    std::vector<std::byte*> blocks;
    for (int layer = 0; layer < mix.layer_count; ++layer) {
      for (const std::size_t bytes : mix.layer_bytes) blocks.push_back(pool_->allocate(bytes).value());
    }
    while (!blocks.empty()) {
      EXPECT_TRUE(pool_->free(blocks.back(), gate.stream()).ok());
      blocks.pop_back();
    }
    gate.drain();
  }

  std::printf("%s: %.4f times what is asked, %s in %zu slabs\n", mix.name, held_over_asked(*pool_),
              format_bytes(pool_->statistics().held_bytes).c_str(), pool_->statistics().slab_count);
  EXPECT_LE(held_over_asked(*pool_), 1.02);
  EXPECT_EQ(pool_->statistics().pin_count, pin_count) << "a repeated step takes memory again";
}

// Layers of the next micro-step are allocated while those of the last one are freed, as in a pipeline.
TEST_P(PinnedPoolMix, HoldsAtMostAFiftiethMoreWhenStepsOverlap) {
  const Mix& mix = GetParam();
  std::deque<std::vector<std::byte*>> layers;
  for (int i = 0; i < 5 * mix.layer_count; ++i) {
    if (i >= mix.layer_count) {
      std::vector<std::byte*>& oldest = i % 2 == 0 ? layers.front() : layers.back();
      for (std::byte* block : oldest) EXPECT_TRUE(pool_->free(block, {}).ok());
      i % 2 == 0 ? layers.pop_front() : layers.pop_back();
    }
    layers.emplace_back();
    for (const std::size_t bytes : mix.layer_bytes) layers.back().push_back(pool_->allocate(bytes).value());
  }

  EXPECT_LE(held_over_asked(*pool_), 1.02);
}

TEST_P(PinnedPoolMix, HoldsAtMostAFiftiethMoreWhenPrewarmed) {
  const Mix& mix = GetParam();
  std::size_t total_bytes = 0;
  for (const std::size_t bytes : mix.layer_bytes) total_bytes += mix.layer_count * round_up(bytes, kPage);
  const std::size_t unit_bytes = mix.layer_bytes.size() == 1 ? mix.layer_bytes[0] : 0;
  ASSERT_TRUE(pool_->prewarm(total_bytes, unit_bytes).ok());
  const std::uint64_t pin_count = pool_->statistics().pin_count;

  for (int layer = 0; layer < mix.layer_count; ++layer) {
    for (const std::size_t bytes : mix.layer_bytes) EXPECT_TRUE(pool_->allocate(bytes).ok());
  }

  EXPECT_EQ(pin_count, 1u);
  EXPECT_LE(held_over_asked(*pool_), 1.02);
}

INSTANTIATE_TEST_SUITE_P(Mixes, PinnedPoolMix, ::testing::ValuesIn(kMixes),
                         [](const auto& info) { return "Mix" + std::to_string(info.index); });

TEST_F(PinnedPoolTest, AGrowingPoolKeepsItsBoundOnMemoryTakenAhead) {
  const std::uint64_t seed = choose_seed();
  SCOPED_TRACE("FOREBAY_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::size_t live_bytes = 0;
  while (live_bytes < 256_MiB) {
    const std::size_t bytes = 1 + random() % (random() % 4 == 0 ? 9_MiB : 200_KiB);
    ASSERT_TRUE(pool_->allocate(bytes).ok());
    live_bytes += round_up(bytes, kPage);
    const PinnedPoolStatistics statistics = pool_->statistics();
    ASSERT_EQ(statistics.live_bytes, live_bytes);
    ASSERT_LE(statistics.held_bytes - live_bytes, std::max<std::size_t>(2_MiB, statistics.held_bytes / 64));
  }
}

TEST_F(PinnedPoolTest, ManySmallBlocksShareOnePinCall) {
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(pool_->allocate(16_KiB).ok());

  EXPECT_LE(pool_->statistics().pin_count, 2000 * 16_KiB / 2_MiB + 1);
}

TEST_F(PinnedPoolTest, ARequestLargerThanASlabGetsOneOfItsOwnSize) {
  make({.slab_bytes = 4_MiB});
  ASSERT_TRUE(pool_->allocate(30_MiB + 1).ok());

  EXPECT_EQ(pool_->statistics().slab_count, 1u);
  EXPECT_EQ(pool_->statistics().held_bytes, 30_MiB + kPage);
}

// --- prewarm, trim, limit ----------------------------------------

TEST_F(PinnedPoolTest, PrewarmedMemoryServesWithoutAnotherPinCall) {
  make({.slab_bytes = 16_MiB});
  ASSERT_TRUE(pool_->prewarm(40_MiB).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 40_MiB);
  EXPECT_EQ(pool_->statistics().slab_count, 3u) << "the last slab shrinks to what is missing";
  ASSERT_TRUE(pool_->prewarm(40_MiB).ok());
  EXPECT_EQ(pool_->statistics().slab_count, 3u) << "it is there already";

  const std::uint64_t pin_count = backend_->call_count(HostCall::kPin);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(pool_->allocate(4_MiB).ok());
  EXPECT_EQ(backend_->call_count(HostCall::kPin), pin_count);
}

TEST_F(PinnedPoolTest, APrewarmedPoolHasAtMostSixteenSmallSlabs) {
  make({.slab_bytes = 1_MiB});
  ASSERT_TRUE(pool_->prewarm(64_MiB).ok());
  EXPECT_EQ(pool_->statistics().slab_count, 16u);
  EXPECT_EQ(pool_->statistics().held_bytes, 64_MiB);
}

// A slab for small blocks is a huge page where it may be that large.
TEST_F(PinnedPoolTest, ASlabForSmallBlocksIsInWholeHugePages) {
  make({.slab_bytes = 2_MiB});
  ASSERT_TRUE(pool_->allocate(3 * kPage).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 2_MiB);

  make({.slab_bytes = 2_MiB - kPage});
  ASSERT_TRUE(pool_->allocate(3 * kPage).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, (2_MiB - kPage) / (3 * kPage) * (3 * kPage));
}

TEST_F(PinnedPoolTest, SlabsForBlocksOfOneSizeAreMultiplesOfIt) {
  make({.slab_bytes = 16_MiB});
  ASSERT_TRUE(pool_->prewarm(35_MiB, 5_MiB).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 35_MiB);
  EXPECT_EQ(pool_->statistics().slab_count, 3u);

  for (int i = 0; i < 7; ++i) ASSERT_TRUE(pool_->allocate(5_MiB).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 35_MiB);
}

TEST_F(PinnedPoolTest, TrimKeepsLiveAndPendingBlocks) {
  make({.slab_bytes = 4_MiB});
  Gate gate(*backend_);
  ASSERT_TRUE(pool_->prewarm(12_MiB).ok());
  std::byte* used = pool_->allocate(4_MiB).value();
  std::byte* awaited = pool_->allocate(4_MiB).value();
  gate.hold();
  EXPECT_TRUE(pool_->free(awaited, gate.stream()).ok());

  EXPECT_EQ(pool_->trim(), 4_MiB);
  EXPECT_EQ(pool_->trim(), 0u);
  gate.drain();
  EXPECT_EQ(pool_->trim(), 4_MiB);
  EXPECT_EQ(pool_->statistics().held_bytes, 4_MiB);
  std::memset(used, 3, 4_MiB);
}

TEST_F(PinnedPoolTest, AfterATrimKeepsNoMoreThanAPoolThatWasNotPrewarmed) {
  const auto held_after_use = [&] {
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 5; ++i) blocks.push_back(pool_->allocate(8_MiB).value());
    for (std::byte* block : blocks) EXPECT_TRUE(pool_->free(block, Stream()).ok());
    EXPECT_TRUE(pool_->allocate(48_MiB).ok());
    return pool_->statistics().held_bytes;
  };
  make({.slab_bytes = 8_MiB});
  const std::size_t held_bytes = held_after_use();

  make({.slab_bytes = 8_MiB});
  ASSERT_TRUE(pool_->prewarm(64_MiB).ok());
  EXPECT_EQ(pool_->trim(), 64_MiB);

  EXPECT_EQ(held_after_use(), held_bytes);
}

// Memory that was prewarmed counts as used as far as blocks take it, also freed ones that a stream still
// uses.
TEST_F(PinnedPoolTest, KeepsWhatWasPrewarmedAndNoMore) {
  for (const bool waiting : {false, true}) {
    make({.slab_bytes = 8_MiB});
    Gate gate(*backend_);
    ASSERT_TRUE(pool_->prewarm(64_MiB).ok());
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 5; ++i) blocks.push_back(pool_->allocate(8_MiB).value());
    std::byte* const large = pool_->allocate(48_MiB).value();
    EXPECT_EQ(pool_->statistics().held_bytes, 112_MiB);
    gate.hold();
    for (std::byte* block : blocks) {
      if (waiting) {
        ASSERT_TRUE(pool_->free(block, gate.stream()).ok());
      }
    }
    ASSERT_TRUE(pool_->free(large, {}).ok());
    // 72 MiB are unused, and 24 of them were prewarmed.
    ASSERT_TRUE(pool_->allocate(49_MiB).ok());
    EXPECT_EQ(pool_->statistics().held_bytes, 113_MiB) << waiting;
    gate.drain();
  }
}

TEST_F(PinnedPoolTest, ASmallerPrewarmKeepsAllOfALargerOne) {
  make({.slab_bytes = 8_MiB});
  ASSERT_TRUE(pool_->prewarm(64_MiB).ok());
  ASSERT_TRUE(pool_->prewarm(8_MiB).ok());

  ASSERT_TRUE(pool_->allocate(72_MiB).ok());

  EXPECT_EQ(pool_->statistics().held_bytes, 136_MiB);
}

// Sizes are in pages where they are counted in 32 bits.
TEST_F(PinnedPoolTest, PrewarmsMoreThanTwoGibibytes) {
  make({.addresses_only = true});
  ASSERT_TRUE(pool_->prewarm(2_GiB + kPage).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 2_GiB + kPage);
  make({.addresses_only = true});
  ASSERT_TRUE(pool_->prewarm(1, 2_GiB + kPage).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 2_GiB + kPage);
}

TEST_F(PinnedPoolTest, StaysWithinItsLimitAndReportsTheHolders) {
  make({.limit_bytes = 10_MiB});
  Gate gate(*backend_);
  std::byte* a = pool_->allocate(6_MiB).value();
  gate.hold();
  EXPECT_TRUE(pool_->free(a, gate.stream()).ok());
  std::byte* b = pool_->allocate(3_MiB).value();

  const Result<std::byte*> refused = pool_->allocate(4_MiB);

  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kOutOfMemory);
  for (const char* part :
       {"4.00 MiB", "limit of 10.00 MiB", "6.00 MiB wait for streams", "raise limit_bytes"}) {
    EXPECT_NE(refused.status().message().find(part), std::string::npos) << refused.status().message();
  }
  EXPECT_LE(pool_->statistics().peak_held_bytes, 10_MiB);
  gate.drain();
  EXPECT_TRUE(pool_->allocate(4_MiB).ok());
  EXPECT_TRUE(pool_->free(b, {}).ok());
}

TEST_F(PinnedPoolTest, FreeSlabsThatAreTooSmallGoBackForALargerRequest) {
  make({.limit_bytes = 10_MiB, .slab_bytes = 4_MiB});
  ASSERT_TRUE(pool_->prewarm(8_MiB).ok());

  const Result<std::byte*> large = pool_->allocate(9_MiB);

  ASSERT_TRUE(large.ok()) << large.status().to_string();
  EXPECT_EQ(pool_->statistics().held_bytes, 9_MiB);
}

// --- failures ----------------------------------------------------

TEST_F(PinnedPoolTest, ARefusedPinIsAnErrorAndChangesNothing) {
  fail_next(HostCall::kPin, StatusCode::kUnsupported, "no more locked pages");

  const Result<std::byte*> refused = pool_->allocate(5_MiB);

  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
  for (const char* part : {"5.00 MiB", "no more locked pages", "ulimit -l", "limit_bytes"}) {
    EXPECT_NE(refused.status().message().find(part), std::string::npos) << refused.status().message();
  }
  EXPECT_EQ(pool_->statistics().held_bytes, 0u);
  EXPECT_TRUE(pool_->allocate(5_MiB).ok()) << "the next request works";

  // Only where memory is short a smaller slab is tried.
  make({});
  fail_next(HostCall::kPin, StatusCode::kUnsupported, "no more locked pages");
  EXPECT_EQ(pool_->allocate(16_KiB).status().code(), StatusCode::kUnsupported);
}

TEST_F(PinnedPoolTest, MemoryThatCannotBePinnedIsUnmapped) {
  PinRefusingBackend backend(*backend_);
  for (const bool addresses_only : {false, true}) {
    const auto pool = std::move(PinnedPool::create(backend, {.addresses_only = addresses_only})).value();

    EXPECT_FALSE(pool->allocate(5_MiB).ok());

    unsigned char in_memory = 0;
    ASSERT_NE(backend.refused, nullptr);
    EXPECT_EQ(::mincore(std::exchange(backend.refused, nullptr), 1, &in_memory), -1);
    EXPECT_EQ(errno, ENOMEM) << "it is still mapped";
  }
}

TEST_F(PinnedPoolTest, ARefusedPinNamesTheLimitOnLockedMemory) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  for (const rlim_t limit : {std::min(rlim_t{64_KiB}, before.rlim_max), before.rlim_max}) {
    const rlimit lower{limit, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &lower), 0);
    fail_next(HostCall::kPin, StatusCode::kUnsupported, "no more locked pages");
    const std::string message = pool_->allocate(5_MiB).status().message();
    EXPECT_EQ(message,
              "cannot allocate 5.00 MiB of pinned host memory for host: a slab of 5.00 MiB cannot be pinned: "
              "no more "
              "locked pages; the limit on locked memory (ulimit -l) is " +
                  (limit == RLIM_INFINITY ? "unlimited" : format_bytes(limit)) +
                  ": raise it, free host memory, or set limit_bytes");
  }
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

// An event that cannot be asked about may be that of work that still runs.
TEST_F(PinnedPoolTest, ABlockWhoseEventFailsIsNotReused) {
  QueryCountingBackend backend(*backend_);
  const auto pool = std::move(PinnedPool::create(backend, {.slab_bytes = 1})).value();
  Gate gate(*backend_);
  std::byte* const block = pool->allocate(1_MiB).value();
  ASSERT_TRUE(pool->free(block, gate.stream()).ok());
  gate.drain();
  backend.fails = true;
  EXPECT_NE(pool->allocate(1_MiB).value(), block);
  backend.fails = false;
  EXPECT_EQ(pool->allocate(1_MiB).value(), block);
}

// A 64th of what is held, or 2 MiB if that is more.
TEST_F(PinnedPoolTest, HoldsAheadInProportionToItsSize) {
  make({.addresses_only = true});
  ASSERT_TRUE(pool_->allocate(640_MiB).ok());
  ASSERT_TRUE(pool_->allocate(1_MiB).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 650_MiB) << "in huge pages";

  // Unused slabs of no use for the request stay up to that bound.
  const auto held_after = [&](std::size_t live_bytes, std::size_t unused_bytes, std::size_t next_bytes) {
    make({.slab_bytes = 1, .addresses_only = true});
    EXPECT_TRUE(pool_->allocate(live_bytes).ok());
    std::byte* blocks[2];
    for (std::byte*& block : blocks) block = pool_->allocate(unused_bytes).value();
    for (std::byte* block : blocks) EXPECT_TRUE(pool_->free(block, {}).ok());
    EXPECT_TRUE(pool_->allocate(next_bytes).ok());
    return pool_->statistics().held_bytes;
  };
  EXPECT_EQ(held_after(640_MiB, 5_MiB, 6_MiB), 656_MiB);
  EXPECT_EQ(held_after(640_MiB, 12_MiB, 13_MiB), 665_MiB);
  EXPECT_EQ(held_after(4_MiB, 768_KiB, 1_MiB), 5_MiB + 1536_KiB);
  EXPECT_EQ(held_after(4_MiB, 2_MiB, 3_MiB), 9_MiB);
}

// The same request would be refused again.
TEST_F(PinnedPoolTest, ARefusedRequestIsNotRepeatedAsItWas) {
  fail_next(HostCall::kPin, StatusCode::kOutOfMemory, "full");

  EXPECT_EQ(pool_->allocate(5_MiB).status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(backend_->call_count(HostCall::kPin), 1u);
}

TEST_F(PinnedPoolTest, TakesNothingAheadWhenOnlyTheRequestFits) {
  fail_next(HostCall::kPin, StatusCode::kOutOfMemory, "too much at once");

  ASSERT_TRUE(pool_->allocate(16_KiB).ok());

  EXPECT_EQ(pool_->statistics().held_bytes, 16_KiB);
}

TEST_F(PinnedPoolTest, AFailedPrewarmKeepsTheMemoryTakenSoFar) {
  make({.slab_bytes = 4_MiB});
  backend_->add_fault({.call = HostCall::kPin, .nth = 3, .status = Status(StatusCode::kOutOfMemory, "full")});

  EXPECT_EQ(pool_->prewarm(16_MiB).code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(pool_->statistics().held_bytes, 8_MiB);
  EXPECT_TRUE(pool_->prewarm(16_MiB).ok());
  EXPECT_EQ(pool_->statistics().held_bytes, 16_MiB);
}

TEST_F(PinnedPoolTest, WithoutAnEventAFreeWaitsForItsStream) {
  Gate gate(*backend_);
  for (const HostCall call : {HostCall::kEventCreate, HostCall::kEventRecord}) {
    std::byte* block = pool_->allocate(4_MiB).value();
    fail_next(call, StatusCode::kInternal, "no event");

    EXPECT_TRUE(pool_->free(block, gate.stream()).ok());

    EXPECT_EQ(pool_->statistics().pending_bytes, 0u);
    EXPECT_EQ(pool_->allocate(4_MiB).value(), block);
    EXPECT_TRUE(pool_->free(block, {}).ok());
  }
}

// A pool that adapts to other sizes gives the largest unused slabs back first, in as few calls as possible.
TEST_F(PinnedPoolTest, GivesTheLargestUnusedSlabsBackFirst) {
  make({.slab_bytes = 1});
  std::vector<std::byte*> blocks;
  for (const std::size_t bytes : {8_MiB, 4_MiB, 2_MiB}) blocks.push_back(pool_->allocate(bytes).value());
  for (std::byte* block : blocks) ASSERT_TRUE(pool_->free(block, {}).ok());
  std::byte* const large = pool_->allocate(9_MiB).value();
  EXPECT_EQ(pool_->statistics().held_bytes, 11_MiB) << "2 MiB may be held ahead";
  ASSERT_TRUE(pool_->free(large, {}).ok());
}

TEST_F(PinnedPoolTest, ABlockFreedOnAnInvalidStreamIsNeverReused) {
  std::byte* block = pool_->allocate(4_MiB).value();
  const Stream nonsense{reinterpret_cast<void*>(0x1234567)};

  const Status status = pool_->free(block, nonsense);

  EXPECT_FALSE(status.ok());
  EXPECT_EQ(pool_->free(block, {}).code(), StatusCode::kInvalidArgument);
  EXPECT_NE(pool_->allocate(4_MiB).value(), block);
  EXPECT_EQ(pool_->trim(), 0u);
}

TEST_F(PinnedPoolTest, ARequestLargerThanTheHostIsRefusedBeforeItIsTouched) {
  const Result<std::byte*> absurd = pool_->allocate(std::size_t{4} << 40);
  ASSERT_FALSE(absurd.ok());
  EXPECT_EQ(absurd.status().code(), StatusCode::kOutOfMemory);
  EXPECT_NE(absurd.status().message().find("free host memory"), std::string::npos)
      << absurd.status().message();

  const std::size_t most_bytes = (std::size_t{1} << 31) * kPage;
  const std::string too_large = "cannot take " + format_bytes(most_bytes + 1) +
                                " of pinned host memory at once: a slab has at most " +
                                format_bytes(most_bytes) + "; ask for less";
  EXPECT_EQ(pool_->allocate(most_bytes + 1).status().message(), too_large);
  EXPECT_EQ(pool_->prewarm(most_bytes + kPage).message(), too_large);
  EXPECT_EQ(pool_->prewarm(1, most_bytes + kPage).message(), too_large);
  EXPECT_EQ(pool_->allocate(most_bytes).status().message().find("cannot allocate 8.00 TiB of pinned host "),
            0u);
  EXPECT_EQ(
      pool_->prewarm(most_bytes).message().find("cannot prewarm 8.00 TiB of pinned host memory for host: "),
      0u);
  EXPECT_NE(pool_->prewarm(1, most_bytes).message().find(": 8.00 TiB are missing and the host has "),
            std::string::npos);
  EXPECT_EQ(pool_->allocate(SIZE_MAX).status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(pool_->prewarm(SIZE_MAX).code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(pool_->prewarm(std::size_t{4} << 40).code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(pool_->statistics().pin_count, 0u);
}

TEST_F(PinnedPoolTest, ZeroSlabBytesAreRefused) {
  EXPECT_EQ(PinnedPool::create(*backend_, {.slab_bytes = 0}).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(PinnedPoolTest, WorksIfTheNumaNodeDoesNotExist) {
  for (const int node : {1023, 1024, INT_MAX}) {
    make({.numa_node = node});

    EXPECT_TRUE(pool_->allocate(1_MiB).ok()) << node;
  }
}

// A backend of a device near a node.
class NearNodeBackend final : public ForwardingBackend {
 public:
  NearNodeBackend(Backend& below, int node) : ForwardingBackend(below), capabilities_(below.capabilities()) {
    capabilities_.numa_node = node;
  }
  const Capabilities& capabilities() const noexcept override { return capabilities_; }

 private:
  Capabilities capabilities_;
};

// The given one, or else the nearest to the device.
TEST_F(PinnedPoolTest, PrefersANode) {
  constexpr int kDefault = 0;         // MPOL_DEFAULT
  constexpr int kPreferred = 1;       // MPOL_PREFERRED
  constexpr unsigned kOfAddress = 2;  // MPOL_F_ADDR
  for (const auto& [given, nearest] : {std::pair{0, -1}, {-1, 0}, {0, 1023}, {-1, -1}}) {
    NearNodeBackend backend(*backend_, nearest);
    const auto pool = std::move(PinnedPool::create(backend, {.numa_node = given})).value();
    std::byte* const block = pool->allocate(1_MiB).value();
    int policy = -1;
    unsigned long nodes[16] = {};
    if (::syscall(SYS_get_mempolicy, &policy, nodes, 1024ul, block, kOfAddress) != 0) {
      GTEST_SKIP() << "this system does not tell where memory is placed: " << std::strerror(errno);
    }
    const bool is_known = given >= 0 || nearest >= 0;
    EXPECT_EQ(policy, is_known ? kPreferred : kDefault) << given << ", " << nearest;
    EXPECT_EQ(nodes[0], is_known ? 1u : 0u) << given << ", " << nearest;
  }
}

// Pinned memory that is touched late would be placed by the thread that comes first.
TEST_F(PinnedPoolTest, MemoryIsThereOnceItIsHeldUnlessOnlyAddressesAreAskedFor) {
  for (const bool addresses_only : {false, true}) {
    make({.huge_pages = false, .addresses_only = addresses_only});
    std::byte* const block = pool_->allocate(1_MiB).value();
    std::vector<unsigned char> is_there(1_MiB / kPage);
    ASSERT_EQ(::mincore(block, 1_MiB, is_there.data()), 0);
    for (std::size_t i = 0; i < is_there.size(); ++i) {
      ASSERT_EQ(is_there[i] & 1, addresses_only ? 0 : 1) << "page " << i;
    }
  }
}

// A slab of huge pages begins at one. Addresses beyond the slab go back.
TEST_F(PinnedPoolTest, SlabsAreAlignedToHugePagesAndKeepNoOtherAddresses) {
  const auto address_bytes = [] {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * kPage;
  };
  make({.slab_bytes = 1});
  const std::size_t before = address_bytes();
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 32; ++i) {
    blocks.push_back(pool_->allocate(2_MiB + kPage).value());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back()) % 2_MiB, 0u);
  }
  EXPECT_LT(address_bytes(), before + 32 * (2_MiB + kPage) + 8_MiB);
  for (std::byte* const block : blocks) ASSERT_TRUE(pool_->free(block, {}).ok());
  EXPECT_EQ(pool_->trim(), 32 * (2_MiB + kPage));
  EXPECT_LT(address_bytes(), before + 8_MiB);
}

// As the kernel lists them: dc, not copied to child processes; hg, huge pages asked for.
TEST_F(PinnedPoolTest, MemoryIsNotForChildrenAndAsksForHugePages) {
  const auto flags_of = [](const std::byte* block) {
    std::ifstream maps("/proc/self/smaps");
    bool found = false;
    for (std::string line; std::getline(maps, line);) {
      std::uintptr_t begin = 0;
      std::uintptr_t end = 0;
      char minus = 0;
      std::istringstream words(line);
      if (words >> std::hex >> begin >> minus >> end && minus == '-') {
        const auto address = reinterpret_cast<std::uintptr_t>(block);
        found = begin <= address && address < end;
      } else if (found && line.rfind("VmFlags:", 0) == 0) {
        return line + ' ';
      }
    }
    return std::string();
  };
  for (const bool huge_pages : {true, false}) {
    make({.huge_pages = huge_pages});
    const std::string flags = flags_of(pool_->allocate(4_MiB).value());
    if (flags.empty()) GTEST_SKIP() << "this system does not list the flags of memory";

    EXPECT_NE(flags.find(" dc "), std::string::npos) << flags;
    // Reserved huge pages need not be asked for, and a kernel may have none.
    const bool can_ask = flags.find(" ht ") == std::string::npos &&
                         ::access("/sys/kernel/mm/transparent_hugepage/enabled", F_OK) == 0;
    EXPECT_EQ(flags.find(" hg ") != std::string::npos, huge_pages && can_ask) << flags;
  }
}

// Each figure is one that no other has.
TEST_F(PinnedPoolTest, ReportsEachFigureInItsPlace) {
  make({.slab_bytes = 16_MiB, .huge_pages = false});
  ASSERT_TRUE(pool_->prewarm(40_MiB).ok());
  Gate gate(*backend_);
  std::byte* const pending = pool_->allocate(8_MiB - 7).value();
  ASSERT_TRUE(pool_->allocate(9_MiB - 5).ok());
  gate.hold();
  ASSERT_TRUE(pool_->free(pending, gate.stream()).ok());

  EXPECT_EQ(pool_->report(),
            "pinned host memory for host: of 40.00 MiB held, 9.00 MiB are in use, 8.00 MiB wait for streams, "
            "and 23.00 MiB are free in pieces of at most 16.00 MiB\n"
            "  3 slabs, 0 B in reserved huge pages; live blocks asked for 9.00 MiB; at most 40.00 MiB held "
            "for 17.00 MiB asked for\n");
  const PinnedPoolStatistics statistics = pool_->statistics();
  EXPECT_EQ(statistics.requested_bytes, 9_MiB - 5);
  EXPECT_EQ(statistics.peak_requested_bytes, 17_MiB - 12);
  EXPECT_EQ(statistics.live_bytes, 9_MiB);
  EXPECT_EQ(statistics.allocation_count, 2u);
}

// Later events of a stream that has not come to the first one need not be asked for.
TEST_F(PinnedPoolTest, AsksABusyStreamOnceAndReusesItsEvents) {
  QueryCountingBackend backend(*backend_);
  const auto pool = std::move(PinnedPool::create(backend, {.slab_bytes = 1})).value();
  Gate gate(*backend_);
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(pool->allocate(1_MiB).value());
  gate.hold();
  for (std::byte* block : blocks) ASSERT_TRUE(pool->free(block, gate.stream()).ok());
  EXPECT_EQ(backend_->call_count(HostCall::kEventCreate), 5u);

  std::byte* const other = pool->allocate(1_MiB).value();
  EXPECT_EQ(backend.query_count, 1);
  gate.drain();
  for (std::byte*& block : blocks) block = pool->allocate(1_MiB).value();
  EXPECT_EQ(backend.query_count, 6);
  for (std::byte* block : blocks) ASSERT_TRUE(pool->free(block, gate.stream()).ok());
  EXPECT_EQ(backend_->call_count(HostCall::kEventCreate), 5u);
  ASSERT_TRUE(pool->free(other, {}).ok());
  gate.drain();
}

// Sixteen busy streams are remembered; of further ones each block is asked about.
TEST_F(PinnedPoolTest, AsksAboutEachBlockOfTheSeventeenthBusyStream) {
  QueryCountingBackend backend(*backend_);
  const auto pool = std::move(PinnedPool::create(backend, {.slab_bytes = 1})).value();
  std::vector<std::unique_ptr<Gate>> gates;
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 36; ++i) blocks.push_back(pool->allocate(16_KiB).value());
  for (int i = 0; i < 18; ++i) {
    gates.push_back(std::make_unique<Gate>(*backend_));
    gates.back()->hold();
  }
  for (int i = 0; i < 36; ++i) ASSERT_TRUE(pool->free(blocks[i], gates[i / 2]->stream()).ok());

  ASSERT_TRUE(pool->allocate(16_KiB).ok());
  EXPECT_EQ(backend.query_count, 16 + 2 * 2);
  for (auto& gate : gates) gate->drain();
}

TEST_F(PinnedPoolTest, ReportsHeldMemoryAndResetsPeaks) {
  std::byte* block = pool_->allocate(8_MiB).value();
  EXPECT_TRUE(pool_->free(block, {}).ok());
  EXPECT_NE(pool_->report().find("8.00 MiB are free in pieces of at most 8.00 MiB"), std::string::npos)
      << pool_->report();

  pool_->reset_peaks();

  EXPECT_EQ(pool_->statistics().peak_requested_bytes, 0u);
  EXPECT_EQ(pool_->statistics().peak_held_bytes, 8_MiB);
  block = pool_->allocate(6_MiB).value();
  ASSERT_TRUE(pool_->free(block, {}).ok());
  EXPECT_EQ(pool_->trim(), 8_MiB);
  ASSERT_TRUE(pool_->allocate(3_MiB).ok());
  EXPECT_EQ(pool_->statistics().peak_requested_bytes, 6_MiB);
  EXPECT_EQ(pool_->statistics().peak_held_bytes, 8_MiB);
  pool_->reset_peaks();
  EXPECT_EQ(pool_->statistics().peak_requested_bytes, 3_MiB);
  EXPECT_LT(pool_->statistics().peak_held_bytes, 8_MiB);
}

// Both pieces are in one bin, in the order of their frees.
TEST_F(PinnedPoolTest, ReportsTheLargestFreePiece) {
  for (const bool larger_first : {false, true}) {
    make({.slab_bytes = 32_MiB});
    ASSERT_TRUE(pool_->prewarm(32_MiB).ok());
    std::byte* const smaller = pool_->allocate(8_MiB).value();
    ASSERT_TRUE(pool_->allocate(1_MiB).ok());
    std::byte* const larger = pool_->allocate(8_MiB + 64_KiB).value();
    ASSERT_TRUE(pool_->allocate(15_MiB - 64_KiB).ok());
    ASSERT_TRUE(pool_->free(larger_first ? larger : smaller, {}).ok());
    ASSERT_TRUE(pool_->free(larger_first ? smaller : larger, {}).ok());
    EXPECT_NE(pool_->report().find("16.06 MiB are free in pieces of at most 8.06 MiB"), std::string::npos)
        << pool_->report();
  }
}

// --- random operations against a model ---------------------------

struct Block {
  std::byte* address;
  std::size_t bytes;
  std::uint8_t pattern;
};

bool holds(const Block& block) {
  return block.bytes == 0 || (block.address[0] == std::byte{block.pattern} &&
                              std::memcmp(block.address, block.address + 1, block.bytes - 1) == 0);
}

TEST(PinnedPoolModel, HoldsItsInvariantsUnderRandomOperations) {
  const std::uint64_t seed = choose_seed();
  SCOPED_TRACE("FOREBAY_SEED=" + std::to_string(seed));
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  constexpr std::size_t kLimit = 24_MiB;
  constexpr int kStreams = 3;
  auto backend = std::move(ScriptedHostBackend::create({})).value();
  auto pool = std::move(PinnedPool::create(*backend, {.limit_bytes = kLimit, .slab_bytes = 4_MiB})).value();
  std::vector<std::unique_ptr<Gate>> gates;
  for (int i = 0; i < kStreams; ++i) gates.push_back(std::make_unique<Gate>(*backend));
  std::vector<bool> held(kStreams);
  std::vector<Block> live;
  std::vector<std::pair<int, Block>> pending;  // By stream; while it is held, no byte of these may be reused.
  int refused_count = 0;

  for (int i = 0; i < 20'000 && !::testing::Test::HasFailure(); ++i) {
    const std::size_t kind = random() % 100;
    const int which = static_cast<int>(random() % kStreams);
    if (kind < 50) {
      const std::size_t bytes = random() % (random() % 8 == 0 ? 3_MiB : 100_KiB);
      const Result<std::byte*> address = pool->allocate(bytes);
      if (!address.ok()) {
        EXPECT_EQ(address.status().code(), StatusCode::kOutOfMemory);
        ++refused_count;
      } else {
        const Block block{address.value(), bytes, static_cast<std::uint8_t>(random())};
        const std::size_t block_bytes = pool->block_bytes(block.address);
        EXPECT_EQ(block_bytes, std::max(kPage, round_up(bytes, kPage)));
        const auto overlaps = [&](const Block& other) {
          return block.address < other.address + std::max<std::size_t>(other.bytes, 1) &&
                 other.address < block.address + block_bytes;
        };
        EXPECT_TRUE(std::none_of(live.begin(), live.end(), overlaps));
        for (const auto& [stream, other] : pending) {
          EXPECT_FALSE(held[stream] && overlaps(other)) << "handed out before its stream had passed";
        }
        std::memset(block.address, block.pattern, bytes);
        live.push_back(block);
      }
    } else if (kind < 90 || live.size() > 400) {
      if (live.empty()) continue;
      std::swap(live[random() % live.size()], live.back());
      const Block block = live.back();
      live.pop_back();
      EXPECT_TRUE(holds(block)) << "somebody else wrote into a live block";
      const bool by_host = random() % 4 == 0;
      EXPECT_TRUE(pool->free(block.address, by_host ? Stream() : gates[which]->stream()).ok());
      if (!by_host && held[which]) pending.emplace_back(which, block);
      EXPECT_EQ(pool->free(block.address, {}).code(), StatusCode::kInvalidArgument);
    } else if (kind < 94) {
      if (held[which]) continue;
      gates[which]->drain();
      gates[which]->hold();
      held[which] = true;
    } else if (kind < 99) {
      gates[which]->drain();
      held[which] = false;
      std::erase_if(pending, [which](const auto& entry) { return entry.first == which; });
    } else {
      pool->trim();
    }
    const PinnedPoolStatistics statistics = pool->statistics();
    EXPECT_LE(statistics.held_bytes, kLimit);
    EXPECT_LE(statistics.live_bytes + statistics.pending_bytes, statistics.held_bytes);
    std::size_t live_bytes = 0;
    for (const Block& block : live) live_bytes += std::max(kPage, round_up(block.bytes, kPage));
    EXPECT_EQ(statistics.live_bytes, live_bytes);
  }

  for (const Block& block : live) {
    EXPECT_TRUE(holds(block));
    EXPECT_TRUE(pool->free(block.address, {}).ok());
  }
  for (auto& gate : gates) gate->drain();
  pool->trim();
  EXPECT_EQ(pool->statistics().held_bytes, 0u);
  EXPECT_EQ(pool->statistics().requested_bytes, 0u);
  EXPECT_GT(refused_count, 0) << "the limit was never reached: the test is too easy";
  pool.reset();
  gates.clear();
  EXPECT_EQ(backend->live_handle_count(), 0u);
}

TEST(PinnedPoolThreads, ManyAllocateWhileOnePrewarmsAndOneTrims) {
  constexpr int kThreads = 4;
  auto backend = std::move(ScriptedHostBackend::create({})).value();
  auto pool = std::move(PinnedPool::create(*backend, {.limit_bytes = 64_MiB, .slab_bytes = 4_MiB})).value();
  std::atomic<int> wrong_count{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<std::uint64_t>(t));
      const Stream stream = backend->stream_create().value();
      std::vector<Block> live;
      for (int i = 0; i < 1500; ++i) {
        if (live.size() < 20 && random() % 2 == 0) {
          const std::size_t bytes = 1 + random() % 300'000;
          const Result<std::byte*> address = pool->allocate(bytes);
          if (!address.ok()) continue;
          live.push_back({address.value(), bytes, static_cast<std::uint8_t>(random())});
          // In stream order, as a copy would write it.
          if (!backend->stream_synchronize(stream).ok()) ++wrong_count;
          std::memset(live.back().address, live.back().pattern, bytes);
        } else if (!live.empty()) {
          std::swap(live[random() % live.size()], live.back());
          if (!holds(live.back())) ++wrong_count;
          if (!pool->free(live.back().address, random() % 3 == 0 ? Stream() : stream).ok()) ++wrong_count;
          live.pop_back();
        }
      }
      for (const Block& block : live) {
        if (!holds(block) || !pool->free(block.address, {}).ok()) ++wrong_count;
      }
      if (!backend->stream_destroy(stream).ok()) ++wrong_count;
    });
  }
  std::thread warmer([&] {
    while (!stop) {
      if (!pool->prewarm(32_MiB).ok()) ++wrong_count;
      pool->trim();
      (void)pool->report();
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop = true;
  warmer.join();
  pool->trim();

  EXPECT_EQ(wrong_count.load(), 0);
  EXPECT_EQ(pool->statistics().live_bytes, 0u);
  EXPECT_EQ(pool->statistics().held_bytes, 0u);
}

}  // namespace
}  // namespace forebay
