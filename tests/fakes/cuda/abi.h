// The CUDA driver's binary interface as the fake driver has it: the entry points with all their versions and
// per-thread variants, and the types that only programs other than forebay pass. runtime/device/cuda/abi.h
// has what forebay itself calls.
#pragma once

#include <string_view>

#include "runtime/device/cuda/abi.h"

namespace forebay::cuda {

// The version of the interface that this file was written from, as cuDriverGetVersion counts.
constexpr int kInterfaceVersion = 13000;

// X(enumerator, name in cuda.h, value)
// clang-format off
#define FAKE_CUDA_MORE_DEVICE_ATTRIBUTES(X) \
  X(kMaxThreadsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1) \
  X(kMaxBlockDimX, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 2) \
  X(kMaxBlockDimY, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 3) \
  X(kMaxBlockDimZ, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 4) \
  X(kMaxGridDimX, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 5) \
  X(kMaxGridDimY, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 6) \
  X(kMaxGridDimZ, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 7) \
  X(kMaxSharedMemoryPerBlock, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 8) \
  X(kWarpSize, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 10) \
  X(kMaxRegistersPerBlock, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 12) \
  X(kClockRate, CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 13) \
  X(kIntegrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, 18) \
  X(kCanMapHostMemory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 19) \
  X(kConcurrentKernels, CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 31) \
  X(kEccEnabled, CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 32) \
  X(kPciBusId, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 33) \
  X(kPciDeviceId, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 34) \
  X(kMemoryClockRate, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 36) \
  X(kGlobalMemoryBusWidth, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 37) \
  X(kL2CacheSize, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 38) \
  X(kMaxThreadsPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 39) \
  X(kAsyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 40) \
  X(kUnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41) \
  X(kPciDomainId, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 50) \
  X(kStreamPrioritiesSupported, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 78) \
  X(kManagedMemory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 83) \
  X(kPageableMemoryAccess, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 88) \
  X(kConcurrentManagedAccess, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 89) \
  X(kCanUseHostPointerForRegisteredMem, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 91) \
  X(kMaxSharedMemoryPerBlockOptin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 97) \
  X(kHostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 99) \
  X(kReadOnlyHostRegisterSupported, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 113) \
  X(kMemoryPoolsSupported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 115) \
  X(kGpuDirectRdmaSupported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 116) \
  X(kMempoolSupportedHandleTypes, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 119) \
  X(kDmaBufSupported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 124) \
  X(kHandleTypeFabricSupported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 128) \
  X(kNumaConfig, CU_DEVICE_ATTRIBUTE_NUMA_CONFIG, 130) \
  X(kNumaId, CU_DEVICE_ATTRIBUTE_NUMA_ID, 131) \
  X(kMulticastSupported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 132) \
  X(kHostNumaId, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 134)

#define FOREBAY_CUDA_FUNCTION_ATTRIBUTES(X) \
  X(kMaxThreadsPerBlock, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0) \
  X(kSharedSizeBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 1) \
  X(kConstSizeBytes, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, 2) \
  X(kLocalSizeBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, 3) \
  X(kNumRegs, CU_FUNC_ATTRIBUTE_NUM_REGS, 4) \
  X(kPtxVersion, CU_FUNC_ATTRIBUTE_PTX_VERSION, 5) \
  X(kBinaryVersion, CU_FUNC_ATTRIBUTE_BINARY_VERSION, 6) \
  X(kCacheModeCa, CU_FUNC_ATTRIBUTE_CACHE_MODE_CA, 7) \
  X(kMaxDynamicSharedSizeBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8) \
  X(kPreferredSharedMemoryCarveout, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 9)

#define FOREBAY_CUDA_POINTER_ATTRIBUTES(X) \
  X(kContext, CU_POINTER_ATTRIBUTE_CONTEXT, 1) \
  X(kMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2) \
  X(kDevicePointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 3) \
  X(kHostPointer, CU_POINTER_ATTRIBUTE_HOST_POINTER, 4) \
  X(kP2pTokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS, 5) \
  X(kSyncMemops, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 6) \
  X(kBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID, 7) \
  X(kIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED, 8) \
  X(kDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9) \
  X(kIsLegacyCudaIpcCapable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 10) \
  X(kRangeStartAddr, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11) \
  X(kRangeSize, CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12) \
  X(kMapped, CU_POINTER_ATTRIBUTE_MAPPED, 13) \
  X(kAllowedHandleTypes, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 14) \
  X(kIsGpuDirectRdmaCapable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, 15) \
  X(kAccessFlags, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, 16) \
  X(kMempoolHandle, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 17) \
  X(kMappingSize, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, 18) \
  X(kMappingBaseAddr, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, 19) \
  X(kMemoryBlockId, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID, 20)

#define FOREBAY_CUDA_POOL_ATTRIBUTES(X) \
  X(kReuseFollowEventDependencies, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, 1) \
  X(kReuseAllowOpportunistic, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 2) \
  X(kReuseAllowInternalDependencies, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 3) \
  X(kReleaseThreshold, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 4) \
  X(kReservedMemCurrent, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, 5) \
  X(kReservedMemHigh, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 6) \
  X(kUsedMemCurrent, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, 7) \
  X(kUsedMemHigh, CU_MEMPOOL_ATTR_USED_MEM_HIGH, 8)

#define FOREBAY_CUDA_P2P_ATTRIBUTES(X) \
  X(kPerformanceRank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, 1) \
  X(kAccessSupported, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 2) \
  X(kNativeAtomicSupported, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, 3)

#define FOREBAY_CUDA_LAUNCH_ATTRIBUTES(X) \
  X(kIgnore, CU_LAUNCH_ATTRIBUTE_IGNORE, 0) \
  X(kCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 2) \
  X(kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 4) \
  X(kPriority, CU_LAUNCH_ATTRIBUTE_PRIORITY, 8)
// clang-format on

#define FOREBAY_CUDA_ENUMERATOR(name, real, value) name = value,
// The values of CuDeviceAttribute, and more.
enum class FakeDeviceAttribute : unsigned {
  FOREBAY_CUDA_DEVICE_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR)
      FAKE_CUDA_MORE_DEVICE_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR)
};
enum class CuFunctionAttribute : unsigned { FOREBAY_CUDA_FUNCTION_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR) };
enum class CuPointerAttribute : unsigned { FOREBAY_CUDA_POINTER_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR) };
enum class CuMemPoolAttribute : unsigned { FOREBAY_CUDA_POOL_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR) };
enum class CuDeviceP2PAttribute : unsigned { FOREBAY_CUDA_P2P_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR) };
enum class CuLaunchAttributeId : unsigned { FOREBAY_CUDA_LAUNCH_ATTRIBUTES(FOREBAY_CUDA_ENUMERATOR) };
#undef FOREBAY_CUDA_ENUMERATOR

