// The work that `forebay simulate` counts for a transformer, against the formulas that it stands for.
#include "runtime/command/simulate/transformer_work.h"

#include <gtest/gtest.h>

#include <cstdint>

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
      EXPECT_EQ(total_flops(work.layer), static_cast<double>(flops / ranks));
      EXPECT_EQ(total_flops(work.layer_backward), 2 * total_flops(work.layer));
      const std::uint64_t last_product = 2 * kTokens * 4 * kHidden * kHidden;
      EXPECT_EQ(total_flops(work.layer) - total_flops(work.recomputed_layer),
                static_cast<double>(last_product / ranks));
    }
  }
}

// The kernels that a trainer without fused ones runs more, read and written: five passes over the scores;
// the copies to an order by heads and back; GPT-2's four biases and its two dropouts.
TEST(TransformerWork, PlainAttentionReadsTheScoresAndBiasesAndDropoutMore) {
  for (const std::uint64_t ranks : {1, 2, 4}) {
    const auto more = [&](TransformerKind kind) {
      return pass_bytes(transformer_work(options_of(kind, static_cast<int>(ranks), false)).layer) -
             pass_bytes(transformer_work(options_of(kind, static_cast<int>(ranks), true)).layer);
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

TEST(TransformerWork, SumsOverTensorParallelRanksAreTwoALayerAndPass) {
  for (const int ranks : {1, 2}) {
    const TransformerWork work = transformer_work(options_of(TransformerKind::kGpt2, ranks, true));
    for (const WorkPieces* pieces : {&work.layer, &work.layer_backward}) {
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

}  // namespace
}  // namespace forebay
