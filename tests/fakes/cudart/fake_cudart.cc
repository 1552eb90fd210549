#include "tests/fakes/cudart/fake_cudart.h"

#include <dlfcn.h>

#include <mutex>
#include <vector>

#include "tests/fakes/cuda/abi.h"

namespace {

using namespace forebay::cuda;  // NOLINT: this file is a caller of that interface and nothing else.

// The driver functions that the runtime calls: X(symbol).
#define FAKE_CUDART_CALLED(X)   \
  X(cuInit)                     \
  X(cuGetErrorName)             \
  X(cuGetErrorString)           \
  X(cuDriverGetVersion)         \
  X(cuDeviceGetCount)           \
  X(cuDevicePrimaryCtxRetain)   \
  X(cuDevicePrimaryCtxReset_v2) \
  X(cuCtxSetCurrent)            \
  X(cuCtxGetCurrent)            \
  X(cuCtxGetDevice)             \
  X(cuCtxSynchronize)           \
  X(cuMemGetInfo_v2)            \
  X(cuMemAlloc_v2)              \
  X(cuMemFree_v2)               \
  X(cuMemAllocAsync)            \
  X(cuMemFreeAsync)             \
  X(cuMemHostAlloc)             \
  X(cuMemFreeHost)              \
  X(cuMemcpy)                   \
  X(cuMemcpyAsync)              \
  X(cuMemsetD8_v2)              \
  X(cuMemsetD8Async)            \
  X(cuStreamCreate)             \
  X(cuStreamDestroy_v2)         \
  X(cuStreamQuery)              \
  X(cuStreamSynchronize)        \
  X(cuStreamWaitEvent)          \
  X(cuLaunchHostFunc)           \
  X(cuEventCreate)              \
  X(cuEventDestroy_v2)          \
  X(cuEventRecord)              \
  X(cuEventQuery)               \
  X(cuEventSynchronize)         \
  X(cuEventElapsedTime)

// Two tables: one for legacy callers, one for callers of the _ptsz functions.
struct Functions {
#define FAKE_CUDART_MEMBER(symbol) symbol##_function* symbol = nullptr;
  FAKE_CUDART_CALLED(FAKE_CUDART_MEMBER)
#undef FAKE_CUDART_MEMBER
};

struct Runtime {
  cudaError_t state = cudaSuccess;  // The result of the start, for good.
  cuGetProcAddress_v2_function* get = nullptr;
  Functions legacy;
  Functions per_thread;
};

thread_local cudaError_t last_error = cudaSuccess;
thread_local int wanted_device = 0;

constexpr int kRuntimeVersion = 13000;

// Asks for every row of the table, as the real one asks for all it knows, and keeps the functions that it
// calls.
void query(const Runtime& runtime, std::uint64_t flags, Functions* functions) {
  for (std::size_t i = 0; i < kEntryPointCount; ++i) {
    const EntryPoint& row = kEntryPoints[i];
    const int version = flags == kProcAddressPerThreadStream && row.variant != StreamVariant::kNone
                            ? row.variant_version
                            : row.version;
    void* found = nullptr;
    if (runtime.get(row.name, &found, version, flags, nullptr) != CuResult::kSuccess) continue;
#define FAKE_CUDART_KEEP(kept) \
  if (i == kept##_index) functions->kept = reinterpret_cast<kept##_function*>(found);
    FAKE_CUDART_CALLED(FAKE_CUDART_KEEP)
#undef FAKE_CUDART_KEEP
  }
}

Runtime start() {
  Runtime runtime;
  runtime.state = cudaErrorInsufficientDriver;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return runtime;
  runtime.get = reinterpret_cast<cuGetProcAddress_v2_function*>(::dlsym(library, "cuGetProcAddress_v2"));
  if (runtime.get == nullptr) return runtime;
  query(runtime, kProcAddressDefault, &runtime.legacy);
  query(runtime, kProcAddressPerThreadStream, &runtime.per_thread);
#define FAKE_CUDART_CHECK(symbol) \
  if (runtime.legacy.symbol == nullptr || runtime.per_thread.symbol == nullptr) return runtime;
  FAKE_CUDART_CALLED(FAKE_CUDART_CHECK)
#undef FAKE_CUDART_CHECK
  runtime.state = static_cast<cudaError_t>(runtime.legacy.cuInit(0));
  return runtime;
}

const Runtime& runtime() {
  static const Runtime started = start();
  return started;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

// The thread's device has its primary context retained, once per process, and current.
cudaError_t enter() {
  const Runtime& loaded = runtime();
  if (loaded.state != cudaSuccess) return loaded.state;
  CuContext current = nullptr;
  CuResult result = loaded.legacy.cuCtxGetCurrent(&current);
  if (result != CuResult::kSuccess) return static_cast<cudaError_t>(result);
  CuDevice device = -1;
  if (current != nullptr && loaded.legacy.cuCtxGetDevice(&device) == CuResult::kSuccess &&
      device == wanted_device) {
    return cudaSuccess;
  }
  static std::mutex mutex;
  static std::vector<CuContext>* const contexts = new std::vector<CuContext>;  // Outlives the last caller.
  const std::lock_guard<std::mutex> lock(mutex);
  if (contexts->size() <= static_cast<std::size_t>(wanted_device)) {
    contexts->resize(static_cast<std::size_t>(wanted_device) + 1);
  }
  CuContext& context = (*contexts)[static_cast<std::size_t>(wanted_device)];
  if (context == nullptr) {
    result = loaded.legacy.cuDevicePrimaryCtxRetain(&context, wanted_device);
    if (result != CuResult::kSuccess) return static_cast<cudaError_t>(result);
  }
  return static_cast<cudaError_t>(loaded.legacy.cuCtxSetCurrent(context));
}

// Calls the driver's function in the context of the thread's device.
template <typename Function, typename... Arguments>
cudaError_t call_of(const Functions& functions, Function* Functions::*function, Arguments... arguments) {
  const cudaError_t entered = enter();
  if (entered != cudaSuccess) return remember(entered);
  return remember(static_cast<cudaError_t>((functions.*function)(arguments...)));
}
template <typename Function, typename... Arguments>
cudaError_t call(Function* Functions::*function, Arguments... arguments) {
  return call_of(runtime().legacy, function, arguments...);
}
template <typename Function, typename... Arguments>
cudaError_t call_per_thread(Function* Functions::*function, Arguments... arguments) {
  return call_of(runtime().per_thread, function, arguments...);
}

CuDevicePtr device(const void* address) {
  return reinterpret_cast<CuDevicePtr>(address);
}
CuDevicePtr* device(void** address) {
  return reinterpret_cast<CuDevicePtr*>(address);
}
CuStream driver(cudaStream_t stream) {
  return reinterpret_cast<CuStream>(stream);
}
CuEvent driver(cudaEvent_t event) {
  return reinterpret_cast<CuEvent>(event);
}

bool known(int kind) {
  return kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault;
}

}  // namespace

// The shared library exports these; the archive keeps them within the program that links it.
#ifdef FAKE_CUDART_SHARED
#define FAKE_CUDART_EXPORT extern "C" [[gnu::visibility("default")]]
#else
#define FAKE_CUDART_EXPORT extern "C" [[gnu::visibility("hidden")]]
#endif

FAKE_CUDART_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  if (error == cudaErrorInsufficientDriver) return "cudaErrorInsufficientDriver";
  const char* text = nullptr;
  if (runtime().legacy.cuGetErrorName != nullptr)
    runtime().legacy.cuGetErrorName(static_cast<CuResult>(error), &text);
  return text != nullptr ? text : "unrecognized error code";
}
FAKE_CUDART_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorInsufficientDriver)
    return "CUDA driver version is insufficient for CUDA runtime version";
  const char* text = nullptr;
  if (runtime().legacy.cuGetErrorString != nullptr) {
    runtime().legacy.cuGetErrorString(static_cast<CuResult>(error), &text);
  }
  return text != nullptr ? text : "unrecognized error code";
}
FAKE_CUDART_EXPORT cudaError_t cudaGetLastError() {
  const cudaError_t result = last_error;
  last_error = cudaSuccess;
  return result;
}
FAKE_CUDART_EXPORT cudaError_t cudaPeekAtLastError() {
  return last_error;
}
FAKE_CUDART_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  if (version == nullptr) return remember(cudaErrorInvalidValue);
  *version = kRuntimeVersion;
  return cudaSuccess;
}
// Without a driver the version is 0, and that is no error.
FAKE_CUDART_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  if (version == nullptr) return remember(cudaErrorInvalidValue);
  *version = 0;
  if (runtime().legacy.cuDriverGetVersion == nullptr) return cudaSuccess;
  return remember(static_cast<cudaError_t>(runtime().legacy.cuDriverGetVersion(version)));
}
FAKE_CUDART_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                                unsigned version, unsigned long long flags,
                                                                int* status) {
  if (runtime().get == nullptr) return remember(cudaErrorInsufficientDriver);
  CuProcAddressQueryResult found{};
  const CuResult result = runtime().get(name, function, static_cast<int>(version), flags, &found);
  if (status != nullptr) *status = static_cast<int>(found);
  return remember(static_cast<cudaError_t>(result));
}

