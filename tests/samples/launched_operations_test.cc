// Compares the model's kernels, built for the host and launched on a HostBackend, with the host's loops, bit
// for bit, operation by operation, with every instruction set of the processor. The shapes leave part of
// every block, tile and lane idle.

#include "model/launched_operations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/image.h"
#include "forebay/error.h"
#include "forebay/host_backend.h"
#include "hwy/highway.h"
#include "model/convert.h"
#include "model/host_operations.h"
#include "model/random.h"
#include "model/shape.h"
#include "tests/samples/simulated_kernels.h"

namespace forebay::gpt {
namespace {

std::uint64_t test_seed() {
  const char* text = std::getenv("FOREBAY_SEED");
  const std::uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 20261121;
  std::printf("FOREBAY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

// Runs one computation with either kind of operations, each on its own copy of the data.
class LaunchedOperationsTest : public ::testing::Test {
 protected:
  using Buffers = std::vector<std::vector<float>>;
  using Computation = std::function<void(Operations&, Buffers&)>;

  std::vector<float> normal(std::size_t count, double scale = 1) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i)
      values[i] = static_cast<float>(scale * draw_normal(seed_, stream_, i));
    ++stream_;
    return values;
  }
  std::vector<std::uint8_t> bytes(std::size_t count) {
    std::vector<std::uint8_t> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::uint8_t>(draw(seed_, stream_, i));
    ++stream_;
    return values;
  }

  void expect_same_bits(const std::string& what, const Buffers& buffers, const Computation& compute) {
    Buffers launched_buffers = buffers;
    compute(launched_, launched_buffers);
    throw_if_error(backend_->stream_synchronize(stream_handle_));
    for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
      hwy::SetSupportedTargetsForTest(rest & -rest);
      Buffers host_buffers = buffers;
      compute(*create_host_operations(create_plain_matmul(), 1), host_buffers);
      for (std::size_t b = 0; b < buffers.size(); ++b) {
        const std::vector<float>&x = host_buffers[b], &y = launched_buffers[b];
        for (std::size_t i = 0; i < x.size(); ++i) {
          ASSERT_EQ(std::memcmp(&x[i], &y[i], sizeof(float)), 0)
              << what << " with " << hwy::TargetName(rest & -rest) << ": element " << i << " of buffer " << b
              << " is " << x[i] << " and " << y[i];
        }
      }
    }
    hwy::SetSupportedTargetsForTest(0);
  }

  const std::uint64_t seed_ = test_seed();
  std::uint64_t stream_ = 0;
  const std::unique_ptr<HostBackend> backend_ =
      value_or_throw(HostBackend::create({.granularity = 64u << 10}));
  const Stream stream_handle_ = value_or_throw(backend_->stream_create());
  const std::unique_ptr<Operations> host_ = create_host_operations(create_plain_matmul(), 1);
  LaunchedOperations launched_{
      *backend_, stream_handle_, {.image = {.host_kernels = kernels::simulated_kernel_table()}}};
};

TEST_F(LaunchedOperationsTest, MultipliesInTheSameOrder) {
  for (const ProductShape& extent :
       {ProductShape{1, 1, 1}, ProductShape{70, 33, 19}, ProductShape{64, 128, 48}, ProductShape{130, 7, 65},
        ProductShape{5, 100, 3}, ProductShape{200, 65, 129}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
          const ProductShape shape{extent.rows, extent.columns, extent.depth, transpose_a, transpose_b};
          std::vector<std::byte> b(shape.depth * shape.columns * element_bytes(type));
          const std::vector<float> values = normal(shape.depth * shape.columns);
          narrow(type, values.data(), b.data(), values.size(), false);
          std::vector<std::byte> workspace(host_->prepare_product(shape, type) + 64);
          std::byte* const aligned =
              workspace.data() + (64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64);
          expect_same_bits("product", {normal(shape.rows * shape.depth), normal(shape.rows * shape.columns)},
                           [&](Operations& operations, Buffers& x) {
                             operations.multiply(shape, x[0].data(), {b.data(), type}, x[1].data(), aligned);
                           });
        }
      }
    }
  }
}

