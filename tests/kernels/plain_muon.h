// The orthogonalisation of a matrix as the contract has it, in plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace forebay::kernel_test {

struct Extent {
  std::uint64_t rows, columns;
  std::uint64_t count() const { return rows * columns; }
};

// `descends`: chains run the wrong way, for tests of tests.
inline std::vector<float> plain_orthogonal(const Extent& e, const std::vector<float>& u,
                                           bool descends = false) {
  double all = 0.0;
  for (std::size_t row = 0; row < e.rows; ++row) {
    double lanes[16] = {};
    for (std::size_t j = 0; j < e.columns; ++j) {
      const double value = u[row * e.columns + j];
      lanes[j % 16] += value * value;
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    all += lanes[0];
  }
  const float divisor = std::max(static_cast<float>(std::sqrt(all)), 1e-7f);
  const std::size_t k = std::min(e.rows, e.columns), n = std::max(e.rows, e.columns);
  const bool is_tall = e.rows > e.columns;
  const auto at = [&](std::size_t i, std::size_t j) {
    return is_tall ? j * e.columns + i : i * e.columns + j;
  };
  std::vector<float> x(k * n), gram(k * k), polynomial(k * k), moved(k * n), result(k * n);
  for (std::size_t i = 0; i < k; ++i) {
    for (std::size_t j = 0; j < n; ++j) x[i * n + j] = u[at(i, j)] / divisor;
  }
  for (int step = 0; step < 5; ++step) {
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = 0; j < k; ++j) {
        float sum = 0.0f;
        for (std::size_t number = 0; number < n; ++number) {
          const std::size_t t = descends ? n - 1 - number : number;
          sum = std::fma(x[i * n + t], x[j * n + t], sum);
        }
        gram[i * k + j] = sum;
      }
    }
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = 0; j < k; ++j) {
        float sum = 0.0f;
        for (std::size_t t = 0; t < k; ++t) sum = std::fma(gram[i * k + t], gram[t * k + j], sum);
        polynomial[i * k + j] = std::fma(2.0315f, sum, -4.7750f * gram[i * k + j]);
      }
    }
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = 0; j < n; ++j) {
        float sum = 0.0f;
        for (std::size_t t = 0; t < k; ++t) sum = std::fma(polynomial[i * k + t], x[t * n + j], sum);
        moved[i * n + j] = sum;
      }
    }
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::fma(3.4445f, x[i], moved[i]);
  }
  for (std::size_t i = 0; i < k; ++i) {
    for (std::size_t j = 0; j < n; ++j) result[at(i, j)] = x[i * n + j] + 0.0f;
  }
  return result;
}

}  // namespace forebay::kernel_test
