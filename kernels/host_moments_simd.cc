// The host's update, and loading and storing narrow m and v, in SIMD, compiled once per instruction set.
// Every body follows moments.h and definitions.h operation by operation; the rest of a range after whole
// vectors or blocks goes to the scalar definition. Which instruction sets take part: simd_elements.h.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include <cstdint>

#include "kernels/host_moments.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host_moments_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // Must come before highway.h.
#include "hwy/highway.h"
#include "kernels/simd_elements.h"  // After them.

HWY_BEFORE_NAMESPACE();
namespace forebay::host_kernels {
namespace HWY_NAMESPACE {

#ifdef FOREBAY_SIMD

namespace hn = hwy::HWY_NAMESPACE;

using BitTag = hn::RebindToUnsigned<FloatTag>;
using BitVector = hn::Vec<BitTag>;

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
  return canonical_vector(FloatTag(), v);
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

// --- the low-precision parameter ---

// A device reads the parameter next, so it is written past the caches: no line of it is read to be
// overwritten, and none of the others is driven out. 5 to 8 % of a whole step. Not where it takes the place
// of its gradient, whose lines are there already (5 % slower), and only where each vector is aligned, as the
// instruction demands.
template <DataType type>
class ParameterWriter {
 public:
  ParameterWriter(const AdamWArguments& a, std::size_t begin)
      : parameter_(static_cast<Storage<type>*>(a.parameter)),
        streams_(a.parameter != a.gradient &&
                 (reinterpret_cast<std::uintptr_t>(a.parameter) + begin * sizeof(Storage<type>)) %
                         (hn::Lanes(Tag()) * sizeof(Storage<type>)) ==
                     0) {}
  // Order: the writes are visible to other threads when they learn of the end of this block.
  ~ParameterWriter() { hwy::FlushStream(); }

  HWY_INLINE void write(FloatVector p, std::size_t i) const {
    const auto rounded = VectorElement<type>::rounded(FloatTag(), p);
    if (streams_) {
      hn::Stream(rounded, Tag(), parameter_ + i);
    } else {
      hn::StoreU(rounded, Tag(), parameter_ + i);
    }
  }

 private:
  using Tag = hn::Rebind<Storage<type>, FloatTag>;
  Storage<type>* parameter_;
  bool streams_;
};

// --- bf16 ---

using Half = VectorElement<DataType::kBfloat16>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;

void load_bfloat16(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const FloatTag d;
  const auto* kept_m = static_cast<const std::uint16_t*>(moments.m);
  const auto* kept_v = static_cast<const std::uint16_t*>(moments.v);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    hn::StoreU(canonical_vector(Half::load(d, kept_m + i)), d, m + (i - begin));
    hn::StoreU(canonical_vector(Half::load(d, kept_v + i)), d, v + (i - begin));
  }
}

// Both are canonical.
template <bool dithered>
HWY_INLINE void store_bfloat16_vectors(FloatVector m, FloatVector v, BitVector seed, std::uint16_t* kept_m,
                                       std::uint16_t* kept_v) {
  if constexpr (dithered) {
    // The upper halves of the sums, both at once. The canonical NaN does not change: its lower half is zero,
    // so nothing carries.
    const hn::Repartition<std::uint16_t, FloatTag> both;
    const auto random = dither_vector(seed, bits_of(m), bits_of(v));
    const auto sum_of_m = hn::Add(bits_of(m), hn::ShiftRight<16>(random));
    const auto sum_of_v = hn::Add(bits_of(v), hn::And(random, set_bits(0xFFFF)));
    const auto halves = hn::ConcatOdd(both, hn::BitCast(both, sum_of_v), hn::BitCast(both, sum_of_m));
    hn::StoreU(hn::LowerHalf(HalfTag(), halves), HalfTag(), kept_m);
    hn::StoreU(hn::UpperHalf(HalfTag(), halves), HalfTag(), kept_v);
  } else {
    const FloatTag d;
    round_canonical<DataType::kBfloat16>(d, m, kept_m);
    round_canonical<DataType::kBfloat16>(d, v, kept_v);
  }
}

template <bool dithered>
void store_bfloat16(const float* m, const float* v, std::size_t begin, std::size_t end,
                    const Moments& moments, Rounding rounding) {
  const FloatTag d;
  auto* kept_m = static_cast<std::uint16_t*>(moments.m);
  auto* kept_v = static_cast<std::uint16_t*>(moments.v);
  const auto seed = set_bits(rounding.seed);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    store_bfloat16_vectors<dithered>(canonical_vector(hn::LoadU(d, m + (i - begin))),
                                     canonical_vector(hn::LoadU(d, v + (i - begin))), seed, kept_m + i,
                                     kept_v + i);
  }
}

