#include "convert.h"

#include <algorithm>
#include <bit>

namespace forebay::gpt {
namespace {

// Every function here is free of branches that depend on a value, so that the loops below vectorise.

float from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<std::uint16_t>(is_nan ? 0x7FC0u : rounded);
}

float from_float16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFu;
  // As if it were an fp32 with a small exponent; the product moves the exponent and makes subnormals normal.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  const std::uint32_t special = (magnitude << 13) | 0x7F800000u;  // Infinity and NaN.
  const std::uint32_t result = magnitude >= 0x7C00u ? special : std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(result | sign);
}

std::uint16_t to_float16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Normal results: rebias the exponent by -112 and round the 13 bits that go.
  const std::uint32_t normal = (magnitude + 0xC8000FFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 makes the adder round at the right place, 2^-24.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5F);
  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  result = magnitude >= 0x477FF000u ? 0x7C00u : result;                 // From 65520 on: infinity.
  result = magnitude > 0x7F800000u ? 0x7E00u : result;                  // NaN
  return static_cast<std::uint16_t>(result | sign);
}

[[maybe_unused]] constexpr std::size_t kParallelCount =
    1u << 15;  // Below it starting threads costs more than it saves.

template <typename From>
void widen_each(const std::uint16_t* source, float* target, std::size_t count, From from) {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
  for (std::size_t i = 0; i < count; ++i) target[i] = from(source[i]);
}

template <typename Bits, typename From, typename To>
void narrow_each(const float* source, Bits* target, std::size_t count, bool accumulate, From from, To to) {
  if (accumulate) {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
    for (std::size_t i = 0; i < count; ++i) target[i] = to(from(target[i]) + source[i]);
  } else {
#pragma omp parallel for simd schedule(static) if (count >= kParallelCount)
    for (std::size_t i = 0; i < count; ++i) target[i] = to(source[i]);
  }
}

}  // namespace

void widen(DataType type, const std::byte* source, float* target, std::size_t count) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(source);
  switch (type) {
    case DataType::kFloat32:
      std::copy_n(reinterpret_cast<const float*>(source), count, target);
      return;
    case DataType::kBfloat16:
      widen_each(halves, target, count, from_bfloat16);
      return;
    case DataType::kFloat16:
      widen_each(halves, target, count, from_float16);
      return;
  }
}

void narrow(DataType type, const float* source, std::byte* target, std::size_t count, bool accumulate) {
  auto* halves = reinterpret_cast<std::uint16_t*>(target);
  const auto same = [](float value) { return value; };
  switch (type) {
    case DataType::kFloat32:
      narrow_each(source, reinterpret_cast<float*>(target), count, accumulate, same, same);
      return;
    case DataType::kBfloat16:
      narrow_each(source, halves, count, accumulate, from_bfloat16, to_bfloat16);
      return;
    case DataType::kFloat16:
      narrow_each(source, halves, count, accumulate, from_float16, to_float16);
      return;
  }
}

}  // namespace forebay::gpt
