// Loading and storing m and v in SIMD, compiled once per instruction set. Every body follows moments.h
// operation by operation; what is left of a range after whole vectors or blocks goes to the scalar
// definition.
//
// Vectors whose length is unknown to the compiler (SVE, RVV) are left out, as for the other kernels.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include <cstdint>

#include "host_moments.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host_moments_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // Must come before highway.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace forebay::host_kernels {
namespace HWY_NAMESPACE {

// The same instruction sets as the other kernels: those without a fused multiply-add take the scalar form.
#if HWY_NATIVE_FMA && HWY_HAVE_FLOAT64

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using BitTag = hn::RebindToUnsigned<FloatTag>;
using FloatVector = hn::Vec<FloatTag>;
using BitVector = hn::Vec<BitTag>;

// How far ahead of its use memory is fetched, in elements.
constexpr std::size_t kPrefetchCount = 1024;

HWY_INLINE BitVector bits_of(FloatVector v) {
  return hn::BitCast(BitTag(), v);
}

HWY_INLINE FloatVector from_bits(BitVector v) {
  return hn::BitCast(FloatTag(), v);
}

HWY_INLINE BitVector set_bits(std::uint32_t value) {
  return hn::Set(BitTag(), value);
}

HWY_INLINE FloatVector canonical_vector(FloatVector v) {
  return hn::IfThenElse(hn::IsNaN(v), from_bits(set_bits(kCanonicalNanFloat32)), v);
}

HWY_INLINE BitVector dither_vector(BitVector seed, BitVector m, BitVector v) {
  auto h = hn::Mul(hn::Xor(m, seed), set_bits(definitions::kDitherFactor1));
  h = hn::Xor(h, hn::ShiftRight<15>(h));
  h = hn::Mul(hn::Xor(h, v), set_bits(definitions::kDitherFactor2));
  return hn::Xor(h, hn::ShiftRight<16>(h));
}

// drop_bits(); `random` is not read unless dithered.
template <int shift, bool dithered>
HWY_INLINE BitVector drop_vector(BitVector bits, BitVector random) {
  if constexpr (dithered) return hn::ShiftRight<shift>(hn::Add(bits, random));
  const auto odd = hn::And(hn::ShiftRight<shift>(bits), set_bits(1));
  return hn::ShiftRight<shift>(hn::Add(hn::Add(bits, set_bits((1u << (shift - 1)) - 1u)), odd));
}

// The end of the whole vectors in [begin, end).
HWY_INLINE std::size_t vector_end(std::size_t begin, std::size_t end) {
  return begin + (end - begin) / hn::Lanes(FloatTag()) * hn::Lanes(FloatTag());
}

// --- bf16 ---

using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;

// A NaN is loaded with any payload: whatever is computed from it is made canonical.
HWY_INLINE void load_bfloat16_vector(const std::uint16_t* source, float* target) {
  const BitTag du;
  const auto wide = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(HalfTag(), source)));
  hn::StoreU(canonical_vector(from_bits(wide)), FloatTag(), target);
}

void load_bfloat16(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const std::size_t lanes = hn::Lanes(FloatTag());
  const auto* kept_m = static_cast<const std::uint16_t*>(moments.m);
  const auto* kept_v = static_cast<const std::uint16_t*>(moments.v);
  for (std::size_t i = begin; i < end; i += lanes) {
    hwy::Prefetch(kept_m + i + kPrefetchCount);
    hwy::Prefetch(kept_v + i + kPrefetchCount);
    load_bfloat16_vector(kept_m + i, m + (i - begin));
    load_bfloat16_vector(kept_v + i, v + (i - begin));
  }
}

template <bool dithered>
HWY_INLINE void store_bfloat16_vector(FloatVector value, BitVector random, std::uint16_t* target) {
  const hn::RebindToSigned<FloatTag> di;
  const auto rounded = drop_vector<16, dithered>(bits_of(value), random);
  const auto nan = hn::RebindMask(BitTag(), hn::IsNaN(value));
  const auto chosen = hn::IfThenElse(nan, set_bits(kCanonicalNanBfloat16), rounded);
  hn::StoreU(hn::DemoteTo(HalfTag(), hn::BitCast(di, chosen)), HalfTag(), target);
}

