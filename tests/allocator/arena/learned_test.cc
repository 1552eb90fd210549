// Learned placements: a later run of the same job has the waste of the steady state from its first pass on,
// another job is served as without them, and damaged ones are refused.
#include "allocator/arena/learned.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "forebay/arena.h"
#include "forebay/model_backend.h"
#include "runtime/command/replay/trace_replay.h"
#include "tests/allocator/arena/families.h"

namespace forebay {
namespace {

using testing::Family;
using testing::family_name;
using testing::FamilyMaker;
using testing::kFamilyCount;

std::unique_ptr<ModelBackend> device(std::size_t memory_bytes) {
  ModelBackendOptions options;
  options.memory_bytes = memory_bytes;
  return std::move(ModelBackend::create(std::move(options))).value();
}

ReplayResult play(const AllocationTrace& trace, int passes, std::string_view learned = {},
                  std::string* learn = nullptr, std::size_t memory_bytes = 128_GiB) {
  const std::unique_ptr<ModelBackend> backend = device(memory_bytes);
  ReplayOptions options{.passes = passes, .timed = false};
  options.learned = learned;
  options.learn = learn;
  Result<ReplayResult> result = replay_trace(trace, *backend, ReplayTarget::kArena, options);
  EXPECT_TRUE(result.ok()) << result.status().to_string();
  EXPECT_TRUE(result.value().completed) << result.value().failure;
  EXPECT_EQ(backend->live_handle_count(), 0u);
  return std::move(result).value();
}

double percent(double share) {
  return 100 * share;
}

class LearnedPlacementsOf : public ::testing::TestWithParam<Family> {};

TEST_P(LearnedPlacementsOf, GiveTheSteadyStateFromTheFirstPass) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AllocationTrace trace = FamilyMaker(GetParam(), seed).make();
    std::string learned;
    const ReplayResult taught = play(trace, 5, {}, &learned);
    const ReplayResult again = play(trace, 4, learned);

    if (std::getenv("FOREBAY_SHOW") != nullptr) {
      std::printf(
          "%s %d: first %.2f %%, steady %.2f %%, learned %.2f %% then %.2f %%; calls %llu, learned "
          "%llu %llu %llu %llu; file %zu KiB\n",
          family_name(GetParam()), static_cast<int>(seed), percent(taught.fragmentation()),
          percent(taught.last_fragmentation()), percent(again.fragmentation()),
          percent(again.last_fragmentation()), static_cast<unsigned long long>(taught.pass_calls[0]),
          static_cast<unsigned long long>(again.pass_calls[0]),
          static_cast<unsigned long long>(again.pass_calls[1]),
          static_cast<unsigned long long>(again.pass_calls[2]),
          static_cast<unsigned long long>(again.pass_calls[3]), learned.size() >> 10);
    }
    EXPECT_LE(again.peak_physical_bytes, taught.last_peak_physical_bytes);
    EXPECT_LE(again.last_peak_physical_bytes, taught.last_peak_physical_bytes);
    EXPECT_LE(again.pass_calls[0], taught.pass_calls[0] + taught.pass_calls[1]);
    for (int pass = 1; pass < 4; ++pass) EXPECT_EQ(again.pass_calls[pass], 0u) << "pass " << pass + 1;
  }
}

