// The initial weights: from the seed, or from a file.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "model/shape.h"

namespace forebay::gpt {

// The random values of `parameter`, the `index`-th over all units. They depend on the seed only.
std::vector<float> random_values(const GptParameter& parameter, std::uint64_t index, std::uint64_t seed);

// Receives the values of one parameter: the `index`-th of `unit`.
using ParameterSetter =
    std::function<void(std::size_t unit, std::size_t index, std::span<const float> values)>;

void set_random(const std::vector<GptUnit>& units, std::uint64_t seed, const ParameterSetter& set);

// From a safetensors file, or a model directory, that has these tensors and no others. The names may be those
// of transformers; tensors that it derives from others are left out.
// Errors: throws Error(kCorruption) naming a tensor that is missing, unknown or of another shape, and the
// errors of WeightFiles.
void set_from_file(const std::vector<GptUnit>& units, const std::string& path, const ParameterSetter& set);

}  // namespace forebay::gpt
