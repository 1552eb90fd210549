// Topology: what lies near what on this host. NUMA nodes with their processors and memory, and the nodes that
// PCI devices, drives and network interfaces are attached to; and from that, where the threads and the
// page-locked memory that serve a device should be.
//
// Read once, by hwloc where the build has it and from sysfs otherwise, into plain values; everything else
// here is a function of these values, so that a machine which is not there can be asked too.
//
// What it is not: it moves and allocates nothing. Threads are kept to processors by ThreadBinding
// (thread_binding.h) or BlockRunner::create_on, memory to a node by PinnedPoolOptions::numa_node.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace forebay {

// Where the files of the system are found, so that a test can lay out a host of its own.
struct SystemPaths {
  std::string proc = "/proc";
  std::string sys = "/sys";
};

struct NumaNode {
  int node = 0;  // As the kernel numbers it.
  // The processors (hardware threads) of each core that this process may use, both in ascending order. Empty
  // for a node of memory only, and where the process may use none.
  std::vector<std::vector<int>> cores;
  std::uint64_t memory_bytes = 0;  // 0 when unknown.
  bool memory_usable = true;       // Whether this process may take memory there.
  // From this node to each of Topology::nodes, in their order; the smallest is the node itself. Empty when
  // unknown.
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
      nodes;  // Nearest, in ascending order: usually one; several where none is nearer. Never empty.
};

struct Topology {
  std::string source;                   // For people: "hwloc", "hwloc, of another machine", "sysfs".
  std::vector<NumaNode> nodes;          // By number; at least one.
  std::vector<Attachment> attachments;  // Those whose place is known.
  // The processors' worth of time that the control group grants; none: no limit.
  std::optional<double> processor_quota;

  // Usable ones, of all nodes.
  std::vector<int> processors() const;
  // Null when there is no such node.
  const NumaNode* find_node(int node) const;
  // The nodes nearest to what is attached. On a host with one node that one, known or not. Empty: unknown.
  // PCI ids are found however the driver writes them ("00000000:C1:00.0").
  std::vector<int> nodes_near(AttachmentKind kind, const std::string& name) const;
};

struct TopologyOptions {
  SystemPaths paths;
  // False: from sysfs alone. hwloc is not asked when `paths` are not the system's own.
  bool hwloc = true;
  // Stands for the processors that the system lets this process use.
  std::optional<std::vector<int>> usable_processors;
};

// What cannot be read is left out; a host that shows nothing is one node with the usable processors. hwloc
// obeys its environment (HWLOC_XMLFILE, HWLOC_SYNTHETIC); of a machine that is not this one, all processors
// are usable. A build without hwloc says so once, at FOREBAY_LOG=info. Cost: milliseconds.
Topology read_topology(const TopologyOptions& options = {});

// Where the host's side of a device should be.
struct Placement {
  std::vector<int> nodes;       // Nearest the device; empty: unknown, or no device.
  int memory_node = -1;         // For page-locked memory; -1: nothing to choose.
  std::vector<int> processors;  // For threads that wait and move bytes.
  // For threads that compute: one of each core, and no more than the quota is worth.
  std::vector<int> cores;
  std::string reason;  // For people.
};

struct PlacementRequest {
  std::vector<int>
      nodes;  // Nearest the device: Topology::nodes_near, or Capabilities::numa_node where known.
  // The processors near a device are divided between those who have it, or another device there, in equal
  // runs of cores. Whoever is more than there are cores shares one with others.
  int index = 0;  // Below count.
  int count = 1;
};

// Near nodes without a usable processor, or without memory that may be taken, those at the least distance
// serve. Requires: 0 <= index < count.
Placement place(const Topology& topology, const PlacementRequest& request);

// One placement for each device, given as the nodes nearest to it: devices near the same nodes divide the
// processors.
std::vector<Placement> place_all(const Topology& topology, std::span<const std::vector<int>> devices);

// "0-3,8": runs in ascending order, as the kernel writes them; "none" for none.
std::string processors_text(std::span<const int> processors);

}  // namespace forebay
