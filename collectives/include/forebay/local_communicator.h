// Ranks as threads of one process: the reference Communicator, used by tests, by single-process runs and
// wherever several ranks share one device.
//
// Each rank has a Backend of its own. In memory that the host reaches it is the host that copies. Otherwise
// the backends copy, on the ranks' streams, ordered by events: they must be of one kind and take each other's
// events and addresses, as cuda backends of one device do, or of several devices with peer access. A data
// operation then waits, where it is issued, until the peers have issued it too or the deadline passes; from
// there on the device orders everything, and a device that stops is not noticed by a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "forebay/communicator.h"
#include "forebay/host_clock.h"
#include "forebay/kernels.h"

namespace forebay {

// A fault by script: what happens to one data operation of one rank.
struct LocalFault {
  enum class Kind : std::uint8_t {
    kFails,       // It does not come; the group fails with `cause`.
    kFailsAfter,  // It is carried out, and `delay` later, before its rank gets on, the group fails.
    kDies,        // Neither it nor anything after it comes from this rank, and nobody is told.
    kStalls,      // It does not come before the group has failed.
    kMismatches,  // It comes with another count.
    kComesLate,   // It comes `delay` later.
  };

  int rank = -1;                // -1: none.
  std::uint64_t operation = 0;  // Of that rank, counted from 0 as issued.
  Kind kind = Kind::kFails;
  Status cause;
  std::chrono::nanoseconds delay{0};  // On the group's clock.
};

struct LocalOptions {
  std::chrono::milliseconds deadline{60'000};  // Of every operation, measured on `clock`.
  HostClock* clock = nullptr;  // Not owned; the ranks' backends share it. Null: a real one of its own.
  // Modelled link, for a virtual clock and memory that the host reaches: each operation takes latency + bytes
  // sent / bandwidth. 0: takes no time.
  std::chrono::nanoseconds latency{0};
  double bytes_per_second = 0;
  LocalFault fault;
};

// The meeting place of `size` ranks. Shared by the communicators it hands out, each of which keeps it alive.
class LocalGroup {
 public:
  static std::shared_ptr<LocalGroup> create(int size, LocalOptions options = {});
  virtual ~LocalGroup() = default;

  // The communicator of `rank`, on that rank's backend and kernels. Once per rank.
  virtual Result<std::unique_ptr<Communicator>> communicator(int rank, Backend& backend,
                                                             Kernels& kernels) = 0;
};

}  // namespace forebay
