#include "model/launched_operations.h"

#include <algorithm>
#include <utility>

#include "cuda/kernels.h"
#include "forebay/error.h"
#include "forebay/kernel_launch.h"
#include "forebay/units.h"
#include "model/device_handles.h"

namespace forebay::gpt {

using namespace kernels;  // NOLINT: the kernels' arguments.

namespace {

constexpr std::size_t kAlignment = 256;
// The most blocks of a grid. A GPU holds fewer at once; the blocks loop over the remaining work.
constexpr std::size_t kBlocksMax = 8192;

// The blocks of each operation, if there is no limit.
template <typename Elements>
std::size_t blocks_of(const Elements& a) {
  return ceil_div(a.count, kThreads);
}
std::size_t blocks_of(const AddBias& a) {
  return ceil_div(a.rows * a.columns, kThreads);
}
std::size_t blocks_of(const ColumnSums& a) {
  return ceil_div(a.columns, kSumColumns);
}
std::size_t blocks_of(const Embed& a) {
  return ceil_div(a.rows * a.hidden, kThreads);
}
std::size_t blocks_of(const EmbedTokensBackward& a) {
  return a.range.count;
}
std::size_t blocks_of(const EmbedPositionsBackward& a) {
  return ceil_div(a.sequence * a.hidden, kThreads);
}
template <typename Norm>
requires requires(Norm a) {
  a.norm;
}
std::size_t blocks_of(const Norm& a) {
  return ceil_div(a.norm.rows, kRowsPerBlock);
}
std::size_t blocks_of(const GainBackward& a) {
  return ceil_div(a.norm.hidden, kSumColumns);
}
template <typename Loss>
requires requires(Loss a) {
  a.part;
}
std::size_t blocks_of(const Loss& a) {
  return ceil_div(a.part.rows, kRowsPerBlock);
}
std::size_t blocks_of(const AttentionForward& a) {
  return attention_blocks(a.shape);
}

}  // namespace

// The loaded module and its kernels, by the names of their arguments.
struct LaunchedOperations::Kernels {
  Kernels(Backend& loading, const ModuleImage& image)
      : backend(loading), module(value_or_throw(loading.load_module(image))) {
    try {
#define FOREBAY_FIND_KERNEL(name, Arguments, Shared) \
  Arguments = value_or_throw(loading.get_kernel(module, #name));
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
#define FOREBAY_KERNEL_MEMBER(name, Arguments, Shared) Kernel Arguments;
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

template <typename Arguments>
void LaunchedOperations::launch(Kernel kernel, std::size_t block_count, const Arguments& arguments) {
  if (block_count == 0) return;
  const Dimensions grid{static_cast<std::uint32_t>(std::min(block_count, kBlocksMax))};
  throw_if_error(launch_with(backend_, kernel, grid, Dimensions{kThreads}, arguments, stream_));
}

#define FOREBAY_LAUNCH_OPERATION(Arguments)                       \
  void LaunchedOperations::run(const Arguments& arguments) {      \
    launch(kernels_->Arguments, blocks_of(arguments), arguments); \
  }
FOREBAY_GPT_OPERATIONS(FOREBAY_LAUNCH_OPERATION)

void LaunchedOperations::run(const AttentionBackward& arguments) {
  const std::size_t blocks = attention_blocks(arguments.shape);
  launch(kernels_->AttentionBackwardQueries, blocks, AttentionBackwardQueries{arguments});
  launch(kernels_->AttentionBackwardKeys, blocks, AttentionBackwardKeys{arguments});
}

std::size_t LaunchedOperations::prepare_attention(const Attention& shape) {
  return scores_bytes(shape) + shape.softmax_rows() * sizeof(float);
}

void LaunchedOperations::zero(float* target, std::size_t count) {
  throw_if_error(backend_.fill_async(reinterpret_cast<DevicePtr>(target), 0, count * sizeof(float), stream_));
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
    return launch(kernels_->Product, tiles, Product{shape, a, b, c});
  }
  std::byte* place = workspace + CublasProducts::kWorkspaceBytes;
  const auto rounded = [&](Operand operand, std::size_t count) -> const void* {
    if (operand.type == product_type_) return operand.data;
    run(Narrow{product_type_, static_cast<const float*>(operand.data), place, count, false});
    return std::exchange(place, place + round_up(count * element_bytes(product_type_), kAlignment));
  };
  const void* const rounded_a = rounded({a, DataType::kFloat32}, shape.rows * shape.depth);
  const void* const rounded_b = rounded(b, shape.depth * shape.columns);
  library_->multiply(shape, product_type_, rounded_a, rounded_b, c, workspace);
}

}  // namespace forebay::gpt
