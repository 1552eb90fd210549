// HostBackend: a device made of ordinary memory, for machines without a GPU and for tests.
//
// Memory is a memfd under a byte budget, with the virtual-memory rules of a driver: a reservation is
// inaccessible, a chunk is a part of the memfd, and mapping it is a shared mmap, so aliases are allowed. A
// stream is a worker thread with a bounded queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "forebay/backend.h"
#include "forebay/host_clock.h"

namespace forebay {

struct HostBackendOptions {
  std::string name = "host";            // Appears in messages; a rank adds its number.
  std::size_t memory_bytes = SIZE_MAX;  // The device budget. SIZE_MAX: the memory of the machine.
  std::size_t granularity = 2u << 20;   // Bytes; a power of two of at least a page. Current GPUs have 2 MiB.
  std::size_t queue_limit = 4096;       // Operations queued on one stream before queueing waits.
  HostClock* clock = nullptr;           // Not owned. Null: a real-time clock of its own.
  bool poison = true;                   // Fills new chunks with 0xCB, so that stale reads show.
  // For tests and debugging: memory that an engine gathered for a unit is inaccessible while no lease of the
  // unit is alive, parameters are never writable, and a use at another time ends the program with a report
  // that names the unit (access_guard.h). FOREBAY_HOST_GUARD=1 in the environment sets it too.
  bool guard = false;
};

class HostBackend : public Backend {
 public:
  // Errors: kInvalidArgument (granularity, queue_limit), kIoError (the system gives no memfd).
  static Result<std::unique_ptr<HostBackend>> create(HostBackendOptions options);

  virtual HostClock& clock() = 0;
  // Bytes charged against the budget, now and at most so far.
  virtual std::size_t charged_bytes() const = 0;
  virtual std::size_t peak_charged_bytes() const = 0;
  // Handles not yet given back: reservations, chunks, mappings, blocks, pinned ranges, streams, events and
  // modules. 0 when nothing leaks.
  virtual std::size_t live_handle_count() const = 0;
};

}  // namespace forebay
