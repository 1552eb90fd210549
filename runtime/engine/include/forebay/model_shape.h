// The shape of a transformer, as the handful of numbers that people know it by, turned into the units and
// parameters that the engine plans and trains. No weights, no allocation: `forebay plan` works on it, and a
// trainer may register its units from it. What the engine has is always a ModelShape; this is only a short
// way to write one.
#pragma once

#include <cstdint>
#include <string>

#include "forebay/data_type.h"
#include "forebay/plan.h"
#include "forebay/status.h"

namespace forebay {

enum class TransformerKind : std::uint8_t {
  kGpt2,   // Learned positions, LayerNorm with bias, one fused query/key/value matrix, GELU, biases
           // everywhere.
  kLlama,  // Rotary positions, RMSNorm, grouped-query attention, SwiGLU, biases only where asked for.
};

// A field that is 0 takes the default in its comment.
struct TransformerShape {
  TransformerKind kind = TransformerKind::kGpt2;
  std::uint64_t layers = 0;           // Required.
  std::uint64_t hidden = 0;           // Required.
  std::uint64_t heads = 0;            // Required; divides hidden unless head_dimension is given.
  std::uint64_t vocabulary = 0;       // Required.
  std::uint64_t positions = 0;        // Longest sequence. Required for GPT-2, whose position table it sizes.
  std::uint64_t intermediate = 0;     // Width of the feed-forward part. 0: four times hidden (GPT-2 only).
  std::uint64_t key_value_heads = 0;  // Llama. 0: as many as heads.
  std::uint64_t head_dimension = 0;   // Llama. 0: hidden / heads.
  bool tied_embedding = true;         // The output projection is the embedding's matrix.
  bool attention_bias = false;        // Llama; GPT-2 always has biases.
  bool feed_forward_bias = false;     // Llama; GPT-2 always has biases.
};

// Fills in the defaults and checks that the numbers go together.
//
// Errors: kInvalidArgument naming the number and what it may be.
Result<TransformerShape> complete_shape(TransformerShape shape);

// What one rank has of a model that ranks share. Tensor parallelism cuts the matrices of each layer: the
// first of attention and of the feed-forward part by columns (whole heads), the second by rows, the embedding
// by tokens; where these do not divide, the parts are rounded up. Norms, positions and the biases of second
// matrices are whole on every rank. Pipeline parallelism gives each stage some of the layers.
struct ModelPart {
  int tensor_parallel = 1;    // A divisor of heads. With fewer key-value heads than ranks, each rank has one.
  int pipeline_parallel = 1;  // At most as many as layers.
  int pipeline_stage = 0;
  friend bool operator==(const ModelPart&, const ModelPart&) = default;
};

// As even as may be; later stages, which hold fewer micro-batches, have the layers more.
struct LayerRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};
LayerRange stage_layers(std::uint64_t layers, const ModelPart& part);

// The units in order of execution: "embedding", one per layer, "final". Parameters are named as in Hugging
// Face's GPT-2 and Llama state dictionaries. Group 0 holds the matrices, which decay; group 1 the biases and
// norms. Of several pipeline stages the first has the embedding and the last "final"; where the output
// projection is the embedding's matrix, that is a unit of both, "tokens", which comes before all others.
//
// Errors: as complete_shape; kInvalidArgument for parts that the model cannot have.
// Source: Hugging Face transformers, models/gpt2 and models/llama; Shoeybi et al., arXiv 1909.08053,
// section 3.
Result<ModelShape> make_model_shape(const TransformerShape& shape, const ModelPart& part = {});

struct ActivationOptions {
  std::uint64_t batch = 1;     // Sequences of one micro-step on one rank.
  std::uint64_t sequence = 0;  // 0: the shape's positions.
  DataType dtype = DataType::kBfloat16;
};

// An estimate of the bytes that the layers keep from forward to backward with no recomputation: for GPT-2 and
// a 2-byte type sbh(34 + 5as/h) per layer, s tokens, b sequences, a heads, h hidden. It counts elements (16h
// and two score matrices) at the type's width and dropout masks at one byte; Llama's terms are counted
// likewise, without dropout. What stands outside the layers (logits) is not in it. forebay-gpt declares its
// own exact figure instead.
//
// Errors: kInvalidArgument for a sequence longer than the positions or a figure beyond 2^62 bytes.
// Source: Korthikanti et al., arXiv 2205.05198, section 4, equation 1.
Result<std::uint64_t> estimate_activation_bytes(const TransformerShape& shape,
                                                const ActivationOptions& options);

}  // namespace forebay
