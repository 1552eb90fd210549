// Does the same as PyTorch with a pluggable allocator: opens the library by its path, finds the functions by
// their names, and allocates, uses and frees on streams. It also takes some memory from the driver.
//   torch_program PATH_OF_CORE [full | record | record-many | record-device | record-thread | shared-thread |
//   capture | graph-memory | pool | fork | pinned | shared-record]
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/allocator/preload/driver_access.h"

namespace forebay::testing {
namespace {

using Allocate = void*(ssize_t bytes, int device, void* stream);
using Free = void(void* block, ssize_t bytes, int device, void* stream);
using RecordStream = void(void* block, void* stream);

Driver driver;
Allocate* allocate = nullptr;
Allocate* pool_allocate = nullptr;
Free* give_back = nullptr;
RecordStream* record_stream = nullptr;

CuDevicePtr address_of(void* block) {
  return reinterpret_cast<CuDevicePtr>(block);
}

int use_streams(CuContext context, int seed) {
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuStream first = nullptr, second = nullptr;
  CHECK_CU(driver.cuStreamCreate(&first, kStreamNonBlocking));
  CHECK_CU(driver.cuStreamCreate(&second, kStreamNonBlocking));
  CuEvent event = nullptr;
  CHECK_CU(driver.cuEventCreate(&event, kEventDisableTiming));
  constexpr std::size_t kWords = 300'000;
  std::vector<unsigned> back(kWords);
  for (int round = 0; round < 30; ++round) {
    const unsigned value = static_cast<unsigned>(seed * 100 + round);
    void* const block = allocate(kWords * 4, 0, first);
    CHECK(block != nullptr);
    CHECK_CU(driver.cuMemsetD32Async(address_of(block), value, kWords, first));
    CHECK_CU(driver.cuEventRecord(event, first));
    CHECK_CU(driver.cuStreamWaitEvent(second, event, 0));
    CHECK_CU(driver.cuMemcpyDtoHAsync_v2(back.data(), address_of(block), kWords * 4, second));
    // Freed on the first stream, while the second still reads.
    record_stream(block, second);
    give_back(block, kWords * 4, 0, first);
    void* const next = allocate(kWords * 4, 0, first);
    CHECK(next != nullptr);
    CHECK_CU(driver.cuMemsetD32Async(address_of(next), ~value, kWords, first));
    give_back(next, kWords * 4, 0, first);
    CHECK_CU(driver.cuStreamSynchronize(second));
    CHECK(std::all_of(back.begin(), back.end(), [&](unsigned one) { return one == value; }));
  }
  CHECK_CU(driver.cuStreamSynchronize(first));
  return 0;
}

// On a thread's default stream, which other threads see only through events.
int use_thread_stream(CuContext context, int seed) {
  CHECK_CU(driver.cuCtxSetCurrent(context));
  const CuStream own = reinterpret_cast<CuStream>(std::uintptr_t{2});  // CU_STREAM_PER_THREAD.
  CuStream other = nullptr;
  CHECK_CU(driver.cuStreamCreate(&other, kStreamNonBlocking));
  constexpr std::size_t kWords = 300'000;
  std::vector<unsigned> back(kWords);
  for (int round = 0; round < 10; ++round) {
    const unsigned value = static_cast<unsigned>(seed * 100 + round);
    void* const block = allocate(kWords * 4, 0, own);
    CHECK(block != nullptr);
    CHECK_CU(driver.cuMemsetD32Async(address_of(block), value, kWords, own));
    CHECK_CU(driver.cuMemcpyDtoHAsync_v2(back.data(), address_of(block), kWords * 4, own));
    give_back(block, kWords * 4, 0, own);
    void* const next = allocate(kWords * 4, 0, other);
    CHECK(next != nullptr);
    CHECK_CU(driver.cuMemsetD32Async(address_of(next), ~value, kWords, other));
    CHECK_CU(driver.cuStreamSynchronize(other));
    CHECK_CU(driver.cuStreamSynchronize(own));
    CHECK(std::all_of(back.begin(), back.end(), [&](unsigned one) { return one == value; }));
    give_back(next, kWords * 4, 0, other);
  }
  return 0;
}

// A block that another stream still uses is not given out again, not even on its own stream.
int record_use(CuContext context) {
  constexpr ssize_t kBytes = 8 << 20;
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuStream first = nullptr, second = nullptr;
  CHECK_CU(driver.cuStreamCreate(&first, kStreamNonBlocking));
  CHECK_CU(driver.cuStreamCreate(&second, kStreamNonBlocking));
  void* const block = allocate(kBytes, 0, first);
  CHECK(block != nullptr);
  for (int i = 0; i < 5; ++i) CHECK_CU(driver.cuMemsetD8Async(address_of(block), 1, 4096, second));
  record_stream(block, second);
  give_back(block, kBytes, 0, first);
  void* const next = allocate(kBytes, 0, first);
  const bool is_idle = driver.cuStreamQuery(second) == CuResult::kSuccess;
  std::printf("idle %d: same block %d\n", is_idle, next == block);
  give_back(next, kBytes, 0, first);
  CHECK_CU(driver.cuStreamSynchronize(second));
  return 0;
}

// A stream whose work waits until the gate opens, which another thread does a moment later.
class HeldStream {
 public:
  int hold(bool is_default = false) {
    if (!is_default) CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
    CHECK_CU(driver.cuLaunchHostFunc(
        stream,
        [](void* gate) {
          while (!static_cast<HeldStream*>(gate)->open_) std::this_thread::yield();
        },
        this));
    opener_ = std::thread([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      open_ = true;
    });
    return 0;
  }
  ~HeldStream() { opener_.join(); }
  CuStream stream = nullptr;

