// The work that `forebay simulate` counts for a transformer, against the formulas that it stands for.
#include "runtime/command/simulate/transformer_work.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>

#include "forebay/error.h"

namespace forebay {
namespace {

constexpr std::uint64_t kHidden = 256;
constexpr std::uint64_t kHeads = 8;
constexpr std::uint64_t kBatch = 3;
constexpr std::uint64_t kSequence = 128;
constexpr std::uint64_t kTokens = kBatch * kSequence;
constexpr std::uint64_t kElementBytes = 2;

TransformerWorkOptions options_of(TransformerKind kind, int tensor_parallel, bool fused) {
  TransformerWorkOptions options;
  options.shape.kind = kind;
  options.shape.layers = 2;
  options.shape.hidden = kHidden;
  options.shape.heads = kHeads;
  options.shape.vocabulary = 1000;
  options.shape.positions = kSequence;
  if (kind == TransformerKind::kLlama) {
    options.shape.intermediate = 3 * kHidden;
    options.shape.key_value_heads = 4;
  }
  options.shape = value_or_throw(complete_shape(options.shape));
  options.batch = kBatch;
  options.sequence = kSequence;
  options.tensor_parallel = tensor_parallel;
  options.fused_attention = fused;
  return options;
}

std::uint64_t pass_bytes(const WorkPieces& pieces) {
  std::uint64_t bytes = 0;
  for (const WorkPiece& piece : pieces) bytes += piece.kind == WorkPiece::Kind::kPass ? piece.bytes : 0;
  return bytes;
}

// Table 2 of the scaling laws of Kaplan et al. (arXiv 2001.08361): 2 operations a weight and token, and for
// attention two products of sequence by sequence by hidden.
TEST(TransformerWork, ProductsOfALayerAreThoseOfTheFormula) {
  for (const bool fused : {true, false}) {
    for (const std::uint64_t ranks : {1, 2, 4}) {
      const TransformerWork work =
          transformer_work(options_of(TransformerKind::kGpt2, static_cast<int>(ranks), fused));
      const std::uint64_t weights = 12 * kHidden * kHidden;
      const std::uint64_t flops = 2 * kTokens * weights + 4 * kBatch * kSequence * kSequence * kHidden;
      EXPECT_EQ(total_flops(work.layer.forward), static_cast<double>(flops / ranks));
      EXPECT_EQ(total_flops(work.layer.backward), 2 * total_flops(work.layer.forward));
      const std::uint64_t last_product = 2 * kTokens * 4 * kHidden * kHidden;
      EXPECT_EQ(total_flops(work.layer.forward) - total_flops(work.layer.recomputed),
                static_cast<double>(last_product / ranks));
    }
  }
}

// The kernels that a trainer without fused ones runs more, read and written: five passes over the scores;
// the copies to an order by heads and back; GPT-2's four biases and its two dropouts.
TEST(TransformerWork, PlainAttentionReadsTheScoresAndBiasesAndDropoutMore) {
  for (const std::uint64_t ranks : {1, 2, 4}) {
    const auto more = [&](TransformerKind kind) {
      return pass_bytes(transformer_work(options_of(kind, static_cast<int>(ranks), false)).layer.forward) -
             pass_bytes(transformer_work(options_of(kind, static_cast<int>(ranks), true)).layer.forward);
    };
    const std::uint64_t scores = 10 * kBatch * kHeads * kSequence * kSequence / ranks;

    const std::uint64_t whole_width = 2 * 4 * kHidden;                   // Two biases, two dropouts.
    const std::uint64_t parted = (4 * 3 + 2 + 2 * 4) * kHidden / ranks;  // Two copies, two biases.
    EXPECT_EQ(more(TransformerKind::kGpt2), (scores + kTokens * (whole_width + parted)) * kElementBytes);
    // Keys and values have half as many heads as queries; no bias and no dropout.
    EXPECT_EQ(more(TransformerKind::kLlama),
              (scores + kTokens * (2 * 2 + 2) * kHidden / ranks) * kElementBytes);
  }
}

// A product reads a matrix once for all tokens; an expert is read for its part of the tokens.
TEST(TransformerWork, ProductsReadTheMatricesThatThePlanCounts) {
  TransformerShape mixture;
  mixture.kind = TransformerKind::kLlama;
  mixture.layers = 3;
  mixture.hidden = kHidden;
  mixture.heads = kHeads;
  mixture.vocabulary = 1000;
  mixture.intermediate = 4 * kHidden;
  mixture.key_value_heads = 4;
  mixture.experts = {.count = 16, .active = 3, .shared = 1, .intermediate = 64, .dense_layers = 1};
  TransformerShape latent = mixture;  // DeepSeek 3.
  latent.key_value_heads = kHeads;
  latent.latent = {.query_rank = 48, .key_value_rank = 40, .rotary_dimension = 16, .value_dimension = 24};
  TransformerShape without_query_rank = latent;  // DeepSeek 2 Lite.
  without_query_rank.latent.query_rank = 0;
  TransformerShape dense = mixture;
  dense.experts = {};
  for (const TransformerShape& shape : {mixture, latent, without_query_rank, dense}) {
    for (const int ranks : {1, 2, 4}) {
      TransformerWorkOptions options = options_of(TransformerKind::kLlama, ranks, true);
      options.shape = value_or_throw(complete_shape(shape));
      const TransformerWork work = transformer_work(options);
      const ModelShape model = value_or_throw(make_model_shape(options.shape, {.tensor_parallel = ranks}));
      for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
        double weights = 0;
        for (const ParameterShape& parameter : model.units[1 + layer].parameters) {
          if (parameter.shape.size() != 2) continue;
          const bool is_expert = parameter.name.find(".experts.") != std::string::npos;
          weights +=
              static_cast<double>(parameter.count) * (is_expert ? static_cast<double>(shape.experts.active) /
                                                                      static_cast<double>(shape.experts.count)
                                                                : 1);
        }
        double flops = 0;
        for (const WorkPiece& piece : work.of_layer(layer).forward)
          flops += piece.kind == WorkPiece::Kind::kProduct ? piece.flops() : 0;
        EXPECT_NEAR(flops, 2 * kTokens * weights, 1e-9 * flops) << ranks << " ranks, layer " << layer;
      }
    }
  }
}

TEST(TransformerWork, LatentAttentionHasQueriesAndValuesOfTheirOwnWidths) {
  TransformerWorkOptions options = options_of(TransformerKind::kLlama, 2, true);
  options.shape.key_value_heads = kHeads;
  options.shape.latent = {
      .query_rank = 48, .key_value_rank = 40, .rotary_dimension = 16, .value_dimension = 24};
  double flops = 0;
  for (const WorkPiece& piece : transformer_work(options).layer.forward)
    flops += piece.kind == WorkPiece::Kind::kAttention ? piece.flops() : 0;
  EXPECT_EQ(flops, 2.0 * kBatch * kHeads / 2 * kSequence * kSequence * (kHidden / kHeads + 16 + 24));
}

// Passes read or write a layer's activations; backward they move half as much again.
TEST(TransformerWork, PassesOfAMixtureAreThoseOfItsTokens) {
  TransformerWorkOptions options = options_of(TransformerKind::kLlama, 2, true);
  options.shape.experts = {.count = 16, .active = 3, .shared = 2, .intermediate = 64};
  const TransformerWork work = transformer_work(options);
  const std::uint64_t norms_and_sums = 2 + 3 + 2 + 3;
  const std::uint64_t shared = 3 * 2 * 64 / 2;
  const std::uint64_t routed = (2 * 3 + 3 + 1) * kHidden + 3 * 3 * 64 / 2;  // Copied, and added up.
  const std::uint64_t elements = kTokens * (norms_and_sums * kHidden + shared + routed);
  EXPECT_EQ(pass_bytes(work.layer.forward), elements * kElementBytes);
  EXPECT_EQ(pass_bytes(work.layer.backward), elements * kElementBytes * 3 / 2);
}

TEST(TransformerWork, EachRankFillsItsRowsOfTheEmbedding) {
  for (const int ranks : {1, 2}) {
    const TransformerWork work = transformer_work(options_of(TransformerKind::kGpt2, ranks, true));
    const std::uint64_t filled = 1000 / static_cast<std::uint64_t>(ranks) * kHidden * kElementBytes;
    EXPECT_EQ(pass_bytes(work.embedding_backward), filled + pass_bytes(work.embedding));
    EXPECT_EQ(pass_bytes(work.embedding), 3 * kTokens * kHidden * kElementBytes);
    EXPECT_EQ(pass_bytes(work.final),
              2 * kTokens * (kHidden + 1000 / static_cast<std::uint64_t>(ranks)) * kElementBytes);
  }
}

TEST(TransformerWork, SumsOverTensorParallelRanksAreTwoALayerAndPass) {
  for (const int ranks : {1, 2}) {
    const TransformerWork work = transformer_work(options_of(TransformerKind::kGpt2, ranks, true));
    for (const WorkPieces* pieces : {&work.layer.forward, &work.layer.backward}) {
      int sums = 0;
      for (const WorkPiece& piece : *pieces) {
        if (piece.kind != WorkPiece::Kind::kSum) continue;
        ++sums;
        EXPECT_EQ(piece.bytes, kTokens * kHidden * kElementBytes);
      }
      EXPECT_EQ(sums, ranks == 1 ? 0 : 2);
    }
  }
}

// One word for each piece: MxKxN, "a" before it in a fused kernel and "*COUNT" behind it; the bytes of a
// pass;
// "+" and the bytes of a sum.
std::string text_of(const WorkPieces& pieces) {
  std::ostringstream text;
  for (const WorkPiece& piece : pieces) {
    text << (text.tellp() == 0 ? "" : " ");
    if (piece.kind == WorkPiece::Kind::kPass) {
      text << piece.bytes;
    } else if (piece.kind == WorkPiece::Kind::kSum) {
      text << "+" << piece.bytes;
    } else {
      text << (piece.kind == WorkPiece::Kind::kAttention ? "a" : "") << piece.m << "x" << piece.k << "x"
           << piece.n;
      if (piece.count != 1) text << "*" << piece.count;
    }
  }
  return text.str();
}

// Two sequences of 8 tokens, in bf16. Widths that differ, so that no one stands for another.
TEST(TransformerWork, EachPieceHasItsSize) {
  TransformerWorkOptions options;
  options.shape = {.layers = 3, .hidden = 64, .heads = 4, .vocabulary = 101, .positions = 32};
  options.batch = 2;
  options.sequence = 8;
  const auto work = [&](int ranks, bool fused) {
    TransformerWorkOptions complete = options;
    complete.shape = value_or_throw(complete_shape(options.shape));
    complete.tensor_parallel = ranks;
    complete.fused_attention = fused;
    return transformer_work(complete);
  };
  const TransformerWork gpt2 = work(1, true);
  EXPECT_EQ(text_of(gpt2.embedding), R"(6144)");
  EXPECT_EQ(text_of(gpt2.layer.forward),
            R"(4096 16x64x192 a8x16x8*8 a8x8x16*8 16x64x64 6144 4096 16x64x256 16384 16x256x64 6144)");
  EXPECT_EQ(text_of(gpt2.layer.recomputed),
            R"(4096 16x64x192 a8x16x8*8 a8x8x16*8 16x64x64 6144 4096 16x64x256 16384)");
  EXPECT_EQ(
      text_of(gpt2.layer.backward),
      R"(9216 16x64x256 256x16x64 24576 16x256x64 64x16x256 6144 9216 16x64x64 64x16x64 a8x16x8*8 a8x8x16*8 a8x8x16*8 a16x8x8*8 16x192x64 64x16x192 6144)");
  EXPECT_EQ(text_of(gpt2.final), R"(4096 16x64x101 6464)");
  EXPECT_EQ(text_of(gpt2.final_backward), R"(9696 16x101x64 64x16x101 6144)");
  EXPECT_EQ(text_of(gpt2.embedding_backward), R"(12928 6144)");
  EXPECT_EQ(gpt2.dense_layers, 0u);
  const TransformerWork parted = work(2, false);
  EXPECT_EQ(text_of(parted.embedding), R"(6144 +2048)");
  EXPECT_EQ(
      text_of(parted.layer.forward),
      R"(4096 16x64x96 12288 8x16x8*4 5120 8x8x16*4 2048 16x32x64 +2048 8192 6144 4096 16x64x128 8192 8192 16x128x64 +2048 8192 6144)");
  EXPECT_EQ(
      text_of(parted.layer.recomputed),
      R"(4096 16x64x96 12288 8x16x8*4 5120 8x8x16*4 2048 16x32x64 +2048 8192 6144 4096 16x64x128 8192 8192)");
  EXPECT_EQ(
      text_of(parted.layer.backward),
      R"(9216 12288 +2048 16x64x128 128x16x64 12288 12288 16x128x64 64x16x128 6144 9216 12288 +2048 16x64x32 32x16x64 3072 8x16x8*4 8x8x16*4 7680 8x8x16*4 16x8x8*4 18432 16x96x64 64x16x96 6144)");
  EXPECT_EQ(text_of(parted.final), R"(4096 16x64x51 3264)");
  EXPECT_EQ(text_of(parted.embedding_backward), R"(6400 6144)");

  options.shape.kind = TransformerKind::kLlama;
  options.shape.intermediate = 90;
  options.shape.key_value_heads = 1;
  options.shape.head_dimension = 24;
  options.shape.query_key_norm = options.shape.output_norms = true;
  EXPECT_EQ(
      text_of(work(1, true).layer.forward),
      R"(4096 16x64x144 7680 a8x24x8*8 a8x8x24*8 16x96x64 4096 6144 4096 16x64x180 8640 16x90x64 4096 6144)");
  EXPECT_EQ(
      text_of(work(4, false).layer.forward),
      R"(4096 16x64x72 3072 4608 8x24x8*2 2560 8x8x24*2 1536 16x24x64 +2048 4096 6144 4096 16x64x46 2208 16x23x64 +2048 4096 6144)");

  options.shape.query_key_norm = options.shape.output_norms = false;
  options.shape.experts = {.count = 12, .active = 3, .shared = 2, .intermediate = 30, .dense_layers = 1};
  const TransformerWork mixture = work(4, true);
  EXPECT_EQ(
      text_of(mixture.layer.forward),
      R"(4096 16x64x72 a8x24x8*2 a8x8x24*2 16x24x64 +2048 6144 4096 16x64x12 16x64x30 1440 16x15x64 12288 4x64x16*12 2304 4x8x64*12 8192 +2048 6144)");
  EXPECT_EQ(
      text_of(mixture.dense_layer.forward),
      R"(4096 16x64x72 a8x24x8*2 a8x8x24*2 16x24x64 +2048 6144 4096 16x64x46 2208 16x23x64 +2048 6144)");
  EXPECT_EQ(mixture.dense_layers, 1u);
  EXPECT_EQ(&mixture.of_layer(0), &mixture.dense_layer);
  EXPECT_EQ(&mixture.of_layer(1), &mixture.layer);
  // More experts than the tokens can use.
  options.shape.experts.count = 100;
  EXPECT_EQ(
      text_of(work(1, true).layer.forward),
      R"(4096 16x64x144 a8x24x8*8 a8x8x24*8 16x96x64 6144 4096 16x64x100 16x64x120 5760 16x60x64 12288 1x64x60*48 8640 1x30x64*48 8192 6144)");

  options.shape.experts = {};
  options.shape.key_value_heads = 0;
  options.shape.head_dimension = 0;
  options.shape.latent = {
      .query_rank = 20, .key_value_rank = 28, .rotary_dimension = 6, .value_dimension = 10};
  EXPECT_EQ(
      text_of(work(2, true).layer.forward),
      R"(4096 16x64x20 1280 16x20x44 16x64x34 1792 16x28x52 a8x22x8*4 a8x8x10*4 16x20x64 +2048 6144 4096 16x64x90 4320 16x45x64 +2048 6144)");
  options.shape.latent.query_rank = 0;
  EXPECT_EQ(
      text_of(work(2, false).layer.forward),
      R"(4096 16x64x44 16x64x34 1792 16x28x52 6912 8x22x8*4 5120 8x8x10*4 1280 16x20x64 +2048 6144 4096 16x64x90 4320 16x45x64 +2048 6144)");
}

}  // namespace
}  // namespace forebay
