// The state of the fake driver, and the steps of every entry point.
//
// The functions named as entry points and declared at the end are their bodies; entry_points.cc exports them.
//
// Threads: one mutex guards everything. It is given up while bytes are moved and while foreign code runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/fakes/cuda/memory.h"
#include "tests/fakes/cuda/ptx/program.h"
#include "tests/fakes/cuda/scheduler.h"

namespace forebay::fake_cuda {

struct Context {
  CuContext handle = nullptr;
  int device = 0;
  bool primary = false;
  bool alive = false;
  unsigned flags = 0;
  std::uint64_t retain_count = 0;
  CuResult sticky = CuResult::kSuccess;  // After an illegal address everything returns it until a reset.
  StreamPtr legacy;
  std::map<std::uint64_t, StreamPtr> per_thread;  // By thread number.
  std::set<CuContext> peers;                      // This context may reach their memory.
  unsigned stream_count = 0;                      // Ever made.
};
using ContextPtr = std::shared_ptr<Context>;

struct Event {
  unsigned flags = 0;
  ContextPtr context;
  MarkPtr mark;                       // The last record; null before any.
  std::shared_ptr<Capture> captured;  // When that was in a capturing stream.
  CuStream captured_stream = nullptr;
};
using EventPtr = std::shared_ptr<Event>;

struct Graph {
  std::vector<Operation> operations;
  std::vector<Address> owned;  // Memory that its allocation nodes handed out.
  std::set<Address> freed;     // Memory of its free nodes.
  ~Graph();
};
using GraphPtr = std::shared_ptr<Graph>;

struct Capture {
  std::uint64_t id = 0;
  CuCaptureStatus status = CuCaptureStatus::kActive;
  CuCaptureMode mode = CuCaptureMode::kGlobal;
  std::uint64_t thread = 0;
  CuStream origin = nullptr;
  GraphPtr graph;
  CuGraph graph_handle = nullptr;
  std::set<CuStream> streams;   // The origin and all that joined.
  std::set<CuStream> unjoined;  // Forked and not yet waited for by the origin.
};

struct Pool {
  CuMemoryPool handle = nullptr;
  int device = 0;
  bool is_default = false;
  CuMemPoolProps properties{};
  std::uint64_t release_threshold = 0;
  int reuse_follow = 1, reuse_opportunistic = 1, reuse_internal = 1;
  std::uint64_t reserved = 0, reserved_high = 0, used = 0, used_high = 0;
  std::vector<CuMemAccessFlags> access;  // By device.
  bool destroyed = false;                // Its memory goes when the last block is freed.
};
using PoolPtr = std::shared_ptr<Pool>;

struct Module {
  ContextPtr context;
  std::shared_ptr<const ptx::Module> program;  // Its PTX, where a kernel of it has no host build.
};

// A host build, or a kernel of the module's program.
struct Function {
  CuModule module = nullptr;
  std::string name;
  std::vector<std::size_t> argument_bytes;
  const FakeKernel* host = nullptr;
  std::shared_ptr<const ptx::Kernel> compiled;
  int dynamic_shared_bytes = 48 << 10;
};

struct HostRange {
  std::size_t bytes = 0;
  bool registered = false;  // By cuMemHostRegister; otherwise allocated here.
  unsigned flags = 0;
};

struct Device {
  ContextPtr primary;
  PoolPtr default_pool;
  PoolPtr current_pool;
};

// The living objects, by handle. Handles are numbers that are never used twice, so that a stale one is told
// from a live one.
struct Driver {
  Driver();

  std::mutex mutex;
  Scheduler scheduler{mutex};

  // Read without the mutex.
  std::atomic<long> process{0};  // That called cuInit; 0 before.
  std::atomic<bool> exiting{false};

  FakeOptions options;
  bool initialised = false;
  unsigned connections = 8;  // Hardware queues, where streams share them.
  Memory memory;
  std::vector<Device> devices;
  std::map<CuContext, ContextPtr> contexts;
  std::map<CuStream, StreamPtr> streams;
  std::map<CuEvent, EventPtr> events;
  // Handles that were destroyed. The next ones are the same, as in a driver, where they are addresses.
  std::vector<CuStream> old_streams;
  std::vector<CuEvent> old_events;
  std::map<CuModule, Module> modules;
  std::map<CuFunction, Function> functions;
  std::map<CuMemoryPool, PoolPtr> pools;
  std::map<CuGraph, GraphPtr> graphs;
  std::map<CuGraphExec, GraphPtr> graph_execs;
  std::map<Address, HostRange> host_ranges;
  std::map<std::string, const FakeKernel*> kernels;
  bool kernel_libraries_opened = false;
  std::uint64_t next_stream_id = 1;
  std::uint64_t next_capture_id = 1;
  std::uint64_t orphans = 0;
  std::uint64_t hazards = 0;
  std::uint64_t forbidden_calls = 0;
  std::uint64_t spinning_waits = 0;