 private:
  std::atomic<bool> open_{false};
  std::thread opener_;
};

// A stream that reads the block has no place in the arena, or the block is known outside.
int record_use_beyond(int streams, bool is_known) {
  constexpr ssize_t kBytes = 4 << 20;
  std::vector<CuStream> live(static_cast<std::size_t>(streams));
  for (CuStream& stream : live) {
    CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
    CHECK(allocate(4096, 0, stream) != nullptr);
  }
  void* const block = allocate(kBytes, 0, live[0]);
  void* const copy = allocate(kBytes, 0, live[0]);
  CHECK(block != nullptr && copy != nullptr);
  const unsigned on = 1;
  if (is_known) (void)driver.cuPointerSetAttribute(&on, CuPointerAttribute::kSyncMemops, address_of(block));
  CHECK_CU(driver.cuMemsetD8Async(address_of(block), 7, kBytes, live[0]));
  CHECK_CU(driver.cuStreamSynchronize(live[0]));
  HeldStream other;
  if (other.hold() != 0) return 1;
  CHECK_CU(driver.cuMemcpyAsync(address_of(copy), address_of(block), kBytes, other.stream));
  record_stream(block, other.stream);
  give_back(block, kBytes, 0, live[0]);
  void* const next = allocate(kBytes, 0, live[0]);
  CHECK(next != nullptr);
  CHECK_CU(driver.cuMemsetD8Async(address_of(next), 9, kBytes, live[0]));
  CHECK_CU(driver.cuStreamSynchronize(live[0]));
  CHECK_CU(driver.cuStreamSynchronize(other.stream));
  unsigned char byte = 0;
  CHECK_CU(driver.cuMemcpyDtoH_v2(&byte, address_of(copy) + kBytes / 2, 1));
  std::printf("read %d\n", byte);
  return 0;
}

// The default stream of another device reads the block.
int record_other_device(CuContext context) {
  constexpr ssize_t kBytes = 4 << 20;
  CuContext second = nullptr;
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&second, 1));
  CuStream stream = nullptr;
  CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
  void* const block = allocate(kBytes, 0, stream);
  CHECK(block != nullptr);
  CHECK_CU(driver.cuMemsetD8Async(address_of(block), 7, kBytes, stream));
  CHECK_CU(driver.cuStreamSynchronize(stream));
  CHECK_CU(driver.cuCtxSetCurrent(second));
  void* const copy = allocate(kBytes, 1, nullptr);
  HeldStream other;
  if (other.hold(true) != 0) return 1;
  CHECK_CU(driver.cuMemcpyAsync(address_of(copy), address_of(block), kBytes, nullptr));
  record_stream(block, nullptr);
  CHECK_CU(driver.cuCtxSetCurrent(context));
  give_back(block, kBytes, 0, stream);
  for (int i = 0; i < 10; ++i) {
    void* const next = allocate(kBytes, 0, stream);
    CHECK_CU(driver.cuMemsetD8Async(address_of(next), 9, kBytes, stream));
    CHECK_CU(driver.cuStreamSynchronize(stream));
  }
  CHECK_CU(driver.cuCtxSetCurrent(second));
  CHECK_CU(driver.cuCtxSynchronize());
  unsigned char byte = 0;
  CHECK_CU(driver.cuMemcpyDtoH_v2(&byte, address_of(copy) + kBytes / 2, 1));
  std::printf("read %d\n", byte);
  return 0;
}

