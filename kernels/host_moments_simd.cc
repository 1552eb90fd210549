// The host's update, and loading and storing narrow m and v, in SIMD, compiled once per instruction set.
// Every body follows moments.h and definitions.h operation by operation, or by others with the same bits; the
// rest of a range after whole groups or blocks goes to update_in_blocks() or the scalar definition. Which
// instruction sets take part: simd_elements.h.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#define HWY_WANT_AVX3_DL

#include <algorithm>
#include <cmath>
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

const MomentKernels* moment_kernels();

#ifdef FOREBAY_SIMD

namespace hn = hwy::HWY_NAMESPACE;

using BitTag = hn::RebindToUnsigned<FloatTag>;
using BitVector = hn::Vec<BitTag>;
using WordTag = hn::Repartition<std::uint16_t, FloatTag>;
using WordVector = hn::Vec<WordTag>;
using ByteTag = hn::Repartition<std::uint8_t, FloatTag>;
using ByteVector = hn::Vec<ByteTag>;

constexpr std::size_t kLanes = hn::MaxLanes(FloatTag());

HWY_INLINE BitVector bits_of(FloatVector v) {
  return hn::BitCast(BitTag(), v);
}

HWY_INLINE FloatVector from_bits(BitVector v) {
  return hn::BitCast(FloatTag(), v);
}

HWY_INLINE BitVector set_bits(std::uint32_t value) {
  return hn::Set(BitTag(), value);
}

HWY_INLINE WordVector words_of(BitVector v) {
  return hn::BitCast(WordTag(), v);
}

HWY_INLINE WordVector set_words(std::uint32_t value) {
  return hn::Set(WordTag(), static_cast<std::uint16_t>(value));
}

HWY_INLINE ByteVector set_bytes(std::uint32_t value) {
  return hn::Set(ByteTag(), static_cast<std::uint8_t>(value));
}

HWY_INLINE FloatVector canonical_vector(FloatVector v) {
  return canonical_vector(FloatTag(), v);
}

// The same value, which the compiler does not know. GCC makes a constant that it knows again in each turn of
// a loop, on the execution port that moves words, where registers are short.
template <class V>
HWY_INLINE V hidden(V v) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  asm("" : "+v"(v.raw));
#endif
  return v;
}

// (a ^ b) & mask
HWY_INLINE BitVector xor_and(BitVector a, BitVector b, BitVector mask) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return BitVector{_mm512_ternarylogic_epi32(a.raw, b.raw, mask.raw, 0x28)};
#else
  return hn::And(hn::Xor(a, b), mask);
#endif
}

// The greater of two magnitudes.
HWY_INLINE FloatVector greater_magnitude(FloatVector a, FloatVector b) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return FloatVector{_mm512_range_ps(a.raw, b.raw, 0xB)};
#else
  return hn::Max(a, hn::Abs(b));
#endif
}

// The smaller of two magnitudes.
HWY_INLINE FloatVector smaller_magnitude(FloatVector a, FloatVector b) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return FloatVector{_mm512_range_ps(a.raw, b.raw, 0xA)};
#else
  return hn::Min(a, hn::Abs(b));
#endif
}

// definitions::DitherBits of a vector.
struct DitherVectors {
  BitVector m, v;
};

// dither_bits() for one step.
template <std::uint32_t shift>
class Dither {
 public:
  explicit HWY_INLINE Dither(std::uint32_t seed)
      : seed_(hidden(set_bits(seed))),
        factor_(hidden(set_bits(definitions::kDitherFactor))),
        mask_(hidden(set_bits((1u << shift) - 1u))) {}
  HWY_INLINE DitherVectors operator()(BitVector m, BitVector v) const {
    const auto h = hn::Mul(hn::Xor3(m, v, seed_), factor_);
    const auto upper = hn::ShiftRight<32 - static_cast<int>(shift)>(h);
    return {upper, xor_and(h, upper, mask_)};
  }

 private:
  BitVector seed_, factor_, mask_;
};

using HalfDither = Dither<definitions::kBfloat16Shift>;
using CodeDither = Dither<definitions::kMomentShift>;

// A turn of a loop: whole lines of the caches in every type, each of which is fetched once.
constexpr std::size_t kTurnCount = 64;
constexpr std::size_t kLineFloats = 64 / sizeof(float);

// How far ahead of its use memory is fetched. Further (2 KiB): 18 % slower on a Zen 4, because the
// processor's own prefetchers lose their streams. Nearer (256 bytes): 2 to 9 % slower on a Xeon. Not at all:
// 8 % slower on a processor whose prefetchers stop at each page.
constexpr std::size_t kPrefetchBytes = 512;

// `ahead`: elements.
template <class T>
HWY_INLINE void prefetch_turn(const T* source, std::size_t ahead = kPrefetchBytes / sizeof(T)) {
  constexpr std::size_t kLineCount = 64 / sizeof(T);
  for (std::size_t i = 0; i < kTurnCount; i += kLineCount) hwy::Prefetch(source + ahead + i);
}

// A group of vectors that are updated side by side: while the roots and quotients of some are computed, the
// processor does the rest of others. More: they no longer fit into the registers.
constexpr std::size_t kGroupVectors = 4;
constexpr std::size_t kGroupCount = kGroupVectors * kLanes;
static_assert(kTurnCount % kGroupCount == 0);

// GCC leaves short loops rolled at -O2, and then keeps arrays of vectors in memory.
#ifdef __clang__
#define FOREBAY_UNROLL _Pragma("unroll")
#else
#define FOREBAY_UNROLL _Pragma("GCC unroll 4")
#endif

// --- bf16 ---

using Half = VectorElement<DataType::kBfloat16>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;

