// A WaitReport as bytes: the waits that a rank reports to the others through the rendezvous store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/wait_graph.h"

namespace forebay::internal {

struct WaitReport {
  std::uint64_t number = 0;  // Reports of this rank before this one.
  std::vector<Wait> waits;   // The oldest first.
};

inline constexpr std::size_t kReportedWaitsMax = 8;
inline constexpr std::size_t kWaitTextMax = 256;

// Leaves out waits, ranks and text beyond the limits.
std::string encode(const WaitReport& report);
// False for bytes that encode() did not make.
bool decode(std::string_view bytes, WaitReport* report);

}  // namespace forebay::internal
