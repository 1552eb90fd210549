// The host's update, and loading and storing narrow m and v, in SIMD, compiled once per instruction set.
// Every body follows moments.h and definitions.h operation by operation; the rest of a range after whole
// vectors or blocks goes to the scalar definition. Which instruction sets take part: simd_elements.h.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include <algorithm>
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
  h = hn::Mul(hn::Xor3(h, hn::ShiftRight<15>(h), v), set_bits(definitions::kDitherFactor2));
  return hn::Xor(h, hn::ShiftRight<16>(h));
}

// drop_bits(); `random` is not read unless dithered.
template <int shift, bool dithered>
HWY_INLINE BitVector drop_vector(BitVector bits, BitVector random) {
  if constexpr (dithered) return hn::ShiftRight<shift>(hn::Add(bits, random));
  const auto odd = hn::And(hn::ShiftRight<shift>(bits), set_bits(1));
  return hn::ShiftRight<shift>(hn::Add(hn::Add(bits, set_bits((1u << (shift - 1)) - 1u)), odd));
}

// A turn of a loop: whole lines of the caches in every type, each of which is fetched once.
constexpr std::size_t kTurnCount = 64;

// How far ahead of its use memory is fetched. Further (2 KiB): 18 % slower on a Zen 4, because the
// processor's own prefetchers lose their streams. Not at all: 8 % slower on a processor whose prefetchers
// stop at each page.
constexpr std::size_t kPrefetchBytes = 256;

template <class T>
HWY_INLINE void prefetch_turn(const T* source) {
  constexpr std::size_t kLineCount = 64 / sizeof(T);
  for (std::size_t i = 0; i < kTurnCount; i += kLineCount)
    hwy::Prefetch(source + kPrefetchBytes / sizeof(T) + i);
}

// Vectors that are updated side by side. More: they no longer fit into the registers.
constexpr std::size_t kVectorsAtOnce = 4;
constexpr std::size_t kCountAtOnce = kVectorsAtOnce * hn::MaxLanes(FloatTag());
static_assert(kTurnCount % kCountAtOnce == 0);

// GCC leaves short loops rolled at -O2, and then keeps arrays of vectors in memory.
#ifdef __clang__
#define FOREBAY_UNROLL _Pragma("unroll")
#else
#define FOREBAY_UNROLL _Pragma("GCC unroll 4")
#endif

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
  HWY_INLINE FloatVector load_m(std::size_t i) const { return hn::LoadU(FloatTag(), m + i); }
  HWY_INLINE FloatVector load_v(std::size_t i) const { return hn::LoadU(FloatTag(), v + i); }
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
  HWY_INLINE FloatVector load_m(std::size_t i) const { return Half::load(FloatTag(), m + i); }
  HWY_INLINE FloatVector load_v(std::size_t i) const { return Half::load(FloatTag(), v + i); }
  HWY_INLINE void store(FloatVector new_m, FloatVector new_v, std::size_t i) const {
    store_bfloat16_vectors<dithered>(new_m, new_v, seed, m + i, v + i);
  }
  std::uint16_t *m, *v;
  BitVector seed;
};

// The update of `vector_count` vectors side by side: while the roots and quotients of some are computed, the
// processor does the rest of others. `kept` loads and stores m and v, and `between` is done meanwhile.
template <std::size_t vector_count, DataType gradient_type, DataType parameter_type, bool has_parameter,
          class Kept, class Between>
HWY_INLINE void update_vectors(const AdamWVectors& c, const AdamWArguments& a, std::size_t start, Kept& kept,
                               const ParameterWriter<parameter_type>& parameter, const Between& between) {
  const FloatTag d;
  const auto* gradient = static_cast<const Storage<gradient_type>*>(a.gradient) + start;
  float* master = a.master + start;
  FloatVector p[vector_count], m[vector_count], root[vector_count];
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < vector_count; ++k) {
    const std::size_t i = k * hn::Lanes(d);
    p[k] = hn::LoadU(d, master + i);
    m[k] = kept.load_m(start + i);
    auto v = kept.load_v(start + i);
    root[k] = adamw_root(c, VectorElement<gradient_type>::load(d, gradient + i), p[k], m[k], v);
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(hn::Add(m[k], v))))) {
      m[k] = canonical_vector(m[k]);
      v = canonical_vector(v);
    }
    kept.store(m[k], v, start + i);
  }
  FloatVector quotient[vector_count];
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < vector_count; ++k) quotient[k] = adamw_quotient(c, m[k], root[k]);
  between();
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < vector_count; ++k) {
    const std::size_t i = k * hn::Lanes(d);
    p[k] = adamw_parameter(c, quotient[k], p[k]);
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(p[k])))) p[k] = canonical_vector(p[k]);
    hn::StoreU(p[k], d, master + i);
    if constexpr (has_parameter) parameter.write(p[k], start + i);
  }
}

