// forebay-gpt within a device budget: the placement of the inputs of recomputed blocks decides whether it can
// train, and --activations auto finds a placement that fits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "forebay/error.h"
#include "parallel/checkpointed_inputs.h"
#include "tests/end_to_end/parallel_run.h"
#include "tests/support/process.h"
#include "tests/support/unwrapped.h"
#include "trainer/training.h"

namespace forebay::testing {
namespace {

// Narrow blocks over many rows: their inputs, 128 KiB each, outweigh everything else. The host's chunks are
// 2 MiB.
const Words kDeep = {"--layers",    "40",
                     "--hidden",    "8",
                     "--heads",     "2",
                     "--sequence",  "16",
                     "--batch",     "256",
                     "--threads",   "1",
                     "--steps",     "1",
                     "--bucket",    "64KiB",
                     "--matmul",    "plain",
                     "--ranks",     "2",
                     "--dropout",   "0.1",
                     "--recompute", "block",
                     "--quiet",     "--tensor-parallel",
                     "2",           "--communicator",
                     "local"};
const Words kDeeper = with(kDeep, {"--layers", "70"});

Words placed(const Words& words, const std::string& activations) {
  return words + Words{"--activations", activations};
}

Words within(const Words& words, std::uint64_t bytes) {
  return words + Words{"--memory", std::to_string(bytes)};
}

std::string shortage_of(const Words& words) {
  try {
    train(words);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kOutOfMemory);
    return error.status().message();
  }
  return "no error";
}

// The bytes that a run reserves without a limit.
std::uint64_t reserved_bytes(const Words& words, const std::string& activations) {
  return train(with(placed(words, activations), {"--steps", "0"})).ranks[0].reserved_bytes;
}

TEST(ActivationBudget, InputsThatJustFitAreKept) {
  gpt::TrainerOptions o;
  o.model = {.layers = 4, .hidden = 8, .heads = 2, .sequence = 16};
  o.recompute_every = 1;
  o.tensor_parallel = 2;
  const gpt::ActivationNeeds needs{.keep = 100'000, .elsewhere = 10'000};
  EXPECT_EQ(gpt::choose_activations(o, {}, needs, 100'000), std::nullopt);
  EXPECT_EQ(gpt::choose_activations(o, {}, needs, 99'999), 89'999);
  EXPECT_THROW(gpt::choose_activations(o, {}, needs, 10'000), Error);
}

TEST(ActivationBudget, WhatKeepHasNoRoomForTrainsPartitionedAndWhatIsDeeperWithInputsOnTheHost) {
  const std::uint64_t budget = reserved_bytes(kDeep, "partition");
  for (const auto& [words, refused_place, place] :
       {std::tuple(kDeep, "keep", "partition"), std::tuple(kDeeper, "partition", "partition+cpu")}) {
    SCOPED_TRACE(place);
    const gpt::TrainingReport free = train(placed(words, refused_place));

    const std::string refused = shortage_of(within(placed(words, refused_place), budget));
    const gpt::TrainingReport fits = train(within(placed(words, place), budget));

    EXPECT_LE(fits.ranks[0].reserved_bytes, budget);
    expect_same_bits(fits, free);
    EXPECT_NE(refused.find("the plan needs"), std::string::npos) << refused;
    for (const std::uint64_t bytes : {free.ranks[0].planned_reserved_bytes, budget})
      EXPECT_NE(refused.find("(" + std::to_string(bytes) + " bytes)"), std::string::npos) << refused;
    EXPECT_NE(refused.find("activations that are partitioned or offloaded"), std::string::npos) << refused;
  }
}

TEST(ActivationBudget, AutoFindsEachPlace) {
  const gpt::TrainingReport free = train(kDeep);
  for (const char* const place : {"keep", "partition", "partition+cpu"}) {
    SCOPED_TRACE(place);
    const std::uint64_t budget = reserved_bytes(kDeep, place);

    const gpt::TrainingReport found = train(within(placed(kDeep, "auto"), budget));

    EXPECT_EQ(found.activations, place);
    expect_same_bits(found, free);
    for (const gpt::RankReport& rank : found.ranks) {
      EXPECT_LE(rank.reserved_bytes, budget);
      EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
      EXPECT_EQ(rank.saved_device_bytes, found.ranks[0].saved_device_bytes);
      EXPECT_EQ(rank.saved_host_bytes, rank.planned_saved_host_bytes);
    }
  }
}

// One chunk less than `partition` needs: auto offloads just the missing bytes.
TEST(ActivationBudget, AutoSpillsNoMoreThanTheBudgetAsksFor) {
  const std::uint64_t cut = reserved_bytes(kDeeper, "partition");
  const gpt::RankReport all = train(with(placed(kDeeper, "partition+cpu"), {"--steps", "0"})).ranks[0];
  ASSERT_LT(all.reserved_bytes, cut);

  const gpt::RankReport some =
      train(with(within(placed(kDeeper, "auto"), cut - 1), {"--steps", "0"})).ranks[0];

  EXPECT_GT(some.saved_host_bytes, 0u);
  EXPECT_LT(some.saved_host_bytes, all.saved_host_bytes);
  EXPECT_LT(some.reserved_bytes, cut);
}

TEST(ActivationBudget, AutoSaysWhatEachPlaceTakesWhereNoneFits) {
  const std::uint64_t least = reserved_bytes(kDeep, "partition+cpu");

  const std::string refused = shortage_of(within(placed(kDeep, "auto"), least - 1));

  for (const char* const part : {"--activations auto: the rest of the plan leaves", "kept", "partitioned",
                                 "partition+cpu", "raise --memory"})
    EXPECT_NE(refused.find(part), std::string::npos) << part << " is not in: " << refused;
}

TEST(ActivationBudget, AutoWithoutRoomForTheStatesSaysWhichOfThemIsLargest) {
  const std::string refused = shortage_of(within(placed(kDeep, "auto"), 1 << 20));

  EXPECT_NE(refused.find("the largest parts are"), std::string::npos) << refused;
}

TEST(ActivationBudget, RanksThatPlaceActivationsDifferentlyAreNamed) {
  const auto placed_as = [](ActivationPlacement first, ActivationPlacement second) {
    std::vector<gpt::TrainerOptions> by_rank(2, gpt::resolve_options(*gpt::parse_command(kDeep).options));
    by_rank[0].activations = first;
    by_rank[1].activations = second;
    try {
      gpt::run_training(by_rank);
    } catch (const Error& error) {
      return error.status().message();
    }
    return std::string("no error");
  };
  const ActivationPlacement keep = ActivationPlacement::kKeep;
  const ActivationPlacement partition = ActivationPlacement::kPartition;
  const ActivationPlacement choose = ActivationPlacement::kAuto;
  for (const auto& [first, second] :
       {std::pair(keep, choose), {choose, keep}, {choose, partition}, {partition, keep}}) {
    const std::string message = placed_as(first, second);
    EXPECT_NE(message.find("--activations is"), std::string::npos) << message;
    EXPECT_NE(message.find("on rank 0"), std::string::npos) << message;
  }
}

// Ranks as processes: one of them prints the choice.
TEST(ActivationBudget, AutoPrintsWhatItChose) {
  Words words = with(placed(kDeeper, "auto"), {"--steps", "0", "--communicator", "shm"});
  words.erase(std::find(words.begin(), words.end(), "--quiet"));
  const auto output_of = [&](std::uint64_t budget) {
    const Finished finished = run_program(Words{FOREBAY_GPT} + within(words, budget));
    EXPECT_EQ(finished.exit_code, 0) << finished.output;
    return unwrapped(finished.output);
  };

  const std::string kept = output_of(reserved_bytes(kDeeper, "keep"));
  const std::string cut = output_of(reserved_bytes(kDeeper, "partition"));
  const std::string spilled = output_of(reserved_bytes(kDeeper, "partition+cpu"));

  EXPECT_NE(kept.find("activations auto: keep"), std::string::npos) << kept;
  EXPECT_NE(cut.find("activations auto: partition: the inputs of"), std::string::npos) << cut;
  EXPECT_NE(spilled.find("activations auto: partition+cpu: the inputs of 70 of 70"), std::string::npos)
      << spilled;
  EXPECT_NE(spilled.find("wait in host memory"), std::string::npos) << spilled;
}

TEST(ActivationBudget, RefusesAutoWhereNothingIsRecomputedOrBucketsAreMeasured) {
  const Words words = {FOREBAY_GPT, "--quiet", "--steps", "1", "--activations", "auto"};
  const Finished none = run_program(words);
  const Finished measured = run_program(words + Words{"--recompute", "block", "--bucket", "auto"});

  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.output.find("add --recompute block"), std::string::npos) << none.output;
  EXPECT_EQ(measured.exit_code, 2);
  EXPECT_NE(measured.output.find("give --bucket a size"), std::string::npos) << measured.output;
}

// The first pipeline stage has more micro-batches in flight, the last one has the logits.
TEST(ActivationBudget, AutoFindsAPlaceForEachStageOfAPipeline) {
  const Words words = with(kDeep, {"--ranks", "4", "--micro-steps", "3"}) + Words{"--pipeline-parallel", "2"};
  const gpt::TrainingReport free = train(words);
  const std::uint64_t cut = reserved_bytes(words, "partition");
  const std::uint64_t kept = reserved_bytes(words, "keep");
  ASSERT_LT(cut, kept);

  const gpt::TrainingReport found = train(within(placed(words, "auto"), cut));

  expect_same_bits(found, free);
  EXPECT_EQ(found.activations, "partition, partition+cpu");
  for (const gpt::RankReport& rank : found.ranks) {
    EXPECT_LE(rank.reserved_bytes, cut);
    EXPECT_EQ(rank.peak_bytes, rank.planned_bytes);
  }
  EXPECT_GT(found.ranks[0].saved_device_bytes, 0u);
  EXPECT_NE(shortage_of(within(placed(words, "auto"), cut / 2)).find("--activations auto"),
            std::string::npos);
}

}  // namespace
}  // namespace forebay::testing
