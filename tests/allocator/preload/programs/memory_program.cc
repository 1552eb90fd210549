// Properties of allocation that programs rely on, one at a time. Prints the results; a test compares them
// with and without the preload, or with the expected ones.
//   memory_program MATTER
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/allocator/preload/driver_access.h"
#include "tests/support/thread_state.h"

namespace forebay::testing {
namespace {

constexpr std::size_t kMiB = 1u << 20;
// The most destroyed streams that the preload keeps until they are idle.
constexpr int kKeptStreams = 256;

Driver driver;      // A null stream is the legacy one.
Driver per_thread;  // A null stream is the calling thread's own.
CuContext context = nullptr;

// A host function: the stream's work waits until the gate, an atomic bool, is open.
void wait_at_gate(void* gate) {
  while (!*static_cast<std::atomic<bool>*>(gate)) std::this_thread::yield();
}

int start(int device = 0) {
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, device));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  return 0;
}

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  return driver.cuMemGetInfo_v2(&free, &total) == CuResult::kSuccess ? free : SIZE_MAX;
}
std::size_t total_bytes() {
  std::size_t free = 0, total = 0;
  return driver.cuMemGetInfo_v2(&free, &total) == CuResult::kSuccess ? total : SIZE_MAX;
}

CuStream new_stream() {
  CuStream stream = nullptr;
  return driver.cuStreamCreate(&stream, kStreamNonBlocking) == CuResult::kSuccess ? stream : nullptr;
}

// Work that takes a while on a fake with a latency.
int queue_work(CuStream stream, CuDevicePtr address) {
  for (int i = 0; i < 5; ++i) CHECK_CU(driver.cuMemsetD8Async(address, 1, 4096, stream));
  return 0;
}

bool is_idle(CuStream stream) {
  return driver.cuStreamQuery(stream) == CuResult::kSuccess;
}

unsigned number(CuResult result) {
  return static_cast<unsigned>(result);
}