template <bool dithered>
void store_bfloat16(const float* m, const float* v, std::size_t begin, std::size_t end,
                    const Moments& moments, Rounding rounding) {
  const FloatTag d;
  auto* kept_m = static_cast<std::uint16_t*>(moments.m);
  auto* kept_v = static_cast<std::uint16_t*>(moments.v);
  const auto seed = set_bits(rounding.seed);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    const auto new_m = canonical_vector(hn::LoadU(d, m + (i - begin)));
    const auto new_v = canonical_vector(hn::LoadU(d, v + (i - begin)));
    auto random = hn::Zero(BitTag());
    if constexpr (dithered) random = dither_vector(seed, bits_of(new_m), bits_of(new_v));
    store_bfloat16_vector<dithered>(new_m, hn::ShiftRight<16>(random), kept_m + i);
    store_bfloat16_vector<dithered>(new_v, hn::And(random, set_bits(0xFFFF)), kept_v + i);
  }
}

// --- block8 ---

using ByteTag = hn::Rebind<std::uint8_t, FloatTag>;
using definitions::kMomentExponentNan;
constexpr int kShift = static_cast<int>(definitions::kMomentShift);

HWY_INLINE BitVector load_codes(const std::uint8_t* source) {
  return hn::PromoteTo(BitTag(), hn::LoadU(ByteTag(), source));
}

// The codes are at most 255, so the saturation of the narrowing does nothing.
HWY_INLINE void store_codes(BitVector codes, std::uint8_t* target) {
  const hn::RebindToSigned<FloatTag> di;
  hn::StoreU(hn::DemoteTo(ByteTag(), hn::BitCast(di, codes)), ByteTag(), target);
}

void load_m_block(const std::uint8_t* codes, std::uint32_t exponent, float* target) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto unit = from_bits(set_bits((exponent - 17u) << 23));
  const auto base = set_bits((exponent - 15u) << 23);
  for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) {
    const auto code = load_codes(codes + i);
    const auto magnitude = hn::And(code, set_bits(0x7F));
    const auto normal = hn::Add(hn::ShiftLeft<kShift>(magnitude), base);
    const auto subnormal = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), unit);
    const auto value = hn::IfThenElse(hn::Lt(magnitude, set_bits(8)), bits_of(subnormal), normal);
    const auto sign = hn::ShiftLeft<24>(hn::And(code, set_bits(0x80)));
    hn::StoreU(from_bits(hn::Or(value, sign)), d, target + i);
  }
}

void load_v_block(const std::uint8_t* codes, std::uint32_t exponent, float* target) {
  const FloatTag d;
  const auto base = set_bits((exponent - 31u) << 23);
  for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) {
    const auto code = load_codes(codes + i);
    const auto value = hn::Add(hn::ShiftLeft<kShift>(code), base);
    const auto zero = hn::Eq(code, hn::Zero(BitTag()));
    hn::StoreU(from_bits(hn::IfThenZeroElse(zero, value)), d, target + i);
  }
}

void fill_with_nan(float* target) {
  for (std::size_t i = 0; i < kMomentBlockCount; ++i) target[i] = float_from_bits(kCanonicalNanFloat32);
}

void load_block8(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const auto* m_codes = static_cast<const std::uint8_t*>(moments.m);
  const auto* v_codes = static_cast<const std::uint8_t*>(moments.v);
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    for (std::size_t i = start; i < start + kMomentBlockCount; i += 64) {
      hwy::Prefetch(m_codes + i + kPrefetchCount);
      hwy::Prefetch(v_codes + i + kPrefetchCount);
    }
    const std::size_t block = start / kMomentBlockCount;
    const std::uint32_t m_exponent = definitions::moment_exponent_read(moments.m_exponents[block]);
    const std::uint32_t v_exponent = definitions::moment_exponent_read(moments.v_exponents[block]);
    if (m_exponent == kMomentExponentNan) {
      fill_with_nan(m + (start - begin));
    } else {
      load_m_block(m_codes + start, m_exponent, m + (start - begin));
    }
    if (v_exponent == kMomentExponentNan) {
      fill_with_nan(v + (start - begin));
    } else {
      load_v_block(v_codes + start, v_exponent, v + (start - begin));
    }
  }
}

// The exponent of a block of fp32 values.
HWY_INLINE std::uint32_t block_exponent(const float* values) {
  const FloatTag d;
  const auto magnitudes = set_bits(0x7FFFFFFF);
  auto first = hn::Zero(BitTag()), second = first;
  for (std::size_t i = 0; i < kMomentBlockCount; i += 2 * hn::Lanes(d)) {
    first = hn::Max(first, hn::And(bits_of(hn::LoadU(d, values + i)), magnitudes));
    second = hn::Max(second, hn::And(bits_of(hn::LoadU(d, values + i + hn::Lanes(d))), magnitudes));
  }
  return definitions::moment_exponent(hn::GetLane(hn::MaxOfLanes(BitTag(), hn::Max(first, second))));
}

