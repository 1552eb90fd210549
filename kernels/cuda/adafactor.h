// The kernels of Adafactor (forebay/adafactor.h), as those of blocks.h are written. The arithmetic is in
// definitions.h.
//
// The contract fixes the order of every sum: a lane of a row or leaf and a band of a column are one ascending
// chain of a thread, and bands and leaves are added one after the other.
#pragma once

#include "kernels/cuda/runs.h"

namespace forebay::cuda_kernels {

inline constexpr unsigned kLaneCount = static_cast<unsigned>(definitions::kNormLanes);
// Rows or leaves of a block that has a thread for each lane.
inline constexpr unsigned kLanedRows = kBlockSize / kLaneCount;
// One lane more than there are, so that rows do not meet in a bank.
using LanedRows = double[kLanedRows][kLaneCount + 1];

template <DataType type>
struct TypeConstant {
  static constexpr DataType kType = type;
};

// Calls visit(TypeConstant<type>()). The type is the same for all threads.
template <typename Visit>
FOREBAY_KERNEL void with_type(DataType type, const Visit& visit) {
  if (type == DataType::kFloat32) {
    visit(TypeConstant<DataType::kFloat32>());
  } else if (type == DataType::kBfloat16) {
    visit(TypeConstant<DataType::kBfloat16>());
  } else {
    visit(TypeConstant<DataType::kFloat16>());
  }
}

// g of an element that is `i` elements behind the first of the run.
template <DataType type>
FOREBAY_KERNEL float gradient_of(const FactoredRun& run, std::size_t i) {
  return definitions::Element<type>::load(static_cast<const Storage<type>*>(run.gradient)[i]) * run.factor;
}

// Adds the squares of `count` elements to `sum`, ascending: elements i, i + step and so on. `kLoads`: loads
// in flight.
template <DataType type, unsigned kLoads, typename Count>
FOREBAY_KERNEL double add_squares(const FactoredRun& run, std::size_t i, Count count, std::size_t step,
                                  double sum) {
  const auto* next = static_cast<const Storage<type>*>(run.gradient) + i;
  for (; count >= kLoads; count -= kLoads) {
    float values[kLoads];
    FOREBAY_UNROLL
    for (unsigned k = 0; k < kLoads; ++k) {
      values[k] = definitions::Element<type>::load(*next);
      next += step;
    }
    FOREBAY_UNROLL
    for (unsigned k = 0; k < kLoads; ++k) sum = definitions::norm_step(sum, values[k] * run.factor);
  }
  for (; count > 0; --count) {
    sum = definitions::norm_step(sum, definitions::Element<type>::load(*next) * run.factor);
    next += step;
  }
  return sum;
}

// The first number from `begin` on that is `lane` modulo 16.
FOREBAY_KERNEL std::size_t first_of_lane(std::size_t begin, unsigned lane) {
  return begin + (lane - begin) % kLaneCount;
}
// The numbers of that lane before `end`, from its first one on.
FOREBAY_KERNEL std::size_t count_of_lane(std::size_t first, std::size_t end) {
  return first < end ? (end - 1 - first) / kLaneCount + 1 : 0;
}

FOREBAY_KERNEL std::size_t least(std::size_t a, std::size_t b) {
  return a < b ? a : b;
}
FOREBAY_KERNEL std::size_t greatest(std::size_t a, std::size_t b) {
  return a > b ? a : b;
}

// Sixteen threads have a row, one for each lane.
struct FactorRows {
  using Launch = FactorSumsLaunch;
  struct Shared {
    LanedRows lanes;
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared& shared) {
    FactorSumsArguments a = launch.arguments.part;
    if (!definitions::decided(launch.arguments.state, a)) return;
    const FactoredRun& run = a.run;
    const unsigned own = c.thread() / kLaneCount, lane = c.thread() % kLaneCount;
    const std::size_t row_count = run.shape.row_count();
    for (std::size_t begin = c.block() * kLanedRows; begin < row_count; begin += c.grid_size() * kLanedRows) {
      const std::size_t row = begin + own, start = row * run.shape.columns;
      const std::size_t lower = greatest(start, run.first);
      const std::size_t upper = least(start + run.shape.columns, run.first + run.count);
      double sum = 0.0;
      if (row < row_count && lower < upper) {
        const std::size_t i = start + first_of_lane(lower - start, lane);
        with_type(run.type, [&](auto type) {
          sum = add_squares<decltype(type)::kType, 8>(run, i - run.first, count_of_lane(i, upper), kLaneCount,
                                                      sum);
        });
      }
      shared.lanes[own][lane] = sum;
      c.barrier();
      if (row < row_count && lane == 0) {
        a.sums[row] =
            canonical(static_cast<float>(definitions::norm_fold(shared.lanes[own], definitions::kNormLanes)));
      }
      c.barrier();  // The next rows overwrite the memory that these have just read.
    }
  }
};

// A block has neighbouring columns of a matrix, and a few bands of them at once. A thread has one band of one
// column; the first of a column's threads adds its bands.
struct FactorColumns {
  using Launch = FactorSumsLaunch;
  struct Shared {
    double bands[kBlockSize];
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared& shared) {
    FactorSumsArguments a = launch.arguments.part;
    if (!definitions::decided(launch.arguments.state, a)) return;
    const FactoredRun& run = a.run;
    const std::size_t columns = run.shape.columns, stop = run.first + run.count;
    const unsigned width = kBlockSize / launch.bands;
    const unsigned own = c.thread() % width, number = c.thread() / width;
    const std::size_t across = (columns + width - 1) / width;
    for (std::size_t tile = c.block(); tile < across * run.shape.batches; tile += c.grid_size()) {
      const std::size_t matrix = tile / across, column = tile % across * width + own;
      const std::size_t start = matrix * run.shape.rows * columns;
      float* const target = a.sums + run.shape.row_count() + matrix * columns + column;
      const std::size_t element = start + column - run.first;  // In the first row, from the start of the run.
      // Rows of the matrix that the run touches; it may have only a part of the first and the last.
      std::size_t lower = run.first > start ? (run.first - start) / columns : 0;
      std::size_t upper = stop > start ? least(run.shape.rows, (stop - start + columns - 1) / columns) : 0;
      std::size_t band = lower / kFactorBandRows;
      const std::size_t band_end = (upper + kFactorBandRows - 1) / kFactorBandRows;
      if (lower < upper && start + lower * columns + column < run.first) ++lower;
      if (lower < upper && start + (upper - 1) * columns + column >= stop) --upper;
      if (column >= columns) upper = 0;
      double total = 0.0;
      for (; band < band_end; band += launch.bands) {
        const std::size_t band_row = (band + number) * kFactorBandRows;
        const std::size_t row = greatest(band_row, lower), end = least(band_row + kFactorBandRows, upper);
        double sum = 0.0;
        if (row < end) {
          with_type(run.type, [&](auto type) {
            sum = add_squares<decltype(type)::kType, 4>(run, element + row * columns,
                                                        static_cast<unsigned>(end - row), columns, sum);
          });
        }
        shared.bands[c.thread()] = sum;
        c.barrier();
        if (number == 0) {
          for (unsigned k = 0; k < launch.bands; ++k) total = total + shared.bands[k * width + own];
        }
        c.barrier();  // The next bands overwrite the memory that these have just read.
      }
      if (number == 0 && column < columns) *target = canonical(static_cast<float>(total));
    }
  }
};

struct FactorRenewal {
  using Launch = Controlled<FactorRenewalArguments>;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared&) {
    FactorRenewalArguments a = launch.part;
    if (!definitions::decided(launch.state, a)) return;
    const std::size_t row_count = a.shape.row_count(), count = a.shape.factor_count();
    const float columns = static_cast<float>(a.shape.columns), rows = static_cast<float>(a.shape.rows);
    const std::size_t step = static_cast<std::size_t>(c.grid_size()) * c.block_size();
    for (std::size_t i = static_cast<std::size_t>(c.block()) * c.block_size() + c.thread(); i < count;
         i += step)
      a.sums[i] =
          definitions::factor_element(a.weight, a.sums[i], i < row_count ? columns : rows, a.factors[i]);
  }
};

