// StateClaims: the directories in which one engine saved its state, or from which it loaded it. Another
// engine of this process must not replace the states there. StateLock keeps out other processes.
// Threads: any, but for the end.
#pragma once

#include <sys/types.h>

#include <set>
#include <utility>

#include "runtime/engine/state/state_directory.h"

namespace forebay::internal {

class StateClaims {
 public:
  StateClaims() = default;
  StateClaims(const StateClaims&) = delete;
  StateClaims& operator=(const StateClaims&) = delete;
  ~StateClaims();

  // Errors: throws kInvalidArgument where other engines claim the directory and this one does not. Claims on
  // a directory that has no state any more do not count.
  void check(const StateDirectory& directory) const;
  void add(const StateDirectory& directory);

 private:
  std::set<std::pair<dev_t, ino_t>> directories_;
};

}  // namespace forebay::internal
