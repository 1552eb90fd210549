#include "runtime/command/host_limits.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

// A host made of files in a directory of its own.
class HostLimits : public ::testing::Test {
 protected:
  HostLimits() { root_ = testing::make_temporary_directory("host"); }
  ~HostLimits() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::vector<HostLimit> read() const {
    return read_host_limits({.proc = root_ / "proc", .cgroup = root_ / "cgroup"});
  }

  fs::path root_;
};

TEST_F(HostLimits, TakesTheTightestGroupOnTheWayToTheRoot) {
  write("proc/self/cgroup", "0::/user.slice/job/task\n");
  write("cgroup/memory.max", "max\n");
  write("cgroup/user.slice/memory.max", "8000\n");
  write("cgroup/user.slice/job/memory.max", "4096\n");
  write("cgroup/user.slice/job/task/memory.max", "max\n");

  const std::vector<HostLimit> limits = read();

  ASSERT_EQ(limits.size(), 1u);
  EXPECT_EQ(limits[0].bytes, 4096u);
  EXPECT_EQ(limits[0].name, "cgroup memory limit");
  EXPECT_TRUE(limits[0].where.ends_with("cgroup/user.slice/job/memory.max")) << limits[0].where;
}

TEST_F(HostLimits, SeesTheRootOfAContainerWhosePathIsNotMounted) {
  write("proc/self/cgroup", "0::/../../elsewhere\n");
  write("cgroup/memory.max", "123456\n");

  const std::vector<HostLimit> limits = read();

  ASSERT_EQ(limits.size(), 1u);
  EXPECT_EQ(limits[0].bytes, 123456u);
}

TEST_F(HostLimits, ReadsVersionOneOfControlGroups) {
  write("proc/self/cgroup", "11:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n0::/\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("cgroup/memory/docker/x/memory.limit_in_bytes", "2147483648\n");

  const std::vector<HostLimit> limits = read();

  ASSERT_EQ(limits.size(), 1u);
  EXPECT_EQ(limits[0].bytes, 2147483648u);
}

// 2^60 bytes and more stand for none.
TEST_F(HostLimits, AnEnormousLimitIsNone) {
  for (const bool is_limit : {true, false}) {
    write("proc/self/cgroup", "0::/\n");
    write("cgroup/memory.max", is_limit ? "1152921504606846975\n" : "1152921504606846976\n");
    write("proc/meminfo",
          is_limit ? "MemAvailable: 1125899906842623 kB\n" : "MemAvailable: 1125899906842624 kB\n");
    std::vector<std::uint64_t> bytes;
    for (const HostLimit& limit : read()) bytes.push_back(limit.bytes);
    if (is_limit) {
      EXPECT_EQ(bytes.size(), 2u);
      for (const std::uint64_t one : bytes) EXPECT_GE(one, (std::uint64_t{1} << 60) - 1024);
    } else {
      EXPECT_TRUE(bytes.empty());
    }
  }
}

TEST_F(HostLimits, ReadsFreeMemory) {
  write("proc/meminfo", "MemTotal:       32000 kB\nMemFree:  5 kB\nMemAvailable:   24000 kB\n");

  const std::vector<HostLimit> limits = read();

  ASSERT_EQ(limits.size(), 1u);
  EXPECT_EQ(limits[0].name, "free memory (MemAvailable)");
  EXPECT_EQ(limits[0].bytes, 24000u * 1024);
}

TEST_F(HostLimits, LeavesOutWhatIsUnlimitedOrMissing) {
  EXPECT_TRUE(read().empty());
  write("proc/self/cgroup", "0::/\n");
  write("cgroup/memory.max", "max\n");
  write("proc/meminfo", "MemTotal: 3 kB\n");
  write("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n");
  EXPECT_TRUE(read().empty());
}

TEST_F(HostLimits, TheLastLineMayHaveNoEnd) {
  write("proc/meminfo", "MemTotal: 3 kB");
  EXPECT_TRUE(read().empty());
  write("proc/meminfo", "MemTotal: 3 kB\nMemAvailable: 2 kB");
  ASSERT_EQ(read().size(), 1u);
  EXPECT_EQ(read()[0].bytes, 2048u);
}

TEST_F(HostLimits, SurvivesFilesThatMakeNoSense) {
  write("proc/self/cgroup", "::\n:\n\n0::relative\nnonsense\n7:memory\n");
  write("cgroup/memory.max", "-3\n");
  write("proc/meminfo", "MemAvailable: 99999999999999999999999999 kB\n");
  write("proc/self/limits", "Max locked memory");
  EXPECT_TRUE(read().empty());
}

TEST(HostLimitsOfThisHost, CanBeRead) {
  bool has_free_memory = false;
  for (const HostLimit& limit : read_host_limits()) has_free_memory |= limit.where == "/proc/meminfo";
  EXPECT_TRUE(has_free_memory);
}

}  // namespace
}  // namespace forebay
