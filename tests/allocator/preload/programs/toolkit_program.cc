// NVIDIA's own libraries, where they are installed: opens one and makes the call that looks for the driver.
// Prints its result.
//   toolkit_program runtime|cublas|nccl PATH
#include <dlfcn.h>

#include <cstdio>
#include <string>

namespace {

template <typename... Parameters>
int call(void* library, const char* name, Parameters... arguments) {
  auto* const function = reinterpret_cast<int (*)(Parameters...)>(::dlsym(library, name));
  if (function == nullptr) {
    std::printf("%s is not there\n", name);
    return -1;
  }
  return function(arguments...);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string what = argv[1];
  void* const library = ::dlopen(argv[2], RTLD_NOW);
  if (library == nullptr) {
    std::printf("%s\n", ::dlerror());
    return 3;
  }
  void* result = nullptr;
  int count = 0;
  if (what == "runtime") {
    std::printf("cudaGetDeviceCount %d, ", call(library, "cudaGetDeviceCount", &count));
    std::printf("cudaMalloc %d\n", call(library, "cudaMalloc", &result, std::size_t{4096}));
  } else if (what == "cublas") {
    std::printf("cublasCreate %d\n", call(library, "cublasCreate_v2", &result));
  } else {
    std::printf("ncclMemAlloc %d\n", call(library, "ncclMemAlloc", &result, std::size_t{4096}));
  }
  return 0;
}
