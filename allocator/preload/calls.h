/* The driver's calls that the preload knows: the hooked ones, which a program reaches through the front end,
   and those that the core calls itself. The lists are X-macros: each takes a macro and expands it once per
   row.

   Use `name` and `symbol` only with # and ##, because <cuda.h> defines some of them as macros. */
#ifndef FOREBAY_PRELOAD_CALLS_H
#define FOREBAY_PRELOAD_CALLS_H

#include <stddef.h>
#include <stdint.h>

/* --- the driver's types and result codes ---

   They are C, because the front end is C, and have the sizes of cuda.h, because they are passed unchanged.
   tests/allocator/preload compares them with tests/fakes/cuda/abi.h. */

typedef unsigned DriverResult;
typedef int DriverDevice;
typedef unsigned long long DriverAddress;
typedef unsigned long long DriverMemory; /* A handle of cuMemCreate. */
typedef struct DriverContextObject* DriverContext;
typedef struct DriverStreamObject* DriverStream;
typedef struct DriverPoolObject* DriverPool;
typedef struct DriverGraphObject* DriverGraph;
typedef struct DriverGraphNodeObject* DriverGraphNode;

typedef struct DriverIpcHandle {
  char bytes[64];
} DriverIpcHandle;

typedef struct DriverLocation {
  unsigned type;
  int id;
} DriverLocation;

typedef struct DriverAccess {
  DriverLocation location;
  unsigned flags;
} DriverAccess;

typedef struct DriverMemoryProperties {
  unsigned type;
  unsigned handle_types;
  DriverLocation location;
  void* win32_handle_meta_data;
  unsigned char compression_type;
  unsigned char gpu_direct_rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
} DriverMemoryProperties;

enum {
  kDriverSuccess = 0,
  kDriverInvalidValue = 1,
  kDriverOutOfMemory = 2,
  kDriverNotInitialized = 3,
  kDriverDeinitialized = 4,
  kDriverNoDevice = 100,
  kDriverInvalidContext = 201,
  kDriverMapFailed = 205,
  kDriverOperatingSystem = 304,
  kDriverNotFound = 500,
  kDriverNotReady = 600,
  kDriverNotSupported = 801,
  kDriverCaptureErrors = 900, /* From here to the next: a stream is captured, or is not. */
  kDriverCaptureErrorsEnd = 908
};

/* As cuDriverGetVersion counts. The interfaces of all hooked calls are known up to this version. */
enum { kKnownInterfaceVersion = 13000 };

/* Attributes of addresses. */
enum { kRangeStart = 11, kRangeSize = 12 };

/* A flag of cuGetProcAddress. */
enum { kProcAddressPerThreadFlag = 2 };

/* Default streams, which have a number instead of an object. */
#define DRIVER_LEGACY_STREAM ((DriverStream)(uintptr_t)1)
#define DRIVER_PER_THREAD_STREAM ((DriverStream)(uintptr_t)2)

/* --- the calls --- */

/* The default stream that a null stream means. cuGetProcAddress tells two symbols of one name and version
   apart by it: LEGACY and THREAD are such a pair; ANY: the call has no pair. */
enum { kNullStreamANY = 0, kNullStreamLEGACY = 1, kNullStreamTHREAD = 2 };

/* X(name, symbol, version, NULL_STREAM, (parameters), (arguments)); all return DriverResult.
     name     the name that cuGetProcAddress is called with
     symbol   the name that the driver exports, and so does the front end
     version  the lowest version for which cuGetProcAddress returns this symbol
   From the first row of a name on, every interface of that name is listed. Older interfaces have 32-bit
   parameters and are not hooked. Doors: the calls through which a program reaches the driver. */
/* clang-format off */
#define FOREBAY_PRELOAD_DOORS(X) \
  X(cuInit, cuInit, 2000, ANY, (unsigned flags), (flags)) \
  X(cuGetProcAddress, cuGetProcAddress, 11030, ANY, (const char* name, void** function, int version, uint64_t flags), (name, function, version, flags)) \
  X(cuGetProcAddress, cuGetProcAddress_v2, 12000, ANY, (const char* name, void** function, int version, uint64_t flags, unsigned* found), (name, function, version, flags, found))