TEST_F(LaunchedOperationsTest, ConvertAndAddInTheSameWay) {
  const std::size_t count = 1500;
  for (const DataType type : {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16}) {
    for (const bool accumulate : {false, true}) {
      expect_same_bits(data_type_name(type), {normal(count, 100), normal(count, 100), normal(count)},
                       [&](Operations& operations, Buffers& x) {
                         auto* const stored = reinterpret_cast<std::byte*>(x[1].data());
                         operations.run(Narrow{type, x[0].data(), stored, count / 2, false});
                         operations.run(Narrow{type, x[0].data() + count / 2, stored, count / 2, accumulate});
                         operations.run(Widen{{stored, type}, x[2].data(), count / 2});
                       });
    }
  }
  expect_same_bits("zero, add, add_bias", {normal(count), normal(count), normal(count)},
                   [&](Operations& operations, Buffers& x) {
                     operations.run(Add{x[0].data(), x[1].data(), x[2].data(), count});
                     operations.run(AddBias{x[2].data(), x[0].data(), 3, count / 3});
                     operations.zero(x[1].data(), count - 1);
                   });
}

TEST_F(LaunchedOperationsTest, SumColumnsInTheSameLanes) {
  for (const std::size_t rows : {1, 7, 31, 32, 33, 100}) {
    for (const std::size_t columns : {1, 32, 45, 130}) {
      expect_same_bits("bias_backward", {normal(rows * columns), normal(columns)},
                       [&](Operations& operations, Buffers& x) {
                         operations.run(ColumnSums{x[0].data(), x[1].data(), rows, columns});
                       });
    }
  }
}

TEST_F(LaunchedOperationsTest, NormaliseRowsInTheSameLanes) {
  for (const std::size_t rows : {1, 9, 40}) {
    for (const std::size_t hidden : {1, 12, 48, 100}) {
      expect_same_bits("layer_norm",
                       {normal(rows * hidden), normal(rows), normal(rows), normal(hidden), normal(hidden),
                        normal(rows * hidden), normal(rows * hidden), normal(rows * hidden), normal(hidden),
                        normal(hidden)},
                       [&](Operations& operations, Buffers& x) {
                         const LayerNorm norm{x[0].data(), x[1].data(), x[2].data(), rows, hidden};
                         operations.run(NormForward{norm, x[3].data(), x[4].data(), x[5].data()});
                         operations.run(NormBackward{norm, x[3].data(), x[6].data(), x[7].data()});
                         operations.run(GainBackward{norm, x[6].data(), x[8].data()});
                         operations.run(ColumnSums{x[6].data(), x[9].data(), rows, hidden});
                       });
    }
  }
}

TEST_F(LaunchedOperationsTest, NormaliseWithoutAMeanInTheSameLanes) {
  for (const std::size_t rows : {1, 9, 40}) {
    for (const std::size_t hidden : {1, 12, 48, 100}) {
      expect_same_bits("rms_norm",
                       {normal(rows * hidden), normal(rows), normal(hidden), normal(rows * hidden),
                        normal(rows * hidden), normal(rows * hidden), normal(hidden)},
                       [&](Operations& operations, Buffers& x) {
                         const LayerNorm norm{x[0].data(), nullptr, x[1].data(), rows, hidden, 1e-6F};
                         operations.run(NormForward{norm, x[2].data(), nullptr, x[3].data()});
                         operations.run(NormBackward{norm, x[2].data(), x[4].data(), x[5].data()});
                         operations.run(GainBackward{norm, x[4].data(), x[6].data()});
                       });
    }
  }
}

