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
#include <thread>
#include <utility>
#include <vector>

#include "forebay/arena.h"
#include "forebay/model_backend.h"
#include "runtime/command/replay/trace_replay.h"
#include "tests/allocator/arena/families.h"
#include "tests/allocator/arena/watched_backend.h"

namespace forebay {
namespace {

using testing::Family;
using testing::family_name;
using testing::FamilyMaker;
using testing::kFamilyCount;
using testing::WatchedBackend;

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

internal::LearnedPlacements by_hand() {
  internal::LearnedPlacements learned;
  learned.granule_bytes = 2_MiB;
  learned.reserve_bytes = 64_MiB;
  learned.transient_offset = 16_MiB;
  learned.peak_live_bytes = (std::size_t{1} << 52) - 512;
  learned.chunk_bytes = {4_MiB, 2_MiB};
  learned.mappings = {{0, 0}, {4_MiB, 1}, {38_MiB, 1}, {60_MiB, 0}};
  learned.placements = {{512, 0, 3, 64_MiB - 512}, {64_MiB, 64_MiB, 31, 0}};
  return learned;
}

TEST(LearnedPlacements, AreReadAsTheyWereWritten) {
  const internal::LearnedPlacements written = by_hand();
  const auto read = internal::LearnedPlacements::decode(written.encode());

  ASSERT_TRUE(read.ok()) << read.status().message();
  const internal::LearnedPlacements& learned = read.value();
  EXPECT_EQ(learned.granule_bytes, 2_MiB);
  EXPECT_EQ(learned.reserve_bytes, 64_MiB);
  EXPECT_EQ(learned.transient_offset, 16_MiB);
  EXPECT_EQ(learned.peak_live_bytes, (std::size_t{1} << 52) - 512);
  EXPECT_EQ(learned.chunk_bytes, written.chunk_bytes);
  EXPECT_EQ(learned.held_bytes(), 6_MiB);
  ASSERT_EQ(learned.mappings.size(), 4u);
  EXPECT_EQ(learned.mappings[2].offset, 38_MiB);
  EXPECT_EQ(learned.mappings[2].chunk, 1u);
  ASSERT_EQ(learned.placements.size(), 2u);
  EXPECT_EQ(learned.placements[0].bytes, 512u);
  EXPECT_EQ(learned.placements[0].live_bytes, 0u);
  EXPECT_EQ(learned.placements[0].kind, 3u);
  EXPECT_EQ(learned.placements[0].offset, 64_MiB - 512);
  EXPECT_EQ(learned.placements[1].live_bytes, 64_MiB);
}

// Files with a right sum whose numbers cannot be those of an arena, and their neighbours that can.
TEST(LearnedPlacements, NumbersThatNoArenaHasAreRefused) {
  struct Case {
    const char* what;
    bool is_possible;
    void (*change)(internal::LearnedPlacements& learned);
  };
  const Case cases[] = {
      {"nothing", true, [](auto&) {}},
      {"granules of no power of two", false,
       [](auto& l) { l = {.granule_bytes = 3_MiB, .reserve_bytes = 48_MiB, .transient_offset = 0}; }},
      {"a reservation of half granules", false,
       [](auto& l) {
         l.mappings.clear();
         l.placements.clear();
         l.reserve_bytes = 65_MiB;
       }},
      {"a border inside a granule", false, [](auto& l) { l.transient_offset = 17_MiB; }},
      {"a border at the end", true, [](auto& l) { l.transient_offset = 64_MiB; }},
      {"a border behind the end", false, [](auto& l) { l.transient_offset = 66_MiB; }},
      {"too high a peak", false, [](auto& l) { l.peak_live_bytes = std::size_t{1} << 52; }},
      {"a chunk of nothing", false, [](auto& l) { l.chunk_bytes.push_back(0); }},
      {"a chunk of half granules", false, [](auto& l) { l.chunk_bytes.push_back(3_MiB); }},
      {"a chunk of all addresses", true, [](auto& l) { l.chunk_bytes.push_back(64_MiB); }},
      {"a chunk of more", false, [](auto& l) { l.chunk_bytes.push_back(66_MiB); }},
      {"a mapping of no chunk", false, [](auto& l) { l.mappings[2].chunk = 2; }},
      {"a mapping inside a granule", false, [](auto& l) { l.mappings[2].offset = 39_MiB; }},
      {"mappings that overlap", false, [](auto& l) { l.mappings[1].offset = 2_MiB; }},
      {"a mapping behind the end", false, [](auto& l) { l.mappings[3].offset = 62_MiB; }},
      {"a block of nothing", false, [](auto& l) { l.placements[0].bytes = 0; }},
      {"a block of more than all", false, [](auto& l) { l.placements[1].bytes = 64_MiB + 512; }},
      {"a block behind the end", false, [](auto& l) { l.placements[0].bytes = 1024; }},
      {"more live than there is", false, [](auto& l) { l.placements[1].live_bytes = 64_MiB + 512; }},
      {"a kind behind the last", false, [](auto& l) { l.placements[1].kind = 32; }},
  };
  for (const Case& one : cases) {
    internal::LearnedPlacements learned = by_hand();
    one.change(learned);
    EXPECT_EQ(check_learned_placements(learned.encode()).ok(), one.is_possible) << one.what;
  }
  // Bytes behind the last number, or a sum that is cut off.
  const std::string text = by_hand().encode();
  const std::size_t head = internal::kLearnedHeadline.size() + internal::kLearnedVersion.size();
  std::string body = text.substr(head + 8) + '\0';
  std::string longer = text.substr(0, head);
  const std::uint64_t sum = internal::learned_checksum(body);
  for (int i = 0; i < 8; ++i) longer.push_back(static_cast<char>(sum >> (8 * i)));
  EXPECT_NE(check_learned_placements(longer + body).message().find("damaged or not complete"),
            std::string::npos);
  for (const std::size_t bytes : {head, head + 7, head + 8}) {
    EXPECT_NE(check_learned_placements(text.substr(0, bytes)).message().find("damaged or not complete"),
              std::string::npos)
        << bytes;
  }
}

// Persistent blocks stay, transient ones keep their distance to their border, and those of the upper half
// their distance to the end.
TEST(LearnedPlacements, MoveWithTheirRegion) {
  internal::LearnedPlacements learned = by_hand();
  learned.mappings = {{12_MiB, 0}, {16_MiB, 0}, {38_MiB, 1}, {40_MiB, 1}, {60_MiB, 0}};
  learned.placements = {{512, 0, 1, 16_MiB - 512},
                        {512, 0, 1, 16_MiB},
                        {512, 0, 1, 40_MiB - 512},
                        {512, 0, 1, 40_MiB},
                        {512, 0, 1, 64_MiB - 512}};
  ASSERT_TRUE(learned.move_to(1_MiB, 128_MiB, 32_MiB).ok());

  std::vector<std::size_t> offsets;
  for (const auto& mapping : learned.mappings) offsets.push_back(mapping.offset);
  EXPECT_EQ(offsets, (std::vector<std::size_t>{12_MiB, 32_MiB, 54_MiB, 104_MiB, 124_MiB}));
  offsets.clear();
  for (const auto& placement : learned.placements) offsets.push_back(placement.offset);
  EXPECT_EQ(offsets, (std::vector<std::size_t>{16_MiB - 512, 32_MiB, 56_MiB - 512, 104_MiB, 128_MiB - 512}));
  EXPECT_EQ(learned.granule_bytes, 1_MiB);
  EXPECT_EQ(learned.reserve_bytes, 128_MiB);
  EXPECT_EQ(learned.transient_offset, 32_MiB);
}

TEST(LearnedPlacements, FitFewerAddressesWhereTheyDoNotMeet) {
  struct Case {
    const char* what;
    std::vector<internal::LearnedMapping> mappings;
    std::vector<internal::LearnedPlacement> placements;
    std::size_t granule_bytes;
    bool fits;
  };
  // They move from 64 MiB with the border at 16 MiB to 32 MiB with the border at 8.
  const Case cases[] = {
      {"side by side", {{4_MiB, 0}, {16_MiB, 0}}, {}, 2_MiB, true},
      {"one over the other", {{6_MiB, 0}, {16_MiB, 0}}, {}, 2_MiB, false},
      {"both ends meet", {{32_MiB, 0}, {60_MiB, 0}}, {}, 2_MiB, true},
      {"both ends overlap", {{36_MiB, 1}, {60_MiB, 0}}, {}, 2_MiB, false},
      {"across the middle", {{38_MiB, 0}}, {}, 2_MiB, false},
      {"larger granules", {{4_MiB, 1}}, {}, 4_MiB, false},
      {"a larger granule in which it begins", {{2_MiB, 0}}, {}, 4_MiB, false},
      {"a block at the end", {}, {{1_MiB, 0, 0, 63_MiB}}, 2_MiB, true},
      {"a block that is too large", {}, {{32_MiB, 0, 0, 16_MiB}}, 2_MiB, false},
      {"a block as large as the rest", {}, {{24_MiB, 0, 0, 16_MiB}}, 2_MiB, true},
      {"a persistent block behind the end", {}, {{512, 0, 0, 16_MiB - 512}}, 2_MiB, true},
  };
  for (const Case& one : cases) {
    internal::LearnedPlacements learned = by_hand();
    learned.mappings = one.mappings;
    learned.placements = one.placements;
    EXPECT_EQ(learned.move_to(one.granule_bytes, 32_MiB, 8_MiB).ok(), one.fits) << one.what;
  }
  internal::LearnedPlacements beyond = by_hand();
  beyond.mappings.clear();
  beyond.placements = {{512, 0, 0, 8_MiB}};
  EXPECT_FALSE(beyond.move_to(2_MiB, 8_MiB, 8_MiB).ok());
  beyond.placements = {{512, 0, 0, 8_MiB - 512}};
  EXPECT_TRUE(beyond.move_to(2_MiB, 8_MiB, 8_MiB).ok());
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

// While the driver maps a learned row of 40 shadows and one new chunk, another thread takes descriptors: as
// many as one slab holds, or a few less. Live blocks share no memory afterwards.
TEST(LearnedPlacements, LetNoBlocksShareMemoryWhenAnotherThreadTakesTheDescriptors) {
  constexpr std::uint32_t kShadowCount = 40;
  constexpr std::size_t kFirstBytes = kShadowCount * 2_MiB;
  constexpr std::size_t kSecondBytes = kFirstBytes + 2_MiB;
  const auto take = [](Arena& arena, std::size_t bytes) { return arena.allocate({.bytes = bytes}).value(); };
  internal::LearnedPlacements learned;
  {
    const std::unique_ptr<ModelBackend> backend = device(8_GiB);
    const std::unique_ptr<Arena> arena = std::move(Arena::create(*backend, {})).value();
    ASSERT_TRUE(arena->learn_begin().ok());
    DevicePtr blocks[] = {take(*arena, 512), take(*arena, kFirstBytes), nullptr};
    ASSERT_TRUE(arena->free(std::exchange(blocks[1], nullptr), {}).ok());
    blocks[2] = take(*arena, kSecondBytes);
    learned = internal::LearnedPlacements::decode(arena->learn_end().value()).value();
    for (const DevicePtr block : {blocks[0], blocks[2]}) ASSERT_TRUE(arena->free(block, {}).ok());
  }
  ASSERT_EQ(learned.placements.size(), 3u);
  ASSERT_EQ(learned.granule_bytes, 2_MiB);
  // The second block at addresses of its own, which show the memory of the first in another order.
  const std::size_t first = learned.placements[1].offset;
  const std::size_t second = learned.placements[2].offset = first + 64 * 2_MiB;
  learned.chunk_bytes.assign(kShadowCount + 2, 2_MiB);
  learned.mappings = {{0, kShadowCount + 1}};
  for (std::uint32_t i = 0; i < kShadowCount; ++i) learned.mappings.push_back({first + i * 2_MiB, i});
  for (std::uint32_t i = 0; i <= kShadowCount; ++i) {
    learned.mappings.push_back({second + i * 2_MiB, i < kShadowCount ? kShadowCount - 1 - i : kShadowCount});
  }
  const std::string text = learned.encode();
  ASSERT_TRUE(check_learned_placements(text).ok());

  constexpr std::size_t kMost = 1100;  // The arena makes 1024 descriptors at a time.
  for (std::size_t taken_count = 0; taken_count < kMost; taken_count += 16) {
    const std::unique_ptr<ModelBackend> model = device(8_GiB);
    WatchedBackend backend(*model);
    const std::unique_ptr<Arena> arena = std::move(Arena::create(backend, {.learned = text})).value();
    std::vector<std::pair<DevicePtr, std::size_t>> live = {{take(*arena, 512), 512}};
    ASSERT_TRUE(arena->free(take(*arena, kFirstBytes), {}).ok());
    bool mapped = false;
    backend.on_map = [&](DevicePtr, std::size_t, bool) {
      if (std::exchange(mapped, true)) return;
      std::thread([&] {
        for (std::size_t i = 0; i < taken_count; ++i) live.emplace_back(take(*arena, 512), 512);
      }).join();
    };
    const DevicePtr block = take(*arena, kSecondBytes);
    ASSERT_TRUE(mapped);
    live.emplace_back(block, kSecondBytes);
    for (int i = 0; i < 4; ++i) {
      for (const std::size_t bytes : {std::size_t{2_MiB}, kFirstBytes})
        live.emplace_back(take(*arena, bytes), bytes);
    }

    std::vector<testing::Extent> shown;
    for (const auto& [at, bytes] : live) {
      for (const testing::Extent& extent : backend.shown(at, bytes)) shown.push_back(extent);
    }
    std::sort(shown.begin(), shown.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    bool apart = true;
    for (std::size_t i = 1; i < shown.size(); ++i) apart = apart && shown[i - 1].end <= shown[i].begin;
    EXPECT_TRUE(apart) << "with " << taken_count << " small blocks taken meanwhile";
    for (const auto& [at, bytes] : live) ASSERT_TRUE(arena->free(at, {}).ok());
  }
}

}  // namespace
}  // namespace forebay
