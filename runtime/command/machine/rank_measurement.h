// Measures this host as several ranks use it at the same time: kernels of a host backend, copies, and one
// link between the ranks. Numbers only; machine_description.h makes a description for `forebay simulate` of
// them.
#pragma once

#include <chrono>
#include <cstdint>

#include "forebay/data_type.h"
#include "forebay/status.h"

namespace forebay {

enum class LinkKind : std::uint8_t { kShm, kGloo };

// One rank's share while all ranks do the same.
struct RankMeasurement {
  int ranks = 1;
  double kernel_bytes_per_second =
      0;                             // The AdamW update on one thread: 24 bytes an element and the gradient.
  double copy_bytes_per_second = 0;  // From pinned memory to the device.
  // The link, by all-gathers. 0 for one rank.
  double link_bytes_per_second = 0;
  double link_latency_seconds = 0;             // One hop's.
  double link_processor_seconds_per_byte = 0;  // User and system, for each byte received from another rank.
  double control_seconds = 0;                  // One hop of a control operation.
};

// Runs `ranks` processes that measure at the same time, each with buffers of `bytes`.
//
// Requires: this process has one thread. Errors: those of the communicator and the backend, of any rank.
Result<RankMeasurement> measure_ranks(int ranks, LinkKind link, DataType dtype, std::uint64_t bytes,
                                      std::chrono::nanoseconds duration);

}  // namespace forebay