// Placements of another job of the family, whose requests differ.
TEST_P(LearnedPlacementsOf, AnotherJobCostNothing) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::string learned;
    (void)play(FamilyMaker(GetParam(), seed + 100).make(), 4, {}, &learned);
    const AllocationTrace trace = FamilyMaker(GetParam(), seed).make();
    const ReplayResult plain = play(trace, 4);
    const ReplayResult misled = play(trace, 4, learned);

    if (std::getenv("FOREBAY_SHOW") != nullptr) {
      std::printf("%s %d: first %.2f %% then %.2f %%, misled %.2f %% then %.2f %%\n", family_name(GetParam()),
                  static_cast<int>(seed), percent(plain.fragmentation()), percent(plain.last_fragmentation()),
                  percent(misled.fragmentation()), percent(misled.last_fragmentation()));
    }
    EXPECT_LE(percent(misled.fragmentation()), percent(plain.fragmentation()) + 0.1);
    EXPECT_LE(percent(misled.last_fragmentation()), percent(plain.last_fragmentation()) + 0.1);
    EXPECT_EQ(misled.pass_calls[3], 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LearnedPlacementsOf,
                         ::testing::Values(Family::kZero3Loop, Family::kRandomLengths, Family::kExperts,
                                           Family::kServing, Family::kCrossStream, Family::kTrainEvaluate,
                                           Family::kLeaks, Family::kRobson),
                         [](const auto& info) {
                           std::string name = family_name(info.param);
                           std::erase_if(name,
                                         [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                           return name;
                         });

// A job whose sizes have changed by a little, which shares its beginning with the one that was learnt.
TEST(LearnedPlacements, AJobThatGoesOnOtherwiseCostsNothing) {
  const AllocationTrace trace = FamilyMaker(Family::kTrainEvaluate, 3).make();
  AllocationTrace changed = trace;
  for (std::size_t i = changed.blocks.size() / 10; i < changed.blocks.size(); ++i) {
    changed.blocks[i].bytes += changed.blocks[i].bytes / 7;
  }
  std::string learned;
  (void)play(trace, 4, {}, &learned);
  const ReplayResult plain = play(changed, 4);
  const ReplayResult misled = play(changed, 4, learned);

  EXPECT_LE(percent(misled.fragmentation()), percent(plain.fragmentation()) + 0.1);
  EXPECT_LE(percent(misled.last_fragmentation()), percent(plain.last_fragmentation()) + 0.1);
}

TEST(LearnedPlacements, FitADeviceOfAnotherSize) {
  const AllocationTrace trace = FamilyMaker(Family::kRandomLengths, 2).make();
  std::string learned;
  const ReplayResult taught = play(trace, 5, {}, &learned);
  for (const std::size_t memory_bytes : {80_GiB, 256_GiB}) {
    const ReplayResult again = play(trace, 2, learned, nullptr, memory_bytes);
    EXPECT_LE(again.peak_physical_bytes, taught.last_peak_physical_bytes) << memory_bytes;
  }
}

TEST(LearnedPlacements, AreRefusedWhenTheyAreDamagedOrForeign) {
  std::string learned;
  (void)play(FamilyMaker(Family::kRobson, 1).make(), 3, {}, &learned);
  ASSERT_TRUE(check_learned_placements(learned).ok());

  const auto message = [](std::string_view text) { return check_learned_placements(text).message(); };
  EXPECT_NE(message("a 0 1024 0\n").find("none of `forebay replay --learn`"), std::string::npos);
  EXPECT_NE(message("").find("none of"), std::string::npos);
  std::string other = learned;
  other.replace(other.find(" 2\n"), 3, " 1\n");
  EXPECT_NE(message(other).find("another version"), std::string::npos);
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::string damaged = learned;
    const std::size_t at = 29 + random() % (damaged.size() - 29);
    if (i % 2 == 0) {
      damaged.resize(at);
    } else {
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << random() % 8));
    }
    EXPECT_NE(message(damaged).find("damaged"), std::string::npos) << at;
  }
}

TEST(LearnedPlacements, AnArenaRefusesThoseThatDoNotFit) {
  std::string learned;
  (void)play(FamilyMaker(Family::kRobson, 1).make(), 3, {}, &learned);
  const std::unique_ptr<ModelBackend> backend = device(64_MiB);
  const Result<std::unique_ptr<Arena>> arena = Arena::create(*backend, {.learned = learned});

  ASSERT_FALSE(arena.ok());
  EXPECT_EQ(arena.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(arena.status().message().find("larger range of addresses"), std::string::npos)
      << arena.status().message();
  EXPECT_EQ(backend->live_handle_count(), 0u);
}

// A file by hand: its sum is right, and its only mapping would begin before the first address of a smaller
// device and end behind it.
TEST(LearnedPlacements, AMappingAcrossTheFirstAddressIsRefused) {
  constexpr std::size_t kTebibyte = std::size_t{1} << 40;
  internal::LearnedPlacements learned;
  learned.granule_bytes = 2_MiB;
  learned.reserve_bytes = 1024 * kTebibyte;
  learned.chunk_bytes = {4_MiB};
  internal::LearnedPlacements moved = learned;
  moved.mappings = {{learned.reserve_bytes - kTebibyte - 2_MiB, 0}};
  ASSERT_TRUE(check_learned_placements(moved.encode()).ok());
  EXPECT_EQ(moved.move_to(2_MiB, kTebibyte, 0).code(), StatusCode::kInvalidArgument);
  moved.mappings = {{learned.reserve_bytes - kTebibyte, 0}};
  EXPECT_TRUE(moved.move_to(2_MiB, kTebibyte, 0).ok());
  EXPECT_EQ(moved.mappings[0].offset, 0u);
}

TEST(LearnedPlacements, AreLearntFromNothingLiveOn) {
  const std::unique_ptr<ModelBackend> backend = device(1_GiB);
  const std::unique_ptr<Arena> arena = Arena::create(*backend, {}).value();
  EXPECT_EQ(arena->learn_end().status().code(), StatusCode::kInvalidArgument);
  const DevicePtr block = arena->allocate({.bytes = 4_MiB}).value();
  EXPECT_EQ(arena->learn_begin().code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(arena->free(block, {}).ok());
  EXPECT_TRUE(arena->learn_begin().ok());
  EXPECT_TRUE(arena->learn_end().ok());
}

}  // namespace
}  // namespace forebay
