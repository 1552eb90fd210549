#include "runtime/command/simulate/transformer_work.h"

#include <algorithm>

#include "forebay/units.h"

namespace forebay {
namespace {

using Kind = WorkPiece::Kind;

// Plain attention stands for a trainer of its time, in which each operation is a kernel of its own. Passes
// over the scores: scale, two of the mask, softmax, dropout; each read and written.
constexpr std::uint64_t kScorePasses = 5;

class Pieces {
 public:
  explicit Pieces(const TransformerWorkOptions& options)
      : o_(options),
        ranks_(static_cast<std::uint64_t>(options.tensor_parallel)),
        tokens_(options.batch * options.sequence),
        element_(element_bytes(options.dtype)) {}

  void product(std::uint64_t rows, std::uint64_t inputs, std::uint64_t outputs) {
    list.push_back({.kind = Kind::kProduct,
                    .m = static_cast<double>(rows),
                    .n = static_cast<double>(outputs),
                    .k = static_cast<double>(inputs)});
  }
  // Passes over the activations of a layer of `width`.
  void pass(std::uint64_t times, std::uint64_t width) {
    list.push_back({.kind = Kind::kPass, .bytes = times * tokens_ * width * element_});
  }
  // The passes that a trainer with fused kernels does not have.
  void unfused_pass(std::uint64_t times, std::uint64_t width) {
    if (!o_.fused_attention) pass(times, width);
  }
  void sum() {
    if (ranks_ > 1) list.push_back({.kind = Kind::kSum, .bytes = tokens_ * o_.shape.hidden * element_});
  }

  void attention() {
    const TransformerShape& shape = o_.shape;
    const std::uint64_t heads = shape.heads / ranks_;
    const auto s = static_cast<double>(o_.sequence);
    const auto d = static_cast<double>(shape.head_dimension);
    const auto count = static_cast<double>(o_.batch * heads);
    const Kind kind = o_.fused_attention ? Kind::kAttention : Kind::kProduct;
    list.push_back({.kind = kind, .m = s, .n = s, .k = d, .count = count});
    if (!o_.fused_attention) {
      const std::uint64_t scores = o_.batch * heads * o_.sequence * o_.sequence;
      list.push_back({.kind = Kind::kPass, .bytes = 2 * kScorePasses * scores * element_});
    }
    list.push_back({.kind = kind, .m = s, .n = d, .k = s, .count = count});
  }

  void layer() {
    const TransformerShape& shape = o_.shape;
    const bool gpt2 = shape.kind == TransformerKind::kGpt2;
    const std::uint64_t h = shape.hidden;
    const std::uint64_t queries = shape.heads / ranks_ * shape.head_dimension;
    const std::uint64_t keys = ceil_div(shape.key_value_heads, ranks_) * shape.head_dimension;
    const std::uint64_t inner = ceil_div(active_intermediate(shape), ranks_);
    pass(2, h);
    product(tokens_, h, queries + 2 * keys);
    unfused_pass(gpt2 ? 4 : 2, queries + 2 * keys);  // The copy to an order by heads; GPT-2's bias.
    attention();
    unfused_pass(2, queries);  // The copy back.
    product(tokens_, queries, h);
    sum();
    if (gpt2) unfused_pass(4, h);  // The bias; dropout.
    pass(3, h);
    pass(2, h);
    product(tokens_, h, gpt2 ? inner : 2 * inner);
    if (gpt2) unfused_pass(2, inner);  // The bias.
    pass(gpt2 ? 2 : 3, inner);
    product(tokens_, inner, h);
    sum();
    if (gpt2) unfused_pass(4, h);  // The bias; dropout.
    pass(3, h);
  }
  void embedding() {
    pass(3, o_.shape.hidden);
    sum();
  }
  void final() {
    const std::uint64_t tokens_of_rank = ceil_div(o_.shape.vocabulary, ranks_);
    pass(2, o_.shape.hidden);
    product(tokens_, o_.shape.hidden, tokens_of_rank);
    pass(2, tokens_of_rank);
  }

  WorkPieces list;

 private:
  const TransformerWorkOptions& o_;
  const std::uint64_t ranks_;
  const std::uint64_t tokens_;
  const std::uint64_t element_;
};

// Each product becomes two, for the gradients of its inputs and of its weights; passes move half as much
// again. Sums stay where they are, one for each of the forward pass.
WorkPieces backward_of(const WorkPieces& forward) {
  WorkPieces list;
  for (auto piece = forward.rbegin(); piece != forward.rend(); ++piece) {
    if (piece->kind == Kind::kPass) {
      list.push_back(*piece);
      list.back().bytes = piece->bytes * 3 / 2;
    } else if (piece->kind == Kind::kSum) {
      list.push_back(*piece);
    } else {
      WorkPiece inputs = *piece;
      std::swap(inputs.n, inputs.k);
      WorkPiece weights = *piece;
      std::swap(weights.m, weights.k);
      list.insert(list.end(), {inputs, weights});
    }
  }
  return list;
}

WorkPieces made(const TransformerWorkOptions& options, void (Pieces::*make)()) {
  Pieces pieces(options);
  (pieces.*make)();
  return std::move(pieces.list);
}

}  // namespace

TransformerWork transformer_work(const TransformerWorkOptions& options) {
  TransformerWork work;
  work.embedding = made(options, &Pieces::embedding);
  work.layer = made(options, &Pieces::layer);
  work.final = made(options, &Pieces::final);
  work.recomputed_layer = work.layer;
  while (work.recomputed_layer.back().kind != Kind::kProduct) work.recomputed_layer.pop_back();
  work.recomputed_layer.pop_back();
  work.layer_backward = backward_of(work.layer);
  work.final_backward = backward_of(work.final);
  // Only adds rows to gradients, which are filled with zeros first.
  const std::uint64_t rows = options.shape.vocabulary / static_cast<std::uint64_t>(options.tensor_parallel);
  work.embedding_backward = {
      {.kind = Kind::kPass, .bytes = rows * options.shape.hidden * element_bytes(options.dtype)},
      work.embedding.front()};
  return work;
}

double total_flops(const WorkPieces& pieces) {
  double flops = 0;
  for (const WorkPiece& piece : pieces) flops += piece.flops();
  return flops;
}

}  // namespace forebay