// The bytes of four vectors in order: each lane has one of vector 0 in its lowest byte, one of vector 1 in
// the next, and so on.
HWY_INLINE ByteVector bytes_in_order(ByteVector bytes) {
  HWY_ALIGN static constexpr std::uint8_t kTransposed[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                             2, 6, 10, 14, 3, 7, 11, 15};
  const auto by_vector = hn::TableLookupBytes(bytes, hn::LoadDup128(ByteTag(), kTransposed));
  constexpr std::size_t kBlocks = kLanes / 4;  // Each has 128 bits.
  if constexpr (kBlocks == 1) return by_vector;
  const auto lane = hn::Iota(BitTag(), 0);
  // Lane q has the four bytes of vector q / kBlocks that were in block q % kBlocks.
  constexpr int kLog = kBlocks == 2 ? 1 : 2;
  const auto block = hn::And(lane, set_bits(kBlocks - 1));
  const auto index = hn::Add(hn::ShiftLeft<2>(block), hn::ShiftRight<kLog>(lane));
  const auto lanes =
      hn::TableLookupLanes(hn::BitCast(BitTag(), by_vector), hn::IndicesFromVec(BitTag(), index));
  return hn::BitCast(ByteTag(), lanes);
}

// Rearranges words and bytes. Its constants are made once, before a loop.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
class Words {
 public:
  HWY_INLINE Words() {
    const BitTag d;
    HWY_ALIGN static constexpr std::uint32_t kLane[4] = {0, 0x04040404, 0x08080808, 0x0C0C0C0C};
    const auto lane = hn::LoadDup128(d, kLane);
    const auto numbers = hn::Iota(d, 0);
    const auto next_numbers = hn::Add(numbers, set_bits(16));
    // Lane j < 8 gets the even words from 4 j on, and the other lanes the odd ones.
    const auto even = hn::ShiftLeft<2>(hn::And(numbers, set_bits(7)));
    const auto word = hn::Or(even, hn::ShiftRight<3>(numbers));
    const auto next_word = hn::Add(word, set_bits(2));
    wide_[0] = hidden(hn::ShiftLeft<16>(index_of_word(numbers)));
    wide_[1] = hidden(hn::ShiftLeft<16>(index_of_word(next_numbers)));
    words_in_order_ = hidden(hn::Or(index_of_word(word), hn::ShiftLeft<16>(index_of_word(next_word))));
#if HWY_TARGET <= HWY_AVX3_DL
    // Lane q gets the byte of vector q / 4 of lanes 4 (q % 4) to 4 (q % 4) + 3.
    const auto first = hn::Or(hn::ShiftLeft<4>(hn::And(numbers, set_bits(3))), hn::ShiftRight<2>(numbers));
    bytes_in_order_ = hidden(hn::Add(hn::Mul(first, set_bits(0x01010101)), set_bits(0x0C080400)));
    HWY_ALIGN static constexpr std::uint32_t kFirstBits[4] = {0x14140404, 0x34342424, 0x14140404, 0x34342424};
    code_ = hidden(hn::LoadDup128(d, kFirstBits));
#else
    code_ = hidden(set_bits(0x00100010));
#endif
    upper_words_ = hidden(hn::Add(lane, set_bits(0x03020302)));
    lower_words_ = hidden(hn::Add(lane, set_bits(0x01000100)));
    upper_bytes_ = hidden(hn::Add(lane, set_bits(0x03030101)));
    one_ = hidden(set_bits(0x00010001));
    tie_ = hidden(set_bits(0x80008000));
    all_ = hidden(set_bits(0xFFFFFFFF));
    sign_ = hidden(set_bits(0x80808080));
  }

  // Two vectors of bf16 elements, widened: each goes to the upper half of its lane.
  HWY_INLINE void load_halves(const std::uint16_t* source, FloatVector& first, FloatVector& second) const {
    const auto words = hn::LoadU(WordTag(), source);
    first = wide(words, wide_[0]);
    second = wide(words, wide_[1]);
  }

  // The upper words of the lanes of two vectors side by side, that of `first` below.
  HWY_INLINE WordVector upper_words(BitVector first, BitVector second) const {
    return WordVector{_mm512_mask_shuffle_epi8(second.raw, 0x3333333333333333u, first.raw, upper_words_.raw)};
  }

  // The upper halves of two vectors, in order.
  HWY_INLINE WordVector upper_halves(BitVector first, BitVector second) const {
    return in_order(upper_words(first, second));
  }

  // The same, rounded to the nearest, ties to even: see round_upper().
  HWY_INLINE WordVector nearest_halves(BitVector first, BitVector second) const {
    const auto upper = upper_words(first, second);
    const auto lower = _mm512_mask_shuffle_epi8(first.raw, 0xCCCCCCCCCCCCCCCCu, second.raw, lower_words_.raw);
    const auto marked = hn::OrAnd(WordVector{lower}, upper, words_of(one_));
    const auto is_more = _mm512_cmpgt_epu16_mask(marked.raw, tie_.raw);
    return in_order(WordVector{_mm512_mask_sub_epi16(upper.raw, is_more, upper.raw, all_.raw)});
  }

  // The upper bytes of the words of two vectors side by side, that of `first` below.
  HWY_INLINE ByteVector upper_bytes(WordVector first, WordVector second) const {
    return ByteVector{_mm512_mask_shuffle_epi8(second.raw, kFirst, first.raw, upper_bytes_.raw)};
  }

  // The same with bits 4 to 11 of each word.
  HWY_INLINE ByteVector codes(WordVector first, WordVector second) const {
#if HWY_TARGET <= HWY_AVX3_DL
    const auto codes = _mm512_multishift_epi64_epi8(code_.raw, second.raw);
    return ByteVector{_mm512_mask_multishift_epi64_epi8(codes, kFirst, code_.raw, first.raw)};
#else
    return upper_bytes(hn::Mul(first, words_of(code_)), hn::Mul(second, words_of(code_)));
#endif
  }

  // The bytes with the uppermost bits of `sign`.
  HWY_INLINE ByteVector with_sign(ByteVector bytes, ByteVector sign) const {
    return hn::IfVecThenElse(hn::BitCast(ByteTag(), sign_), sign, bytes);  // Bit by bit on this target.
  }

  // See bytes_in_order().
  HWY_INLINE ByteVector in_order(ByteVector bytes) const {
#if HWY_TARGET <= HWY_AVX3_DL
    return ByteVector{_mm512_permutexvar_epi8(bytes_in_order_.raw, bytes.raw)};
#else
    return bytes_in_order(bytes);
#endif
  }

 private:
  static constexpr std::uint64_t kFirst = 0x5555555555555555u;

