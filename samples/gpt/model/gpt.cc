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
    : options_(options),
      operations_(operations),
      queue_(queue),
      group_(group),
      index_(options.shape.is_llama() ? BlockIndices{llama_block::kNorm1Gain, llama_block::kAttention,
                                                     llama_block::kNorm2Gain, llama_block::kDown}
                                      : BlockIndices{block::kNorm1Gain, block::kAttentionWeight,
                                                     block::kNorm2Gain, block::kContractWeight}),
      head_(options.shape.is_llama() ? static_cast<int>(llama_final_unit::kHead)
                                     : static_cast<int>(final_unit::kTokens)) {
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
  wide_gradient_ = layout.floats(rows_ * std::max(shape_.is_llama() ? 2 * inner_ : inner_, qkv_width_));
  if (shape_.is_llama()) second_gradient_ = layout.floats(row_hidden);
  if (options.dropout > 0) dropped_gradient_ = layout.floats(row_hidden);

  // The embeddings side by side, or the largest matrix of a block.
  const std::size_t positions = shape_.is_llama() ? 0 : shape_.position_count();
  const std::size_t embeddings = (vocabulary_ + positions) * hidden;
  const std::size_t columns = std::max(inner_, qkv_width_);
  if (dtype_ != DataType::kFloat32)
    parameter_space_ = layout.floats(std::max({embeddings, columns, 4 * hidden}));
  gradient_space_ = layout.floats(std::max(embeddings, columns * hidden));

  std::size_t product_bytes = 0;
  const auto prepare = [&](const ProductShape& product, DataType b_type) {
    product_bytes = std::max(product_bytes, operations_.prepare_product(product, b_type));
  };
  // Extents of the weights. The head is a linear layer from the vocabulary to hidden columns, used backwards;
  // so is every linear layer of Llama.
  std::vector<std::pair<std::size_t, std::size_t>> weights = {{vocabulary_, hidden}};
  if (shape_.is_llama()) {
    weights.insert(
        weights.end(),
        {{width_, hidden}, {kv_width_, hidden}, {hidden, width_}, {inner_, hidden}, {hidden, inner_}});
  } else {
    weights.insert(weights.end(),
                   {{hidden, 3 * width_}, {width_, hidden}, {hidden, inner_}, {inner_, hidden}});
  }
  for (const auto& [in, out] : weights) {
    prepare(forward_product(in, out), dtype_);
    prepare(input_gradient_product(in, out), dtype_);
    prepare(weight_gradient_product(in, out), DataType::kFloat32);
  }
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
  if (!shape_.is_llama()) b.norm1_mean = layout.floats(rows_);
  b.norm1_inverse = layout.floats(rows_);
  b.qkv = layout.floats(rows_ * qkv_width_);
  b.softmax = layout.bytes(attention_shape().softmax_rows() * sizeof(SoftmaxRow));
  b.attended = layout.floats(rows_ * width_);
  b.middle = layout.floats(row_hidden);
  b.norm2 = layout.floats(row_hidden);
  if (!shape_.is_llama()) b.norm2_mean = layout.floats(rows_);
  b.norm2_inverse = layout.floats(rows_);
  b.expanded = layout.floats(rows_ * inner_);
  b.activated = layout.floats(rows_ * inner_);
  if (shape_.is_llama()) b.up = layout.floats(rows_ * inner_);
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

// --- embedding: x = dropout(wte[token] + wpe[position]); Llama has no table of positions ---

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
    if (!shape_.is_llama())
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
    if (shape_.is_llama()) return;

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
    norm_forward(norm_of(input, b.norm1_mean, b.norm1_inverse), p, index_.norm1, at(b.norm1));
    project_qkv(b, p);
    operations_.run(AttentionForward{attention, at(b.qkv), at(b.attended), softmax_at(b.softmax),
                                     memory_ + attention_space_});
    multiply(output_product(width_, hidden), at(b.attended), stored(p[index_.attention]),
             at(narrow_gradient_));  // Idle here.
  });
  all_reduce(at(narrow_gradient_));
}

void Gpt::expand(std::size_t layer, const float* input, const Parameters& p) {
  const BlockPlaces& b = places(layer);
  queue_.run([=, this, dropout = dropout_of(layer, kAttention), first = first_element()] {
    add_residual({input, bias_of(p, index_.attention), dropout, first}, at(b.middle));
    norm_forward(norm_of(at(b.middle), b.norm2_mean, b.norm2_inverse), p, index_.norm2, at(b.norm2));
    activate(b, p);
  });
}

void Gpt::contract(std::size_t layer, const Parameters& p) {
  const BlockPlaces& b = places(layer);
  float* const output = output_of(layer);
  queue_.run([=, this] {
    multiply(output_product(inner_, shape_.hidden), at(b.activated), stored(p[index_.contract]),
             at(narrow_gradient_));
  });
  all_reduce(at(narrow_gradient_));
  queue_.run([=, this, dropout = dropout_of(layer, kMlp), first = first_element()] {
    add_residual({at(b.middle), bias_of(p, index_.contract), dropout, first}, output);
  });
}

