// Nodes near devices, on hosts that are laid out as files, on one that hwloc reads from XML, and on this
// one.
#include "forebay/topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>

#include "forebay/thread_binding.h"
#include "runtime/topology/readers.h"
#include "tests/topology/laid_out_host.h"

namespace forebay {
namespace {

using testing::LaidOutHost;
using Numbers = std::vector<int>;

Topology read(const LaidOutHost& host) {
  return read_topology(host.options());
}

TEST(SysfsTopology, ShowsNodesWithTheirCoresAndMemory) {
  LaidOutHost host;
  lay_out_two_nodes(host);

  const Topology topology = read(host);

  EXPECT_EQ(topology.source, "sysfs");
  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[1].node, 1);
  EXPECT_EQ(topology.nodes[1].cores, (std::vector<Numbers>{{2, 6}, {3, 7}}));
  EXPECT_EQ(topology.nodes[1].processors(), (Numbers{2, 3, 6, 7}));
  EXPECT_EQ(topology.nodes[1].memory_bytes, std::uint64_t{64} << 30);
  EXPECT_EQ(topology.nodes[1].distances, (Numbers{21, 10}));
  EXPECT_TRUE(topology.nodes[1].memory_usable);
  EXPECT_EQ(topology.processors(), (Numbers{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_FALSE(topology.processor_quota.has_value());
}

TEST(SysfsTopology, KnowsTheNodesOfDevicesDrivesAndInterfaces) {
  LaidOutHost host;
  lay_out_two_nodes(host);

  const Topology topology = read(host);

  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:11:00.0"), Numbers{0});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:C1:00.0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "00000000:C1:00.0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "c1:00.0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:99:00.0"), Numbers{});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kDrive, "nvme0n1"), Numbers{0});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kDrive, "nvme1n1"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kNetworkInterface, "eth0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kNetworkInterface, "lo"), Numbers{});
  // A bridge is nothing that bytes come from.
  for (const Attachment& one : topology.attachments) EXPECT_NE(one.name, "0000:00:1f.0");
}

TEST(SysfsTopology, TellsAttachmentsOfOneNameApart) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  host.add_pci_device("0000:e1:00.0", "0x010802", "0");
  host.add_pci_device("10000:e1:00.0", "0x010802", "1");
  Topology topology = read(host);
  topology.attachments.insert(topology.attachments.begin(),
                              {AttachmentKind::kNetworkInterface, "nvme0n1", {1}});
  topology.attachments.push_back({AttachmentKind::kNetworkInterface, "IB0", {1}});

  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "10000:E1:00.0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:E1:00.0"), Numbers{0});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kDrive, "nvme0n1"), Numbers{0});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kNetworkInterface, "nvme0n1"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kNetworkInterface, "IB0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kNetworkInterface, "ib0"), Numbers{});
}

TEST(SysfsTopology, LeavesOutBridgesAndPartitions) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  host.add_pci_device("0000:00:00.0", "0x060000", "0");
  const std::string partition = "sys/devices/pci/0000:c8:00.0/nvme/nvme1n1/nvme1n1p2";
  host.write(partition + "/partition", "2\n");
  host.link("sys/class/block/nvme1n1p2", partition);

  const Topology topology = read(host);

  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:00:00.0"), Numbers{});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kDrive, "nvme1n1p2"), Numbers{});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kDrive, "nvme1n1"), Numbers{1});
}

TEST(SysfsTopology, AsksTheBridgeAboveADeviceThatDoesNotKnowItsNode) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  const std::string bridge = "sys/devices/pci/0000:00:02.0";
  host.write(bridge + "/numa_node", "1\n");
  host.write(bridge + "/0000:31:00.0/numa_node", "-1\n");
  host.write(bridge + "/0000:31:00.0/nvme/nvme3n1/queue/rotational", "0\n");
  host.link("sys/class/block/nvme3n1", bridge + "/0000:31:00.0/nvme/nvme3n1");

  EXPECT_EQ(read(host).nodes_near(AttachmentKind::kDrive, "nvme3n1"), Numbers{1});
}

