// The numbers of PTX: NaN and subnormal rules on top of the processor's IEEE 754.
// Source: PTX ISA, "Floating-point instructions".
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace forebay::ptx {

template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

// Every operation of fp32 gives this NaN, whichever its inputs were. For fp64 the ISA leaves it open; this
// one differs from the NaN that forebay stores, so that a missing canonical_double() shows.
template <typename T>
inline T canonical_nan() {
  if constexpr (sizeof(T) == 8) {
    return std::bit_cast<double>(std::uint64_t{0xFFF8000000000000});
  } else {
    return std::bit_cast<float>(std::uint32_t{0x7FFFFFFF});
  }
}

template <typename T>
inline T canonical_result(T value) {
  return value == value ? value : canonical_nan<T>();
}

// .ftz: a subnormal becomes a zero of its sign. For fp32 alone.
inline float flushed(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits & 0x7F800000) == 0 ? std::bit_cast<float>(bits & 0x80000000) : value;
}
inline double flushed(double value) {
  return value;
}

// .sat: the range 0 to 1, and 0 for a NaN.
template <typename T>
inline T saturated(T value) {
  return !(value > T{0}) ? T{0} : value > T{1} ? T{1} : value;
}

// One NaN gives the other operand; -0 is less than +0.
template <typename T, bool maximum>
inline T selected(T a, T b) {
  if (a != a) return canonical_result(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) == maximum ? b : a;
  return (a < b) != maximum ? a : b;
}

}  // namespace forebay::ptx
