#include "forebay/host_adafactor.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/host_factored.h"
#include "kernels/moments.h"

namespace forebay {
namespace host_kernels {
namespace {

void scale(const void* source, DataType type, float factor, std::size_t count, float* target) {
  with_type(type, [&]<DataType source_type>() {
    using Element = definitions::Element<source_type>;
    const auto* values = static_cast<const typename Element::Storage*>(source);
    for (std::size_t i = 0; i < count; ++i) target[i] = Element::load(values[i]) * factor;
  });
}

void add_squares(const float* values, std::size_t count, double* sums) {
  for (std::size_t i = 0; i < count; ++i) sums[i] = definitions::norm_step(sums[i], values[i]);
}

void add_to_lanes(const float* values, std::size_t count, double* lanes) {
  for (std::size_t i = 0; i < count; i += definitions::kNormLanes)
    add_squares(values + i, definitions::kNormLanes, lanes);
}

void divide(float q, const float* c, std::size_t count, float* values) {
  for (std::size_t i = 0; i < count; ++i) values[i] = definitions::factored_element(values[i], q, c[i]);
}

void move(float decay, float step, const float* u, std::size_t count, float* p) {
  for (std::size_t i = 0; i < count; ++i) p[i] = definitions::moved_master(decay, step, u[i], p[i]);
}

}  // namespace

const FactoredKernels& scalar_factored_kernels() noexcept {
  static constexpr FactoredKernels kKernels = {"scalar", scale, add_squares, add_to_lanes, divide, move};
  return kKernels;
}

}  // namespace host_kernels

namespace {

using definitions::norm_fold;
using host_kernels::FactoredKernels;
using host_kernels::for_each_chunk;
using host_kernels::kChunkCount;
using host_kernels::kElementBlock;
using host_kernels::simd_factored_kernels;
using host_kernels::Values;

constexpr std::size_t kLanes = definitions::kNormLanes;

// Columns, rows and leaves that one thread takes at once: see kElementBlock.
constexpr std::size_t kColumnBlock = 512;
constexpr std::size_t kRowBlock = 16;
constexpr std::size_t kLeafBlock = 128;

static_assert(kColumnBlock <= kChunkCount && kLeafCount <= kChunkCount);

// g of elements of the parameter.
void load_gradient(const FactoredKernels& kernels, const FactoredRun& run, std::uint64_t at,
                   std::size_t count, float* target) {
  kernels.scale(static_cast<const std::byte*>(run.gradient) + (at - run.first) * element_bytes(run.type),
                run.type, run.factor, count, target);
}

// Adds squares to 16 lanes, the first value's to lane `place` mod 16.
void add_to_lanes(const FactoredKernels& kernels, const float* values, std::size_t count, std::uint64_t place,
                  double* lanes) {
  const std::size_t first = place % kLanes;
  const std::size_t head = std::min(count, (kLanes - first) % kLanes);
  const std::size_t whole = (count - head) / kLanes * kLanes;
  kernels.add_squares(values, head, lanes + first);
  kernels.add_to_lanes(values + head, whole, lanes);
  kernels.add_squares(values + head + whole, count - head - whole, lanes);
}

// `sum` and then the leaves of `count` elements that begin at `place`. add(begin, end, lanes) adds the
// squares of elements from `place` on to the lanes of their leaf.
template <typename Add>
double leaf_sum(std::uint64_t place, std::uint64_t count, double sum, double* scratch,
                const BlockRunner& runner, const Add& add) {
  if (count == 0) return sum;
  const std::uint64_t first_leaf = place / kLeafCount;
  const std::uint64_t leaf_count = (place + count - 1) / kLeafCount + 1 - first_leaf;
  runner.run(leaf_count, kLeafBlock, [&](std::size_t begin, std::size_t end) {
    for (std::size_t leaf = begin; leaf < end; ++leaf) {
      const std::uint64_t start = (first_leaf + leaf) * kLeafCount;
      double lanes[kLanes] = {};
      add(std::max(start, place) - place, std::min(start + kLeafCount, place + count) - place, lanes);
      scratch[leaf] = norm_fold(lanes, kLanes);
    }
  });
  for (std::uint64_t leaf = 0; leaf < leaf_count; ++leaf) sum = sum + scratch[leaf];
  return sum;
}

void sum_rows(const FactoredRun& run, std::uint64_t begin, std::uint64_t end, float* sums) {
  const FactoredKernels& kernels = simd_factored_kernels();
  const std::uint64_t columns = run.shape.columns, stop = run.first + run.count;
  Values g;
  for (std::uint64_t row = begin; row < end; ++row) {
    const std::uint64_t start = row * columns;
    double lanes[kLanes] = {};
    for_each_chunk(std::max(start, run.first), std::min(start + columns, stop),
                   [&](std::uint64_t at, std::size_t count) {
                     load_gradient(kernels, run, at, count, g.data());
                     add_to_lanes(kernels, g.data(), count, at - start, lanes);
                   });
    sums[row] = canonical(static_cast<float>(norm_fold(lanes, kLanes)));
  }
}

// The sums of columns [begin, end), at most kColumnBlock, of one matrix.
void sum_columns(const FactoredRun& run, std::uint64_t matrix, std::uint64_t begin, std::uint64_t end,
                 float* sums) {
  const FactoredKernels& kernels = simd_factored_kernels();
  const std::uint64_t columns = run.shape.columns, stop = run.first + run.count;
  const std::uint64_t first_row = std::max(run.first / columns, matrix * run.shape.rows);
  const std::uint64_t last_row = std::min((stop - 1) / columns + 1, (matrix + 1) * run.shape.rows);
  std::array<double, kColumnBlock> total{};
  Values g;
  for (std::uint64_t row = first_row; row < last_row;) {
    const std::uint64_t in_matrix = row - matrix * run.shape.rows;
    const std::uint64_t band_end = std::min(last_row, row + kFactorBandRows - in_matrix % kFactorBandRows);
    std::array<double, kColumnBlock> band{};
    for (; row < band_end; ++row) {
      const std::uint64_t start = row * columns;
      const std::uint64_t lower = std::max(start + begin, run.first), upper = std::min(start + end, stop);
      if (lower >= upper) continue;
      load_gradient(kernels, run, lower, upper - lower, g.data());
      kernels.add_squares(g.data(), upper - lower, band.data() + (lower - start - begin));
    }
    for (std::uint64_t j = 0; j < end - begin; ++j) total[j] = total[j] + band[j];
  }
  float* const target = sums + run.shape.row_count() + matrix * columns;
  for (std::uint64_t j = begin; j < end; ++j) target[j] = canonical(static_cast<float>(total[j - begin]));
}

// Calls visit(at, count, u) for chunks of elements [begin, end) of the parameter.
template <typename Visit>
void for_each_update(const FactoredRun& run, const float* factors, const float* row_means,
                     std::uint64_t begin, std::uint64_t end, const Visit& visit) {
  const FactoredKernels& kernels = simd_factored_kernels();
  const FactoredShape& shape = run.shape;
  Values u;
  while (begin < end) {
    const std::uint64_t row = begin / shape.columns, matrix = row / shape.rows;
    const std::uint64_t stop = std::min(end, (row + 1) * shape.columns);
    float q = 1.0f;
    if (shape.has_rows) q = definitions::row_share(factors[row], row_means[matrix]);
    // The column factor of element 0 of the row.
    const float* const c = factors + shape.row_count() + matrix * shape.columns;
    for_each_chunk(begin, stop, [&](std::uint64_t at, std::size_t count) {
      load_gradient(kernels, run, at, count, u.data());
      kernels.divide(q, c + (at - row * shape.columns), count, u.data());
      visit(at, count, u.data());
    });
    begin = stop;
  }
}

}  // namespace

void host_kernels::move_masters(const MasterMove& a, std::uint64_t seed, std::uint64_t at, std::size_t count,
                                const float* u) {
  const FactoredKernels& kernels = simd_factored_kernels();
  Values widened;
  float* p = a.master + at;
  if (std::uint16_t* const half = a.half.elements; half != nullptr) {
    p = widened.data();
    kernels.scale(half + at, DataType::kBfloat16, 1.0f, count, p);
    kernels.move(a.decay, a.step, u, count, p);
    for (std::size_t i = 0; i < count; ++i) {
      half[at + i] = definitions::master_to_bfloat16(p[i], true, seed, a.half.first + at + i);
      p[i] = bfloat16_to_float(half[at + i]);
    }
  } else {
    kernels.move(a.decay, a.step, u, count, p);
  }
  const host_kernels::RangeKernels& ranges = host_kernels::simd_kernels();
  if (a.average != nullptr)
    ranges.average({p, a.average + at, DataType::kFloat32, a.average_weight}, 0, count);
  if (a.parameter == nullptr) return;
  auto* const parameter = static_cast<std::byte*>(a.parameter) + at * element_bytes(a.parameter_type);
  ranges.cast({p, parameter, count, DataType::kFloat32, a.parameter_type}, 0, count);
}

FactoredShape factored_shape(Span<const std::uint64_t> shape, std::uint64_t count) {
  if (shape.size() < 2) return {1, 1, count, false};
  const std::uint64_t columns = shape[shape.size() - 1], rows = shape[shape.size() - 2];
  return {count / (rows * columns), rows, columns, true};
}

void factor_sums(const FactorSumsArguments& a, const BlockRunner& runner) {
  const FactoredRun& run = a.run;
  std::fill_n(a.sums, run.shape.factor_count(), 0.0f);
  if (run.count == 0) return;
  const std::uint64_t columns = run.shape.columns, last = run.first + run.count - 1;
  const std::uint64_t first_row = run.first / columns, last_row = last / columns;
  if (run.shape.has_rows) {
    runner.run(last_row + 1 - first_row, kRowBlock, [&](std::size_t begin, std::size_t end) {
      sum_rows(run, first_row + begin, first_row + end, a.sums);
    });
  }
  for (std::uint64_t matrix = first_row / run.shape.rows; matrix <= last_row / run.shape.rows; ++matrix) {
    runner.run(columns, kColumnBlock,
               [&](std::size_t begin, std::size_t end) { sum_columns(run, matrix, begin, end, a.sums); });
  }
}

void renew_factors(const FactorRenewalArguments& a, const BlockRunner& runner) {
  const FactoredShape& shape = a.shape;
  runner.run(shape.factor_count(), kElementBlock, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t count = i < shape.row_count() ? shape.columns : shape.rows;
      a.sums[i] = definitions::factor_element(a.weight, a.sums[i], static_cast<float>(count), a.factors[i]);
    }
  });
  if (!shape.has_rows) return;
  for (std::uint64_t matrix = 0; matrix < shape.batches; ++matrix) {
    double lanes[kLanes] = {};
    for (std::uint64_t i = 0; i < shape.rows; ++i)
      lanes[i % kLanes] = lanes[i % kLanes] + static_cast<double>(a.sums[matrix * shape.rows + i]);
    a.row_means[matrix] = definitions::row_mean(lanes, shape.rows);
  }
}

