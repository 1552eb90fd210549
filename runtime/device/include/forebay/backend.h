// Backend: the one seam between forebay and a device. About thirty functions in the terms of the CUDA driver
// API, implemented by `host` (host_backend.h: ordinary memory, worker threads as streams), `cuda`
// (cuda_backend.h: the driver API) and `model` (model_backend.h: books without bytes). The layers above do
// not know which one they run on, and one conformance suite (tests/device/backend_conformance.h) tests all of
// them.
//
// The contract, once for all implementations:
//
// Address space. `reserve` hands out addresses and no memory. `chunk_create` takes physical memory, whole
// multiples of `capabilities().granularity`, charged against the device. `map` puts one whole chunk at
// reserved addresses that hold no mapping yet; the same chunk may be mapped at several addresses at once (an
// alias: the bytes are the same). Reading and writing needs `set_access` first, one call for a contiguous
// range of any number of mappings without a hole. `unmap` takes a range of whole mappings. `chunk_destroy`
// ends the handle; the memory goes back when its last mapping ends too, so a mapped chunk may be destroyed.
// `release` takes exactly a range from `reserve`, without mappings. A call that breaks these rules is refused
// with kInvalidArgument and changes nothing.
//
// Order. Work on one stream runs in the order it was queued; work on different streams is ordered by events
// alone. `event_record` marks a point, and recording again moves it; waiting for or querying an event that
// was never recorded succeeds at once. Queueing does not wait for the device, except when a stream's bounded
// queue is full. Address-space and memory calls are synchronous and do not wait for queued work: unmapping,
// freeing or destroying memory that queued work still uses is a defect of the caller.
//
// Failure. A call that fails has no effect. When queued work fails, later calls of `stream_synchronize`, and
// of `event_synchronize` for events recorded behind it, return that first failure for good.
//
// Threads. Every function may be called from any thread at any time. The function given to `call_host` must
// not call the Backend; implementations detect that and fail the stream with kInternal. One that takes long
// holds back its own stream and no other; with a CUDA driver before 11.7 it may hold back the host functions
// of other streams.
//
// Source: CUDA driver API reference, "Virtual Memory Management", "Stream Management", "Event Management".
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "forebay/status.h"

namespace forebay {

// An address in device memory. On the host backend the host may dereference it; elsewhere it must not.
using DevicePtr = std::byte*;

// Handles are values: copying one copies no resource. A default-constructed handle is null.
struct Stream {
  void* handle = nullptr;  // cuda: a CUstream, so a trainer's own cudaStream_t is used as it is.
  friend constexpr bool operator==(Stream a, Stream b) noexcept { return a.handle == b.handle; }
  friend constexpr bool operator!=(Stream a, Stream b) noexcept { return !(a == b); }
};
struct Event {
  void* handle = nullptr;
  friend constexpr bool operator==(Event a, Event b) noexcept { return a.handle == b.handle; }
  friend constexpr bool operator!=(Event a, Event b) noexcept { return !(a == b); }
};
struct Chunk {
  std::uint64_t handle = 0;
  friend constexpr bool operator==(Chunk a, Chunk b) noexcept { return a.handle == b.handle; }
  friend constexpr bool operator!=(Chunk a, Chunk b) noexcept { return !(a == b); }
};
struct Module {
  void* handle = nullptr;
};
struct Kernel {
  void* handle = nullptr;
};

enum class BackendKind : std::uint8_t { kHost, kCuda, kModel };

struct Capabilities {
  BackendKind kind = BackendKind::kHost;
  char name[64] = {};  // "host", "cuda:0 NVIDIA H200": for messages.
  std::size_t granularity =
      0;  // Bytes; chunk sizes and mapped addresses are multiples of it. A power of two.
  std::size_t memory_bytes = 0;  // The device's capacity, or the budget of the backend.
  bool host_accessible = false;  // The host may dereference device memory.
  int numa_node = -1;            // The NUMA node nearest to the device; -1 when unknown.
  int multiprocessor_count = 0;  // Multiprocessors, from which grids are chosen; 0 on a host.
};

struct MemoryInfo {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

struct Dimensions {
  std::uint32_t x = 1, y = 1, z = 1;
};

// One kernel of a host module: `function` gets the launch's dimensions and, in `arguments`, one pointer per
// kernel argument, as cuLaunchKernel passes them. It runs on the stream's thread.
struct HostKernel {
  const char* name;
  void (*function)(const Dimensions& grid, const Dimensions& block, void* const* arguments);
};

// The argument of load_module. A host backend reads `host_kernels` (an array that ends with a null name); a
// cuda backend reads `image` (cubin, fatbin or PTX). An image for another kind of backend is refused with
// kUnsupported.
struct ModuleImage {
  const HostKernel* host_kernels = nullptr;
  const void* image = nullptr;
  std::size_t image_bytes = 0;
};

using HostFunction = void (*)(void* argument);

class AccessGuard;

class Backend {
 public:
  virtual ~Backend() = default;

