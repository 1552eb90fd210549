#include "forebay/model_shape.h"

#include <utility>

namespace forebay {
namespace {

// Far beyond any model, and small enough that the product of any two, and a unit's sum of them, fits in 64
// bits.
constexpr std::uint64_t kLayerLimit = 100'000;
constexpr std::uint64_t kWidthLimit = std::uint64_t{1} << 24;
constexpr std::uint64_t kTableLimit = std::uint64_t{1} << 28;

constexpr int kDecay = 0;
constexpr int kNoDecay = 1;

Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

Status check_range(const char* name, std::uint64_t value, std::uint64_t limit) {
  if (value >= 1 && value <= limit) return Status();
  return refuse(std::string(name) + " is " + std::to_string(value) + "; use 1 to " + std::to_string(limit));
}

// Collects the parameters of one unit under a common prefix of their names.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, std::string prefix) : prefix_(std::move(prefix)) {
    unit_.name = std::move(name);
  }

  void matrix(const std::string& name, std::uint64_t rows, std::uint64_t columns) {
    unit_.parameters.push_back(
        {.name = prefix_ + name + ".weight", .count = rows * columns, .group = kDecay});
  }
  void vector(const std::string& name, std::uint64_t count) {
    unit_.parameters.push_back({.name = prefix_ + name, .count = count, .group = kNoDecay});
  }
  // A matrix with the bias of its output columns.
  void linear(const std::string& name, std::uint64_t inputs, std::uint64_t outputs, bool bias) {
    matrix(name, inputs, outputs);
    if (bias) vector(name + ".bias", outputs);
  }
  void layer_norm(const std::string& name, std::uint64_t count) {
    vector(name + ".weight", count);
    vector(name + ".bias", count);
  }
  UnitShape take() { return std::move(unit_); }

  UnitShape& unit() { return unit_; }

 private:
  std::string prefix_;
  UnitShape unit_;
};

ModelShape gpt2_units(const TransformerShape& shape) {
  const std::uint64_t h = shape.hidden;
  ModelShape model;

  UnitBuilder embedding("embedding", "");
  embedding.matrix("wte", shape.vocabulary, h);
  embedding.matrix("wpe", shape.positions, h);
  embedding.unit().backward_reads_parameters = false;
  model.units.push_back(embedding.take());

  for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
    const std::string name = "h." + std::to_string(layer);
    UnitBuilder block(name, name + ".");
    block.layer_norm("ln_1", h);
    block.linear("attn.c_attn", h, 3 * h, true);
    block.linear("attn.c_proj", h, h, true);
    block.layer_norm("ln_2", h);
    block.linear("mlp.c_fc", h, shape.intermediate, true);
    block.linear("mlp.c_proj", shape.intermediate, h, true);
    model.units.push_back(block.take());
  }

  UnitBuilder final("final", "");
  final.layer_norm("ln_f", h);
  if (shape.tied_embedding) {
    final.unit().tied.push_back({.unit = 0, .index = 0});
  } else {
    final.matrix("lm_head", shape.vocabulary, h);
  }
  model.units.push_back(final.take());
  return model;
}

ModelShape llama_units(const TransformerShape& shape) {
  const std::uint64_t h = shape.hidden;
  const std::uint64_t queries = shape.heads * shape.head_dimension;
  const std::uint64_t keys = shape.key_value_heads * shape.head_dimension;
  ModelShape model;

  UnitBuilder embedding("embedding", "model.");
  embedding.matrix("embed_tokens", shape.vocabulary, h);
  embedding.unit().backward_reads_parameters = false;
  model.units.push_back(embedding.take());

  for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    UnitBuilder block(name, "model." + name + ".");
    block.vector("input_layernorm.weight", h);
    block.linear("self_attn.q_proj", h, queries, shape.attention_bias);
    block.linear("self_attn.k_proj", h, keys, shape.attention_bias);
    block.linear("self_attn.v_proj", h, keys, shape.attention_bias);
    block.linear("self_attn.o_proj", queries, h, shape.attention_bias);
    block.vector("post_attention_layernorm.weight", h);
    block.linear("mlp.gate_proj", h, shape.intermediate, shape.feed_forward_bias);
    block.linear("mlp.up_proj", h, shape.intermediate, shape.feed_forward_bias);
    block.linear("mlp.down_proj", shape.intermediate, h, shape.feed_forward_bias);
    model.units.push_back(block.take());
  }

  UnitBuilder final("final", "");
  final.vector("model.norm.weight", h);
  if (shape.tied_embedding) {
    final.unit().tied.push_back({.unit = 0, .index = 0});
  } else {
    final.matrix("lm_head", shape.vocabulary, h);
  }
  model.units.push_back(final.take());
  return model;
}

}  // namespace

