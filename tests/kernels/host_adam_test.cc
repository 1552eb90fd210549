// The host step: against the scalar definitions bit for bit, for every instruction set, blocks and
// threads; the accuracy of narrow m and v, as host_adam.h states it; and that training goes on as with
// fp32 ones.
#include "forebay/host_adam.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <sched.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/host_kernels.h"
#include "kernels/host_moments.h"
#include "tests/kernels/kernel_test_support.h"

namespace forebay {
namespace {

using host_kernels::MomentKernels;
using host_kernels::Rounding;
using kernel_test::Array;
using kernel_test::fill_hard;
using kernel_test::kTypes;
using kernel_test::same_bits;

constexpr MomentFormat kFormats[] = {MomentFormat::kFloat32, MomentFormat::kBfloat16, MomentFormat::kBlock8};
constexpr MomentFormat kNarrowFormats[] = {MomentFormat::kBfloat16, MomentFormat::kBlock8};
constexpr MomentRounding kRoundings[] = {MomentRounding::kNearest, MomentRounding::kDithered};

// m and v in a format, at an offset in elements from an aligned start, between guards that nobody may change.
class KeptMoments {
 public:
  KeptMoments(MomentFormat format, std::size_t count, std::size_t offset)
      : format_(format), offset_(offset), count_(count) {
    for (auto& bytes : kept_) bytes.assign(moment_bytes(format, count + offset + 2 * kGuard), 0x5A);
    for (auto& bytes : exponents_) {
      bytes.assign(moment_exponent_bytes(format, count) + offset + 2 * kGuard, 0x5A);
    }
    for (int i = 0; i < 2; ++i) {
      std::memset(start(i), 0, moment_bytes(format, count));
      std::memset(exponent_start(i), 0, moment_exponent_bytes(format, count));
    }
  }