enum class CuMemRangeHandleType : unsigned { kDmaBufFd = 1 };
enum class CuMemoryType : unsigned { kHost = 1, kDevice = 2, kArray = 3, kUnified = 4 };

constexpr std::uint64_t kProcAddressLegacyStream = 1;
constexpr std::uint64_t kProcAddressPerThreadStream = 2;
constexpr unsigned kStreamDefault = 0;
constexpr unsigned kEventDefault = 0;
constexpr unsigned kEventInterprocess = 4;
constexpr unsigned kEventRecordExternal = 1;
constexpr unsigned kEventWaitExternal = 1;
constexpr unsigned kWaitValueEq = 1;
constexpr unsigned kWaitValueAnd = 2;
constexpr unsigned kWriteValueDefault = 0;
constexpr unsigned kWriteValueNoMemoryBarrier = 1;
constexpr unsigned kHostAllocWriteCombined = 4;
constexpr unsigned kHostRegisterDeviceMap = 2;
constexpr unsigned kHostRegisterIoMemory = 4;
constexpr unsigned kHostRegisterReadOnly = 8;
constexpr unsigned kIpcLazyEnablePeerAccess = 1;
constexpr unsigned kContextScheduleMask = 7;
constexpr unsigned kContextMapHost = 8;
constexpr unsigned kContextFlagsMask = 255;

using CuMemoryPool = struct CuMemoryPoolObject*;
using CuGraph = struct CuGraphObject*;
using CuGraphNode = struct CuGraphNodeObject*;
using CuGraphExec = struct CuGraphExecObject*;

struct CuIpcMemHandle {
  char bytes[64];
};
struct CuMemPoolProps {
  CuMemAllocationType type;
  CuMemHandleType handle_types;
  CuMemLocation location;
  void* win32_security_attributes;
  std::size_t max_bytes;
  unsigned short usage;
  unsigned char reserved[54];
};
struct CuGraphEdgeData {
  unsigned char from_port;
  unsigned char to_port;
  unsigned char type;
  unsigned char reserved[5];
};
union CuLaunchAttributeValue {
  char pad[64];
  int cooperative;
  int priority;
  struct {
    unsigned x, y, z;
  } cluster;
};
struct CuLaunchAttribute {
  CuLaunchAttributeId id;
  char pad[4];
  CuLaunchAttributeValue value;
};
struct CuLaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CuStream stream;
  CuLaunchAttribute* attributes;
  unsigned attribute_count;
};

