// HostStream: one worker thread and its bounded queue, run in order. Marks are the points that events stand
// for.
//
// Threads: members marked so are guarded by the mutex of the HostClock, because readiness depends on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "forebay/access_guard.h"
#include "forebay/backend.h"
#include "forebay/host_backend.h"
#include "forebay/host_clock.h"
#include "runtime/device/host/script.h"

namespace forebay {

// One recording of an event. Shared by the event, the stream that will reach it and the streams that wait for
// it, since recording again moves the event but not those who already wait.
struct HostMark {
  // Guarded by the clock's mutex.
  bool reached = false;
  HostClock::Nanoseconds time{0};  // When it was reached.
  Status failure;                  // The first failure of the stream up to here, once reached.
};

// One kernel of a loaded module. Shared by the module and the launches in flight, so unloading does not pull
// it away.
struct HostLoadedKernel {
  std::string name;
  void (*function)(const Dimensions& grid, const Dimensions& block, void* const* arguments) = nullptr;
};

// Queued work.
struct HostCopy {
  void* target;
  const void* source;
  std::size_t bytes;
};
struct HostFill {
  std::byte* target;
  std::uint8_t value;
  std::size_t bytes;
};
struct HostFunctionCall {
  HostFunction function;
  void* argument;
};
struct HostLaunch {
  std::shared_ptr<const HostLoadedKernel> kernel;
  Dimensions grid;
  Dimensions block;
  std::vector<void*> arguments;  // Into `values`.
  std::unique_ptr<std::byte[]> values;
};
struct HostRecord {
  std::shared_ptr<HostMark> mark;
};
struct HostWait {
  std::shared_ptr<HostMark> mark;
};
struct HostAccess {
  DevicePtr address;  // Where a guarded range begins.
  AccessGuard::Access access;
  int change;  // +1: open. -1: close.
};
using HostOperation =
    std::variant<HostCopy, HostFill, HostFunctionCall, HostLaunch, HostRecord, HostWait, HostAccess>;

class HostStream {
 public:
  // Starts the worker. Throws std::system_error when there is no thread to be had.
  // `callbacks`: the driver's threads in use, of all streams of the backend; guarded by the clock's mutex.
  HostStream(HostClock& clock, const HostBackendOptions& options, const HostScript& script,
             unsigned& callbacks);
  // Requires: finish() has returned.
  ~HostStream() = default;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  // Queues an operation; waits while the queue is full. Requires: `lock` on the clock's mutex.
  // Errors: kInvalidArgument when the stream ended meanwhile.
  Status queue(std::unique_lock<std::mutex>& lock, HostOperation operation);
  // Waits for the work queued so far, and returns the stream's first failure. Requires: `lock` on the clock's
  // mutex.
  Status synchronize(std::unique_lock<std::mutex>& lock);
  // Refuses further work, waits for queued work and ends the thread. Call once.
  void finish();

  // The stream for which the calling thread runs a host function or kernel, or null.
  static HostStream* running_here() noexcept;
  // Notes that the running function called `function` of a Backend, which it must not.
  void note_forbidden_call(const char* function) noexcept { forbidden_call_ = function; }

 private:
  void work(HostClock::Registration registration);
  void run(std::unique_lock<std::mutex>& lock, HostOperation operation);
  template <typename Function>
  void run_foreign(std::unique_lock<std::mutex>& lock, const char* what, Function function);
  template <typename Function>
  void run_data(std::unique_lock<std::mutex>& lock, Function function);
  void call(std::unique_lock<std::mutex>& lock, const HostFunctionCall& call);
  void fail_locked(const Status& status);

  HostClock& clock_;
  const HostBackendOptions& options_;
  const HostScript& script_;
  unsigned& callbacks_;

  // Used by the worker alone.
  const char* forbidden_call_ = nullptr;

  // Guarded by the clock's mutex.
  std::deque<HostOperation> operations_;
  std::uint64_t queued_count_ = 0;
  std::uint64_t done_count_ = 0;
  bool closed_ = false;
  Status failure_;

  std::thread worker_;  // Last: it uses all of the above.
};

}  // namespace forebay
