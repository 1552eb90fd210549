// What is behind a directory: its file system, and the drives that this lies on. For choosing directories of
// the file tier, and threads near them.
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
  std::string device;  // "259:2"; "0:41" for what has no block device of its own.
  std::string path;
  std::string file_system;
  std::string source;   // "/dev/nvme0n1p2", "server:/export"
  std::string options;  // Of the file system: "rw,lowerdir=...".
};

// In the order they were made. Lines that cannot be understood are left out.
std::vector<Mount> read_mounts(const SystemPaths& paths = {});

struct Drive {
  std::string name;  // "nvme0n1"
  std::optional<bool>
      rotational;           // What the system says; virtual drives often say yes. None: it does not say.
  bool is_memory = false;   // ram, zram
  bool is_network = false;  // nbd, rbd, drbd
  bool is_file = false;     // loop: a file of another file system.
};

// The drives below a mount's block device: the disk of a partition, those that a volume is made of. Empty
// when it has none or the system does not show them.
std::vector<Drive> find_drives(const Mount& mount, const SystemPaths& paths = {});

enum class DirectoryKind : std::uint8_t {
  kDrive,    // Files are on drives of this host.
  kMemory,   // Files take the memory that they are meant to save.
  kNetwork,  // Files are on another host.
  kUnknown,
};

// "drive", "memory", "network" or "unknown": the words of reports.
const char* directory_kind_name(DirectoryKind kind) noexcept;

struct DirectoryFacts {
  std::string path;         // As given.
  std::string mount_point;  // Empty when none is listed above it, as for what is on the root of a chroot.
  std::string file_system;  // "ext4"; empty when unknown.
  DirectoryKind kind = DirectoryKind::kUnknown;
  std::vector<Drive> drives;
  std::vector<int> nodes;  // Nearest to any of the drives, in ascending order. Empty: unknown.

  // Of any of the drives; none when no drive is known to turn and one is not known at all.
  std::optional<bool> rotational() const;
  // "nvme0n1+nvme1n1"; empty without drives.
  std::string drive_names() const;
};

// Errors: kInvalidArgument when `directory` is none.
Result<DirectoryFacts> locate_directory(const Topology& topology, const std::string& directory,
                                        const SystemPaths& paths = {});

}  // namespace forebay