  // By EntryPointIndex.
  std::vector<std::uint64_t> calls;
  // Calls that need a start; the one that fails, counted from 1 (0: none), and its result.
  std::uint64_t call_count = 0;
  std::uint64_t failing_call = 0;
  CuResult failing_result = CuResult::kUnknown;
  struct Fault {
    std::size_t entry;
    bool by_name;  // All rows of its name; otherwise its symbol alone.
    std::uint64_t calls_left;
    CuResult result;
  };
  std::vector<Fault> faults;
};

// At the process's end: writes the account to the file that FAKE_CUDA_SUMMARY names.
void write_summary();

// The one driver. Made at first use, never destroyed.
Driver& driver();

// Not a canonical address, so that a program that dereferences a handle stops there and then.
std::uint64_t next_handle_number();
template <typename Handle>
Handle next_handle() {
  return reinterpret_cast<Handle>(next_handle_number());
}
template <typename Handle>
Handle next_handle(std::vector<Handle>& old) {
  if (old.empty()) return next_handle<Handle>();
  const Handle handle = old.back();
  old.pop_back();
  return handle;
}

// Whether no call of a context succeeds after this result of its work.
bool is_sticky(CuResult result);

// A number of the calling thread that no other thread has or had.
std::uint64_t thread_number();

// --- entry (entry.cc) ---

// Counts the call of an entry point and says whether it may go on.
CuResult admit(std::size_t entry);

// Lives while the body of an entry point runs. At its end the caller waits until the context in which it has
// queued work has room again.
class EntryScope {
 public:
  EntryScope();
  ~EntryScope();
  EntryScope(const EntryScope&) = delete;
  EntryScope& operator=(const EntryScope&) = delete;
  // The calling thread has queued work in the context.
  static void note(const ContextPtr& context);
};

// While one lives, a null stream means the per-thread default stream.
class PerThreadScope {
 public:
  explicit PerThreadScope(bool per_thread);
  ~PerThreadScope();
  PerThreadScope(const PerThreadScope&) = delete;
  PerThreadScope& operator=(const PerThreadScope&) = delete;

 private:
  bool before_;
};
bool null_stream_is_per_thread();

// While one lives, the calling thread runs foreign code that must not call the driver.
class ForeignScope {
 public:
  explicit ForeignScope(const char* what);
  ~ForeignScope();
  ForeignScope(const ForeignScope&) = delete;
  ForeignScope& operator=(const ForeignScope&) = delete;
  // Whether it did.
  bool called_driver() const { return called_; }