  // Bytes are rearranged by one operation and words by two, but bytes only on newer processors.
#if HWY_TARGET <= HWY_AVX3_DL
  static HWY_INLINE BitVector index_of_word(BitVector word) {
    return hn::Add(hn::Mul(word, set_bits(0x0202)), set_bits(0x0100));
  }
  static HWY_INLINE FloatVector wide(WordVector words, BitVector index) {
    constexpr std::uint64_t kUpper = 0xCCCCCCCCCCCCCCCCu;
    return from_bits(BitVector{_mm512_maskz_permutexvar_epi8(kUpper, index.raw, words.raw)});
  }
  HWY_INLINE WordVector in_order(WordVector words) const {
    return WordVector{_mm512_permutexvar_epi8(words_in_order_.raw, words.raw)};
  }

  BitVector bytes_in_order_;
#else
  static HWY_INLINE BitVector index_of_word(BitVector word) {
    return word;
  }
  static HWY_INLINE FloatVector wide(WordVector words, BitVector index) {
    constexpr std::uint32_t kUpper = 0xAAAAAAAAu;
    return from_bits(BitVector{_mm512_maskz_permutexvar_epi16(kUpper, index.raw, words.raw)});
  }
  HWY_INLINE WordVector in_order(WordVector words) const {
    return WordVector{_mm512_permutexvar_epi16(words_in_order_.raw, words.raw)};
  }
#endif

  BitVector wide_[2], words_in_order_, upper_words_, lower_words_, upper_bytes_, code_, one_, tie_, all_,
      sign_;
};
#else
class Words {
 public:
  HWY_INLINE void load_halves(const std::uint16_t* source, FloatVector& first, FloatVector& second) const {
    first = Half::load(FloatTag(), source);
    second = Half::load(FloatTag(), source + kLanes);
  }
  HWY_INLINE WordVector upper_words(BitVector first, BitVector second) const {
    return hn::OddEven(words_of(second), words_of(hn::ShiftRight<16>(first)));
  }
  HWY_INLINE WordVector upper_halves(BitVector first, BitVector second) const {
    return hn::ConcatOdd(WordTag(), words_of(second), words_of(first));
  }
  HWY_INLINE WordVector nearest_halves(BitVector first, BitVector second) const {
    return upper_halves(round_upper<16>(BitTag(), first), round_upper<16>(BitTag(), second));
  }
  HWY_INLINE ByteVector upper_bytes(WordVector first, WordVector second) const {
    const ByteTag d;
    return hn::OddEven(hn::BitCast(d, second), hn::BitCast(d, hn::ShiftRight<8>(first)));
  }
  HWY_INLINE ByteVector codes(WordVector first, WordVector second) const {
    const ByteTag d;
    return hn::OddEven(hn::BitCast(d, hn::ShiftLeft<4>(second)), hn::BitCast(d, hn::ShiftRight<4>(first)));
  }
  HWY_INLINE ByteVector with_sign(ByteVector bytes, ByteVector sign) const {
    return hn::OrAnd(bytes, sign, set_bytes(0x80));
  }
  HWY_INLINE ByteVector in_order(ByteVector bytes) const { return bytes_in_order(bytes); }
};
#endif

// The vectors of a group from memory, widened.
template <DataType type>
HWY_INLINE void load_group(const Words& words, const Storage<type>* source,
                           FloatVector (&values)[kGroupVectors]) {
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < kGroupVectors; ++k) {
    if constexpr (type != DataType::kBfloat16) {
      values[k] = VectorElement<type>::load(FloatTag(), source + k * kLanes);
    } else if (k % 2 == 0) {
      words.load_halves(source + k * kLanes, values[k], values[k + 1]);
    }
  }
}

// The low-precision parameter.
//
// A device reads it next, so it is written past the caches: no line of it is read to be overwritten, and none
// of the others is driven out. 5 to 8 % of a whole step. Not where it takes the place of its gradient, whose
// lines are there already (5 % slower), and only where each vector is aligned, as the instruction demands.
template <DataType type>
class ParameterWriter {
 public:
  ParameterWriter(const AdamWArguments& a, std::size_t begin)
      : parameter_(static_cast<Storage<type>*>(a.parameter)),
        streams_(a.parameter != a.gradient &&
                 (reinterpret_cast<std::uintptr_t>(a.parameter) + begin * sizeof(Storage<type>)) %
                         sizeof(FloatVector) ==
                     0) {}
  HWY_INLINE void write(const Words& words, const FloatVector (&p)[kGroupVectors], std::size_t i) const {
    FOREBAY_UNROLL
    for (std::size_t k = 0; k < kGroupVectors; ++k) {
      if constexpr (type != DataType::kBfloat16) {
        write(VectorElement<type>::rounded(FloatTag(), p[k]), hn::Rebind<Storage<type>, FloatTag>(),
              parameter_ + i + k * kLanes);
      } else if (k % 2 == 0) {
        write(words.nearest_halves(bits_of(p[k]), bits_of(p[k + 1])), WordTag(), parameter_ + i + k * kLanes);
      }
    }
  }

 private:
  template <class D>
  HWY_INLINE void write(hn::Vec<D> values, D d, Storage<type>* target) const {
    if (streams_) {
      hn::Stream(values, d, target);
    } else {
      hn::StoreU(values, d, target);
    }
  }

  Storage<type>* parameter_;
  bool streams_;
};

void load_bfloat16(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const FloatTag d;
  const auto* kept_m = static_cast<const std::uint16_t*>(moments.m);
  const auto* kept_v = static_cast<const std::uint16_t*>(moments.v);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    hn::StoreU(canonical_vector(Half::load(d, kept_m + i)), d, m + (i - begin));
    hn::StoreU(canonical_vector(Half::load(d, kept_v + i)), d, v + (i - begin));
  }
}

// Adds random bits to m and v, which round their upper halves. Both are canonical, and the canonical NaN's
// upper half does not change: its lower half is zero, so nothing carries.
template <bool dithered>
HWY_INLINE void round_halves(const HalfDither& dither, BitVector& m, BitVector& v) {
  if constexpr (dithered) {
    const auto random = dither(m, v);
    m = hn::Add(m, random.m);
    v = hn::Add(v, random.v);
  }
}