// A block has a matrix. All threads load its row factors, and sixteen add them.
struct FactorMeans {
  using Launch = Controlled<FactorRenewalArguments>;
  static constexpr unsigned kTile = 2048;
  static_assert(kTile % kLaneCount == 0);
  struct Shared {
    float rows[kTile];
    double lanes[kLaneCount];
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared& shared) {
    FactorRenewalArguments a = launch.part;
    if (!definitions::decided(launch.state, a)) return;
    for (std::size_t matrix = c.block(); matrix < a.shape.batches; matrix += c.grid_size()) {
      const float* const factors = a.sums + matrix * a.shape.rows;
      double sum = 0.0;
      for (std::size_t begin = 0; begin < a.shape.rows; begin += kTile) {
        const unsigned present = static_cast<unsigned>(least(kTile, a.shape.rows - begin));
        for (unsigned i = c.thread(); i < present; i += kBlockSize) shared.rows[i] = factors[begin + i];
        c.barrier();
        if (c.thread() < kLaneCount) {
          for (unsigned i = c.thread(); i < present; i += kLaneCount)
            sum = sum + static_cast<double>(shared.rows[i]);
        }
        c.barrier();  // The next rows overwrite the memory that these have just read.
      }
      if (c.thread() < kLaneCount) shared.lanes[c.thread()] = sum;
      c.barrier();
      if (c.thread() == 0) a.row_means[matrix] = definitions::row_mean(shared.lanes, a.shape.rows);
      c.barrier();  // The next matrix overwrites the lanes.
    }
  }
};