TEST_F(LaunchedOperationsTest, RotateInTheSameWay) {
  for (const std::size_t columns : {2, 6, 256}) {
    const std::size_t rows = 30, sequence = 15, heads = 3;
    Rotate rotate{.values = nullptr,
                  .count = rows * heads * columns / 2,
                  .sequence = sequence,
                  .heads = heads,
                  .columns = columns,
                  .direction = 1,
                  .frequencies = {}};
    for (std::size_t i = 0; i < columns / 2; ++i)
      rotate.frequencies[i] = 1.0F / static_cast<float>(1 + i * i);
    const std::vector<float> values = normal(rows * heads * columns);
    expect_same_bits("rotate", {values}, [&](Operations& operations, Buffers& x) {
      rotate.values = x[0].data();
      rotate.direction = 1;
      operations.run(rotate);
    });
    std::vector<float> back = values;
    rotate.values = back.data();
    for (const float direction : {1.0F, -1.0F}) {
      rotate.direction = direction;
      host_->run(rotate);
    }
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(back[i], values[i], 1e-6F);
  }
}

TEST_F(LaunchedOperationsTest, ActivateInTheSameWay) {
  const std::size_t count = 1000;
  expect_same_bits("gelu", {normal(count, 4), normal(count), normal(count)},
                   [&](Operations& operations, Buffers& x) {
                     operations.run(Gelu{x[0].data(), x[1].data(), count});
                     operations.run(GeluBackward{x[0].data(), x[2].data(), count});
                   });
  expect_same_bits("swiglu", {normal(count, 4), normal(count), normal(count), normal(count), normal(count)},
                   [&](Operations& operations, Buffers& x) {
                     operations.run(SwiGlu{x[0].data(), x[1].data(), x[2].data(), count});
                     operations.run(SwiGluBackward{x[0].data(), x[1].data(), x[3].data(), x[4].data(),
                                                   x[3].data(), count});
                   });
}

TEST_F(LaunchedOperationsTest, DropTheSameElements) {
  const Dropout dropout{.key = draw(seed_, 1, 2), .threshold = 1u << 30, .scale = 1.25F};
  const std::size_t count = 1000;
  expect_same_bits("drop", {normal(count), normal(count)}, [&](Operations& operations, Buffers& x) {
    operations.run(Drop{x[0].data(), x[1].data(), count, dropout, 77});
    operations.run(Drop{x[0].data(), x[0].data(), count, dropout, 1u << 20});
  });
}

TEST_F(LaunchedOperationsTest, EmbedInTheSameOrder) {
  const std::size_t rows = 60, sequence = 20, hidden = 36, vocabulary = 256;
  std::vector<std::uint8_t> tokens = bytes(rows);
  for (std::uint8_t& token : tokens) token %= 11;  // Makes many rows share a token.
  const std::vector<Token> wide(tokens.begin(), tokens.end());
  for (const TokenRange range : {TokenRange{0, vocabulary}, TokenRange{3, 5}, TokenRange{256, 0}}) {
    expect_same_bits(
        "embed 16-bit tokens", {normal(vocabulary * hidden), normal(rows * hidden)},
        [&](Operations& operations, Buffers& x) {
          operations.run(Embed{wide.data(), x[0].data(), range, x[1].data(), rows, hidden});
          operations.run(EmbedTokensBackward{wide.data(), x[1].data(), range, x[0].data(), rows, hidden});
        });
    expect_same_bits(
        "embed",
        {normal(vocabulary * hidden), normal(rows * hidden), normal(vocabulary * hidden),
         normal(sequence * hidden)},
        [&](Operations& operations, Buffers& x) {
          operations.run(Embed{tokens.data(), x[0].data(), range, x[1].data(), rows, hidden});
          operations.run(EmbedTokensBackward{tokens.data(), x[1].data(), range, x[2].data(), rows, hidden});
          operations.run(EmbedPositionsBackward{x[1].data(), x[3].data(), rows, sequence, hidden});
        });
  }
}

