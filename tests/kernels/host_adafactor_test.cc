// Adafactor's parts on the host: against the formulas in double over fifty steps, and the same bits for any
// number of threads and any runs that end at leaves.
#include "forebay/host_adafactor.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace forebay {
namespace {

// One parameter on one rank.
struct Parameter {
  FactoredShape shape;
  std::vector<float> master, factors, row_means;

  Parameter(Span<const std::uint64_t> dimensions, std::vector<float> start)
      : shape(factored_shape(dimensions, start.size())), master(std::move(start)) {
    factors.resize(shape.factor_count());
    row_means.resize(shape.batches);
  }

  // `cut`: elements of one run of the update, from a parameter that begins at element `place` of its unit.
  void step(const std::vector<float>& gradient, std::uint64_t t, double lr, float weight_decay,
            std::uint64_t place, std::uint64_t cut, const BlockRunner& runner) {
    std::vector<double> scratch(leaf_room(gradient.size()));
    FactoredRun run{gradient.data(), DataType::kFloat32, 1.0f, shape, 0, gradient.size(), place};
    std::vector<float> sums(shape.factor_count(), NAN);
    factor_sums({run, sums.data()}, runner);
    renew_factors({shape, adafactor_weight(t), factors.data(), sums.data(), row_means.data()}, runner);
    keep_factors({sums.data(), factors.data(), sums.size()}, runner);
    double squares[2] = {};
    update_squares({run, factors.data(), row_means.data(), scratch.data(), squares + 1}, runner);
    const auto for_each_cut = [&](auto visit) {
      for (std::uint64_t begin = 0; begin < master.size();) {
        const std::uint64_t end =
            std::min<std::uint64_t>(master.size(), (place + begin) / cut * cut + cut - place);
        visit(begin, end);
        begin = end;
      }
    };
    for_each_cut([&](std::uint64_t begin, std::uint64_t end) {
      parameter_squares(
          {master.data() + begin, DataType::kFloat32, end - begin, place + begin, scratch.data(), squares},
          runner, squares[0]);
    });
    float factor = 0.0f;
    adafactor_step({squares, 2, 1, lr, shape.count(), t, &factor}, runner);
    for_each_cut([&](std::uint64_t begin, std::uint64_t end) {
      FactoredUpdateArguments a;
      a.run = run;
      a.run.gradient = gradient.data() + begin;
      a.run.first = begin;
      a.run.count = end - begin;
      a.factors = factors.data();
      a.row_means = row_means.data();
      a.decay = -(static_cast<float>(lr) * weight_decay);
      a.step = factor;
      a.step_number = t;
      a.master = master.data() + begin;
      factored_update(a, runner);
    });
  }
};

// The formulas of torch.optim.Adafactor in double.
struct Reference {
  FactoredShape shape;
  std::vector<double> p, rows, columns;

  Reference(const FactoredShape& of, const std::vector<float>& start)
      : shape(of), p(start.begin(), start.end()), rows(of.row_count()), columns(of.batches * of.columns) {}

