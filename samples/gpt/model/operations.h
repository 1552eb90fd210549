// The operations of a GPT, forward and backward, on one device. Activations and results are fp32.
//
// One struct holds the arguments of each operation; it is passed by value to a kernel, too. All matrices are
// row-major, and all pointers are memory of that device. There are two implementations: host threads
// (host_operations.h) and kernels on a stream (launched_operations.h). Both follow definitions.h, so with
// plain products their results are bit for bit the same, with any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "forebay/data_type.h"
#include "model/definitions.h"
#include "model/matmul.h"
#include "model/tokens.h"

namespace forebay::gpt {

// A matrix of fp32, or of the type in which an engine keeps parameters.
struct Operand {
  const void* data;
  DataType type;
};

// --- element by element ---

// target = source. Exact.
struct Widen {
  Operand source;
  float* target;
  std::size_t count;
};

// Rounds to nearest, ties to even. With `accumulate`, target = round(widened target + source).
struct Narrow {
  DataType type;
  const float* source;
  void* target;
  std::size_t count;
  bool accumulate;
};

// target = a + b.
struct Add {
  const float* a;
  const float* b;
  float* target;
  std::size_t count;
  FOREBAY_DEVICE void operator()(std::size_t i) const { target[i] = a[i] + b[i]; }
};

// target = source after dropout; source[0] has the index `first`. The two may be the same.
struct Drop {
  const float* source;
  float* target;
  std::size_t count;
  Dropout dropout;
  std::uint64_t first;
  FOREBAY_DEVICE void operator()(std::size_t i) const {
    target[i] = definitions::dropped(dropout, first + i, source[i]);
  }
};

struct Gelu {
  const float* input;
  float* output;
  std::size_t count;
  FOREBAY_DEVICE void operator()(std::size_t i) const { output[i] = definitions::gelu(input[i]); }
};

// gradient *= gelu'(input).
struct GeluBackward {
  const float* input;
  float* gradient;
  std::size_t count;
  FOREBAY_DEVICE void operator()(std::size_t i) const { gradient[i] *= definitions::gelu_slope(input[i]); }
};

// output = silu(gate) * up.
struct SwiGlu {
  const float* gate;
  const float* up;
  float* output;
  std::size_t count;
  FOREBAY_DEVICE void operator()(std::size_t i) const { output[i] = definitions::silu(gate[i]) * up[i]; }
};

// From the gradient of that output; `up_gradient` may be the same memory.
struct SwiGluBackward {
  const float* gate;
  const float* up;
  const float* gradient;
  float* gate_gradient;
  float* up_gradient;
  std::size_t count;
  FOREBAY_DEVICE void operator()(std::size_t i) const {
    const float g = gradient[i];
    gate_gradient[i] = g * up[i] * definitions::silu_slope(gate[i]);
    up_gradient[i] = g * definitions::silu(gate[i]);
  }
};

// The rotary position embedding, in place, of a matrix whose rows are heads of `columns` side by side:
// columns i and i + columns / 2 of a head at `position` turn by the angle position * frequencies[i].
struct Rotate {
  float* values;
  std::size_t count;  // Pairs of columns.
  std::size_t sequence;
  std::size_t heads;
  std::size_t columns;
  float direction;  // 1; -1 turns back, for the gradient.
  float frequencies[kRotaryPairsMax];
  FOREBAY_DEVICE void operator()(std::size_t i) const {
    const std::size_t half = columns / 2, pair = i % half, head = i / half;
    const std::size_t position = head / heads % sequence;
    const definitions::Turn turn = definitions::turn_by(static_cast<float>(position) * frequencies[pair]);
    float* const x = values + head * columns + pair;
    const float a = x[0], b = x[half], sine = direction * turn.sine;
    x[0] = a * turn.cosine - b * sine;
    x[half] = b * turn.cosine + a * sine;
  }
};

// --- matrices ---

// matrix[r][c] += bias[c].
struct AddBias {
  float* matrix;
  const float* bias;
  std::size_t rows;
  std::size_t columns;
};

// sums[c] = sum over r of matrix[r][c].
struct ColumnSums {
  const float* matrix;
  float* sums;
  std::size_t rows;
  std::size_t columns;
};

// --- embedding ---

// Tokens `first` to `first + count`: this rank has their embeddings.
struct TokenRange {
  std::size_t first;
  std::size_t count;
  FOREBAY_DEVICE bool has(std::size_t token) const { return token >= first && token - first < count; }
};

// output[r] = tokens[tokens_in[r] - range.first], or zero where that token is out of range.
struct Embed {
  TokenList tokens_in;
  const float* tokens;
  TokenRange range;
  float* output;
  std::size_t rows;
  std::size_t hidden;
};

struct EmbedTokensBackward {
  TokenList tokens_in;
  const float* gradient;
  TokenRange range;
  float* tokens_gradient;
  std::size_t rows;
  std::size_t hidden;
};

struct EmbedPositionsBackward {
  const float* gradient;
  float* positions_gradient;
  std::size_t rows;
  std::size_t sequence;
  std::size_t hidden;
};

// --- LayerNorm and RMSNorm ---

struct LayerNorm {
  const float* input;
  float* mean;     // Mean of each row, kept for the backward pass. Null: RMSNorm, whose mean counts as 0.
  float* inverse;  // 1 / sqrt(variance + epsilon) of each row, kept likewise.
  std::size_t rows;
  std::size_t hidden;
  float epsilon = definitions::kEpsilon;

