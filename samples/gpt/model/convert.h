// Conversions between fp32, in which the model computes, and the engine's type of parameters and gradients.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/data_type.h"

namespace forebay::gpt {

// Exact.
void widen(DataType type, const std::byte* source, float* target, std::size_t count);

// Rounds to nearest, ties to even. With `accumulate`, target = round(widened target + source).
void narrow(DataType type, const float* source, std::byte* target, std::size_t count, bool accumulate);

}  // namespace forebay::gpt
