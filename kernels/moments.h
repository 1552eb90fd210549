// The one scalar definition of how m and v are kept in fewer bytes than fp32. The SIMD bodies follow it
// operation by operation, and the tests compare them bit for bit. See forebay/moments.h for the formats.
#pragma once

#include "forebay/moments.h"
#include "kernels/definitions.h"

namespace forebay::definitions {

// The seed of all elements with this key in this step.
FOREBAY_DEVICE inline std::uint64_t step_seed(std::uint64_t key, std::uint64_t step) noexcept {
  std::uint64_t z = key + (step + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The seed of dither_bits(). A plain multiple of the step in its place gave single elements means over many
// steps that were further off than random bits give.
FOREBAY_DEVICE inline std::uint32_t dither_seed(std::uint64_t step) noexcept {
  return static_cast<std::uint32_t>(step_seed(0, step) >> 32);
}

// An odd factor whose products are as good as random bits in HostAdam.DitherIsUnbiasedAndIndependent.
inline constexpr std::uint32_t kDitherFactor = 0xD35A2D97u;

// The random bits that m and v drop theirs with. `shift` is how many each takes.
struct DitherBits {
  std::uint32_t m, v;
};

// Both values are canonical(). The upper bits of the product depend on all bits of its factors and the lower
// ones on few, so v, which takes the lower ones, mixes them with those of m.
FOREBAY_DEVICE inline DitherBits dither_bits(std::uint32_t seed, float m, float v,
                                             std::uint32_t shift) noexcept {
  const std::uint32_t h = (float_bits(m) ^ float_bits(v) ^ seed) * kDitherFactor;
  const std::uint32_t upper = h >> (32u - shift);
  return {upper, (h ^ upper) & ((1u << shift) - 1u)};
}

// Drops the lower `shift` bits. `random` has that many; without dither half of the last place is added, less
// one when the kept part is even.
FOREBAY_DEVICE inline std::uint32_t drop_bits(std::uint32_t bits, std::uint32_t shift, bool dithered,
                                              std::uint32_t random) noexcept {
  const std::uint32_t nearest = (1u << (shift - 1u)) - 1u + ((bits >> shift) & 1u);
  return (bits + (dithered ? random : nearest)) >> shift;
}

// --- bf16 ---

inline constexpr std::uint32_t kBfloat16Shift = 16;

// An infinity stays one: its lower bits are zero, so nothing carries.
FOREBAY_DEVICE inline std::uint16_t moment_to_bfloat16(float value, bool dithered,
                                                       std::uint32_t random) noexcept {
  if (!(value == value)) return kCanonicalNanBfloat16;
  return static_cast<std::uint16_t>(drop_bits(float_bits(value), kBfloat16Shift, dithered, random));
}

// --- block8 ---

// The stored exponent is E + 127. This one marks a block that is NaN as a whole.
inline constexpr std::uint32_t kMomentExponentNan = 255;
// No block has a smaller one, so that every code is a normal fp32 number, and so is the unit of m's
// subnormals.
inline constexpr std::uint32_t kMomentExponentLeast = 32;
inline constexpr std::uint32_t kMomentMantissaBits = 3;
inline constexpr std::uint32_t kMomentShift = 23 - kMomentMantissaBits;

// The exponent of a block, from the greatest of its elements' bits without their signs. Infinity and NaN are
// greater than all numbers.
FOREBAY_DEVICE inline std::uint32_t moment_exponent(std::uint32_t greatest) noexcept {
  const std::uint32_t exponent = (greatest + ((1u << kMomentShift) - 1u)) >> 23;
  if (exponent >= kMomentExponentNan) return kMomentExponentNan;
  return exponent < kMomentExponentLeast ? kMomentExponentLeast : exponent;
}

// An exponent as read: memory of zeros, or damaged memory, has smaller ones than are written.
FOREBAY_DEVICE inline std::uint32_t moment_exponent_read(std::uint8_t stored) noexcept {
  return stored < kMomentExponentLeast ? kMomentExponentLeast : stored;
}

// For a block whose exponent is not kMomentExponentNan. Below 2^(E-14) the codes are multiples of 2^(E-17),
// and the addition puts their digits where the mantissa of a normal number has them.
FOREBAY_DEVICE inline std::uint8_t m_to_code(float m, std::uint32_t exponent, bool dithered,
                                             std::uint32_t random) noexcept {
  const std::uint32_t least_normal = (exponent - 14u) << 23;
  std::uint32_t magnitude = float_bits(m) & 0x7FFFFFFFu;
  if (magnitude < least_normal) {
    magnitude = float_bits(float_from_bits(magnitude) + float_from_bits(least_normal)) - (1u << 23);
  }
  const std::uint32_t kept = drop_bits(magnitude, kMomentShift, dithered, random);
  return static_cast<std::uint8_t>((kept - ((exponent - 15u) << 3)) | ((float_bits(m) >> 24) & 0x80u));
}

FOREBAY_DEVICE inline float m_from_code(std::uint8_t code, std::uint32_t exponent) noexcept {
  if (exponent == kMomentExponentNan) return float_from_bits(kCanonicalNanFloat32);
  const std::uint32_t magnitude = code & 0x7Fu;
  const float value = magnitude < 8u
                          ? static_cast<float>(magnitude) * float_from_bits((exponent - 17u) << 23)
                          : float_from_bits((magnitude << kMomentShift) + ((exponent - 15u) << 23));
  return float_from_bits(float_bits(value) | (code & 0x80u) << 24);
}

// v has no sign; a value that is not 0 stays not 0.
FOREBAY_DEVICE inline std::uint8_t v_to_code(float v, std::uint32_t exponent, bool dithered,
                                             std::uint32_t random) noexcept {
  const std::uint32_t magnitude = float_bits(v) & 0x7FFFFFFFu;
  const std::uint32_t kept = drop_bits(magnitude, kMomentShift, dithered, random);
  const std::uint32_t base = (exponent - 31u) << 3;
  const std::uint32_t code = kept <= base ? 1u : kept - base;
  return static_cast<std::uint8_t>(magnitude == 0u ? 0u : code);
}

FOREBAY_DEVICE inline float v_from_code(std::uint8_t code, std::uint32_t exponent) noexcept {
  if (exponent == kMomentExponentNan) return float_from_bits(kCanonicalNanFloat32);
  return code == 0u
             ? 0.0f
             : float_from_bits((static_cast<std::uint32_t>(code) << kMomentShift) + ((exponent - 31u) << 23));
}

// --- a master in bf16 ---

inline constexpr std::uint32_t kMasterFactor1 = 0x9E3779B1u;
inline constexpr std::uint32_t kMasterFactor2 = 0x85EBCA77u;

// 16 random bits of an element.
FOREBAY_DEVICE inline std::uint32_t master_bits(std::uint64_t seed, std::uint64_t element) noexcept {
  std::uint32_t h = (static_cast<std::uint32_t>(element) ^ static_cast<std::uint32_t>(seed)) * kMasterFactor1;
  h ^= h >> 15;
  h = (h ^ static_cast<std::uint32_t>(element >> 32) ^ static_cast<std::uint32_t>(seed >> 32)) *
      kMasterFactor2;
  h ^= h >> 13;
  return h * 0xC2B2AE35u >> 16;
}

FOREBAY_DEVICE inline std::uint16_t master_to_bfloat16(float value, bool dithered, std::uint64_t seed,
                                                       std::uint64_t element) noexcept {
  return moment_to_bfloat16(value, dithered, dithered ? master_bits(seed, element) : 0);
}

}  // namespace forebay::definitions
