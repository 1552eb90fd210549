// Bits: and, or, xor, not, cnot, lop3, shl, shr, shf, popc, clz, brev, bfe, bfi, prmt; and mov, which also
// packs registers into one and takes one apart.
#include <algorithm>
#include <bit>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/lanes.h"

namespace forebay::ptx {
namespace {

struct And {
  template <typename T>
  static T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
struct Not {
  template <typename T>
  static T of(T a) {
    return static_cast<T>(~a);
  }
};
struct LogicalNot {
  template <typename T>
  static T of(T a) {
    return a == 0 ? 1 : 0;
  }
};
struct Same {
  template <typename T>
  static T of(T a) {
    return a;
  }
};
struct Reverse {
  template <typename T>
  static T of(T a) {
    T result = 0;
    for (unsigned bit = 0; bit < 8 * sizeof(T); ++bit)
      result |= static_cast<T>((a >> bit & 1) << (8 * sizeof(T) - 1 - bit));
    return result;
  }
};

// One lane mask for the whole predicate. Where one side decides, the other may be a predicate that nobody
// wrote: compilers make such ones of && and ||. Where it does not decide, the result is one too.
template <typename Operation>
void of_predicates(Warp& warp, const Instruction& i) {
  const LaneMask a = warp.predicate(i.in[0]), b = warp.predicate(i.in[1]);
  const LaneMask a_defined = warp.defined(i.in[0]), b_defined = warp.defined(i.in[1]);
  LaneMask decided = 0;
  if constexpr (std::is_same_v<Operation, And>) decided = (a_defined & ~a) | (b_defined & ~b);
  if constexpr (std::is_same_v<Operation, Or>) decided = (a_defined & a) | (b_defined & b);
  const LaneMask undefined = ~(decided | (a_defined & b_defined)) & warp.active;
  warp.set_predicate(i.out[0], Operation::of(a, b));
  warp.undefine(i.out[0], undefined);
}
void not_of_predicate(Warp& warp, const Instruction& i) {
  warp.set_predicate(i.out[0], ~warp.predicate(i.in[0]));
}
void move_predicate(Warp& warp, const Instruction& i) {
  warp.set_predicate(i.out[0], warp.predicate(i.in[0]));
}

template <typename T>
void look_up(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]),
                 *const c = warp.values<T>(i.in[2]);
  T result[kWarpSize] = {};
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    for (unsigned row = 0; row < 8; ++row) {
      if ((i.table >> row & 1) == 0) continue;
      const T x = (row & 4) != 0 ? a[lane] : static_cast<T>(~a[lane]);
      const T y = (row & 2) != 0 ? b[lane] : static_cast<T>(~b[lane]);
      const T z = (row & 1) != 0 ? c[lane] : static_cast<T>(~c[lane]);
      result[lane] |= static_cast<T>(x & y & z);
    }
  }
  warp.set(i.out[0], result);
}

// A shift by the width or more leaves zeros, or the sign.
template <typename T, bool left>
void shift(Warp& warp, const Instruction& i) {
  const T* const a = warp.values<T>(i.in[0]);
  const std::uint32_t* const count = warp.values<std::uint32_t>(i.in[1]);
  constexpr std::uint32_t kBits = 8 * sizeof(T);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if constexpr (left) {
      result[lane] = count[lane] >= kBits ? T{0} : static_cast<T>(a[lane] << (count[lane] % kBits));
    } else if constexpr (std::is_signed_v<T>) {
      result[lane] = static_cast<T>(a[lane] >> std::min(count[lane], kBits - 1));
    } else {
      result[lane] = count[lane] >= kBits ? T{0} : static_cast<T>(a[lane] >> (count[lane] % kBits));
    }
  }
  warp.set(i.out[0], result);
}

// 32 bits of the pair b:a, shifted; with `wraps` the count is taken modulo 32, otherwise at most 32.
template <bool left, bool wraps>
void funnel_shift(Warp& warp, const Instruction& i) {
  const std::uint32_t *const a = warp.values<std::uint32_t>(i.in[0]),
                             *const b = warp.values<std::uint32_t>(i.in[1]),
                             *const c = warp.values<std::uint32_t>(i.in[2]);
  std::uint32_t result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const std::uint32_t count = wraps ? c[lane] % 32 : std::min(c[lane], 32u);
    const std::uint64_t pair = std::uint64_t{b[lane]} << 32 | a[lane];
    result[lane] = static_cast<std::uint32_t>(left ? pair >> (32 - count) : pair >> count);
  }
  warp.set(i.out[0], result);
}

struct Population {
  template <typename T>
  static std::uint32_t of(T a) {
    return static_cast<std::uint32_t>(std::popcount(a));
  }
};
struct LeadingZeros {
  template <typename T>
  static std::uint32_t of(T a) {
    return static_cast<std::uint32_t>(std::countl_zero(a));
  }
};
template <typename T, typename Operation>
void count_bits(Warp& warp, const Instruction& i) {
  const T* const a = warp.values<T>(i.in[0]);
  std::uint32_t result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = Operation::of(a[lane]);
  warp.set(i.out[0], result);
}

