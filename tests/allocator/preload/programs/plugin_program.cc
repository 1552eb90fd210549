// Loads a plugin and has it work, before or after some work of its own.
//   plugin_program LIBRARY plain|deepbind|namespace
#include "tests/allocator/preload/driver_access.h"

namespace forebay::testing {
namespace {

// Frees a block of the plugin's, too.
int own_work(unsigned long long (*plugin_block)()) {
  Driver driver;
  CHECK(open_driver("libcuda.so.1", &driver));
  CuContext context = nullptr;
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuDevicePtr address = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&address, 1u << 20));
  CHECK_CU(driver.cuMemFree_v2(address));
  CHECK_CU(driver.cuMemFree_v2(plugin_block()));
  std::size_t free = 0, total = 0;
  CHECK_CU(driver.cuMemGetInfo_v2(&free, &total));
  return 0;
}

int run(const char* path, const std::string& how) {
  void* library = nullptr;
  if (how == "namespace") {
    library = ::dlmopen(LM_ID_NEWLM, path, RTLD_NOW);
  } else {
    library = ::dlopen(path, how == "deepbind" ? RTLD_NOW | RTLD_DEEPBIND : RTLD_NOW);
  }
  if (library == nullptr) {
    std::printf("%s\n", ::dlerror());
    return 1;
  }
  auto* const work = reinterpret_cast<int (*)()>(::dlsym(library, "plugin_work"));
  if (work == nullptr || work() != 0) return 1;
  auto* const plugin_block = reinterpret_cast<unsigned long long (*)()>(::dlsym(library, "plugin_block"));
  // In a namespace of its own it has a driver of its own, whose memory this one does not know.
  return own_work(how == "namespace" || plugin_block == nullptr ? [] { return 0ull; } : plugin_block);
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  return argc == 3 ? forebay::testing::run(argv[1], argv[2]) : 2;
}
