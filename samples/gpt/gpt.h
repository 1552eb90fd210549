// Gpt: the forward and backward pass of a GPT-2 style model on the host, unit by unit.
//
// It knows nothing of engines. Whoever drives it hands in, for each unit, where the parameters are and where
// the gradients go; so the same arithmetic runs under a ZeRO engine and in a plain loop. All it keeps
// (activations, workspaces) is in one piece of memory whose size is known from the start.
//
//   gpt.start(tokens, targets);
//   for each unit: gpt.forward(unit, parameters);
//   for each unit, last first: gpt.backward(unit, parameters, gradients);
//   gpt.loss();
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "forebay/data_type.h"
#include "matmul.h"
#include "operations.h"
#include "shape.h"

namespace forebay::gpt {

// Where the gradient of one parameter goes, in the model's data type. Null: it is not wanted.
struct GradientTarget {
  std::byte* data = nullptr;
  bool accumulate = false;  // "+=" rather than "=".
};

class Gpt {
 public:
  struct Options {
    GptShape shape;
    std::size_t batch = 1;
    DataType dtype = DataType::kFloat32;  // Of parameters and gradients.
    int threads = 1;                      // That will compute: set_compute_threads().
  };

  // Prepares `matmul`, which must outlive this, for the model's products.
  Gpt(const Options& options, MatMul& matmul);

  std::size_t memory_bytes() const { return memory_bytes_; }
  // `memory`, aligned to 64 bytes, holds memory_bytes().
  void use_memory(std::byte* memory) { memory_ = memory; }

  int unit_count() const { return static_cast<int>(shape_.layers) + 2; }

  // --- one pass; `parameters` and `gradients` are in the order of describe_units(), for the last unit with
  // the tied wte.weight after its own --- Both [batch, sequence].
  void start(std::span<const std::uint8_t> tokens, std::span<const std::uint8_t> targets);
  void forward(int unit, std::span<const std::byte* const> parameters);
  // The backward pass of unit 0 reads no parameters. The last unit's loss is multiplied by `loss_scale`.
  void backward(int unit, std::span<const std::byte* const> parameters,
                std::span<const GradientTarget> gradients, double loss_scale);
  // Mean over the tokens of the batch, not scaled. From the last unit's backward pass on.
  double loss() const { return loss_; }

 private:
  // Places in memory_, in bytes.
  struct BlockPlaces {
    std::size_t input, norm1, norm1_mean, norm1_inverse, qkv, log_sums, attended, middle, norm2, norm2_mean,
        norm2_inverse, expanded, activated;
  };

  void embedding_forward(std::span<const std::byte* const> parameters);
  void block_forward(std::size_t layer, std::span<const std::byte* const> parameters);
  void final_forward(std::span<const std::byte* const> parameters);
  void embedding_backward(std::span<const GradientTarget> gradients);
  void block_backward(std::size_t layer, std::span<const std::byte* const> parameters,
                      std::span<const GradientTarget> gradients);
  void final_backward(std::span<const std::byte* const> parameters, std::span<const GradientTarget> gradients,
                      double loss_scale);

  // output = input * weight + bias: [rows, in] x [in, out].
  void linear(const float* input, const std::byte* weight, const std::byte* bias, std::size_t in,
              std::size_t out, float* output);
  // The gradients of `linear`. `input_gradient` gets "=".
  struct LinearGradient {
    const float* input;
    const float* output_gradient;
    float* input_gradient;
    const std::byte* weight;
    GradientTarget weight_gradient;
    GradientTarget bias_gradient;
    std::size_t in;
    std::size_t out;
  };
  void linear_backward(const LinearGradient& arguments);
  void norm_backward(const LayerNorm& norm, const std::byte* gain, const float* gradient,
                     float* input_gradient, GradientTarget gain_gradient, GradientTarget bias_gradient);

  void multiply(const ProductShape& product, const float* a, const float* b, float* c);
  ProductShape forward_product(std::size_t in, std::size_t out) const;
  ProductShape input_gradient_product(std::size_t in, std::size_t out) const;
  ProductShape weight_gradient_product(std::size_t in, std::size_t out) const;

  LayerNorm norm_of(std::size_t input, std::size_t mean, std::size_t inverse);
  Attention attention_shape() const {
    return {batch_, shape_.sequence, shape_.hidden, shape_.heads, threads_};
  }

  // `parameter` in fp32: where it is, or widened into the workspace at `offset`, where it stays until the
  // next use.
  const float* widened(const std::byte* parameter, std::size_t count, std::size_t offset = 0);
  // Where to compute a gradient in fp32 ...
  float* gradient_space(const GradientTarget& target, std::size_t offset = 0);
  // ... and how it gets to its target from there.
  void store_gradient(const GradientTarget& target, std::size_t count, std::size_t offset = 0);

  float* at(std::size_t place) { return reinterpret_cast<float*>(memory_ + place); }

  const GptShape shape_;
  const std::size_t batch_;
  const std::size_t rows_;  // batch * sequence: tokens of one pass.
  const DataType dtype_;
  const int threads_;
  MatMul& matmul_;

  std::byte* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  std::vector<BlockPlaces> blocks_;
  std::size_t output_ = 0;  // Of the last block.
  std::size_t final_norm_ = 0, final_mean_ = 0, final_inverse_ = 0, logits_ = 0, row_losses_ = 0;
  std::size_t residual_gradient_ = 0, narrow_gradient_ = 0, wide_gradient_ = 0;
  std::size_t parameter_space_ = 0, gradient_space_ = 0, product_space_ = 0, attention_space_ = 0;

  std::vector<std::uint8_t> tokens_;
  std::vector<std::uint8_t> targets_;
  double loss_ = 0;
};

}  // namespace forebay::gpt