// m and v as they are kept in kFloat32.
struct KeptFloat32 {
  KeptFloat32(const Moments& moments, Rounding)
      : m(static_cast<float*>(moments.m)), v(static_cast<float*>(moments.v)) {}
  HWY_INLINE FloatVector load(const float* kept) const { return hn::LoadU(FloatTag(), kept); }
  HWY_INLINE void store(FloatVector new_m, FloatVector new_v, std::size_t i) const {
    hn::StoreU(new_m, FloatTag(), m + i);
    hn::StoreU(new_v, FloatTag(), v + i);
  }
  float *m, *v;
};

// And in kBfloat16.
template <bool dithered>
struct KeptBfloat16 {
  KeptBfloat16(const Moments& moments, Rounding rounding)
      : m(static_cast<std::uint16_t*>(moments.m)),
        v(static_cast<std::uint16_t*>(moments.v)),
        seed(set_bits(rounding.seed)) {}
  HWY_INLINE FloatVector load(const std::uint16_t* kept) const { return Half::load(FloatTag(), kept); }
  HWY_INLINE void store(FloatVector new_m, FloatVector new_v, std::size_t i) const {
    store_bfloat16_vectors<dithered>(new_m, new_v, seed, m + i, v + i);
  }
  std::uint16_t *m, *v;
  BitVector seed;
};

template <class Kept, DataType gradient_type, DataType parameter_type, bool has_parameter>
void update_elements(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                     Rounding rounding) {
  const FloatTag d;
  const AdamWArguments& a = arguments.update;
  const AdamWVectors c(constants_of(a));
  const Kept kept(arguments.moments, rounding);
  const auto* gradient = static_cast<const Storage<gradient_type>*>(a.gradient);
  float* master = a.master;
  const ParameterWriter<parameter_type> parameter(a, begin);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    hwy::Prefetch(gradient + i + kPrefetchCount);
    hwy::Prefetch(master + i + kPrefetchCount);
    hwy::Prefetch(kept.m + i + kPrefetchCount);
    hwy::Prefetch(kept.v + i + kPrefetchCount);
    auto p = hn::LoadU(d, master + i);
    auto m = kept.load(kept.m + i);
    auto v = kept.load(kept.v + i);
    adamw_vector(c, VectorElement<gradient_type>::load(d, gradient + i), p, m, v);
    hn::StoreU(p, d, master + i);
    if constexpr (has_parameter) parameter.write(p, i);
    kept.store(m, v, i);
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

// From codes of m to values.
struct DecoderOfM {
  explicit HWY_INLINE DecoderOfM(std::uint8_t stored) {
    const std::uint32_t exponent = definitions::moment_exponent_read(stored);
    const bool nan = exponent == kMomentExponentNan;
    unit = from_bits(set_bits((exponent - 17u) << 23));
    base = set_bits((exponent - 15u) << 23);
    kept = set_bits(nan ? 0 : 0xFFFFFFFF);
    added = set_bits(nan ? kCanonicalNanFloat32 : 0);
  }

  HWY_INLINE FloatVector operator()(BitVector code) const {
    const hn::RebindToSigned<FloatTag> di;
    const auto magnitude = hn::And(code, set_bits(0x7F));
    const auto normal = hn::Add(hn::ShiftLeft<kShift>(magnitude), base);
    const auto subnormal = hn::Mul(hn::ConvertTo(FloatTag(), hn::BitCast(di, magnitude)), unit);
    const auto value = hn::IfThenElse(hn::Lt(magnitude, set_bits(8)), bits_of(subnormal), normal);
    const auto sign = hn::ShiftLeft<24>(hn::And(code, set_bits(0x80)));
    return from_bits(hn::Or(hn::And(hn::Or(value, sign), kept), added));
  }

  FloatVector unit;
  BitVector base, kept, added;
};

// From codes of v to values.
struct DecoderOfV {
  explicit HWY_INLINE DecoderOfV(std::uint8_t stored) {
    const std::uint32_t exponent = definitions::moment_exponent_read(stored);
    const bool nan = exponent == kMomentExponentNan;
    base = set_bits((exponent - 31u) << 23);
    kept = set_bits(nan ? 0 : 0xFFFFFFFF);
    added = set_bits(nan ? kCanonicalNanFloat32 : 0);
  }

  HWY_INLINE FloatVector operator()(BitVector code) const {
    const auto value = hn::Add(hn::ShiftLeft<kShift>(code), base);
    const auto zero = hn::Eq(code, hn::Zero(BitTag()));
    return from_bits(hn::Or(hn::And(hn::IfThenZeroElse(zero, value), kept), added));
  }

  BitVector base, kept, added;
};

void load_block8(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const FloatTag d;
  const auto* m_codes = static_cast<const std::uint8_t*>(moments.m);
  const auto* v_codes = static_cast<const std::uint8_t*>(moments.v);
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const DecoderOfM decode_m(moments.m_exponents[start / kMomentBlockCount]);
    const DecoderOfV decode_v(moments.v_exponents[start / kMomentBlockCount]);
    for (std::size_t i = start; i < start + kMomentBlockCount; i += hn::Lanes(d)) {
      hn::StoreU(decode_m(load_codes(m_codes + i)), d, m + (i - begin));
      hn::StoreU(decode_v(load_codes(v_codes + i)), d, v + (i - begin));
    }
  }
}

