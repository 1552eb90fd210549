#include "cuda/cublas_products.h"

#include <dlfcn.h>

#include <climits>
#include <cstdlib>
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

// The few functions of the driver that put a device's primary context on a thread. cuBLAS works on the one it
// finds there.
class CurrentContext {
 public:
  explicit CurrentContext(int ordinal) {
    const char* const given = std::getenv("FOREBAY_LIBCUDA");
    const char* const name = given != nullptr && *given != '\0' ? given : "libcuda.so.1";
    void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      throw Error(StatusCode::kUnavailable, std::string("--matmul library: cannot open ") + name + kWithout);
    const auto find = [&](auto& function, const char* symbol) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol_of(library, symbol, name));
    };
    find(get_device_, "cuDeviceGet");
    find(retain_, "cuDevicePrimaryCtxRetain");
    find(release_, "cuDevicePrimaryCtxRelease_v2");
    find(set_current_, "cuCtxSetCurrent");
    void* context = nullptr;
    int result = get_device_(&device_, ordinal);
    if (result == 0) result = retain_(&context, device_);
    if (result == 0 && (result = set_current_(context)) != 0) release_(device_);
    if (result != 0) {
      throw Error(StatusCode::kUnavailable,
                  "--matmul library: the driver does not give cuBLAS the context of device " +
                      std::to_string(ordinal) + " (CUresult " + std::to_string(result) + ")" + kWithout);
    }
  }
  ~CurrentContext() {
    set_current_(nullptr);
    release_(device_);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  int (*get_device_)(int* device, int ordinal) = nullptr;
  int (*retain_)(void** context, int device) = nullptr;
  int (*release_)(int device) = nullptr;
  int (*set_current_)(void* context) = nullptr;
  int device_ = 0;
};

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
  Impl(int ordinal, Stream stream) : functions(open_cublas()), context(ordinal) {
    check_status(functions.create(&handle), "cublasCreate");
    try {
      check_status(functions.set_stream(handle, stream.handle), "cublasSetStream");
      check_status(functions.set_math_mode(handle, cublas::kNoReducedPrecisionReduction),
                   "cublasSetMathMode");
    } catch (...) {
      functions.destroy(handle);
      throw;
    }
  }
  ~Impl() { functions.destroy(handle); }

  const cublas::Functions functions;
  const CurrentContext context;
  cublas::Handle handle = nullptr;
  std::byte* workspace = nullptr;  // The one that cuBLAS has now.
};

CublasProducts::CublasProducts(int ordinal, Stream stream) : impl_(std::make_unique<Impl>(ordinal, stream)) {}

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
    check_status(cublas.functions.set_workspace(cublas.handle, workspace, kWorkspaceBytes),
                 "cublasSetWorkspace");
    cublas.workspace = workspace;
  }
  // cuBLAS stores matrices by columns, so it sees each row-major matrix transposed: c^T = b^T a^T.
  const auto operation = [](bool transposed) { return transposed ? cublas::kTransposed : cublas::kNormal; };
  const float one = 1, zero = 0;
  const cublas::ScalarType scalar = scalar_type(type);
  const int rows = static_cast<int>(shape.rows), columns = static_cast<int>(shape.columns),
            depth = static_cast<int>(shape.depth);
  check_status(
      cublas.functions.multiply(cublas.handle, operation(shape.transpose_b), operation(shape.transpose_a),
                                columns, rows, depth, &one, b, scalar, shape.transpose_b ? depth : columns, a,
                                scalar, shape.transpose_a ? rows : depth, &zero, c, cublas::kReal32, columns,
                                cublas::kCompute32, cublas::kDefaultAlgorithm),
      "cublasGemmEx");
}

}  // namespace forebay::gpt
