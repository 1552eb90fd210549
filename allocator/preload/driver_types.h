/* The CUDA driver's types and result codes as far as the preload passes them on: C, because the front end is,
   and sized as in cuda.h, because they go through unchanged. tests/allocator/preload holds them against
   runtime/device/cuda/abi.h. */
#ifndef FOREBAY_PRELOAD_DRIVER_TYPES_H
#define FOREBAY_PRELOAD_DRIVER_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned DriverResult;
typedef int DriverDevice;
typedef unsigned long long DriverAddress;
typedef unsigned long long DriverMemory; /* What cuMemCreate hands out. */
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
  kDriverNotSupported = 801
};

/* Versions as cuDriverGetVersion counts. Up to here we know the interface of every call that is hooked. */
enum { kKnownInterfaceVersion = 13000 };

/* Of cuGetProcAddress. */
enum { kProcAddressPerThreadFlag = 2 };

/* Streams that have a number instead of an object. */
#define DRIVER_LEGACY_STREAM ((DriverStream)(uintptr_t)1)
#define DRIVER_PER_THREAD_STREAM ((DriverStream)(uintptr_t)2)

#endif
