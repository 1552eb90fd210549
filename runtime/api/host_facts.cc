#include "host_facts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

#include "host_limits.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

std::string read_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string read_all(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

std::uint64_t to_number(const std::string& text) {
  return std::strtoull(text.c_str(), nullptr, 10);
}

// The number behind `label` in the first line that has it: "MemTotal:       32 kB", "Node 0 MemFree: 5 kB".
std::uint64_t number_behind(const std::string& text, const std::string& label) {
  const std::size_t found = text.find(label);
  return found == std::string::npos ? 0 : to_number(text.substr(found + label.size()));
}

// Entries of a directory whose names begin with `prefix`, and the rest of each name.
std::vector<std::pair<std::string, fs::path>> entries(const fs::path& directory, const std::string& prefix) {
  std::vector<std::pair<std::string, fs::path>> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix)) found.emplace_back(name.substr(prefix.size()), entry.path());
  }
  return found;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
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

struct Mount {
  std::string device;  // "259:2"
  std::string path;
  std::string file_system;
  std::string source;  // "/dev/nvme0n1p2"
};

// The kernel writes spaces, tabs, newlines and backslashes as three octal digits.
std::string unescape(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && text.find_first_not_of("01234567", i + 1) >= i + 4) {
      plain += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

std::vector<Mount> read_mounts(const fs::path& proc) {
  std::vector<Mount> mounts;
  std::ifstream file(proc / "self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // "36 35 98:0 /root /path options [more ...] - type source options"
    std::istringstream words(line);
    std::string id, parent, root, options, word;
    Mount mount;
    words >> id >> parent >> mount.device >> root >> mount.path >> options;
    while (words >> word && word != "-") {
    }
    if (!(words >> mount.file_system >> mount.source)) continue;
    mount.path = unescape(mount.path);
    mount.source = unescape(mount.source);
    mounts.push_back(std::move(mount));
  }
  return mounts;
}

// The whole drives below a block device: its disk, or those of the volume it is made of. False when one of
// them turns, or is no drive (a loop device, memory).
bool find_drives(const fs::path& device, std::vector<std::string>* drives, int depth = 0) {
  constexpr int kDeepest = 8;  // Volumes on volumes; more would be a loop.
  std::error_code error;
  fs::path path = fs::canonical(device, error);
  if (error || depth > kDeepest) return false;
  if (fs::exists(path / "partition", error)) path = path.parent_path();
  const auto below = entries(path / "slaves", "");
  if (!below.empty()) {
    return std::all_of(below.begin(), below.end(),
                       [&](const auto& entry) { return find_drives(entry.second, drives, depth + 1); });
  }
  const std::string name = path.filename().string();
  for (const char* no_drive : {"loop", "ram", "zram", "nbd", "sr", "fd"}) {
    const std::string prefix = no_drive;
    if (name.starts_with(prefix) && is_number(name.substr(prefix.size()))) return false;
  }
  if (read_line(path / "queue/rotational") != "0") return false;
  if (std::find(drives->begin(), drives->end(), name) == drives->end()) drives->push_back(name);
  return true;
}

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

std::vector<FlashDirectory> read_flash_directories(const HostFactPaths& paths) {
  std::map<std::string, FlashDirectory> by_drive;
  for (const Mount& mount : read_mounts(paths.proc)) {
    // Files may be mounted too, as containers do.
    struct stat status;
    if (::stat(mount.path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) continue;
    // Some file systems have a number of their own; their source names the device.
    const bool is_anonymous = mount.device.starts_with("0:");
    if (is_anonymous && !mount.source.starts_with("/dev/")) continue;
    const fs::path sys = paths.sys;
    std::vector<std::string> drives;
    if (!find_drives(is_anonymous ? sys / "class/block" / fs::path(mount.source).filename()
                                  : sys / "dev/block" / mount.device,
                     &drives)) {
      continue;
    }
    std::sort(drives.begin(), drives.end());
    FlashDirectory directory;
    directory.path = mount.path;
    directory.file_system = mount.file_system;
    directory.is_nvme = true;
    for (const std::string& drive : drives) {
      directory.drive += (directory.drive.empty() ? "" : "+") + drive;
      directory.is_nvme = directory.is_nvme && drive.starts_with("nvme");
    }
    struct statvfs space;
    if (::statvfs(mount.path.c_str(), &space) == 0) {
      directory.free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
    }
    directory.is_writable = can_open(mount.path, 0);
    directory.has_direct = directory.is_writable && can_open(mount.path, O_DIRECT);
    // Of a drive's mount points the one to use: writable, then with room, then with the shortest name.
    FlashDirectory& best = by_drive[directory.drive];
    const auto rank = [](const FlashDirectory& one) {
      return std::make_tuple(one.is_writable, one.free_bytes, -static_cast<std::int64_t>(one.path.size()));
    };
    if (best.path.empty() || rank(directory) > rank(best)) best = std::move(directory);
  }
  std::vector<FlashDirectory> directories;
  for (auto& [drive, directory] : by_drive) directories.push_back(std::move(directory));
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

HostFacts read_host_facts(const HostFactPaths& paths) {
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
