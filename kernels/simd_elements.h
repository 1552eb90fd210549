// Shared by the SIMD bodies: loading and rounding elements of each type, and the AdamW update of one vector.
// Everything follows definitions.h operation by operation.
//
// Included once per instruction set by sources that Highway compiles so, after their HWY_TARGET_INCLUDE;
// where FOREBAY_SIMD is not defined afterwards, the instruction set takes the scalar definition. Targets
// without a fused multiply-add (SSE, WebAssembly, the emulated one) do, because multiply and add in two
// roundings would give other bits. The sources leave out vectors whose length is unknown to the compiler
// (SVE, RVV), so such processors use NEON or the scalar definition.

// Highway's guard: defined and undefined in turn, once per instruction set.
#if defined(FOREBAY_KERNELS_SIMD_ELEMENTS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOREBAY_KERNELS_SIMD_ELEMENTS_H_
#undef FOREBAY_KERNELS_SIMD_ELEMENTS_H_
#else
#define FOREBAY_KERNELS_SIMD_ELEMENTS_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/definitions.h"

#undef FOREBAY_SIMD
#if HWY_NATIVE_FMA && HWY_HAVE_FLOAT64
#define FOREBAY_SIMD 1

HWY_BEFORE_NAMESPACE();
namespace forebay::host_kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <DataType type>
using Storage = typename definitions::Element<type>::Storage;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;

// How far ahead of its use memory is fetched. 128 to 2048 elements measured alike, and 12 % faster than none:
// the processor's own prefetchers stop at each 4 KiB page, and four streams make many of those stops.
constexpr std::size_t kPrefetchCount = 512;

// `v` with every NaN made canonical().  IsNaN and not Ne(v, v): on x86 Highway 1.0.3 compares ordered, so
// that a NaN is not unequal to itself.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V canonical_vector(D d, V v) {
  const hn::RebindToUnsigned<D> du;
  const auto nan = hn::BitCast(d, hn::Set(du, kCanonicalNanFloat32));
  return hn::IfThenElse(hn::IsNaN(v), nan, v);
}

// Rounds to the nearest multiple of 2^shift, ties to even, but leaves the lower bits: they are of no use. An
// odd multiple has its lowest bit set below, which makes a tie more than one. The canonical NaN keeps its
// upper half.
template <int shift, class D, class V = hn::Vec<D>>
HWY_INLINE V round_upper(D du, V bits) {
  const auto marked = hn::OrAnd(bits, hn::ShiftRight<shift>(bits), hn::Set(du, 1u));
  return hn::Add(marked, hn::Set(du, (1u << (shift - 1)) - 1u));
}

// Loads one vector of a type, widened to fp32, and rounds one with canonical NaNs to it. A
// NaN is loaded with any payload: results are made canonical before they are stored.
template <DataType type>
struct VectorElement;

template <>
struct VectorElement<DataType::kFloat32> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const float* source) {
    return hn::LoadU(d, source);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> rounded(D, hn::Vec<D> v) {
    return v;
  }
};

template <>
struct VectorElement<DataType::kBfloat16> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const std::uint16_t* source) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<std::uint16_t, D> d16;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, source))));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> rounded(D d, hn::Vec<D> v) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<std::uint16_t, D> d16;
    return hn::TruncateTo(d16, hn::ShiftRight<16>(round_upper<16>(du, hn::BitCast(du, v))));
  }
};

// x86 with fused multiply-add has F16C, whose conversions are exact or round to nearest even, as the
// definition. Elsewhere the same values come from integer and fp32 arithmetic, since Highway's conversion
// there is not promised.
template <>
struct VectorElement<DataType::kFloat16> {
#if HWY_ARCH_X86 && !defined(HWY_DISABLE_F16C)
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const std::uint16_t* source) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(d16, source)));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> rounded(D d, hn::Vec<D> v) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::BitCast(d16, hn::DemoteTo(dh, v));
  }
