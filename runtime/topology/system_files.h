// The small text files that describe the system. A missing file reads as empty.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace forebay::internal {

std::string read_line(const std::filesystem::path& path);
std::string read_all(const std::filesystem::path& path);

// The entries of a directory with names that begin with `prefix`: the rest of each name, and the path. By
// name.
std::vector<std::pair<std::string, std::filesystem::path>> entries(const std::filesystem::path& directory,
                                                                   const std::string& prefix);

bool is_number(const std::string& text);

// A number of at most nine digits, perhaps with a sign; none for anything else.
std::optional<int> to_int(const std::string& text);

// "0-3,8" -> 0 1 2 3 8, in ascending order. Parts that make no sense, and numbers beyond a million, are left
// out.
std::vector<int> parse_list(const std::string& text);

// The directories below `root` of the process's control group and of its ancestors, innermost first.
// `controller`: "cpu", "memory"; empty: the hierarchy of version 2. In a container the path may name groups
// that are not mounted, and the container sees its own root.
std::vector<std::filesystem::path> control_groups(const std::filesystem::path& proc,
                                                  const std::string& controller,
                                                  const std::filesystem::path& root);

// The number behind `label` in the first line that has it: "Node 0 MemTotal:  32 kB". 0 when there is none.
std::uint64_t number_behind(const std::string& text, const std::string& label);

}  // namespace forebay::internal