  // --- facts ---
  virtual const Capabilities& capabilities() const noexcept = 0;

  // --- address space; sizes and addresses are multiples of granularity ---
  // `alignment` is a power of two; 0 means granularity.
  virtual Result<DevicePtr> reserve(std::size_t bytes, std::size_t alignment) = 0;
  virtual Status release(DevicePtr base, std::size_t bytes) = 0;
  // Errors: kOutOfMemory when the device (or its budget) has less than `bytes` left; the message has both
  // figures.
  virtual Result<Chunk> chunk_create(std::size_t bytes) = 0;
  virtual Status chunk_destroy(Chunk chunk) = 0;
  // Maps the whole of `chunk` at `address`.
  virtual Status map(DevicePtr address, Chunk chunk) = 0;
  virtual Status unmap(DevicePtr address, std::size_t bytes) = 0;
  virtual Status set_access(DevicePtr address, std::size_t bytes) = 0;

  // --- memory ---
  // Plain device memory, aligned to 512 bytes, charged like chunks (rounded to granularity on the host
  // backend).
  virtual Result<DevicePtr> alloc(std::size_t bytes) = 0;
  virtual Status free(DevicePtr address) = 0;
  // Pins ordinary host memory, so that copies to and from it are asynchronous. Whole pages only.
  virtual Status pin(void* address, std::size_t bytes) = 0;
  virtual Status unpin(void* address) = 0;
  virtual MemoryInfo memory_info() = 0;

  // --- copies; either side may be device memory or host memory ---
  // Requires: the ranges do not overlap; both stay valid until the copy has run.
  virtual Status copy_async(void* target, const void* source, std::size_t bytes, Stream stream) = 0;
  // Sets every byte to `value`.
  virtual Status fill_async(DevicePtr target, std::uint8_t value, std::size_t bytes, Stream stream) = 0;

  // --- order ---
  virtual Result<Stream> stream_create() = 0;
  // A stream of which the device prefers the work, where it can: for collectives, which other ranks wait for.
  virtual Result<Stream> urgent_stream_create() { return stream_create(); }
  // Waits for the work of the stream, then ends the stream.
  virtual Status stream_destroy(Stream stream) = 0;
  // The host waits until all work queued so far has run.
  virtual Status stream_synchronize(Stream stream) = 0;
  virtual Result<Event> event_create() = 0;
  // An event for elapsed().
  virtual Result<Event> timed_event_create() { return event_create(); }
  virtual Status event_destroy(Event event) = 0;
  virtual Status event_record(Event event, Stream stream) = 0;
  // True when the last record of the event has been reached (or there was none).
  virtual Result<bool> event_query(Event event) = 0;
  // The host waits for the event.
  virtual Status event_synchronize(Event event) = 0;
  // The time from the last record of `begin` to that of `end`; both were made by timed_event_create().
  // Errors: kInvalidArgument when one was never recorded, kUnavailable when one is not reached yet.
  virtual Result<std::chrono::nanoseconds> elapsed(Event begin, Event end) = 0;
  // Later work on `stream` waits for the event's last record at the time of this call.
  virtual Status stream_wait(Stream stream, Event event) = 0;
  // Runs `function(argument)` on a host thread in stream order.
  virtual Status call_host(Stream stream, HostFunction function, void* argument) = 0;

  // --- launch ---
  virtual Result<Module> load_module(const ModuleImage& image) = 0;
  virtual Status unload_module(Module module) = 0;
  // Errors: kInvalidArgument naming the kernel when the module has none of that name.
  virtual Result<Kernel> get_kernel(Module module, const char* name) = 0;
  // Argument values are copied before this returns: `arguments[i]` points to `argument_bytes[i]` bytes.
  virtual Status launch(Kernel kernel, Dimensions grid, Dimensions block, const void* const* arguments,
                        const std::size_t* argument_bytes, std::size_t argument_count, Stream stream) = 0;

  // --- debugging ---
  // Takes access to ranges away while nobody has opened them (access_guard.h). Null: there is no such mode,
  // or it is off.
  virtual AccessGuard* access_guard() noexcept { return nullptr; }
};

}  // namespace forebay
