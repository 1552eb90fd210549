// The cases of the sample's kernels. Their definitions are the host builds of the kernels' bodies, which
// gpt_launched_operations_test compares with the host's own loops.
//
// The definitions promise their bits as long as numbers are finite. Beyond that a NaN stands for any NaN.
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/image.h"
#include "cuda/kernels.h"
#include "tests/fakes/cuda/ptx/image.h"
#include "tests/kernels/ptx/kernel_case.h"
#include "tests/samples/simulated_kernels.h"

namespace forebay::ptx_test {
namespace {

using namespace gpt;
using namespace gpt::kernels;

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kBfloat16, DataType::kFloat16};

Element element_of(DataType type) {
  return type == DataType::kFloat32    ? Element::kFloat32
         : type == DataType::kBfloat16 ? Element::kBfloat16
                                       : Element::kFloat16;
}

class Cases {
 public:
  explicit Cases(std::uint64_t seed) : random_(seed) {}

  std::vector<KernelCase> make() {
    // With special values, and with ordinary ones, which the long sums need to show their order.
    for (const bool hard : {false, true}) {
      hard_ = hard;
      elements();
      embeddings();
      columns();
      rows();
      losses();
      attention();
      products();
    }
    return std::move(cases_);
  }

 private:
  Array values(std::size_t count, DataType type = DataType::kFloat32) {
    const Element element = element_of(type);
    return array_of(element, count, 0, [&] {
      return hard_ && random_() % 4 == 0 ? hard_value(element, random_) : mild_value(element, random_);
    });
  }
  Array finite(std::size_t count) {
    return array_of(Element::kFloat32, count, 0, [&] { return mild_value(Element::kFloat32, random_); });
  }
  Array input(Array array) {
    array.read_only = true;
    return array;
  }
  Array tokens(std::size_t count, std::size_t vocabulary) {
    return input(array_of(Element::kByte, count, 0, [&] { return random_() % vocabulary; }));
  }

  template <typename Make>
  void add(const char* kernel, const std::string& description, unsigned grid, std::vector<Array> arrays,
           Make make) {
    KernelCase c;
    c.kernel = kernel;
    c.description = description;
    c.grid = grid;
    c.arrays = std::move(arrays);
    for (Array& array : c.arrays) array.any_nan = true;
    c.argument = [make](const Pointers& p) { return bytes_of_struct(make(p)); };
    auto* const function = find(kernel);
    c.define = [make, function, grid](const Pointers& p) {
      auto launch = make(p);
      void* arguments[] = {&launch};
      function({grid, 1, 1}, {kThreads, 1, 1}, arguments);
    };
    cases_.push_back(std::move(c));
  }
  static auto find(std::string_view name) -> decltype(HostKernel::function) {
    for (std::size_t i = 0; i < kKernelCount; ++i) {
      if (name == simulated_kernels()[i].kernel.name) return simulated_kernels()[i].kernel.function;
    }
    return nullptr;
  }

  void elements() {
    const std::size_t count = 3001;
    for (const DataType type : kTypes) {
      add("forebay_gpt_widen", data_type_name(type), 2, {input(values(count, type)), values(count)},
          [=](const Pointers& p) {
            return Widen{{p.at(0), type}, p.at(1), count};
          });
      for (const bool accumulate : {false, true}) {
        add("forebay_gpt_narrow", data_type_name(type), 2, {input(values(count)), values(count, type)},
            [=](const Pointers& p) {
              return Narrow{type, p.at(0), p.at<void>(1), count, accumulate};
            });
      }
    }
    add("forebay_gpt_add_bias", "", 3, {values(41 * 73), input(values(73))}, [](const Pointers& p) {
      return AddBias{p.at(0), p.at(1), 41, 73};
    });
    add("forebay_gpt_add", "", 3, {input(values(count)), input(values(count)), values(count)},
        [=](const Pointers& p) {
          return Add{p.at(0), p.at(1), p.at(2), count};
        });
    add("forebay_gpt_drop", "", 3, {input(values(count)), values(count)}, [=](const Pointers& p) {
      return Drop{p.at(0), p.at(1), count, {0x1234567890ABCDEF, 0x40000000, 1.25f}, 0xFFFFFFFF0};
    });
    add("forebay_gpt_gelu", "", 3, {input(values(count)), values(count)}, [=](const Pointers& p) {
      return Gelu{p.at(0), p.at(1), count};
    });
    add("forebay_gpt_gelu_backward", "", 3, {input(values(count)), values(count)}, [=](const Pointers& p) {
      return GeluBackward{p.at(0), p.at(1), count};
    });
    add("forebay_gpt_swiglu", "", 3, {input(values(count)), input(values(count)), values(count)},
        [=](const Pointers& p) {
          return SwiGlu{p.at(0), p.at(1), p.at(2), count};
        });
    add("forebay_gpt_swiglu_backward", "", 3,
        {input(values(count)), input(values(count)), values(count), values(count)}, [=](const Pointers& p) {
          return SwiGluBackward{p.at(0), p.at(1), p.at(2), p.at(3), p.at(2), count};
        });
    for (const float direction : {1.0f, -1.0f}) {
      Rotate rotate{.values = nullptr,
                    .count = 34 * 3 * 5,
                    .sequence = 17,
                    .heads = 3,
                    .columns = 10,
                    .direction = direction,
                    .frequencies = {}};
      for (std::size_t i = 0; i < 5; ++i) rotate.frequencies[i] = 1.0f / static_cast<float>(1 + 7 * i * i);
      add("forebay_gpt_rotate", direction > 0 ? "" : "back", 3, {values(34 * 3 * 10)},
          [=](const Pointers& p) {
            Rotate one = rotate;
            one.values = p.at(0);
            return one;
          });
    }
  }

