// Whether a thread of this process waits. Says nothing about what it waits for.
#pragma once

#include <sys/types.h>

#include <fstream>
#include <string>

namespace forebay::testing {

// Whether this thread of the process waits for something. True where the system does not tell.
inline bool is_waiting(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string stat;
  std::getline(file, stat);
  // "NUMBER (NAME) STATE ...".
  const std::size_t end = stat.rfind(") ");
  return end == std::string::npos || stat[end + 2] == 'S';
}

}  // namespace forebay::testing