void Gpt::add_residual(const Residual& residual, float* target) {
  float* projected = at(narrow_gradient_);
  const std::size_t count = rows_ * shape_.hidden;
  if (residual.bias != nullptr)
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
    linear_backward({at(b.activated), dropped_gradient(residual, dropout, first), activated_gradient()}, p,
                    gradients, index_.contract, inner_, shape_.hidden);
    activate_backward(b, p, gradients);
  });
  all_reduce(at(narrow_gradient_));
  queue_.run([=, this, attention = attention_of(layer), dropout = dropout_of(layer, kAttention)] {
    norm_backward(norm_of(at(b.middle), b.norm2_mean, b.norm2_inverse), p, gradients, index_.norm2, residual);
    linear_backward({at(b.attended), dropped_gradient(residual, dropout, first), at(narrow_gradient_)}, p,
                    gradients, index_.attention, width_, shape_.hidden);
    operations_.run(AttentionBackward{attention, at(b.qkv), softmax_at(b.softmax), at(narrow_gradient_),
                                      at(wide_gradient_), memory_ + attention_space_});
    project_qkv_backward(b, p, gradients);
  });
  all_reduce(at(narrow_gradient_));
  queue_.run([=, this] {
    norm_backward(norm_of(input, b.norm1_mean, b.norm1_inverse), p, gradients, index_.norm1, residual);
  });
  if (saves(layer)) options_.inputs->release();
}

const float* Gpt::dropped_gradient(const float* residual, const Dropout& dropout, std::uint64_t first) {
  if (!dropout.active()) return residual;
  operations_.run(Drop{residual, at(dropped_gradient_), rows_ * shape_.hidden, dropout, first});
  return at(dropped_gradient_);
}

// --- the parts of a block in which the models differ ---

void Gpt::project_qkv(const BlockPlaces& b, const Parameters& p) {
  const std::size_t hidden = shape_.hidden;
  if (!shape_.is_llama()) return linear(at(b.norm1), p, block::kQkvWeight, hidden, 3 * width_, at(b.qkv));
  float* const queries = at(b.qkv);
  float* const keys = queries + rows_ * width_;
  linear(at(b.norm1), p, llama_block::kQuery, hidden, width_, queries);
  linear(at(b.norm1), p, llama_block::kKey, hidden, kv_width_, keys);
  linear(at(b.norm1), p, llama_block::kValue, hidden, kv_width_, keys + rows_ * kv_width_);
  rotate(queries, heads_, 1);
  rotate(keys, kv_heads_, 1);
}

void Gpt::project_qkv_backward(const BlockPlaces& b, const Parameters& p, const Gradients& gradients) {
  const std::size_t hidden = shape_.hidden;
  float* const queries = at(wide_gradient_);
  float* const sum = at(narrow_gradient_);
  if (!shape_.is_llama()) {
    return linear_backward({at(b.norm1), queries, sum}, p, gradients, block::kQkvWeight, hidden, 3 * width_);
  }
  float* const keys = queries + rows_ * width_;
  float* const values = keys + rows_ * kv_width_;
  float* const more = at(second_gradient_);
  rotate(queries, heads_, -1);
  rotate(keys, kv_heads_, -1);
  linear_backward({at(b.norm1), queries, sum}, p, gradients, llama_block::kQuery, hidden, width_);
  linear_backward({at(b.norm1), keys, more}, p, gradients, llama_block::kKey, hidden, kv_width_);
  operations_.run(Add{sum, more, sum, rows_ * hidden});
  linear_backward({at(b.norm1), values, more}, p, gradients, llama_block::kValue, hidden, kv_width_);
  operations_.run(Add{sum, more, sum, rows_ * hidden});
}

void Gpt::activate(const BlockPlaces& b, const Parameters& p) {
  const std::size_t hidden = shape_.hidden, count = rows_ * inner_;
  if (!shape_.is_llama()) {
    linear(at(b.norm2), p, block::kExpandWeight, hidden, inner_, at(b.expanded));
    return operations_.run(Gelu{at(b.expanded), at(b.activated), count});
  }
  linear(at(b.norm2), p, llama_block::kGate, hidden, inner_, at(b.expanded));
  linear(at(b.norm2), p, llama_block::kUp, hidden, inner_, at(b.up));
  operations_.run(SwiGlu{at(b.expanded), at(b.up), at(b.activated), count});
}