TEST(SysfsTopology, KnowsTheCoresOfOlderKernels) {
  LaidOutHost host;
  host.add_node(0, "0-3", "10");
  for (const int processor : {0, 1, 2, 3}) {
    const int first = processor % 2;
    host.write("sys/devices/system/cpu/cpu" + std::to_string(processor) + "/topology/thread_siblings_list",
               std::to_string(first) + "," + std::to_string(first + 2) + "\n");
  }

  EXPECT_EQ(read(host).nodes[0].cores, (std::vector<Numbers>{{0, 2}, {1, 3}}));
}

TEST(SysfsTopology, OrdersNodesByNumber) {
  LaidOutHost host;
  host.add_node(10, "1", "10 40");
  host.add_node(2, "0", "40 10");

  const Topology topology = read(host);

  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[0].node, 2);
  EXPECT_EQ(topology.nodes[1].node, 10);
}

TEST(SysfsTopology, KnowsNoDistancesUnlessOneOfEachNodeIsShown) {
  for (const std::string distances : {"10", "10 4294967317", "10 21 31"}) {
    LaidOutHost host;
    host.add_node(0, "0", distances);
    host.add_node(1, "1", "21 10");

    const Topology topology = read(host);

    EXPECT_EQ(topology.nodes[0].distances, Numbers{}) << distances;
    EXPECT_EQ(topology.nodes[1].distances, (Numbers{21, 10}));
  }
}

TEST(SysfsTopology, FindsADriveWithSeveralPathsByItsControllers) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  const std::string subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys2";
  host.write(subsystem + "/nvme2n1/queue/rotational", "0\n");
  host.write("sys/devices/pci/0000:c8:00.0/nvme/nvme2/state", "live\n");
  host.write("sys/devices/pci/0000:18:00.0/nvme/nvme3/state", "live\n");
  host.link(subsystem + "/nvme3", "sys/devices/pci/0000:18:00.0/nvme/nvme3");
  host.link(subsystem + "/nvme2", "sys/devices/pci/0000:c8:00.0/nvme/nvme2");
  host.link("sys/class/block/nvme2n1", subsystem + "/nvme2n1");

  EXPECT_EQ(read(host).nodes_near(AttachmentKind::kDrive, "nvme2n1"), Numbers{1});
}

TEST(SysfsTopology, TakesADeviceWithoutANodeForNearNothing) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  host.add_pci_device("0000:21:00.0", "0x030200", "-1");
  host.add_pci_device("0000:22:00.0", "0x030200", "7");

  const Topology topology = read(host);

  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:21:00.0"), Numbers{});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:22:00.0"), Numbers{});
}

TEST(SysfsTopology, ShowsOnlyTheProcessorsThatMayBeUsed) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  TopologyOptions options = host.options();
  options.usable_processors = Numbers{1, 5, 6};

  const Topology topology = read_topology(options);

  EXPECT_EQ(topology.nodes[0].cores, (std::vector<Numbers>{{1, 5}}));
  EXPECT_EQ(topology.nodes[1].cores, (std::vector<Numbers>{{6}}));
  EXPECT_EQ(topology.processors(), (Numbers{1, 5, 6}));
}

TEST(SysfsTopology, SeesWhichMemoryMayBeTaken) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  host.write("proc/self/status", "Name:\tx\nMems_allowed:\t2\nMems_allowed_list:\t1\n");

  const Topology topology = read(host);

  EXPECT_FALSE(topology.nodes[0].memory_usable);
  EXPECT_TRUE(topology.nodes[1].memory_usable);
}