template <bool dithered>
void store_block(const float* m, const float* v, std::uint32_t m_exponent, std::uint32_t v_exponent,
                 std::uint32_t seed_bits, std::uint8_t* m_codes, std::uint8_t* v_codes) {
  const FloatTag d;
  const auto seed = set_bits(seed_bits);
  const auto magnitudes = set_bits(0x7FFFFFFF);
  const auto least_normal = set_bits((m_exponent - 14u) << 23);
  const auto m_base = set_bits((m_exponent - 15u) << 3), v_base = set_bits((v_exponent - 31u) << 3);
  // A block that is NaN has codes of 0.
  const auto m_mask = set_bits(m_exponent == kMomentExponentNan ? 0 : 0xFF);
  const auto v_mask = set_bits(v_exponent == kMomentExponentNan ? 0 : 0xFF);
  const auto zero = hn::Zero(BitTag());
  for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) {
    const auto new_m = bits_of(canonical_vector(hn::LoadU(d, m + i)));
    const auto new_v = bits_of(canonical_vector(hn::LoadU(d, v + i)));
    auto random = zero;
    if constexpr (dithered) random = dither_vector(seed, new_m, new_v);

    auto m_magnitude = hn::And(new_m, magnitudes);
    const auto subnormal =
        hn::Sub(bits_of(hn::Add(from_bits(m_magnitude), from_bits(least_normal))), set_bits(1u << 23));
    m_magnitude = hn::IfThenElse(hn::Lt(m_magnitude, least_normal), subnormal, m_magnitude);
    const auto m_kept = drop_vector<kShift, dithered>(m_magnitude, hn::ShiftRight<12>(random));
    const auto sign = hn::And(hn::ShiftRight<24>(new_m), set_bits(0x80));
    store_codes(hn::And(hn::Or(hn::Sub(m_kept, m_base), sign), m_mask), m_codes + i);

    const auto v_magnitude = hn::And(new_v, magnitudes);
    const auto v_kept = drop_vector<kShift, dithered>(v_magnitude, hn::And(random, set_bits(0xFFFFF)));
    const auto code = hn::Sub(hn::Max(v_kept, hn::Add(v_base, set_bits(1))), v_base);
    const auto is_zero = hn::Eq(v_magnitude, zero);
    store_codes(hn::And(hn::IfThenZeroElse(is_zero, code), v_mask), v_codes + i);
  }
}

template <bool dithered>
void store_block8(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
                  Rounding rounding) {
  auto* m_codes = static_cast<std::uint8_t*>(moments.m);
  auto* v_codes = static_cast<std::uint8_t*>(moments.v);
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const float* m_block = m + (start - begin);
    const float* v_block = v + (start - begin);
    const std::uint32_t m_exponent = block_exponent(m_block), v_exponent = block_exponent(v_block);
    moments.m_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(m_exponent);
    moments.v_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(v_exponent);
    store_block<dithered>(m_block, v_block, m_exponent, v_exponent, rounding.seed, m_codes + start,
                          v_codes + start);
  }
}

// --- both ---

// The end of what SIMD does of [begin, end).
std::size_t whole_end(MomentFormat format, std::size_t begin, std::size_t end) {
  if (format == MomentFormat::kBfloat16) return vector_end(begin, end);
  return begin + (end - begin) / kMomentBlockCount * kMomentBlockCount;
}

void load(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const std::size_t middle = whole_end(moments.format, begin, end);
  const auto function = moments.format == MomentFormat::kBfloat16 ? load_bfloat16 : load_block8;
  function(moments, begin, middle, m, v);
  if (middle < end) {
    scalar_moment_kernels().load(moments, middle, end, m + (middle - begin), v + (middle - begin));
  }
}

void store(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
           Rounding rounding) {
  const std::size_t middle = whole_end(moments.format, begin, end);
  if (moments.format == MomentFormat::kBfloat16) {
    (rounding.dithered ? store_bfloat16<true> : store_bfloat16<false>)(m, v, begin, middle, moments,
                                                                       rounding);
  } else {
    (rounding.dithered ? store_block8<true> : store_block8<false>)(m, v, begin, middle, moments, rounding);
  }
  if (middle < end) {
    scalar_moment_kernels().store(m + (middle - begin), v + (middle - begin), middle, end, moments, rounding);
  }
}

const MomentKernels* moment_kernels() {
  static const MomentKernels kKernels = {hwy::TargetName(HWY_TARGET), load, store};
  return &kKernels;
}

#else

const MomentKernels* moment_kernels() {
  return &scalar_moment_kernels();
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace forebay::host_kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace forebay::host_kernels {

HWY_EXPORT(moment_kernels);

const MomentKernels& simd_moment_kernels() {
  return *HWY_DYNAMIC_DISPATCH(moment_kernels)();
}

}  // namespace forebay::host_kernels
#endif
