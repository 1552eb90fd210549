// ModelBackend: a device that keeps the books and no bytes, for planning and replay. It refuses what the
// other backends refuse, charges what they charge, and orders streams and events as they do; but an address
// is only a number, a copy moves nothing and a kernel does not run. So a device of many terabytes fits into
// any machine, and a call costs a fraction of a microsecond.
//
// What it is not: a clock. Nothing takes time here; see HostClock for modelled durations.
//
// Addresses are 49-bit numbers above what any process has mapped, as on current GPUs: whoever dereferences
// one crashes at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/backend.h"
#include "forebay/host_backend.h"

namespace forebay {

// When queued work runs. Work runs on the threads that call the backend; there are no others.
enum class ModelOrder : std::uint8_t {
  kAtOnce,  // In the call that queues it.
  kSeeded,  // Some of it, of streams picked by the seed, in each call that queues or queries.
  kManual,  // When complete_next, complete_any, complete_all or a wait of the host asks for it.
};

struct ModelBackendOptions {
  std::string name = "model";                       // Appears in messages.
  std::size_t memory_bytes = std::size_t{1} << 40;  // What the device holds.
  std::size_t granularity = 2u << 20;               // Bytes; a power of two of at least 512.
  ModelOrder order = ModelOrder::kAtOnce;
  std::uint64_t seed = 1;           // Of the order in which streams advance (kSeeded, complete_any).
  std::size_t queue_limit = 4096;   // Operations kept on one stream; queueing more runs the oldest first.
  std::vector<HostFault> faults{};  // Applied in addition to add_fault().
};

class ModelBackend : public Backend {
 public:
  // Errors: kInvalidArgument (granularity, queue_limit, a fault without nth or error, more memory than there
  // are addresses).
  static Result<std::unique_ptr<ModelBackend>> create(ModelBackendOptions options);

  // Runs the oldest operation queued on `stream`. False if there is none, or if it waits for an event that
  // has not been reached, or another thread is running one of that stream.
  virtual bool complete_next(Stream stream) = 0;
  // The same for a stream picked by the seed among those that can advance.
  virtual bool complete_any() = 0;
  // Runs everything, in an order picked by the seed.
  virtual void complete_all() = 0;
  // Operations queued on all streams and not run yet.
  virtual std::size_t queued_count() const = 0;

  // Scripts and counters, as on HostBackend.
  virtual void add_fault(HostFault fault) = 0;
  virtual std::uint64_t call_count(HostCall call) const = 0;
  virtual std::size_t charged_bytes() const = 0;
  virtual std::size_t peak_charged_bytes() const = 0;
  virtual std::size_t live_handle_count() const = 0;
};

}  // namespace forebay
