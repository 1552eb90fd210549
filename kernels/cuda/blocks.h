// The kernels with cooperating threads, one struct each: one source for the device and for the CPU.
//
// `Shared` is the block's shared memory, which begins with any content. The context gives the thread's place,
// barrier() and shuffle_down(); every thread of a block, or of a warp, has to reach each of these.
#pragma once

#include "kernels/cuda/launches.h"
#include "kernels/cuda/packed.h"

namespace forebay::cuda_kernels {

inline constexpr unsigned kWarpSize = 32;

// Sums of whole chunks of adjacent leaves, so that a chunk is an aligned subtree of the norm's tree. A thread
// has the lanes that lie in one access and walks down the leaf's rows of 16 elements in order; the lanes of a
// leaf are then folded in shared memory as definitions.h does it.
template <DataType type>
struct NormLeaves {
  using Launch = NormLeavesLaunch;
  static constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(Storage<type>));
  static constexpr int kLanes = static_cast<int>(definitions::kNormLanes);
  static constexpr int kThreadsPerLeaf = kLanes / kWidth;
  static constexpr int kChunk = kBlockSize / kThreadsPerLeaf;  // Leaves: 64, or 128 of 16-bit elements.
  static constexpr int kRows = static_cast<int>(kLeafCount) / kLanes;
  static constexpr int kUnroll = 8;  // Rows in flight.
  static_assert(kRows % kUnroll == 0 && kChunk % kWarpSize == 0);

  struct Shared {
    // One lane more than there are, so that neither the threads of a leaf nor those of neighbouring leaves
    // meet in a bank.
    double lanes[kChunk][kLanes + 1];
  };

  template <bool aligned>
  static FOREBAY_KERNEL void sum_rows(const Storage<type>* source, double* lanes) {
    for (int row = 0; row < kRows; row += kUnroll) {
      Granule<type, kWidth> rows[kUnroll];
      FOREBAY_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        const Storage<type>* address = source + (row + u) * kLanes;
        if constexpr (aligned) {
          rows[u].load(address);
        } else {
          FOREBAY_UNROLL
          for (int j = 0; j < kWidth; ++j) rows[u].set_raw(j, address[j]);
        }
      }
      FOREBAY_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        FOREBAY_UNROLL
        for (int j = 0; j < kWidth; ++j) lanes[j] = definitions::norm_step(lanes[j], rows[u].value(j));
      }
    }
  }

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared& shared) {
    const std::size_t chunk_count = (launch.leaf_count + kChunk - 1) / kChunk;
    for (std::size_t chunk = c.block(); chunk < chunk_count; chunk += c.grid_size()) {
      const std::size_t left = launch.leaf_count - chunk * kChunk;
      const unsigned present = left < kChunk ? static_cast<unsigned>(left) : kChunk;
      const unsigned leaf = c.thread() / kThreadsPerLeaf;
      if (leaf < present) {
        const unsigned lane = c.thread() % kThreadsPerLeaf * kWidth;
        const auto* source =
            static_cast<const Storage<type>*>(launch.source) + (chunk * kChunk + leaf) * kLeafCount + lane;
        double lanes[kWidth] = {};
        if (launch.aligned) {
          sum_rows<true>(source, lanes);
        } else {
          sum_rows<false>(source, lanes);
        }
        FOREBAY_UNROLL
        for (int j = 0; j < kWidth; ++j) shared.lanes[leaf][lane + j] = lanes[j];
      }
      c.barrier();
      if (c.thread() < present) definitions::norm_fold(shared.lanes[c.thread()], definitions::kNormLanes);
      c.barrier();
      if (c.thread() < kWarpSize) {
        const double sum = add_leaves(c, shared, present);
        if (c.thread() == 0) launch.chunk_sums[chunk] = sum;
      }
      c.barrier();  // The next chunk overwrites the memory that this one has just read.
    }
  }

  // One warp adds the chunk's leaves: each thread an aligned run of them, then the threads in pairs.
  template <typename Context>
  static FOREBAY_KERNEL double add_leaves(const Context& c, Shared& shared, unsigned present) {
    constexpr unsigned kPerThread = kChunk / kWarpSize;
    const unsigned first = c.thread() * kPerThread;
    for (unsigned step = 1; step < kPerThread; step *= 2) {
      for (unsigned i = first; i + step < first + kPerThread; i += 2 * step) {
        if (i + step < present) shared.lanes[i][0] = shared.lanes[i][0] + shared.lanes[i + step][0];
      }
    }
    // A thread without leaves has 0, which changes no sum of squares.
    double sum = first < present ? shared.lanes[first][0] : 0.0;
    for (unsigned step = 1; step < kWarpSize; step *= 2) sum = sum + c.shuffle_down(sum, step);
    return sum;
  }
};

// One block.
struct NormTree {
  using Launch = NormTreeLaunch;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& launch, Shared&) {
    for (std::size_t step = 1; step < launch.count; step *= 2) {
      for (std::size_t i = c.thread() * 2 * step; i + step < launch.count; i += c.block_size() * 2 * step) {
        launch.values[i] = launch.values[i] + launch.values[i + step];
      }
      c.barrier();
    }
    if (c.thread() == 0) {
      *launch.result = definitions::canonical_double(launch.count == 0 ? 0.0 : launch.values[0]);
    }
  }
};

// One block: the slices of every unit side by side, then the units; the decision is one thread's.
struct StepControl {
  using Launch = StepControlArguments;
  struct Shared {};

  template <typename Context>
  static FOREBAY_KERNEL void run(const Context& c, const Launch& a, Shared&) {
    const std::size_t units = a.unit_count, ranks = static_cast<std::size_t>(a.rank_count);
    for (std::size_t i = c.thread(); i < units * ranks; i += c.block_size()) {
      a.scratch[i] = a.squares[i / units * a.rank_stride + i % units];
    }
    if (a.used != nullptr) {
      for (std::size_t unit = c.thread(); unit < units; unit += c.block_size()) {
        bool used = false;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          used = used || a.used[rank * a.rank_stride + unit] != 0.0;
        }
        a.unit_used[unit] = used ? 1 : 0;
      }
    }
    c.barrier();
    for (std::size_t step = 1; step < ranks; step *= 2) {
      const std::size_t pairs = (ranks - step + 2 * step - 1) / (2 * step);
      for (std::size_t i = c.thread(); i < pairs * units; i += c.block_size()) {
        double* left = a.scratch + i / units * 2 * step * units + i % units;
        *left = *left + left[step * units];
      }
      c.barrier();
    }
    for (std::size_t step = 1; step < units; step *= 2) {
      for (std::size_t i = c.thread() * 2 * step; i + step < units; i += c.block_size() * 2 * step) {
        a.scratch[i] = a.scratch[i] + a.scratch[i + step];
      }
      c.barrier();
    }
    if (c.thread() == 0) definitions::advance_step(a, units == 0 ? 0.0 : a.scratch[0]);
  }
};

}  // namespace forebay::cuda_kernels
