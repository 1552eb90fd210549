// FaultScript: counts the fallible calls of a backend and says which of them a test makes fail. Shared by the
// backends that take a script: host (host/script.h) and model (model/script.h).
//
// Threads: every function may be called from any thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// The calls that a script can make fail. The names are those of Backend.
enum class HostCall : std::uint8_t {
  kReserve,
  kChunkCreate,
  kMap,
  kUnmap,
  kSetAccess,
  kAlloc,
  kPin,
  kCopyAsync,
  kFillAsync,
  kStreamCreate,
  kEventCreate,
  kEventRecord,
  kStreamWait,
  kCallHost,
  kLoadModule,
  kLaunch,
};
inline constexpr int kHostCallCount = static_cast<int>(HostCall::kLaunch) + 1;

// The names in messages, by HostCall.
inline constexpr const char* kHostCallNames[kHostCallCount] = {
    "reserve",     "chunk_create", "map",         "unmap",         "set_access",   "alloc",
    "pin",         "copy_async",   "fill_async",  "stream_create", "event_create", "event_record",
    "stream_wait", "call_host",    "load_module", "launch"};

struct HostFault {
  HostCall call;
  std::uint64_t nth = 1;  // The nth call of that kind fails, counted from 1.
  Status status;          // The result of that call.
};

inline bool is_fault_valid(const HostFault& fault) {
  return fault.nth > 0 && !fault.status.ok() && static_cast<int>(fault.call) < kHostCallCount;
}

class FaultScript {
 public:
  explicit FaultScript(std::vector<HostFault> faults)
      : faults_(std::move(faults)), armed_count_(faults_.size()) {}

  // Counts one call; not ok if the script fails it.
  Status next(HostCall call) {
    const std::uint64_t nth =
        counts_[static_cast<std::size_t>(call)].fetch_add(1, std::memory_order_relaxed) + 1;
    if (armed_count_.load(std::memory_order_acquire) == 0) return {};
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(faults_.begin(), faults_.end(), [&](const HostFault& fault) {
      return fault.call == call && fault.nth == nth;
    });
    if (found == faults_.end()) return {};
    Status status = std::move(found->status);
    faults_.erase(found);
    armed_count_.store(faults_.size(), std::memory_order_release);
    return status;
  }

  // `nth` counts from this call on.
  void add(HostFault fault) {
    const std::lock_guard lock(mutex_);
    fault.nth += count(fault.call);
    faults_.push_back(std::move(fault));
    armed_count_.store(faults_.size(), std::memory_order_release);
  }

  std::uint64_t count(HostCall call) const {
    return counts_[static_cast<std::size_t>(call)].load(std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<std::uint64_t>, kHostCallCount> counts_{};
  std::mutex mutex_;
  std::vector<HostFault> faults_;         // Guarded by mutex_.
  std::atomic<std::size_t> armed_count_;  // faults_.size(), to be read without the mutex.
};

}  // namespace forebay
