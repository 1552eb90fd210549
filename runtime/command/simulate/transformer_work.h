// The work of a transformer's passes on one rank, kernel by kernel: products of matrices, passes over memory
// and sums over tensor-parallel ranks. Shapes only; the times are ClusterTiming's.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/data_type.h"
#include "forebay/model_shape.h"

namespace forebay {

struct WorkPiece {
  enum class Kind : std::uint8_t {
    kProduct,    // m x k times k x n, `count` times.
    kAttention,  // The same in a fused kernel.
    kPass,       // `bytes` read and written.
    kSum,        // Over the tensor-parallel ranks, `bytes` of activations.
  };
  Kind kind = Kind::kPass;
  double m = 0, n = 0, k = 0, count = 1;
  std::uint64_t bytes = 0;
  double flops() const { return 2 * m * n * k * count; }
};
using WorkPieces = std::vector<WorkPiece>;

struct TransformerWorkOptions {
  TransformerShape shape;  // Complete.
  std::uint64_t batch = 1;
  std::uint64_t sequence = 1;
  int tensor_parallel = 1;
  DataType dtype = DataType::kBfloat16;
  bool fused_attention = true;
};

struct LayerWork {
  WorkPieces forward;
  // The layer again, before its backward pass: without the last product and what follows it, which nothing
  // reads.
  WorkPieces recomputed;
  WorkPieces backward;
};

// The forward pass of each kind of unit, and the backward pass that belongs to it.
struct TransformerWork {
  WorkPieces embedding, final;
  WorkPieces embedding_backward, final_backward;
  LayerWork layer;        // With experts where the shape has them, each with an equal part of the tokens.
  LayerWork dense_layer;  // The first ones of a mixture of experts.
  std::uint64_t dense_layers = 0;

  const LayerWork& of_layer(std::uint64_t index) const { return index < dense_layers ? dense_layer : layer; }
};

TransformerWork transformer_work(const TransformerWorkOptions& options);

double total_flops(const WorkPieces& pieces);

}  // namespace forebay