// The host has no memory at all: that is no memory of the device either, and afterwards everything goes on.
int host_memory() {
  CuDevicePtr block = 0;
  // Mapped once: the fake's device memory is the host's.
  CHECK_CU(driver.cuMemAlloc_v2(&block, 48 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  std::size_t pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  CHECK(file != nullptr && std::fscanf(file, "%zu", &pages) == 1);
  std::fclose(file);
  const rlimit none{.rlim_cur = pages * 4096 + kMiB, .rlim_max = RLIM_INFINITY};
  CHECK(::setrlimit(RLIMIT_AS, &none) == 0);
  void* taken = nullptr;  // A list: each has the address of the one before.
  for (std::size_t bytes = kMiB; bytes >= 16; bytes /= 2) {
    while (void* const more = std::malloc(bytes)) {
      *static_cast<void**>(more) = taken;
      taken = more;
    }
  }
  CuResult results[3];
  const std::size_t sizes[] = {512, 2 * kMiB, 60 * kMiB};
  for (int i = 0; i < 3; ++i) results[i] = driver.cuMemAlloc_v2(&block, sizes[i]);
  while (taken != nullptr) std::free(std::exchange(taken, *static_cast<void**>(taken)));
  std::printf("%u %u %u\n", number(results[0]), number(results[1]), number(results[2]));
  CHECK_CU(driver.cuMemAlloc_v2(&block, 40 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  return 0;
}

// Programs rely on a plain free waiting for all work; a free of stream-ordered memory does not wait.
int waiting() {
  CuStream stream = new_stream();
  CuDevicePtr used = 0, plain = 0, ordered = 0, freed_in_order = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&used, kMiB));
  CHECK_CU(driver.cuMemAlloc_v2(&plain, kMiB));
  CHECK_CU(driver.cuMemAlloc_v2(&freed_in_order, kMiB));
  CHECK_CU(driver.cuMemAllocAsync(&ordered, kMiB, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));

  if (queue_work(stream, used) != 0) return 1;
  CHECK_CU(driver.cuMemFree_v2(ordered));
  std::printf("ordered: idle %d\n", is_idle(stream));
  CHECK_CU(driver.cuMemFreeAsync(freed_in_order, stream));
  std::printf("plain, in order: idle %d\n", is_idle(stream));
  CHECK_CU(driver.cuMemFree_v2(plain));
  std::printf("plain: idle %d\n", is_idle(stream));
  CHECK_CU(driver.cuMemFree_v2(used));
  return 0;
}

// Unused memory of the arena counts as free.
int info() {
  const std::size_t before = free_bytes();
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, 16 * kMiB));
  const std::size_t during = free_bytes();
  CHECK_CU(driver.cuMemFree_v2(block));
  CuStream stream = new_stream();
  CHECK_CU(driver.cuMemAllocAsync(&block, 8 * kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(block, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  const std::size_t after = free_bytes();
  std::size_t device_total = 0;
  CHECK_CU(driver.cuDeviceTotalMem_v2(&device_total, 0));
  std::printf("total %zu, device %zu, before %zu, less %zu, after %zu\n", total_bytes(), device_total, before,
              before - during, after);
  // All memory that is reported free can be allocated.
  CHECK_CU(driver.cuMemAlloc_v2(&block, after));
  CHECK(driver.cuMemGetInfo_v2(nullptr, nullptr) == CuResult::kSuccess);
  CHECK_CU(driver.cuMemFree_v2(block));
  return 0;
}

// The driver's own code when there is no more, and a retry that works.
int full() {
  CuStream stream = new_stream();
  std::vector<CuDevicePtr> blocks;
  CuResult result = CuResult::kSuccess;
  while (true) {
    CuDevicePtr block = 0;
    result = driver.cuMemAlloc_v2(&block, 4 * kMiB);
    if (result != CuResult::kSuccess) break;
    blocks.push_back(block);
  }
  std::printf("plain: %u\n", number(result));
  CuDevicePtr block = 0;
  std::printf("ordered: %u\n", number(driver.cuMemAllocAsync(&block, 4 * kMiB, stream)));
  // Memory whose last use is queued serves as soon as it has run.
  if (queue_work(stream, blocks.back()) != 0) return 1;
  CHECK_CU(driver.cuMemFreeAsync(blocks.back(), stream));
  blocks.pop_back();
  CHECK_CU(driver.cuMemAlloc_v2(&block, 4 * kMiB));
  blocks.push_back(block);
  // Separate free ranges serve a block that none of them could hold.
  CHECK_CU(driver.cuMemFree_v2(blocks[1]));
  CHECK_CU(driver.cuMemFree_v2(blocks[3]));
  std::printf("apart: %u\n", number(driver.cuMemAlloc_v2(&block, 8 * kMiB)));
  std::printf("%s\n", blocks.size() >= 15 ? "nearly all of it" : "too little");
  return 0;
}

// Unused memory of the arena goes back where the driver itself needs some. An error of queued work is told by
// a plain free, and the block is free all the same.
int make_way() {
  CuDevicePtr block = 0, own = 0;
  std::size_t pitch = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, 40 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  std::printf("pitched: %u\n", number(driver.cuMemAllocPitch_v2(&own, &pitch, kMiB, 40, 4)));
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  const CuStream stream = new_stream();
  if (queue_work(stream, own) != 0) return 1;
  // The defect: memory goes away under queued work.
  std::printf("its free: %u\n", number(driver.cuMemFree_v2(own)));
  std::printf("a plain free: %u\n", number(driver.cuMemFree_v2(block)));
  return 0;
}

// The pool's handle is the driver's; its figures count the allocations from it.
int pool() {
  CuMemoryPool pool = nullptr;
  CHECK_CU(driver.cuDeviceGetDefaultMemPool(&pool, 0));
  const auto get = [&](CuMemPoolAttribute attribute) {
    std::uint64_t value = 0;
    return driver.cuMemPoolGetAttribute(pool, attribute, &value) == CuResult::kSuccess ? value : UINT64_MAX;
  };
  const auto reset = [&](CuMemPoolAttribute attribute) {
    std::uint64_t zero = 0;
    return driver.cuMemPoolSetAttribute(pool, attribute, &zero);
  };
  using enum CuMemPoolAttribute;
  std::uint64_t threshold = UINT64_MAX;
  CHECK_CU(driver.cuMemPoolSetAttribute(pool, kReleaseThreshold, &threshold));
  CHECK(get(kReleaseThreshold) == UINT64_MAX);
  CuStream stream = new_stream();
  CuDevicePtr a = 0, b = 0, plain = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&plain, 32 * kMiB));
  CHECK_CU(driver.cuMemAllocAsync(&a, 3 * kMiB, stream));
  CHECK_CU(driver.cuMemAllocFromPoolAsync(&b, 2 * kMiB, pool, stream));
  std::printf("used %llu, high %llu\n", static_cast<unsigned long long>(get(kUsedMemCurrent)),
              static_cast<unsigned long long>(get(kUsedMemHigh)));
  CHECK(get(kReservedMemCurrent) >= 5 * kMiB && get(kReservedMemHigh) >= get(kReservedMemCurrent));
  // Plain allocations are not from the pool.
  CHECK(get(kReservedMemCurrent) < 32 * kMiB);
  CHECK_CU(driver.cuMemFreeAsync(a, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  std::printf("used %llu, high %llu\n", static_cast<unsigned long long>(get(kUsedMemCurrent)),
              static_cast<unsigned long long>(get(kUsedMemHigh)));
  CHECK_CU(reset(kUsedMemHigh));
  CHECK_CU(reset(kReservedMemHigh));
  std::printf("high after the reset %llu\n", static_cast<unsigned long long>(get(kUsedMemHigh)));
  CHECK_CU(driver.cuMemFreeAsync(b, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  const std::uint64_t kept = get(kReservedMemCurrent);
  CHECK_CU(driver.cuMemPoolTrimTo(pool, kept));
  CHECK(get(kReservedMemCurrent) == kept);
  CHECK_CU(driver.cuMemPoolTrimTo(pool, 0));
  // The most stays until it is reset.
  CHECK(get(kReservedMemHigh) >= kept);
  CHECK_CU(reset(kReservedMemHigh));
  CHECK(get(kReservedMemHigh) < kept && get(kReservedMemHigh) >= get(kReservedMemCurrent));
  std::printf("used %llu, kept %d, trimmed %d\n", static_cast<unsigned long long>(get(kUsedMemCurrent)),
              kept >= 5 * kMiB, get(kReservedMemCurrent) < kept);
  CHECK_CU(driver.cuMemFree_v2(plain));
  // Another pool has figures of its own.
  CuMemPoolProps properties{};
  properties.type = CuMemAllocationType::kPinned;
  properties.location = {CuMemLocationType::kDevice, 0};
  CuMemoryPool other = nullptr;
  std::uint64_t of_other = UINT64_MAX;
  CHECK_CU(driver.cuMemPoolCreate(&other, &properties));
  CHECK_CU(driver.cuMemAllocAsync(&a, kMiB, stream));
  CHECK_CU(driver.cuMemPoolGetAttribute(other, kUsedMemCurrent, &of_other));
  CHECK(of_other == 0);
  CHECK_CU(driver.cuMemFreeAsync(a, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuMemPoolDestroy(other));
  // The figures end with the context.
  CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CHECK_CU(driver.cuMemAllocAsync(&a, kMiB, nullptr));
  std::printf("used in the next context %llu, high %llu\n",
              static_cast<unsigned long long>(get(kUsedMemCurrent)),
              static_cast<unsigned long long>(get(kUsedMemHigh)));
  CHECK_CU(driver.cuMemFreeAsync(a, nullptr));
  return 0;
}

// Served by the driver: pitched and managed memory, a pool that the program made, a context of its own,
// chunks.
int elsewhere() {
  CuDevicePtr block = 0;
  std::size_t pitch = 0;
  CHECK_CU(driver.cuMemAllocPitch_v2(&block, &pitch, 1000, 100, 4));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuMemAllocManaged(&block, kMiB, 1));
  CHECK_CU(driver.cuMemFree_v2(block));
  CuStream stream = new_stream();
  CuMemPoolProps properties{};
  properties.type = CuMemAllocationType::kPinned;
  properties.location = {CuMemLocationType::kDevice, 0};
  CuMemoryPool pool = nullptr, standard = nullptr;
  CHECK_CU(driver.cuMemPoolCreate(&pool, &properties));
  CHECK_CU(driver.cuMemAllocFromPoolAsync(&block, kMiB, pool, stream));
  CHECK_CU(driver.cuMemFreeAsync(block, stream));
  // As the device's current pool it serves requests that name no pool.
  CHECK_CU(driver.cuDeviceGetDefaultMemPool(&standard, 0));
  CHECK_CU(driver.cuDeviceSetMemPool(0, pool));
  CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(block, stream));
  CHECK_CU(driver.cuDeviceSetMemPool(0, standard));
  CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(block, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuMemPoolDestroy(pool));
  CuMemAllocationProp chunk{};
  chunk.type = CuMemAllocationType::kPinned;
  chunk.location = {CuMemLocationType::kDevice, 0};
  CuMemHandle handle = 0;
  CHECK_CU(driver.cuMemCreate(&handle, 2 * kMiB, &chunk, 0));
  CHECK_CU(driver.cuMemRelease(handle));
  // A NUMA node has no device: not to be looked into.
  chunk.location = {CuMemLocationType::kHostNuma, 0};
  std::printf("on a NUMA node: %u\n", number(driver.cuMemCreate(&handle, 2 * kMiB, &chunk, 0)));
  CuContext own = nullptr;
  CHECK_CU(driver.cuCtxCreate_v2(&own, 0, 0));
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuCtxDestroy_v2(own));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  return 0;
}

// Only a context of its own: the device's primary one does not come into being.
int own_context_alone() {
  CHECK_CU(driver.cuInit(0));
  CuContext own = nullptr;
  CHECK_CU(driver.cuCtxCreate_v2(&own, 0, 0));
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuCtxDestroy_v2(own));
  return 0;
}

// On a stream that is being captured, allocations belong to the graph.
int capture() {
  CuStream stream = new_stream();
  CuDevicePtr outside = 0, inside = 0, late = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&outside, kMiB));
  CHECK_CU(driver.cuMemAllocAsync(&late, kMiB, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  const std::size_t free_before = free_bytes();
  CHECK_CU(driver.cuStreamBeginCapture_v2(stream, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuMemAllocAsync(&inside, kMiB, stream));
  CHECK_CU(driver.cuMemsetD8Async(inside, 7, kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(inside, stream));
  // A plain free while a capture goes on: done, and the capture is as it was.
  CuCaptureMode mode = CuCaptureMode::kRelaxed;
  CHECK_CU(driver.cuThreadExchangeStreamCaptureMode(&mode));
  CHECK_CU(driver.cuMemFree_v2(outside));
  CuDevicePtr meanwhile = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&meanwhile, kMiB));
  CHECK_CU(driver.cuThreadExchangeStreamCaptureMode(&mode));
  CuGraph graph = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(stream, &graph));
  CuGraphExec exec = nullptr;
  CHECK_CU(driver.cuGraphInstantiateWithFlags(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) CHECK_CU(driver.cuGraphLaunch(exec, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuMemFreeAsync(late, stream));
  CHECK_CU(driver.cuMemFree_v2(meanwhile));
  CHECK_CU(driver.cuGraphExecDestroy(exec));
  CHECK_CU(driver.cuGraphDestroy(graph));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, 1));
  CHECK_CU(driver.cuMemFree_v2(block));
  std::printf("all back %d\n", free_bytes() == free_before + 2 * kMiB);
  return 0;
}

// A plain free while a capture goes on cannot wait. It is completed by a call that waits, and by no
// allocation.
int late_free() {
  CuStream captured = new_stream();
  CuStream other = new_stream();
  CuDevicePtr block = 0, next = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&next, kMiB));
  CHECK_CU(driver.cuMemFree_v2(next));
  const std::uint64_t free_before = free_bytes();
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuStreamBeginCapture_v2(captured, CuCaptureMode::kRelaxed));
  CuCaptureMode mode = CuCaptureMode::kRelaxed;
  CHECK_CU(driver.cuThreadExchangeStreamCaptureMode(&mode));
  if (queue_work(other, block) != 0) return 1;
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuThreadExchangeStreamCaptureMode(&mode));
  CuGraph graph = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(captured, &graph));
  const std::uint64_t free_with_it = free_bytes();
  CHECK_CU(driver.cuMemAlloc_v2(&next, kMiB));
  std::printf("next block: idle %d, the same %d, counted as free %d\n", is_idle(other), next == block,
              free_with_it >= free_before);
  CHECK_CU(driver.cuMemFree_v2(next));
  bool is_back = false;
  CuDevicePtr two[2] = {};
  for (CuDevicePtr& one : two) {
    CHECK_CU(driver.cuMemAlloc_v2(&one, kMiB));
    is_back |= one == block;
  }
  std::printf("after a plain free: the same %d\n", is_back);
  for (const CuDevicePtr one : two) CHECK_CU(driver.cuMemFree_v2(one));
  CHECK_CU(driver.cuGraphDestroy(graph));
  return 0;
}

