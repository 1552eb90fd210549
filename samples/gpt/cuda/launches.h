// The arguments of each of the model's kernels: one struct, passed by value. Pointers are device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/data_type.h"
#include "model/definitions.h"
#include "model/operations.h"

namespace forebay::gpt::kernels {

// Threads per block, for every kernel.
inline constexpr unsigned kThreads = 256;
// Rows or columns of a tile of the matrix product, and the depth that is in shared memory at a time.
inline constexpr std::size_t kTile = 64;
inline constexpr std::size_t kTileDepth = 16;
// Columns that one block sums.
inline constexpr std::size_t kSumColumns = 32;

struct WidenLaunch {
  Operand source;
  float* target;
  std::size_t count;
};

struct NarrowLaunch {
  const float* source;
  void* target;
  std::size_t count;
  DataType type;
  bool accumulate;
};

struct AddBiasLaunch {
  float* matrix;
  const float* bias;
  std::size_t rows;
  std::size_t columns;
};

struct ColumnSumsLaunch {
  const float* matrix;
  float* sums;
  std::size_t rows;
  std::size_t columns;
};

struct AddLaunch {
  const float* a;
  const float* b;
  float* target;
  std::size_t count;
};

// gelu: target = gelu(input). gelu_backward: target *= gelu'(input).
struct GeluLaunch {
  const float* input;
  float* target;
  std::size_t count;
};

struct DropLaunch {
  const float* source;
  float* target;
  std::size_t count;
  Dropout dropout;
  std::uint64_t first;
};

struct EmbedLaunch {
  const std::uint8_t* tokens_in;
  const float* tokens;
  TokenRange range;
  float* output;
  std::size_t rows;
  std::size_t hidden;
};

struct EmbedTokensBackwardLaunch {
  const std::uint8_t* tokens_in;
  const float* gradient;
  TokenRange range;
  float* tokens_gradient;
  std::size_t rows;
  std::size_t hidden;
};

struct EmbedPositionsBackwardLaunch {
  const float* gradient;
  float* positions_gradient;
  std::size_t rows;
  std::size_t sequence;
  std::size_t hidden;
};

struct LayerNormLaunch {
  LayerNorm norm;
  const float* gain;
  const float* bias;
  float* output;
};

struct LayerNormBackwardLaunch {
  LayerNorm norm;
  const float* gain;
  const float* gradient;
  float* input_gradient;
};

struct GainBackwardLaunch {
  LayerNorm norm;
  const float* gradient;
  float* gain_gradient;
};

// `scores` has two rows of shape.sequence for each block of the grid; `means` is [batch, heads, sequence].
struct AttentionLaunch {
  Attention shape;
  const float* qkv;
  float* output;
  SoftmaxRow* softmax;
  float* scores;
};

struct AttentionBackwardLaunch {
  Attention shape;
  const float* qkv;
  const SoftmaxRow* softmax;
  const float* gradient;
  float* qkv_gradient;
  float* scores;
  float* means;
};

struct CrossEntropyLaunch {
  LogitsPart part;
  RowLossPart* losses;
};

struct CrossEntropyBackwardLaunch {
  LogitsPart part;
  const RowLossPart* losses;
  std::size_t parts;
  std::size_t index;
  RowLoss* row_losses;
  float factor;
};

struct ProductLaunch {
  ProductShape shape;
  const float* a;
  Operand b;
  float* c;
};

}  // namespace forebay::gpt::kernels