// The upper halves that are kept of vectors after round_halves().
template <bool dithered>
HWY_INLINE WordVector kept_halves(const Words& words, BitVector first, BitVector second) {
  return dithered ? words.upper_halves(first, second) : words.nearest_halves(first, second);
}

template <bool dithered>
void store_bfloat16(const float* m, const float* v, std::size_t begin, std::size_t end,
                    const Moments& moments, Rounding rounding) {
  const FloatTag d;
  auto* kept_m = static_cast<std::uint16_t*>(moments.m);
  auto* kept_v = static_cast<std::uint16_t*>(moments.v);
  const Words words;
  const HalfDither dither(rounding.seed);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    auto new_m = bits_of(canonical_vector(hn::LoadU(d, m + (i - begin))));
    auto new_v = bits_of(canonical_vector(hn::LoadU(d, v + (i - begin))));
    round_halves<dithered>(dither, new_m, new_v);
    const auto halves = kept_halves<dithered>(words, new_m, new_v);
    hn::StoreU(hn::LowerHalf(HalfTag(), halves), HalfTag(), kept_m + i);
    hn::StoreU(hn::UpperHalf(HalfTag(), halves), HalfTag(), kept_v + i);
  }
}

// --- groups ---

// m and v as they are kept in kFloat32. `new_values` gets those of vector k while the roots of others are
// computed, and `store` comes last.
struct KeptFloat32 {
  KeptFloat32(const Moments& moments, Rounding)
      : m(static_cast<float*>(moments.m)), v(static_cast<float*>(moments.v)) {}
  HWY_INLINE void load(const Words& words, std::size_t i, FloatVector (&old_m)[kGroupVectors],
                       FloatVector (&old_v)[kGroupVectors]) const {
    load_group<DataType::kFloat32>(words, m + i, old_m);
    load_group<DataType::kFloat32>(words, v + i, old_v);
  }
  HWY_INLINE void new_values(std::size_t k, FloatVector m_of_k, FloatVector v_of_k) {
    new_m[k] = m_of_k;
    new_v[k] = v_of_k;
  }
  HWY_INLINE void store(const Words&, std::size_t i) const {
    FOREBAY_UNROLL
    for (std::size_t k = 0; k < kGroupVectors; ++k) {
      hn::StoreU(new_m[k], FloatTag(), m + i + k * kLanes);
      hn::StoreU(new_v[k], FloatTag(), v + i + k * kLanes);
    }
  }
  float *m, *v;
  FloatVector new_m[kGroupVectors], new_v[kGroupVectors];
};

// And in kBfloat16.
template <bool dithered>
struct KeptBfloat16 {
  KeptBfloat16(const Moments& moments, Rounding rounding)
      : m(static_cast<std::uint16_t*>(moments.m)),
        v(static_cast<std::uint16_t*>(moments.v)),
        dither(rounding.seed) {}
  HWY_INLINE void load(const Words& words, std::size_t i, FloatVector (&old_m)[kGroupVectors],
                       FloatVector (&old_v)[kGroupVectors]) const {
    load_group<DataType::kBfloat16>(words, m + i, old_m);
    load_group<DataType::kBfloat16>(words, v + i, old_v);
  }
  HWY_INLINE void new_values(std::size_t k, FloatVector m_of_k, FloatVector v_of_k) {
    new_m[k] = bits_of(m_of_k);
    new_v[k] = bits_of(v_of_k);
    round_halves<dithered>(dither, new_m[k], new_v[k]);
  }
  HWY_INLINE void store(const Words& words, std::size_t i) const {
    FOREBAY_UNROLL
    for (std::size_t k = 0; k < kGroupVectors; k += 2) {
      hn::StoreU(kept_halves<dithered>(words, new_m[k], new_m[k + 1]), WordTag(), m + i + k * kLanes);
      hn::StoreU(kept_halves<dithered>(words, new_v[k], new_v[k + 1]), WordTag(), v + i + k * kLanes);
    }
  }
  std::uint16_t *m, *v;
  HalfDither dither;
  BitVector new_m[kGroupVectors], new_v[kGroupVectors];
};

// The update of a group where all is finite. False, and nothing is stored, where a result is a NaN: one in m
// or v reaches p, and so does an infinite root.
template <DataType gradient_type, DataType parameter_type, bool has_parameter, class Kept>
HWY_INLINE bool update_group(const AdamWVectors& c, const Words& words, const AdamWArguments& a,
                             std::size_t start, Kept& kept,
                             const ParameterWriter<parameter_type>& parameter) {
  const FloatTag d;
  FloatVector g[kGroupVectors], m[kGroupVectors], v[kGroupVectors], p[kGroupVectors];
  load_group<gradient_type>(words, static_cast<const Storage<gradient_type>*>(a.gradient) + start, g);
  kept.load(words, start, m, v);
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < kGroupVectors; ++k) {
    adamw_moments(c, g[k], m[k], v[k]);
    p[k] = hn::Sqrt(v[k]);
    kept.new_values(k, m[k], v[k]);
  }
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < kGroupVectors; ++k)
    p[k] = hn::Div(m[k], hn::Add(divide_finite_by_s2(c, p[k]), c.eps));
  float* const master = a.master + start;
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < kGroupVectors; ++k)
    p[k] = adamw_parameter(c, p[k], hn::LoadU(d, master + k * kLanes));
  static_assert(kGroupVectors == 4);
  const auto sum = hn::Add(hn::Add(p[0], p[1]), hn::Add(p[2], p[3]));
  if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(sum)))) return false;
  kept.store(words, start);
  FOREBAY_UNROLL
  for (std::size_t k = 0; k < kGroupVectors; ++k) hn::StoreU(p[k], d, master + k * kLanes);
  if constexpr (has_parameter) parameter.write(words, p, start);
  return true;
}

// The update of any range and any values.
HWY_NOINLINE void update_rest(const HostAdamArguments& a, std::size_t begin, std::size_t end,
                              Rounding rounding) {
  update_in_blocks(a, begin, end, rounding, *moment_kernels(), simd_kernels());
}

