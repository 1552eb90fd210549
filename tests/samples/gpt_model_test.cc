// The model alone: loss and gradients against a double-precision reference, products against each other, the
// order of samples. No engine.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "forebay/error.h"
#include "model/convert.h"
#include "model/gpt.h"
#include "model/host_operations.h"
#include "model/matmul.h"
#include "model/random.h"
#include "model/shape.h"
#include "model/text.h"
#include "tests/samples/gpt_reference.h"
#include "tests/samples/plain_model.h"

namespace forebay::gpt {
namespace {

GptReference reference_of(const PlainModel& model, const GptShape& shape) {
  std::map<std::string, Values> values;
  for (const GptUnit& unit : model.units()) {
    for (const GptParameter& parameter : unit.parameters) {
      const std::vector<float> value = model.value(parameter.name);
      values[parameter.name] = Values(value.begin(), value.end());
    }
  }
  return {shape, std::move(values)};
}

constexpr GptShape kTiny{.layers = 2, .hidden = 12, .heads = 3, .sequence = 5};

class GptModel : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Products, GptModel, ::testing::ValuesIn(matmul_names()),
                         [](const auto& info) { return info.param; });

// Every parameter's gradient, at sampled elements, against central differences of the double-precision loss,
// whose own error is about 1e-8. The remaining difference is fp32 rounding.
void expect_gradients_of_the_reference(PlainModel& model, const GptReference::Dropped& dropped,
                                       std::uint64_t seed) {
  randomise(model, seed);
  const auto tokens = random_bytes(10, seed, 1000);
  const auto targets = random_bytes(10, seed, 1001);

  const double loss = model.run(tokens, targets);

  GptReference reference = reference_of(model, kTiny);
  reference.drop(dropped);
  EXPECT_NEAR(loss, reference.loss(tokens, targets), 2e-6 * loss);
  for (const GptUnit& unit : model.units()) {
    for (const GptParameter& parameter : unit.parameters) {
      const std::vector<float> gradient = model.gradient(parameter.name);
      double largest = 0;
      for (const float g : gradient) largest = std::max(largest, std::abs(double{g}));
      ASSERT_GT(largest, 0) << parameter.name;
      for (std::uint64_t sample = 0; sample < 12; ++sample) {
        // The rows of wte that the tokens name matter most: choose them half of the time.
        std::size_t i = draw(seed, 2000, sample) % gradient.size();
        if (parameter.name == "wte.weight" && sample % 2 == 0)
          i = tokens[sample % 10] * kTiny.hidden + i % kTiny.hidden;
        double& value = reference.parameter(parameter.name)[i];
        const double centre = value;
        const double step = 1e-4;
        value = centre + step;
        const double above = reference.loss(tokens, targets);
        value = centre - step;
        const double below = reference.loss(tokens, targets);
        value = centre;
        EXPECT_NEAR(gradient[i], (above - below) / (2 * step), 2e-5 * largest + 2e-7)
            << parameter.name << "[" << i << "]";
      }
    }
  }
}

TEST_P(GptModel, GradientsAgreeWithFiniteDifferencesOfTheReference) {
  PlainModel model(kTiny, 2, DataType::kFloat32, make_matmul(GetParam()));
  expect_gradients_of_the_reference(model, {}, test_seed());
}

TEST_P(GptModel, GradientsThroughDropoutAgreeWithThoseOfTheDocumentedMasks) {
  PlainModel model({.shape = kTiny, .batch = 2, .recompute_every = 2, .dropout = 0.3, .seed = 9},
                   make_matmul(GetParam()));
  model.begin({.step = 4, .micro_step = 1, .first_sample = 6});
  expect_gradients_of_the_reference(
      model, {.probability = 0.3, .seed = 9, .step = 4, .micro_step = 1, .first_sample = 6}, test_seed());
}

TEST_P(GptModel, AddsToAGradientWhenToldTo) {
  const std::uint64_t seed = test_seed();
  PlainModel model(kTiny, 2, DataType::kFloat32, make_matmul(GetParam()));
  randomise(model, seed);
  const auto tokens = random_bytes(10, seed, 1000);
  const auto targets = random_bytes(10, seed, 1001);

  model.run(tokens, targets);
  std::map<std::string, std::vector<float>> once;
  for (const GptUnit& unit : model.units()) {
    for (const GptParameter& parameter : unit.parameters)
      once[parameter.name] = model.gradient(parameter.name);
  }
  model.run(tokens, targets, /*accumulate=*/true);

  for (const auto& [name, gradient] : once) {
    const std::vector<float> twice = model.gradient(name);
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      ASSERT_NEAR(twice[i], 2 * gradient[i], 1e-6F + 1e-5F * std::abs(gradient[i]))
          << name << "[" << i << "]";
    }
  }
}

