#include "tests/kernels/kernels_conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "forebay/backend.h"
#include "forebay/host_muon.h"
#include "forebay/kernels.h"
#include "kernels/host_kernels.h"
#include "kernels/host_moments.h"
#include "tests/kernels/kernel_test_support.h"
#include "tests/kernels/plain_adafactor.h"
#include "tests/kernels/plain_muon.h"

namespace forebay::kernel_test {
namespace {

// Offsets of the operands, in elements: all aligned, shifted together (a segment in the middle of a buffer),
// and against each other, where no wide access fits.
struct Offsets {
  std::size_t a, b;
};
constexpr Offsets kOffsets[] = {{0, 0}, {8, 0}, {3, 3}, {5, 5}, {0, 1}, {7, 2}};
constexpr std::size_t kCounts[] = {1, 2, 7, 8, 9, 64, 1003, 4096};

std::string describe(DataType a, DataType b, const Offsets& offsets, std::size_t count) {
  return std::string(data_type_name(a)) + " " + data_type_name(b) + ", offsets " + std::to_string(offsets.a) +
         " " + std::to_string(offsets.b) + ", " + std::to_string(count) + " elements";
}

TEST_P(KernelsConformance, CastIsTheDefinitionBitForBit) {
  for (const DataType source_type : kTypes) {
    for (const DataType target_type : kTypes) {
      for (const Offsets& offsets : kOffsets) {
        for (const std::size_t count : kCounts) {
          SCOPED_TRACE(describe(source_type, target_type, offsets, count));
          Array source = hard(source_type, count, offsets.a);
          Array expected(target_type, count, offsets.b), got = expected;
          host_kernels::scalar_kernels().cast(
              {source.data(), expected.data(), count, source_type, target_type}, 0, count);
          std::byte* const target = upload(got);

          finish(kernels_->cast({upload(source), target, count, source_type, target_type}, stream_));

          download(got, target);
          ASSERT_TRUE(same_bits("target", got, expected));
        }
        forget_blocks();
      }
    }
  }
}

TEST_P(KernelsConformance, AccumulateIsTheDefinitionBitForBit) {
  for (const DataType type : kTypes) {
    for (const int rank_count : {1, 2, 3, 4, 5, 9}) {
      for (const Offsets& offsets : kOffsets) {
        for (const std::size_t count : {std::size_t{3}, std::size_t{517}}) {
          const int rank = static_cast<int>(random_() % static_cast<std::uint64_t>(rank_count));
          const bool first = random_() % 2 == 0;
          // An odd distance between contributions leaves no two of them aligned alike.
          const std::size_t stride = count % 2 == 0 || offsets.a == 5 ? count + 1 : (count + 7) / 8 * 8;
          SCOPED_TRACE(describe(type, type, offsets, count) + ", rank " + std::to_string(rank) + " of " +
                       std::to_string(rank_count) + (first ? ", first" : ""));
          Array own = hard(type, count, offsets.a);
          Array received = hard(type, stride * static_cast<std::size_t>(rank_count), offsets.a);
          Array expected = hard(DataType::kFloat32, count, offsets.b), got = expected;
          AccumulateArguments a = {own.data(),
                                   static_cast<const std::byte*>(received.data()),
                                   stride * element_bytes(type),
                                   expected.floats(),
                                   count,
                                   rank,
                                   rank_count,
                                   type,
                                   first};
          host_kernels::scalar_kernels().accumulate(a, 0, count);
          std::byte* const target = upload(got);
          a.own = upload(own), a.received = upload(received), a.target = reinterpret_cast<float*>(target);

          finish(kernels_->accumulate(a, stream_));

          download(got, target);
          ASSERT_TRUE(same_bits("target", got, expected));
        }
        forget_blocks();
      }
    }
  }
}

TEST_P(KernelsConformance, ScaleIsTheDefinitionBitForBit) {
  const DataType f32 = DataType::kFloat32;
  for (const DataType round_type : kTypes) {
    for (const DataType target_type : {round_type, f32}) {
      for (const Offsets& offsets : kOffsets) {
        for (const std::size_t count : kCounts) {
          SCOPED_TRACE(describe(round_type, target_type, offsets, count));
          const float factor = float_from_bits(static_cast<std::uint32_t>(random_()) & 0xBFFFFFFFu);
          Array source = hard(f32, count, offsets.a);
          Array expected(target_type, count, offsets.b), got = expected;
          ScaleArguments a = {source.floats(), expected.data(), count, factor, round_type, target_type};
          host_kernels::scalar_kernels().scale(a, 0, count);
          std::byte* const target = upload(got);
          a.source = reinterpret_cast<const float*>(upload(source)), a.target = target;

          finish(kernels_->scale(a, stream_));

          download(got, target);
          ASSERT_TRUE(same_bits("target", got, expected));
        }
        forget_blocks();
      }
    }
  }
}

TEST_P(KernelsConformance, AddIsTheDefinitionBitForBit) {
  for (const DataType type : kTypes) {
    for (const Offsets& offsets : kOffsets) {
      for (const std::size_t count : kCounts) {
        SCOPED_TRACE(describe(type, type, offsets, count));
        Array source = hard(type, count, offsets.a), expected = hard(type, count, offsets.b), got = expected;
        host_kernels::scalar_kernels().add({source.data(), expected.data(), count, type}, 0, count);
        std::byte* const target = upload(got);

        finish(kernels_->add({upload(source), target, count, type}, stream_));

        download(got, target);
        ASSERT_TRUE(same_bits("target", got, expected));
      }
      forget_blocks();
    }
  }
}

TEST_P(KernelsConformance, FillRoundsItsValueOnceAndWritesNothingBeside) {
  for (const DataType type : kTypes) {
    for (const std::size_t offset : {0, 1, 5, 8}) {
      for (const std::size_t count : kCounts) {
        for (const float value :
             {1.00390625f, -0.0f, 1e-40f, std::numeric_limits<float>::quiet_NaN(), 1e30f}) {
          Array expected(type, count, offset), got = expected;
          for (std::size_t i = 0; i < count; ++i) {
            expected.set(i, type == DataType::kFloat32    ? float_bits(canonical(value))
                            : type == DataType::kBfloat16 ? float_to_bfloat16(value)
                                                          : float_to_float16(value));
          }
          std::byte* const target = upload(got);

          finish(kernels_->fill({target, count, value, type}, stream_));

          download(got, target);
          ASSERT_TRUE(same_bits("target", got, expected)) << data_type_name(type) << " at " << offset;
        }
      }
      forget_blocks();
    }
  }
}

// The tree of NormArguments, by recursion on "adjacent pairs, level by level, an odd one passing up".
double plain_pairs(std::vector<double> level) {
  if (level.empty()) return 0.0;
  while (level.size() > 1) {
    std::vector<double> above;
    for (std::size_t i = 0; i < level.size(); i += 2) {
      above.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    }
    level = std::move(above);
  }
  return level[0];
}

double plain_norm(const Array& source) {
  std::vector<double> leaves;
  for (std::size_t leaf = 0; leaf < source.count(); leaf += kLeafCount) {
    double lane[16] = {};
    for (std::size_t i = 0; i < kLeafCount; ++i) {
      const double x = source.value(leaf + i);
      lane[i % 16] += x * x;
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    leaves.push_back(lane[0]);
  }
  return plain_pairs(leaves);
}

std::uint64_t double_bits(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

TEST_P(KernelsConformance, NormIsTheFixedTreeBitForBit) {
  for (const DataType type : kTypes) {
    for (const std::size_t leaf_count : {0, 1, 2, 3, 5, 31, 63, 64, 65, 127, 128, 129, 191, 259, 513}) {
      for (const std::size_t offset : {0, 1}) {
        const std::size_t count = leaf_count * kLeafCount;
        Array source(type, count, offset);
        std::normal_distribution<float> values(0.0f, 0.1f);
        for (std::size_t i = 0; i < count; ++i) {
          const float x = values(random_);
          source.set(i, type == DataType::kFloat32    ? float_bits(x)
                        : type == DataType::kBfloat16 ? float_to_bfloat16(x)
                                                      : float_to_float16(x));
        }
        double* const scratch = upload(std::vector<double>(leaf_count, -1.0));
        double* const result = upload(std::vector<double>(1, -1.0));

        finish(kernels_->norm({upload(source), scratch, result, count, type}, stream_));

        ASSERT_EQ(double_bits(download(result)), double_bits(plain_norm(source)))
            << leaf_count << " leaves of " << data_type_name(type) << " at offset " << offset;
        forget_blocks();
      }
    }
  }
}

// On a device with many multiprocessors this needs half a gigabyte.
TEST_P(KernelsConformance, NormIsTheSameTreeWhenItHasMoreLeavesThanTheGridHasPlaces) {
  const auto processors =
      static_cast<std::size_t>(std::max(backend_->capabilities().multiprocessor_count, 1));
  const std::size_t leaf_count = processors * 32 * 64 + 3 * 64 + 1, count = leaf_count * kLeafCount;
  Array source(DataType::kFloat32, count, 0);
  for (std::size_t i = 0; i < count; ++i) {
    source.set(i, 0x3F000000u | (static_cast<std::uint32_t>(i * 2654435761u) >> 9));
  }
  double* const scratch = upload(std::vector<double>(leaf_count));
  double* const result = upload(std::vector<double>(1));

  finish(kernels_->norm({upload(source), scratch, result, count, DataType::kFloat32}, stream_));

  ASSERT_EQ(double_bits(download(result)), double_bits(plain_norm(source)));
}

TEST_P(KernelsConformance, NormIsNotFiniteExactlyWhenAnElementIsNotAndItsNanIsCanonical) {
  const std::size_t count = 67 * kLeafCount;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float special :
       {infinity, -infinity, float_from_bits(0xFFC01234u), std::numeric_limits<float>::max()}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{700}, count - 1}) {
      Array source(DataType::kFloat32, count, 0);
      for (std::size_t i = 0; i < count; ++i) source.set(i, 0);
      source.set(place, float_bits(special));
      double* const scratch = upload(std::vector<double>(67));
      double* const result = upload(std::vector<double>(1));

      finish(kernels_->norm({upload(source), scratch, result, count, DataType::kFloat32}, stream_));

      const double got = download(result);
      EXPECT_EQ(std::isfinite(got), std::isfinite(special)) << special << " at " << place;
      if (std::isnan(special)) {
        EXPECT_EQ(double_bits(got), 0x7FF8000000000000u);
      }
      forget_blocks();
    }
  }
}

AdamWArguments adamw_constants_at(int step) {
  AdamWArguments a = {};
  a.factor = 0.25f;
  a.lr = 1e-3f, a.weight_decay = 0.1f, a.beta1 = 0.9f, a.beta2 = 0.95f, a.eps = 1e-8f;
  a.a1 = static_cast<float>(1.0 - 0.9), a.a2 = static_cast<float>(1.0 - 0.95);
  a.c1 = static_cast<float>(1.0 - std::pow(0.9, step));
  a.s2 = static_cast<float>(std::sqrt(1.0 - std::pow(0.95, step)));
  return a;
}

// An optimizer state in the test's memory and on the device.
struct AdamWArrays {
  Array gradient, master, m, v, parameter;

