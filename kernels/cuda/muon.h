// The kernels of Muon (forebay/muon.h), as those of blocks.h are written. The arithmetic is in definitions.h.
//
// Every element of a product is one ascending chain of one thread, so a tile is never cut along the inner
// dimension, and no tensor core takes part.
#pragma once

#include "kernels/cuda/runs.h"

namespace forebay::cuda_kernels {

struct MuonMomentum {
  using Launch = RunLaunch<MuonMomentumArguments>;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared&) {
    MuonMomentumArguments a = launch.arguments.part;
    if (!definitions::decided(launch.arguments.state, a)) return;
    for (std::size_t start = c.block() * kRunTile; start < a.count; start += c.grid_size() * kRunTile) {
      const Place place = place_in_tile(c, start, a.count, launch.aligned);
      Run g, values;
      load(a.gradient.values, a.gradient.type, place, g);
      load_as<DataType::kFloat32>(a.m, place, values);
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) {
        const float scaled = g[i] * a.gradient.factor;
        values[i] = definitions::average_element(values[i], scaled, a.a1);
        values[i] = definitions::average_element(values[i], scaled, a.a1);
      }
      store_raw<DataType::kFloat32>(a.values, place, [&](int i) { return values[i]; });
    }
  }
};

struct MuonUpdate {
  using Launch = RunLaunch<MuonUpdateArguments>;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared&) {
    MuonUpdateArguments a = launch.arguments.part;
    if (!definitions::decided(launch.arguments.state, a)) return;
    const std::uint64_t seed = definitions::step_seed(a.half.key, a.step_number);
    const Masters masters = {a.master, a.half, a.average, a.average_weight, a.parameter, a.parameter_type};
    for (std::size_t start = c.block() * kRunTile; start < a.count; start += c.grid_size() * kRunTile) {
      const Place place = place_in_tile(c, start, a.count, launch.aligned);
      Run g, m, u, p;
      load(a.gradient.values, a.gradient.type, place, g);
      load_as<DataType::kFloat32>(a.m, place, m);
      load_as<DataType::kFloat32>(a.u, place, u);
      masters.load(place, p);
      FOREBAY_UNROLL
      for (int i = 0; i < kRun; ++i) {
        m[i] = definitions::average_element(m[i], g[i] * a.gradient.factor, a.a1);
        p[i] = definitions::moved_master(a.decay, a.step, u[i], p[i]);
      }
      store_raw<DataType::kFloat32>(a.m, place, [&](int i) { return m[i]; });
      masters.store(place, true, seed, p);
    }
  }
};

// Sixteen threads have a row, one for each lane.
struct MatrixSquares {
  using Launch = MatrixNormLaunch;
  static constexpr unsigned kLanes = static_cast<unsigned>(definitions::kNormLanes);
  static constexpr unsigned kRows = kBlockSize / kLanes;
  static constexpr int kUnroll = 8;  // Loads in flight.
  struct Shared {
    double lanes[kRows][kLanes + 1];  // One more, so that rows do not meet in a bank.
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared& shared) {
    if (a.state != nullptr && !definitions::updates(*a.state, nullptr)) return;
    const unsigned own = c.thread() / kLanes, lane = c.thread() % kLanes;
    for (std::size_t first = c.block() * kRows; first < a.rows; first += c.grid_size() * kRows) {
      const bool present = first + own < a.rows;
      double sum = 0.0;
      if (present) {
        const float* const row = a.matrix + (first + own) * a.columns;
        std::size_t j = lane;
        for (; j + (kUnroll - 1) * kLanes < a.columns; j += kUnroll * kLanes) {
          float values[kUnroll];
          FOREBAY_UNROLL
          for (int i = 0; i < kUnroll; ++i) values[i] = row[j + static_cast<unsigned>(i) * kLanes];
          FOREBAY_UNROLL
          for (int i = 0; i < kUnroll; ++i) sum = definitions::norm_step(sum, values[i]);
        }
        for (; j < a.columns; j += kLanes) sum = definitions::norm_step(sum, row[j]);
      }
      shared.lanes[own][lane] = sum;
      c.barrier();
      if (present && lane == 0) a.sums[first + own] = definitions::norm_fold(shared.lanes[own], kLanes);
      c.barrier();  // The next rows overwrite the memory that these have just read.
    }
  }
};

// One block. One thread adds the rows, ascending; the others load them.
struct MatrixNorm {
  using Launch = MatrixNormLaunch;
  struct Shared {
    double sums[kBlockSize];
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared& shared) {
    if (a.state != nullptr && !definitions::updates(*a.state, nullptr)) return;
    double sum = 0.0;
    for (std::size_t first = 0; first < a.rows; first += kBlockSize) {
      const std::size_t left = a.rows - first;
      const unsigned present = left < kBlockSize ? static_cast<unsigned>(left) : kBlockSize;
      if (c.thread() < present) shared.sums[c.thread()] = a.sums[first + c.thread()];
      c.barrier();
      if (c.thread() == 0) {
        for (unsigned i = 0; i < present; ++i) sum = sum + shared.sums[i];
      }
      c.barrier();
    }
    if (c.thread() == 0) *a.divisor = definitions::matrix_divisor(sum);
  }
};

