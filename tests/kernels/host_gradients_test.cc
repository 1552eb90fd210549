// Gradients added up on the host have the bits of the kernels.
#include "forebay/host_gradients.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "forebay/error.h"
#include "forebay/host_backend.h"

namespace forebay {
namespace {

TEST(HostGradients, HaveTheBitsOfTheKernels) {
  constexpr unsigned kSeed = 7;
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  const auto backend = value_or_throw(HostBackend::create({.granularity = 64u << 10}));
  const auto kernels = value_or_throw(Kernels::create(*backend, {.thread_count = 2}));
  const Stream stream = value_or_throw(backend->stream_create());
  for (const std::size_t count : {std::size_t{512}, std::size_t{200 * 512}}) {
    for (const int threads : {1, 3}) {
      const BlockRunner runner(threads);
      std::vector<float> source(count), sum(count), expected(count);
      for (const bool first : {true, false, false}) {
        for (float& value : source) value = normal(random);
        host_accumulate(source.data(), sum.data(), count, first, runner);
        AccumulateArguments arguments{};
        arguments.own = source.data();
        arguments.target = expected.data();
        arguments.count = count;
        arguments.rank_count = 1;
        arguments.type = DataType::kFloat32;
        arguments.first = first;
        throw_if_error(kernels->accumulate(arguments, stream));
        throw_if_error(backend->stream_synchronize(stream));
        ASSERT_EQ(std::memcmp(sum.data(), expected.data(), 4 * count), 0) << "seed " << kSeed;
      }
      for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
        std::vector<float> g(count), expected_g(count);
        throw_if_error(host_scale({sum.data(), g.data(), count, 1.0f / 9, type, DataType::kFloat32}, runner));
        throw_if_error(kernels->scale(
            {sum.data(), expected_g.data(), count, 1.0f / 9, type, DataType::kFloat32}, stream));
        throw_if_error(backend->stream_synchronize(stream));
        ASSERT_EQ(std::memcmp(g.data(), expected_g.data(), 4 * count), 0) << data_type_name(type);
        std::vector<double> scratch(count / kLeafCount);
        double norm = 0;
        double expected_norm = 1;
        throw_if_error(host_norm({g.data(), scratch.data(), &norm, count, DataType::kFloat32}, runner));
        throw_if_error(
            kernels->norm({g.data(), scratch.data(), &expected_norm, count, DataType::kFloat32}, stream));
        throw_if_error(backend->stream_synchronize(stream));
        EXPECT_EQ(std::memcmp(&norm, &expected_norm, 8), 0) << data_type_name(type);
        g[count / 2] = std::numeric_limits<float>::infinity();
        throw_if_error(host_norm({g.data(), scratch.data(), &norm, count, DataType::kFloat32}, runner));
        EXPECT_FALSE(std::isfinite(norm));
        g[count / 2] = std::bit_cast<float>(0xFFC12345u);
        throw_if_error(host_norm({g.data(), scratch.data(), &norm, count, DataType::kFloat32}, runner));
        throw_if_error(
            kernels->norm({g.data(), scratch.data(), &expected_norm, count, DataType::kFloat32}, stream));
        throw_if_error(backend->stream_synchronize(stream));
        EXPECT_EQ(std::memcmp(&norm, &expected_norm, 8), 0) << "not a number";
      }
    }
  }
  throw_if_error(backend->stream_destroy(stream));
}

TEST(HostGradients, AddTheContributionsOfRanksAsTheKernelsDo) {
  constexpr unsigned kSeed = 11;
  constexpr std::size_t kCount = 3000;
  constexpr std::size_t kStride = 4 * kCount + 64;
  constexpr int kRanks = 3;
  std::mt19937 random(kSeed);
  const auto backend = value_or_throw(HostBackend::create({.granularity = 64u << 10}));
  const auto kernels = value_or_throw(Kernels::create(*backend, {.thread_count = 1}));
  const Stream stream = value_or_throw(backend->stream_create());
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    for (const bool first : {true, false}) {
      // Any bits: not-a-numbers and infinities too.
      std::vector<std::uint32_t> received(kRanks * kStride / 4), own(kCount);
      for (std::uint32_t& bits : received) bits = static_cast<std::uint32_t>(random());
      for (std::uint32_t& bits : own) bits = static_cast<std::uint32_t>(random());
      std::vector<float> actual(kCount, 0.375f), expected(kCount, 0.375f);
      AccumulateArguments arguments{.own = own.data(),
                                    .received = reinterpret_cast<const std::byte*>(received.data()),
                                    .received_stride_bytes = kStride,
                                    .target = expected.data(),
                                    .count = kCount - 5,
                                    .rank = 1,
                                    .rank_count = kRanks,
                                    .type = type,
                                    .first = first};
      throw_if_error(kernels->accumulate(arguments, stream));
      throw_if_error(backend->stream_synchronize(stream));
      arguments.target = actual.data();
      throw_if_error(host_accumulate(arguments));
      EXPECT_EQ(std::memcmp(actual.data(), expected.data(), 4 * kCount), 0)
          << data_type_name(type) << ", seed " << kSeed;
    }
  }
  throw_if_error(backend->stream_destroy(stream));
}

// A caller may round otherwise, or flush to zero; the ranks would not have the same bits.
TEST(HostGradients, DoNotFollowTheRoundingOfTheCaller) {
  constexpr unsigned kSeed = 13;
  constexpr std::size_t kCount = 4 * kLeafCount;
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> own(kCount), received(2 * kCount);
  for (std::vector<float>* values : {&own, &received}) {
    for (float& value : *values) value = normal(random);
  }
  const BlockRunner runner(1);
  const auto results = [&](int mode) {
    std::vector<float> sum(kCount), added(own), scaled(kCount);
    std::vector<double> scratch(kCount / kLeafCount);
    double norm = 0;
    std::fesetround(mode);
    const Status summed = host_accumulate({.own = own.data(),
                                           .received = reinterpret_cast<const std::byte*>(received.data()),
                                           .received_stride_bytes = sizeof(float) * kCount,
                                           .target = sum.data(),
                                           .count = kCount,
                                           .rank = 0,
                                           .rank_count = 2,
                                           .type = DataType::kFloat32,
                                           .first = true});
    host_accumulate(received.data(), added.data(), kCount, false, runner);
    const Status shrunk = host_scale(
        {own.data(), scaled.data(), kCount, 1.0f / 9, DataType::kFloat32, DataType::kFloat32}, runner);
    const Status normed = host_norm({own.data(), scratch.data(), &norm, kCount, DataType::kFloat32}, runner);
    std::fesetround(FE_TONEAREST);
    for (const Status& status : {summed, shrunk, normed}) throw_if_error(status);
    return std::tuple(sum, added, scaled, norm);
  };

  EXPECT_EQ(results(FE_UPWARD), results(FE_TONEAREST)) << "seed " << kSeed;
}

TEST(HostGradients, RefuseWhatTheKernelsRefuse) {
  const BlockRunner runner(1);
  float value = 1;
  double scratch = 0;
  EXPECT_EQ(host_scale({nullptr, &value, 1, 1.0f, DataType::kFloat32, DataType::kFloat32}, runner).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(host_accumulate({.own = nullptr,
                             .received = nullptr,
                             .received_stride_bytes = 0,
                             .target = &value,
                             .count = 1,
                             .rank = 0,
                             .rank_count = 1,
                             .type = DataType::kFloat32,
                             .first = true})
                .code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(host_norm({&value, &scratch, &scratch, 1, DataType::kFloat32}, runner).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