  Moments get() { return {format_, start(0), start(1), exponent_start(0), exponent_start(1)}; }
  std::size_t count() const { return count_; }
  friend bool operator==(const KeptMoments& a, const KeptMoments& b) {
    return a.kept_[0] == b.kept_[0] && a.kept_[1] == b.kept_[1] && a.exponents_[0] == b.exponents_[0] &&
           a.exponents_[1] == b.exponents_[1];
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::byte* start(int i) {
    return reinterpret_cast<std::byte*>(kept_[i].data()) + moment_bytes(format_, kGuard + offset_);
  }
  std::uint8_t* exponent_start(int i) { return exponents_[i].data() + kGuard + offset_; }

  MomentFormat format_;
  std::size_t offset_, count_;
  std::vector<std::uint8_t> kept_[2], exponents_[2];
};

// Calls `function(kernels)` once per instruction set that gives another table.
void for_each_target(const std::function<void(const MomentKernels&)>& function) {
  std::vector<std::string> seen;
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(rest & -rest);
    const MomentKernels& kernels = host_kernels::simd_moment_kernels();
    if (std::find(seen.begin(), seen.end(), kernels.target) == seen.end()) {
      seen.emplace_back(kernels.target);
      SCOPED_TRACE(kernels.target);
      function(kernels);
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  std::string names;
  for (const std::string& name : seen) names += " " + name;
  std::printf("instruction sets:%s\n", names.c_str());
}

AdamWArguments adamw_at_step(std::uint64_t step, double lr, double beta2) {
  AdamWArguments a = {};
  a.gradient_type = a.parameter_type = DataType::kFloat32;
  a.factor = 1.0f;
  a.lr = static_cast<float>(lr), a.weight_decay = 0.01f, a.eps = 1e-8f;
  a.beta1 = 0.9f, a.beta2 = static_cast<float>(beta2);
  a.a1 = static_cast<float>(1.0 - 0.9), a.a2 = static_cast<float>(1.0 - beta2);
  BiasCorrection correction;
  bias_corrections(0.9, beta2, step, &correction, 1);
  a.c1 = correction.c1, a.s2 = correction.s2;
  return a;
}

// The step as host_adam.h tells it, one element at a time.
void reference_step(const HostAdamArguments& a) {
  const std::size_t count = a.update.count;
  if (count == 0) return;
  std::vector<float> m(count), v(count);
  if (a.moments.format == MomentFormat::kFloat32) {
    std::memcpy(m.data(), a.moments.m, count * sizeof(float));
    std::memcpy(v.data(), a.moments.v, count * sizeof(float));
  } else {
    host_kernels::scalar_moment_kernels().load(a.moments, 0, count, m.data(), v.data());
  }
  AdamWArguments update = a.update;
  update.m = m.data(), update.v = v.data();
  host_kernels::scalar_kernels().adamw(update, 0, count);
  if (a.moments.format == MomentFormat::kFloat32) {
    std::memcpy(a.moments.m, m.data(), count * sizeof(float));
    std::memcpy(a.moments.v, v.data(), count * sizeof(float));
  } else {
    host_kernels::scalar_moment_kernels().store(
        m.data(), v.data(), 0, count, a.moments,
        {a.rounding == MomentRounding::kDithered, definitions::dither_seed(a.step)});
  }
}

class HostAdam : public ::testing::Test {
 protected:
  // TBB has no more workers than processors unless asked, and three threads shall be three on any machine.
  tbb::global_control workers_{tbb::global_control::max_allowed_parallelism, 4};
  std::mt19937_64 random_{kernel_test::test_seed()};

  // `scale` is the magnitude of most of a block's elements; some are hard.
  std::vector<float> values(std::size_t count, bool hard, bool positive) {
    std::vector<float> result(count);
    float scale = 1.0f;
    bool block_is_hard = false;
    for (std::size_t i = 0; i < count; ++i) {
      if (i % kMomentBlockCount == 0) {
        scale = std::ldexp(1.0f, static_cast<int>(random_() % 240) - 120);
        block_is_hard = hard && random_() % 3 == 0;
      }
      const int smaller = static_cast<int>(random_() % 40) * static_cast<int>(random_() % 2);
      result[i] = std::ldexp(std::uniform_real_distribution<float>(-2.0f, 2.0f)(random_), -smaller) * scale;
      if (random_() % 16 == 0) result[i] = 0.0f;
      if (block_is_hard && random_() % 64 == 0) {
        result[i] = float_from_bits(static_cast<std::uint32_t>(random_()));
      }
      if (positive) result[i] = std::fabs(result[i]);
    }
    return result;
  }
};

TEST_F(HostAdam, EveryInstructionSetLoadsAndStoresTheDefinitionsBits) {
  for_each_target([&](const MomentKernels& kernels) {
    for (const MomentFormat format : kNarrowFormats) {
      for (const MomentRounding rounding : kRoundings) {
        for (int round = 0; round < 120; ++round) {
          const std::size_t count = round < 40 ? static_cast<std::size_t>(round) : random_() % 2000;
          const std::size_t offset = random_() % 7;
          const std::vector<float> m = values(count, true, false), v = values(count, true, round % 4 != 0);
          const Rounding how = {rounding == MomentRounding::kDithered, static_cast<std::uint32_t>(random_())};
          KeptMoments expected(format, count, offset), got = expected;

          host_kernels::scalar_moment_kernels().store(m.data(), v.data(), 0, count, expected.get(), how);
          kernels.store(m.data(), v.data(), 0, count, got.get(), how);

          ASSERT_TRUE(got == expected) << count << " elements, " << moment_format_name(format);

          // Any bytes at all may be read, those of exponents that are never written too.
          for (std::size_t i = 0; i < moment_bytes(format, count) && round % 2 == 0; ++i) {
            static_cast<std::uint8_t*>(got.get().m)[i] = static_cast<std::uint8_t>(random_());
            static_cast<std::uint8_t*>(got.get().v)[i] = static_cast<std::uint8_t>(random_());
          }
          for (std::size_t i = 0; i < moment_exponent_bytes(format, count) && round % 4 == 0; ++i) {
            got.get().m_exponents[i] = static_cast<std::uint8_t>(random_());
            got.get().v_exponents[i] = static_cast<std::uint8_t>(random_());
          }
          Array wide[4] = {Array(DataType::kFloat32, count, offset), Array(DataType::kFloat32, count, offset),
                           Array(DataType::kFloat32, count, offset),
                           Array(DataType::kFloat32, count, offset)};
          host_kernels::scalar_moment_kernels().load(got.get(), 0, count, wide[0].floats(), wide[1].floats());
          kernels.load(got.get(), 0, count, wide[2].floats(), wide[3].floats());

          ASSERT_TRUE(same_bits("m", wide[2], wide[0])) << moment_format_name(format);
          ASSERT_TRUE(same_bits("v", wide[3], wide[1])) << moment_format_name(format);
        }
      }
    }
  });
}

// One step over each format, gradient type and parameter type; sizes about those of blocks and tiles.
TEST_F(HostAdam, GivesTheDefinitionsBitsOnAnyNumberOfThreadsAndInstructionSet) {
  const BlockRunner one(1), three(3);
  for_each_target([&](const MomentKernels&) {
    int combination = 0;
    for (const MomentFormat format : kFormats) {
      for (const DataType gradient_type : kTypes) {
        for (int parameter = 0; parameter < 4; ++parameter) {
          for (const std::size_t count :
               {std::size_t{0}, std::size_t{1}, 255 + random_() % 3, 1023 + random_() % 3, random_() % 5000,
                2 * 65536 + random_() % 1500}) {
            // The large ones are slow: one in five.
            if (++combination % 5 != 0 && count > 65536) continue;
            // With 6 most parameters begin where vectors are aligned, with others few.
            const std::size_t offset = random_() % 2 == 0 ? 6 : random_() % 17;
            Array gradient(gradient_type, count, offset);
            fill_hard(gradient, gradient_type, random_);
            const std::vector<float> m = values(count, true, false), v = values(count, true, true);
            KeptMoments expected(format, count, offset);
            ASSERT_TRUE(
                store_moments(m.data(), v.data(), count, expected.get(), MomentRounding::kNearest, 0, one)
                    .ok());
            KeptMoments got[2] = {expected, expected};
            Array expected_master(DataType::kFloat32, count, offset + 1);
            fill_hard(expected_master, DataType::kFloat32, random_);
            Array master[2] = {expected_master, expected_master};
            const DataType parameter_type = kTypes[parameter % 3];
            Array expected_parameter(parameter_type, count, offset + 2);
            Array narrow[2] = {expected_parameter, expected_parameter};
            HostAdamArguments a = {};
            a.update = adamw_at_step(3, 1e-3, 0.999);
            a.update.count = count, a.update.factor = 0.7f;
            a.update.gradient = gradient.data(), a.update.gradient_type = gradient_type;
            a.update.parameter_type = parameter_type;
            a.rounding = kRoundings[combination % 2];
            a.step = random_();
            const auto with = [&](Array& p, Array& low, KeptMoments& kept) {
              a.update.master = p.floats();
              a.update.parameter = parameter < 3 ? low.data() : nullptr;
              a.moments = kept.get();
              return a;
            };

            reference_step(with(expected_master, expected_parameter, expected));
            ASSERT_TRUE(host_adam(with(master[0], narrow[0], got[0]), one).ok());
            ASSERT_TRUE(host_adam(with(master[1], narrow[1], got[1]), three).ok());

            for (int i = 0; i < 2; ++i) {
              ASSERT_TRUE(same_bits("master", master[i], expected_master)) << moment_format_name(format);
              ASSERT_TRUE(same_bits("parameter", narrow[i], expected_parameter))
                  << moment_format_name(format);
              ASSERT_TRUE(got[i] == expected) << moment_format_name(format) << ", " << count << " elements";
            }
          }
        }
      }
    }
  });
}

// A group of vectors where all is finite takes a short way, and a block whose v are all in the range of its
// codes another one. So three steps each: with v that are all large, with one that is zero or tiny, with one
// gradient that is infinite, huge or NaN, and with constants that the short ways do not take.
TEST_F(HostAdam, RareValuesAndConstantsGiveTheDefinitionsBits) {
  const BlockRunner runner(1);
  const std::size_t count = 5 * kMomentBlockCount + 77;
  struct Constants {
    float beta1, beta2, a2, eps, s2;
  };
  const Constants usual = {0.9f, 0.999f, 0.001f, 1e-8f, 0.5f};
  std::vector<Constants> constants(9, usual);
  constants[1].beta1 = 0.0f, constants[2].beta1 = 1e-9f, constants[3].beta1 = -0.5f;
  constants[4].beta1 = 1.5f, constants[5].beta2 = 0.0f, constants[6].a2 = -0.5f;
  constants[7].eps = 0.0f, constants[8].s2 = 1.0f;
  for_each_target([&](const MomentKernels&) {
    for (const MomentFormat format : kFormats) {
      for (const MomentRounding rounding : kRoundings) {
        for (const float rare : {1.0f, 0.0f, 0x1p-60f, 0x1p-149f, 0x1p100f, INFINITY, NAN}) {
          for (const Constants& c : constants) {
            Array gradient(DataType::kFloat32, count, 1), master(DataType::kFloat32, count, 2);
            for (std::size_t i = 0; i < count; ++i) {
              const float g = std::uniform_real_distribution<float>(0.5f, 2.0f)(random_);
              gradient.set(i, float_bits(random_() % 2 == 0 ? g : -g));
              master.set(i, float_bits(g));
            }
            const std::size_t at_rare = kMomentBlockCount + random_() % (2 * kMomentBlockCount);
            gradient.set(at_rare, float_bits(rare));
            Array parameter(DataType::kBfloat16, count, 6);
            Array expected_master = master, expected_parameter = parameter;
            KeptMoments kept(format, count, 0), expected(format, count, 0);
            HostAdamArguments a = {};
            a.update = adamw_at_step(1, 1e-3, 0.999);
            a.update.count = count, a.update.gradient = gradient.data();
            a.update.parameter_type = DataType::kBfloat16;
            a.update.beta1 = c.beta1, a.update.beta2 = c.beta2, a.update.a2 = c.a2;
            a.update.eps = c.eps, a.update.s2 = c.s2;
            a.rounding = rounding;
            for (a.step = 1; a.step <= 3; ++a.step) {
              // Then only what is kept has come from the rare value.
              if (a.step == 3) gradient.set(at_rare, float_bits(1.0f));
              a.update.master = expected_master.floats(), a.update.parameter = expected_parameter.data();
              a.moments = expected.get();
              reference_step(a);
              a.update.master = master.floats(), a.update.parameter = parameter.data();
              a.moments = kept.get();
              ASSERT_TRUE(host_adam(a, runner).ok());

              SCOPED_TRACE(std::string(moment_format_name(format)) + ", a gradient of " +
                           std::to_string(rare) + ", constants " + std::to_string(&c - constants.data()));
              ASSERT_TRUE(same_bits("master", master, expected_master));
              ASSERT_TRUE(same_bits("parameter", parameter, expected_parameter));
              ASSERT_TRUE(kept == expected);
            }
          }
        }
      }
    }
  });
}

// Where a caller cuts its arrays, for staging or for placement, changes nothing.
TEST_F(HostAdam, PartsGiveTheSameBitsAsTheWhole) {
  const BlockRunner runner(2);
  const std::size_t count = 40 * kMomentBlockCount + 77;
  for (const MomentFormat format : kFormats) {
    Array gradient(DataType::kBfloat16, count, 0), master(DataType::kFloat32, count, 0);
    fill_hard(gradient, DataType::kBfloat16, random_);
    fill_hard(master, DataType::kFloat32, random_);
    Array narrow(DataType::kBfloat16, count, 0);
    Array parts_master = master, parts_narrow = narrow;
    KeptMoments whole(format, count, 0), parts(format, count, 0);
    HostAdamArguments a = {};
    a.update = adamw_at_step(1, 1e-3, 0.95);
    a.update.gradient = gradient.data(), a.update.gradient_type = DataType::kBfloat16;
    a.update.parameter_type = DataType::kBfloat16;
    a.step = 1;

    a.update.count = count;
    a.update.master = master.floats(), a.update.parameter = narrow.data(), a.moments = whole.get();
    ASSERT_TRUE(host_adam(a, runner).ok());
    for (std::size_t begin = 0; begin < count;) {
      const std::size_t part = std::min<std::size_t>(count - begin, kMomentBlockCount * (1 + random_() % 12));
      HostAdamArguments b = a;
      b.update.count = part;
      b.update.gradient = static_cast<const std::uint16_t*>(gradient.data()) + begin;
      b.update.master = parts_master.floats() + begin;
      b.update.parameter = static_cast<std::uint16_t*>(parts_narrow.data()) + begin;
      b.moments = parts.get();
      b.moments.m = static_cast<std::byte*>(b.moments.m) + moment_bytes(format, begin);
      b.moments.v = static_cast<std::byte*>(b.moments.v) + moment_bytes(format, begin);
      b.moments.m_exponents += moment_exponent_bytes(format, begin);
      b.moments.v_exponents += moment_exponent_bytes(format, begin);
      ASSERT_TRUE(host_adam(b, runner).ok());
      begin += part;
    }

    EXPECT_TRUE(same_bits("master", parts_master, master));
    EXPECT_TRUE(same_bits("parameter", parts_narrow, narrow));
    EXPECT_TRUE(parts == whole) << moment_format_name(format);
  }
}

TEST_F(HostAdam, AParameterMayTakeThePlaceOfItsGradient) {
  const BlockRunner runner(2);
  const std::size_t count = 65536 + 40 * kMomentBlockCount + 77;
  for (const MomentFormat format : kFormats) {
    for (const DataType type : kTypes) {
      // With 6 the arrays begin where vectors are aligned, with 3 they do not.
      for (const std::size_t offset : {std::size_t{6}, std::size_t{3}}) {
        Array gradient(type, count, offset), master(DataType::kFloat32, count, 0);
        fill_hard(gradient, type, random_);
        fill_hard(master, DataType::kFloat32, random_);
        Array apart(type, count, offset), together = gradient, together_master = master;
        KeptMoments kept(format, count, 0), together_kept = kept;
        HostAdamArguments a = {};
        a.update = adamw_at_step(1, 1e-3, 0.95);
        a.update.count = count, a.update.gradient_type = a.update.parameter_type = type;
        a.step = 1;

        a.update.gradient = gradient.data(), a.update.parameter = apart.data();
        a.update.master = master.floats(), a.moments = kept.get();
        ASSERT_TRUE(host_adam(a, runner).ok());
        a.update.gradient = together.data(), a.update.parameter = together.data();
        a.update.master = together_master.floats(), a.moments = together_kept.get();
        ASSERT_TRUE(host_adam(a, runner).ok());

        ASSERT_TRUE(same_bits("parameter", together, apart)) << moment_format_name(format);
        ASSERT_TRUE(same_bits("master", together_master, master)) << moment_format_name(format);
        ASSERT_TRUE(together_kept == kept) << moment_format_name(format);
      }
    }
  }
}

// One NaN is as good as another, so all are kept as one.
TEST_F(HostAdam, MomentsInFp32KeepOneNan) {
  const BlockRunner runner(1);
  const std::vector<float> m = {1.0f, float_from_bits(0x7FC12345u), float_from_bits(0xFF800001u), -0.0f};
  const std::vector<float> v = {float_from_bits(0xFFC00000u), 2.0f, float_from_bits(0x7FFFFFFFu), 0.0f};
  KeptMoments kept(MomentFormat::kFloat32, m.size(), 0);
  ASSERT_TRUE(
      store_moments(m.data(), v.data(), m.size(), kept.get(), MomentRounding::kNearest, 0, runner).ok());
  const auto* const kept_m = static_cast<const float*>(kept.get().m);
  const auto* const kept_v = static_cast<const float*>(kept.get().v);
  for (std::size_t i = 0; i < m.size(); ++i) {
    EXPECT_EQ(float_bits(kept_m[i]), float_bits(canonical(m[i]))) << i;
    EXPECT_EQ(float_bits(kept_v[i]), float_bits(canonical(v[i]))) << i;
  }
}

// The worst cases that host_adam.h states, element by element.
TEST_F(HostAdam, RoundingStaysWithinTheStatedBounds) {
  const BlockRunner runner(1);
  const std::size_t count = 400 * kMomentBlockCount;
  for (const MomentRounding rounding : kRoundings) {
    const bool nearest = rounding == MomentRounding::kNearest;
    const std::vector<float> m = values(count, false, false), v = values(count, false, true);
    std::vector<float> kept_m(count), kept_v(count);

    KeptMoments half(MomentFormat::kBfloat16, count, 0);
    ASSERT_TRUE(store_moments(m.data(), v.data(), count, half.get(), rounding, 7, runner).ok());
    ASSERT_TRUE(load_moments(half.get(), count, kept_m.data(), kept_v.data(), runner).ok());
    for (std::size_t i = 0; i < count; ++i) {
      const double part = nearest ? 1.0 / 257 : 1.0 / 128;
      // bf16 subnormals are multiples of 2^-133.
      ASSERT_LE(std::fabs(double{kept_m[i]} - m[i]), std::max(std::fabs(m[i]) * part, 0x1p-133)) << m[i];
      ASSERT_LE(std::fabs(double{kept_v[i]} - v[i]), std::max(v[i] * part, 0x1p-133)) << v[i];
    }

    KeptMoments codes(MomentFormat::kBlock8, count, 0);
    ASSERT_TRUE(store_moments(m.data(), v.data(), count, codes.get(), rounding, 7, runner).ok());
    ASSERT_TRUE(load_moments(codes.get(), count, kept_m.data(), kept_v.data(), runner).ok());
    double worst_m = 0.0, worst_v = 0.0;
    for (std::size_t start = 0; start < count; start += kMomentBlockCount) {
      double greatest_m = 0.0, greatest_v = 0.0;
      for (std::size_t i = start; i < start + kMomentBlockCount; ++i) {
        greatest_m = std::max(greatest_m, std::fabs(double{m[i]}));
        greatest_v = std::max(greatest_v, double{v[i]});
      }
      for (std::size_t i = start; i < start + kMomentBlockCount; ++i) {
        const double part = nearest ? 1.0 / 17 : 1.0 / 8;
        const double least_m = std::max(greatest_m * std::exp2(nearest ? -17.9 : -16.9), 0x1p-112);
        const double least_v = std::max(greatest_v * std::exp2(-30.7), 0x1p-112);
        const double m_error = std::fabs(double{kept_m[i]} - m[i]);
        const double v_error = std::fabs(double{kept_v[i]} - v[i]);
        ASSERT_LE(m_error, std::max(std::fabs(m[i]) * part, least_m)) << m[i] << " beside " << greatest_m;
        ASSERT_LE(v_error, std::max(v[i] * part, least_v)) << v[i] << " beside " << greatest_v;
        ASSERT_EQ(kept_v[i] == 0.0f, v[i] == 0.0f) << v[i];
        ASSERT_TRUE(kept_m[i] == 0.0f || std::signbit(kept_m[i]) == std::signbit(m[i])) << m[i];
        worst_m = std::max(worst_m, m_error / std::max(std::fabs(m[i]) * part, least_m));
        worst_v = std::max(worst_v, v_error / std::max(v[i] * part, least_v));
      }
    }
    // The stated bounds are near, not merely loose.
    EXPECT_GT(worst_m, 0.9);
    EXPECT_GT(worst_v, 0.9);
  }
}

TEST_F(HostAdam, ABlockWithAnElementThatIsNotFiniteIsNaNAndOthersAreNot) {
  const BlockRunner runner(1);
  const std::size_t count = 3 * kMomentBlockCount;
  for (const float bad : {INFINITY, -INFINITY, NAN, 3.3e38f}) {
    std::vector<float> m(count, 1.0f), v(count, 2.0f), kept_m(count), kept_v(count);
    m[kMomentBlockCount + 5] = bad;
    v[2 * kMomentBlockCount + 9] = bad;
    KeptMoments codes(MomentFormat::kBlock8, count, 0);

    ASSERT_TRUE(
        store_moments(m.data(), v.data(), count, codes.get(), MomentRounding::kDithered, 0, runner).ok());
    ASSERT_TRUE(load_moments(codes.get(), count, kept_m.data(), kept_v.data(), runner).ok());

    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(std::isnan(kept_m[i]), i / kMomentBlockCount == 1) << i;
      EXPECT_EQ(std::isnan(kept_v[i]), i / kMomentBlockCount == 2) << i;
    }
  }
}

TEST_F(HostAdam, LoadingAndStoringAgainChangesNoValue) {
  const BlockRunner runner(1);
  const std::size_t count = 300 * kMomentBlockCount + 31;
  for (const MomentFormat format : kFormats) {
    for (const MomentRounding rounding : kRoundings) {
      const std::vector<float> m = values(count, true, false), v = values(count, true, true);
      KeptMoments first(format, count, 0), second(format, count, 0);
      std::vector<float> once[2] = {m, v}, twice[2] = {m, v};
      ASSERT_TRUE(store_moments(m.data(), v.data(), count, first.get(), rounding, 1, runner).ok());
      ASSERT_TRUE(load_moments(first.get(), count, once[0].data(), once[1].data(), runner).ok());

      for (const MomentRounding again : kRoundings) {
        ASSERT_TRUE(
            store_moments(once[0].data(), once[1].data(), count, second.get(), again, 2, runner).ok());
        ASSERT_TRUE(load_moments(second.get(), count, twice[0].data(), twice[1].data(), runner).ok());

        EXPECT_EQ(std::memcmp(once[0].data(), twice[0].data(), count * sizeof(float)), 0);
        EXPECT_EQ(std::memcmp(once[1].data(), twice[1].data(), count * sizeof(float)), 0);
      }
    }
  }
}

TEST_F(HostAdam, OneMomentAloneHasTheBytesAndValuesOfBoth) {
  const BlockRunner runner(1);
  const std::size_t count = 300 * kMomentBlockCount + 31;
  for (const MomentFormat format : kFormats) {
    const std::vector<float> given[2] = {values(count, false, false), values(count, false, true)};
    KeptMoments both(format, count, 0), alone(format, count, 0);
    ASSERT_TRUE(store_moments(given[0].data(), given[1].data(), count, both.get(), MomentRounding::kNearest,
                              1, runner)
                    .ok());
    std::vector<float> expected[2] = {given[0], given[1]};
    ASSERT_TRUE(load_moments(both.get(), count, expected[0].data(), expected[1].data(), runner).ok());
    const Moments kept[2] = {both.get(), alone.get()};
    for (const bool is_v : {false, true}) {
      void* const codes = is_v ? kept[1].v : kept[1].m;
      std::uint8_t* const exponents = is_v ? kept[1].v_exponents : kept[1].m_exponents;
      narrow_moment(format, is_v, given[is_v].data(), count, codes, exponents);
      EXPECT_EQ(std::memcmp(codes, is_v ? kept[0].v : kept[0].m, moment_bytes(format, count)), 0);
      std::vector<float> found(count);
      widen_moment(format, is_v, codes, exponents, count, found.data());
      EXPECT_EQ(std::memcmp(found.data(), expected[is_v].data(), count * sizeof(float)), 0);
    }
  }
}

TEST_F(HostAdam, MemoryOfZerosIsZeroInEveryFormat) {
  const BlockRunner runner(1);
  for (const MomentFormat format : kFormats) {
    KeptMoments kept(format, 700, 0);
    std::vector<float> m(700, 1.0f), v(700, 1.0f);

    ASSERT_TRUE(load_moments(kept.get(), 700, m.data(), v.data(), runner).ok());

    for (std::size_t i = 0; i < 700; ++i) EXPECT_EQ(float_bits(m[i]) | float_bits(v[i]), 0u) << i;
  }
}

// The mean over many steps is the value: m by magnitude and sign, v too.
TEST_F(HostAdam, DitheringIsUnbiased) {
  const BlockRunner runner(1);
  constexpr std::size_t kCount = kMomentBlockCount;
  constexpr int kSteps = 4000;
  for (const MomentFormat format : kNarrowFormats) {
    std::vector<float> m(kCount), v(kCount), kept_m(kCount), kept_v(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      m[i] = std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_);
      v[i] = std::uniform_real_distribution<float>(0.01f, 1.0f)(random_);
    }
    std::vector<double> mean_m(kCount), mean_v(kCount);
    KeptMoments kept(format, kCount, 0);
    for (int step = 0; step < kSteps; ++step) {
      ASSERT_TRUE(store_moments(m.data(), v.data(), kCount, kept.get(), MomentRounding::kDithered,
                                static_cast<std::uint64_t>(step), runner)
                      .ok());
      ASSERT_TRUE(load_moments(kept.get(), kCount, kept_m.data(), kept_v.data(), runner).ok());
      for (std::size_t i = 0; i < kCount; ++i) {
        mean_m[i] += kept_m[i] / double{kSteps};
        mean_v[i] += kept_v[i] / double{kSteps};
      }
    }
    // A unit in the last place is at most u of the value, so one mean is off by u / 2 / sqrt(steps) at one
    // sigma.
    const double u = format == MomentFormat::kBfloat16 ? 1.0 / 128 : 1.0 / 8;
    const double sigma = u / 2 / std::sqrt(double{kSteps});
    for (std::size_t i = 0; i < kCount; ++i) {
      EXPECT_NEAR(mean_m[i], m[i], 6 * sigma * std::max(0.001f, std::fabs(m[i])))
          << moment_format_name(format);
      EXPECT_NEAR(mean_v[i], v[i], 6 * sigma * v[i]) << moment_format_name(format);
    }
  }
}

// The random bits have no part in common with what they round, with each other, or with the step before: each
// mean below is one of numbers without bias, and this is how many standard deviations it lies from 0.
TEST_F(HostAdam, DitherIsUnbiasedAndIndependent) {
  using namespace definitions;
  constexpr int kCount = 1 << 20;
  for (const std::uint32_t shift : {kBfloat16Shift, kMomentShift}) {
    const double unit = std::ldexp(1.0, static_cast<int>(shift));
    const auto error = [&](float value, std::uint32_t random) {
      const std::uint32_t dropped = float_bits(value) & ((1u << shift) - 1u);
      return (dropped + random < (1u << shift) ? 0.0 : 1.0) - dropped / unit;
    };
    for (const bool is_constant_m : {false, true}) {
      std::mt19937 random(1);
      std::normal_distribution<float> normal;
      std::vector<double> of_m, of_v, of_both, of_steps, of_value;
      for (int i = 0; i < kCount; ++i) {
        const float m = is_constant_m ? 0.0f : 0.01f * normal(random), root = normal(random);
        const float v = 0.001f * root * root;
        const DitherBits first = dither_bits(dither_seed(7), m, v, shift);
        const DitherBits second = dither_bits(dither_seed(8), m, v, shift);
        const double m_error = error(m, first.m), v_error = error(v, first.v);
        of_m.push_back(m_error);
        of_v.push_back(v_error);
        of_both.push_back((first.m / unit - 0.5) * (first.v / unit - 0.5));
        of_steps.push_back(v_error * error(v, second.v));
        of_value.push_back((first.v / unit - 0.5) * ((float_bits(v) & ((1u << shift) - 1u)) / unit - 0.5));
      }
      const auto deviations = [](const std::vector<double>& values) {
        double sum = 0.0, squares = 0.0;
        for (const double x : values) sum += x, squares += x * x;
        return squares == 0.0 ? 0.0 : std::fabs(sum) / std::sqrt(squares);
      };
      EXPECT_LT(deviations(of_m), 4.0) << shift;
      EXPECT_LT(deviations(of_v), 4.0) << shift;
      EXPECT_LT(deviations(of_both), 4.0) << shift;
      EXPECT_LT(deviations(of_steps), 4.0) << shift;
      EXPECT_LT(deviations(of_value), 4.0) << shift;
    }
  }
}

// v of a constant gradient of 1 after `steps`, which fp32 takes to 1 - beta2^steps.
double mean_v_of_constant_gradient(MomentFormat format, MomentRounding rounding, double beta2, int steps) {
  const BlockRunner runner(1);
  constexpr std::size_t kCount = 4 * kMomentBlockCount;
  std::vector<float> gradient(kCount), master(kCount, 1.0f), m(kCount), v(kCount);
  std::mt19937 random(1);
  for (float& g : gradient) g = std::uniform_real_distribution<float>(0.9f, 1.1f)(random);
  KeptMoments kept(format, kCount, 0);
  for (int step = 1; step <= steps; ++step) {
    HostAdamArguments a = {};
    a.update = adamw_at_step(static_cast<std::uint64_t>(step), 1e-4, beta2);
    a.update.gradient = gradient.data(), a.update.master = master.data(), a.update.count = kCount;
    a.moments = kept.get();
    a.rounding = rounding;
    a.step = static_cast<std::uint64_t>(step);
    EXPECT_TRUE(host_adam(a, runner).ok());
  }
  EXPECT_TRUE(load_moments(kept.get(), kCount, m.data(), v.data(), runner).ok());
  double mean = 0.0;
  for (std::size_t i = 0; i < kCount; ++i) mean += v[i] / (double{gradient[i]} * gradient[i]) / kCount;
  return mean;
}

// Why dithering is the default. The figures are those of host_adam.h.
TEST_F(HostAdam, DitheredVFollowsTheGradientWhereTheNearestStops) {
  for (const MomentFormat format : kNarrowFormats) {
    const double nearest = mean_v_of_constant_gradient(format, MomentRounding::kNearest, 0.999, 5000);
    const double dithered = mean_v_of_constant_gradient(format, MomentRounding::kDithered, 0.999, 5000);
    const double often = mean_v_of_constant_gradient(format, MomentRounding::kNearest, 0.95, 500);
    std::printf("%s: v / g^2 nearest %.4f, dithered %.4f, nearest at beta2 0.95 %.4f\n",
                moment_format_name(format), nearest, dithered, often);

    EXPECT_LT(nearest, format == MomentFormat::kBfloat16 ? 0.6 : 0.1);
    EXPECT_NEAR(dithered, 1.0, 0.02);
    if (format == MomentFormat::kBfloat16) {
      EXPECT_NEAR(often, 1.0, 0.1);
    }
  }
}

// A master in bf16, and its moving average, beside the same in double. The rate is a fortieth of a unit in
// the last place.
TEST_F(HostAdam, ADitheredMasterFollowsADoubleReferenceWhereTheNearestStandsStill) {
  const BlockRunner runner(2);
  constexpr std::size_t kCount = 8192;
  constexpr int kSteps = 500;
  constexpr double kRate = 1e-4, kDecay = 0.01, kEma = 0.99;
  double wide = 1.0, m = 0.0, v = 0.0, wide_average = 1.0;
  for (int t = 1; t <= kSteps; ++t) {
    m = 0.9 * m + 0.1;
    v = 0.95 * v + 0.05;
    wide -= kRate * kDecay * wide;
    wide -= kRate * (m / (1 - std::pow(0.9, t))) / (std::sqrt(v / (1 - std::pow(0.95, t))) + 1e-8);
    wide_average += (1 - kEma) * (wide - wide_average);
  }
  for (const MomentRounding rounding : kRoundings) {
    for (const MomentFormat format : kFormats) {
      const std::vector<float> gradient(kCount, 1.0f);
      std::vector<std::uint16_t> master(kCount, float_to_bfloat16(1.0f));
      std::vector<float> average(kCount, 1.0f), exact(kCount, 1.0f);
      KeptMoments kept(format, kCount, 0);
      double largest = 0.0;
      for (int t = 1; t <= kSteps; ++t) {
        HostAdamArguments a;
        a.update = adamw_at_step(static_cast<std::uint64_t>(t), kRate, 0.95);
        a.update.gradient = gradient.data(), a.update.count = kCount;
        a.moments = kept.get();
        a.half = {master.data(), 1000, 77};
        a.rounding = rounding;
        a.step = static_cast<std::uint64_t>(t);
        a.average = average.data();
        a.average_weight = static_cast<float>(1.0 - kEma);
        ASSERT_TRUE(host_adam(a, runner).ok());
        for (std::size_t i = 0; i < kCount; ++i) {
          const double p = bfloat16_to_float(master[i]);
          exact[i] = static_cast<float>(exact[i] + (1 - kEma) * (p - exact[i]));
          largest = std::max(largest, std::fabs(double{exact[i]} - average[i]));
        }
      }
      double mean = 0.0, mean_average = 0.0;
      for (std::size_t i = 0; i < kCount; ++i) {
        mean += bfloat16_to_float(master[i]) / double{kCount};
        mean_average += average[i] / double{kCount};
      }
      EXPECT_LT(largest, 2e-6);
      if (rounding == MomentRounding::kNearest) {
        EXPECT_EQ(mean, 1.0) << moment_format_name(format);
        continue;
      }
      // One element is 0.014 from its mean at one sigma.
      EXPECT_NEAR(mean, wide, 6 * 0.014 / std::sqrt(double{kCount}) + 1e-4) << moment_format_name(format);
      EXPECT_NEAR(mean_average, wide_average, 6 * 0.014 / std::sqrt(double{kCount}) + 1e-4)
          << moment_format_name(format);
    }
  }
}

// Parts, threads and the place of an element change nothing; its number, its key and the step do.
TEST_F(HostAdam, TheRandomBitsOfAMasterFollowItsNumberItsKeyAndTheStep) {
  const BlockRunner one(1), three(3);
  constexpr std::size_t kCount = 200'000;
  const std::vector<float> gradient(kCount, 1.0f), zeros(2 * kCount);
  const auto run = [&](const BlockRunner& runner, std::size_t part, std::uint64_t first, std::uint64_t key,
                       std::uint64_t step) {
    std::vector<std::uint16_t> master(kCount, float_to_bfloat16(1.0f));
    std::vector<float> moments = zeros;
    for (std::size_t begin = 0; begin < kCount; begin += part) {
      HostAdamArguments a;
      a.update = adamw_at_step(1, 1e-3, 0.95);
      a.update.gradient = gradient.data() + begin, a.update.count = std::min(part, kCount - begin);
      a.moments = {MomentFormat::kFloat32, moments.data() + begin, moments.data() + kCount + begin, nullptr,
                   nullptr};
      a.half = {master.data() + begin, first + begin, key};
      a.step = step;
      EXPECT_TRUE(host_adam(a, runner).ok());
    }
    return master;
  };
  const std::vector<std::uint16_t> expected = run(one, kCount, 5, 6, 7);
  EXPECT_EQ(run(three, kCount, 5, 6, 7), expected);
  EXPECT_EQ(run(three, 777, 5, 6, 7), expected);
  for (const auto& other :
       {run(one, kCount, 6, 6, 7), run(one, kCount, 5, 7, 7), run(one, kCount, 5, 6, 8)}) {
    std::size_t equal = 0;
    for (std::size_t i = 0; i < kCount; ++i) equal += other[i] == expected[i] ? 1 : 0;
    // An element moves with a probability of 0.256.
    EXPECT_NEAR(static_cast<double>(equal) / kCount, 0.256 * 0.256 + 0.744 * 0.744, 0.01);
  }
}

// --- Training goes on as with fp32 m and v ---

// Logistic regression with noisy minibatches, features of very different size, so that m and v in one block
// differ by orders of magnitude. Returns the loss over all samples.
double train_logistic(MomentFormat format, double beta2, std::uint64_t seed) {
  constexpr std::size_t kFeatures = 600, kSamples = 512, kBatch = 16;
  constexpr int kSteps = 1500;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> x(kFeatures * kSamples), truth(kFeatures);
  std::vector<double> y(kSamples);
  for (std::size_t f = 0; f < kFeatures; ++f) truth[f] = normal(random);
  for (std::size_t s = 0; s < kSamples; ++s) {
    double z = 0.0;
    for (std::size_t f = 0; f < kFeatures; ++f) {
      const double size = std::pow(10.0, -2.0 * static_cast<double>(f % 7) / 6.0);
      x[s * kFeatures + f] = size * normal(random);
      z += truth[f] * x[s * kFeatures + f];
    }
    y[s] = 1.0 / (1.0 + std::exp(-z)) > std::uniform_real_distribution<double>(0.0, 1.0)(random) ? 1.0 : 0.0;
  }
  const BlockRunner runner(1);
  std::vector<float> w(kFeatures, 0.0f), gradient(kFeatures);
  KeptMoments kept(format, kFeatures, 0);
  const auto residual = [&](std::size_t s, double* loss) {
    double z = 0.0;
    for (std::size_t f = 0; f < kFeatures; ++f) z += double{w[f]} * x[s * kFeatures + f];
    if (loss != nullptr) *loss += std::log1p(std::exp(-std::fabs(z))) + std::max(z, 0.0) - y[s] * z;
    return 1.0 / (1.0 + std::exp(-z)) - y[s];
  };
  for (int step = 1; step <= kSteps; ++step) {
    std::vector<double> sum(kFeatures, 0.0);
    for (std::size_t b = 0; b < kBatch; ++b) {
      const std::size_t s = random() % kSamples;
      const double r = residual(s, nullptr);
      for (std::size_t f = 0; f < kFeatures; ++f) sum[f] += r * x[s * kFeatures + f] / kBatch;
    }
    for (std::size_t f = 0; f < kFeatures; ++f) gradient[f] = static_cast<float>(sum[f]);
    HostAdamArguments a = {};
    a.update = adamw_at_step(static_cast<std::uint64_t>(step), 3e-3, beta2);
    a.update.gradient = gradient.data(), a.update.master = w.data(), a.update.count = kFeatures;
    a.moments = kept.get();
    a.step = static_cast<std::uint64_t>(step);
    EXPECT_TRUE(host_adam(a, runner).ok());
  }
  double loss = 0.0;
  for (std::size_t s = 0; s < kSamples; ++s) residual(s, &loss);
  return loss / kSamples;
}

// A quadratic with curvatures over four decades within each block, and noise on the gradient.
double train_quadratic(MomentFormat format, double beta2, std::uint64_t seed) {
  constexpr std::size_t kCount = 512;
  constexpr int kSteps = 4000;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  const BlockRunner runner(1);
  std::vector<float> w(kCount, 1.0f), gradient(kCount);
  std::vector<double> curvature(kCount);
  for (double& c : curvature) c = std::pow(10.0, std::uniform_real_distribution<double>(-4.0, 0.0)(random));
  KeptMoments kept(format, kCount, 0);
  for (int step = 1; step <= kSteps; ++step) {
    for (std::size_t i = 0; i < kCount; ++i) {
      gradient[i] = static_cast<float>(curvature[i] * (w[i] + 0.3 * normal(random)));
    }
    HostAdamArguments a = {};
    a.update = adamw_at_step(static_cast<std::uint64_t>(step), 1e-3, beta2);
    a.update.weight_decay = 0.0f;
    a.update.gradient = gradient.data(), a.update.master = w.data(), a.update.count = kCount;
    a.update.eps = 1e-12f;
    a.moments = kept.get();
    a.step = static_cast<std::uint64_t>(step);
    EXPECT_TRUE(host_adam(a, runner).ok());
  }
  // By its distance from the minimum, so that every curvature counts alike.
  double loss = 0.0;
  for (std::size_t i = 0; i < kCount; ++i) loss += 0.5 * double{w[i]} * w[i] / kCount;
  return loss;
}

void expect_same_training(const char* name, double (*train)(MomentFormat, double, std::uint64_t),
                          double bfloat16_part, double block8_part) {
  for (const double beta2 : {0.95, 0.999}) {
    double loss[3] = {};
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      for (int i = 0; i < 3; ++i) loss[i] += train(kFormats[i], beta2, seed) / 3;
    }
    std::printf("%s, beta2 %.3f: loss with fp32 %.6f, bf16 %.6f (%+.2f %%), block8 %.6f (%+.2f %%)\n", name,
                beta2, loss[0], loss[1], 100 * (loss[1] / loss[0] - 1), loss[2],
                100 * (loss[2] / loss[0] - 1));
    EXPECT_NEAR(loss[1] / loss[0], 1.0, bfloat16_part);
    EXPECT_NEAR(loss[2] / loss[0], 1.0, block8_part);
  }
}

TEST_F(HostAdam, NarrowMomentsTrainALogisticRegressionAsFloat32OnesDo) {
  expect_same_training("logistic", train_logistic, 0.02, 0.05);
}

TEST_F(HostAdam, NarrowMomentsTrainAQuadraticAsFloat32OnesDo) {
  expect_same_training("quadratic", train_quadratic, 0.02, 0.10);
}

// --- Arguments ---

TEST_F(HostAdam, RefusesWhatCannotBeAndChangesNothing) {
  const BlockRunner runner(1);
  std::vector<float> gradient(8, 1.0f), master(8, 1.0f), m(8), v(8);
  std::vector<std::uint8_t> exponents(1);
  HostAdamArguments good = {};
  good.update = adamw_at_step(1, 1e-3, 0.999);
  good.update.gradient = gradient.data(), good.update.master = master.data(), good.update.count = 8;
  good.moments = {MomentFormat::kFloat32, m.data(), v.data(), nullptr, nullptr};
  const auto refused = [&](const char* part, const std::function<void(HostAdamArguments&)>& change) {
    HostAdamArguments a = good;
    change(a);
    const Status status = host_adam(a, runner);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(status.message().rfind("host_adam", 0), 0u) << status.message();
  };

  refused("gradient is null", [](HostAdamArguments& a) { a.update.gradient = nullptr; });
  refused("master is null", [](HostAdamArguments& a) { a.update.master = nullptr; });
  refused("m is null", [](HostAdamArguments& a) { a.moments.m = nullptr; });
  refused("v is null", [](HostAdamArguments& a) { a.moments.v = nullptr; });
  refused("v is not aligned",
          [](HostAdamArguments& a) { a.moments.v = static_cast<std::byte*>(a.moments.v) + 2; });
  refused("format is 9", [](HostAdamArguments& a) { a.moments.format = static_cast<MomentFormat>(9); });
  refused("rounding is 9", [](HostAdamArguments& a) { a.rounding = static_cast<MomentRounding>(9); });
  refused("block8 without m_exponents",
          [](HostAdamArguments& a) { a.moments.format = MomentFormat::kBlock8; });
  refused("block8 without v_exponents", [&](HostAdamArguments& a) {
    a.moments.format = MomentFormat::kBlock8;
    a.moments.m_exponents = exponents.data();
  });
  EXPECT_EQ(master, std::vector<float>(8, 1.0f));
  EXPECT_EQ(m, std::vector<float>(8));

  EXPECT_FALSE(store_moments(nullptr, v.data(), 8, good.moments, MomentRounding::kNearest, 0, runner).ok());
  EXPECT_EQ(store_moments(m.data(), nullptr, 8, good.moments, MomentRounding::kNearest, 0, runner).message(),
            "store_moments of 8 elements: the source of m or v is null; pass fp32 values");
  EXPECT_TRUE(store_moments(nullptr, nullptr, 0, good.moments, MomentRounding::kNearest, 0, runner).ok());
  EXPECT_EQ(load_moments(good.moments, 8, m.data(), nullptr, runner).message(),
            "load_moments of 8 elements: the target of m or v is null; pass room for fp32 values");
  EXPECT_FALSE(load_moments(good.moments, 8, nullptr, v.data(), runner).ok());
  EXPECT_TRUE(load_moments(good.moments, 0, nullptr, nullptr, runner).ok());
  EXPECT_TRUE(host_adam(good, runner).ok());

  // An optimizer without v needs none, in no format.
  HostAdamArguments sgd = good;
  sgd.update.optimizer = Optimizer::kSgd;
  sgd.moments.v = nullptr;
  EXPECT_TRUE(host_adam(sgd, runner).ok());
  sgd.moments = {MomentFormat::kBlock8, m.data(), nullptr, exponents.data(), nullptr};
  EXPECT_TRUE(host_adam(sgd, runner).ok());
}

// --- BlockRunner ---

TEST(BlockRunner, KeepsItsThreadsToTheProcessorsItWasGivenAndGivesThemBack) {
  cpu_set_t before, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int processor = 0;
  while (!CPU_ISSET(processor, &before)) ++processor;
  const int processors[] = {processor};
  Result<std::unique_ptr<BlockRunner>> runner = BlockRunner::create_on(processors);
  ASSERT_TRUE(runner.ok()) << runner.status().to_string();

  struct Seen {
    int processor;
    std::atomic<int> blocks{0}, elsewhere{0};
  } seen{processor};
  runner.value()->run(
      1000, 10,
      [](const void* context, std::size_t, std::size_t) {
        auto& s = *static_cast<Seen*>(const_cast<void*>(context));
        cpu_set_t here;
        sched_getaffinity(0, sizeof here, &here);
        if (CPU_COUNT(&here) != 1 || !CPU_ISSET(s.processor, &here)) ++s.elsewhere;
        ++s.blocks;
      },
      &seen);

  EXPECT_EQ(runner.value()->thread_count(), 1);
  EXPECT_EQ(seen.blocks, 100);
#if !defined(__SANITIZE_THREAD__)
  EXPECT_EQ(seen.elsewhere, 0);
#endif
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(BlockRunner, RefusesProcessorsThatAreNotThere) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int processor = 0;
  while (!CPU_ISSET(processor, &allowed)) ++processor;
  const int negative[] = {-1}, large[] = {1 << 20}, twice[] = {processor, processor};

  EXPECT_FALSE(BlockRunner::create_on({}).ok());
  EXPECT_FALSE(BlockRunner::create_on(negative).ok());
  EXPECT_FALSE(BlockRunner::create_on(large).ok());
  EXPECT_FALSE(BlockRunner::create_on(twice).ok());
#if !defined(__SANITIZE_THREAD__)
  const int one[] = {processor};
  EXPECT_EQ(BlockRunner::create_on(one, 3).value()->thread_count(), 3);
#endif
}

}  // namespace
}  // namespace forebay