// Frees on default streams of threads whose work waits for the thread: of a block that is known outside, and
// by more threads than have a stream of the arena's each.
int frees_of_threads() {
  std::atomic<bool> is_open{false};
  constexpr int kThreads = 40;
  std::atomic<int> freed{0}, failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      CuDevicePtr block = 0;
      CuIpcMemHandle handle = {};
      const bool is_known = i % 2 == 0;
      const bool well = driver.cuCtxSetCurrent(context) == CuResult::kSuccess &&
                        driver.cuMemAlloc_v2(&block, 2 * kMiB) == CuResult::kSuccess &&
                        (!is_known || driver.cuIpcGetMemHandle(&handle, block) == CuResult::kSuccess) &&
                        per_thread.cuLaunchHostFunc(nullptr, wait_at_gate, &is_open) == CuResult::kSuccess &&
                        per_thread.cuMemFreeAsync(block, nullptr) == CuResult::kSuccess;
      failures += !well;
      ++freed;
      while (!is_open) std::this_thread::yield();
      failures += per_thread.cuStreamSynchronize(nullptr) != CuResult::kSuccess;
    });
  }
  while (freed < kThreads) std::this_thread::yield();
  std::printf("freed while all work waits, failures %d\n", failures.load());
  is_open = true;
  for (std::thread& thread : threads) thread.join();
  CHECK_CU(driver.cuCtxSynchronize());
  return failures;
}

// A thread that was cancelled goes on to the end of the call, which holds locks.
int cancelled_threads() {
  static std::atomic<int> returned{0};
  static std::atomic<CuDevicePtr> block{0};
  for (int i = 0; i < 4; ++i) {
    pthread_t thread;
    const auto allocate = [](void*) -> void* {
      CuDevicePtr address = 0;
      if (driver.cuCtxSetCurrent(context) != CuResult::kSuccess) return nullptr;
      (void)pthread_cancel(pthread_self());
      if (driver.cuMemAlloc_v2(&address, 8 * kMiB) == CuResult::kSuccess) ++returned;
      block = address;
      pthread_testcancel();
      return nullptr;
    };
    if (pthread_create(&thread, nullptr, allocate, nullptr) != 0) return 2;
    void* result = nullptr;
    (void)pthread_join(thread, &result);
    if (result != PTHREAD_CANCELED) return 3;
    if (returned != i + 1) break;  // A lock may be held for good.
    if (i % 2 == 0) CHECK_CU(driver.cuMemFree_v2(block));
  }
  std::printf("returned %d\n", returned.load());
  return 0;
}

// The end of the current pool makes the default one current again.
int pool_ended() {
  CuMemoryPool pool = nullptr;
  CuMemPoolProps properties = {};
  properties.type = CuMemAllocationType::kPinned;
  properties.location = {CuMemLocationType::kDevice, 0};
  CuDevicePtr block = 0;
  CuStream stream = new_stream();
  CHECK_CU(driver.cuMemPoolCreate(&pool, &properties));
  CHECK_CU(driver.cuMemSetMemPool(&properties.location, properties.type, pool));
  CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(block, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuMemPoolDestroy(pool));
  for (int i = 0; i < 3; ++i) CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
  return 0;
}

// Work without an end by way of the device's reset and of the last release.
int reset() {
  CuDevicePtr block = 0;
  for (int i = 0; i < 3; ++i) {
    CHECK_CU(driver.cuMemAlloc_v2(&block, 20 * kMiB));
    CuStream stream = new_stream();
    CuDevicePtr ordered = 0;
    CHECK_CU(driver.cuMemAllocAsync(&ordered, 20 * kMiB, stream));
    if (queue_work(stream, ordered) != 0) return 1;
    CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
    CHECK_CU(driver.cuCtxSetCurrent(context));
    std::printf("free after the reset: all %d\n", free_bytes() == total_bytes());
  }
  std::printf("stale: %u\n", number(driver.cuMemFree_v2(block)));
  for (int i = 0; i < 3; ++i) {
    CHECK_CU(driver.cuMemAlloc_v2(&block, 40 * kMiB));
    CHECK_CU(driver.cuDevicePrimaryCtxRelease_v2(0));
    CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
    CHECK_CU(driver.cuCtxSetCurrent(context));
    std::printf("free after the last release: all %d\n", free_bytes() == total_bytes());
  }
  return 0;
}

// A context that two parts of the program hold lives until both have let it go, and so does its memory.
int releases() {
  CuContext same = nullptr;
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&same, 0));
  CHECK(same == context);
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemsetD8_v2(block, 0x3C, kMiB));
  CHECK_CU(driver.cuDevicePrimaryCtxRelease_v2(0));
  unsigned char byte = 0;
  CHECK_CU(driver.cuMemcpyDtoH_v2(&byte, block + kMiB - 1, 1));
  std::printf("after the first of two releases: kept %d\n", byte == 0x3C);
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuMemAlloc_v2(&block, 2 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuDevicePrimaryCtxRelease_v2(0));
  return 0;
}

// A stream that was destroyed while its work ran goes with its context, and is not destroyed once more.
int stream_reset() {
  CuDevicePtr block = 0;
  CuStream busy = new_stream();
  CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, busy));
  if (queue_work(busy, block) != 0) return 1;
  CHECK_CU(driver.cuMemFreeAsync(block, busy));
  CHECK_CU(driver.cuStreamDestroy_v2(busy));
  CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuStreamDestroy_v2(new_stream()));
  return 0;
}

// Says whether a plain free waits for work that is queued.
int tell_free(const char* when) {
  const CuStream stream = new_stream();
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  if (queue_work(stream, block) != 0) return 1;
  CHECK_CU(driver.cuMemFree_v2(block));
  std::printf("%s: idle %d\n", when, is_idle(stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  return 0;
}

// Work behind the gate writes freed memory. Writes the next block, and says whether that stays.
int tell_next(CuDevicePtr next, std::atomic<bool>* gate) {
  const CuStream other = new_stream();
  CHECK_CU(driver.cuMemsetD8Async(next, 1, kMiB, other));
  CHECK_CU(driver.cuStreamSynchronize(other));
  *gate = true;
  CHECK_CU(driver.cuCtxSynchronize());
  unsigned char byte = 0;
  CHECK_CU(driver.cuMemcpyDtoH_v2(&byte, next + kMiB / 2, 1));
  std::printf("byte %d\n", byte);
  // No capture is left, so a plain free waits.
  return tell_free("afterwards");
}

// A busy stream that is destroyed while it is captured: its work of before goes on, on memory that was freed.
int captured_stream_destroyed() {
  const CuStream busy = new_stream();
  CuDevicePtr freed = 0, next = 0;
  CHECK_CU(driver.cuMemAllocAsync(&freed, kMiB, busy));
  std::atomic<bool> is_open{false};
  CHECK_CU(driver.cuLaunchHostFunc(busy, wait_at_gate, &is_open));
  CHECK_CU(driver.cuMemsetD8Async(freed, 9, kMiB, busy));
  CHECK_CU(driver.cuMemFreeAsync(freed, busy));
  CHECK_CU(driver.cuStreamBeginCapture_v2(busy, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuStreamDestroy_v2(busy));
  CHECK_CU(driver.cuMemAllocAsync(&next, kMiB, new_stream()));
  return tell_next(next, &is_open);
}

// A thread retains the primary context while another one's release waits for work.
int retain_beside_release() {
  std::atomic<bool> is_open{false};
  std::atomic<int> failures{0};
  const CuStream stream = new_stream();
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuLaunchHostFunc(stream, wait_at_gate, &is_open));
  std::atomic<bool> is_retaining{false}, is_released{false};
  std::thread other([&] {
    CuContext own = nullptr;
    CuDevicePtr memory = 0;
    unsigned char byte = 0;
    is_retaining = true;
    const bool is_well = driver.cuDevicePrimaryCtxRetain(&own, 0) == CuResult::kSuccess &&
                         driver.cuCtxSetCurrent(own) == CuResult::kSuccess &&
                         driver.cuMemAlloc_v2(&memory, kMiB) == CuResult::kSuccess &&
                         driver.cuMemsetD8_v2(memory, 7, kMiB) == CuResult::kSuccess;
    is_open = true;
    while (!is_released) std::this_thread::yield();
    if (!is_well || driver.cuMemcpyDtoH_v2(&byte, memory + 5, 1) != CuResult::kSuccess || byte != 7)
      ++failures;
    if (driver.cuMemFree_v2(memory) != CuResult::kSuccess) ++failures;
    if (driver.cuDevicePrimaryCtxRelease_v2(0) != CuResult::kSuccess) ++failures;
  });
  std::thread opener([&] {
    while (!is_retaining) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    is_open = true;  // The other thread may wait for the release, which nothing shows.
  });
  while (!is_retaining) std::this_thread::yield();
  CHECK_CU(driver.cuDevicePrimaryCtxRelease_v2(0));
  is_released = true;
  other.join();
  opener.join();
  std::printf("failures %d\n", failures.load());
  return 0;
}

// Blocks that another device knows, each of another size, one at a time: together more than the device has.
int pinned_sizes() {
  for (int i = 0; i < 200; ++i) {
    CuDevicePtr block = 0;
    CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB + static_cast<std::size_t>(i * 37 % 200) * 4096));
    const unsigned on = 1;
    (void)driver.cuPointerSetAttribute(&on, CuPointerAttribute::kSyncMemops, block);
    CHECK_CU(driver.cuMemFree_v2(block));
  }
  std::printf("all served\n");
  return 0;
}

