// The parts of an Adafactor step: sums of squares by row and by column, the new factors, and the update.
// Kernels has them on a stream, host_adafactor.h on host memory, with the same bits. ARCHITECTURE.md, "The
// numeric contract", has the formulas, the order of every sum, and what ranks exchange between the parts.
//
// Each part works on a run of a parameter: elements [first, first + count) of it, which begin at element
// `place` of its unit. The bits depend on how ranks divide a parameter, and not on how one rank cuts its
// slice into runs, if it cuts at multiples of kLeafCount of the unit.
#pragma once

#include <cstdint>

#include "forebay/conversions.h"
#include "forebay/data_type.h"
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

  FOREBAY_DEVICE constexpr std::uint64_t row_count() const { return has_rows ? batches * rows : 0; }
  FOREBAY_DEVICE constexpr std::uint64_t count() const { return batches * rows * columns; }
  FOREBAY_DEVICE constexpr std::uint64_t factor_count() const { return row_count() + batches * columns; }
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
struct FactorSumsArguments {
  FactoredRun run;
  float* sums = nullptr;
};

// Turns the sums of all ranks into new factors: factor = fma(weight, sum / count - factor, factor).
// `row_means` gets the mean of the new row factors of each matrix.
struct FactorRenewalArguments {
  FactoredShape shape;
  float weight = 0.0f;  // adafactor_weight()
  const float* factors = nullptr;
  float* sums = nullptr;
  float* row_means = nullptr;  // Not used without row factors.
};

// omega of applied step t, from 1.
float adafactor_weight(std::uint64_t step);

// *result = the sum of u * u, with new factors. `scratch` has room for leaf_room(run.count) doubles.
struct UpdateSquaresArguments {
  FactoredRun run;
  const float* factors = nullptr;  // The new ones, of the whole parameter.
  const float* row_means = nullptr;
  double* scratch = nullptr;
  double* result = nullptr;
};

// *result = the sum of p * p of `count` masters that begin at element `place` of the unit. `scratch` has room
// for leaf_room(count) doubles.
struct ParameterSquaresArguments {
  const void* masters = nullptr;
  DataType type = DataType::kFloat32;
  std::uint64_t count = 0;
  std::uint64_t place = 0;
  double* scratch = nullptr;
  double* result = nullptr;
};

// *step = the factor of u, from the sums of squares of all ranks. Rank r has its sum of p * p at
// squares[r * rank_stride], and that of u * u behind it.
struct AdafactorStepArguments {
  const double* squares = nullptr;
  std::uint64_t rank_stride = 2;
  std::uint64_t rank_count = 1;
  double lr = 0.0;
  std::uint64_t count = 0;        // Elements of the parameter.
  std::uint64_t step_number = 1;  // The applied step.
  float* step = nullptr;
};

// The masters begin with the run; `step` is the factor of u.
// Requires: no overlap, except that a parameter may take the place of its gradient where both have the same
//           number of bytes.
struct FactoredUpdateArguments : MasterMove {
  FactoredRun run;
  const float* factors = nullptr;  // The new ones, of the whole parameter.
  const float* row_means = nullptr;
  const float* computed_step = nullptr;  // From adafactor_step(). Null: `step` is given.
};

// The new factors take the place of the old ones.
struct KeepFactorsArguments {
  const float* source = nullptr;
  float* target = nullptr;
  std::uint64_t count = 0;
};

}  // namespace forebay
