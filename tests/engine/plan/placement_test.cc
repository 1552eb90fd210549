// The placements of a plan compared with an independent account: the bytes that ARCHITECTURE.md, "The memory
// contract", gives to each unit.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "forebay/plan.h"
#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::uint64_t kLeaf = 512;

// Tied, partly frozen, entirely frozen, replicated and shared units.
ModelShape model_with_everything(bool shared) {
  ModelShape model;
  model.activation_bytes = 1'000'003;
  model.units.push_back({.name = "embedding",
                         .parameters = {{.name = "words", .count = 30'007}},
                         .backward_reads_parameters = false,
                         .shared_by = shared ? 3 : 1});
  for (int layer = 0; layer < 4; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    model.units.push_back({.name = name,
                           .parameters = {{.name = name + ".weight", .count = 12'345},
                                          {.name = name + ".bias", .count = 1, .group = 1},
                                          {.name = name + ".scale", .count = 511, .replicated = true}}});
  }
  model.units[2].parameters.push_back({.name = "partly frozen", .count = 10'001, .frozen = true});
  model.units.push_back({.name = "frozen", .parameters = {{.name = "all", .count = 2'049, .frozen = true}}});
  model.units.push_back({.name = "head",
                         .parameters = {{.name = "norm", .count = 13, .group = 1},
                                        {.name = "bias", .count = 33, .frozen = true}},
                         .tied = {{.unit = 0, .index = 0}}});
  return model;
}

struct Ranks {
  int count;
  int group;
  bool hybrid;
};

// Every ZeRO stage, type, offload, tier and way to add up micro-steps, for several layouts of ranks.
template <typename Check>
void for_all_options(Check check) {
  for (const Ranks& ranks : {Ranks{1, 1, false}, {3, 1, false}, {4, 1, false}, {4, 2, false}, {4, 2, true}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const DataType dtype : {DataType::kFloat32, DataType::kBfloat16}) {
        for (const auto& [micro_steps, accumulate] :
             {std::pair(1, Accumulate::kShard), {3, Accumulate::kShard}, {3, Accumulate::kLocal}}) {
          for (const Offload offload :
               {Offload::kNone, Offload::kOptimizer, Offload::kOptimizerAndParameters}) {
            for (const Tier tier : {Tier::kPinned, Tier::kFile}) {
              for (const int device_units : {0, 2}) {
                if (stage >= 2 && accumulate == Accumulate::kLocal) continue;
                if (stage < 3 && offload == Offload::kOptimizerAndParameters) continue;
                if (offload == Offload::kNone && (tier != Tier::kPinned || device_units != 0)) continue;
                PlanOptions options{{.stage = stage,
                                     .dtype = dtype,
                                     .micro_steps = micro_steps,
                                     .accumulate = accumulate,
                                     .group = ranks.group,
                                     .shard_within_group = ranks.hybrid,
                                     .bucket_bytes = 20'000,
                                     .offload = offload,
                                     .tier = tier},
                                    ranks.count};
                options.device_units = device_units;
                check(options);
              }
            }
          }
        }
      }
    }
  }
}

std::string text_of(const PlanOptions& options) {
  return "stage " + std::to_string(options.stage) + " ranks " + std::to_string(options.ranks) + " group " +
         std::to_string(options.group) + (options.shard_within_group ? " hybrid " : " ") +
         data_type_name(options.dtype) + " micro-steps " + std::to_string(options.micro_steps) +
         (options.accumulate == Accumulate::kLocal ? " local " : " shard ") + offload_name(options.offload) +
         " on " + tier_name(options.tier) + " but " + std::to_string(options.device_units);
}

Plan plan_of(const ModelShape& model, const PlanOptions& options) {
  Result<Plan> plan = make_plan(model, options);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return std::move(plan).value();
}

TEST(StatePlacement, FillsEveryPoolWithoutGaps) {
  const ModelShape model = model_with_everything(true);
  for_all_options([&](const PlanOptions& options) {
    SCOPED_TRACE(text_of(options));
    const Plan plan = plan_of(model, options);
    std::array<std::uint64_t, kPoolCount> ends{};
    for (const StatePlacement& placement : plan.placements) {
      std::uint64_t& end = ends[static_cast<std::size_t>(placement.pool)];
      EXPECT_EQ(placement.offset, end);
      end += placement.bytes;
    }
    for (int pool = 0; pool < kPoolCount; ++pool)
      EXPECT_EQ(plan.bytes_in(static_cast<Pool>(pool)), ends[static_cast<std::size_t>(pool)]);
  });
}

TEST(StatePlacement, AddsUpToThePlansBytes) {
  const ModelShape model = model_with_everything(true);
  for_all_options([&](const PlanOptions& options) {
    SCOPED_TRACE(text_of(options));
    const Plan plan = plan_of(model, options);
    EXPECT_EQ(plan.bytes.parameters, plan.bytes_in(Pool::kParameters));
    EXPECT_EQ(plan.bytes.gradients, plan.bytes_in(Pool::kGradients));
    EXPECT_EQ(plan.bytes.optimizer, plan.bytes_in(Pool::kOptimizer));
    EXPECT_EQ(plan.bytes.gathered, plan.bytes_in(Pool::kGathered));
    EXPECT_EQ(plan.bytes.buckets, plan.bytes_in(Pool::kBuckets));
    EXPECT_EQ(plan.bytes.activations, plan.bytes_in(Pool::kActivations));
    EXPECT_EQ(plan.host_bytes.total(), plan.bytes_in(Pool::kHost) + plan.bytes_in(Pool::kStaging));
    EXPECT_EQ(plan.file_bytes.total(), plan.bytes_in(Pool::kFiles));
  });
}

TEST(StatePlacement, StartsOnWholeAccessesAndPlacesNothingTwice) {
  const ModelShape model = model_with_everything(false);
  for_all_options([&](const PlanOptions& options) {
    SCOPED_TRACE(text_of(options));
    std::set<std::pair<Role, int>> seen;
    for (const StatePlacement& placement : plan_of(model, options).placements) {
      EXPECT_TRUE(seen.insert({placement.role, placement.index}).second);
      // The control follows the norms, which are doubles; everything else is accessed 16 bytes at a time.
      EXPECT_EQ(placement.offset % (placement.role == Role::kControl ? 8 : 512), 0u)
          << static_cast<int>(placement.role);
    }
  });
}

// The independent account. Keys: pool, then role.
using Account = std::map<std::pair<Pool, Role>, std::uint64_t>;

// The states of one unit of `trainable` and `frozen` padded elements.
Account expected_of_unit(const PlanOptions& o, bool offloaded, std::uint64_t trainable,
                         std::uint64_t frozen) {
  const std::uint64_t shards = static_cast<std::uint64_t>(o.shard_within_group ? o.group : o.ranks);
  const std::uint64_t size = o.dtype == DataType::kFloat32 ? 4 : 2;
  const std::uint64_t slice = trainable / shards;
  const std::uint64_t updated = o.stage == 0 ? trainable : slice;
  const bool sums = o.micro_steps > 1 && o.accumulate == Accumulate::kShard;
  const bool parameters_offloaded = offloaded && o.offload == Offload::kOptimizerAndParameters;
  const Pool below = o.tier == Tier::kFile ? Pool::kFiles : Pool::kHost;
  Account account;
  if (o.stage < 3) account[{Pool::kParameters, Role::kParameters}] = size * (trainable + frozen);
  if (o.stage == 3 && !parameters_offloaded)
    account[{Pool::kParameters, Role::kParameterShard}] = size * (trainable + frozen) / shards;
  if (o.stage < 2) account[{Pool::kGradients, Role::kGradients}] = size * trainable;
  if (sums && (!offloaded || o.stage == 0)) account[{Pool::kGradients, Role::kAccumulator}] = 4 * slice;
  if (!sums && !offloaded && o.stage >= 2) account[{Pool::kGradients, Role::kGradientShard}] = size * slice;
  const Pool states = offloaded ? below : Pool::kOptimizer;
  if (size == 2 || offloaded) account[{states, Role::kMaster}] = 4 * updated;
  account[{states, Role::kM}] = 4 * updated;
  account[{states, Role::kV}] = 4 * updated;
  if (offloaded) account[{Pool::kHost, Role::kHostGradients}] = (sums && o.stage > 0 ? 4 : size) * updated;
  if (parameters_offloaded && size == 2) account[{below, Role::kTrainableSlice}] = size * slice;
  if (parameters_offloaded && frozen > 0) account[{below, Role::kFrozenSlice}] = size * frozen / shards;
  for (auto& [key, bytes] : account) {
    if (key.first == Pool::kFiles) bytes = round_up(bytes, 4096);  // Files have whole pages.
  }
  return account;
}

std::uint64_t padded_count(const UnitShape& unit, bool frozen, int ranks) {
  std::uint64_t end = 0;
  for (const ParameterShape& parameter : unit.parameters) {
    if (parameter.frozen == frozen) end = round_up(end, kParameterAlignment) + parameter.count;
  }
  return round_up(end, kLeaf * static_cast<std::uint64_t>(ranks));
}

bool is_of_unit(Role role) {
  return role < Role::kSlot;
}

TEST(StatePlacement, GivesEachUnitTheBytesOfTheMemoryContract) {
  for (const bool shared : {false, true}) {
    const ModelShape model = model_with_everything(shared);
    for_all_options([&](const PlanOptions& options) {
      SCOPED_TRACE(text_of(options));
      const Plan plan = plan_of(model, options);
      const int unit_count = static_cast<int>(model.units.size());
      // A shared unit stays on the device.
      const int on_device =
          options.offload == Offload::kNone ? unit_count : std::max(options.device_units, shared ? 1 : 0);
      ASSERT_EQ(plan.device_units, on_device);
      std::vector<Account> actual(model.units.size());
      for (const StatePlacement& placement : plan.placements) {
        if (!is_of_unit(placement.role)) continue;
        actual[static_cast<std::size_t>(placement.index)][{placement.pool, placement.role}] = placement.bytes;
      }
      for (int unit = 0; unit < unit_count; ++unit) {
        const UnitShape& shape = model.units[static_cast<std::size_t>(unit)];
        EXPECT_EQ(actual[static_cast<std::size_t>(unit)],
                  expected_of_unit(options, unit >= on_device, padded_count(shape, false, options.ranks),
                                   padded_count(shape, true, options.ranks)))
            << shape.name;
      }
    });
  }
}

// The engine's own placements, from the largest slice of an offloaded unit and the columns of a bucket.
Account expected_of_transit(const Plan& plan) {
  const PlanOptions& o = plan.options;
  const std::uint64_t size = o.dtype == DataType::kFloat32 ? 4 : 2;
  const bool sums = o.micro_steps > 1 && o.accumulate == Accumulate::kShard && o.stage > 0;
  const bool parameters = o.offload == Offload::kOptimizerAndParameters;
  const auto shards = static_cast<std::uint64_t>(o.shard_within_group ? o.group : o.ranks);
  std::uint64_t largest = 0;
  for (auto u = static_cast<std::size_t>(plan.device_units); u < plan.layouts.size(); ++u)
    largest = std::max(largest, plan.layouts[u].trainable_count / shards);
  Account account;
  if (largest == 0) return account;
  if (sums) {
    account[{Pool::kGradients, Role::kTransit}] = 2 * 4 * plan.bucket_columns;
    account[{Pool::kHost, Role::kHostSum}] = 4 * plan.bucket_columns;
  } else if (o.stage >= 2) {
    account[{Pool::kGradients, Role::kTransit}] = 2 * size * largest;
  }
  if (o.tier != Tier::kFile) return account;
  // The default staging is far larger than any unit here, so a piece is the largest updated range.
  const std::uint64_t piece = round_up(o.stage == 0 ? largest * shards : largest, 32'768);
  EXPECT_EQ(plan.piece_count, piece);
  account[{Pool::kStaging, Role::kPassBuffers}] = 6 * piece * (parameters && size == 2 ? 14 : 12);
  if (parameters) account[{Pool::kStaging, Role::kMoverBuffers}] = 4 * piece * 4;
  return account;
}

TEST(StatePlacement, KeepsTwoGradientsInTransitAndAFewBuffers) {
  const ModelShape model = model_with_everything(true);
  for_all_options([&](const PlanOptions& options) {
    SCOPED_TRACE(text_of(options));
    const Plan plan = plan_of(model, options);
    Account actual;
    for (const StatePlacement& placement : plan.placements) {
      if (placement.role >= Role::kTransit && placement.role != Role::kHostRest)
        actual[{placement.pool, placement.role}] += placement.bytes;
    }
    EXPECT_EQ(actual, expected_of_transit(plan));
    EXPECT_EQ(plan.bytes_in(Pool::kHost) % 4096, 0u);
    EXPECT_LT(plan.bytes_of(Role::kHostRest), 4096u);
  });
}

TEST(StatePlacement, PlacesSlotsAndBucketsOfTheirOwnSizes) {
  const ModelShape model = model_with_everything(true);
  for_all_options([&](const PlanOptions& options) {
    SCOPED_TRACE(text_of(options));
    const Plan plan = plan_of(model, options);
    std::vector<std::uint64_t> slots;
    std::vector<std::uint64_t> sums;
    for (const StatePlacement& placement : plan.placements) {
      if (placement.role == Role::kSlot) slots.push_back(placement.bytes);
      if (placement.role == Role::kBucketSum) sums.push_back(placement.bytes);
    }
    EXPECT_EQ(slots, plan.slots.slot_bytes);
    ASSERT_EQ(sums.size(), 2u);
    EXPECT_EQ(sums[0], sums[1]);
    EXPECT_GE(sums[0], 4 * plan.bucket_columns);
    const auto shards =
        static_cast<std::uint64_t>(options.shard_within_group ? options.group : options.ranks);
    EXPECT_EQ(plan.bytes_of(Role::kFused),
              round_up(shards * plan.fused_columns * element_bytes(options.dtype), 512));
    EXPECT_EQ(plan.bytes_of(Role::kNorms), 8 * model.units.size());
    EXPECT_EQ(plan.bytes_of(Role::kActivations), round_up(1'000'003, 512));
  });
}

}  // namespace
}  // namespace forebay
