// Elements of any data type in tests: rounded, stored and loaded one at a time, and noise to fill them with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/conversions.h"
#include "forebay/data_type.h"

namespace forebay::testing {

inline float round_to(DataType type, float value) {
  switch (type) {
    case DataType::kFloat32:
      return value;
    case DataType::kBfloat16:
      return bfloat16_to_float(float_to_bfloat16(value));
    case DataType::kFloat16:
      return float16_to_float(float_to_float16(value));
  }
  return value;
}

// Element `i` of an array at `at`, which is aligned for its type.
inline float load(DataType type, const std::byte* at, std::uint64_t i) {
  if (type == DataType::kFloat32) return reinterpret_cast<const float*>(at)[i];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(at)[i];
  return type == DataType::kBfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

inline void store(DataType type, std::byte* at, std::uint64_t i, float value) {
  if (type == DataType::kFloat32) {
    reinterpret_cast<float*>(at)[i] = value;
  } else {
    reinterpret_cast<std::uint16_t*>(at)[i] =
        type == DataType::kBfloat16 ? float_to_bfloat16(value) : float_to_float16(value);
  }
}

// SplitMix64's last steps: neighbouring inputs give unrelated outputs.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace forebay::testing
