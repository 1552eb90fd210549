// The controls of the fake CUDA driver, for tests. No driver has these entry points.
//
// The fake is a libcuda.so.1 over host memory (see README.md). A program reaches it as it
// reaches the real driver, by dlopen, and reaches these controls by dlsym in the same handle; FakeCuda does
// both. Programs that know nothing of it are steered by environment variables, named beside each option.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace forebay::fake_cuda {

// The host's access to device memory.
enum class HostAccess : int {
  kAllowed = 0,  // Device memory is ordinary memory to the host.
  kDenied =
      1,  // Touching it kills the process, as on a GPU: by protection keys, or windows where there are none.
  // As kDenied, by opening all device memory while any kernel runs (a touch at that moment goes unseen). For
  // kernels that start threads of their own, which protection keys would lock out.
  kWindows = 2,
};

// Fixed from cuInit until fake_cuda_reset.
struct FakeOptions {
  int device_count = 1;                             // FAKE_CUDA_DEVICES
  std::size_t memory_bytes = std::size_t{1} << 30;  // FAKE_CUDA_MEMORY: of each device, in bytes.
  std::size_t granularity = std::size_t{2} << 20;   // FAKE_CUDA_GRANULARITY: of chunks, in bytes.
  HostAccess host_access = HostAccess::kAllowed;    // FAKE_CUDA_STRICT: 0, 1 or 2.
  // Not 0: streams are served in an order drawn from it and operations are held back for a moment, in which
  // the host and other streams may overtake them. FAKE_CUDA_SEED
  std::uint64_t seed = 0;
  std::uint64_t latency_ns = 0;  // FAKE_CUDA_LATENCY_NS: added to every operation.
  std::uint64_t bytes_per_second =
      0;                        // FAKE_CUDA_BANDWIDTH: of every copy and fill; 0 means as fast as it goes.
  bool peers = true;            // FAKE_CUDA_PEERS: devices can reach each other's memory.
  bool gpu_direct_rdma = true;  // FAKE_CUDA_RDMA: reported as supported.
  bool dma_buf = false;         // FAKE_CUDA_DMA_BUF: mapped ranges have descriptors, without the memory.
  bool poison = true;           // FAKE_CUDA_POISON: memory is overwritten when it is created and given back.
  // The driver waits for the device in cuMemFree. Off, a free under queued work is a hazard; on, it waits as
  // the driver does, for programs that rely on it. FAKE_CUDA_FREE_WAITS
  bool free_waits = false;
  int driver_version = 13000;   // FAKE_CUDA_DRIVER_VERSION
  int compute_capability = 90;  // FAKE_CUDA_CAPABILITY: of each device; images must have code for it.
  bool quiet = false;           // FAKE_CUDA_QUIET: hazards are counted and not printed.
  // The harsh side of a driver: it may do each of these, and programs must not rely on the contrary.
  // FAKE_CUDA_CALLBACK_THREADS: host functions of one context that run at once; 0 means any number.
  unsigned callback_threads = 0;
  // FAKE_CUDA_QUEUE: operations that may be pending on a stream. A call that queues one more blocks until one
  // is done, and so does every other call that queues work in that context. 0 means any number.
  std::size_t queue_limit = 0;
  // FAKE_CUDA_PAGEABLE_WAITS: a copy from or to ordinary host memory waits for its stream and returns when
  // the bytes have moved.
  bool pageable_waits = false;
  // FAKE_CUDA_REFUSE_PART_PINNED: a copy whose host range is pinned in part is refused.
  bool refuse_part_pinned = false;
  // FAKE_CUDA_NEED_DEVICE_MAP: cuMemHostGetDevicePointer works only for memory with the DEVICEMAP flag.
  bool need_device_map = false;
  // FAKE_CUDA_HARDWARE_QUEUES: streams share CUDA_DEVICE_MAX_CONNECTIONS hardware queues (8 where that is not
  // set when cuInit is called). An operation starts only after all that were queued before it in the same
  // hardware queue have started; a host function and a wait for a value hold the queue until they are done.
  bool hardware_queues = false;
  // FAKE_CUDA_CALLS_WAIT: calls that a driver may let wait for all work of the context do wait: allocating
  // and freeing memory (not chunks), pinning, loading modules and kernels.
  bool calls_wait = false;
  // FAKE_CUDA_STICKY_FAULTS: a scripted fault that a driver cannot recover from poisons the current context.
  bool sticky_faults = false;
  // FAKE_CUDA_HARSH=N: one callback thread, a queue of N, and all of the above; where no seed is given, N is
  // the seed too. It applies to the options of fake_cuda_configure as well.
  // FAKE_CUDA_SUMMARY: a file that the process's end writes the account to, for programs that know nothing of
  // the fake; a line for each figure. FAKE_CUDA_FAIL: the number, from 1, of the call among all that need a
  // start which fails, with FAKE_CUDA_FAIL_RESULT (a CUresult; default 999). From the environment only.
};