// An element of a parameter and the factors of its moment.
struct Moment {
  FactoredShape shape;
  const float* factors;
  const float* row_means;
  // advance() goes on by so many elements.
  std::size_t step_rows;
  std::size_t step_columns;
  std::size_t row;
  std::size_t column;
  const float* matrix_columns;
  float q;

  FOREBAY_KERNEL Moment(const FactoredShape& of, const float* all, const float* means, std::size_t element,
                        std::size_t step)
      : shape(of),
        factors(all),
        row_means(means),
        step_rows(step / of.columns),
        step_columns(step % of.columns),
        row(element / of.columns),
        column(element % of.columns),
        matrix_columns(all + of.row_count()),
        q(1.0f) {
    enter_row();
  }

  FOREBAY_KERNEL void enter_row() {
    const std::size_t matrix = shape.batches == 1 ? 0 : row / shape.rows;
    matrix_columns = factors + shape.row_count() + matrix * shape.columns;
    if (shape.has_rows) q = definitions::row_share(factors[row], row_means[matrix]);
  }
  FOREBAY_KERNEL void advance() {
    const std::size_t before = row;
    row += step_rows;
    column += step_columns;
    if (column >= shape.columns) {
      column -= shape.columns;
      ++row;
    }
    if (row != before) enter_row();
  }
  FOREBAY_KERNEL float update(float g) const {
    return definitions::factored_element(g, q, matrix_columns[column]);
  }
};

// Sixteen threads have a leaf, or the part of it that the run has: one for each lane.
template <bool has_factors>
struct FactoredLeaves {
  using Launch = FactoredLeavesLaunch;
  struct Shared {
    LanedRows lanes;
  };

  template <DataType type>
  static FOREBAY_KERNEL double add_lane(const FactoredRun& run, const Launch& a, std::size_t begin,
                                        std::size_t end) {
    if constexpr (!has_factors)
      return add_squares<type, 8>(run, begin, count_of_lane(begin, end), kLaneCount, 0.0);
    double sum = 0.0;
    if (begin >= end) return sum;
    Moment moment(run.shape, a.factors, a.row_means, run.first + begin, kLaneCount);
    for (std::size_t i = begin;;) {
      sum = definitions::norm_step(sum, moment.update(gradient_of<type>(run, i)));
      i += kLaneCount;
      if (i >= end) return sum;
      moment.advance();
    }
  }

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared& shared) {
    FactoredRun run = a.run;
    if (a.state != nullptr) {
      if (!definitions::updates(*a.state, nullptr)) return;
      if constexpr (has_factors) run.factor = a.state->factor;
    }
    const unsigned own = c.thread() / kLaneCount, lane = c.thread() % kLaneCount;
    const std::size_t first_leaf = run.place / kLeafCount, count = leaves_of(run.place, run.count);
    for (std::size_t begin = c.block() * kLanedRows; begin < count; begin += c.grid_size() * kLanedRows) {
      const bool present = begin + own < count;
      double sum = 0.0;
      if (present) {
        const std::size_t start = (first_leaf + begin + own) * kLeafCount;
        const std::size_t lower = first_of_lane(greatest(start, run.place), lane) - run.place;
        const std::size_t upper = least(start + kLeafCount, run.place + run.count) - run.place;
        with_type(run.type, [&](auto type) { sum = add_lane<decltype(type)::kType>(run, a, lower, upper); });
      }
      shared.lanes[own][lane] = sum;
      c.barrier();
      if (present && lane == 0)
        a.leaves[begin + own] = definitions::norm_fold(shared.lanes[own], definitions::kNormLanes);
      c.barrier();  // The next leaves overwrite the memory that these have just read.
    }
  }
};

