// Memory: ld, st, atom, red, cvta, fences.
#include <algorithm>
#include <bit>
#include <mutex>

#include "tests/fakes/cuda/ptx/fault.h"
#include "tests/fakes/cuda/ptx/float.h"
#include "tests/fakes/cuda/ptx/lanes.h"

namespace forebay::ptx {
namespace {

using Access = SharedShadow::Access;

std::uint64_t load_element(const std::byte* from, unsigned bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, from, bytes);
  return value;
}

std::uint64_t sign_extended(std::uint64_t value, unsigned bytes) {
  const unsigned shift = 64 - 8 * bytes;
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(value << shift) >> shift);
}

// in: the base. out: one register for each element.
void load(Warp& warp, const Instruction& i) {
  const unsigned bytes = i.bytes;
  warp.for_lanes([&](unsigned lane) {
    const std::byte* const from =
        warp.reach(i, lane, warp.address(i, i.in[0], lane), bytes * i.elements, Access::kRead);
    for (unsigned k = 0; k < i.elements; ++k) {
      if ((i.out_used >> k & 1) == 0) continue;
      const std::uint64_t value = load_element(from + k * bytes, bytes);
      warp.put(i.out[k], lane, i.is_signed ? sign_extended(value, bytes) : value);
    }
  });
}

// in: the base, then one register for each element.
void store(Warp& warp, const Instruction& i) {
  const unsigned bytes = i.bytes;
  warp.for_lanes([&](unsigned lane) {
    std::byte* const to =
        warp.reach(i, lane, warp.address(i, i.in[0], lane), bytes * i.elements, Access::kWrite);
    for (unsigned k = 0; k < i.elements; ++k) {
      const std::uint64_t value = warp.get(i.in[k + 1], lane);
      std::memcpy(to + k * bytes, &value, bytes);
    }
  });
}

// --- atomics ---

enum class AtomicOperation : std::uint8_t {
  kAdd,
  kMinimum,
  kMaximum,
  kAnd,
  kOr,
  kXor,
  kExchange,
  kCompareAndSwap,
  kIncrement,
  kDecrement
};

// Kernels of several streams run at once, on threads of the fake driver.
std::mutex atomics;

template <typename T>
T combined(AtomicOperation operation, T old, T operand, T replacement) {
  switch (operation) {
    case AtomicOperation::kAdd:
      if constexpr (std::is_floating_point_v<T>) {
        return canonical_result(old + operand);
      } else {
        using Wrapping = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<Wrapping>(old) + static_cast<Wrapping>(operand));
      }
    case AtomicOperation::kMinimum:
      return std::min(old, operand);
    case AtomicOperation::kMaximum:
      return std::max(old, operand);
    case AtomicOperation::kExchange:
      return operand;
    case AtomicOperation::kCompareAndSwap:
      return old == operand ? replacement : old;
    case AtomicOperation::kIncrement:
      return old >= operand ? T{0} : static_cast<T>(old + 1);
    case AtomicOperation::kDecrement:
      return old == 0 || old > operand ? operand : static_cast<T>(old - 1);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (operation == AtomicOperation::kAnd) return old & operand;
    if (operation == AtomicOperation::kOr) return old | operand;
    if (operation == AtomicOperation::kXor) return old ^ operand;
  }
  return old;
}

// in: the base, the operand, and for cas the replacement.
template <typename T>
void update(Warp& warp, const Instruction& i) {
  const std::lock_guard lock(atomics);
  const auto operation = static_cast<AtomicOperation>(i.table);
  warp.for_lanes([&](unsigned lane) {
    std::byte* const place = warp.reach(i, lane, warp.address(i, i.in[0], lane), sizeof(T), Access::kAtomic);
    const T operand = warp.values<T>(i.in[1])[lane];
    const T replacement = i.in_count > 2 ? warp.values<T>(i.in[2])[lane] : T{};
    T old;
    std::memcpy(&old, place, sizeof old);
    const T result = combined(operation, old, operand, replacement);
    std::memcpy(place, &result, sizeof result);
    if (i.out_count == 0 || (i.out_used & 1) == 0) return;
    std::uint64_t bits = 0;
    std::memcpy(&bits, &old, sizeof old);
    warp.put(i.out[0], lane, bits);
  });
}

// --- addresses ---

// To generic addresses, or from them.
void convert_address(Warp& warp, const Instruction& i) {
  const std::uint64_t window = window_of(i.space);
  warp.for_lanes([&](unsigned lane) {
    const std::uint64_t address = warp.get(i.in[0], lane);
    if (i.from_generic) {
      const std::uint64_t kind = address / window_of(Space::kShared);
      if (kind != window / window_of(Space::kShared)) {
        warp.fail(FaultKind::kAddress, lane,
                  "a generic address lies in another space than the instruction says");
      }
      warp.put(i.out[0], lane, address - window);
    } else {
      warp.put(i.out[0], lane, address + window);
    }
  });
}

void do_nothing(Warp&, const Instruction&) {}

Space take_space(Statement& s) {
  if (s.take("global")) return Space::kGlobal;
  if (s.take("shared::cta") || s.take("shared")) return Space::kShared;
  if (s.take("local")) return Space::kLocal;
  if (s.take("param::entry") || s.take("param")) return Space::kParameter;
  return Space::kGeneric;
}

