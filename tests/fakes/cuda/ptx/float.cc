// Arithmetic of fp32 and fp64: add, sub, mul, fma, mad, div, sqrt, rcp, min, max, abs, neg, copysign, testp.
//
// Approximate forms (.approx, .full) are refused: which bits they give is a device's own affair.
#include "tests/fakes/cuda/ptx/float.h"

#include <cfenv>
#include <cmath>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/lanes.h"

namespace forebay::ptx {
namespace {

struct Add {
  template <typename T>
  static T of(T a, T b) {
    return a + b;
  }
};
struct Subtract {
  template <typename T>
  static T of(T a, T b) {
    return a - b;
  }
};
struct Multiply {
  template <typename T>
  static T of(T a, T b) {
    return a * b;
  }
};
struct Divide {
  template <typename T>
  static T of(T a, T b) {
    return a / b;
  }
};
struct FusedMultiplyAdd {
  template <typename T>
  static T of(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
struct SquareRoot {
  template <typename T>
  static T of(T a) {
    return std::sqrt(a);
  }
};
struct Reciprocal {
  template <typename T>
  static T of(T a) {
    return T{1} / a;
  }
};

// An operation rounded to nearest, with the NaN of the ISA.
template <typename Operation>
struct Canonical {
  template <typename T, typename... More>
  static T of(T a, More... more) {
    return canonical_result(Operation::of(a, more...));
  }
};

int rounding_mode(Rounding rounding) {
  switch (rounding) {
    case Rounding::kToZero:
      return FE_TOWARDZERO;
    case Rounding::kDown:
      return FE_DOWNWARD;
    case Rounding::kUp:
      return FE_UPWARD;
    case Rounding::kNearest:
      break;
  }
  return FE_TONEAREST;
}

// With the other roundings, .ftz or .sat. The compiler is told not to move arithmetic across the change of
// rounding by -frounding-math, and cannot move it, because the registers are memory that the calls might
// change.
template <typename T, typename Operation, unsigned operands>
void adjusted(Warp& warp, const Instruction& i) {
  T result[kWarpSize];
  const auto input = [&](unsigned operand, unsigned lane) {
    const T value = warp.values<T>(i.in[operand])[lane];
    return i.flush ? flushed(value) : value;
  };
  std::fesetround(rounding_mode(i.rounding));
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if constexpr (operands == 1) {
      result[lane] = Operation::of(input(0, lane));
    } else if constexpr (operands == 2) {
      result[lane] = Operation::of(input(0, lane), input(1, lane));
    } else {
      result[lane] = Operation::of(input(0, lane), input(1, lane), input(2, lane));
    }
  }
  std::fesetround(FE_TONEAREST);
  for (T& value : result) {
    if (i.flush) value = flushed(value);
    value = i.saturate ? saturated(value) : canonical_result(value);
  }
  warp.set(i.out[0], result);
}

template <typename T, bool maximum, bool keeps_nan>
void select(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const T x = i.flush ? flushed(a[lane]) : a[lane], y = i.flush ? flushed(b[lane]) : b[lane];
    result[lane] = keeps_nan && (x != x || y != y) ? canonical_nan<T>() : selected<T, maximum>(x, y);
  }
  warp.set(i.out[0], result);
}

// The sign's bit alone: a NaN passes with its payload.
template <typename T, bool absolute>
void change_sign(Warp& warp, const Instruction& i) {
  using Bits = BitsOf<T>;
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  const T* const a = warp.values<T>(i.in[0]);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto bits = std::bit_cast<Bits>(i.flush ? flushed(a[lane]) : a[lane]);
    result[lane] = std::bit_cast<T>(absolute ? bits & ~kSign : bits ^ kSign);
  }
  warp.set(i.out[0], result);
}

// The magnitude of b with the sign of a.
template <typename T>
void copy_sign(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = std::copysign(b[lane], a[lane]);
  warp.set(i.out[0], result);
}

template <typename T>
void test_property(Warp& warp, const Instruction& i) {
  const T* const a = warp.values<T>(i.in[0]);
  LaneMask result = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const int kind = std::fpclassify(a[lane]);
    const bool holds[] = {
        kind != FP_NAN && kind != FP_INFINITE, kind == FP_INFINITE, kind != FP_NAN, kind == FP_NAN,
        kind == FP_NORMAL || kind == FP_ZERO,  kind == FP_SUBNORMAL};
    result |= LaneMask{holds[i.table]} << lane;
  }
  warp.set_predicate(i.out[0], result);
}

