// The exact bytes of every pool, and the choices of kAuto.

#include "forebay/activation_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "forebay/error.h"

namespace forebay::testing {
namespace {

using enum ActivationPlacement;

constexpr std::uint64_t kBlock = 1 << 20;  // Divisible by 2, 4, 8 and 512.

std::vector<ActivationSlot> chain(int layers, ActivationPlacement placement, std::uint64_t bytes = kBlock) {
  std::vector<ActivationSlot> slots;
  for (int u = 0; u < layers; ++u) slots.push_back({.unit = u, .bytes = bytes, .placement = placement});
  return slots;
}

ActivationPlan plan_of(const std::vector<ActivationSlot>& slots, const ActivationPlanOptions& options) {
  return value_or_throw(make_activation_plan(slots, options));
}

std::string refusal(const std::vector<ActivationSlot>& slots, const ActivationPlanOptions& options,
                    StatusCode code = StatusCode::kInvalidArgument) {
  const Result<ActivationPlan> plan = make_activation_plan(slots, options);
  EXPECT_FALSE(plan.ok());
  if (plan.ok()) return "";
  EXPECT_EQ(plan.status().code(), code);
  return plan.status().message();
}

TEST(ActivationPlan, CutsByOneRule) {
  EXPECT_EQ(activation_slice_bytes(1000, 1), 1000u);
  EXPECT_EQ(activation_slice_bytes(1000, 3), 336u);  // ceil(1000 / 3) is 334.
  EXPECT_EQ(activation_slice_bytes(1, 4), 16u);
  EXPECT_EQ(activation_slice_bytes(64, 4), 16u);
  EXPECT_EQ(activation_slice_bytes(65, 4), 32u);
}

TEST(ActivationPlan, CountsEveryPool) {
  const ActivationPlanOptions options{.ranks = 4, .micro_batches = 3, .look_ahead = 2, .staging_count = 2};

  const ActivationPlan kept = plan_of(chain(10, kKeep), options);
  EXPECT_EQ(kept.kept_bytes, 30 * kBlock);
  EXPECT_EQ(kept.device_bytes(), 30 * kBlock);
  EXPECT_EQ(kept.wire_per_micro_batch, WireBytes{});

  const ActivationPlan cut = plan_of(chain(10, kPartition), options);
  EXPECT_EQ(cut.kept_bytes, 30 * kBlock / 4);
  EXPECT_EQ(cut.staging_bytes, 0u);
  EXPECT_EQ(cut.gathered_bytes, 3 * kBlock);  // Two ahead of the one in use.
  EXPECT_EQ(cut.host_bytes(), 0u);
  EXPECT_EQ(cut.wire_per_micro_batch.sent, 10 * kBlock / 4 * 3);
  EXPECT_EQ(cut.wire_per_micro_batch.received, 10 * kBlock / 4 * 3);

  const ActivationPlan spilled = plan_of(chain(10, kPartitionAndSpill), options);
  EXPECT_EQ(spilled.kept_bytes, 0u);
  EXPECT_EQ(spilled.staging_bytes, 2 * kBlock / 4);
  EXPECT_EQ(spilled.gathered_bytes, 3 * kBlock);
  EXPECT_EQ(spilled.host_bytes(), 30 * kBlock / 4);
  EXPECT_EQ(spilled.spilled_bytes_per_micro_batch, 10 * kBlock / 4);
  EXPECT_EQ(spilled.wire_per_micro_batch, cut.wire_per_micro_batch);
}

TEST(ActivationPlan, SpillsAFraction) {
  std::vector<ActivationSlot> slots = chain(4, kPartitionAndSpill);
  for (ActivationSlot& slot : slots) slot.spill_fraction = 0.25;
  slots[3].spill_fraction = 0;

  const ActivationPlan plan = plan_of(slots, {.ranks = 2});

  EXPECT_EQ(plan.host_bytes(), 3 * kBlock / 8);
  EXPECT_EQ(plan.kept_bytes, 4 * kBlock / 2 - 3 * kBlock / 8);
  EXPECT_EQ(plan.staging_bytes, 2 * kBlock / 8);
}

TEST(ActivationPlan, SpillsActivationsThatRanksDoNotShareWhole) {
  std::vector<ActivationSlot> slots = chain(2, kPartitionAndSpill);
  slots[1].shared = false;

  const ActivationPlan plan = plan_of(slots, {.ranks = 4});

  EXPECT_EQ(plan.places[0].spilled_bytes, kBlock / 4);
  EXPECT_EQ(plan.places[1].spilled_bytes, kBlock);
  EXPECT_EQ(plan.wire_per_micro_batch.sent, 3 * kBlock / 4);
  // With kPartition alone, it is kept whole.
  slots[1].placement = kPartition;
  EXPECT_EQ(plan_of(slots, {.ranks = 4}).places[1].kept_bytes, kBlock);
}

TEST(ActivationPlan, BoundsTheHostMemoryBetweenDeviceAndFiles) {
  for (const std::uint64_t staging : {std::uint64_t{1}, std::uint64_t{3} << 20, std::uint64_t{64} << 20}) {
    const ActivationPlan plan = plan_of(chain(50, kPartitionAndSpill),
                                        {.ranks = 2, .tier = Tier::kFile, .file_staging_bytes = staging});
    EXPECT_EQ(plan.file_bytes, 50 * kBlock / 2);
    EXPECT_LE(plan.host_bytes(), std::max<std::uint64_t>(staging, 8 * (64u << 10)));
    EXPECT_EQ(plan.file_piece_bytes % (64u << 10), 0u);
  }
}

TEST(ActivationPlan, ChoosesByTheBudget) {
  const int layers = 32;
  const auto plan_with = [&](std::uint64_t budget) {
    return plan_of(chain(layers, kAuto), {.ranks = 4, .device_bytes = budget, .chunk_bytes = 512});
  };
  const ActivationPlan keep = plan_of(chain(layers, kKeep), {.ranks = 4, .chunk_bytes = 512});
  const ActivationPlan partition = plan_of(chain(layers, kPartition), {.ranks = 4, .chunk_bytes = 512});
  const ActivationPlan spill = plan_of(chain(layers, kPartitionAndSpill), {.ranks = 4, .chunk_bytes = 512});
  ASSERT_GT(keep.reserved_bytes, partition.reserved_bytes);
  ASSERT_GT(partition.reserved_bytes, spill.reserved_bytes);

  EXPECT_TRUE(plan_with(0).places == keep.places);
  EXPECT_TRUE(plan_with(keep.reserved_bytes).places == keep.places);
  EXPECT_TRUE(plan_with(partition.reserved_bytes).places == partition.places);
  EXPECT_TRUE(plan_with(spill.reserved_bytes).places == spill.places);
  // Between these budgets, no more is spilled than needed.
  const ActivationPlan less = plan_with(keep.reserved_bytes - 1);
  EXPECT_EQ(less.spilled_bytes_per_micro_batch, 0u);
  EXPECT_LT(less.wire_per_micro_batch.sent, partition.wire_per_micro_batch.sent);
  EXPECT_NE(refusal(chain(layers, kAuto),
                    {.ranks = 4, .device_bytes = spill.reserved_bytes - 1, .chunk_bytes = 512},
                    StatusCode::kOutOfMemory)
                .find("the activations need"),
            std::string::npos);
}

// Compared with every possible level, for slots of different sizes.
TEST(ActivationPlan, SpillsTheFewestBytes) {
  const std::uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  int spilling = 0;
  for (int round = 0; round < 60; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 3);
    ActivationPlanOptions options{.ranks = ranks,
                                  .micro_batches = 1 + static_cast<int>(random() % 2),
                                  .staging_count = 1 + static_cast<int>(random() % 2),
                                  .chunk_bytes = 512};
    std::vector<ActivationSlot> slots;
    std::uint64_t largest = 0;
    for (int u = 0; u < 6; ++u) {
      slots.push_back(
          {.unit = u, .bytes = 1 + random() % 20'000, .shared = random() % 3 != 0, .placement = kAuto});
      largest = std::max(largest, slots.back().bytes);
    }
    const auto spilling_up_to = [&](std::uint64_t level) {
      std::vector<ActivationSlot> some = slots;
      for (ActivationSlot& slot : some) {
        const std::uint64_t slice = activation_slice_bytes(slot.bytes, slot.shared ? ranks : 1);
        slot.placement = kPartitionAndSpill;
        slot.spill_fraction = static_cast<double>(std::min(level, slice)) / static_cast<double>(slice);
      }
      return plan_of(some, options);
    };
    const std::uint64_t none = spilling_up_to(0).reserved_bytes;
    std::uint64_t least = none;
    for (std::uint64_t level = 512; level <= largest + 512; level += 512)
      least = std::min(least, spilling_up_to(level).reserved_bytes);
    if (least == none) continue;
    options.device_bytes = least + random() % (none - least);

    const ActivationPlan chosen = plan_of(slots, options);

    const std::uint64_t budget = options.device_bytes;
    options.device_bytes = 0;
    EXPECT_LE(chosen.reserved_bytes, budget);
    if (chosen.spilled_bytes_per_micro_batch == 0) continue;
    ++spilling;
    std::uint64_t fewest = UINT64_MAX;
    for (std::uint64_t level = 0; level <= largest + 512; level += 512) {
      const ActivationPlan plan = spilling_up_to(level);
      if (plan.reserved_bytes <= budget) fewest = std::min(fewest, plan.spilled_bytes_per_micro_batch);
    }
    EXPECT_EQ(chosen.spilled_bytes_per_micro_batch, fewest);
  }
  EXPECT_GT(spilling, 5);
}

TEST(ActivationPlan, ChoosesTheLookAheadFromTimes) {
  const auto look_ahead = [](double fetch_seconds, double slow_fetch_seconds) {
    std::vector<ActivationSlot> slots = chain(24, kPartitionAndSpill);
    for (ActivationSlot& slot : slots) slot.recompute_seconds = 1e-3;
    // Every third activation is larger, and its fetch longer.
    for (std::size_t i = 0; i < slots.size(); i += 3)
      slots[i].bytes = static_cast<std::uint64_t>(kBlock * slow_fetch_seconds / fetch_seconds);
    return plan_of(slots, {.look_ahead = kAutoLookAhead, .fetch_bytes_per_second = kBlock / fetch_seconds})
        .look_ahead;
  };

  EXPECT_EQ(look_ahead(0.5e-3, 0.5e-3), 1);  // Hidden behind the activation before.
  EXPECT_GE(look_ahead(0.25e-3, 2e-3), 2);   // Hidden on average only.
  EXPECT_EQ(plan_of(chain(4, kKeep), {.look_ahead = kAutoLookAhead}).look_ahead, 0);
  EXPECT_NE(refusal(chain(4, kPartitionAndSpill), {.look_ahead = kAutoLookAhead})
                .find("the times of recomputation"),
            std::string::npos);
}

TEST(ActivationPlan, NamesTheOptionThatIsWrong) {
  EXPECT_NE(refusal({{.unit = 3, .bytes = 0}}, {}).find("slot 0 of unit 3 has 0 bytes"), std::string::npos);
  EXPECT_NE(refusal({{.bytes = 1}, {.bytes = 2}}, {}).find("declared twice"), std::string::npos);
  EXPECT_NE(refusal({{.bytes = 1, .spill_fraction = 1.5}}, {}).find("spill_fraction"), std::string::npos);
  EXPECT_NE(refusal(chain(1, kKeep), {.micro_batches = 0}).find("micro_batches"), std::string::npos);
  EXPECT_NE(refusal(chain(1, kKeep), {.look_ahead = 9}).find("look_ahead"), std::string::npos);
  EXPECT_NE(refusal(chain(1, kKeep), {.staging_count = 0}).find("staging_count"), std::string::npos);
  const std::string device =
      refusal(chain(8, kKeep), {.ranks = 2, .device_bytes = 4 * kBlock}, StatusCode::kOutOfMemory);
  EXPECT_NE(device.find("8.00 MiB"), std::string::npos) << device;
  EXPECT_NE(device.find("partition them"), std::string::npos) << device;
  const std::string host =
      refusal(chain(8, kPartitionAndSpill), {.host_bytes = 8 * kBlock - 1}, StatusCode::kOutOfMemory);
  EXPECT_NE(host.find("pinned host memory"), std::string::npos) << host;
}

// The last value that is accepted and the first that is not.
TEST(ActivationPlan, LimitsAreExact) {
  const auto message = [](const ActivationSlot& slot, const ActivationPlanOptions& options) {
    return make_activation_plan({slot}, options).status().message();
  };
  const auto range = [](const char* name, int value, int smallest, int largest) {
    return std::string(name) + " of an activation plan is " + std::to_string(value) + "; use " +
           std::to_string(smallest) + " to " + std::to_string(largest);
  };
  const ActivationSlot one{.bytes = 1};
  EXPECT_EQ(message(one, {.ranks = 0}), range("ranks", 0, 1, 65536));
  EXPECT_EQ(message(one, {.ranks = 65536}), "");
  EXPECT_EQ(message(one, {.ranks = 65537}), range("ranks", 65537, 1, 65536));
  EXPECT_EQ(message(one, {.micro_batches = 4096}), "");
  EXPECT_EQ(message(one, {.micro_batches = 4097}), range("micro_batches", 4097, 1, 4096));
  EXPECT_EQ(message(one, {.look_ahead = -2}), range("look_ahead", -2, -1, 8));
  EXPECT_EQ(message(one, {.look_ahead = 8}), "");
  EXPECT_EQ(message(one, {.lease_limit = 0}), range("lease_limit", 0, 1, 64));
  EXPECT_EQ(message(one, {.lease_limit = 64}), "");
  EXPECT_EQ(message(one, {.lease_limit = 65}), range("lease_limit", 65, 1, 64));
  EXPECT_EQ(message(one, {.staging_count = 64}), "");
  EXPECT_EQ(message(one, {.staging_count = 65}), range("staging_count", 65, 1, 64));
  EXPECT_EQ(message(one, {.chunk_bytes = 0}),
            "chunk_bytes of an activation plan is 0; use the device's granularity");
  EXPECT_EQ(message({.unit = 3, .slot = 2, .bytes = 0}, {}),
            "slot 2 of unit 3 has 0 bytes; use 1 to 1125899906842624");
  EXPECT_EQ(message({.bytes = std::uint64_t{1} << 50}, {}), "");
  EXPECT_EQ(message({.bytes = (std::uint64_t{1} << 50) + 1}, {}),
            "slot 0 of unit 0 has 1125899906842625 bytes; use 1 to 1125899906842624");
  EXPECT_EQ(message({.bytes = 1, .state_bytes = std::size_t{1} << 30}, {}), "");
  EXPECT_EQ(message({.bytes = 1, .state_bytes = (std::size_t{1} << 30) + 1}, {}),
            "slot 0 of unit 0 has a state of up to 1073741825 bytes; use at most 1073741824");
  for (const double fraction : {-0.01, 1.01, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(message({.bytes = 1, .spill_fraction = fraction}, {}),
              "slot 0 of unit 0 has spill_fraction " + std::to_string(fraction) + "; use 0 to 1");
  }
  for (const double fraction : {0.0, 1.0})
    EXPECT_EQ(message({.bytes = 1, .spill_fraction = fraction}, {}), "");
  for (const double seconds :
       {-0.01, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(message({.bytes = 1, .recompute_seconds = seconds}, {}),
              "slot 0 of unit 0 has recompute_seconds " + std::to_string(seconds) + "; use 0 or more");
  }
  // One number serves for each unit.
  EXPECT_TRUE(
      make_activation_plan({{.unit = 0, .slot = 1, .bytes = 1}, {.unit = 1, .slot = 1, .bytes = 1}}, {})
          .ok());
  EXPECT_EQ(refusal({{.unit = 2, .slot = 1, .bytes = 1}, {.unit = 2, .slot = 1, .bytes = 1}}, {}),
            "slot 1 of unit 2 was declared twice; give it another number");
}

TEST(ActivationPlan, ABudgetThatIsTooSmallIsToldWithItsParts) {
  const std::string rest =
      "make the batch smaller, keep fewer micro-batches in flight or make look_ahead smaller";
  const auto device = [](const std::vector<ActivationSlot>& slots, ActivationPlanOptions options) {
    options.chunk_bytes = 512;
    options.device_bytes = plan_of(slots, options).reserved_bytes;
    EXPECT_TRUE(make_activation_plan(slots, options).ok()) << "as much as it needs";
    --options.device_bytes;
    return refusal(slots, options, StatusCode::kOutOfMemory);
  };
  EXPECT_EQ(
      device(chain(8, kKeep), {.ranks = 2}),
      "the activations need 8.00 MiB (8388608 bytes) of the device, the budget is 8388607 bytes: kept 8.00 "
      "MiB, "
      "staging 0 B, gathered 0 B; partition them over the tensor-parallel ranks, spill (more of) them, " +
          rest);
  EXPECT_EQ(device(chain(8, kKeep), {}),
            "the activations need 8.00 MiB (8388608 bytes) of the device, the budget is 8388607 bytes: kept "
            "8.00 MiB, "
            "staging 0 B, gathered 0 B; spill (more of) them, " +
                rest);
  EXPECT_EQ(device(chain(8, kPartition), {.ranks = 2}),
            "the activations need 6.00 MiB (6291456 bytes) of the device, the budget is 6291455 bytes: kept "
            "4.00 MiB, "
            "staging 0 B, gathered 2.00 MiB; spill (more of) them, " +
                rest);
  EXPECT_EQ(
      device(chain(8, kPartitionAndSpill), {.ranks = 2}),
      "the activations need 3.00 MiB (3145728 bytes) of the device, the budget is 3145727 bytes: kept 0 B, "
      "staging 1.00 MiB, gathered 2.00 MiB; " +
          rest);
  EXPECT_TRUE(make_activation_plan(chain(8, kPartitionAndSpill), {.host_bytes = 8 * kBlock}).ok());
  EXPECT_EQ(refusal(chain(8, kPartitionAndSpill), {.host_bytes = 8 * kBlock - 1}, StatusCode::kOutOfMemory),
            "the spilled activations need 8.00 MiB (8388608 bytes) of pinned host memory, the limit is "
            "8388607 bytes; "
            "spill a smaller fraction, spill to files, or raise the limit");
}

// No more buffers than activations are read from elsewhere, in whole granules.
TEST(ActivationPlan, HasABufferForEachActivationThatIsReadAtOnce) {
  const auto gathered = [](int layers, const ActivationPlanOptions& options) {
    return plan_of(chain(layers, kPartition, 1000), options);
  };
  EXPECT_EQ(gathered(10, {.ranks = 2, .look_ahead = 3, .lease_limit = 2}).gathered_count, 5);
  EXPECT_EQ(gathered(2, {.ranks = 2, .micro_batches = 2, .look_ahead = 3, .lease_limit = 2}).gathered_count,
            4);
  EXPECT_EQ(gathered(1, {.ranks = 2, .look_ahead = 0}).gathered_count, 1);
  EXPECT_EQ(gathered(10, {.ranks = 1, .look_ahead = 3}).gathered_count, 0);
  // Slices of 512 bytes; whole again, 1024.
  const ActivationPlan plan = gathered(10, {.ranks = 2, .look_ahead = 1, .chunk_bytes = 4096});
  EXPECT_EQ(plan.gathered_buffer_bytes, 1024u);
  EXPECT_EQ(plan.kept_bytes, 10u * 512);
  EXPECT_EQ(plan.reserved_bytes, 8192u);
  // The largest one decides, wherever it is.
  for (const int largest : {0, 1, 2}) {
    std::vector<ActivationSlot> slots = chain(3, kPartitionAndSpill, 1000);
    slots[static_cast<std::size_t>(largest)].bytes = 3000;
    const ActivationPlan mixed = plan_of(slots, {.ranks = 2});
    EXPECT_EQ(mixed.gathered_buffer_bytes, 3072u) << largest;
    EXPECT_EQ(mixed.staging_buffer_bytes, 1536u) << largest;
  }
  // No more is spilled than there is.
  const ActivationPlan alone = plan_of(chain(1, kPartitionAndSpill, 1000), {});
  EXPECT_EQ(alone.places[0].spilled_bytes, 1000u);
  EXPECT_EQ(alone.places[0].kept_bytes, 0u);
  EXPECT_EQ(alone.host_spilled_bytes, 1024u);
  const ActivationPlan odd = plan_of(chain(3, kPartitionAndSpill, 1001), {.ranks = 2, .tier = Tier::kFile});
  EXPECT_EQ(odd.spilled_bytes_per_micro_batch, 3u * 512);
  EXPECT_EQ(odd.staging_buffer_bytes, 512u);
  EXPECT_EQ(odd.file_bytes, 3u * 4096);
  EXPECT_EQ(odd.host_spilled_bytes, 0u);
}

TEST(ActivationPlan, FilePiecesAreAPartOfTheirBudget) {
  const auto piece = [](std::uint64_t staging_bytes, std::uint64_t slot_bytes) {
    const ActivationPlan plan = plan_of(chain(2, kPartitionAndSpill, slot_bytes),
                                        {.tier = Tier::kFile, .file_staging_bytes = staging_bytes});
    EXPECT_EQ(plan.host_staging_bytes, 8 * plan.file_piece_bytes);
    return plan.file_piece_bytes;
  };
  constexpr std::uint64_t kGranule = 64u << 10;
  EXPECT_EQ(piece(8 * kGranule, kBlock), kGranule);
  EXPECT_EQ(piece(1, kBlock), kGranule);
  EXPECT_EQ(piece(8 * 5 * kGranule, kBlock), 5 * kGranule);
  EXPECT_EQ(piece(8 * 6 * kGranule - 1, kBlock), 5 * kGranule);
  EXPECT_EQ(piece(std::uint64_t{1} << 30, kBlock), kBlock);
  EXPECT_EQ(piece(std::uint64_t{1} << 30, kBlock + 1), kBlock + kGranule);
  EXPECT_EQ(plan_of(chain(2, kPartitionAndSpill), {}).file_piece_bytes, 0u);
  EXPECT_EQ(plan_of(chain(2, kKeep), {.tier = Tier::kFile}).file_piece_bytes, 0u);
}

TEST(ActivationPlan, TheLookAheadNeedsTheTimesOfItsPlacements) {
  const auto message = [](ActivationPlacement placement, double fetch, double gather, double recompute) {
    std::vector<ActivationSlot> slots = chain(4, placement);
    for (ActivationSlot& slot : slots) slot.recompute_seconds = recompute;
    return make_activation_plan(slots, {.ranks = placement == kPartition ? 2 : 1,
                                        .look_ahead = kAutoLookAhead,
                                        .fetch_bytes_per_second = fetch,
                                        .gather_bytes_per_second = gather})
        .status()
        .message();
  };
  const std::string missing =
      "the look-ahead of saved activations is to follow from their times, and some are missing; give the "
      "times "
      "of recomputation, the bytes per second of fetches where they spill and of gathers where they are "
      "partitioned, or give the look-ahead as a number";
  EXPECT_EQ(message(kPartitionAndSpill, 1e9, 0, 1), "");
  EXPECT_EQ(message(kPartitionAndSpill, 0, 1e9, 1), missing);
  EXPECT_EQ(message(kPartitionAndSpill, 1e9, 0, 0), missing);
  EXPECT_EQ(message(kPartition, 0, 1e9, 1), "");
  EXPECT_EQ(message(kPartition, 1e9, 0, 1), missing);
  EXPECT_EQ(message(kPartition, 0, 1e9, 0), missing);
  EXPECT_EQ(message(kKeep, 0, 0, 0), "");
}

TEST(ActivationPlan, ItsFingerprintNamesEachFigure) {
  std::vector<ActivationSlot> slots = chain(3, kPartitionAndSpill);
  slots[0].placement = kKeep;
  slots[1].shared = false;
  slots[1].slot = 7;
  slots[2].spill_fraction = 0.5;
  slots[2].state_bytes = 16;
  const ActivationPlan plan = plan_of(slots, {.ranks = 2,
                                              .micro_batches = 3,
                                              .look_ahead = 4,
                                              .lease_limit = 5,
                                              .staging_count = 6,
                                              .tier = Tier::kFile,
                                              .chunk_bytes = 512});
  EXPECT_EQ(
      plan.fingerprint_text(),
      "tensor-parallel 2\nmicro-batches 3\nlook-ahead 4\nleases 5\nstaging-count 6\ntier nvme\nchunk 512\n"
      "activation:0.0 1048576 bytes, shared, keep, spilled 0, state 0\n"
      "activation:1.7 1048576 bytes, partition+spill, spilled 1048576, state 0\n"
      "activation:2.0 1048576 bytes, shared, partition+spill, spilled 262144, state 16\n");
}

}  // namespace
}  // namespace forebay::testing
