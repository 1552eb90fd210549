// A plugin that opens the driver by itself and allocates.
#include "tests/allocator/preload/driver_access.h"

extern "C" [[gnu::visibility("default")]] int plugin_work() {
  using namespace forebay::testing;
  Driver driver;
  CHECK(open_driver("libcuda.so.1", &driver));
  CuContext context = nullptr;
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  for (int i = 0; i < 3; ++i) {
    CuDevicePtr address = 0;
    CHECK_CU(driver.cuMemAlloc_v2(&address, 1u << 20));
    CHECK_CU(driver.cuMemFree_v2(address));
  }
  CHECK_CU(driver.cuDevicePrimaryCtxRelease_v2(0));
  return 0;
}

// A block of the plugin's, for others to free. Requires: a current context.
extern "C" [[gnu::visibility("default")]] unsigned long long plugin_block() {
  using namespace forebay::testing;
  Driver driver;
  CuDevicePtr address = 0;
  if (!open_driver("libcuda.so.1", &driver)) return 0;
  return driver.cuMemAlloc_v2(&address, 1u << 20) == CuResult::kSuccess ? address : 0;
}

// In a library that does this work before the program begins.
#ifdef PLUGIN_EARLY
namespace {
[[gnu::constructor]] void begin() {
  if (plugin_work() != 0) std::printf("the work before the beginning failed\n");
}
}  // namespace
#endif
