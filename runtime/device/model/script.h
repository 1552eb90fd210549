// ScriptedModelBackend: the model backend with a script, for tests. The script makes chosen calls fail, and
// decides when queued work runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "forebay/model_backend.h"
#include "runtime/device/fault_script.h"

namespace forebay {

// When queued work runs. It runs on the threads that call the backend; there are no others.
enum class ModelOrder : std::uint8_t {
  kAtOnce,  // In the call that queues it.
  kSeeded,  // Each call that queues or queries runs some of it, from streams picked by the seed.
  kManual,  // When complete_next, complete_any, complete_all or a wait of the host asks for it.
  kTimed,   // When its virtual time has come. Chosen by ModelBackendOptions::timing.
};

struct ModelScript {
  ModelOrder order = ModelOrder::kAtOnce;
  std::uint64_t seed = 1;  // For the order in which streams advance (kSeeded, complete_any).
  std::vector<HostFault> faults{};
};

class ScriptedModelBackend : public ModelBackend {
 public:
  // Errors: as ModelBackend::create; kInvalidArgument for a fault without nth or error.
  static Result<std::unique_ptr<ScriptedModelBackend>> create(ModelBackendOptions options,
                                                              ModelScript script = {});

  // Runs the oldest operation of `stream`. False if there is none, if it waits for an event that has not been
  // reached, or if another thread is running an operation of that stream.
  virtual bool complete_next(Stream stream) = 0;
  // The same for a stream that the seed picks among those that can advance.
  virtual bool complete_any() = 0;
  // Runs everything, in an order that the seed picks.
  virtual void complete_all() = 0;
  // Operations that are queued on all streams and have not run.
  virtual std::size_t queued_count() const = 0;

  // As ScriptedHostBackend.
  virtual void add_fault(HostFault fault) = 0;
  virtual std::uint64_t call_count(HostCall call) const = 0;
};

}  // namespace forebay
