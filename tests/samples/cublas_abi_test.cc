// The sample's own declarations of cuBLAS against the toolkit's header, and its list of functions against the
// library where that is installed.

#include "cuda/cublas_abi.h"

#include <cublas_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <type_traits>

namespace forebay::gpt::cublas {
namespace {

// One argument or result, as the calling convention passes it.
template <typename T>
constexpr int kind_of() {
  if constexpr (std::is_pointer_v<T>) return 1;
  if constexpr (std::is_enum_v<T> || std::is_integral_v<T>) return 2;
  return 0;
}
template <typename A, typename B>
constexpr bool kSamePlace = kind_of<A>() == kind_of<B>() && kind_of<A>() != 0 && sizeof(A) == sizeof(B);

template <typename A, typename B>
struct SameSignature : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
requires(sizeof...(A) == sizeof...(B)) struct SameSignature<R (*)(A...), S (*)(B...)>
    : std::bool_constant<kSamePlace<R, S> && (kSamePlace<A, B> && ...)> {
};

// The header has an inline overload of this one beside the exported function.
using RealGemmEx = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                                      const void*, const void*, cudaDataType, int, const void*, cudaDataType,
                                      int, const void*, void*, cudaDataType, int, cublasComputeType_t,
                                      cublasGemmAlgo_t);
static_assert(std::is_same_v<decltype(static_cast<RealGemmEx>(&cublasGemmEx)), RealGemmEx>);
static_assert(SameSignature<decltype(Functions::multiply), RealGemmEx>::value);
static_assert(SameSignature<decltype(Functions::create), decltype(&cublasCreate_v2)>::value);
static_assert(SameSignature<decltype(Functions::destroy), decltype(&cublasDestroy_v2)>::value);
static_assert(SameSignature<decltype(Functions::set_stream), decltype(&cublasSetStream_v2)>::value);
static_assert(SameSignature<decltype(Functions::set_workspace), decltype(&cublasSetWorkspace_v2)>::value);
static_assert(SameSignature<decltype(Functions::set_math_mode), decltype(&cublasSetMathMode)>::value);

static_assert(int{kNormal} == CUBLAS_OP_N && int{kTransposed} == CUBLAS_OP_T);
static_assert(int{kReal32} == CUDA_R_32F && int{kReal16} == CUDA_R_16F && int{kRealBrain16} == CUDA_R_16BF);
static_assert(int{kCompute32} == CUBLAS_COMPUTE_32F);
static_assert(int{kDefaultAlgorithm} == CUBLAS_GEMM_DEFAULT);
static_assert(int{kDefaultMath} == CUBLAS_DEFAULT_MATH);
static_assert(int{kNoReducedPrecisionReduction} == CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
static_assert(CUBLAS_STATUS_SUCCESS == 0);

TEST(CublasAbi, EveryFunctionIsInTheLibrary) {
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    if (library == nullptr) library = ::dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  }
  if (library == nullptr)
    GTEST_SKIP() << "cublas_api.h agrees, and there is no libcublas.so.13 or .12 to look into: "
                 << ::dlerror();
#define FOREBAY_CHECK_SYMBOL(member, symbol, parameters) \
  EXPECT_NE(::dlsym(library, #symbol), nullptr) << #symbol;
  FOREBAY_CUBLAS_FUNCTIONS(FOREBAY_CHECK_SYMBOL)
}

}  // namespace
}  // namespace forebay::gpt::cublas
