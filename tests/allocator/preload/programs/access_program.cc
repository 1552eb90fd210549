// The same work by each way to the driver: three allocations of two kinds, contents that come back, and a
// refusal. Ends with 0 when all was as it should be.
//   access_program dlsym|query|query-thread|default|linked [path of the driver]
#include <vector>

#include "tests/allocator/preload/driver_access.h"

// The program that is linked against the driver calls these as its symbols; the others have no such symbols.
#ifdef ACCESS_PROGRAM_LINKED
extern "C" {
#define ACCESS_PROGRAM_DECLARE(symbol) forebay::cuda::symbol##_function symbol;
PRELOAD_PROGRAM_CALLS(ACCESS_PROGRAM_DECLARE)
#undef ACCESS_PROGRAM_DECLARE
}
#endif

namespace forebay::testing {
namespace {

bool link_driver([[maybe_unused]] Driver* driver) {
#ifdef ACCESS_PROGRAM_LINKED
#define ACCESS_PROGRAM_TAKE(symbol) driver->symbol = ::symbol;
  PRELOAD_PROGRAM_CALLS(ACCESS_PROGRAM_TAKE)
#undef ACCESS_PROGRAM_TAKE
  return true;
#else
  return false;
#endif
}

int work(const Driver& driver) {
  CuContext context = nullptr;
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuStream stream = nullptr;
  CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));

  constexpr std::size_t kBytes = 3u << 20;
  CuDevicePtr plain = 0, ordered = 0, from_null = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&plain, kBytes));
  CHECK_CU(driver.cuMemAllocAsync(&ordered, kBytes, stream));
  CHECK_CU(driver.cuMemAllocAsync(&from_null, 1000, nullptr));
  CHECK(plain % 512 == 0 && ordered % 512 == 0 && from_null % 256 == 0);
  CHECK_CU(driver.cuMemsetD8Async(plain, 0x5C, kBytes, stream));
  CHECK_CU(driver.cuMemcpyAsync(ordered, plain, kBytes, stream));
  std::vector<unsigned char> back(kBytes);
  CHECK_CU(driver.cuMemcpyDtoHAsync_v2(back.data(), ordered, kBytes, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  for (const unsigned char byte : back) CHECK(byte == 0x5C);

  CuDevicePtr none = 0;
  CHECK(driver.cuMemAlloc_v2(&none, 0) == CuResult::kInvalidValue);
  CHECK(driver.cuMemAlloc_v2(&none, std::size_t{1} << 50) == CuResult::kOutOfMemory);
  CHECK_CU(driver.cuMemFreeAsync(ordered, stream));
  CHECK_CU(driver.cuMemFreeAsync(from_null, nullptr));
  CHECK_CU(driver.cuMemFree_v2(plain));
  CHECK(driver.cuMemFree_v2(plain) == CuResult::kInvalidValue);
  CHECK_CU(driver.cuMemFree_v2(0));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuStreamDestroy_v2(stream));
  CHECK_CU(driver.cuDevicePrimaryCtxRelease_v2(0));
  std::printf("all well\n");
  return 0;
}

int run(int argc, char** argv) {
  const std::string way = argc > 1 ? argv[1] : "";
  const char* const path = argc > 2 ? argv[2] : "libcuda.so.1";
  Driver driver;
  bool reached = false;
  if (way == "dlsym") reached = open_driver(path, &driver);
  if (way == "query") reached = query_driver(path, kProcAddressDefault, &driver);
  if (way == "query-thread") reached = query_driver(path, kProcAddressPerThreadStream, &driver);
  if (way == "default") reached = find_driver(&driver);
  if (way == "linked") reached = link_driver(&driver);
  if (!reached) {
    std::printf("the driver is not to be had this way\n");
    return 2;
  }
  return work(driver);
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  return forebay::testing::run(argc, argv);
}
