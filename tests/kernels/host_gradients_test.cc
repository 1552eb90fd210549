// Gradients added up on the host have the bits of the kernels.
#include "forebay/host_gradients.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "forebay/error.h"
#include "forebay/host_backend.h"

namespace forebay {
namespace {

TEST(HostGradients, HaveTheBitsOfTheKernels) {
  constexpr unsigned kSeed = 7;
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  const auto backend = value_or_throw(HostBackend::create({}));
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
      }
    }
  }
  throw_if_error(backend->stream_destroy(stream));
}

TEST(HostGradients, RefuseWhatTheKernelsRefuse) {
  const BlockRunner runner(1);
  float value = 1;
  double scratch = 0;
  EXPECT_EQ(host_scale({nullptr, &value, 1, 1.0f, DataType::kFloat32, DataType::kFloat32}, runner).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(host_norm({&value, &scratch, &scratch, 1, DataType::kFloat32}, runner).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace forebay
