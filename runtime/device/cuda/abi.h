// The CUDA driver's binary interface, as far as this runtime calls it: result codes, handles, enumerations,
// structures and one table of entry points. It needs no toolkit. It is declarations only: nothing here loads
// or calls a driver.
//
// Nothing is named as in <cuda.h>, so that a test can include both; tests/device/cuda/abi_test.cc does, and
// compares every size, offset, value, signature and version with the real headers wherever they are
// installed. tests/fakes/cuda/abi.h declares the rest of the interface that the fake driver has.
//
// The lists are X-macros: a list named FOREBAY_CUDA_... takes a macro X and expands it once per row.
//
// Source: CUDA driver API reference and the headers of CUDA 13.0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::cuda {

// X(enumerator, name in cuda.h, value)
// clang-format off
#define FOREBAY_CUDA_RESULTS(X) \
  X(kSuccess, CUDA_SUCCESS, 0) \
  X(kInvalidValue, CUDA_ERROR_INVALID_VALUE, 1) \
  X(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY, 2) \
  X(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED, 3) \
  X(kDeinitialized, CUDA_ERROR_DEINITIALIZED, 4) \
  X(kStubLibrary, CUDA_ERROR_STUB_LIBRARY, 34) \
  X(kCallRequiresNewerDriver, CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, 36) \
  X(kDeviceUnavailable, CUDA_ERROR_DEVICE_UNAVAILABLE, 46) \
  X(kNoDevice, CUDA_ERROR_NO_DEVICE, 100) \
  X(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE, 101) \
  X(kDeviceNotLicensed, CUDA_ERROR_DEVICE_NOT_LICENSED, 102) \
  X(kInvalidImage, CUDA_ERROR_INVALID_IMAGE, 200) \
  X(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT, 201) \
  X(kAlreadyMapped, CUDA_ERROR_ALREADY_MAPPED, 208) \
  X(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU, 209) \
  X(kNotMapped, CUDA_ERROR_NOT_MAPPED, 211) \
  X(kEccUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE, 214) \
  X(kPeerAccessUnsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217) \
  X(kInvalidPtx, CUDA_ERROR_INVALID_PTX, 218) \
  X(kNvlinkUncorrectable, CUDA_ERROR_NVLINK_UNCORRECTABLE, 220) \
  X(kJitCompilerNotFound, CUDA_ERROR_JIT_COMPILER_NOT_FOUND, 221) \
  X(kUnsupportedPtxVersion, CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222) \
  X(kJitCompilationDisabled, CUDA_ERROR_JIT_COMPILATION_DISABLED, 223) \
  X(kUnsupportedExecAffinity, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, 224) \
  X(kContained, CUDA_ERROR_CONTAINED, 226) \
  X(kInvalidSource, CUDA_ERROR_INVALID_SOURCE, 300) \
  X(kOperatingSystem, CUDA_ERROR_OPERATING_SYSTEM, 304) \
  X(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE, 400) \
  X(kIllegalState, CUDA_ERROR_ILLEGAL_STATE, 401) \
  X(kNotFound, CUDA_ERROR_NOT_FOUND, 500) \
  X(kNotReady, CUDA_ERROR_NOT_READY, 600) \
  X(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS, 700) \
  X(kLaunchOutOfResources, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701) \
  X(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT, 702) \
  X(kPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704) \
  X(kPeerAccessNotEnabled, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, 705) \
  X(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED, 709) \
  X(kAssert, CUDA_ERROR_ASSERT, 710) \
  X(kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712) \
  X(kHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713) \
  X(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR, 714) \
  X(kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION, 715) \
  X(kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS, 716) \
  X(kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE, 717) \
  X(kInvalidPc, CUDA_ERROR_INVALID_PC, 718) \
  X(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED, 719) \
  X(kTensorMemoryLeak, CUDA_ERROR_TENSOR_MEMORY_LEAK, 721) \
  X(kNotPermitted, CUDA_ERROR_NOT_PERMITTED, 800) \
  X(kNotSupported, CUDA_ERROR_NOT_SUPPORTED, 801) \
  X(kSystemNotReady, CUDA_ERROR_SYSTEM_NOT_READY, 802) \
  X(kSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803) \
  X(kCompatNotSupportedOnDevice, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, 804) \
  X(kMpsConnectionFailed, CUDA_ERROR_MPS_CONNECTION_FAILED, 805) \
  X(kMpsRpcFailure, CUDA_ERROR_MPS_RPC_FAILURE, 806) \
  X(kMpsServerNotReady, CUDA_ERROR_MPS_SERVER_NOT_READY, 807) \
  X(kMpsMaxClientsReached, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, 808) \
  X(kMpsMaxConnectionsReached, CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED, 809) \
  X(kMpsClientTerminated, CUDA_ERROR_MPS_CLIENT_TERMINATED, 810) \
  X(kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900) \
  X(kStreamCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901) \
  X(kStreamCaptureMerge, CUDA_ERROR_STREAM_CAPTURE_MERGE, 902) \
  X(kStreamCaptureUnmatched, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903) \
  X(kStreamCaptureUnjoined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904) \
  X(kStreamCaptureIsolation, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905) \
  X(kStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906) \
  X(kCapturedEvent, CUDA_ERROR_CAPTURED_EVENT, 907) \
  X(kStreamCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908) \
  X(kTimeout, CUDA_ERROR_TIMEOUT, 909) \
  X(kExternalDevice, CUDA_ERROR_EXTERNAL_DEVICE, 911) \
  X(kUnknown, CUDA_ERROR_UNKNOWN, 999)

