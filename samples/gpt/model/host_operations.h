// The operations of a GPT as loops over OpenMP threads, in memory that the host may touch.
//
// One thread computes each output element in a fixed order, so the results do not depend on the number of
// threads.
#pragma once

#include <memory>

#include "model/matmul.h"
#include "model/operations.h"

namespace forebay::gpt {

// Sets the exact number of OpenMP threads for the calling thread's loops and matrix products, and tries it.
// Without OpenMP it is always one. Errors: throws Error(kUnavailable) when OpenMP gives another number.
void set_compute_threads(int count);
// The number of processors, within OpenMP's own limits.
int default_compute_threads();

class HostOperations final : public Operations {
 public:
  // `threads`: the number that will compute, see set_compute_threads().
  HostOperations(std::unique_ptr<MatMul> matmul, int threads);

  const char* matmul() const noexcept override { return matmul_->name(); }
  bool queues() const noexcept override { return false; }

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
  const std::unique_ptr<MatMul> matmul_;
  const int threads_;
};

}  // namespace forebay::gpt
