// Directories of this user's runs on this host.
#pragma once

#include <memory>
#include <string>

#include "forebay/status.h"

namespace forebay::internal {

// Where they go: `wanted`, the user's XDG_RUNTIME_DIR, when it is there, else /tmp.
std::string runtime_directory(const std::string& wanted);

// A new private directory in which the ranks of one launcher meet, removed with all that is in it. A launcher
// that is killed cannot remove its own, so each one first removes those of launchers that are gone: a living
// one holds a lock on its own, which ends with the process.
class MeetingDirectory {
 public:
  // Errors: kIoError.
  static Result<std::unique_ptr<MeetingDirectory>> create(const std::string& parent);
  ~MeetingDirectory();
  MeetingDirectory(const MeetingDirectory&) = delete;
  MeetingDirectory& operator=(const MeetingDirectory&) = delete;

  const std::string& path() const noexcept { return path_; }

 private:
  MeetingDirectory(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  const std::string path_;
  const int lock_;  // Of the directory itself.
};

}  // namespace forebay::internal
