// The parts of an Adafactor step, on host memory: sums of squares by row and column, the new factors, and the
// update. ARCHITECTURE.md, "The numeric contract", has the formulas, the order of every sum, and what ranks
// exchange between the parts.
//
// Each part works on a run of a parameter: elements [first, first + count) of it, which begin at element
// `place` of its unit. The bits do not depend on threads. They depend on how ranks divide a parameter, and
// not on how one rank cuts its slice into runs, if it cuts at multiples of kLeafCount of the unit.
//
// Threads: those of the BlockRunner, the caller among them. The work is done when a function returns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forebay/block_runner.h"
#include "forebay/kernels.h"
#include "forebay/master_move.h"
#include "forebay/span.h"

namespace forebay {

// The constants of torch.optim.Adafactor.
inline constexpr double kAdafactorDecay = -0.8;        // omega(t) = t^decay.
inline constexpr float kAdafactorEpsilon1 = 0x1p-23f;  // Least root of a second moment.
inline constexpr double kAdafactorEpsilon2 = 1e-3;     // Least root mean square of a parameter.
inline constexpr double kAdafactorThreshold = 1.0;     // d: largest root mean square of an update.
// Rows that a column sum adds before it adds them to the others. Smaller: more additions. Larger: fewer
// blocks can work at once.
inline constexpr std::uint64_t kFactorBandRows = 256;

// A parameter as Adafactor sees it: matrices, or one row without a row factor. Its factors lie one after the
// other: the rows of all matrices, then the columns of all matrices.
struct FactoredShape {
  std::uint64_t batches = 1;
  std::uint64_t rows = 1;
  std::uint64_t columns = 0;
  bool has_rows = false;  // It has row factors.

  std::uint64_t row_count() const { return has_rows ? batches * rows : 0; }
  std::uint64_t count() const { return batches * rows * columns; }
  std::uint64_t factor_count() const { return row_count() + batches * columns; }
};

// The shape of a parameter of `count` elements. Fewer than two dimensions, or none declared: one row.
FactoredShape factored_shape(Span<const std::uint64_t> shape, std::uint64_t count);

// A run of a gradient g = float(gradient) * factor.
struct FactoredRun {
  const void* gradient = nullptr;  // Begins with element `first`.
  DataType type = DataType::kFloat32;
  float factor = 1.0f;
  FactoredShape shape;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::uint64_t place = 0;
};

// sums = the run's sums of g * g by row and by column, laid out as the factors; zeros elsewhere.
void factor_sums(const FactoredRun& run, float* sums, const BlockRunner& runner);

// Turns the sums of all ranks into new factors: factor = fma(weight, sum / count - factor, factor).
// `row_means` gets the mean of the row factors of each matrix.
void update_factors(const FactoredShape& shape, float weight, const float* factors, float* sums,
                    float* row_means);

// omega of applied step t, from 1.
float adafactor_weight(std::uint64_t step);

// The sum of u * u, with new factors. `scratch` has room for leaf_room(run.count) doubles.
double update_squares(const FactoredRun& run, const float* factors, const float* row_means, double* scratch,
                      const BlockRunner& runner);

// `sum` and then the leaves of p * p of `count` elements that begin at `place` of the unit.
double parameter_squares(const void* masters, DataType type, std::uint64_t count, std::uint64_t place,
                         double sum, double* scratch, const BlockRunner& runner);

// Leaves that a run of `count` elements touches, at most.
constexpr std::uint64_t leaf_room(std::uint64_t count) {
  return count / kLeafCount + 2;
}

// -(alpha / max(1, ...)): the factor of u, from the sums of all ranks over the `count` elements.
float adafactor_step(double lr, std::uint64_t step, std::uint64_t count, double parameter_squares,
                     double update_squares);

// The masters begin with the run; `step` is adafactor_step().
struct FactoredUpdateArguments : MasterMove {
  FactoredRun run;
  const float* factors = nullptr;  // The new ones, of the whole parameter.
  const float* row_means = nullptr;
};
// Requires: no overlap, except that a parameter may take the place of its gradient where both have the same
//           number of bytes.
void factored_update(const FactoredUpdateArguments& arguments, const BlockRunner& runner);

}  // namespace forebay
