#include "runtime/command/machine/devices_print.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/text_table.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}
std::string yes_no(bool value) {
  return value ? "yes" : "no";
}

// A name, and lines beside it.
class Section {
 public:
  explicit Section(std::string name) : name_(std::move(name)) {}
  void line(const std::string& text) {
    constexpr std::size_t kWidth = 9;
    text_ += name_ + std::string(name_.size() < kWidth ? kWidth - name_.size() : 1, ' ') +
             wrap_text(text, kTableWidth, kWidth) + "\n";
    name_.clear();
  }
  const std::string& text() const { return text_; }

 private:
  std::string name_;
  std::string text_;
};

std::string peers_text(const CudaDevice& device) {
  if (device.peer_ordinals.empty()) return "no peers";
  std::string text = "peers";
  for (const int peer : device.peer_ordinals) text += " cuda:" + std::to_string(peer);
  return text;
}

std::string device_text(const CudaDevice& device) {
  Section section("cuda:" + std::to_string(device.ordinal));
  if (!device.name.empty()) {
    section.line(device.name + ", compute capability " + std::to_string(device.compute_major) + "." +
                 std::to_string(device.compute_minor) + ", " +
                 format_count(device.multiprocessor_count, "multiprocessor"));
    section.line("memory " + format_bytes(device.memory_bytes) + ", " + format_bytes(device.free_bytes) +
                 " free");
    section.line(device.granularity == 0 ? "no virtual memory management: forebay's arena needs it"
                                         : "chunks are multiples of " + format_bytes(device.granularity) +
                                               "; as file descriptors: " + yes_no(device.has_posix_fd) +
                                               ", GPUDirect RDMA: " + yes_no(device.has_rdma));
    section.line(peers_text(device) + "; NUMA node " +
                 (device.numa_node < 0 ? "unknown" : std::to_string(device.numa_node)) +
                 (device.pci_bus_id.empty() ? "" : "; PCI " + device.pci_bus_id));
    section.line(device.uuid);
  }
  if (!device.problem.empty()) section.line("problem: " + device.problem);
  return section.text();
}

std::string cuda_text(const DevicesReport& report) {
  Section section("driver");
  if (!report.cuda_status.ok()) {
    section.line("none: " + report.cuda_status.message());
    return section.text();
  }
  section.line(report.cuda.driver_path + ", CUDA " + version_text(report.cuda.driver_version) +
               (report.cuda.devices.empty() ? "; no device (see nvidia-smi and CUDA_VISIBLE_DEVICES)" : ""));
  std::string text = section.text();
  for (const CudaDevice& device : report.cuda.devices) text += device_text(device);
  return text;
}

std::string host_text(const DevicesReport& report) {
  const HostFacts& host = report.host;
  Section section("host");
  section.line(format_count(host.processor_count, "processor") +
               (host.usable_count == host.processor_count
                    ? ""
                    : ", " + std::to_string(host.usable_count) + " usable here") +
               (host.processor_model.empty() ? "" : ": " + host.processor_model));
  section.line("kernels: " + report.host_kernels);
  section.line("memory " + format_bytes(host.memory_bytes) + ", " + format_bytes(host.available_bytes) +
               " available; lockable " +
               (host.memlock_bytes ? format_bytes(*host.memlock_bytes) + " (ulimit -l)" : "without limit"));
  for (const HostNumaNode& node : host.numa_nodes) {
    section.line("NUMA node " + std::to_string(node.node) + ": processors " +
                 (node.processors.empty() ? "none" : node.processors) + ", memory " +
                 format_bytes(node.memory_bytes) + ", " + format_bytes(node.free_bytes) + " free");
  }
  for (const HugePages& pages : host.huge_pages) {
    section.line("huge pages of " + format_bytes(pages.page_bytes) + ": " + std::to_string(pages.count) +
                 ", " + std::to_string(pages.free_count) + " free");
  }
  if (!host.transparent_huge_pages.empty()) {
    section.line("transparent huge pages: " + host.transparent_huge_pages);
  }
  return section.text();
}

std::string node_text(const std::vector<int>& nodes) {
  return nodes.empty()
             ? "NUMA node unknown"
             : std::string(nodes.size() == 1 ? "NUMA node " : "NUMA nodes ") + processors_text(nodes);
}

