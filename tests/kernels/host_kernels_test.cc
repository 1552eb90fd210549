// Every instruction set this processor has, against the scalar definition, bit for bit.
//
// Method: Highway is told to pretend that one instruction set is the best there is; each kernel then runs
// over ranges of many sizes from unaligned starts, on values that include every kind of NaN, infinity and
// subnormal, and all bytes are compared, those outside the range too.
#include "kernels/host_kernels.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "tests/kernels/kernel_test_support.h"

namespace forebay::host_kernels {
namespace {

using kernel_test::Array;
using kernel_test::fill_hard;
using kernel_test::kTypes;
using kernel_test::same_bits;

// Calls `function(kernels)` once per instruction set that gives another table.
void for_each_target(const std::function<void(const RangeKernels&)>& function) {
  std::vector<std::string> seen;
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    hwy::SetSupportedTargetsForTest(rest & -rest);
    const RangeKernels& kernels = simd_kernels();
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

struct Span {
  std::size_t count, offset, begin, end;
};

// All of the small sizes, then a few larger ones; the start is unaligned in most.
std::vector<Span> spans(std::mt19937_64& random) {
  std::vector<Span> result;
  for (std::size_t count = 0; count <= 70; ++count) result.push_back({count, count % 5, 0, count});
  for (int i = 0; i < 60; ++i) {
    const std::size_t count = 71 + random() % 1930;
    const std::size_t begin = random() % 40;
    result.push_back({count, random() % 17, begin, begin + random() % (count - begin + 1)});
  }
  // More than the running sums of accumulate hold at once.
  result.push_back({5003, 3, 1, 5002});
  return result;
}

class HostKernels : public ::testing::Test {
 protected:
  std::mt19937_64 random_{kernel_test::test_seed()};
};

TEST_F(HostKernels, TheBestInstructionSetOfThisProcessorIsUsed) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma") || !__builtin_cpu_supports("avx2"))
    GTEST_SKIP() << "no AVX2 with FMA here";
  EXPECT_STRNE(simd_kernels().target, "scalar");
#else
  GTEST_SKIP() << "checked on x86-64 only";
#endif
}

TEST_F(HostKernels, CastGivesTheDefinitionsBits) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType source_type : kTypes) {
      for (const DataType target_type : kTypes) {
        for (const Span& span : spans(random_)) {
          Array source(source_type, span.count, span.offset);
          fill_hard(source, source_type, random_);
          Array expected(target_type, span.count, span.offset + 1), got = expected;

          scalar_kernels().cast({source.data(), expected.data(), span.count, source_type, target_type},
                                span.begin, span.end);
          kernels.cast({source.data(), got.data(), span.count, source_type, target_type}, span.begin,
                       span.end);

          ASSERT_TRUE(same_bits("target", got, expected));
        }
      }
    }
  });
}

TEST_F(HostKernels, CastAgreesOnEvery16BitValue) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType type : {DataType::kBfloat16, DataType::kFloat16}) {
      Array source(type, 65536, 0), expected(DataType::kFloat32, 65536, 0), got = expected;
      for (std::uint32_t bits = 0; bits < 65536; ++bits) source.set(bits, bits);

      scalar_kernels().cast({source.data(), expected.data(), 65536, type, DataType::kFloat32}, 0, 65536);
      kernels.cast({source.data(), got.data(), 65536, type, DataType::kFloat32}, 0, 65536);

      ASSERT_TRUE(same_bits("target", got, expected));
    }
  });
}

// The upper 20 bits in full with lower parts about zero, half and one of either format, so every exponent,
// sign, kept mantissa, tie and NaN class occurs.
TEST_F(HostKernels, CastAgreesOnADenseSampleOfFloat32) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType type : {DataType::kBfloat16, DataType::kFloat16}) {
      for (const std::uint32_t low : {0u, 1u, 0x7FFu, 0x800u, 0x801u, 0xFFFu}) {
        const std::size_t count = std::size_t{1} << 20;
        Array source(DataType::kFloat32, count, 0), expected(type, count, 0), got = expected;
        for (std::uint32_t i = 0; i < count; ++i) source.set(i, i << 12 | low);

        scalar_kernels().cast({source.data(), expected.data(), count, DataType::kFloat32, type}, 0, count);
        kernels.cast({source.data(), got.data(), count, DataType::kFloat32, type}, 0, count);

        ASSERT_TRUE(same_bits("target", got, expected));
      }
    }
  });
}

TEST_F(HostKernels, AccumulateGivesTheDefinitionsBits) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType type : kTypes) {
      for (const int rank_count : {1, 2, 3, 4}) {
        for (const bool first : {true, false}) {
          for (const Span& span : spans(random_)) {
            const std::size_t stride = span.count + 3;
            Array own(type, span.count, span.offset), received(type, stride * rank_count, 1);
            Array expected(DataType::kFloat32, span.count, span.offset);
            fill_hard(own, type, random_);
            fill_hard(received, type, random_);
            fill_hard(expected, DataType::kFloat32, random_);
            Array got = expected;
            AccumulateArguments arguments = {own.data(),
                                             static_cast<const std::byte*>(received.data()),
                                             stride * element_bytes(type),
                                             expected.floats(),
                                             span.count,
                                             static_cast<int>(random_() % rank_count),
                                             rank_count,
                                             type,
                                             first};

            scalar_kernels().accumulate(arguments, span.begin, span.end);
            arguments.target = got.floats();
            kernels.accumulate(arguments, span.begin, span.end);

            ASSERT_TRUE(same_bits("target", got, expected))
                << rank_count << " ranks, " << data_type_name(type);
          }
        }
      }
    }
  });
}