  void step(const std::vector<float>& gradient, int t, double lr, double weight_decay) {
    constexpr double kEpsilon = 0x1p-23;
    const auto mean_square = [](const std::vector<double>& values) {
      double sum = 0;
      for (const double value : values) sum += value * value;
      return sum / static_cast<double>(values.size());
    };
    const double weight = std::pow(t, -0.8);
    const double alpha = std::max(1e-3, std::sqrt(mean_square(p))) * std::min(lr, 1.0 / std::sqrt(t));
    std::vector<double> row_sums(rows.size()), column_sums(columns.size());
    const auto for_each = [&](auto visit) {
      for (std::size_t i = 0; i < p.size(); ++i) {
        const std::size_t row = i / shape.columns, matrix = row / shape.rows;
        visit(i, row, matrix, matrix * shape.columns + i % shape.columns);
      }
    };
    for_each([&](std::size_t i, std::size_t row, std::size_t, std::size_t column) {
      const double square = static_cast<double>(gradient[i]) * gradient[i];
      if (shape.has_rows) row_sums[row] += square;
      column_sums[column] += square;
    });
    for (std::size_t k = 0; k < rows.size(); ++k)
      rows[k] += weight * (row_sums[k] / static_cast<double>(shape.columns) - rows[k]);
    for (std::size_t k = 0; k < columns.size(); ++k)
      columns[k] += weight * (column_sums[k] / static_cast<double>(shape.rows) - columns[k]);
    std::vector<double> means(shape.batches), u(p.size());
    for (std::size_t k = 0; k < rows.size(); ++k)
      means[k / shape.rows] += rows[k] / static_cast<double>(shape.rows);
    for_each([&](std::size_t i, std::size_t row, std::size_t matrix, std::size_t column) {
      double moment = columns[column];
      if (shape.has_rows) moment *= rows[row] / std::max(means[matrix], kEpsilon);
      u[i] = gradient[i] / std::sqrt(std::max(moment, kEpsilon * kEpsilon));
    });
    const double excess = std::max(1.0, std::sqrt(mean_square(u)));
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = p[i] * (1 - lr * weight_decay) - alpha / excess * u[i];
  }
};

std::vector<float> drawn(std::size_t count, float mean, std::mt19937_64& random) {
  std::vector<float> values(count);
  for (float& value : values) value = std::normal_distribution<float>(mean, 1.0f)(random);
  return values;
}

const std::vector<std::vector<std::uint64_t>> kShapes = {{37, 53}, {515}, {3, 700, 7}, {1, 129}, {600, 1}};

std::size_t count_of(const std::vector<std::uint64_t>& shape) {
  std::size_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

TEST(HostAdafactor, FollowsADoublePrecisionReferenceOverFiftySteps) {
  constexpr double kTolerance = 1e-5;
  const BlockRunner runner(2);
  std::mt19937_64 random(20251);
  for (const auto& dimensions : kShapes) {
    Parameter parameter({dimensions.data(), dimensions.size()}, drawn(count_of(dimensions), 0.0f, random));
    Reference reference(parameter.shape, parameter.master);
    for (int t = 1; t <= 50; ++t) {
      const std::vector<float> gradient = drawn(parameter.master.size(), 0.1f, random);
      parameter.step(gradient, static_cast<std::uint64_t>(t), 1e-2, 0.1f, 0, kLeafCount, runner);
      reference.step(gradient, t, 1e-2, static_cast<double>(0.1f));
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < reference.p.size(); ++i)
      worst = std::max(worst, std::fabs(static_cast<double>(parameter.master[i]) - reference.p[i]));
    std::printf("%zu dimensions: largest difference after 50 steps: %.3g\n", dimensions.size(), worst);
    EXPECT_LT(worst, kTolerance);
  }
}

TEST(HostAdafactor, ThreadsAndRunsChangeNoBit) {
  const BlockRunner one(1), three(3);
  for (const auto& dimensions : kShapes) {
    std::mt19937_64 random(7);
    const std::vector<float> start = drawn(count_of(dimensions), 0.0f, random);
    Parameter a({dimensions.data(), dimensions.size()}, start), b = a;
    for (std::uint64_t t = 1; t <= 3; ++t) {
      const std::vector<float> gradient = drawn(start.size(), 0.1f, random);
      a.step(gradient, t, 1e-2, 0.1f, 64, kLeafCount, one);
      b.step(gradient, t, 1e-2, 0.1f, 64, std::uint64_t{1} << 40, three);
    }
    EXPECT_EQ(std::memcmp(a.master.data(), b.master.data(), 4 * start.size()), 0) << dimensions.size();
    EXPECT_EQ(a.factors, b.factors);
  }
}

// Slices of ranks cut rows; each gives its part of the sums.
TEST(HostAdafactor, SumsOfSlicesAddUpToThoseOfTheWhole) {
  const BlockRunner runner(2);
  std::mt19937_64 random(11);
  for (const auto& dimensions : kShapes) {
    const std::vector<float> gradient = drawn(count_of(dimensions), 0.0f, random);
    const FactoredShape shape = factored_shape({dimensions.data(), dimensions.size()}, gradient.size());
    std::vector<float> whole(shape.factor_count()), part(whole.size()), added(whole.size());
    factor_sums({{gradient.data(), DataType::kFloat32, 0.5f, shape, 0, gradient.size(), 0}, whole.data()},
                runner);
    for (std::size_t begin = 0; begin < gradient.size(); begin += 333) {
      const std::size_t count = std::min<std::size_t>(333, gradient.size() - begin);
      factor_sums(
          {{gradient.data() + begin, DataType::kFloat32, 0.5f, shape, begin, count, begin}, part.data()},
          runner);
      for (std::size_t k = 0; k < added.size(); ++k) added[k] += part[k];
    }
    for (std::size_t k = 0; k < added.size(); ++k) EXPECT_NEAR(added[k], whole[k], 1e-5f * whole[k]);
  }
}

// bf16 gradients that parameters take the place of, masters in fp32 and then in bf16, and an average.
TEST(HostAdafactor, EveryInstructionSetGivesTheSameBits) {
  const BlockRunner runner(2);
  for (const auto& dimensions : kShapes) {
    std::mt19937_64 random(13);
    const std::size_t count = count_of(dimensions), first = 3;
    std::vector<std::uint16_t> gradient(count - first), half(count - first);
    for (std::uint16_t& value : gradient) value = float_to_bfloat16(drawn(1, 0.1f, random)[0]);
    for (std::uint16_t& value : half) value = float_to_bfloat16(drawn(1, 0.0f, random)[0]);
    const std::vector<float> start = drawn(count - first, 0.0f, random);
    std::vector<std::vector<float>> results;
    for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
      hwy::SetSupportedTargetsForTest(rest & -rest);
      Parameter parameter({dimensions.data(), dimensions.size()}, std::vector<float>(count));
      FactoredUpdateArguments a;
      a.run = {gradient.data(), DataType::kBfloat16, 0.3f, parameter.shape, first, gradient.size(), 67};
      std::vector<float> sums(parameter.factors.size()), average = start, masters = start;
      factor_sums({a.run, sums.data()}, runner);
      renew_factors(
          {parameter.shape, 0.5f, parameter.factors.data(), sums.data(), parameter.row_means.data()}, runner);
      a.factors = sums.data();
      a.row_means = parameter.row_means.data();
      a.decay = -1e-3f, a.step = -1e-2f, a.step_number = 5;
      std::vector<double> scratch(leaf_room(count));
      double squares[2] = {};
      update_squares({a.run, a.factors, a.row_means, scratch.data(), squares}, runner);
      parameter_squares({start.data(), DataType::kFloat32, start.size(), 67, scratch.data(), squares + 1},
                        runner, 0.5);
      sums.push_back(static_cast<float>(squares[0] + squares[1]));
      a.factors = sums.data();
      a.master = masters.data();
      a.average = average.data(), a.average_weight = 0.25f;
      std::vector<std::uint16_t> parameters = gradient, halves = half;
      a.run.gradient = a.parameter = parameters.data();
      a.parameter_type = DataType::kBfloat16;
      factored_update(a, runner);
      a.run.gradient = gradient.data();
      a.half = {halves.data(), 11, 99};
      factored_update(a, runner);
      std::vector<float>& result = results.emplace_back(sums);
      result.insert(result.end(), masters.begin(), masters.end());
      result.insert(result.end(), average.begin(), average.end());
      for (const std::uint16_t value : parameters) result.push_back(bfloat16_to_float(value));
      for (const std::uint16_t value : halves) result.push_back(bfloat16_to_float(value));
    }
    hwy::SetSupportedTargetsForTest(0);
    EXPECT_GE(results.size(), 1u);
    for (const std::vector<float>& result : results) EXPECT_EQ(result, results[0]);
  }
}

// Behind a large sum small ones vanish one by one; added up first, they would not.
TEST(HostAdafactor, AddsTheLeavesFromTheFirstOn) {
  const BlockRunner runner(1);
  constexpr std::size_t kCount = 4 * kLeafCount;
  std::vector<float> masters(kCount);
  for (std::size_t i = 0; i < kCount; i += kLeafCount) masters[i] = i == 0 ? 0x1p27f : 1.0f;
  std::vector<double> scratch(leaf_room(kCount));

  double sum = 0.0;
  parameter_squares({masters.data(), DataType::kFloat32, kCount, 0, scratch.data(), &sum}, runner);

  EXPECT_EQ(sum, 0x1p54);
}

TEST(HostAdafactor, NoGradientLeavesAllButTheDecay) {
  const BlockRunner runner(1);
  Parameter parameter({}, std::vector<float>(600, 2.0f));
  parameter.step(std::vector<float>(600, 0.0f), 1, 1e-2, 0.5f, 0, kLeafCount, runner);
  for (const float value : parameter.master) EXPECT_FLOAT_EQ(value, 2.0f * (1 - 0.005f));
}

}  // namespace
}  // namespace forebay
