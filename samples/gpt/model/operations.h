// The operations of a GPT, forward and backward, on one device. Activations and results are fp32.
//
// All matrices are row-major, and all pointers are memory of that device. There are two implementations: host
// threads (host_operations.h) and kernels on a stream (launched_operations.h). Both follow definitions.h, so
// with plain products their results are bit for bit the same, with any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "forebay/data_type.h"
#include "model/definitions.h"
#include "model/matmul.h"

namespace forebay::gpt {

// A matrix of fp32, or of the type in which an engine keeps parameters.
struct Operand {
  const void* data;
  DataType type;
};

struct LayerNorm {
  const float* input;
  float* mean;     // Mean of each row, kept for the backward pass.
  float* inverse;  // 1 / sqrt(variance + 1e-5) of each row, kept likewise.
  std::size_t rows;
  std::size_t hidden;
};

// Causal attention of `heads` heads over `batch` samples. A row of `qkv` is [query | key | value], each
// `hidden` wide with the heads beside one another; scores are scaled by 1 / sqrt(hidden / heads).
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

  FOREBAY_DEVICE std::size_t head_columns() const { return hidden / heads; }
  FOREBAY_DEVICE std::size_t softmax_rows() const { return batch * heads * sequence; }
  // The probability with which query `position` of a head sees position 0, for `dropout`.
  FOREBAY_DEVICE std::uint64_t dropout_index(std::size_t sample, std::size_t head,
                                             std::size_t position) const {
    return (((first_sample + sample) * all_heads + first_head + head) * sequence + position) * sequence;
  }
};

// Tokens `first` to `first + count`: this rank has their embeddings.
struct TokenRange {
  std::size_t first;
  std::size_t count;
  FOREBAY_DEVICE bool has(std::size_t token) const { return token >= first && token - first < count; }
};

// A part of the logits, [rows, columns]. Its columns are the tokens of `range`, then zeros.
struct LogitsPart {
  float* logits;
  const std::uint8_t* targets;
  std::size_t rows;
  std::size_t columns;
  TokenRange range;
};

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

  // Exact.
  virtual void widen(Operand source, float* target, std::size_t count) = 0;
  // Rounds to nearest, ties to even. With `accumulate`, target = round(widened target + source).
  virtual void narrow(DataType type, const float* source, std::byte* target, std::size_t count,
                      bool accumulate) = 0;
  virtual void zero(float* target, std::size_t count) = 0;

  // matrix[r][c] += bias[c].
  virtual void add_bias(float* matrix, const float* bias, std::size_t rows, std::size_t columns) = 0;
  // bias_gradient[c] = sum over r of gradient[r][c].
  virtual void bias_backward(const float* gradient, float* bias_gradient, std::size_t rows,
                             std::size_t columns) = 0;
  // target = a + b.
  virtual void add(const float* a, const float* b, float* target, std::size_t count) = 0;
  // target = source after dropout; source[0] has the index `first`. The two may be the same.
  virtual void drop(const float* source, float* target, std::size_t count, const Dropout& dropout,
                    std::uint64_t first) = 0;

  // output[r] = tokens[tokens_in[r] - range.first], or zero where that token is out of range.
  virtual void embed(const std::uint8_t* tokens_in, const float* tokens, TokenRange range, float* output,
                     std::size_t rows, std::size_t hidden) = 0;
  virtual void embed_tokens_backward(const std::uint8_t* tokens_in, const float* gradient, TokenRange range,
                                     float* tokens_gradient, std::size_t rows, std::size_t hidden) = 0;
  virtual void embed_positions_backward(const float* gradient, float* positions_gradient, std::size_t rows,
                                        std::size_t sequence, std::size_t hidden) = 0;

  // y = (x - mean) / sqrt(variance + 1e-5) * gain + bias, over the columns of each row.
  virtual void layer_norm(const LayerNorm& norm, const float* gain, const float* bias, float* output) = 0;
  // input_gradient += the gradient through the norm (the residual path is already in it).
  virtual void layer_norm_backward(const LayerNorm& norm, const float* gain, const float* gradient,
                                   float* input_gradient, float* gain_gradient, float* bias_gradient) = 0;

  virtual void gelu(const float* input, float* output, std::size_t count) = 0;
  // gradient *= gelu'(input).
  virtual void gelu_backward(const float* input, float* gradient, std::size_t count) = 0;

  // `softmax` [batch, heads, sequence] is kept for the backward pass.
  virtual void attention(const Attention& shape, const float* qkv, float* output, SoftmaxRow* softmax,
                         std::byte* workspace) = 0;
  virtual void attention_backward(const Attention& shape, const float* qkv, const SoftmaxRow* softmax,
                                  const float* gradient, float* qkv_gradient, std::byte* workspace) = 0;

  // Replaces each logit by exp(logit - the row's largest in this part), and writes the terms of the loss to
  // `losses` [rows].
  virtual void cross_entropy(const LogitsPart& part, RowLossPart* losses) = 0;
  // `losses` [parts, rows] has the terms of all ranks, added in rank order; this rank is the `index`-th.
  // Replaces the result of cross_entropy() by the gradient, (softmax - one-hot) * factor.
  virtual void cross_entropy_backward(const LogitsPart& part, const RowLossPart* losses, std::size_t parts,
                                      std::size_t index, RowLoss* row_losses, float factor) = 0;
};

// The mean of the rows' losses, in double and in the order of rows.
double mean_loss(std::span<const RowLoss> rows);

}  // namespace forebay::gpt