// Memory of a pool that a graph was captured with serves again when PyTorch frees it, and not while the graph
// runs, on whichever stream.
int pool_memory() {
  constexpr ssize_t kBytes = 20 << 20;
  CuStream stream = nullptr, next = nullptr;
  CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
  CHECK_CU(driver.cuStreamCreate(&next, kStreamNonBlocking));
  for (int round = 0; round < 12; ++round) {
    void* const before = round % 2 == 0 ? pool_allocate(kBytes, 0, stream) : nullptr;
    CHECK_CU(driver.cuStreamBeginCapture_v2(stream, CuCaptureMode::kGlobal));
    void* const block = before != nullptr ? before : pool_allocate(kBytes, 0, stream);
    CHECK(block != nullptr);
    CHECK_CU(driver.cuMemsetD8Async(address_of(block), 7, kBytes, stream));
    CuGraph graph = nullptr;
    CHECK_CU(driver.cuStreamEndCapture(stream, &graph));
    CuGraphExec runnable = nullptr;
    CHECK_CU(driver.cuGraphInstantiateWithFlags(&runnable, graph, 0));
    HeldStream other;
    if (other.hold() != 0) return 1;
    CHECK_CU(driver.cuGraphLaunch(runnable, other.stream));
    CHECK_CU(driver.cuGraphExecDestroy(runnable));
    CHECK_CU(driver.cuGraphDestroy(graph));
    give_back(block, kBytes, 0, stream);
    void* const tensor = allocate(kBytes, 0, next);
    CHECK(tensor != nullptr);
    CHECK_CU(driver.cuMemsetD8Async(address_of(tensor), 9, kBytes, next));
    CHECK_CU(driver.cuStreamSynchronize(next));
    CHECK_CU(driver.cuStreamSynchronize(other.stream));
    unsigned char byte = 0;
    CHECK_CU(driver.cuMemcpyDtoH_v2(&byte, address_of(tensor) + kBytes / 2, 1));
    CHECK(byte == 9);
    give_back(tensor, kBytes, 0, next);
  }
  std::printf("all well\n");
  return 0;
}

