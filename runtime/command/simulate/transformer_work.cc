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

  // `count` matrices, each with so many rows.
  void product(double rows, std::uint64_t inputs, std::uint64_t outputs, double count = 1) {
    list.push_back({.kind = Kind::kProduct,
                    .m = rows,
                    .n = static_cast<double>(outputs),
                    .k = static_cast<double>(inputs),
                    .count = count});
  }
  void product(std::uint64_t inputs, std::uint64_t outputs) {
    product(static_cast<double>(tokens_), inputs, outputs);
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

  // A head has queries and keys of `width` elements, and values of `value_width`.
  void scores(std::uint64_t width, std::uint64_t value_width) {
    const std::uint64_t heads = o_.shape.heads / ranks_;
    const auto s = static_cast<double>(o_.sequence);
    const auto count = static_cast<double>(o_.batch * heads);
    const Kind kind = o_.fused_attention ? Kind::kAttention : Kind::kProduct;
    list.push_back({.kind = kind, .m = s, .n = s, .k = static_cast<double>(width), .count = count});
    if (!o_.fused_attention) {
      const std::uint64_t scores = o_.batch * heads * o_.sequence * o_.sequence;
      list.push_back({.kind = Kind::kPass, .bytes = 2 * kScorePasses * scores * element_});
    }
    list.push_back({.kind = kind, .m = s, .n = static_cast<double>(value_width), .k = s, .count = count});
  }

  void attention() {
    const TransformerShape& shape = o_.shape;
    const bool gpt2 = shape.kind == TransformerKind::kGpt2;
    const std::uint64_t h = shape.hidden;
    const std::uint64_t queries = shape.heads / ranks_ * shape.head_dimension;
    const std::uint64_t keys = ceil_div(shape.key_value_heads, ranks_) * shape.head_dimension;
    product(h, queries + 2 * keys);
    if (shape.query_key_norm) pass(2, queries + keys);
    unfused_pass(gpt2 ? 4 : 2, queries + 2 * keys);  // The copy to an order by heads; GPT-2's bias.
    scores(shape.head_dimension, shape.head_dimension);
    unfused_pass(2, queries);  // The copy back.
    product(queries, h);
  }
  void latent_attention() {
    const TransformerShape& shape = o_.shape;
    const LatentAttention& latent = shape.latent;
    const std::uint64_t h = shape.hidden;
    const std::uint64_t heads = shape.heads / ranks_;
    const std::uint64_t width = shape.head_dimension + latent.rotary_dimension;
    const std::uint64_t values = heads * latent.value_dimension;
    if (latent.query_rank == 0) {
      product(h, heads * width);
    } else {
      product(h, latent.query_rank);
      pass(2, latent.query_rank);
      product(latent.query_rank, heads * width);
    }
    product(h, latent.key_value_rank + latent.rotary_dimension);
    pass(2, latent.key_value_rank);
    product(latent.key_value_rank, heads * shape.head_dimension + values);
    unfused_pass(2, 2 * heads * width + values);  // The copy to an order by heads.
    scores(width, latent.value_dimension);
    unfused_pass(2, values);  // The copy back.
    product(values, h);
  }

  // `inner`: the width on this rank.
  void feed_forward(std::uint64_t inner) {
    const std::uint64_t h = o_.shape.hidden;
    const bool gpt2 = o_.shape.kind == TransformerKind::kGpt2;
    product(h, gpt2 ? inner : 2 * inner);
    if (gpt2) unfused_pass(2, inner);  // The bias.
    pass(gpt2 ? 2 : 3, inner);
    product(inner, h);
  }
  // The router, the shared experts as one, and the others, to which the tokens are copied.
  void mixture() {
    const Experts& experts = o_.shape.experts;
    const std::uint64_t h = o_.shape.hidden;
    const std::uint64_t inner = ceil_div(experts.intermediate, ranks_);
    product(h, experts.count);
    if (experts.shared > 0) feed_forward(ceil_div(experts.shared * experts.intermediate, ranks_));
    const std::uint64_t routed = tokens_ * experts.active;
    const auto used = static_cast<double>(std::min(experts.count, routed));
    const double rows = static_cast<double>(routed) / used;
    pass(2 * experts.active, h);
    product(rows, h, 2 * inner, used);
    pass(3 * experts.active, inner);
    product(rows, inner, h, used);
    pass(experts.active + 1, h);
  }

  void layer(bool dense) {
    const TransformerShape& shape = o_.shape;
    const bool gpt2 = shape.kind == TransformerKind::kGpt2;
    const std::uint64_t h = shape.hidden;
    pass(2, h);
    if (shape.latent.key_value_rank > 0) {
      latent_attention();
    } else {
      attention();
    }
    sum();
    if (gpt2) unfused_pass(4, h);  // The bias; dropout.
    if (shape.output_norms) pass(2, h);
    pass(3, h);
    pass(2, h);
    if (dense) {
      feed_forward(ceil_div(shape.intermediate, ranks_));
    } else {
      mixture();
    }
    sum();
    if (gpt2) unfused_pass(4, h);  // The bias; dropout.
    if (shape.output_norms) pass(2, h);
    pass(3, h);
  }
  void embedding() {
    pass(3, o_.shape.hidden);
    sum();
  }
  void final() {
    const std::uint64_t tokens_of_rank = ceil_div(o_.shape.vocabulary, ranks_);
    pass(2, o_.shape.hidden);
    product(o_.shape.hidden, tokens_of_rank);
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

LayerWork layer_work(const TransformerWorkOptions& options, bool dense) {
  LayerWork work;
  Pieces pieces(options);
  pieces.layer(dense);
  work.forward = std::move(pieces.list);
  work.recomputed = work.forward;
  while (work.recomputed.back().kind != Kind::kProduct) work.recomputed.pop_back();
  work.recomputed.pop_back();
  work.backward = backward_of(work.forward);
  return work;
}

}  // namespace

TransformerWork transformer_work(const TransformerWorkOptions& options) {
  TransformerWork work;
  Pieces embedding(options);
  embedding.embedding();
  work.embedding = std::move(embedding.list);
  Pieces final(options);
  final.final();
  work.final = std::move(final.list);
  const Experts& experts = options.shape.experts;
  work.layer = layer_work(options, experts.count == 0);
  work.dense_layers = experts.count == 0 ? 0 : experts.dense_layers;
  if (work.dense_layers > 0) work.dense_layer = layer_work(options, true);
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
