#include "runtime/command/machine/host_facts.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/process.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

// A host made of files in a directory of its own.
class HostFactsTest : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void link(const std::string& path, const std::string& target) {
    fs::create_directories(fs::path(root_ / path).parent_path());
    fs::create_directory_symlink(root_ / target, root_ / path);
  }
  std::string directory(const std::string& path) {
    fs::create_directories(root_ / path);
    return root_ / path;
  }
  void add_drive(const std::string& name, const std::string& number, const std::string& rotational) {
    write("sys/devices/" + name + "/queue/rotational", rotational + "\n");
    link("sys/dev/block/" + number, "sys/devices/" + name);
  }
  HostFacts read() { return read_host_facts({.proc = root_ / "proc", .sys = root_ / "sys"}); }

  ::forebay::testing::TemporaryDirectory root_;
};

TEST_F(HostFactsTest, ReadsMemoryHugePagesAndNumaNodes) {
  write("proc/meminfo", "MemTotal:       32000 kB\nMemFree:  5 kB\nMemAvailable:   24000 kB\n");
  write("proc/cpuinfo", "processor\t: 0\nmodel name\t: A Fine Processor 9000\n");
  write("proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max locked memory         8388608              16777216             bytes     \n");
  write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  write("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "2\n");
  write("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "1\n");
  write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n");
  write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "500\n");
  for (const char* node : {"10", "2"}) {
    const std::string path = std::string("sys/devices/system/node/node") + node;
    write(path + "/cpulist", std::string(node) + "-63\n");
    write(path + "/meminfo",
          std::string("Node ") + node + " MemTotal:  1000 kB\nNode " + node + " MemFree:   10 kB\n");
  }
  write("sys/devices/system/node/online", "2,10\n");

  const HostFacts facts = read();

  EXPECT_GT(facts.processor_count, 0);
  EXPECT_GT(facts.usable_count, 0);
  EXPECT_EQ(facts.processor_model, "A Fine Processor 9000");
  EXPECT_EQ(facts.memory_bytes, 32000u * 1024);
  EXPECT_EQ(facts.available_bytes, 24000u * 1024);
  EXPECT_EQ(facts.memlock_bytes, 8388608u);
  EXPECT_EQ(facts.transparent_huge_pages, "madvise");
  ASSERT_EQ(facts.huge_pages.size(), 2u);
  EXPECT_EQ(facts.huge_pages[0].page_bytes, 2u << 20);
  EXPECT_EQ(facts.huge_pages[0].free_count, 500u);
  EXPECT_EQ(facts.huge_pages[1].page_bytes, 1u << 30);
  ASSERT_EQ(facts.numa_nodes.size(), 2u);
  EXPECT_EQ(facts.numa_nodes[0].node, 2);
  EXPECT_EQ(facts.numa_nodes[0].processors, "2-63");
  EXPECT_EQ(facts.numa_nodes[1].node, 10);
  EXPECT_EQ(facts.numa_nodes[1].memory_bytes, 1000u * 1024);
  EXPECT_EQ(facts.numa_nodes[1].free_bytes, 10u * 1024);
}

TEST_F(HostFactsTest, FindsMountPointsOnFlashDrives) {
  add_drive("nvme0n1", "259:0", "0");
  write("sys/devices/nvme0n1/nvme0n1p2/partition", "2\n");
  link("sys/dev/block/259:2", "sys/devices/nvme0n1/nvme0n1p2");
  add_drive("sda", "8:0", "0");
  add_drive("sdb", "8:16", "1");
  add_drive("loop3", "7:3", "0");
  const std::string on_nvme = directory("on nvme");
  const std::string on_ssd = directory("on-ssd");
  const std::string elsewhere = directory("elsewhere");
  std::string escaped = on_nvme;
  escaped.replace(escaped.find(' '), 1, "\\040");
  write("proc/self/mountinfo",
        "1 0 259:2 / " + escaped + " rw,noatime shared:1 master:2 - ext4 /dev/nvme0n1p2 rw\n" +  //
            "2 1 259:2 / " + on_nvme + "/not-there rw - ext4 /dev/nvme0n1p2 rw\n" +              //
            "3 1 8:0 / " + on_ssd + " rw - xfs /dev/sda rw\n" +                                  //
            "4 1 8:16 / " + elsewhere + " rw - ext4 /dev/sdb rw\n" +                             //
            "5 1 7:3 / " + elsewhere + " rw - squashfs /dev/loop3 rw\n" +                        //
            "6 1 0:22 / " + elsewhere + " rw - tmpfs tmpfs rw\n" +                               //
            "nonsense\n\n7 1 9:9 / / rw -\n");

  const HostFacts facts = read();

  ASSERT_EQ(facts.flash_directories.size(), 2u);
  const FlashDirectory& nvme = facts.flash_directories[0];
  EXPECT_EQ(nvme.path, on_nvme);
  EXPECT_EQ(nvme.drives, std::vector<std::string>{"nvme0n1"});
  EXPECT_TRUE(nvme.is_nvme);
  EXPECT_EQ(nvme.file_system, "ext4");
  EXPECT_GT(nvme.free_bytes, 0u);
  EXPECT_TRUE(nvme.is_writable);
  const FlashDirectory& ssd = facts.flash_directories[1];
  EXPECT_EQ(ssd.drives, std::vector<std::string>{"sda"});
  EXPECT_FALSE(ssd.is_nvme);
  EXPECT_TRUE(fs::is_empty(on_ssd));  // The trial left nothing.
}

TEST_F(HostFactsTest, SeesTheDrivesBelowAVolume) {
  add_drive("nvme0n1", "259:0", "0");
  add_drive("nvme1n1", "259:1", "0");
  add_drive("sdb", "8:16", "1");
  write("sys/devices/md0/queue/rotational", "0\n");
  link("sys/devices/md0/slaves/nvme0n1", "sys/devices/nvme0n1");
  link("sys/devices/md0/slaves/nvme1n1", "sys/devices/nvme1n1");
  link("sys/dev/block/9:0", "sys/devices/md0");
  write("sys/devices/dm-1/queue/rotational", "0\n");
  link("sys/devices/dm-1/slaves/nvme0n1", "sys/devices/nvme0n1");
  link("sys/devices/dm-1/slaves/sdb", "sys/devices/sdb");
  link("sys/dev/block/253:1", "sys/devices/dm-1");
  link("sys/class/block/nvme1n1", "sys/devices/nvme1n1");
  const std::string volume = directory("volume");
  const std::string mixed = directory("mixed");
  const std::string tree = directory("tree");
  write("proc/self/mountinfo", "1 0 9:0 / " + volume + " rw - ext4 /dev/md0 rw\n" +          //
                                   "2 0 253:1 / " + mixed + " rw - ext4 /dev/dm-1 rw\n" +    //
                                   "3 0 0:41 / " + tree + " rw - btrfs /dev/nvme1n1 rw\n");  //

  const HostFacts facts = read();

  ASSERT_EQ(facts.flash_directories.size(), 2u);
  EXPECT_EQ(facts.flash_directories[0].path, tree);
  EXPECT_EQ(facts.flash_directories[0].drives, std::vector<std::string>{"nvme1n1"});
  EXPECT_EQ(facts.flash_directories[1].path, volume);
  EXPECT_TRUE(facts.flash_directories[1].is_nvme);
  EXPECT_EQ(facts.flash_directories[1].drives, (std::vector<std::string>{"nvme0n1", "nvme1n1"}));
}

TEST_F(HostFactsTest, LeavesOutWhatIsMissing) {
  const HostFacts facts = read();
  EXPECT_EQ(facts.memory_bytes, 0u);
  EXPECT_FALSE(facts.memlock_bytes.has_value());
  EXPECT_TRUE(facts.huge_pages.empty());
  EXPECT_TRUE(facts.numa_nodes.empty());
  EXPECT_TRUE(facts.flash_directories.empty());
  EXPECT_EQ(facts.transparent_huge_pages, "");
}

TEST(HostFactsOfThisHost, CanBeRead) {
  const HostFacts facts = read_host_facts();
  EXPECT_GT(facts.memory_bytes, 0u);
  EXPECT_GT(facts.processor_count, 0);
}

}  // namespace
}  // namespace forebay
