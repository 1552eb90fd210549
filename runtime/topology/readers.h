// The two ways to read a topology, and their input.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "forebay/topology.h"

namespace forebay::internal {

struct Limits {
  std::vector<int> processors;  // Usable ones; empty: not known, all are.
  // NUMA nodes that memory may be taken from; empty: not known, all are.
  std::vector<int> memory_nodes;
  std::optional<double> processor_quota;
};

// The processors and memory that this process may use, by its affinity and its control group.
Limits read_limits(const TopologyOptions& options);

Topology read_sysfs_topology(const SystemPaths& paths, const Limits& limits);

// None when hwloc cannot read the machine; `why` says so.
std::optional<Topology> read_hwloc_topology(const Limits& limits, std::string* why);

// Keeps the processors of a core that are usable.
std::vector<int> usable_of(const std::vector<int>& processors, const Limits& limits);

// "00000000:C1:00.0" -> "0000:c1:00.0", which is how the kernel writes it.
std::string normal_pci_id(const std::string& id);

}  // namespace forebay::internal