  FOREBAY_DEVICE float mean_of(std::size_t row) const { return mean != nullptr ? mean[row] : 0.0F; }
};

// output = (input - mean) / sqrt(variance + epsilon) * gain + bias, over the columns of each row. A null bias
// is 0.
struct NormForward {
  LayerNorm norm;
  const float* gain;
  const float* bias;
  float* output;
};

// input_gradient += the gradient through the norm (the residual path is already in it).
struct NormBackward {
  LayerNorm norm;
  const float* gain;
  const float* gradient;
  float* input_gradient;
};

struct GainBackward {
  LayerNorm norm;
  const float* gradient;
  float* gain_gradient;
};

// --- the loss ---

// A part of the logits, [rows, columns]. Its columns are the tokens of `range`, then zeros.
struct LogitsPart {
  float* logits;
  TokenList targets;
  std::size_t rows;
  std::size_t columns;
  TokenRange range;
};

// Replaces each logit by exp(logit - the row's largest in this part), and writes the terms of the loss to
// `losses` [rows].
struct CrossEntropy {
  LogitsPart part;
  RowLossPart* losses;
};

// `losses` [parts, rows] has the terms of all ranks, added in rank order; this rank is the `index`-th.
// Replaces the result of CrossEntropy by the gradient, (softmax - one-hot) * factor.
struct CrossEntropyBackward {
  LogitsPart part;
  const RowLossPart* losses;
  std::size_t parts;
  std::size_t index;
  RowLoss* row_losses;
  float factor;
};

// --- attention ---

// Where a head's query, key and value columns of position 0 lie in `qkv`, and how far the next positions are.
struct HeadPlaces {
  std::size_t query, key, value;
  std::size_t query_stride, key_stride;  // Values have that of keys.
};

// Causal attention of `heads` heads over `batch` samples; scores are scaled by 1 / sqrt(hidden / heads). A
// row of `qkv` is [query | key | value], each `hidden` wide with the heads beside one another. With
// `kv_heads`, `qkv` is a matrix of queries, then one of keys, then one of values, and heads / kv_heads heads
// in order share a key and a value.
struct Attention {
  std::size_t batch;
  std::size_t sequence;
  std::size_t hidden;
  std::size_t heads;
  // Dropout of the probabilities. The undivided tensor is [samples, all heads, sequence, sequence]; these
  // samples and heads are a part.
  Dropout dropout = {};
  std::size_t first_sample = 0;
  std::size_t first_head = 0;
  std::size_t all_heads = 0;
  std::size_t kv_heads = 0;  // 0: each head has a key and a value.