// A thread that captures its own default stream until it is told to end that.
class CapturingThread {
 public:
  explicit CapturingThread(bool is_spoilt)
      : thread_([this, is_spoilt] {
          failed_ =
              driver.cuCtxSetCurrent(context) != CuResult::kSuccess ||
              per_thread.cuStreamBeginCapture_v2(nullptr, CuCaptureMode::kRelaxed) != CuResult::kSuccess;
          if (is_spoilt) (void)per_thread.cuStreamSynchronize(nullptr);
          state_ = kBegun;
          while (state_ != kEnding) std::this_thread::yield();
          CuGraph graph = nullptr;
          const CuResult ended = per_thread.cuStreamEndCapture(nullptr, &graph);
          failed_ = failed_ || (ended != CuResult::kSuccess) != is_spoilt;
          if (graph != nullptr) (void)driver.cuGraphDestroy(graph);
        }) {
    while (state_ != kBegun) std::this_thread::yield();
  }
  ~CapturingThread() { end(); }
  // Whether all went as it should.
  bool end() {
    state_ = kEnding;
    if (thread_.joinable()) thread_.join();
    return !failed_;
  }

 private:
  enum { kIdle, kBegun, kEnding };
  std::atomic<int> state_{kIdle};
  std::atomic<bool> failed_{false};
  std::thread thread_;  // Last: it uses the others.
};