  AdamWArguments arguments(AdamWArguments constants, DataType gradient_type, DataType parameter_type,
                           bool has_parameter) {
    constants.gradient = gradient.data();
    constants.master = master.floats(), constants.m = m.floats();
    constants.v = has_second_moment(constants.optimizer) ? v.floats() : nullptr;
    constants.parameter = has_parameter ? parameter.data() : nullptr;
    constants.count = master.count();
    constants.gradient_type = gradient_type, constants.parameter_type = parameter_type;
    return constants;
  }
};

TEST_P(KernelsConformance, UpdatesAreTheDefinitionBitForBit) {
  for (const DataType gradient_type : kTypes) {
    for (int column = 0; column < 4 * kOptimizerCount; ++column) {
      const auto optimizer = static_cast<Optimizer>(column / 4);
      const bool has_parameter = column % 4 < 3;
      const DataType parameter_type = has_parameter ? kTypes[column % 4] : DataType::kFloat32;
      for (const Offsets& offsets : kOffsets) {
        for (const std::size_t count : {std::size_t{1}, std::size_t{9}, std::size_t{1003}}) {
          SCOPED_TRACE(describe(gradient_type, parameter_type, offsets, count) +
                       (has_parameter ? "" : ", no parameter, ") + optimizer_name(optimizer));
          const DataType f32 = DataType::kFloat32;
          AdamWArrays expected = {hard(gradient_type, count, offsets.a), hard(f32, count, offsets.b),
                                  hard(f32, count, offsets.b), hard(f32, count, offsets.b),
                                  Array(parameter_type, count, offsets.a)};
          AdamWArrays got = expected;
          AdamWArguments constants = adamw_constants_at(3);
          constants.optimizer = optimizer;
          host_kernels::scalar_kernels().adamw(
              expected.arguments(constants, gradient_type, parameter_type, has_parameter), 0, count);
          AdamWArguments a = got.arguments(constants, gradient_type, parameter_type, has_parameter);
          std::byte* const parameter = upload(got.parameter);
          a.gradient = upload(got.gradient);
          a.master = reinterpret_cast<float*>(upload(got.master));
          a.m = reinterpret_cast<float*>(upload(got.m));
          auto* const v = reinterpret_cast<float*>(upload(got.v));
          a.v = has_second_moment(optimizer) ? v : nullptr;
          a.parameter = has_parameter ? parameter : nullptr;

          finish(kernels_->adamw(a, stream_));

          download(got.master, a.master), download(got.m, a.m), download(got.v, v);
          download(got.parameter, parameter);
          ASSERT_TRUE(same_bits("master", got.master, expected.master));
          ASSERT_TRUE(same_bits("m", got.m, expected.m));
          ASSERT_TRUE(same_bits("v", got.v, expected.v));
          ASSERT_TRUE(same_bits("parameter", got.parameter, expected.parameter));
        }
        forget_blocks();
      }
    }
  }
}

// m and v of any bits, as they are kept, and the update of them.
struct KeptArrays {
  MomentFormat format;
  std::vector<std::uint8_t> bytes[2];  // Values or codes, behind `offset` bytes.
  std::vector<std::uint8_t> exponents[2];
  std::size_t offset;