  void embeddings() {
    const std::size_t rows = 37, sequence = 12, vocabulary = 50;
    for (const std::size_t hidden : {std::size_t{48}, std::size_t{300}}) {
      // All of the vocabulary, and a part of it.
      for (const TokenRange range : {TokenRange{0, vocabulary}, TokenRange{20, 15}}) {
        add("forebay_gpt_embed", std::to_string(hidden), 3,
            {tokens(rows, vocabulary), input(values(range.count * hidden)), values(rows * hidden)},
            [=](const Pointers& p) {
              return Embed{p.at<std::uint8_t>(0), p.at(1), range, p.at(2), rows, hidden};
            });
        add("forebay_gpt_embed_tokens_backward", std::to_string(hidden), 4,
            {tokens(rows, vocabulary), input(values(rows * hidden)), values(range.count * hidden)},
            [=](const Pointers& p) {
              return EmbedTokensBackward{p.at<std::uint8_t>(0), p.at(1), range, p.at(2), rows, hidden};
            });
      }
      add("forebay_gpt_embed_positions_backward", std::to_string(hidden), 3,
          {input(values(rows * hidden)), values(sequence * hidden)}, [=](const Pointers& p) {
            return EmbedPositionsBackward{p.at(0), p.at(1), rows, sequence, hidden};
          });
    }
  }

  void columns() {
    for (const std::size_t rows : {1, 31, 33, 100}) {
      for (const std::size_t columns : {1, 32, 45, 130}) {
        const std::string shape = std::to_string(rows) + " x " + std::to_string(columns);
        add("forebay_gpt_column_sums", shape, 2, {input(values(rows * columns)), values(columns)},
            [=](const Pointers& p) {
              return ColumnSums{p.at(0), p.at(1), rows, columns};
            });
        add("forebay_gpt_gain_backward", shape, 2,
            {input(values(rows * columns)), input(values(rows)), input(values(rows)),
             input(values(rows * columns)), values(columns)},
            [=](const Pointers& p) {
              return GainBackward{{p.at(0), p.at(1), p.at(2), rows, columns}, p.at(3), p.at(4)};
            });
      }
    }
  }

  void rows() {
    for (const std::size_t rows : {1, 9, 40}) {
      for (const std::size_t hidden : {1, 12, 48, 100}) {
        const std::string shape = std::to_string(rows) + " x " + std::to_string(hidden);
        add("forebay_gpt_norm_forward", shape, 2,
            {input(values(rows * hidden)), values(rows), values(rows), input(values(hidden)),
             input(values(hidden)), values(rows * hidden)},
            [=](const Pointers& p) {
              return NormForward{{p.at(0), p.at(1), p.at(2), rows, hidden}, p.at(3), p.at(4), p.at(5)};
            });
        add("forebay_gpt_norm_backward", shape, 2,
            {input(values(rows * hidden)), input(values(rows)), input(values(rows)), input(values(hidden)),
             input(values(rows * hidden)), values(rows * hidden)},
            [=](const Pointers& p) {
              return NormBackward{{p.at(0), p.at(1), p.at(2), rows, hidden}, p.at(3), p.at(4), p.at(5)};
            });
        add("forebay_gpt_norm_forward", shape + ", no mean", 2,
            {input(values(rows * hidden)), values(rows), input(values(hidden)), values(rows * hidden)},
            [=](const Pointers& p) {
              return NormForward{{p.at(0), nullptr, p.at(1), rows, hidden, 1e-6f}, p.at(2), nullptr, p.at(3)};
            });
        add("forebay_gpt_norm_backward", shape + ", no mean", 2,
            {input(values(rows * hidden)), input(values(rows)), input(values(hidden)),
             input(values(rows * hidden)), values(rows * hidden)},
            [=](const Pointers& p) {
              return NormBackward{
                  {p.at(0), nullptr, p.at(1), rows, hidden, 1e-6f}, p.at(2), p.at(3), p.at(4)};
            });
      }
    }
  }

