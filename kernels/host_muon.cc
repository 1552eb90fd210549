#include "forebay/host_muon.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/host_factored.h"
#include "kernels/host_products.h"
#include "kernels/moments.h"

namespace forebay {
namespace host_kernels {
namespace {

void tile(const Product& p, std::size_t row, std::size_t row_end, std::size_t column,
          std::size_t column_end) {
  for (std::size_t i = row; i < row_end; ++i) {
    for (std::size_t j = column; j < column_end; ++j) {
      float sum = 0.0f;
      for (std::size_t t = 0; t < p.depth; ++t) {
        const float b = p.transposed ? p.b[j * p.depth + t] : p.b[t * p.columns + j];
        sum = definitions::product_step(sum, p.a[i * p.depth + t], b);
      }
      p.c[i * p.columns + j] = sum;
    }
  }
}

void combine(float alpha, const float* x, float beta, const float* y, std::size_t count, float* target) {
  for (std::size_t i = 0; i < count; ++i) target[i] = definitions::combine_element(alpha, x[i], beta, y[i]);
}

}  // namespace

const ProductKernels& scalar_product_kernels() noexcept {
  static constexpr ProductKernels kKernels = {"scalar", tile, combine};
  return kKernels;
}

}  // namespace host_kernels

namespace {

using host_kernels::for_each_chunk;
using host_kernels::kElementBlock;
using host_kernels::kTileColumns;
using host_kernels::kTileRows;
using host_kernels::Product;
using host_kernels::simd_factored_kernels;
using host_kernels::simd_kernels;
using host_kernels::simd_product_kernels;
using host_kernels::Values;

// Rows that one thread takes at once, and the side of the squares in which matrices are turned over. Smaller:
// more waiting, more lines of the caches in use at once. Larger: they leave the first cache.
constexpr std::size_t kRowBlock = 32;

// The places of `count` elements, `from` elements behind `gradient`, as g.
void load_gradient(const MuonGradient& gradient, std::uint64_t from, std::size_t count, float* g) {
  const auto* const values =
      static_cast<const std::byte*>(gradient.values) + from * element_bytes(gradient.type);
  simd_factored_kernels().scale(values, gradient.type, gradient.factor, count, g);
}

// values = fma(a1, g - values, values)
void approach(const float* g, float a1, std::size_t count, float* values) {
  simd_kernels().average({g, values, DataType::kFloat32, a1}, 0, count);
}

// target[j][i] = source[i][j]
void transpose(const float* source, std::size_t rows, std::size_t columns, float* target,
               const BlockRunner& runner) {
  runner.run(rows, kRowBlock, [&](std::size_t begin, std::size_t end) {
    for (std::size_t left = 0; left < columns; left += kRowBlock) {
      const std::size_t right = std::min(columns, left + kRowBlock);
      for (std::size_t i = begin; i < end; ++i) {
        for (std::size_t j = left; j < right; ++j) target[j * rows + i] = source[i * columns + j];
      }
    }
  });
}

// The lower half of a symmetric matrix, from its upper half.
void mirror(float* matrix, std::size_t side, const BlockRunner& runner) {
  runner.run(side, kRowBlock, [&](std::size_t begin, std::size_t end) {
    for (std::size_t left = 0; left < end; left += kRowBlock) {
      for (std::size_t i = begin; i < end; ++i) {
        for (std::size_t j = left; j < std::min(i, left + kRowBlock); ++j)
          matrix[i * side + j] = matrix[j * side + i];
      }
    }
  });
}

// `symmetric`: the product is, bit for bit, so one half is enough.
void multiply(const Product& p, bool symmetric, const BlockRunner& runner) {
  const std::size_t down = (p.rows + kTileRows - 1) / kTileRows;
  const std::size_t across = (p.columns + kTileColumns - 1) / kTileColumns;
  runner.run(down * across, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t number = begin; number < end; ++number) {
      const std::size_t row = number / across * kTileRows, column = number % across * kTileColumns;
      const std::size_t column_end = std::min(p.columns, column + kTileColumns);
      const std::size_t row_end = std::min({p.rows, row + kTileRows, symmetric ? column_end : p.rows});
      if (row < row_end) simd_product_kernels().tile(p, row, row_end, column, column_end);
    }
  });
  if (symmetric) mirror(p.c, p.rows, runner);
}

