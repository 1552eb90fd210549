// `forebay devices` as a person runs it: without a driver, and on the fake driver with two devices.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/command/machine/devices_print.h"
#include "tests/support/process.h"

namespace {

using Json = nlohmann::json;
using forebay::testing::Finished;
using forebay::testing::Process;
using forebay::testing::run_program;

Finished devices(const Process::Variables& variables, bool json) {
  std::vector<std::string> command{FOREBAY_COMMAND, "devices"};
  if (json) command.emplace_back("--json");
  return run_program(command, variables);
}

Process::Variables fake(const std::string& device_count) {
  return {{"FOREBAY_LIBCUDA", FOREBAY_FAKE_LIBCUDA},
          {"FAKE_CUDA_DEVICES", device_count},
          {"FAKE_CUDA_MEMORY", "67108864"}};
}

const Process::Variables kNoDriver{{"FOREBAY_LIBCUDA", "/nowhere/libcuda.so.1"}};

TEST(DevicesCommand, ListsTheHostWhereThereIsNoDriver) {
  const Finished text = devices(kNoDriver, false);
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_EQ(text.output.find("driver   none: cannot open the CUDA driver"), 0u) << text.output;
  EXPECT_NE(text.output.find("\nhost     "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("kernels: host "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("\nflash    "), std::string::npos) << text.output;

  const Finished finished = devices(kNoDriver, true);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  const Json json = Json::parse(finished.output);
  EXPECT_EQ(json.at("driver").at("found"), false);
  EXPECT_NE(json.at("driver").at("reason").get<std::string>().find("/nowhere"), std::string::npos);
  EXPECT_EQ(json.at("driver").at("version"), nullptr);
  EXPECT_EQ(json.at("driver").at("path"), nullptr);
  EXPECT_TRUE(json.at("devices").empty());
  EXPECT_GT(json.at("host").at("memory_bytes").get<std::uint64_t>(), 0u);
  EXPECT_GT(json.at("host").at("processor_count").get<int>(), 0);
  EXPECT_TRUE(json.at("host").at("flash_directories").is_array());
  // Without devices there is one placement: the host's.
  const Json& topology = json.at("topology");
  EXPECT_FALSE(topology.at("nodes").empty());
  ASSERT_EQ(topology.at("placements").size(), 1u);
  EXPECT_EQ(topology.at("placements").at(0).at("device"), "host");
  EXPECT_EQ(topology.at("placements").at(0).at("processors"), topology.at("usable_processors"));
  EXPECT_NE(text.output.find("\ntopology by "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("host ("), std::string::npos) << text.output;
}

TEST(DevicesCommand, PlacesTheDevicesOfAMachineWithTwoNodes) {
  if (!FOREBAY_HAVE_HWLOC) GTEST_SKIP() << "this build has no hwloc";
  Process::Variables variables = fake("4");
  variables["HWLOC_XMLFILE"] = FOREBAY_TWO_NODES;

  const Finished finished = devices(variables, true);
  const Finished text = devices(variables, false);

  ASSERT_EQ(finished.exit_code, 0) << finished.output;
  const Json topology = Json::parse(finished.output).at("topology");
  EXPECT_EQ(topology.at("usable_processors"), "0-7");
  ASSERT_EQ(topology.at("nodes").size(), 2u);
  EXPECT_EQ(topology.at("nodes").at(1).at("distances"), Json::array({22, 10}));
  ASSERT_EQ(topology.at("placements").size(), 4u);
  const char* const processors[] = {"0-1", "2-3", "4-5", "6-7"};
  for (int i = 0; i < 4; ++i) {
    const Json& placement = topology.at("placements").at(static_cast<std::size_t>(i));
    EXPECT_EQ(placement.at("device"), "cuda:" + std::to_string(i));
    EXPECT_EQ(placement.at("nodes"), Json::array({i / 2}));
    EXPECT_EQ(placement.at("memory_node"), i / 2);
    EXPECT_EQ(placement.at("processors"), processors[i]);
  }
  EXPECT_NE(text.output.find("cuda:3 (nearest NUMA node 1; share 2 of 2): threads on processors 6-7, kernels "
                             "on 1 core,\n         pinned memory on NUMA node 1\n"),
            std::string::npos)
      << text.output;
  EXPECT_NE(text.output.find(" nvme1n1: NUMA node 1\n"), std::string::npos) << text.output;
  EXPECT_NE(text.output.find(" eth0: NUMA node 1\n"), std::string::npos) << text.output;
}

TEST(DevicesCommand, ListsTheDevicesOfADriver) {
  const Finished finished = devices(fake("2"), true);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  const Json json = Json::parse(finished.output);
  EXPECT_EQ(json.at("driver").at("found"), true);
  EXPECT_EQ(json.at("driver").at("path"), FOREBAY_FAKE_LIBCUDA);
  EXPECT_EQ(json.at("driver").at("version"), "13.0");
  ASSERT_EQ(json.at("devices").size(), 2u);
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    const Json& device = json.at("devices").at(static_cast<std::size_t>(ordinal));
    EXPECT_EQ(device.at("ordinal"), ordinal);
    EXPECT_EQ(device.at("memory_bytes"), 67108864);
    EXPECT_EQ(device.at("free_bytes"), 67108864);
    EXPECT_EQ(device.at("granularity_bytes"), 2 << 20);
    EXPECT_EQ(device.at("posix_fd"), true);
    EXPECT_EQ(device.at("rdma"), true);
    EXPECT_EQ(device.at("peers"), Json::array({1 - ordinal}));
    EXPECT_EQ(device.at("numa_node"), nullptr);
    EXPECT_EQ(device.at("problem"), nullptr);
    EXPECT_EQ(device.at("uuid").get<std::string>().find("GPU-"), 0u);
  }

  const Finished text = devices(fake("2"), false);
  EXPECT_EQ(text.exit_code, 0) << text.output;
  EXPECT_NE(text.output.find(", CUDA 13.0\n"), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("\ncuda:1   "), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("peers cuda:0"), std::string::npos) << text.output;
}

TEST(DevicesCommand, SaysWhenADriverHasNoDevice) {
  const Finished finished = devices(fake("0"), false);
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
  EXPECT_NE(finished.output.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << finished.output;
  EXPECT_EQ(finished.output.find("cuda:0"), std::string::npos) << finished.output;
}

// No two figures are equal.
forebay::DevicesReport printed_devices() {
  using namespace forebay;
  DevicesReport report;
  report.cuda.driver_path = "/lib/libcuda.so.1";
  report.cuda.driver_version = 12050;
  CudaDevice device;
  device.ordinal = 3;
  device.name = "NVIDIA H200";
  device.uuid = "GPU-1";
  device.pci_bus_id = "0000:C1:00.0";
  device.compute_major = 9;
  device.compute_minor = 1;
  device.multiprocessor_count = 132;
  device.memory_bytes = 100u << 20;
  device.free_bytes = 90u << 20;
  device.granularity = 2u << 20;
  device.has_posix_fd = true;
  device.has_rdma = false;
  device.peer_ordinals = {1, 2};
  device.numa_node = 0;
  report.cuda.devices.push_back(device);
  device.ordinal = 4;
  device.granularity = 0;
  device.peer_ordinals.clear();
  device.numa_node = -1;
  device.pci_bus_id = "";
  device.has_posix_fd = false;
  device.has_rdma = true;
  device.problem = "it fell off";
  report.cuda.devices.push_back(device);
  report.host.processor_count = 64;
  report.host.usable_count = 60;
  report.host.processor_model = "A processor";
  report.host.memory_bytes = 300u << 20;
  report.host.available_bytes = 200u << 20;
  report.host.memlock_bytes = 8u << 20;
  report.host.transparent_huge_pages = "madvise";
  report.host.huge_pages = {{2u << 20, 11, 7}, {1u << 30, 5, 3}};
  report.host.numa_nodes = {{0, "0-31", 150u << 20, 50u << 20}, {1, "", 140u << 20, 40u << 20}};
  report.host.flash_directories = {{"/a", {"nvme0n1", "nvme1n1"}, true, "xfs", 70u << 20, true, true},
                                   {"/b", {"sdb"}, false, "ext4", 60u << 20, true, false},
                                   {"/c", {"sdc"}, false, "btrfs", 55u << 20, false, true}};
  report.host_kernels = "host AVX3, 2 threads";
  report.topology.source = "hwloc";
  report.topology.nodes = {
      {.node = 0, .cores = {{0, 32}, {1, 33}}, .memory_bytes = 10, .distances = {10, 21}},
      {.node = 1, .cores = {{2, 34}}, .memory_bytes = 20, .memory_usable = false, .distances = {21, 10}}};
  report.topology.attachments = {{AttachmentKind::kPci, "0000:41:00.0", {0}},
                                 {AttachmentKind::kDrive, "nvme0n1", {1}},
                                 {AttachmentKind::kDrive, "nvme1n1", {0, 1}},
                                 {AttachmentKind::kNetworkInterface, "eth0", {1}}};
  report.topology.processor_quota = 3.456;
  report.placements = {
      {.nodes = {1}, .memory_node = 1, .processors = {2, 34}, .cores = {2}, .reason = "near"},
      {.processors = {0, 1, 32, 33}, .cores = {0, 1}, .reason = "unknown"}};
  return report;
}

TEST(DevicesPrint, EachFigureStandsInItsPlace) {
  EXPECT_EQ(forebay::devices_text(printed_devices()), R"(driver   /lib/libcuda.so.1, CUDA 12.5
cuda:3   NVIDIA H200, compute capability 9.1, 132 multiprocessors
         memory 100.00 MiB, 90.00 MiB free
         chunks are multiples of 2.00 MiB; as file descriptors: yes, GPUDirect RDMA: no
         peers cuda:1 cuda:2; NUMA node 0; PCI 0000:C1:00.0
         GPU-1
cuda:4   NVIDIA H200, compute capability 9.1, 132 multiprocessors
         memory 100.00 MiB, 90.00 MiB free
         no virtual memory management: forebay's arena needs it
         no peers; NUMA node unknown
         GPU-1
         problem: it fell off
host     64 processors, 60 usable here: A processor
         kernels: host AVX3, 2 threads
         memory 300.00 MiB, 200.00 MiB available; lockable 8.00 MiB (ulimit -l)
         NUMA node 0: processors 0-31, memory 150.00 MiB, 50.00 MiB free
         NUMA node 1: processors none, memory 140.00 MiB, 40.00 MiB free
         huge pages of 2.00 MiB: 11, 7 free
         huge pages of 1.00 GiB: 5, 3 free
         transparent huge pages: madvise
topology by hwloc: 2 NUMA nodes; processors 0-2,32-34 may be used, the quota is worth 3.45
         cuda:3 (near): threads on processors 2,34, kernels on 1 core, pinned memory on NUMA node 1
         cuda:4 (unknown): threads on processors 0-1,32-33, kernels on 2 cores, pinned memory
         anywhere
         nvme0n1: NUMA node 1
         nvme1n1: NUMA nodes 0-1
         eth0: NUMA node 1
flash    /a: nvme0n1+nvme1n1 (NVMe), NUMA nodes 0-1, xfs, 70.00 MiB free, direct I/O
         /b: sdb (SSD), NUMA node unknown, ext4, 60.00 MiB free, no direct I/O
         /c: sdc (SSD), NUMA node unknown, btrfs, 55.00 MiB free, not writable
)");
}

TEST(DevicesPrint, EachFigureHasItsKeyInJson) {
  EXPECT_EQ(Json::parse(forebay::devices_json(printed_devices())), Json::parse(R"(
{"devices": [{"compute_capability": "9.1", "free_bytes": 94371840, "granularity_bytes": 2097152,
              "memory_bytes": 104857600, "multiprocessor_count": 132, "name": "NVIDIA H200", "numa_node": 0,
              "ordinal": 3, "pci_bus_id": "0000:C1:00.0", "peers": [1, 2], "posix_fd": true, "problem": null,
              "rdma": false, "uuid": "GPU-1"},
             {"compute_capability": "9.1", "free_bytes": 94371840, "granularity_bytes": 0,
              "memory_bytes": 104857600, "multiprocessor_count": 132, "name": "NVIDIA H200", "numa_node": null,
              "ordinal": 4, "pci_bus_id": null, "peers": [], "posix_fd": false, "problem": "it fell off",
              "rdma": true, "uuid": "GPU-1"}],
 "driver": {"found": true, "path": "/lib/libcuda.so.1", "reason": null, "version": "12.5"},
 "host": {"available_bytes": 209715200,
          "flash_directories": [{"direct": true, "drive": "nvme0n1+nvme1n1", "file_system": "xfs",
                                 "free_bytes": 73400320, "kind": "nvme", "numa_nodes": [0, 1], "path": "/a",
                                 "writable": true},
                                {"direct": false, "drive": "sdb", "file_system": "ext4", "free_bytes": 62914560,
                                 "kind": "ssd", "numa_nodes": [], "path": "/b", "writable": true},
                                {"direct": true, "drive": "sdc", "file_system": "btrfs", "free_bytes": 57671680,
                                 "kind": "ssd", "numa_nodes": [], "path": "/c", "writable": false}],
          "huge_pages": [{"count": 11, "free_count": 7, "page_bytes": 2097152},
                         {"count": 5, "free_count": 3, "page_bytes": 1073741824}],
          "kernels": "host AVX3, 2 threads", "memlock_bytes": 8388608, "memory_bytes": 314572800,
          "numa_nodes": [{"free_bytes": 52428800, "memory_bytes": 157286400, "node": 0, "processors": "0-31"},
                         {"free_bytes": 41943040, "memory_bytes": 146800640, "node": 1, "processors": ""}],
          "processor_count": 64, "processor_model": "A processor", "transparent_huge_pages": "madvise",
          "usable_count": 60},
 "topology": {"attachments": [{"kind": "pci", "name": "0000:41:00.0", "nodes": [0]},
                              {"kind": "drive", "name": "nvme0n1", "nodes": [1]},
                              {"kind": "drive", "name": "nvme1n1", "nodes": [0, 1]},
                              {"kind": "network", "name": "eth0", "nodes": [1]}],
              "nodes": [{"core_count": 2, "distances": [10, 21], "memory_bytes": 10, "memory_usable": true,
                         "node": 0, "processors": "0-1,32-33"},
                        {"core_count": 1, "distances": [21, 10], "memory_bytes": 20, "memory_usable": false,
                         "node": 1, "processors": "2,34"}],
              "placements": [{"cores": "2", "device": "cuda:3", "memory_node": 1, "nodes": [1],
                              "processors": "2,34", "reason": "near"},
                             {"cores": "0-1", "device": "cuda:4", "memory_node": null, "nodes": [],
                              "processors": "0-1,32-33", "reason": "unknown"}],
              "processor_quota": 3.456, "source": "hwloc", "usable_processors": "0-2,32-34"}})"));
}

TEST(DevicesCommand, FailsWhenItsOutputCannotBeWritten) {
  const Finished finished =
      run_program({"/bin/sh", "-c", std::string(FOREBAY_COMMAND) + " devices >/dev/full"}, kNoDriver);
  EXPECT_EQ(finished.exit_code, 1) << finished.output;
}

}  // namespace
