// A host made of files in a directory of the test's own, in the shape of /proc and /sys.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "forebay/topology.h"
#include "tests/support/process.h"

namespace forebay::testing {

class LaidOutHost {
 public:
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void link(const std::string& path, const std::string& target) {
    std::filesystem::create_directories(std::filesystem::path(root_ / path).parent_path());
    std::filesystem::create_directory_symlink(root_ / target, root_ / path);
  }
  // A directory there is, of that name below the root.
  std::string directory(const std::string& path) {
    std::filesystem::create_directories(root_ / path);
    return std::filesystem::canonical(root_ / path).string();
  }

  void add_node(int node, const std::string& processors, const std::string& distances) {
    const std::string path = "sys/devices/system/node/node" + std::to_string(node);
    write(path + "/cpulist", processors + "\n");
    write(path + "/distance", distances + "\n");
    write(path + "/meminfo", "Node " + std::to_string(node) + " MemTotal:       67108864 kB\n");
  }
  void add_core(const std::string& processors, const std::vector<int>& members) {
    for (const int member : members) {
      write("sys/devices/system/cpu/cpu" + std::to_string(member) + "/topology/core_cpus_list",
            processors + "\n");
    }
  }
  // `node` as the kernel writes it: "-1" where it does not know.
  void add_pci_device(const std::string& id, const std::string& device_class, const std::string& node) {
    write("sys/devices/pci/" + id + "/numa_node", node + "\n");
    write("sys/devices/pci/" + id + "/class", device_class + "\n");
    link("sys/bus/pci/devices/" + id, "sys/devices/pci/" + id);
  }
  // A drive below a PCI device; `number` is its device number.
  void add_drive(const std::string& name, const std::string& number, const std::string& pci_id,
                 const std::string& rotational = "0") {
    const std::string path = "sys/devices/pci/" + pci_id + "/nvme/" + name;
    write(path + "/queue/rotational", rotational + "\n");
    link("sys/class/block/" + name, path);
    link("sys/dev/block/" + number, path);
  }

  SystemPaths paths() const { return {.proc = root_ / "proc", .sys = root_ / "sys"}; }
  TopologyOptions options() const { return {.paths = paths(), .usable_processors = std::vector<int>{}}; }

 private:
  TemporaryDirectory root_;
};

// Two nodes with two cores of two processors, two GPUs, a drive and, the second, a network interface each.
inline void lay_out_two_nodes(LaidOutHost& host) {
  host.add_node(0, "0-1,4-5", "10 21");
  host.add_node(1, "2-3,6-7", "21 10");
  for (int first = 0; first < 4; ++first) {
    host.add_core(std::to_string(first) + "," + std::to_string(first + 4), {first, first + 4});
  }
  host.add_pci_device("0000:10:00.0", "0x030200", "0");
  host.add_pci_device("0000:11:00.0", "0x030200", "0");
  host.add_pci_device("0000:12:00.0", "0x030200", "1");
  host.add_pci_device("0000:c1:00.0", "0x030200", "1");
  host.add_pci_device("0000:18:00.0", "0x010802", "0");
  host.add_pci_device("0000:c8:00.0", "0x010802", "1");
  host.add_pci_device("0000:c9:00.0", "0x020000", "1");
  host.add_pci_device("0000:00:1f.0", "0x060400", "0");
  host.add_drive("nvme0n1", "259:0", "0000:18:00.0");
  host.add_drive("nvme1n1", "259:1", "0000:c8:00.0");
  host.directory("sys/devices/pci/0000:c9:00.0/net/eth0");
  host.link("sys/devices/pci/0000:c9:00.0/net/eth0/device", "sys/devices/pci/0000:c9:00.0");
  host.link("sys/class/net/eth0", "sys/devices/pci/0000:c9:00.0/net/eth0");
}

}  // namespace forebay::testing
