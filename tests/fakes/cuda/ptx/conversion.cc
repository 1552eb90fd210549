// Conversions: cvt between integers, fp16, bf16, fp32 and fp64, with every rounding, .ftz and .sat.
#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <limits>

#include "tests/fakes/cuda/ptx/float.h"
#include "tests/fakes/cuda/ptx/lanes.h"

namespace forebay::ptx {
namespace {

// --- between integers, of registers that have the types' own widths ---

template <typename To, typename From>
void convert_integer(Warp& warp, const Instruction& i) {
  const From* const a = warp.values<From>(i.in[0]);
  To result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = static_cast<To>(a[lane]);
  warp.set(i.out[0], result);
}

// --- the common ones of floats, rounded to nearest ---

void widen_float(Warp& warp, const Instruction& i) {
  const float* const a = warp.values<float>(i.in[0]);
  double result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane)
    result[lane] = canonical_result(static_cast<double>(a[lane]));
  warp.set(i.out[0], result);
}
template <typename To, typename From>
void float_of_integer(Warp& warp, const Instruction& i) {
  const From* const a = warp.values<From>(i.in[0]);
  To result[kWarpSize];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) result[lane] = static_cast<To>(a[lane]);
  warp.set(i.out[0], result);
}

// --- any conversion, a lane at a time ---

// A 16-bit float with this many bits of exponent and fraction, widened. Exact.
double from_small(std::uint64_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto exponent = static_cast<int>(bits >> fraction_bits & ((1u << exponent_bits) - 1));
  const auto fraction = static_cast<double>(bits & ((1u << fraction_bits) - 1));
  const double sign = (bits >> 15 & 1) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : canonical_nan<double>();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(1.0 + std::ldexp(fraction, -fraction_bits), exponent - bias);
}

// Rounds by the current mode. The operand has at most fp64's precision, so one rounding is made.
std::uint64_t to_small(double value, int exponent_bits, int fraction_bits) {
  if (value != value) return 0x7FFF;
  const std::uint64_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint64_t infinity = ((std::uint64_t{1} << exponent_bits) - 1) << fraction_bits;
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  // In units of the last place, rounded with the sign that the mode has to see.
  const double units = std::fabs(std::nearbyint(std::ldexp(value, fraction_bits - exponent)));
  const auto whole = static_cast<std::uint64_t>(units);
  // Normal numbers have a leading bit that the exponent's field absorbs; a carry moves on to the next
  // exponent.
  const std::uint64_t bits = whole + (static_cast<std::uint64_t>(exponent + bias - 1) << fraction_bits);
  if (bits < infinity) return sign | bits;
  const int mode = std::fegetround();
  const bool stays =
      mode == FE_TOWARDZERO || (mode == FE_DOWNWARD && sign == 0) || (mode == FE_UPWARD && sign != 0);
  return sign | (stays ? infinity - 1 : infinity);
}

double float_value(const Instruction& i, std::uint64_t bits, bool is_brain) {
  switch (i.bytes) {
    case 8:
      return std::bit_cast<double>(bits);
    case 4: {
      const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
      return i.flush ? flushed(value) : value;
    }
    default:
      return is_brain ? from_small(bits, 8, 7) : from_small(bits, 5, 10);
  }
}

std::uint64_t float_bits(const Instruction& i, double value, bool is_brain) {
  if (i.saturate) value = saturated(value);
  switch (i.to_bytes) {
    case 8:
      return std::bit_cast<std::uint64_t>(canonical_result(value));
    case 4: {
      const float narrow = canonical_result(static_cast<float>(value));
      return std::bit_cast<std::uint32_t>(i.flush ? flushed(narrow) : narrow);
    }
    default:
      return is_brain ? to_small(value, 8, 7) : to_small(value, 5, 10);
  }
}

// The range of an integer type; a NaN gives 0.
std::uint64_t integer_of(const Instruction& i, double value) {
  if (value != value) return 0;
  const double rounded = std::nearbyint(value);
  const int bits = 8 * i.to_bytes;
  if (i.to_signed) {
    const double limit = std::ldexp(1.0, bits - 1);
    if (rounded >= limit) return (std::uint64_t{1} << (bits - 1)) - 1;
    if (rounded < -limit) return std::uint64_t{1} << (bits - 1);
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(rounded));
  }
  if (rounded >= std::ldexp(1.0, bits))
    return bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
  return rounded < 0 ? 0 : static_cast<std::uint64_t>(rounded);
}

std::uint64_t extended(std::uint64_t value, unsigned bytes, bool is_signed) {
  if (bytes == 8) return value;
  const unsigned shift = 64 - 8 * bytes;
  return is_signed ? static_cast<std::uint64_t>(static_cast<std::int64_t>(value << shift) >> shift)
                   : value << shift >> shift;
}

// .sat of an integer: the nearest value that the result's type has.
std::uint64_t clamped(const Instruction& i, std::uint64_t value) {
  const int bits = 8 * i.to_bytes;
  __int128 wide =
      i.is_signed ? static_cast<__int128>(static_cast<std::int64_t>(value)) : static_cast<__int128>(value);
  const __int128 one = 1;
  const __int128 least = i.to_signed ? -(one << (bits - 1)) : 0,
                 most = (one << (i.to_signed ? bits - 1 : bits)) - 1;
  return static_cast<std::uint64_t>(std::clamp(wide, least, most));
}