void combine(float alpha, const float* x, float beta, const float* y, std::size_t count, float* target,
             const BlockRunner& runner) {
  runner.run(count, kElementBlock, [&](std::size_t begin, std::size_t end) {
    simd_product_kernels().combine(alpha, x + begin, beta, y + begin, end - begin, target + begin);
  });
}

// The sum of squares: each row in lanes, which are folded, and the rows ascending.
double square_sum(std::size_t rows, std::size_t columns, const float* matrix, const BlockRunner& runner) {
  constexpr std::size_t kLanes = definitions::kNormLanes;
  std::vector<double> sums(rows);
  runner.run(rows, kRowBlock, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      double lanes[kLanes] = {};
      const std::size_t whole = columns / kLanes * kLanes;
      const float* const values = matrix + row * columns;
      simd_factored_kernels().add_to_lanes(values, whole, lanes);
      simd_factored_kernels().add_squares(values + whole, columns - whole, lanes);
      sums[row] = definitions::norm_fold(lanes, kLanes);
    }
  });
  double sum = 0.0;
  for (const double one : sums) sum = sum + one;
  return sum;
}

}  // namespace

void muon_momentum(const MuonMomentumArguments& a, const BlockRunner& runner) {
  runner.run(a.count, kElementBlock, [&](std::size_t begin, std::size_t end) {
    Values g;
    for_each_chunk(begin, end, [&](std::uint64_t at, std::size_t chunk) {
      load_gradient(a.gradient, at, chunk, g.data());
      if (a.values != a.m) std::copy_n(a.m + at, chunk, a.values + at);
      approach(g.data(), a.a1, chunk, a.values + at);
      approach(g.data(), a.a1, chunk, a.values + at);
    });
  });
}

void orthogonalise(const OrthogonaliseArguments& arguments, const BlockRunner& runner) {
  const std::uint64_t rows = arguments.rows, columns = arguments.columns;
  float *const matrix = arguments.matrix, *const scratch = arguments.scratch;
  const std::uint64_t count = rows * columns, k = std::min(rows, columns), n = std::max(rows, columns);
  const float divisor = definitions::matrix_divisor(square_sum(rows, columns, matrix, runner));
  runner.run(count, kElementBlock, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) matrix[i] = matrix[i] / divisor;
  });
  float *x = matrix, *moved = scratch;
  float *const gram = scratch + count, *const square = gram + k * k;
  if (rows > columns) {
    transpose(matrix, rows, columns, scratch, runner);
    std::swap(x, moved);
  }
  for (int step = 0; step < kMuonSteps; ++step) {
    multiply({.a = x, .b = x, .c = gram, .rows = k, .depth = n, .columns = k, .transposed = true}, true,
             runner);
    multiply({.a = gram, .b = gram, .c = square, .rows = k, .depth = k, .columns = k}, true, runner);
    combine(kMuonC, square, kMuonB, gram, k * k, gram, runner);
    multiply({.a = gram, .b = x, .c = moved, .rows = k, .depth = k, .columns = n}, false, runner);
    combine(kMuonA, x, 1.0f, moved, count, x, runner);
  }
  if (rows > columns) transpose(x, k, n, matrix, runner);
  // A sum over ranks has no negative zero.
  runner.run(count, kElementBlock, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) matrix[i] = matrix[i] + 0.0f;
  });
}

void muon_update(const MuonUpdateArguments& a, const BlockRunner& runner) {
  const std::uint64_t seed = definitions::step_seed(a.half.key, a.step_number);
  runner.run(a.count, kElementBlock, [&](std::size_t begin, std::size_t end) {
    Values g;
    for_each_chunk(begin, end, [&](std::uint64_t at, std::size_t count) {
      load_gradient(a.gradient, at, count, g.data());
      approach(g.data(), a.a1, count, a.m + at);
      host_kernels::move_masters(a, seed, at, count, a.u + at);
    });
  });
}

}  // namespace forebay
