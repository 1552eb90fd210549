// make_plan compared with the formulas of ARCHITECTURE.md, "The memory contract", for units of awkward sizes.

#include "forebay/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "forebay/error.h"
#include "forebay/units.h"
#include "runtime/engine/plan/schedule.h"

namespace forebay {
namespace {

constexpr std::uint64_t kLeaf = 512;
constexpr int kRanks[] = {1, 3, 4, 7};
constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16};

// An embedding, `layers` equal layers, and a head that is tied to the embedding. The counts have few
// divisors.
ModelShape awkward_model(int layers) {
  ModelShape model;
  model.units.push_back({.name = "embedding",
                         .parameters = {{.name = "words", .count = 300'007}},
                         .backward_reads_parameters = false});
  for (int layer = 0; layer < layers; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    model.units.push_back({.name = name,
                           .parameters = {{.name = name + ".weight", .count = 123'457},
                                          {.name = name + ".bias", .count = 1, .group = 1},
                                          {.name = name + ".scale", .count = 511, .group = 1}}});
  }
  model.units.push_back({.name = "head",
                         .parameters = {{.name = "norm", .count = 13, .group = 1}},
                         .tied = {{.unit = 0, .index = 0}}});
  return model;
}

Plan plan_of(const ModelShape& model, const PlanOptions& options) {
  Result<Plan> plan = make_plan(model, options);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return plan.value();
}

std::uint64_t padded_count(const Plan& plan) {
  std::uint64_t count = 0;
  for (const UnitLayout& layout : plan.layouts) count += layout.trainable_count;
  return count;
}

template <typename Check>
void for_all_options(Check check) {
  for (const int ranks : kRanks) {
    for (const DataType dtype : kTypes) {
      for (const int micro_steps : {1, 3}) {
        for (int stage = 0; stage <= 3; ++stage) {
          const PlanOptions options{
              {.stage = stage, .dtype = dtype, .micro_steps = micro_steps, .bucket_bytes = 64_KiB}, ranks};
          SCOPED_TRACE("stage " + std::to_string(stage) + " ranks " + std::to_string(ranks) + " " +
                       data_type_name(dtype) + " micro-steps " + std::to_string(micro_steps));
          check(options);
        }
      }
    }
  }
}

TEST(Plan, PersistentPoolsAreTheFormulasOverThePaddedParameters) {
  const ModelShape model = awkward_model(5);
  for_all_options([&](const PlanOptions& options) {
    const Plan plan = plan_of(model, options);

    const std::uint64_t psi = padded_count(plan);
    const std::uint64_t n = static_cast<std::uint64_t>(options.ranks);
    const bool wide = options.dtype == DataType::kFloat32;
    const std::uint64_t element = wide ? 4 : 2;
    const std::uint64_t states = wide ? 8 : 12;  // m and v; with 2-byte types the master too.
    ASSERT_EQ(psi % (n * kLeaf), 0u);
    EXPECT_EQ(plan.bytes.parameters, options.stage == 3 ? element * psi / n : element * psi);
    EXPECT_EQ(plan.bytes.optimizer, options.stage == 0 ? states * psi : states * psi / n);
    const bool accumulates = options.micro_steps > 1;
    const std::uint64_t whole = options.stage <= 1 ? element * psi : 0;
    const std::uint64_t shard = accumulates ? 4 * psi / n : options.stage >= 2 ? element * psi / n : 0;
    EXPECT_EQ(plan.bytes.gradients, whole + shard);
  });
}

TEST(Plan, PaddingIsBoundedByTheAlignmentAndOneGranulePerUnit) {
  const ModelShape model = awkward_model(5);
  for (const int ranks : kRanks) {
    const Plan plan = plan_of(model, {{.stage = 3}, ranks});
    for (std::size_t u = 0; u < model.units.size(); ++u) {
      const std::vector<ParameterShape>& parameters = model.units[u].parameters;
      std::uint64_t end = 0;
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        const UnitLayout::Place& place = plan.layouts[u].places[p];
        EXPECT_EQ(place.offset % kParameterAlignment, 0u);
        EXPECT_GE(place.offset, end);
        EXPECT_LT(place.offset, end + kParameterAlignment);
        EXPECT_EQ(place.count, parameters[p].count);
        end = place.offset + place.count;
      }
      const std::uint64_t granule = kLeaf * static_cast<std::uint64_t>(ranks);
      EXPECT_GE(plan.layouts[u].trainable_count, end);
      EXPECT_LT(plan.layouts[u].trainable_count, end + kParameterAlignment + granule);
      EXPECT_EQ(plan.layouts[u].trainable_count % granule, 0u);
    }
  }
}

TEST(Plan, BoundedPoolsDoNotGrowWithDepth) {
  for_all_options([&](const PlanOptions& options) {
    const PoolBytes two = plan_of(awkward_model(2), options).bytes;
    const PoolBytes eight = plan_of(awkward_model(8), options).bytes;
    EXPECT_EQ(two.gathered, eight.gathered);
    EXPECT_EQ(two.buckets, eight.buckets);
    EXPECT_LT(two.model_states(), eight.model_states());
  });
}

// As in forebay-gpt: an embedding, and blocks of 12 hidden^2 parameters.
ModelShape transformer(int layers, std::uint64_t hidden) {
  ModelShape model;
  model.units.push_back({.name = "embedding", .parameters = {{.name = "words", .count = 50'257 * hidden}}});
  for (int layer = 0; layer < layers; ++layer) {
    const std::string name = "block" + std::to_string(layer);
    model.units.push_back(
        {.name = name, .parameters = {{.name = name + ".all", .count = 12 * hidden * hidden}}});
  }
  return model;
}

TEST(Plan, BucketsAreTheSameForTenMillionAndABillionParameters) {
  const ModelShape small = transformer(12, 168);
  const ModelShape large = transformer(48, 1280);
  ASSERT_NEAR(static_cast<double>(small.parameter_count()), 12.5e6, 0.1e6);
  ASSERT_GT(large.parameter_count(), 1'000'000'000u);
  for (const std::uint64_t bucket : {1u << 20, 16u << 20}) {
    for (const DataType type : {DataType::kFloat32, DataType::kBfloat16}) {
      for (int stage = 0; stage < 4; ++stage) {
        for (const int micro_steps : {1, 4}) {
          const PlanOptions options{
              {.stage = stage, .dtype = type, .micro_steps = micro_steps, .bucket_bytes = bucket}, 4};
          const std::uint64_t of_small = plan_of(small, options).bytes.buckets;
          const std::uint64_t of_large = plan_of(large, options).bytes.buckets;
          EXPECT_GE(of_large, of_small) << "stage " << stage << ", bucket " << bucket;
          // The norm of each unit, rounded to a granule.
          EXPECT_LE(of_large - of_small, 1024u) << "stage " << stage << ", bucket " << bucket;
        }
      }
    }
  }
}

TEST(Plan, GathersNothingBelowStage2AndNoParametersBelowStage3) {
  const ModelShape model = awkward_model(4);
  const auto gathered = [&](int stage) {
    return plan_of(model, {{.stage = stage, .dtype = DataType::kBfloat16}, 3}).bytes.gathered;
  };
  EXPECT_EQ(gathered(0), 0u);
  EXPECT_EQ(gathered(1), 0u);
  EXPECT_GT(gathered(2), 0u);
  EXPECT_EQ(gathered(3), 2 * gathered(2));  // Slots of parameters as large as those of gradients.
}

TEST(Plan, GivesTheOwnerOfATiedParameterASlotOfItsOwn) {
  ModelShape tied = awkward_model(4);
  ModelShape untied = tied;
  untied.units.back().tied.clear();
  const PlanOptions options{{.stage = 3}, 4};

  const Plan with = plan_of(tied, options);
  const Plan without = plan_of(untied, options);

  EXPECT_EQ(with.bytes.parameters, without.bytes.parameters);  // The tied parameter has one owner.
  EXPECT_EQ(without.slots.slot_bytes.size(), 4u);              // Two of parameters, two of gradients.
  EXPECT_EQ(with.slots.slot_bytes.size(), 6u);
}

TEST(Plan, HasASlotForEachUnitThatARecordedOrderUsesAtOnce) {
  ModelShape model = awkward_model(4);
  model.units.back().tied.clear();
  PlanOptions options{{.stage = 3, .order_of_units = OrderOfUnits::kRecorded}, 4};
  const Plan unknown = plan_of(model, options);
  EXPECT_EQ(unknown.slots.slot_bytes, plan_of(model, {{.stage = 3}, 4}).slots.slot_bytes);
  // Units 1 and 2 together with 3, and 3 again in the backward pass.
  options.recorded_order = "0.1.2.3.4.5.5b.5r.3b.3r/0.1/1-2.1-3.2-3/";
  const Plan known = plan_of(model, options);
  EXPECT_EQ(known.slots.parameter_slot, (std::vector<int>{0, 0, 1, 2, 0, 0}));
  EXPECT_EQ(known.slots.gradient_slot, (std::vector<int>{3, 3, 3, 3, 3, 3}));
  EXPECT_EQ(known.bytes_in(Pool::kGathered), known.bytes.gathered);
  for (const char* const text : {"0", "0.6/0//", "0/0/0-7/", "0b.x/0//", "0/0//0-1 "}) {
    options.recorded_order = text;
    const Result<Plan> refused = make_plan(model, options);
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(refused.status().message().find("recorded_order()"), std::string::npos) << text;
  }
}

TEST(Plan, CountsAFrozenParameterOnlyAsAParameter) {
  for (const int stage : {0, 1, 2, 3}) {
    const PlanOptions options{{.stage = stage, .dtype = DataType::kBfloat16}, 3};
    ModelShape model = awkward_model(2);
    const Plan before = plan_of(model, options);
    model.units[1].parameters.push_back({.name = "frozen", .count = 10'001, .frozen = true});

    const Plan after = plan_of(model, options);

    const std::uint64_t padded = after.layouts[1].frozen_count;
    EXPECT_EQ(padded, round_up(10'001, 3 * kLeaf));
    EXPECT_EQ(after.bytes.parameters, before.bytes.parameters + 2 * padded / (stage == 3 ? 3 : 1));
    EXPECT_EQ(after.bytes.gradients, before.bytes.gradients);
    EXPECT_EQ(after.bytes.optimizer, before.bytes.optimizer);
    if (stage < 3) {
      EXPECT_EQ(after.wire_per_step, before.wire_per_step);
    }
  }
}

TEST(Plan, BucketsHaveTheOptionsSizeForEveryModel) {
  for (const std::uint64_t asked : {std::uint64_t{1}, 10'000 + std::uint64_t{7}, 64_KiB, 1_MiB}) {
    for (const int ranks : kRanks) {
      const Plan plan = plan_of(awkward_model(3),
                                {{.stage = 2, .dtype = DataType::kBfloat16, .bucket_bytes = asked}, ranks});
      const std::uint64_t slice_bytes = static_cast<std::uint64_t>(ranks) * 2;
      EXPECT_EQ(plan.bucket_columns % kLeaf, 0u);
      EXPECT_GE(plan.bucket_columns, kLeaf);
      EXPECT_LE(plan.bucket_columns * slice_bytes, std::max(asked, kLeaf * slice_bytes));
    }
  }
}

TEST(Plan, ReservedIsWholeChunksAndAtLeastTheTotal) {
  ModelShape model = awkward_model(3);
  model.activation_bytes = 1'000'003;
  for_all_options([&](PlanOptions options) {
    options.chunk_bytes = 256_KiB;
    const Plan plan = plan_of(model, options);
    EXPECT_EQ(plan.reserved_bytes % options.chunk_bytes, 0u);
    EXPECT_GE(plan.reserved_bytes, plan.bytes.total());
    EXPECT_LT(plan.reserved_bytes,
              plan.bytes.total() + (1 + plan.slots.slot_bytes.size()) * options.chunk_bytes);
    EXPECT_EQ(plan.bytes.activations, round_up(1'000'003, 512));
  });
}

TEST(Plan, ActivationRoomIsExactToOneGranule) {
  ModelShape model = awkward_model(3);
  for_all_options([&](PlanOptions options) {
    options.chunk_bytes = 256_KiB;
    for (const bool spillable : {false, true}) {
      options.spillable = spillable;
      model.activation_bytes = 0;
      const Plan bare = plan_of(model, options);
      for (const std::uint64_t more :
           {std::uint64_t{0}, std::uint64_t{1}, 256_KiB - 1, 256_KiB, 3'000'001ul}) {
        const std::uint64_t budget = bare.reserved_bytes + more;
        model.activation_bytes = bare.activation_room(budget);
        EXPECT_LE(plan_of(model, options).reserved_bytes, budget);
        model.activation_bytes += 1;
        EXPECT_GT(plan_of(model, options).reserved_bytes, budget);
      }
      EXPECT_EQ(bare.activation_room(bare.reserved_bytes - 1), 0u);
      EXPECT_EQ(bare.activation_room(0), 0u);
    }
  });
}

TEST(Plan, SendsTwoPsiBelowStage3AndAtMostThreeAtIt) {
  const ModelShape model = awkward_model(6);
  for_all_options([&](const PlanOptions& options) {
    const Plan plan = plan_of(model, options);

    const std::uint64_t n = static_cast<std::uint64_t>(options.ranks);
    const std::uint64_t k = static_cast<std::uint64_t>(options.micro_steps);
    const std::uint64_t element = element_bytes(options.dtype);
    // Psi (N-1)/N elements, padded, and the doubles that step() exchanges: three, and two for each unit.
    const std::uint64_t pass = padded_count(plan) / n * (n - 1) * element;
    const std::uint64_t norms = 8 * (n - 1) * (2 * model.units.size() + 3);
    EXPECT_EQ(plan.wire_per_step.received, plan.wire_per_step.sent);
    if (options.stage < 3) {
      EXPECT_EQ(plan.wire_per_step.sent, (k + 1) * pass + norms);
    } else {
      EXPECT_LE(plan.wire_per_step.sent, 3 * k * pass + norms);
      if (n > 1) {
        EXPECT_GT(plan.wire_per_step.sent, 2 * k * pass);
      }
    }
  });
}

// The slices that a step gathers, pass by pass.
std::uint64_t gathered_pass_by_pass(const ModelShape& model, const Plan& plan) {
  Residency residency(plan.slots);
  std::uint64_t gathered = 0;
  const auto read = [&](int unit) {
    for (const int needed : units_read_by(model, unit)) {
      const auto place = static_cast<std::size_t>(needed);
      if (plan.slots.parameter_slot[place] == SlotAssignment::kNone || !residency.take(needed, 1)) continue;
      gathered += plan.layouts[place].total_count() / static_cast<std::uint64_t>(plan.options.ranks);
    }
  };
  const int unit_count = static_cast<int>(model.units.size());
  const PlanOptions& options = plan.options;
  for (int forwards = 0, backwards = 0; backwards < options.micro_steps;) {
    if (forward_is_next(options.micro_steps, options.forwards_ahead, forwards, backwards)) {
      for (int unit = 0; unit < unit_count; ++unit) read(unit);
      ++forwards;
    } else {
      for (int unit = unit_count - 1; unit >= 0; --unit) {
        if (model.units[static_cast<std::size_t>(unit)].backward_reads_parameters) read(unit);
      }
      ++backwards;
    }
  }
  return gathered;
}

TEST(Plan, CountsTheGathersOfAnyScheduleAsTheyComePassByPass) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 400; ++i) {
    ModelShape model = awkward_model(static_cast<int>(random() % 7));
    for (UnitShape& unit : model.units) unit.backward_reads_parameters = random() % 3 > 0;
    if (random() % 2 == 0) model.units.back().tied.clear();
    PlanOptions options;
    options.stage = 3;
    options.micro_steps = 1 + static_cast<int>(random() % 12);
    options.ranks = 2 + static_cast<int>(random() % 3);
    options.forwards_ahead = static_cast<int>(random() % 14);
    const Plan plan = plan_of(model, options);

    const auto n = static_cast<std::uint64_t>(options.ranks);
    const auto k = static_cast<std::uint64_t>(options.micro_steps);
    const std::uint64_t element = element_bytes(options.dtype);
    const std::uint64_t norms = 8 * (n - 1) * (2 * model.units.size() + 3);
    EXPECT_EQ(plan.wire_per_step.sent,
              (n - 1) * element * (k * (padded_count(plan) / n) + gathered_pass_by_pass(model, plan)) + norms)
        << k << " micro-steps, " << options.forwards_ahead << " ahead";
  }
}

TEST(Plan, TakesTheSameTimeForAnyNumberOfMicroStepsAndRefusesSizesThatOverflow) {
  ModelShape model = awkward_model(1000);
  PlanOptions options;
  options.stage = 3;
  options.micro_steps = 1'000'000;
  options.ranks = 2;
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_GT(plan_of(model, options).wire_per_step.sent, std::uint64_t{1} << 45);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));

  model.units[0].parameters[0].count = std::uint64_t{1} << 51;
  for (int stage = 0; stage <= 3; ++stage) {
    options.stage = stage;
    const Status status = make_plan(model, options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << "stage " << stage;
    EXPECT_NE(status.message().find("sent by a rank"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("1000000 micro-steps"), std::string::npos) << status.message();
  }
}

TEST(Plan, LocalAccumulationReducesOnceAStepAndKeepsNoSecondAccumulator) {
  const ModelShape model = awkward_model(3);
  for (const int stage : {0, 1}) {
    PlanOptions options{{.stage = stage, .micro_steps = 5, .accumulate = Accumulate::kLocal}, 4};
    const Plan local = plan_of(model, options);
    options.micro_steps = 1;
    options.accumulate = Accumulate::kShard;
    const Plan once = plan_of(model, options);
    EXPECT_EQ(local.wire_per_step, once.wire_per_step);
    EXPECT_EQ(local.bytes.gradients, once.bytes.gradients);
  }
}

TEST(Plan, ChangesItsFingerprintWithEveryOptionThatRanksMustAgreeOn) {
  const ModelShape model = awkward_model(2);
  const PlanOptions options{{.stage = 2}, 3};
  const std::string text = plan_of(model, options).fingerprint_text();
  EXPECT_EQ(plan_of(model, options).fingerprint_text(), text);
  PlanOptions other = options;
  other.stage = 3;
  EXPECT_NE(plan_of(model, other).fingerprint_text(), text);
  other = options;
  other.dtype = DataType::kFloat16;
  EXPECT_NE(plan_of(model, other).fingerprint_text(), text);
  EXPECT_NE(plan_of(awkward_model(3), options).fingerprint_text(), text);
}

TEST(Plan, RefusesOptionsByName) {
  const auto message = [](const PlanOptions& options) {
    const Status status = make_plan(awkward_model(1), options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_NE(message({{.stage = 4}}).find("stage is 4; use 0, 1, 2 or 3"), std::string::npos);
  EXPECT_NE(message({{.stage = -1}}).find("stage is -1"), std::string::npos);
  EXPECT_NE(message({.ranks = 0}).find("ranks is 0"), std::string::npos);
  EXPECT_NE(message({{.micro_steps = 0}}).find("micro-steps is 0"), std::string::npos);
  EXPECT_NE(message({{.bucket_bytes = 0}}).find("bucket"), std::string::npos);
  EXPECT_NE(message({.chunk_bytes = 0}).find("chunk"), std::string::npos);
  for (const int stage : {2, 3}) {
    EXPECT_NE(message({{.stage = stage, .accumulate = Accumulate::kLocal}}).find("accumulate local"),
              std::string::npos);
  }
  for (const int stage : {0, 1, 2}) {
    EXPECT_NE(message({{.stage = stage, .offload = Offload::kOptimizerAndParameters}}).find("use stage 3"),
              std::string::npos);
  }
  for (const double fraction : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_NE(message({{.offload = Offload::kOptimizer, .offload_fraction = fraction}}).find("use 0 to 1"),
              std::string::npos);
  }
  EXPECT_NE(message({{.offload = Offload::kOptimizer, .tier = Tier::kFile, .staging_bytes = 4096}})
                .find("offload-staging is 4KiB; use at least 8 MiB"),
            std::string::npos);
}

// Units of 1024 elements, which need no padding on one or two ranks.
ModelShape even_model(int units) {
  ModelShape model;
  for (int unit = 0; unit < units; ++unit) {
    const std::string name = "unit" + std::to_string(unit);
    model.units.push_back({.name = name, .parameters = {{.name = name + ".all", .count = 1024}}});
  }
  return model;
}

TEST(Plan, KeepsTheFirstUnitsThatFitIntoTheRestOfTheFraction) {
  struct Case {
    double fraction;
    int device_units;
    int shared_unit;  // -1: none.
    int expected;
  };
  for (const Case& one : {Case{1, -1, -1, 0},
                          {0.7501, -1, -1, 0},
                          {0.75, -1, -1, 1},
                          {0.6, -1, -1, 1},
                          {0.5, -1, -1, 2},
                          {0.25, -1, -1, 3},
                          {0, -1, -1, 4},
                          {0.5, 0, -1, 0},
                          {1, 3, -1, 3},
                          {1, 9, -1, 4},
                          {1, -1, 0, 1},
                          {1, -1, 1, 2},
                          {0.25, -1, 1, 3},
                          {1, 1, 2, 3}}) {
    ModelShape model = even_model(4);
    if (one.shared_unit >= 0) model.units[static_cast<std::size_t>(one.shared_unit)].shared_by = 2;
    PlanOptions options;
    options.stage = 1;
    options.offload = Offload::kOptimizer;
    options.offload_fraction = one.fraction;
    options.device_units = one.device_units;
    EXPECT_EQ(plan_of(model, options).device_units, one.expected)
        << one.fraction << " " << one.device_units << " " << one.shared_unit;
    options.offload = Offload::kNone;
    EXPECT_EQ(plan_of(model, options).device_units, 4);
  }
}

// Four ranks in two groups. Within a group the parameters' type travels, and fp32 sums between the groups.
TEST(Plan, SendsAcrossGroupsInFp32AndTwiceIfGroupsHoldTheModel) {
  const std::uint64_t trainable = 4 * 2048;  // Padded to four ranks.
  const std::uint64_t decision = 8 * 3 * (2 * 4 + 3);
  for (const bool within : {false, true}) {
    for (const int micro_steps : {1, 3}) {
      PlanOptions options;
      options.stage = 1;
      options.dtype = DataType::kBfloat16;
      options.micro_steps = micro_steps;
      options.ranks = 4;
      options.group = 2;
      options.shard_within_group = within;
      const std::uint64_t reduced =
          (2 - 1) * (trainable / 2) * 2 + (2 - 1) * (trainable / 4) * 4 * (within ? 2 : 1);
      const std::uint64_t gathered = within ? (2 - 1) * (trainable / 2) * 2 : (4 - 1) * (trainable / 4) * 2;
      EXPECT_EQ(plan_of(even_model(4), options).wire_per_step.sent,
                static_cast<std::uint64_t>(micro_steps) * reduced + gathered + decision)
          << within << " " << micro_steps;
    }
  }
}

TEST(Plan, ExchangesNormsWithAllRanksThatDecide) {
  PlanOptions options;
  options.ranks = 2;
  const std::uint64_t sent = plan_of(even_model(4), options).wire_per_step.sent;
  options.deciding_ranks = 6;
  options.deciding_units = 7;
  // Three facts and four norms to the other data-parallel rank, four facts and seven norms to five ranks.
  EXPECT_EQ(plan_of(even_model(4), options).wire_per_step.sent, sent - 8 * 4 + 8 * 5 * (7 + 4));
  options.deciding_units = 3;
  EXPECT_EQ(plan_of(even_model(4), options).wire_per_step.sent, sent - 8 * 4 + 8 * 5 * (4 + 4));
}

// Up to half of the small units' bucket, of slices that are not empty and stay on the device.
TEST(Plan, FusesSmallUnits) {
  ModelShape model = even_model(1);
  model.units[0].parameters[0].count = 2 * 65536;
  for (int leaves = 1; leaves <= 10; ++leaves) {
    const std::string name = "small" + std::to_string(leaves);
    model.units.push_back(
        {.name = name,
         .parameters = {{.name = name + ".all", .count = 2 * kLeaf * static_cast<std::uint64_t>(leaves)}}});
  }
  model.units.push_back({.name = "frozen", .parameters = {{.name = "f", .count = 1, .frozen = true}}});
  PlanOptions options;
  options.stage = 2;
  options.ranks = 2;
  options.bucket_bytes = 2 * 4 * 16384;
  const Plan plan = plan_of(model, options);
  ASSERT_EQ(plan.bucket_columns, 16384u);
  EXPECT_EQ(plan.fused_columns, 4096u);
  std::string fused;
  for (int unit = 0; unit < 12; ++unit) fused += plan.fuses(unit) ? '1' : '0';
  EXPECT_EQ(fused, "011110000000");
  options.offload = Offload::kOptimizer;
  options.device_units = 2;
  const Plan offloaded = plan_of(model, options);
  EXPECT_TRUE(offloaded.fuses(1));
  EXPECT_FALSE(offloaded.fuses(2));
  options.ranks = 1;
  EXPECT_EQ(plan_of(model, options).fused_columns, 0u);
}

// A sum over micro-steps is kept in fp32 where the owner of a slice alone has it.
TEST(Plan, GradientsHaveTheTypeInWhichTheyAreKept) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int micro_steps : {1, 2}) {
      for (const bool local : {false, true}) {
        if (local && stage >= 2) continue;
        PlanOptions options;
        options.stage = stage;
        options.dtype = DataType::kBfloat16;
        options.micro_steps = micro_steps;
        options.accumulate = local ? Accumulate::kLocal : Accumulate::kShard;
        options.ranks = 2;
        options.offload = Offload::kOptimizer;
        options.device_units = 1;
        const Plan plan = plan_of(even_model(2), options);
        const bool sums = micro_steps > 1 && !local;
        EXPECT_EQ(plan.gradient_type(0), sums && stage >= 2 ? DataType::kFloat32 : DataType::kBfloat16)
            << stage << micro_steps << local;
        EXPECT_EQ(plan.gradient_type(1), sums && stage >= 1 ? DataType::kFloat32 : DataType::kBfloat16)
            << stage << micro_steps << local;
      }
    }
  }
}

TEST(Plan, ASumOverPipelineStagesFitsIntoItsStaging) {
  PlanOptions options;
  options.ranks = 2;
  options.bucket_bytes = 2 * 4 * 1024;
  ModelShape model = even_model(2);
  model.units[0].parameters[0].count = 2 * 8192;
  const Plan plan = plan_of(model, options);
  ASSERT_EQ(plan.bucket_columns, 1024u);
  // A 1 + 2 s-th of the bucket, or of a smaller slice, in multiples of four, for each of s stages.
  EXPECT_EQ(plan.shared_bucket_count(0, 2), 2u * 204);
  EXPECT_EQ(plan.shared_bucket_count(0, 3), 3u * 144);
  EXPECT_EQ(plan.shared_bucket_count(1, 2), 2u * 100);
}

TEST(Plan, PiecesOfFilesFitIntoTheStaging) {
  const auto pieces = [](std::uint64_t staging_bytes, std::uint64_t count, DataType dtype, bool parameters) {
    ModelShape model = even_model(1);
    model.units[0].parameters[0].count = count;
    PlanOptions options;
    options.stage = 3;
    options.dtype = dtype;
    options.offload = parameters ? Offload::kOptimizerAndParameters : Offload::kOptimizer;
    options.tier = Tier::kFile;
    options.staging_bytes = staging_bytes;
    const Plan plan = plan_of(model, options);
    EXPECT_LE(plan.bytes_in(Pool::kStaging), staging_bytes);
    return plan.piece_count;
  };
  // Six buffers of 12 bytes of states and of a parameter, and with offloaded parameters four of fp32, in
  // pieces of 32768 elements.
  const std::uint64_t large = std::uint64_t{1} << 24;
  EXPECT_EQ(pieces(8_MiB, large, DataType::kFloat32, false), 2u * 32768);
  EXPECT_EQ(pieces(64_MiB, large, DataType::kFloat32, false), 21u * 32768);
  EXPECT_EQ(pieces(64_MiB, large, DataType::kBfloat16, false), 24u * 32768);
  EXPECT_EQ(pieces(64_MiB, large, DataType::kFloat32, true), 18u * 32768);
  EXPECT_EQ(pieces(64_MiB, large, DataType::kBfloat16, true), 20u * 32768);
  // No larger than the model needs.
  EXPECT_EQ(pieces(64_MiB, 1, DataType::kFloat32, false), 32768u);
  EXPECT_EQ(pieces(64_MiB, 32769, DataType::kFloat32, false), 2u * 32768);
}

TEST(Plan, ADescribedModelNamesTheWrongCall) {
  const auto message = [](auto call) {
    ModelShape model;
    ModelDescription description(model);
    EXPECT_EQ(description.add_unit("first", true), 0);
    EXPECT_EQ(description.add_parameter(0, {.name = "a", .count = 3}), 0);
    EXPECT_EQ(description.add_parameter(0, {.name = "b", .count = 3}), 1);
    EXPECT_EQ(description.add_unit("second", false), 1);
    EXPECT_EQ(description.add_parameter(1, {.name = "c", .count = 3}), 0);
    EXPECT_EQ(description.tie(1, {.unit = 0, .index = 1}), 1);
    EXPECT_EQ(description.tie(1, {.unit = 0, .index = 0}), 2);
    EXPECT_TRUE(model.units[0].backward_reads_parameters);
    EXPECT_FALSE(model.units[1].backward_reads_parameters);
    try {
      call(description);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      return error.status().message();
    }
    return std::string();
  };
  EXPECT_EQ(message([](auto& model) { model.add_unit("first", true); }),
            "two units are named first; messages name units, so give each its own");
  for (const int unit : {-1, 2}) {
    EXPECT_EQ(message([&](auto& model) { model.add_parameter(unit, {.name = "d", .count = 1}); }),
              "add_parameter(d): unit is " + std::to_string(unit) +
                  ", and the model has 2 so far; add the unit first");
    EXPECT_EQ(message([&](auto& model) { model.tie(unit, {.unit = 0, .index = 0}); }),
              "tie(): unit is " + std::to_string(unit) + ", and the model has 2 so far; add the unit first");
  }
  EXPECT_EQ(message([](auto& model) { model.add_parameter(0, {.name = "c", .count = 1}); }),
            "two parameters are named c; saved state finds parameters by name, so give each its own");
  EXPECT_EQ(message([](auto& model) { model.add_parameter(1, {.name = "d", .count = 1}); }),
            "add_parameter(d) to unit second after tie(): tied parameters come after the unit's own, so "
            "their indices "
            "would change; add all parameters of the unit first");
  for (const UnitShape::Tied tied : {UnitShape::Tied{-1, 0}, {1, 0}, {2, 0}, {0, -1}, {0, 2}}) {
    EXPECT_EQ(message([&](auto& model) { model.tie(1, tied); }),
              "unit second ties parameter " + std::to_string(tied.index) + " of unit " +
                  std::to_string(tied.unit) +
                  ", which no earlier unit has; tie one that was added before the unit");
  }
  EXPECT_EQ(message([](auto& model) { model.add_parameter(0, {.name = "d", .count = 1}); }), "");
}

// The last value that is accepted and the first that is not, with the whole message.
TEST(Plan, LimitsAreExact) {
  struct Case {
    const char* what;
    std::function<void(ModelShape& model, PlanOptions& options)> change;
    std::string message;  // Empty: it is accepted.
  };
  const Case cases[] = {
      {"one rank", [](auto&, auto& o) { o.ranks = 1; }, ""},
      {"a million ranks", [](auto&, auto& o) { o.ranks = 1'000'000; }, ""},
      {"more ranks", [](auto&, auto& o) { o.ranks = 1'000'001; }, "ranks is 1000001; use 1 to 1000000"},
      {"groups that do not divide the ranks",
       [](auto&, auto& o) {
         o.ranks = 6;
         o.group = 4;
       },
       "groups of 4 ranks do not divide 6 ranks; give a number that does, 1 for no groups"},
      {"no chunk", [](auto&, auto& o) { o.chunk_bytes = 0; },
       "chunk is 0 bytes; use the device's granularity (2 MiB is usual)"},
      {"no units", [](auto& m, auto&) { m.units.clear(); }, "the model has no units; add at least one"},
      {"no parameters", [](auto& m, auto&) { m = {.units = {{.name = "u"}}}; },
       "the model has no parameters; add at least one"},
      {"no elements", [](auto& m, auto&) { m.units[1].parameters[1].count = 0; },
       "parameter layer0.bias has no elements; give it one or more, or leave it out"},
      {"the last group", [](auto& m, auto&) { m.units[1].parameters[1].group = 4095; }, ""},
      {"a group behind the last", [](auto& m, auto&) { m.units[1].parameters[1].group = 4096; },
       "parameter layer0.bias is in parameter group 4096; use a group from 0 to 4095"},
      {"a group before the first", [](auto& m, auto&) { m.units[1].parameters[1].group = -1; },
       "parameter layer0.bias is in parameter group -1; use a group from 0 to 4095"},
      {"a name twice", [](auto& m, auto&) { m.units[1].parameters[1].name = "words"; },
       "two parameters are named words; saved state finds parameters by name, so give each its own"},
      {"a name of AdamW that would be a factor's",
       [](auto& m, auto&) { m.units[1].parameters[1].name = "words/factors"; }, ""},
      {"the name of a factor",
       [](auto& m, auto& o) {
         m.units[1].parameters[1].name = "words/factors";
         o.optimizer = Optimizer::kAdafactor;
       },
       "parameter words/factors has the name under which a saved state keeps Adafactor's factors of "
       "parameter words; give it another one, or use another optimizer"},
      {"as many elements as there may be",
       [](auto& m, auto&) {
         m = {.units = {{.name = "u",
                         .parameters = {{.name = "a", .count = (std::uint64_t{1} << 52) - 7},
                                        {.name = "b", .count = 7}}}}};
       },
       ""},
      {"one element more",
       [](auto& m, auto&) {
         m = {.units = {{.name = "u",
                         .parameters = {{.name = "a", .count = (std::uint64_t{1} << 52) - 7},
                                        {.name = "b", .count = 8}}}}};
       },
       "the model has more than 4503599627370496 elements up to parameter b; make it smaller"},
      {"one parameter of too many elements",
       [](auto& m, auto&) { m.units[0].parameters[0].count = (std::uint64_t{1} << 52) + 1; },
       "the model has more than 4503599627370496 elements up to parameter words; make it smaller"},
      {"shared by as many as there may be", [](auto& m, auto&) { m.units[1].shared_by = 32; }, ""},
      {"shared by more", [](auto& m, auto&) { m.units[1].shared_by = 33; },
       "unit layer0 is shared by 33 pipeline stages; use 1 to 32"},
      {"shared by none", [](auto& m, auto&) { m.units[1].shared_by = 0; },
       "unit layer0 is shared by 0 pipeline stages; use 1 to 32"},
      {"tied to the unit before", [](auto& m, auto&) { m.units[2].tied = {{.unit = 1, .index = 2}}; }, ""},
      {"tied to the unit itself", [](auto& m, auto&) { m.units[2].tied = {{.unit = 2, .index = 0}}; },
       "unit head ties a parameter that no earlier unit has; tie one that was added before the unit"},
      {"tied to a parameter behind the last",
       [](auto& m, auto&) { m.units[2].tied = {{.unit = 1, .index = 3}}; },
       "unit head ties a parameter that no earlier unit has; tie one that was added before the unit"},
      {"tied to a parameter before the first",
       [](auto& m, auto&) { m.units[2].tied = {{.unit = 1, .index = -1}}; },
       "unit head ties a parameter that no earlier unit has; tie one that was added before the unit"},
      {"tied to a unit before the first",
       [](auto& m, auto&) { m.units[2].tied = {{.unit = -1, .index = 0}}; },
       "unit head ties a parameter that no earlier unit has; tie one that was added before the unit"},
      {"as many bytes of activations as there may be",
       [](auto& m, auto&) { m.activation_bytes = std::uint64_t{1} << 60; }, ""},
      {"one byte more", [](auto& m, auto&) { m.activation_bytes = (std::uint64_t{1} << 60) + 1; },
       "the model declares 1152921504606846977 bytes of activations; declare at most 1152921504606846976"},
  };
  for (const Case& one : cases) {
    ModelShape model = awkward_model(1);
    PlanOptions options;
    options.ranks = 2;
    one.change(model, options);
    EXPECT_EQ(make_plan(model, options).status().message(), one.message) << one.what;
  }
}

// Only parameters that a rule of the optimizer needs whole.
TEST(Plan, RefusesSplitParametersWhereAnOptimizerNeedsThemWhole) {
  const auto message = [](Optimizer optimizer, int parts, bool frozen, std::vector<std::uint64_t> shape) {
    ModelShape model;
    ParameterShape parameter{.name = "w", .count = 64 * 64, .frozen = frozen};
    if (shape.size() == 1) parameter.count = shape[0];
    parameter.shape = shape;
    TensorSplit split;
    split.shape = shape;
    split.parts = static_cast<std::uint64_t>(parts);
    parameter.split = split;
    model.units.push_back({.name = "u", .parameters = {parameter, {.name = "v", .count = 3}}});
    PlanOptions options;
    options.optimizer = optimizer;
    return make_plan(model, options).status().message();
  };
  const std::string refusal =
      "parameter w is split over tensor-parallel ranks, and optimizer muon needs whole matrices; use another "
      "optimizer, or no tensor parallelism";
  EXPECT_EQ(message(Optimizer::kMuon, 2, false, {64, 64}), refusal);
  EXPECT_EQ(message(Optimizer::kMuon, 1, false, {64, 64}), "");
  EXPECT_EQ(message(Optimizer::kMuon, 2, true, {64, 64}), "");
  EXPECT_EQ(message(Optimizer::kMuon, 2, false, {64}), "") << "no matrix";
  EXPECT_EQ(message(Optimizer::kAdamW, 2, false, {64, 64}), "");
}

TEST(Plan, ItsFingerprintNamesEachFigure) {
  ModelShape model = awkward_model(1);
  model.units[1].parameters[2].frozen = true;
  const std::string text = plan_of(model, {{.stage = 2, .bucket_bytes = 64_KiB}, 3}).fingerprint_text();

  const std::size_t at = text.find("ranks 3\n");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_EQ(text.substr(at),
            "ranks 3\nunits-on-device 3\nbucket-columns 5120\nunit-0 300007\nunit-1 123457 1 "
            "frozen:511\nunit-2 13\n");
}

TEST(Plan, RefusesInvalidModels) {
  const auto refused = [](const ModelShape& model) {
    return make_plan(model, {}).status().code() == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(refused({.units = {{.name = "empty"}}}));
  EXPECT_TRUE(refused({.units = {{.name = "u", .parameters = {{.name = "p", .count = 0}}}}}));
  EXPECT_TRUE(refused({.units = {{.name = "u", .parameters = {{.name = "p", .count = 1, .group = -1}}}}}));
  EXPECT_TRUE(refused({.units = {{.name = "u", .parameters = {{.name = "p", .count = ~std::uint64_t{0}}}}}}));
  ModelShape twice = awkward_model(1);
  twice.units[1].parameters.push_back({.name = "words", .count = 3});
  EXPECT_TRUE(refused(twice));
  ModelShape forward_tie = awkward_model(1);
  forward_tie.units[0].tied.push_back({.unit = 1, .index = 0});
  EXPECT_TRUE(refused(forward_tie));
  ModelShape no_such_index = awkward_model(1);
  no_such_index.units.back().tied[0].index = 1;
  EXPECT_TRUE(refused(no_such_index));
}

}  // namespace
}  // namespace forebay
