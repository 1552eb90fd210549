// The last vote of one rank for a step's decision (Communicator::vote).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace forebay::internal {

// Threads: one; the owner's mutex guards it.
struct Ballot {
  std::uint64_t step = 0;
  std::vector<std::byte> decision;
  bool cast = false;

  void mark(std::uint64_t voted_step, std::span<const std::byte> voted) {
    step = voted_step;
    decision.assign(voted.begin(), voted.end());
    cast = true;
  }
  bool is_for(std::uint64_t wanted) const { return cast && step == wanted; }
};

}  // namespace forebay::internal