// While any stream is captured nothing waits for the device, and afterwards frees do again, however the
// captures end.
int captures() {
  CuMemoryPool pool = nullptr;
  CHECK_CU(driver.cuDeviceGetDefaultMemPool(&pool, 0));
  const CuStream other = new_stream();
  if (tell_free("before") != 0) return 1;

  CapturingThread first(false), second(false);
  CHECK(first.end());
  if (tell_free("one of two has ended") != 0) return 1;
  CuDevicePtr block = 0, refused = 0;
  CHECK_CU(driver.cuMemAllocAsync(&block, 4 * kMiB, other));
  if (queue_work(other, block) != 0) return 1;
  CHECK_CU(driver.cuMemFreeAsync(block, other));
  CHECK_CU(driver.cuMemPoolTrimTo(pool, 0));
  std::printf("trimmed: idle %d\n", is_idle(other));
  // All memory is free but for what that work may still use.
  const CuResult full = driver.cuMemAllocAsync(&refused, total_bytes() - kMiB, new_stream());
  std::printf("refused %u: idle %d\n", number(full), is_idle(other));
  CHECK(second.end());
  if (tell_free("both have ended") != 0) return 1;

  // With its stream.
  const CuStream captured = new_stream();
  CHECK_CU(driver.cuStreamBeginCapture_v2(captured, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuStreamDestroy_v2(captured));
  if (tell_free("its stream has ended") != 0) return 1;

  // With an error.
  CapturingThread spoilt(true);
  CHECK(spoilt.end());
  if (tell_free("it was invalid") != 0) return 1;

  // It goes on while its thread is in another context, which has a default stream of its own.
  CuContext own = nullptr;
  CuGraph unused = nullptr;
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(per_thread.cuStreamBeginCapture_v2(nullptr, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuCtxCreate_v2(&own, 0, 0));
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  if (tell_free("its thread was elsewhere") != 0) return 1;
  CHECK_CU(per_thread.cuStreamEndCapture(nullptr, &unused));
  CHECK_CU(driver.cuCtxDestroy_v2(own));

  // With its context.
  CHECK_CU(driver.cuCtxCreate_v2(&own, 0, 0));
  CHECK_CU(per_thread.cuStreamBeginCapture_v2(nullptr, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuCtxDestroy_v2(own));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  if (tell_free("its context is gone") != 0) return 1;

  // With its thread, whose default stream it was.
  std::thread([] {
    (void)driver.cuCtxSetCurrent(context);
    (void)per_thread.cuStreamBeginCapture_v2(nullptr, CuCaptureMode::kRelaxed);
  }).join();
  if (tell_free("its thread has ended") != 0) return 1;

  // An ordered free on a captured stream would have to go into the graph.
  const CuStream graphs = new_stream();
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuStreamBeginCapture_v2(graphs, CuCaptureMode::kRelaxed));
  std::printf("freed by a graph: %d\n", driver.cuMemFreeAsync(block, graphs) == CuResult::kSuccess);
  CuGraph graph = nullptr;
  (void)driver.cuStreamEndCapture(graphs, &graph);
  CHECK_CU(driver.cuMemFree_v2(block));
  return 0;
}

// A free that waits for the end of a capture ends with its arena: the block of the next one at that address
// stays.
int capture_reset() {
  CuDevicePtr block = 0, next = 0, other = 0;
  const CuStream stream = new_stream();
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuStreamBeginCapture_v2(stream, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuMemFree_v2(block));
  CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
  if (start() != 0) return 1;
  const CuStream again = new_stream();
  CHECK_CU(driver.cuMemAlloc_v2(&next, kMiB));
  CHECK_CU(driver.cuStreamBeginCapture_v2(again, CuCaptureMode::kRelaxed));
  CuGraph graph = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(again, &graph));
  CHECK_CU(driver.cuMemAlloc_v2(&other, kMiB));
  std::printf("at the same address %d, given twice %d\n", block == next, next == other);
  CHECK_CU(driver.cuMemFree_v2(next));
  CHECK_CU(driver.cuMemFree_v2(other));
  return 0;
}

// Threads that each use their own default stream through the same null.
int thread_streams() {
  std::atomic<int> wrong{0};
  const auto work = [&](int seed) {
    if (driver.cuCtxSetCurrent(context) != CuResult::kSuccess) ++wrong;
    std::vector<unsigned> back(64u << 10);
    CuResult result = CuResult::kSuccess;
    for (int round = 0; round < 40; ++round) {
      const unsigned value = static_cast<unsigned>(seed * 1000 + round);
      CuDevicePtr block = 0;
      result = per_thread.cuMemAllocAsync(&block, back.size() * 4, nullptr);
      bool well = result == CuResult::kSuccess;
      well = well && per_thread.cuMemsetD32Async(block, value, back.size(), nullptr) == CuResult::kSuccess;
      well = well && per_thread.cuMemcpyDtoHAsync_v2(back.data(), block, back.size() * 4, nullptr) ==
                         CuResult::kSuccess;
      // Freed before anybody has waited.
      well = well && per_thread.cuMemFreeAsync(block, nullptr) == CuResult::kSuccess;
      well = well && per_thread.cuStreamSynchronize(nullptr) == CuResult::kSuccess;
      well = well && std::all_of(back.begin(), back.end(), [&](unsigned one) { return one == value; });
      if (!well) std::printf("round %d: %u\n", round, number(result));
      wrong += !well;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  std::printf("wrong: %d\n", wrong.load());
  return wrong.load() == 0 ? 0 : 1;
}

// A stream uses its own freed memory again at once, while its work runs: also a thread's default stream.
int reuse() {
  CuMemoryPool standard = nullptr;
  CHECK_CU(driver.cuDeviceGetDefaultMemPool(&standard, 0));
  for (const bool from_pool : {false, true}) {
    const auto allocate = [&](CuDevicePtr* block) {
      return from_pool ? per_thread.cuMemAllocFromPoolAsync(block, 8 * kMiB, standard, nullptr)
                       : per_thread.cuMemAllocAsync(block, 8 * kMiB, nullptr);
    };
    CuDevicePtr block = 0, again = 0;
    CHECK_CU(allocate(&block));
    for (int i = 0; i < 5; ++i) CHECK_CU(per_thread.cuMemsetD8Async(block, 1, 4096, nullptr));
    CHECK_CU(per_thread.cuMemFreeAsync(block, nullptr));
    CHECK_CU(allocate(&again));
    std::printf("%s: same address %d\n", from_pool ? "from the pool" : "ordered", again == block);
    CHECK_CU(per_thread.cuMemFreeAsync(again, nullptr));
    CHECK_CU(per_thread.cuStreamSynchronize(nullptr));
  }
  return 0;
}

// Takes a block on the calling thread's default stream, queues work on it and frees it there. `done`: a
// stream that waits for that work.
int free_in_use(CuDevicePtr* block, CuStream done) {
  CuEvent event = nullptr;
  CHECK_CU(driver.cuEventCreate(&event, kEventDisableTiming));
  CHECK_CU(per_thread.cuMemAllocAsync(block, 8 * kMiB, nullptr));
  for (int i = 0; i < 5; ++i) CHECK_CU(per_thread.cuMemsetD8Async(*block, 1, 4096, nullptr));
  CHECK_CU(per_thread.cuEventRecord(event, nullptr));
  CHECK_CU(driver.cuStreamWaitEvent(done, event, 0));
  CHECK_CU(per_thread.cuMemFreeAsync(*block, nullptr));
  CHECK_CU(driver.cuEventDestroy_v2(event));
  return 0;
}

// Memory freed on a thread's default stream is for that stream alone until its work has run, also after the
// thread's end.
int thread_free() {
  const CuStream done = new_stream();
  CuDevicePtr block = 0, of_ended = 0, ordered = 0, plain = 0, own = 0;
  if (free_in_use(&block, done) != 0) return 1;
  CHECK_CU(driver.cuMemAllocAsync(&ordered, 8 * kMiB, new_stream()));
  CHECK_CU(driver.cuMemAlloc_v2(&plain, 8 * kMiB));
  std::printf("idle %d: on another stream %d, plain %d\n", is_idle(done), ordered == block, plain == block);
  CHECK_CU(driver.cuStreamSynchronize(done));
  CHECK_CU(driver.cuMemAllocAsync(&own, 8 * kMiB, new_stream()));
  std::printf("idle: on another stream %d\n", own == block);
  for (const CuDevicePtr one : {ordered, plain, own}) CHECK_CU(driver.cuMemFree_v2(one));

  int failed = 0;
  std::thread([&] {
    failed = driver.cuCtxSetCurrent(context) != CuResult::kSuccess || free_in_use(&of_ended, done) != 0;
  }).join();
  std::thread([&] {
    failed += driver.cuCtxSetCurrent(context) != CuResult::kSuccess ||
              per_thread.cuMemAllocAsync(&own, 8 * kMiB, nullptr) != CuResult::kSuccess;
  }).join();
  CHECK(failed == 0);
  std::printf("after the end of its thread, idle %d: on another thread's %d\n", is_idle(done),
              own == of_ended);
  CHECK_CU(driver.cuStreamSynchronize(done));
  CHECK_CU(driver.cuMemFree_v2(own));
  return 0;
}

// A device that is reset more often than the arena has streams for threads. Each reset makes all of them
// available again, so a free does not wait.
int thread_resets() {
  CuDevicePtr block = 0;
  for (int i = 0; i < 33; ++i) {
    CHECK_CU(per_thread.cuMemAllocAsync(&block, 4096, nullptr));
    CHECK_CU(per_thread.cuMemFreeAsync(block, nullptr));
    CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
    CHECK_CU(driver.cuCtxSetCurrent(context));
  }
  const CuStream done = new_stream();
  if (free_in_use(&block, done) != 0) return 1;
  std::printf("idle %d\n", is_idle(done));
  CHECK_CU(driver.cuStreamSynchronize(done));
  return 0;
}

// More threads with default streams of their own than the arena has streams for. The last ones wait when they
// free.
int many_threads() {
  constexpr int kThreads = 40;
  std::atomic<int> ready{0};
  std::atomic<int> wrong{0};
  std::mutex turn;
  const auto work = [&] {
    CuDevicePtr block = 0;
    const CuStream done = new_stream();
    const CuStream other = new_stream();
    bool well = driver.cuCtxSetCurrent(context) == CuResult::kSuccess;
    well = well && per_thread.cuMemAllocAsync(&block, 4096, nullptr) == CuResult::kSuccess;
    well = well && per_thread.cuMemFreeAsync(block, nullptr) == CuResult::kSuccess;
    // Until all threads have their streams.
    for (++ready; ready < kThreads;) std::this_thread::yield();
    const std::lock_guard lock(turn);
    well = well && free_in_use(&block, done) == 0;
    // All that is free, for another stream.
    std::vector<CuDevicePtr> others(kThreads);
    for (CuDevicePtr& one : others) {
      well = well && driver.cuMemAllocAsync(&one, 8 * kMiB, other) == CuResult::kSuccess;
      well = well && (one != block || per_thread.cuStreamQuery(nullptr) == CuResult::kSuccess);
    }
    for (const CuDevicePtr one : others) well = well && driver.cuMemFree_v2(one) == CuResult::kSuccess;
    wrong += !well;
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  std::printf("wrong: %d\n", wrong.load());
  return 0;
}

// Prints the answers about an address in no block.
void describe_dead(CuDevicePtr address) {
  CuDevicePtr base = 0;
  std::size_t bytes = 0;
  CuMemHandle handle = 0;
  unsigned type = 0;
  const CuResult range = driver.cuMemGetAddressRange_v2(&base, &bytes, address);
  const CuResult retained = driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address));
  const CuResult attribute = driver.cuPointerGetAttribute(&type, CuPointerAttribute::kMemoryType, address);
  std::printf("dead: range %u, handle %u, attribute %u\n", number(range), number(retained),
              number(attribute));
}

// Where an address lies, asked for the middle of a block.
int attributes() {
  CuStream stream = new_stream();
  CuDevicePtr plain = 0, ordered = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&plain, 3 * kMiB + 100));
  CHECK_CU(driver.cuMemAllocAsync(&ordered, kMiB, stream));
  CuMemoryPool standard = nullptr;
  CHECK_CU(driver.cuDeviceGetDefaultMemPool(&standard, 0));
  for (const CuDevicePtr block : {plain, ordered}) {
    CuPointerAttribute asked[] = {CuPointerAttribute::kRangeStartAddr, CuPointerAttribute::kRangeSize,
                                  CuPointerAttribute::kMempoolHandle, CuPointerAttribute::kMemoryType,
                                  CuPointerAttribute::kDeviceOrdinal};
    CuDevicePtr begin = 0;
    std::size_t bytes = 0;
    CuMemoryPool pool = nullptr;
    unsigned type = 0;
    int device = -1;
    void* answers[] = {&begin, &bytes, &pool, &type, &device};
    CHECK_CU(driver.cuPointerGetAttributes(5, asked, answers, block + 12345));
    std::printf("begin %d, bytes %zu, pool %d, type %u, device %d\n", begin == block, bytes, pool == standard,
                type, device);
    begin = 0;
    CHECK_CU(driver.cuPointerGetAttribute(&begin, CuPointerAttribute::kRangeStartAddr, block + 54321));
    std::printf("begin %d\n", begin == block);
    // Virtual memory has others.
    CuContext owner = nullptr;
    unsigned long long handle_types = 77;
    CuDevicePtr mapped = 0;
    CuPointerAttribute kinds[] = {CuPointerAttribute::kContext, CuPointerAttribute::kAllowedHandleTypes,
                                  CuPointerAttribute::kMappingBaseAddr};
    void* of_kind[] = {&owner, &handle_types, &mapped};
    CHECK_CU(driver.cuPointerGetAttributes(3, kinds, of_kind, block + 12345));
    std::printf("context %d, handle types %llu, mapping %d\n",
                owner == context   ? 1
                : owner == nullptr ? 0
                                   : 2,
                handle_types, mapped == block);
    describe_dead(block + (block == plain ? 3 * kMiB + 512 : kMiB));
  }
  int value = 0;
  std::printf("of the host: %u\n",
              number(driver.cuPointerGetAttribute(&value, CuPointerAttribute::kRangeStartAddr,
                                                  reinterpret_cast<CuDevicePtr>(&value))));
  CHECK_CU(driver.cuMemFreeAsync(ordered, stream));
  CHECK_CU(driver.cuMemFree_v2(plain));
  describe_dead(plain);
  return 0;
}