TEST(SysfsTopology, IsOneNodeWhereTheKernelShowsNone) {
  LaidOutHost host;
  host.write("sys/devices/system/cpu/online", "0-3\n");
  host.write("proc/meminfo", "MemTotal:       1024 kB\n");
  host.add_pci_device("0000:10:00.0", "0x030200", "-1");

  const Topology topology = read(host);

  ASSERT_EQ(topology.nodes.size(), 1u);
  EXPECT_EQ(topology.nodes[0].cores, (std::vector<Numbers>{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(topology.nodes[0].memory_bytes, 1u << 20);
  // There is nothing else to be near to.
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:10:00.0"), Numbers{0});
}

TEST(SysfsTopology, IsTheUsableProcessorsWhereNothingIsShown) {
  LaidOutHost host;
  TopologyOptions options = host.options();
  options.usable_processors = Numbers{3, 4};

  const Topology topology = read_topology(options);

  ASSERT_EQ(topology.nodes.size(), 1u);
  EXPECT_EQ(topology.processors(), (Numbers{3, 4}));
}

TEST(SysfsTopology, IgnoresWhatMakesNoSense) {
  LaidOutHost host;
  host.add_node(0, "0-1,x,5-,-3,2-1,99999999999,3,6-99999999,1", "10 ten");
  host.write("sys/devices/system/node/nodes/cpulist", "9\n");
  host.write("sys/devices/system/cpu/cpu0/topology/core_cpus_list", "?\n");

  const Topology topology = read(host);

  ASSERT_EQ(topology.nodes.size(), 1u);
  EXPECT_EQ(topology.processors(), (Numbers{0, 1, 3}));
}

TEST(SysfsTopology, IsReadFromGivenFilesWhereOneOfTheTwoPathsIsTheSystems) {
  const LaidOutHost host;

  EXPECT_EQ(read_topology({.paths = {.proc = host.paths().proc}}).source, "sysfs");
  EXPECT_EQ(read_topology({.paths = {.sys = host.paths().sys}}).source, "sysfs");
}

TEST(ProcessorQuota, IsTheTightestOnTheWayToTheRoot) {
  LaidOutHost host;
  lay_out_two_nodes(host);
  host.write("proc/self/cgroup", "0::/slice/job\n");
  host.write("sys/fs/cgroup/slice/job/cpu.max", "max 100000\n");
  host.write("sys/fs/cgroup/slice/cpu.max", "250000 100000\n");
  host.write("sys/fs/cgroup/cpu.max", "800000 100000\n");

  EXPECT_DOUBLE_EQ(read(host).processor_quota.value_or(0), 2.5);
}

TEST(ProcessorQuota, IsReadFromTheOldHierarchyToo) {
  LaidOutHost host;
  host.write("proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n");
  host.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "150000\n");
  host.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  host.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  host.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");

  EXPECT_DOUBLE_EQ(read(host).processor_quota.value_or(0), 1.5);
}

TEST(ProcessorQuota, IsThatOfTheRootWhereGroupsHaveNone) {
  LaidOutHost host;
  host.write("proc/self/cgroup", "0::/job\n");
  host.write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  host.write("sys/fs/cgroup/cpu.max", "150000 100000\n");

  EXPECT_DOUBLE_EQ(read(host).processor_quota.value_or(0), 1.5);
}

TEST(ProcessorQuota, IsNoneWithoutALimit) {
  struct Case {
    std::string groups, file, text;
  };
  for (const Case& one : std::vector<Case>{
           {"0::/../outside\n", "cpu.max", "max 100000\n"},
           {"0::/../cgroup-outside\n", "../cgroup-outside/cpu.max", "100000 100000\n"},
           {"0::/job\n", "job/cpu.max", "100000\n"},
           {"0::/job\n", "job/cpu.max", "100000 0\n"},
           {"0::job\n", "job/cpu.max", "100000 100000\n"},
           {"3:cpuset:/job\n", "job/cpu.max", "100000 100000\n"},
       }) {
    LaidOutHost host;
    host.write("proc/self/cgroup", one.groups);
    host.write("sys/fs/cgroup/" + one.file, one.text);

    EXPECT_FALSE(read(host).processor_quota.has_value()) << one.groups << one.file << ": " << one.text;
  }
}

TEST(ProcessorQuota, IsThatOfTheControllerOfProcessorsAlone) {
  LaidOutHost host;
  host.write("proc/self/cgroup", "3:cpuset:/other\n2:cpuacct:/other\n1:cpu:/job\n");
  for (const auto& [group, quota] : {std::pair("job", "300000\n"), std::pair("other", "100000\n")}) {
    host.write(std::string("sys/fs/cgroup/cpu/") + group + "/cpu.cfs_quota_us", quota);
    host.write(std::string("sys/fs/cgroup/cpu/") + group + "/cpu.cfs_period_us", "100000\n");
  }

  EXPECT_DOUBLE_EQ(read(host).processor_quota.value_or(0), 3);
}

Topology two_nodes() {
  LaidOutHost host;
  lay_out_two_nodes(host);
  return read(host);
}

TEST(Placement, IsOnTheNearestNode) {
  const Placement placement = place(two_nodes(), {.nodes = {1}});

  EXPECT_EQ(placement.memory_node, 1);
  EXPECT_EQ(placement.processors, (Numbers{2, 3, 6, 7}));
  EXPECT_EQ(placement.cores, (Numbers{2, 3}));
  EXPECT_EQ(placement.reason, "nearest NUMA node 1");
}

TEST(Placement, DividesTheProcessorsBetweenDevicesOfANode) {
  const std::vector<Numbers> gpus = {{0}, {0}, {1}, {1}};

  const std::vector<Placement> placements = place_all(two_nodes(), gpus);

  ASSERT_EQ(placements.size(), 4u);
  EXPECT_EQ(placements[0].processors, (Numbers{0, 4}));
  EXPECT_EQ(placements[1].processors, (Numbers{1, 5}));
  EXPECT_EQ(placements[2].processors, (Numbers{2, 6}));
  EXPECT_EQ(placements[3].processors, (Numbers{3, 7}));
  EXPECT_EQ(placements[3].cores, Numbers{3});
  EXPECT_EQ(placements[3].memory_node, 1);
  EXPECT_EQ(placements[3].reason, "nearest NUMA node 1; share 2 of 2");
}

TEST(Placement, LosesNoCoreAndGivesEveryoneOne) {
  const Topology topology = two_nodes();
  for (int count = 1; count <= 7; ++count) {
    std::vector<int> times(8, 0);
    for (int index = 0; index < count; ++index) {
      const Placement placement = place(topology, {{}, index, count});
      EXPECT_FALSE(placement.cores.empty()) << index << " of " << count;
      for (const int processor : placement.processors) ++times[static_cast<std::size_t>(processor)];
    }
    EXPECT_GE(*std::min_element(times.begin(), times.end()), 1) << count;
    if (count <= 4) {
      EXPECT_EQ(*std::max_element(times.begin(), times.end()), 1) << count;
    }
  }
}

TEST(Placement, IsEverywhereWhereNothingIsKnown) {
  const Placement placement = place(two_nodes(), {});

  EXPECT_EQ(placement.memory_node, -1);
  EXPECT_EQ(placement.processors.size(), 8u);
  EXPECT_EQ(placement.cores, (Numbers{0, 1, 2, 3}));
  EXPECT_EQ(placement.reason, "no NUMA node is known to be nearest");
}

TEST(Placement, GoesToTheLeastDistantNodeThatMayBeUsed) {
  LaidOutHost host;
  host.add_node(0, "0", "10 40 20");
  host.add_node(1, "1", "40 10 30");
  host.add_node(2, "2", "20 30 10");
  host.write("proc/self/status", "Mems_allowed_list:\t1-2\n");
  TopologyOptions options = host.options();
  options.usable_processors = Numbers{1, 2};
  const Topology topology = read_topology(options);

  const Placement placement = place(topology, {.nodes = {0}});

  EXPECT_EQ(placement.processors, Numbers{2});
  EXPECT_EQ(placement.memory_node, 2);
  EXPECT_NE(placement.reason.find("node 2 instead"), std::string::npos) << placement.reason;
}

// Three nodes, of which the last ones' processors may be used.
Topology three_nodes(const std::array<std::string, 3>& distances, const Numbers& usable) {
  LaidOutHost host;
  for (int node = 0; node < 3; ++node) {
    host.add_node(node, std::to_string(node), distances[static_cast<std::size_t>(node)]);
  }
  TopologyOptions options = host.options();
  options.usable_processors = usable;
  return read_topology(options);
}

TEST(Placement, IsOnAllNodesThatAreEquallyNear) {
  const Topology topology = three_nodes({"10 20 20", "20 10 20", "20 20 10"}, {1, 2});

  const Placement placement = place(topology, {.nodes = {0}});

  EXPECT_EQ(placement.processors, (Numbers{1, 2}));
  EXPECT_EQ(placement.reason, "nearest NUMA node 0, where no processor may be used; nodes 1-2 instead");
}

TEST(Placement, TakesANodeOnceThatIsNextToSeveral) {
  const Topology topology = three_nodes({"10 20 20", "20 10 20", "20 20 10"}, {2});

  const Placement placement = place(topology, {.nodes = {0, 1}});

  EXPECT_EQ(placement.processors, Numbers{2});
  EXPECT_EQ(placement.memory_node, 0);
  EXPECT_EQ(placement.reason, "nearest NUMA nodes 0-1, where no processor may be used; node 2 instead");
}

TEST(Placement, SaysThatAnotherNodeServesWhereOneOfTwoHasNoProcessor) {
  const Topology topology = three_nodes({"10 20 20", "20 10 20", "20 20 10"}, {1, 2});

  EXPECT_EQ(place(topology, {.nodes = {0, 1}}).reason,
            "nearest NUMA nodes 0-1, where no processor may be used; node 1 instead");
  EXPECT_EQ(place(topology, {.nodes = {0, 1}}).processors, Numbers{1});
}

TEST(Placement, IsEverywhereForANodeThatThereIsNot) {
  const Placement placement = place(two_nodes(), {.nodes = {9}});

  EXPECT_EQ(placement.processors.size(), 8u);
  EXPECT_EQ(placement.reason, "nearest NUMA node 9, where no processor may be used; nodes 0-1 instead");
}

TEST(Placement, IsNowhereWithoutAUsableProcessor) {
  const Topology topology = three_nodes({"10 20 20", "20 10 20", "20 20 10"}, {99});

  const Placement placement = place(topology, {.nodes = {1}});

  EXPECT_EQ(placement.processors, Numbers{});
  EXPECT_EQ(placement.cores, Numbers{});
  EXPECT_EQ(placement.memory_node, 1);
  EXPECT_EQ(placement.reason, "nearest NUMA node 1");
}

TEST(Placement, TakesMemoryOfTheNextNodeWhereTheNearestHasNone) {
  Topology topology = two_nodes();
  topology.nodes[1].memory_bytes = 0;

  const Placement placement = place(topology, {.nodes = {1}});

  EXPECT_EQ(placement.memory_node, 0);
  EXPECT_EQ(placement.processors, (Numbers{2, 3, 6, 7}));
}

TEST(Placement, ComputesOnNoMoreCoresThanTheQuotaIsWorth) {
  Topology topology = two_nodes();
  topology.processor_quota = 3.5;

  EXPECT_EQ(place(topology, {}).cores, (Numbers{0, 1, 2}));
  EXPECT_EQ(place(topology, {}).processors.size(), 8u);
  EXPECT_EQ(place(topology, {{}, 1, 2}).cores, Numbers{2});
  topology.processor_quota = 0.5;
  EXPECT_EQ(place(topology, {}).cores, Numbers{0});
}

TEST(Placement, HasNoNodeToChooseOnAHostWithOne) {
  LaidOutHost host;
  host.add_node(0, "0-1", "10");

  const Placement placement = place(read(host), {.nodes = {0}});

  EXPECT_EQ(placement.memory_node, -1);
  EXPECT_EQ(placement.processors, (Numbers{0, 1}));
  EXPECT_EQ(placement.reason, "the host has one NUMA node");
}

TEST(ProcessorsText, WritesRunsAsTheKernelDoes) {
  EXPECT_EQ(processors_text(Numbers{}), "none");
  EXPECT_EQ(processors_text(Numbers{7}), "7");
  EXPECT_EQ(processors_text(Numbers{8, 0, 1, 2, 4, 5}), "0-2,4-5,8");
  EXPECT_EQ(processors_text(Numbers{3, 3, 4, 4}), "3-4");
}

// hwloc is told of another machine by its environment, for as long as this lives.
class HwlocMachine {
 public:
  HwlocMachine(const char* variable, const std::string& value) : variable_(variable) {
    ::setenv(variable, value.c_str(), 1);
  }
  ~HwlocMachine() { ::unsetenv(variable_); }

 private:
  const char* variable_;
};

class HwlocTopology : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!FOREBAY_HAVE_HWLOC) GTEST_SKIP() << "this build has no hwloc";
  }
};