#define FOREBAY_PRELOAD_REPLACED(X) \
  /* memory */ \
  X(cuMemAlloc, cuMemAlloc_v2, 3020, ANY, (DriverAddress* address, size_t bytes), (address, bytes)) \
  X(cuMemAllocPitch, cuMemAllocPitch_v2, 3020, ANY, (DriverAddress* address, size_t* pitch, size_t width_bytes, size_t height, unsigned element_bytes), (address, pitch, width_bytes, height, element_bytes)) \
  X(cuMemAllocManaged, cuMemAllocManaged, 6000, ANY, (DriverAddress* address, size_t bytes, unsigned flags), (address, bytes, flags)) \
  X(cuMemFree, cuMemFree_v2, 3020, ANY, (DriverAddress address), (address)) \
  X(cuMemAllocAsync, cuMemAllocAsync, 11020, LEGACY, (DriverAddress* address, size_t bytes, DriverStream stream), (address, bytes, stream)) \
  X(cuMemAllocAsync, cuMemAllocAsync_ptsz, 11020, THREAD, (DriverAddress* address, size_t bytes, DriverStream stream), (address, bytes, stream)) \
  X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, LEGACY, (DriverAddress* address, size_t bytes, DriverPool pool, DriverStream stream), (address, bytes, pool, stream)) \
  X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz, 11020, THREAD, (DriverAddress* address, size_t bytes, DriverPool pool, DriverStream stream), (address, bytes, pool, stream)) \
  X(cuMemFreeAsync, cuMemFreeAsync, 11020, LEGACY, (DriverAddress address, DriverStream stream), (address, stream)) \
  X(cuMemFreeAsync, cuMemFreeAsync_ptsz, 11020, THREAD, (DriverAddress address, DriverStream stream), (address, stream)) \
  X(cuMemGetInfo, cuMemGetInfo_v2, 3020, ANY, (size_t* free_bytes, size_t* total_bytes), (free_bytes, total_bytes)) \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, ANY, (size_t* bytes, DriverDevice device), (bytes, device)) \
  /* pools */ \
  X(cuMemPoolGetAttribute, cuMemPoolGetAttribute, 11020, ANY, (DriverPool pool, unsigned attribute, void* value), (pool, attribute, value)) \
  X(cuMemPoolSetAttribute, cuMemPoolSetAttribute, 11020, ANY, (DriverPool pool, unsigned attribute, void* value), (pool, attribute, value)) \
  X(cuMemPoolTrimTo, cuMemPoolTrimTo, 11020, ANY, (DriverPool pool, size_t keep_bytes), (pool, keep_bytes)) \
  X(cuDeviceSetMemPool, cuDeviceSetMemPool, 11020, ANY, (DriverDevice device, DriverPool pool), (device, pool)) \
  X(cuMemSetMemPool, cuMemSetMemPool, 13000, ANY, (void* location, unsigned type, DriverPool pool), (location, type, pool)) \
  /* attributes of addresses */ \
  X(cuPointerGetAttribute, cuPointerGetAttribute, 4000, ANY, (void* data, unsigned attribute, DriverAddress address), (data, attribute, address)) \
  X(cuPointerGetAttributes, cuPointerGetAttributes, 7000, ANY, (unsigned count, unsigned* attributes, void** data, DriverAddress address), (count, attributes, data, address)) \
  X(cuPointerSetAttribute, cuPointerSetAttribute, 6000, ANY, (const void* value, unsigned attribute, DriverAddress address), (value, attribute, address)) \
  X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020, ANY, (DriverAddress* base, size_t* bytes, DriverAddress address), (base, bytes, address)) \
  /* memory made known outside the process */ \
  X(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010, ANY, (DriverIpcHandle* handle, DriverAddress address), (handle, address)) \
  X(cuIpcOpenMemHandle, cuIpcOpenMemHandle, 4010, ANY, (DriverAddress* address, DriverIpcHandle handle, unsigned flags), (address, handle, flags)) \
  X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, 11000, ANY, (DriverAddress* address, DriverIpcHandle handle, unsigned flags), (address, handle, flags)) \
  X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010, ANY, (DriverAddress address), (address)) \
  X(cuMemCreate, cuMemCreate, 10020, ANY, (DriverMemory* memory, size_t bytes, const DriverMemoryProperties* properties, unsigned long long flags), (memory, bytes, properties, flags)) \
  X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, ANY, (DriverMemory* memory, void* address), (memory, address)) \
  X(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange, 11070, ANY, (void* handle, DriverAddress address, size_t bytes, unsigned type, unsigned long long flags), (handle, address, bytes, type, flags)) \
  X(cuMulticastBindAddr, cuMulticastBindAddr, 12010, ANY, (DriverMemory multicast, size_t multicast_offset, DriverAddress address, size_t bytes, unsigned long long flags), (multicast, multicast_offset, address, bytes, flags)) \
  /* contexts */ \
  X(cuCtxDestroy, cuCtxDestroy_v2, 4000, ANY, (DriverContext context), (context)) \
  X(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, 4000, ANY, (DriverContext peer, unsigned flags), (peer, flags)) \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, ANY, (DriverContext* context, DriverDevice device), (context, device)) \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease, 7000, ANY, (DriverDevice device), (device)) \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, ANY, (DriverDevice device), (device)) \
  X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset, 7000, ANY, (DriverDevice device), (device)) \
  X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 11000, ANY, (DriverDevice device), (device)) \
  /* streams */ \
  X(cuStreamDestroy, cuStreamDestroy_v2, 4000, ANY, (DriverStream stream), (stream)) \
  X(cuStreamBeginCapture, cuStreamBeginCapture, 10000, LEGACY, (DriverStream stream), (stream)) \
  X(cuStreamBeginCapture, cuStreamBeginCapture_ptsz, 10000, THREAD, (DriverStream stream), (stream)) \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010, LEGACY, (DriverStream stream, unsigned mode), (stream, mode)) \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2_ptsz, 10010, THREAD, (DriverStream stream, unsigned mode), (stream, mode)) \
  X(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph, 12030, LEGACY, (DriverStream stream, DriverGraph graph, const DriverGraphNode* dependencies, const void* edges, size_t count, unsigned mode), (stream, graph, dependencies, edges, count, mode)) \
  X(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz, 12030, THREAD, (DriverStream stream, DriverGraph graph, const DriverGraphNode* dependencies, const void* edges, size_t count, unsigned mode), (stream, graph, dependencies, edges, count, mode)) \
  X(cuStreamEndCapture, cuStreamEndCapture, 10000, LEGACY, (DriverStream stream, DriverGraph* graph), (stream, graph)) \
  X(cuStreamEndCapture, cuStreamEndCapture_ptsz, 10000, THREAD, (DriverStream stream, DriverGraph* graph), (stream, graph))