  KeptArrays(MomentFormat format_in, std::size_t count, std::size_t offset_in, std::mt19937_64& random)
      : format(format_in), offset(offset_in * moment_bytes(format_in, 1)) {
    for (int i = 0; i < 2; ++i) {
      // A byte more, which nobody may change.
      bytes[i].resize(offset + moment_bytes(format, count) + 1);
      exponents[i].resize(moment_exponent_bytes(format, count) + 1);
      for (std::uint8_t& byte : bytes[i]) byte = static_cast<std::uint8_t>(random());
      for (std::uint8_t& byte : exponents[i]) byte = static_cast<std::uint8_t>(110 + random() % 30);
      if (random() % 4 == 0) exponents[i][0] = static_cast<std::uint8_t>(random());
    }
  }
  // The arrays at these addresses.
  Moments moments(std::uint8_t* const (&base)[2], std::uint8_t* const (&exponent)[2], bool has_v) const {
    Moments result{format, base[0] + offset, has_v ? base[1] + offset : nullptr, nullptr, nullptr};
    if (format != MomentFormat::kBlock8) return result;
    result.m_exponents = exponent[0];
    if (has_v) result.v_exponents = exponent[1];
    return result;
  }
};

TEST_P(KernelsConformance, UpdatesOfKeptStatesAreTheDefinitionBitForBit) {
  const DataType f32 = DataType::kFloat32, bf16 = DataType::kBfloat16;
  int number = 0;
  for (const MomentFormat format : {MomentFormat::kFloat32, MomentFormat::kBfloat16, MomentFormat::kBlock8}) {
    for (const bool is_half : {false, true}) {
      for (int column = 0; column < 4 * kOptimizerCount; ++column) {
        const auto optimizer = static_cast<Optimizer>(column / 4);
        const bool has_parameter = column % 4 < 3 && !is_half, has_v = has_second_moment(optimizer);
        const DataType parameter_type = has_parameter ? kTypes[column % 4] : f32;
        const DataType gradient_type = kTypes[(column + number) % 3];
        for (const std::size_t offset : {0, 1, 8}) {
          for (const std::size_t count :
               {std::size_t{1}, std::size_t{9}, std::size_t{256}, std::size_t{1003}, std::size_t{4608}}) {
            // One of the counts; the next combination takes another one.
            if (++number % 5 != column % 5) continue;
            const MomentRounding rounding =
                number % 3 == 0 ? MomentRounding::kNearest : MomentRounding::kDithered;
            SCOPED_TRACE(describe(gradient_type, parameter_type, {offset, offset}, count) + ", " +
                         moment_format_name(format) + (is_half ? ", no master, " : ", ") +
                         optimizer_name(optimizer));
            // One array may begin elsewhere than the others: a wide access of it would not be aligned.
            const int shifted = number % 7;
            const auto offset_of = [&](int array) { return offset + (array == shifted ? 1 : 0); };
            Array gradient = hard(gradient_type, count, offset_of(1));
            Array expected_master = hard(is_half ? bf16 : f32, count, offset_of(2)), master = expected_master;
            Array expected_parameter(parameter_type, count, offset_of(3)), parameter = expected_parameter;
            const bool has_average = number % 2 == 0;
            Array expected_average = hard(f32, count, offset_of(0)), average = expected_average;
            KeptArrays expected(format, count, offset_of(4), random_), got = expected;
            KeptUpdateArguments kept;
            kept.update = adamw_constants_at(3);
            kept.update.optimizer = optimizer;
            kept.update.count = count;
            kept.update.gradient_type = gradient_type, kept.update.parameter_type = parameter_type;
            kept.rounding = rounding;
            kept.step = 7;
            const auto complete = [&](const void* g, void* p, void* low, const Moments& moments) {
              kept.update.gradient = g;
              if (is_half) {
                kept.half = {static_cast<std::uint16_t*>(p), (std::uint64_t{1} << 32) - 100, 0x1234567};
              } else {
                kept.update.master = static_cast<float*>(p);
              }
              kept.update.parameter = has_parameter ? low : nullptr;
              kept.moments = moments;
            };
            complete(gradient.data(), expected_master.data(), expected_parameter.data(),
                     expected.moments({expected.bytes[0].data(), expected.bytes[1].data()},
                                      {expected.exponents[0].data(), expected.exponents[1].data()}, has_v));
            host_kernels::scalar_moment_kernels().update(
                kept, 0, count, {rounding == MomentRounding::kDithered, definitions::dither_seed(kept.step)});
            if (has_average) {
              host_kernels::scalar_kernels().average(
                  {expected_master.data(), expected_average.floats(), is_half ? bf16 : f32, 0.25f}, 0, count);
            }
            std::byte *const p = upload(master), *const low = upload(parameter);
            std::byte* const mean = upload(average);
            kept.average = has_average ? reinterpret_cast<float*>(mean) : nullptr;
            kept.average_weight = 0.25f;
            std::uint8_t* const base[] = {upload(got.bytes[0]), upload(got.bytes[1])};
            std::uint8_t* const exponents[] = {upload(got.exponents[0]), upload(got.exponents[1])};
            complete(upload(gradient), p, low, got.moments(base, exponents, has_v));

            finish(kernels_->update_kept({kept, nullptr, nullptr}, stream_));

            download(master, p), download(parameter, low), download(average, mean);
            ASSERT_TRUE(same_bits("average", average, expected_average));
            for (int i = 0; i < 2; ++i) {
              copy(got.bytes[i].data(), base[i], got.bytes[i].size());
              copy(got.exponents[i].data(), exponents[i], got.exponents[i].size());
            }
            ASSERT_TRUE(same_bits("master", master, expected_master));
            ASSERT_TRUE(same_bits("parameter", parameter, expected_parameter));
            for (int i = 0; i < 2; ++i) {
              ASSERT_EQ(got.bytes[i], expected.bytes[i]) << (i == 0 ? "m" : "v");
              ASSERT_EQ(got.exponents[i], expected.exponents[i]) << (i == 0 ? "m" : "v");
            }
          }
          forget_blocks();
        }
      }
    }
  }
}

TEST_P(KernelsConformance, AnUpdateOfKeptStatesFollowsTheStateOfTheStep) {
  const std::size_t count = 300;
  for (const StepOutcome outcome : {StepOutcome::kApplied, StepOutcome::kSkipped}) {
    Array gradient = hard(DataType::kFloat32, count, 0), expected = hard(DataType::kBfloat16, count, 0);
    Array master = expected;
    std::vector<float> m(2 * count, 0.5f);
    KeptUpdateArguments kept;
    kept.update = adamw_constants_at(1);
    kept.update.count = count;
    kept.update.gradient_type = kept.update.parameter_type = DataType::kFloat32;
    StepState state;
    state.outcome = outcome;
    state.applied_steps = 41;
    state.factor = 0.5f, state.c1 = 0.3f, state.s2 = 0.7f;
    const auto complete = [&](const void* g, void* p, float* moments) {
      kept.update.gradient = g;
      kept.half = {static_cast<std::uint16_t*>(p), 5, 9};
      kept.moments = {MomentFormat::kFloat32, moments, moments + count, nullptr, nullptr};
    };
    std::vector<float> expected_m = m;
    complete(gradient.data(), expected.data(), expected_m.data());
    const AdamWArguments before = kept.update;
    kept.update.factor = state.factor, kept.update.c1 = state.c1, kept.update.s2 = state.s2;
    kept.step = state.applied_steps;
    if (outcome == StepOutcome::kApplied)
      host_kernels::scalar_moment_kernels().update(kept, 0, count,
                                                   {true, definitions::dither_seed(kept.step)});
    kept.update = before;
    kept.step = 0;
    std::byte* const p = upload(master);
    float* const moments = upload(m);
    complete(upload(gradient), p, moments);

    finish(kernels_->update_kept({kept, upload(std::vector<StepState>{state}), nullptr}, stream_));

    download(master, p);
    copy(m.data(), moments, m.size() * sizeof(float));
    EXPECT_TRUE(same_bits("master", master, expected));
    EXPECT_EQ(std::memcmp(m.data(), expected_m.data(), m.size() * sizeof(float)), 0);
    forget_blocks();
  }
}

TEST_P(KernelsConformance, AGridSmallerThanTheWorkCoversAllOfIt) {
  const DataType f32 = DataType::kFloat32, bf16 = DataType::kBfloat16;
  const std::size_t cast_count = beyond_the_grid(16), unaligned_count = beyond_the_grid(1);
  for (const std::size_t offset : {0, 1}) {
    const std::size_t count = offset == 0 ? cast_count : unaligned_count;
    Array source = hard(f32, count, 0), expected(bf16, count, offset), got = expected;
    host_kernels::scalar_kernels().cast({source.data(), expected.data(), count, f32, bf16}, 0, count);
    std::byte* const target = upload(got);

    finish(kernels_->cast({upload(source), target, count, f32, bf16}, stream_));

    download(got, target);
    ASSERT_TRUE(same_bits("target", got, expected));
    forget_blocks();
  }
}

// --- a step's control ---

// The rule of StepControlArguments, written plainly.
struct PlainControl {
  std::uint64_t attempted = 0, applied = 0;
  double loss_scale = 1.0;
  int growth = 0;
  bool skipped = false;
  double norm = 0.0;
  float factor = 0.0f, c1 = 0.0f, s2 = 0.0f;