HWY_INLINE BitVector magnitude_of(FloatVector v) {
  return hn::And(bits_of(v), set_bits(0x7FFFFFFF));
}

HWY_INLINE std::uint32_t exponent_of(BitVector greatest) {
  return definitions::moment_exponent(hn::GetLane(hn::MaxOfLanes(BitTag(), greatest)));
}

// Stores one block of values whose greatest magnitudes are known.
template <bool dithered>
HWY_INLINE void store_block(const float* m, const float* v, BitVector greatest_m, BitVector greatest_v,
                            const Moments& moments, std::size_t start, std::uint32_t seed_bits) {
  const FloatTag d;
  const std::uint32_t m_exponent = exponent_of(greatest_m), v_exponent = exponent_of(greatest_v);
  moments.m_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(m_exponent);
  moments.v_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(v_exponent);
  auto* m_codes = static_cast<std::uint8_t*>(moments.m) + start;
  auto* v_codes = static_cast<std::uint8_t*>(moments.v) + start;
  const auto seed = set_bits(seed_bits);
  const auto least_normal = set_bits((m_exponent - 14u) << 23);
  const auto m_base = set_bits((m_exponent - 15u) << 3), v_base = set_bits((v_exponent - 31u) << 3);
  const auto v_least = hn::Add(v_base, set_bits(1));
  // A block that is NaN has codes of 0.
  const auto m_mask = set_bits(m_exponent == kMomentExponentNan ? 0 : 0xFF);
  const auto v_mask = set_bits(v_exponent == kMomentExponentNan ? 0 : 0xFF);
  auto random = hn::Zero(BitTag());
  for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) {
    const auto new_m = canonical_vector(hn::LoadU(d, m + i)), new_v = canonical_vector(hn::LoadU(d, v + i));
    if constexpr (dithered) random = dither_vector(seed, bits_of(new_m), bits_of(new_v));

    auto magnitude = magnitude_of(new_m);
    const auto subnormal =
        hn::Sub(bits_of(hn::Add(from_bits(magnitude), from_bits(least_normal))), set_bits(1u << 23));
    magnitude = hn::IfThenElse(hn::Lt(magnitude, least_normal), subnormal, magnitude);
    const auto kept = drop_vector<kShift, dithered>(magnitude, hn::ShiftRight<12>(random));
    const auto sign = hn::And(hn::ShiftRight<24>(bits_of(new_m)), set_bits(0x80));
    store_codes(hn::And(hn::Or(hn::Sub(kept, m_base), sign), m_mask), m_codes + i);

    const auto v_magnitude = magnitude_of(new_v);
    const auto v_kept = drop_vector<kShift, dithered>(v_magnitude, hn::And(random, set_bits(0xFFFFF)));
    const auto code = hn::Sub(hn::Max(v_kept, v_least), v_base);
    const auto is_zero = hn::Eq(v_magnitude, hn::Zero(BitTag()));
    store_codes(hn::And(hn::IfThenZeroElse(is_zero, code), v_mask), v_codes + i);
  }
}

template <bool dithered>
void store_block8(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
                  Rounding rounding) {
  const FloatTag d;
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const float* m_block = m + (start - begin);
    const float* v_block = v + (start - begin);
    auto greatest_m = hn::Zero(BitTag()), greatest_v = greatest_m;
    for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) {
      greatest_m = hn::Max(greatest_m, magnitude_of(hn::LoadU(d, m_block + i)));
      greatest_v = hn::Max(greatest_v, magnitude_of(hn::LoadU(d, v_block + i)));
    }
    store_block<dithered>(m_block, v_block, greatest_m, greatest_v, moments, start, rounding.seed);
  }
}

