// Which offload setting is chosen, and why, for given rates and limits. Nothing is measured.
#include "runtime/command/machine/offload_choice.h"

#include <gtest/gtest.h>

#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::uint64_t kCount =
    1 << 20;  // Elements of each of the two units: whole leaves and shards on two ranks.

ModelShape model() {
  return {.units = {{.name = "a", .parameters = {{.name = "a.w", .count = kCount}}},
                    {.name = "b", .parameters = {{.name = "b.w", .count = kCount}}}}};
}

PlanOptions options(int stage, int ranks = 1, DataType dtype = DataType::kBfloat16) {
  PlanOptions options;
  options.stage = stage;
  options.ranks = ranks;
  options.dtype = dtype;
  options.bucket_bytes = 64 << 10;
  options.chunk_bytes = 64 << 10;
  options.staging_bytes = 8 << 20;
  return options;
}

TierLimits room() {
  return {.device_bytes = 1_GiB, .host_bytes = 1_GiB, .file_bytes = 1_GiB};
}

// Round numbers: a step of all elements takes 2 s down, 1 s up, 3 s both ways, 4 s of AdamW.
TierRates rates() {
  constexpr double kElements = 2.0 * kCount;
  return {.to_device_bytes_per_second = 2 * kElements,
          .from_device_bytes_per_second = kElements,
          .both_bytes_per_second = 4 * kElements / 3,
          .adamw_elements_per_second = kElements / 4,
          .file_read_bytes_per_second = 4 * kElements,
          .file_write_bytes_per_second = 3 * kElements};
}

OffloadChoice choose(const PlanOptions& plan, const TierLimits& limits, const TierRates& given = rates()) {
  const auto choice = choose_offload(model(), plan, limits, given);
  EXPECT_TRUE(choice.ok()) << choice.status().to_string();
  return choice.value();
}

const OffloadEstimate& of(const OffloadChoice& choice, const std::string& name) {
  for (const OffloadEstimate& one : choice.estimates) {
    if (setting_name(one.offload, one.tier) == name) return one;
  }
  ADD_FAILURE() << "no setting is " << name;
  return choice.estimates.front();
}

std::string chosen(const OffloadChoice& choice) {
  if (choice.chosen < 0) return "";
  const OffloadEstimate& one = choice.estimates[static_cast<std::size_t>(choice.chosen)];
  return setting_name(one.offload, one.tier);
}

TEST(OffloadChoice, IsNoneWhereThereIsRoom) {
  const OffloadChoice choice = choose(options(2), room());

  EXPECT_EQ(choice.estimates.size(), 3u);
  EXPECT_EQ(chosen(choice), "none");
  EXPECT_EQ(choice.reason, "none fits and adds nothing");
  EXPECT_EQ(of(choice, "none").added_seconds, 0);
  EXPECT_EQ(of(choice, "none").host_bytes, 0u);
}

TEST(OffloadChoice, EstimatesEachPieceAtItsRate) {
  const OffloadChoice choice = choose(options(2), room());

  const OffloadEstimate& on_cpu = of(choice, "optimizer on cpu");
  EXPECT_DOUBLE_EQ(on_cpu.down_seconds, 2);
  EXPECT_DOUBLE_EQ(on_cpu.up_seconds, 1);
  EXPECT_DOUBLE_EQ(on_cpu.both_seconds, 3);
  EXPECT_DOUBLE_EQ(on_cpu.adamw_seconds, 4);
  EXPECT_DOUBLE_EQ(on_cpu.file_seconds, 0);
  EXPECT_DOUBLE_EQ(on_cpu.added_seconds, 4);
  EXPECT_EQ(on_cpu.bound_by, "AdamW on the host");
  EXPECT_EQ(on_cpu.host_bytes, 14 * 2 * kCount);
  const OffloadEstimate& on_nvme = of(choice, "optimizer on nvme");
  EXPECT_DOUBLE_EQ(on_nvme.file_seconds, 3 + 4);  // 12 bytes an element at 4 and 3 elements' bytes a second.
  EXPECT_DOUBLE_EQ(on_nvme.added_seconds, 7);
  EXPECT_EQ(on_nvme.bound_by, "files");
  EXPECT_EQ(on_nvme.file_bytes, 12 * 2 * kCount);
}

TEST(OffloadChoice, SharesTheHostBetweenItsRanks) {
  TierLimits limits = room();
  limits.host_ranks = 2;

  const OffloadChoice two = choose(options(2, 2), limits);
  limits.device_in_host = true;
  const OffloadChoice in_host = choose(options(2, 2), limits);

  // Each rank has half of the elements and half of the host, but a link of its own.
  EXPECT_DOUBLE_EQ(of(two, "optimizer on nvme").adamw_seconds, 4);
  EXPECT_DOUBLE_EQ(of(two, "optimizer on nvme").file_seconds, 7);
  EXPECT_DOUBLE_EQ(of(two, "optimizer on nvme").down_seconds, 1);
  EXPECT_DOUBLE_EQ(of(in_host, "optimizer on nvme").down_seconds, 2);
  // At stage 0 every rank updates everything.
  EXPECT_DOUBLE_EQ(of(choose(options(0, 2), limits), "optimizer on cpu").adamw_seconds, 8);
}

