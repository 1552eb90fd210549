// Why a rank waits in vain. The rank it waits for may itself wait for another, in another group, and that one
// again: to blame is who waits for nobody. All ranks here are the world's.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay::internal {

// An operation of one rank that is not done.
struct Wait {
  std::string what;        // "all_gather of 16 bytes (operation 3) in the group of ranks 1 and 3"
  std::vector<int> ranks;  // Whom it waits for.
  bool came = false;       // They have come to the operation and do not finish it.
  std::chrono::nanoseconds age{0};
};

// What `rank` waits in just now: nothing for one that waits for nobody, or that is not heard of.
using WaitsOf = std::function<std::vector<Wait>(int rank)>;

// The error of `rank`, which has waited in `wait` for its deadline: it names those at the end of the chain,
// or says that there is no end.
Status judge(int rank, const Wait& wait, std::chrono::milliseconds deadline, const WaitsOf& waits_of);

// How often a rank that waits says so, at most, and how long that holds. Shorter: a rank that a busy host
// keeps from running looks like one that waits for nobody. Longer: one that was stopped while it waited looks
// as if it still did.
struct WaitRhythm {
  std::chrono::nanoseconds beat;
  std::chrono::nanoseconds fresh;
};
WaitRhythm wait_rhythm(std::chrono::milliseconds deadline);

}  // namespace forebay::internal
