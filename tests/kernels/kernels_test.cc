// Kernels as their users see them: launched on a host backend's stream, on one thread and on several, against
// references written from the header's text alone, and with the arguments that must be refused.
#include "forebay/kernels.h"

#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <cmath>
#include <limits>

#include "kernels/host_kernels.h"
#include "runtime/device/host/script.h"
#include "tests/kernels/kernel_test_support.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace forebay {
namespace {

using kernel_test::Array;
using kernel_test::fill_hard;
using kernel_test::kTypes;
using kernel_test::same_bits;

// More than three blocks of the runner, and no multiple of anything.
constexpr std::size_t kLarge = 3 * 65536 + 1237;

class KernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<ScriptedHostBackend>> backend =
        ScriptedHostBackend::create({.granularity = 64u << 10});
    ASSERT_TRUE(backend.ok()) << backend.status().to_string();
    backend_ = std::move(backend).value();
    Result<Stream> stream = backend_->stream_create();
    ASSERT_TRUE(stream.ok()) << stream.status().to_string();
    stream_ = stream.value();
  }

  void TearDown() override {
    if (backend_ != nullptr) {
      EXPECT_TRUE(backend_->stream_destroy(stream_).ok());
      EXPECT_EQ(backend_->live_handle_count(), 0u);
    }
  }

  std::unique_ptr<Kernels> create(int thread_count) {
    Result<std::unique_ptr<Kernels>> kernels = Kernels::create(*backend_, {.thread_count = thread_count});
    EXPECT_TRUE(kernels.ok()) << kernels.status().to_string();
    return kernels.ok() ? std::move(kernels).value() : nullptr;
  }

  void finish(Status queued) {
    ASSERT_TRUE(queued.ok()) << queued.to_string();
    const Status ran = backend_->stream_synchronize(stream_);
    ASSERT_TRUE(ran.ok()) << ran.to_string();
  }

  // TBB has no more workers than processors unless asked, and three threads shall be three on any machine.
  tbb::global_control workers_{tbb::global_control::max_allowed_parallelism, 4};
  std::mt19937_64 random_{kernel_test::test_seed()};
  std::unique_ptr<ScriptedHostBackend> backend_;
  Stream stream_;
};

AdamWArguments adamw_at_step(int step, double lr, double weight_decay) {
  AdamWArguments a = {};
  a.gradient_type = a.parameter_type = DataType::kFloat32;
  a.factor = 1.0f;
  a.lr = static_cast<float>(lr), a.weight_decay = static_cast<float>(weight_decay);
  a.beta1 = 0.9f, a.beta2 = 0.999f, a.eps = 1e-8f;
  a.a1 = static_cast<float>(1.0 - 0.9), a.a2 = static_cast<float>(1.0 - 0.999);
  a.c1 = static_cast<float>(1.0 - std::pow(0.9, step));
  a.s2 = static_cast<float>(std::sqrt(1.0 - std::pow(0.999, step)));
  return a;
}

// The tree of NormArguments, by recursion on "adjacent pairs, level by level, an odd one passing up".
double naive_norm(const Array& source) {
  std::vector<double> level;
  for (std::size_t leaf = 0; leaf < source.count(); leaf += 512) {
    double lane[16] = {};
    for (std::size_t i = 0; i < 512; ++i) {
      const double x = source.value(leaf + i);
      lane[i % 16] += x * x;
    }
    for (int j = 0; j < 8; ++j) lane[j] += lane[j + 8];
    for (int j = 0; j < 4; ++j) lane[j] += lane[j + 4];
    for (int j = 0; j < 2; ++j) lane[j] += lane[j + 2];
    level.push_back(lane[0] + lane[1]);
  }
  if (level.empty()) return 0.0;
  while (level.size() > 1) {
    std::vector<double> above;
    for (std::size_t i = 0; i < level.size(); i += 2) {
      above.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    }
    level = above;
  }
  return level[0];
}

