// Directories of this user's runs on this host.
#pragma once

#include <memory>
#include <string>

#include "forebay/descriptor.h"
#include "forebay/status.h"

namespace forebay::internal {

// Their parent: `wanted`, the user's XDG_RUNTIME_DIR, if it exists, else /tmp.
std::string runtime_directory(const std::string& wanted);

// A new private directory in which the ranks of one launcher meet; its end removes it with its contents. A
// killed launcher cannot remove its directory, so each launcher first removes those of launchers that are
// gone: a living launcher holds a lock on its directory, which ends with the process. A file in the directory
// names its inode, so that no directory of the user's own is taken for one of these.
class MeetingDirectory {
 public:
  // Errors: kIoError.
  static Result<std::unique_ptr<MeetingDirectory>> create(const std::string& parent);
  ~MeetingDirectory();
  MeetingDirectory(const MeetingDirectory&) = delete;
  MeetingDirectory& operator=(const MeetingDirectory&) = delete;

  const std::string& path() const noexcept { return path_; }

 private:
  MeetingDirectory(std::string path, Descriptor lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  const std::string path_;
  const Descriptor lock_;  // A lock on the directory itself.
};

}  // namespace forebay::internal
