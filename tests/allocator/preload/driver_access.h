// The ways in which real programs reach the driver, for programs under test. It does not know the preload.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "tests/fakes/cuda/abi.h"

namespace forebay::testing {

using namespace forebay::cuda;  // NOLINT: these programs are written on that interface and nothing else.

// The functions that the programs call: X(symbol).
#define PRELOAD_PROGRAM_CALLS(X)       \
  X(cuInit)                            \
  X(cuDriverGetVersion)                \
  X(cuDeviceTotalMem_v2)               \
  X(cuDevicePrimaryCtxRetain)          \
  X(cuDevicePrimaryCtxRelease_v2)      \
  X(cuDevicePrimaryCtxReset_v2)        \
  X(cuCtxCreate_v2)                    \
  X(cuCtxDestroy_v2)                   \
  X(cuCtxSetCurrent)                   \
  X(cuCtxGetCurrent)                   \
  X(cuCtxSynchronize)                  \
  X(cuCtxEnablePeerAccess)             \
  X(cuMemAlloc_v2)                     \
  X(cuMemAllocPitch_v2)                \
  X(cuMemAllocManaged)                 \
  X(cuMemFree_v2)                      \
  X(cuMemAllocAsync)                   \
  X(cuMemAllocFromPoolAsync)           \
  X(cuMemFreeAsync)                    \
  X(cuMemGetInfo_v2)                   \
  X(cuMemcpyHtoD_v2)                   \
  X(cuMemcpyDtoH_v2)                   \
  X(cuMemcpyAsync)                     \
  X(cuMemcpyHtoDAsync_v2)              \
  X(cuMemcpyDtoHAsync_v2)              \
  X(cuMemsetD8_v2)                     \
  X(cuMemsetD8Async)                   \
  X(cuMemsetD32Async)                  \
  X(cuPointerGetAttribute)             \
  X(cuPointerGetAttributes)            \
  X(cuPointerSetAttribute)             \
  X(cuMemPoolCreate)                   \
  X(cuMemPoolDestroy)                  \
  X(cuMemPoolGetAttribute)             \
  X(cuMemPoolSetAttribute)             \
  X(cuMemPoolTrimTo)                   \
  X(cuDeviceGetDefaultMemPool)         \
  X(cuDeviceSetMemPool)                \
  X(cuMemSetMemPool)                   \
  X(cuStreamCreate)                    \
  X(cuStreamDestroy_v2)                \
  X(cuStreamQuery)                     \
  X(cuStreamSynchronize)               \
  X(cuStreamWaitEvent)                 \
  X(cuStreamBeginCapture_v2)           \
  X(cuStreamEndCapture)                \
  X(cuStreamIsCapturing)               \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuGraphInstantiateWithFlags)       \
  X(cuGraphLaunch)                     \
  X(cuGraphExecDestroy)                \
  X(cuGraphDestroy)                    \
  X(cuLaunchHostFunc)                  \
  X(cuEventCreate)                     \
  X(cuEventDestroy_v2)                 \
  X(cuEventRecord)                     \
  X(cuMemCreate)                       \
  X(cuMemRelease)                      \
  X(cuMemRetainAllocationHandle)       \
  X(cuMemGetHandleForAddressRange)     \
  X(cuMemGetAddressRange_v2)           \
  X(cuIpcGetMemHandle)                 \
  X(cuIpcOpenMemHandle_v2)             \
  X(cuIpcCloseMemHandle)

struct Driver {
#define PRELOAD_PROGRAM_MEMBER(symbol) symbol##_function* symbol = nullptr;
  PRELOAD_PROGRAM_CALLS(PRELOAD_PROGRAM_MEMBER)
#undef PRELOAD_PROGRAM_MEMBER
};

// dlopen and one dlsym for each function, as JAX does. `path`: of the driver, by name or absolute.
inline bool open_driver(const char* path, Driver* driver) {
  void* const library = ::dlopen(path, RTLD_NOW);
  if (library == nullptr) {
    std::printf("no driver: %s\n", ::dlerror());
    return false;
  }
#define PRELOAD_PROGRAM_RESOLVE(symbol) \
  driver->symbol = reinterpret_cast<symbol##_function*>(::dlsym(library, #symbol));
  PRELOAD_PROGRAM_CALLS(PRELOAD_PROGRAM_RESOLVE)
#undef PRELOAD_PROGRAM_RESOLVE
  return true;
}

// dlopen, one dlsym, and cuGetProcAddress for everything, as NVIDIA's runtime does. `flags`: the default
// stream that a null stream means.
inline bool query_driver(const char* path, std::uint64_t flags, Driver* driver) {
  void* const library = ::dlopen(path, RTLD_NOW);
  if (library == nullptr) return false;
  auto* const get = reinterpret_cast<cuGetProcAddress_v2_function*>(::dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) return false;
  const auto find = [&](std::size_t index) {
    const EntryPoint& row = kEntryPoints[index];
    const bool variant = flags == kProcAddressPerThreadStream && row.variant != StreamVariant::kNone;
    void* found = nullptr;
    // The runtime passes null for the reason.
    (void)get(row.name, &found, variant ? row.variant_version : row.version, flags, nullptr);
    return found;
  };
#define PRELOAD_PROGRAM_QUERY(symbol) \
  driver->symbol = reinterpret_cast<symbol##_function*>(find(symbol##_index));
  PRELOAD_PROGRAM_CALLS(PRELOAD_PROGRAM_QUERY)
#undef PRELOAD_PROGRAM_QUERY
  return true;
}

// RTLD_DEFAULT, as a plugin of a program that is linked against the driver does.
inline bool find_driver(Driver* driver) {
#define PRELOAD_PROGRAM_FIND(symbol) \
  driver->symbol = reinterpret_cast<symbol##_function*>(::dlsym(RTLD_DEFAULT, #symbol));
  PRELOAD_PROGRAM_CALLS(PRELOAD_PROGRAM_FIND)
#undef PRELOAD_PROGRAM_FIND
  return driver->cuInit != nullptr;
}

#define CHECK_CU(call)                                                                                \
  do {                                                                                                \
    const CuResult check_result = (call);                                                             \
    if (check_result != CuResult::kSuccess) {                                                         \
      std::printf("%s:%d: %s: %u\n", __FILE__, __LINE__, #call, static_cast<unsigned>(check_result)); \
      return 1;                                                                                       \
    }                                                                                                 \
  } while (false)

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      return 1;                                                           \
    }                                                                     \
  } while (false)

}  // namespace forebay::testing
