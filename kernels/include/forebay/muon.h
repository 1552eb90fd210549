// The parts of a Muon step of one matrix: its momentum, the orthogonalisation, and the update of its masters.
// Kernels has them on a stream, host_muon.h on host memory, with the same bits. ARCHITECTURE.md, "The numeric
// contract", has the formulas and the order of every sum. Parameters that are not matrices are AdamW's.
//
// The parts that work on elements do not depend on how these are cut.
#pragma once

#include <cstdint>

#include "forebay/data_type.h"
#include "forebay/master_move.h"

namespace forebay {

// The constants of torch.optim.Muon: the polynomial, how often it is applied, and the least norm.
inline constexpr float kMuonA = 3.4445f;
inline constexpr float kMuonB = -4.7750f;
inline constexpr float kMuonC = 2.0315f;
inline constexpr int kMuonSteps = 5;
inline constexpr float kMuonEpsilon = 1e-7f;

// A gradient g = float(values) * factor.
struct MuonGradient {
  const void* values = nullptr;
  DataType type = DataType::kFloat32;
  float factor = 1.0f;
};

// `values` becomes what is orthogonalised, m with Nesterov's momentum: m, then twice v = fma(a1, g - v, v).
// Requires: `values` does not overlap the gradient. It may be m.
struct MuonMomentumArguments {
  MuonGradient gradient;
  float a1 = 0.0f;
  const float* m = nullptr;
  float* values = nullptr;
  std::uint64_t count = 0;
};

// Orthogonalises a matrix of `rows` by `columns` in row-major order, by Newton-Schulz steps.
// Shape: `scratch` has room for orthogonal_scratch_count(rows, columns) elements, and is aligned to a double.
// Cost: for k the smaller and n the larger extent, 5 (1.5 n k^2 + 0.5 k^3) fused multiply-adds.
struct OrthogonaliseArguments {
  float* matrix = nullptr;
  float* scratch = nullptr;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
};
std::uint64_t orthogonal_scratch_count(std::uint64_t rows, std::uint64_t columns);
// The multiply-adds of an orthogonalisation, about; to divide matrices over ranks.
double orthogonal_cost(std::uint64_t rows, std::uint64_t columns);

// -fp32(lr * r): the factor of an orthogonalised matrix. r is sqrt(max(1, rows / columns)), or, for steps of
// the size of AdamW's, 0.2 sqrt(max(rows, columns)).
float muon_step(double lr, std::uint64_t rows, std::uint64_t columns, bool matches_rms);

// m = fma(a1, g - m, m), then the masters move by the orthogonalised u. All begin with the same element.
// Requires: no overlap, except that a parameter may take the place of its gradient where both have the same
//           number of bytes.
struct MuonUpdateArguments : MasterMove {
  MuonGradient gradient;
  float a1 = 0.0f;
  float* m = nullptr;
  const float* u = nullptr;
  std::uint64_t count = 0;
};

}  // namespace forebay
