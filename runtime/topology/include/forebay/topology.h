// Topology: the NUMA nodes of this host with their processors and memory, and the nodes that PCI devices,
// drives and network interfaces are attached to. From it follows where the host threads and the pinned memory
// that serve a device should be.
//
// It is read once, with hwloc where the build has it and from sysfs otherwise, into plain values. Everything
// else here is a function of these values, so other machines can be examined too.
//
// It moves and allocates nothing. ThreadBinding (thread_binding.h) and BlockRunner::create_on bind threads to
// processors; PinnedPoolOptions::numa_node binds memory to a node.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forebay/span.h"

namespace forebay {

// Where the files of the system are. A copy of them from another host can be examined as well.
struct SystemPaths {
  std::string proc = "/proc";
  std::string sys = "/sys";
};

struct NumaNode {
  int node = 0;  // The kernel's number.
  // The processors (hardware threads) of each core that this process may use, both in ascending order. Empty
  // for a node of memory only, and where the process may use none.
  std::vector<std::vector<int>> cores;
  std::uint64_t memory_bytes = 0;  // 0 when unknown.
  bool memory_usable = true;       // Whether this process may take memory there.
  // From this node to each of Topology::nodes, in their order; the smallest is its own. Empty when unknown.
  std::vector<int> distances;

  std::vector<int> processors() const;
};

enum class AttachmentKind : std::uint8_t {
  kPci,               // "0000:41:00.0"
  kDrive,             // "nvme0n1"
  kNetworkInterface,  // "eth0"
};

struct Attachment {
  AttachmentKind kind = AttachmentKind::kPci;
  std::string name;
  std::vector<int>
      nodes;  // The nearest, in ascending order: usually one; several at the same distance. Never empty.
};

struct Topology {
  std::string source;                   // For people: "hwloc", "hwloc, of another machine", "sysfs".
  std::vector<NumaNode> nodes;          // By number; at least one.
  std::vector<Attachment> attachments;  // All with a known place.
  // How many processors' time the control group grants; none: no limit.
  std::optional<double> processor_quota;

  // The usable processors of all nodes.
  std::vector<int> processors() const;
  // Null when there is no such node.
  const NumaNode* find_node(int node) const;
  // The nodes nearest to an attachment. On a host with one node that node, also for an unknown attachment.
  // Empty: unknown. PCI ids may be written as a driver does ("00000000:C1:00.0").
  std::vector<int> nodes_near(AttachmentKind kind, const std::string& name) const;
};

struct TopologyOptions {
  SystemPaths paths;
  // False: from sysfs alone. hwloc is not asked when `paths` are not the system's own.
  bool hwloc = true;
  // Replaces the processors that the system lets this process use.
  std::optional<std::vector<int>> usable_processors;
};

// Unreadable facts are left out; a host that shows nothing is one node with the usable processors. hwloc
// obeys its environment (HWLOC_XMLFILE, HWLOC_SYNTHETIC); all processors of another machine are usable. A
// build without hwloc says so once, at FOREBAY_LOG=info. Cost: milliseconds.
Topology read_topology(const TopologyOptions& options = {});

// Where the host threads and the pinned memory of a device should be.
struct Placement {
  std::vector<int> nodes;       // Nearest to the device; empty: unknown, or no device.
  int memory_node = -1;         // For pinned memory; -1: nothing to choose.
  std::vector<int> processors;  // For threads that wait and move bytes.
  // For threads that compute: one processor of each core, and no more than the quota grants.
  std::vector<int> cores;
  std::string reason;  // For people.
};

struct PlacementRequest {
  std::vector<int>
      nodes;  // Nearest to the device: Topology::nodes_near, or Capabilities::numa_node where known.
  // The users of the devices near these nodes divide the cores there in equal runs; this is the index-th of
  // `count` users. Where there are more users than cores, users share a core.
  int index = 0;  // Below count.
  int count = 1;
};

// If the nearest nodes have no usable processor or memory, the next nearest nodes that have some are used.
// Requires: 0 <= index < count.
Placement place(const Topology& topology, const PlacementRequest& request);

// One placement for each device, which is given as the nodes nearest to it. Devices near the same nodes
// divide the processors.
std::vector<Placement> place_all(const Topology& topology, Span<const std::vector<int>> devices);

// "0-3,8": runs in ascending order, as the kernel writes them; "none" for none.
std::string processors_text(Span<const int> processors);

}  // namespace forebay
