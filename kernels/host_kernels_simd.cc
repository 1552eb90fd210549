// The kernels in SIMD, compiled once per instruction set. Every body follows definitions.h operation by
// operation; the rest of a range after whole vectors goes to the scalar definition itself. Which
// instruction sets take part: simd_elements.h.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include "kernels/host_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host_kernels_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // Must come before highway.h.
#include "hwy/highway.h"
#include "kernels/simd_elements.h"  // After them.

HWY_BEFORE_NAMESPACE();
namespace forebay::host_kernels {
namespace HWY_NAMESPACE {

#ifdef FOREBAY_SIMD

// --- cast ---

template <DataType source_type, DataType target_type>
void cast_vectors(const CastArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const auto* source = static_cast<const Storage<source_type>*>(a.source);
  auto* target = static_cast<Storage<target_type>*>(a.target);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    round_vector<target_type>(d, VectorElement<source_type>::load(d, source + i), target + i);
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

// The number of running sums that are kept between ranks: 4 KiB of the first cache level, so that any number
// of ranks is read one after the other in long runs.
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
        round_vector<DataType::kFloat32>(d, sum, target + i);
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
      round_vector<DataType::kFloat32>(d, sum, target + i);
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
    round_vector<round_type>(d, hn::Mul(hn::LoadU(d, a.source + i), factor), target + i);
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
    round_vector<round_type>(d, hn::Mul(hn::LoadU(d, a.source + i), factor), rounded);
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
    round_vector<type>(d, sum, target + i);
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

template <Optimizer optimizer, DataType gradient_type, DataType parameter_type, bool has_parameter>
void update_vectors(const AdamWArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const AdamWVectors c(constants_of(a));
  const auto* gradient = static_cast<const Storage<gradient_type>*>(a.gradient);
  auto* parameter = static_cast<Storage<parameter_type>*>(a.parameter);
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    hwy::Prefetch(gradient + i + kPrefetchCount);
    hwy::Prefetch(a.master + i + kPrefetchCount);
    hwy::Prefetch(a.m + i + kPrefetchCount);
    auto p = hn::LoadU(d, a.master + i);
    auto m = hn::LoadU(d, a.m + i);
    const auto g = VectorElement<gradient_type>::load(d, gradient + i);
    if constexpr (has_second_moment(optimizer)) {
      hwy::Prefetch(a.v + i + kPrefetchCount);
      auto v = hn::LoadU(d, a.v + i);
      if constexpr (optimizer == Optimizer::kAdamW) {
        adamw_vector(c, g, p, m, v);
      } else {
        adam_vector(c, g, p, m, v);
      }
      round_canonical<DataType::kFloat32>(d, v, a.v + i);
    } else {
      first_moment_vector<optimizer>(c, g, p, m);
    }
    round_canonical<DataType::kFloat32>(d, p, a.master + i);
    round_canonical<DataType::kFloat32>(d, m, a.m + i);
    if constexpr (has_parameter) round_canonical<parameter_type>(d, p, parameter + i);
  }
}

void adamw(const AdamWArguments& a, std::size_t begin, std::size_t end) {
  if (!has_simd_update(a)) return scalar_kernels().adamw(a, begin, end);
  const std::size_t middle = vector_end(begin, end);
  with_optimizer(a.optimizer, [&]<Optimizer optimizer>() {
    with_type(a.gradient_type, [&]<DataType gradient_type>() {
      if (a.parameter == nullptr) {
        update_vectors<optimizer, gradient_type, DataType::kFloat32, false>(a, begin, middle);
        return;
      }
      with_type(a.parameter_type, [&]<DataType parameter_type>() {
        update_vectors<optimizer, gradient_type, parameter_type, true>(a, begin, middle);
      });
    });
  });
  scalar_kernels().adamw(a, middle, end);
}

void average(const AverageArguments& a, std::size_t begin, std::size_t end) {
  const FloatTag d;
  const std::size_t middle = vector_end(begin, end);
  const auto weight = hn::Set(d, a.weight);
  with_type(a.source_type, [&]<DataType type>() {
    const auto* source = static_cast<const Storage<type>*>(a.source);
    for (std::size_t i = begin; i < middle; i += hn::Lanes(d)) {
      const auto old = hn::LoadU(d, a.average + i);
      const auto change = hn::Sub(VectorElement<type>::load(d, source + i), old);
      round_canonical<DataType::kFloat32>(d, canonical_vector(d, hn::MulAdd(weight, change, old)),
                                          a.average + i);
    }
  });
  scalar_kernels().average(a, middle, end);
}

const RangeKernels* range_kernels() {
  static const RangeKernels kKernels = {
      hwy::TargetName(HWY_TARGET), cast, accumulate, scale, add, norm_leaves, adamw, average};
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