template <typename T>
void extract_field(Warp& warp, const Instruction& i) {
  const T* const a = warp.values<T>(i.in[0]);
  const std::uint32_t *const b = warp.values<std::uint32_t>(i.in[1]), *const c =
                                                                          warp.values<std::uint32_t>(i.in[2]);
  constexpr unsigned kTop = 8 * sizeof(T) - 1;
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const unsigned begin = b[lane] & 0xFF, length = c[lane] & 0xFF;
    const T sign = std::is_signed_v<T> && length != 0
                       ? static_cast<T>(a[lane] >> std::min(begin + length - 1, kTop) & 1)
                       : T{0};
    std::uint64_t value = 0;
    for (unsigned bit = 0; bit <= kTop; ++bit) {
      const bool inside = bit < length && begin + bit <= kTop;
      const auto one = static_cast<std::uint64_t>(inside ? a[lane] >> (begin + bit) & 1 : sign);
      value |= one << bit;
    }
    result[lane] = static_cast<T>(value);
  }
  warp.set(i.out[0], result);
}

template <typename T>
void insert_field(Warp& warp, const Instruction& i) {
  const T *const a = warp.values<T>(i.in[0]), *const b = warp.values<T>(i.in[1]);
  const std::uint32_t *const c = warp.values<std::uint32_t>(i.in[2]), *const d =
                                                                          warp.values<std::uint32_t>(i.in[3]);
  constexpr unsigned kBits = 8 * sizeof(T);
  T result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const unsigned begin = c[lane] & 0xFF, length = d[lane] & 0xFF;
    result[lane] = b[lane];
    for (unsigned bit = 0; bit < length && begin + bit < kBits; ++bit) {
      const T one = T{1} << (begin + bit);
      result[lane] = (a[lane] >> bit & 1) != 0 ? result[lane] | one : result[lane] & ~one;
    }
  }
  warp.set(i.out[0], result);
}

// Four bytes of the pair b:a, each named by 3 bits of c; a fourth bit spreads the byte's sign.
void permute(Warp& warp, const Instruction& i) {
  const std::uint32_t *const a = warp.values<std::uint32_t>(i.in[0]),
                             *const b = warp.values<std::uint32_t>(i.in[1]),
                             *const c = warp.values<std::uint32_t>(i.in[2]);
  std::uint32_t result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const std::uint64_t pair = std::uint64_t{b[lane]} << 32 | a[lane];
    result[lane] = 0;
    for (unsigned byte = 0; byte < 4; ++byte) {
      const unsigned choice = c[lane] >> (4 * byte) & 15;
      std::uint32_t value = static_cast<std::uint32_t>(pair >> (8 * (choice & 7)) & 0xFF);
      if ((choice & 8) != 0) value = (value & 0x80) != 0 ? 0xFF : 0;
      result[lane] |= value << (8 * byte);
    }
  }
  warp.set(i.out[0], result);
}

// mov.b64 d, {a, b}: a is the lower half. Elements may have less than an even share of the bits only by being
// equal.
void pack(Warp& warp, const Instruction& i) {
  warp.for_lanes([&](unsigned lane) {
    std::uint64_t value = 0;
    for (unsigned k = 0; k < i.in_count; ++k) value |= warp.get(i.in[k], lane) << (8 * k * i.bytes);
    warp.put(i.out[0], lane, value);
  });
}
void unpack(Warp& warp, const Instruction& i) {
  warp.for_lanes([&](unsigned lane) {
    const std::uint64_t value = warp.get(i.in[0], lane);
    for (unsigned k = 0; k < i.out_count; ++k) {
      if ((i.out_used >> k & 1) != 0) warp.put(i.out[k], lane, value >> (8 * k * i.bytes));
    }
  });
}

void decode_move(Statement& s) {
  Instruction& i = s.result;
  const Type type = s.type();
  s.expect_operands(2, 2);
  const Operand &target = s.operand(0), &source = s.operand(1);
  const bool unpacks = target.kind == Operand::Kind::kVector, packs = source.kind == Operand::Kind::kVector;
  if (unpacks && packs) s.refuse("it moves a vector to a vector");
  if (!unpacks && !packs) {
    s.out(0, type.bytes());
    s.in(1, type);
    if (type.bytes() == 0) i.execute = move_predicate;
    with_bits(type, [&]<typename T>() { i.execute = unary<T, Same>; });
    return;
  }
  const std::vector<Operand::Element>& elements = unpacks ? target.elements : source.elements;
  const auto count = static_cast<unsigned>(elements.size());
  if (count < 2 || count > 4 || type.bytes() % count != 0) s.refuse("its vector does not fit its type");
  i.bytes = static_cast<std::uint8_t>(type.bytes() / count);
  for (const Operand::Element& element : elements) {
    if (element.discarded ? packs : element.slot.bytes != i.bytes)
      s.refuse("an element of its vector has another width");
    if (unpacks) {
      s.out_slot(element.slot, !element.discarded);
    } else {
      s.in_slot(element.slot);
    }
  }
  if (unpacks) {
    s.in(1, type);
    i.execute = unpack;
  } else {
    s.out(0, type.bytes());
    i.execute = pack;
  }
}

