// A CUDA driver library, opened by path, with the functions of the table as members, for the tests of
// the fake.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/fakes/cuda/abi.h"

namespace forebay::cuda {

// So that a failed expectation names the result.
inline void PrintTo(CuResult result, std::ostream* stream) {
  switch (result) {
#define FOREBAY_CUDA_ROW(name, real, value) \
  case CuResult::name:                      \
    *stream << #real;                       \
    return;
    FOREBAY_CUDA_RESULTS(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW
  }
  *stream << static_cast<unsigned>(result);
}

}  // namespace forebay::cuda

namespace forebay::fake_cuda {

struct DriverUnderTest {
  void* library = nullptr;
#define FOREBAY_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  cuda::symbol##_function* symbol = nullptr;
  FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW

  // The library at `path`. A function it does not export stays null: an older driver than the table.
  static DriverUnderTest open(const char* path) {
    DriverUnderTest driver;
    driver.library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (driver.library == nullptr) {
      std::fprintf(stderr, "cannot open the CUDA driver under test: %s\n", ::dlerror());
      std::abort();
    }
#define FOREBAY_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  driver.symbol = reinterpret_cast<cuda::symbol##_function*>(::dlsym(driver.library, #symbol));
    FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW
    return driver;
  }

  // A per-thread-default-stream variant, such as "cuMemcpyAsync_ptsz".
  template <typename Function>
  Function* variant(const char* symbol) const {
    return reinterpret_cast<Function*>(::dlsym(library, symbol));
  }
};

}  // namespace forebay::fake_cuda

#define EXPECT_CU(expected, call) EXPECT_EQ((call), ::forebay::cuda::CuResult::expected)
#define EXPECT_CU_OK(call) EXPECT_EQ((call), ::forebay::cuda::CuResult::kSuccess)
#define ASSERT_CU_OK(call) ASSERT_EQ((call), ::forebay::cuda::CuResult::kSuccess)