TEST_P(GptModel, GivesTheSameBitsAgain) {
  const std::uint64_t seed = test_seed();
  PlainModel model(kTiny, 2, DataType::kBfloat16, make_matmul(GetParam()));
  randomise(model, seed);
  const auto tokens = random_bytes(10, seed, 1000);
  const auto targets = random_bytes(10, seed, 1001);

  const double first = model.run(tokens, targets);
  const std::vector<float> gradient = model.gradient("h.0.attn.c_attn.weight");
  const double second = model.run(tokens, targets);

  EXPECT_EQ(first, second);
  EXPECT_EQ(gradient, model.gradient("h.0.attn.c_attn.weight"));
}

TEST(GptThreads, PlainProductsGiveTheSameBitsAtAnyNumberOfThreads) {
  const std::uint64_t seed = test_seed();
  // Large enough that threads share every loop.
  const GptShape shape{.layers = 1, .hidden = 144, .heads = 3, .sequence = 40};
  const auto tokens = random_bytes(3 * 40, seed, 1000);
  const auto targets = random_bytes(3 * 40, seed, 1001);
  std::vector<double> losses;
  std::vector<std::vector<float>> gradients;

  for (const int threads : {1, 2, 3}) {
    set_compute_threads(threads);
    PlainModel model(shape, 3, DataType::kBfloat16, create_plain_matmul(), threads);
    randomise(model, seed);
    losses.push_back(model.run(tokens, targets));
    gradients.push_back(model.gradient("wte.weight"));
  }
  set_compute_threads(1);

  EXPECT_EQ(losses[1], losses[0]);
  EXPECT_EQ(losses[2], losses[0]);
  EXPECT_EQ(gradients[1], gradients[0]);
  EXPECT_EQ(gradients[2], gradients[0]);
}

#if defined(_OPENMP)
TEST(GptThreads, GivesExactlyTheThreadsAskedForOrRefuses) {
  std::thread([] {  // OpenMP's settings are the calling thread's.
    omp_set_dynamic(1);
    set_compute_threads(3);
    EXPECT_EQ(omp_get_dynamic(), 0);
    EXPECT_EQ(omp_get_max_threads(), 3);

    omp_set_max_active_levels(0);
    EXPECT_THROW(set_compute_threads(2), Error);
    EXPECT_EQ(default_compute_threads(), 1);
  })
      .join();
}
#endif

TEST_P(GptModel, LowPrecisionRoundsOnlyParametersAndGradients) {
  const std::uint64_t seed = test_seed();
  for (const DataType dtype : {DataType::kBfloat16, DataType::kFloat16}) {
    PlainModel low(kTiny, 2, dtype, make_matmul(GetParam()));
    PlainModel full(kTiny, 2, DataType::kFloat32, make_matmul(GetParam()));
    randomise(low, seed);
    for (const GptUnit& unit : low.units()) {
      for (const GptParameter& parameter : unit.parameters)
        full.set(parameter.name, low.value(parameter.name));
    }
    const auto tokens = random_bytes(10, seed, 1000);
    const auto targets = random_bytes(10, seed, 1001);
    const double scale = 1024;

    const double low_loss = low.run(tokens, targets, false, scale);
    const double full_loss = full.run(tokens, targets, false, scale);

    EXPECT_EQ(low_loss, full_loss);  // The same fp32 values were computed on.
    const std::string name = "h.1.mlp.c_fc.weight";
    std::vector<float> rounded = full.gradient(name);
    std::vector<std::byte> bytes(rounded.size() * 2);
    narrow(dtype, rounded.data(), bytes.data(), rounded.size(), false);
    widen(dtype, bytes.data(), rounded.data(), rounded.size());
    EXPECT_EQ(low.gradient(name), rounded) << data_type_name(dtype);
  }
}

