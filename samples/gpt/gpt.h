// Gpt: the forward and backward pass of a GPT-2 style model, unit by unit.
//
// It knows nothing of engines, nor of devices: it says in which order the Operations come and on what.
// Whoever drives it hands in, for each unit, where the parameters are and where the gradients go; so the same
// arithmetic runs under a ZeRO engine and in a plain loop. All it keeps (activations, workspaces) is in one
// piece of the device's memory whose size is known from the start.
//
//   copy to gpt.tokens() and gpt.targets();
//   for each unit: gpt.forward(unit, parameters);
//   for each unit, last first: gpt.backward(unit, parameters, gradients, loss_scale);
//   copy from gpt.row_losses();
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "forebay/backend.h"
#include "forebay/data_type.h"
#include "operations.h"
#include "shape.h"

namespace forebay::gpt {

// Where the gradient of one parameter goes, in the model's data type. Null: it is not wanted.
struct GradientTarget {
  DevicePtr data = nullptr;
  bool accumulate = false;  // "+=" rather than "=".
};

class Gpt {
 public:
  struct Options {
    GptShape shape;
    std::size_t batch = 1;
    DataType dtype = DataType::kFloat32;  // Of parameters and gradients.
  };

  // Prepares `operations`, which must outlive this, for the model.
  Gpt(const Options& options, Operations& operations);

  std::size_t memory_bytes() const { return memory_bytes_; }
  // `memory`, aligned to 256 bytes, holds memory_bytes().
  void use_memory(DevicePtr memory) { memory_ = memory; }

  int unit_count() const { return static_cast<int>(shape_.layers) + 2; }
  // batch * sequence: tokens of one pass.
  std::size_t row_count() const { return rows_; }

  // --- places in that memory, each of row_count() ---
  // Bytes, [batch, sequence], in place before the first unit's forward pass; read up to its backward pass.
  DevicePtr tokens() const { return memory_ + tokens_; }
  DevicePtr targets() const { return memory_ + targets_; }
  // One RowLoss each, of the loss before scaling. From the last unit's backward pass on.
  DevicePtr row_losses() const { return memory_ + row_losses_; }

  // --- one pass; `parameters` and `gradients` are in the order of describe_units(), for the last unit with
  // the tied wte.weight after its own ---
  void forward(int unit, std::span<const std::byte* const> parameters);
  // The backward pass of unit 0 reads no parameters. The last unit's loss is multiplied by `loss_scale`.
  void backward(int unit, std::span<const std::byte* const> parameters,
                std::span<const GradientTarget> gradients, double loss_scale);

 private:
  // Places in memory_, in bytes.
  struct BlockPlaces {
    std::size_t input, norm1, norm1_mean, norm1_inverse, qkv, softmax, attended, middle, norm2, norm2_mean,
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

  void multiply(const ProductShape& product, const float* a, Operand b, float* c);
  ProductShape forward_product(std::size_t in, std::size_t out) const;
  ProductShape input_gradient_product(std::size_t in, std::size_t out) const;
  ProductShape weight_gradient_product(std::size_t in, std::size_t out) const;

  LayerNorm norm_of(std::size_t input, std::size_t mean, std::size_t inverse);
  Attention attention_shape() const { return {batch_, shape_.sequence, shape_.hidden, shape_.heads}; }

  // A parameter as it is kept, and what a pass has computed.
  Operand stored(const std::byte* parameter) const { return {parameter, dtype_}; }
  static Operand computed(const float* values) { return {values, DataType::kFloat32}; }
  // A vector or an embedding in fp32: where it is, or widened into the workspace at `offset`, where it stays
  // until the next use.
  const float* widened(const std::byte* parameter, std::size_t count, std::size_t offset = 0);
  // Where to compute a gradient in fp32 ...
  float* gradient_space(const GradientTarget& target, std::size_t offset = 0);
  // ... and how it gets to its target from there.
  void store_gradient(const GradientTarget& target, std::size_t count, std::size_t offset = 0);

  float* at(std::size_t place) { return reinterpret_cast<float*>(memory_ + place); }
  SoftmaxRow* softmax_at(std::size_t place) { return reinterpret_cast<SoftmaxRow*>(memory_ + place); }
  const std::uint8_t* bytes_at(std::size_t place) {
    return reinterpret_cast<const std::uint8_t*>(memory_ + place);
  }

  const GptShape shape_;
  const std::size_t batch_;
  const std::size_t rows_;
  const DataType dtype_;
  Operations& operations_;

  DevicePtr memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  std::vector<BlockPlaces> blocks_;
  std::size_t tokens_ = 0, targets_ = 0;
  std::size_t output_ = 0;  // Of the last block.
  std::size_t final_norm_ = 0, final_mean_ = 0, final_inverse_ = 0, logits_ = 0, row_losses_ = 0;
  std::size_t residual_gradient_ = 0, narrow_gradient_ = 0, wide_gradient_ = 0;
  std::size_t parameter_space_ = 0, gradient_space_ = 0, product_space_ = 0, attention_space_ = 0;
};

}  // namespace forebay::gpt
