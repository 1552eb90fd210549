#include "model/gpt.h"

#include <algorithm>
#include <cmath>

#include "forebay/units.h"
#include "model/random.h"

namespace forebay::gpt {
namespace {

constexpr std::size_t kAlignment = 256;  // cuBLAS asks for 256; the host's vectors need less.

}  // namespace

// Assigns offsets one after the other.
class Gpt::Layout {
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

Gpt::Gpt(const Options& options, Operations& operations, WorkQueue& queue, TensorGroup& group)
    : options_(options), operations_(operations), queue_(queue), group_(group) {
  const std::size_t hidden = shape_.hidden;
  const std::size_t row_hidden = rows_ * hidden;

  // Two buffers, so that a pass does not wait for the transfer of the one before.
  const std::size_t turns = options.stage.count > 1 ? 2 : 1;
  Layout layout;
  for (std::size_t pass = 0; pass < options.passes; ++pass) {
    tokens_.push_back(layout.bytes(token_bytes()));
    targets_.push_back(layout.bytes(token_bytes()));
  }
  lay_out_blocks(layout);
  for (std::size_t turn = 0; turn < (is_last() ? 1 : turns); ++turn)
    outputs_.push_back(layout.floats(row_hidden));
  if (is_last()) {
    final_norm_ = layout.floats(row_hidden);
    final_mean_ = layout.floats(rows_);
    final_inverse_ = layout.floats(rows_);
    logits_ = layout.floats(rows_ * vocabulary_);
    loss_parts_ = layout.bytes(part_.size * rows_ * sizeof(RowLossPart));
    row_losses_ = layout.bytes(rows_ * sizeof(RowLoss));
  }

  for (std::size_t turn = 0; turn < turns; ++turn) residual_gradients_.push_back(layout.floats(row_hidden));
  narrow_gradient_ = layout.floats(row_hidden);
  wide_gradient_ = layout.floats(rows_ * inner_);
  if (options.dropout > 0) dropped_gradient_ = layout.floats(row_hidden);

  // The two embeddings side by side, or the largest matrix of a block.
  const std::size_t embeddings = (vocabulary_ + shape_.position_count()) * hidden;
  if (dtype_ != DataType::kFloat32) parameter_space_ = layout.floats(std::max(embeddings, 4 * hidden));
  gradient_space_ = layout.floats(std::max(embeddings, inner_ * hidden));

  std::size_t product_bytes = 0;
  const auto prepare = [&](const ProductShape& product, DataType b_type) {
    product_bytes = std::max(product_bytes, operations_.prepare_product(product, b_type));
  };
  const std::size_t linears[][2] = {
      {hidden, 3 * width_}, {width_, hidden}, {hidden, inner_}, {inner_, hidden}};
  for (const auto& [in, out] : linears) {
    prepare(forward_product(in, out), dtype_);
    prepare(input_gradient_product(in, out), dtype_);
    prepare(weight_gradient_product(in, out), DataType::kFloat32);
  }
  // The head is a linear layer from the vocabulary to hidden columns, used backwards.
  prepare(input_gradient_product(vocabulary_, hidden), dtype_);
  prepare(forward_product(vocabulary_, hidden), dtype_);
  prepare(weight_gradient_product(vocabulary_, hidden), DataType::kFloat32);
  product_space_ = layout.bytes(product_bytes);
  attention_space_ = layout.bytes(operations_.prepare_attention(attention_shape()));
  group_space_ = layout.bytes(group_.staging_bytes());
  memory_bytes_ = layout.size();
}

// All recomputed blocks share one region for the activations that they do not keep.
void Gpt::lay_out_blocks(Layout& layout) {
  const std::size_t row_hidden = rows_ * shape_.hidden;
  BlockPlaces recomputed{};
  bool recomputes_any = false;
  for (std::size_t layer = layers_.begin; layer < layers_.end; ++layer)
    recomputes_any = recomputes_any || recomputes(layer);
  if (recomputes_any) {
    recomputed = lay_out_block(layout);
    // Inputs that are saved elsewhere pass through here: a block has read its own before it writes the next.
    if (options_.inputs != nullptr) recomputed.input = layout.floats(row_hidden);
  }
  const bool is_sent_its_input = !is_first();
  for (std::size_t pass = 0; pass < options_.passes; ++pass) {
    std::vector<BlockPlaces>& blocks = blocks_.emplace_back();
    for (std::size_t layer = layers_.begin; layer < layers_.end; ++layer) {
      BlockPlaces& b = blocks.emplace_back(recomputes(layer) ? recomputed : lay_out_block(layout));
      const bool arrives = is_sent_its_input && layer == layers_.begin;
      if (!saves(layer) && !arrives) b.input = layout.floats(row_hidden);
    }
  }
  if (!is_sent_its_input) return;
  // One more than passes in flight: the next input arrives in it.
  const std::size_t kept = saves(layers_.begin) ? 1 : options_.passes;
  for (std::size_t turn = 0; turn < kept + 1; ++turn) inputs_.push_back(layout.floats(row_hidden));
}

float* Gpt::input_of(std::size_t layer) {
  if (layer == layers_.begin && !is_first()) return reinterpret_cast<float*>(input(pass_.micro_step));
  return at(places(layer).input);
}

float* Gpt::output_of(std::size_t layer) {
  if (layer + 1 < layers_.end) return input_of(layer + 1);
  return reinterpret_cast<float*>(output(pass_.micro_step));
}

// Everything except the input.
Gpt::BlockPlaces Gpt::lay_out_block(Layout& layout) const {
  const std::size_t row_hidden = rows_ * shape_.hidden;
  BlockPlaces b{};
  b.norm1 = layout.floats(row_hidden);
  b.norm1_mean = layout.floats(rows_);
  b.norm1_inverse = layout.floats(rows_);
  b.qkv = layout.floats(3 * rows_ * width_);
  b.softmax = layout.bytes(attention_shape().softmax_rows() * sizeof(SoftmaxRow));
  b.attended = layout.floats(rows_ * width_);
  b.middle = layout.floats(row_hidden);
  b.norm2 = layout.floats(row_hidden);
  b.norm2_mean = layout.floats(rows_);
  b.norm2_inverse = layout.floats(rows_);
  b.expanded = layout.floats(rows_ * inner_);
  b.activated = layout.floats(rows_ * inner_);
  return b;
}

void Gpt::forward(int unit, const Parameters& parameters) {
  const int block = unit - first_block();
  if (block < 0) return embedding_forward(parameters);
  const std::size_t layer = layers_.begin + static_cast<std::size_t>(block);
  if (layer == layers_.end) return final_forward(parameters);
  block_forward(layer, parameters);
}

void Gpt::backward(int unit, const Parameters& parameters, const Gradients& gradients, double loss_scale) {
  const int block = unit - first_block();
  if (block < 0) return embedding_backward(gradients);
  const std::size_t layer = layers_.begin + static_cast<std::size_t>(block);
  if (layer == layers_.end) return final_backward(parameters, gradients, loss_scale);
  block_backward(layer, parameters, gradients);
}

// --- embedding: x = dropout(wte[token] + wpe[position]) ---

void Gpt::embedding_forward(const Parameters& p) {
  float* const x = input_of(0);
  queue_.run([=, this, tokens = tokens()] {
    operations_.run(Embed{TokenList::at(tokens, shape_.vocabulary),
                          widened(p[embedding::kTokens], vocabulary_ * shape_.hidden), token_range(), x,
                          rows_, shape_.hidden});
  });
  all_reduce(x);
  queue_.run([=, this, dropout = dropout_of(0), first = first_element()] {
    const std::size_t sample = shape_.sequence * shape_.hidden;
    operations_.run(AddBias{x, widened(p[embedding::kPositions], sample), batch_, sample});
    if (dropout.active()) operations_.run(Drop{x, x, rows_ * shape_.hidden, dropout, first});
  });
}

void Gpt::embedding_backward(const Gradients& gradients) {
  queue_.run([=, this, ids = tokens(), gradient = residual_gradient(), dropout = dropout_of(0),
              first = first_element()] {
    if (dropout.active()) operations_.run(Drop{gradient, gradient, rows_ * shape_.hidden, dropout, first});

    const GradientTarget& tokens = gradients[embedding::kTokens];
    const TokenRange range = token_range();
    float* space = gradient_space(tokens);
    operations_.run(EmbedTokensBackward{TokenList::at(ids, shape_.vocabulary), gradient, range, space, rows_,
                                        shape_.hidden});
    if (const std::size_t padding = vocabulary_ - range.count; padding > 0)
      operations_.zero(space + range.count * shape_.hidden, padding * shape_.hidden);
    store_gradient(tokens, vocabulary_ * shape_.hidden);

    const GradientTarget& positions = gradients[embedding::kPositions];
    float* const position_space = gradient_space(positions);
    operations_.run(EmbedPositionsBackward{gradient, position_space, rows_, shape_.sequence, shape_.hidden});
    const std::size_t used = shape_.sequence * shape_.hidden;
    const std::size_t all = shape_.position_count() * shape_.hidden;
    if (all > used) operations_.zero(position_space + used, all - used);
    store_gradient(positions, all);
  });
}

// --- one block: middle = x + dropout(attention(norm1(x))); output = middle + dropout(mlp(norm2(middle))) ---

void Gpt::block_forward(std::size_t layer, const Parameters& p) {
  const float* input = input_of(layer);
  if (saves(layer) && !pass_.evaluates) options_.inputs->save(layer, pass_.micro_step, input);
  attend(layer, input, p);
  expand(layer, input, p);
  contract(layer, p);
}

void Gpt::attend(std::size_t layer, const float* input, const Parameters& p) {
  const BlockPlaces& b = places(layer);
  queue_.run([=, this, attention = attention_of(layer)] {
    const std::size_t hidden = shape_.hidden;
    norm_forward(norm_of(input, b.norm1_mean, b.norm1_inverse), p, block::kNorm1Gain, at(b.norm1));
    linear(at(b.norm1), p, block::kQkvWeight, hidden, 3 * width_, at(b.qkv));
    operations_.run(AttentionForward{attention, at(b.qkv), at(b.attended), softmax_at(b.softmax),
                                     memory_ + attention_space_});
    multiply(forward_product(width_, hidden), at(b.attended), stored(p[block::kAttentionWeight]),
             at(narrow_gradient_));  // Idle here.
  });
  all_reduce(at(narrow_gradient_));
}

void Gpt::expand(std::size_t layer, const float* input, const Parameters& p) {
  const BlockPlaces& b = places(layer);
  queue_.run([=, this, dropout = dropout_of(layer, kAttention), first = first_element()] {
    const std::size_t hidden = shape_.hidden;
    add_residual({input, p[block::kAttentionBias], dropout, first}, at(b.middle));
    norm_forward(norm_of(at(b.middle), b.norm2_mean, b.norm2_inverse), p, block::kNorm2Gain, at(b.norm2));
    linear(at(b.norm2), p, block::kExpandWeight, hidden, inner_, at(b.expanded));
    operations_.run(Gelu{at(b.expanded), at(b.activated), rows_ * inner_});
  });
}

void Gpt::contract(std::size_t layer, const Parameters& p) {
  const BlockPlaces& b = places(layer);
  float* const output = output_of(layer);
  queue_.run([=, this] {
    multiply(forward_product(inner_, shape_.hidden), at(b.activated), stored(p[block::kContractWeight]),
             at(narrow_gradient_));
  });
  all_reduce(at(narrow_gradient_));
  queue_.run([=, this, dropout = dropout_of(layer, kMlp), first = first_element()] {
    add_residual({at(b.middle), p[block::kContractBias], dropout, first}, output);
  });
}

void Gpt::add_residual(const Residual& residual, float* target) {
  float* projected = at(narrow_gradient_);
  const std::size_t count = rows_ * shape_.hidden;
  operations_.run(AddBias{projected, widened(residual.bias, shape_.hidden), rows_, shape_.hidden});
  if (residual.dropout.active())
    operations_.run(Drop{projected, projected, count, residual.dropout, residual.first});
  operations_.run(Add{residual.input, projected, target, count});
}

void Gpt::block_backward(std::size_t layer, const Parameters& p, const Gradients& gradients) {
  const BlockPlaces& b = places(layer);
  const float* input = saves(layer) ? options_.inputs->load(layer, pass_.micro_step) : input_of(layer);
  if (recomputes(layer)) {
    attend(layer, input, p);
    expand(layer, input, p);
  }
  const std::uint64_t first = first_element();
  // The gradient of the output, then of middle, then of the input.
  float* const residual = residual_gradient();
  queue_.run([=, this, dropout = dropout_of(layer, kMlp)] {
    linear_backward({at(b.activated), dropped_gradient(residual, dropout, first), at(wide_gradient_)}, p,
                    gradients, block::kContractWeight, inner_, shape_.hidden);
    operations_.run(GeluBackward{at(b.expanded), at(wide_gradient_), rows_ * inner_});
    linear_backward({at(b.norm2), at(wide_gradient_), at(narrow_gradient_)}, p, gradients,
                    block::kExpandWeight, shape_.hidden, inner_);
  });
  all_reduce(at(narrow_gradient_));
  queue_.run([=, this, attention = attention_of(layer), dropout = dropout_of(layer, kAttention)] {
    norm_backward(norm_of(at(b.middle), b.norm2_mean, b.norm2_inverse), p, gradients, block::kNorm2Gain,
                  residual);
    linear_backward({at(b.attended), dropped_gradient(residual, dropout, first), at(narrow_gradient_)}, p,
                    gradients, block::kAttentionWeight, width_, shape_.hidden);
    operations_.run(AttentionBackward{attention, at(b.qkv), softmax_at(b.softmax), at(narrow_gradient_),
                                      at(wide_gradient_), memory_ + attention_space_});
    linear_backward({at(b.norm1), at(wide_gradient_), at(narrow_gradient_)}, p, gradients, block::kQkvWeight,
                    shape_.hidden, 3 * width_);
  });
  all_reduce(at(narrow_gradient_));
  queue_.run([=, this] {
    norm_backward(norm_of(input, b.norm1_mean, b.norm1_inverse), p, gradients, block::kNorm1Gain, residual);
  });
  if (saves(layer)) options_.inputs->release();
}

const float* Gpt::dropped_gradient(const float* residual, const Dropout& dropout, std::uint64_t first) {
  if (!dropout.active()) return residual;
  operations_.run(Drop{residual, at(dropped_gradient_), rows_ * shape_.hidden, dropout, first});
  return at(dropped_gradient_);
}

// --- final: logits = norm(x) * wte^T, and the loss ---

void Gpt::final_forward(const Parameters& p) {
  const float* const x = output_of(layers_.end - 1);
  queue_.run([=, this] {
    const std::size_t hidden = shape_.hidden;
    norm_forward(norm_of(x, final_mean_, final_inverse_), p, final_unit::kNormGain, at(final_norm_));
    multiply(input_gradient_product(vocabulary_, hidden), at(final_norm_), stored(p[final_unit::kTokens]),
             at(logits_));
  });
}

void Gpt::cross_entropy(float factor) {
  const LogitsPart logits = logits_part(targets());
  queue_.run([=, this] { operations_.run(CrossEntropy{logits, loss_parts() + part_.rank * rows_}); });
  group_.all_gather(memory_ + loss_parts_, rows_ * sizeof(RowLossPart));
  queue_.run([=, this] {
    operations_.run(CrossEntropyBackward{logits, loss_parts(), part_.size, part_.rank,
                                         reinterpret_cast<RowLoss*>(row_losses()), factor});
  });
}

void Gpt::final_backward(const Parameters& p, const Gradients& gradients, double loss_scale) {
  cross_entropy(static_cast<float>(loss_scale / static_cast<double>(rows_)));
  queue_.run([=, this] {
    const std::size_t hidden = shape_.hidden;
    const GradientTarget& tokens = gradients[final_unit::kTokens];
    multiply(weight_gradient_product(vocabulary_, hidden), at(logits_), computed(at(final_norm_)),
             gradient_space(tokens));
    store_gradient(tokens, vocabulary_ * hidden);
    multiply(forward_product(vocabulary_, hidden), at(logits_), stored(p[final_unit::kTokens]),
             at(narrow_gradient_));
  });
  all_reduce(at(narrow_gradient_));
  const float* const x = output_of(layers_.end - 1);
  queue_.run([=, this, residual = residual_gradient()] {
    operations_.zero(residual, rows_ * shape_.hidden);
    norm_backward(norm_of(x, final_mean_, final_inverse_), p, gradients, final_unit::kNormGain, residual);
  });
}

// --- the pieces ---

void Gpt::linear(const float* input, const Parameters& p, int weight, std::size_t in, std::size_t out,
                 float* output) {
  multiply(forward_product(in, out), input, stored(p[weight]), output);
  operations_.run(AddBias{output, widened(p[weight + 1], out), rows_, out});
}

void Gpt::linear_backward(const LinearGradient& g, const Parameters& p, const Gradients& gradients,
                          int weight, std::size_t in, std::size_t out) {
  const GradientTarget& weight_gradient = gradients[weight];
  const GradientTarget& bias_gradient = gradients[weight + 1];
  multiply(weight_gradient_product(in, out), g.input, computed(g.output_gradient),
           gradient_space(weight_gradient));
  store_gradient(weight_gradient, in * out);
  operations_.run(ColumnSums{g.output_gradient, gradient_space(bias_gradient), rows_, out});
  store_gradient(bias_gradient, out);
  multiply(input_gradient_product(in, out), g.output_gradient, stored(p[weight]), g.input_gradient);
}

void Gpt::norm_forward(const LayerNorm& norm, const Parameters& p, int gain, float* output) {
  const std::size_t hidden = shape_.hidden;
  operations_.run(NormForward{norm, widened(p[gain], hidden), widened(p[gain + 1], hidden, hidden), output});
}

void Gpt::norm_backward(const LayerNorm& norm, const Parameters& p, const Gradients& gradients, int gain,
                        float* input_gradient) {
  const std::size_t hidden = shape_.hidden;
  const float* gradient = at(narrow_gradient_);
  const GradientTarget& gain_gradient = gradients[gain];
  const GradientTarget& bias_gradient = gradients[gain + 1];
  operations_.run(NormBackward{norm, widened(p[gain], hidden), gradient, input_gradient});
  operations_.run(GainBackward{norm, gradient, gradient_space(gain_gradient)});
  operations_.run(ColumnSums{gradient, gradient_space(bias_gradient, hidden), rows_, hidden});
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

LayerNorm Gpt::norm_of(const float* input, std::size_t mean, std::size_t inverse) {
  return {input, at(mean), at(inverse), rows_, shape_.hidden};
}

Attention Gpt::attention_shape() const {
  return {.batch = batch_,
          .sequence = shape_.sequence,
          .hidden = width_,
          .heads = heads_,
          .first_head = part_.rank * heads_,
          .all_heads = shape_.heads};
}

Attention Gpt::attention_of(std::size_t layer) const {
  Attention attention = attention_shape();
  attention.dropout = dropout_of(layer, kProbabilities);
  attention.first_sample = pass_.first_sample;
  return attention;
}

TokenRange Gpt::token_range() const {
  const std::size_t first = std::min(part_.rank * vocabulary_, shape_.vocabulary);
  return {first, std::min(vocabulary_, shape_.vocabulary - first)};
}

LogitsPart Gpt::logits_part(DevicePtr targets) {
  return {at(logits_), TokenList::at(targets, shape_.vocabulary), rows_, vocabulary_, token_range()};
}

Dropout Gpt::dropout_of(std::uint64_t site) const {
  if (options_.dropout == 0 || pass_.evaluates) return {};
  const double threshold = std::min(std::round(options_.dropout * 0x1p32), 0x1p32 - 1);
  return {.key = draw(draw(options_.seed, kDropoutStream, pass_.step), site, pass_.micro_step),
          .threshold = static_cast<std::uint32_t>(threshold),
          .scale = static_cast<float>(1 / (1 - options_.dropout))};
}

const float* Gpt::widened(const std::byte* parameter, std::size_t count, std::size_t offset) {
  if (dtype_ == DataType::kFloat32) return reinterpret_cast<const float*>(parameter);
  float* target = at(parameter_space_) + offset;
  operations_.run(Widen{stored(parameter), target, count});
  return target;
}

float* Gpt::gradient_space(const GradientTarget& target, std::size_t offset) {
  const bool direct = target.data != nullptr && dtype_ == DataType::kFloat32 && !target.accumulate;
  return direct ? reinterpret_cast<float*>(target.data) : at(gradient_space_) + offset;
}

void Gpt::store_gradient(const GradientTarget& target, std::size_t count, std::size_t offset) {
  const float* source = gradient_space(target, offset);
  if (target.data == nullptr || reinterpret_cast<const std::byte*>(source) == target.data) return;
  operations_.run(Narrow{dtype_, source, target.data, count, target.accumulate});
}

}  // namespace forebay::gpt