TEST_F(HostKernels, ScaleGivesTheDefinitionsBitsInPlaceToo) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType round_type : kTypes) {
      for (const Span& span : spans(random_)) {
        Array source(DataType::kFloat32, span.count, span.offset);
        fill_hard(source, DataType::kFloat32, random_);
        const float factor = span.count % 3 == 0 ? 1.0f : 1.0f / 3.0f;

        Array narrow(round_type, span.count, span.offset + 1), got_narrow = narrow;
        scalar_kernels().scale({source.floats(), narrow.data(), span.count, factor, round_type, round_type},
                               span.begin, span.end);
        kernels.scale({source.floats(), got_narrow.data(), span.count, factor, round_type, round_type},
                      span.begin, span.end);
        ASSERT_TRUE(same_bits("target", got_narrow, narrow));

        Array wide(DataType::kFloat32, span.count, span.offset + 1);
        scalar_kernels().scale(
            {source.floats(), wide.data(), span.count, factor, round_type, DataType::kFloat32}, span.begin,
            span.end);
        Array in_place = source;
        kernels.scale(
            {in_place.floats(), in_place.data(), span.count, factor, round_type, DataType::kFloat32},
            span.begin, span.end);
        for (std::size_t i = 0; i < span.count; ++i) {
          const bool inside = i >= span.begin && i < span.end;
          ASSERT_EQ(in_place.get(i), inside ? wide.get(i) : source.get(i)) << i << " of " << span.count;
        }
      }
    }
  });
}

TEST_F(HostKernels, AddGivesTheDefinitionsBits) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType type : kTypes) {
      for (const Span& span : spans(random_)) {
        Array source(type, span.count, span.offset), expected(type, span.count, span.offset + 1);
        fill_hard(source, type, random_);
        fill_hard(expected, type, random_);
        Array got = expected;

        scalar_kernels().add({source.data(), expected.data(), span.count, type}, span.begin, span.end);
        kernels.add({source.data(), got.data(), span.count, type}, span.begin, span.end);

        ASSERT_TRUE(same_bits("target", got, expected)) << data_type_name(type);
      }
    }
  });
}

TEST_F(HostKernels, NormLeavesGiveTheDefinitionsBits) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType type : kTypes) {
      for (std::size_t leaf_count = 1; leaf_count < 8; ++leaf_count) {
        for (const bool hard : {false, true}) {
          const std::size_t count = leaf_count * kLeafCount;
          Array source(type, count, leaf_count % 3);
          fill_hard(source, type, random_);
          for (std::size_t i = 0; i < count && !hard; ++i) {
            if (!std::isfinite(source.value(i))) source.set(i, 1);
          }
          std::vector<double> expected(leaf_count, -1.0), got = expected;
          double unused = 0.0;

          scalar_kernels().norm_leaves({source.data(), expected.data(), &unused, count, type}, 0, leaf_count);
          kernels.norm_leaves({source.data(), got.data(), &unused, count, type}, 0, leaf_count);

          // A leaf that is no number may be any NaN: run_norm makes the result canonical.
          for (std::size_t leaf = 0; leaf < leaf_count; ++leaf) {
            if (std::isnan(expected[leaf])) {
              EXPECT_TRUE(std::isnan(got[leaf]));
            } else {
              ASSERT_EQ(std::memcmp(&got[leaf], &expected[leaf], sizeof(double)), 0) << "leaf " << leaf;
            }
          }
        }
      }
    }
  });
}