TEST_F(HwlocTopology, ShowsTheSameFactsOfTwoNodes) {
  const HwlocMachine machine("HWLOC_XMLFILE", std::string(FOREBAY_TEST_DATA) + "/two_nodes.xml");

  const Topology topology = read_topology();

  EXPECT_EQ(topology.source, "hwloc, of another machine");
  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[0].cores, (std::vector<Numbers>{{0, 1}, {2, 3}}));
  EXPECT_EQ(topology.nodes[1].cores, (std::vector<Numbers>{{4, 5}, {6, 7}}));
  EXPECT_EQ(topology.nodes[1].memory_bytes, std::uint64_t{64} << 30);
  EXPECT_EQ(topology.nodes[0].distances, (Numbers{10, 21}));
  EXPECT_EQ(topology.nodes[1].distances, (Numbers{22, 10}));
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:11:00.0"), Numbers{0});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:12:00.0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kDrive, "nvme0n1"), Numbers{0});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kDrive, "nvme1n1"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kNetworkInterface, "eth0"), Numbers{1});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kNetworkInterface, "eth1"), Numbers{});
}

// The machine of two_nodes.xml with texts replaced, in a file of the test's own.
std::string changed_machine(const LaidOutHost& host,
                            const std::vector<std::pair<std::string, std::string>>& changes) {
  std::ostringstream text;
  text << std::ifstream(std::string(FOREBAY_TEST_DATA) + "/two_nodes.xml").rdbuf();
  std::string machine = text.str();
  for (const auto& [old_text, new_text] : changes) {
    const std::size_t at = machine.find(old_text);
    EXPECT_NE(at, std::string::npos) << old_text;
    machine.replace(at, old_text.size(), new_text);
  }
  const std::string path = host.paths().sys + "/machine.xml";
  std::filesystem::create_directories(host.paths().sys);
  std::ofstream(path) << machine;
  return path;
}