#else
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const std::uint16_t* source) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<std::uint16_t, D> d16;
    const auto half = hn::PromoteTo(du, hn::LoadU(d16, source));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
    const auto shifted = hn::ShiftLeft<13>(hn::And(half, hn::Set(du, 0x7FFFu)));
    // The bias is moved by an exact product, which makes normal numbers of the subnormal ones too.
    const auto product = hn::BitCast(du, hn::Mul(hn::BitCast(d, shifted), hn::Set(d, 0x1p112f)));
    const auto special = hn::Or(shifted, hn::Set(du, 0x7F800000u));
    const auto is_special = hn::Gt(shifted, hn::Set(du, 0x0F7FFFFFu));
    return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, product)));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> rounded(D d, hn::Vec<D> v) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
    const auto biased = hn::Sub(magnitude, hn::Set(du, (112u << 23) - 0xFFFu));
    const auto normal = hn::ShiftRight<13>(hn::Add(biased, odd));
    // The unit in the last place of 0.5 is 2^-24, fp16's least subnormal: the addition itself rounds.
    const auto half = hn::Set(d, 0.5f);
    const auto subnormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
    auto rounded = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x38800000u)), subnormal, normal);
    rounded = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477FFFFFu)), hn::Set(du, 0x7C00u), rounded);
    rounded = hn::Or(rounded, sign);
    const auto nan = hn::Set(du, static_cast<std::uint32_t>(kCanonicalNanFloat16));
    rounded = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7F800000u)), nan, rounded);
    return hn::DemoteTo(d16, hn::BitCast(di, rounded));
  }
#endif
};

// Stores one vector with canonical NaNs, rounded.
template <DataType type, class D>
HWY_INLINE void round_canonical(D d, hn::Vec<D> v, Storage<type>* target) {
  hn::StoreU(VectorElement<type>::rounded(d, v), hn::Rebind<Storage<type>, D>(), target);
}

// Storing one vector, rounded, with every NaN made canonical.
template <DataType type, class D>
HWY_INLINE void round_vector(D d, hn::Vec<D> v, Storage<type>* target) {
  round_canonical<type>(d, canonical_vector(d, v), target);
}

// The end of the whole vectors in [begin, end).
HWY_INLINE std::size_t vector_end(std::size_t begin, std::size_t end) {
  return begin + (end - begin) / hn::Lanes(FloatTag()) * hn::Lanes(FloatTag());
}

// The constants of an AdamW update, in every lane.
struct AdamWVectors {
  explicit HWY_INLINE AdamWVectors(const definitions::AdamWConstants& c)
      : factor(hn::Set(FloatTag(), c.factor)),
        decay(hn::Set(FloatTag(), c.decay)),
        beta1(hn::Set(FloatTag(), c.beta1)),
        a1(hn::Set(FloatTag(), c.a1)),
        beta2(hn::Set(FloatTag(), c.beta2)),
        a2(hn::Set(FloatTag(), c.a2)),
        step(hn::Set(FloatTag(), c.step)),
        s2(hn::Set(FloatTag(), c.s2)),
        s2_reciprocal(hn::Set(FloatTag(), 1.0f / c.s2)),
        eps(hn::Set(FloatTag(), c.eps)) {}

  FloatVector factor, decay, beta1, a1, beta2, a2, step, s2, s2_reciprocal, eps;
};

// The quotient of a square root and s2, rounded as a division rounds it, in three operations that do not
// occupy the divider: the product with the rounded reciprocal, corrected by its exact remainder (Markstein,
// IBM Journal of Research and Development 34(1), 1990). Nothing underflows in it, since the root of the least
// fp32 is 2^-74.5, while s2 is in the range of has_simd_update(). An infinite root gives NaN.
HWY_INLINE FloatVector divide_finite_by_s2(const AdamWVectors& c, FloatVector root) {
  const auto product = hn::Mul(root, c.s2_reciprocal);
  const auto remainder = hn::NegMulAdd(product, c.s2, root);
  return hn::MulAdd(remainder, c.s2_reciprocal, product);
}

