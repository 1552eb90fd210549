// The kernels in SIMD, compiled once per instruction set. Every body follows definitions.h operation by
// operation; what is left of a range after whole vectors goes to the scalar definition itself.
//
// Instruction sets without a fused multiply-add (SSE, WebAssembly, the emulated one) use the scalar
// definition, because multiply and add in two roundings would give other bits. Vectors whose length is
// unknown to the compiler (SVE, RVV) are left out, so such processors use NEON or the scalar definition.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include <cstdint>
#include <cstring>

#include "host_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host_kernels_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // Must come before highway.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace forebay::host_kernels {
namespace HWY_NAMESPACE {

#if HWY_NATIVE_FMA && HWY_HAVE_FLOAT64

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

// Loading one vector of a type, widened to fp32, and storing one, rounded. A NaN is loaded with any payload:
// whatever is computed from it is made canonical where it is stored.
template <DataType type>
struct VectorElement;

template <>
struct VectorElement<DataType::kFloat32> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const float* source) {
    return hn::LoadU(d, source);
  }
  template <class D>
  static HWY_INLINE void round(D d, hn::Vec<D> v, float* target) {
    hn::StoreU(canonical_vector(d, v), d, target);
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
  static HWY_INLINE void round(D d, hn::Vec<D> v, std::uint16_t* target) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd);
    const auto nan = hn::Set(du, static_cast<std::uint32_t>(kCanonicalNanBfloat16) << 16);
    const auto chosen = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), nan, rounded);
    // At most 0xFFFF after the shift, so the saturation of the narrowing does nothing.
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, hn::ShiftRight<16>(chosen))), d16, target);
  }
};

// x86 with fused multiply-add has F16C, whose conversions are exact or round to nearest even, as the
// definition. Elsewhere the same values come from integer and fp32 arithmetic, since what Highway does there
// is not promised.
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
  static HWY_INLINE void round(D d, hn::Vec<D> v, std::uint16_t* target) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::Rebind<hwy::float16_t, D> dh;
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(dh, canonical_vector(d, v))), d16, target);
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
  static HWY_INLINE void round(D d, hn::Vec<D> v, std::uint16_t* target) {
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
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, rounded)), d16, target);
  }
#endif
};

// The end of the whole vectors in [begin, end).
HWY_INLINE std::size_t vector_end(std::size_t begin, std::size_t end) {
  return begin + (end - begin) / hn::Lanes(FloatTag()) * hn::Lanes(FloatTag());
}

// --- cast ---

template <DataType source_type, DataType target_type>
void cast_vectors(const CastArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const auto* source = static_cast<const Storage<source_type>*>(a.source);
  auto* target = static_cast<Storage<target_type>*>(a.target);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    VectorElement<target_type>::round(d, VectorElement<source_type>::load(d, source + i), target + i);
  }
}

void cast(const CastArguments& a, std::size_t begin, std::size_t end) {
  if (a.source_type == a.target_type) return scalar_kernels().cast(a, begin, end);  // A copy.
  const std::size_t middle = vector_end(begin, end);
  with_type(a.source_type, [&]<DataType source_type>() {
    with_type(a.target_type,
              [&]<DataType target_type>() { cast_vectors<source_type, target_type>(a, begin, middle); });
  });
  scalar_kernels().cast(a, middle, end);
}

// --- accumulate ---

// Elements whose running sums are kept between ranks: 4 KiB of the first cache level, so that any number of
// ranks is read one after the other in long runs.
constexpr std::size_t kSumCount = 1024;

template <DataType type>
void accumulate_vectors(const AccumulateArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  HWY_ALIGN float sums[kSumCount];
  for (std::size_t start = begin; start < end; start += kSumCount) {
    const std::size_t count = end - start < kSumCount ? end - start : kSumCount;
    // The first rank and the last need no round trip through `sums`, and for one or two ranks there is none.
    const int last = a.rank_count - 1;
    const auto* source = static_cast<const Storage<type>*>(contribution(a, 0)) + start;
    if (last == 0) {
      float* target = a.target + start;
      for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
        auto sum = VectorElement<type>::load(d, source + i);
        if (!a.first) sum = hn::Add(hn::LoadU(d, target + i), sum);
        VectorElement<DataType::kFloat32>::round(d, sum, target + i);
      }
      continue;
    }
    for (int rank = 1; rank < last; ++rank) {
      const auto* next = static_cast<const Storage<type>*>(contribution(a, rank)) + start;
      for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
        const auto sum = rank == 1 ? VectorElement<type>::load(d, source + i) : hn::Load(d, sums + i);
        hn::Store(hn::Add(sum, VectorElement<type>::load(d, next + i)), d, sums + i);
      }
    }
    const auto* next = static_cast<const Storage<type>*>(contribution(a, last)) + start;
    float* target = a.target + start;
    for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
      auto sum = last == 1 ? VectorElement<type>::load(d, source + i) : hn::Load(d, sums + i);
      sum = hn::Add(sum, VectorElement<type>::load(d, next + i));
      if (!a.first) sum = hn::Add(hn::LoadU(d, target + i), sum);
      VectorElement<DataType::kFloat32>::round(d, sum, target + i);
    }
  }
}