#define FOREBAY_CUDA_DEVICE_ATTRIBUTES(X) \
  X(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16) \
  X(kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75) \
  X(kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76) \
  X(kVirtualMemoryManagementSupported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102) \
  X(kHandleTypePosixFileDescriptorSupported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103) \
  X(kGpuDirectRdmaWithCudaVmmSupported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 110)


#define FOREBAY_CUDA_JIT_OPTIONS(X) \
  X(kErrorLogBuffer, CU_JIT_ERROR_LOG_BUFFER, 5) \
  X(kErrorLogBufferSizeBytes, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, 6)
// clang-format on

#define FOREBAY_CUDA_ENUMERATOR(name, real, value) name = value,
enum class CuResult : unsigned { FOREBAY_CUDA_RESULTS(FOREBAY_CUDA_ENUMERATOR) };
enum class CuDeviceAttribute : unsigned { FOREBAY_CUDA_DEVICE_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR) };
enum class CuJitOption : unsigned { FOREBAY_CUDA_JIT_OPTIONS(FOREBAY_CUDA_ENUMERATOR) };
#undef FOREBAY_CUDA_ENUMERATOR

enum class CuMemLocationType : unsigned {
  kInvalid = 0,
  kDevice = 1,
  kHost = 2,
  kHostNuma = 3,
  kHostNumaCurrent = 4
};
enum class CuMemAllocationType : unsigned { kInvalid = 0, kPinned = 1, kManaged = 2 };
// A set of bits where several are requested.
enum class CuMemHandleType : unsigned { kNone = 0, kPosixFileDescriptor = 1, kFabric = 8 };
enum class CuMemAccessFlags : unsigned { kNone = 0, kRead = 1, kReadWrite = 3 };
enum class CuMemGranularity : unsigned { kMinimum = 0, kRecommended = 1 };
enum class CuCaptureStatus : unsigned { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CuCaptureMode : unsigned { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CuProcAddressQueryResult : unsigned {
  kSuccess = 0,
  kSymbolNotFound = 1,
  kVersionNotSufficient = 2
};

constexpr std::uint64_t kProcAddressDefault = 0;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostAllocPortable = 1;
constexpr unsigned kHostAllocDeviceMap = 2;
constexpr unsigned kWaitValueGeq = 0;  // The difference is taken as a signed number.

using CuDevice = int;
using CuDevicePtr = unsigned long long;  // As in cuda.h on 64-bit systems, so that pointers to it agree too.
using CuMemHandle = unsigned long long;
using CuContext = struct CuContextObject*;
using CuStream = struct CuStreamObject*;
using CuEvent = struct CuEventObject*;
using CuModule = struct CuModuleObject*;
using CuFunction = struct CuFunctionObject*;
using CuHostFunction = void (*)(void* argument);

// The two streams that have a number instead of an object. A null stream is the legacy one, or the per-thread
// one in the entry points ending in _ptsz and _ptds.
inline CuStream legacy_stream() noexcept {
  return reinterpret_cast<CuStream>(std::uintptr_t{1});
}
inline CuStream per_thread_stream() noexcept {
  return reinterpret_cast<CuStream>(std::uintptr_t{2});
}

// The names of the fields are ours, the layout is the driver's.
struct CuUuid {
  char bytes[16];
};
struct CuMemLocation {
  CuMemLocationType type;
  int id;
};
struct CuMemAccessDesc {
  CuMemLocation location;
  CuMemAccessFlags flags;
};
struct CuMemAllocationFlags {
  unsigned char compression_type;
  unsigned char gpu_direct_rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};
struct CuMemAllocationProp {
  CuMemAllocationType type;
  CuMemHandleType requested_handle_types;
  CuMemLocation location;
  void* win32_handle_meta_data;
  CuMemAllocationFlags flags;
};

// The entry points that we call: X(name, symbol, version, (parameters)); all return CuResult.
//   name     the argument of cuGetProcAddress
//   symbol   the symbol that the library exports; one name has several where the interface changed
//   version  the lowest version with which cuGetProcAddress answers with this symbol
// Use `name` and `symbol` with # and ## only: where <cuda.h> is included they are macros.
// clang-format off
#define FOREBAY_CUDA_CALLED(X) \
  X(cuInit, cuInit, 2000, (unsigned flags)) \
  X(cuDriverGetVersion, cuDriverGetVersion, 2020, (int* version)) \
  X(cuGetErrorName, cuGetErrorName, 6000, (CuResult error, const char** text)) \
  X(cuDeviceGet, cuDeviceGet, 2000, (CuDevice* device, int ordinal)) \
  X(cuDeviceGetCount, cuDeviceGetCount, 2000, (int* count)) \
  X(cuDeviceGetName, cuDeviceGetName, 2000, (char* name, int bytes, CuDevice device)) \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040, (CuUuid* uuid, CuDevice device)) \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, (int* value, CuDeviceAttribute attribute, CuDevice device)) \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, (std::size_t* bytes, CuDevice device)) \
  X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010, (char* bus_id, int bytes, CuDevice device)) \
  X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000, (int* can_access, CuDevice device, CuDevice peer)) \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, (CuContext* context, CuDevice device)) \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, (CuDevice device)) \
  X(cuCtxSetCurrent, cuCtxSetCurrent, 4000, (CuContext context)) \
  X(cuCtxGetCurrent, cuCtxGetCurrent, 4000, (CuContext* context)) \
  X(cuCtxSynchronize, cuCtxSynchronize, 2000, ()) \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, (CuCaptureMode* mode)) \
  X(cuStreamCreate, cuStreamCreate, 2000, (CuStream* stream, unsigned flags)) \
  X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050, (CuStream* stream, unsigned flags, int priority)) \
  X(cuStreamDestroy, cuStreamDestroy_v2, 4000, (CuStream stream)) \
  X(cuStreamSynchronize, cuStreamSynchronize, 2000, (CuStream stream)) \
  X(cuStreamWaitEvent, cuStreamWaitEvent, 3020, (CuStream stream, CuEvent event, unsigned flags)) \
  X(cuStreamIsCapturing, cuStreamIsCapturing, 10000, (CuStream stream, CuCaptureStatus* status)) \
  X(cuLaunchHostFunc, cuLaunchHostFunc, 10000, (CuStream stream, CuHostFunction function, void* argument)) \
  X(cuEventCreate, cuEventCreate, 2000, (CuEvent* event, unsigned flags)) \
  X(cuEventDestroy, cuEventDestroy_v2, 4000, (CuEvent event)) \
  X(cuEventRecord, cuEventRecord, 2000, (CuEvent event, CuStream stream)) \
  X(cuEventQuery, cuEventQuery, 2000, (CuEvent event)) \
  X(cuEventSynchronize, cuEventSynchronize, 2000, (CuEvent event)) \
  X(cuEventElapsedTime, cuEventElapsedTime, 2000, (float* milliseconds, CuEvent start, CuEvent end)) \
  X(cuMemcpyAsync, cuMemcpyAsync, 4000, (CuDevicePtr target, CuDevicePtr source, std::size_t bytes, CuStream stream)) \
  X(cuMemsetD8Async, cuMemsetD8Async, 3020, (CuDevicePtr target, unsigned char value, std::size_t count, CuStream stream)) \
  X(cuMemAlloc, cuMemAlloc_v2, 3020, (CuDevicePtr* address, std::size_t bytes)) \
  X(cuMemFree, cuMemFree_v2, 3020, (CuDevicePtr address)) \
  X(cuMemGetInfo, cuMemGetInfo_v2, 3020, (std::size_t* free, std::size_t* total)) \
  X(cuMemAddressReserve, cuMemAddressReserve, 10020, (CuDevicePtr* address, std::size_t bytes, std::size_t alignment, CuDevicePtr hint, unsigned long long flags)) \
  X(cuMemAddressFree, cuMemAddressFree, 10020, (CuDevicePtr address, std::size_t bytes)) \
  X(cuMemCreate, cuMemCreate, 10020, (CuMemHandle* handle, std::size_t bytes, const CuMemAllocationProp* properties, unsigned long long flags)) \
  X(cuMemRelease, cuMemRelease, 10020, (CuMemHandle handle)) \
  X(cuMemMap, cuMemMap, 10020, (CuDevicePtr address, std::size_t bytes, std::size_t offset, CuMemHandle handle, unsigned long long flags)) \
  X(cuMemUnmap, cuMemUnmap, 10020, (CuDevicePtr address, std::size_t bytes)) \
  X(cuMemSetAccess, cuMemSetAccess, 10020, (CuDevicePtr address, std::size_t bytes, const CuMemAccessDesc* access, std::size_t count)) \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020, (std::size_t* granularity, const CuMemAllocationProp* properties, CuMemGranularity option)) \
  X(cuMemHostAlloc, cuMemHostAlloc, 2020, (void** address, std::size_t bytes, unsigned flags)) \
  X(cuMemFreeHost, cuMemFreeHost, 2000, (void* address)) \
  X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020, (CuDevicePtr* device_address, void* address, unsigned flags)) \
  X(cuMemHostRegister, cuMemHostRegister_v2, 6050, (void* address, std::size_t bytes, unsigned flags)) \
  X(cuMemHostUnregister, cuMemHostUnregister, 4000, (void* address)) \
  X(cuModuleLoadDataEx, cuModuleLoadDataEx, 2010, (CuModule* module, const void* image, unsigned option_count, CuJitOption* options, void** option_values)) \
  X(cuModuleUnload, cuModuleUnload, 2000, (CuModule module)) \
  X(cuModuleGetFunction, cuModuleGetFunction, 2000, (CuFunction* function, CuModule module, const char* name)) \
  X(cuLaunchKernel, cuLaunchKernel, 4000, (CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream, void** parameters, void** extra))

// Functions that a driver may lack: the pointer is null then.
#define FOREBAY_CUDA_OPTIONAL(X) \
  X(cuStreamWaitValue32, cuStreamWaitValue32_v2, 11070, (CuStream stream, CuDevicePtr address, std::uint32_t value, unsigned flags))
// clang-format on

// cuMemAlloc_v2_function, and so on: the function types.
#define FOREBAY_CUDA_ROW(name, symbol, version, parameters) using symbol##_function = CuResult parameters;
FOREBAY_CUDA_CALLED(FOREBAY_CUDA_ROW)
FOREBAY_CUDA_OPTIONAL(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW

}  // namespace forebay::cuda
