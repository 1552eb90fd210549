// Identifies a process on its host, and tells whether it still runs and which processes can share memory.
#pragma once

#include <cstdint>
#include <string>

#include "forebay/status.h"

namespace forebay::internal {

// A process id is used again after its process has ended; together with the start time it is not.
struct ProcessIdentity {
  std::int32_t id = 0;
  std::uint64_t start_time = 0;  // In the kernel's ticks since the boot; 0: unknown.
};

// Errors: kUnsupported without /proc.
Result<ProcessIdentity> this_process();
// False when no such process runs any more. A process that has ended but was not reaped yet does not run.
bool is_running(const ProcessIdentity& process);

// Equal for processes that can share memory: the boot's id, the process namespace and the user namespace.
// Errors: kUnsupported without /proc.
Result<std::string> host_identity();

}  // namespace forebay::internal