void accumulate(const AccumulateArguments& a, std::size_t begin, std::size_t end) {
  const std::size_t middle = vector_end(begin, end);
  with_type(a.type, [&]<DataType type>() { accumulate_vectors<type>(a, begin, middle); });
  scalar_kernels().accumulate(a, middle, end);
}

// --- scale ---

// Rounded and stored as the rounding type.
template <DataType round_type>
void scale_vectors(const ScaleArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const auto factor = hn::Set(d, a.factor);
  auto* target = static_cast<Storage<round_type>*>(a.target);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    VectorElement<round_type>::round(d, hn::Mul(hn::LoadU(d, a.source + i), factor), target + i);
  }
}

// Rounded to a 16-bit type and widened again, by way of one vector on the stack.
template <DataType round_type>
void scale_widened_vectors(const ScaleArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const auto factor = hn::Set(d, a.factor);
  auto* target = static_cast<float*>(a.target);
  HWY_ALIGN Storage<round_type> rounded[hn::MaxLanes(d)];
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    VectorElement<round_type>::round(d, hn::Mul(hn::LoadU(d, a.source + i), factor), rounded);
    hn::StoreU(VectorElement<round_type>::load(d, rounded), d, target + i);
  }
}

void scale(const ScaleArguments& a, std::size_t begin, std::size_t end) {
  const std::size_t middle = vector_end(begin, end);
  with_type(a.round_type, [&]<DataType round_type>() {
    if (a.target_type == round_type) {
      scale_vectors<round_type>(a, begin, middle);
    } else {
      scale_widened_vectors<round_type>(a, begin, middle);
    }
  });
  scalar_kernels().scale(a, middle, end);
}

// --- add ---

template <DataType type>
void add_vectors(const AddArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const auto* source = static_cast<const Storage<type>*>(a.source);
  auto* target = static_cast<Storage<type>*>(a.target);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    const auto sum =
        hn::Add(VectorElement<type>::load(d, target + i), VectorElement<type>::load(d, source + i));
    VectorElement<type>::round(d, sum, target + i);
  }
}

void add(const AddArguments& a, std::size_t begin, std::size_t end) {
  const std::size_t middle = vector_end(begin, end);
  with_type(a.type, [&]<DataType type>() { add_vectors<type>(a, begin, middle); });
  scalar_kernels().add(a, middle, end);
}

// --- norm ---

using DoubleTag = hn::CappedTag<double, definitions::kNormLanes>;
constexpr std::size_t kDoubleLanes = hn::MaxLanes(DoubleTag());
constexpr std::size_t kDoubleVectors = definitions::kNormLanes / kDoubleLanes;

// How far ahead of its use the norm fetches: one stream read alone is bound by latency, not by memory.
constexpr std::size_t kNormPrefetchLeaves = 4;

// `leaf_count` leaves side by side: one alone would wait for the latency of its own additions.
template <DataType type, std::size_t leaf_count>
void norm_leaf_vectors(const Storage<type>* source, double* sums) {
  const DoubleTag d;
  const hn::Rebind<float, DoubleTag> d32;
  hn::Vec<DoubleTag> lanes[leaf_count][kDoubleVectors];
  for (auto& leaf : lanes) {
    for (auto& lane : leaf) lane = hn::Zero(d);
  }
  for (std::size_t i = 0; i < kLeafCount; i += definitions::kNormLanes) {
    for (std::size_t leaf = 0; leaf < leaf_count; ++leaf) {
      hwy::Prefetch(source + (leaf + kNormPrefetchLeaves) * kLeafCount + i);
      for (std::size_t j = 0; j < kDoubleVectors; ++j) {
        const auto* address = source + leaf * kLeafCount + i + j * kDoubleLanes;
        const auto wide = hn::PromoteTo(d, VectorElement<type>::load(d32, address));
        lanes[leaf][j] = hn::MulAdd(wide, wide, lanes[leaf][j]);  // The square is exact: see norm_step().
      }
    }
  }
  for (std::size_t leaf = 0; leaf < leaf_count; ++leaf) {
    for (std::size_t half = kDoubleVectors / 2; half > 0; half /= 2) {
      for (std::size_t j = 0; j < half; ++j) lanes[leaf][j] = hn::Add(lanes[leaf][j], lanes[leaf][j + half]);
    }
    HWY_ALIGN double rest[kDoubleLanes];
    hn::Store(lanes[leaf][0], d, rest);
    sums[leaf] = definitions::norm_fold(rest, kDoubleLanes);
  }
}

