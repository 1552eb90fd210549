// The shapes that functions of instructions have: one operation, done for all 32 lanes.
//
// All lanes are computed, and the active ones are kept: an operation must not trap on any input.
#pragma once

#include <cstdint>

#include "tests/fakes/cuda/ptx/program.h"
#include "tests/fakes/cuda/ptx/statement.h"
#include "tests/fakes/cuda/ptx/warp.h"

namespace forebay::ptx {

template <typename T, typename Operation>
void unary(Warp& warp, const Instruction& i) {
  const T* const a = warp.values<T>(i.in[0]);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = Operation::of(a[lane]);
  warp.set(i.out[0], result);
}

template <typename T, typename Operation>
void binary(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = Operation::of(a[lane], b[lane]);
  warp.set(i.out[0], result);
}

template <typename T, typename Operation>
void ternary(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]),
                 *const c = warp.values<T>(i.in[2]);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = Operation::of(a[lane], b[lane], c[lane]);
  warp.set(i.out[0], result);
}

// The C++ type of an integer type: `choose.template operator()<std::uint32_t>()`. False for others.
template <typename Choose>
bool with_integer(const Type& type, Choose choose) {
  if (type.is_float() || type.kind == 'p') return false;
  const bool is_signed = type.is_signed();
  switch (type.bits) {
    case 16:
      is_signed ? choose.template operator()<std::int16_t>() : choose.template operator()<std::uint16_t>();
      return true;
    case 32:
      is_signed ? choose.template operator()<std::int32_t>() : choose.template operator()<std::uint32_t>();
      return true;
    case 64:
      is_signed ? choose.template operator()<std::int64_t>() : choose.template operator()<std::uint64_t>();
      return true;
    default:
      return false;
  }
}

// Types of which only the width counts.
template <typename Choose>
bool with_bits(const Type& type, Choose choose) {
  return with_integer({'u', type.bits}, choose);
}

}  // namespace forebay::ptx
