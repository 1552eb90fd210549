// What the model is made of: its sizes, its units, and every parameter's name, shape and initial value.
// README.md says the same in words, exactly enough for another implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace forebay::gpt {

inline constexpr std::size_t kVocabulary = 256;  // Tokens are bytes.

struct GptShape {
  std::size_t layers = 4;
  std::size_t hidden = 128;
  std::size_t heads = 4;
  std::size_t sequence = 64;  // Positions, and tokens of one sample.
};

enum class Initial : std::uint8_t { kNormal, kZero, kOne };

// The two groups of the usual weight-decay split.
inline constexpr int kDecayedGroup = 0;    // Matrices and embeddings.
inline constexpr int kUndecayedGroup = 1;  // Biases and LayerNorm gains.

// How tensor-parallel ranks share a parameter: each has all of it, or some of its rows (the first extent) or
// columns (the last). Where these do not divide, the last parts are padded with zeros.
enum class Cut : std::uint8_t { kWhole, kRows, kColumns };

struct GptParameter {
  std::string name;                // As Hugging Face GPT-2 spells it.
  std::vector<std::size_t> shape;  // Matrices are [in, out].
  int group = kDecayedGroup;
  Initial initial = Initial::kNormal;
  double deviation = 0;  // Of kNormal.
  Cut cut = Cut::kWhole;
  std::size_t sections = 1;  // Of the columns, each of which is cut: query, key and value have three.

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
  bool uses_tokens = false;  // wte.weight too, which an earlier unit has.
  bool is_computed = true;   // False: it has parameters for others.
};

// Units in the order of the forward pass: "embedding", one per block, "final". The head of "final" is
// wte.weight, tied: it comes after final's own parameters wherever those of a unit that uses it are listed.
// Errors: throws Error(kInvalidArgument) naming the option that cannot be.
std::vector<GptUnit> describe_units(const GptShape& shape);

std::size_t parameter_count(const GptShape& shape);

// --- a stage of a pipeline ---

// Each has some consecutive blocks, the first the embedding before them, the last "final" after them.
struct PipelineStage {
  std::size_t index = 0;
  std::size_t count = 1;

  bool is_first() const { return index == 0; }
  bool is_last() const { return index + 1 == count; }
};

// From `begin` up to before `end`.
struct LayerRange {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t count() const { return end - begin; }
};

// As even as may be; the later stages, which hold fewer micro-batches, have the blocks more.
LayerRange layers_of(const GptShape& shape, const PipelineStage& stage);
// Errors: throws Error(kInvalidArgument) when there are more stages than blocks.
void check_stages(const GptShape& shape, std::size_t stages);
// The units that a stage has, of those of describe_units(). The first and the last of several stages both use
// wte.weight: there it is a unit of its own, "tokens", which comes before all others.
std::vector<GptUnit> stage_of(const std::vector<GptUnit>& units, const PipelineStage& stage);

// --- a rank's part of the model ---

// Errors: throws Error(kInvalidArgument) when the heads cannot be shared out.
void check_part(const GptShape& shape, const TensorPart& part);
// The parameters as this rank has them; whole ones are as they were.
std::vector<GptUnit> part_of(const std::vector<GptUnit>& units, const TensorPart& part);
GptParameter part_of(const GptParameter& whole, const TensorPart& part);
// Where element `i` of the part is in `whole`; none for padding.
std::optional<std::size_t> place_in_whole(const GptParameter& whole, const TensorPart& part, std::size_t i);
// The part's values; padding is zero.
std::vector<float> take_part(const GptParameter& whole, const TensorPart& part,
                             std::span<const float> values);
// Puts the part's values where they belong in `values`, those of `whole`.
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

}  // namespace forebay::gpt
