// A stage-3 run that fits into the device only because the arena stitches chunks that lie apart. Over a
// device that maps a chunk at one place only, the same run is out of memory.
//
// Three ranks take activations and workspaces from an arena beside the engine's own. Each unit keeps its
// activations from the forward pass to the backward pass. It takes a workspace that is larger than the one
// before, and frees it after the next one is taken. So each hole of a workspace lies between live blocks and
// is too small for the next. The gradients are made of the activations: a lost byte changes the digest.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "forebay/arena.h"
#include "forebay/units.h"
#include "runtime/device/forwarding_backend.h"
#include "tests/engine/toy.h"

namespace forebay::testing {
namespace {

constexpr int kRanks = 3;
constexpr int kUnits = 16;
constexpr int kSteps = 5;
constexpr std::size_t kChunk = 64_KiB;

// Refuses a second mapping of a chunk, beside the first or after it.
class MapOnceBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  Status map(DevicePtr address, Chunk chunk) override {
    {
      const std::lock_guard lock(mutex_);
      if (!mapped_.insert(chunk.handle).second) {
        ++refused_count_;
        return Status(StatusCode::kOutOfMemory, "this device maps a chunk at one place only");
      }
    }
    return ForwardingBackend::map(address, chunk);
  }
  Status chunk_destroy(Chunk chunk) override {
    {
      const std::lock_guard lock(mutex_);
      mapped_.erase(chunk.handle);
    }
    return ForwardingBackend::chunk_destroy(chunk);
  }
  int refused_count() const {
    const std::lock_guard lock(mutex_);
    return refused_count_;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::uint64_t> mapped_;
  int refused_count_ = 0;
};

std::size_t activation_bytes(int unit) {
  return kChunk + kChunk / 4 + static_cast<std::size_t>(unit % 3) * kBlockGranule;
}
std::size_t workspace_bytes(int unit) {
  return (2 + static_cast<std::size_t>(unit)) * kChunk - kBlockGranule;
}
// The most bytes that are live at once.
std::size_t peak_bytes() {
  std::size_t peak = 0, kept = 0;
  for (int u = 0; u < kUnits; ++u) {
    kept += activation_bytes(u);
    peak = std::max(peak, kept + workspace_bytes(u) + (u > 0 ? workspace_bytes(u - 1) : 0));
  }
  return peak;
}
// The rest of a partly covered chunk cannot be used: one chunk in all is left for that.
std::size_t tight_bytes() {
  return round_up(peak_bytes(), kChunk) + kChunk;
}

ToyOptions options_for_run() {
  ToyOptions options;
  for (int u = 0; u < kUnits; ++u) {
    options.units.push_back({{{1000 + 37 * static_cast<std::uint64_t>(u)}}, {}, true});
  }
  options.engine.stage = 3;
  options.engine.bucket_bytes = 5000;
  options.ranks = kRanks;
  return options;
}

struct RunOptions {
  std::size_t device_bytes = SIZE_MAX;  // On each rank.
  std::size_t arena_bytes = 64_MiB;
  bool maps_once = false;
};

struct RankResult {
  std::string digest;
  ArenaStatistics arena;
  std::size_t engine_bytes = 0;           // Device memory of the engine.
  std::uint64_t steady_driver_calls = 0;  // From the third step on.
  int refused_count = 0;                  // Second mappings.
};

class Trainer {
 public:
  Trainer(const ToyOptions& options, Rank& rank, Backend& arena_backend, std::size_t arena_bytes)
      : options_(options), rank_(rank), toy_(options, rank) {
    engine_bytes_ = rank.host_backend().charged_bytes();
    arena_ = value_or_throw(Arena::create(arena_backend, {.limit_bytes = arena_bytes}));
    stream_ = value_or_throw(rank.backend->stream_create());
  }
  ~Trainer() {
    EXPECT_TRUE(rank_.backend->stream_synchronize(stream_).ok());
    EXPECT_TRUE(arena_->stream_retire(stream_).ok());
    EXPECT_TRUE(rank_.backend->stream_destroy(stream_).ok());
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  void run(RankResult& result) {
    toy_.initialize();
    std::uint64_t settled = 0;
    for (int step = 0; step < kSteps; ++step) {
      if (step == 2) settled = arena_->statistics().driver_call_count;
      train(step);
    }
    ToyResult values;
    toy_.collect(values);
    result.digest = values.digest;
    result.engine_bytes = engine_bytes_;
    result.steady_driver_calls = arena_->statistics().driver_call_count - settled;
    note(result);
  }
  void note(RankResult& result) const { result.arena = arena_->statistics(); }

 private:
  float* take(std::size_t bytes) {
    return reinterpret_cast<float*>(value_or_throw(arena_->allocate({.bytes = bytes, .stream = stream_})));
  }
  void give(float* block) { throw_if_error(arena_->free(reinterpret_cast<DevicePtr>(block), stream_)); }
  template <typename Function>
  void call(Function function) {
    throw_if_error(call_on(*rank_.backend, stream_, std::move(function)));
  }

  void train(int step) {
    Engine& engine = toy_.engine();
    const int rank = rank_.communicator->rank();
    std::vector<float*> kept;
    float* previous = nullptr;
    engine.step_begin();
    engine.micro_step_begin(0);
    for (int u = 0; u < kUnits; ++u) {
      const Lease lease = engine.forward(u, stream_);
      const std::size_t count = activation_bytes(u) / sizeof(float);
      const std::size_t scratch_count = workspace_bytes(u) / sizeof(float);
      float* const scratch = take(scratch_count * sizeof(float));
      float* const activations = kept.emplace_back(take(count * sizeof(float)));
      if (previous != nullptr) give(previous);
      previous = scratch;
      const auto* const values = reinterpret_cast<const float*>(lease.parameter(0));
      const std::uint64_t value_count = parameter_count(u);
      call([=] {
        for (std::size_t i = 0; i < scratch_count; ++i)
          scratch[i] = 0.25f * values[i % value_count] + toy_noise(rank, step, 0, u, i % 8192);
        for (std::size_t i = 0; i < count; ++i) activations[i] = 0.5f * scratch[scratch_count - 1 - i];
      });
    }
    give(previous);
    for (int u = kUnits - 1; u >= 0; --u) {
      Lease lease = engine.backward(u, stream_);
      const std::size_t count = activation_bytes(u) / sizeof(float);
      const std::uint64_t value_count = parameter_count(u);
      float* const activations = kept[static_cast<std::size_t>(u)];
      bool accumulate = false;
      auto* const gradient = reinterpret_cast<float*>(lease.gradient(0, &accumulate));
      const auto* const values = reinterpret_cast<const float*>(lease.parameter(0));
      call([=] {
        for (std::size_t i = 0; i < value_count; ++i) gradient[i] = 0.5f * values[i];
        for (std::size_t i = 0; i < count; ++i) gradient[i % value_count] += activations[i];
      });
      lease.grad_ready(0);
      give(activations);
    }
    Hyperparameters hyperparameters;
    hyperparameters.groups = options_.groups;
    hyperparameters.clip = options_.clip;
    static_cast<void>(engine.step(hyperparameters));
  }
  std::uint64_t parameter_count(int u) const {
    return options_.units[static_cast<std::size_t>(u)].parameters[0].count;
  }

  const ToyOptions& options_;
  Rank& rank_;
  ToyTrainer toy_;
  std::unique_ptr<Arena> arena_;
  Stream stream_;
  std::size_t engine_bytes_ = 0;
};

// One result for each rank, filled as far as the run went.
void run(const RunOptions& run_options, std::vector<RankResult>* results) {
  const ToyOptions options = options_for_run();
  results->assign(kRanks, {});
  WorldOptions world;
  world.backend.granularity = kChunk;
  world.backend.memory_bytes = run_options.device_bytes;
  run_ranks(kRanks, world, [&](Rank& rank) {
    RankResult& result = (*results)[static_cast<std::size_t>(rank.communicator->rank())];
    MapOnceBackend map_once(*rank.backend);
    Backend& arena_backend = run_options.maps_once ? map_once : *rank.backend;
    Trainer trainer(options, rank, arena_backend, run_options.arena_bytes);
    try {
      trainer.run(result);
    } catch (...) {
      trainer.note(result);
      result.refused_count = map_once.refused_count();
      throw;
    }
    result.refused_count = map_once.refused_count();
  });
}

TEST(EngineStitching, ARunUnderATightBudgetCompletesBecauseChunksAreStitched) {
  std::vector<RankResult> roomy;
  run({}, &roomy);
  const std::size_t engine_bytes = roomy[0].engine_bytes;
  for (const RankResult& rank : roomy) {
    ASSERT_EQ(rank.digest, roomy[0].digest);
    ASSERT_EQ(rank.engine_bytes, engine_bytes);
    ASSERT_EQ(rank.arena.peak_live_bytes, peak_bytes());
  }

  const RunOptions tight{.device_bytes = engine_bytes + tight_bytes(), .arena_bytes = tight_bytes()};
  std::vector<RankResult> stitched;
  run(tight, &stitched);

  for (const RankResult& rank : stitched) {
    EXPECT_EQ(rank.digest, roomy[0].digest);
    EXPECT_GT(rank.arena.moved_chunk_count, 0u) << "nothing was put together";
    EXPECT_LE(rank.arena.peak_reserved_bytes, tight_bytes());
    EXPECT_EQ(rank.arena.peak_live_bytes, peak_bytes());
    EXPECT_EQ(rank.steady_driver_calls, 0u) << "a repeated step called the driver";
  }
  std::printf("%zu bytes live at most, a budget of %zu, %llu chunks moved by %llu driver calls\n",
              peak_bytes(), tight_bytes(),
              static_cast<unsigned long long>(stitched[0].arena.moved_chunk_count),
              static_cast<unsigned long long>(stitched[0].arena.driver_call_count));
}

TEST(EngineStitching, TheSameRunIsOutOfMemoryWhereNoChunkCanBeMappedAgain) {
  std::vector<RankResult> roomy;
  run({.maps_once = true}, &roomy);
  for (const RankResult& rank : roomy) ASSERT_FALSE(rank.digest.empty());

  std::vector<RankResult> refused;
  const std::size_t device_bytes = roomy[0].engine_bytes + tight_bytes();
  try {
    run({.device_bytes = device_bytes, .arena_bytes = tight_bytes(), .maps_once = true}, &refused);
    FAIL() << "completed without stitching: the budget is not tight enough to prove anything";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kOutOfMemory);
    const std::string message = error.what();
    EXPECT_NE(message.find("cannot allocate"), std::string::npos) << message;
  }

  int refused_count = 0;
  for (const RankResult& rank : refused) {
    refused_count += rank.refused_count;
    EXPECT_EQ(rank.arena.moved_chunk_count, 0u);
    // Fragmentation, not size: live and requested bytes together would have fitted.
    EXPECT_LT(rank.arena.peak_live_bytes, peak_bytes());
  }
  EXPECT_GT(refused_count, 0);
}

}  // namespace
}  // namespace forebay::testing
