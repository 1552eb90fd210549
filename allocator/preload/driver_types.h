/* The CUDA driver's types and result codes that the preload passes on. They are C, because the front end is
   C, and have the sizes of cuda.h, because they are passed unchanged. tests/allocator/preload compares them
   with tests/fakes/cuda/abi.h. */
#ifndef FOREBAY_PRELOAD_DRIVER_TYPES_H
#define FOREBAY_PRELOAD_DRIVER_TYPES_H

#include <stddef.h>
#include <stdint.h>

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
  kDriverNotSupported = 801
};

/* As cuDriverGetVersion counts. The interfaces of all hooked calls are known up to this version. */
enum { kKnownInterfaceVersion = 13000 };

/* A flag of cuGetProcAddress. */
enum { kProcAddressPerThreadFlag = 2 };

/* Default streams, which have a number instead of an object. */
#define DRIVER_LEGACY_STREAM ((DriverStream)(uintptr_t)1)
#define DRIVER_PER_THREAD_STREAM ((DriverStream)(uintptr_t)2)

#endif