template <typename T, typename Operation, unsigned operands>
Instruction::Execute arithmetic(const Instruction& i) {
  if (i.rounding != Rounding::kNearest || i.flush || i.saturate) return adjusted<T, Operation, operands>;
  if constexpr (operands == 1) return unary<T, Canonical<Operation>>;
  if constexpr (operands == 2) return binary<T, Canonical<Operation>>;
  if constexpr (operands == 3) return ternary<T, Canonical<Operation>>;
}

template <typename T>
Instruction::Execute function_of(std::string_view name, const Instruction& i, bool keeps_nan) {
  if (name == "add") return arithmetic<T, Add, 2>(i);
  if (name == "sub") return arithmetic<T, Subtract, 2>(i);
  if (name == "mul") return arithmetic<T, Multiply, 2>(i);
  if (name == "div") return arithmetic<T, Divide, 2>(i);
  if (name == "fma" || name == "mad") return arithmetic<T, FusedMultiplyAdd, 3>(i);
  if (name == "sqrt") return arithmetic<T, SquareRoot, 1>(i);
  if (name == "rcp") return arithmetic<T, Reciprocal, 1>(i);
  if (name == "abs") return change_sign<T, true>;
  if (name == "neg") return change_sign<T, false>;
  if (name == "min") return keeps_nan ? select<T, false, true> : select<T, false, false>;
  if (name == "max") return keeps_nan ? select<T, true, true> : select<T, true, false>;
  if (name == "copysign") return copy_sign<T>;
  return nullptr;
}

}  // namespace

bool decode_float(Statement& s) {
  const std::string_view name = s.name();
  Instruction& i = s.result;
  if (name == "testp") {
    constexpr std::string_view kProperties[] = {"finite",     "infinite", "number",
                                                "notanumber", "normal",   "subnormal"};
    bool known = false;
    for (std::uint8_t k = 0; k < std::size(kProperties) && !known; ++k) {
      known = s.take(kProperties[k]);
      i.table = k;
    }
    const Type type = s.type();
    s.expect_operands(2, 2);
    s.out(0, 0);
    s.in(1, type);
    if (type.is('f', 32)) i.execute = test_property<float>;
    if (type.is('f', 64)) i.execute = test_property<double>;
    return true;
  }
  const bool may_round = name == "add" || name == "sub" || name == "mul";
  const bool must_round = name == "fma" || name == "mad" || name == "div" || name == "sqrt" || name == "rcp";
  const bool selects = name == "min" || name == "max";
  const bool signs = name == "abs" || name == "neg" || name == "copysign";
  if (!may_round && !must_round && !selects && !signs) return false;
  if (may_round || must_round) {
    const bool rounds = s.rounding();
    if (must_round && !rounds) s.refuse("only forms with a rounding have a result that all devices agree on");
  }
  i.flush = s.take("ftz");
  const bool keeps_nan = selects && s.take("NaN");
  i.saturate = (may_round || name == "fma") && s.take("sat");
  const Type type = s.type();
  if (type.is('f', 64) && (i.flush || i.saturate)) s.refuse("fp64 has no such modifier");
  const bool is_unary = name == "sqrt" || name == "rcp" || name == "abs" || name == "neg";
  const std::size_t inputs = is_unary ? 1 : name == "fma" || name == "mad" ? 3 : 2;
  s.expect_operands(inputs + 1, inputs + 1);
  s.out(0, type.bytes());
  for (std::size_t k = 1; k <= inputs; ++k) s.in(k, type);
  if (type.is('f', 32)) i.execute = function_of<float>(name, i, keeps_nan);
  if (type.is('f', 64)) i.execute = function_of<double>(name, i, keeps_nan);
  return true;
}

}  // namespace forebay::ptx