// The number of an allocation, by which libraries tell whether what they have registered is still there.
unsigned long long buffer_id(CuDevicePtr address) {
  unsigned long long id = 0;
  const CuResult result = driver.cuPointerGetAttribute(&id, CuPointerAttribute::kBufferId, address);
  return result == CuResult::kSuccess ? id : 0;
}

int buffer_ids() {
  CuDevicePtr a = 0, b = 0, again = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&a, kMiB / 2));
  CHECK_CU(driver.cuMemAlloc_v2(&b, kMiB / 2));
  const unsigned long long of_a = buffer_id(a), of_b = buffer_id(b);
  std::printf("two blocks: %d\n", of_a != 0 && of_b != 0 && of_a != of_b);
  std::printf("one block: %d\n", buffer_id(a + kMiB / 4) == of_a);
  CHECK_CU(driver.cuMemFree_v2(b));
  CHECK_CU(driver.cuMemAlloc_v2(&again, kMiB / 2));
  std::printf("one after another: %d\n", buffer_id(again) != 0 && buffer_id(again) != of_b);
  CHECK_CU(driver.cuMemFree_v2(again));
  CHECK_CU(driver.cuMemFree_v2(a));
  return 0;
}

// Streams that are destroyed while their work runs, one after the other.
int streams() {
  CuDevicePtr kept = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&kept, kMiB));
  for (int i = 0; i < 300; ++i) {
    CuStream stream = new_stream();
    CHECK(stream != nullptr);
    CuDevicePtr block = 0;
    CHECK_CU(driver.cuMemAllocAsync(&block, kMiB, stream));
    CHECK_CU(driver.cuMemsetD8Async(block, 1, kMiB, stream));
    CHECK_CU(driver.cuMemFreeAsync(block, stream));
    CHECK_CU(driver.cuStreamDestroy_v2(stream));
  }
  CuStream busy = new_stream();
  CHECK_CU(driver.cuStreamSynchronize(busy));
  if (queue_work(busy, kept) != 0) return 1;
  CHECK_CU(driver.cuStreamDestroy_v2(busy));
  CHECK_CU(driver.cuCtxSynchronize());
  CHECK_CU(driver.cuMemFree_v2(kept));
  CHECK_CU(driver.cuStreamDestroy_v2(new_stream()));
  std::printf("all free %d\n", free_bytes() == total_bytes());
  return 0;
}

// The default pool gives back what is idle while the work of another stream waits for this thread.
int trim_beside_work() {
  CuMemoryPool pool = nullptr;
  CHECK_CU(driver.cuDeviceGetDefaultMemPool(&pool, 0));
  CuStream idle = new_stream(), busy = new_stream();
  CuDevicePtr blocks[2] = {};
  for (CuDevicePtr& block : blocks) CHECK_CU(driver.cuMemAllocAsync(&block, 16 * kMiB, idle));
  std::atomic<bool> is_open{false};
  CHECK_CU(driver.cuLaunchHostFunc(busy, wait_at_gate, &is_open));
  CHECK_CU(driver.cuMemFreeAsync(blocks[0], busy));
  CHECK_CU(driver.cuMemFreeAsync(blocks[1], idle));
  CHECK_CU(driver.cuStreamSynchronize(idle));
  std::uint64_t before = 0, after = 0;
  CHECK_CU(driver.cuMemPoolGetAttribute(pool, CuMemPoolAttribute::kReservedMemCurrent, &before));
  // One trim gives a busy machine some milliseconds to see that a stream is idle.
  for (int trim = 0; trim < 1000; ++trim) {
    CHECK_CU(driver.cuMemPoolTrimTo(pool, 0));
    CHECK_CU(driver.cuMemPoolGetAttribute(pool, CuMemPoolAttribute::kReservedMemCurrent, &after));
    if (after < before) break;
  }
  std::printf("reserved less %d\n", after < before);
  is_open = true;
  CHECK_CU(driver.cuStreamSynchronize(busy));
  return 0;
}

// Memory that was freed on streams which have ended serves all, and not before their work has run.
int ended_streams() {
  CuDevicePtr block = 0, again = 0;
  CuStream stream = new_stream();
  CHECK_CU(driver.cuMemAllocAsync(&block, 40 * kMiB, stream));
  CHECK_CU(driver.cuMemFreeAsync(block, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuStreamDestroy_v2(stream));
  std::printf("idle when it ended: %u\n", number(driver.cuMemAllocAsync(&again, 40 * kMiB, new_stream())));
  CHECK_CU(driver.cuMemFree_v2(again));

  // Beyond the most streams that are kept the oldest is waited for.
  std::atomic<bool> is_open{false}, is_last{false}, has_returned{false};
  CuEvent event = nullptr;
  CHECK_CU(driver.cuEventCreate(&event, kEventDisableTiming));
  const pid_t caller = ::gettid();
  std::thread opener([&] {
    while (!is_last || !(has_returned || is_waiting(caller))) std::this_thread::yield();
    is_open = true;
  });
  for (int i = 0; i <= kKeptStreams; ++i) {
    stream = new_stream();
    if (i == 0) {
      CHECK_CU(driver.cuLaunchHostFunc(stream, wait_at_gate, &is_open));
      CHECK_CU(driver.cuEventRecord(event, stream));
    } else {
      CHECK_CU(driver.cuStreamWaitEvent(stream, event, 0));
    }
    is_last = i == kKeptStreams;
    CHECK_CU(driver.cuStreamDestroy_v2(stream));
  }
  std::printf("the oldest of many: waited for %d\n", is_open.load());
  has_returned = true;
  opener.join();
  CHECK_CU(driver.cuCtxSynchronize());
  CHECK_CU(driver.cuEventDestroy_v2(event));
  return 0;
}

// Frees by the other call, twice, in the middle of a block, and of addresses that were never allocated.
int frees() {
  CuStream stream = new_stream();
  CuDevicePtr plain = 0, ordered = 0, twice = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&plain, kMiB));
  CHECK_CU(driver.cuMemAllocAsync(&ordered, kMiB, stream));
  CHECK_CU(driver.cuMemAlloc_v2(&twice, kMiB));
  CHECK_CU(driver.cuMemFreeAsync(plain, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuMemFree_v2(ordered));
  std::printf("in the middle: %u %u\n", number(driver.cuMemFree_v2(twice + 512)),
              number(driver.cuMemFreeAsync(twice + 512, stream)));
  CHECK_CU(driver.cuMemFree_v2(twice));
  std::printf("twice: %u %u\n", number(driver.cuMemFree_v2(twice)),
              number(driver.cuMemFreeAsync(twice, stream)));
  std::printf("unknown: %u\n", number(driver.cuMemFree_v2(0x1234000)));
  std::printf("null: %u %u\n", number(driver.cuMemFree_v2(0)), number(driver.cuMemFreeAsync(0, stream)));
  return 0;
}

// Says whether a request of 6 MiB gets this block, whose bytes are 0x77, again.
int ask_again(CuDevicePtr block, CuDevicePtr* again) {
  CHECK_CU(driver.cuMemAlloc_v2(again, 6 * kMiB));
  std::vector<unsigned char> back(6 * kMiB);
  CHECK_CU(driver.cuMemcpyDtoH_v2(back.data(), *again, back.size()));
  std::printf("same address %d, same memory %d\n", *again == block,
              std::all_of(back.begin(), back.end(), [](unsigned char byte) { return byte == 0x77; }));
  return 0;
}

// Gets the tokens by which another device's driver finds the memory.
int show_outside(CuDevicePtr block) {
  CuPointerAttribute tokens = CuPointerAttribute::kP2pTokens;
  std::uint64_t values[2] = {};
  void* answers[] = {values};
  CHECK_CU(driver.cuPointerGetAttributes(1, &tokens, answers, block));
  return 0;
}

