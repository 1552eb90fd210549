#include "gpt.h"

#include <algorithm>

#include "forebay/units.h"

namespace forebay::gpt {
namespace {

constexpr std::size_t kAlignment = 256;  // What a GPU's library wants; more than a host's vectors do.

// Hands out places one after the other.
class Layout {
 public:
  std::size_t floats(std::size_t count) { return bytes(count * sizeof(float)); }
  std::size_t bytes(std::size_t count) {
    const std::size_t place = size_;
    size_ += round_up(count, kAlignment);
    return place;
  }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
};

}  // namespace

Gpt::Gpt(const Options& options, Operations& operations)
    : shape_(options.shape),
      batch_(options.batch),
      rows_(options.batch * options.shape.sequence),
      dtype_(options.dtype),
      operations_(operations) {
  const std::size_t hidden = shape_.hidden;
  const std::size_t row_hidden = rows_ * hidden;

  Layout layout;
  tokens_ = layout.bytes(rows_);
  targets_ = layout.bytes(rows_);
  for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
    BlockPlaces& b = blocks_.emplace_back();
    b.input = layout.floats(row_hidden);
    b.norm1 = layout.floats(row_hidden);
    b.norm1_mean = layout.floats(rows_);
    b.norm1_inverse = layout.floats(rows_);
    b.qkv = layout.floats(3 * row_hidden);
    b.softmax = layout.bytes(attention_shape().softmax_rows() * sizeof(SoftmaxRow));
    b.attended = layout.floats(row_hidden);
    b.middle = layout.floats(row_hidden);
    b.norm2 = layout.floats(row_hidden);
    b.norm2_mean = layout.floats(rows_);
    b.norm2_inverse = layout.floats(rows_);
    b.expanded = layout.floats(4 * row_hidden);
    b.activated = layout.floats(4 * row_hidden);
  }
  output_ = layout.floats(row_hidden);
  final_norm_ = layout.floats(row_hidden);
  final_mean_ = layout.floats(rows_);
  final_inverse_ = layout.floats(rows_);
  logits_ = layout.floats(rows_ * kVocabulary);
  row_losses_ = layout.bytes(rows_ * sizeof(RowLoss));

  residual_gradient_ = layout.floats(row_hidden);
  narrow_gradient_ = layout.floats(row_hidden);
  wide_gradient_ = layout.floats(4 * row_hidden);

  // The two embeddings side by side, or the largest matrix of a block.
  const std::size_t embeddings = (kVocabulary + shape_.sequence) * hidden;
  if (dtype_ != DataType::kFloat32) parameter_space_ = layout.floats(std::max(embeddings, 4 * hidden));
  gradient_space_ = layout.floats(std::max(embeddings, 4 * hidden * hidden));

  std::size_t product_bytes = 0;
  const auto prepare = [&](const ProductShape& product, DataType b_type) {
    product_bytes = std::max(product_bytes, operations_.prepare_product(product, b_type));
  };
  const std::size_t linears[][2] = {
      {hidden, 3 * hidden}, {hidden, hidden}, {hidden, 4 * hidden}, {4 * hidden, hidden}};
  for (const auto& [in, out] : linears) {
    prepare(forward_product(in, out), dtype_);
    prepare(input_gradient_product(in, out), dtype_);
    prepare(weight_gradient_product(in, out), DataType::kFloat32);
  }
  // The head is a linear layer from the vocabulary to hidden columns, used backwards.
  prepare(input_gradient_product(kVocabulary, hidden), dtype_);
  prepare(forward_product(kVocabulary, hidden), dtype_);
  prepare(weight_gradient_product(kVocabulary, hidden), DataType::kFloat32);
  product_space_ = layout.bytes(product_bytes);
  attention_space_ = layout.bytes(operations_.prepare_attention(attention_shape()));
  memory_bytes_ = layout.size();
}

void Gpt::forward(int unit, std::span<const std::byte* const> parameters) {
  if (unit == 0) return embedding_forward(parameters);
  if (unit + 1 == unit_count()) return final_forward(parameters);
  block_forward(static_cast<std::size_t>(unit) - 1, parameters);
}

void Gpt::backward(int unit, std::span<const std::byte* const> parameters,
                   std::span<const GradientTarget> gradients, double loss_scale) {
  if (unit == 0) return embedding_backward(gradients);
  if (unit + 1 == unit_count()) return final_backward(parameters, gradients, loss_scale);
  block_backward(static_cast<std::size_t>(unit) - 1, parameters, gradients);
}

// --- embedding: x = wte[token] + wpe[position] ---

void Gpt::embedding_forward(std::span<const std::byte* const> parameters) {
  const std::size_t token_count = kVocabulary * shape_.hidden;
  const float* tokens = widened(parameters[embedding::kTokens], token_count);
  const float* positions =
      widened(parameters[embedding::kPositions], shape_.sequence * shape_.hidden, token_count);
  operations_.embed(bytes_at(tokens_), tokens, positions, at(blocks_[0].input), rows_, shape_.sequence,
                    shape_.hidden);
}

