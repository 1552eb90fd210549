#include "forebay/topology.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>

#include "forebay/check.h"
#include "forebay/log.h"
#include "runtime/topology/readers.h"

namespace forebay {
namespace {

using Core = std::vector<int>;

std::string nodes_text(const std::vector<int>& nodes) {
  return (nodes.size() == 1 ? "node " : "nodes ") + processors_text(nodes);
}

// The nodes of `wanted` for which `serves` holds, or else the nearest node for which it does. `wanted` empty:
// all.
template <typename Serves>
std::vector<const NumaNode*> nearest(const Topology& topology, const std::vector<int>& wanted,
                                     Serves serves) {
  std::vector<const NumaNode*> found;
  for (const NumaNode& node : topology.nodes) {
    const bool is_wanted =
        wanted.empty() || std::find(wanted.begin(), wanted.end(), node.node) != wanted.end();
    if (is_wanted && serves(node)) found.push_back(&node);
  }
  if (!found.empty()) return found;
  int least = std::numeric_limits<int>::max();
  for (const int number : wanted) {
    const NumaNode* from = topology.find_node(number);
    if (from == nullptr) continue;
    for (std::size_t i = 0; i < topology.nodes.size(); ++i) {
      const NumaNode& node = topology.nodes[i];
      const int far = from->distances.empty() ? 0 : from->distances[i];  // Unknown ones are equally far.
      if (!serves(node) || far > least) continue;
      if (far < least) found.clear();
      least = far;
      if (std::find(found.begin(), found.end(), &node) == found.end()) found.push_back(&node);
    }
  }
  if (!found.empty()) return found;
  for (const NumaNode& node : topology.nodes) {
    if (serves(node)) found.push_back(&node);
  }
  return found;
}

// The index-th of `count` equal runs; a run that would be empty shares a core.
std::vector<Core> share_of(const std::vector<Core>& cores, int index, int count) {
  const std::size_t total = cores.size();
  const auto at = [&](int i) {
    return static_cast<std::size_t>(i) * total / static_cast<std::size_t>(count);
  };
  const std::size_t begin = at(index);
  const std::size_t end = std::max(at(index + 1), std::min(begin + 1, total));
  return {cores.begin() + static_cast<std::ptrdiff_t>(begin),
          cores.begin() + static_cast<std::ptrdiff_t>(end)};
}

}  // namespace

std::vector<int> NumaNode::processors() const {
  std::vector<int> all;
  for (const Core& core : cores) all.insert(all.end(), core.begin(), core.end());
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<int> Topology::processors() const {
  std::vector<int> all;
  for (const NumaNode& node : nodes) {
    const std::vector<int> some = node.processors();
    all.insert(all.end(), some.begin(), some.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

const NumaNode* Topology::find_node(int node) const {
  for (const NumaNode& one : nodes) {
    if (one.node == node) return &one;
  }
  return nullptr;
}

std::vector<int> Topology::nodes_near(AttachmentKind kind, const std::string& name) const {
  if (nodes.size() == 1) return {nodes.front().node};
  const std::string wanted = kind == AttachmentKind::kPci ? internal::normal_pci_id(name) : name;
  for (const Attachment& one : attachments) {
    if (one.kind == kind && one.name == wanted) return one.nodes;
  }
  return {};
}

std::string internal::normal_pci_id(const std::string& id) {
  std::string text = id;
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) return text;
  if (text.find(':', colon + 1) == std::string::npos) return "0000:" + text;  // Without a domain.
  constexpr std::size_t kDomainDigits = 4;
  while (text.find(':') > kDomainDigits && text.front() == '0') text.erase(0, 1);
  return text;
}

Topology read_topology(const TopologyOptions& options) {
  const internal::Limits limits = internal::read_limits(options);
  const SystemPaths system;
  if (options.hwloc && options.paths.proc == system.proc && options.paths.sys == system.sys) {
    std::string why;
    if (std::optional<Topology> read = internal::read_hwloc_topology(limits, &why)) return *std::move(read);
    static std::atomic<bool> said = false;
    if (!said.exchange(true)) log(LogLevel::kInfo, "the topology is read from sysfs: %s", why.c_str());
  }
  return internal::read_sysfs_topology(options.paths, limits);
}

Placement place(const Topology& topology, const PlacementRequest& request) {
  FOREBAY_CHECK(request.index >= 0 && request.index < request.count, "placement %d of %d", request.index,
                request.count);
  Placement placement;
  placement.nodes = request.nodes;
  const auto has_cores = [](const NumaNode& node) { return !node.cores.empty(); };
  const auto has_memory = [](const NumaNode& node) { return node.memory_usable && node.memory_bytes != 0; };

  std::vector<Core> cores;
  std::vector<int> serving;
  for (const NumaNode* node : nearest(topology, request.nodes, has_cores)) {
    serving.push_back(node->node);
    cores.insert(cores.end(), node->cores.begin(), node->cores.end());
  }
  for (const Core& core : share_of(cores, request.index, request.count)) {
    placement.cores.push_back(core.front());
    placement.processors.insert(placement.processors.end(), core.begin(), core.end());
  }
  std::sort(placement.processors.begin(), placement.processors.end());
  if (topology.processor_quota) {
    const double share = *topology.processor_quota / request.count;
    const auto worth = static_cast<std::size_t>(std::clamp(std::floor(share), 1.0, 1e6));
    if (placement.cores.size() > worth) placement.cores.resize(worth);
  }
  if (topology.nodes.size() > 1 && !request.nodes.empty()) {
    const std::vector<const NumaNode*> memory = nearest(topology, request.nodes, has_memory);
    if (!memory.empty()) placement.memory_node = memory.front()->node;
  }

  if (topology.nodes.size() == 1) {
    placement.reason = "the host has one NUMA node";
  } else if (request.nodes.empty()) {
    placement.reason = "no NUMA node is known to be nearest";
  } else {
    placement.reason = "nearest NUMA " + nodes_text(request.nodes);
    if (serving != request.nodes && !serving.empty()) {
      placement.reason += ", where no processor may be used; " + nodes_text(serving) + " instead";
    }
  }
  if (request.count > 1) {
    placement.reason +=
        "; share " + std::to_string(request.index + 1) + " of " + std::to_string(request.count);
  }
  return placement;
}

std::vector<Placement> place_all(const Topology& topology, Span<const std::vector<int>> devices) {
  std::map<std::vector<int>, int> counts;
  for (const std::vector<int>& nodes : devices) ++counts[nodes];
  std::map<std::vector<int>, int> next;
  std::vector<Placement> placements;
  for (const std::vector<int>& nodes : devices) {
    placements.push_back(place(topology, {nodes, next[nodes]++, counts[nodes]}));
  }
  return placements;
}

std::string processors_text(Span<const int> processors) {
  if (processors.empty()) return "none";
  std::vector<int> sorted(processors.begin(), processors.end());
  std::sort(sorted.begin(), sorted.end());
  std::string text;
  for (std::size_t i = 0; i < sorted.size();) {
    std::size_t last = i;
    while (last + 1 < sorted.size() && sorted[last + 1] <= sorted[last] + 1) ++last;
    if (!text.empty()) text += ",";
    text += std::to_string(sorted[i]);
    if (sorted[last] != sorted[i]) text += "-" + std::to_string(sorted[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace forebay
