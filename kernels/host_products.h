// The loops of host_muon.cc: tiles of matrix products and sums of two matrices, in two forms with the same
// bits: one straight from the contract, and one in SIMD for the best instruction set of the processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::host_kernels {

// C = A B, or A B^T. All matrices are fp32 in row-major order, without gaps.
struct Product {
  const float* a = nullptr;  // rows x depth
  const float* b = nullptr;  // depth x columns; `transposed`: columns x depth
  float* c = nullptr;        // rows x columns; overlaps neither a nor b
  std::size_t rows = 0;
  std::size_t depth = 0;
  std::size_t columns = 0;
  bool transposed = false;
};

// Rows and columns of one tile at most. Smaller: B is copied more often. Larger: fewer threads can work at
// once.
inline constexpr std::size_t kTileRows = 192;
inline constexpr std::size_t kTileColumns = 64;

struct ProductKernels {
  const char* target;  // "scalar", or Highway's name of the instruction set.
  // c[i][j] = 0, then fma(a[i][t], b[t][j], c[i][j]) for t ascending: rows [row, row_end), and columns
  // [column, column_end), of which there are at most kTileColumns.
  void (*tile)(const Product& product, std::size_t row, std::size_t row_end, std::size_t column,
               std::size_t column_end);
  // target[i] = fma(alpha, x[i], beta * y[i]). The target may be x or y.
  void (*combine)(float alpha, const float* x, float beta, const float* y, std::size_t count, float* target);
};

const ProductKernels& scalar_product_kernels() noexcept;

// The loops for this processor.
const ProductKernels& simd_product_kernels();

}  // namespace forebay::host_kernels
