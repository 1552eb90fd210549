#include "collectives/launch/runtime_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace forebay::internal {
namespace {

constexpr char kPrefix[] = "forebay-meeting-";
// Another launcher may take a directory without a lock yet for an old one and remove it; then another is
// made.
constexpr int kMakeTries = 16;

// The directory, locked, or nothing if it belongs to another user, is in use, or is gone. `how`: LOCK_NB to
// look only.
Descriptor lock_directory(const std::string& path, int how) {
  Descriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!directory.valid()) return {};
  struct stat facts {};
  struct stat named {};
  if (fstat(directory.number(), &facts) == 0 && facts.st_uid == geteuid() &&
      flock(directory.number(), LOCK_EX | how) == 0 && stat(path.c_str(), &named) == 0 &&
      named.st_dev == facts.st_dev && named.st_ino == facts.st_ino) {
    return directory;
  }
  return {};
}

void remove_whole(const std::string& path) noexcept {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

void remove_abandoned(const std::string& parent) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(parent, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(kPrefix)) continue;
    const Descriptor lock = lock_directory(entry->path().string(), LOCK_NB);
    if (lock.valid()) remove_whole(entry->path().string());
  }
}

}  // namespace

std::string runtime_directory(const std::string& wanted) {
  struct stat facts {};
  // In containers the variable is often set although the directory is missing.
  const bool usable = !wanted.empty() && stat(wanted.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode) &&
                      facts.st_uid == geteuid();
  return usable ? wanted : "/tmp";
}

Result<std::unique_ptr<MeetingDirectory>> MeetingDirectory::create(const std::string& parent) {
  remove_abandoned(parent);
  std::string path;
  for (int i = 0; i < kMakeTries; ++i) {
    path = parent + "/" + kPrefix + "XXXXXX";
    if (mkdtemp(path.data()) == nullptr) break;
    Descriptor lock = lock_directory(path, 0);
    if (lock.valid())
      return std::unique_ptr<MeetingDirectory>(new MeetingDirectory(std::move(path), std::move(lock)));
  }
  return Status(StatusCode::kIoError, "cannot make a directory like ", path,
                " for the ranks to meet: ", std::strerror(errno), "; free some space or set XDG_RUNTIME_DIR");
}

MeetingDirectory::~MeetingDirectory() {
  remove_whole(path_);
}

}  // namespace forebay::internal