float adafactor_weight(std::uint64_t step) {
  return static_cast<float>(std::pow(static_cast<double>(step), kAdafactorDecay));
}

void update_squares(const UpdateSquaresArguments& a, const BlockRunner& runner) {
  const FactoredRun& run = a.run;
  *a.result = leaf_sum(run.place, run.count, 0.0, a.scratch, runner,
                       [&](std::uint64_t begin, std::uint64_t end, double* lanes) {
                         for_each_update(run, a.factors, a.row_means, run.first + begin, run.first + end,
                                         [&](std::uint64_t at, std::size_t count, const float* u) {
                                           add_to_lanes(simd_factored_kernels(), u, count,
                                                        run.place + (at - run.first), lanes);
                                         });
                       });
}

void parameter_squares(const ParameterSquaresArguments& a, const BlockRunner& runner, double sum) {
  const FactoredKernels& kernels = simd_factored_kernels();
  *a.result = leaf_sum(
      a.place, a.count, sum, a.scratch, runner, [&](std::uint64_t begin, std::uint64_t end, double* lanes) {
        Values p;
        const auto* from = static_cast<const std::byte*>(a.masters) + begin * element_bytes(a.type);
        kernels.scale(from, a.type, 1.0f, end - begin, p.data());
        add_to_lanes(kernels, p.data(), end - begin, a.place + begin, lanes);
      });
}

void adafactor_step(const AdafactorStepArguments& a, const BlockRunner&) {
  double sums[2] = {};
  for (std::uint64_t rank = 0; rank < a.rank_count; ++rank) {
    for (std::uint64_t i = 0; i < 2; ++i) sums[i] = sums[i] + a.squares[rank * a.rank_stride + i];
  }
  *a.step = definitions::adafactor_step(a.lr, a.step_number, a.count, sums[0], sums[1]);
}

void keep_factors(const KeepFactorsArguments& a, const BlockRunner&) {
  std::copy_n(a.source, a.count, a.target);
}

void factored_update(const FactoredUpdateArguments& a, const BlockRunner& runner) {
  const std::uint64_t seed = definitions::step_seed(a.half.key, a.step_number), first = a.run.first;
  runner.run(a.run.count, kElementBlock, [&](std::size_t begin, std::size_t end) {
    for_each_update(a.run, a.factors, a.row_means, first + begin, first + end,
                    [&](std::uint64_t at, std::size_t count, const float* u) {
                      host_kernels::move_masters(a, seed, at - first, count, u);
                    });
  });
}

}  // namespace forebay
