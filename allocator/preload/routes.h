// Which arena a call of the program's means, and what has to be waited for on its behalf.
#pragma once

#include <sched.h>

#include <utility>

#include "allocator/preload/process_arenas.h"
#include "allocator/preload/state.h"

namespace forebay {

// How often a request that finds no memory waits for the device. Fewer: one that could be served is refused
// while other threads free. More: one that cannot be served takes longer to be told so.
inline constexpr int kWaitingAttempts = 4;
// And how often where the arena holds enough that is nobody's: another thread is at it just now.
inline constexpr int kContendedAttempts = 64;

// The primary context of the device; null when the driver will not say.
void* primary_context(int device);

// The arena that serves a request, or why none does.
struct Route {
  ProcessArenas::Use use;
  PreloadServer otherwise = PreloadServer::kUnavailable;
};

// Of the calling thread's current context. Without a current context the driver is to answer.
Route route_of_current_context();
// The stream that is meant, the default ones by their numbers.
inline DriverStream numbered(DriverStream stream, bool per_thread) noexcept {
  if (stream != nullptr) return stream;
  return per_thread ? DRIVER_PER_THREAD_STREAM : DRIVER_LEGACY_STREAM;
}

// Of the context that the stream belongs to. `stream` is none of the default ones.
Route route_of_stream(DriverStream stream);

// The arena of the current context if there is one already; makes none.
ProcessArenas::Use arena_of_current_context();

// Makes `context` current on the calling thread, for as long as the scope lasts.
class ContextScope {
 public:
  explicit ContextScope(void* context) noexcept;
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  DriverResult result() const noexcept { return result_; }

 private:
  DriverContext previous_ = nullptr;
  bool has_set_ = false;
  DriverResult result_;
};

// The host waits until everything queued in the arena's context has run, as a plain free does.
DriverResult wait_for_device(const ProcessArenas::Use& use);

// Gives memory that the arena holds and does not use back to the device, what is queued to be free included:
// waits for the device where there is such. Returns the bytes.
std::size_t trim_arena(const ProcessArenas::Use& use);
// The same for all.
std::size_t trim_arenas();
// The same if whoever reads the record has asked for it since the last time. While a capture goes on it is
// put off. Requires: the calling thread uses no arena.
void trim_if_asked();

// A call of the driver's that takes device memory. When there is none left, what the arenas keep is given
// back, and the call is made once more.
template <typename Call>
DriverResult call_with_room(const Call& call) {
  const DriverResult result = call();
  return result == kDriverOutOfMemory && trim_arenas() > 0 ? call() : result;
}

// --- captures: while one goes on, nothing waits for the device ---

void capture_began(DriverStream stream, bool per_thread);
void capture_ended(DriverStream stream, bool per_thread);
// Whether any stream may be capturing now.
bool any_capture();
// Whether this stream is, as the driver sees it. `result`: what it said when it would not tell.
bool is_capturing(DriverStream stream, bool per_thread, DriverResult* result);

// --- streams that the program has destroyed, and whose work still runs ---

// Destroys the stream for the program: at once when it is idle, else once it is. The arenas may hold memory
// whose last use is queued on it, and need the handle until then.
DriverResult destroy_stream(DriverStream stream);
// Ends those that have become idle.
void end_idle_streams();
// The device's context is going away, and its streams with it.
void forget_streams(void* context);

// Asks again for what was refused for want of memory: what has been freed counts as taken until its uses have
// run. An arena that has run out marks their ends; those who free meanwhile are marked the next time. `wait`:
// for all that is queued on the device; false when that cannot be.
template <typename Wait>
Result<DevicePtr> allocate_again(const ProcessArenas::Use& use, const AllocationRequest& request,
                                 Result<DevicePtr> refused, const Wait& wait) {
  for (int i = 0; i < kContendedAttempts && refused.status().code() == StatusCode::kOutOfMemory; ++i) {
    if (i >= kWaitingAttempts) {
      const ArenaStatistics statistics = use.arena().statistics();
      if (statistics.reserved_bytes - statistics.live_bytes < request.bytes) break;
      (void)::sched_yield();
    }
    if (!wait()) break;
    refused = use.arena().allocate(request);
  }
  return refused;
}

}  // namespace forebay
