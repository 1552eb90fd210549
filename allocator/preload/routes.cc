#include "allocator/preload/routes.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "allocator/preload/accounts.h"

namespace forebay {
namespace {

// The most streams kept until they are idle. Smaller: destroying a stream waits more often. Larger: more
// driver memory.
constexpr std::size_t kKeptStreamLimit = 256;
// For the events of idle streams. Longer: a trim beside work that does not end takes longer.
// Counted, not timed: each poll leaves a busy processor to the driver's threads.
constexpr int kEventPolls = 100;
constexpr std::chrono::microseconds kEventPollInterval{100};
// So long a capture waits for waits that have started: the driver looks for captures when they start. Longer:
// a capture begins later beside a free that waits. Shorter: a thread that loses its processor just then ends
// the capture.
constexpr std::chrono::milliseconds kWaitStartTime{10};
constexpr std::chrono::microseconds kWaitStartPause{50};

// False without a current context.
bool find_current_context(DriverContext* context, DriverDevice* device) {
  const UsedCalls& used = preload_state().used;
  return used.cuCtxGetCurrent(context) == kDriverSuccess && *context != nullptr &&
         used.cuCtxGetDevice(device) == kDriverSuccess;
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

struct CapturedStream {
  DriverStream stream;  // Numbered.
  DriverContext context;
  long thread;
};

long thread_id() {
  return ::syscall(SYS_gettid);
}

SharedList<CapturedStream>& captures() {
  return SharedList<CapturedStream>::of_process();
}

// --- kept streams ---

struct KeptStream {
  DriverStream stream;
  DriverContext context;
};

SharedList<KeptStream>& kept_streams() {
  return SharedList<KeptStream>::of_process();
}

// Held while kept streams are looked at and ended, so that their context stays.
std::mutex& ending_streams() {
  static constinit std::mutex mutex;
  return mutex;
}

// Ends the capture that began on a stream which is about to be destroyed; the stream can be asked for its
// work then. False if it cannot be ended.
bool end_capture_of(DriverStream stream) {
  const bool began_here =
      !captures().take([=](const CapturedStream& captured) { return captured.stream == stream; }).empty();
  DriverResult answer = kDriverSuccess;
  if (!began_here || !is_capturing(stream, false, &answer)) return true;
  const PreloadState& state = preload_state();
  DriverGraph graph = nullptr;
  if (state.real.cuStreamEndCapture != nullptr) (void)state.real.cuStreamEndCapture(stream, &graph);
  if (graph != nullptr && state.used.cuGraphDestroy != nullptr) (void)state.used.cuGraphDestroy(graph);
  return !is_capturing(stream, false, &answer);
}

bool has_arena() {
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    if (ProcessArenas::of_process().find(device)) return true;
  }
  return false;
}

DriverResult retire_and_destroy(DriverStream stream) {
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    if (const ProcessArenas::Use use = ProcessArenas::of_process().find(device)) {
      (void)use.arena().stream_retire(Stream{stream});
    }
    ProcessArenas::of_process().blocks().set_parked_idle(device, Stream{stream}, UINT64_MAX);
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

DriverContext current_context() {
  DriverContext context = nullptr;
  (void)preload_state().used.cuCtxGetCurrent(&context);
  return context;
}

Route route_of_current_context() {
  DriverContext context = nullptr;
  DriverDevice device = 0;
  return find_current_context(&context, &device) ? route_of_context(context, device) : Route();
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
  DriverContext context = nullptr;
  DriverDevice device = 0;
  if (!find_current_context(&context, &device)) return {};
  ProcessArenas::Use use = ProcessArenas::of_process().find(device);
  return use && use.context() == context ? std::move(use) : ProcessArenas::Use();
}

Result<Stream> stream_behind(const ProcessArenas::Use& use, DriverStream stream) {
  if (stream == DRIVER_PER_THREAD_STREAM) return ProcessArenas::stream_behind_thread(use);
  return Stream{stream};
}

namespace {
// Each raises its own and then looks at the other's, so that one of the two sees the other.
constinit std::atomic<int> waits{0};
constinit std::atomic<int> beginning_captures{0};
constinit std::atomic<bool> has_peers{false};

struct Waiting {
  Waiting() noexcept { waits.fetch_add(1); }
  ~Waiting() { waits.fetch_sub(1); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
};
}  // namespace

CaptureBeginning::CaptureBeginning() noexcept {
  beginning_captures.fetch_add(1);
  const auto end = std::chrono::steady_clock::now() + kWaitStartTime;
  while (waits.load() > 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(kWaitStartPause);
}

CaptureBeginning::~CaptureBeginning() {
  beginning_captures.fetch_sub(1);
}

DriverResult wait_for_context(void* context) {
  const Waiting waiting;
  if (any_capture()) return kDriverCaptureErrors;
  const ContextScope scope(context);
  if (scope.result() != kDriverSuccess) return scope.result();
  return preload_state().used.cuCtxSynchronize();
}

void note_peer_access() noexcept {
  has_peers = true;
}

DriverResult wait_for_users(void* context, void* user) {
  DriverResult result = wait_for_context(context);
  const auto wait_too = [&](void* other) {
    if (result == kDriverSuccess && other != nullptr && other != context) result = wait_for_context(other);
  };
  wait_too(user);
  for (int device = 0; has_peers && device < kPreloadDeviceLimit; ++device) {
    if (const ProcessArenas::Use other = ProcessArenas::of_process().find(device)) wait_too(other.context());
  }
  return result;
}

std::size_t trim_arena(const ProcessArenas::Use& use, bool waits) {
  std::size_t bytes = use.arena().trim();
  const auto may_have_more = [&] {
    const ArenaStatistics statistics = use.arena().statistics();
    return statistics.reserved_bytes - statistics.live_bytes >= use.arena().chunk_bytes();
  };
  if (may_have_more()) {
    // The first trim recorded events behind the queued work. Events of idle streams complete soon.
    if (waits) {
      if (wait_for_device(use) == kDriverSuccess) bytes += use.arena().trim();
    } else {
      for (int poll = 0; poll < kEventPolls && may_have_more() && !any_capture(); ++poll) {
        std::this_thread::sleep_for(kEventPollInterval);
        bytes += use.arena().trim();
      }
    }
  }
  if (bytes > 0) note_reserved(use.device(), &use.arena());
  return bytes;
}

std::mutex& giving_back() {
  static constinit std::mutex mutex;
  return mutex;
}

namespace {
constinit std::atomic<std::uint64_t> trims{0};
}

std::uint64_t trim_count() {
  return trims.load(std::memory_order_acquire);
}

std::size_t trim_arenas() {
  finish_waiting_frees();
  const std::lock_guard lock(giving_back());
  std::size_t bytes = 0;
  for (int device = 0; device < kPreloadDeviceLimit; ++device) {
    const ProcessArenas::Use use = ProcessArenas::of_process().find(device);
    if (!use) continue;
    give_back_parked(use);
    bytes += trim_arena(use, true);
  }
  if (bytes > 0) trims.fetch_add(1, std::memory_order_release);
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
  captures().add({{numbered(stream, per_thread), current_context(), thread_id()}});
}

void capture_ended(DriverStream stream, bool per_thread) {
  const DriverStream ended = numbered(stream, per_thread);
  // Captures of several threads' default streams have the same number.
  const bool is_default = is_default_stream(ended);
  (void)captures().take([=, context = current_context()](const CapturedStream& captured) {
    return captured.stream == ended &&
           (!is_default || (captured.thread == thread_id() && captured.context == context));
  });
}

bool any_capture() {
  if (beginning_captures.load() > 0) return true;
  if (captures().size() == 0) return false;
  // A capture can also end with its stream, so the driver is asked about the listed streams. About a default
  // stream it can be asked on its own thread and in its own context alone; one of a thread that has ended is
  // no more.
  (void)captures().take([](const CapturedStream& captured) {
    unsigned status = 0;
    if (is_default_stream(captured.stream) && captured.thread != thread_id())
      return ::syscall(SYS_tgkill, ::getpid(), captured.thread, 0) != 0;
    if (is_default_stream(captured.stream) && captured.context != current_context()) return false;
    return preload_state().used.cuStreamIsCapturing(captured.stream, &status) != kDriverSuccess ||
           status == 0;
  });
  return captures().size() != 0;
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
  // Mode observe has an arena if the program allocates by forebay_torch_alloc.
  if (is_default_stream(stream) || (state.mode != PreloadMode::kArena && !has_arena()))
    return state.real.cuStreamDestroy_v2(stream);
  const RelaxedCapture relaxed;
  if (!end_capture_of(stream)) return retire_and_destroy(stream);
  const DriverResult asked = state.used.cuStreamQuery(stream);
  // A stream that joined another's capture may have work of before.
  if (asked != kDriverNotReady && !is_captured_error(asked)) return retire_and_destroy(stream);
  KeptStream made{stream, nullptr};
  (void)state.used.cuStreamGetCtx(stream, &made.context);
  kept_streams().add({made});
  std::size_t excess = kept_streams().size() - std::min(kept_streams().size(), kKeptStreamLimit);
  const auto is_excess = [&](const KeptStream&) {
    if (excess == 0) return false;
    --excess;
    return true;
  };
  const std::lock_guard lock(ending_streams());
  for (const KeptStream& oldest : kept_streams().take(is_excess)) {
    (void)state.used.cuStreamSynchronize(oldest.stream);
    (void)retire_and_destroy(oldest.stream);
  }
  return kDriverSuccess;
}

void end_idle_streams() {
  if (kept_streams().size() == 0) return;
  std::list<KeptStream> all;
  std::list<KeptStream> idle;
  const std::unique_lock lock(ending_streams(), std::try_to_lock);
  if (!lock) return;  // Another thread is at it.
  all = kept_streams().take([](const KeptStream&) { return true; });
  const RelaxedCapture relaxed;
  for (auto i = all.begin(); i != all.end();) {
    const auto kept = i++;
    const DriverResult asked = preload_state().used.cuStreamQuery(kept->stream);
    if (asked != kDriverNotReady && !is_captured_error(asked)) idle.splice(idle.end(), all, kept);
  }
  kept_streams().add(std::move(all));
  for (const KeptStream& kept : idle) (void)retire_and_destroy(kept.stream);
}

void forget_streams(void* context) {
  const std::lock_guard lock(ending_streams());
  (void)kept_streams().take([&](const KeptStream& kept) { return kept.context == context; });
  (void)captures().take([&](const CapturedStream& captured) { return captured.context == context; });
}

}  // namespace forebay
