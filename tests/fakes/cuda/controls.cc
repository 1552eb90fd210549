// The fake's own controls: options, reset, faults, counts and the account.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "tests/fakes/cuda/driver.h"

#define FAKE_CUDA_EXPORT extern "C" [[gnu::visibility("default")]]

namespace forebay::fake_cuda {
namespace {

template <typename Value>
void read_variable(const char* name, Value* value) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text, &end, 10);
  if (*end != '\0') {
    std::fprintf(stderr, "fake CUDA: %s is \"%s\", which is not a whole number; the default stays\n", name,
                 text);
    return;
  }
  *value = static_cast<Value>(number);
}

// More than any machine has, and few enough that checks of each pair of them stay cheap.
constexpr int kDeviceLimit = 64;

bool usable(const FakeOptions& options) {
  const int access = static_cast<int>(options.host_access);
  return options.device_count >= 0 && options.device_count <= kDeviceLimit &&
         options.granularity >= kPageBytes && (options.granularity & (options.granularity - 1)) == 0 &&
         access >= 0 && access <= static_cast<int>(HostAccess::kWindows);
}

// FAKE_CUDA_HARSH.
void make_harsh(FakeOptions* options) {
  std::size_t queue_limit = 0;
  read_variable("FAKE_CUDA_HARSH", &queue_limit);
  if (queue_limit == 0) return;
  options->callback_threads = 1;
  options->queue_limit = queue_limit;
  options->pageable_waits = options->refuse_part_pinned = options->need_device_map = true;
  options->hardware_queues = options->calls_wait = options->sticky_faults = true;
  if (options->seed == 0) options->seed = queue_limit;
}

FakeOptions options_of_environment() {
  FakeOptions options;
  read_variable("FAKE_CUDA_DEVICES", &options.device_count);
  read_variable("FAKE_CUDA_MEMORY", &options.memory_bytes);
  read_variable("FAKE_CUDA_GRANULARITY", &options.granularity);
  read_variable("FAKE_CUDA_STRICT", &options.host_access);
  read_variable("FAKE_CUDA_SEED", &options.seed);
  read_variable("FAKE_CUDA_LATENCY_NS", &options.latency_ns);
  read_variable("FAKE_CUDA_BANDWIDTH", &options.bytes_per_second);
  read_variable("FAKE_CUDA_PEERS", &options.peers);
  read_variable("FAKE_CUDA_RDMA", &options.gpu_direct_rdma);
  read_variable("FAKE_CUDA_DMA_BUF", &options.dma_buf);
  read_variable("FAKE_CUDA_POISON", &options.poison);
  read_variable("FAKE_CUDA_FREE_WAITS", &options.free_waits);
  read_variable("FAKE_CUDA_DRIVER_VERSION", &options.driver_version);
  read_variable("FAKE_CUDA_CAPABILITY", &options.compute_capability);
  read_variable("FAKE_CUDA_QUIET", &options.quiet);
  read_variable("FAKE_CUDA_CALLBACK_THREADS", &options.callback_threads);
  read_variable("FAKE_CUDA_QUEUE", &options.queue_limit);
  read_variable("FAKE_CUDA_PAGEABLE_WAITS", &options.pageable_waits);
  read_variable("FAKE_CUDA_REFUSE_PART_PINNED", &options.refuse_part_pinned);
  read_variable("FAKE_CUDA_NEED_DEVICE_MAP", &options.need_device_map);
  read_variable("FAKE_CUDA_HARDWARE_QUEUES", &options.hardware_queues);
  read_variable("FAKE_CUDA_CALLS_WAIT", &options.calls_wait);
  read_variable("FAKE_CUDA_STICKY_FAULTS", &options.sticky_faults);
  make_harsh(&options);
  if (usable(options)) return options;
  std::fprintf(
      stderr,
      "fake CUDA: FAKE_CUDA_DEVICES=%d (0 to %d), FAKE_CUDA_GRANULARITY=%zu (a power of two from %zu on), "
      "FAKE_CUDA_STRICT=%d (0 to 2): one of them cannot be; all options of the environment are ignored\n",
      options.device_count, kDeviceLimit, options.granularity, std::size_t{kPageBytes},
      static_cast<int>(options.host_access));
  return FakeOptions{};
}

// Whether `text` names the entry: by its symbol, or by its name, which stands for all its versions.
bool names(const char* text, const EntryPoint& entry) {
  return std::strcmp(text, entry.symbol) == 0 || std::strcmp(text, entry.name) == 0;
}

void forget_handles(Driver& state) {
  state.graph_execs.clear();
  state.graphs.clear();
  state.functions.clear();
  state.modules.clear();
  state.events.clear();
  state.streams.clear();
  for (const auto& [begin, range] : state.host_ranges) {
    if (!range.registered) ::munmap(reinterpret_cast<void*>(begin), range.bytes);
  }
  state.host_ranges.clear();
}

}  // namespace

Driver::Driver() : options(options_of_environment()), calls(kEntryPointCount) {
  read_variable("FAKE_CUDA_FAIL", &failing_call);
  read_variable("FAKE_CUDA_FAIL_RESULT", &failing_result);
}

}  // namespace forebay::fake_cuda

using namespace forebay::fake_cuda;  // NOLINT: the functions below are its C interface.

FAKE_CUDA_EXPORT int fake_cuda_configure(const FakeOptions& options) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  if (state.initialised || !usable(options)) return -1;
  state.options = options;
  make_harsh(&state.options);
  return 0;
}