// X(name, symbol, version, VARIANT, variant_version, (parameters), (arguments)); all return CuResult.
//   name             the argument of cuGetProcAddress
//   symbol           the symbol that the library exports; one name has several where the interface changed
//   version          the lowest version with which cuGetProcAddress answers with this symbol
//   VARIANT          NONE, or the suffix of the per-thread-default-stream variant: PTSZ or PTDS
//   variant_version  the lowest version with which the variant is answered when it is asked for
//   arguments        the names of the parameters, for a wrapper to pass on
// For a version, the answer is the row of the name with the highest version that is not above it. A name is
// complete from its first row up: a lower version than that has a 32-bit interface that nothing here knows.
//
// Use `name` and `symbol` with # and ## only: where <cuda.h> is included they are macros.
// clang-format off
#define FOREBAY_CUDA_ENTRY_POINTS(X) \
  /* start, errors, versions */ \
  X(cuInit, cuInit, 2000, NONE, 0, (unsigned flags), (flags)) \
  X(cuDriverGetVersion, cuDriverGetVersion, 2020, NONE, 0, (int* version), (version)) \
  X(cuGetErrorName, cuGetErrorName, 6000, NONE, 0, (CuResult error, const char** text), (error, text)) \
  X(cuGetErrorString, cuGetErrorString, 6000, NONE, 0, (CuResult error, const char** text), (error, text)) \
  X(cuGetProcAddress, cuGetProcAddress, 11030, NONE, 0, (const char* name, void** function, int version, std::uint64_t flags), (name, function, version, flags)) \
  X(cuGetProcAddress, cuGetProcAddress_v2, 12000, NONE, 0, (const char* name, void** function, int version, std::uint64_t flags, CuProcAddressQueryResult* found), (name, function, version, flags, found)) \
  X(cuGetExportTable, cuGetExportTable, 3000, NONE, 0, (const void** table, const CuUuid* id), (table, id)) \
  /* devices */ \
  X(cuDeviceGet, cuDeviceGet, 2000, NONE, 0, (CuDevice* device, int ordinal), (device, ordinal)) \
  X(cuDeviceGetCount, cuDeviceGetCount, 2000, NONE, 0, (int* count), (count)) \
  X(cuDeviceGetName, cuDeviceGetName, 2000, NONE, 0, (char* name, int bytes, CuDevice device), (name, bytes, device)) \
  X(cuDeviceGetUuid, cuDeviceGetUuid, 9020, NONE, 0, (CuUuid* uuid, CuDevice device), (uuid, device)) \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040, NONE, 0, (CuUuid* uuid, CuDevice device), (uuid, device)) \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, NONE, 0, (int* value, CuDeviceAttribute attribute, CuDevice device), (value, attribute, device)) \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, NONE, 0, (std::size_t* bytes, CuDevice device), (bytes, device)) \
  X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010, NONE, 0, (char* bus_id, int bytes, CuDevice device), (bus_id, bytes, device)) \
  X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000, NONE, 0, (int* can_access, CuDevice device, CuDevice peer), (can_access, device, peer)) \
  X(cuDeviceGetP2PAttribute, cuDeviceGetP2PAttribute, 8000, NONE, 0, (int* value, CuDeviceP2PAttribute attribute, CuDevice source, CuDevice target), (value, attribute, source, target)) \
  /* contexts */ \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, NONE, 0, (CuContext* context, CuDevice device), (context, device)) \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, NONE, 0, (CuDevice device), (device)) \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, NONE, 0, (CuDevice device), (device)) \
  X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000, NONE, 0, (CuDevice device, unsigned* flags, int* active), (device, flags, active)) \
  X(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags, 7000, NONE, 0, (CuDevice device, unsigned flags), (device, flags)) \
  X(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2, 11000, NONE, 0, (CuDevice device, unsigned flags), (device, flags)) \
  X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, NONE, 0, (CuDevice device), (device)) \
  X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 11000, NONE, 0, (CuDevice device), (device)) \
  X(cuCtxCreate, cuCtxCreate_v2, 3020, NONE, 0, (CuContext* context, unsigned flags, CuDevice device), (context, flags, device)) \
  X(cuCtxCreate, cuCtxCreate_v3, 11040, NONE, 0, (CuContext* context, void* affinities, int affinity_count, unsigned flags, CuDevice device), (context, affinities, affinity_count, flags, device)) \
  X(cuCtxCreate, cuCtxCreate_v4, 12050, NONE, 0, (CuContext* context, void* parameters, unsigned flags, CuDevice device), (context, parameters, flags, device)) \
  X(cuCtxDestroy, cuCtxDestroy_v2, 4000, NONE, 0, (CuContext context), (context)) \
  X(cuCtxSetCurrent, cuCtxSetCurrent, 4000, NONE, 0, (CuContext context), (context)) \
  X(cuCtxGetCurrent, cuCtxGetCurrent, 4000, NONE, 0, (CuContext* context), (context)) \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, NONE, 0, (CuContext context), (context)) \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, NONE, 0, (CuContext* context), (context)) \
  X(cuCtxGetDevice, cuCtxGetDevice, 2000, NONE, 0, (CuDevice* device), (device)) \
  X(cuCtxGetDevice, cuCtxGetDevice_v2, 13000, NONE, 0, (CuDevice* device, CuContext context), (device, context)) \
  X(cuCtxGetApiVersion, cuCtxGetApiVersion, 3020, NONE, 0, (CuContext context, unsigned* version), (context, version)) \
  X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050, NONE, 0, (int* least, int* greatest), (least, greatest)) \
  X(cuCtxSynchronize, cuCtxSynchronize, 2000, NONE, 0, (), ()) \
  X(cuCtxSynchronize, cuCtxSynchronize_v2, 13000, NONE, 0, (CuContext context), (context)) \
  X(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, 4000, NONE, 0, (CuContext peer, unsigned flags), (peer, flags)) \
  X(cuCtxDisablePeerAccess, cuCtxDisablePeerAccess, 4000, NONE, 0, (CuContext peer), (peer)) \
  /* streams */ \
  X(cuStreamCreate, cuStreamCreate, 2000, NONE, 0, (CuStream* stream, unsigned flags), (stream, flags)) \
  X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050, NONE, 0, (CuStream* stream, unsigned flags, int priority), (stream, flags, priority)) \
  X(cuStreamDestroy, cuStreamDestroy_v2, 4000, NONE, 0, (CuStream stream), (stream)) \
  X(cuStreamQuery, cuStreamQuery, 2000, PTSZ, 7000, (CuStream stream), (stream)) \
  X(cuStreamSynchronize, cuStreamSynchronize, 2000, PTSZ, 7000, (CuStream stream), (stream)) \
  X(cuStreamWaitEvent, cuStreamWaitEvent, 3020, PTSZ, 7000, (CuStream stream, CuEvent event, unsigned flags), (stream, event, flags)) \
  X(cuStreamGetCtx, cuStreamGetCtx, 9020, PTSZ, 9020, (CuStream stream, CuContext* context), (stream, context)) \
  X(cuStreamGetCtx, cuStreamGetCtx_v2, 12050, PTSZ, 12050, (CuStream stream, CuContext* context, void** green), (stream, context, green)) \
  X(cuStreamGetDevice, cuStreamGetDevice, 12080, PTSZ, 12080, (CuStream stream, CuDevice* device), (stream, device)) \
  X(cuStreamGetFlags, cuStreamGetFlags, 5050, PTSZ, 7000, (CuStream stream, unsigned* flags), (stream, flags)) \
  X(cuStreamGetPriority, cuStreamGetPriority, 5050, PTSZ, 7000, (CuStream stream, int* priority), (stream, priority)) \
  X(cuStreamGetId, cuStreamGetId, 12000, PTSZ, 12000, (CuStream stream, unsigned long long* id), (stream, id)) \
  X(cuLaunchHostFunc, cuLaunchHostFunc, 10000, PTSZ, 10000, (CuStream stream, CuHostFunction function, void* argument), (stream, function, argument)) \
  X(cuStreamWaitValue32, cuStreamWaitValue32_v2, 11070, PTSZ, 11070, (CuStream stream, CuDevicePtr address, std::uint32_t value, unsigned flags), (stream, address, value, flags)) \
  X(cuStreamWriteValue32, cuStreamWriteValue32_v2, 11070, PTSZ, 11070, (CuStream stream, CuDevicePtr address, std::uint32_t value, unsigned flags), (stream, address, value, flags)) \
  /* capture and graphs */ \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, NONE, 0, (CuCaptureMode* mode), (mode)) \
  X(cuStreamBeginCapture, cuStreamBeginCapture, 10000, PTSZ, 10000, (CuStream stream), (stream)) \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010, PTSZ, 10010, (CuStream stream, CuCaptureMode mode), (stream, mode)) \
  X(cuStreamEndCapture, cuStreamEndCapture, 10000, PTSZ, 10000, (CuStream stream, CuGraph* graph), (stream, graph)) \
  X(cuStreamIsCapturing, cuStreamIsCapturing, 10000, PTSZ, 10000, (CuStream stream, CuCaptureStatus* status), (stream, status)) \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo, 10010, PTSZ, 10010, (CuStream stream, CuCaptureStatus* status, std::uint64_t* id), (stream, status, id)) \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, 11030, PTSZ, 11030, (CuStream stream, CuCaptureStatus* status, std::uint64_t* id, CuGraph* graph, const CuGraphNode** dependencies, std::size_t* dependency_count), (stream, status, id, graph, dependencies, dependency_count)) \
  X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3, 12030, PTSZ, 12030, (CuStream stream, CuCaptureStatus* status, std::uint64_t* id, CuGraph* graph, const CuGraphNode** dependencies, const CuGraphEdgeData** edges, std::size_t* dependency_count), (stream, status, id, graph, dependencies, edges, dependency_count)) \
  X(cuGraphGetNodes, cuGraphGetNodes, 10000, NONE, 0, (CuGraph graph, CuGraphNode* nodes, std::size_t* count), (graph, nodes, count)) \
  X(cuGraphDestroy, cuGraphDestroy, 10000, NONE, 0, (CuGraph graph), (graph)) \
  X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040, NONE, 0, (CuGraphExec* exec, CuGraph graph, unsigned long long flags), (exec, graph, flags)) \
  X(cuGraphLaunch, cuGraphLaunch, 10000, PTSZ, 10000, (CuGraphExec exec, CuStream stream), (exec, stream)) \
  X(cuGraphExecDestroy, cuGraphExecDestroy, 10000, NONE, 0, (CuGraphExec exec), (exec)) \
  /* events */ \
  X(cuEventCreate, cuEventCreate, 2000, NONE, 0, (CuEvent* event, unsigned flags), (event, flags)) \
  X(cuEventDestroy, cuEventDestroy_v2, 4000, NONE, 0, (CuEvent event), (event)) \
  X(cuEventRecord, cuEventRecord, 2000, PTSZ, 7000, (CuEvent event, CuStream stream), (event, stream)) \
  X(cuEventRecordWithFlags, cuEventRecordWithFlags, 11010, PTSZ, 11010, (CuEvent event, CuStream stream, unsigned flags), (event, stream, flags)) \
  X(cuEventQuery, cuEventQuery, 2000, NONE, 0, (CuEvent event), (event)) \
  X(cuEventSynchronize, cuEventSynchronize, 2000, NONE, 0, (CuEvent event), (event)) \
  X(cuEventElapsedTime, cuEventElapsedTime, 2000, NONE, 0, (float* milliseconds, CuEvent start, CuEvent end), (milliseconds, start, end)) \
  X(cuEventElapsedTime, cuEventElapsedTime_v2, 12080, NONE, 0, (float* milliseconds, CuEvent start, CuEvent end), (milliseconds, start, end)) \
  /* copies and fills */ \
  X(cuMemcpy, cuMemcpy, 4000, PTDS, 7000, (CuDevicePtr target, CuDevicePtr source, std::size_t bytes), (target, source, bytes)) \
  X(cuMemcpyAsync, cuMemcpyAsync, 4000, PTSZ, 7000, (CuDevicePtr target, CuDevicePtr source, std::size_t bytes, CuStream stream), (target, source, bytes, stream)) \
  X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020, PTDS, 7000, (CuDevicePtr target, const void* source, std::size_t bytes), (target, source, bytes)) \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020, PTSZ, 7000, (CuDevicePtr target, const void* source, std::size_t bytes, CuStream stream), (target, source, bytes, stream)) \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020, PTDS, 7000, (void* target, CuDevicePtr source, std::size_t bytes), (target, source, bytes)) \
  X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020, PTSZ, 7000, (void* target, CuDevicePtr source, std::size_t bytes, CuStream stream), (target, source, bytes, stream)) \
  X(cuMemcpyDtoD, cuMemcpyDtoD_v2, 3020, PTDS, 7000, (CuDevicePtr target, CuDevicePtr source, std::size_t bytes), (target, source, bytes)) \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020, PTSZ, 7000, (CuDevicePtr target, CuDevicePtr source, std::size_t bytes, CuStream stream), (target, source, bytes, stream)) \
  X(cuMemcpyPeer, cuMemcpyPeer, 4000, PTDS, 7000, (CuDevicePtr target, CuContext target_context, CuDevicePtr source, CuContext source_context, std::size_t bytes), (target, target_context, source, source_context, bytes)) \
  X(cuMemcpyPeerAsync, cuMemcpyPeerAsync, 4000, PTSZ, 7000, (CuDevicePtr target, CuContext target_context, CuDevicePtr source, CuContext source_context, std::size_t bytes, CuStream stream), (target, target_context, source, source_context, bytes, stream)) \
  X(cuMemsetD8, cuMemsetD8_v2, 3020, PTDS, 7000, (CuDevicePtr target, unsigned char value, std::size_t count), (target, value, count)) \
  X(cuMemsetD8Async, cuMemsetD8Async, 3020, PTSZ, 7000, (CuDevicePtr target, unsigned char value, std::size_t count, CuStream stream), (target, value, count, stream)) \
  X(cuMemsetD16, cuMemsetD16_v2, 3020, PTDS, 7000, (CuDevicePtr target, unsigned short value, std::size_t count), (target, value, count)) \
  X(cuMemsetD16Async, cuMemsetD16Async, 3020, PTSZ, 7000, (CuDevicePtr target, unsigned short value, std::size_t count, CuStream stream), (target, value, count, stream)) \
  X(cuMemsetD32, cuMemsetD32_v2, 3020, PTDS, 7000, (CuDevicePtr target, unsigned value, std::size_t count), (target, value, count)) \
  X(cuMemsetD32Async, cuMemsetD32Async, 3020, PTSZ, 7000, (CuDevicePtr target, unsigned value, std::size_t count, CuStream stream), (target, value, count, stream)) \
  /* memory */ \
  X(cuMemAlloc, cuMemAlloc_v2, 3020, NONE, 0, (CuDevicePtr* address, std::size_t bytes), (address, bytes)) \
  X(cuMemAllocPitch, cuMemAllocPitch_v2, 3020, NONE, 0, (CuDevicePtr* address, std::size_t* pitch, std::size_t width_bytes, std::size_t height, unsigned element_bytes), (address, pitch, width_bytes, height, element_bytes)) \
  X(cuMemAllocManaged, cuMemAllocManaged, 6000, NONE, 0, (CuDevicePtr* address, std::size_t bytes, unsigned flags), (address, bytes, flags)) \
  X(cuMemFree, cuMemFree_v2, 3020, NONE, 0, (CuDevicePtr address), (address)) \
  X(cuMemGetInfo, cuMemGetInfo_v2, 3020, NONE, 0, (std::size_t* free, std::size_t* total), (free, total)) \
  X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020, NONE, 0, (CuDevicePtr* base, std::size_t* bytes, CuDevicePtr address), (base, bytes, address)) \
  X(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange, 11070, NONE, 0, (void* handle, CuDevicePtr address, std::size_t bytes, CuMemRangeHandleType type, unsigned long long flags), (handle, address, bytes, type, flags)) \
  X(cuMemAllocAsync, cuMemAllocAsync, 11020, PTSZ, 11020, (CuDevicePtr* address, std::size_t bytes, CuStream stream), (address, bytes, stream)) \
  X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, PTSZ, 11020, (CuDevicePtr* address, std::size_t bytes, CuMemoryPool pool, CuStream stream), (address, bytes, pool, stream)) \
  X(cuMemFreeAsync, cuMemFreeAsync, 11020, PTSZ, 11020, (CuDevicePtr address, CuStream stream), (address, stream)) \
  X(cuPointerGetAttribute, cuPointerGetAttribute, 4000, NONE, 0, (void* data, CuPointerAttribute attribute, CuDevicePtr address), (data, attribute, address)) \
  X(cuPointerGetAttributes, cuPointerGetAttributes, 7000, NONE, 0, (unsigned count, CuPointerAttribute* attributes, void** data, CuDevicePtr address), (count, attributes, data, address)) \
  X(cuPointerSetAttribute, cuPointerSetAttribute, 6000, NONE, 0, (const void* value, CuPointerAttribute attribute, CuDevicePtr address), (value, attribute, address)) \
  /* memory pools */ \
  X(cuMemPoolCreate, cuMemPoolCreate, 11020, NONE, 0, (CuMemoryPool* pool, const CuMemPoolProps* properties), (pool, properties)) \
  X(cuMemPoolDestroy, cuMemPoolDestroy, 11020, NONE, 0, (CuMemoryPool pool), (pool)) \
  X(cuMemPoolSetAttribute, cuMemPoolSetAttribute, 11020, NONE, 0, (CuMemoryPool pool, CuMemPoolAttribute attribute, void* value), (pool, attribute, value)) \
  X(cuMemPoolGetAttribute, cuMemPoolGetAttribute, 11020, NONE, 0, (CuMemoryPool pool, CuMemPoolAttribute attribute, void* value), (pool, attribute, value)) \
  X(cuMemPoolTrimTo, cuMemPoolTrimTo, 11020, NONE, 0, (CuMemoryPool pool, std::size_t keep_bytes), (pool, keep_bytes)) \
  X(cuMemPoolSetAccess, cuMemPoolSetAccess, 11020, NONE, 0, (CuMemoryPool pool, const CuMemAccessDesc* access, std::size_t count), (pool, access, count)) \
  X(cuMemPoolGetAccess, cuMemPoolGetAccess, 11020, NONE, 0, (CuMemAccessFlags* flags, CuMemoryPool pool, CuMemLocation* location), (flags, pool, location)) \
  X(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, 11020, NONE, 0, (CuMemoryPool* pool, CuDevice device), (pool, device)) \
  X(cuDeviceGetMemPool, cuDeviceGetMemPool, 11020, NONE, 0, (CuMemoryPool* pool, CuDevice device), (pool, device)) \
  X(cuDeviceSetMemPool, cuDeviceSetMemPool, 11020, NONE, 0, (CuDevice device, CuMemoryPool pool), (device, pool)) \
  X(cuMemSetMemPool, cuMemSetMemPool, 13000, NONE, 0, (CuMemLocation* location, CuMemAllocationType type, CuMemoryPool pool), (location, type, pool)) \
  /* virtual memory */ \
  X(cuMemAddressReserve, cuMemAddressReserve, 10020, NONE, 0, (CuDevicePtr* address, std::size_t bytes, std::size_t alignment, CuDevicePtr hint, unsigned long long flags), (address, bytes, alignment, hint, flags)) \
  X(cuMemAddressFree, cuMemAddressFree, 10020, NONE, 0, (CuDevicePtr address, std::size_t bytes), (address, bytes)) \
  X(cuMemCreate, cuMemCreate, 10020, NONE, 0, (CuMemHandle* handle, std::size_t bytes, const CuMemAllocationProp* properties, unsigned long long flags), (handle, bytes, properties, flags)) \
  X(cuMemRelease, cuMemRelease, 10020, NONE, 0, (CuMemHandle handle), (handle)) \
  X(cuMemMap, cuMemMap, 10020, NONE, 0, (CuDevicePtr address, std::size_t bytes, std::size_t offset, CuMemHandle handle, unsigned long long flags), (address, bytes, offset, handle, flags)) \
  X(cuMemUnmap, cuMemUnmap, 10020, NONE, 0, (CuDevicePtr address, std::size_t bytes), (address, bytes)) \
  X(cuMemSetAccess, cuMemSetAccess, 10020, NONE, 0, (CuDevicePtr address, std::size_t bytes, const CuMemAccessDesc* access, std::size_t count), (address, bytes, access, count)) \
  X(cuMemGetAccess, cuMemGetAccess, 10020, NONE, 0, (unsigned long long* flags, const CuMemLocation* location, CuDevicePtr address), (flags, location, address)) \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020, NONE, 0, (std::size_t* granularity, const CuMemAllocationProp* properties, CuMemGranularity option), (granularity, properties, option)) \
  X(cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020, NONE, 0, (void* shareable, CuMemHandle handle, CuMemHandleType type, unsigned long long flags), (shareable, handle, type, flags)) \
  X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020, NONE, 0, (CuMemHandle* handle, void* os_handle, CuMemHandleType type), (handle, os_handle, type)) \
  X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, NONE, 0, (CuMemHandle* handle, void* address), (handle, address)) \
  X(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, 10020, NONE, 0, (CuMemAllocationProp* properties, CuMemHandle handle), (properties, handle)) \
  /* host memory */ \
  X(cuMemHostAlloc, cuMemHostAlloc, 2020, NONE, 0, (void** address, std::size_t bytes, unsigned flags), (address, bytes, flags)) \
  X(cuMemAllocHost, cuMemAllocHost_v2, 3020, NONE, 0, (void** address, std::size_t bytes), (address, bytes)) \
  X(cuMemFreeHost, cuMemFreeHost, 2000, NONE, 0, (void* address), (address)) \
  X(cuMemHostRegister, cuMemHostRegister, 4000, NONE, 0, (void* address, std::size_t bytes, unsigned flags), (address, bytes, flags)) \
  X(cuMemHostRegister, cuMemHostRegister_v2, 6050, NONE, 0, (void* address, std::size_t bytes, unsigned flags), (address, bytes, flags)) \
  X(cuMemHostUnregister, cuMemHostUnregister, 4000, NONE, 0, (void* address), (address)) \
  X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020, NONE, 0, (CuDevicePtr* device_address, void* address, unsigned flags), (device_address, address, flags)) \
  X(cuMemHostGetFlags, cuMemHostGetFlags, 2030, NONE, 0, (unsigned* flags, void* address), (flags, address)) \
  /* between processes */ \
  X(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010, NONE, 0, (CuIpcMemHandle* handle, CuDevicePtr address), (handle, address)) \
  X(cuIpcOpenMemHandle, cuIpcOpenMemHandle, 4010, NONE, 0, (CuDevicePtr* device_address, CuIpcMemHandle handle, unsigned flags), (device_address, handle, flags)) \
  X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, 11000, NONE, 0, (CuDevicePtr* device_address, CuIpcMemHandle handle, unsigned flags), (device_address, handle, flags)) \
  X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010, NONE, 0, (CuDevicePtr address), (address)) \
  /* modules and launches */ \
  X(cuModuleLoadData, cuModuleLoadData, 2000, NONE, 0, (CuModule* module, const void* image), (module, image)) \
  X(cuModuleLoadDataEx, cuModuleLoadDataEx, 2010, NONE, 0, (CuModule* module, const void* image, unsigned option_count, CuJitOption* options, void** option_values), (module, image, option_count, options, option_values)) \
  X(cuModuleUnload, cuModuleUnload, 2000, NONE, 0, (CuModule module), (module)) \
  X(cuModuleGetFunction, cuModuleGetFunction, 2000, NONE, 0, (CuFunction* function, CuModule module, const char* name), (function, module, name)) \
  X(cuModuleGetGlobal, cuModuleGetGlobal_v2, 3020, NONE, 0, (CuDevicePtr* address, std::size_t* bytes, CuModule module, const char* name), (address, bytes, module, name)) \
  X(cuFuncGetAttribute, cuFuncGetAttribute, 2020, NONE, 0, (int* value, CuFunctionAttribute attribute, CuFunction function), (value, attribute, function)) \
  X(cuFuncSetAttribute, cuFuncSetAttribute, 9000, NONE, 0, (CuFunction function, CuFunctionAttribute attribute, int value), (function, attribute, value)) \
  X(cuLaunchKernel, cuLaunchKernel, 4000, PTSZ, 7000, (CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream, void** parameters, void** extra), (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters, extra)) \
  X(cuLaunchKernelEx, cuLaunchKernelEx, 11060, PTSZ, 11060, (const CuLaunchConfig* config, CuFunction function, void** parameters, void** extra), (config, function, parameters, extra))
