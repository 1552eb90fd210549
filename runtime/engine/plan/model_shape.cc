#include "forebay/model_shape.h"

#include <algorithm>
#include <utility>

#include "forebay/activation_formulas.h"
#include "forebay/units.h"

namespace forebay {
namespace {

// Smaller: a real model could be refused. Larger: the product of two, or the sum over a unit, could overflow.
constexpr std::uint64_t kLayerLimit = 100'000;
constexpr std::uint64_t kWidthLimit = std::uint64_t{1} << 24;
constexpr std::uint64_t kTableLimit = std::uint64_t{1} << 28;
constexpr std::uint64_t kExpertLimit = 4096;

constexpr int kDecay = 0;
constexpr int kNoDecay = 1;

Status refuse(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

Status check_limit(const char* name, std::uint64_t value, std::uint64_t limit) {
  if (value >= 1 && value <= limit) return Status();
  return refuse(std::string(name) + " is " + std::to_string(value) + "; use 1 to " + std::to_string(limit));
}

// Collects the parameters of one unit, as one tensor-parallel rank has them. Their names share a prefix.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, std::string prefix, const ModelPart& part)
      : prefix_(std::move(prefix)), ranks_(static_cast<std::uint64_t>(part.tensor_parallel)) {
    unit_.name = std::move(name);
  }

  // Whole on every rank.
  void matrix(const std::string& name, std::uint64_t rows, std::uint64_t columns) {
    add(name + ".weight", {rows, columns}, kDecay, /*replicated=*/true);
  }
  // One row for each position.
  void positions(const std::string& name, std::uint64_t count, std::uint64_t columns) {
    matrix(name, count, columns);
    unit_.parameters.back().elementwise = true;
  }
  void vector(const std::string& name, std::uint64_t count) {
    add(name, {count}, kNoDecay, /*replicated=*/true);
  }
  // With biases.
  void layer_norm(const std::string& name, std::uint64_t count) {
    vector(name + ".weight", count);
    vector(name + ".bias", count);
  }

  // One row for each token. Muon does not orthogonalise tables and heads.
  void embedding(const std::string& name, std::uint64_t tokens, std::uint64_t columns) {
    add(name + ".weight", {ceil_div(tokens, ranks_), columns}, kDecay, /*replicated=*/false);
    unit_.parameters.back().elementwise = true;
  }
  // Partitioned by columns, the bias too. This rank has `outputs` columns.
  void by_columns(const std::string& name, std::uint64_t inputs, std::uint64_t outputs, bool bias) {
    add(name + ".weight", {inputs, outputs}, kDecay, /*replicated=*/false);
    if (bias) add(name + ".bias", {outputs}, kNoDecay, /*replicated=*/false);
  }
  // Partitioned by rows, the bias whole. This rank has `inputs` rows.
  void by_rows(const std::string& name, std::uint64_t inputs, std::uint64_t outputs, bool bias) {
    add(name + ".weight", {inputs, outputs}, kDecay, /*replicated=*/false);
    if (bias) vector(name + ".bias", outputs);
  }

  UnitShape take() { return std::move(unit_); }
  UnitShape& unit() { return unit_; }

 private:
  void add(const std::string& name, std::vector<std::uint64_t> shape, int group, bool replicated) {
    std::uint64_t count = 1;
    for (const std::uint64_t extent : shape) count *= extent;
    unit_.parameters.push_back({.name = prefix_ + name,
                                .count = count,
                                .group = group,
                                .replicated = replicated,
                                .shape = std::move(shape)});
  }

  std::string prefix_;
  const std::uint64_t ranks_;
  UnitShape unit_;
};

// Whether the first and the last pipeline stage share the embedding's matrix, in a unit of its own.
bool shares_tokens(const TransformerShape& shape, const ModelPart& part) {
  return shape.tied_embedding && part.pipeline_parallel > 1;
}

void add_tokens(const TransformerShape& shape, UnitBuilder& builder) {
  const bool gpt2 = shape.kind == TransformerKind::kGpt2;
  builder.embedding(gpt2 ? "wte" : "model.embed_tokens", shape.vocabulary, shape.hidden);
}

UnitShape shared_tokens(const TransformerShape& shape, const ModelPart& part) {
  UnitBuilder tokens("tokens", "", part);
  add_tokens(shape, tokens);
  tokens.unit().backward_reads_parameters = false;
  tokens.unit().shared_by = 2;
  return tokens.take();
}

UnitShape embedding_unit(const TransformerShape& shape, const ModelPart& part) {
  UnitBuilder embedding("embedding", "", part);
  if (shares_tokens(shape, part)) {
    embedding.unit().tied.push_back({.unit = 0, .index = 0});
  } else {
    add_tokens(shape, embedding);
  }
  if (shape.kind == TransformerKind::kGpt2) embedding.positions("wpe", shape.positions, shape.hidden);
  embedding.unit().backward_reads_parameters = false;
  return embedding.take();
}

UnitShape gpt2_layer(const TransformerShape& shape, const ModelPart& part, std::uint64_t layer) {
  const std::uint64_t h = shape.hidden;
  const auto ranks = static_cast<std::uint64_t>(part.tensor_parallel);
  const std::uint64_t width = h / ranks;
  const std::uint64_t inner = ceil_div(shape.intermediate, ranks);
  const std::string name = "h." + std::to_string(layer);
  UnitBuilder block(name, name + ".", part);
  block.layer_norm("ln_1", h);
  block.by_columns("attn.c_attn", h, 3 * width, true);
  block.by_rows("attn.c_proj", width, h, true);
  block.layer_norm("ln_2", h);
  block.by_columns("mlp.c_fc", h, inner, true);
  block.by_rows("mlp.c_proj", inner, h, true);
  return block.take();
}

void add_feed_forward(const std::string& name, std::uint64_t h, std::uint64_t inner, bool bias,
                      UnitBuilder& block) {
  block.by_columns(name + "gate_proj", h, inner, bias);
  block.by_columns(name + "up_proj", h, inner, bias);
  block.by_rows(name + "down_proj", inner, h, bias);
}

// The short vectors are whole on every rank, the heads partitioned.
void add_latent_attention(const TransformerShape& shape, std::uint64_t ranks, UnitBuilder& block) {
  const LatentAttention& latent = shape.latent;
  const std::uint64_t h = shape.hidden;
  const std::uint64_t heads = shape.heads / ranks;
  const std::uint64_t queries = heads * (shape.head_dimension + latent.rotary_dimension);
  const std::uint64_t values = heads * latent.value_dimension;
  if (latent.query_rank == 0) {
    block.by_columns("self_attn.q_proj", h, queries, false);
  } else {
    block.matrix("self_attn.q_a_proj", h, latent.query_rank);
    if (shape.attention_bias) block.vector("self_attn.q_a_proj.bias", latent.query_rank);
    block.vector("self_attn.q_a_layernorm.weight", latent.query_rank);
    block.by_columns("self_attn.q_b_proj", latent.query_rank, queries, false);
  }
  const std::uint64_t keys = latent.key_value_rank + latent.rotary_dimension;
  block.matrix("self_attn.kv_a_proj_with_mqa", h, keys);
  if (shape.attention_bias) block.vector("self_attn.kv_a_proj_with_mqa.bias", keys);
  block.vector("self_attn.kv_a_layernorm.weight", latent.key_value_rank);
  block.by_columns("self_attn.kv_b_proj", latent.key_value_rank, heads * shape.head_dimension + values,
                   false);
  block.by_rows("self_attn.o_proj", values, h, shape.attention_bias);
}

UnitShape llama_layer(const TransformerShape& shape, const ModelPart& part, std::uint64_t layer) {
  const std::uint64_t h = shape.hidden;
  const auto ranks = static_cast<std::uint64_t>(part.tensor_parallel);
  const std::uint64_t queries = shape.heads / ranks * shape.head_dimension;
  const std::uint64_t keys = ceil_div(shape.key_value_heads, ranks) * shape.head_dimension;
  const std::uint64_t inner = ceil_div(shape.intermediate, ranks);
  const std::string name = "layers." + std::to_string(layer);
  UnitBuilder block(name, "model." + name + ".", part);
  block.vector("input_layernorm.weight", h);
  if (shape.latent.key_value_rank > 0) {
    add_latent_attention(shape, ranks, block);
  } else {
    const bool bias = shape.attention_bias || shape.query_key_value_bias;
    block.by_columns("self_attn.q_proj", h, queries, bias);
    block.by_columns("self_attn.k_proj", h, keys, bias);
    block.by_columns("self_attn.v_proj", h, keys, bias);
    block.by_rows("self_attn.o_proj", queries, h, shape.attention_bias);
  }
  if (shape.query_key_norm) {
    block.vector("self_attn.q_norm.weight", shape.head_dimension);
    block.vector("self_attn.k_norm.weight", shape.head_dimension);
  }
  block.vector("post_attention_layernorm.weight", h);
  if (shape.output_norms) {
    block.vector("pre_feedforward_layernorm.weight", h);
    block.vector("post_feedforward_layernorm.weight", h);
  }
  const bool bias = shape.feed_forward_bias;
  if (layer < shape.experts.dense_layers || shape.experts.count == 0) {
    add_feed_forward("mlp.", h, inner, bias, block);
    return block.take();
  }
  const Experts& experts = shape.experts;
  const std::uint64_t width = ceil_div(experts.intermediate, ranks);
  block.matrix("mlp.gate", h, experts.count);
  for (std::uint64_t i = 0; i < experts.count; ++i)
    add_feed_forward("mlp.experts." + std::to_string(i) + ".", h, width, bias, block);
  if (experts.shared > 0)
    add_feed_forward("mlp.shared_experts.", h, ceil_div(experts.shared * experts.intermediate, ranks), bias,
                     block);
  return block.take();
}

UnitShape final_unit(const TransformerShape& shape, const ModelPart& part) {
  UnitBuilder final("final", "", part);
  if (shape.kind == TransformerKind::kGpt2) {
    final.layer_norm("ln_f", shape.hidden);
  } else {
    final.vector("model.norm.weight", shape.hidden);
  }
  if (shape.tied_embedding) {
    final.unit().tied.push_back({.unit = 0, .index = 0});
  } else {
    final.embedding("lm_head", shape.vocabulary, shape.hidden);
  }
  return final.take();
}

Status check_part(const TransformerShape& shape, const ModelPart& part) {
  if (part.tensor_parallel < 1 || shape.heads % static_cast<std::uint64_t>(part.tensor_parallel) != 0) {
    return refuse("tensor-parallel is " + std::to_string(part.tensor_parallel) + " and the model has " +
                  std::to_string(shape.heads) + " heads, which it does not divide; use a divisor");
  }
  if (part.pipeline_parallel < 1 || static_cast<std::uint64_t>(part.pipeline_parallel) > shape.layers) {
    return refuse("pipeline-parallel is " + std::to_string(part.pipeline_parallel) +
                  " and each stage needs a layer; use 1 to the model's layers, " +
                  std::to_string(shape.layers));
  }
  if (part.pipeline_stage < 0 || part.pipeline_stage >= part.pipeline_parallel) {
    return refuse("pipeline stage " + std::to_string(part.pipeline_stage) + " does not exist; use 0 to " +
                  std::to_string(part.pipeline_parallel - 1));
  }
  return Status();
}

}  // namespace

Result<TransformerShape> complete_shape(TransformerShape shape) {
  const bool gpt2 = shape.kind == TransformerKind::kGpt2;
  FOREBAY_RETURN_IF_ERROR(check_limit("layers", shape.layers, kLayerLimit));
  FOREBAY_RETURN_IF_ERROR(check_limit("hidden", shape.hidden, kWidthLimit));
  FOREBAY_RETURN_IF_ERROR(check_limit("heads", shape.heads, kWidthLimit));
  FOREBAY_RETURN_IF_ERROR(check_limit("vocabulary", shape.vocabulary, kTableLimit));
  if (gpt2 || shape.positions != 0) {
    FOREBAY_RETURN_IF_ERROR(check_limit("sequence", shape.positions, kTableLimit));
  }
  if (shape.head_dimension == 0) {
    if (shape.hidden % shape.heads != 0) {
      return refuse("heads " + std::to_string(shape.heads) + " does not divide hidden " +
                    std::to_string(shape.hidden) + "; use a divisor of hidden");
    }
    shape.head_dimension = shape.hidden / shape.heads;
  }
  FOREBAY_RETURN_IF_ERROR(check_limit("head_dim", shape.head_dimension, kWidthLimit / shape.heads));
  if (shape.key_value_heads == 0) shape.key_value_heads = shape.heads;
  if (shape.key_value_heads > shape.heads || shape.heads % shape.key_value_heads != 0) {
    return refuse("key-value heads " + std::to_string(shape.key_value_heads) + " does not divide heads " +
                  std::to_string(shape.heads) + "; use a divisor of heads");
  }
  if (shape.intermediate == 0 && gpt2) shape.intermediate = 4 * shape.hidden;
  FOREBAY_RETURN_IF_ERROR(check_limit("intermediate", shape.intermediate, 4 * kWidthLimit));
  const Experts& experts = shape.experts;
  if (experts.count > 0) {
    FOREBAY_RETURN_IF_ERROR(check_limit("experts", experts.count, kExpertLimit));
    FOREBAY_RETURN_IF_ERROR(check_limit("active experts", experts.active, experts.count));
    FOREBAY_RETURN_IF_ERROR(check_limit("intermediate of an expert", experts.intermediate, kWidthLimit));
    if (experts.shared > 0)
      FOREBAY_RETURN_IF_ERROR(check_limit("shared experts", experts.shared, kExpertLimit));
  }
  const LatentAttention& latent = shape.latent;
  if (latent.key_value_rank > 0) {
    FOREBAY_RETURN_IF_ERROR(check_limit("kv_lora_rank", latent.key_value_rank, kWidthLimit));
    FOREBAY_RETURN_IF_ERROR(
        check_limit("qk_rope_head_dim", latent.rotary_dimension, kWidthLimit / shape.heads));
    FOREBAY_RETURN_IF_ERROR(check_limit("v_head_dim", latent.value_dimension, kWidthLimit / shape.heads));
    if (latent.query_rank > 0)
      FOREBAY_RETURN_IF_ERROR(check_limit("q_lora_rank", latent.query_rank, kWidthLimit));
  }
  return shape;
}

std::uint64_t active_intermediate(const TransformerShape& shape) {
  const Experts& experts = shape.experts;
  if (experts.count == 0) return shape.intermediate;
  return (experts.active + experts.shared) * experts.intermediate;
}

LayerRange stage_layers(std::uint64_t layers, const ModelPart& part) {
  const auto stages = static_cast<std::uint64_t>(part.pipeline_parallel);
  const auto stage = static_cast<std::uint64_t>(part.pipeline_stage);
  const std::uint64_t first = stage * layers / stages;
  return {first, (stage + 1) * layers / stages - first};
}

Result<ModelShape> make_model_shape(const TransformerShape& shape, const ModelPart& part) {
  Result<TransformerShape> complete = complete_shape(shape);
  FOREBAY_RETURN_IF_ERROR(complete.status());
  const TransformerShape& full = complete.value();
  FOREBAY_RETURN_IF_ERROR(check_part(full, part));
  const bool gpt2 = full.kind == TransformerKind::kGpt2;
  ModelShape model;
  const bool first = part.pipeline_stage == 0;
  const bool last = part.pipeline_stage + 1 == part.pipeline_parallel;
  if (shares_tokens(full, part) && (first || last)) model.units.push_back(shared_tokens(full, part));
  if (first) model.units.push_back(embedding_unit(full, part));
  const LayerRange range = stage_layers(full.layers, part);
  for (std::uint64_t layer = range.first; layer < range.first + range.count; ++layer)
    model.units.push_back(gpt2 ? gpt2_layer(full, part, layer) : llama_layer(full, part, layer));
  if (last) model.units.push_back(final_unit(full, part));
  return model;
}

Result<std::uint64_t> estimate_activation_bytes(const TransformerShape& shape,
                                                const ActivationOptions& options) {
  Result<TransformerShape> completed = complete_shape(shape);
  FOREBAY_RETURN_IF_ERROR(completed.status());
  const TransformerShape& full = completed.value();
  FOREBAY_RETURN_IF_ERROR(check_limit("batch", options.batch, kTableLimit));
  const std::uint64_t sequence = options.sequence == 0 ? full.positions : options.sequence;
  FOREBAY_RETURN_IF_ERROR(check_limit("sequence", sequence, kTableLimit));
  if (full.positions != 0 && sequence > full.positions) {
    return refuse("sequence " + std::to_string(sequence) + " is longer than the model's " +
                  std::to_string(full.positions) + " positions; use a shorter one");
  }

  // Per token: elements of the type, and bytes of dropout masks. Scores are per token, head and attended
  // token.
  const std::uint64_t h = full.hidden;
  std::uint64_t elements, mask_bytes, score_elements, score_mask_bytes;
  if (full.kind == TransformerKind::kGpt2) {
    elements = 8 * h + 2 * full.intermediate;  // 2 norms, attention 5, feed-forward 1; its two wide tensors.
    mask_bytes = 2 * h;
    score_elements = 2;  // Softmax, before and after dropout.
    score_mask_bytes = 1;
  } else {
    elements =
        4 * h + 2 * full.head_dimension * (full.heads + full.key_value_heads) + 3 * active_intermediate(full);
    mask_bytes = 0;
    score_elements = 1;
    score_mask_bytes = 0;
  }
  const std::uint64_t width = element_bytes(options.dtype);
  const std::uint64_t scores =
      options.fused_attention ? 0 : full.heads * (score_elements * width + score_mask_bytes);
  const std::uint64_t per_token = elements * width + mask_bytes;

  constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;
  std::uint64_t bytes = 0;
  const bool overflow =
      __builtin_mul_overflow(scores, sequence, &bytes) || __builtin_add_overflow(bytes, per_token, &bytes) ||
      __builtin_mul_overflow(bytes, sequence, &bytes) ||
      __builtin_mul_overflow(bytes, options.batch, &bytes) ||
      __builtin_mul_overflow(bytes, full.layers, &bytes) ||
      __builtin_add_overflow(bytes, loss_bytes(sequence * options.batch, full.vocabulary, width, 1), &bytes);
  if (overflow || bytes > kLimit) {
    return refuse("the activations of batch " + std::to_string(options.batch) + " and sequence " +
                  std::to_string(sequence) + " are larger than 2^62 bytes; use a smaller batch or sequence");
  }
  return bytes;
}

}  // namespace forebay