void decode_logic(Statement& s) {
  const std::string_view name = s.name();
  Instruction& i = s.result;
  const Type type = s.type();
  if (type.kind != 'b' && type.kind != 'p') s.refuse("it needs a type of bits");
  const bool is_unary = name == "not" || name == "cnot";
  s.expect_operands(is_unary ? 2 : 3, is_unary ? 2 : 3);
  s.out(0, type.bytes());
  s.in(1, type);
  if (!is_unary) s.in(2, type);
  if (type.bytes() == 0) {
    i.undefined_allowed = !is_unary;
    if (name == "and") i.execute = of_predicates<And>;
    if (name == "or") i.execute = of_predicates<Or>;
    if (name == "xor") i.execute = of_predicates<Xor>;
    if (name == "not") i.execute = not_of_predicate;
    return;
  }
  with_bits(type, [&]<typename T>() {
    if (name == "and") i.execute = binary<T, And>;
    if (name == "or") i.execute = binary<T, Or>;
    if (name == "xor") i.execute = binary<T, Xor>;
    if (name == "not") i.execute = unary<T, Not>;
    if (name == "cnot") i.execute = unary<T, LogicalNot>;
  });
}

void decode_shift(Statement& s) {
  Instruction& i = s.result;
  const bool left = s.name() == "shl";
  const Type type = s.type();
  if (type.is_float() || (left && type.kind != 'b')) s.refuse("it does not have this type");
  s.expect_operands(3, 3);
  s.out(0, type.bytes());
  s.in(1, type);
  s.in(2, 4);
  with_integer(type, [&]<typename T>() { i.execute = left ? shift<T, true> : shift<T, false>; });
}

}  // namespace

bool decode_bits(Statement& s) {
  const std::string_view name = s.name();
  Instruction& i = s.result;
  if (name == "mov") {
    decode_move(s);
  } else if (name == "and" || name == "or" || name == "xor" || name == "not" || name == "cnot") {
    decode_logic(s);
  } else if (name == "shl" || name == "shr") {
    decode_shift(s);
  } else if (name == "shf") {
    const bool left = s.take("l");
    if (!left) s.expect("r");
    const bool wraps = s.take("wrap");
    if (!wraps) s.expect("clamp");
    s.expect("b32");
    s.expect_operands(4, 4);
    s.out(0, 4);
    for (std::size_t k = 1; k <= 3; ++k) s.in(k, 4);
    i.execute = left ? (wraps ? funnel_shift<true, true> : funnel_shift<true, false>)
                     : (wraps ? funnel_shift<false, true> : funnel_shift<false, false>);
  } else if (name == "lop3") {
    s.expect("b32");
    s.expect_operands(5, 5);
    s.out(0, 4);
    for (std::size_t k = 1; k <= 3; ++k) s.in(k, 4);
    if (s.number(4) > 0xFF) s.refuse("its table has 8 bits");
    i.table = static_cast<std::uint8_t>(s.number(4));
    i.execute = look_up<std::uint32_t>;
  } else if (name == "popc" || name == "clz") {
    const Type type = s.type();
    s.expect_operands(2, 2);
    s.out(0, 4);
    s.in(1, type);
    const bool counts_ones = name == "popc";
    if (type.is('b', 32)) {
      i.execute =
          counts_ones ? count_bits<std::uint32_t, Population> : count_bits<std::uint32_t, LeadingZeros>;
    }
    if (type.is('b', 64)) {
      i.execute =
          counts_ones ? count_bits<std::uint64_t, Population> : count_bits<std::uint64_t, LeadingZeros>;
    }
  } else if (name == "brev") {
    const Type type = s.type();
    s.expect_operands(2, 2);
    s.out(0, type.bytes());
    s.in(1, type);
    if (type.is('b', 32)) i.execute = unary<std::uint32_t, Reverse>;
    if (type.is('b', 64)) i.execute = unary<std::uint64_t, Reverse>;
  } else if (name == "bfe") {
    const Type type = s.type();
    s.expect_operands(4, 4);
    s.out(0, type.bytes());
    s.in(1, type);
    s.in(2, 4);
    s.in(3, 4);
    if (type.bits >= 32 && type.kind != 'b')
      with_integer(type, [&]<typename T>() { i.execute = extract_field<T>; });
  } else if (name == "bfi") {
    const Type type = s.type();
    s.expect_operands(5, 5);
    s.out(0, type.bytes());
    s.in(1, type);
    s.in(2, type);
    s.in(3, 4);
    s.in(4, 4);
    if (type.is('b', 32)) i.execute = insert_field<std::uint32_t>;
    if (type.is('b', 64)) i.execute = insert_field<std::uint64_t>;
  } else if (name == "prmt") {
    s.expect("b32");
    s.expect_operands(4, 4);
    s.out(0, 4);
    for (std::size_t k = 1; k <= 3; ++k) s.in(k, 4);
    i.execute = permute;
  } else {
    return false;
  }
  return true;
}

}  // namespace forebay::ptx
