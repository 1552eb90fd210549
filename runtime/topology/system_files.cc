#include "runtime/topology/system_files.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace forebay::internal {

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

std::vector<std::pair<std::string, fs::path>> entries(const fs::path& directory, const std::string& prefix) {
  std::vector<std::pair<std::string, fs::path>> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix)) found.emplace_back(name.substr(prefix.size()), entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

std::optional<int> to_int(const std::string& text) {
  constexpr std::size_t kDigitsMax = 9;
  const std::string digits = text.starts_with('-') ? text.substr(1) : text;
  if (!is_number(digits) || digits.size() > kDigitsMax) return std::nullopt;
  return std::atoi(text.c_str());
}

std::vector<int> parse_list(const std::string& text) {
  constexpr int kLargest = 1'000'000;
  std::vector<int> numbers;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const std::size_t dash = part.find('-');
    const std::optional<int> first = to_int(part.substr(0, dash));
    const std::optional<int> last = dash == std::string::npos ? first : to_int(part.substr(dash + 1));
    if (!first || !last || *last > kLargest) continue;
    for (int number = *first; number <= *last; ++number) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

std::vector<fs::path> control_groups(const fs::path& proc, const std::string& controller,
                                     const fs::path& root) {
  std::vector<fs::path> groups;
  std::istringstream lines(read_all(proc / "self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // "hierarchy:controllers:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.size() <= second + 1 || line[second + 1] != '/') continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers.find("," + controller + ",") == std::string::npos) continue;
    fs::path group = line.substr(second + 1);
    if (line.find("/..", second) != std::string::npos) group = "/";  // Outside the container's own root.
    for (; group.has_relative_path(); group = group.parent_path())
      groups.push_back(root / group.relative_path());
    groups.push_back(root);
  }
  return groups;
}

std::uint64_t number_behind(const std::string& text, const std::string& label) {
  const std::size_t found = text.find(label);
  return found == std::string::npos ? 0 : std::strtoull(text.c_str() + found + label.size(), nullptr, 10);
}

}  // namespace forebay::internal
