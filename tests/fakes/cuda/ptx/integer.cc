// Integer arithmetic: add, sub, mul, mad, div, rem, min, max, abs, neg.
#include <algorithm>
#include <type_traits>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/lanes.h"

namespace forebay::ptx {
namespace {

// Arithmetic wraps around, which C++ promises for unsigned types alone; 16-bit ones would be promoted to int.
template <typename T>
using Wrapping = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <typename T>
struct Add {
  static T of(T a, T b) { return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b)); }
};
template <typename T>
struct Subtract {
  static T of(T a, T b) { return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b)); }
};
template <typename T>
struct MultiplyLow {
  static T of(T a, T b) { return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b)); }
};
template <typename T>
struct MultiplyHigh {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  static T of(T a, T b) { return static_cast<T>((Wide{a} * Wide{b}) >> (8 * sizeof(T))); }
};
template <typename T, typename Multiply>
struct MultiplyAdd {
  static T of(T a, T b, T c) { return Add<T>::of(Multiply::of(a, b), c); }
};
template <typename T>
struct Minimum {
  static T of(T a, T b) { return std::min(a, b); }
};
template <typename T>
struct Maximum {
  static T of(T a, T b) { return std::max(a, b); }
};
template <typename T>
struct Negate {
  static T of(T a) { return Subtract<T>::of(0, a); }
};
template <typename T>
struct Absolute {
  static T of(T a) { return a < 0 ? Negate<T>::of(a) : a; }
};

// Twice the width: mul.wide, and mad.wide with a third operand of that width.
template <typename T>
void multiply_wide(Warp& warp, const Instruction& i) {
  using Wide =
      std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>,
                         std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>>;
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  Wide result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    result[lane] = static_cast<Wide>(static_cast<Wide>(a[lane]) * static_cast<Wide>(b[lane]));
  }
  if (i.in_count == 3) {
    const Wide* const c = warp.values<Wide>(i.in[2]);
    for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = Add<Wide>::of(result[lane], c[lane]);
  }
  warp.set(i.out[0], result);
}

// The result of a division by zero is unspecified, so none may happen.
template <typename T, bool remainder>
void divide(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  T result[kWarpSize] = {};
  warp.for_lanes([&](unsigned lane) {
    if (b[lane] == 0) warp.fail(FaultKind::kTrap, lane, "an integer is divided by zero");
    if (std::is_signed_v<T> && b[lane] == static_cast<T>(-1)) {
      result[lane] = remainder ? 0 : Negate<T>::of(a[lane]);
    } else {
      result[lane] = static_cast<T>(remainder ? a[lane] % b[lane] : a[lane] / b[lane]);
    }
  });
  warp.set(i.out[0], result);
}

}  // namespace

bool decode_integer(Statement& s) {
  const std::string_view name = s.name();
  Instruction& i = s.result;
  const bool multiplies = name == "mul" || name == "mad";
  if (multiplies) {
    const bool low = s.take("lo"), high = !low && s.take("hi"), wide = !low && !high && s.take("wide");
    if (!low && !high && !wide) return false;  // A product of floats has none of these.
    const Type type = s.type();
    const bool adds = name == "mad";
    s.expect_operands(adds ? 4 : 3, adds ? 4 : 3);
    const unsigned result_bytes = wide ? 2 * type.bytes() : type.bytes();
    if (result_bytes > 8) s.refuse("the product has no type");
    s.out(0, result_bytes);
    s.in(1, type);
    s.in(2, type);
    if (adds) s.in(3, result_bytes);
    with_integer(type, [&]<typename T>() {
      if (wide) {
        if constexpr (sizeof(T) < 8) i.execute = multiply_wide<T>;
      } else if (low) {
        i.execute = adds ? ternary<T, MultiplyAdd<T, MultiplyLow<T>>> : binary<T, MultiplyLow<T>>;
      } else {
        i.execute = adds ? ternary<T, MultiplyAdd<T, MultiplyHigh<T>>> : binary<T, MultiplyHigh<T>>;
      }
    });
    return true;
  }
  const bool is_unary = name == "abs" || name == "neg";
  const bool is_binary =
      name == "add" || name == "sub" || name == "div" || name == "rem" || name == "min" || name == "max";
  if ((!is_unary && !is_binary) || !s.next_is_type()) return false;
  if (s.next_begins("f") || s.next_begins("b")) return false;
  const Type type = s.type();
  s.expect_operands(is_unary ? 2 : 3, is_unary ? 2 : 3);
  s.out(0, type.bytes());
  s.in(1, type);
  if (is_binary) s.in(2, type);
  with_integer(type, [&]<typename T>() {
    if (name == "add") i.execute = binary<T, Add<T>>;
    if (name == "sub") i.execute = binary<T, Subtract<T>>;
    if (name == "min") i.execute = binary<T, Minimum<T>>;
    if (name == "max") i.execute = binary<T, Maximum<T>>;
    if (name == "div") i.execute = divide<T, false>;
    if (name == "rem") i.execute = divide<T, true>;
    if constexpr (std::is_signed_v<T>) {
      if (name == "neg") i.execute = unary<T, Negate<T>>;
      if (name == "abs") i.execute = unary<T, Absolute<T>>;
    }
  });
  return true;
}

}  // namespace forebay::ptx
