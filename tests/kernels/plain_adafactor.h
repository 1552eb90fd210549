// The sums and the update of Adafactor as the contract has them, in plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "forebay/adafactor.h"
#include "forebay/conversions.h"

namespace forebay::kernel_test {

// Elements [first, first + g.size()) of a parameter, which begin at element `place` of the unit.
struct PlainRun {
  FactoredShape shape;
  std::uint64_t first = 0;
  std::uint64_t place = 0;
  std::vector<float> g;  // Scaled.

  std::uint64_t end() const { return first + g.size(); }
  bool has(std::uint64_t element) const { return element >= first && element < end(); }
  double square(std::uint64_t element) const {
    const double value = g[element - first];
    return value * value;
  }
};

inline double folded(double (&lanes)[16]) {
  for (int half = 8; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// For tests of tests: `descends`: chains run the wrong way; `band_rows`: bands of another height.
inline std::vector<float> plain_factor_sums(const PlainRun& run, bool descends = false,
                                            std::uint64_t band_rows = 256) {
  const FactoredShape& shape = run.shape;
  std::vector<float> sums;
  for (std::uint64_t row = 0; row < shape.row_count(); ++row) {
    double lanes[16] = {};
    for (std::uint64_t i = 0; i < shape.columns; ++i) {
      const std::uint64_t j = descends ? shape.columns - 1 - i : i;
      if (run.has(row * shape.columns + j)) lanes[j % 16] += run.square(row * shape.columns + j);
    }
    sums.push_back(canonical(static_cast<float>(folded(lanes))));
  }
  for (std::uint64_t column = 0; column < shape.batches * shape.columns; ++column) {
    const std::uint64_t matrix = column / shape.columns;
    double total = 0.0;
    for (std::uint64_t begin = 0; begin < shape.rows; begin += band_rows) {
      const std::uint64_t end = std::min(begin + band_rows, shape.rows);
      double band = 0.0;
      for (std::uint64_t i = begin; i < end; ++i) {
        const std::uint64_t row = matrix * shape.rows + (descends ? begin + end - 1 - i : i);
        const std::uint64_t element = row * shape.columns + column % shape.columns;
        if (run.has(element)) band += run.square(element);
      }
      total += band;
    }
    sums.push_back(canonical(static_cast<float>(total)));
  }
  return sums;
}

// The sum of squares of values that begin at element `place` of the unit.
inline double plain_squares(const std::vector<float>& values, std::uint64_t place) {
  double sum = 0.0;
  for (std::uint64_t at = place; at < place + values.size();) {
    const std::uint64_t end = std::min(place + values.size(), (at / 512 + 1) * 512);
    double lanes[16] = {};
    for (; at < end; ++at) lanes[at % 16] += static_cast<double>(values[at - place]) * values[at - place];
    sum += folded(lanes);
  }
  return sum;
}

struct PlainFactors {
  std::vector<float> factors, row_means;
};

inline PlainFactors plain_renewal(const FactoredShape& shape, float weight, const std::vector<float>& before,
                                  const std::vector<float>& sums) {
  PlainFactors result;
  for (std::uint64_t i = 0; i < sums.size(); ++i) {
    const std::uint64_t count = i < shape.row_count() ? shape.columns : shape.rows;
    const float mean = sums[i] / static_cast<float>(count);
    result.factors.push_back(canonical(std::fma(weight, mean - before[i], before[i])));
  }
  for (std::uint64_t matrix = 0; shape.has_rows && matrix < shape.batches; ++matrix) {
    double lanes[16] = {};
    for (std::uint64_t i = 0; i < shape.rows; ++i) lanes[i % 16] += result.factors[matrix * shape.rows + i];
    result.row_means.push_back(static_cast<float>(folded(lanes) / static_cast<double>(shape.rows)));
  }
  return result;
}

// u of the run's elements.
inline std::vector<float> plain_updates(const PlainRun& run, const PlainFactors& all) {
  const FactoredShape& shape = run.shape;
  std::vector<float> updates;
  for (std::uint64_t element = run.first; element < run.end(); ++element) {
    const std::uint64_t row = element / shape.columns, matrix = row / shape.rows;
    float moment = all.factors[shape.row_count() + matrix * shape.columns + element % shape.columns];
    if (shape.has_rows) moment = all.factors[row] / std::max(all.row_means[matrix], 0x1p-23f) * moment;
    updates.push_back(run.g[element - run.first] / std::sqrt(moment > 0x1p-46f ? moment : 0x1p-46f));
  }
  return updates;
}

// The factor of u, from the sums of squares of all ranks.
inline float plain_step(double lr, std::uint64_t t, std::uint64_t count, double parameters, double updates) {
  const double alpha = std::max(1e-3, std::sqrt(parameters / static_cast<double>(count))) *
                       std::min(lr, 1.0 / std::sqrt(static_cast<double>(t)));
  return -static_cast<float>(alpha / std::max(1.0, std::sqrt(updates / static_cast<double>(count))));
}

}  // namespace forebay::kernel_test
