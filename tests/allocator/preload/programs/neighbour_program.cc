// Beside neighbours in LD_PRELOAD. Prints the count of each of them.
//   neighbour_program getpid | allocate | errors
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/allocator/preload/driver_access.h"

extern "C" forebay::cuda::CuResult cuInit(unsigned);
extern "C" forebay::cuda::CuResult cuMemAlloc_v2(forebay::cuda::CuDevicePtr*, std::size_t);

namespace forebay::testing {
namespace {

int count_of(const char* function) {
  auto* const counted = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, function));
  return counted == nullptr ? -1 : counted();
}

int ask_for_process() {
  CHECK(::getpid() == static_cast<pid_t>(::syscall(SYS_getpid)));
  std::printf("getpid counted %d\n", count_of("next_library_calls"));
  return 0;
}

int allocate() {
  Driver driver;
  CHECK(open_driver("libcuda.so.1", &driver));
  CuContext context = nullptr;
  CHECK_CU(::cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuDevicePtr address = 0;
  CHECK_CU(::cuMemAlloc_v2(&address, 4096));
  CHECK_CU(driver.cuMemFree_v2(address));
  std::printf("cuMemAlloc counted %d\n", count_of("next_cuda_library_calls"));
  return 0;
}

// For a missing name dlsym gives the C library's error message, word for word.
int look_up_in_vain() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(library != nullptr);
  for (const char* name : {"cuNoSuchFunction", "cuMemAlloc_v9", "cublasCreate_v2", "cudnnCreate",
                           "curl_easy_init", "cu", "cuM", ""}) {
    void* const found = ::dlsym(library, name);
    const char* const why = ::dlerror();
    std::printf("%s: %s, %s\n", name, found == nullptr ? "none" : "found", why == nullptr ? "no error" : why);
  }
  // The driver's functions have no version.
  std::printf("dlvsym: %s\n",
              ::dlvsym(library, "cuMemAlloc_v2", "GLIBC_2.2.5") == nullptr ? "none" : "found");
  ::dlerror();
  const bool is_there = ::dlsym(library, "cuMemAlloc_v2") != nullptr;
  std::printf("cuMemAlloc_v2: %s, %s\n", is_there ? "found" : "none",
              ::dlerror() == nullptr ? "no error" : "an error");
  // A look-up that succeeds elsewhere, and a hooked name in a library that does not define it.
  void* const c_library = ::dlopen("libc.so.6", RTLD_NOW);
  std::printf("cuInit in libc: %s\n", ::dlsym(c_library, "cuInit") == nullptr ? "none" : "found");
  const char* const why = ::dlerror();
  std::printf("%s\n", why == nullptr ? "no error" : why);
  return 0;
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "getpid") return forebay::testing::ask_for_process();
  if (what == "allocate") return forebay::testing::allocate();
  return forebay::testing::look_up_in_vain();
}
