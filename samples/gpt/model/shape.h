// The model's sizes and units, and the name, shape and initial value of each parameter. README.md says the
// same in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "forebay/tensor_split.h"

namespace forebay::gpt {

inline constexpr std::size_t kVocabulary = 256;  // The default: tokens are bytes.

// The blocks of GPT-2 or those of Llama: RMSNorm, rotary position embedding, SwiGLU, keys and values that
// several heads share, no biases, and a head of its own.
enum class ModelKind : std::uint8_t { kGpt2, kLlama };

struct GptShape {
  static constexpr std::size_t kLayersMax = 1 << 16;  // With more, describing the model takes minutes.
  std::size_t layers = 4;
  std::size_t hidden = 128;
  std::size_t heads = 4;
  std::size_t sequence = 64;  // Tokens of one sample.
  std::size_t vocabulary = kVocabulary;
  std::size_t positions = 0;  // Rows of wpe.weight, of which the first `sequence` are used; 0: as many.
  std::size_t inner = 0;  // Columns of the MLP; 0: 4 * hidden, or 8 / 3 of it in multiples of 32 for Llama.

  ModelKind kind = ModelKind::kGpt2;
  // Llama's only.
  std::size_t kv_heads = 0;    // Heads of keys and values, a divisor of `heads`; 0: as many.
  double rope_theta = 10000;   // The base of the rotary embedding's frequencies.
  double norm_epsilon = 1e-5;  // RMSNorm's; that of LayerNorm is 1e-5.
  bool tied_head = false;      // The head is the token embedding, as always in GPT-2.

  bool is_llama() const { return kind == ModelKind::kLlama; }
  std::size_t position_count() const { return positions == 0 ? sequence : positions; }
  std::size_t inner_count() const;
  std::size_t kv_head_count() const { return kv_heads == 0 ? heads : kv_heads; }
  // Columns of all keys, and of all values.
  std::size_t kv_columns() const { return hidden / heads * kv_head_count(); }
  bool has_tied_head() const { return !is_llama() || tied_head; }
};

enum class Initial : std::uint8_t { kNormal, kZero, kOne };

// The two parameter groups: with and without weight decay.
inline constexpr int kDecayedGroup = 0;    // Matrices and embeddings.
inline constexpr int kUndecayedGroup = 1;  // Biases and gains of norms.

// How tensor-parallel ranks share a parameter: each has all of it, some of its rows (the first extent) or
// some of its columns (the last). If the ranks do not divide them, the last parts are padded with zeros.
enum class Cut : std::uint8_t { kWhole, kRows, kColumns };

struct GptParameter {
  std::string name;                // The name in Hugging Face's GPT-2 or Llama.
  std::vector<std::size_t> shape;  // Matrices are [in, out] in GPT-2, [out, in] in Llama.
  int group = kDecayedGroup;
  Initial initial = Initial::kNormal;
  double deviation = 0;  // For kNormal.
  Cut cut = Cut::kWhole;
  std::size_t sections = 1;  // Sections of columns, each divided by itself: query, key and value make three.
  std::optional<TensorSplit> split = {};  // A part has its place in the whole.

  std::size_t count() const;
};

// One of the ranks that share every layer.
struct TensorPart {
  std::size_t rank = 0;
  std::size_t size = 1;
};

struct GptUnit {
  std::string name;
  std::vector<GptParameter> parameters;
  bool uses_tokens = false;  // It also uses the token embedding, which an earlier unit owns.
  bool is_computed = true;   // False: it only holds parameters for other units.
};

// Units in the order of the forward pass: "embedding", one per block, "final". Lists of final's parameters
// have the head at the end, also where it is the tied token embedding. Errors: throws Error(kInvalidArgument)
// naming the wrong option.
std::vector<GptUnit> describe_units(const GptShape& shape);

std::size_t parameter_count(const GptShape& shape);

bool is_token_embedding(const std::string& parameter);
const char* model_name(ModelKind kind);  // "gpt2" or "llama".

// --- pipeline stages ---

// A stage has consecutive blocks; the first stage also has the embedding, the last one "final".
struct PipelineStage {
  std::size_t index = 0;
  std::size_t count = 1;

  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == count; }
};

// Layers from `begin` to before `end`.
struct LayerRange {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t count() const { return end - begin; }
};

// The blocks are divided evenly. The later stages, which hold fewer micro-batches, get one more where needed.
LayerRange layers_of(const GptShape& shape, const PipelineStage& stage);
// Errors: throws Error(kInvalidArgument) when there are more stages than blocks.
void check_stages(const GptShape& shape, std::size_t stages);
// The stage's units, from describe_units(). The first and the last of several stages share a tied token
// embedding: there it is a unit of its own, "tokens", before all others.
std::vector<GptUnit> stage_of(const std::vector<GptUnit>& units, const PipelineStage& stage);

// --- a rank's part of the model ---

// Errors: throws Error(kInvalidArgument) when the ranks do not divide the heads, or those of keys.
void check_part(const GptShape& shape, const TensorPart& part);
// The shapes of this rank's part; undivided parameters are unchanged.
std::vector<GptUnit> part_of(const std::vector<GptUnit>& units, const TensorPart& part);
GptParameter part_of(const GptParameter& whole, const TensorPart& part);
// The index in `whole` of the part's element `i`; none for padding.
std::optional<std::size_t> place_in_whole(const GptParameter& whole, const TensorPart& part, std::size_t i);
// The part's values; padding is zero.
std::vector<float> take_part(const GptParameter& whole, const TensorPart& part,
                             std::span<const float> values);
// Writes the part's values to their places in `values`, which has those of `whole`.
void put_part(const GptParameter& whole, const TensorPart& part, std::span<const float> part_values,
              std::span<float> values);

// Positions of the parameters within their units.
namespace embedding {
enum : int { kTokens, kPositions, kCount };
}
namespace block {
enum : int {
  kNorm1Gain,
  kNorm1Bias,
  kQkvWeight,
  kQkvBias,
  kAttentionWeight,
  kAttentionBias,
  kNorm2Gain,
  kNorm2Bias,
  kExpandWeight,
  kExpandBias,
  kContractWeight,
  kContractBias,
  kCount
};
}
namespace final_unit {
enum : int { kNormGain, kNormBias, kTokens, kCount };
}
// The same for Llama, without biases.
namespace llama_block {
enum : int { kNorm1Gain, kQuery, kKey, kValue, kAttention, kNorm2Gain, kGate, kUp, kDown, kCount };
}
namespace llama_final_unit {
enum : int { kNormGain, kHead, kCount };
}

}  // namespace forebay::gpt