// One block. One thread adds; the others load.
struct Chain {
  using Launch = ChainLaunch;
  static constexpr unsigned kTile = 4 * kBlockSize;
  struct Shared {
    double values[kTile];
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared& shared) {
    if (a.state != nullptr && !definitions::updates(*a.state, nullptr)) return;
    double sum = 0.0;
    for (std::size_t begin = 0; begin < a.count; begin += kTile) {
      const unsigned present = static_cast<unsigned>(least(kTile, a.count - begin));
      for (unsigned i = c.thread(); i < present; i += kBlockSize) shared.values[i] = a.values[begin + i];
      c.barrier();
      if (c.thread() == 0) {
        for (unsigned i = 0; i < present; ++i) sum = sum + shared.values[i];
      }
      c.barrier();  // The next values overwrite the memory that these have just been read from.
    }
    if (c.thread() == 0) *a.result = sum;
  }
};

// One block. Two threads add the ranks' sums in rank order; all load them.
struct AdafactorStep {
  using Launch = Controlled<AdafactorStepArguments>;
  static constexpr unsigned kTile = kBlockSize / 2;  // Ranks.
  struct Shared {
    double squares[2 * kTile];
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared& shared) {
    AdafactorStepArguments a = launch.part;
    if (!definitions::decided(launch.state, a)) return;
    double sum = 0.0;
    for (std::size_t begin = 0; begin < a.rank_count; begin += kTile) {
      const unsigned present = static_cast<unsigned>(least(kTile, a.rank_count - begin));
      if (c.thread() < 2 * present)
        shared.squares[c.thread()] = a.squares[(begin + c.thread() / 2) * a.rank_stride + c.thread() % 2];
      c.barrier();
      if (c.thread() < 2) {
        for (unsigned rank = 0; rank < present; ++rank) sum = sum + shared.squares[2 * rank + c.thread()];
      }
      c.barrier();  // The next ranks overwrite the memory that these have just been read from.
    }
    if (c.thread() < 2) shared.squares[c.thread()] = sum;
    c.barrier();
    if (c.thread() == 0) {
      *a.step =
          definitions::adafactor_step(a.lr, a.step_number, a.count, shared.squares[0], shared.squares[1]);
    }
  }
};

struct FactoredUpdate {
  using Launch = RunLaunch<FactoredUpdateArguments>;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared&) {
    FactoredUpdateArguments a = launch.arguments.part;
    if (!definitions::decided(launch.arguments.state, a)) return;
    const std::uint64_t seed = definitions::step_seed(a.half.key, a.step_number);
    const Masters masters = {a.master, a.half, a.average, a.average_weight, a.parameter, a.parameter_type};
    for (std::size_t start = c.block() * kRunTile; start < a.run.count; start += c.grid_size() * kRunTile) {
      const Place place = place_in_tile(c, start, a.run.count, launch.aligned);
      if (place.present == 0) continue;
      Run g, p;
      load(a.run.gradient, a.run.type, place, g);
      masters.load(place, p);
      Moment moment(a.run.shape, a.factors, a.row_means, a.run.first + place.begin, 1);
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) {
        if (i >= place.present) break;
        if (i > 0) moment.advance();
        p[i] = definitions::moved_master(a.decay, a.step, moment.update(g[i] * a.run.factor), p[i]);
      }
      masters.store(place, true, seed, p);
    }
  }
};

struct KeepFactors {
  using Launch = Controlled<KeepFactorsArguments>;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared&) {
    KeepFactorsArguments a = launch.part;
    if (!definitions::decided(launch.state, a)) return;
    const std::size_t step = static_cast<std::size_t>(c.grid_size()) * c.block_size();
    for (std::size_t i = static_cast<std::size_t>(c.block()) * c.block_size() + c.thread(); i < a.count;
         i += step)
      a.target[i] = a.source[i];
  }
};

}  // namespace forebay::cuda_kernels