// The living objects, and the defects found so far.
struct FakeAccount {
  // Handles. Default streams, default pools and primary contexts that nobody retains are not counted.
  std::uint64_t contexts, streams, events, modules, pools, graphs, graph_execs;
  std::uint64_t reservations, chunks, mappings, allocations, pool_blocks, ipc_mappings;
  std::uint64_t host_allocations, host_registrations;
  // Bytes of physical memory charged to the devices, and queued work that has not finished.
  std::uint64_t device_bytes, operations;
  // The most that was charged at once, to all devices together.
  std::uint64_t peak_device_bytes;
  // Handles that were still alive when their context was destroyed or reset.
  std::uint64_t orphans;
  // Unmaps, frees and uses that would have corrupted memory, and calls of the driver from host functions.
  std::uint64_t hazards, forbidden_calls;
  // Waits of the host for events that keep a core busy.
  std::uint64_t spinning_waits;

  std::uint64_t live_handles() const {
    return contexts + streams + events + modules + pools + graphs + graph_execs + reservations + chunks +
           mappings + allocations + pool_blocks + ipc_mappings + host_allocations + host_registrations;
  }
};

struct FakeLaunch {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  int device;
};

// A host build of a kernel. `run` computes the whole grid before it returns; `arguments[i]` points to a copy
// of argument i, made at launch, as kernelParams does. It runs with device memory open to the calling thread
// alone (HostAccess).
struct FakeKernel {
  const char* name;
  void (*run)(const FakeLaunch& launch, void* const* arguments);
  std::size_t argument_count;
  const std::size_t* argument_bytes;
};

struct FakeKernelTable {
  const FakeKernel* kernels;
  std::size_t count;
};

// A library named in FAKE_CUDA_KERNELS (paths, separated by colons) exports this with C linkage.
#define FOREBAY_FAKE_KERNELS_SYMBOL "forebay_fake_kernels"
using FakeKernelsFunction = const FakeKernelTable*();

// The fake itself, and its controls.
struct FakeCuda {
  void* library = nullptr;

  // 0, or -1 when a context is alive: reset first.
  int (*configure)(const FakeOptions& options) = nullptr;
  // Destroys all that is alive, waits for running work, forgets faults, counts and registered kernels, and
  // returns to the state before cuInit with the options of the environment.
  void (*reset)() = nullptr;
  // The nth call from now (1 is the next) of `entry` does nothing and returns `result`, a CUresult. `entry`
  // is a name
  // ("cuMemAlloc", all its versions) or a symbol ("cuMemAlloc_v2"). nth 0 forgets it. -1 when there is no
  // such entry.
  int (*fail)(const char* entry, std::uint64_t nth, int result) = nullptr;
  // How often `entry` was called since the last reset, calls that failed included.
  std::uint64_t (*call_count)(const char* entry) = nullptr;
  void (*account)(FakeAccount& account) = nullptr;
  // The table must stay valid until reset. A name that is there already is replaced.
  void (*register_kernels)(const FakeKernelTable& table) = nullptr;

  template <typename Function>
  Function* symbol(const char* name) const {
    auto* const function = reinterpret_cast<Function*>(::dlsym(library, name));
    if (function == nullptr) {
      std::fprintf(stderr, "the fake CUDA driver has no symbol %s: %s\n", name, ::dlerror());
      std::abort();
    }
    return function;
  }

  // Opens the library at `path`; aborts with the loader's message when there is none.
  static FakeCuda open(const char* path) {
    FakeCuda fake;
    fake.library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (fake.library == nullptr) {
      std::fprintf(stderr, "cannot open the fake CUDA driver: %s\n", ::dlerror());
      std::abort();
    }
    fake.configure = fake.symbol<int(const FakeOptions&)>("fake_cuda_configure");
    fake.reset = fake.symbol<void()>("fake_cuda_reset");
    fake.fail = fake.symbol<int(const char*, std::uint64_t, int)>("fake_cuda_fail");
    fake.call_count = fake.symbol<std::uint64_t(const char*)>("fake_cuda_call_count");
    fake.account = fake.symbol<void(FakeAccount&)>("fake_cuda_account");
    fake.register_kernels = fake.symbol<void(const FakeKernelTable&)>("fake_cuda_register_kernels");
    return fake;
  }

  FakeAccount accounts() const {
    FakeAccount result{};
    account(result);
    return result;
  }
};

}  // namespace forebay::fake_cuda
