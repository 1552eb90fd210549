// Scalar conversions between fp32 and the two 16-bit formats. Every forebay kernel uses them.
//
// Rounding is IEEE round-to-nearest-even; subnormals are kept; too large values become infinity. A NaN
// becomes the canonical NaN of the target format: quiet, positive, without payload (0x7FC00000, 0x7FC0,
// 0x7E00), because processors differ in payload and sign. Widening is exact. All is integer arithmetic, so
// the rounding mode and flush-to-zero of the calling thread do not change the result.
#pragma once

#include <cstdint>
#include <cstring>

#include "forebay/language.h"

// Marks a function that nvcc compiles for the device too.
#ifndef FOREBAY_DEVICE
#ifdef __CUDACC__
#define FOREBAY_DEVICE __host__ __device__
#else
#define FOREBAY_DEVICE
#endif
#endif

namespace forebay {

// Bits of the canonical NaN of each format.
inline constexpr std::uint32_t kCanonicalNanFloat32 = 0x7FC00000;
inline constexpr std::uint16_t kCanonicalNanBfloat16 = 0x7FC0;
inline constexpr std::uint16_t kCanonicalNanFloat16 = 0x7E00;

// The representation of an fp32 value, and back. memcpy and not std::bit_cast: device code may call it.
FOREBAY_DEVICE inline std::uint32_t float_bits(float value) noexcept {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
FOREBAY_DEVICE inline float float_from_bits(std::uint32_t bits) noexcept {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// `value`, or the canonical NaN if it is any NaN.
FOREBAY_DEVICE inline float canonical(float value) noexcept {
  return (float_bits(value) & 0x7FFFFFFFu) > 0x7F800000u ? float_from_bits(kCanonicalNanFloat32) : value;
}

// The nearest bf16 value; of two equally near ones, the even one.
FOREBAY_DEVICE inline std::uint16_t float_to_bfloat16(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return kCanonicalNanBfloat16;
  // Adding half an ulp (less one if the kept part is even) carries into the kept bits exactly when
  // round-to-nearest-even rounds up.
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// The same value in fp32.
FOREBAY_DEVICE inline float bfloat16_to_float(std::uint16_t value) noexcept {
  return canonical(float_from_bits(static_cast<std::uint32_t>(value) << 16));
}

// The nearest fp16 value; of two equally near ones, the even one. From 65520 on: infinity.
FOREBAY_DEVICE inline std::uint16_t float_to_float16(float value) noexcept {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return kCanonicalNanFloat16;
  if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // At least 2^16.
  if (magnitude < 0x33000000u) return static_cast<std::uint16_t>(sign);  // Below 2^-25, half the least.
  std::uint32_t rounded;
  if (magnitude < 0x38800000u) {
    // Below 2^-14: a subnormal, in units of 2^-24. The significand with its leading one is shifted to that
    // unit.
    const std::uint32_t significand = (magnitude & 0x007FFFFFu) | 0x00800000u;
    const std::uint32_t shift = 126u - (magnitude >> 23);
    const std::uint32_t kept = significand >> shift;
    const std::uint32_t dropped = significand & ((1u << shift) - 1u);
    const std::uint32_t half = 1u << (shift - 1u);
    rounded = kept + ((dropped > half || (dropped == half && (kept & 1u) != 0u)) ? 1u : 0u);
  } else {
    // The exponent's bias goes from 127 to 15; a carry may reach infinity, which is then the right answer.
    rounded = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | rounded);
}

// The same value in fp32.
FOREBAY_DEVICE inline float float16_to_float(std::uint16_t value) noexcept {
  const std::uint32_t sign = (static_cast<std::uint32_t>(value) & 0x8000u) << 16;
  const std::uint32_t exponent = (value >> 10) & 0x1Fu;
  const std::uint32_t mantissa = value & 0x3FFu;
  if (exponent == 0x1Fu) {
    return float_from_bits(mantissa != 0u ? kCanonicalNanFloat32 : (sign | 0x7F800000u));
  }
  if (exponent == 0u) {
    // Zero or a subnormal: an integer times 2^-24, exact in fp32, and normal there.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return float_from_bits(sign | float_bits(magnitude));
  }
  return float_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

}  // namespace forebay
