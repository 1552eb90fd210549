// Routes: which arena serves a call of the program, and how to wait for work of the program.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "allocator/preload/process_arenas.h"
#include "allocator/preload/state.h"

namespace forebay {

// How often a request that finds no memory waits for the device. Smaller: a request is refused although other
// threads are freeing enough memory. Larger: a request that cannot be served takes longer to fail.
inline constexpr int kWaitingAttempts = 4;
// So long it goes on while the arena holds enough unused memory, which other threads are using just now: a
// thread that asks for events may have lost its processor, and the others get nothing until it goes on.
inline constexpr std::chrono::milliseconds kContendedTime{250};

// A list that threads share. No memory is allocated or freed under its mutex.
template <typename Entry>
class SharedList {
 public:
  // The process's own. It is made without memory of the host, which may be missing, and never destroyed.
  static SharedList& of_process() {
    alignas(SharedList) static std::byte place[sizeof(SharedList)];
    static auto* const instance = new (place) SharedList;
    return *instance;
  }
  std::size_t size() const noexcept { return count_.load(std::memory_order_acquire); }
  void add(std::list<Entry> made) {
    const std::lock_guard lock(mutex_);
    list_.splice(list_.end(), made);
    count_.store(list_.size(), std::memory_order_release);
  }
  template <typename Visit>
  void visit(const Visit& visit) {
    const std::lock_guard lock(mutex_);
    for (Entry& entry : list_) visit(entry);
  }
  // Takes out the entries for which `condition` is true, asked from the oldest on.
  template <typename Condition>
  std::list<Entry> take(Condition condition) {
    std::list<Entry> taken;
    const std::lock_guard lock(mutex_);
    for (auto i = list_.begin(); i != list_.end();) {
      const auto entry = i++;
      if (condition(*entry)) taken.splice(taken.end(), list_, entry);
    }
    count_.store(list_.size(), std::memory_order_release);
    return taken;
  }

 private:
  std::atomic<std::size_t> count_{0};
  std::mutex mutex_;
  std::list<Entry> list_;  // Guarded by mutex_.
};

// The primary context of the device; null if the driver does not return it.
void* primary_context(int device);

// The arena that serves a request, or the reason why none does.
struct Route {
  ProcessArenas::Use use;
  PreloadServer otherwise = PreloadServer::kUnavailable;
};

// The route of the calling thread's current context. Without one the driver serves the call.
Route route_of_current_context();
inline bool is_default_stream(DriverStream stream) noexcept {
  return stream == nullptr || stream == DRIVER_LEGACY_STREAM || stream == DRIVER_PER_THREAD_STREAM;
}
// A stream as the arena and the accounts know it: a null stream becomes the number of its default stream.
inline DriverStream numbered(DriverStream stream, bool per_thread) noexcept {
  if (stream != nullptr) return stream;
  return per_thread ? DRIVER_PER_THREAD_STREAM : DRIVER_LEGACY_STREAM;
}

// The route of the context that the stream belongs to. Requires: it is not a default stream.
Route route_of_stream(DriverStream stream);

// The arena of the current context if it exists; makes none.
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

// Within it this thread may ask streams and events while others capture; without it that may end
// their captures.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() noexcept {
    const auto call = preload_state().used.cuThreadExchangeStreamCaptureMode;
    if (call != nullptr) (void)call(&mode_);
  }
  unsigned mode_ = 2;  // Relaxed; then the thread's own.
};

// Waits until all work queued in the context has run. During a capture it does not wait, and returns an error
// for which is_captured_error() is true: the work may run still.
DriverResult wait_for_context(void* context);
inline DriverResult wait_for_device(const ProcessArenas::Use& use) {
  return wait_for_context(use.context());
}
inline bool is_captured_error(DriverResult result) noexcept {
  return result >= kDriverCaptureErrors && result <= kDriverCaptureErrorsEnd;
}

// The program has let one context use the memory of another device's.
void note_peer_access() noexcept;
// Waits as the driver does before it frees memory of `context`: for that context, for `user`, which was
// current then (null: none), and, where note_peer_access() was called, for those of the arenas. Returns the
// first error.
DriverResult wait_for_users(void* context, void* user);
// The calling thread's; null if there is none.
DriverContext current_context();

// Gives unused memory of the arena back to the device, and returns its bytes. `waits`: for queued work that
// may still use some of it; otherwise some milliseconds at most, until idle streams are known to be.
std::size_t trim_arena(const ProcessArenas::Use& use, bool waits);
// The same for all arenas, and for the shared blocks that were freed.
std::size_t trim_arenas();
// How often that gave back any bytes.
std::uint64_t trim_count();
// The same if the record has a new request for it (request_preload_trim). Put off during a capture. Requires:
// the calling thread has no Use.
void trim_if_asked();