#define FOREBAY_PRELOAD_HOOKED(X) FOREBAY_PRELOAD_DOORS(X) FOREBAY_PRELOAD_REPLACED(X)

/* X(symbol, (parameters)): calls that the core makes itself, to the driver that the program uses. Without a needed
   one nothing is replaced. */
#define FOREBAY_PRELOAD_NEEDED(X) \
  X(cuCtxGetCurrent, (DriverContext* context)) \
  X(cuCtxSetCurrent, (DriverContext context)) \
  X(cuCtxGetDevice, (DriverDevice* device)) \
  X(cuCtxSynchronize, (void)) \
  X(cuDevicePrimaryCtxGetState, (DriverDevice device, unsigned* flags, int* active)) \
  X(cuStreamGetCtx, (DriverStream stream, DriverContext* context)) \
  X(cuStreamQuery, (DriverStream stream)) \
  X(cuStreamSynchronize, (DriverStream stream)) \
  X(cuStreamIsCapturing, (DriverStream stream, unsigned* status)) \
  X(cuMemAddressReserve, (DriverAddress* address, size_t bytes, size_t alignment, DriverAddress hint, unsigned long long flags)) \
  X(cuMemAddressFree, (DriverAddress address, size_t bytes)) \
  X(cuMemMap, (DriverAddress address, size_t bytes, size_t offset, DriverMemory memory, unsigned long long flags)) \
  X(cuMemUnmap, (DriverAddress address, size_t bytes)) \
  X(cuMemRelease, (DriverMemory memory)) \
  X(cuMemSetAccess, (DriverAddress address, size_t bytes, const DriverAccess* access, size_t count)) \
  X(cuMemExportToShareableHandle, (void* shareable, DriverMemory memory, unsigned type, unsigned long long flags)) \
  X(cuMemImportFromShareableHandle, (DriverMemory* memory, void* os_handle, unsigned type))

