#include "forebay/muon.h"

#include <algorithm>
#include <cmath>

namespace forebay {

// One more matrix, or the sum of squares of each row in double, and two of the smaller side.
std::uint64_t orthogonal_scratch_count(std::uint64_t rows, std::uint64_t columns) {
  const std::uint64_t k = std::min(rows, columns);
  return rows * std::max<std::uint64_t>(columns, 2) + 2 * k * k;
}

double orthogonal_cost(std::uint64_t rows, std::uint64_t columns) {
  const auto k = static_cast<double>(std::min(rows, columns));
  const auto n = static_cast<double>(std::max(rows, columns));
  return kMuonSteps * k * k * (1.5 * n + 0.5 * k);
}

float muon_step(double lr, std::uint64_t rows, std::uint64_t columns, bool matches_rms) {
  const auto down = static_cast<double>(rows), across = static_cast<double>(columns);
  const double ratio =
      matches_rms ? 0.2 * std::sqrt(std::max(down, across)) : std::sqrt(std::max(1.0, down / across));
  return -static_cast<float>(lr * ratio);
}

}  // namespace forebay
