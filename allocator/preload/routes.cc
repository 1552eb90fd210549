#include "allocator/preload/routes.h"

#include <atomic>
#include <list>
#include <mutex>
#include <utility>

#include "allocator/preload/accounts.h"

namespace forebay {
namespace {

// The most streams kept until they are idle. Smaller: destroying a stream waits more often. Larger: more
// driver memory.
constexpr std::size_t kKeptStreamLimit = 256;

// The device's arena if it exists and belongs to this context.
ProcessArenas::Use find_arena(void* context, int device) {
  ProcessArenas::Use use = ProcessArenas::of_process().find(device);
  if (use && use.context() != context) return {};
  return use;
}

Route route_of_context(DriverContext context, int device) {
  const PreloadState& state = preload_state();
  Route route;
  if (state.mode != PreloadMode::kArena) {
    route.otherwise = PreloadServer::kObserved;
    return route;
  }
  ProcessArenas& arenas = ProcessArenas::of_process();
  route.use = arenas.find(device);
  if (!route.use) {
    // An arena retains the primary context, and must not create it by that.
    unsigned flags = 0;
    int active = 0;
    if (state.used.cuDevicePrimaryCtxGetState == nullptr ||
        state.used.cuDevicePrimaryCtxGetState(device, &flags, &active) != kDriverSuccess || active == 0) {
      route.otherwise = PreloadServer::kOtherContext;
      return route;
    }
    Status why;
    route.use = arenas.use(device, &primary_context, &why);
    if (!route.use) {
      note_problem(why);
      return route;
    }
  }
  if (route.use.context() != context) {
    route.use = {};
    route.otherwise = PreloadServer::kOtherContext;
  }
  return route;
}

// Finds the device of a context that is not current.
bool device_of_context(DriverContext context, int* device) {
  const ContextScope scope(context);
  return scope.result() == kDriverSuccess && preload_state().used.cuCtxGetDevice(device) == kDriverSuccess;
}

// --- captures ---

struct Captures {
  std::atomic<std::size_t> count{0};
  std::mutex mutex;
  // Guarded by mutex.
  std::list<DriverStream> list;
};

Captures& captures() {
  static auto* const instance = new Captures;
  return *instance;
}

bool is_default_stream(DriverStream stream) {
  return stream == nullptr || stream == DRIVER_LEGACY_STREAM || stream == DRIVER_PER_THREAD_STREAM;
}

// --- kept streams ---

struct KeptStream {
  DriverStream stream;
  DriverContext context;
};

struct KeptStreams {
  std::atomic<std::size_t> count{0};
  std::mutex mutex;
  // Guarded by mutex.
  std::list<KeptStream> list;
};

KeptStreams& kept_streams() {
  static auto* const instance = new KeptStreams;
  return *instance;
}

DriverResult retire_and_destroy(DriverStream stream) {
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    if (const ProcessArenas::Use use = ProcessArenas::of_process().find(device)) {
      (void)use.arena().stream_retire(Stream{stream});
    }
  }
  return preload_state().real.cuStreamDestroy_v2(stream);
}

}  // namespace

void* primary_context(int device) {
  const PreloadState& state = preload_state();
  DriverContext context = nullptr;
  if (state.real.cuDevicePrimaryCtxRetain == nullptr ||
      state.real.cuDevicePrimaryCtxRetain(&context, device) != kDriverSuccess) {
    return nullptr;
  }
  (void)state.real.cuDevicePrimaryCtxRelease_v2(device);
  return context;
}

ContextScope::ContextScope(void* context) noexcept {
  const UsedCalls& used = preload_state().used;
  result_ = used.cuCtxGetCurrent(&previous_);
  if (result_ != kDriverSuccess || previous_ == context) return;
  result_ = used.cuCtxSetCurrent(static_cast<DriverContext>(context));
  has_set_ = result_ == kDriverSuccess;
}

ContextScope::~ContextScope() {
  if (has_set_) (void)preload_state().used.cuCtxSetCurrent(previous_);
}

Route route_of_current_context() {
  const UsedCalls& used = preload_state().used;
  DriverContext context = nullptr;
  DriverDevice device = 0;
  if (used.cuCtxGetCurrent(&context) != kDriverSuccess || context == nullptr ||
      used.cuCtxGetDevice(&device) != kDriverSuccess) {
    return {};
  }
  return route_of_context(context, device);
}

Route route_of_stream(DriverStream stream) {
  const UsedCalls& used = preload_state().used;
  DriverContext context = nullptr;
  if (used.cuStreamGetCtx(stream, &context) != kDriverSuccess) return {};
  DriverContext current = nullptr;
  DriverDevice device = 0;
  const bool is_current = used.cuCtxGetCurrent(&current) == kDriverSuccess && current == context;
  if (is_current ? used.cuCtxGetDevice(&device) != kDriverSuccess : !device_of_context(context, &device))
    return {};
  return route_of_context(context, device);
}

ProcessArenas::Use arena_of_current_context() {
  const UsedCalls& used = preload_state().used;
  DriverContext context = nullptr;
  DriverDevice device = 0;
  if (used.cuCtxGetCurrent(&context) != kDriverSuccess || context == nullptr ||
      used.cuCtxGetDevice(&device) != kDriverSuccess) {
    return {};
  }
  return find_arena(context, device);
}

DriverResult wait_for_device(const ProcessArenas::Use& use) {
  const ContextScope scope(use.context());
  if (scope.result() != kDriverSuccess) return scope.result();
  return preload_state().used.cuCtxSynchronize();
}

