// The facts of a host that matter to a training process: processors and NUMA nodes, memory and the part of it
// that may be pinned, huge pages, and the directories on flash drives that the file tier could use. They are
// read from text files below two roots, so that a test can lay out a host; whether a directory can be written
// is tried. Distances are not here but in topology.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "forebay/topology.h"

namespace forebay {

struct HostNumaNode {
  int node = 0;
  std::string processors;  // As the kernel writes it: "0-7,16-23".
  std::uint64_t memory_bytes = 0;
  std::uint64_t free_bytes = 0;
};

struct HugePages {
  std::uint64_t page_bytes = 0;
  std::uint64_t count = 0;
  std::uint64_t free_count = 0;
};

// A mount point on a drive without moving parts.
struct FlashDirectory {
  std::string path;
  std::vector<std::string> drives;  // "nvme0n1"; several below a volume.
  bool is_nvme = false;
  std::string file_system;
  std::uint64_t free_bytes = 0;
  bool is_writable = false;
  bool has_direct = false;  // Files can be opened past the page cache (O_DIRECT).
};

struct HostFacts {
  int processor_count = 0;      // Online.
  int usable_count = 0;         // The processors that this process may run on.
  std::string processor_model;  // Empty when unknown.
  std::uint64_t memory_bytes = 0;
  std::uint64_t available_bytes = 0;
  std::optional<std::uint64_t> memlock_bytes;  // None: unlimited.
  std::string transparent_huge_pages;          // "always", "madvise", "never"; empty when unknown.
  std::vector<HugePages> huge_pages;           // Smallest size first.
  std::vector<HostNumaNode> numa_nodes;
  std::vector<FlashDirectory> flash_directories;  // By path; one per drive.
};

// Facts that cannot be read are left out or 0.
HostFacts read_host_facts(const SystemPaths& paths = {});

}  // namespace forebay