// The new m and v of a block wait in the first cache level until its greatest are known.
template <DataType gradient_type, DataType parameter_type, bool has_parameter, bool dithered>
void update_block8(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                   Rounding rounding) {
  const FloatTag d;
  const AdamWArguments& a = arguments.update;
  const Moments& moments = arguments.moments;
  const AdamWVectors c(constants_of(a));
  const auto* gradient = static_cast<const Storage<gradient_type>*>(a.gradient);
  const ParameterWriter<parameter_type> parameter(a, begin);
  const auto* m_codes = static_cast<const std::uint8_t*>(moments.m);
  const auto* v_codes = static_cast<const std::uint8_t*>(moments.v);
  HWY_ALIGN float new_m[kMomentBlockCount];
  HWY_ALIGN float new_v[kMomentBlockCount];
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const DecoderOfM decode_m(moments.m_exponents[start / kMomentBlockCount]);
    const DecoderOfV decode_v(moments.v_exponents[start / kMomentBlockCount]);
    auto greatest_m = hn::Zero(BitTag()), greatest_v = greatest_m;
    for (std::size_t i = start; i < start + kMomentBlockCount; i += hn::Lanes(d)) {
      hwy::Prefetch(gradient + i + kPrefetchCount);
      hwy::Prefetch(a.master + i + kPrefetchCount);
      hwy::Prefetch(m_codes + i + kPrefetchCount);
      hwy::Prefetch(v_codes + i + kPrefetchCount);
      auto p = hn::LoadU(d, a.master + i);
      auto m = decode_m(load_codes(m_codes + i));
      auto v = decode_v(load_codes(v_codes + i));
      adamw_vector(c, VectorElement<gradient_type>::load(d, gradient + i), p, m, v);
      hn::StoreU(p, d, a.master + i);
      if constexpr (has_parameter) parameter.write(p, i);
      greatest_m = hn::Max(greatest_m, magnitude_of(m));
      greatest_v = hn::Max(greatest_v, magnitude_of(v));
      hn::Store(m, d, new_m + (i - start));
      hn::Store(v, d, new_v + (i - start));
    }
    store_block<dithered>(new_m, new_v, greatest_m, greatest_v, moments, start, rounding.seed);
  }
}

// --- both ---

// The end of the part of [begin, end) that SIMD handles.
std::size_t whole_end(MomentFormat format, std::size_t begin, std::size_t end) {
  if (format != MomentFormat::kBlock8) return vector_end(begin, end);
  return begin + (end - begin) / kMomentBlockCount * kMomentBlockCount;
}

void load(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const std::size_t middle = whole_end(moments.format, begin, end);
  const auto function = moments.format == MomentFormat::kBfloat16 ? load_bfloat16 : load_block8;
  function(moments, begin, middle, m, v);
  scalar_moment_kernels().load(moments, middle, end, m + (middle - begin), v + (middle - begin));
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
  scalar_moment_kernels().store(m + (middle - begin), v + (middle - begin), middle, end, moments, rounding);
}

template <DataType gradient_type, DataType parameter_type, bool has_parameter>
void update_whole(const HostAdamArguments& a, std::size_t begin, std::size_t end, Rounding rounding) {
  auto function = update_elements<KeptFloat32, gradient_type, parameter_type, has_parameter>;
  if (a.moments.format == MomentFormat::kBfloat16) {
    function = rounding.dithered
                   ? update_elements<KeptBfloat16<true>, gradient_type, parameter_type, has_parameter>
                   : update_elements<KeptBfloat16<false>, gradient_type, parameter_type, has_parameter>;
  } else if (a.moments.format == MomentFormat::kBlock8) {
    function = rounding.dithered ? update_block8<gradient_type, parameter_type, has_parameter, true>
                                 : update_block8<gradient_type, parameter_type, has_parameter, false>;
  }
  function(a, begin, end, rounding);
}

void update(const HostAdamArguments& a, std::size_t begin, std::size_t end, Rounding rounding) {
  if (!has_simd_update(a.update)) return scalar_moment_kernels().update(a, begin, end, rounding);
  const std::size_t middle = whole_end(a.moments.format, begin, end);
  with_type(a.update.gradient_type, [&]<DataType gradient_type>() {
    if (a.update.parameter == nullptr) {
      update_whole<gradient_type, DataType::kFloat32, false>(a, begin, middle, rounding);
      return;
    }
    with_type(a.update.parameter_type, [&]<DataType parameter_type>() {
      update_whole<gradient_type, parameter_type, true>(a, begin, middle, rounding);
    });
  });
  scalar_moment_kernels().update(a, middle, end, rounding);
}

const MomentKernels* moment_kernels() {
  static const MomentKernels kKernels = {hwy::TargetName(HWY_TARGET), load, store, update};
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