  void losses() {
    for (const std::size_t rows : {1, 9, 40}) {
      const std::size_t columns = 40;
      // Two parts of a vocabulary of 70: the second has 30 tokens and 10 columns of zeros.
      for (const std::size_t part : {0, 1}) {
        const TokenRange range{part * columns, part == 0 ? columns : 30};
        const std::string shape = std::to_string(rows) + " rows, part " + std::to_string(part);
        add("forebay_gpt_cross_entropy", shape, 2,
            {values(rows * columns), tokens(rows, 70), values(rows * 3)}, [=](const Pointers& p) {
              return CrossEntropy{{p.at(0), p.at<std::uint8_t>(1), rows, columns, range},
                                  p.at<RowLossPart>(2)};
            });
        add("forebay_gpt_cross_entropy_backward", shape, 2,
            {values(rows * columns), tokens(rows, 70), input(values(2 * rows * 3)), values(rows * 2)},
            [=](const Pointers& p) {
              return CrossEntropyBackward{{p.at(0), p.at<std::uint8_t>(1), rows, columns, range},
                                          p.at<RowLossPart>(2),
                                          2,
                                          part,
                                          p.at<RowLoss>(3),
                                          0.0078125f};
            });
      }
    }
  }

  void attention() {
    for (const bool drops : {false, true}) {
      // The last has a key and a value for two heads each.
      for (const auto& [sequence, heads, head_columns, kv_heads] :
           {std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>{24, 3, 16, 0},
            {7, 2, 5, 0},
            {300, 1, 8, 0},
            {20, 4, 6, 2}}) {
        if (sequence == 300 && drops) continue;
        Attention shape{sequence == 300 ? 1u : 2u, sequence, heads * head_columns, heads};
        shape.all_heads = heads + 1;
        shape.first_head = 1;
        shape.kv_heads = kv_heads;
        if (drops) shape.dropout = {0xFEDCBA9876543210, 0x20000000, 1.125f};
        const std::size_t tokens = shape.batch * sequence, hidden = shape.hidden, all = shape.softmax_rows();
        const unsigned grid = 3;
        const std::string text = std::to_string(sequence) + " positions" + (drops ? ", dropout" : "") +
                                 (kv_heads > 0 ? ", shared keys" : "");
        const Array qkv = input(values(tokens * 3 * hidden));
        const std::size_t workspace = scores_bytes(shape) / sizeof(float) + all;
        add("forebay_gpt_attention", text, grid,
            {qkv, values(tokens * hidden), values(all * 2), finite(workspace)}, [=](const Pointers& p) {
              return AttentionForward{shape, p.at(0), p.at(1), p.at<SoftmaxRow>(2), p.at<std::byte>(3)};
            });
        const auto add_backward = [&]<typename Arguments>(const char* kernel, Arguments) {
          add(kernel, text, grid,
              {qkv, input(values(all * 2)), input(values(tokens * hidden)), values(tokens * 3 * hidden),
               finite(workspace)},
              [=](const Pointers& p) {
                return Arguments{{shape, p.at(0), p.at<SoftmaxRow>(1), p.at(2), p.at(3), p.at<std::byte>(4)}};
              });
        };
        add_backward("forebay_gpt_attention_backward_queries", AttentionBackwardQueries());
        add_backward("forebay_gpt_attention_backward_keys", AttentionBackwardKeys());
      }
    }
  }

  void products() {
    for (const ProductShape& extent : {ProductShape{1, 1, 1}, ProductShape{70, 33, 19},
                                       ProductShape{64, 128, 48}, ProductShape{5, 100, 3}}) {
      for (const int transposed : {0, 1, 2, 3}) {
        for (const DataType type : kTypes) {
          const ProductShape shape{extent.rows, extent.columns, extent.depth, (transposed & 1) != 0,
                                   (transposed & 2) != 0};
          add("forebay_gpt_product",
              std::string(data_type_name(type)) + ", transposed " + std::to_string(transposed), 2,
              {input(values(shape.rows * shape.depth)), input(values(shape.depth * shape.columns, type)),
               values(shape.rows * shape.columns)},
              [=](const Pointers& p) {
                return Product{shape, p.at(0), {p.at<void>(1), type}, p.at(2)};
              });
        }
      }
    }
  }

  std::mt19937_64 random_;
  bool hard_ = false;
  std::vector<KernelCase> cases_;
};

}  // namespace

std::vector<KernelCase> gpt_cases(std::uint64_t seed) {
  return Cases(seed).make();
}

std::string gpt_ptx() {
  return ptx::text_of_image(gpt::kernels::kernel_image().image);
}

}  // namespace forebay::ptx_test
