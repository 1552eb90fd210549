// The shape of a transformer: a few well-known numbers, such as layers and hidden, from which the units and
// parameters of a ModelShape are made. `forebay plan` uses it, and a trainer may register its units from it.
// It has no weights and allocates nothing. The engine itself takes any ModelShape.
#pragma once

#include <cstdint>
#include <string>

#include "forebay/data_type.h"
#include "forebay/plan.h"
#include "forebay/status.h"

namespace forebay {

enum class TransformerKind : std::uint8_t {
  kGpt2,   // Learned positions, LayerNorm with bias, one query/key/value matrix, GELU, biases everywhere.
  kLlama,  // Rotary positions, RMSNorm, grouped-query attention, SwiGLU, biases only where the shape says so.
};

// A mixture of experts in place of the feed-forward part. Each is a feed-forward part of `intermediate`, and
// a token passes through `active` of them and through the shared ones.
struct Experts {
  std::uint64_t count = 0;
  std::uint64_t active = 0;
  std::uint64_t shared = 0;
  std::uint64_t intermediate = 0;
  std::uint64_t dense_layers = 0;  // The first ones, which have a feed-forward part of the shape's width.
};

// Attention of which queries, keys and values come from short vectors.
// Source: DeepSeek-AI, arXiv 2405.04434, section 2.1.
struct LatentAttention {
  std::uint64_t query_rank = 0;  // 0: queries come from the hidden state.
  std::uint64_t key_value_rank = 0;
  std::uint64_t rotary_dimension = 0;  // A head's, besides head_dimension.
  std::uint64_t value_dimension = 0;   // A head's.
};

// The numbers of a transformer. 0 stands for the default in the comment of the field.
struct TransformerShape {
  TransformerKind kind = TransformerKind::kGpt2;
  std::uint64_t layers = 0;           // Required.
  std::uint64_t hidden = 0;           // Required.
  std::uint64_t heads = 0;            // Required; divides hidden unless head_dimension is given.
  std::uint64_t vocabulary = 0;       // Required.
  std::uint64_t positions = 0;        // Longest sequence. Required for GPT-2, which has a table of positions.
  std::uint64_t intermediate = 0;     // Width of the feed-forward part. 0: four times hidden (GPT-2 only).
  std::uint64_t key_value_heads = 0;  // Llama. 0: as many as heads.
  std::uint64_t head_dimension = 0;   // Llama. 0: hidden / heads.
  bool tied_embedding = true;         // The output projection is the embedding's matrix.
  bool attention_bias = false;        // Llama; GPT-2 always has biases.
  bool feed_forward_bias = false;     // Llama; GPT-2 always has biases.
  // The kinds that are Llama's but for these.
  bool query_key_value_bias = false;  // Qwen 2: biases there and not after attention.
  bool query_key_norm = false;        // Qwen 3, Gemma 3.
  bool output_norms = false;          // Gemma 2 and 3: norms behind attention and feed-forward part too.
  Experts experts;                    // Mixtral, DeepSeek. count 0: none.
  LatentAttention latent;             // DeepSeek 2 and 3. key_value_rank 0: attention is Llama's.
};

// The width of the feed-forward part that a token passes through: all of it, or that of its experts.
std::uint64_t active_intermediate(const TransformerShape& shape);

// Fills in the defaults and checks that the numbers fit each other.
//
// Errors: kInvalidArgument naming the number and the allowed values.
Result<TransformerShape> complete_shape(TransformerShape shape);

// The part of a model that one rank has. Tensor parallelism partitions the matrices of each layer: the first
// matrix of attention and of the feed-forward part by columns (whole heads), the second by rows, the
// embedding by tokens. Parts are rounded up where the number of ranks does not divide. Norms, positions and
// the biases of second matrices are whole on every rank. Pipeline parallelism gives each pipeline stage some
// of the layers.
struct ModelPart {
  int tensor_parallel = 1;    // A divisor of heads. With fewer key-value heads than ranks, each rank has one.
  int pipeline_parallel = 1;  // At most as many as layers.
  int pipeline_stage = 0;
  friend constexpr bool operator==(const ModelPart& a, const ModelPart& b) noexcept {
    return a.tensor_parallel == b.tensor_parallel && a.pipeline_parallel == b.pipeline_parallel &&
           a.pipeline_stage == b.pipeline_stage;
  }
  friend constexpr bool operator!=(const ModelPart& a, const ModelPart& b) noexcept { return !(a == b); }
};

// Consecutive layers of a model.
struct LayerRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

// The layers of a pipeline stage. Pipeline stages differ by at most one layer. The first one, which holds the
// most micro-batches, never has more than another.
LayerRange stage_layers(std::uint64_t layers, const ModelPart& part);

// The units in order of execution: "embedding", one per layer, "final". Parameters have their names in
// Hugging Face's GPT-2 and Llama state dictionaries. Parameter group 0 holds the matrices, which decay;
// parameter group 1 the biases and norms. The first pipeline stage has "embedding" and the last one "final".
// Where both need the embedding's matrix, it is a unit of both, "tokens", before all other units.
//
// Errors: those of complete_shape; kInvalidArgument for a part that the model cannot have.
// Source: Hugging Face transformers, models/gpt2 and models/llama; Shoeybi et al., arXiv 1909.08053,
// section 3.
Result<ModelShape> make_model_shape(const TransformerShape& shape, const ModelPart& part = {});

struct ActivationOptions {
  std::uint64_t batch = 1;     // Sequences in one micro-step of one rank.
  std::uint64_t sequence = 0;  // Tokens of a sequence. 0: the shape's positions.
  DataType dtype = DataType::kBfloat16;
  bool fused_attention = false;  // Attention keeps neither scores nor their dropout masks.
};

// An estimate of the bytes that the layers keep from forward to backward without recomputation. For GPT-2 and
// a 2-byte type it is sbh(34 + 5as/h) per layer, with s tokens, b sequences, a heads and h hidden. Elements
// (16h and two score matrices) count at the size of the type, dropout masks at one byte. Llama's terms are
// counted likewise, without dropout. A fused attention has no score matrices. The loss is added (loss_bytes
// in activation_formulas.h); other activations outside of the layers are not in it. forebay-gpt declares its
// own exact figure instead.
//
// Errors: kInvalidArgument for a sequence longer than the positions, or a figure larger than 2^62 bytes.
// Source: Korthikanti et al., arXiv 2205.05198, section 4, equation 1.
Result<std::uint64_t> estimate_activation_bytes(const TransformerShape& shape,
                                                const ActivationOptions& options);

}  // namespace forebay