constexpr std::uint8_t kFromBrain = 1, kToBrain = 2;  // Bits of `table`.

int rounding_mode(Rounding rounding) {
  constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  return kModes[static_cast<int>(rounding)];
}

void convert(Warp& warp, const Instruction& i) {
  const bool from_brain = (i.table & kFromBrain) != 0, to_brain = (i.table & kToBrain) != 0;
  std::fesetround(rounding_mode(i.rounding));
  warp.for_lanes([&](unsigned lane) {
    const std::uint64_t bits = extended(warp.get(i.in[0], lane), i.bytes, i.is_signed);
    std::uint64_t result = 0;
    if (i.is_float) {
      double value = float_value(i, bits, from_brain);
      if (i.to_float && i.to_integral) value = std::nearbyint(value);
      result = i.to_float ? float_bits(i, value, to_brain) : integer_of(i, value);
    } else if (i.to_float) {
      // From 64 bits straight to fp32: by way of fp64 it would be rounded twice.
      if (i.to_bytes == 4) {
        const float value =
            i.is_signed ? static_cast<float>(static_cast<std::int64_t>(bits)) : static_cast<float>(bits);
        result = std::bit_cast<std::uint32_t>(i.saturate ? saturated(value) : value);
      } else {
        result = float_bits(
            i, i.is_signed ? static_cast<double>(static_cast<std::int64_t>(bits)) : static_cast<double>(bits),
            to_brain);
      }
    } else {
      result = i.saturate ? clamped(i, bits) : bits;
    }
    // A register wider than the type gets the value, extended as its type says.
    warp.put(i.out[0], lane, extended(result, i.to_bytes, i.to_signed));
  });
  std::fesetround(FE_TONEAREST);
}

// The fast forms, where the registers have the widths of the types.
Instruction::Execute fast_form(const Instruction& i, const Type& to, const Type& from) {
  if (i.saturate || i.flush || i.out[0].bytes != to.bytes() || i.in[0].bytes != from.bytes()) return nullptr;
  if (to.is('f', 64) && from.is('f', 32)) return widen_float;
  if (i.rounding != Rounding::kNearest || from.is_float()) return nullptr;
  Instruction::Execute found = nullptr;
  with_integer(from, [&]<typename From>() {
    if (to.is('f', 32)) found = float_of_integer<float, From>;
    if (to.is('f', 64)) found = float_of_integer<double, From>;
    with_integer(to, [&]<typename To>() { found = convert_integer<To, From>; });
  });
  return found;
}

}  // namespace

bool decode_conversion(Statement& s) {
  if (s.name() != "cvt") return false;
  Instruction& i = s.result;
  const bool rounds = s.rounding();
  bool rounds_to_integer = false;
  for (const auto& [name, rounding] : {std::pair<std::string_view, Rounding>{"rni", Rounding::kNearest},
                                       {"rzi", Rounding::kToZero},
                                       {"rmi", Rounding::kDown},
                                       {"rpi", Rounding::kUp}}) {
    if (rounds || !s.take(name)) continue;
    i.rounding = rounding;
    rounds_to_integer = true;
  }
  i.flush = s.take("ftz");
  i.saturate = s.take("sat");
  const Type to = s.type(), from = s.type();
  if (to.kind == 'p' || from.kind == 'p' || to.kind == 'b' || from.kind == 'b')
    s.refuse("it does not have these types");
  const bool narrows =
      to.is_float() && from.is_float() && (to.bits < from.bits || (to.bits == 16 && to.kind != from.kind));
  const bool needs_rounding = narrows || (to.is_float() && !from.is_float());
  if (needs_rounding && !rounds) s.refuse("it needs a rounding");
  if (from.is_float() && !to.is_float() && !rounds_to_integer) s.refuse("it needs a rounding to integers");
  if (rounds && !needs_rounding) s.refuse("it needs no rounding");
  if (rounds_to_integer && !from.is_float()) s.refuse("it has a rounding to integers");
  if (rounds_to_integer && to.is_float() && to.bits != from.bits)
    s.refuse("it rounds to integers and converts");
  i.is_float = from.is_float();
  i.to_float = to.is_float();
  i.is_signed = from.is_signed();
  i.to_signed = to.is_signed();
  i.to_integral = rounds_to_integer;
  i.bytes = static_cast<std::uint8_t>(from.bytes());
  i.to_bytes = static_cast<std::uint8_t>(to.bytes());
  i.table = static_cast<std::uint8_t>((from.kind == 'h' ? kFromBrain : 0) | (to.kind == 'h' ? kToBrain : 0));
  s.expect_operands(2, 2);
  s.out(0, to.bytes(), true);
  s.in(1, from.bytes(), true);
  const Instruction::Execute fast = fast_form(i, to, from);
  i.execute = fast != nullptr ? fast : convert;
  return true;
}

}  // namespace forebay::ptx