FAKE_CUDART_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  if (runtime().state != cudaSuccess) return remember(runtime().state);
  return remember(static_cast<cudaError_t>(runtime().legacy.cuDeviceGetCount(count)));
}
FAKE_CUDART_EXPORT cudaError_t cudaGetDevice(int* device) {
  if (device == nullptr) return remember(cudaErrorInvalidValue);
  *device = wanted_device;
  return remember(runtime().state);
}
FAKE_CUDART_EXPORT cudaError_t cudaSetDevice(int device) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess) return counted;
  if (device < 0 || device >= count) return remember(cudaErrorInvalidDevice);
  wanted_device = device;
  return remember(enter());
}
FAKE_CUDART_EXPORT cudaError_t cudaDeviceSynchronize() {
  return call(&Functions::cuCtxSynchronize);
}
FAKE_CUDART_EXPORT cudaError_t cudaDeviceReset() {
  return call(&Functions::cuDevicePrimaryCtxReset_v2, wanted_device);
}
FAKE_CUDART_EXPORT cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call(&Functions::cuMemGetInfo_v2, free, total);
}

// Nothing is asked of the driver for no bytes: the runtime hands out a null pointer.
FAKE_CUDART_EXPORT cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  if (address == nullptr) return remember(cudaErrorInvalidValue);
  *address = nullptr;
  if (bytes == 0) return cudaSuccess;
  return call(&Functions::cuMemAlloc_v2, device(address), bytes);
}
FAKE_CUDART_EXPORT cudaError_t cudaFree(void* address) {
  return call(&Functions::cuMemFree_v2, device(address));
}
FAKE_CUDART_EXPORT cudaError_t cudaMallocAsync(void** address, std::size_t bytes, cudaStream_t stream) {
  return call(&Functions::cuMemAllocAsync, device(address), bytes, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaMallocAsync_ptsz(void** address, std::size_t bytes, cudaStream_t stream) {
  return call_per_thread(&Functions::cuMemAllocAsync, device(address), bytes, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  return call(&Functions::cuMemFreeAsync, device(address), driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaFreeAsync_ptsz(void* address, cudaStream_t stream) {
  return call_per_thread(&Functions::cuMemFreeAsync, device(address), driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaMallocHost(void** address, std::size_t bytes) {
  return call(&Functions::cuMemHostAlloc, address, bytes, kHostAllocPortable);
}
FAKE_CUDART_EXPORT cudaError_t cudaFreeHost(void* address) {
  return address == nullptr ? cudaSuccess : call(&Functions::cuMemFreeHost, address);
}

FAKE_CUDART_EXPORT cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes, int kind) {
  if (!known(kind)) return remember(cudaErrorInvalidValue);
  return call(&Functions::cuMemcpy, device(target), device(source), bytes);
}
FAKE_CUDART_EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, int kind,
                                               cudaStream_t stream) {
  if (!known(kind)) return remember(cudaErrorInvalidValue);
  return call(&Functions::cuMemcpyAsync, device(target), device(source), bytes, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaMemcpyAsync_ptsz(void* target, const void* source, std::size_t bytes,
                                                    int kind, cudaStream_t stream) {
  if (!known(kind)) return remember(cudaErrorInvalidValue);
  return call_per_thread(&Functions::cuMemcpyAsync, device(target), device(source), bytes, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaMemset(void* target, int value, std::size_t bytes) {
  return call(&Functions::cuMemsetD8_v2, device(target), static_cast<unsigned char>(value), bytes);
}
FAKE_CUDART_EXPORT cudaError_t cudaMemsetAsync(void* target, int value, std::size_t bytes,
                                               cudaStream_t stream) {
  return call(&Functions::cuMemsetD8Async, device(target), static_cast<unsigned char>(value), bytes,
              driver(stream));
}

FAKE_CUDART_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call(&Functions::cuStreamCreate, reinterpret_cast<CuStream*>(stream), flags);
}
FAKE_CUDART_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return call(&Functions::cuStreamCreate, reinterpret_cast<CuStream*>(stream), kStreamDefault);
}
FAKE_CUDART_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call(&Functions::cuStreamDestroy_v2, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call(&Functions::cuStreamQuery, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call(&Functions::cuStreamSynchronize, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaStreamSynchronize_ptsz(cudaStream_t stream) {
  return call_per_thread(&Functions::cuStreamSynchronize, driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return call(&Functions::cuStreamWaitEvent, driver(stream), driver(event), flags);
}
FAKE_CUDART_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*),
                                                  void* argument) {
  return call(&Functions::cuLaunchHostFunc, driver(stream), function, argument);
}

FAKE_CUDART_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call(&Functions::cuEventCreate, reinterpret_cast<CuEvent*>(event), flags);
}
FAKE_CUDART_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return call(&Functions::cuEventCreate, reinterpret_cast<CuEvent*>(event), kEventDefault);
}
FAKE_CUDART_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call(&Functions::cuEventDestroy_v2, driver(event));
}
FAKE_CUDART_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call(&Functions::cuEventRecord, driver(event), driver(stream));
}
FAKE_CUDART_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call(&Functions::cuEventQuery, driver(event));
}
FAKE_CUDART_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call(&Functions::cuEventSynchronize, driver(event));
}
FAKE_CUDART_EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call(&Functions::cuEventElapsedTime, milliseconds, driver(start), driver(end));
}