// A child that drops its parent's tensors changes nothing of its parent's.
int forked() {
  void* const block = allocate(8 << 20, 0, nullptr);
  CHECK(block != nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    give_back(block, 8 << 20, 0, nullptr);
    record_stream(block, nullptr);
    ::_exit(allocate(4096, 0, nullptr) == nullptr ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  std::printf("all well\n");
  return 0;
}

// The default stream of this thread uses the block last: it is recorded, or the block is freed there, known
// outside.
int use_thread_last(CuContext context, bool is_known) {
  constexpr ssize_t kBytes = 4 << 20;
  CHECK_CU(driver.cuCtxSetCurrent(context));
  const CuStream own = reinterpret_cast<CuStream>(std::uintptr_t{2});  // CU_STREAM_PER_THREAD.
  CuStream stream = nullptr, other = nullptr;
  CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
  CHECK_CU(driver.cuStreamCreate(&other, kStreamNonBlocking));
  void* const block = allocate(kBytes, 0, stream);
  CHECK(block != nullptr);
  CuIpcMemHandle handle = {};
  if (is_known) CHECK_CU(driver.cuIpcGetMemHandle(&handle, address_of(block)));
  for (int i = 0; i < 5; ++i) CHECK_CU(driver.cuMemsetD8Async(address_of(block), 1, 4096, own));
  if (!is_known) record_stream(block, own);
  give_back(block, kBytes, 0, is_known ? own : stream);
  void* next = nullptr;
  std::thread([&] {
    (void)driver.cuCtxSetCurrent(context);
    next = allocate(kBytes, 0, other);
  }).join();
  const bool is_idle = driver.cuStreamQuery(own) == CuResult::kSuccess;
  std::printf("idle %d: same block %d\n", is_idle, next == block);
  CHECK_CU(driver.cuStreamSynchronize(own));
  give_back(next, kBytes, 0, other);
  return 0;
}

// The graph may run on any stream, so it gets no memory that work queued on the captured stream may still
// use.
int capture(CuContext context) {
  constexpr ssize_t kBytes = 8 << 20;
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuStream stream = nullptr;
  CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
  void* const block = allocate(kBytes, 0, stream);
  CHECK(block != nullptr);
  for (int i = 0; i < 5; ++i) CHECK_CU(driver.cuMemsetD8Async(address_of(block), 1, 4096, stream));
  give_back(block, kBytes, 0, stream);
  CHECK_CU(driver.cuStreamBeginCapture_v2(stream, CuCaptureMode::kRelaxed));
  void* const next = allocate(kBytes, 0, stream);
  CuGraph graph = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(stream, &graph));
  const bool is_idle = driver.cuStreamQuery(stream) == CuResult::kSuccess;
  std::printf("idle %d: same block %d\n", is_idle, next == block);
  CHECK_CU(driver.cuStreamSynchronize(stream));
  give_back(next, kBytes, 0, stream);
  CHECK_CU(driver.cuStreamSynchronize(stream));
  return 0;
}

// A graph writes its temporary and its result each time it runs, so nothing else gets their memory. Within
// the capture a temporary's memory serves again.
int graph_memory(CuContext context) {
  constexpr ssize_t kBytes = 4 << 20;
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuStream captured = nullptr, other = nullptr;
  CHECK_CU(driver.cuStreamCreate(&captured, kStreamNonBlocking));
  CHECK_CU(driver.cuStreamCreate(&other, kStreamNonBlocking));
  // Freed in the capture, known outside and used by another stream before.
  void* const early = allocate(kBytes, 0, captured);
  CHECK(early != nullptr);
  const unsigned on = 1;
  (void)driver.cuPointerSetAttribute(&on, CuPointerAttribute::kSyncMemops, address_of(early));
  record_stream(early, other);
  CHECK_CU(driver.cuStreamBeginCapture_v2(captured, CuCaptureMode::kThreadLocal));
  CHECK_CU(driver.cuMemsetD8Async(address_of(early), 9, kBytes, captured));
  give_back(early, kBytes, 0, captured);
  void* const temporary = allocate(kBytes, 0, captured);
  void* const result = allocate(kBytes, 0, captured);
  CHECK(temporary != nullptr && result != nullptr);
  CHECK_CU(driver.cuMemsetD8Async(address_of(temporary), 9, kBytes, captured));
  CHECK_CU(driver.cuMemcpyAsync(address_of(result), address_of(temporary), kBytes, captured));
  give_back(temporary, kBytes, 0, captured);
  void* const second = allocate(kBytes, 0, captured);
  record_stream(second, other);  // Work of the graph may use it beside this stream's.
  give_back(second, kBytes, 0, captured);
  void* const third = allocate(kBytes, 0, captured);
  CHECK(third != second);
  CuGraph graph = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(captured, &graph));
  CuGraphExec runnable = nullptr;
  CHECK_CU(driver.cuGraphInstantiateWithFlags(&runnable, graph, 0));
  give_back(result, kBytes, 0, captured);
  CuDevicePtr plain = 0;  // A plain free completes those that the capture has put off.
  CHECK_CU(driver.cuMemAlloc_v2(&plain, 4096));
  CHECK_CU(driver.cuMemFree_v2(plain));
  std::vector<CuDevicePtr> tensors;
  for (int i = 0; i < 8; ++i) {
    const CuStream stream = i % 2 == 0 ? captured : other;
    tensors.push_back(address_of(allocate(kBytes, 0, stream)));
    CHECK(tensors.back() != 0);
    CHECK_CU(driver.cuMemsetD8Async(tensors.back(), 1, kBytes, stream));
    CHECK_CU(driver.cuStreamSynchronize(stream));
  }
  CHECK_CU(driver.cuGraphLaunch(runnable, captured));
  CHECK_CU(driver.cuStreamSynchronize(captured));
  int overwritten = 0;
  for (const CuDevicePtr tensor : tensors) {
    unsigned char byte = 0;
    CHECK_CU(driver.cuMemcpyDtoH_v2(&byte, tensor + kBytes / 2, 1));
    overwritten += byte != 1;
  }
  std::printf("within the capture: same block %d; overwritten %d\n", second == temporary, overwritten);
  // Another capture does not use it: both graphs may run.
  CHECK_CU(driver.cuStreamBeginCapture_v2(captured, CuCaptureMode::kThreadLocal));
  give_back(third, kBytes, 0, captured);
  CHECK(allocate(kBytes, 0, captured) != third);
  CuGraph next = nullptr;
  CHECK_CU(driver.cuStreamEndCapture(captured, &next));
  CHECK_CU(driver.cuGraphDestroy(next));
  CHECK_CU(driver.cuGraphExecDestroy(runnable));
  CHECK_CU(driver.cuGraphDestroy(graph));
  return 0;
}

