#include <algorithm>
#include <map>

#include "runtime/topology/readers.h"
#include "runtime/topology/system_files.h"

namespace forebay::internal {
namespace {

namespace fs = std::filesystem;

// The node that the device at `path`, or its parent, says it is near to.
std::optional<int> node_above(const fs::path& path) {
  constexpr int kDeepest = 32;  // Directories; a device's path has about ten.
  fs::path here = path;
  for (int i = 0; i < kDeepest && here.has_relative_path(); ++i, here = here.parent_path()) {
    const std::optional<int> node = to_int(read_line(here / "numa_node"));
    if (node && *node >= 0) return node;
  }
  return std::nullopt;
}

std::optional<int> node_of_drive(const fs::path& link) {
  std::error_code error;
  const fs::path path = fs::canonical(link, error);
  if (error) return std::nullopt;
  if (const std::optional<int> node = node_above(path)) return node;
  // An NVMe drive with several paths lies beside its controllers, not below one: the first that knows serves.
  if (path.string().find("/nvme-subsystem/") == std::string::npos) return std::nullopt;
  for (const auto& [rest, controller] : entries(path.parent_path(), "nvme")) {
    if (!is_number(rest)) continue;
    const fs::path target = fs::canonical(controller, error);
    if (error) continue;
    if (const std::optional<int> node = node_above(target)) return node;
  }
  return std::nullopt;
}

void add(Topology& topology, AttachmentKind kind, const std::string& name, std::optional<int> node) {
  if (node && topology.find_node(*node) != nullptr) topology.attachments.push_back({kind, name, {*node}});
}

void read_attachments(const fs::path& sys, Topology& topology) {
  for (const auto& [name, path] : entries(sys / "bus/pci/devices", "")) {
    if (read_line(path / "class").starts_with("0x06")) continue;  // A bridge.
    add(topology, AttachmentKind::kPci, normal_pci_id(name), to_int(read_line(path / "numa_node")));
  }
  for (const auto& [name, path] : entries(sys / "class/block", "")) {
    std::error_code error;
    if (fs::exists(path / "partition", error)) continue;
    add(topology, AttachmentKind::kDrive, name, node_of_drive(path));
  }
  for (const auto& [name, path] : entries(sys / "class/net", "")) {
    std::error_code error;
    const fs::path device = fs::canonical(path / "device", error);
    if (!error) add(topology, AttachmentKind::kNetworkInterface, name, node_above(device));
  }
}

// The processors of each core, from the list of those that share it.
std::vector<std::vector<int>> cores_of(const fs::path& sys, const std::vector<int>& processors,
                                       const Limits& limits) {
  std::map<int, std::vector<int>> cores;  // By the first processor that shares the core, usable or not.
  for (const int processor : usable_of(processors, limits)) {
    const fs::path facts = sys / "devices/system/cpu" / ("cpu" + std::to_string(processor)) / "topology";
    std::vector<int> shared = parse_list(read_line(facts / "core_cpus_list"));
    if (shared.empty()) shared = parse_list(read_line(facts / "thread_siblings_list"));
    cores[shared.empty() ? processor : shared.front()].push_back(processor);
  }
  std::vector<std::vector<int>> list;
  for (auto& [first, members] : cores) list.push_back(std::move(members));
  return list;
}

}  // namespace

Topology read_sysfs_topology(const SystemPaths& paths, const Limits& limits) {
  const fs::path sys = paths.sys;
  Topology topology;
  topology.source = "sysfs";
  topology.processor_quota = limits.processor_quota;
  for (const auto& [number, path] : entries(sys / "devices/system/node", "node")) {
    if (!is_number(number)) continue;
    NumaNode node;
    node.node = to_int(number).value_or(0);
    node.cores = cores_of(sys, parse_list(read_line(path / "cpulist")), limits);
    node.memory_bytes = number_behind(read_all(path / "meminfo"), "MemTotal:") * 1024;
    node.memory_usable = limits.memory_nodes.empty() ||
                         std::find(limits.memory_nodes.begin(), limits.memory_nodes.end(), node.node) !=
                             limits.memory_nodes.end();
    std::string distances = read_line(path / "distance");
    std::replace(distances.begin(), distances.end(), ' ', '\n');
    for (std::size_t begin = 0; begin < distances.size();) {
      const std::size_t end = std::min(distances.find('\n', begin), distances.size());
      if (const auto distance = to_int(distances.substr(begin, end - begin)))
        node.distances.push_back(*distance);
      begin = end + 1;
    }
    topology.nodes.push_back(std::move(node));
  }
  std::sort(topology.nodes.begin(), topology.nodes.end(),
            [](const NumaNode& a, const NumaNode& b) { return a.node < b.node; });
  for (NumaNode& node : topology.nodes) {
    if (node.distances.size() != topology.nodes.size()) node.distances.clear();
  }
  // A kernel without NUMA shows no nodes, and all that there is is one.
  if (topology.nodes.empty()) {
    std::vector<int> online = parse_list(read_line(sys / "devices/system/cpu/online"));
    if (online.empty()) online = limits.processors;
    NumaNode only;
    only.cores = cores_of(sys, online, limits);
    only.memory_bytes = number_behind(read_all(fs::path(paths.proc) / "meminfo"), "MemTotal:") * 1024;
    topology.nodes.push_back(std::move(only));
  }
  read_attachments(sys, topology);
  return topology;
}

}  // namespace forebay::internal
