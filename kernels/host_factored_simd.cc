// The loops of Adafactor in SIMD, compiled once per instruction set. The values after whole vectors go to the
// scalar form. Which instruction sets take part: simd_elements.h.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include "kernels/host_factored.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host_factored_simd.cc"
#include "hwy/foreach_target.h"  // Must come before highway.h.
#include "hwy/highway.h"
#include "kernels/simd_elements.h"  // After them.

HWY_BEFORE_NAMESPACE();
namespace forebay::host_kernels {
namespace HWY_NAMESPACE {

#ifdef FOREBAY_SIMD

template <DataType type>
void scale_vectors(const Storage<type>* source, float factor, std::size_t count, float* target) {
  const FloatTag d;
  for (std::size_t i = 0; i < count; i += hn::Lanes(d))
    hn::StoreU(hn::Mul(VectorElement<type>::load(d, source + i), hn::Set(d, factor)), d, target + i);
}

void scale(const void* source, DataType type, float factor, std::size_t count, float* target) {
  const std::size_t middle = vector_end(0, count);
  with_type(type, [&]<DataType source_type>() {
    const auto* values = static_cast<const Storage<source_type>*>(source);
    scale_vectors<source_type>(values, factor, middle, target);
    scalar_factored_kernels().scale(values + middle, type, factor, count - middle, target + middle);
  });
}

using DoubleTag = hn::CappedTag<double, definitions::kNormLanes>;
constexpr std::size_t kDoubleLanes = hn::MaxLanes(DoubleTag());
constexpr std::size_t kDoubleVectors = definitions::kNormLanes / kDoubleLanes;

HWY_INLINE hn::Vec<DoubleTag> wide_vector(const float* values) {
  return hn::PromoteTo(DoubleTag(), hn::LoadU(hn::Rebind<float, DoubleTag>(), values));
}

void add_squares(const float* values, std::size_t count, double* sums) {
  const DoubleTag d;
  const std::size_t middle = count / kDoubleLanes * kDoubleLanes;
  for (std::size_t i = 0; i < middle; i += kDoubleLanes) {
    const auto wide = wide_vector(values + i);
    hn::StoreU(hn::MulAdd(wide, wide, hn::LoadU(d, sums + i)), d, sums + i);  // The square is exact.
  }
  scalar_factored_kernels().add_squares(values + middle, count - middle, sums + middle);
}

void add_to_lanes(const float* values, std::size_t count, double* lanes) {
  const DoubleTag d;
  hn::Vec<DoubleTag> sums[kDoubleVectors];
  for (std::size_t j = 0; j < kDoubleVectors; ++j) sums[j] = hn::LoadU(d, lanes + j * kDoubleLanes);
  for (std::size_t i = 0; i < count; i += definitions::kNormLanes) {
    for (std::size_t j = 0; j < kDoubleVectors; ++j) {
      const auto wide = wide_vector(values + i + j * kDoubleLanes);
      sums[j] = hn::MulAdd(wide, wide, sums[j]);
    }
  }
  for (std::size_t j = 0; j < kDoubleVectors; ++j) hn::StoreU(sums[j], d, lanes + j * kDoubleLanes);
}

void divide(float q, const float* c, std::size_t count, float* values) {
  const FloatTag d;
  const auto floor = hn::Set(d, kAdafactorEpsilon1 * kAdafactorEpsilon1);
  const std::size_t middle = vector_end(0, count);
  for (std::size_t i = 0; i < middle; i += hn::Lanes(d)) {
    const auto moment = hn::Mul(hn::Set(d, q), hn::LoadU(d, c + i));
    const auto root = hn::Sqrt(hn::IfThenElse(hn::Gt(moment, floor), moment, floor));
    hn::StoreU(hn::Div(hn::LoadU(d, values + i), root), d, values + i);
  }
  scalar_factored_kernels().divide(q, c + middle, count - middle, values + middle);
}

void move(float decay, float step, const float* u, std::size_t count, float* p) {
  const FloatTag d;
  const std::size_t middle = vector_end(0, count);
  for (std::size_t i = 0; i < middle; i += hn::Lanes(d)) {
    auto value = hn::LoadU(d, p + i);
    value = hn::MulAdd(hn::Set(d, decay), value, value);
    value = hn::MulAdd(hn::Set(d, step), hn::LoadU(d, u + i), value);
    hn::StoreU(canonical_vector(d, value), d, p + i);
  }
  scalar_factored_kernels().move(decay, step, u + middle, count - middle, p + middle);
}

const FactoredKernels* factored_kernels() {
  static const FactoredKernels kKernels = {
      hwy::TargetName(HWY_TARGET), scale, add_squares, add_to_lanes, divide, move};
  return &kKernels;
}

#else

const FactoredKernels* factored_kernels() {
  return &scalar_factored_kernels();
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace forebay::host_kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace forebay::host_kernels {

HWY_EXPORT(factored_kernels);

const FactoredKernels& simd_factored_kernels() {
  return *HWY_DYNAMIC_DISPATCH(factored_kernels)();
}

}  // namespace forebay::host_kernels
#endif
