// A neighbour that hooks the driver: it counts allocations and passes them on to the next library.
#include <dlfcn.h>

#include "tests/fakes/cuda/abi.h"

namespace {
int calls = 0;
}

extern "C" [[gnu::visibility("default")]] int next_cuda_library_calls() {
  return calls;
}

extern "C" [[gnu::visibility("default")]] forebay::cuda::CuResult cuMemAlloc_v2(
    forebay::cuda::CuDevicePtr* address, std::size_t bytes) {
  ++calls;
  auto* const real =
      reinterpret_cast<forebay::cuda::cuMemAlloc_v2_function*>(::dlsym(RTLD_NEXT, "cuMemAlloc_v2"));
  return real == nullptr ? forebay::cuda::CuResult::kNotFound : real(address, bytes);
}