// The same for any root.
HWY_INLINE FloatVector divide_by_s2(const AdamWVectors& c, FloatVector root) {
  const FloatTag d;
  return hn::IfThenElse(hn::Lt(root, hn::Inf(d)), divide_finite_by_s2(c, root), root);
}

// definitions::adamw_element() in parts, where has_simd_update(), without canonical(). The first gives m and
// v and the last p.
HWY_INLINE void adamw_moments(const AdamWVectors& c, FloatVector gradient, FloatVector& m, FloatVector& v) {
  const auto g = hn::Mul(gradient, c.factor);
  m = hn::MulAdd(c.beta1, m, hn::Mul(c.a1, g));
  v = hn::MulAdd(c.beta2, v, hn::Mul(c.a2, hn::Mul(g, g)));
}

HWY_INLINE FloatVector adamw_parameter(const AdamWVectors& c, FloatVector quotient, FloatVector p) {
  return hn::MulAdd(c.step, quotient, hn::MulAdd(c.decay, p, p));
}

// definitions::adamw_element(), where has_simd_update().
HWY_INLINE void adamw_vector(const AdamWVectors& c, FloatVector gradient, FloatVector& p, FloatVector& m,
                             FloatVector& v) {
  const FloatTag d;
  adamw_moments(c, gradient, m, v);
  p = adamw_parameter(c, hn::Div(m, hn::Add(divide_by_s2(c, hn::Sqrt(v)), c.eps)), p);
  // A NaN in m or v has reached p, so one test finds all.
  if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(p)))) {
    p = canonical_vector(d, p);
    m = canonical_vector(d, m);
    v = canonical_vector(d, v);
  }
}

// definitions::update_element() without v, for an optimizer that has none. A NaN may be in one of the two.
template <Optimizer optimizer>
HWY_INLINE void first_moment_vector(const AdamWVectors& c, FloatVector gradient, FloatVector& p,
                                    FloatVector& m) {
  const FloatTag d;
  auto g = hn::Mul(gradient, c.factor);
  if constexpr (optimizer == Optimizer::kSgd) {
    g = hn::MulAdd(c.decay, p, g);
    m = hn::MulAdd(c.beta1, m, g);
    p = hn::MulAdd(c.step, m, p);
  } else {
    const auto u = hn::MulAdd(c.beta1, m, hn::Mul(c.a1, g));
    const auto zero = hn::Zero(d), one = hn::Set(d, 1.0f);
    const auto sign =
        hn::Sub(hn::IfThenElseZero(hn::Gt(u, zero), one), hn::IfThenElseZero(hn::Lt(u, zero), one));
    p = hn::MulAdd(c.decay, p, p);
    p = hn::MulAdd(c.step, sign, p);
    m = hn::MulAdd(c.beta2, m, hn::Mul(c.a2, g));
  }
  p = canonical_vector(d, p);
  m = canonical_vector(d, m);
}

// kAdam, where has_simd_update().
HWY_INLINE void adam_vector(const AdamWVectors& c, FloatVector gradient, FloatVector& p, FloatVector& m,
                            FloatVector& v) {
  const FloatTag d;
  const auto g = hn::MulAdd(c.decay, p, hn::Mul(gradient, c.factor));
  m = hn::MulAdd(c.beta1, m, hn::Mul(c.a1, g));
  v = hn::MulAdd(c.beta2, v, hn::Mul(c.a2, hn::Mul(g, g)));
  p = hn::MulAdd(c.step, hn::Div(m, hn::Add(divide_by_s2(c, hn::Sqrt(v)), c.eps)), p);
  p = canonical_vector(d, p);
  m = canonical_vector(d, m);
  v = canonical_vector(d, v);
}

}  // namespace HWY_NAMESPACE
}  // namespace forebay::host_kernels
HWY_AFTER_NAMESPACE();

#endif
#endif