// Updates whole turns until one has a group of other values, and returns that group's first element. Without
// a call in its loop, the constants stay in registers.
template <class Kept, DataType gradient_type, DataType parameter_type, bool has_parameter>
HWY_NOINLINE std::size_t update_turns(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                                      Rounding rounding) {
  const AdamWArguments& a = arguments.update;
  const AdamWVectors c(constants_of(a));
  const Words words;
  Kept kept(arguments.moments, rounding);
  const ParameterWriter<parameter_type> parameter(a, begin);
  for (std::size_t i = begin; i < end; i += kTurnCount) {
    prefetch_turn(static_cast<const Storage<gradient_type>*>(a.gradient) + i);
    prefetch_turn(a.master + i);
    prefetch_turn(kept.m + i);
    prefetch_turn(kept.v + i);
    for (std::size_t at = i; at < i + kTurnCount; at += kGroupCount) {
      if (!update_group<gradient_type, parameter_type, has_parameter>(c, words, a, at, kept, parameter))
        return at;
    }
  }
  return end;
}

// Updates whole turns.
template <class Kept, DataType gradient_type, DataType parameter_type, bool has_parameter>
void update_groups(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                   Rounding rounding) {
  for (std::size_t i = begin; i < end;) {
    i = update_turns<Kept, gradient_type, parameter_type, has_parameter>(arguments, i, end, rounding);
    if (i == end) return;
    const std::size_t next = begin + ((i - begin) / kTurnCount + 1) * kTurnCount;
    update_rest(arguments, i, next, rounding);
    i = next;
  }
}

// --- block8 ---

using definitions::kMomentExponentNan;
constexpr int kShift = static_cast<int>(definitions::kMomentShift);

#undef FOREBAY_CODES_TO_HALVES
#if HWY_ARCH_X86 && !defined(HWY_DISABLE_F16C)
#define FOREBAY_CODES_TO_HALVES 1
#endif

// A block of codes that is read, a group after the other: m in units of `m_scale`, which is a power of two,
// and v. NaNs have any payload.
class BlockReader {
 public:
  HWY_INLINE BlockReader(const Moments& moments, std::size_t start)
      : m_codes_(static_cast<const std::uint8_t*>(moments.m) + start),
        v_codes_(static_cast<const std::uint8_t*>(moments.v) + start),
        m_exponent_(definitions::moment_exponent_read(moments.m_exponents[start / kMomentBlockCount])),
        v_exponent_(definitions::moment_exponent_read(moments.v_exponents[start / kMomentBlockCount])) {}

  HWY_INLINE FloatVector m_scale() const {
#ifdef FOREBAY_CODES_TO_HALVES
    const std::uint32_t scale = m_exponent_ << 23;
#else
    const std::uint32_t scale = 0x3F800000;
#endif
    return from_bits(set_bits(m_exponent_ == kMomentExponentNan ? kCanonicalNanFloat32 : scale));
  }

  HWY_INLINE bool has_nan_m() const {
    return m_exponent_ == kMomentExponentNan;
  }
  // Then all of v is NaN, and load() gives other values.
  HWY_INLINE bool has_nan_v() const {
    return v_exponent_ == kMomentExponentNan;
  }

  // The group from element i of the block on.
  HWY_INLINE void load(const Words& words, std::size_t i, FloatVector (&m)[kGroupVectors],
                       FloatVector (&v)[kGroupVectors]) {
    read_m(m_codes_ + i);
    read_v(v_codes_ + i);
    load_group<kTypeOfM>(words, m_, m);
    load_group<DataType::kBfloat16>(words, v_, v);
  }

 private:
#ifdef FOREBAY_CODES_TO_HALVES
  static constexpr DataType kTypeOfM = DataType::kFloat16;

  // A code has the digits of an fp16 number: the value is this number times 2^E. They are shifted by a
  // product: only one execution port of an AVX-512 processor shifts.
  HWY_INLINE void read_m(const std::uint8_t* codes) {
    const hn::RebindToSigned<WordTag> d;
    const hn::Rebind<std::int8_t, WordTag> narrow;
    FOREBAY_UNROLL
    for (std::size_t i = 0; i < kGroupCount; i += hn::Lanes(d)) {
      const auto code = hn::PromoteTo(d, hn::LoadU(narrow, reinterpret_cast<const std::int8_t*>(codes) + i));
      const auto digits = hn::Mul(hn::BitCast(WordTag(), code), m_factor_);
      hn::Store(hn::And(digits, m_mask_), WordTag(), m_ + i);
    }
  }
#else
  static constexpr DataType kTypeOfM = DataType::kFloat32;

  HWY_INLINE void read_m(const std::uint8_t* codes) {
    const hn::Rebind<std::uint8_t, FloatTag> narrow;
    const hn::RebindToSigned<FloatTag> di;
    const auto unit = from_bits(set_bits((m_exponent_ - 17u) << 23));
    const auto base = set_bits((m_exponent_ - 15u) << 23);
    for (std::size_t i = 0; i < kGroupCount; i += kLanes) {
      const auto code = hn::PromoteTo(BitTag(), hn::LoadU(narrow, codes + i));
      const auto magnitude = hn::And(code, set_bits(0x7F));
      const auto normal = hn::Add(hn::ShiftLeft<kShift>(magnitude), base);
      const auto subnormal = hn::Mul(hn::ConvertTo(FloatTag(), hn::BitCast(di, magnitude)), unit);
      const auto value = hn::IfThenElse(hn::Lt(magnitude, set_bits(8)), bits_of(subnormal), normal);
      const auto sign = hn::ShiftLeft<24>(hn::And(code, set_bits(0x80)));
      hn::Store(from_bits(hn::Or(value, sign)), FloatTag(), m_ + i);
    }
  }
#endif

  // The values are bf16 numbers.
  HWY_INLINE void read_v(const std::uint8_t* codes) {
    const WordTag d;
    const hn::Rebind<std::uint8_t, WordTag> narrow;
    FOREBAY_UNROLL
    for (std::size_t i = 0; i < kGroupCount; i += hn::Lanes(d)) {
      const auto code = hn::PromoteTo(d, hn::LoadU(narrow, codes + i));
      const auto value = hn::Add(hn::Mul(code, v_factor_), v_base_);
      hn::Store(hn::IfThenElseZero(hn::Ne(code, hn::Zero(d)), value), d, v_ + i);
    }
  }