// Memory that is known outside the process keeps its address, even after it was freed.
int pinned() {
  CuDevicePtr block = 0, other = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, 6 * kMiB));
  if (show_outside(block) != 0) return 1;
  CHECK_CU(driver.cuMemsetD8_v2(block, 0x77, 6 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  std::vector<CuDevicePtr> others;
  for (int i = 0; i < 8; ++i) {
    CHECK_CU(driver.cuMemAlloc_v2(&other, 5 * kMiB));
    CHECK(other >= block + 6 * kMiB || other + 5 * kMiB <= block);
    others.push_back(other);
  }
  for (std::size_t i = 1; i < others.size(); i += 2) CHECK_CU(driver.cuMemFree_v2(others[i]));
  for (std::size_t i = 0; i < others.size(); i += 2) {
    // The byte behind its end is not in it.
    CuDevicePtr begin = 0;
    (void)driver.cuPointerGetAttribute(&begin, CuPointerAttribute::kRangeStartAddr, others[i] + 5 * kMiB);
    CHECK(begin != others[i]);
    CHECK_CU(driver.cuMemFree_v2(others[i]));
  }
  // A request of the same size gets the block again.
  CuDevicePtr again = 0;
  if (int failed = ask_again(block, &again)) return failed;
  // Freed on a stream, it is at once for that stream alone, and for others when the stream is done.
  const CuStream stream = new_stream();
  for (const bool waits : {false, true}) {
    CHECK_CU(driver.cuMemsetD8Async(again, 1, 6 * kMiB, stream));
    CHECK_CU(driver.cuMemFreeAsync(again, stream));
    if (waits) CHECK_CU(driver.cuStreamSynchronize(stream));
    CHECK_CU(driver.cuMemAllocAsync(&other, 6 * kMiB, new_stream()));
    std::printf("on another stream %d\n", other == block);
    CHECK_CU(driver.cuMemFree_v2(other));
    CHECK_CU(driver.cuMemAllocAsync(&again, 6 * kMiB, stream));
    std::printf("on the same %d\n", again == block);
  }
  // Other memory is not taken for it, however often.
  std::size_t free_before = free_bytes();
  for (int i = 0; i < 50; ++i) {
    CHECK_CU(driver.cuMemAllocAsync(&other, kMiB, stream));
    if (show_outside(other) != 0) return 1;
    CHECK_CU(driver.cuMemFreeAsync(other, new_stream()));
    CHECK_CU(driver.cuCtxSynchronize());
  }
  std::printf("kept for later %d\n", free_before - free_bytes() <= 2 * kMiB);
  // Freed on a thread's default stream, it is not lost.
  CHECK_CU(per_thread.cuMemFreeAsync(again, nullptr));
  CHECK_CU(per_thread.cuMemAllocAsync(&again, 6 * kMiB, nullptr));
  std::printf("on the thread's own %d\n", again == block);
  CHECK_CU(driver.cuMemFree_v2(again));
  // The attribute with which a program registers memory with another device.
  CuDevicePtr registered = 0;
  unsigned on = 1;
  CHECK_CU(driver.cuMemAlloc_v2(&registered, 7 * kMiB));
  // The driver may refuse it for mapped memory.
  (void)driver.cuPointerSetAttribute(&on, CuPointerAttribute::kSyncMemops, registered);
  CHECK_CU(driver.cuMemFree_v2(registered));
  for (CuDevicePtr& one : others) {
    CHECK_CU(driver.cuMemAlloc_v2(&one, 4 * kMiB));
    CHECK(one >= registered + 7 * kMiB || one + 4 * kMiB <= registered);
  }
  for (const CuDevicePtr one : others) CHECK_CU(driver.cuMemFree_v2(one));
  // It ends with its context.
  CHECK_CU(driver.cuDevicePrimaryCtxReset_v2(0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CHECK_CU(driver.cuMemAlloc_v2(&again, 6 * kMiB));
  CHECK_CU(driver.cuMemsetD8_v2(again, 0x11, 6 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(again));
  return 0;
}

// Takes nearly all memory around the pinned block [begin, begin + bytes), and gives it back. When there is no
// other, the block serves as a whole.
int surround(CuDevicePtr begin, std::size_t bytes) {
  std::vector<CuDevicePtr> others;
  CuDevicePtr other = 0;
  for (const std::size_t each : {5 * kMiB, 3 * kMiB / 2, kMiB / 8}) {
    while (others.size() < 200 && driver.cuMemAlloc_v2(&other, each) == CuResult::kSuccess) {
      CHECK(other == begin || other >= begin + bytes || other + each <= begin);
      others.push_back(other);
    }
  }
  for (const CuDevicePtr one : others) CHECK_CU(driver.cuMemFree_v2(one));
  return 0;
}

// Two threads at once need memory that is free, but not yet with the arena or the driver: while one of them
// gives it back, the other one finds none.
int two_in_need() {
  constexpr int kRounds = 40;
  const std::size_t total = free_bytes();
  CuStream stream = new_stream();
  for (const bool is_pitched : {false, true}) {
    int refused = 0;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<CuDevicePtr> blocks(6);
      for (CuDevicePtr& one : blocks) CHECK_CU(driver.cuMemAlloc_v2(&one, total / 8));
      CuGraph graph = nullptr;
      // Its frees are put off until its end.
      if (!is_pitched) CHECK_CU(driver.cuStreamBeginCapture_v2(stream, CuCaptureMode::kRelaxed));
      for (const CuDevicePtr one : blocks) CHECK_CU(driver.cuMemFree_v2(one));
      if (!is_pitched) CHECK_CU(driver.cuStreamEndCapture(stream, &graph));
      CuContext context = nullptr;
      CHECK_CU(driver.cuCtxGetCurrent(&context));
      std::atomic<int> ready{0}, failed{0};
      CuDevicePtr taken[2] = {};
      const auto take = [&](int i) {
        (void)driver.cuCtxSetCurrent(context);
        ++ready;
        while (ready < 2) std::this_thread::yield();
        std::size_t pitch = 0;
        const CuResult result = is_pitched ? driver.cuMemAllocPitch_v2(&taken[i], &pitch, total / 32, 10, 4)
                                           : driver.cuMemAlloc_v2(&taken[i], total / 16 * 5);
        failed += result != CuResult::kSuccess;
      };
      std::thread other(take, 0);
      take(1);
      other.join();
      refused += failed.load() > 0;
      for (const CuDevicePtr one : taken)
        if (one != 0) CHECK_CU(driver.cuMemFree_v2(one));
      if (graph != nullptr) CHECK_CU(driver.cuGraphDestroy(graph));
    }
    std::printf("%s: refused in %d rounds\n", is_pitched ? "of the driver" : "of the arena", refused);
  }
  return 0;
}

// Used again and freed again, a block is pinned still.
int pinned_again() {
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB / 2));
  if (show_outside(block) != 0) return 1;
  CHECK_CU(driver.cuMemFree_v2(block));
  if (surround(block, kMiB / 2) != 0) return 1;
  for (int i = 0; i < 2; ++i) {
    CuDevicePtr again = 0;
    CHECK_CU(driver.cuMemAlloc_v2(&again, kMiB / 2));
    std::printf("same address %d\n", again == block);
    CHECK_CU(driver.cuMemFree_v2(again));
    if (surround(block, kMiB / 2) != 0) return 1;
  }
  return 0;
}

// A block has no handle of cuMemCreate: such a handle would be that of a chunk, with other blocks in it.
int handles() {
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, 3 * kMiB));
  for (const CuDevicePtr address : {block, block + 2 * kMiB}) {
    CuMemHandle handle = 0;
    std::printf("%u\n",
                number(driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address))));
  }
  CHECK_CU(driver.cuMemFree_v2(block));
  return 0;
}

// A network card that has the descriptor of a block reaches the same memory by it after the free.
int exported() {
  CuDevicePtr block = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&block, 6 * kMiB));
  int file = -1;
  CHECK_CU(driver.cuMemGetHandleForAddressRange(&file, block + kMiB, 2 * kMiB,
                                                CuMemRangeHandleType::kDmaBufFd, 0));
  CHECK_CU(driver.cuMemsetD8_v2(block, 0x77, 6 * kMiB));
  CHECK_CU(driver.cuMemFree_v2(block));
  std::vector<CuDevicePtr> others(8);
  for (CuDevicePtr& other : others) {
    CHECK_CU(driver.cuMemAlloc_v2(&other, 5 * kMiB));
    CHECK(other >= block + 6 * kMiB || other + 5 * kMiB <= block);
  }
  CuDevicePtr again = 0;
  if (int failed = ask_again(block, &again)) return failed;
  for (const CuDevicePtr other : others) CHECK_CU(driver.cuMemFree_v2(other));
  CHECK_CU(driver.cuMemFree_v2(again));
  ::close(file);
  return 0;
}

