// Matrix products by cuBLAS, which is opened at run time. Operands are fp32, bf16 or fp16, sums fp32. With
// one stream and a fixed workspace, cuBLAS gives the same result again on the same kind of GPU.
#pragma once

#include <cstddef>
#include <memory>

#include "forebay/cuda_backend.h"
#include "forebay/data_type.h"
#include "model/matmul.h"

namespace forebay::gpt {

class CublasProducts {
 public:
  // The bytes of workspace for any product.
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

  // Makes products on `stream` of `backend`, which outlives this. Threads: one at a time. Errors: throws
  // Error(kUnavailable) when there is no cuBLAS, or it does not start.
  CublasProducts(CudaBackend& backend, Stream stream);
  ~CublasProducts();
  CublasProducts(const CublasProducts&) = delete;
  CublasProducts& operator=(const CublasProducts&) = delete;

  // Errors: throws Error(kUnsupported) for a matrix of more than 2^31 - 1 rows or columns.
  static void check(const ProductShape& shape);

  // Both operands are of `type`; `c` is fp32. `workspace`, a multiple of 256, has kWorkspaceBytes.
  void multiply(const ProductShape& shape, DataType type, const void* a, const void* b, float* c,
                std::byte* workspace);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay::gpt
