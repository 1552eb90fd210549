#include "cuda/cublas_products.h"

#include <dlfcn.h>

#include <climits>
#include <string>

#include "cuda/cublas_abi.h"
#include "forebay/error.h"

namespace forebay::gpt {
namespace {

constexpr const char* kWithout = "; or use --matmul plain, which needs no library";

// Libraries stay open: their threads and tables live as long as the process.
void* symbol_of(void* library, const char* name, const char* what) {
  void* const symbol = ::dlsym(library, name);
  if (symbol == nullptr) {
    throw Error(StatusCode::kUnavailable,
                std::string("--matmul library: ") + what + " has no function " + name + kWithout);
  }
  return symbol;
}

cublas::Functions open_cublas() {
  std::string found;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const message = ::dlerror();
      found += (found.empty() ? "" : "; ") + std::string(message != nullptr ? message : name);
      continue;
    }
    cublas::Functions functions;
#define FOREBAY_CUBLAS_FIND(member, symbol, parameters) \
  functions.member = reinterpret_cast<decltype(functions.member)>(symbol_of(library, #symbol, name));
    FOREBAY_CUBLAS_FUNCTIONS(FOREBAY_CUBLAS_FIND)
#undef FOREBAY_CUBLAS_FIND
    return functions;
  }
  throw Error(StatusCode::kUnavailable, "--matmul library: cannot open cuBLAS: " + found +
                                            "; install it, or name its directory in LD_LIBRARY_PATH" +
                                            kWithout);
}

// Runs `call` with the device's context current on this thread: cuBLAS works on the context that it finds.
template <typename Call>
cublas::Status in_context(CudaBackend& backend, const Call& call) {
  cublas::Status result = 0;
  auto work = [&] { result = call(); };
  throw_if_error(backend.call_in_context([](void* run) { (*static_cast<decltype(work)*>(run))(); }, &work));
  return result;
}

cublas::ScalarType scalar_type(DataType type) {
  switch (type) {
    case DataType::kBfloat16:
      return cublas::kRealBrain16;
    case DataType::kFloat16:
      return cublas::kReal16;
    default:
      return cublas::kReal32;
  }
}

void check_status(cublas::Status status, const char* call) {
  if (status == 0) return;
  throw Error(StatusCode::kUnavailable, std::string("--matmul library: ") + call +
                                            " failed with cublasStatus " + std::to_string(status) + kWithout);
}

}  // namespace

struct CublasProducts::Impl {
  Impl(CudaBackend& cuda, Stream stream) : functions(open_cublas()), backend(cuda) {
    check_status(in_context(backend, [&] { return functions.create(&handle); }), "cublasCreate");
    try {
      check_status(in_context(backend, [&] { return functions.set_stream(handle, stream.handle); }),
                   "cublasSetStream");
      check_status(functions.set_math_mode(handle, cublas::kNoReducedPrecisionReduction),
                   "cublasSetMathMode");
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~Impl() { destroy(); }

  void destroy() {
    static_cast<void>(backend.call_in_context(
        [](void* impl) { static_cast<Impl*>(impl)->functions.destroy(static_cast<Impl*>(impl)->handle); },
        this));
  }

  const cublas::Functions functions;
  CudaBackend& backend;
  cublas::Handle handle = nullptr;
  std::byte* workspace = nullptr;  // The one that cuBLAS has now.
};

CublasProducts::CublasProducts(CudaBackend& backend, Stream stream)
    : impl_(std::make_unique<Impl>(backend, stream)) {}

CublasProducts::~CublasProducts() = default;

void CublasProducts::check(const ProductShape& shape) {
  if (shape.rows <= INT_MAX && shape.columns <= INT_MAX && shape.depth <= INT_MAX) return;
  throw Error(StatusCode::kUnsupported,
              "a matrix product of " + std::to_string(shape.rows) + " x " + std::to_string(shape.columns) +
                  " over " + std::to_string(shape.depth) +
                  " is more than cuBLAS counts; lower --batch or --sequence, or use --matmul plain");
}

void CublasProducts::multiply(const ProductShape& shape, DataType type, const void* a, const void* b,
                              float* c, std::byte* workspace) {
  Impl& cublas = *impl_;
  if (cublas.workspace != workspace) {
    const auto set = [&] {
      return cublas.functions.set_workspace(cublas.handle, workspace, kWorkspaceBytes);
    };
    check_status(in_context(cublas.backend, set), "cublasSetWorkspace");
    cublas.workspace = workspace;
  }
  // cuBLAS stores matrices by columns, so it sees each row-major matrix transposed: c^T = b^T a^T.
  const auto operation = [](bool transposed) { return transposed ? cublas::kTransposed : cublas::kNormal; };
  const float one = 1, zero = 0;
  const cublas::ScalarType scalar = scalar_type(type);
  const int rows = static_cast<int>(shape.rows), columns = static_cast<int>(shape.columns),
            depth = static_cast<int>(shape.depth);
  const auto multiply = [&] {
    return cublas.functions.multiply(
        cublas.handle, operation(shape.transpose_b), operation(shape.transpose_a), columns, rows, depth, &one,
        b, scalar, shape.transpose_b ? depth : columns, a, scalar, shape.transpose_a ? rows : depth, &zero, c,
        cublas::kReal32, columns, cublas::kCompute32, cublas::kDefaultAlgorithm);
  };
  check_status(in_context(cublas.backend, multiply), "cublasGemmEx");
}

}  // namespace forebay::gpt