// A block that is known outside the process keeps its memory after its free.
int pinned(CuContext context) {
  constexpr ssize_t kBytes = 6 << 20;
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuStream stream = nullptr;
  CHECK_CU(driver.cuStreamCreate(&stream, kStreamNonBlocking));
  void* const block = allocate(kBytes, 0, stream);
  CHECK(block != nullptr);
  // The driver may refuse it for mapped memory.
  const unsigned on = 1;
  (void)driver.cuPointerSetAttribute(&on, CuPointerAttribute::kSyncMemops, address_of(block));
  give_back(block, kBytes, 0, stream);
  for (int i = 0; i < 8; ++i) {
    const CuDevicePtr other = address_of(allocate(5 << 20, 0, stream));
    CHECK(other != 0);
    CHECK(other >= address_of(block) + kBytes || other + (5 << 20) <= address_of(block));
  }
  CuDevicePtr again = 0;
  CHECK_CU(driver.cuMemAllocAsync(&again, kBytes, stream));
  std::printf("same block %d\n", again == address_of(block));
  return 0;
}

// A block of the driver's is left alone, and counted as the driver's until the driver frees it.
int strange(CuContext context) {
  CHECK_CU(driver.cuCtxSetCurrent(context));
  CuDevicePtr plain = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&plain, 1u << 20));
  give_back(reinterpret_cast<void*>(plain), 1u << 20, 0, nullptr);
  CHECK_CU(driver.cuMemFree_v2(plain));
  return 0;
}

int run(const char* core, const std::string& what) {
  const bool fill = what == "full";
  void* const library = ::dlopen(core, RTLD_NOW);
  if (library == nullptr) std::printf("%s\n", ::dlerror());
  CHECK(library != nullptr);
  allocate = reinterpret_cast<Allocate*>(::dlsym(library, "forebay_torch_alloc"));
  give_back = reinterpret_cast<Free*>(::dlsym(library, "forebay_torch_free"));
  pool_allocate = reinterpret_cast<Allocate*>(::dlsym(library, "forebay_torch_pool_alloc"));
  record_stream = reinterpret_cast<RecordStream*>(::dlsym(library, "forebay_torch_record_stream"));
  CHECK(allocate != nullptr && give_back != nullptr && record_stream != nullptr && pool_allocate != nullptr);
  CHECK(query_driver("libcuda.so.1", kProcAddressDefault, &driver));
  CuContext context = nullptr;
  CHECK_CU(driver.cuInit(0));
  CHECK_CU(driver.cuDevicePrimaryCtxRetain(&context, 0));
  CHECK_CU(driver.cuCtxSetCurrent(context));
  if (what == "record") return record_use(context);
  if (what == "record-many") return record_use_beyond(64, false);
  if (what == "shared-record") return record_use_beyond(1, true);
  if (what == "record-device") return record_other_device(context);
  if (what == "pool") return pool_memory();
  if (what == "fork") return forked();
  if (what == "record-thread") return use_thread_last(context, false);
  if (what == "shared-thread") return use_thread_last(context, true);
  if (what == "capture") return capture(context);
  if (what == "graph-memory") return graph_memory(context);
  if (what == "pinned") return pinned(context);
  if (what == "strange") return strange(context);

  CHECK(allocate(0, 0, nullptr) == nullptr);
  void* const block = allocate(1u << 20, 0, nullptr);
  CuDevicePtr plain = 0;
  CHECK_CU(driver.cuMemAlloc_v2(&plain, 1u << 20));
  CHECK(block != nullptr && address_of(block) != plain);
  give_back(block, 1u << 20, 0, nullptr);
  CHECK_CU(driver.cuMemFree_v2(plain));
  if (fill) {
    std::vector<void*> blocks;
    for (void* one = allocate(4u << 20, 0, nullptr); one != nullptr; one = allocate(4u << 20, 0, nullptr)) {
      blocks.push_back(one);
    }
    std::printf("%zu blocks of 4 MiB\n", blocks.size());
    for (void* one : blocks) give_back(one, 4u << 20, 0, nullptr);
  }
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&, i] { failures += use_streams(context, i); });
  for (int i = 3; i < 5; ++i) threads.emplace_back([&, i] { failures += use_thread_stream(context, i); });
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  std::printf("all well\n");
  return 0;
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  return argc > 1 ? forebay::testing::run(argv[1], argc > 2 ? argv[2] : "") : 2;
}
