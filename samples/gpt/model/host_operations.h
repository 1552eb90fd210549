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
  void zero(float* target, std::size_t count) override;
  FOREBAY_GPT_OPERATIONS(FOREBAY_OVERRIDE_OPERATION)
  void run(const AttentionBackward& arguments) override;

 private:
  const std::unique_ptr<MatMul> matmul_;
  const int threads_;
};

}  // namespace forebay::gpt
