// The wait graph: which rank waits for which. When an operation comes to its deadline, the rank it waits for
// may itself wait for another one, in another group of ranks. The graph is followed to the rank that waits
// for nobody: that rank blocks the others, and the error names it.
//
// All rank numbers here are those of the world.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay::internal {

// An operation of one rank that is not done: the edges from this rank.
struct Wait {
  std::string what;        // "all_gather of 16 bytes (operation 3) in the group of ranks 1 and 3"
  std::vector<int> ranks;  // The ranks it waits for.
  bool came = false;       // They have come to the operation, but have not finished it.
  std::chrono::nanoseconds age{0};
};

// The operations that `rank` waits in now. Empty for a rank that waits for nobody, and for one that has not
// reported lately.
using WaitsOf = std::function<std::vector<Wait>(int rank)>;

// The error of `rank`, which has waited in `wait` until its deadline. It names the ranks that block the
// others, or says that ranks wait for each other in a circle.
Status explain_timeout(int rank, const Wait& wait, std::chrono::milliseconds deadline,
                       const WaitsOf& waits_of);

// A rank that waits reports it every `period`, and a report is believed for `validity`. Shorter: a rank that
// a busy host keeps from running looks like one that waits for nobody. Longer: a rank that was stopped while
// it waited looks as if it still waited.
struct WaitReporting {
  std::chrono::nanoseconds period;
  std::chrono::nanoseconds validity;
};
WaitReporting wait_reporting(std::chrono::milliseconds deadline);

}  // namespace forebay::internal