TEST(GptProducts, LibraryAndPlainAgreeWithDoubles) {
  const std::uint64_t seed = test_seed();
  std::uint64_t stream = 0;
  for (const std::string& name : matmul_names()) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const ProductShape& extent :
             {ProductShape{1, 1, 1}, ProductShape{70, 33, 19}, ProductShape{64, 48, 128},
              ProductShape{130, 7, 65}, ProductShape{5, 100, 3}}) {
          const ProductShape shape{extent.rows, extent.columns, extent.depth, transpose_a, transpose_b};
          std::vector<float> a_storage(shape.rows * shape.depth + 128),
              b_storage(shape.depth * shape.columns + 128);
          std::vector<float> c_storage(shape.rows * shape.columns + 128, NAN);
          float *a = align(a_storage), *b = align(b_storage), *c = align(c_storage);
          for (std::size_t i = 0; i < shape.rows * shape.depth; ++i) {
            a[i] = static_cast<float>(draw_normal(seed, stream, i));
          }
          for (std::size_t i = 0; i < shape.depth * shape.columns; ++i) {
            b[i] = static_cast<float>(draw_normal(seed, stream + 1, i));
          }
          stream += 2;
          const std::unique_ptr<MatMul> matmul = make_matmul(name);
          AlignedBytes workspace(matmul->prepare(shape));

          matmul->multiply(shape, a, b, c, workspace.data());

          for (std::size_t r = 0; r < shape.rows; ++r) {
            for (std::size_t col = 0; col < shape.columns; ++col) {
              double sum = 0, magnitude = 0;
              for (std::size_t d = 0; d < shape.depth; ++d) {
                const double product =
                    double{a[transpose_a ? d * shape.rows + r : r * shape.depth + d]} *
                    double{b[transpose_b ? col * shape.depth + d : d * shape.columns + col]};
                sum += product;
                magnitude += std::abs(product);
              }
              ASSERT_NEAR(c[r * shape.columns + col], sum, 1e-6 * magnitude + 1e-12)
                  << name << " " << shape.rows << "x" << shape.columns << "x" << shape.depth << " transposed "
                  << transpose_a << transpose_b << " at " << r << "," << col;
            }
          }
        }
      }
    }
  }
}

TEST(GptConvert, HalvesRoundToNearestEvenAndComeBackExactly) {
  const auto narrowed = [](DataType type, float value) {
    std::uint16_t bits = 0;
    narrow(type, &value, reinterpret_cast<std::byte*>(&bits), 1, false);
    return bits;
  };
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const std::uint16_t half = static_cast<std::uint16_t>(bits);
    for (const DataType type : {DataType::kBfloat16, DataType::kFloat16}) {
      float value = 0;
      widen(type, reinterpret_cast<const std::byte*>(&half), &value, 1);
      if (std::isnan(value)) {
        EXPECT_TRUE((narrowed(type, value) & 0x7FFF) > (type == DataType::kFloat16 ? 0x7C00 : 0x7F80));
        continue;
      }
      ASSERT_EQ(narrowed(type, value), half) << data_type_name(type);
      if (std::isinf(value) || half == 0x8000) continue;
      // A value half-way to the next one rounds to the even one.
      const std::uint16_t next_bits = static_cast<std::uint16_t>(half + 1);
      float next = 0;
      widen(type, reinterpret_cast<const std::byte*>(&next_bits), &next, 1);
      if (!std::isfinite(next) || std::signbit(next) != std::signbit(value)) continue;
      const double middle = (double{value} + double{next}) / 2;
      if (double{static_cast<float>(middle)} != middle) continue;  // Subnormal fp32 halves do not exist.
      ASSERT_EQ(narrowed(type, static_cast<float>(middle)), half % 2 == 0 ? half : next_bits) << bits;
    }
  }
  EXPECT_EQ(narrowed(DataType::kFloat16, 65519.996F), 0x7BFF);
  EXPECT_EQ(narrowed(DataType::kFloat16, 65520.0F), 0x7C00);
  EXPECT_EQ(narrowed(DataType::kFloat16, std::numeric_limits<float>::infinity()), 0x7C00);
  EXPECT_EQ(narrowed(DataType::kBfloat16, std::numeric_limits<float>::max()), 0x7F80);
}

TEST(GptOperations, GeluAgreesWithDoubles) {
  std::vector<float> x(4001), y(4001), gradient(4001, 1.0F);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = (static_cast<float>(i) - 2000) * 0.006F;

  const std::unique_ptr<Operations> operations = create_host_operations(create_plain_matmul(), 1);
  operations->run(Gelu{x.data(), y.data(), x.size()});
  operations->run(GeluBackward{x.data(), gradient.data(), x.size()});

  for (std::size_t i = 0; i < x.size(); ++i) {
    const double v = x[i];
    const double factor = std::sqrt(2 / std::numbers::pi);
    const double t = std::tanh(factor * (v + 0.044715 * v * v * v));
    EXPECT_NEAR(y[i], 0.5 * v * (1 + t), 2e-6) << v;
    EXPECT_NEAR(gradient[i], 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * factor * (1 + 3 * 0.044715 * v * v),
                2e-6)
        << v;
  }
}