void Gpt::embedding_backward(std::span<const GradientTarget> gradients) {
  const GradientTarget& tokens = gradients[embedding::kTokens];
  operations_.embed_tokens_backward(bytes_at(tokens_), at(residual_gradient_), gradient_space(tokens), rows_,
                                    kVocabulary, shape_.hidden);
  store_gradient(tokens, kVocabulary * shape_.hidden);

  const GradientTarget& positions = gradients[embedding::kPositions];
  operations_.embed_positions_backward(at(residual_gradient_), gradient_space(positions), rows_,
                                       shape_.sequence, shape_.hidden);
  store_gradient(positions, shape_.sequence * shape_.hidden);
}

// --- one block: middle = x + attention(norm1(x)); output = middle + mlp(norm2(middle)) ---

void Gpt::block_forward(std::size_t layer, std::span<const std::byte* const> p) {
  const BlockPlaces& b = blocks_[layer];
  const std::size_t hidden = shape_.hidden;
  const std::size_t count = rows_ * hidden;
  float* output = at(layer + 1 < shape_.layers ? blocks_[layer + 1].input : output_);
  float* projected = at(narrow_gradient_);  // Idle in the forward pass.

  operations_.layer_norm(norm_of(b.input, b.norm1_mean, b.norm1_inverse),
                         widened(p[block::kNorm1Gain], hidden), widened(p[block::kNorm1Bias], hidden, hidden),
                         at(b.norm1));
  linear(at(b.norm1), p[block::kQkvWeight], p[block::kQkvBias], hidden, 3 * hidden, at(b.qkv));
  operations_.attention(attention_shape(), at(b.qkv), at(b.attended), softmax_at(b.softmax),
                        memory_ + attention_space_);
  linear(at(b.attended), p[block::kAttentionWeight], p[block::kAttentionBias], hidden, hidden, projected);
  operations_.add(at(b.input), projected, at(b.middle), count);

  operations_.layer_norm(norm_of(b.middle, b.norm2_mean, b.norm2_inverse),
                         widened(p[block::kNorm2Gain], hidden), widened(p[block::kNorm2Bias], hidden, hidden),
                         at(b.norm2));
  linear(at(b.norm2), p[block::kExpandWeight], p[block::kExpandBias], hidden, 4 * hidden, at(b.expanded));
  operations_.gelu(at(b.expanded), at(b.activated), 4 * count);
  linear(at(b.activated), p[block::kContractWeight], p[block::kContractBias], 4 * hidden, hidden, projected);
  operations_.add(at(b.middle), projected, output, count);
}

void Gpt::block_backward(std::size_t layer, std::span<const std::byte* const> p,
                         std::span<const GradientTarget> gradients) {
  const BlockPlaces& b = blocks_[layer];
  const std::size_t hidden = shape_.hidden;
  float* residual = at(residual_gradient_);  // Of the output, then of middle, then of the input.
  float* wide = at(wide_gradient_);
  float* narrow = at(narrow_gradient_);

  linear_backward({.input = at(b.activated),
                   .output_gradient = residual,
                   .input_gradient = wide,
                   .weight = p[block::kContractWeight],
                   .weight_gradient = gradients[block::kContractWeight],
                   .bias_gradient = gradients[block::kContractBias],
                   .in = 4 * hidden,
                   .out = hidden});
  operations_.gelu_backward(at(b.expanded), wide, rows_ * 4 * hidden);
  linear_backward({.input = at(b.norm2),
                   .output_gradient = wide,
                   .input_gradient = narrow,
                   .weight = p[block::kExpandWeight],
                   .weight_gradient = gradients[block::kExpandWeight],
                   .bias_gradient = gradients[block::kExpandBias],
                   .in = hidden,
                   .out = 4 * hidden});
  norm_backward(norm_of(b.middle, b.norm2_mean, b.norm2_inverse), p[block::kNorm2Gain], narrow, residual,
                gradients[block::kNorm2Gain], gradients[block::kNorm2Bias]);

  linear_backward({.input = at(b.attended),
                   .output_gradient = residual,
                   .input_gradient = narrow,
                   .weight = p[block::kAttentionWeight],
                   .weight_gradient = gradients[block::kAttentionWeight],
                   .bias_gradient = gradients[block::kAttentionBias],
                   .in = hidden,
                   .out = hidden});
  operations_.attention_backward(attention_shape(), at(b.qkv), softmax_at(b.softmax), narrow, wide,
                                 memory_ + attention_space_);
  linear_backward({.input = at(b.norm1),
                   .output_gradient = wide,
                   .input_gradient = narrow,
                   .weight = p[block::kQkvWeight],
                   .weight_gradient = gradients[block::kQkvWeight],
                   .bias_gradient = gradients[block::kQkvBias],
                   .in = hidden,
                   .out = 3 * hidden});
  norm_backward(norm_of(b.input, b.norm1_mean, b.norm1_inverse), p[block::kNorm1Gain], narrow, residual,
                gradients[block::kNorm1Gain], gradients[block::kNorm1Bias]);
}