// Held by the thread that gives freed memory back, to an arena or to the driver. A thread that found no
// memory takes it before it asks again: another one may be giving back what it needs.
//
// A thread that has a Use may take it, and one that holds it gets a Use: a lock that is shared lets readers
// in while a writer waits.
std::mutex& giving_back();

// Makes a driver call that takes device memory. If there is none left, the arenas give unused memory back,
// and the call is made once more.
template <typename Call>
DriverResult call_with_room(const Call& call) {
  const std::uint64_t before = trim_count();
  const DriverResult result = call();
  if (result != kDriverOutOfMemory) return result;
  (void)trim_arenas();
  return trim_count() == before ? result : call();
}

// --- captures: during one, nothing waits for the device ---

// Lives while the driver begins a capture: the waits that are about to start are over by then or have
// started, and none starts. A wait would end the capture, and the capture the wait.
class CaptureBeginning {
 public:
  CaptureBeginning() noexcept;
  ~CaptureBeginning();
  CaptureBeginning(const CaptureBeginning&) = delete;
  CaptureBeginning& operator=(const CaptureBeginning&) = delete;
};
void capture_began(DriverStream stream, bool per_thread);
void capture_ended(DriverStream stream, bool per_thread);
// Whether any stream may be capturing now.
bool any_capture();
// Whether the driver says that this stream is being captured. `result`: the driver's result.
bool is_capturing(DriverStream stream, bool per_thread, DriverResult* result);

// --- streams that the program has destroyed while their work still runs ---

// Destroys the stream for the program. A busy stream is kept until it is idle, because the arenas need its
// handle: they may hold memory whose last use is queued on it.
DriverResult destroy_stream(DriverStream stream);
// Destroys kept streams that have become idle.
void end_idle_streams();
// Forgets the kept and the captured streams of a context that is about to go away.
void forget_streams(void* context);

// Forgets that frees and closes which were put off wait for work of a context, which is gone.
void forget_user(DriverContext context);
// Forgets the frees of a device whose arena is gone.
void forget_waiting_frees(int device);
// Finishes frees and closes that were put off during a capture, unless there is one still. Waits for the
// device if there are any, so only calls that may wait make it.
void finish_waiting_frees();

// Frees an arena's block, which is out of the book, when no work of its context or the calling thread's uses
// it. Returns an error of that work; during a capture it is put off.
DriverResult free_after_users(const ProcessArenas::Use& use, DevicePtr block, const BlockFacts& facts);

// The arena's stream behind which a block is free whose last use is queued on a stream of the arena's
// context, numbered. Null: that work has run. Requires: the stream is not captured.
Result<Stream> stream_behind(const ProcessArenas::Use& use, DriverStream stream);

// Gives the arena the shared blocks that were freed, unless a capture forbids to wait. Requires: the thread
// holds giving_back().
void give_back_parked(const ProcessArenas::Use& use);

// Allocates from the arena: a block of the size that was freed and is known outside, as `outside` says, or a
// new one. If memory is missing, it waits for all freed memory; in the end a larger block that is known
// outside serves, whose size `request` then has.
Result<DevicePtr> allocate_from(const ProcessArenas::Use& use, AllocationRequest* request,
                                KnownOutside* outside);

// During a capture nothing waits for the device. Events of idle streams complete soon all the same, though
// not within the time of one request on a busy host. False after kCapturePolls calls with the same count.
inline constexpr int kCapturePolls = 50;
inline bool wait_a_moment(int* polls) {
  if (++*polls > kCapturePolls) return false;
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

// Repeats a request that was refused for lack of memory. Freed memory counts as taken until queued work is
// done with it; an arena that runs out records events on the streams that freed. `wait`: waits for all work
// queued on the device; false if it cannot.
template <typename Wait>
Result<DevicePtr> allocate_again(const ProcessArenas::Use& use, const AllocationRequest& request,
                                 Result<DevicePtr> refused, const Wait& wait) {
  const auto end = std::chrono::steady_clock::now() + kContendedTime;
  for (int i = 0; refused.status().code() == StatusCode::kOutOfMemory; ++i) {
    if (i >= kWaitingAttempts) {
      const ArenaStatistics statistics = use.arena().statistics();
      if (statistics.reserved_bytes - statistics.live_bytes < request.bytes) break;
      if (std::chrono::steady_clock::now() >= end) break;
      (void)::sched_yield();
    }
    if (!wait()) break;
    refused = use.arena().allocate(request);
  }
  return refused;
}

}  // namespace forebay
