// Comparisons and choices: setp, set, selp, slct.
#include "tests/fakes/cuda/ptx/float.h"
#include "tests/fakes/cuda/ptx/lanes.h"

namespace forebay::ptx {
namespace {

enum class Combination : std::uint8_t { kNone, kAnd, kOr, kXor };

// For floats, the plain comparisons are false where there is a NaN, except ne; `unordered` ones are then
// true.
struct Equal {
  template <typename T>
  static bool of(T a, T b) {
    return a == b;
  }
};
struct NotEqual {
  template <typename T>
  static bool of(T a, T b) {
    return a < b || a > b;
  }
};
struct Less {
  template <typename T>
  static bool of(T a, T b) {
    return a < b;
  }
};
struct LessOrEqual {
  template <typename T>
  static bool of(T a, T b) {
    return a <= b;
  }
};
struct Greater {
  template <typename T>
  static bool of(T a, T b) {
    return a > b;
  }
};
struct GreaterOrEqual {
  template <typename T>
  static bool of(T a, T b) {
    return a >= b;
  }
};
struct Numbers {
  template <typename T>
  static bool of(T a, T b) {
    return a == a && b == b;
  }
};
template <typename Comparison>
struct OrNan {
  template <typename T>
  static bool of(T a, T b) {
    return !Numbers::of(a, b) || Comparison::of(a, b);
  }
};
struct SomeNan {
  template <typename T>
  static bool of(T a, T b) {
    return !Numbers::of(a, b);
  }
};

template <typename T, typename Comparison>
LaneMask compare(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  LaneMask result = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    T x = a[lane], y = b[lane];
    if constexpr (std::is_floating_point_v<T>) {
      if (i.flush) x = flushed(x), y = flushed(y);
    }
    result |= LaneMask{Comparison::of(x, y)} << lane;
  }
  return result;
}

// setp p|q, a, b, c: p is the comparison, and q its contrary, each combined with c.
template <typename T, typename Comparison>
void set_predicates(Warp& warp, const Instruction& i) {
  const LaneMask result = compare<T, Comparison>(warp, i);
  const auto combined = [&](LaneMask value) {
    if (i.in_count < 3) return value;
    const LaneMask other = i.input_negated ? ~warp.predicate(i.in[2]) : warp.predicate(i.in[2]);
    switch (static_cast<Combination>(i.table)) {
      case Combination::kAnd:
        return value & other;
      case Combination::kOr:
        return value | other;
      case Combination::kXor:
        return value ^ other;
      case Combination::kNone:
        break;
    }
    return value;
  };
  const LaneMask first = combined(result), second = combined(~result);
  if ((i.out_used & 1) != 0) warp.set_predicate(i.out[0], first);
  if (i.out_count > 1) warp.set_predicate(i.out[1], second);
}

template <typename T, typename Comparison>
void set_value(Warp& warp, const Instruction& i) {
  const LaneMask result = compare<T, Comparison>(warp, i);
  std::uint32_t values[kWarpSize];
  const std::uint32_t one = i.to_float ? 0x3F800000 : 0xFFFFFFFF;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) values[lane] = (result >> lane & 1) != 0 ? one : 0;
  warp.set(i.out[0], values);
}

template <typename T>
void choose(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  const LaneMask choice = warp.predicate(i.in[2]);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane)
    result[lane] = (choice >> lane & 1) != 0 ? a[lane] : b[lane];
  warp.set(i.out[0], result);
}

template <typename T, typename Comparison>
Instruction::Execute function(bool to_predicate) {
  return to_predicate ? set_predicates<T, Comparison> : set_value<T, Comparison>;
}

template <typename T>
Instruction::Execute function_of(std::string_view comparison, const Type& type, bool to_predicate) {
  const bool is_float = type.is_float(), is_unsigned = type.kind == 'u';
  if (comparison == "eq") return function<T, Equal>(to_predicate);
  if (comparison == "ne") return function<T, NotEqual>(to_predicate);
  if (type.kind == 'b') return nullptr;
  if (comparison == "lt" || (is_unsigned && comparison == "lo")) return function<T, Less>(to_predicate);
  if (comparison == "le" || (is_unsigned && comparison == "ls"))
    return function<T, LessOrEqual>(to_predicate);
  if (comparison == "gt" || (is_unsigned && comparison == "hi")) return function<T, Greater>(to_predicate);
  if (comparison == "ge" || (is_unsigned && comparison == "hs"))
    return function<T, GreaterOrEqual>(to_predicate);
  if (!is_float) return nullptr;
  if (comparison == "equ") return function<T, OrNan<Equal>>(to_predicate);
  if (comparison == "neu") return function<T, OrNan<NotEqual>>(to_predicate);
  if (comparison == "ltu") return function<T, OrNan<Less>>(to_predicate);
  if (comparison == "leu") return function<T, OrNan<LessOrEqual>>(to_predicate);
  if (comparison == "gtu") return function<T, OrNan<Greater>>(to_predicate);
  if (comparison == "geu") return function<T, OrNan<GreaterOrEqual>>(to_predicate);
  if (comparison == "num") return function<T, Numbers>(to_predicate);
  if (comparison == "nan") return function<T, SomeNan>(to_predicate);
  return nullptr;
}

void decode_set(Statement& s) {
  Instruction& i = s.result;
  const bool to_predicate = s.name() == "setp";
  const std::string_view comparison = s.any();
  Combination combination = Combination::kNone;
  if (s.take("and")) combination = Combination::kAnd;
  if (s.take("or")) combination = Combination::kOr;
  if (s.take("xor")) combination = Combination::kXor;
  if (!to_predicate && combination != Combination::kNone) s.refuse("it is not known with a third operand");
  i.flush = s.take("ftz");
  if (!to_predicate) {
    const Type result = s.type();
    if (result.bits != 32) s.refuse("its result must have 32 bits");
    i.to_float = result.is_float();
  }
  const Type type = s.type();
  const std::size_t count = combination == Combination::kNone ? 3 : 4;
  s.expect_operands(count, count);
  s.out(0, to_predicate ? 0 : 4);
  const Operand& target = s.operand(0);
  if (target.has_second) {
    if (!to_predicate || target.second.bytes != 0) s.refuse("its second result must be a predicate");
    s.out_slot(target.second, true);
  }
  s.in(1, type);
  s.in(2, type);
  if (combination != Combination::kNone) {
    const Operand& other = s.operand(3);
    if (other.kind != Operand::Kind::kRegister || other.slot.bytes != 0)
      s.refuse("its last operand must be a predicate");
    s.in_slot(other.slot);
    i.input_negated = other.negated;
    i.table = static_cast<std::uint8_t>(combination);
  }
  if (type.is('f', 32)) i.execute = function_of<float>(comparison, type, to_predicate);
  if (type.is('f', 64)) i.execute = function_of<double>(comparison, type, to_predicate);
  with_integer(type, [&]<typename T>() { i.execute = function_of<T>(comparison, type, to_predicate); });
}

}  // namespace

bool decode_comparison(Statement& s) {
  Instruction& i = s.result;
  if (s.name() == "setp" || s.name() == "set") {
    decode_set(s);
    return true;
  }
  if (s.name() != "selp") return false;
  const Type type = s.type();
  s.expect_operands(4, 4);
  s.out(0, type.bytes());
  s.in(1, type);
  s.in(2, type);
  s.in(3, 0);
  if (type.bytes() != 0) with_bits(type, [&]<typename T>() { i.execute = choose<T>; });
  return true;
}

}  // namespace forebay::ptx