  void step(const std::vector<std::vector<double>>& squares, double clip, double beta1, double beta2,
            bool dynamic, int interval, double minimum) {
    std::vector<double> units;
    for (const std::vector<double>& slices : squares) units.push_back(plain_pairs(slices));
    const double scale = loss_scale;
    norm = std::sqrt(plain_pairs(units)) / scale;
    ++attempted;
    skipped = !std::isfinite(norm);
    if (skipped) {
      if (dynamic) loss_scale = std::max(scale / 2.0, minimum), growth = 0;
      return;
    }
    ++applied;
    const double t = static_cast<double>(applied);
    factor = static_cast<float>((clip > 0.0 && norm > clip ? clip / norm : 1.0) / scale);
    c1 = static_cast<float>(1.0 - std::pow(beta1, t));
    s2 = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, t)));
    if (dynamic && ++growth == interval) loss_scale *= 2.0, growth = 0;
  }
};

TEST_P(KernelsConformance, StepControlFollowsThePlainRuleThroughSkipsGrowthBackoffAndClipping) {
  const double beta1 = 0.9, beta2 = 0.95;
  constexpr std::size_t kSteps = 40;
  int seen_skips = 0, seen_clips = 0, seen_growth = 0, seen_floor = 0, seen_unclipped = 0;
  for (const auto& [rank_count, unit_count, dynamic] :
       {std::tuple<int, std::size_t, bool>{1, 1, true}, {3, 7, true}, {4, 300, true}, {5, 2, false}}) {
    const auto ranks = static_cast<std::size_t>(rank_count);
    const std::size_t stride = unit_count + 3;
    std::vector<BiasCorrection> table(kSteps + 1);
    bias_corrections(beta1, beta2, 1, table.data(), table.size());
    StepState start;
    start.loss_scale = dynamic ? 64.0 : 1.0;
    PlainControl plain;
    plain.loss_scale = start.loss_scale;
    StepState* const state = upload(std::vector<StepState>{start});
    StepControlArguments a = {};
    a.state = state;
    a.scratch = upload(std::vector<double>(ranks * unit_count, -1.0));
    a.unit_used = upload(std::vector<std::uint32_t>(unit_count, 77));
    a.rank_stride = stride, a.unit_count = unit_count, a.rank_count = rank_count;
    a.corrections = upload(table), a.first_step = 1, a.correction_count = table.size();
    a.dynamic_loss_scale = dynamic, a.growth_interval = 3, a.minimum_loss_scale = 16.0;
    double* const squares = upload(std::vector<double>(ranks * stride));
    double* const used = upload(std::vector<double>(ranks * stride));
    a.squares = squares, a.used = used;

    for (std::size_t step = 0; step < kSteps; ++step) {
      std::vector<double> record(ranks * stride, 1e300), uses(ranks * stride, 1.0);
      std::vector<std::vector<double>> by_unit(unit_count, std::vector<double>(ranks));
      std::vector<std::uint32_t> expected_used(unit_count, 0);
      const std::uint64_t kind = random_() % 8;
      for (std::size_t r = 0; r < ranks; ++r) {
        for (std::size_t u = 0; u < unit_count; ++u) {
          double value = std::uniform_real_distribution<double>(0.0, 2.0)(random_);
          if (kind == 0 && r == ranks - 1 && u == unit_count / 2)
            value = std::numeric_limits<double>::infinity();
          if (kind == 1 && r == 0 && u == unit_count - 1) value = std::numeric_limits<double>::quiet_NaN();
          record[r * stride + u] = by_unit[u][r] = value;
          const bool uses_it = random_() % 3 != 0;
          uses[r * stride + u] = uses_it ? 1.0 : 0.0;
          if (uses_it) expected_used[u] = 1;
        }
      }
      a.clip = step % 3 == 0 ? 0.0 : step % 3 == 1 ? 1e-3 : 1e6;
      copy(squares, record.data(), record.size() * sizeof(double));
      copy(used, uses.data(), uses.size() * sizeof(double));
      const double scale_before = plain.loss_scale;
      plain.step(by_unit, a.clip, beta1, beta2, dynamic, a.growth_interval, a.minimum_loss_scale);

      finish(kernels_->step_control(a, stream_));

      const StepState got = download(state);
      SCOPED_TRACE("step " + std::to_string(step) + " of " + std::to_string(rank_count) + " ranks");
      ASSERT_EQ(got.attempted_steps, plain.attempted);
      ASSERT_EQ(got.applied_steps, plain.applied);
      ASSERT_EQ(got.loss_scale, plain.loss_scale);
      ASSERT_EQ(got.used_loss_scale, scale_before);
      ASSERT_EQ(got.growth_counter, plain.growth);
      ASSERT_EQ(got.outcome, plain.skipped ? StepOutcome::kSkipped : StepOutcome::kApplied);
      if (plain.skipped) {
        ASSERT_EQ(double_bits(got.grad_norm), 0x7FF8000000000000u);
      } else {
        ASSERT_EQ(double_bits(got.grad_norm), double_bits(plain.norm));
        ASSERT_EQ(float_bits(got.factor), float_bits(plain.factor));
        ASSERT_EQ(float_bits(got.c1), float_bits(plain.c1));
        ASSERT_EQ(float_bits(got.s2), float_bits(plain.s2));
      }
      std::vector<std::uint32_t> got_used(unit_count);
      copy(got_used.data(), a.unit_used, unit_count * sizeof(std::uint32_t));
      ASSERT_EQ(got_used, expected_used);
      seen_skips += plain.skipped;
      seen_floor += plain.skipped && dynamic && plain.loss_scale == scale_before;
      seen_growth += plain.loss_scale > scale_before;
      seen_clips += !plain.skipped && a.clip == 1e-3;
      seen_unclipped += !plain.skipped && a.clip == 1e6;
    }
  }
  std::printf("%d skips (%d at the smallest scale), %d growths, %d clipped, %d below the clip\n", seen_skips,
              seen_floor, seen_growth, seen_clips, seen_unclipped);
  EXPECT_GT(seen_skips, 0);
  EXPECT_GT(seen_clips, 0);
  EXPECT_GT(seen_unclipped, 0);
}

