#include "runtime/command/host_limits.h"

#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>

namespace forebay {
namespace {

// Version 1 writes "no limit" as the largest multiple of a page below 2^63; nothing real comes near 2^60.
constexpr std::uint64_t kUnlimitedFrom = std::uint64_t{1} << 60;

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) return std::nullopt;
  return text.str();
}

std::optional<std::uint64_t> parse_number(std::string_view text) {
  const std::size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + start, text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() + start) return std::nullopt;
  return value;
}

// The rest of the line that begins with `label`.
std::optional<std::string_view> line_after(std::string_view text, std::string_view label) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (line.substr(0, label.size()) == label) return line.substr(label.size());
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return std::nullopt;
}

// The smallest limit on the way from the process's own group up to the root: every ancestor binds it. In a
// container the path may name groups that are not mounted; they are skipped, and the container's view is the
// root.
std::optional<HostLimit> tightest(const std::string& root, std::string group, const char* file) {
  if (group.find("/..") != std::string::npos) group = "/";  // Outside the container's own root.
  std::optional<HostLimit> found;
  while (true) {
    const std::string path = root + (group == "/" ? "" : group) + "/" + file;
    if (const std::optional<std::string> text = read_text(path)) {
      const std::optional<std::uint64_t> bytes = parse_cgroup_limit(*text);
      if (bytes && (!found || *bytes < found->bytes)) {
        found = HostLimit{"cgroup memory limit", path, *bytes};
      }
    }
    if (group.empty() || group == "/") return found;
    group.resize(group.find_last_of('/'));
  }
}

std::optional<HostLimit> cgroup_limit(const HostPaths& paths) {
  const std::string text = read_text(paths.proc + "/self/cgroup").value_or("");
  std::string unified = "/", memory = "/";
  bool has_v1 = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {  // "hierarchy:controllers:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.size() <= second + 1 || line[second + 1] != '/') continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers == ",,") unified = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) {
      memory = line.substr(second + 1);
      has_v1 = true;
    }
  }
  std::optional<HostLimit> limit = tightest(paths.cgroup, unified, "memory.max");
  if (!limit && has_v1) limit = tightest(paths.cgroup + "/memory", memory, "memory.limit_in_bytes");
  return limit;
}

}  // namespace

std::optional<std::uint64_t> parse_cgroup_limit(const std::string& text) {
  const std::optional<std::uint64_t> bytes = parse_number(text);  // "max" is not a number.
  if (!bytes || *bytes >= kUnlimitedFrom) return std::nullopt;
  return bytes;
}

std::optional<std::uint64_t> parse_memory_available(const std::string& text) {
  const std::optional<std::string_view> rest = line_after(text, "MemAvailable:");
  const std::optional<std::uint64_t> kibibytes = rest ? parse_number(*rest) : std::nullopt;
  if (!kibibytes || *kibibytes >= kUnlimitedFrom / 1024) return std::nullopt;
  return *kibibytes * 1024;
}

std::optional<std::uint64_t> parse_locked_memory_limit(const std::string& text) {
  const std::optional<std::string_view> rest = line_after(text, "Max locked memory");
  const std::optional<std::uint64_t> bytes = rest ? parse_number(*rest) : std::nullopt;  // Soft limit first.
  if (!bytes || *bytes >= kUnlimitedFrom) return std::nullopt;
  return bytes;
}

std::vector<HostLimit> read_host_limits(const HostPaths& paths) {
  std::vector<HostLimit> limits;
  if (std::optional<HostLimit> limit = cgroup_limit(paths)) limits.push_back(std::move(*limit));

  const std::string meminfo = paths.proc + "/meminfo";
  if (const auto bytes = parse_memory_available(read_text(meminfo).value_or(""))) {
    limits.push_back({"free memory (MemAvailable)", meminfo, *bytes});
  }
  return limits;
}

}  // namespace forebay
