// Muon's parts on the host: against the formulas in double over fifty steps, and the same bits for any number
// of threads, any cut of elements and every instruction set.
#include "forebay/host_muon.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "forebay/conversions.h"
#include "tests/kernels/plain_muon.h"

namespace forebay {
namespace {

using kernel_test::Extent;
using kernel_test::plain_orthogonal;

// More and fewer rows than columns, less than a vector, tiles and panels that are not whole.
constexpr Extent kExtents[] = {{37, 53}, {130, 70}, {1, 129}, {600, 1}, {5, 3}, {193, 193}, {64, 140}};

// Smaller ones, for fifty steps in double.
constexpr Extent kReferenceExtents[] = {{37, 53}, {70, 40}, {1, 129}, {600, 1}, {5, 3}, {40, 40}};

std::vector<float> drawn(std::size_t count, float mean, std::mt19937_64& random) {
  std::vector<float> values(count);
  for (float& value : values) value = std::normal_distribution<float>(mean, 1.0f)(random);
  return values;
}

std::vector<float> orthogonal(const Extent& e, std::vector<float> u, const BlockRunner& runner) {
  std::vector<float> scratch(orthogonal_scratch_count(e.rows, e.columns), NAN);
  orthogonalise({u.data(), scratch.data(), e.rows, e.columns}, runner);
  return u;
}

using Matrix = std::vector<std::vector<double>>;

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c(a.size(), std::vector<double>(b[0].size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t t = 0; t < b.size(); ++t) {
      for (std::size_t j = 0; j < b[0].size(); ++j) c[i][j] += a[i][t] * b[t][j];
    }
  }
  return c;
}

Matrix turned(const Matrix& a) {
  Matrix t(a[0].size(), std::vector<double>(a.size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < a[0].size(); ++j) t[j][i] = a[i][j];
  }
  return t;
}

// torch.optim.Muon in double.
struct Reference {
  Extent e;
  std::vector<double> p, m;

  Reference(const Extent& extent, const std::vector<float>& start)
      : e(extent), p(start.begin(), start.end()), m(start.size()) {}

  std::vector<double> orthogonal(const std::vector<double>& u) const {
    Matrix x(e.rows, std::vector<double>(e.columns));
    double squares = 0;
    for (const double value : u) squares += value * value;
    const double norm = std::max(std::sqrt(squares), 1e-7);
    for (std::size_t i = 0; i < u.size(); ++i) x[i / e.columns][i % e.columns] = u[i] / norm;
    if (e.rows > e.columns) x = turned(x);
    for (int step = 0; step < 5; ++step) {
      Matrix gram = product(x, turned(x));
      const Matrix square = product(gram, gram);
      for (std::size_t i = 0; i < gram.size(); ++i) {
        for (std::size_t j = 0; j < gram.size(); ++j)
          gram[i][j] = -4.7750 * gram[i][j] + 2.0315 * square[i][j];
      }
      const Matrix moved = product(gram, x);
      for (std::size_t i = 0; i < x.size(); ++i) {
        for (std::size_t j = 0; j < x[0].size(); ++j) x[i][j] = 3.4445 * x[i][j] + moved[i][j];
      }
    }
    if (e.rows > e.columns) x = turned(x);
    std::vector<double> flat;
    for (const std::vector<double>& row : x) flat.insert(flat.end(), row.begin(), row.end());
    return flat;
  }

