// Measures hosts as several ranks use them at the same time: kernels of a host backend, copies, and the links
// between the ranks. Numbers only; machine_description.h makes a description for `forebay simulate` of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "forebay/backend.h"
#include "forebay/communicator.h"
#include "forebay/data_type.h"
#include "forebay/process_communicator.h"
#include "forebay/status.h"

namespace forebay {

enum class LinkKind : std::uint8_t { kShm, kGloo };

// A link as reduce-scatters and all-gathers reach it, while all ranks use theirs.
struct LinkMeasurement {
  double bytes_per_second = 0;
  double latency_seconds = 0;             // One hop's.
  double processor_seconds_per_byte = 0;  // User and system, for each byte received from another rank.
};

// One rank's share while all ranks do the same.
struct RankMeasurement {
  int ranks = 1;
  int host_ranks = 1;  // On each host.
  double kernel_bytes_per_second =
      0;                             // The AdamW update on one thread: 24 bytes an element and the gradient.
  double copy_bytes_per_second = 0;  // From pinned memory to the device.
  LinkMeasurement within_host;       // Zeros for one rank on a host.
  LinkMeasurement between_hosts;     // Zeros for one host.
  double control_seconds = 0;        // One hop of a control operation.
};

struct RankRequest {
  DataType dtype = DataType::kFloat32;
  std::uint64_t bytes = 0;  // In the buffers of each rank.
  std::chrono::nanoseconds duration{};
};

// Runs `ranks` processes on this host that measure at the same time.
//
// Requires: this process has one thread. Errors: those of the communicator and the backend, of any rank.
Result<RankMeasurement> measure_ranks(int ranks, LinkKind link, const RankRequest& request);

// The ranks that a launcher started, on any number of hosts; this process is one of them.
class LaunchedRanks {
 public:
  // Order: collective. Over `tcp`, or else over what suits the place where the ranks run.
  // Errors: those of create_process_communicator().
  static Result<std::unique_ptr<LaunchedRanks>> join(const ProcessOptions& place, bool tcp);

  LinkKind link() const;
  // True once measure() was called.
  bool measured() const { return measured_; }
  // Rank 0 says what is measured, or why nothing is; the other ranks' requests are not read.
  //
  // Order:  collective.
  // Errors: rank 0's; kInvalidArgument unless all hosts have the same number of ranks; those of the
  //         communicator and the backend.
  Result<RankMeasurement> measure(const Result<RankRequest>& request);

 private:
  LaunchedRanks() = default;

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Communicator> communicator_;
  bool measured_ = false;
};

}  // namespace forebay