struct MatrixMove {
  using Launch = MatrixMoveLaunch;
  static constexpr unsigned kSide = kTurnSide;
  static constexpr unsigned kStep = kBlockSize / kSide;  // Rows of a square that are in work at once.
  struct Shared {
    float square[kSide][kSide + 1];
  };

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared& shared) {
    if (a.state != nullptr && !definitions::updates(*a.state, nullptr)) return;
    const float divisor = a.divisor != nullptr ? *a.divisor : 0.0f;
    const unsigned x = c.thread() % kSide, y = c.thread() / kSide;
    const std::size_t across = (a.columns + kSide - 1) / kSide;
    const std::size_t squares = (a.rows + kSide - 1) / kSide * across;
    for (std::size_t number = c.block(); number < squares; number += c.grid_size()) {
      const std::size_t row = number / across * kSide, column = number % across * kSide;
      for (unsigned i = y; i < kSide; i += kStep) {
        if (row + i >= a.rows || column + x >= a.columns) continue;
        const std::size_t at = (row + i) * a.columns + column + x;
        // A sum over ranks has no negative zero.
        const float value = a.divisor != nullptr ? a.source[at] / divisor : a.source[at] + 0.0f;
        if (a.turned) {
          shared.square[i][x] = value;
        } else {
          a.target[at] = value;
        }
      }
      if (!a.turned) continue;
      c.barrier();
      for (unsigned i = y; i < kSide; i += kStep) {
        if (column + i < a.columns && row + x < a.rows)
          a.target[(column + i) * a.rows + row + x] = shared.square[x][i];
      }
      c.barrier();  // The next square overwrites the memory that this one has just read.
    }
  }
};

// A block has a tile of 128 by 128 elements, a thread 64 of them: four rows and four columns, and the same 64
// further. Operands pass through shared memory in steps of kDepth, the next ones through registers meanwhile.
template <ProductKind kind>
struct MatrixProduct {
  using Launch = MatrixProductLaunch;
  static constexpr int kDepth = 16;
  static constexpr int kQuad = 4;  // Neighbouring rows or columns of a thread: one access.
  static constexpr int kOwn = 8;   // All of them.
  static constexpr int kHalf = kProductTile / 2;
  static constexpr int kLoads =
      kProductTile * kDepth / kBlockSize;  // A thread loads so many elements of each operand.
  static constexpr bool kSymmetric = kind != ProductKind::kStep;
  static_assert(kHalf / kQuad * (kHalf / kQuad) == kBlockSize);
  // Four more, so that a row begins at an access, and rows do not meet in a bank.
  struct Shared {
    alignas(16) float a[kDepth][kProductTile + kQuad];
    alignas(16) float b[kDepth][kProductTile + kQuad];
  };
  using Loaded = float[kLoads];