TEST_F(HwlocTopology, LeavesOutProcessorsAndMemoryThatAreNotAllowed) {
  const LaidOutHost host;
  const HwlocMachine machine(
      "HWLOC_XMLFILE",
      changed_machine(host, {{"allowed_cpuset=\"0x000000ff\"", "allowed_cpuset=\"0x0000006d\""},
                             {"allowed_nodeset=\"0x00000003\"", "allowed_nodeset=\"0x00000002\""}}));

  const Topology topology = read_topology();

  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[0].cores, (std::vector<Numbers>{{0}, {2, 3}}));
  EXPECT_EQ(topology.nodes[1].cores, (std::vector<Numbers>{{5}, {6}}));
  EXPECT_FALSE(topology.nodes[0].memory_usable);
  EXPECT_TRUE(topology.nodes[1].memory_usable);
}

TEST_F(HwlocTopology, TakesADeviceThatIsAsNearToAllNodesForNearNone) {
  const LaidOutHost host;
  const std::string device =
      R"(<object type="Bridge" gp_index="200" bridge_type="0-1" depth="0" bridge_pci="0000:[fe-fe]">)"
      R"(<object type="PCIDev" gp_index="201" pci_busid="0000:fe:00.0" pci_type="0302 [10de:2335] [10de:2335] a1")"
      R"( pci_link_speed="0.000000"/></object></object><distances2)";
  const HwlocMachine machine("HWLOC_XMLFILE", changed_machine(host, {{"</object>\n  <distances2", device}}));

  const Topology topology = read_topology();

  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:fe:00.0"), Numbers{});
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:12:00.0"), Numbers{1});
}

