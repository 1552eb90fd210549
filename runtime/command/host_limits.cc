#include "runtime/command/host_limits.h"

#include <charconv>
#include <string_view>

#include "runtime/topology/system_files.h"

namespace forebay {
namespace {

using internal::read_all;

// Version 1 writes "no limit" as the largest multiple of a page below 2^63; nothing real comes near 2^60.
constexpr std::uint64_t kUnlimitedFrom = std::uint64_t{1} << 60;

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

// The smallest limit: every ancestor's binds the process.
std::optional<HostLimit> tightest(const std::vector<std::filesystem::path>& groups, const char* file) {
  std::optional<HostLimit> found;
  for (const std::filesystem::path& group : groups) {
    const std::string path = group / file;
    const std::optional<std::uint64_t> bytes = parse_cgroup_limit(read_all(path));
    if (bytes && (!found || *bytes < found->bytes)) found = HostLimit{"cgroup memory limit", path, *bytes};
  }
  return found;
}

std::optional<HostLimit> cgroup_limit(const HostPaths& paths) {
  std::vector<std::filesystem::path> unified = internal::control_groups(paths.proc, "", paths.cgroup);
  if (unified.empty()) unified = {paths.cgroup};
  if (std::optional<HostLimit> limit = tightest(unified, "memory.max")) return limit;
  return tightest(internal::control_groups(paths.proc, "memory", paths.cgroup + "/memory"),
                  "memory.limit_in_bytes");
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
  if (const auto bytes = parse_memory_available(read_all(meminfo))) {
    limits.push_back({"free memory (MemAvailable)", meminfo, *bytes});
  }
  return limits;
}

}  // namespace forebay
