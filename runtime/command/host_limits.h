// What this host lets a process hold: its control group's limit, its free memory, and how much of it may be
// locked. Read from text files below two roots, so that a test can lay out a host of its own.
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
  std::string where;  // The file that says so.
  std::uint64_t bytes = 0;
};

// The limits that are set on what a host's processes hold together, in the order cgroup, free memory. What
// is unlimited, or cannot be read, is left out: a plan must not fail because a file of the system is missing.
std::vector<HostLimit> read_host_limits(const HostPaths& paths = {});

// The pieces, on text. None: unlimited, or not in the text.
std::optional<std::uint64_t> parse_cgroup_limit(const std::string& text);      // memory.max, limit_in_bytes
std::optional<std::uint64_t> parse_memory_available(const std::string& text);  // /proc/meminfo
std::optional<std::uint64_t> parse_locked_memory_limit(const std::string& text);  // /proc/self/limits

}  // namespace forebay