  const std::uint8_t *m_codes_, *v_codes_;
  std::uint32_t m_exponent_, v_exponent_;
  WordVector m_factor_ = hidden(set_words(1u << 7)), m_mask_ = hidden(set_words(0xBF80));
  WordVector v_factor_ = hidden(set_words(1u << 4)), v_base_ = set_words((v_exponent_ - 31u) << 7);
  HWY_ALIGN Storage<kTypeOfM> m_[kGroupCount];
  HWY_ALIGN std::uint16_t v_[kGroupCount];
};

void load_block8(const Moments& moments, std::size_t begin, std::size_t end, float* m, float* v) {
  const FloatTag d;
  const Words words;
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    BlockReader reader(moments, start);
    for (std::size_t i = 0; i < kMomentBlockCount; i += kGroupCount) {
      FloatVector group_m[kGroupVectors], group_v[kGroupVectors];
      reader.load(words, i, group_m, group_v);
      for (std::size_t k = 0; k < kGroupVectors; ++k) {
        const std::size_t at = start - begin + i + k * kLanes;
        hn::StoreU(canonical_vector(hn::Mul(group_m[k], reader.m_scale())), d, m + at);
        hn::StoreU(group_v[k], d, v + at);
      }
    }
    if (reader.has_nan_v())
      std::fill_n(v + (start - begin), kMomentBlockCount, float_from_bits(kCanonicalNanFloat32));
  }
}

// The greatest and the least m and v of a block, without signs.
struct BlockRange {
  // Not implicit: that one would be compiled for another instruction set.
  HWY_INLINE BlockRange()
      : greatest_m(hn::Zero(FloatTag())),
        greatest_v(greatest_m),
        least_m(hn::Inf(FloatTag())),
        least_v(least_m) {}
  // m is no NaN, and v is not negative.
  HWY_INLINE void add(FloatVector m, FloatVector v) {
    greatest_m = greater_magnitude(greatest_m, m);
    greatest_v = from_bits(hn::Max(bits_of(greatest_v), bits_of(v)));  // A NaN stays.
    least_m = smaller_magnitude(least_m, m);
    least_v = hn::Min(least_v, v);
  }

  FloatVector greatest_m, greatest_v, least_m, least_v;
};

// New m and v of a block, canonical, in the first cache level.
struct NewBlock {
  HWY_INLINE NewBlock() {}
  // The range of any values. They are taken as ones of which some are zero.
  void measure() {
    const FloatTag d;
    auto of_m = hn::Zero(BitTag()), of_v = of_m;
    for (std::size_t i = 0; i < kMomentBlockCount; i += kLanes) {
      of_m = hn::Max(of_m, bits_of(hn::Abs(hn::Load(d, m + i))));
      of_v = hn::Max(of_v, bits_of(hn::Abs(hn::Load(d, v + i))));
    }
    range.greatest_m = from_bits(of_m);
    range.greatest_v = from_bits(of_v);
    range.least_m = range.least_v = hn::Zero(d);
  }

  HWY_ALIGN float m[kMomentBlockCount] = {};
  HWY_ALIGN float v[kMomentBlockCount] = {};
  BlockRange range;
};

HWY_INLINE std::uint32_t exponent_of(FloatVector greatest) {
  return definitions::moment_exponent(hn::GetLane(hn::MaxOfLanes(BitTag(), bits_of(greatest))));
}

// From the values of a block to its codes: `round` the vectors of a group, `write` it at element i of the
// block, and in the end `end`.
template <bool dithered>
class BlockEncoder {
 public:
  HWY_INLINE BlockEncoder(const NewBlock& block, const Moments& moments, std::size_t start,
                          const CodeDither& dither)
      : m_codes_(static_cast<std::uint8_t*>(moments.m) + start),
        v_codes_(static_cast<std::uint8_t*>(moments.v) + start),
        m_exponent_(exponent_of(block.range.greatest_m)),
        v_exponent_(exponent_of(block.range.greatest_v)),
        dither_(dither) {
    half_least_normal_ = from_bits(set_bits((m_exponent_ - 15u) << 23));
    const auto least_normal = from_bits(set_bits((m_exponent_ - 14u) << 23));
    m_base_ = set_bytes((m_exponent_ - 15u) << 3);
    v_base_ = set_bytes((v_exponent_ - 31u) << 3);
    v_least_ = set_bits(((v_exponent_ - 31u) << 23) + (1u << kShift));
    has_small_m_ = !hn::AllTrue(FloatTag(), hn::Ge(block.range.least_m, least_normal));
    has_small_v_ = !hn::AllTrue(FloatTag(), hn::Ge(block.range.least_v, from_bits(v_least_)));
  }

  // Then the bits from kShift on are the code and the base that is taken off, and bit 31 is the sign.
  HWY_INLINE void round(FloatVector m, FloatVector v, BitVector& kept_m, BitVector& kept_v) const {
    kept_m = bits_of(m), kept_v = bits_of(v);
    if (HWY_UNLIKELY(has_small_m_)) kept_m = digits_of(m);
    if constexpr (dithered) {
      const auto random = dither_(bits_of(m), bits_of(v));
      kept_m = hn::Add(kept_m, random.m);
      kept_v = hn::Add(kept_v, random.v);
    } else {
      kept_m = round_upper<kShift>(BitTag(), kept_m);
      kept_v = round_upper<kShift>(BitTag(), kept_v);
    }
    if (HWY_UNLIKELY(has_small_v_)) {
      kept_v = hn::Max(hn::And(kept_v, set_bits(0x7FFFFFFF)), v_least_);
      const auto zero = hn::Sub(v_least_, set_bits(1u << kShift));
      kept_v = hn::IfThenElse(hn::Eq(bits_of(hn::Abs(v)), hn::Zero(BitTag())), zero, kept_v);
    }
  }

