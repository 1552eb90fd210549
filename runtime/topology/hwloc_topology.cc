#include <hwloc.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "runtime/topology/readers.h"

namespace forebay::internal {
namespace {

struct Destroy {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Handle = std::unique_ptr<hwloc_topology, Destroy>;

std::vector<int> numbers_of(hwloc_const_bitmap_t set) {
  std::vector<int> numbers;
  if (set == nullptr || hwloc_bitmap_weight(set) < 0) return numbers;  // Nothing, or without an end.
  for (int i = hwloc_bitmap_first(set); i != -1; i = hwloc_bitmap_next(set, i)) numbers.push_back(i);
  return numbers;
}

Handle load(std::string* why) {
  hwloc_topology_t made = nullptr;
  if (hwloc_topology_init(&made) != 0) {
    *why = std::string("hwloc_topology_init: ") + std::strerror(errno);
    return nullptr;
  }
  Handle topology(made);
  // Plugins that ask other libraries about their devices, some of which start these devices.
  for (const char* component : {"cuda", "nvml", "opencl", "gl", "rsmi", "levelzero"}) {
    hwloc_topology_set_components(made, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, component);
  }
  hwloc_topology_set_io_types_filter(made, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  // Nodes that this process may not use are there all the same, and devices may be attached to them.
  hwloc_topology_set_flags(made, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  if (hwloc_topology_load(made) != 0) {
    *why = std::string("hwloc_topology_load: ") + std::strerror(errno) +
           "; check HWLOC_XMLFILE and HWLOC_SYNTHETIC if they are set";
    return nullptr;
  }
  return topology;
}

// The node a processor is counted to: the one with the fewest processors, and of these the first. Memory that
// several nodes are near to (such as high-bandwidth memory beside the ordinary kind) has no processors of its
// own.
hwloc_obj_t home_of(hwloc_topology_t topology, int processor) {
  hwloc_obj_t home = nullptr;
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    if (hwloc_bitmap_isset(node->cpuset, static_cast<unsigned>(processor)) == 0) continue;
    if (home == nullptr || hwloc_bitmap_weight(node->cpuset) < hwloc_bitmap_weight(home->cpuset)) home = node;
  }
  return home;
}

void read_cores(hwloc_topology_t handle, const Limits& limits, Topology& topology) {
  const hwloc_obj_type_t type =
      hwloc_get_nbobjs_by_type(handle, HWLOC_OBJ_CORE) > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  const hwloc_const_bitmap_t allowed = hwloc_topology_get_allowed_cpuset(handle);
  for (hwloc_obj_t core = nullptr; (core = hwloc_get_next_obj_by_type(handle, type, core)) != nullptr;) {
    std::vector<int> processors = usable_of(numbers_of(core->cpuset), limits);
    std::erase_if(processors, [&](int processor) {
      return hwloc_bitmap_isset(allowed, static_cast<unsigned>(processor)) == 0;
    });
    if (processors.empty()) continue;
    const hwloc_obj_t home = home_of(handle, processors.front());
    for (NumaNode& node : topology.nodes) {
      if (home != nullptr && node.node == static_cast<int>(home->os_index)) node.cores.push_back(processors);
    }
  }
  for (NumaNode& node : topology.nodes) std::sort(node.cores.begin(), node.cores.end());
}

void read_distances(hwloc_topology_t handle, Topology& topology) {
  unsigned count = 1;
  hwloc_distances_s* matrix = nullptr;
  if (hwloc_distances_get_by_type(handle, HWLOC_OBJ_NUMANODE, &count, &matrix,
                                  HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) != 0 ||
      count == 0) {
    return;
  }
  // Row and column of each node of ours.
  std::vector<unsigned> places;
  for (const NumaNode& node : topology.nodes) {
    for (unsigned i = 0; i < matrix->nbobjs; ++i) {
      if (matrix->objs[i] != nullptr && static_cast<int>(matrix->objs[i]->os_index) == node.node)
        places.push_back(i);
    }
  }
  if (places.size() == topology.nodes.size()) {
    for (std::size_t i = 0; i < places.size(); ++i) {
      for (const unsigned column : places) {
        topology.nodes[i].distances.push_back(
            static_cast<int>(matrix->values[places[i] * matrix->nbobjs + column]));
      }
    }
  }
  hwloc_distances_release(handle, matrix);
}

std::string pci_id(const hwloc_obj_attr_u::hwloc_pcidev_attr_s& device) {
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.%01x", static_cast<unsigned>(device.domain), device.bus,
                device.dev, device.func);
  return text;
}

void read_attachments(hwloc_topology_t handle, Topology& topology) {
  const auto add = [&](hwloc_obj_t device, AttachmentKind kind, const std::string& name) {
    const hwloc_obj_t above = hwloc_get_non_io_ancestor_obj(handle, device);
    if (above == nullptr) return;
    std::vector<int> nodes = numbers_of(above->nodeset);
    std::erase_if(nodes, [&](int node) { return topology.find_node(node) == nullptr; });
    // As near to all as to any: nothing is known.
    if (nodes.empty() || (nodes.size() == topology.nodes.size() && nodes.size() > 1)) return;
    topology.attachments.push_back({kind, name, std::move(nodes)});
  };
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_pcidev(handle, device)) != nullptr;) {
    add(device, AttachmentKind::kPci, pci_id(device->attr->pcidev));
  }
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_osdev(handle, device)) != nullptr;) {
    if (device->name == nullptr) continue;
    if (device->attr->osdev.type == HWLOC_OBJ_OSDEV_BLOCK) add(device, AttachmentKind::kDrive, device->name);
    if (device->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK)
      add(device, AttachmentKind::kNetworkInterface, device->name);
  }
}

}  // namespace

std::optional<Topology> read_hwloc_topology(const Limits& limits, std::string* why) {
  const Handle loaded = load(why);
  if (loaded == nullptr) return std::nullopt;
  const hwloc_topology_t handle = loaded.get();
  Topology topology;
  topology.source = "hwloc";
  Limits used = limits;
  if (hwloc_topology_is_thissystem(handle) == 0) {
    used = {};  // They are this system's.
    topology.source += ", of another machine";
  }
  topology.processor_quota = used.processor_quota;
  for (hwloc_obj_t object = nullptr;
       (object = hwloc_get_next_obj_by_type(handle, HWLOC_OBJ_NUMANODE, object)) != nullptr;) {
    NumaNode node;
    node.node = static_cast<int>(object->os_index);
    node.memory_bytes = object->attr->numanode.local_memory;
    node.memory_usable =
        hwloc_bitmap_isset(hwloc_topology_get_allowed_nodeset(handle), object->os_index) != 0;
    topology.nodes.push_back(std::move(node));
  }
  std::sort(topology.nodes.begin(), topology.nodes.end(),
            [](const NumaNode& a, const NumaNode& b) { return a.node < b.node; });
  read_cores(handle, used, topology);
  read_distances(handle, topology);
  read_attachments(handle, topology);
  if (topology.processors().empty()) {
    *why = "hwloc shows no processor that this process may use";
    return std::nullopt;
  }
  return topology;
}

}  // namespace forebay::internal
