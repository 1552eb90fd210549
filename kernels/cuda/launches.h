// The argument of a CUDA kernel launch, one struct by value, and how the work is cut.
#pragma once

#include <cstddef>

#include "forebay/kernels.h"

namespace forebay::cuda_kernels {

// Threads of a block, of every kernel. Fewer would need more blocks to keep memory busy; more would leave
// part of a multiprocessor's registers unused.
inline constexpr int kBlockSize = 256;

// Blocks of an element-wise kernel that a multiprocessor holds at once at the least: 1024 threads with
// several wide loads each keep memory busy, and leave each 64 registers. More would make registers spill.
inline constexpr int kBlocksPerMultiprocessor = 4;

// An element-wise kernel works on granules of a fixed number of elements with wide accesses. `head` elements
// come before the first granule; they and the rest after the last whole granule are done one by one.
// `head` is the whole count where the arrays cannot all be aligned at once.
template <typename Arguments>
struct ElementLaunch {
  Arguments arguments;
  std::size_t head;
};

// `chunk_sums` gets one double per chunk: a whole subtree of the norm's tree, the last one perhaps partly
// filled.
struct NormLeavesLaunch {
  const void* source;
  double* chunk_sums;
  std::size_t leaf_count;
  bool aligned;  // `source` is a multiple of an access.
};

// Adds adjacent pairs level by level, an odd one passing up, in place.
struct NormTreeLaunch {
  double* values;
  std::size_t count;
  double* result;
};

// Neighbouring elements of a thread in an update of kept states: a warp has a block of m and v.
inline constexpr int kKeptRun = 8;

// `aligned`: every array begins at a multiple of an access.
struct KeptUpdateLaunch {
  ControlledKeptUpdateArguments arguments;
  bool aligned;
};

}  // namespace forebay::cuda_kernels