bool take_scope(Statement& s) {
  return s.take("cta") || s.take("cluster") || s.take("gpu") || s.take("sys");
}

// The base of [base + displacement], as an input.
void take_address(Statement& s, std::size_t index) {
  const Operand& place = s.operand(index);
  Instruction& i = s.result;
  if (place.kind != Operand::Kind::kAddress) s.refuse("an operand must be an address");
  i.displacement = static_cast<std::int64_t>(place.number);
  if (place.has_base) {
    const bool narrow = place.slot.bytes == 4 && (i.space == Space::kShared || i.space == Space::kLocal);
    if (place.slot.bytes != 8 && !narrow) s.refuse("its address has another width");
    s.in_slot(place.slot);
    return;
  }
  if (place.space != Space::kGeneric && place.space != i.space)
    s.refuse("its variable lies in another space");
  s.in_constant(0, 8);
}

void decode_access(Statement& s) {
  Instruction& i = s.result;
  const bool loads = s.name() == "ld";
  const bool ordered = s.take("relaxed") || s.take("acquire") || s.take("release");
  if (ordered) {
    if (!take_scope(s)) s.refuse("it needs a scope");
  } else if (!s.take("weak")) {
    s.take("volatile");
  }
  i.space = take_space(s);
  if (!loads && i.space == Space::kParameter) s.refuse("parameters may not be written");
  // Hints to caches change no value.
  for (const std::string_view hint : {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}) s.take(hint);
  if (s.next_begins("L1::") || s.next_begins("L2::")) s.any();
  if (s.next_begins("L2::")) s.any();
  if (s.take("v2")) i.elements = 2;
  if (s.take("v4")) i.elements = 4;
  const Type type = s.type();
  if (type.bytes() == 0) s.refuse("predicates are not in memory");
  i.bytes = static_cast<std::uint8_t>(type.bytes());
  i.is_signed = type.is_signed();
  s.expect_operands(2, 2);
  take_address(s, loads ? 1 : 0);
  const std::size_t values = loads ? 0 : 1;
  const Operand& value = s.operand(values);
  if (i.elements == 1 && value.kind != Operand::Kind::kVector) {
    if (loads) {
      s.out(values, type.bytes(), true);
    } else {
      s.in(values, type.bytes(), true);
    }
  } else {
    if (value.kind != Operand::Kind::kVector || value.elements.size() != i.elements)
      s.refuse("its vector has another length");
    for (const Operand::Element& element : value.elements) {
      if (element.discarded ? !loads : element.slot.bytes < type.bytes())
        s.refuse("an element of its vector does not fit");
      if (loads) {
        s.out_slot(element.slot, !element.discarded);
      } else {
        s.in_slot(element.slot);
      }
    }
  }
  i.execute = loads ? load : store;
}

void decode_atomic(Statement& s) {
  Instruction& i = s.result;
  const bool returns = s.name() == "atom";
  if (!s.take("relaxed") && !s.take("acquire") && !s.take("release")) s.take("acq_rel");
  take_scope(s);
  i.space = take_space(s);
  constexpr std::string_view kNames[] = {"add", "min",  "max", "and", "or",
                                         "xor", "exch", "cas", "inc", "dec"};
  const std::string_view name = s.any();
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) s.refuse("the operation is not known to this interpreter");
  const auto operation = static_cast<AtomicOperation>(found - kNames);
  i.table = static_cast<std::uint8_t>(operation);
  const Type type = s.type();
  const std::size_t first = returns ? 1 : 0;
  const bool swaps = operation == AtomicOperation::kCompareAndSwap;
  s.expect_operands(first + (swaps ? 3 : 2), first + (swaps ? 3 : 2));
  if (returns) s.out(0, type.bytes());
  take_address(s, first);
  s.in(first + 1, type);
  if (swaps) s.in(first + 2, type);
  const bool adds = operation == AtomicOperation::kAdd;
  if (type.is_float()) {
    if (adds && type.is('f', 32)) i.execute = update<float>;
    if (adds && type.is('f', 64)) i.execute = update<double>;
  } else if (type.bits >= 32) {
    with_integer(type, [&]<typename T>() { i.execute = update<T>; });
  }
}

}  // namespace

bool decode_memory(Statement& s) {
  Instruction& i = s.result;
  if (s.name() == "ld" || s.name() == "st") {
    decode_access(s);
  } else if (s.name() == "atom" || s.name() == "red") {
    decode_atomic(s);
  } else if (s.name() == "cvta") {
    i.from_generic = s.take("to");
    i.space = take_space(s);
    if (i.space == Space::kGeneric) s.refuse("it needs a space");
    s.expect("u64");
    s.expect_operands(2, 2);
    s.out(0, 8);
    s.in(1, 8);
    i.execute = convert_address;
  } else if (s.name() == "membar" || s.name() == "fence") {
    // Warps run one after the other, so that every write is seen at once.
    if (s.name() == "membar") {
      if (!s.take("cta") && !s.take("gl")) s.expect("sys");
    } else {
      if (!s.take("sc") && !s.take("acq_rel")) s.refuse("its order is not known to this interpreter");
      if (!take_scope(s)) s.refuse("it needs a scope");
    }
    s.expect_operands(0, 0);
    i.execute = do_nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace forebay::ptx