  FOREBAY_DEVICE std::size_t kv_head_count() const { return kv_heads == 0 ? heads : kv_heads; }
  FOREBAY_DEVICE std::size_t heads_of_key() const { return heads / kv_head_count(); }
  FOREBAY_DEVICE HeadPlaces places(std::size_t sample, std::size_t head) const {
    const std::size_t row = sample * sequence, columns = head_columns();
    if (kv_heads == 0) {
      const std::size_t query = row * 3 * hidden + head * columns;
      return {query, query + hidden, query + 2 * hidden, 3 * hidden, 3 * hidden};
    }
    const std::size_t kv_columns = kv_heads * columns, rows = batch * sequence;
    const std::size_t key = rows * hidden + row * kv_columns + head / heads_of_key() * columns;
    return {row * hidden + head * columns, key, key + rows * kv_columns, hidden, kv_columns};
  }
  FOREBAY_DEVICE std::size_t head_columns() const { return hidden / heads; }
  FOREBAY_DEVICE std::size_t softmax_rows() const { return batch * heads * sequence; }
  // The probability with which query `position` of a head sees position 0, for `dropout`.
  FOREBAY_DEVICE std::uint64_t dropout_index(std::size_t sample, std::size_t head,
                                             std::size_t position) const {
    return (((first_sample + sample) * all_heads + first_head + head) * sequence + position) * sequence;
  }
};

// `softmax` [batch, heads, sequence] is kept for the backward pass.
struct AttentionForward {
  Attention shape;
  const float* qkv;
  float* output;
  SoftmaxRow* softmax;
  std::byte* workspace;  // See prepare_attention().
};

struct AttentionBackward {
  Attention shape;
  const float* qkv;
  const SoftmaxRow* softmax;
  const float* gradient;
  float* qkv_gradient;
  std::byte* workspace;
};

// The operations that are one kernel each.
#define FOREBAY_GPT_OPERATIONS(ROW) \
  ROW(Widen)                        \
  ROW(Narrow)                       \
  ROW(Add)                          \
  ROW(Drop)                         \
  ROW(Gelu)                         \
  ROW(GeluBackward)                 \
  ROW(SwiGlu)                       \
  ROW(SwiGluBackward)               \
  ROW(Rotate)                       \
  ROW(AddBias)                      \
  ROW(ColumnSums)                   \
  ROW(Embed)                        \
  ROW(EmbedTokensBackward)          \
  ROW(EmbedPositionsBackward)       \
  ROW(NormForward)                  \
  ROW(NormBackward) ROW(GainBackward) ROW(CrossEntropy) ROW(CrossEntropyBackward) ROW(AttentionForward)

class Operations {
 public:
  virtual ~Operations() = default;

  // The implementation of the products: "library" or "plain".
  virtual const char* matmul() const noexcept = 0;
  // True: calls queue work on a stream and return at once; the engine's thread makes them. False: calls
  // compute; the stream's thread makes them (compute_stream.h).
  virtual bool queues() const noexcept = 0;

  // --- preparations, called before the first operation; each returns the bytes of workspace, aligned to 256
  // bytes ---
  virtual std::size_t prepare_product(const ProductShape& shape, DataType b_type) = 0;
  virtual std::size_t prepare_attention(const Attention& shape) = 0;

  // c = op(a) * op(b).
  virtual void multiply(const ProductShape& shape, const float* a, Operand b, float* c,
                        std::byte* workspace) = 0;
  virtual void zero(float* target, std::size_t count) = 0;
#define FOREBAY_DECLARE_OPERATION(Arguments) virtual void run(const Arguments& arguments) = 0;
  FOREBAY_GPT_OPERATIONS(FOREBAY_DECLARE_OPERATION)
#undef FOREBAY_DECLARE_OPERATION
  virtual void run(const AttentionBackward& arguments) = 0;
};

#define FOREBAY_OVERRIDE_OPERATION(Arguments) void run(const Arguments& arguments) override;

// The mean of the rows' losses, in double and in the order of rows.
double mean_loss(std::span<const RowLoss> rows);

}  // namespace forebay::gpt
