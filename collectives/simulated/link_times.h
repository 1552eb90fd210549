// The time of operations over a topology, for one rank and the ranks of one communicator.
#pragma once

#include <cstdint>
#include <vector>

#include "forebay/simulated_communicator.h"

namespace forebay::internal {

class LinkTimes {
 public:
  // `members`: the world's numbers of the ranks. Cost: linear in members.
  LinkTimes(const SimulatedOptions& options, const std::vector<int>& members, int rank);

  // Each rank sends `bytes` to each other rank.
  ModelWork direct(const char* name, std::uint64_t bytes) const;
  // Every rank gets `bytes` of each other rank.
  ModelWork gather(const char* name, std::uint64_t bytes) const;
  ModelWork message(const char* name, std::uint64_t bytes, int peer) const;
  // A control operation in which each rank gives `bytes`.
  ModelWork control(const char* name, std::uint64_t bytes) const;

 private:
  // Carrying `bytes` over the link takes processors too.
  void add_processor(ModelWork& work, const SimulatedLevel& link, double bytes) const;

  struct Level {
    double share = 0;           // Bytes per second of this rank.
    std::uint64_t peers = 0;    // Ranks for which this is the innermost common level.
    std::uint64_t outside = 0;  // Ranks outside of the next smaller domain.
    std::uint64_t inside = 0;   // Ranks of the next smaller domain, this one among them.
    std::uint64_t hops = 0;     // Links of this level that a ring crosses.
  };

  const SimulatedOptions& options_;
  const std::vector<int>& members_;
  const int rank_;
  std::vector<Level> levels_;
};

}  // namespace forebay::internal