TEST_F(HostKernels, UpdatesGiveTheDefinitionsBits) {
  for_each_target([&](const RangeKernels& kernels) {
    for (const DataType gradient_type : kTypes) {
      for (int column = 0; column < 4 * kOptimizerCount; ++column) {
        const int parameter = column % 4;
        const auto optimizer = static_cast<Optimizer>(column / 4);
        SCOPED_TRACE(optimizer_name(optimizer));
        const DataType parameter_type = kTypes[parameter % 3];
        for (const Span& span : spans(random_)) {
          Array gradient(gradient_type, span.count, span.offset);
          fill_hard(gradient, gradient_type, random_);
          Array expected[3] = {Array(DataType::kFloat32, span.count, span.offset),
                               Array(DataType::kFloat32, span.count, span.offset + 2),
                               Array(DataType::kFloat32, span.count, span.offset + 3)};
          for (Array& array : expected) fill_hard(array, DataType::kFloat32, random_);
          Array got[3] = {expected[0], expected[1], expected[2]};
          Array expected_parameter(parameter_type, span.count, span.offset + 1),
              got_parameter = expected_parameter;
          AdamWArguments arguments = {};
          arguments.gradient = gradient.data();
          arguments.count = span.count;
          arguments.gradient_type = gradient_type;
          arguments.parameter_type = parameter_type;
          arguments.factor = 0.7f;
          arguments.lr = 1e-3f, arguments.weight_decay = 0.1f, arguments.beta1 = 0.9f,
          arguments.beta2 = 0.999f;
          arguments.eps = 1e-8f, arguments.a1 = 0.1f, arguments.a2 = 0.001f, arguments.c1 = 0.271f;
          arguments.s2 = 0.0547f;
          arguments.optimizer = optimizer;
          const bool has_parameter = parameter < 3;
          const auto with = [&](Array* state, Array& target) {
            arguments.master = state[0].floats(), arguments.m = state[1].floats(),
            arguments.v = has_second_moment(optimizer) ? state[2].floats() : nullptr;
            arguments.parameter = has_parameter ? target.data() : nullptr;
            return arguments;
          };

          scalar_kernels().adamw(with(expected, expected_parameter), span.begin, span.end);
          kernels.adamw(with(got, got_parameter), span.begin, span.end);

          ASSERT_TRUE(same_bits("master", got[0], expected[0]));
          ASSERT_TRUE(same_bits("m", got[1], expected[1]));
          ASSERT_TRUE(same_bits("v", got[2], expected[2]));
          ASSERT_TRUE(same_bits("parameter", got_parameter, expected_parameter));
        }
      }
    }
  });
}

// The SIMD bodies divide by s2 without a division: `count` values of v in equal steps over two binades, so
// that those of sqrt(v) are over all mantissas, for many s2, and values at the ends of the ranges. With m
// = 1, eps = 0, lr / c1 = 1 and a master of 0 the new master is -1 / (sqrt(v) / s2); with beta2 = 1 and no
// gradient v stays as it is.
void expect_divisions_by_s2(std::size_t count, std::mt19937_64& random) {
  const auto step = static_cast<std::uint32_t>((std::size_t{1} << 24) / count) | 1;  // For all low bits.
  const std::vector<float> gradient(count, 0.0f);
  std::vector<float> v(count);
  for (int round = 0; round < 24; ++round) {
    AdamWArguments a = {};
    a.gradient = gradient.data(), a.count = count;
    a.gradient_type = a.parameter_type = DataType::kFloat32;
    a.factor = a.lr = a.c1 = a.beta1 = a.beta2 = 1.0f;
    const float hard[] = {
        1.0f,       0x1.fffffep-1f, 0x1p-20f, 0x1.000002p-20f, 0.5f, 0x1.000002p-1f, 0x1.fffffep-2f,
        0x1.8p-30f, 2.5f,           0.0f,     INFINITY,        NAN,  -0.5f};
    a.s2 = round < 13 ? hard[round]
                      : std::sqrt(1.0f - std::pow(0.999f, static_cast<float>(random() % 20000 + 1)));
    // With it the definition is called, so not for the hard ones.
    a.eps = round > 13 && round % 5 == 1 ? -0.0f : 0.0f;
    const std::uint32_t start = static_cast<std::uint32_t>(random());
    for (std::size_t i = 0; i < count; ++i) {
      // Three quarters: mantissas in steps, over two binades; the rest anything, and the least and greatest.
      v[i] = float_from_bits(i % 4 != 0 ? 0x3F000000u +
                                              ((static_cast<std::uint32_t>(i) * step + start) & 0x00FFFFFFu)
                                        : static_cast<std::uint32_t>(random()));
      if (i % 4096 == 0) v[i] = float_from_bits(start & 3u);
      if (i % 4096 == 4) v[i] = INFINITY;
      if (i % 4096 == 8) v[i] = -0.0f;
      if (i % 4096 == 12) v[i] = 0x1.fffffep127f;
    }
    std::vector<float> m(count, 1.0f), expected_v = v, expected(count, 0.0f), got(count, 0.0f);
    a.master = expected.data(), a.m = m.data(), a.v = expected_v.data();
    scalar_kernels().adamw(a, 0, count);

    std::vector<float> got_v = v;
    a.master = got.data(), a.v = got_v.data();
    simd_kernels().adamw(a, 0, count);

    const auto same = [](float x, float y) { return float_bits(x) == float_bits(y); };
    const auto wrong = std::mismatch(got.begin(), got.end(), expected.begin(), same);
    ASSERT_TRUE(wrong.first == got.end())
        << *wrong.first << " is not " << *wrong.second << ", v "
        << v[static_cast<std::size_t>(wrong.first - got.begin())] << ", s2 " << a.s2;
  }
}

TEST_F(HostKernels, AdamWDividesByS2AsADivisionDoes) {
  expect_divisions_by_s2(std::size_t{1} << 15, random_);
}

class SlowHostKernels : public HostKernels {};

TEST_F(SlowHostKernels, AdamWDividesByS2AsADivisionDoes) {
  expect_divisions_by_s2(std::size_t{1} << 20, random_);
}

}  // namespace
}  // namespace forebay::host_kernels