  void step(const std::vector<float>& gradient, double lr, double weight_decay, double momentum,
            bool matches_rms) {
    std::vector<double> u(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[i] = momentum * m[i] + (1 - momentum) * gradient[i];
      u[i] = momentum * m[i] + (1 - momentum) * gradient[i];
    }
    const std::vector<double> o = orthogonal(u);
    const auto rows = static_cast<double>(e.rows), columns = static_cast<double>(e.columns);
    const double ratio =
        matches_rms ? 0.2 * std::sqrt(std::max(rows, columns)) : std::sqrt(std::max(1.0, rows / columns));
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = p[i] * (1 - lr * weight_decay) - lr * ratio * o[i];
  }
};

TEST(HostMuon, FollowsADoublePrecisionReferenceOverFiftySteps) {
  constexpr double kTolerance = 1e-5;
  constexpr double kMomentum = 0.95, kRate = 1e-3;
  const auto a1 = static_cast<float>(1.0 - kMomentum);
  const BlockRunner runner(2);
  std::mt19937_64 random(20261);
  for (const Extent& e : kReferenceExtents) {
    for (const bool matches_rms : {false, true}) {
      std::vector<float> p = drawn(e.count(), 0.0f, random), m(p.size());
      Reference reference(e, p);
      for (int t = 1; t <= 50; ++t) {
        const std::vector<float> gradient = drawn(p.size(), 0.1f, random);
        std::vector<float> u(m.size());
        muon_momentum({{gradient.data()}, a1, m.data(), u.data(), u.size()}, runner);
        u = orthogonal(e, u, runner);
        MuonUpdateArguments a;
        a.gradient = {gradient.data()};
        a.a1 = a1;
        a.m = m.data();
        a.u = u.data();
        a.count = p.size();
        a.master = p.data();
        a.decay = -(static_cast<float>(kRate) * 0.1f);
        a.step = muon_step(kRate, e.rows, e.columns, matches_rms);
        muon_update(a, runner);
        reference.step(gradient, kRate, static_cast<double>(0.1f), kMomentum, matches_rms);
      }
      double worst = 0.0;
      for (std::size_t i = 0; i < p.size(); ++i)
        worst = std::max(worst, std::fabs(static_cast<double>(p[i]) - reference.p[i]));
      std::printf("%llu x %llu, %s: largest difference after 50 steps: %.3g\n",
                  static_cast<unsigned long long>(e.rows), static_cast<unsigned long long>(e.columns),
                  matches_rms ? "match-rms-adamw" : "original", worst);
      EXPECT_LT(worst, kTolerance);
    }
  }
}

TEST(HostMuon, EveryInstructionSetAndThreadCountGivesTheBitsOfThePlainLoops) {
  const BlockRunner one(1), three(3);
  std::mt19937_64 random(7);
  for (const Extent& e : kExtents) {
    const std::vector<float> u = drawn(e.count(), 0.1f, random);
    const std::vector<float> expected = plain_orthogonal(e, u);
    int targets = 0;
    for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1, ++targets) {
      hwy::SetSupportedTargetsForTest(rest & -rest);
      const std::vector<float> actual = orthogonal(e, u, three);
      EXPECT_EQ(std::memcmp(actual.data(), expected.data(), 4 * actual.size()), 0)
          << e.rows << " x " << e.columns << " on " << hwy::TargetName(rest & -rest);
    }
    hwy::SetSupportedTargetsForTest(0);
    EXPECT_GE(targets, 1);
    EXPECT_EQ(orthogonal(e, u, one), expected) << e.rows << " x " << e.columns << " on one thread";
  }
}

