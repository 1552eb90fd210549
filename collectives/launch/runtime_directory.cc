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
// Written once the directory is locked. A launcher that is killed before that leaves an empty directory.
constexpr char kMarker[] = ".made-by-forebay";

// The directory, locked, or nothing if it belongs to another user, is in use, or is gone.
Descriptor lock_directory(const std::string& path) {
  Descriptor directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!directory.valid()) return {};
  struct stat facts {};
  struct stat named {};
  if (fstat(directory.number(), &facts) == 0 && facts.st_uid == geteuid() &&
      flock(directory.number(), LOCK_EX | LOCK_NB) == 0 && stat(path.c_str(), &named) == 0 &&
      named.st_dev == facts.st_dev && named.st_ino == facts.st_ino) {
    return directory;
  }
  return {};
}

// The text of the marker: it fits no other directory, even a copy.
std::string marker_text(int directory) {
  struct stat facts {};
  if (fstat(directory, &facts) != 0) return {};
  return "a directory of forebay's launcher, inode " + std::to_string(facts.st_dev) + ":" +
         std::to_string(facts.st_ino) + "; removed once the launcher has ended\n";
}

bool mark(int directory) {
  const Descriptor file(
      openat(directory, kMarker, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  const std::string text = marker_text(directory);
  return file.valid() && write(file.number(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

bool is_marked(int directory) {
  const Descriptor file(openat(directory, kMarker, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  const std::string text = marker_text(directory);
  std::string found(text.size() + 1, '\0');
  const ssize_t count = file.valid() ? read(file.number(), found.data(), found.size()) : -1;
  return count == static_cast<ssize_t>(text.size()) && found.compare(0, text.size(), text) == 0;
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
    const Descriptor lock = lock_directory(entry->path().string());
    if (lock.valid() && is_marked(lock.number())) remove_whole(entry->path().string());
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
  std::string path = parent + "/" + kPrefix + "XXXXXX";
  if (mkdtemp(path.data()) != nullptr) {
    Descriptor lock = lock_directory(path);
    if (lock.valid() && mark(lock.number()))
      return std::unique_ptr<MeetingDirectory>(new MeetingDirectory(std::move(path), std::move(lock)));
    const int reason = errno;
    remove_whole(path);
    errno = reason;
  }
  return Status(StatusCode::kIoError, "cannot make a directory like ", path,
                " for the ranks to meet: ", std::strerror(errno), "; free some space or set XDG_RUNTIME_DIR");
}

MeetingDirectory::~MeetingDirectory() {
  remove_whole(path_);
}

}  // namespace forebay::internal
