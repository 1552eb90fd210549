// The drives behind a directory, on hosts that are laid out as files.
#include "forebay/drives.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>

#include "tests/topology/laid_out_host.h"

namespace forebay {
namespace {

using testing::LaidOutHost;
using Numbers = std::vector<int>;

// "254:0": the file system that a directory is really on.
std::string device_number(const std::string& directory) {
  struct stat facts {};
  EXPECT_EQ(::stat(directory.c_str(), &facts), 0) << directory;
  return std::to_string(major(facts.st_dev)) + ":" + std::to_string(minor(facts.st_dev));
}

class DrivesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    lay_out_two_nodes(host_);
    topology_ = read_topology(host_.options());
  }
  // A directory, and its mount: "259:0", "ext4", "/dev/nvme0n1", options.
  std::string mount(const std::string& name, const std::string& device, const std::string& rest) {
    const std::string path = host_.directory(name);
    std::string escaped = path;
    for (std::size_t at; (at = escaped.find(' ')) != std::string::npos;) escaped.replace(at, 1, "\\040");
    mounts_ += "1 0 " + device + " / " + escaped + " rw,noatime shared:1 - " + rest + "\n";
    host_.write("proc/self/mountinfo", mounts_);
    return path;
  }
  DirectoryFacts locate(const std::string& directory) {
    const auto facts = locate_directory(topology_, directory, host_.paths());
    EXPECT_TRUE(facts.ok()) << facts.status().to_string();
    return facts.value();
  }

  LaidOutHost host_;
  Topology topology_;
  std::string mounts_ = "nonsense\n\n7 1 9:9 / / rw -\n";
};

TEST_F(DrivesTest, FindsTheDriveOfAPartitionAndItsNode) {
  const std::string partition = "sys/devices/pci/0000:c8:00.0/nvme/nvme1n1/nvme1n1p2";
  host_.write(partition + "/partition", "2\n");
  host_.link("sys/dev/block/259:4", partition);
  const std::string path = mount("with space", "259:4", "ext4 /dev/nvme1n1p2 rw");

  const DirectoryFacts facts = locate(host_.directory("with space/below"));

  EXPECT_EQ(facts.mount_point, path);
  EXPECT_EQ(facts.file_system, "ext4");
  EXPECT_EQ(facts.kind, DirectoryKind::kDrive);
  EXPECT_EQ(facts.drive_names(), "nvme1n1");
  EXPECT_EQ(facts.rotational(), false);
  EXPECT_EQ(facts.nodes, Numbers{1});
}

TEST_F(DrivesTest, TakesTheDeepestMountAndOfEqualOnesTheLast) {
  mount("tier", "259:0", "ext4 /dev/nvme0n1 rw");
  mount("tier/inner", "0:33", "tmpfs tmpfs rw");
  mount("tier/inner", "259:1", "xfs /dev/nvme1n1 rw");
  mount("tier/in", "0:34", "tmpfs tmpfs rw");
  mount("tier/oth", "0:35", "tmpfs tmpfs rw");

  EXPECT_EQ(locate(host_.directory("tier/other")).drive_names(), "nvme0n1");
  EXPECT_EQ(locate(host_.directory("tier/inner/a")).drive_names(), "nvme1n1");
}

TEST_F(DrivesTest, TakesTheDeepestMountInAnyOrder) {
  mount("tier/inner", "259:1", "xfs /dev/nvme1n1 rw");
  mount("tier", "259:0", "ext4 /dev/nvme0n1 rw");

  EXPECT_EQ(locate(host_.directory("tier/inner/a")).drive_names(), "nvme1n1");
}

TEST_F(DrivesTest, TakesTheRootWhereNothingElseIsMounted) {
  mounts_ += "1 0 259:1 / / rw - ext4 /dev/nvme1n1 rw\n";
  const DirectoryFacts facts = locate(mount("other", "259:0", "ext4 /dev/nvme0n1 rw") + "/..");

  EXPECT_EQ(facts.mount_point, "/");
  EXPECT_EQ(facts.drive_names(), "nvme1n1");
}