FAKE_CUDA_EXPORT void fake_cuda_reset() {
  Driver& state = driver();
  Lock lock(state.mutex);
  if (state.initialised) {
    for (const auto& [handle, context] : std::map(state.contexts)) destroy_context(lock, context);
    // Work of streams whose context was destroyed before them, too.
    while (state.scheduler.pending_count() != 0)
      state.scheduler.wait(lock, (*state.scheduler.busy().begin())->last);
    forget_handles(state);
    state.memory.clear();
    state.contexts.clear();
    state.pools.clear();
    state.devices.clear();
  }
  state.initialised = false;
  state.process = 0;
  state.kernels.clear();
  state.kernel_libraries_opened = false;
  state.orphans = state.hazards = state.forbidden_calls = state.spinning_waits = 0;
  state.faults.clear();
  std::fill(state.calls.begin(), state.calls.end(), 0);
  state.call_count = 0;
  state.options = options_of_environment();
}

FAKE_CUDA_EXPORT int fake_cuda_fail(const char* entry, std::uint64_t nth, int result) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  std::size_t known = kEntryPointCount;
  bool by_name = false;
  for (std::size_t i = 0; i < kEntryPointCount; ++i) {
    if (!names(entry, kEntryPoints[i])) continue;
    if (known == kEntryPointCount) known = i;
    by_name = by_name || std::strcmp(entry, kEntryPoints[i].name) == 0;
  }
  if (known == kEntryPointCount) return -1;
  std::erase_if(state.faults,
                [&](const Driver::Fault& fault) { return fault.entry == known && fault.by_name == by_name; });
  if (nth != 0) state.faults.push_back({known, by_name, nth, static_cast<CuResult>(result)});
  return 0;
}

FAKE_CUDA_EXPORT std::uint64_t fake_cuda_call_count(const char* entry) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < kEntryPointCount; ++i) {
    if (names(entry, kEntryPoints[i])) count += state.calls[i];
  }
  return count;
}

FAKE_CUDA_EXPORT void fake_cuda_register_kernels(const FakeKernelTable& table) {
  const Lock lock(driver().mutex);
  register_kernels(table);
}

FAKE_CUDA_EXPORT void fake_cuda_account(FakeAccount& account) {
  Driver& state = driver();
  const Lock lock(state.mutex);
  account = {};
  for (const auto& [handle, context] : state.contexts) {
    account.contexts += context->primary ? context->retain_count != 0 : 1;
  }
  account.streams = state.streams.size();
  account.events = state.events.size();
  account.modules = state.modules.size();
  account.graphs = state.graphs.size();
  account.graph_execs = state.graph_execs.size();
  for (const auto& [handle, pool] : state.pools) account.pools += !pool->is_default;
  for (const auto& [begin, reservation] : state.memory.reservations())
    account.reservations += !reservation.internal;
  account.chunks = state.memory.chunks().size();
  for (const auto& [begin, mapping] : state.memory.mappings()) {
    account.mappings += mapping.kind == MappingKind::kVirtual;
    account.allocations += mapping.kind == MappingKind::kAllocation;
    account.pool_blocks += mapping.kind == MappingKind::kPool && !mapping.freed;
    account.ipc_mappings += mapping.kind == MappingKind::kImported;
  }
  for (const auto& [begin, range] : state.host_ranges) {
    ++(range.registered ? account.host_registrations : account.host_allocations);
  }
  if (state.initialised) {
    for (int device = 0; device < state.options.device_count; ++device) {
      account.device_bytes += state.memory.charged_bytes(device);
    }
    account.peak_device_bytes = state.memory.peak_charged_bytes();
  }
  account.operations = state.scheduler.pending_count();
  account.orphans = state.orphans;
  account.hazards = state.hazards;
  account.forbidden_calls = state.forbidden_calls;
  account.spinning_waits = state.spinning_waits;
}

namespace forebay::fake_cuda {

void write_summary() {
  const char* const path = std::getenv("FAKE_CUDA_SUMMARY");
  Driver& state = driver();
  // A child made by fork comes here too, and has no driver.
  if (path == nullptr || *path == '\0' || state.process.load(std::memory_order_acquire) != ::getpid()) return;
  FakeAccount account;
  fake_cuda_account(account);
  std::FILE* const file = std::fopen(path, "a");
  if (file == nullptr) return;
  const std::pair<const char*, std::uint64_t> figures[] = {{"peak_device_bytes", account.peak_device_bytes},
                                                           {"device_bytes", account.device_bytes},
                                                           {"live_handles", account.live_handles()},
                                                           {"operations", account.operations},
                                                           {"orphans", account.orphans},
                                                           {"hazards", account.hazards},
                                                           {"forbidden_calls", account.forbidden_calls},
                                                           {"calls", state.call_count}};
  for (const auto& [name, value] : figures) {
    std::fprintf(file, "%s %llu\n", name, static_cast<unsigned long long>(value));
  }
  const Lock lock(state.mutex);
  for (std::size_t i = 0; i < kEntryPointCount; ++i) {
    if (state.calls[i] == 0) continue;
    std::fprintf(file, "calls_%s %llu\n", kEntryPoints[i].symbol,
                 static_cast<unsigned long long>(state.calls[i]));
  }
  std::fclose(file);
}

}  // namespace forebay::fake_cuda