Result<TransformerShape> complete_shape(TransformerShape shape) {
  const bool gpt2 = shape.kind == TransformerKind::kGpt2;
  FOREBAY_RETURN_IF_ERROR(check_range("layers", shape.layers, kLayerLimit));
  FOREBAY_RETURN_IF_ERROR(check_range("hidden", shape.hidden, kWidthLimit));
  FOREBAY_RETURN_IF_ERROR(check_range("heads", shape.heads, kWidthLimit));
  FOREBAY_RETURN_IF_ERROR(check_range("vocabulary", shape.vocabulary, kTableLimit));
  if (gpt2 || shape.positions != 0) {
    FOREBAY_RETURN_IF_ERROR(check_range("sequence", shape.positions, kTableLimit));
  }
  if (shape.head_dimension == 0) {
    if (shape.hidden % shape.heads != 0) {
      return refuse("heads " + std::to_string(shape.heads) + " does not divide hidden " +
                    std::to_string(shape.hidden) + "; use a divisor of hidden");
    }
    shape.head_dimension = shape.hidden / shape.heads;
  }
  FOREBAY_RETURN_IF_ERROR(check_range("head_dim", shape.head_dimension, kWidthLimit / shape.heads));
  if (shape.key_value_heads == 0) shape.key_value_heads = shape.heads;
  if (shape.key_value_heads > shape.heads || shape.heads % shape.key_value_heads != 0) {
    return refuse("key-value heads " + std::to_string(shape.key_value_heads) + " does not divide heads " +
                  std::to_string(shape.heads) + "; use a divisor of heads");
  }
  if (shape.intermediate == 0 && gpt2) shape.intermediate = 4 * shape.hidden;
  FOREBAY_RETURN_IF_ERROR(check_range("intermediate", shape.intermediate, 4 * kWidthLimit));
  return shape;
}

Result<ModelShape> make_model_shape(const TransformerShape& shape) {
  Result<TransformerShape> complete = complete_shape(shape);
  FOREBAY_RETURN_IF_ERROR(complete.status());
  return shape.kind == TransformerKind::kGpt2 ? gpt2_units(complete.value()) : llama_units(complete.value());
}

Result<std::uint64_t> estimate_activation_bytes(const TransformerShape& shape,
                                                const ActivationOptions& options) {
  Result<TransformerShape> completed = complete_shape(shape);
  FOREBAY_RETURN_IF_ERROR(completed.status());
  const TransformerShape& full = completed.value();
  FOREBAY_RETURN_IF_ERROR(check_range("batch", options.batch, kTableLimit));
  const std::uint64_t sequence = options.sequence == 0 ? full.positions : options.sequence;
  FOREBAY_RETURN_IF_ERROR(check_range("sequence", sequence, kTableLimit));
  if (full.positions != 0 && sequence > full.positions) {
    return refuse("sequence " + std::to_string(sequence) + " is longer than the model's " +
                  std::to_string(full.positions) + " positions; use a shorter one");
  }

  // Per token: elements of the type, bytes of dropout masks. Scores are per token, head and token attended
  // to.
  const std::uint64_t h = full.hidden;
  std::uint64_t elements, mask_bytes, score_elements, score_mask_bytes;
  if (full.kind == TransformerKind::kGpt2) {
    elements = 8 * h + 2 * full.intermediate;  // 2 norms, attention 5, feed-forward 1; its two wide tensors.
    mask_bytes = 2 * h;
    score_elements = 2;  // Softmax, and what dropout leaves of it.
    score_mask_bytes = 1;
  } else {
    elements = 4 * h + 2 * full.head_dimension * (full.heads + full.key_value_heads) + 3 * full.intermediate;
    mask_bytes = 0;
    score_elements = 1;
    score_mask_bytes = 0;
  }
  const std::uint64_t width = element_bytes(options.dtype);
  const std::uint64_t scores = full.heads * (score_elements * width + score_mask_bytes);
  const std::uint64_t per_token = elements * width + mask_bytes;

  constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;
  std::uint64_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(scores, sequence, &bytes) ||
                        __builtin_add_overflow(bytes, per_token, &bytes) ||
                        __builtin_mul_overflow(bytes, sequence, &bytes) ||
                        __builtin_mul_overflow(bytes, options.batch, &bytes) ||
                        __builtin_mul_overflow(bytes, full.layers, &bytes);
  if (overflow || bytes > kLimit) {
    return refuse("the activations of batch " + std::to_string(options.batch) + " and sequence " +
                  std::to_string(sequence) + " pass 2^62 bytes; use a smaller batch or sequence");
  }
  return bytes;
}

}  // namespace forebay
