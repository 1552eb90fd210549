// ModelBackend: a device that keeps books and no bytes, for planning and replay. It refuses, charges and
// orders as the other backends do, but an address is only a number: a copy moves nothing and a kernel does
// not run. So a device of many terabytes fits into any machine, and a call costs a fraction of a microsecond.
// Queued work runs in the call that queues it.
//
// It is not a clock: nothing takes time here.
//
// Addresses are 49-bit numbers above the addresses of any process, as on current GPUs: dereferencing one
// crashes at once.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "forebay/backend.h"

namespace forebay {

struct ModelBackendOptions {
  std::string name = "model";                       // Appears in messages.
  std::size_t memory_bytes = std::size_t{1} << 40;  // The device budget.
  std::size_t granularity = 2u << 20;               // Bytes; a power of two of at least 512.
  std::size_t queue_limit = 4096;  // Operations kept on one stream; queueing more runs the oldest first.
};

class ModelBackend : public Backend {
 public:
  // Errors: kInvalidArgument (granularity, queue_limit, more memory than there are addresses).
  static Result<std::unique_ptr<ModelBackend>> create(ModelBackendOptions options);

  // Bytes charged against the budget, now and at most so far.
  virtual std::size_t charged_bytes() const = 0;
  virtual std::size_t peak_charged_bytes() const = 0;
  // Handles not yet given back; 0 when nothing leaks.
  virtual std::size_t live_handle_count() const = 0;
};

}  // namespace forebay