template <class Kept, DataType gradient_type, DataType parameter_type, bool has_parameter>
void update_elements(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                     Rounding rounding) {
  const AdamWArguments& a = arguments.update;
  const AdamWVectors c(constants_of(a));
  Kept kept(arguments.moments, rounding);
  const ParameterWriter<parameter_type> parameter(a, begin);
  const auto nothing = [] {};
  std::size_t i = begin;
  for (; i + kTurnCount <= end; i += kTurnCount) {
    prefetch_turn(static_cast<const Storage<gradient_type>*>(a.gradient) + i);
    prefetch_turn(a.master + i);
    prefetch_turn(kept.m + i);
    prefetch_turn(kept.v + i);
    for (std::size_t at = i; at < i + kTurnCount; at += kCountAtOnce) {
      update_vectors<kVectorsAtOnce, gradient_type, parameter_type, has_parameter>(c, a, at, kept, parameter,
                                                                                   nothing);
    }
  }
  for (; i < end; i += hn::Lanes(FloatTag()))
    update_vectors<1, gradient_type, parameter_type, has_parameter>(c, a, i, kept, parameter, nothing);
}

// --- block8 ---

using ByteTag = hn::Rebind<std::uint8_t, FloatTag>;
using definitions::kMomentExponentNan;
constexpr int kShift = static_cast<int>(definitions::kMomentShift);

HWY_INLINE BitVector load_codes(const std::uint8_t* source) {
  return hn::PromoteTo(BitTag(), hn::LoadU(ByteTag(), source));
}

HWY_INLINE void store_codes(BitVector codes, std::uint8_t* target) {
  hn::StoreU(hn::TruncateTo(ByteTag(), codes), ByteTag(), target);
}

// From codes of m to values. NaNs have any payload.
#if HWY_ARCH_X86 && !defined(HWY_DISABLE_F16C)
// A code has the digits of an fp16 number: the value is this number times 2^E.
struct DecoderOfM {
  explicit HWY_INLINE DecoderOfM(std::uint8_t stored)
      : scale(from_bits(set_bits(definitions::moment_exponent_read(stored) << 23))) {
    if (stored == kMomentExponentNan) scale = from_bits(set_bits(kCanonicalNanFloat32));
  }

  HWY_INLINE FloatVector operator()(const std::uint8_t* codes) const {
    const hn::Rebind<std::int8_t, FloatTag> d8;
    const hn::Rebind<std::int16_t, FloatTag> d16;
    const hn::Rebind<hwy::float16_t, FloatTag> half;
    const auto wide = hn::PromoteTo(d16, hn::BitCast(d8, hn::LoadU(ByteTag(), codes)));
    const auto digits = hn::And(hn::ShiftLeft<7>(wide), hn::Set(d16, static_cast<std::int16_t>(0xBF80)));
    return hn::Mul(hn::PromoteTo(FloatTag(), hn::BitCast(half, digits)), scale);
  }

  FloatVector scale;
};
#else
struct DecoderOfM {
  explicit HWY_INLINE DecoderOfM(std::uint8_t stored) {
    const std::uint32_t exponent = definitions::moment_exponent_read(stored);
    unit = from_bits(set_bits((exponent - 17u) << 23));
    base = set_bits((exponent - 15u) << 23);
    added = set_bits(exponent == kMomentExponentNan ? kCanonicalNanFloat32 : 0);
  }

  HWY_INLINE FloatVector operator()(const std::uint8_t* codes) const {
    const hn::RebindToSigned<FloatTag> di;
    const auto code = load_codes(codes);
    const auto magnitude = hn::And(code, set_bits(0x7F));
    const auto normal = hn::Add(hn::ShiftLeft<kShift>(magnitude), base);
    const auto subnormal = hn::Mul(hn::ConvertTo(FloatTag(), hn::BitCast(di, magnitude)), unit);
    const auto value = hn::IfThenElse(hn::Lt(magnitude, set_bits(8)), bits_of(subnormal), normal);
    const auto sign = hn::ShiftLeft<24>(hn::And(code, set_bits(0x80)));
    return from_bits(hn::Or3(value, sign, added));
  }

  FloatVector unit;
  BitVector base, added;
};
#endif

// From codes of v to values. NaNs have any payload.
struct DecoderOfV {
  explicit HWY_INLINE DecoderOfV(std::uint8_t stored) {
    const std::uint32_t exponent = definitions::moment_exponent_read(stored);
    base = set_bits((exponent - 31u) << 23);
    added = set_bits(exponent == kMomentExponentNan ? kCanonicalNanFloat32 : 0);
  }

