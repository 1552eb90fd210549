// The exact bytes of every pool, and the choices of kAuto.

#include "forebay/activation_plan.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <string>

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
  EXPECT_NE(refusal(chain(4, kPartitionAndSpill), {.look_ahead = kAutoLookAhead}).find("recompute_seconds"),
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

}  // namespace
}  // namespace forebay::testing
