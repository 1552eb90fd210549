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

// Neighbouring elements of a thread in an update of kept states: a warp has a block of m and v. A tile is
// those of a block.
inline constexpr int kRun = 8;
inline constexpr std::size_t kRunTile = static_cast<std::size_t>(kBlockSize) * kRun;

// `aligned`: every array begins at a multiple of an access.
struct KeptUpdateLaunch {
  ControlledKeptUpdateArguments arguments;
  bool aligned;
};

// `aligned`: as above.
template <typename Arguments>
struct RunLaunch {
  Controlled<Arguments> arguments;
  bool aligned;
};

// The sum of squares of each row, and then the divisor of the matrix.
struct MatrixNormLaunch {
  const float* matrix;
  double* sums;
  float* divisor;
  std::size_t rows;
  std::size_t columns;
  const StepState* state;
};

// target = source / divisor, or + 0 without a divisor; `turned`: target[j][i] from source[i][j].
struct MatrixMoveLaunch {
  const float* source;
  float* target;
  const float* divisor;
  std::size_t rows;
  std::size_t columns;
  bool turned;
  const StepState* state;
};

// The side of the squares in which a matrix is turned over.
inline constexpr int kTurnSide = 32;

// A product with `a`, of `rows` by `depth`: ProductKind has the other operand and the result.
struct MatrixProductLaunch {
  const float* a;
  const float* b;  // depth x columns; kStep only
  float* c;        // rows x columns
  std::size_t rows;
  std::size_t depth;
  std::size_t columns;
  const StepState* state;
};

enum class ProductKind {
  kGram,        // c = a a^T
  kPolynomial,  // c = fma(kMuonC, a a, kMuonB * a), of a symmetric matrix
  kStep,        // c = fma(kMuonA, b, a b)
};

// The side of the tiles of a product that a block has, 64 elements a thread. Smaller: shared memory is read
// more often for each multiply-add. Larger: the sums do not fit into the registers.
inline constexpr int kProductTile = 128;

// The tiles of a product. A symmetric one has those on its diagonal and above.
inline FOREBAY_DEVICE std::size_t product_tiles(ProductKind kind, std::size_t rows, std::size_t columns) {
  const std::size_t down = (rows + kProductTile - 1) / kProductTile;
  const std::size_t across = (columns + kProductTile - 1) / kProductTile;
  return kind == ProductKind::kStep ? down * across : down * (down + 1) / 2;
}

// Sums of squares of rows, or of columns. `bands`: bands of rows that a block adds up at once, a power of
// two.
struct FactorSumsLaunch {
  Controlled<FactorSumsArguments> arguments;
  unsigned bands;
};
inline constexpr unsigned kBandsMax = 8;

// The sum of each leaf of u * u with new factors, or, without factors, of float(gradient)^2.
struct FactoredLeavesLaunch {
  FactoredRun run;
  const float* factors;
  const float* row_means;
  double* leaves;
  const StepState* state;
};

// *result = values[0] + values[1] + ..., one after the other.
struct ChainLaunch {
  const double* values;
  std::size_t count;
  double* result;
  const StepState* state;
};

// Leaves that elements [place, place + count) of a unit touch.
inline FOREBAY_DEVICE std::size_t leaves_of(std::size_t place, std::size_t count) {
  return count == 0 ? 0 : (place + count - 1) / kLeafCount + 1 - place / kLeafCount;
}

}  // namespace forebay::cuda_kernels