TEST_F(KernelsTest, ThreadsNeverChangeBits) {
  Array gradient(DataType::kBfloat16, kLarge, 1), master(DataType::kFloat32, kLarge, 3);
  Array m(DataType::kFloat32, kLarge, 0), v(DataType::kFloat32, kLarge, 5);
  fill_hard(gradient, DataType::kBfloat16, random_);
  for (Array* array : {&master, &m, &v}) fill_hard(*array, DataType::kFloat32, random_);
  AdamWArguments a = adamw_at_step(3, 1e-3, 0.1);
  a.gradient = gradient.data();
  a.gradient_type = a.parameter_type = DataType::kBfloat16;
  a.count = kLarge;
  Array expected[] = {master, m, v, Array(DataType::kBfloat16, kLarge, 1)};
  const auto with = [&](Array* state) {
    a.master = state[0].floats(), a.m = state[1].floats(), a.v = state[2].floats(),
    a.parameter = state[3].data();
    return a;
  };
  host_kernels::scalar_kernels().adamw(with(expected), 0, kLarge);

  for (const int thread_count : {1, 2, 3, 0}) {
    const std::unique_ptr<Kernels> kernels = create(thread_count);
    Array got[] = {master, m, v, Array(DataType::kBfloat16, kLarge, 1)};

    finish(kernels->adamw(with(got), stream_));

    SCOPED_TRACE(kernels->description());
    ASSERT_TRUE(same_bits("master", got[0], expected[0]));
    ASSERT_TRUE(same_bits("m", got[1], expected[1]));
    ASSERT_TRUE(same_bits("v", got[2], expected[2]));
    ASSERT_TRUE(same_bits("parameter", got[3], expected[3]));
  }
}

TEST_F(KernelsTest, EveryElementwiseKernelCoversItsCountOnAnyNumberOfThreads) {
  for (const int thread_count : {1, 2, 3}) {
    const std::unique_ptr<Kernels> kernels = create(thread_count);
    SCOPED_TRACE(kernels->description());
    for (const std::size_t count : {std::size_t{1}, std::size_t{65536}, std::size_t{65537}, kLarge}) {
      Array source(DataType::kFloat32, count, 1), narrow(DataType::kBfloat16, count, 3), scaled = source,
                                                                                         sum = source;
      for (std::size_t i = 0; i < count; ++i) source.set(i, float_bits(static_cast<float>(i % 251)));
      for (std::size_t i = 0; i < count; ++i) sum.set(i, float_bits(1.0f));

      finish(kernels->cast({source.data(), narrow.data(), count, DataType::kFloat32, DataType::kBfloat16},
                           stream_));
      finish(kernels->scale(
          {source.floats(), scaled.data(), count, 0.5f, DataType::kFloat32, DataType::kFloat32}, stream_));
      finish(kernels->add({source.data(), sum.data(), count, DataType::kFloat32}, stream_));

      for (std::size_t i = 0; i < count; ++i) {
        const float value = static_cast<float>(i % 251);
        ASSERT_EQ(narrow.value(i), value) << i << " of " << count;
        ASSERT_EQ(scaled.value(i), value * 0.5f) << i << " of " << count;
        ASSERT_EQ(sum.value(i), value + 1.0f) << i << " of " << count;
      }
    }
  }
}

// One rank's value is 2^24 times the others': half an ulp added to it is lost, but not two halves added
// first, so another order of the ranks shows.
TEST_F(KernelsTest, AccumulateAddsInRankOrderWhicheverRankIsOwn) {
  const std::unique_ptr<Kernels> kernels = create(2);
  for (const DataType type : kTypes) {
    for (const int rank_count : {1, 3, 4}) {
      for (int rank = 0; rank < rank_count; ++rank) {
        for (const bool first : {true, false}) {
          const std::size_t count = 1000, stride = 1024;
          Array received(type, stride * rank_count, 0), own(type, count, 0),
              target(DataType::kFloat32, count, 0);
          std::vector<float> expected(count);
          for (std::size_t i = 0; i < count; ++i) {
            float sum = 0.0f;
            for (int r = 0; r < rank_count; ++r) {
              const float value =
                  i % 4 == static_cast<std::size_t>(r) ? 0x1p15f : std::ldexp(1.0f, -9 + r % 2);
              const std::uint32_t bits = type == DataType::kFloat32    ? float_bits(value)
                                         : type == DataType::kBfloat16 ? float_to_bfloat16(value)
                                                                       : float_to_float16(value);
              // The own slot of `received` holds a value that must not be read.
              received.set(r * stride + i, r == rank ? 0x3F3Fu : bits);
              if (r == rank) own.set(i, bits);
              sum = r == 0 ? value : sum + value;
            }
            target.set(i, float_bits(3.0f));
            expected[i] = first ? sum : 3.0f + sum;
          }

          finish(kernels->accumulate(
              {own.data(), static_cast<const std::byte*>(received.data()), stride * element_bytes(type),
               target.floats(), count, rank, rank_count, type, first},
              stream_));

          for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(target.value(i), expected[i]) << i;
        }
      }
    }
  }
}