 private:
  friend CuResult admit(std::size_t entry);
  const char* what_;
  bool called_ = false;
};

// An executor thread begins: it starts without a context and without device memory.
void begin_executor_thread();

// Prints a line that begins with "fake CUDA: ", unless the options say quiet.
[[gnu::format(printf, 1, 2)]] void report(const char* format, ...);

// --- contexts (contexts.cc) ---

// The calling thread's context. Errors: kInvalidContext, kContextIsDestroyed, or the failure of the
// context.
CuResult current_context(ContextPtr* result);
ContextPtr find_context(CuContext handle);
bool valid_device(int device);
bool can_access_peer(int device, int peer);
// Fails the context of the stream, as an illegal address does; queued work is skipped.
void fail_context(Context& context, CuResult failure);
// The result of the stream's operations; kSuccess while all is well.
CuResult stream_failure(const Stream& stream);
// An operation of the stream returned `result`: an illegal address fails its context, anything else the
// stream.
void fail_stream(Stream& stream, CuResult result);
// Counts and reports work that would have corrupted memory, and fails the context.
void hazard(Context& context, const char* entry, const std::string& what);
// Destroys all that belongs to the context. With `lock`, because running work is waited for.
void destroy_context(Lock& lock, const ContextPtr& context);

// --- streams (streams.cc) ---

// The stream meant by the handle, the default ones included, in the current context.
// Errors: kInvalidHandle, kInvalidContext, the failure of the context or stream.
CuResult find_stream(CuStream handle, StreamPtr* result);
StreamPtr make_stream(const ContextPtr& context, unsigned flags, int priority);
// Queues it behind the operations that the default-stream rules name, or records it where the stream is
// capturing.
CuResult enqueue(const StreamPtr& stream, Operation operation);
// Waits for all work of the context and returns its failure.
CuResult wait_for_context(Lock& lock, const ContextPtr& context);
// Called by entry points that a driver may let wait for the device: with FakeOptions::calls_wait, waits for
// all work of the calling thread's context, unless that has failed. The state may have changed
// meanwhile.
void wait_as_a_driver_may(Lock& lock);
// Waits for all that was queued on the stream and returns its failure.
CuResult wait_for_stream(Lock& lock, const StreamPtr& stream);

// --- capture (capture.cc) ---

// Refuses a call that the captures of this or, in global mode, any thread forbid; they are invalidated by it.
CuResult refuse_while_capturing();
// The answer to synchronising the context, which invalidates all captures in it, in any mode.
CuResult refuse_around_captures(const ContextPtr& context);
// The answer to synchronising or querying the stream, which invalidates a capture.
CuResult refuse_on_capturing(const StreamPtr& stream);
// Whether the legacy stream may be used: not while a blocking stream of its context is capturing.
CuResult refuse_implicit(const StreamPtr& stream);
// Records into the stream's capture.
CuResult record_captured(const StreamPtr& stream, Operation operation);
// The effect of waiting for the event, when either side is capturing; `handled` says whether that was all.
CuResult capture_wait(const StreamPtr& stream, const EventPtr& event, bool* handled);
CuResult capture_record(const StreamPtr& stream, const EventPtr& event);

// --- memory use (hazards.cc) ---

// One piece of a device range: `alias` is where the fake reaches its bytes.
struct Piece {
  PhysicalPtr physical;
  std::byte* alias;
  std::size_t bytes;
};
// Resolves a range for the device of the context. Errors: kInvalidValue when part of it is not mapped or not
// accessible.
CuResult resolve(const Context& context, Address address, std::size_t bytes, bool write,
                 std::vector<Piece>* pieces);
// The range is about to go away: waits for running work on it and reports queued work. Without work it does
// nothing.
void check_unused(Lock& lock, const char* entry, Address address, std::size_t bytes);
// Whether the context's device may read, or write, the mapping.
bool accessible(const Context& context, const Mapping& mapping, bool write);
// Gives up the mapping of an allocation with its addresses.
void remove_allocation(Address begin);
// Host memory that the driver has pinned: all of the range, or some of it.
bool is_pinned(Address address, std::size_t bytes);
bool is_part_pinned(Address address, std::size_t bytes);
// Whether devices reach pinned memory at its host address: where it was mapped, or where that is not asked
// for (FakeOptions::need_device_map).
bool is_mapped(const HostRange& range);
bool is_mapped(Address address, std::size_t bytes);

// --- pools (pools.cc) ---

PoolPtr make_pool(int device, const CuMemPoolProps& properties, bool is_default);
// After a synchronisation: gives back the memory of pools beyond their thresholds.
void trim_pools();
// Frees a block that cuMemFree was given, which has no stream to wait for.
CuResult free_pool_block(Lock& lock, Mapping& mapping);

// --- modules (modules.cc) ---

void register_kernels(const FakeKernelTable& table);

// --- kernels in PTX (compiled_kernels.cc) ---

// The PTX of an image, parsed; null where it has none, or where every kernel of it has a host build.
// Errors: kInvalidImage; kInvalidPtx, with the reason in `compiler_log`, which is printed too.
CuResult load_program(const void* image, std::shared_ptr<const ptx::Module>* program,
                      std::string* compiler_log);
// Executes one launch on the memory that the context may use now. The lock is given up meanwhile. A defect of
// the kernel is printed and counted, and fails the context.
CuResult run_program(Lock& lock, Context& context, const ptx::Kernel& kernel, const FakeLaunch& launch,
                     const std::vector<std::byte>& parameters);

// --- the bodies of the entry points ---
#define FOREBAY_CUDA_ROW(name, symbol, version, VARIANT, variant_version, parameters, arguments) \
  CuResult symbol parameters;
FOREBAY_CUDA_ENTRY_POINTS(FOREBAY_CUDA_ROW)
#undef FOREBAY_CUDA_ROW

}  // namespace forebay::fake_cuda