  HWY_INLINE FloatVector operator()(const std::uint8_t* codes) const {
    const auto code = load_codes(codes);
    const auto value = hn::Add(hn::ShiftLeft<kShift>(code), base);
    const auto zero = hn::Eq(code, hn::Zero(BitTag()));
    return from_bits(hn::Or(hn::IfThenZeroElse(zero, value), added));
  }

  BitVector base, added;
};

void load_block8(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const FloatTag d;
  const auto* m_codes = static_cast<const std::uint8_t*>(moments.m);
  const auto* v_codes = static_cast<const std::uint8_t*>(moments.v);
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const DecoderOfM decode_m(moments.m_exponents[start / kMomentBlockCount]);
    const DecoderOfV decode_v(moments.v_exponents[start / kMomentBlockCount]);
    for (std::size_t i = start; i < start + kMomentBlockCount; i += hn::Lanes(d)) {
      hn::StoreU(canonical_vector(decode_m(m_codes + i)), d, m + (i - begin));
      hn::StoreU(canonical_vector(decode_v(v_codes + i)), d, v + (i - begin));
    }
  }
}

HWY_INLINE BitVector magnitude_of(FloatVector v) {
  return hn::And(bits_of(v), set_bits(0x7FFFFFFF));
}

HWY_INLINE std::uint32_t exponent_of(BitVector greatest) {
  return definitions::moment_exponent(hn::GetLane(hn::MaxOfLanes(BitTag(), greatest)));
}

// New m and v of a block, canonical. They wait in the first cache level until their greatest are known.
struct NewBlock {
  // Not implicit: that one would be compiled for another instruction set.
  HWY_INLINE NewBlock() { clear(); }
  HWY_INLINE void clear() { greatest_m = greatest_v = hn::Zero(BitTag()); }
  HWY_INLINE void add(FloatVector new_m, FloatVector new_v, std::size_t i) {
    greatest_m = hn::Max(greatest_m, magnitude_of(new_m));
    greatest_v = hn::Max(greatest_v, magnitude_of(new_v));
    hn::Store(new_m, FloatTag(), m + i);
    hn::Store(new_v, FloatTag(), v + i);
  }

  HWY_ALIGN float m[kMomentBlockCount] = {};
  HWY_ALIGN float v[kMomentBlockCount] = {};
  BitVector greatest_m, greatest_v;
};

// From the values of a block to its codes.
template <bool dithered>
class BlockEncoder {
 public:
  // Writes the block's exponents.
  HWY_INLINE BlockEncoder(const NewBlock& block, std::uint8_t* m_codes, std::uint8_t* v_codes,
                          std::uint8_t& m_exponent, std::uint8_t& v_exponent, std::uint32_t seed)
      : block_(block), m_codes_(m_codes), v_codes_(v_codes), seed_(set_bits(seed)) {
    const std::uint32_t of_m = exponent_of(block.greatest_m), of_v = exponent_of(block.greatest_v);
    m_exponent = static_cast<std::uint8_t>(of_m);
    v_exponent = static_cast<std::uint8_t>(of_v);
    least_normal_ = set_bits((of_m - 14u) << 23);
    m_base_ = set_bits((of_m - 15u) << 23);
    v_base_ = set_bits((of_v - 31u) << 3);
    m_is_nan_ = of_m == kMomentExponentNan;
    v_is_nan_ = of_v == kMomentExponentNan;
  }

  HWY_INLINE void encode(std::size_t i) const {
    const FloatTag d;
    const auto new_m = hn::Load(d, block_.m + i), new_v = hn::Load(d, block_.v + i);
    auto random = hn::Zero(BitTag());
    if constexpr (dithered) random = dither_vector(seed_, bits_of(new_m), bits_of(new_v));

    // The base is taken off first: its lower digits are zero.
    const auto m_magnitude = magnitude_of(new_m);
    const auto subnormal = bits_of(hn::Add(from_bits(m_magnitude), from_bits(least_normal_)));
    const auto is_subnormal = hn::Lt(m_magnitude, least_normal_);
    const auto digits =
        hn::IfThenElse(is_subnormal, hn::Sub(subnormal, least_normal_), hn::Sub(m_magnitude, m_base_));
    const auto m_code = drop_vector<kShift, dithered>(digits, hn::ShiftRight<12>(random));
    store_codes(hn::OrAnd(m_code, hn::ShiftRight<24>(bits_of(new_m)), set_bits(0x80)), m_codes_ + i);

    const auto v_magnitude = magnitude_of(new_v);
    const auto v_kept = drop_vector<kShift, dithered>(v_magnitude, hn::And(random, set_bits(0xFFFFF)));
    const auto v_code = hn::Sub(hn::Max(v_kept, hn::Add(v_base_, set_bits(1))), v_base_);
    const auto is_zero = hn::Eq(v_magnitude, hn::Zero(BitTag()));
    store_codes(hn::IfThenZeroElse(is_zero, v_code), v_codes_ + i);
  }