TEST_F(KernelsTest, NormIsTheFixedTreeExactly) {
  for (const int thread_count : {1, 3}) {
    const std::unique_ptr<Kernels> kernels = create(thread_count);
    for (const DataType type : kTypes) {
      for (const std::size_t leaf_count : {0, 1, 2, 3, 5, 7, 64, 127, 129, 385}) {
        const std::size_t count = leaf_count * kLeafCount;
        Array source(type, count, 1);
        for (std::size_t i = 0; i < count; ++i) {
          const float x = std::normal_distribution<float>(0.0f, 0.1f)(random_);
          source.set(i, type == DataType::kFloat32    ? float_bits(x)
                        : type == DataType::kBfloat16 ? float_to_bfloat16(x)
                                                      : float_to_float16(x));
        }
        std::vector<double> scratch(leaf_count);
        double result = -1.0;

        finish(kernels->norm({source.data(), scratch.data(), &result, count, type}, stream_));

        ASSERT_EQ(result, naive_norm(source)) << leaf_count << " leaves of " << data_type_name(type);
      }
    }
  }
}

TEST_F(KernelsTest, NormIsNotFiniteExactlyWhenAnElementIsNot) {
  const std::unique_ptr<Kernels> kernels = create(1);
  const std::size_t count = 3 * kLeafCount;
  std::vector<double> scratch(3);
  for (const float special : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{700}, count - 1}) {
      Array source(DataType::kFloat32, count, 0);
      for (std::size_t i = 0; i < count; ++i) source.set(i, 0);
      source.set(place, float_bits(special));
      double result = -1.0;

      finish(kernels->norm({source.data(), scratch.data(), &result, count, DataType::kFloat32}, stream_));

      EXPECT_EQ(std::isfinite(result), std::isfinite(special)) << special << " at " << place;
    }
  }
}

// Against the same formula in double. A step moves a parameter by about lr, rounded to fp32 each time: after
// 1000 steps of lr 1e-3 the two stay within 2e-5 of each other where parameters are about one, which is 330
// ulps of a sum of a thousand rounded terms (the expected walk is about 20).
TEST_F(KernelsTest, AdamWFollowsADoublePrecisionReferenceOverAThousandSteps) {
  const std::unique_ptr<Kernels> kernels = create(2);
  constexpr std::size_t kCount = 515;
  constexpr double kTolerance = 2e-5;
  Array gradient(DataType::kFloat32, kCount, 0), master = gradient, m = gradient, v = gradient;
  std::vector<double> p64(kCount), m64(kCount), v64(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const float start = std::normal_distribution<float>()(random_);
    master.set(i, float_bits(start));
    m.set(i, 0), v.set(i, 0);
    p64[i] = start;
  }
  for (int step = 1; step <= 1000; ++step) {
    for (std::size_t i = 0; i < kCount; ++i) {
      const float g = std::normal_distribution<float>(0.1f, 1.0f)(random_);
      gradient.set(i, float_bits(g));
      p64[i] -= 1e-3 * 0.1 * p64[i];
      m64[i] = 0.9 * m64[i] + (1.0 - 0.9) * g;
      v64[i] = 0.999 * v64[i] + (1.0 - 0.999) * g * static_cast<double>(g);
      const double m_hat = m64[i] / (1.0 - std::pow(0.9, step));
      const double v_hat = v64[i] / (1.0 - std::pow(0.999, step));
      p64[i] -= 1e-3 * m_hat / (std::sqrt(v_hat) + 1e-8);
    }
    AdamWArguments a = adamw_at_step(step, 1e-3, 0.1);
    a.gradient = gradient.data(), a.master = master.floats(), a.m = m.floats(), a.v = v.floats();
    a.count = kCount;
    finish(kernels->adamw(a, stream_));
  }
  double worst = 0.0;
  for (std::size_t i = 0; i < kCount; ++i) worst = std::max(worst, std::fabs(master.value(i) - p64[i]));
  std::printf("largest difference after 1000 steps: %.3g\n", worst);
  EXPECT_LT(worst, kTolerance);
}

