// ScriptedHostBackend: the host backend with a script, for tests. The script makes chosen calls fail and
// gives copies and kernels a duration, so that errors, order and overlap are deterministic.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "forebay/host_backend.h"
#include "runtime/device/fault_script.h"

namespace forebay {

struct HostScript {
  std::vector<HostFault> faults{};
  // Durations, in addition to the real work; meant for a virtual clock. 0 or an empty function: none.
  double copy_bytes_per_second = 0;
  std::function<HostClock::Nanoseconds(const char* kernel)> kernel_duration{};
  // Threads that a driver calls host functions on. As on the cuda backend, a host function only signals
  // there, for `callback_duration`, and the work runs on a thread of its stream. 0: a thread for each stream.
  unsigned callback_threads = 0;
  HostClock::Nanoseconds callback_duration{0};
  // The work runs on the driver's thread too, as where a driver has no cuStreamWaitValue32.
  bool work_in_callbacks = false;
};

class ScriptedHostBackend : public HostBackend {
 public:
  // Errors: as HostBackend::create; kInvalidArgument for a fault without nth or error.
  static Result<std::unique_ptr<ScriptedHostBackend>> create(HostBackendOptions options,
                                                             HostScript script = {});

  // Adds a fault to the script. `nth` counts from this call on.
  virtual void add_fault(HostFault fault) = 0;
  // Calls of that kind made so far, failed ones included.
  virtual std::uint64_t call_count(HostCall call) const = 0;
};

}  // namespace forebay