TEST_F(DrivesTest, ReadsMountsAsTheKernelWritesThem) {
  host_.write("proc/self/mountinfo",
              "36 35 98:0 /root /a\\040b\\134c\\040 rw,noatime shared:1 unbindable - ext4 /dev/a\\011b "
              "rw,upperdir=/x\\040y\n"
              "37 35 0:41 / /odd\\189\\04 rw - nfs server:/home\n");

  const std::vector<Mount> mounts = read_mounts(host_.paths());

  ASSERT_EQ(mounts.size(), 2u);
  EXPECT_EQ(mounts[0].device, "98:0");
  EXPECT_EQ(mounts[0].path, "/a b\\c ");
  EXPECT_EQ(mounts[0].file_system, "ext4");
  EXPECT_EQ(mounts[0].source, "/dev/a\tb");
  EXPECT_EQ(mounts[0].options, "rw,upperdir=/x y");
  EXPECT_EQ(mounts[1].path, "/odd\\189\\04");
  EXPECT_EQ(mounts[1].source, "server:/home");
  EXPECT_EQ(mounts[1].options, "");
}

TEST_F(DrivesTest, ShowsTheDirectoryAsItWasGiven) {
  const std::string path = mount("tier", "259:0", "ext4 /dev/nvme0n1 rw");

  EXPECT_EQ(locate(path + "/./").path, path + "/./");
  EXPECT_EQ(locate(path + "/./").mount_point, path);
}

TEST_F(DrivesTest, NamesADriveOnceHoweverManyPartsOfItAVolumeHas) {
  for (const std::string part : {"nvme0n1p1", "nvme0n1p2"}) {
    const std::string partition = "sys/devices/pci/0000:18:00.0/nvme/nvme0n1/" + part;
    host_.write(partition + "/partition", "1\n");
    host_.link("sys/devices/virtual/block/md0/slaves/" + part, partition);
  }
  host_.link("sys/dev/block/9:0", "sys/devices/virtual/block/md0");

  EXPECT_EQ(locate(mount("volume", "9:0", "xfs /dev/md0 rw")).drive_names(), "nvme0n1");
}

TEST_F(DrivesTest, ShowsTheNodesOfDrivesOnceAndInOrder) {
  host_.add_drive("mmcblk0", "179:0", "0000:c8:00.0", "?");
  for (const std::string drive : {"mmcblk0", "nvme0n1", "nvme1n1"}) {
    host_.link("sys/devices/virtual/block/md0/slaves/" + drive, "sys/class/block/" + drive);
  }
  host_.link("sys/dev/block/9:0", "sys/devices/virtual/block/md0");
  topology_ = read_topology(host_.options());

  const DirectoryFacts facts = locate(mount("volume", "9:0", "xfs /dev/md0 rw"));

  EXPECT_EQ(facts.drive_names(), "mmcblk0+nvme0n1+nvme1n1");
  EXPECT_EQ(facts.nodes, (Numbers{0, 1}));
  // One of them does not say.
  EXPECT_EQ(facts.rotational(), std::nullopt);
}

TEST_F(DrivesTest, SeesTheDrivesOfAVolumeAndAllTheirNodes) {
  host_.write("sys/devices/virtual/block/md0/queue/rotational", "0\n");
  host_.link("sys/devices/virtual/block/md0/slaves/nvme0n1", "sys/class/block/nvme0n1");
  host_.link("sys/devices/virtual/block/md0/slaves/nvme1n1", "sys/class/block/nvme1n1");
  host_.link("sys/dev/block/9:0", "sys/devices/virtual/block/md0");
  const DirectoryFacts facts = locate(mount("volume", "9:0", "xfs /dev/md0 rw"));

  EXPECT_EQ(facts.drive_names(), "nvme0n1+nvme1n1");
  EXPECT_EQ(facts.nodes, (Numbers{0, 1}));
  EXPECT_EQ(facts.kind, DirectoryKind::kDrive);
}

TEST_F(DrivesTest, FindsNoDriveOfVolumesThatLieOnEachOther) {
  host_.link("sys/devices/virtual/block/dm-3/slaves/dm-4", "sys/devices/virtual/block/dm-4");
  host_.link("sys/devices/virtual/block/dm-4/slaves/dm-3", "sys/devices/virtual/block/dm-3");
  host_.link("sys/dev/block/253:3", "sys/devices/virtual/block/dm-3");

  const DirectoryFacts facts = locate(mount("loop", "253:3", "ext4 /dev/dm-3 rw"));

  EXPECT_EQ(facts.drive_names(), "");
  EXPECT_EQ(facts.kind, DirectoryKind::kUnknown);
}

TEST_F(DrivesTest, FindsTheDriveOfAFileSystemWithANumberOfItsOwn) {
  EXPECT_EQ(locate(mount("tree", "0:41", "btrfs /dev/nvme0n1 rw,subvol=/a")).nodes, Numbers{0});
}