TEST_P(KernelsConformance, StepControlGrowsAfterTheIntervalHalvesOnASkipAndKeepsTheMinimum) {
  std::vector<BiasCorrection> table(100);
  bias_corrections(0.9, 0.95, 1, table.data(), table.size());
  StepState start;
  start.loss_scale = 4.0;
  StepControlArguments a = {};
  a.state = upload(std::vector<StepState>{start});
  a.scratch = upload(std::vector<double>(1));
  a.rank_stride = a.unit_count = 1, a.rank_count = 1;
  a.corrections = upload(table), a.first_step = 1, a.correction_count = table.size();
  a.dynamic_loss_scale = true, a.growth_interval = 2, a.minimum_loss_scale = 3.0;
  const double* const finite = upload(std::vector<double>{1.0});
  const double* const infinite = upload(std::vector<double>{std::numeric_limits<double>::infinity()});
  std::vector<double> scales;

  for (const double* squares :
       {finite, finite, finite, infinite, finite, finite, infinite, infinite, infinite}) {
    a.squares = squares;
    finish(kernels_->step_control(a, stream_));
    scales.push_back(download(a.state).loss_scale);
  }

  EXPECT_EQ(scales, (std::vector<double>{4, 8, 8, 4, 4, 8, 4, 3, 3}));
}

TEST_P(KernelsConformance, AStepWithoutItsBiasCorrectionIsNotAppliedAndSaysSo) {
  std::vector<BiasCorrection> table(2);
  bias_corrections(0.9, 0.95, 6, table.data(), table.size());
  StepState start;
  start.attempted_steps = 9, start.applied_steps = 6;
  StepControlArguments a = {};
  a.state = upload(std::vector<StepState>{start});
  a.scratch = upload(std::vector<double>(1));
  a.squares = upload(std::vector<double>{4.0});
  a.rank_stride = a.unit_count = 1, a.rank_count = 1;
  a.corrections = upload(table), a.first_step = 6, a.correction_count = table.size();

  finish(kernels_->step_control(a, stream_));
  const StepState seventh = download(a.state);
  finish(kernels_->step_control(a, stream_));
  const StepState eighth = download(a.state);
  a.first_step = 9;
  finish(kernels_->step_control(a, stream_));
  const StepState below = download(a.state);

  EXPECT_EQ(seventh.outcome, StepOutcome::kApplied);
  EXPECT_EQ(seventh.c1, table[1].c1);
  EXPECT_EQ(seventh.s2, table[1].s2);
  EXPECT_EQ(eighth.outcome, StepOutcome::kNoCorrection);
  EXPECT_EQ(eighth.applied_steps, 7u);
  EXPECT_EQ(below.outcome, StepOutcome::kNoCorrection);
  EXPECT_EQ(below.applied_steps, 7u);
  EXPECT_EQ(below.attempted_steps, 12u);
}

// Two steps queued at once, between which the host learns nothing: the first is skipped, the second is
// applied with the corrections of step 1.
TEST_P(KernelsConformance, QueuedStepsFollowTheDeviceAndNotTheHost) {
  const DataType f32 = DataType::kFloat32, bf16 = DataType::kBfloat16;
  const std::size_t count = 1003;
  AdamWArrays expected = {hard(bf16, count, 3), hard(f32, count, 3), hard(f32, count, 3), hard(f32, count, 3),
                          Array(bf16, count, 3)};
  AdamWArrays got = expected;
  std::vector<BiasCorrection> table(4);
  bias_corrections(0.9, 0.95, 1, table.data(), table.size());
  StepState start;
  start.loss_scale = 8.0;
  StepControlArguments control = {};
  control.state = upload(std::vector<StepState>{start});
  control.scratch = upload(std::vector<double>(2));
  control.rank_stride = control.unit_count = 2, control.rank_count = 1;
  control.corrections = upload(table), control.first_step = 1, control.correction_count = table.size();
  control.dynamic_loss_scale = true, control.growth_interval = 100, control.minimum_loss_scale = 1.0;
  control.clip = 0.5;
  control.used = upload(std::vector<double>{1.0, 0.0});
  control.unit_used = upload(std::vector<std::uint32_t>(2));
  const double* const infinite = upload(std::vector<double>{1.0, std::numeric_limits<double>::infinity()});
  const double* const finite = upload(std::vector<double>{9.0, 16.0});
  AdamWArguments a = got.arguments(adamw_constants_at(50), bf16, bf16, true);
  a.factor = std::numeric_limits<float>::quiet_NaN();  // Not read, like the corrections of step 50.
  a.gradient = upload(got.gradient);
  a.master = reinterpret_cast<float*>(upload(got.master));
  a.m = reinterpret_cast<float*>(upload(got.m));
  a.v = reinterpret_cast<float*>(upload(got.v));
  a.parameter = upload(got.parameter);
  AdamWArguments constants = adamw_constants_at(1);
  // The skipped step halved the scale; the norm is 5 / 4.
  constants.factor = static_cast<float>(0.5 / 1.25 / 4.0);
  host_kernels::scalar_kernels().adamw(expected.arguments(constants, bf16, bf16, true), 0, count);

  control.squares = infinite;
  ASSERT_TRUE(kernels_->step_control(control, stream_).ok());
  ASSERT_TRUE(kernels_->adamw_controlled({a, control.state, control.unit_used}, stream_).ok());
  control.squares = finite;
  ASSERT_TRUE(kernels_->step_control(control, stream_).ok());
  ASSERT_TRUE(
      kernels_->adamw_controlled({a, control.state, control.unit_used + 1}, stream_).ok());  // Unused.
  finish(kernels_->adamw_controlled({a, control.state, control.unit_used}, stream_));

  download(got.master, a.master), download(got.m, a.m), download(got.v, a.v);
  download(got.parameter, a.parameter);
  EXPECT_TRUE(same_bits("master", got.master, expected.master));
  EXPECT_TRUE(same_bits("m", got.m, expected.m));
  EXPECT_TRUE(same_bits("v", got.v, expected.v));
  EXPECT_TRUE(same_bits("parameter", got.parameter, expected.parameter));
  EXPECT_EQ(download(control.state).grad_norm, 1.25);
  EXPECT_EQ(download(control.state).loss_scale, 4.0);
}

// Wide, tall and square matrices, single rows and columns, more than one tile; a matrix of subnormals, whose
// norm is the least; zeros of both signs.
TEST_P(KernelsConformance, OrthogonaliseGivesTheBitsOfPlainLoops) {
  struct Case {
    Extent extent;
    float scale;
  };
  bool depends_on_order = false;
  for (const auto& [e, scale] :
       {Case{{37, 53}, 1.0f}, Case{{53, 37}, 1e-3f}, Case{{131, 40}, 1.0f}, Case{{5, 150}, 1e4f},
        Case{{1, 129}, 1.0f}, Case{{300, 1}, 1.0f}, Case{{1, 1}, -2.0f}, Case{{16, 16}, 1e-40f},
        Case{{17, 33}, 0x1p-149f}, Case{{3, 7}, 0.0f}}) {
    std::vector<float> matrix(e.count());
    for (float& value : matrix) {
      value = random_() % 16 == 0 ? -0.0f : scale * std::normal_distribution<float>()(random_);
    }
    const std::vector<float> expected = plain_orthogonal(e, matrix);
    depends_on_order = depends_on_order || plain_orthogonal(e, matrix, true) != expected;
    float* const device = upload(matrix);
    const std::uint64_t scratch_count = orthogonal_scratch_count(e.rows, e.columns);
    float* const scratch = upload(std::vector<float>(scratch_count + 1, NAN));

    finish(kernels_->orthogonalise({{device, scratch, e.rows, e.columns}, nullptr}, stream_));

    std::vector<float> got(matrix.size());
    copy(got.data(), device, got.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0)
        << e.rows << " x " << e.columns;
    EXPECT_TRUE(std::isnan(download(scratch + scratch_count))) << "written behind the scratch";
    forget_blocks();
  }
  EXPECT_TRUE(depends_on_order) << "no matrix tells the order of a chain";
}