// --- final: logits = norm(x) * wte^T, and the loss ---

void Gpt::final_forward(std::span<const std::byte* const> parameters) {
  const std::size_t hidden = shape_.hidden;
  operations_.layer_norm(norm_of(output_, final_mean_, final_inverse_),
                         widened(parameters[final_unit::kNormGain], hidden),
                         widened(parameters[final_unit::kNormBias], hidden, hidden), at(final_norm_));
  multiply(input_gradient_product(kVocabulary, hidden), at(final_norm_),
           stored(parameters[final_unit::kTokens]), at(logits_));
}

void Gpt::final_backward(std::span<const std::byte* const> parameters,
                         std::span<const GradientTarget> gradients, double loss_scale) {
  const std::size_t hidden = shape_.hidden;
  const float factor = static_cast<float>(loss_scale / static_cast<double>(rows_));
  operations_.cross_entropy(at(logits_), bytes_at(targets_), reinterpret_cast<RowLoss*>(row_losses()), rows_,
                            kVocabulary, factor);

  const GradientTarget& tokens = gradients[final_unit::kTokens];
  multiply(weight_gradient_product(kVocabulary, hidden), at(logits_), computed(at(final_norm_)),
           gradient_space(tokens));
  store_gradient(tokens, kVocabulary * hidden);
  multiply(forward_product(kVocabulary, hidden), at(logits_), stored(parameters[final_unit::kTokens]),
           at(narrow_gradient_));

  operations_.zero(at(residual_gradient_), rows_ * hidden);
  norm_backward(norm_of(output_, final_mean_, final_inverse_), parameters[final_unit::kNormGain],
                at(narrow_gradient_), at(residual_gradient_), gradients[final_unit::kNormGain],
                gradients[final_unit::kNormBias]);
}

// --- the pieces ---

void Gpt::linear(const float* input, const std::byte* weight, const std::byte* bias, std::size_t in,
                 std::size_t out, float* output) {
  multiply(forward_product(in, out), input, stored(weight), output);
  operations_.add_bias(output, widened(bias, out), rows_, out);
}

void Gpt::linear_backward(const LinearGradient& g) {
  multiply(weight_gradient_product(g.in, g.out), g.input, computed(g.output_gradient),
           gradient_space(g.weight_gradient));
  store_gradient(g.weight_gradient, g.in * g.out);
  operations_.bias_backward(g.output_gradient, gradient_space(g.bias_gradient), rows_, g.out);
  store_gradient(g.bias_gradient, g.out);
  multiply(input_gradient_product(g.in, g.out), g.output_gradient, stored(g.weight), g.input_gradient);
}

void Gpt::norm_backward(const LayerNorm& norm, const std::byte* gain, const float* gradient,
                        float* input_gradient, GradientTarget gain_gradient, GradientTarget bias_gradient) {
  const std::size_t hidden = shape_.hidden;
  operations_.layer_norm_backward(norm, widened(gain, hidden), gradient, input_gradient,
                                  gradient_space(gain_gradient), gradient_space(bias_gradient, hidden));
  store_gradient(gain_gradient, hidden);
  store_gradient(bias_gradient, hidden, hidden);
}

void Gpt::multiply(const ProductShape& product, const float* a, Operand b, float* c) {
  operations_.multiply(product, a, b, c, memory_ + product_space_);
}

// [rows, in] x [in, out].
ProductShape Gpt::forward_product(std::size_t in, std::size_t out) const {
  return {.rows = rows_, .columns = out, .depth = in};
}

// [rows, out] x [in, out]^T.
ProductShape Gpt::input_gradient_product(std::size_t in, std::size_t out) const {
  return {.rows = rows_, .columns = in, .depth = out, .transpose_b = true};
}

// [rows, in]^T x [rows, out].
ProductShape Gpt::weight_gradient_product(std::size_t in, std::size_t out) const {
  return {.rows = in, .columns = out, .depth = rows_, .transpose_a = true};
}

LayerNorm Gpt::norm_of(std::size_t input, std::size_t mean, std::size_t inverse) {
  return {at(input), at(mean), at(inverse), rows_, shape_.hidden};
}

const float* Gpt::widened(const std::byte* parameter, std::size_t count, std::size_t offset) {
  if (dtype_ == DataType::kFloat32) return reinterpret_cast<const float*>(parameter);
  float* target = at(parameter_space_) + offset;
  operations_.widen(stored(parameter), target, count);
  return target;
}

float* Gpt::gradient_space(const GradientTarget& target, std::size_t offset) {
  const bool direct = target.data != nullptr && dtype_ == DataType::kFloat32 && !target.accumulate;
  return direct ? reinterpret_cast<float*>(target.data) : at(gradient_space_) + offset;
}

void Gpt::store_gradient(const GradientTarget& target, std::size_t count, std::size_t offset) {
  const float* source = gradient_space(target, offset);
  if (target.data == nullptr || reinterpret_cast<const std::byte*>(source) == target.data) return;
  operations_.narrow(dtype_, source, target.data, count, target.accumulate);
}

}  // namespace forebay::gpt