// bf16 gradients that parameters take the place of, masters in fp32 and then in bf16, and an average.
TEST(HostMuon, CutsAndInstructionSetsChangeNoBitOfAnUpdate) {
  const BlockRunner runner(2);
  constexpr std::size_t kCount = 3001;
  std::mt19937_64 random(13);
  std::vector<std::uint16_t> gradient(kCount), half(kCount);
  for (std::uint16_t& value : gradient) value = float_to_bfloat16(drawn(1, 0.1f, random)[0]);
  for (std::uint16_t& value : half) value = float_to_bfloat16(drawn(1, 0.0f, random)[0]);
  const std::vector<float> masters = drawn(kCount, 0.0f, random), m = drawn(kCount, 0.0f, random),
                           u = drawn(kCount, 0.0f, random);
  std::vector<std::vector<float>> results;
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(rest & -rest);
    for (const std::size_t cut : {kCount, std::size_t{700}}) {
      std::vector<float> p = masters, moments = m, average = masters, blended = m;
      std::vector<std::uint16_t> parameters = gradient, halves = half;
      for (std::size_t at = 0; at < kCount; at += cut) {
        MuonUpdateArguments a;
        a.a1 = 0.05f;
        a.u = u.data() + at;
        a.count = std::min(cut, kCount - at);
        a.decay = -1e-3f, a.step = -1e-2f, a.step_number = 5;
        a.gradient = {gradient.data() + at, DataType::kBfloat16, 0.3f};
        float* const values = blended.data() + at;
        muon_momentum({a.gradient, a.a1, values, values, a.count}, runner);
        a.m = moments.data() + at;
        a.master = p.data() + at;
        a.average = average.data() + at, a.average_weight = 0.25f;
        a.gradient.values = a.parameter = parameters.data() + at;
        a.parameter_type = DataType::kBfloat16;
        muon_update(a, runner);
        a.gradient.values = gradient.data() + at;
        a.parameter = nullptr;
        a.half = {halves.data() + at, 11 + at, 99};
        muon_update(a, runner);
      }
      std::vector<float>& result = results.emplace_back(p);
      for (const std::vector<float>* more : {&moments, &average, &blended})
        result.insert(result.end(), more->begin(), more->end());
      for (const std::uint16_t value : parameters) result.push_back(bfloat16_to_float(value));
      for (const std::uint16_t value : halves) result.push_back(bfloat16_to_float(value));
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  for (const std::vector<float>& result : results) EXPECT_EQ(result, results[0]);
  // The same approach twice.
  const float g = bfloat16_to_float(gradient[0]) * 0.3f;
  const float first = std::fma(0.05f, g - m[0], m[0]);
  EXPECT_EQ(results[0][3 * kCount], std::fma(0.05f, g - first, first));
}

TEST(Muon, CountsItsScratchAndItsWork) {
  EXPECT_EQ(orthogonal_scratch_count(3, 5), 3u * 5 + 2 * 9);
  EXPECT_EQ(orthogonal_scratch_count(5, 3), 5u * 3 + 2 * 9);
  EXPECT_EQ(orthogonal_scratch_count(5, 1), 5u * 2 + 2);  // The sums of rows are in double.
  EXPECT_DOUBLE_EQ(orthogonal_cost(8, 4), 5 * (1.5 * 8 * 16 + 0.5 * 64));
  EXPECT_DOUBLE_EQ(orthogonal_cost(4, 8), orthogonal_cost(8, 4));
}

TEST(Muon, AStepGrowsWithTheShape) {
  EXPECT_FLOAT_EQ(muon_step(0.1, 4, 1, false), -0.2f);
  EXPECT_FLOAT_EQ(muon_step(0.1, 1, 4, false), -0.1f);
  EXPECT_FLOAT_EQ(muon_step(0.1, 4, 1, true), -0.04f);
  EXPECT_FLOAT_EQ(muon_step(0.1, 1, 25, true), -0.1f);
}

TEST(HostMuon, AMatrixOfZerosStaysOne) {
  const BlockRunner runner(1);
  for (const float value : orthogonal({20, 30}, std::vector<float>(600, 0.0f), runner)) {
    EXPECT_EQ(value, 0.0f);
    EXPECT_FALSE(std::signbit(value));
  }
}

TEST(HostMuon, AnElementThatVanishesIsNoNegativeZero) {
  const BlockRunner runner(1);
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();

  const float value = orthogonal({2, 3}, {-46 * kLeast, -25 * kLeast, 3, 1, -48 * kLeast, 1}, runner)[1];

  EXPECT_EQ(value, 0.0f);
  EXPECT_FALSE(std::signbit(value));
}

}  // namespace
}  // namespace forebay
