// The functions of cuBLAS that this program calls, declared here and found at run time. A test compares them
// with cublas_api.h where that is installed. Source: NVIDIA cuBLAS documentation, "Using the cuBLAS API".
#pragma once

#include <cstddef>

namespace forebay::gpt::cublas {

using Handle = void*;
using Status = int;  // 0: success.

enum Operation : int { kNormal = 0, kTransposed = 1 };
enum ScalarType : int { kReal32 = 0, kReal16 = 2, kRealBrain16 = 14 };
enum ComputeType : int { kCompute32 = 68 };
enum Algorithm : int { kDefaultAlgorithm = -1 };
// Products in full fp32 (no TF32), and no reduction of partial sums in 16 bits.
enum MathMode : int { kDefaultMath = 0, kNoReducedPrecisionReduction = 16 };

// ROW(member, exported symbol, parameters)
#define FOREBAY_CUBLAS_FUNCTIONS(ROW)                                                                       \
  ROW(create, cublasCreate_v2, (Handle * handle))                                                           \
  ROW(destroy, cublasDestroy_v2, (Handle handle))                                                           \
  ROW(set_stream, cublasSetStream_v2, (Handle handle, void* stream))                                        \
  ROW(set_workspace, cublasSetWorkspace_v2, (Handle handle, void* workspace, std::size_t bytes))            \
  ROW(set_math_mode, cublasSetMathMode, (Handle handle, MathMode mode))                                     \
  ROW(multiply, cublasGemmEx,                                                                               \
      (Handle handle, Operation a_operation, Operation b_operation, int rows, int columns, int depth,       \
       const void* alpha, const void* a, ScalarType a_type, int a_stride, const void* b, ScalarType b_type, \
       int b_stride, const void* beta, void* c, ScalarType c_type, int c_stride, ComputeType compute_type,  \
       Algorithm algorithm))

struct Functions {
#define FOREBAY_CUBLAS_MEMBER(member, symbol, parameters) Status(*member) parameters = nullptr;
  FOREBAY_CUBLAS_FUNCTIONS(FOREBAY_CUBLAS_MEMBER)
#undef FOREBAY_CUBLAS_MEMBER
};

}  // namespace forebay::gpt::cublas
