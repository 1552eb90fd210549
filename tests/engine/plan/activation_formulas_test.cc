// The formulas of the literature give the figures that the literature prints.

#include "forebay/activation_formulas.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace forebay::testing {
namespace {

ActivationFormulas of(const TransformerBlocks& blocks) {
  const Result<ActivationFormulas> figures = activation_formulas(blocks);
  EXPECT_TRUE(figures.ok()) << figures.status().to_string();
  return figures.ok() ? figures.value() : ActivationFormulas();
}

const TransformerBlocks kSmall{.layers = 48, .hidden = 1600, .heads = 25, .sequence = 1024, .batch = 32};
const TransformerBlocks kLarge{.layers = 125, .hidden = 8192, .heads = 64, .sequence = 1024, .batch = 32};

TEST(ActivationFormulas, GiveTheFiguresOfZero) {
  const ActivationFormulas each = of(kSmall);
  EXPECT_EQ(each.zero_all, 60'397'977'600u);  // Printed: 60 GB.
  EXPECT_EQ(each.saved, 5'033'164'800u);
  EXPECT_EQ(each.saved + each.zero_segment, 6'291'456'000u);

  TransformerBlocks segments = kSmall;
  segments.recompute_every = 6;
  EXPECT_EQ(of(segments).saved_count, 8u);
  EXPECT_EQ(of(segments).saved + of(segments).zero_segment, 8'388'608'000u);  // Printed: 8 GB.
  segments.recompute_every = 8;
  EXPECT_EQ(of(segments).saved + of(segments).zero_segment, 10'695'475'200u);
}

TEST(ActivationFormulas, GiveTheFiguresOfKorthikanti) {
  const ActivationFormulas figures = of(kSmall);

  EXPECT_EQ(figures.all, 286'890'393'600u);
  EXPECT_EQ(figures.all_sequence_parallel, 286'890'393'600u);
  EXPECT_EQ(figures.selective, 85'563'801'600u);
  EXPECT_NEAR(static_cast<double>(figures.all) / static_cast<double>(figures.zero_all), 4.75, 1e-9);
}

// Attention keeps no scores and dropout is drawn again: a layer has 4 + 12/t elements of sbh.
TEST(ActivationFormulas, CountLayersThatKeepNeitherScoresNorMasks) {
  TransformerBlocks blocks = kSmall;
  const std::uint64_t sbh = 1024u * 32u * 1600u;
  EXPECT_EQ(of(blocks).without_scores_and_masks, 48 * 2 * 16 * sbh);
  blocks.element_bytes = 4;
  EXPECT_EQ(of(blocks).without_scores_and_masks, 48 * 4 * 16 * sbh);
  blocks.tensor_parallel = 5;
  EXPECT_EQ(of(blocks).without_scores_and_masks, 48 * (4 * 4 * sbh + 4 * 12 * sbh / 5));
}

// The logits in their type, and two fp32 tensors of their size, on the ranks that share the vocabulary.
TEST(ActivationFormulas, CountTheLossWhereTheOutputIs) {
  TransformerBlocks blocks = kSmall;
  EXPECT_EQ(of(blocks).loss, 0u);
  blocks.vocabulary = 50257;
  const std::uint64_t logits = 1024ull * 32 * 50257;
  EXPECT_EQ(of(blocks).loss, (2 + 4 + 4) * logits);
  blocks.tensor_parallel = 5;
  EXPECT_EQ(of(blocks).loss, 2 * logits);
  blocks.element_bytes = 4;
  EXPECT_EQ(of(blocks).loss, (12 * logits + 4) / 5);
  blocks.has_output = false;
  EXPECT_EQ(of(blocks).loss, 0u);
  blocks.has_output = true;
  blocks.vocabulary = std::uint64_t{1} << 60;
  EXPECT_EQ(activation_formulas(blocks).status().code(), StatusCode::kInvalidArgument);
}

// The first of every K layers of the model saves its input; the other layers keep everything.
TEST(ActivationFormulas, KeepAllOfTheLayersThatAreNotRecomputed) {
  const std::uint64_t layer = 286'890'393'600u / 48;
  TransformerBlocks blocks = kSmall;
  EXPECT_EQ(of(blocks).kept, 0u);
  EXPECT_EQ(of(blocks).block, layer);

  blocks.recompute_every = 6;
  EXPECT_EQ(of(blocks).kept, 40 * layer);
  EXPECT_EQ(of(blocks).block, layer);

  blocks.recompute_every = 0;
  EXPECT_EQ(of(blocks).saved_count, 0u);
  EXPECT_EQ(of(blocks).kept, of(blocks).all);
  EXPECT_EQ(of(blocks).block, 0u);
}

TEST(ActivationFormulas, CountTheRecomputedLayersOverTheWholeModel) {
  const auto recomputed = [](std::uint64_t first, std::uint64_t layers, int every) {
    TransformerBlocks stage = kSmall;
    stage.first_layer = first;
    stage.layers = layers;
    stage.recompute_every = every;
    return of(stage).saved_count;
  };
  EXPECT_EQ(recomputed(0, 2, 3), 1u);  // 0
  EXPECT_EQ(recomputed(2, 2, 3), 1u);  // 3
  EXPECT_EQ(recomputed(4, 2, 3), 0u);
  EXPECT_EQ(recomputed(6, 2, 3), 1u);  // 6
  EXPECT_EQ(recomputed(6, 2, 1), 2u);
  EXPECT_EQ(recomputed(1, 7, 2), 3u);  // 2, 4, 6
}

// sbh (10 + 24/t + 5as/(ht)) and its variants.
TEST(ActivationFormulas, DivideByTheTensorParallelRanks) {
  TransformerBlocks blocks = kSmall;
  blocks.tensor_parallel = 5;
  const std::uint64_t sbh = 1024u * 32u * 1600u;
  const ActivationFormulas figures = of(blocks);

  EXPECT_EQ(figures.all, 48 * (10 * sbh + 24 * sbh / 5 + 5 * 25 * 1024ull * 1024 * 32 / 5));
  EXPECT_EQ(figures.all_sequence_parallel, 286'890'393'600u / 5);
  EXPECT_EQ(figures.selective, 85'563'801'600u / 5);
  EXPECT_EQ(figures.saved_partitioned, figures.saved / 5);
}

// Section 8 of the paper counts six all-reduces per layer.
TEST(ActivationFormulas, AddATwelfthToTheTensorParallelWireOfZero) {
  for (const int ranks : {2, 4, 8, 16}) {
    TransformerBlocks blocks = kLarge;
    blocks.tensor_parallel = ranks;
    const ActivationFormulas figures = of(blocks);
    EXPECT_EQ(12 * figures.partition_wire, figures.zero_tensor_parallel_wire);
    blocks.recompute_every = 5;
    EXPECT_EQ(60 * of(blocks).partition_wire, figures.zero_tensor_parallel_wire);
  }
  EXPECT_EQ(of(kLarge).partition_wire, 0u);
}

// The result of the last matrix of a recomputed block is not needed again.
TEST(ActivationFormulas, CountTheSumsThatATensorParallelRankTakesPartIn) {
  TransformerBlocks blocks{.layers = 8,
                           .hidden = 256,
                           .heads = 8,
                           .sequence = 128,
                           .batch = 4,
                           .tensor_parallel = 2,
                           .element_bytes = 4};
  const std::uint64_t input = 4 * 128 * 256 * 4;  // At two ranks a sum sends and receives as much.
  EXPECT_EQ(of(blocks).tensor_parallel_wire, (5 * 8 + 2) * input);
  blocks.recompute_every = 3;
  EXPECT_EQ(of(blocks).tensor_parallel_wire, (4 * 8 + 3 + 2) * input);
  blocks.recompute_every = 0;
  EXPECT_EQ(of(blocks).tensor_parallel_wire, (4 * 8 + 2) * input);
  EXPECT_EQ(of(blocks).partition_wire, 0u);
  blocks.has_embedding = false;
  EXPECT_EQ(of(blocks).tensor_parallel_wire, (4 * 8 + 1) * input);
  blocks.has_output = false;
  EXPECT_EQ(of(blocks).tensor_parallel_wire, 4 * 8 * input);
  blocks.tensor_parallel = 4;
  EXPECT_EQ(of(blocks).tensor_parallel_wire, 4 * 8 * input / 2 * 3);
}

TEST(ActivationFormulas, SayWhereThePaperDisagreesWithItself) {
  TransformerBlocks sixteen = kLarge;
  sixteen.tensor_parallel = 16;
  EXPECT_EQ(of(sixteen).saved, 67'108'864'000u);
  EXPECT_EQ(of(sixteen).saved_partitioned, 4'194'304'000u);

  // Printed: 60 GB in section 3.2 and 33 GB in section 6.1 for the same inputs, and 2 GB for them over 16
  // ranks.
  const auto printed = [](std::uint64_t bytes) { return std::round(static_cast<double>(bytes) / 1e9); };
  EXPECT_EQ(printed(of(sixteen).saved), 67);
  EXPECT_EQ(printed(of(sixteen).saved_partitioned), 4);
}

TEST(ActivationFormulas, ReadTheWordsOfRecomputationThatTheyWrite) {
  for (const int every : {0, 1, 2, 3, 2147483647}) EXPECT_EQ(parse_recompute(recompute_name(every)), every);
  EXPECT_EQ(recompute_name(0), "none");
  EXPECT_EQ(recompute_name(1), "block");
  EXPECT_EQ(recompute_name(6), "every:6");
  EXPECT_EQ(parse_recompute("every:1"), 1);
  for (const char* word : {"", "all", "every", "every:", "every:0", "every:-1", "every:2x", "every: 2",
                           "every:+2", "every:2147483648", "Block"})
    EXPECT_EQ(parse_recompute(word), std::nullopt) << word;
}

TEST(ActivationFormulas, RefuseNumbersThatAreNoShape) {
  TransformerBlocks none = kSmall;
  none.batch = 0;
  EXPECT_EQ(activation_formulas(none).status().code(), StatusCode::kInvalidArgument);
  TransformerBlocks negative = kSmall;
  negative.recompute_every = -1;
  EXPECT_NE(activation_formulas(negative).status().message().find("is -1"), std::string::npos);
  TransformerBlocks huge = kSmall;
  huge.batch = std::uint64_t{1} << 40;
  EXPECT_NE(activation_formulas(huge).status().message().find("2^62"), std::string::npos);
}

}  // namespace
}  // namespace forebay::testing
