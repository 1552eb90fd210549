#include "forebay/drives.h"

#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>

#include "runtime/topology/system_files.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;
using internal::entries;
using internal::is_number;
using internal::read_line;

// Volumes on volumes, and file systems over file systems; more would be a loop.
constexpr int kDeepest = 8;

// The kernel writes spaces, tabs, newlines and backslashes as three octal digits.
std::string unescape(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && text.find_first_not_of("01234567", i + 1) >= i + 4) {
      plain += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

// "loop" and a number, "rbd" and a number.
bool is_numbered(const std::string& name, std::initializer_list<const char*> kinds) {
  return std::any_of(kinds.begin(), kinds.end(), [&](const std::string& kind) {
    return name.starts_with(kind) && is_number(name.substr(kind.size()));
  });
}

void collect_drives(const fs::path& device, std::vector<Drive>* drives, int depth) {
  std::error_code error;
  fs::path path = fs::canonical(device, error);
  if (error || depth > kDeepest) return;
  if (fs::exists(path / "partition", error)) path = path.parent_path();
  const auto below = entries(path / "slaves", "");
  for (const auto& [name, member] : below) collect_drives(member, drives, depth + 1);
  if (!below.empty()) return;
  Drive drive;
  drive.name = path.filename().string();
  for (const Drive& known : *drives) {
    if (known.name == drive.name) return;
  }
  const std::string rotational = read_line(path / "queue/rotational");
  if (rotational == "0" || rotational == "1") drive.rotational = rotational == "1";
  drive.is_memory = is_numbered(drive.name, {"ram", "zram"});
  drive.is_network = is_numbered(drive.name, {"nbd", "rbd", "drbd"});
  drive.is_file = is_numbered(drive.name, {"loop"});
  drives->push_back(std::move(drive));
}

bool is_one_of(const std::string& word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool is_memory_file_system(const std::string& type) {
  return is_one_of(type, {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"});
}

bool is_network_file_system(const std::string& type) {
  return is_one_of(type, {"nfs",        "nfs4",         "cifs",           "smb3",      "smbfs",    "ceph",
                          "lustre",     "gpfs",         "beegfs",         "afs",       "orangefs", "9p",
                          "fuse.sshfs", "fuse.ceph",    "fuse.glusterfs", "glusterfs", "wekafs",   "virtiofs",
                          "fuse.s3fs",  "fuse.gcsfuse", "fuse.juicefs"});
}

// The mount that shows `path`: the deepest that is above it, and of those at the same place the last.
const Mount* find_mount(const std::vector<Mount>& mounts, const std::string& path) {
  const Mount* best = nullptr;
  for (const Mount& mount : mounts) {
    const std::string& point = mount.path;
    const bool above = point == "/" || path == point || path.starts_with(point + "/");
    if (above && (best == nullptr || point.size() >= best->path.size())) best = &mount;
  }
  return best;
}

// The name of a file system by the number of statfs (linux/magic.h): those in memory and on other hosts,
// which decide something, and the usual ones of drives. Empty for others.
std::string file_system_name(std::uint32_t number) {
  constexpr struct {
    std::uint32_t number;
    const char* name;
  } kKnown[] = {
      {0x01021994, "tmpfs"}, {0x858458f6, "ramfs"}, {0x958458f6, "hugetlbfs"}, {0x00006969, "nfs"},
      {0xff534d42, "cifs"},  {0xfe534d42, "smb3"},  {0x00c36400, "ceph"},      {0x01021997, "9p"},
      {0x5346414f, "afs"},   {0x0000ef53, "ext4"},  // Its driver serves ext2 and ext3, too.
      {0x58465342, "xfs"},   {0x9123683e, "btrfs"}, {0xf2f52010, "f2fs"},      {0x794c7630, "overlay"},
  };
  for (const auto& known : kKnown) {
    if (known.number == number) return known.name;
  }
  return "";
}

// The mount of `path` where no mount above it is listed: the kernel lists mounts at or below the root, and in
// a chroot and in some containers the root is no mount point. The same file system may be listed elsewhere;
// otherwise the path itself is examined. The result has no mount point.
Mount unlisted_mount(const std::vector<Mount>& mounts, const std::string& path) {
  Mount found;
  found.device = "0:0";
  struct stat facts {};
  if (::stat(path.c_str(), &facts) == 0) {
    found.device = std::to_string(major(facts.st_dev)) + ":" + std::to_string(minor(facts.st_dev));
    const auto same = std::find_if(mounts.begin(), mounts.end(),
                                   [&](const Mount& mount) { return mount.device == found.device; });
    if (same != mounts.end()) found = *same;
    found.path.clear();
  }
  struct statfs kind {};
  if (found.file_system.empty() && ::statfs(path.c_str(), &kind) == 0) {
    found.file_system = file_system_name(static_cast<std::uint32_t>(kind.f_type));
  }
  return found;
}

// "…,upperdir=/a/b,…": the directory that an overlay writes to.
std::string upper_directory(const std::string& options) {
  std::istringstream parts(options);
  const std::string label = "upperdir=";
  for (std::string part; std::getline(parts, part, ',');) {
    if (part.starts_with(label)) return part.substr(label.size());
  }
  return "";
}

DirectoryKind kind_of(const std::string& file_system, const std::vector<Drive>& drives) {
  const auto any = [&](bool Drive::*member) {
    return std::any_of(drives.begin(), drives.end(), [&](const Drive& one) { return one.*member; });
  };
  if (is_memory_file_system(file_system) || any(&Drive::is_memory)) return DirectoryKind::kMemory;
  if (is_network_file_system(file_system) || any(&Drive::is_network)) return DirectoryKind::kNetwork;
  return drives.empty() || any(&Drive::is_file) ? DirectoryKind::kUnknown : DirectoryKind::kDrive;
}

}  // namespace

std::vector<Mount> read_mounts(const SystemPaths& paths) {
  std::vector<Mount> mounts;
  std::ifstream file(fs::path(paths.proc) / "self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // "36 35 98:0 /root /path options [more ...] - type source options"
    std::istringstream words(line);
    std::string id, parent, root, options, word;
    Mount mount;
    words >> id >> parent >> mount.device >> root >> mount.path >> options;
    while (words >> word && word != "-") {
    }
    if (!(words >> mount.file_system >> mount.source)) continue;
    words >> mount.options;
    mount.path = unescape(mount.path);
    mount.source = unescape(mount.source);
    mount.options = unescape(mount.options);
    mounts.push_back(std::move(mount));
  }
  return mounts;
}

std::vector<Drive> find_drives(const Mount& mount, const SystemPaths& paths) {
  const fs::path sys = paths.sys;
  std::vector<Drive> drives;
  if (!mount.device.starts_with("0:")) {
    collect_drives(sys / "dev/block" / mount.device, &drives, 0);
  } else if (mount.source.starts_with("/dev/")) {
    // Some file systems have a number of their own; their source names the device, perhaps by a link.
    std::error_code error;
    const fs::path source = fs::canonical(mount.source, error);
    collect_drives(sys / "class/block" / (error ? fs::path(mount.source) : source).filename(), &drives, 0);
  }
  std::sort(drives.begin(), drives.end(), [](const Drive& a, const Drive& b) { return a.name < b.name; });
  return drives;
}

const char* directory_kind_name(DirectoryKind kind) noexcept {
  switch (kind) {
    case DirectoryKind::kDrive:
      return "drive";
    case DirectoryKind::kMemory:
      return "memory";
    case DirectoryKind::kNetwork:
      return "network";
    case DirectoryKind::kUnknown:
      return "unknown";
  }
  return "unknown";
}

std::optional<bool> DirectoryFacts::rotational() const {
  bool known = !drives.empty();
  for (const Drive& drive : drives) {
    if (drive.rotational == true) return true;
    known = known && drive.rotational.has_value();
  }
  return known ? std::optional<bool>(false) : std::nullopt;
}

std::string DirectoryFacts::drive_names() const {
  std::string names;
  for (const Drive& drive : drives) names += (names.empty() ? "" : "+") + drive.name;
  return names;
}

Result<DirectoryFacts> locate_directory(const Topology& topology, const std::string& directory,
                                        const SystemPaths& paths) {
  std::error_code error;
  fs::path path = fs::canonical(directory, error);
  if (error || !fs::is_directory(path, error)) {
    return Status(StatusCode::kInvalidArgument,
                  "'" + directory + "' is not a directory; make it, or name another");
  }
  DirectoryFacts facts;
  facts.path = directory;
  const std::vector<Mount> mounts = read_mounts(paths);
  for (int depth = 0; depth < kDeepest; ++depth) {
    const Mount* listed = find_mount(mounts, path.string());
    const Mount mount = listed != nullptr ? *listed : unlisted_mount(mounts, path.string());
    if (depth == 0) {
      facts.mount_point = mount.path;
      facts.file_system = mount.file_system;
    }
    if (mount.file_system == "overlay") {
      // In a container the place may not be visible, and another one may have its name.
      const fs::path upper = fs::canonical(upper_directory(mount.options), error);
      if (error || upper == path) break;
      path = upper;
      continue;
    }
    facts.drives = find_drives(mount, paths);
    facts.kind = kind_of(mount.file_system, facts.drives);
    break;
  }
  for (const Drive& drive : facts.drives) {
    for (const int node : topology.nodes_near(AttachmentKind::kDrive, drive.name))
      facts.nodes.push_back(node);
  }
  std::sort(facts.nodes.begin(), facts.nodes.end());
  facts.nodes.erase(std::unique(facts.nodes.begin(), facts.nodes.end()), facts.nodes.end());
  return facts;
}

}  // namespace forebay
