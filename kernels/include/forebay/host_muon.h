// The parts of a Muon step of one matrix, on host memory: its momentum, the orthogonalisation, and the update
// of its masters. ARCHITECTURE.md, "The numeric contract", has the formulas and the order of every sum.
// Parameters that are not matrices are updated by host_adam.h.
//
// The bits depend neither on threads nor on the instruction set, and the parts that work on elements do not
// depend on how these are cut.
//
// Threads: those of the BlockRunner, the caller among them. The work is done when a function returns.
#pragma once

#include <cstdint>

#include "forebay/block_runner.h"
#include "forebay/data_type.h"
#include "forebay/host_masters.h"

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
void muon_momentum(const MuonGradient& gradient, float a1, std::uint64_t count, const float* m, float* values,
                   const BlockRunner& runner);

// Orthogonalises a matrix of `rows` by `columns` in row-major order, by Newton-Schulz steps.
// Shape: `scratch` has room for orthogonal_scratch_count(rows, columns) elements.
// Cost: for k the smaller and n the larger extent, 5 (1.5 n k^2 + 0.5 k^3) fused multiply-adds.
void orthogonalise(std::uint64_t rows, std::uint64_t columns, float* matrix, float* scratch,
                   const BlockRunner& runner);
std::uint64_t orthogonal_scratch_count(std::uint64_t rows, std::uint64_t columns);
// The multiply-adds of orthogonalise(), about; to divide matrices over ranks.
double orthogonal_cost(std::uint64_t rows, std::uint64_t columns);

// -fp32(lr * r): the factor of an orthogonalised matrix. r is sqrt(max(1, rows / columns)), or, for steps of
// the size of AdamW's, 0.2 sqrt(max(rows, columns)).
float muon_step(double lr, std::uint64_t rows, std::uint64_t columns, bool matches_rms);

// m = fma(a1, g - m, m), then the masters move by the orthogonalised u. All begin with the same element.
struct MuonUpdateArguments : MasterMove {
  MuonGradient gradient;
  float a1 = 0.0f;
  float* m = nullptr;
  const float* u = nullptr;
  std::uint64_t count = 0;
};
// Requires: no overlap, except that a parameter may take the place of its gradient where both have the same
//           number of bytes.
void muon_update(const MuonUpdateArguments& arguments, const BlockRunner& runner);

}  // namespace forebay
