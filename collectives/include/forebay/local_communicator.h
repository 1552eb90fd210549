// Ranks as threads of one process: the reference Communicator, for tests, for single-process runs and
// wherever several ranks share one device.
//
// Each rank has a Backend of its own. Where the host reaches the backends' memory, the host copies. Otherwise
// the backends copy, on the ranks' streams, ordered by events: they must be of one kind and accept each
// other's events and addresses, as cuda backends of one device do, or those of several devices with peer
// access. A data operation then waits, where it is issued, until the peers have issued it too or the deadline
// passes. From there on the device orders everything, and no deadline notices a device that stops.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "forebay/communicator.h"
#include "forebay/host_clock.h"
#include "forebay/kernels.h"

namespace forebay {

// A scripted fault: changes one data operation of one rank. For tests of code that must survive faults.
struct LocalFault {
  enum class Kind : std::uint8_t {
    kFails,       // The operation is not carried out; the group fails with `cause`.
    kFailsAfter,  // It is carried out, and the group fails `delay` later, before this rank goes on.
    kDies,        // Neither it nor any later operation of this rank is carried out, and nobody is told.
    kStalls,      // It is not carried out before the group has failed.
    kMismatches,  // It is carried out with another count.
    kComesLate,   // It is carried out `delay` later.
  };

  int rank = -1;                // -1: no fault.
  std::uint64_t operation = 0;  // Which data operation of that rank, counted from 0 as issued.
  Kind kind = Kind::kFails;
  Status cause;
  std::chrono::nanoseconds delay{0};  // On the group's clock.
};

struct LocalOptions {
  std::chrono::milliseconds deadline{60'000};  // For each operation, measured on `clock`.
  HostClock* clock = nullptr;  // Not owned; the ranks' backends share it. Null: a real clock of its own.
  // A modelled link, for a virtual clock and memory that the host reaches: each operation takes
  // latency + bytes sent / bandwidth. 0: it takes no time.
  std::chrono::nanoseconds latency{0};
  double bytes_per_second = 0;
  LocalFault fault;
};

// The meeting place of `size` ranks. The communicators it hands out share it and keep it alive.
// Threads: any.
class LocalGroup {
 public:
  // Requires: size >= 1; the clock of the options outlives all communicators.
  static std::shared_ptr<LocalGroup> create(int size, LocalOptions options = {});
  virtual ~LocalGroup() = default;

  // The communicator of `rank`, on that rank's backend and kernels, which outlive it. Once per rank.
  // Errors: kInvalidArgument for a rank that does not exist, was asked for before, or has another kind of
  //         memory than the ranks before it; kUnsupported for a modelled link where the backends copy.
  virtual Result<std::unique_ptr<Communicator>> communicator(int rank, Backend& backend,
                                                             Kernels& kernels) = 0;
};

}  // namespace forebay
