#include "model/launched_operations.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/kernels.h"
#include "forebay/error.h"
#include "forebay/units.h"
#include "model/device_handles.h"

namespace forebay::gpt {

using namespace kernels;  // NOLINT: the kernels' arguments.

namespace {

constexpr std::size_t kAlignment = 256;
// The most blocks of a grid. A GPU holds fewer at once; the blocks loop over the remaining work.
constexpr std::size_t kBlocksMax = 8192;
// The most blocks of attention, each with rows of workspace: 8 per multiprocessor of the largest GPUs.
constexpr std::size_t kAttentionBlocksMax = 1152;

std::size_t attention_blocks(const Attention& shape) {
  return std::min(shape.softmax_rows(), kAttentionBlocksMax);
}

std::size_t scores_bytes(const Attention& shape) {
  return round_up(attention_blocks(shape) * 2 * shape.sequence * sizeof(float), kAlignment);
}

}  // namespace

// The loaded module and its kernels, by the names of their bodies.
struct LaunchedOperations::Kernels {
  Kernels(Backend& loading, const ModuleImage& image)
      : backend(loading), module(value_or_throw(loading.load_module(image))) {
    try {
#define FOREBAY_FIND_KERNEL(name, body) body = value_or_throw(loading.get_kernel(module, #name));
      FOREBAY_GPT_KERNELS(FOREBAY_FIND_KERNEL)
#undef FOREBAY_FIND_KERNEL
    } catch (...) {
      gave_back(backend.unload_module(module));
      throw;
    }
  }
  ~Kernels() {
    gave_back(backend.unload_module(module));
  }
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  Backend& backend;
  const Module module;
#define FOREBAY_KERNEL_MEMBER(name, body) Kernel body;
  FOREBAY_GPT_KERNELS(FOREBAY_KERNEL_MEMBER)
#undef FOREBAY_KERNEL_MEMBER
};

LaunchedOperations::LaunchedOperations(Backend& backend, Stream stream, Options options)
    : backend_(backend),
      stream_(stream),
      library_(std::move(options.library)),
      product_type_(options.product_type),
      kernels_(std::make_unique<Kernels>(backend, options.image)) {}

LaunchedOperations::~LaunchedOperations() = default;

template <typename Launch>
void LaunchedOperations::launch(Kernel kernel, std::size_t block_count, const Launch& argument) {
  static_assert(std::is_trivially_copyable_v<Launch>);
  if (block_count == 0) return;
  const Dimensions grid{static_cast<std::uint32_t>(std::min(block_count, kBlocksMax))};
  const void* arguments[] = {&argument};
  const std::size_t argument_bytes[] = {sizeof argument};
  throw_if_error(backend_.launch(kernel, grid, Dimensions{kThreads}, arguments, argument_bytes, 1, stream_));
}

// --- products; operands of another type are rounded for the library, in memory behind its own workspace ---

std::size_t LaunchedOperations::prepare_product(const ProductShape& shape, DataType b_type) {
  if (library_ == nullptr) return 0;
  CublasProducts::check(shape);
  std::size_t bytes = CublasProducts::kWorkspaceBytes;
  if (product_type_ != DataType::kFloat32)
    bytes += round_up(shape.rows * shape.depth * element_bytes(product_type_), kAlignment);
  if (b_type != product_type_)
    bytes += round_up(shape.depth * shape.columns * element_bytes(product_type_), kAlignment);
  return bytes;
}

void LaunchedOperations::multiply(const ProductShape& shape, const float* a, Operand b, float* c,
                                  std::byte* workspace) {
  if (library_ == nullptr) {
    const std::size_t tiles = ceil_div(shape.rows, kTile) * ceil_div(shape.columns, kTile);
    return launch(kernels_->Product, tiles, ProductLaunch{shape, a, b, c});
  }
  std::byte* place = workspace + CublasProducts::kWorkspaceBytes;
  const auto rounded = [&](Operand operand, std::size_t count) -> const void* {
    if (operand.type == product_type_) return operand.data;
    narrow(product_type_, static_cast<const float*>(operand.data), place, count, false);
    return std::exchange(place, place + round_up(count * element_bytes(product_type_), kAlignment));
  };
  const void* const rounded_a = rounded({a, DataType::kFloat32}, shape.rows * shape.depth);
  const void* const rounded_b = rounded(b, shape.depth * shape.columns);
  library_->multiply(shape, product_type_, rounded_a, rounded_b, c, workspace);
}

// --- element by element ---

void LaunchedOperations::widen(Operand source, float* target, std::size_t count) {
  launch(kernels_->Widen, ceil_div(count, kThreads), WidenLaunch{source, target, count});
}

void LaunchedOperations::narrow(DataType type, const float* source, std::byte* target, std::size_t count,
                                bool accumulate) {
  launch(kernels_->Narrow, ceil_div(count, kThreads), NarrowLaunch{source, target, count, type, accumulate});
}

void LaunchedOperations::zero(float* target, std::size_t count) {
  throw_if_error(backend_.fill_async(reinterpret_cast<DevicePtr>(target), 0, count * sizeof(float), stream_));
}

void LaunchedOperations::add_bias(float* matrix, const float* bias, std::size_t rows, std::size_t columns) {
  launch(kernels_->AddBias, ceil_div(rows * columns, kThreads), AddBiasLaunch{matrix, bias, rows, columns});
}

void LaunchedOperations::bias_backward(const float* gradient, float* bias_gradient, std::size_t rows,
                                       std::size_t columns) {
  launch(kernels_->ColumnSums, ceil_div(columns, kSumColumns),
         ColumnSumsLaunch{gradient, bias_gradient, rows, columns});
}

void LaunchedOperations::add(const float* a, const float* b, float* target, std::size_t count) {
  launch(kernels_->Add, ceil_div(count, kThreads), AddLaunch{a, b, target, count});
}

void LaunchedOperations::drop(const float* source, float* target, std::size_t count, const Dropout& dropout,
                              std::uint64_t first) {
  launch(kernels_->Drop, ceil_div(count, kThreads), DropLaunch{source, target, count, dropout, first});
}

void LaunchedOperations::gelu(const float* input, float* output, std::size_t count) {
  launch(kernels_->Gelu, ceil_div(count, kThreads), GeluLaunch{input, output, count});
}

void LaunchedOperations::gelu_backward(const float* input, float* gradient, std::size_t count) {
  launch(kernels_->GeluBackward, ceil_div(count, kThreads), GeluLaunch{input, gradient, count});
}

// --- embedding ---

void LaunchedOperations::embed(const std::uint8_t* tokens_in, const float* tokens, TokenRange range,
                               float* output, std::size_t rows, std::size_t hidden) {
  launch(kernels_->Embed, ceil_div(rows * hidden, kThreads),
         EmbedLaunch{tokens_in, tokens, range, output, rows, hidden});
}

void LaunchedOperations::embed_tokens_backward(const std::uint8_t* tokens_in, const float* gradient,
                                               TokenRange range, float* tokens_gradient, std::size_t rows,
                                               std::size_t hidden) {
  launch(kernels_->EmbedTokensBackward, range.count,
         EmbedTokensBackwardLaunch{tokens_in, gradient, range, tokens_gradient, rows, hidden});
}

void LaunchedOperations::embed_positions_backward(const float* gradient, float* positions_gradient,
                                                  std::size_t rows, std::size_t sequence,
                                                  std::size_t hidden) {
  launch(kernels_->EmbedPositionsBackward, ceil_div(sequence * hidden, kThreads),
         EmbedPositionsBackwardLaunch{gradient, positions_gradient, rows, sequence, hidden});
}

// --- rows ---

void LaunchedOperations::layer_norm(const LayerNorm& norm, const float* gain, const float* bias,
                                    float* output) {
  launch(kernels_->NormForward, ceil_div(norm.rows, kRowsPerBlock),
         LayerNormLaunch{norm, gain, bias, output});
}

void LaunchedOperations::layer_norm_backward(const LayerNorm& norm, const float* gain, const float* gradient,
                                             float* input_gradient, float* gain_gradient,
                                             float* bias_gradient) {
  launch(kernels_->NormBackward, ceil_div(norm.rows, kRowsPerBlock),
         LayerNormBackwardLaunch{norm, gain, gradient, input_gradient});
  launch(kernels_->GainBackward, ceil_div(norm.hidden, kSumColumns),
         GainBackwardLaunch{norm, gradient, gain_gradient});
  bias_backward(gradient, bias_gradient, norm.rows, norm.hidden);
}

void LaunchedOperations::cross_entropy(const LogitsPart& part, RowLossPart* losses) {
  launch(kernels_->CrossEntropy, ceil_div(part.rows, kRowsPerBlock), CrossEntropyLaunch{part, losses});
}

void LaunchedOperations::cross_entropy_backward(const LogitsPart& part, const RowLossPart* losses,
                                                std::size_t parts, std::size_t index, RowLoss* row_losses,
                                                float factor) {
  launch(kernels_->CrossEntropyBackward, ceil_div(part.rows, kRowsPerBlock),
         CrossEntropyBackwardLaunch{part, losses, parts, index, row_losses, factor});
}

// --- attention; the workspace is the blocks' rows of scores, then the means of the backward pass ---

std::size_t LaunchedOperations::prepare_attention(const Attention& shape) {
  return scores_bytes(shape) + shape.softmax_rows() * sizeof(float);
}

void LaunchedOperations::attention(const Attention& shape, const float* qkv, float* output,
                                   SoftmaxRow* softmax, std::byte* workspace) {
  launch(kernels_->AttentionForward, attention_blocks(shape),
         AttentionLaunch{shape, qkv, output, softmax, reinterpret_cast<float*>(workspace)});
}

void LaunchedOperations::attention_backward(const Attention& shape, const float* qkv,
                                            const SoftmaxRow* softmax, const float* gradient,
                                            float* qkv_gradient, std::byte* workspace) {
  const AttentionBackwardLaunch argument{shape,
                                         qkv,
                                         softmax,
                                         gradient,
                                         qkv_gradient,
                                         reinterpret_cast<float*>(workspace),
                                         reinterpret_cast<float*>(workspace + scores_bytes(shape))};
  launch(kernels_->AttentionBackwardQueries, attention_blocks(shape), argument);
  launch(kernels_->AttentionBackwardKeys, attention_blocks(shape), argument);
}

}  // namespace forebay::gpt
