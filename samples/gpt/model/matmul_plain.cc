// The sample's own product, for readers and for machines without a library. It packs b into panels of 16
// columns and sums a tile of 4 rows by 16 columns of c over the whole depth, in ascending order. One thread
// owns a tile, so the result does not depend on the number of threads. Each product is rounded before it is
// added (no fused multiply-add), so the result does not depend on the instruction set.

#include <algorithm>

#include "forebay/units.h"
#include "model/matmul.h"

namespace forebay::gpt {
namespace {

constexpr std::size_t kTileRows = 4;  // 4 x 16 sums fit the registers of every x86-64 from AVX2 on.
constexpr std::size_t kTileColumns = 16;
constexpr std::size_t kRowsPerTask = 64;  // A panel of b stays in the cache for that many rows.

struct Rows {  // `a` as rows, transposed or not.
  const float* data;
  std::size_t row_stride;
  std::size_t depth_stride;
};

#define FOREBAY_ALWAYS_INLINE inline __attribute__((always_inline))

// sums[r][c] = sum over d of a[r][d] * panel[d][c].
template <std::size_t kRows>
FOREBAY_ALWAYS_INLINE void tile_body(const Rows& a, const float* panel, std::size_t depth, float* sums) {
  float sum[kRows][kTileColumns] = {};
  for (std::size_t d = 0; d < depth; ++d) {
    const float* b = panel + d * kTileColumns;
    for (std::size_t r = 0; r < kRows; ++r) {
      const float factor = a.data[r * a.row_stride + d * a.depth_stride];
      for (std::size_t c = 0; c < kTileColumns; ++c) sum[r][c] += factor * b[c];
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t c = 0; c < kTileColumns; ++c) sums[r * kTileColumns + c] = sum[r][c];
  }
}

FOREBAY_ALWAYS_INLINE void task_body(const Rows& a, std::size_t rows, const float* panel, std::size_t depth,
                                     float* c, std::size_t c_stride, std::size_t columns) {
  for (std::size_t row = 0; row < rows; row += kTileRows) {
    const Rows tile{a.data + row * a.row_stride, a.row_stride, a.depth_stride};
    const std::size_t tile_rows = std::min(kTileRows, rows - row);
    float sums[kTileRows * kTileColumns];
    if (tile_rows == kTileRows) {
      tile_body<kTileRows>(tile, panel, depth, sums);
    } else {
      for (std::size_t r = 0; r < tile_rows; ++r) {
        tile_body<1>({tile.data + r * a.row_stride, a.row_stride, a.depth_stride}, panel, depth,
                     sums + r * kTileColumns);
      }
    }
    for (std::size_t r = 0; r < tile_rows; ++r) {
      std::copy_n(sums + r * kTileColumns, columns, c + (row + r) * c_stride);
    }
  }
}

using Task = void (*)(const Rows&, std::size_t, const float*, std::size_t, float*, std::size_t, std::size_t);

void task_baseline(const Rows& a, std::size_t rows, const float* panel, std::size_t depth, float* c,
                   std::size_t c_stride, std::size_t columns) {
  task_body(a, rows, panel, depth, c, c_stride, columns);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void task_avx2(const Rows& a, std::size_t rows, const float* panel,
                                               std::size_t depth, float* c, std::size_t c_stride,
                                               std::size_t columns) {
  task_body(a, rows, panel, depth, c, c_stride, columns);
}
#endif

Task choose_task() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return task_avx2;
#endif
  return task_baseline;
}

// panels[p][d][c] = op(b)[d][p * 16 + c], zero past the last column.
void pack(const ProductShape& shape, const float* b, float* panels) {
  const std::size_t panel_count = ceil_div(shape.columns, kTileColumns);
  const std::size_t column_stride = shape.transpose_b ? shape.depth : 1;
  const std::size_t depth_stride = shape.transpose_b ? 1 : shape.columns;
#pragma omp parallel for schedule(static)
  for (std::size_t p = 0; p < panel_count; ++p) {
    const std::size_t first = p * kTileColumns;
    const std::size_t columns = std::min(kTileColumns, shape.columns - first);
    const float* source = b + first * column_stride;
    for (std::size_t d = 0; d < shape.depth; ++d) {
      float* target = panels + (p * shape.depth + d) * kTileColumns;
      for (std::size_t c = 0; c < columns; ++c) target[c] = source[c * column_stride + d * depth_stride];
      std::fill(target + columns, target + kTileColumns, 0.0F);
    }
  }
}

class PlainMatMul final : public MatMul {
 public:
  const char* name() const noexcept override { return "plain"; }

  std::size_t prepare(const ProductShape& shape) override {
    return ceil_div(shape.columns, kTileColumns) * kTileColumns * shape.depth * sizeof(float);
  }

  void multiply(const ProductShape& shape, const float* a, const float* b, float* c,
                std::byte* workspace) override {
    float* panels = reinterpret_cast<float*>(workspace);
    pack(shape, b, panels);
    const std::size_t row_stride = shape.transpose_a ? 1 : shape.depth;
    const std::size_t depth_stride = shape.transpose_a ? shape.rows : 1;
    const std::size_t panel_count = ceil_div(shape.columns, kTileColumns);
    const std::size_t row_task_count = ceil_div(shape.rows, kRowsPerTask);
#pragma omp parallel for collapse(2) schedule(static)
    for (std::size_t p = 0; p < panel_count; ++p) {
      for (std::size_t t = 0; t < row_task_count; ++t) {
        const std::size_t row = t * kRowsPerTask;
        const std::size_t column = p * kTileColumns;
        task_({a + row * row_stride, row_stride, depth_stride}, std::min(kRowsPerTask, shape.rows - row),
              panels + p * shape.depth * kTileColumns, shape.depth, c + row * shape.columns + column,
              shape.columns, std::min(kTileColumns, shape.columns - column));
      }
    }
  }

 private:
  const Task task_ = choose_task();
};

}  // namespace

std::unique_ptr<MatMul> create_plain_matmul() {
  return std::make_unique<PlainMatMul>();
}

}  // namespace forebay::gpt
