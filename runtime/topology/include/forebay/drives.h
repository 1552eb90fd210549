// The file system and the drives behind a directory, for choosing directories of the file tier and threads
// near them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forebay/status.h"
#include "forebay/topology.h"

namespace forebay {

// A line of /proc/self/mountinfo.
struct Mount {
  std::string device;  // "259:2"; "0:41" without a block device of its own.
  std::string path;
  std::string file_system;
  std::string source;   // "/dev/nvme0n1p2", "server:/export"
  std::string options;  // The file system's: "rw,lowerdir=...".
};

// In the order in which they were mounted. Unreadable lines are left out.
std::vector<Mount> read_mounts(const SystemPaths& paths = {});

struct Drive {
  std::string name;                // "nvme0n1"
  std::optional<bool> rotational;  // As the system says; virtual drives often say yes. None: it does not say.
  bool is_memory = false;          // ram, zram
  bool is_network = false;         // nbd, rbd, drbd
  bool is_file = false;            // loop: a file of another file system.
};

// The drives below a mount's block device: the disk of a partition, the disks of a volume. Empty when there
// are none or the system does not show them.
std::vector<Drive> find_drives(const Mount& mount, const SystemPaths& paths = {});

enum class DirectoryKind : std::uint8_t {
  kDrive,    // Files are on drives of this host.
  kMemory,   // Files are in host memory, so they save none.
  kNetwork,  // Files are on another host.
  kUnknown,
};

// "drive", "memory", "network" or "unknown": the words of reports.
const char* directory_kind_name(DirectoryKind kind) noexcept;

struct DirectoryFacts {
  std::string path;         // As given.
  std::string mount_point;  // Empty when none is listed above it, as on the root of a chroot.
  std::string file_system;  // "ext4"; empty when unknown.
  DirectoryKind kind = DirectoryKind::kUnknown;
  std::vector<Drive> drives;
  std::vector<int> nodes;  // The nearest to any of the drives, in ascending order. Empty: unknown.

  // True when any drive is rotational; none when none is known to be and one is unknown.
  std::optional<bool> rotational() const;
  // "nvme0n1+nvme1n1"; empty without drives.
  std::string drive_names() const;
};

// Errors: kInvalidArgument when `directory` is not a directory.
Result<DirectoryFacts> locate_directory(const Topology& topology, const std::string& directory,
                                        const SystemPaths& paths = {});

}  // namespace forebay