TEST(GptOperations, LargeLogitsDoNotOverflow) {
  std::vector<float> logits(kVocabulary, -1000.0F);
  logits[3] = 1000.0F;
  logits[4] = 1000.0F;
  const std::vector<std::uint8_t> targets = {4};
  RowLoss row_loss{};
  RowLossPart part_loss{};
  const LogitsPart part{logits.data(), targets.data(), 1, kVocabulary, {0, kVocabulary}};

  const std::unique_ptr<Operations> operations = create_host_operations(create_plain_matmul(), 1);
  operations->run(CrossEntropy{part, &part_loss});
  operations->run(CrossEntropyBackward{part, &part_loss, 1, 0, &row_loss, 1.0F});

  EXPECT_NEAR(mean_loss({&row_loss, 1}), std::log(2.0), 1e-6);
  EXPECT_NEAR(logits[3], 0.5, 1e-6);
  EXPECT_NEAR(logits[4], -0.5, 1e-6);
}

TEST(GptShapeTest, NamesAndCountsAreThoseOfGpt2) {
  const GptShape shape{.layers = 12, .hidden = 768, .heads = 12, .sequence = 1024};

  // Hugging Face's gpt2 has 124,439,808 with a vocabulary of 50257.
  EXPECT_EQ(parameter_count(shape), 124439808u - (50257u - kVocabulary) * 768u);
  const std::vector<GptUnit> units = describe_units(shape);
  ASSERT_EQ(units.size(), 14u);
  EXPECT_EQ(units[1].parameters[block::kQkvWeight].name, "h.0.attn.c_attn.weight");
  EXPECT_EQ(units[1].parameters[block::kQkvWeight].shape, (std::vector<std::size_t>{768, 2304}));
  EXPECT_EQ(units[13].parameters[final_unit::kNormBias].name, "ln_f.bias");
}

TEST(GptShapeTest, HeadsThatDoNotDivideHiddenAreRefused) {
  try {
    describe_units({.layers = 1, .hidden = 10, .heads = 3, .sequence = 4});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(error.status().message().find("--heads 3 does not divide --hidden 10"), std::string::npos);
  }
}

TEST(GptText, RanksReadTogetherWhatOneRankReads) {
  // 3 ranks of batch 4 against 1 rank of batch 12, one micro-step, third step.
  std::vector<std::uint64_t> together, apart;
  for (std::uint64_t rank = 0; rank < 3; ++rank) {
    const BatchPlace place{.first_sample = 24, .micro_step = 0, .rank = rank, .rank_count = 3, .batch = 4};
    for (std::uint64_t b = 0; b < 4; ++b) apart.push_back(place.sample() + b);
  }
  const BatchPlace place{.first_sample = 24, .micro_step = 0, .rank = 0, .rank_count = 1, .batch = 12};
  for (std::uint64_t b = 0; b < 12; ++b) together.push_back(place.sample() + b);

  EXPECT_EQ(apart, together);
}

TEST(GptText, SamplesAreWindowsAndTargetsTheNextByte) {
  std::vector<std::uint8_t> bytes(300);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i % 256);
  const Text text(bytes);

  for (std::uint64_t sample = 0; sample < 200; ++sample) {
    std::vector<Token> tokens(16), targets(16);
    copy_sample(text, 7, sample, tokens, targets);
    const std::size_t start = draw(7, kTextStream, sample) % (300 - 16);
    for (std::size_t i = 0; i < 16; ++i) {
      ASSERT_EQ(tokens[i], bytes[start + i]);
      ASSERT_EQ(targets[i], bytes[start + i + 1]);
    }
  }
}

TEST(GptText, AMissingFileIsNamed) {
  try {
    Text::read({"no-such-directory/no-such-text"});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kIoError);
    EXPECT_NE(error.status().message().find("no-such-directory/no-such-text"), std::string::npos);
    EXPECT_NE(error.status().message().find("--text"), std::string::npos);
  }
}

TEST(GptRandom, FirstDrawsAreTheDocumentedOnes) {
  // SplitMix64 of 0 and 1, as published.
  EXPECT_EQ(splitmix64(0), 0xE220A8397B1DCDAFu);
  EXPECT_EQ(splitmix64(1), 0x910A2DEC89025CC1u);
  EXPECT_EQ(draw(1, 2, 3), splitmix64(splitmix64(splitmix64(1) + 2) + 3));
}

}  // namespace
}  // namespace forebay::gpt