TEST_F(HwlocTopology, ShowsAnyMachine) {
  const HwlocMachine machine("HWLOC_SYNTHETIC", "package:2 numa:2 core:3 pu:1");

  const Topology topology = read_topology();

  ASSERT_EQ(topology.nodes.size(), 4u);
  EXPECT_EQ(topology.nodes[3].processors(), (Numbers{9, 10, 11}));
  EXPECT_EQ(topology.nodes_near(AttachmentKind::kPci, "0000:11:00.0"), Numbers{});
}

TEST_F(HwlocTopology, CountsAProcessorToTheFirstOfItsSmallestNodes) {
  // Nodes 0 and 1 are beside all four cores. Nodes 2 and 3 are beside two of them, and so are 4 and 5.
  const HwlocMachine machine("HWLOC_SYNTHETIC", "[numa] [numa] package:2 [numa] [numa] core:2 pu:1");

  const Topology topology = read_topology();

  std::vector<std::pair<int, Numbers>> with_cores;
  for (const NumaNode& node : topology.nodes) {
    if (!node.cores.empty()) with_cores.emplace_back(node.node, node.processors());
  }
  ASSERT_EQ(topology.nodes.size(), 6u);
  EXPECT_EQ(with_cores.size(), 2u);
  EXPECT_EQ(topology.processors(), (Numbers{0, 1, 2, 3}));
  for (const auto& [node, processors] : with_cores) {
    EXPECT_EQ(processors.size(), 2u) << node;
    EXPECT_EQ(node % 2, 0) << node;
  }
}

