// How the states of an optimizer are kept between steps in fewer bytes than fp32 takes: formats of m and v,
// and a master in bf16.
//
// Each format has one scalar definition (kernels/moments.h), which the SIMD bodies and the CUDA kernels
// follow, so the result is the same bit for bit on every instruction set, number of threads and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/language.h"

namespace forebay {

// How m and v are kept between steps. With every format, a step widens them to fp32, computes in fp32 as
// AdamWArguments says, updates the parameter from the new m and v, and then rounds them for keeping. So
// rounding affects the next step, never the present one.
enum class MomentFormat : std::uint8_t {
  // 4 bytes. Nothing is rounded.
  kFloat32,
  // 2 bytes. Half a unit in the last place is at most 1/257 of the value.
  kBfloat16,
  // 1 byte and 1/256: eight-bit floating codes in blocks of kMomentBlockCount elements with one exponent E
  // a block, the least for which no element is above 1.875 * 2^E. A code of m has a sign, 4 bits of exponent
  // and 3 of mantissa, with subnormals: 2^(E-17) to 1.875 * 2^E. A code of v has 5 bits of exponent and 3 of
  // mantissa: 1.125 * 2^(E-31) to 1.875 * 2^E. The error of one element x in a block whose greatest magnitude
  // is X is at most
  //
  //          nearest                              dithered
  //   m      max(|x| / 17, X * 2^-17.9)           max(|x| / 8, X * 2^-16.9)
  //   v      max(x / 17, X * 2^-30.7)             max(x / 8, X * 2^-30.7)
  //
  // and 2^-112 where these are smaller. So an element whose gradients are below 2^-14 of the greatest in its
  // block learns more slowly than with fp32. A v that is not 0 never becomes 0, which would make its next
  // step as large as m / eps. A block with an element that is not finite, or above 1.875 * 2^127, becomes NaN
  // as a whole.
  kBlock8,
};

// "fp32", "bf16" or "block8": the words of reports and messages.
constexpr const char* moment_format_name(MomentFormat format) noexcept {
  return format == MomentFormat::kFloat32 ? "fp32" : format == MomentFormat::kBfloat16 ? "bf16" : "block8";
}

// Elements that share an exponent in kBlock8. Larger: one large element costs more others their range.
// Smaller: the exponents take more bytes.
inline constexpr std::size_t kMomentBlockCount = 256;

// How m and v are rounded to a format narrower than fp32.
enum class MomentRounding : std::uint8_t {
  // To the nearest, ties to even. With the usual beta2 v stands still: a step moves v by (1 - beta2) of its
  // distance to g * g, and a move of less than half a unit in the last place is lost. At beta2 = 0.999 a
  // growing bf16 v stops at a quarter to a half of g * g, a kBlock8 one at a sixtieth to a thirtieth, and
  // both never fall. Use it for bf16 with a beta2 of at most 0.95.
  kNearest,
  // Up or down at random, so that the mean is the value: small moves are made now and then instead of never.
  // The random bits are a hash of the element's new m, its new v, and the number of the step. So the result
  // does not depend on where the element lies, on blocks, threads or the instruction set.
  kDithered,
};

// The memory of m and v. Element i of m and v has index i in both; in kBlock8 element i is in block i /
// kMomentBlockCount, and an array that is passed in parts is cut at multiples of kMomentBlockCount. Memory of
// zeros is m = v = 0 in every format.
struct Moments {
  MomentFormat format = MomentFormat::kFloat32;
  void* m = nullptr;  // float, bf16 or codes: moment_bytes() of each.
  void* v = nullptr;  // Null for an optimizer without a second moment.
  // kBlock8 only: one byte a block.
  std::uint8_t* m_exponents = nullptr;
  std::uint8_t* v_exponents = nullptr;
};

// Bytes of `count` elements of one of m and v, without exponents.
constexpr std::size_t moment_bytes(MomentFormat format, std::size_t count) noexcept {
  return format == MomentFormat::kFloat32 ? 4 * count : format == MomentFormat::kBfloat16 ? 2 * count : count;
}

// Bytes of their exponents.
constexpr std::size_t moment_exponent_bytes(MomentFormat format, std::size_t count) noexcept {
  return format == MomentFormat::kBlock8 ? (count + kMomentBlockCount - 1) / kMomentBlockCount : 0;
}

// A master that is kept in bf16, so that the parameter is its own master. A step widens it to fp32, updates
// it, and rounds the result. Rounding to the nearest would lose every change of less than half a unit in the
// last place, which is most of them, so kDithered rounds up or down at random with the value as the mean. The
// random bits are a hash of `key`, the step's number and the element's number, so they do not depend on
// ranks, blocks or threads.
struct HalfMaster {
  std::uint16_t* elements = nullptr;  // bf16. Null: the master is fp32.
  std::uint64_t first = 0;            // The number of elements[0].
  std::uint64_t key = 0;              // Another one for each array of elements.
};

}  // namespace forebay