// All types and alignments, with a decision and without, beside the results of host memory.
TEST_P(KernelsConformance, MuonsUpdatesHaveTheBitsOfTheHost) {
  const BlockRunner runner(1);
  for (const DataType gradient_type : kTypes) {
    for (const std::size_t offset : {std::size_t{0}, std::size_t{3}}) {
      for (const bool is_half : {false, true}) {
        for (const StepOutcome outcome : {StepOutcome::kNone, StepOutcome::kApplied, StepOutcome::kSkipped}) {
          const std::size_t count = 5003;
          const bool has_parameter = !is_half && offset == 0;
          const DataType f32 = DataType::kFloat32;
          Array gradient = hard(gradient_type, count, offset), u = hard(f32, count, offset);
          Array m = hard(f32, count, offset), blended = hard(f32, count, offset);
          Array master = hard(is_half ? DataType::kBfloat16 : f32, count, offset);
          Array average = hard(f32, count, offset), parameter = hard(gradient_type, count, offset);
          StepState state;
          state.outcome = outcome, state.applied_steps = 12, state.factor = 0.021f;
          MuonMomentumArguments momentum;
          momentum.gradient = {gradient.data(), gradient_type, 0.5f};
          momentum.a1 = 0.05f, momentum.m = m.floats(), momentum.values = blended.floats();
          momentum.count = count;
          MuonUpdateArguments update;
          update.gradient = momentum.gradient, update.a1 = 0.05f, update.count = count;
          update.m = m.floats(), update.u = u.floats();
          update.decay = -1e-3f, update.step = -1e-2f, update.step_number = 7;
          if (is_half) {
            update.half = {static_cast<std::uint16_t*>(master.data()), 0xFFFFFF00u, 0xFEDCBA9876543210u};
            update.average = average.floats(), update.average_weight = 0.125f;
          } else {
            update.master = master.floats();
          }
          if (has_parameter) update.parameter = parameter.data(), update.parameter_type = gradient_type;
          Controlled<MuonMomentumArguments> momentum_there = {momentum, nullptr};
          Controlled<MuonUpdateArguments> update_there = {update, nullptr};
          if (outcome != StepOutcome::kNone)
            momentum_there.state = update_there.state = upload(std::vector<StepState>{state});
          std::byte* const gradient_there = upload(gradient);
          std::byte *const m_there = upload(m), *const blended_there = upload(blended);
          std::byte *const master_there = upload(master), *const average_there = upload(average);
          std::byte* const parameter_there = upload(parameter);
          momentum_there.part.gradient.values = update_there.part.gradient.values = gradient_there;
          momentum_there.part.m = update_there.part.m = reinterpret_cast<float*>(m_there);
          momentum_there.part.values = reinterpret_cast<float*>(blended_there);
          update_there.part.u = reinterpret_cast<float*>(upload(u));
          if (is_half) {
            update_there.part.half.elements = reinterpret_cast<std::uint16_t*>(master_there);
            update_there.part.average = reinterpret_cast<float*>(average_there);
          } else {
            update_there.part.master = reinterpret_cast<float*>(master_there);
          }
          if (has_parameter) update_there.part.parameter = parameter_there;

          ASSERT_TRUE(kernels_->muon_momentum(momentum_there, stream_).ok());
          finish(kernels_->muon_update(update_there, stream_));

          if (outcome == StepOutcome::kApplied) {
            momentum.gradient.factor = update.gradient.factor = state.factor;
            update.step_number = state.applied_steps;
          }
          if (outcome != StepOutcome::kSkipped) {
            muon_momentum(momentum, runner);
            muon_update(update, runner);
          }
          Array got_m = m, got_blended = m, got_master = master, got_average = average;
          Array got_parameter = parameter;
          download(got_m, m_there), download(got_blended, blended_there), download(got_master, master_there);
          download(got_average, average_there), download(got_parameter, parameter_there);
          EXPECT_TRUE(same_bits("m", got_m, m));
          EXPECT_TRUE(same_bits("momentum", got_blended, blended));
          EXPECT_TRUE(same_bits("master", got_master, master));
          EXPECT_TRUE(same_bits("average", got_average, average));
          EXPECT_TRUE(same_bits("parameter", got_parameter, parameter));
          forget_blocks();
        }
      }
    }
  }
}

TEST_P(KernelsConformance, AStepThatIsSkippedOrthogonalisesNothing) {
  StepState state;
  state.outcome = StepOutcome::kSkipped;
  const StepState* const there = upload(std::vector<StepState>{state});
  const std::vector<float> matrix(24, 3.0f);
  float* const device = upload(matrix);
  float* const scratch = upload(std::vector<float>(orthogonal_scratch_count(4, 6)));

  finish(kernels_->orthogonalise({{device, scratch, 4, 6}, there}, stream_));

  EXPECT_EQ(download(device + 23), 3.0f);
  EXPECT_EQ(kernels_->orthogonalise({{device, nullptr, 4, 6}, there}, stream_).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(kernels_->orthogonalise({{device, device + 4, 4, 6}, there}, stream_).code(),
            StatusCode::kInvalidArgument);
  // The last part of the scratch.
  const std::size_t scratch_count = orthogonal_scratch_count(4, 6);
  float* const whole = upload(std::vector<float>(scratch_count));
  EXPECT_EQ(kernels_->orthogonalise({{whole + scratch_count - 24, whole, 4, 6}, there}, stream_).code(),
            StatusCode::kInvalidArgument);
  EXPECT_TRUE(kernels_->orthogonalise({{nullptr, nullptr, 0, 6}, there}, stream_).ok());
}

// Runs of a parameter: all of it, and slices that cut rows, bands and matrices.
struct FactoredCase {
  std::vector<std::uint64_t> dimensions;
  std::uint64_t first, count, place;
};
const std::vector<FactoredCase> kFactoredCases = {
    {{37, 53}, 0, 1961, 0},       {{37, 53}, 60, 1500, 67},   {{1300}, 0, 1300, 512},
    {{1300}, 500, 300, 1012},     {{3, 700, 7}, 0, 14700, 0}, {{3, 700, 7}, 4001, 5555, 13},
    {{3, 700, 7}, 6000, 40, 600}, {{1, 129}, 0, 129, 5},      {{2100, 1}, 0, 2100, 3},
    {{2100, 1}, 700, 1024, 703},  {{5, 1, 19}, 3, 80, 509},   {{257, 33}, 33, 8448, 33},
    {{40, 2, 3}, 1, 200, 15},     {{12, 12}, 50, 0, 50}};

std::uint64_t count_of(const std::vector<std::uint64_t>& dimensions) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : dimensions) count *= extent;
  return count;
}

// 1, 2^-12, and then 2^-27: the squares of the first two are halfway between two fp32 values, and each of the
// others vanishes beside them, while two of them together do not. So the sum tells the order of a chain.
float telling_value(std::uint64_t number) {
  return number == 0 ? 1.0f : number == 1 ? 0x1p-12f : 0x1p-27f;
}