  // After the last vector. A block that is NaN has codes of 0.
  HWY_INLINE void end() const {
    if (HWY_UNLIKELY(m_is_nan_)) std::fill_n(m_codes_, kMomentBlockCount, std::uint8_t{0});
    if (HWY_UNLIKELY(v_is_nan_)) std::fill_n(v_codes_, kMomentBlockCount, std::uint8_t{0});
  }

 private:
  const NewBlock& block_;
  std::uint8_t* m_codes_;
  std::uint8_t* v_codes_;
  bool m_is_nan_, v_is_nan_;
  BitVector seed_, least_normal_, m_base_, v_base_;
};

template <bool dithered>
HWY_INLINE BlockEncoder<dithered> encoder_of(const NewBlock& block, const Moments& moments, std::size_t start,
                                             Rounding rounding) {
  const std::size_t index = start / kMomentBlockCount;
  return BlockEncoder<dithered>(block, static_cast<std::uint8_t*>(moments.m) + start,
                                static_cast<std::uint8_t*>(moments.v) + start, moments.m_exponents[index],
                                moments.v_exponents[index], rounding.seed);
}

template <bool dithered>
void store_block8(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
                  Rounding rounding) {
  const FloatTag d;
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    NewBlock block;
    for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) {
      const std::size_t at = start - begin + i;
      block.add(canonical_vector(hn::LoadU(d, m + at)), canonical_vector(hn::LoadU(d, v + at)), i);
    }
    const auto encoder = encoder_of<dithered>(block, moments, start, rounding);
    for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) encoder.encode(i);
    encoder.end();
  }
}

// A block of codes that is read, and its new values.
struct KeptBlock8 {
  KeptBlock8(const Moments& moments, std::size_t start, NewBlock& block)
      : decode_m(moments.m_exponents[start / kMomentBlockCount]),
        decode_v(moments.v_exponents[start / kMomentBlockCount]),
        m(static_cast<const std::uint8_t*>(moments.m)),
        v(static_cast<const std::uint8_t*>(moments.v)),
        first(start),
        values(block) {}
  HWY_INLINE FloatVector load_m(std::size_t i) const { return decode_m(m + i); }
  HWY_INLINE FloatVector load_v(std::size_t i) const { return decode_v(v + i); }
  HWY_INLINE void store(FloatVector new_m, FloatVector new_v, std::size_t i) {
    values.add(new_m, new_v, i - first);
  }

  DecoderOfM decode_m;
  DecoderOfV decode_v;
  const std::uint8_t *m, *v;
  std::size_t first;
  NewBlock& values;
};

// Codes are made of each block while the next one is updated, so that the processor waits for neither.
template <DataType gradient_type, DataType parameter_type, bool has_parameter, bool dithered>
void update_block8(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                   Rounding rounding) {
  const FloatTag d;
  const AdamWArguments& a = arguments.update;
  const AdamWVectors c(constants_of(a));
  const ParameterWriter<parameter_type> parameter(a, begin);
  // Before the first block comes one that is written nowhere.
  std::uint8_t nowhere[2 * kMomentBlockCount + 2];
  Moments moments = {MomentFormat::kBlock8, nowhere, nowhere + kMomentBlockCount,
                     nowhere + 2 * kMomentBlockCount, nowhere + 2 * kMomentBlockCount + 1};
  std::size_t previous = 0;
  NewBlock blocks[2];
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    const std::size_t number = (start - begin) / kMomentBlockCount % 2;
    const auto encoder = encoder_of<dithered>(blocks[1 - number], moments, previous, rounding);
    NewBlock& block = blocks[number];
    block.clear();
    KeptBlock8 kept(arguments.moments, start, block);
    for (std::size_t turn = 0; turn < kMomentBlockCount; turn += kTurnCount) {
      prefetch_turn(static_cast<const Storage<gradient_type>*>(a.gradient) + start + turn);
      prefetch_turn(a.master + start + turn);
      prefetch_turn(kept.m + start + turn);
      prefetch_turn(kept.v + start + turn);
      for (std::size_t at = turn; at < turn + kTurnCount; at += kCountAtOnce) {
        update_vectors<kVectorsAtOnce, gradient_type, parameter_type, has_parameter>(
            c, a, start + at, kept, parameter, [&] HWY_ATTR {
              for (std::size_t i = at; i < at + kCountAtOnce; i += hn::Lanes(d)) encoder.encode(i);
            });
      }
    }
    encoder.end();
    moments = arguments.moments;
    previous = start;
  }
  if (begin == end) return;
  const NewBlock& last = blocks[(previous - begin) / kMomentBlockCount % 2];
  const auto encoder = encoder_of<dithered>(last, moments, previous, rounding);
  for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) encoder.encode(i);
  encoder.end();
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