TEST(OffloadChoice, HasParametersBelowTheDeviceAtStage3) {
  const OffloadChoice choice = choose(options(3), room());

  EXPECT_EQ(choice.estimates.size(), 5u);
  const OffloadEstimate& on_cpu = of(choice, "optimizer+parameters on cpu");
  const OffloadEstimate& on_nvme = of(choice, "optimizer+parameters on nvme");
  EXPECT_EQ(on_cpu.host_bytes, 16 * 2 * kCount);
  EXPECT_LT(on_cpu.device_bytes, of(choice, "optimizer on cpu").device_bytes);
  // Every unit comes up for its gather, on either tier; two units stay where the pass turns.
  EXPECT_DOUBLE_EQ(on_cpu.up_seconds, 1);
  EXPECT_DOUBLE_EQ(on_nvme.up_seconds, 1);
  // 12 + 2 bytes an element are read, and as many written.
  EXPECT_DOUBLE_EQ(on_nvme.file_seconds, 14.0 / 4 + 14.0 / 3);
}

TEST(OffloadChoice, TakesTheCheapestOfThoseThatFit) {
  TierLimits limits = room();
  limits.device_bytes = of(choose(options(2), room()), "optimizer on cpu").device_bytes;

  const OffloadChoice on_cpu = choose(options(2), limits);
  TierRates slow = rates();
  slow.adamw_elements_per_second /= 100;  // Then files are as good, and the first stays.
  const OffloadChoice still_on_cpu = choose(options(2), limits, slow);
  limits.host_bytes = 14 * 2 * kCount - 1;
  const OffloadChoice on_nvme = choose(options(2), limits);

  EXPECT_EQ(chosen(on_cpu), "optimizer on cpu");
  EXPECT_NE(on_cpu.reason.find("none needs"), std::string::npos) << on_cpu.reason;
  EXPECT_NE(on_cpu.reason.find("optimizer on cpu fits and adds 4.000 s (AdamW on the host)"),
            std::string::npos)
      << on_cpu.reason;
  EXPECT_NE(on_cpu.reason.find("optimizer on nvme would add 7.000 s (files)"), std::string::npos)
      << on_cpu.reason;
  EXPECT_EQ(chosen(still_on_cpu), "optimizer on cpu");
  EXPECT_EQ(chosen(on_nvme), "optimizer on nvme");
  EXPECT_NE(
      on_nvme.reason.find("optimizer on cpu needs 28.00 MiB of host memory, and the host has 28.00 MiB"),
      std::string::npos)
      << on_nvme.reason;
}

TEST(OffloadChoice, CountsADeviceInHostMemoryThereToo) {
  TierLimits limits = room();
  const std::uint64_t device = of(choose(options(2), limits), "none").device_bytes;
  limits.host_ranks = 2;
  limits.host_bytes = 2 * device - 1;

  EXPECT_TRUE(of(choose(options(2), limits), "none").fits);
  limits.device_in_host = true;
  const OffloadChoice choice = choose(options(2), limits);
  EXPECT_FALSE(of(choice, "none").fits);
  EXPECT_NE(of(choice, "none").lacks.find("host memory for 2 ranks, the device's included"),
            std::string::npos)
      << of(choice, "none").lacks;
}

TEST(OffloadChoice, SaysWhatIsMissingWhereNothingFits) {
  TierLimits limits = room();
  limits.device_bytes = 64 << 10;
  ModelShape large = model();
  large.activation_bytes = 512_MiB;

  const auto choice = choose_offload(large, options(2), limits, rates());

  ASSERT_TRUE(choice.ok());
  EXPECT_EQ(choice.value().chosen, -1);
  EXPECT_NE(choice.value().reason.find("the budget is 64.00 KiB"), std::string::npos)
      << choice.value().reason;
  EXPECT_NE(choice.value().reason.find("activations with 512.00 MiB: use a smaller --batch"),
            std::string::npos)
      << choice.value().reason;
}

TEST(OffloadChoice, NeedsRoomForItsFiles) {
  TierLimits limits = room();
  limits.device_bytes = of(choose(options(2), room()), "optimizer on cpu").device_bytes;
  limits.host_bytes = 14 * 2 * kCount - 1;
  limits.file_bytes = 12 * 2 * kCount - 1;

  const OffloadChoice choice = choose(options(2), limits);

  EXPECT_EQ(choice.chosen, -1);
  EXPECT_NE(of(choice, "optimizer on nvme").lacks.find("24.00 MiB of files, and the directories have"),
            std::string::npos);
  // The device has room for two of them, so the advice is about the host.
  EXPECT_EQ(choice.reason.find("optimizer on cpu needs 28.00 MiB of host memory"), 0u) << choice.reason;
  EXPECT_NE(choice.reason.find("--host-ranks"), std::string::npos) << choice.reason;
}

TEST(OffloadChoice, CostsNothingWhereNothingWasMeasured) {
  const OffloadChoice choice = choose(options(2), room(), {});

  for (const OffloadEstimate& one : choice.estimates) EXPECT_EQ(one.added_seconds, 0);
  EXPECT_EQ(chosen(choice), "none");
}

TEST(OffloadChoice, PassesOnWhatThePlanRefuses) {
  PlanOptions wrong = options(2);
  wrong.ranks = 0;

  EXPECT_EQ(choose_offload(model(), wrong, room(), rates()).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