std::size_t trim_arena(const ProcessArenas::Use& use) {
  std::size_t bytes = use.arena().trim();
  if (bytes > 0) note_reserved(use.device(), &use.arena());
  const ArenaStatistics statistics = use.arena().statistics();
  if (statistics.reserved_bytes - statistics.live_bytes < use.arena().chunk_bytes() || any_capture())
    return bytes;
  // The first trim recorded events behind the queued work. After the wait they have completed.
  if (wait_for_device(use) != kDriverSuccess) return bytes;
  bytes += use.arena().trim();
  note_reserved(use.device(), &use.arena());
  return bytes;
}

std::size_t trim_arenas() {
  std::size_t bytes = 0;
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    if (const ProcessArenas::Use use = ProcessArenas::of_process().find(device)) bytes += trim_arena(use);
  }
  return bytes;
}

void trim_if_asked() {
  PreloadRecord& record = *preload_state().record;
  const std::uint32_t asked = record.trim_requests.load(std::memory_order_relaxed);
  const std::uint32_t done = record.trims.load(std::memory_order_relaxed);
  if (asked == done || any_capture()) return;
  static std::atomic<bool> is_trimming{false};
  if (is_trimming.exchange(true, std::memory_order_acquire)) return;
  record.trimmed_bytes.fetch_add(trim_arenas(), std::memory_order_relaxed);
  // Last: the reader that waits for it finds the bytes.
  record.trims.store(asked, std::memory_order_release);
  is_trimming.store(false, std::memory_order_release);
}

void capture_began(DriverStream stream, bool per_thread) {
  std::list<DriverStream> made{numbered(stream, per_thread)};
  Captures& all = captures();
  const std::lock_guard lock(all.mutex);
  all.list.splice(all.list.end(), made);
  all.count.store(all.list.size(), std::memory_order_release);
}

void capture_ended(DriverStream stream, bool per_thread) {
  std::list<DriverStream> gone;
  Captures& all = captures();
  const std::lock_guard lock(all.mutex);
  for (auto i = all.list.begin(); i != all.list.end(); ++i) {
    if (*i != numbered(stream, per_thread)) continue;
    gone.splice(gone.end(), all.list, i);
    break;
  }
  all.count.store(all.list.size(), std::memory_order_release);
}

bool any_capture() {
  Captures& all = captures();
  if (all.count.load(std::memory_order_acquire) == 0) return false;
  // A capture can also end with its stream, so the driver is asked about the listed streams. It cannot be
  // asked about a default stream, which is another one on every thread.
  std::list<DriverStream> ended;
  const std::lock_guard lock(all.mutex);
  for (auto i = all.list.begin(); i != all.list.end();) {
    const auto next = std::next(i);
    unsigned status = 0;
    if (!is_default_stream(*i) &&
        (preload_state().used.cuStreamIsCapturing(*i, &status) != kDriverSuccess || status == 0)) {
      ended.splice(ended.end(), all.list, i);
    }
    i = next;
  }
  all.count.store(all.list.size(), std::memory_order_release);
  return !all.list.empty();
}

bool is_capturing(DriverStream stream, bool per_thread, DriverResult* result) {
  const UsedCalls& used = preload_state().used;
  unsigned status = 0;
  Driver_cuStreamIsCapturing* const ask =
      per_thread ? used.cuStreamIsCapturing_ptsz : used.cuStreamIsCapturing;
  *result = ask == nullptr ? static_cast<DriverResult>(kDriverSuccess) : ask(stream, &status);
  return status != 0;
}

DriverResult destroy_stream(DriverStream stream) {
  end_idle_streams();
  const PreloadState& state = preload_state();
  if (is_default_stream(stream) || state.used.cuStreamQuery == nullptr ||
      state.used.cuStreamQuery(stream) != kDriverNotReady) {
    return is_default_stream(stream) ? state.real.cuStreamDestroy_v2(stream) : retire_and_destroy(stream);
  }
  std::list<KeptStream> made{{stream, nullptr}};
  (void)state.used.cuStreamGetCtx(stream, &made.front().context);
  KeptStreams& kept = kept_streams();
  std::list<KeptStream> oldest;
  {
    const std::lock_guard lock(kept.mutex);
    kept.list.splice(kept.list.end(), made);
    if (kept.list.size() > kKeptStreamLimit) oldest.splice(oldest.end(), kept.list, kept.list.begin());
    kept.count.store(kept.list.size(), std::memory_order_relaxed);
  }
  if (!oldest.empty()) {
    (void)state.used.cuStreamSynchronize(oldest.front().stream);
    (void)retire_and_destroy(oldest.front().stream);
  }
  return kDriverSuccess;
}

void end_idle_streams() {
  KeptStreams& kept = kept_streams();
  if (kept.count.load(std::memory_order_relaxed) == 0) return;
  std::list<KeptStream> all;
  {
    const std::lock_guard lock(kept.mutex);
    all.splice(all.end(), kept.list);
    kept.count.store(0, std::memory_order_relaxed);
  }
  std::list<KeptStream> busy;
  while (!all.empty()) {
    if (preload_state().used.cuStreamQuery(all.front().stream) == kDriverNotReady) {
      busy.splice(busy.end(), all, all.begin());
      continue;
    }
    (void)retire_and_destroy(all.front().stream);
    all.pop_front();
  }
  const std::lock_guard lock(kept.mutex);
  kept.list.splice(kept.list.end(), busy);
  kept.count.store(kept.list.size(), std::memory_order_relaxed);
}

void forget_streams(void* context) {
  std::list<KeptStream> gone;
  KeptStreams& kept = kept_streams();
  const std::lock_guard lock(kept.mutex);
  for (auto i = kept.list.begin(); i != kept.list.end();) {
    const auto next = std::next(i);
    if (i->context == context) gone.splice(gone.end(), kept.list, i);
    i = next;
  }
  kept.count.store(kept.list.size(), std::memory_order_relaxed);
}

}  // namespace forebay