TEST_F(LaunchedOperationsTest, AttendInTheSameOrder) {
  // The second has more queries than blocks, the third more columns and positions than threads.
  const Dropout dropout{.key = draw(seed_, 1, 2), .threshold = 1u << 30, .scale = 1.25F};
  for (const Attention& shape :
       {Attention{2, 5, 12, 3}, Attention{2, 150, 8, 4}, Attention{1, 290, 300, 1},
        Attention{.batch = 2,
        .sequence = 40,
        .hidden = 12,
        .heads = 3,
        .dropout = dropout,
        .first_sample = 5,
        .first_head = 3,
        .all_heads = 9},
        Attention{.batch = 1, .sequence = 71, .hidden = 72, .heads = 2},  // Whole vectors, and a rest.
        Attention{.batch = 2, .sequence = 9, .hidden = 12, .heads = 6, .kv_heads = 2},
        Attention{.batch = 1,
        .sequence = 40,
        .hidden = 12,
        .heads = 3,
        .dropout = dropout,
        .all_heads = 3,
        .kv_heads = 1}}) {
    const std::size_t rows = shape.batch * shape.sequence;
    std::vector<std::byte> host_space(host_->prepare_attention(shape));
    std::vector<std::byte> launched_space(launched_.prepare_attention(shape));
    expect_same_bits(
        "attention",
        {normal(rows * 3 * shape.hidden), normal(rows * shape.hidden), normal(2 * shape.softmax_rows()),
         normal(rows * shape.hidden), normal(rows * 3 * shape.hidden)},
        [&](Operations& operations, Buffers& x) {
          std::byte* const space = operations.queues() ? launched_space.data() : host_space.data();
          auto* const softmax = reinterpret_cast<SoftmaxRow*>(x[2].data());
          operations.run(AttentionForward{shape, x[0].data(), x[1].data(), softmax, space});
          operations.run(AttentionBackward{shape, x[0].data(), softmax, x[3].data(), x[4].data(), space});
        });
  }
}

TEST_F(LaunchedOperationsTest, LoseInTheSameLanes) {
  const std::size_t rows = 21;
  const std::vector<std::uint8_t> targets = bytes(rows);
  for (const std::size_t parts : {1, 3, 100}) {
    const std::size_t columns = (kVocabulary + parts - 1) / parts;
    Buffers buffers(2);
    for (std::size_t part = 0; part < parts; ++part) buffers.push_back(normal(rows * columns, 3));
    buffers[0].resize(parts * rows * sizeof(RowLossPart) / sizeof(float));
    buffers[1].resize(rows * sizeof(RowLoss) / sizeof(float));
    expect_same_bits("cross_entropy", buffers, [&](Operations& operations, Buffers& x) {
      auto* const losses = reinterpret_cast<RowLossPart*>(x[0].data());
      const auto part_of = [&](std::size_t part) {
        const std::size_t first = std::min(part * columns, kVocabulary);
        return LogitsPart{x[2 + part].data(),
                          targets.data(),
                          rows,
                          columns,
                          {first, std::min(columns, kVocabulary - first)}};
      };
      for (std::size_t part = 0; part < parts; ++part)
        operations.run(CrossEntropy{part_of(part), losses + part * rows});
      for (std::size_t part = 0; part < parts; ++part) {
        operations.run(CrossEntropyBackward{part_of(part), losses, parts, part,
                                            reinterpret_cast<RowLoss*>(x[1].data()), 0.3F});
      }
    });
  }
}

TEST(KernelImage, HasEveryKernelByName) {
  const ModuleImage image = kernels::kernel_image();
  const std::string bytes(static_cast<const char*>(image.image), image.image_bytes);
  // Names are readable in a text and in a fat binary that is not compressed; the latter at least has one.
  if (kernels::kernel_image_is_compiled()) {
    EXPECT_EQ(bytes.substr(0, 4), "\120\355\125\272") << "not a fat binary";
    return;
  }
  for (std::size_t i = 0; i < kernels::kKernelCount; ++i) {
    EXPECT_NE(bytes.find(std::string(kernels::simulated_kernels()[i].kernel.name) + "\n"), std::string::npos)
        << kernels::simulated_kernels()[i].kernel.name;
  }
}

}  // namespace
}  // namespace forebay::gpt