TEST_F(HwlocTopology, TakesEachProcessorForACoreWhereNoCoresAreShown) {
  const HwlocMachine machine("HWLOC_SYNTHETIC", "numa:2 pu:2");

  const Topology topology = read_topology();

  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[1].cores, (std::vector<Numbers>{{2}, {3}}));
}

TEST_F(HwlocTopology, OrdersNodesByTheirNumbers) {
  const HwlocMachine machine("HWLOC_SYNTHETIC", "numa:2(indexes=1,0) core:2 pu:1");

  const Topology topology = read_topology();

  ASSERT_EQ(topology.nodes.size(), 2u);
  EXPECT_EQ(topology.nodes[0].node, 0);
  EXPECT_EQ(topology.nodes[0].cores, (std::vector<Numbers>{{2}, {3}}));
  EXPECT_EQ(topology.nodes[1].cores, (std::vector<Numbers>{{0}, {1}}));
}

TEST_F(HwlocTopology, HasTheQuotaOfThisProcessOnThisMachineAlone) {
  const internal::Limits limits{.processor_quota = 1.5};
  std::string why;

  const std::optional<Topology> here = internal::read_hwloc_topology(limits, &why);
  ASSERT_TRUE(here.has_value()) << why;
  EXPECT_EQ(here->processor_quota, 1.5);

  const HwlocMachine machine("HWLOC_SYNTHETIC", "numa:2 core:2 pu:1");
  const std::optional<Topology> elsewhere = internal::read_hwloc_topology(limits, &why);
  ASSERT_TRUE(elsewhere.has_value()) << why;
  EXPECT_FALSE(elsewhere->processor_quota.has_value());
}

TEST_F(HwlocTopology, GivesWayToSysfsWhereItCannotRead) {
  const HwlocMachine machine("HWLOC_SYNTHETIC", "nonsense:everywhere");

  // hwloc may take nonsense for nothing and show this machine.
  EXPECT_FALSE(read_topology().processors().empty());
}

TEST(TopologyOfThisHost, IsTheSameFromBothReaders) {
  const Topology one = read_topology();
  const Topology other = read_topology({.hwloc = false});

  EXPECT_EQ(other.source, "sysfs");
  EXPECT_EQ(one.processors(), other.processors());
  ASSERT_EQ(one.nodes.size(), other.nodes.size());
  for (std::size_t i = 0; i < one.nodes.size(); ++i) {
    EXPECT_EQ(one.nodes[i].node, other.nodes[i].node);
    EXPECT_EQ(one.nodes[i].cores, other.nodes[i].cores);
  }
}

TEST(TopologyOfThisHost, ObeysTheAffinityOfTheThread) {
  const Numbers all = read_topology().processors();
  ASSERT_FALSE(all.empty());
  const auto bound = ThreadBinding::create(Numbers{all.back()});
  ASSERT_TRUE(bound.ok()) << bound.status().to_string();

  EXPECT_EQ(read_topology().processors(), Numbers{all.back()});
  EXPECT_EQ(read_topology({.hwloc = false}).processors(), Numbers{all.back()});
}

}  // namespace
}  // namespace forebay
