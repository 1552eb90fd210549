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
  void zero(float* target, std::size_t count) override;
  FOREBAY_GPT_OPERATIONS(FOREBAY_OVERRIDE_OPERATION)
  void run(const AttentionBackward& arguments) override;

 private:
  struct Kernels;

  template <typename Arguments>
  void launch(Kernel kernel, std::size_t block_count, const Arguments& arguments);

  Backend& backend_;
  const Stream stream_;
  const std::unique_ptr<CublasProducts> library_;
  const DataType product_type_;
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace forebay::gpt
