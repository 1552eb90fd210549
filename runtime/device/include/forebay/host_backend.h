// HostBackend: a device made of ordinary memory, for machines without a GPU and for tests.
//
// Memory is a memfd charged against a byte budget, with the driver's virtual-memory semantics (reserve = an
// inaccessible range, chunk = a piece of the memfd, map = shared and fixed, aliases allowed). A stream is a
// worker thread with an in-order, bounded queue. A script injects faults and durations, so that out-of-memory
// paths, ordering and overlap are deterministic tests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "forebay/backend.h"
#include "forebay/host_clock.h"

namespace forebay {

// The fallible calls a script can fail. Names are those of Backend.
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

struct HostFault {
  HostCall call;
  std::uint64_t nth = 1;  // Fails the nth call of that kind, counted from 1.
  Status status;          // What that call returns.
};

struct HostBackendOptions {
  std::string name = "host";            // Appears in messages; a rank adds its number.
  std::size_t memory_bytes = SIZE_MAX;  // The device budget. SIZE_MAX: no limit but the machine's.
  std::size_t granularity = 2u << 20;   // Bytes. 2 MiB is what current GPUs have; tests use less.
  std::size_t queue_limit = 4096;       // Operations queued on one stream before queueing waits.
  HostClock* clock = nullptr;           // Not owned. Null: a real-time clock of its own.
  bool poison = true;                   // Fill chunks with 0xCB when they are created, so stale reads show.
  std::vector<HostFault> faults{};      // Applied in addition to add_fault().
  // Durations (added to the real work; meant for a virtual clock). 0 or an empty function: none.
  double copy_bytes_per_second = 0;
  std::function<HostClock::Nanoseconds(const char* kernel)> kernel_duration{};
};

class HostBackend : public Backend {
 public:
  // Errors: kInvalidArgument (granularity not a power of two or smaller than a page), kIoError (no memfd).
  static Result<std::unique_ptr<HostBackend>> create(HostBackendOptions options);

  // Adds a fault while running; `nth` counts from this call on.
  virtual void add_fault(HostFault fault) = 0;
  // Calls of that kind made so far, failed ones included.
  virtual std::uint64_t call_count(HostCall call) const = 0;
  virtual HostClock& clock() = 0;
  // Bytes charged against the budget now and at most so far.
  virtual std::size_t charged_bytes() const = 0;
  virtual std::size_t peak_charged_bytes() const = 0;
  // Handles not yet given back (reservations, chunks, mappings, streams, events, modules); 0 when nothing
  // leaks.
  virtual std::size_t live_handle_count() const = 0;
};

}  // namespace forebay
