// Matrix products in fp32: by oneDNN ("library") or by loops of our own ("plain").
//
// All matrices are dense and row-major. A product is deterministic for a given number of threads; `plain`
// gives the same result for any number.
#pragma once

#include <compare>
#include <cstddef>
#include <memory>

namespace forebay::gpt {

// c[rows, columns] = op(a)[rows, depth] * op(b)[depth, columns], where op transposes or not: a transposed `a`
// is stored as [depth, rows], a transposed `b` as [columns, depth].
struct ProductShape {
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t depth = 0;
  bool transpose_a = false;
  bool transpose_b = false;
  friend auto operator<=>(const ProductShape&, const ProductShape&) = default;
};

class MatMul {
 public:
  virtual ~MatMul() = default;
  virtual const char* name() const noexcept = 0;

  // Prepares products of `shape` and returns the bytes of workspace for each. Requires: the number of OpenMP
  // threads that will compute.
  virtual std::size_t prepare(const ProductShape& shape) = 0;
  // Requires: `shape` is prepared; `workspace`, aligned to 64 bytes, has the bytes that prepare() returned.
  virtual void multiply(const ProductShape& shape, const float* a, const float* b, float* c,
                        std::byte* workspace) = 0;
};

std::unique_ptr<MatMul> create_plain_matmul();

bool library_matmul_available() noexcept;
// Errors: throws Error(kUnsupported) when built without oneDNN.
std::unique_ptr<MatMul> create_library_matmul();

}  // namespace forebay::gpt
