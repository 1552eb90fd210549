// Our declarations of the CUDA driver's interface against the toolkit's own header: sizes, offsets, values,
// and the newest symbol of each name. The function types are compared in device/cuda/abi_symbols_test.cc.
#include "tests/fakes/cuda/abi.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace forebay::cuda {
namespace {

// --- values ---
#define FOREBAY_TEST_VALUE(name, real, value) static_assert(real == value, #real);
FOREBAY_CUDA_RESULTS(FOREBAY_TEST_VALUE)
FOREBAY_CUDA_DEVICE_ATTRIBUTES(FOREBAY_TEST_VALUE)
FAKE_CUDA_MORE_DEVICE_ATTRIBUTES(FOREBAY_TEST_VALUE)
FOREBAY_CUDA_FUNCTION_ATTRIBUTES(FOREBAY_TEST_VALUE)
FOREBAY_CUDA_POINTER_ATTRIBUTES(FOREBAY_TEST_VALUE)
FOREBAY_CUDA_POOL_ATTRIBUTES(FOREBAY_TEST_VALUE)
FOREBAY_CUDA_P2P_ATTRIBUTES(FOREBAY_TEST_VALUE)
FOREBAY_CUDA_JIT_OPTIONS(FOREBAY_TEST_VALUE)
FOREBAY_CUDA_LAUNCH_ATTRIBUTES(FOREBAY_TEST_VALUE)
#undef FOREBAY_TEST_VALUE

template <typename Ours, typename Real>
constexpr bool same(Ours ours, Real real) {
  return sizeof(Ours) == sizeof(Real) && static_cast<unsigned>(ours) == static_cast<unsigned>(real);
}
static_assert(same(CuMemLocationType::kInvalid, CU_MEM_LOCATION_TYPE_INVALID));
static_assert(same(CuMemLocationType::kDevice, CU_MEM_LOCATION_TYPE_DEVICE));
static_assert(same(CuMemLocationType::kHost, CU_MEM_LOCATION_TYPE_HOST));
static_assert(same(CuMemLocationType::kHostNuma, CU_MEM_LOCATION_TYPE_HOST_NUMA));
static_assert(same(CuMemLocationType::kHostNumaCurrent, CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT));
static_assert(same(CuMemAllocationType::kInvalid, CU_MEM_ALLOCATION_TYPE_INVALID));
static_assert(same(CuMemAllocationType::kPinned, CU_MEM_ALLOCATION_TYPE_PINNED));
static_assert(same(CuMemAllocationType::kManaged, CU_MEM_ALLOCATION_TYPE_MANAGED));
static_assert(same(CuMemHandleType::kNone, CU_MEM_HANDLE_TYPE_NONE));
static_assert(same(CuMemHandleType::kPosixFileDescriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
static_assert(same(CuMemHandleType::kFabric, CU_MEM_HANDLE_TYPE_FABRIC));
static_assert(same(CuMemAccessFlags::kNone, CU_MEM_ACCESS_FLAGS_PROT_NONE));
static_assert(same(CuMemAccessFlags::kRead, CU_MEM_ACCESS_FLAGS_PROT_READ));
static_assert(same(CuMemAccessFlags::kReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
static_assert(same(CuMemGranularity::kMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
static_assert(same(CuMemGranularity::kRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
static_assert(same(CuMemRangeHandleType::kDmaBufFd, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD));
static_assert(same(CuMemoryType::kHost, CU_MEMORYTYPE_HOST));
static_assert(same(CuMemoryType::kDevice, CU_MEMORYTYPE_DEVICE));
static_assert(same(CuMemoryType::kArray, CU_MEMORYTYPE_ARRAY));
static_assert(same(CuMemoryType::kUnified, CU_MEMORYTYPE_UNIFIED));
static_assert(same(CuCaptureStatus::kNone, CU_STREAM_CAPTURE_STATUS_NONE));
static_assert(same(CuCaptureStatus::kActive, CU_STREAM_CAPTURE_STATUS_ACTIVE));
static_assert(same(CuCaptureStatus::kInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED));
static_assert(same(CuCaptureMode::kGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL));
static_assert(same(CuCaptureMode::kThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
static_assert(same(CuCaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED));
static_assert(same(CuProcAddressQueryResult::kSuccess, CU_GET_PROC_ADDRESS_SUCCESS));
static_assert(same(CuProcAddressQueryResult::kSymbolNotFound, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND));
static_assert(same(CuProcAddressQueryResult::kVersionNotSufficient,
                   CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT));

static_assert(kProcAddressDefault == CU_GET_PROC_ADDRESS_DEFAULT);
static_assert(kProcAddressLegacyStream == CU_GET_PROC_ADDRESS_LEGACY_STREAM);
static_assert(kProcAddressPerThreadStream == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
static_assert(kStreamDefault == CU_STREAM_DEFAULT && kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventDefault == CU_EVENT_DEFAULT && kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING && kEventInterprocess == CU_EVENT_INTERPROCESS);
static_assert(kEventRecordExternal == CU_EVENT_RECORD_EXTERNAL &&
              kEventWaitExternal == CU_EVENT_WAIT_EXTERNAL);
static_assert(kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE &&
              kHostAllocDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(kHostAllocWriteCombined == CU_MEMHOSTALLOC_WRITECOMBINED);
static_assert(kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kHostRegisterIoMemory == CU_MEMHOSTREGISTER_IOMEMORY);
static_assert(kHostRegisterReadOnly == CU_MEMHOSTREGISTER_READ_ONLY);
static_assert(kIpcLazyEnablePeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(kContextScheduleMask == CU_CTX_SCHED_MASK && kContextMapHost == CU_CTX_MAP_HOST);
static_assert(kContextFlagsMask == CU_CTX_FLAGS_MASK);

// --- layouts ---
static_assert(sizeof(CuDevice) == sizeof(CUdevice) && sizeof(CuDevicePtr) == sizeof(CUdeviceptr));
static_assert(sizeof(CuMemHandle) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(CuUuid) == sizeof(CUuuid) && sizeof(CuIpcMemHandle) == sizeof(CUipcMemHandle));

#define FOREBAY_TEST_FIELD(Ours, ours, Real, real)             \
  static_assert(offsetof(Ours, ours) == offsetof(Real, real)); \
  static_assert(sizeof(Ours::ours) == sizeof(Real::real));

static_assert(sizeof(CuMemLocation) == sizeof(CUmemLocation));
FOREBAY_TEST_FIELD(CuMemLocation, type, CUmemLocation, type)
FOREBAY_TEST_FIELD(CuMemLocation, id, CUmemLocation, id)

static_assert(sizeof(CuMemAccessDesc) == sizeof(CUmemAccessDesc));
FOREBAY_TEST_FIELD(CuMemAccessDesc, location, CUmemAccessDesc, location)
FOREBAY_TEST_FIELD(CuMemAccessDesc, flags, CUmemAccessDesc, flags)

static_assert(sizeof(CuMemAllocationProp) == sizeof(CUmemAllocationProp));
FOREBAY_TEST_FIELD(CuMemAllocationProp, type, CUmemAllocationProp, type)
FOREBAY_TEST_FIELD(CuMemAllocationProp, requested_handle_types, CUmemAllocationProp, requestedHandleTypes)
FOREBAY_TEST_FIELD(CuMemAllocationProp, location, CUmemAllocationProp, location)
FOREBAY_TEST_FIELD(CuMemAllocationProp, win32_handle_meta_data, CUmemAllocationProp, win32HandleMetaData)
FOREBAY_TEST_FIELD(CuMemAllocationProp, flags, CUmemAllocationProp, allocFlags)
FOREBAY_TEST_FIELD(CuMemAllocationProp, flags.compression_type, CUmemAllocationProp,
                   allocFlags.compressionType)
FOREBAY_TEST_FIELD(CuMemAllocationProp, flags.gpu_direct_rdma_capable, CUmemAllocationProp,
                   allocFlags.gpuDirectRDMACapable)
FOREBAY_TEST_FIELD(CuMemAllocationProp, flags.usage, CUmemAllocationProp, allocFlags.usage)

static_assert(sizeof(CuMemPoolProps) == sizeof(CUmemPoolProps));
FOREBAY_TEST_FIELD(CuMemPoolProps, type, CUmemPoolProps, allocType)
FOREBAY_TEST_FIELD(CuMemPoolProps, handle_types, CUmemPoolProps, handleTypes)
FOREBAY_TEST_FIELD(CuMemPoolProps, location, CUmemPoolProps, location)
FOREBAY_TEST_FIELD(CuMemPoolProps, win32_security_attributes, CUmemPoolProps, win32SecurityAttributes)
FOREBAY_TEST_FIELD(CuMemPoolProps, max_bytes, CUmemPoolProps, maxSize)
FOREBAY_TEST_FIELD(CuMemPoolProps, usage, CUmemPoolProps, usage)

static_assert(sizeof(CuGraphEdgeData) == sizeof(CUgraphEdgeData));

static_assert(sizeof(CuLaunchAttributeValue) == sizeof(CUlaunchAttributeValue));
FOREBAY_TEST_FIELD(CuLaunchAttributeValue, cooperative, CUlaunchAttributeValue, cooperative)
FOREBAY_TEST_FIELD(CuLaunchAttributeValue, priority, CUlaunchAttributeValue, priority)
FOREBAY_TEST_FIELD(CuLaunchAttributeValue, cluster, CUlaunchAttributeValue, clusterDim)
static_assert(sizeof(CuLaunchAttribute) == sizeof(CUlaunchAttribute));
FOREBAY_TEST_FIELD(CuLaunchAttribute, id, CUlaunchAttribute, id)
FOREBAY_TEST_FIELD(CuLaunchAttribute, value, CUlaunchAttribute, value)

static_assert(sizeof(CuLaunchConfig) == sizeof(CUlaunchConfig));
FOREBAY_TEST_FIELD(CuLaunchConfig, grid_x, CUlaunchConfig, gridDimX)
FOREBAY_TEST_FIELD(CuLaunchConfig, grid_z, CUlaunchConfig, gridDimZ)
FOREBAY_TEST_FIELD(CuLaunchConfig, block_x, CUlaunchConfig, blockDimX)
FOREBAY_TEST_FIELD(CuLaunchConfig, block_z, CUlaunchConfig, blockDimZ)
FOREBAY_TEST_FIELD(CuLaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes)
FOREBAY_TEST_FIELD(CuLaunchConfig, stream, CUlaunchConfig, hStream)
FOREBAY_TEST_FIELD(CuLaunchConfig, attributes, CUlaunchConfig, attrs)
FOREBAY_TEST_FIELD(CuLaunchConfig, attribute_count, CUlaunchConfig, numAttrs)
#undef FOREBAY_TEST_FIELD

TEST(CudaAbi, StreamsWithANumberHaveTheDriversNumber) {
  EXPECT_EQ(static_cast<void*>(legacy_stream()), static_cast<void*>(CU_STREAM_LEGACY));
  EXPECT_EQ(static_cast<void*>(per_thread_stream()), static_cast<void*>(CU_STREAM_PER_THREAD));
}

// The header maps each name to its newest symbol by macro, and so must the last row of the name.
TEST(CudaAbi, TheNewestRowOfANameIsWhatTheHeaderCallsByIt) {
  std::map<std::string, std::string> newest;
  for (const EntryPoint& row : kEntryPoints) newest[row.name] = row.symbol;

  EXPECT_LE(kInterfaceVersion, CUDA_VERSION);
  if (CUDA_VERSION != kInterfaceVersion) {
    GTEST_SKIP() << "the header is of " << CUDA_VERSION << " and may have newer symbols than those of "
                 << kInterfaceVersion << ", from which the table was written";
  }
#define FOREBAY_TEST_TEXT(text) #text
#define FOREBAY_TEST_NEWEST(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  {#name, FOREBAY_TEST_TEXT(name)},
  static const std::map<std::string, std::string> kHeader = {FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_TEST_NEWEST)};
#undef FOREBAY_TEST_NEWEST
  EXPECT_EQ(kHeader.size(), newest.size());
  for (const auto& [name, symbol] : kHeader) {
    // The header leaves these names to their first interfaces: the newest takes different arguments.
    if (name == "cuCtxGetDevice" || name == "cuCtxSynchronize" || name == "cuStreamGetCtx") continue;
    EXPECT_EQ(newest[name], symbol) << name;
  }
}

TEST(CudaAbi, RowsOfANameAreTogetherAndAscend) {
  std::map<std::string, int> version;
  std::string last;
  for (const EntryPoint& row : kEntryPoints) {
    if (row.name != last) {
      EXPECT_EQ(version.count(row.name), 0u) << row.name << " comes in two places";
    }
    EXPECT_GT(row.version, version[row.name]) << row.symbol;
    version[row.name] = row.version;
    last = row.name;
    EXPECT_EQ(row.variant_symbol != nullptr, row.variant != StreamVariant::kNone) << row.symbol;
    EXPECT_LE(row.version, kInterfaceVersion);
  }
}

TEST(CudaAbi, IndexesPointToTheirRows) {
  EXPECT_STREQ(kEntryPoints[cuInit_index].symbol, "cuInit");
  EXPECT_STREQ(kEntryPoints[cuMemAlloc_v2_index].symbol, "cuMemAlloc_v2");
  EXPECT_STREQ(kEntryPoints[cuLaunchKernelEx_index].symbol, "cuLaunchKernelEx");
  EXPECT_EQ(cuLaunchKernelEx_index + 1, kEntryPointCount);
}

}  // namespace
}  // namespace forebay::cuda
