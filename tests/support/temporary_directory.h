// Directories of a test's own, in TMPDIR.
#pragma once

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace forebay::testing {

// A new directory named forebay-NAME-XXXXXX. Errors: throws std::runtime_error if TMPDIR cannot be written.
inline std::string make_temporary_directory(const std::string& name) {
  std::error_code error;
  std::string path = std::filesystem::temp_directory_path(error) / ("forebay-" + name + "-XXXXXX");
  if (error || ::mkdtemp(path.data()) == nullptr) {
    throw std::runtime_error("cannot make the directory " + path + ": " +
                             (error ? error.message() : std::strerror(errno)) +
                             "; set TMPDIR to a directory that tests may write to");
  }
  return path;
}

// A directory that is gone with this object.
class TemporaryDirectory {
 public:
  TemporaryDirectory() : path_(make_temporary_directory("test")) {}
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  const std::string path_;
};

}  // namespace forebay::testing