// The same, around the end of the first band of a matrix: 64 small squares in one chain vanish beside 1 if
// the chain has it, and do not if they begin a band.
float value_at_band_end(std::uint64_t row) {
  constexpr std::uint64_t kEnd = kFactorBandRows;
  if (row + 2 < kEnd || row >= kEnd + 64) return 0.0f;
  return row < kEnd ? telling_value(row + 2 - kEnd) : telling_value(2);
}

// All types and alignments; hard values, and chains that tell their order and their bands.
TEST_P(KernelsConformance, FactorSumsHaveTheBitsOfPlainLoops) {
  bool depends_on_order = false, depends_on_bands = false;
  for (const FactoredCase& wanted : kFactoredCases) {
    for (const DataType type : kTypes) {
      const std::size_t offset = random_() % 2 * 3;
      const bool is_hard = type != DataType::kBfloat16 && random_() % 3 == 0;
      const float factor = is_hard ? 0.37f : 0.5f;
      PlainRun plain{
          factored_shape({wanted.dimensions.data(), wanted.dimensions.size()}, count_of(wanted.dimensions)),
          wanted.first,
          wanted.place,
          {}};
      Array gradient = hard(type, wanted.count, offset);
      for (std::size_t i = 0; i < wanted.count && !is_hard; ++i) {
        const std::uint64_t row = (wanted.first + i) / plain.shape.columns;
        const std::uint64_t column = (wanted.first + i) % plain.shape.columns;
        float value = std::normal_distribution<float>()(random_);
        if (column % 2 == 1) value = telling_value(row % plain.shape.rows);
        if (column % 4 == 2) value = value_at_band_end(row % plain.shape.rows);
        if ((row % 3 == 2 || plain.shape.rows == 1) && plain.shape.columns > 32)
          value = column % 16 == 0 ? telling_value(column / 16) : 0.0f;
        gradient.set(i, type == DataType::kFloat32    ? float_bits(value / factor)
                        : type == DataType::kBfloat16 ? float_to_bfloat16(value / factor)
                                                      : float_to_float16(value / factor));
      }
      for (std::size_t i = 0; i < wanted.count; ++i) plain.g.push_back(gradient.value(i) * factor);
      const std::vector<float> expected = plain_factor_sums(plain);
      depends_on_order = depends_on_order || (!is_hard && plain_factor_sums(plain, true) != expected);
      depends_on_bands = depends_on_bands || (!is_hard && plain_factor_sums(plain, false, 4096) != expected);
      float* const sums = upload(std::vector<float>(expected.size() + 1, -1.0f));
      StepState state;
      state.outcome = StepOutcome::kApplied, state.factor = factor;
      const bool controlled = random_() % 2 == 0;

      finish(kernels_->factor_sums({{{upload(gradient), type, controlled ? 99.0f : factor, plain.shape,
                                      wanted.first, wanted.count, wanted.place},
                                     sums},
                                    controlled ? upload(std::vector<StepState>{state}) : nullptr},
                                   stream_));

      std::vector<float> got(expected.size() + 1);
      copy(got.data(), sums, got.size() * sizeof(float));
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), expected.size() * sizeof(float)), 0)
          << wanted.dimensions[0] << " rows, " << wanted.count << " elements from " << wanted.first;
      EXPECT_EQ(got.back(), -1.0f) << "written behind the sums";
      forget_blocks();
    }
  }
  EXPECT_TRUE(depends_on_order) << "no sum tells the order of its chain";
  EXPECT_TRUE(depends_on_bands) << "no column tells its bands";
}

// From the sums of all ranks to the masters, in fp32 and in bf16, with a decision and without.
TEST_P(KernelsConformance, AdafactorsUpdatesHaveTheBitsOfPlainLoops) {
  const DataType f32 = DataType::kFloat32;
  for (const FactoredCase& wanted : kFactoredCases) {
    for (const StepOutcome outcome : {StepOutcome::kNone, StepOutcome::kApplied, StepOutcome::kSkipped}) {
      const DataType type = kTypes[random_() % 3];
      const std::size_t offset = random_() % 2 * 3, count = wanted.count;
      const bool is_half = random_() % 2 == 0, has_parameter = !is_half && random_() % 2 == 0;
      const bool has_average = random_() % 2 == 0;
      const FactoredShape shape =
          factored_shape({wanted.dimensions.data(), wanted.dimensions.size()}, count_of(wanted.dimensions));
      StepState state;
      state.outcome = outcome, state.applied_steps = 12, state.factor = 0.021f;
      const bool controlled = outcome != StepOutcome::kNone, applied = outcome != StepOutcome::kSkipped;
      const float factor = controlled ? state.factor : 0.3f;
      const std::uint64_t t = controlled ? state.applied_steps : 7;
      Array gradient = hard(type, count, offset);
      Array master = hard(is_half ? DataType::kBfloat16 : f32, count, offset);
      for (std::size_t i = 0; i < count; ++i) {
        const float g = std::normal_distribution<float>()(random_),
                    p = std::normal_distribution<float>()(random_);
        gradient.set(i, type == f32                   ? float_bits(g)
                        : type == DataType::kBfloat16 ? float_to_bfloat16(g)
                                                      : float_to_float16(g));
        master.set(i, is_half ? float_to_bfloat16(p) : float_bits(p));
      }
      Array average = hard(f32, count, offset), parameter = hard(type, count, offset);
      std::vector<float> before(shape.factor_count()), sums(before.size());
      for (float& value : before)
        value = random_() % 8 == 0 ? 0.0f : std::uniform_real_distribution<float>()(random_);
      for (float& value : sums)
        value = random_() % 8 == 0 ? 0.0f : 30 * std::uniform_real_distribution<float>()(random_);
      const std::uint64_t ranks = 1 + random_() % 300;
      std::vector<double> squares(ranks * 5);
      for (double& value : squares) value = std::uniform_real_distribution<double>()(random_);

      PlainRun plain{shape, wanted.first, wanted.place, {}};
      std::vector<float> masters;
      for (std::size_t i = 0; i < count; ++i) {
        plain.g.push_back(gradient.value(i) * factor);
        masters.push_back(master.value(i));
      }
      const PlainFactors factors = plain_renewal(shape, 0.4f, before, sums);
      const std::vector<float> updates = plain_updates(plain, factors);
      double all[2] = {};
      for (std::uint64_t rank = 0; rank < ranks; ++rank) {
        all[0] += squares[rank * 5];
        all[1] += squares[rank * 5 + 1];
      }
      const float step = plain_step(0.05, t, shape.count(), all[0], all[1]);

      const StepState* const state_there = controlled ? upload(std::vector<StepState>{state}) : nullptr;
      float* const sums_there = upload(sums);
      float* const kept_there = upload(before);
      float* const means_there = upload(std::vector<float>(shape.batches, -1.0f));
      float* const step_there = upload(std::vector<float>{-1.0f});
      double* const results = upload(std::vector<double>{-1.0, -1.0});
      double* const scratch = upload(std::vector<double>(leaf_room(count), NAN));
      std::byte *const gradient_there = upload(gradient), *const master_there = upload(master);
      std::byte *const average_there = upload(average), *const parameter_there = upload(parameter);
      const FactoredRun run = {gradient_there, type, 0.3f, shape, wanted.first, count, wanted.place};
      FactoredUpdateArguments a;
      a.run = run, a.factors = sums_there, a.row_means = means_there;
      a.computed_step = step_there, a.step = 99.0f, a.step_number = 7, a.decay = -1e-3f;
      if (is_half) {
        a.half = {reinterpret_cast<std::uint16_t*>(master_there), 0xFFFFFF00u, 0xFEDCBA9876543210u};
      } else {
        a.master = reinterpret_cast<float*>(master_there);
      }
      if (has_average) a.average = reinterpret_cast<float*>(average_there), a.average_weight = 0.125f;
      if (has_parameter) a.parameter = parameter_there, a.parameter_type = type;

      ASSERT_TRUE(
          kernels_->renew_factors({{shape, 0.4f, kept_there, sums_there, means_there}, state_there}, stream_)
              .ok());
      ASSERT_TRUE(
          kernels_->update_squares({{run, sums_there, means_there, scratch, results}, state_there}, stream_)
              .ok());
      ASSERT_TRUE(kernels_
                      ->parameter_squares({{master_there, is_half ? DataType::kBfloat16 : f32, count,
                                            wanted.place, scratch, results + 1},
                                           state_there},
                                          stream_)
                      .ok());
      ASSERT_TRUE(
          kernels_
              ->adafactor_step({{upload(squares), 5, ranks, 0.05, shape.count(), 7, step_there}, state_there},
                               stream_)
              .ok());
      ASSERT_TRUE(kernels_->factored_update({a, state_there}, stream_).ok());
      finish(kernels_->keep_factors({{sums_there, kept_there, before.size()}, state_there}, stream_));

      SCOPED_TRACE(std::to_string(wanted.dimensions[0]) + " rows, " + std::to_string(count) +
                   " elements from " + std::to_string(wanted.first) + ", outcome " +
                   std::to_string(static_cast<int>(outcome)));
      std::vector<float> got_kept(before.size()), got_means(factors.row_means.size());
      copy(got_kept.data(), kept_there, got_kept.size() * sizeof(float));
      copy(got_means.data(), means_there, got_means.size() * sizeof(float));
      if (shape.count() > 0) {
        EXPECT_EQ(got_kept, applied ? factors.factors : before);
        if (applied) {
          EXPECT_EQ(got_means, factors.row_means);
        }
        EXPECT_EQ(float_bits(download(step_there)), float_bits(applied ? step : -1.0f));
      }
      EXPECT_EQ(download(results), applied ? plain_squares(updates, wanted.place) : -1.0);
      EXPECT_EQ(download(results + 1), applied ? plain_squares(masters, wanted.place) : -1.0);
      for (std::size_t i = 0; applied && i < count; ++i) {
        float p = std::fma(step, updates[i], std::fma(-1e-3f, masters[i], masters[i]));
        if (is_half) {
          const std::uint16_t rounded = definitions::master_to_bfloat16(
              p, true, definitions::step_seed(a.half.key, t), a.half.first + i);
          master.set(i, rounded);
          p = bfloat16_to_float(rounded);
        } else {
          master.set(i, float_bits(canonical(p)));
        }
        if (has_average)
          average.set(i, float_bits(definitions::average_element(average.value(i), p, 0.125f)));
        if (!has_parameter) continue;
        parameter.set(i, type == f32                   ? float_bits(canonical(p))
                         : type == DataType::kBfloat16 ? float_to_bfloat16(p)
                                                       : float_to_float16(p));
      }
      Array got_master = master, got_average = average, got_parameter = parameter;
      download(got_master, master_there), download(got_average, average_there);
      download(got_parameter, parameter_there);
      EXPECT_TRUE(same_bits("master", got_master, master));
      EXPECT_TRUE(same_bits("average", got_average, average));
      EXPECT_TRUE(same_bits("parameter", got_parameter, parameter));
      forget_blocks();
    }
  }
}