std::string device_name(const DevicesReport& report, std::size_t index) {
  return report.cuda.devices.empty() ? "host" : "cuda:" + std::to_string(report.cuda.devices[index].ordinal);
}

std::string topology_text(const DevicesReport& report) {
  const Topology& topology = report.topology;
  Section section("topology");
  std::string quota = "no quota";
  if (topology.processor_quota) {
    quota = std::to_string(*topology.processor_quota);
    quota = "the quota is worth " + quota.substr(0, quota.find('.') + 3);
  }
  section.line("by " + topology.source + ": " + format_count(topology.nodes.size(), "NUMA node") +
               "; processors " + processors_text(topology.processors()) + " may be used, " + quota);
  for (std::size_t i = 0; i < report.placements.size(); ++i) {
    const Placement& placement = report.placements[i];
    section.line(
        device_name(report, i) + " (" + placement.reason + "): threads on processors " +
        processors_text(placement.processors) + ", kernels on " +
        format_count(placement.cores.size(), "core") + ", pinned memory " +
        (placement.memory_node < 0 ? "anywhere" : "on NUMA node " + std::to_string(placement.memory_node)));
  }
  for (const Attachment& one : topology.attachments) {
    if (one.kind != AttachmentKind::kPci) section.line(one.name + ": " + node_text(one.nodes));
  }
  return section.text();
}

std::vector<int> nodes_of(const Topology& topology, const std::vector<std::string>& drives) {
  std::vector<int> nodes;
  for (const std::string& drive : drives) {
    for (const int node : topology.nodes_near(AttachmentKind::kDrive, drive)) nodes.push_back(node);
  }
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  return nodes;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : "+") + word;
  return text;
}

std::string flash_text(const DevicesReport& report) {
  const HostFacts& host = report.host;
  Section section("flash");
  if (host.flash_directories.empty()) {
    section.line(
        "no directory is on an NVMe drive or SSD that the system shows; any directory works, as fast as "
        "'forebay bench-tiers DIR' finds it");
  }
  for (const FlashDirectory& directory : host.flash_directories) {
    section.line(directory.path + ": " + joined(directory.drives) +
                 (directory.is_nvme ? " (NVMe), " : " (SSD), ") +
                 node_text(nodes_of(report.topology, directory.drives)) + ", " + directory.file_system +
                 ", " + format_bytes(directory.free_bytes) + " free, " +
                 (!directory.is_writable ? "not writable"
                  : directory.has_direct ? "direct I/O"
                                         : "no direct I/O"));
  }
  return section.text();
}

Json number_or_null(int value) {
  return value < 0 ? Json(nullptr) : Json(value);
}
Json text_or_null(const std::string& text) {
  return text.empty() ? Json(nullptr) : Json(text);
}

Json device_json(const CudaDevice& device) {
  return Json{{"ordinal", device.ordinal},
              {"name", text_or_null(device.name)},
              {"uuid", text_or_null(device.uuid)},
              {"compute_capability",
               std::to_string(device.compute_major) + "." + std::to_string(device.compute_minor)},
              {"multiprocessor_count", device.multiprocessor_count},
              {"memory_bytes", device.memory_bytes},
              {"free_bytes", device.free_bytes},
              {"granularity_bytes", device.granularity},
              {"posix_fd", device.has_posix_fd},
              {"rdma", device.has_rdma},
              {"peers", device.peer_ordinals},
              {"numa_node", number_or_null(device.numa_node)},
              {"pci_bus_id", text_or_null(device.pci_bus_id)},
              {"problem", text_or_null(device.problem)}};
}