template <DataType type>
void norm_vectors(const NormArguments& a, std::size_t begin, std::size_t end) {
  const auto* source = static_cast<const Storage<type>*>(a.source);
  std::size_t leaf = begin;
  for (; leaf + 2 <= end; leaf += 2) norm_leaf_vectors<type, 2>(source + leaf * kLeafCount, a.scratch + leaf);
  if (leaf < end) norm_leaf_vectors<type, 1>(source + leaf * kLeafCount, a.scratch + leaf);
}

void norm_leaves(const NormArguments& a, std::size_t begin, std::size_t end) {
  with_type(a.type, [&]<DataType type>() { norm_vectors<type>(a, begin, end); });
}

// --- adamw ---

template <DataType gradient_type, DataType parameter_type, bool has_parameter>
void adamw_vectors(const AdamWArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const definitions::AdamWConstants c = constants_of(a);
  const auto factor = hn::Set(d, c.factor), decay = hn::Set(d, c.decay), step = hn::Set(d, c.step);
  const auto beta1 = hn::Set(d, c.beta1), a1 = hn::Set(d, c.a1);
  const auto beta2 = hn::Set(d, c.beta2), a2 = hn::Set(d, c.a2);
  const auto s2 = hn::Set(d, c.s2), eps = hn::Set(d, c.eps);
  const auto* gradient = static_cast<const Storage<gradient_type>*>(a.gradient);
  auto* parameter = static_cast<Storage<parameter_type>*>(a.parameter);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    hwy::Prefetch(gradient + i + kPrefetchCount);
    hwy::Prefetch(a.master + i + kPrefetchCount);
    hwy::Prefetch(a.m + i + kPrefetchCount);
    hwy::Prefetch(a.v + i + kPrefetchCount);
    const auto g = hn::Mul(VectorElement<gradient_type>::load(d, gradient + i), factor);
    auto p = hn::LoadU(d, a.master + i);
    auto m = hn::LoadU(d, a.m + i);
    auto v = hn::LoadU(d, a.v + i);
    p = hn::MulAdd(decay, p, p);
    m = hn::MulAdd(beta1, m, hn::Mul(a1, g));
    v = hn::MulAdd(beta2, v, hn::Mul(a2, hn::Mul(g, g)));
    p = hn::MulAdd(step, hn::Div(m, hn::Add(hn::Div(hn::Sqrt(v), s2), eps)), p);
    VectorElement<DataType::kFloat32>::round(d, p, a.master + i);
    VectorElement<DataType::kFloat32>::round(d, m, a.m + i);
    VectorElement<DataType::kFloat32>::round(d, v, a.v + i);
    if constexpr (has_parameter) VectorElement<parameter_type>::round(d, p, parameter + i);
  }
}

void adamw(const AdamWArguments& a, std::size_t begin, std::size_t end) {
  const std::size_t middle = vector_end(begin, end);
  with_type(a.gradient_type, [&]<DataType gradient_type>() {
    if (a.parameter == nullptr) {
      adamw_vectors<gradient_type, DataType::kFloat32, false>(a, begin, middle);
      return;
    }
    with_type(a.parameter_type, [&]<DataType parameter_type>() {
      adamw_vectors<gradient_type, parameter_type, true>(a, begin, middle);
    });
  });
  scalar_kernels().adamw(a, middle, end);
}

const RangeKernels* range_kernels() {
  static const RangeKernels kKernels = {
      hwy::TargetName(HWY_TARGET), cast, accumulate, scale, add, norm_leaves, adamw};
  return &kKernels;
}

#else

const RangeKernels* range_kernels() {
  return &scalar_kernels();
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace forebay::host_kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace forebay::host_kernels {

HWY_EXPORT(range_kernels);

const RangeKernels& simd_kernels() {
  return *HWY_DYNAMIC_DISPATCH(range_kernels)();
}

}  // namespace forebay::host_kernels
#endif
