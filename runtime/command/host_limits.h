// The limits of a process's memory on this host: its control group's limit, the free memory, and the part
// that may be pinned. They are read from text files below two roots, so that a test can lay out a host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace forebay {

struct HostPaths {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

struct HostLimit {
  std::string name;   // For people: "cgroup memory limit".
  std::string where;  // The file that states it.
  std::uint64_t bytes = 0;
};

// The limits on the memory of all processes of a host together, in the order cgroup, free memory. A limit
// that is not set or cannot be read is left out: a plan must not fail because a system file is missing.
std::vector<HostLimit> read_host_limits(const HostPaths& paths = {});

// Parsers of the files' texts. None: unlimited, or not in the text.
std::optional<std::uint64_t> parse_cgroup_limit(const std::string& text);      // memory.max, limit_in_bytes
std::optional<std::uint64_t> parse_memory_available(const std::string& text);  // /proc/meminfo
std::optional<std::uint64_t> parse_locked_memory_limit(const std::string& text);  // /proc/self/limits

}  // namespace forebay
