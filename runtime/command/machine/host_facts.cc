#include "runtime/command/machine/host_facts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <tuple>
#include <utility>

#include "forebay/drives.h"
#include "runtime/command/host_limits.h"
#include "runtime/topology/system_files.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;
using internal::entries;
using internal::is_number;
using internal::number_behind;
using internal::read_all;
using internal::read_line;

std::uint64_t to_number(const std::string& text) {
  return std::strtoull(text.c_str(), nullptr, 10);
}

std::vector<HostNumaNode> read_numa_nodes(const fs::path& sys) {
  std::vector<HostNumaNode> nodes;
  for (const auto& [number, path] : entries(sys / "devices/system/node", "node")) {
    if (!is_number(number)) continue;
    const std::string memory = read_all(path / "meminfo");
    nodes.push_back({.node = static_cast<int>(to_number(number)),
                     .processors = read_line(path / "cpulist"),
                     .memory_bytes = number_behind(memory, "MemTotal:") * 1024,
                     .free_bytes = number_behind(memory, "MemFree:") * 1024});
  }
  std::sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.node < b.node; });
  return nodes;
}

std::vector<HugePages> read_huge_pages(const fs::path& sys) {
  std::vector<HugePages> sizes;
  for (const auto& [size, path] : entries(sys / "kernel/mm/hugepages", "hugepages-")) {
    sizes.push_back({.page_bytes = to_number(size) * 1024,
                     .count = to_number(read_line(path / "nr_hugepages")),
                     .free_count = to_number(read_line(path / "free_hugepages"))});
  }
  std::sort(sizes.begin(), sizes.end(),
            [](const auto& a, const auto& b) { return a.page_bytes < b.page_bytes; });
  return sizes;
}

// "always [madvise] never" -> "madvise".
std::string chosen_word(const std::string& line) {
  const std::size_t open = line.find('[');
  const std::size_t close = line.find(']');
  return open == std::string::npos || close == std::string::npos || close < open
             ? ""
             : line.substr(open + 1, close - open - 1);
}

// --- drives ---

// Opens a nameless file in the directory; its number, or -1 with errno.
int open_temporary(const std::string& directory, int flags) {
  const int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
  // A file system without such files: one with a name, for a moment.
  std::string path = directory + "/.forebay-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC | flags);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

bool can_open(const std::string& directory, int flags) {
  const int file = open_temporary(directory, flags);
  if (file < 0) return false;
  ::close(file);
  return true;
}

std::vector<FlashDirectory> read_flash_directories(const SystemPaths& paths) {
  std::map<std::vector<std::string>, FlashDirectory> by_drives;
  for (const Mount& mount : read_mounts(paths)) {
    // Files may be mounted too, as containers do.
    struct stat status;
    if (::stat(mount.path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) continue;
    const std::vector<Drive> drives = find_drives(mount, paths);
    const bool is_flash = std::all_of(drives.begin(), drives.end(), [](const Drive& drive) {
      return drive.rotational == false && !drive.is_memory && !drive.is_network && !drive.is_file;
    });
    if (drives.empty() || !is_flash) continue;
    FlashDirectory directory;
    directory.path = mount.path;
    directory.file_system = mount.file_system;
    directory.is_nvme = true;
    for (const Drive& drive : drives) {
      directory.drives.push_back(drive.name);
      directory.is_nvme = directory.is_nvme && drive.name.starts_with("nvme");
    }
    std::error_code error;
    const fs::space_info space = fs::space(mount.path, error);
    if (!error) directory.free_bytes = space.available;
    directory.is_writable = can_open(mount.path, 0);
    directory.has_direct = directory.is_writable && can_open(mount.path, O_DIRECT);
    // The best mount point of a drive: writable, then with most room, then with the shortest name.
    FlashDirectory& best = by_drives[directory.drives];
    const auto rank = [](const FlashDirectory& one) {
      return std::make_tuple(one.is_writable, one.free_bytes, -static_cast<std::int64_t>(one.path.size()));
    };
    if (best.path.empty() || rank(directory) > rank(best)) best = std::move(directory);
  }
  std::vector<FlashDirectory> directories;
  for (auto& [drives, directory] : by_drives) directories.push_back(std::move(directory));
  std::sort(directories.begin(), directories.end(),
            [](const auto& a, const auto& b) { return a.path < b.path; });
  return directories;
}

int count_usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 0;
  return CPU_COUNT(&set);
}

std::string read_processor_model(const fs::path& proc) {
  std::ifstream file(proc / "cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(": ");
    return colon == std::string::npos ? "" : line.substr(colon + 2);
  }
  return "";
}

}  // namespace

HostFacts read_host_facts(const SystemPaths& paths) {
  HostFacts facts;
  const fs::path proc = paths.proc;
  const fs::path sys = paths.sys;
  facts.processor_count = static_cast<int>(std::max(::sysconf(_SC_NPROCESSORS_ONLN), 0L));
  facts.usable_count = count_usable_processors();
  facts.processor_model = read_processor_model(proc);
  const std::string memory = read_all(proc / "meminfo");
  facts.memory_bytes = number_behind(memory, "MemTotal:") * 1024;
  facts.available_bytes = parse_memory_available(memory).value_or(0);
  facts.memlock_bytes = parse_locked_memory_limit(read_all(proc / "self/limits"));
  facts.transparent_huge_pages = chosen_word(read_line(sys / "kernel/mm/transparent_hugepage/enabled"));
  facts.huge_pages = read_huge_pages(sys);
  facts.numa_nodes = read_numa_nodes(sys);
  facts.flash_directories = read_flash_directories(paths);
  return facts;
}

}  // namespace forebay