// Two devices: each has its own, and each reaches the other's.
int devices() {
  CuContext second = nullptr;
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&second, 1));
  CuStream here = new_stream();
  CuDevicePtr a = 0, b = 0;
  CHECK_CU(driver.cuMemAllocAsync(&a, kMiB, here));
  CHECK_CU(driver.cuMemsetD8Async(a, 0x21, kMiB, here));
  CHECK_CU(driver.cuStreamSynchronize(here));
  CHECK_CU(driver.cuCtxSetCurrent(second));
  CuStream there = new_stream();
  CHECK_CU(driver.cuMemAlloc_v2(&b, kMiB));
  // In the order of a stream of another device than the current one: the memory is that one's.
  CuDevicePtr c = 0;
  CHECK_CU(driver.cuMemAllocAsync(&c, kMiB, here));
  int device = -1;
  CHECK_CU(driver.cuPointerGetAttribute(&device, CuPointerAttribute::kDeviceOrdinal, c));
  std::printf("device of the stream %d\n", device);
  CHECK_CU(driver.cuMemcpyAsync(b, a, kMiB, there));
  std::vector<unsigned char> back(kMiB);
  CHECK_CU(driver.cuMemcpyDtoHAsync_v2(back.data(), b, kMiB, there));
  CHECK_CU(driver.cuStreamSynchronize(there));
  std::printf("copied %d\n",
              std::all_of(back.begin(), back.end(), [](unsigned char byte) { return byte == 0x21; }));
  // Freed on a stream of the other device, which the arena of this one cannot ask later.
  for (int i = 0; i < 5; ++i) CHECK_CU(driver.cuMemcpyAsync(b, a, kMiB, there));
  CHECK_CU(driver.cuMemFreeAsync(a, there));
  std::printf("freed on its stream: idle %d\n", is_idle(there));
  CHECK_CU(driver.cuMemFreeAsync(c, here));
  CHECK_CU(driver.cuMemFree_v2(b));
  CHECK_CU(driver.cuStreamSynchronize(there));
  CHECK_CU(driver.cuStreamSynchronize(here));
  CHECK_CU(driver.cuDevicePrimaryCtxRelease_v2(1));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  return 0;
}

// Work of a stream of device 1 reads a block of device 0, which is current or not when the block is freed.
int frees_beside_peers() {
  CuContext second = nullptr;
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&second, 1));
  CHECK_CU(driver.cuCtxSetCurrent(second));
  const CuStream there = new_stream();
  CuDevicePtr target = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&target, kMiB));
  const auto tell = [&](const char* when, CuContext current) {
    CuDevicePtr block = 0;
    CHECK_CU(driver.cuCtxSetCurrent(context));
    CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
    for (int i = 0; i < 5; ++i) CHECK_CU(driver.cuMemcpyAsync(target, block, kMiB, there));
    CHECK_CU(driver.cuCtxSetCurrent(current));
    CHECK_CU(driver.cuMemFree_v2(block));
    std::printf("%s: idle %d\n", when, is_idle(there));
    CHECK_CU(driver.cuStreamSynchronize(there));
    return 0;
  };
  if (tell("of the user", second) != 0) return 1;
  CHECK_CU(driver.cuCtxSetCurrent(second));
  CHECK_CU(driver.cuCtxEnablePeerAccess(context, 0));
  if (tell("of the owner, with access", context) != 0) return 1;
  CHECK_CU(driver.cuCtxSetCurrent(context));
  return 0;
}

// A free is put off in one context, whose work uses the block, and completed in another.
int put_off_elsewhere() {
  CuContext own = nullptr;
  CuDevicePtr block = 0, other = 0;
  const CuStream captured = new_stream();
  CHECK_CU(driver.cuMemAlloc_v2(&block, kMiB));
  CHECK_CU(driver.cuMemAlloc_v2(&other, kMiB));
  CHECK_CU(driver.cuStreamBeginCapture_v2(captured, CuCaptureMode::kRelaxed));
  CHECK_CU(driver.cuCtxCreate_v2(&own, 0, 0));
  const CuStream there = new_stream();
  if (queue_work(there, block) != 0) return 1;
  CHECK_CU(driver.cuMemFree_v2(block));
  std::printf("put off: idle %d\n", is_idle(there));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuGraph graph = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(captured, &graph));
  CHECK_CU(driver.cuMemFree_v2(other));
  std::printf("completed: idle %d\n", is_idle(there));
  CHECK_CU(driver.cuCtxDestroy_v2(own));
  return 0;
}

// The wait of a free is refused, as it is when another thread begins a capture just then.
int refused_wait() {
  void* const fake = ::dlopen("libcuda.so.1", RTLD_NOW);
  auto* const fail =
      reinterpret_cast<int (*)(const char*, std::uint64_t, int)>(::dlsym(fake, "fake_cuda_fail"));
  CHECK(fail != nullptr);
  const CuStream busy = new_stream();
  CuDevicePtr freed = 0, next = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&freed, kMiB));
  std::atomic<bool> is_open{false};
  CHECK_CU(driver.cuLaunchHostFunc(busy, wait_at_gate, &is_open));
  CHECK_CU(driver.cuMemsetD8Async(freed, 9, kMiB, busy));
  fail("cuCtxSynchronize", 1, static_cast<int>(CuResult::kStreamCaptureUnsupported));
  CHECK_CU(driver.cuMemFree_v2(freed));
  CHECK_CU(driver.cuMemAlloc_v2(&next, kMiB));
  return tell_next(next, &is_open);
}

// One thread frees while another one captures its own stream again and again.
int captures_beside_frees() {
  std::atomic<bool> is_over{false};
  std::atomic<int> failures{0};
  std::thread freeing([&] {
    (void)driver.cuCtxSetCurrent(context);
    while (!is_over) {
      CuDevicePtr block = 0;
      if (driver.cuMemAlloc_v2(&block, 4096) != CuResult::kSuccess ||
          driver.cuMemFree_v2(block) != CuResult::kSuccess)
        ++failures;
    }
  });
  // So that calls wait for the fake's lock, and others come between.
  std::vector<std::thread> asking;
  for (int i = 0; i < 3; ++i) {
    asking.emplace_back([&, asked = new_stream()] {
      while (!is_over) (void)is_idle(asked);
    });
  }
  const CuStream stream = new_stream();
  for (int i = 0; i < 3000; ++i) {
    CuGraph graph = nullptr;
    if (driver.cuStreamBeginCapture_v2(stream, CuCaptureMode::kThreadLocal) != CuResult::kSuccess ||
        driver.cuStreamEndCapture(stream, &graph) != CuResult::kSuccess)
      ++failures;
    if (graph != nullptr) (void)driver.cuGraphDestroy(graph);
  }
  is_over = true;
  freeing.join();
  for (std::thread& thread : asking) thread.join();
  std::printf("failures %d\n", failures.load());
  return 0;
}

}  // namespace

int run(const std::string& matter) {
  const std::map<std::string, std::function<int()>> matters = {
      {"waiting", waiting},
      {"info", info},
      {"full", full},
      {"pool", pool},
      {"elsewhere", elsewhere},
      {"capture", capture},
      {"reset", reset},
      {"thread", thread_streams},
      {"attributes", attributes},
      {"streams", streams},
      {"frees", frees},
      {"pinned", pinned},
      {"exported", exported},
      {"devices", devices},
      {"reuse", reuse},
      {"late-free", late_free},
      {"thread-free", thread_free},
      {"thread-resets", thread_resets},
      {"many-threads", many_threads},
      {"releases", releases},
      {"stream-reset", stream_reset},
      {"captures", captures},
      {"captured-stream-destroyed", captured_stream_destroyed},
      {"retain-beside-release", retain_beside_release},
      {"pinned-sizes", pinned_sizes},
      {"capture-reset", capture_reset},
      {"make-way", make_way},
      {"ended-streams", ended_streams},
      {"trim-beside-work", trim_beside_work},
      {"frees-of-threads", frees_of_threads},
      {"cancelled-threads", cancelled_threads},
      {"pool-ended", pool_ended},
      {"pinned-again", pinned_again},
      {"handles", handles},
      {"buffer-ids", buffer_ids},
      {"two-in-need", two_in_need},
      {"frees-beside-peers", frees_beside_peers},
      {"refused-wait", refused_wait},
      {"put-off-elsewhere", put_off_elsewhere},
      {"captures-beside-frees", captures_beside_frees},
      {"host-memory", host_memory}};
  if (!query_driver("libcuda.so.1", kProcAddressDefault, &driver) ||
      !query_driver("libcuda.so.1", kProcAddressPerThreadStream, &per_thread)) {
    return 2;
  }
  if (matter == "own-context") return own_context_alone();
  const auto found = matters.find(matter);
  if (found == matters.end() || start() != 0) return 2;
  return found->second();
}

}  // namespace forebay::testing

int main(int argc, char** argv) {
  return forebay::testing::run(argc > 1 ? argv[1] : "");
}