TEST_F(DrivesTest, KnowsWhatTurns) {
  host_.add_drive("sda", "8:0", "0000:18:00.0", "1");
  host_.write("sys/devices/virtual/block/dm-0/slaves/x", "");
  host_.link("sys/devices/virtual/block/dm-1/slaves/sda", "sys/class/block/sda");
  host_.link("sys/devices/virtual/block/dm-1/slaves/nvme0n1", "sys/class/block/nvme0n1");
  host_.link("sys/dev/block/253:1", "sys/devices/virtual/block/dm-1");

  EXPECT_EQ(locate(mount("disk", "8:0", "ext4 /dev/sda rw")).rotational(), true);
  EXPECT_EQ(locate(mount("mixed", "253:1", "ext4 /dev/dm-1 rw")).rotational(), true);
  host_.write("sys/devices/pci/0000:18:00.0/nvme/sda/queue/rotational", "");
  EXPECT_EQ(locate(host_.directory("disk")).rotational(), std::nullopt);
}

TEST_F(DrivesTest, TellsMemoryAndOtherHostsApart) {
  host_.write("sys/devices/virtual/block/zram0/queue/rotational", "0\n");
  host_.link("sys/dev/block/253:0", "sys/devices/virtual/block/zram0");
  host_.write("sys/devices/virtual/block/nbd3/queue/rotational", "0\n");
  host_.link("sys/dev/block/43:3", "sys/devices/virtual/block/nbd3");
  host_.write("sys/devices/virtual/block/loop1/queue/rotational", "0\n");
  host_.link("sys/dev/block/7:1", "sys/devices/virtual/block/loop1");

  EXPECT_EQ(locate(mount("shm", "0:22", "tmpfs tmpfs rw")).kind, DirectoryKind::kMemory);
  EXPECT_EQ(locate(mount("zram", "253:0", "ext4 /dev/zram0 rw")).kind, DirectoryKind::kMemory);
  EXPECT_EQ(locate(mount("home", "0:50", "nfs4 server:/home rw")).kind, DirectoryKind::kNetwork);
  EXPECT_EQ(locate(mount("nbd", "43:3", "ext4 /dev/nbd3 rw")).kind, DirectoryKind::kNetwork);
  EXPECT_EQ(locate(mount("loop", "7:1", "ext4 /dev/loop1 rw")).kind, DirectoryKind::kUnknown);
  EXPECT_EQ(locate(mount("pool", "0:51", "zfs pool/data rw")).kind, DirectoryKind::kUnknown);
  EXPECT_TRUE(locate(host_.directory("shm")).nodes.empty());
}

TEST_F(DrivesTest, KnowsDrivesByTheirNames) {
  using enum DirectoryKind;
  const std::vector<std::pair<std::string, DirectoryKind>> expected = {
      {"ram0", kMemory},   {"zram12", kMemory}, {"ramdrive", kDrive}, {"nbd0", kNetwork}, {"rbd7", kNetwork},
      {"drbd1", kNetwork}, {"loop0", kUnknown}, {"loopback", kDrive}, {"sdb", kDrive}};
  int number = 0;
  for (const auto& [name, kind] : expected) {
    const std::string device = "100:" + std::to_string(number++);
    host_.add_drive(name, device, "0000:18:00.0");
    EXPECT_EQ(locate(mount(name, device, "ext4 /dev/" + name + " rw")).kind, kind) << name;
  }
}

TEST_F(DrivesTest, KnowsFileSystemsInMemoryAndOfOtherHosts) {
  for (const std::string type : {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}) {
    EXPECT_EQ(locate(mount("on " + type, "0:70", type + " x rw")).kind, DirectoryKind::kMemory) << type;
  }
  for (const std::string type : {"nfs",          "nfs4",           "cifs",       "smb3",      "smbfs",
                                 "ceph",         "lustre",         "gpfs",       "beegfs",    "afs",
                                 "9p",           "orangefs",       "fuse.sshfs", "fuse.ceph", "glusterfs",
                                 "fuse.gcsfuse", "fuse.glusterfs", "wekafs",     "virtiofs",  "fuse.s3fs",
                                 "fuse.juicefs"}) {
    EXPECT_EQ(locate(mount("on " + type, "0:71", type + " x rw")).kind, DirectoryKind::kNetwork) << type;
  }
}