Json host_json(const DevicesReport& report) {
  const HostFacts& host = report.host;
  Json nodes = Json::array();
  for (const HostNumaNode& node : host.numa_nodes) {
    nodes.push_back({{"node", node.node},
                     {"processors", node.processors},
                     {"memory_bytes", node.memory_bytes},
                     {"free_bytes", node.free_bytes}});
  }
  Json pages = Json::array();
  for (const HugePages& one : host.huge_pages) {
    pages.push_back({{"page_bytes", one.page_bytes}, {"count", one.count}, {"free_count", one.free_count}});
  }
  Json directories = Json::array();
  for (const FlashDirectory& directory : host.flash_directories) {
    directories.push_back({{"path", directory.path},
                           {"drive", joined(directory.drives)},
                           {"numa_nodes", nodes_of(report.topology, directory.drives)},
                           {"kind", directory.is_nvme ? "nvme" : "ssd"},
                           {"file_system", directory.file_system},
                           {"free_bytes", directory.free_bytes},
                           {"writable", directory.is_writable},
                           {"direct", directory.has_direct}});
  }
  return Json{{"processor_count", host.processor_count},
              {"usable_count", host.usable_count},
              {"processor_model", text_or_null(host.processor_model)},
              {"kernels", report.host_kernels},
              {"memory_bytes", host.memory_bytes},
              {"available_bytes", host.available_bytes},
              {"memlock_bytes", host.memlock_bytes ? Json(*host.memlock_bytes) : Json(nullptr)},
              {"numa_nodes", nodes},
              {"huge_pages", pages},
              {"transparent_huge_pages", text_or_null(host.transparent_huge_pages)},
              {"flash_directories", directories}};
}

const char* kind_name(AttachmentKind kind) {
  switch (kind) {
    case AttachmentKind::kPci:
      return "pci";
    case AttachmentKind::kDrive:
      return "drive";
    case AttachmentKind::kNetworkInterface:
      return "network";
  }
  return "unknown";
}

Json topology_json(const DevicesReport& report) {
  const Topology& topology = report.topology;
  Json nodes = Json::array();
  for (const NumaNode& node : topology.nodes) {
    nodes.push_back({{"node", node.node},
                     {"processors", processors_text(node.processors())},
                     {"core_count", node.cores.size()},
                     {"memory_bytes", node.memory_bytes},
                     {"memory_usable", node.memory_usable},
                     {"distances", node.distances}});
  }
  Json attachments = Json::array();
  for (const Attachment& one : topology.attachments) {
    attachments.push_back({{"kind", kind_name(one.kind)}, {"name", one.name}, {"nodes", one.nodes}});
  }
  Json placements = Json::array();
  for (std::size_t i = 0; i < report.placements.size(); ++i) {
    const Placement& placement = report.placements[i];
    placements.push_back({{"device", device_name(report, i)},
                          {"nodes", placement.nodes},
                          {"memory_node", number_or_null(placement.memory_node)},
                          {"processors", processors_text(placement.processors)},
                          {"cores", processors_text(placement.cores)},
                          {"reason", placement.reason}});
  }
  return Json{{"source", topology.source},
              {"usable_processors", processors_text(topology.processors())},
              {"processor_quota", topology.processor_quota ? Json(*topology.processor_quota) : Json(nullptr)},
              {"nodes", nodes},
              {"attachments", attachments},
              {"placements", placements}};
}

}  // namespace

std::vector<Placement> place_devices(const Topology& topology, const std::vector<CudaDevice>& devices) {
  std::vector<std::vector<int>> nodes;
  for (const CudaDevice& device : devices) {
    nodes.push_back(topology.nodes_near(AttachmentKind::kPci, device.pci_bus_id));
    // The driver was asked beside the topology.
    if (nodes.back().empty() && topology.find_node(device.numa_node) != nullptr) {
      nodes.back().push_back(device.numa_node);
    }
  }
  if (nodes.empty()) nodes.emplace_back();
  return place_all(topology, nodes);
}

std::string devices_text(const DevicesReport& report) {
  return cuda_text(report) + host_text(report) + topology_text(report) + flash_text(report);
}

std::string devices_json(const DevicesReport& report) {
  Json devices = Json::array();
  for (const CudaDevice& device : report.cuda.devices) devices.push_back(device_json(device));
  const bool has_driver = report.cuda_status.ok();
  const Json json{{"driver",
                   {{"found", has_driver},
                    {"path", text_or_null(report.cuda.driver_path)},
                    {"version", has_driver ? Json(version_text(report.cuda.driver_version)) : Json(nullptr)},
                    {"reason", has_driver ? Json(nullptr) : Json(report.cuda_status.message())}}},
                  {"devices", devices},
                  {"host", host_json(report)},
                  {"topology", topology_json(report)}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace forebay