  HWY_INLINE void write(const Words& words, const BitVector (&kept_m)[kGroupVectors],
                        const BitVector (&kept_v)[kGroupVectors], std::size_t i) const {
    const ByteTag d;
    const auto m0 = words.upper_words(kept_m[0], kept_m[2]), m1 = words.upper_words(kept_m[1], kept_m[3]);
    const auto v0 = words.upper_words(kept_v[0], kept_v[2]), v1 = words.upper_words(kept_v[1], kept_v[3]);
    const auto m = words.with_sign(hn::Sub(words.codes(m0, m1), m_base_), words.upper_bytes(m0, m1));
    hn::StoreU(words.in_order(m), d, m_codes_ + i);
    hn::StoreU(words.in_order(hn::Sub(words.codes(v0, v1), v_base_)), d, v_codes_ + i);
  }

  // Writes the exponents. A block that is NaN has codes of 0.
  HWY_INLINE void end(const Moments& moments, std::size_t start) const {
    moments.m_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(m_exponent_);
    moments.v_exponents[start / kMomentBlockCount] = static_cast<std::uint8_t>(v_exponent_);
    if (HWY_UNLIKELY(m_exponent_ == kMomentExponentNan))
      std::fill_n(m_codes_, kMomentBlockCount, std::uint8_t{0});
    if (HWY_UNLIKELY(v_exponent_ == kMomentExponentNan))
      std::fill_n(v_codes_, kMomentBlockCount, std::uint8_t{0});
  }

 private:
  // Below the least normal number the addition rounds m to its digits; above, its result is smaller than m.
  HWY_INLINE BitVector digits_of(FloatVector m) const {
    const auto half = hn::Set(FloatTag(), 0.5f);
    const auto sign = set_bits(0x80000000);
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
    const auto least = from_bits(hn::OrAnd(bits_of(half_least_normal_), bits_of(m), sign));
    // The greater magnitude with the sign of m.
    return bits_of(FloatVector{_mm512_range_ps(m.raw, hn::MulAdd(m, half, least).raw, 0x3)});
#else
    const auto magnitude = hn::Abs(m);
    const auto digits = hn::Max(magnitude, hn::MulAdd(magnitude, half, half_least_normal_));
    return hn::OrAnd(bits_of(digits), bits_of(m), sign);
#endif
  }

  std::uint8_t *m_codes_, *v_codes_;
  std::uint32_t m_exponent_, v_exponent_;
  bool has_small_m_, has_small_v_;
  CodeDither dither_;
  BitVector v_least_;
  FloatVector half_least_normal_;
  ByteVector m_base_, v_base_;
};

template <bool dithered>
void store_block8(const float* m, const float* v, std::size_t begin, std::size_t end, const Moments& moments,
                  Rounding rounding) {
  const FloatTag d;
  const Words words;
  const CodeDither dither(rounding.seed);
  NewBlock block;
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    for (std::size_t i = 0; i < kMomentBlockCount; i += hn::Lanes(d)) {
      const std::size_t at = start - begin + i;
      hn::Store(canonical_vector(hn::LoadU(d, m + at)), d, block.m + i);
      hn::Store(canonical_vector(hn::LoadU(d, v + at)), d, block.v + i);
    }
    block.measure();
    BlockEncoder<dithered> encoder(block, moments, start, dither);
    for (std::size_t i = 0; i < kMomentBlockCount; i += kGroupCount) {
      BitVector kept_m[kGroupVectors], kept_v[kGroupVectors];
      FOREBAY_UNROLL
      for (std::size_t k = 0; k < kGroupVectors; ++k) {
        const std::size_t at = i + k * kLanes;
        encoder.round(hn::Load(d, block.m + at), hn::Load(d, block.v + at), kept_m[k], kept_v[k]);
      }
      encoder.write(words, kept_m, kept_v, i);
    }
    encoder.end(moments, start);
  }
}

// The constants of an update, made once.
struct BlockConstants {
  BlockConstants(const AdamWArguments& a, Rounding rounding)
      : update(constants_of(a)), dither(rounding.seed) {}
  AdamWVectors update;
  Words words;
  CodeDither dither;
};

// A block is updated in two loops, because its exponents come from all of its m and v. The root occupies the
// divider in the first one and the quotient in the second, so both have other work to do meanwhile.

// The first: new m and v, and the roots of v. False where one of m and v is infinite or a NaN. With finite
// codes and constants m is a NaN only where its gradient is infinite or a NaN, and then v is one of these
// too.
template <DataType gradient_type>
HWY_NOINLINE bool compute_moments(const AdamWArguments& a, const BlockConstants& constants,
                                  const Moments& moments, std::size_t start, NewBlock& block,
                                  float* HWY_RESTRICT roots) {
  const FloatTag d;
  AdamWVectors c = constants.update;  // Copies, which no store can change.
  const Words words = constants.words;
  const auto* const gradient = static_cast<const Storage<gradient_type>*>(a.gradient) + start;
  const auto* const m_codes = static_cast<const std::uint8_t*>(moments.m) + start;
  const auto* const v_codes = static_cast<const std::uint8_t*>(moments.v) + start;
  BlockReader reader(moments, start);
  if (HWY_UNLIKELY(reader.has_nan_m() || reader.has_nan_v())) return false;
  // The scale of m goes into beta1, which is exact: see can_update_block8().
  c.beta1 = hn::Mul(c.beta1, reader.m_scale());
  BlockRange range;
  for (std::size_t i = 0; i < kMomentBlockCount; i += kGroupCount) {
    if (kGroupCount == kTurnCount || i % kTurnCount == 0) {
      // The second loop fetches the master, so that neither has more lines on their way than a processor
      // follows: 4 to 8 % faster, dithered, on a Xeon with AVX-512 than all of it here, 512 bytes ahead.
      prefetch_turn(gradient + i, 4 * kMomentBlockCount);
      prefetch_turn(m_codes + i, 4 * kMomentBlockCount);
      prefetch_turn(v_codes + i, 4 * kMomentBlockCount);
    }
    FloatVector g[kGroupVectors], m[kGroupVectors], v[kGroupVectors];
    load_group<gradient_type>(words, gradient + i, g);
    reader.load(words, i, m, v);
    FOREBAY_UNROLL
    for (std::size_t k = 0; k < kGroupVectors; ++k) {
      const std::size_t at = i + k * kLanes;
      adamw_moments(c, g[k], m[k], v[k]);
      range.add(m[k], v[k]);
      hn::Store(m[k], d, block.m + at);
      hn::Store(v[k], d, block.v + at);
      hn::Store(hn::Sqrt(v[k]), d, roots + at);
    }
  }
  block.range = range;
  return hn::AllTrue(d, hn::And(hn::IsFinite(range.greatest_m), hn::IsFinite(range.greatest_v)));
}

