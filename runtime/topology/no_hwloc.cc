#include "runtime/topology/readers.h"

namespace forebay::internal {

std::optional<Topology> read_hwloc_topology(const Limits&, std::string* why) {
  *why = "this build has no hwloc";
  return std::nullopt;
}

}  // namespace forebay::internal