// The other rules in double, as PyTorch's documents and the paper of Lion write them.
TEST_F(KernelsTest, OptimizersFollowADoublePrecisionReferenceOverFiftySteps) {
  const std::unique_ptr<Kernels> kernels = create(2);
  constexpr std::size_t kCount = 515;
  constexpr double kTolerance = 1e-5;
  constexpr double kDecay = 0.1;
  for (const Optimizer optimizer : {Optimizer::kAdam, Optimizer::kSgd, Optimizer::kLion}) {
    const double lr = optimizer == Optimizer::kSgd ? 1e-2 : 1e-3;
    Array gradient(DataType::kFloat32, kCount, 0), master = gradient, m = gradient, v = gradient;
    std::vector<double> p64(kCount), m64(kCount), v64(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const float start = std::normal_distribution<float>()(random_);
      master.set(i, float_bits(start));
      m.set(i, 0), v.set(i, 0);
      p64[i] = start;
    }
    for (int step = 1; step <= 50; ++step) {
      for (std::size_t i = 0; i < kCount; ++i) {
        const float drawn = std::normal_distribution<float>(0.1f, 1.0f)(random_);
        gradient.set(i, float_bits(drawn));
        double g = drawn;
        if (optimizer == Optimizer::kLion) {
          const double u = 0.9 * m64[i] + (1.0 - 0.9) * g;
          p64[i] -= lr * kDecay * p64[i];
          p64[i] -= lr * (u > 0 ? 1.0 : u < 0 ? -1.0 : 0.0);
          m64[i] = 0.999 * m64[i] + (1.0 - 0.999) * g;
          continue;
        }
        g += kDecay * p64[i];
        if (optimizer == Optimizer::kSgd) {
          m64[i] = 0.9 * m64[i] + g;
          p64[i] -= lr * m64[i];
          continue;
        }
        m64[i] = 0.9 * m64[i] + (1.0 - 0.9) * g;
        v64[i] = 0.999 * v64[i] + (1.0 - 0.999) * g * g;
        const double m_hat = m64[i] / (1.0 - std::pow(0.9, step));
        const double v_hat = v64[i] / (1.0 - std::pow(0.999, step));
        p64[i] -= lr * m_hat / (std::sqrt(v_hat) + 1e-8);
      }
      AdamWArguments a = adamw_at_step(step, lr, kDecay);
      a.optimizer = optimizer;
      a.gradient = gradient.data(), a.master = master.floats(), a.m = m.floats();
      a.v = has_second_moment(optimizer) ? v.floats() : nullptr;
      a.count = kCount;
      finish(kernels->adamw(a, stream_));
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < kCount; ++i) worst = std::max(worst, std::fabs(master.value(i) - p64[i]));
    std::printf("%s: largest difference after 50 steps: %.3g\n", optimizer_name(optimizer), worst);
    EXPECT_LT(worst, kTolerance) << optimizer_name(optimizer);
  }
}

#if defined(__x86_64__)
TEST_F(KernelsTest, FlushToZeroInTheCreatingThreadChangesNothing) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // FTZ and DAZ, which the stream's thread inherits.
  Result<Stream> flushing = backend_->stream_create();
  std::vector<float> values(100, 0x1p-120f);
  const std::unique_ptr<Kernels> kernels = create(1);

  const Status queued = kernels->scale(
      {values.data(), values.data(), values.size(), 0x1p-20f, DataType::kFloat32, DataType::kFloat32},
      flushing.value());
  const Status ran = backend_->stream_synchronize(flushing.value());
  _mm_setcsr(saved);

  ASSERT_TRUE(queued.ok() && ran.ok());
  for (const float value : values) ASSERT_EQ(float_bits(value), 1u << 9);  // 2^-140, a subnormal.
  EXPECT_TRUE(backend_->stream_destroy(flushing.value()).ok());
}
#endif