// clang-format on

enum class StreamVariant : std::uint8_t { kNone, kPtsz, kPtds };

struct EntryPoint {
  const char* name;
  const char* symbol;
  int version;
  StreamVariant variant;
  const char* variant_symbol;  // Null when there is none.
  int variant_version;
};

// The columns of the table: the variant, and its symbol.
#define FOREBAY_CUDA_VARIANT_NONE ::forebay::cuda::StreamVariant::kNone
#define FOREBAY_CUDA_VARIANT_PTSZ ::forebay::cuda::StreamVariant::kPtsz
#define FOREBAY_CUDA_VARIANT_PTDS ::forebay::cuda::StreamVariant::kPtds
#define FOREBAY_CUDA_VARIANT_SYMBOL_NONE(symbol) nullptr
#define FOREBAY_CUDA_VARIANT_SYMBOL_PTSZ(symbol) #symbol "_ptsz"
#define FOREBAY_CUDA_VARIANT_SYMBOL_PTDS(symbol) #symbol "_ptds"

// The table as data. An element's index is the value of its EntryPointIndex.
inline constexpr EntryPoint kEntryPoints[] = {
#define FOREBAY_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  {#name,                                                                                        \
   #symbol,                                                                                      \
   version,                                                                                      \
   FOREBAY_CUDA_VARIANT_##VARIANT,                                                               \
   FOREBAY_CUDA_VARIANT_SYMBOL_##VARIANT(symbol),                                                \
   variant_version},
    FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW
};
inline constexpr std::size_t kEntryPointCount = sizeof(kEntryPoints) / sizeof(kEntryPoints[0]);

// cuMemAlloc_v2_index, and so on.
enum EntryPointIndex : std::size_t {
#define FOREBAY_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  symbol##_index,
  FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW
};

// cuMemAlloc_v2_function, and so on: the function types.
#define FOREBAY_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  using symbol##_function = CuResult parameters;
FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW

// The rows that forebay calls are rows of this table; the function types agree, or their second declaration
// above is an error.
#define FOREBAY_CUDA_ROW(row_name, symbol, row_version, parameters)                 \
  static_assert(kEntryPoints[symbol##_index].name == std::string_view(#row_name) && \
                kEntryPoints[symbol##_index].version == row_version);
FOREBAY_CUDA_CALLED(FOREBAY_CUDA_ROW)
FOREBAY_CUDA_OPTIONAL(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW

}  // namespace forebay::cuda
