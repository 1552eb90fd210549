// The operations of a GPT besides matrix products, forward and backward, in fp32 on the host.
//
// All matrices are row-major. Each output element is computed by one thread in one fixed order, so the bits
// do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace forebay::gpt {

// How many OpenMP threads the calling thread's parallel loops and matrix products use from now on: exactly so
// many, which is tried here. Without OpenMP it is always one.
// Errors: throws Error(kUnavailable) when OpenMP gives another number.
void set_compute_threads(int count);
// The processors, as far as OpenMP's own limits let them be used.
int default_compute_threads();

// matrix[r][c] += bias[c].
void add_bias(float* matrix, const float* bias, std::size_t rows, std::size_t columns);
// bias_gradient[c] = sum over r, ascending, of gradient[r][c].
void bias_backward(const float* gradient, float* bias_gradient, std::size_t rows, std::size_t columns);

// target = a + b.
void add(const float* a, const float* b, float* target, std::size_t count);

// output[r] = tokens[tokens_in[r]] + positions[r mod sequence].
void embed(std::span<const std::uint8_t> tokens_in, const float* tokens, const float* positions,
           float* output, std::size_t sequence, std::size_t hidden);
void embed_tokens_backward(std::span<const std::uint8_t> tokens_in, const float* gradient,
                           float* tokens_gradient, std::size_t vocabulary, std::size_t hidden);
void embed_positions_backward(const float* gradient, float* positions_gradient, std::size_t rows,
                              std::size_t sequence, std::size_t hidden);

// y = (x - mean) / sqrt(variance + 1e-5) * gain + bias, over the columns of each row. `mean` and `inverse`
// (the reciprocal of the root) are kept for the backward pass.
struct LayerNorm {
  const float* input;
  float* mean;
  float* inverse;
  std::size_t rows;
  std::size_t hidden;
};
void layer_norm(const LayerNorm& norm, const float* gain, const float* bias, float* output);
// input_gradient += the gradient through the norm (the residual path is already in it).
void layer_norm_backward(const LayerNorm& norm, const float* gain, const float* gradient,
                         float* input_gradient, float* gain_gradient, float* bias_gradient);

// GELU by tanh: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
void gelu(const float* input, float* output, std::size_t count);
// gradient *= gelu'(input).
void gelu_backward(const float* input, float* gradient, std::size_t count);

// Causal attention of `heads` heads over `batch` samples. A row of `qkv` is [query | key | value], each
// `hidden` wide with the heads beside one another; scores are scaled by 1 / sqrt(hidden / heads).
struct Attention {
  std::size_t batch;
  std::size_t sequence;
  std::size_t hidden;
  std::size_t heads;
  int threads;  // How many pieces of workspace there are.
  std::size_t head_columns() const { return hidden / heads; }
  // Floats of workspace that one thread needs.
  std::size_t workspace_count() const { return 2 * hidden / heads * sequence + 2 * sequence; }
};
// `log_sums` [batch, heads, sequence] gets the logarithm of each softmax's denominator: with it the backward
// pass makes the probabilities again instead of keeping them. `workspace`: for each thread.
void attention(const Attention& shape, const float* qkv, float* output, float* log_sums, float* workspace);
void attention_backward(const Attention& shape, const float* qkv, const float* log_sums,
                        const float* gradient, float* qkv_gradient, float* workspace);

// Mean over rows of -log softmax(logits[r])[targets[r]], added in double in the order of rows. `row_losses`
// has one double for each row. `logits` become the gradient: (softmax - one-hot) * factor.
double cross_entropy(float* logits, std::span<const std::uint8_t> targets, std::size_t vocabulary,
                     float factor, double* row_losses);

}  // namespace forebay::gpt