  // Rows [first, first + kProductTile) of a matrix of `rows` by `depth`, at [begin, begin + kDepth).
  template <typename Context>
  static FOREBAY_KERNEL void load_rows(const Context& c, const float* matrix, std::size_t rows,
                                       std::size_t depth, std::size_t first, std::size_t begin,
                                       Loaded& values) {
    const std::size_t t = begin + c.thread() % kDepth;
    FOREBAY_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const std::size_t row = first + c.thread() / kDepth + static_cast<unsigned>(i * (kBlockSize / kDepth));
      values[i] = row < rows && t < depth ? matrix[row * depth + t] : 0.0f;
    }
  }
  template <typename Context>
  static FOREBAY_KERNEL void store_rows(const Context& c, const Loaded& values,
                                        float (&shared)[kDepth][kProductTile + kQuad]) {
    FOREBAY_UNROLL
    for (int i = 0; i < kLoads; ++i)
      shared[c.thread() % kDepth][c.thread() / kDepth + static_cast<unsigned>(i * (kBlockSize / kDepth))] =
          values[i];
  }

  // Columns [first, first + kProductTile) of a matrix of `depth` by `columns`, at [begin, begin + kDepth).
  template <typename Context>
  static FOREBAY_KERNEL void load_columns(const Context& c, const Launch& a, std::size_t first,
                                          std::size_t begin, Loaded& values) {
    const std::size_t column = first + c.thread() % kProductTile;
    FOREBAY_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const std::size_t t =
          begin + c.thread() / kProductTile + static_cast<unsigned>(i * (kBlockSize / kProductTile));
      values[i] = t < a.depth && column < a.columns ? a.b[t * a.columns + column] : 0.0f;
    }
  }
  template <typename Context>
  static FOREBAY_KERNEL void store_columns(const Context& c, const Loaded& values,
                                           float (&shared)[kDepth][kProductTile + kQuad]) {
    FOREBAY_UNROLL
    for (int i = 0; i < kLoads; ++i)
      shared[c.thread() / kProductTile + static_cast<unsigned>(i * (kBlockSize / kProductTile))]
            [c.thread() % kProductTile] = values[i];
  }

  // A thread's elements of a row in shared memory.
  static FOREBAY_KERNEL void load_own(const float* row, unsigned quad, float (&values)[kOwn]) {
    FOREBAY_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Packed<16> four = load_shared(row + half * kHalf + quad * kQuad);
      FOREBAY_UNROLL
      for (int i = 0; i < kQuad; ++i) values[half * kQuad + i] = float_from_bits(four.words[i]);
    }
  }
  static FOREBAY_KERNEL unsigned own_place(unsigned quad, int i) {
    return static_cast<unsigned>(i / kQuad * kHalf + i % kQuad) + quad * kQuad;
  }

  static FOREBAY_KERNEL void add_products(const Shared& shared, int t, unsigned down, unsigned across,
                                          float (&sums)[kOwn][kOwn]) {
    float rows[kOwn], columns[kOwn];
    load_own(shared.a[t], down, rows);
    load_own(shared.b[t], across, columns);
    FOREBAY_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      FOREBAY_UNROLL
      for (int j = 0; j < kOwn; ++j) sums[i][j] = definitions::product_step(sums[i][j], rows[i], columns[j]);
    }
  }

  static FOREBAY_KERNEL float result(const Launch& a, std::size_t row, std::size_t column, float sum) {
    if constexpr (kind == ProductKind::kPolynomial)
      return definitions::combine_element(kMuonC, sum, kMuonB, a.a[row * a.columns + column]);
    if constexpr (kind == ProductKind::kStep)
      return definitions::combine_element(kMuonA, a.b[row * a.columns + column], 1.0f, sum);
    return sum;
  }

  template <typename Context>
  static FOREBAY_KERNEL void load_step(const Context& c, const Launch& a, std::size_t row, std::size_t column,
                                       std::size_t begin, Loaded& left, Loaded& right) {
    load_rows(c, a.a, a.rows, a.depth, row, begin, left);
    if constexpr (kSymmetric) {
      load_rows(c, a.a, a.rows, a.depth, column, begin, right);
    } else {
      load_columns(c, a, column, begin, right);
    }
  }

  template <typename Context>
  static FOREBAY_KERNEL void run_tile(const Context& c, const Launch& a, Shared& shared, std::size_t row,
                                      std::size_t column) {
    const unsigned across = c.thread() % (kHalf / kQuad), down = c.thread() / (kHalf / kQuad);
    const bool present = row + down * kQuad < a.rows && column + across * kQuad < a.columns;
    float sums[kOwn][kOwn] = {};
    Loaded left, right;
    load_step(c, a, row, column, 0, left, right);
    for (std::size_t begin = 0; begin < a.depth; begin += kDepth) {
      store_rows(c, left, shared.a);
      if constexpr (kSymmetric) {
        store_rows(c, right, shared.b);
      } else {
        store_columns(c, right, shared.b);
      }
      c.barrier();
      if (begin + kDepth < a.depth) {
        load_step(c, a, row, column, begin + kDepth, left, right);
        if (present) {
          FOREBAY_UNROLL
          for (int t = 0; t < kDepth; ++t) add_products(shared, t, down, across, sums);
        }
      } else if (present) {
        // No zeros behind the chain: they would make a negative zero a positive one.
        const int steps = static_cast<int>(a.depth - begin);
        for (int t = 0; t < steps; ++t) add_products(shared, t, down, across, sums);
      }
      c.barrier();  // The next step overwrites the memory that this one has just read.
    }
    FOREBAY_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      FOREBAY_UNROLL
      for (int j = 0; j < kOwn; ++j) {
        const std::size_t r = row + own_place(down, i), s = column + own_place(across, j);
        if (r >= a.rows || s >= a.columns) continue;
        const float value = result(a, r, s, sums[i][j]);
        a.c[r * a.columns + s] = value;
        if (kSymmetric && row != column) a.c[s * a.columns + r] = value;
      }
    }
  }

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared& shared) {
    if (a.state != nullptr && !definitions::updates(*a.state, nullptr)) return;
    const std::size_t tiles = product_tiles(kind, a.rows, a.columns);
    const std::size_t across = (a.columns + kProductTile - 1) / kProductTile;
    for (std::size_t number = c.block(); number < tiles; number += c.grid_size()) {
      std::size_t row = number / across, column = number % across;
      if constexpr (kSymmetric) {
        column = 0;
        while ((column + 1) * (column + 2) / 2 <= number) ++column;
        row = number - column * (column + 1) / 2;
      }
      run_tile(c, a, shared, row * kProductTile, column * kProductTile);
    }
  }
};

}  // namespace forebay::cuda_kernels
