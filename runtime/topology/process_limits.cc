#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "runtime/topology/processor_mask.h"
#include "runtime/topology/readers.h"
#include "runtime/topology/system_files.h"

namespace forebay::internal {
namespace {

namespace fs = std::filesystem;

// "200000 100000" of version 2 is two processors' worth; "max 100000" has no limit.
std::optional<double> quota_of(const std::string& quota, const std::string& period) {
  const double granted = std::strtod(quota.c_str(), nullptr);  // "max" and "-1" are not above 0.
  const double of = std::strtod(period.c_str(), nullptr);
  if (!(granted > 0) || !(of > 0)) return std::nullopt;
  return granted / of;
}

std::optional<double> quota_v2(const fs::path& group) {
  std::istringstream words(read_line(group / "cpu.max"));
  std::string quota, period;
  words >> quota >> period;
  return quota_of(quota, period);
}

std::optional<double> quota_v1(const fs::path& group) {
  return quota_of(read_line(group / "cpu.cfs_quota_us"), read_line(group / "cpu.cfs_period_us"));
}

std::optional<double> read_quota(const SystemPaths& paths) {
  const fs::path root = fs::path(paths.sys) / "fs/cgroup";
  std::optional<double> least;
  const auto bind = [&](const std::optional<double>& quota) {
    if (quota && (!least || *quota < *least)) least = quota;
  };
  for (const fs::path& group : control_groups(paths.proc, "", root)) bind(quota_v2(group));
  for (const fs::path& group : control_groups(paths.proc, "cpu", root / "cpu")) bind(quota_v1(group));
  return least;
}

std::vector<int> read_memory_nodes(const SystemPaths& paths) {
  std::istringstream lines(read_all(fs::path(paths.proc) / "self/status"));
  const std::string label = "Mems_allowed_list:";
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(label)) continue;
    line.erase(0, line.find_first_not_of(" \t", label.size()));
    return parse_list(line);
  }
  return {};
}

}  // namespace

Limits read_limits(const TopologyOptions& options) {
  Limits limits;
  limits.processors =
      options.usable_processors ? *options.usable_processors : processors_of(read_processor_mask());
  limits.memory_nodes = read_memory_nodes(options.paths);
  limits.processor_quota = read_quota(options.paths);
  return limits;
}

std::vector<int> usable_of(const std::vector<int>& processors, const Limits& limits) {
  if (limits.processors.empty()) return processors;
  std::vector<int> usable;
  for (const int processor : processors) {
    if (std::find(limits.processors.begin(), limits.processors.end(), processor) != limits.processors.end())
      usable.push_back(processor);
  }
  return usable;
}

}  // namespace forebay::internal