TEST_P(KernelsConformance, AdafactorsPartsRefuseMisuse) {
  FactoredRun run;
  run.shape = {1, 4, 6, true};
  run.count = 24;
  float value = 0.0f;
  double sum = 0.0;
  const auto refused = [](const char* word, const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };

  refused("gradient", kernels_->factor_sums({{run, &value}, nullptr}, stream_));
  run.gradient = &value;
  refused("sums", kernels_->factor_sums({{run, nullptr}, nullptr}, stream_));
  refused("row_means",
          kernels_->renew_factors({{run.shape, 1.0f, &value, &value, nullptr}, nullptr}, stream_));
  refused("factors", kernels_->update_squares({{run, nullptr, &value, &sum, &sum}, nullptr}, stream_));
  refused("result",
          kernels_->parameter_squares({{&value, DataType::kFloat32, 1, 0, &sum, nullptr}, nullptr}, stream_));
  refused("squares", kernels_->adafactor_step({{nullptr, 2, 1, 0.1, 24, 1, &value}, nullptr}, stream_));
  refused("target", kernels_->keep_factors({{&value, nullptr, 1}, nullptr}, stream_));
  FactoredUpdateArguments update;
  update.run = run;
  update.factors = update.row_means = &value;
  refused("master", kernels_->factored_update({update, nullptr}, stream_));
  run.first = 1;
  refused("keep it inside", kernels_->factor_sums({{run, &value}, nullptr}, stream_));
}

TEST_P(KernelsConformance, NothingIsDoneForNoElementsAndMisuseIsRefused) {
  const DataType f32 = DataType::kFloat32;
  AdamWArguments adamw = adamw_constants_at(1);
  adamw.gradient_type = adamw.parameter_type = f32;
  const auto code = [](const Status& status) { return status.code(); };

  EXPECT_TRUE(kernels_->cast({nullptr, nullptr, 0, f32, DataType::kFloat16}, stream_).ok());
  EXPECT_TRUE(kernels_->accumulate({nullptr, nullptr, 0, nullptr, 0, 1, 3, f32, true}, stream_).ok());
  EXPECT_TRUE(kernels_->scale({nullptr, nullptr, 0, 1.0f, f32, f32}, stream_).ok());
  EXPECT_TRUE(kernels_->add({nullptr, nullptr, 0, f32}, stream_).ok());
  EXPECT_TRUE(kernels_->fill({nullptr, 0, 1.0f, f32}, stream_).ok());
  EXPECT_TRUE(kernels_->adamw(adamw, stream_).ok());
  EXPECT_TRUE(kernels_->adamw_controlled({adamw, nullptr, nullptr}, stream_).ok());

  StepState state;
  BiasCorrection correction = {};
  double value = 0.0;
  StepControlArguments control = {};
  control.state = &state, control.scratch = &value, control.squares = &value;
  control.rank_stride = control.unit_count = 1, control.rank_count = 1;
  control.corrections = &correction, control.first_step = 1, control.correction_count = 1;
  const auto refused = [&](const char* word, auto change) {
    StepControlArguments changed = control;
    change(changed);
    const Status status = kernels_->step_control(changed, stream_);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  refused("ranks", [](auto& a) { a.rank_count = 0; });
  refused("rank_stride", [](auto& a) { a.rank_stride = 0; });
  refused("clip", [](auto& a) { a.clip = -1.0; });
  refused("growth interval", [](auto& a) { a.dynamic_loss_scale = true; });
  refused("unit_used", [&](auto& a) { a.used = &value; });
  refused("corrections", [](auto& a) { a.correction_count = 0; });
  refused("state", [](auto& a) { a.state = nullptr; });
  refused("squares", [](auto& a) { a.squares = nullptr; });
  adamw.count = 4;
  EXPECT_EQ(code(kernels_->adamw_controlled({adamw, &state, nullptr}, stream_)),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kernels_->fill({nullptr, 4, 1.0f, f32}, stream_)), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay::kernel_test
