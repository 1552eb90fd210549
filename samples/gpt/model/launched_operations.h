// The operations of a GPT as kernels that a Backend launches on a stream: for a device that the host does not
// reach. cuda/kernels.h has the kernels, all but the products of cuBLAS.
#pragma once

#include <memory>

#include "cuda/cublas_products.h"
#include "forebay/backend.h"
#include "model/operations.h"

namespace forebay::gpt {

class LaunchedOperations final : public Operations {
 public:
  struct Options {
    ModuleImage image;  // The kernels.
    // Null: plain products. Otherwise operands are rounded to `product_type`.
    std::unique_ptr<CublasProducts> library;
    DataType product_type = DataType::kFloat32;
  };

  // `backend` and `stream` outlive this. The destructor waits for queued work.
  LaunchedOperations(Backend& backend, Stream stream, Options options);
  ~LaunchedOperations() override;

  const char* matmul() const noexcept override { return library_ ? "library" : "plain"; }
  bool queues() const noexcept override { return true; }

  std::size_t prepare_product(const ProductShape& shape, DataType b_type) override;
  std::size_t prepare_attention(const Attention& shape) override;

  void multiply(const ProductShape& shape, const float* a, Operand b, float* c,
                std::byte* workspace) override;
  void widen(Operand source, float* target, std::size_t count) override;
  void narrow(DataType type, const float* source, std::byte* target, std::size_t count,
              bool accumulate) override;
  void zero(float* target, std::size_t count) override;
  void add_bias(float* matrix, const float* bias, std::size_t rows, std::size_t columns) override;
  void bias_backward(const float* gradient, float* bias_gradient, std::size_t rows,
                     std::size_t columns) override;
  void add(const float* a, const float* b, float* target, std::size_t count) override;
  void drop(const float* source, float* target, std::size_t count, const Dropout& dropout,
            std::uint64_t first) override;
  void embed(const std::uint8_t* tokens_in, const float* tokens, TokenRange range, float* output,
             std::size_t rows, std::size_t hidden) override;
  void embed_tokens_backward(const std::uint8_t* tokens_in, const float* gradient, TokenRange range,
                             float* tokens_gradient, std::size_t rows, std::size_t hidden) override;
  void embed_positions_backward(const float* gradient, float* positions_gradient, std::size_t rows,
                                std::size_t sequence, std::size_t hidden) override;
  void layer_norm(const LayerNorm& norm, const float* gain, const float* bias, float* output) override;
  void layer_norm_backward(const LayerNorm& norm, const float* gain, const float* gradient,
                           float* input_gradient, float* gain_gradient, float* bias_gradient) override;
  void gelu(const float* input, float* output, std::size_t count) override;
  void gelu_backward(const float* input, float* gradient, std::size_t count) override;
  void attention(const Attention& shape, const float* qkv, float* output, SoftmaxRow* softmax,
                 std::byte* workspace) override;
  void attention_backward(const Attention& shape, const float* qkv, const SoftmaxRow* softmax,
                          const float* gradient, float* qkv_gradient, std::byte* workspace) override;
  void cross_entropy(const LogitsPart& part, RowLossPart* losses) override;
  void cross_entropy_backward(const LogitsPart& part, const RowLossPart* losses, std::size_t parts,
                              std::size_t index, RowLoss* row_losses, float factor) override;

 private:
  struct Kernels;

  template <typename Launch>
  void launch(Kernel kernel, std::size_t block_count, const Launch& argument);

  Backend& backend_;
  const Stream stream_;
  const std::unique_ptr<CublasProducts> library_;
  const DataType product_type_;
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace forebay::gpt