TEST(DirectoryKindName, IsAWordOfReports) {
  EXPECT_STREQ(directory_kind_name(DirectoryKind::kDrive), "drive");
  EXPECT_STREQ(directory_kind_name(DirectoryKind::kMemory), "memory");
  EXPECT_STREQ(directory_kind_name(DirectoryKind::kNetwork), "network");
  EXPECT_STREQ(directory_kind_name(DirectoryKind::kUnknown), "unknown");
}

TEST_F(DrivesTest, LooksBelowAnOverlayForWhereItWrites) {
  const std::string lower = mount("images", "259:1", "ext4 /dev/nvme1n1 rw");
  const std::string upper = host_.directory("images/upper");
  const std::string seen =
      mount("merged", "0:60", "overlay overlay rw,lowerdir=/x,upperdir=" + upper + ",workdir=/y");
  const std::string blind = mount("container", "0:61", "overlay overlay rw,upperdir=/not/visible/here");

  const DirectoryFacts facts = locate(seen);
  EXPECT_EQ(facts.file_system, "overlay");
  EXPECT_EQ(facts.mount_point, seen);
  EXPECT_EQ(facts.drive_names(), "nvme1n1");
  EXPECT_EQ(facts.kind, DirectoryKind::kDrive);
  EXPECT_EQ(locate(blind).kind, DirectoryKind::kUnknown);
  EXPECT_EQ(locate(lower).drive_names(), "nvme1n1");
}

// In a chroot the root is mostly no mount point, and mounts above it are not listed.
TEST_F(DrivesTest, FindsTheDriveByItsNumberWhereNoMountIsListed) {
  const std::string path = host_.directory("unlisted");
  const std::string number = device_number(path);
  if (number.starts_with("0:")) GTEST_SKIP() << path << " is on a file system without a device number";
  // It may be a number of the host that is laid out.
  std::filesystem::remove(std::filesystem::path(host_.paths().sys) / "dev/block" / number);
  host_.link("sys/dev/block/" + number, "sys/class/block/nvme1n1");

  const DirectoryFacts facts = locate(path);

  EXPECT_EQ(facts.mount_point, "");
  EXPECT_EQ(facts.drive_names(), "nvme1n1");
  EXPECT_EQ(facts.kind, DirectoryKind::kDrive);
  EXPECT_EQ(facts.nodes, Numbers{1});
}

TEST_F(DrivesTest, KnowsAnUnlistedMountByAnotherOfTheSameFileSystem) {
  const std::string path = host_.directory("unlisted");
  mount("elsewhere", device_number(path), "nfs4 server:/home rw");

  const DirectoryFacts facts = locate(path);

  EXPECT_EQ(facts.mount_point, "");
  EXPECT_EQ(facts.file_system, "nfs4");
  EXPECT_EQ(facts.kind, DirectoryKind::kNetwork);
}

TEST_F(DrivesTest, KnowsMemoryWithoutAMount) {
  const std::vector<Mount> mounts = read_mounts();
  const auto is_memory = [](const Mount& one) {
    return one.path == "/dev/shm" && one.file_system == "tmpfs";
  };
  if (std::none_of(mounts.begin(), mounts.end(), is_memory)) GTEST_SKIP() << "/dev/shm is no tmpfs here";

  const DirectoryFacts facts = locate("/dev/shm");

  EXPECT_EQ(facts.file_system, "tmpfs");
  EXPECT_EQ(facts.kind, DirectoryKind::kMemory);
}

TEST_F(DrivesTest, RefusesWhatIsNoDirectory) {
  host_.write("file", "");
  const auto missing = locate_directory(topology_, "/not/there", host_.paths());

  EXPECT_EQ(missing.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(missing.status().message().find("/not/there"), std::string::npos);
  EXPECT_FALSE(locate_directory(topology_, host_.directory("") + "/file", host_.paths()).ok());
}

TEST(DrivesOfThisHost, CanBeLookedFor) {
  const std::vector<Mount> mounts = read_mounts();
  const bool is_listed =
      std::any_of(mounts.begin(), mounts.end(), [](const Mount& mount) { return mount.path == "/"; });

  const auto facts = locate_directory(read_topology(), "/");

  ASSERT_TRUE(facts.ok()) << facts.status().to_string();
  EXPECT_EQ(facts.value().mount_point, is_listed ? "/" : "");
  EXPECT_TRUE(!is_listed || !facts.value().file_system.empty());
}

}  // namespace
}  // namespace forebay