// The second: the master, the parameter and the codes.
template <DataType parameter_type, bool has_parameter, bool dithered>
HWY_NOINLINE void write_block(const AdamWArguments& a, const BlockConstants& constants, std::size_t start,
                              const NewBlock& block, const float* HWY_RESTRICT roots,
                              const BlockEncoder<dithered>& block_encoder,
                              const ParameterWriter<parameter_type>& writer) {
  const FloatTag d;
  const Words words = constants.words;
  const AdamWVectors c = constants.update;
  const ParameterWriter<parameter_type> parameter = writer;
  const BlockEncoder<dithered> encoder = block_encoder;
  float* const master = a.master + start;
  auto sum = hn::Set(d, 1.0f);  // NaN after any parameter that is.
  for (std::size_t i = 0; i < kMomentBlockCount; i += kGroupCount) {
    FloatVector p[kGroupVectors];
    BitVector kept_m[kGroupVectors], kept_v[kGroupVectors];
    FOREBAY_UNROLL
    for (std::size_t k = 0; k < kGroupVectors; ++k) {
      const std::size_t at = i + k * kLanes;
      if (kLanes == kLineFloats || at % kLineFloats == 0) hwy::Prefetch(master + 2 * kMomentBlockCount + at);
      const auto m = hn::Load(d, block.m + at);
      const auto root = divide_finite_by_s2(c, hn::Load(d, roots + at));
      p[k] = adamw_parameter(c, hn::Div(m, hn::Add(root, c.eps)), hn::LoadU(d, master + at));
      hn::StoreU(p[k], d, master + at);
      encoder.round(m, hn::Load(d, block.v + at), kept_m[k], kept_v[k]);
    }
    encoder.write(words, kept_m, kept_v, i);
    if constexpr (has_parameter) parameter.write(words, p, start + i);
    sum = hn::MulAdd(p[0], p[1], hn::MulAdd(p[2], p[3], sum));
  }
  if (HWY_LIKELY(hn::AllFalse(d, hn::IsNaN(sum)))) return;
  for (std::size_t i = 0; i < kMomentBlockCount; i += kGroupCount) {
    FloatVector p[kGroupVectors];
    for (std::size_t k = 0; k < kGroupVectors; ++k) {
      p[k] = canonical_vector(hn::LoadU(d, master + i + k * kLanes));
      hn::StoreU(p[k], d, master + i + k * kLanes);
    }
    if constexpr (has_parameter) parameter.write(words, p, start + i);
  }
}

template <DataType gradient_type, DataType parameter_type, bool has_parameter, bool dithered>
void update_block8(const HostAdamArguments& arguments, std::size_t begin, std::size_t end,
                   Rounding rounding) {
  const AdamWArguments& a = arguments.update;
  const Moments& moments = arguments.moments;
  const BlockConstants constants(a, rounding);
  const ParameterWriter<parameter_type> parameter(a, begin);
  NewBlock block;
  HWY_ALIGN float roots[kMomentBlockCount];
  for (std::size_t start = begin; start < end; start += kMomentBlockCount) {
    if (compute_moments<gradient_type>(a, constants, moments, start, block, roots)) {
      const BlockEncoder<dithered> encoder(block, moments, start, constants.dither);
      write_block<parameter_type, has_parameter>(a, constants, start, block, roots, encoder, parameter);
      encoder.end(moments, start);
    } else {
      update_rest(arguments, start, start + kMomentBlockCount, rounding);
    }
  }
}

// Whether the product of beta1 and a block's scale, 2^-95 to 2^127, is exact, no new v is negative, and m is
// finite where the gradient is.
bool can_update_block8(const AdamWArguments& a) {
  return (a.beta1 == 0.0f || (a.beta1 >= 0x1p-24f && a.beta1 <= 1.0f)) && !std::signbit(a.beta2) &&
         !std::signbit(a.a2) && std::isfinite(a.a1);
}

// --- all ---

// The end of the part of [begin, end) that is whole vectors, or blocks.
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
  auto function = update_groups<KeptFloat32, gradient_type, parameter_type, has_parameter>;
  if (a.moments.format == MomentFormat::kBfloat16) {
    function = rounding.dithered
                   ? update_groups<KeptBfloat16<true>, gradient_type, parameter_type, has_parameter>
                   : update_groups<KeptBfloat16<false>, gradient_type, parameter_type, has_parameter>;
  } else if (a.moments.format == MomentFormat::kBlock8) {
    function = rounding.dithered ? update_block8<gradient_type, parameter_type, has_parameter, true>
                                 : update_block8<gradient_type, parameter_type, has_parameter, false>;
  }
  function(a, begin, end, rounding);
}

void update(const HostAdamArguments& a, std::size_t begin, std::size_t end, Rounding rounding) {
  const bool is_block8 = a.moments.format == MomentFormat::kBlock8;
  if (!has_simd_update(a.update)) return scalar_moment_kernels().update(a, begin, end, rounding);
  if (is_block8 && !can_update_block8(a.update)) return update_rest(a, begin, end, rounding);
  const std::size_t part = is_block8 ? kMomentBlockCount : kTurnCount;
  const std::size_t middle = begin + (end - begin) / part * part;
  with_type(a.update.gradient_type, [&]<DataType gradient_type>() {
    if (a.update.parameter == nullptr) {
      update_whole<gradient_type, DataType::kFloat32, false>(a, begin, middle, rounding);
      return;
    }
    with_type(a.update.parameter_type, [&]<DataType parameter_type>() {
      update_whole<gradient_type, parameter_type, true>(a, begin, middle, rounding);
    });
  });
  // Order: the parameter is visible to other threads when they learn of the end of this range.
  hwy::FlushStream();
  update_rest(a, middle, end, rounding);
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