#define FOREBAY_PRELOAD_OPTIONAL(X) \
  X(cuDeviceGetDefaultMemPool, (DriverPool* pool, DriverDevice device)) \
  X(cuDeviceGetMemPool, (DriverPool* pool, DriverDevice device)) \
  X(cuDeviceGetCount, (int* count)) \
  X(cuDeviceCanAccessPeer, (int* can_access, DriverDevice device, DriverDevice peer)) \
  X(cuGraphDestroy, (DriverGraph graph)) \
  X(cuThreadExchangeStreamCaptureMode, (unsigned* mode)) \
  X(cuStreamIsCapturing_ptsz, (DriverStream stream, unsigned* status))

#define FOREBAY_PRELOAD_USED(X) FOREBAY_PRELOAD_NEEDED(X) FOREBAY_PRELOAD_OPTIONAL(X)

/* clang-format on */

/* Indices, function types, and one table for each list. A function that the driver lacks is null. */
#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) kHooked_##symbol,
enum { FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW) kHookedCount };
#undef FOREBAY_PRELOAD_ROW

#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) \
  typedef DriverResult Driver_##symbol parameters;
FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
#define FOREBAY_PRELOAD_ROW(symbol, parameters) typedef DriverResult Driver_##symbol parameters;
FOREBAY_PRELOAD_USED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW

typedef struct HookedCalls {
#define FOREBAY_PRELOAD_ROW(name, symbol, version, NULL_STREAM, parameters, arguments) \
  Driver_##symbol* symbol;
  FOREBAY_PRELOAD_HOOKED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
} HookedCalls;

typedef struct UsedCalls {
#define FOREBAY_PRELOAD_ROW(symbol, parameters) Driver_##symbol* symbol;
  FOREBAY_PRELOAD_USED(FOREBAY_PRELOAD_ROW)
#undef FOREBAY_PRELOAD_ROW
} UsedCalls;

/* The front end hands this to the core once cuInit has succeeded. */
typedef struct PreloadStart {
  unsigned bytes; /* Size of this structure. Front end and core must be of one build. */
  unsigned hooked_count;
  const HookedCalls* real; /* The driver's own functions. */
  const UsedCalls* used;
  const void* hooked_dlsym; /* The front end's dlsym. Libraries bound to another one escape the hook. */
  HookedCalls* ours;        /* A copy of `real`, in which the core sets the functions that it replaces. */
} PreloadStart;

/* The core's only entry point for the front end. Returns 0 if `ours` is to be used from now on; any other
   value if nothing is replaced. */
#define FOREBAY_PRELOAD_START_SYMBOL "forebay_preload_start"
#ifdef __cplusplus
extern "C"
#endif
    int
    forebay_preload_start(const PreloadStart* start);
typedef int ForebayPreloadStart(const PreloadStart* start);

#endif