void Gpt::activate_backward(const BlockPlaces& b, const Parameters& p, const Gradients& gradients) {
  const std::size_t hidden = shape_.hidden, count = rows_ * inner_;
  float* const gradient = activated_gradient();
  float* const sum = at(narrow_gradient_);
  if (!shape_.is_llama()) {
    operations_.run(GeluBackward{at(b.expanded), gradient, count});
    return linear_backward({at(b.norm2), gradient, sum}, p, gradients, block::kExpandWeight, hidden, inner_);
  }
  float* const gate = at(wide_gradient_);
  float* const more = at(second_gradient_);
  operations_.run(SwiGluBackward{at(b.expanded), at(b.up), gradient, gate, gradient, count});
  linear_backward({at(b.norm2), gate, sum}, p, gradients, llama_block::kGate, hidden, inner_);
  linear_backward({at(b.norm2), gradient, more}, p, gradients, llama_block::kUp, hidden, inner_);
  operations_.run(Add{sum, more, sum, rows_ * hidden});
}

void Gpt::rotate(float* values, std::size_t heads, float direction) {
  const std::size_t columns = shape_.hidden / shape_.heads, pairs = columns / 2;
  Rotate arguments{.values = values,
                   .count = rows_ * heads * pairs,
                   .sequence = shape_.sequence,
                   .heads = heads,
                   .columns = columns,
                   .direction = direction,
                   .frequencies = {}};
  for (std::size_t i = 0; i < pairs; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(columns);
    arguments.frequencies[i] = 1.0F / static_cast<float>(std::pow(shape_.rope_theta, double{exponent}));
  }
  operations_.run(arguments);
}

// --- final: logits = norm(x) * head^T, and the loss ---

void Gpt::final_forward(const Parameters& p) {
  const float* const x = output_of(layers_.end - 1);
  queue_.run([=, this] {
    const std::size_t hidden = shape_.hidden;
    norm_forward(norm_of(x, final_mean_, final_inverse_), p, final_unit::kNormGain, at(final_norm_));
    multiply(input_gradient_product(vocabulary_, hidden), at(final_norm_), stored(p[head_]), at(logits_));
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
    const GradientTarget& tokens = gradients[head_];
    multiply(weight_gradient_product(vocabulary_, hidden), at(logits_), computed(at(final_norm_)),
             gradient_space(tokens));
    store_gradient(tokens, vocabulary_ * hidden);
    multiply(forward_product(vocabulary_, hidden), at(logits_), stored(p[head_]), at(narrow_gradient_));
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
  multiply(output_product(in, out), input, stored(p[weight]), output);
  if (const std::byte* const bias = bias_of(p, weight))
    operations_.run(AddBias{output, widened(bias, out), rows_, out});
}

void Gpt::linear_backward(const LinearGradient& g, const Parameters& p, const Gradients& gradients,
                          int weight, std::size_t in, std::size_t out) {
  const GradientTarget& weight_gradient = gradients[weight];
  float* const space = gradient_space(weight_gradient);
  if (shape_.is_llama()) {
    multiply(weight_gradient_product(out, in), g.output_gradient, computed(g.input), space);
    store_gradient(weight_gradient, in * out);
    return multiply(forward_product(out, in), g.output_gradient, stored(p[weight]), g.input_gradient);
  }
  multiply(weight_gradient_product(in, out), g.input, computed(g.output_gradient), space);
  store_gradient(weight_gradient, in * out);
  const GradientTarget& bias_gradient = gradients[weight + 1];
  operations_.run(ColumnSums{g.output_gradient, gradient_space(bias_gradient), rows_, out});
  store_gradient(bias_gradient, out);
  multiply(input_gradient_product(in, out), g.output_gradient, stored(p[weight]), g.input_gradient);
}

void Gpt::norm_forward(const LayerNorm& norm, const Parameters& p, int gain, float* output) {
  const std::size_t hidden = shape_.hidden;
  const std::byte* const bias = bias_of(p, gain);
  operations_.run(NormForward{norm, widened(p[gain], hidden),
                              bias != nullptr ? widened(bias, hidden, hidden) : nullptr, output});
}

void Gpt::norm_backward(const LayerNorm& norm, const Parameters& p, const Gradients& gradients, int gain,
                        float* input_gradient) {
  const std::size_t hidden = shape_.hidden;
  const float* gradient = at(narrow_gradient_);
  const GradientTarget& gain_gradient = gradients[gain];
  operations_.run(NormBackward{norm, widened(p[gain], hidden), gradient, input_gradient});
  operations_.run(GainBackward{norm, gradient, gradient_space(gain_gradient)});
  if (shape_.is_llama()) return store_gradient(gain_gradient, hidden);
  const GradientTarget& bias_gradient = gradients[gain + 1];
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
  const bool is_rms = shape_.is_llama();
  return {.input = input,
          .mean = is_rms ? nullptr : at(mean),
          .inverse = at(inverse),
          .rows = rows_,
          .hidden = shape_.hidden,
          .epsilon = is_rms ? static_cast<float>(shape_.norm_epsilon) : definitions::kEpsilon};
}

Attention Gpt::attention_shape() const {
  return {.batch = batch_,
          .sequence = shape_.sequence,
          .hidden = width_,
          .heads = heads_,
          .first_head = part_.rank * heads_,
          .all_heads = shape_.heads,
          .kv_heads = shape_.is_llama() ? kv_heads_ : 0};
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
