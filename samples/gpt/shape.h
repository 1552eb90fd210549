// What the model is made of: its sizes, its units, and every parameter's name, shape and initial value.
// README.md says the same in words, exactly enough for another implementation.
#pragma once

#include <cstddef>
#include <cstdint>
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

struct GptParameter {
  std::string name;                // As Hugging Face GPT-2 spells it.
  std::vector<std::size_t> shape;  // Matrices are [in, out].
  int group = kDecayedGroup;
  Initial initial = Initial::kNormal;
  double deviation = 0;  // Of kNormal.

  std::size_t count() const;
};

struct GptUnit {
  std::string name;
  std::vector<GptParameter> parameters;
};

// Units in the order of the forward pass: "embedding", one per block, "final". The head of "final" is
// wte.weight, tied: it comes after final's own parameters wherever the parameters of a unit are listed.
// Errors: throws Error(kInvalidArgument) naming the option that cannot be.
std::vector<GptUnit> describe_units(const GptShape& shape);

std::size_t parameter_count(const GptShape& shape);

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
