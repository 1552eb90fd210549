// Tiles of matrix products in SIMD, compiled once per instruction set. Every element of a product is a chain
// of fused multiply-adds of its own, so neither tiles nor vectors change a bit. Which instruction sets take
// part: simd_elements.h.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include <algorithm>

#include "kernels/host_products.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host_products_simd.cc"
#include "hwy/foreach_target.h"  // Must come before highway.h.
#include "hwy/highway.h"
#include "kernels/simd_elements.h"  // After them.

HWY_BEFORE_NAMESPACE();
namespace forebay::host_kernels {
namespace HWY_NAMESPACE {

#ifdef FOREBAY_SIMD

// Steps of a chain between two loads of the same sums. Smaller: more loads. Larger: the part of B that is in
// use leaves the first cache.
constexpr std::size_t kDepth = 128;
// Sums in registers: so many rows of two vectors. More do not fit into the registers.
constexpr std::size_t kRows = HWY_MAX_BYTES >= 64 ? 12 : 6;
constexpr std::size_t kWidth = 2 * hn::MaxLanes(FloatTag());
static_assert(kTileColumns % kWidth == 0);

// Steps [begin, begin + depth) of columns [column, column + count) of B, as `depth` rows of kWidth, with
// zeros behind the columns.
void pack(const Product& p, std::size_t begin, std::size_t depth, std::size_t column, std::size_t count,
          float* panel) {
  if (count < kWidth) std::fill_n(panel, depth * kWidth, 0.0f);
  if (p.transposed) {
    for (std::size_t j = 0; j < count; ++j) {
      const float* const source = p.b + (column + j) * p.depth + begin;
      for (std::size_t t = 0; t < depth; ++t) panel[t * kWidth + j] = source[t];
    }
    return;
  }
  for (std::size_t t = 0; t < depth; ++t)
    std::copy_n(p.b + (begin + t) * p.columns + column, count, panel + t * kWidth);
}

// Goes on with the sums of `rows` rows of kWidth columns of C.
template <std::size_t rows>
HWY_INLINE void add_products(const float* a, std::size_t a_stride, const float* panel, std::size_t depth,
                             float* c, std::size_t c_stride, bool begins) {
  const FloatTag d;
  constexpr std::size_t kHalf = kWidth / 2;
  FloatVector sums[rows][2];
#pragma GCC unroll 12
  for (std::size_t r = 0; r < rows; ++r) {
    sums[r][0] = begins ? hn::Zero(d) : hn::LoadU(d, c + r * c_stride);
    sums[r][1] = begins ? hn::Zero(d) : hn::LoadU(d, c + r * c_stride + kHalf);
  }
  for (std::size_t t = 0; t < depth; ++t) {
    const auto left = hn::LoadU(d, panel + t * kWidth), right = hn::LoadU(d, panel + t * kWidth + kHalf);
#pragma GCC unroll 12
    for (std::size_t r = 0; r < rows; ++r) {
      const auto factor = hn::Set(d, a[r * a_stride + t]);
      sums[r][0] = hn::MulAdd(factor, left, sums[r][0]);
      sums[r][1] = hn::MulAdd(factor, right, sums[r][1]);
    }
  }
#pragma GCC unroll 12
  for (std::size_t r = 0; r < rows; ++r) {
    hn::StoreU(sums[r][0], d, c + r * c_stride);
    hn::StoreU(sums[r][1], d, c + r * c_stride + kHalf);
  }
}

// The same for `count` columns. Fewer than kWidth pass through a copy.
template <std::size_t rows>
void add_columns(const Product& p, std::size_t row, std::size_t begin, const float* panel, std::size_t depth,
                 std::size_t column, std::size_t count) {
  const float* const a = p.a + row * p.depth + begin;
  float* const c = p.c + row * p.columns + column;
  if (count == kWidth) return add_products<rows>(a, p.depth, panel, depth, c, p.columns, begin == 0);
  float copy[rows * kWidth] = {};
  for (std::size_t r = 0; r < rows && begin > 0; ++r)
    std::copy_n(c + r * p.columns, count, copy + r * kWidth);
  add_products<rows>(a, p.depth, panel, depth, copy, kWidth, begin == 0);
  for (std::size_t r = 0; r < rows; ++r) std::copy_n(copy + r * kWidth, count, c + r * p.columns);
}

void tile(const Product& p, std::size_t row, std::size_t row_end, std::size_t column,
          std::size_t column_end) {
  alignas(64) float panel[kDepth * kWidth];
  for (std::size_t begin = 0; begin < p.depth; begin += kDepth) {
    const std::size_t depth = std::min(kDepth, p.depth - begin);
    for (std::size_t at = column; at < column_end; at += kWidth) {
      const std::size_t count = std::min(kWidth, column_end - at);
      pack(p, begin, depth, at, count, panel);
      std::size_t r = row;
      for (; r + kRows <= row_end; r += kRows) add_columns<kRows>(p, r, begin, panel, depth, at, count);
      for (; r < row_end; ++r) add_columns<1>(p, r, begin, panel, depth, at, count);
    }
  }
}

void combine(float alpha, const float* x, float beta, const float* y, std::size_t count, float* target) {
  const FloatTag d;
  const std::size_t middle = vector_end(0, count);
  for (std::size_t i = 0; i < middle; i += hn::Lanes(d)) {
    const auto scaled = hn::Mul(hn::Set(d, beta), hn::LoadU(d, y + i));
    hn::StoreU(hn::MulAdd(hn::Set(d, alpha), hn::LoadU(d, x + i), scaled), d, target + i);
  }
  scalar_product_kernels().combine(alpha, x + middle, beta, y + middle, count - middle, target + middle);
}

const ProductKernels* product_kernels() {
  static const ProductKernels kKernels = {hwy::TargetName(HWY_TARGET), tile, combine};
  return &kKernels;
}

#else

const ProductKernels* product_kernels() {
  return &scalar_product_kernels();
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace forebay::host_kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace forebay::host_kernels {

HWY_EXPORT(product_kernels);

const ProductKernels& simd_product_kernels() {
  return *HWY_DYNAMIC_DISPATCH(product_kernels)();
}

}  // namespace forebay::host_kernels
#endif