TEST_F(KernelsTest, NullIsFineForNothingAndRefusedForSomething) {
  const std::unique_ptr<Kernels> kernels = create(1);
  const DataType f32 = DataType::kFloat32;
  double result = -1.0;
  AdamWArguments adamw = adamw_at_step(1, 1e-3, 0.0);

  EXPECT_TRUE(kernels->cast({nullptr, nullptr, 0, f32, DataType::kFloat16}, stream_).ok());
  EXPECT_TRUE(kernels->accumulate({nullptr, nullptr, 0, nullptr, 0, 1, 3, f32, true}, stream_).ok());
  EXPECT_TRUE(kernels->scale({nullptr, nullptr, 0, 1.0f, f32, f32}, stream_).ok());
  EXPECT_TRUE(kernels->add({nullptr, nullptr, 0, f32}, stream_).ok());
  EXPECT_TRUE(kernels->adamw(adamw, stream_).ok());
  finish(kernels->norm({nullptr, nullptr, &result, 0, f32}, stream_));
  EXPECT_EQ(result, 0.0);

  adamw.count = 4;
  EXPECT_EQ(kernels->cast({nullptr, nullptr, 4, f32, f32}, stream_).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kernels->accumulate({nullptr, nullptr, 0, nullptr, 4, 0, 1, f32, true}, stream_).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(kernels->scale({nullptr, nullptr, 4, 1.0f, f32, f32}, stream_).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(kernels->add({nullptr, nullptr, 4, f32}, stream_).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kernels->adamw(adamw, stream_).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(kernels->norm({nullptr, nullptr, nullptr, 0, f32}, stream_).code(), StatusCode::kInvalidArgument);
}

TEST_F(KernelsTest, MisuseIsRefusedWithTheArgumentNamed) {
  const std::unique_ptr<Kernels> kernels = create(1);
  alignas(16) float values[2048] = {};
  double result = 0.0;
  const auto* received = reinterpret_cast<const std::byte*>(values + 512);
  const DataType f32 = DataType::kFloat32, bf16 = DataType::kBfloat16, f16 = DataType::kFloat16;
  const auto refused = [](const Status& status, const char* word) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };

  refused(kernels->cast({values, values, 16, f32, bf16}, stream_), "overlap");
  refused(kernels->cast({values, values + 1, 16, f32, f32}, stream_), "overlap");
  refused(kernels->cast({reinterpret_cast<std::byte*>(values) + 1, values + 64, 16, bf16, f32}, stream_),
          "source");
  refused(kernels->cast({values, values + 64, 16, static_cast<DataType>(7), f32}, stream_), "source_type");
  refused(kernels->accumulate({values, received, 64, values + 64, 16, 3, 3, f32, true}, stream_),
          "rank 3 of 3");
  refused(kernels->accumulate({values, received, 60, values + 64, 16, 0, 3, f32, true}, stream_), "stride");
  refused(kernels->accumulate({values, nullptr, 64, values + 64, 16, 0, 3, f32, true}, stream_), "received");
  refused(kernels->scale({values, values + 64, 16, 1.0f, bf16, f16}, stream_), "target_type");
  refused(kernels->scale({values, values, 16, 1.0f, bf16, bf16}, stream_), "in place");
  refused(kernels->add({values, values + 1, 16, f32}, stream_), "overlap");
  refused(kernels->norm({values, &result, &result, 100, f32}, stream_), "multiple of 512");
  EXPECT_TRUE(kernels->cast({values, values, 16, f32, f32}, stream_).ok());
  finish(kernels->scale({values, values, 16, 1.0f, bf16, f32}, stream_));
}

// Arrays that touch do not overlap, and ranks, strides and steps begin and end where the header says.
TEST_F(KernelsTest, ArgumentsAtTheirLimitsAreAccepted) {
  const std::unique_ptr<Kernels> kernels = create(1);
  alignas(16) float values[2048] = {};
  const DataType f32 = DataType::kFloat32, bf16 = DataType::kBfloat16;
  const auto* received = reinterpret_cast<const std::byte*>(values + 512);
  const auto code = [](const Status& status) { return status.code(); };
  constexpr StatusCode kRefused = StatusCode::kInvalidArgument;

  finish(kernels->add({values, values + 16, 16, f32}, stream_));
  finish(kernels->add({values + 16, values, 16, f32}, stream_));
  finish(kernels->add({values, values, 16, f32}, stream_));
  finish(kernels->cast({values, values + 16, 16, f32, bf16}, stream_));
  finish(kernels->cast({values + 8, values, 16, f32, bf16}, stream_));
  EXPECT_EQ(code(kernels->cast({values + 7, values, 16, f32, bf16}, stream_)), kRefused);
  finish(kernels->scale({values, values, 16, 1.0f, f32, f32}, stream_));

  finish(kernels->accumulate({values, received, 64, values + 64, 16, 2, 3, f32, true}, stream_));
  EXPECT_EQ(code(kernels->accumulate({values, received, 64, values + 64, 16, -1, 3, f32, true}, stream_)),
            kRefused);
  EXPECT_EQ(code(kernels->accumulate({values, received, 64, values + 64, 16, 0, 0, f32, true}, stream_)),
            kRefused);
  const Status short_stride =
      kernels->accumulate({values, received, 60, values + 64, 16, 0, 3, f32, true}, stream_);
  EXPECT_EQ(short_stride.message(),
            "accumulate of 16 fp32 elements from 3 ranks: received_stride_bytes is 60; pass a multiple of 4 "
            "that is at least 64");
  EXPECT_EQ(code(kernels->accumulate({values, received, 66, values + 64, 16, 0, 3, f32, true}, stream_)),
            kRefused);
}

TEST_F(KernelsTest, AnUpdateNeedsAnOptimizerOfSingleElementsAndItsMoments) {
  const std::unique_ptr<Kernels> kernels = create(1);
  alignas(16) float g[4] = {}, p[4] = {}, m[4] = {};
  AdamWArguments a = adamw_at_step(1, 1e-3, 0.0);
  a.gradient = g;
  a.master = p;
  a.m = m;
  a.count = 4;
  EXPECT_EQ(kernels->adamw(a, stream_).message(),
            "adamw of 4 elements: v is null; pass device memory, or count 0");
  a.optimizer = Optimizer::kSgd;
  finish(kernels->adamw(a, stream_));
  a.optimizer = Optimizer::kAdafactor;
  EXPECT_EQ(kernels->adamw(a, stream_).message(),
            "adamw: optimizer is 4, which is no rule of single elements; pass adamw, adam, sgd or lion");
}

TEST_F(KernelsTest, ADecisionWithFiguresThatCannotBeIsRefused) {
  const std::unique_ptr<Kernels> kernels = create(1);
  StepState state;
  double squares[6] = {}, scratch[6] = {}, used[6] = {};
  std::uint32_t unit_used[3] = {};
  const BiasCorrection corrections[1] = {{1.0f, 1.0f}};
  StepControlArguments good{};
  good.state = &state;
  good.squares = squares;
  good.scratch = scratch;
  good.rank_stride = 3;
  good.unit_count = 3;
  good.rank_count = 2;
  good.corrections = corrections;
  good.first_step = 1;
  good.correction_count = 1;
  good.dynamic_loss_scale = true;
  good.growth_interval = 1;
  good.minimum_loss_scale = 1e-300;
  finish(kernels->step_control(good, stream_));

  const auto message = [&](const auto& change) {
    StepControlArguments a = good;
    change(a);
    return kernels->step_control(a, stream_).message();
  };
  EXPECT_EQ(
      message([](auto& a) { a.rank_count = 0; }),
      "step_control of 3 units on 0 ranks, 3 doubles apart: pass 1 rank or more, and a rank_stride of at "
      "least the units");
  EXPECT_NE(message([](auto& a) { a.rank_stride = 2; }).find("2 doubles apart"), std::string::npos);
  EXPECT_EQ(message([](auto& a) { a.clip = -1; }), "step_control: clip is -1; pass 0 for none, or more");
  EXPECT_FALSE(message([](auto& a) { a.clip = std::nan(""); }).empty());
  EXPECT_EQ(message([](auto& a) { a.growth_interval = 0; }),
            "step_control: a growth interval of 0 and a smallest loss scale of 1e-300; pass 1 or more, and "
            "more than 0");
  EXPECT_FALSE(message([](auto& a) { a.minimum_loss_scale = 0; }).empty());
  EXPECT_EQ(message([&](auto& a) { a.used = used; }),
            "step_control: of used and unit_used one is null; pass both or neither");
  EXPECT_EQ(message([&](auto& a) { a.unit_used = unit_used; }),
            "step_control: of used and unit_used one is null; pass both or neither");
  EXPECT_EQ(message([](auto& a) { a.correction_count = 0; }),
            "step_control: 0 bias corrections from step 1; pass at least one, and steps from 1");
  EXPECT_EQ(message([](auto& a) { a.first_step = 0; }),
            "step_control: 1 bias corrections from step 0; pass at least one, and steps from 1");
  StepControlArguments fixed = good;
  fixed.dynamic_loss_scale = false;
  fixed.growth_interval = 0;
  finish(kernels->step_control(fixed, stream_));
}

TEST_F(KernelsTest, NothingToUpdateIsFine) {
  const std::unique_ptr<Kernels> kernels = create(1);
  const std::uint64_t before = backend_->call_count(HostCall::kLaunch);
  AdamWArguments none = adamw_at_step(1, 1e-3, 0.0);
  EXPECT_TRUE(kernels->adamw_controlled({none, nullptr, nullptr}, stream_).ok());
  EXPECT_TRUE(kernels->update_kept({{none, {}}, nullptr, nullptr}, stream_).ok());
  EXPECT_TRUE(kernels->orthogonalise({{nullptr, nullptr, 0, 3}, nullptr}, stream_).ok());
  EXPECT_EQ(backend_->call_count(HostCall::kLaunch), before);
}

TEST_F(KernelsTest, CreateRefusesANegativeThreadCountAndPassesOnTheBackendsRefusal) {
  EXPECT_EQ(Kernels::create(*backend_, {.thread_count = -1}).status().code(), StatusCode::kInvalidArgument);

  backend_->add_fault({HostCall::kLoadModule, 1, Status(StatusCode::kOutOfMemory, "scripted")});
  const Status status = Kernels::create(*backend_, {}).status();

  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_NE(status.message().find("scripted"), std::string::npos);
}

TEST_F(KernelsTest, AFailedLaunchIsReturned) {
  const std::unique_ptr<Kernels> kernels = create(1);
  float values[16] = {};
  backend_->add_fault({HostCall::kLaunch, 1, Status(StatusCode::kInternal, "scripted")});

  const Status status =
      kernels->scale({values, values, 16, 1.0f, DataType::kFloat32, DataType::kFloat32}, stream_);

  EXPECT_EQ(status.code(), StatusCode::kInternal);
}

TEST_F(KernelsTest, DescriptionNamesTheInstructionSetAndTheThreads) {
  EXPECT_TRUE(std::string(create(1)->description()).ends_with(", 1 thread"));
  EXPECT_EQ(std::string(create(1)->description()).rfind("host ", 0), 0u);
}

TEST(PairwiseSum, AddsAdjacentPairsAndPassesAnOddOneUp) {
  double none = 7.0;
  double five[] = {0x1p53, 1.0, 1.0, 1.0, 1.0};

  EXPECT_EQ(pairwise_sum(&none, 0), 0.0);
  // ((2^53 + 1) + (1 + 1)) + 1: the first sum rounds to 2^53, the last, a tie, up to 2^53 + 4. From left to
  // right it would be 2^53.
  EXPECT_EQ(pairwise_sum(five, 5), 0x1p53 + 4.0);
}

}  // namespace
}  // namespace forebay
