#include "runtime/engine/state/state_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "forebay/error.h"
#include "forebay/log.h"
#include "forebay/output_pipe.h"
#include "forebay/text.h"
#include "runtime/engine/state/state_files.h"

namespace forebay::internal {
namespace {

constexpr const char* kLockName = ".lock";
constexpr std::uint64_t kMostHolderBytes = 512;

// kUnavailable: it says nothing about the file.
[[noreturn]] void io_error(const char* action, const std::string& path, int error) {
  const std::string text =
      "cannot " + std::string(action) + " " + shown_path(path) + ": " + std::strerror(error);
  if (error == EMFILE || error == ENFILE)
    throw Error(StatusCode::kUnavailable, text + "; raise the limit of open files, as by ulimit -n");
  if (error == ENOMEM) throw Error(StatusCode::kUnavailable, text + "; give the host more memory");
  throw Error(StatusCode::kIoError, text + "; check that the directory exists, is writable and has room");
}

[[noreturn]] void io_error(const char* action, const std::string& path) {
  io_error(action, path, errno);
}

[[noreturn]] void corrupt(const std::string& path, const std::string& finding) {
  throw Error(StatusCode::kCorruption,
              "saved state " + shown_path(path) + " is damaged: " + finding + "; load another saved state");
}

int opened_at(int directory, const std::string& name, const std::string& path, int flags,
              mode_t mode = 0644) {
  // Without O_NONBLOCK, a named pipe would wait for its other end.
  const int number = ::openat(directory, name.c_str(), flags | O_CLOEXEC | O_NONBLOCK, mode);
  if (number < 0) io_error("open", path);
  return number;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "an unknown host";
}

constexpr const char* kHolderBegin = "process ";

// The process that a lock's text names, if it is of this host; otherwise 0.
pid_t process_of_this_host(const std::string& holder) {
  if (!holder.starts_with(kHolderBegin)) return 0;
  const std::size_t end = holder.find(" on " + host_name() + ",");
  const std::string number = holder.substr(std::strlen(kHolderBegin), end - std::strlen(kHolderBegin));
  const bool is_number = !number.empty() && number.find_first_not_of("0123456789") == std::string::npos;
  return end == std::string::npos || !is_number ? 0 : static_cast<pid_t>(std::atol(number.c_str()));
}

// Whether another process has the lock that its text does not name: a job writes its own name, and takes a
// write lock.
bool is_lock_of_another(int file, const std::string& holder) {
  struct flock found {};
  found.l_type = F_WRLCK;
  found.l_whence = SEEK_SET;
  if (::fcntl(file, F_OFD_GETLK, &found) == 0 && found.l_type == F_RDLCK) return true;
  const pid_t process = process_of_this_host(holder);
  return process != 0 && (process == ::getpid() || (::kill(process, 0) != 0 && errno == ESRCH));
}

[[noreturn]] void refuse_locked(int file, const std::string& directory, const std::string& path,
                                const std::string& holder) {
  const std::string cannot = "cannot save in " + shown_path(directory) + ": ";
  struct stat facts {};
  if (::fstat(file, &facts) == 0 && facts.st_nlink > 1) {
    throw Error(StatusCode::kUnavailable,
                cannot + "a job holds the lock " + shown_path(path) +
                    (holder.empty() ? "" : " (" + holder + ")") +
                    ", which is a hard link that another directory has too, as after cp -al; if that job "
                    "saves in the other directory, remove this link; if it saves here, give this job a "
                    "directory of its own, or end the other one");
  }
  if (is_lock_of_another(file, holder)) {
    throw Error(
        StatusCode::kUnavailable,
        cannot + "a process that is not named holds a lock on " + shown_path(path) +
            (holder.empty() ? "" : ", which was written last by " + holder) +
            "; lslocks shows the processes that hold locks: end that one, or give this job a directory "
            "of its own");
  }
  throw Error(StatusCode::kUnavailable, cannot + "another job saves its state there" +
                                            (holder.empty() ? "" : " (" + holder + ")") +
                                            "; give this job a directory of its own, or end the other one");
}

// The name may be a hard link to another file of this user, and the lock is written over it.
void check_is_lock(int file, const std::string& path) {
  struct stat facts {};
  std::string begin(std::strlen(kHolderBegin), '\0');
  if (::fstat(file, &facts) == 0 && S_ISREG(facts.st_mode)) {
    const ssize_t count = ::pread(file, begin.data(), begin.size(), 0);  // Less while its holder writes it.
    if (count < 0) io_error("read", path);
    begin.resize(static_cast<std::size_t>(count));
    // Zeros: the host lost its power before the text was on the drive.
    if (std::string_view(kHolderBegin).starts_with(begin) || begin.find_first_not_of('\0') == begin.npos)
      return;
  }
  throw Error(StatusCode::kUnavailable,
              "cannot lock " + shown_path(path) + ": it is no lock of forebay; move that file");
}

// Otherwise the error would be that the file cannot be opened.
void refuse_lock_of_another_user(int directory, const std::string& path) {
  struct stat facts {};
  if (::faccessat(directory, kLockName, R_OK | W_OK, AT_EACCESS) == 0 || errno != EACCES ||
      ::fstatat(directory, kLockName, &facts, AT_SYMLINK_NOFOLLOW) != 0 || facts.st_uid == ::geteuid())
    return;
  throw Error(StatusCode::kUnavailable,
              "cannot lock " + shown_path(path) + ": it is user " + std::to_string(facts.st_uid) +
                  "'s, who saved a state there; give each user a directory of its own");
}

// A user who can open the file can hold a lock on it. Earlier versions made it for all users to read.
void keep_from_others(int file) {
  struct stat facts {};
  const bool is_wide = ::fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && (facts.st_mode & 0077) != 0;
  // A file system may have no modes.
  if (is_wide && facts.st_uid == ::geteuid()) static_cast<void>(::fchmod(file, 0600));
}

// 0, or the error.
int sync_error(int file) {
  while (::fsync(file) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

std::string present_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 32> text{};
  ::gmtime_r(&now, &parts);
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

}  // namespace

StateFile::StateFile(Descriptor descriptor, std::string path)
    : descriptor_(std::move(descriptor)), path_(std::move(path)) {
  struct stat facts {};
  if (::fstat(descriptor_.number(), &facts) != 0) io_error("open", path_);
  if (!S_ISREG(facts.st_mode)) corrupt(path_, "it is not a regular file");
}

std::uint64_t StateFile::bytes() const {
  struct stat facts {};
  if (::fstat(descriptor_.number(), &facts) != 0) io_error("open", path_);
  return static_cast<std::uint64_t>(facts.st_size);
}

void StateFile::write(const void* data, std::uint64_t bytes) {
  const auto* const at = static_cast<const char*>(data);
  std::uint64_t done = 0;
  while ((done += write_all(descriptor_.number(), at + done, bytes - done)) < bytes) {
    // EINVAL: the file system wants larger pages, or it wrote a part of one.
    if (errno != EINVAL || !is_direct() || !set_direct(false)) io_error("write", path_);
  }
}

bool StateFile::is_direct() const {
  const int flags = ::fcntl(descriptor_.number(), F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0;
}

bool StateFile::set_direct(bool direct) const {
  const int flags = ::fcntl(descriptor_.number(), F_GETFL);
  return flags >= 0 &&
         ::fcntl(descriptor_.number(), F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

void StateFile::read_at(std::uint64_t offset, void* data, std::uint64_t bytes) const {
  const ssize_t count = descriptor_.read_at(offset, data, bytes);
  if (count < 0) io_error("read", path_);
  if (static_cast<std::uint64_t>(count) < bytes) corrupt(path_, "it ends early (truncated)");
}

void StateFile::sync() const {
  if (const int error = sync_error(descriptor_.number()); error != 0) io_error("sync", path_, error);
}

void StateFile::unlock() const {
  struct flock lock {};
  lock.l_type = F_UNLCK;
  lock.l_whence = SEEK_SET;
  static_cast<void>(::fcntl(descriptor_.number(), F_OFD_SETLK, &lock));
}

StateDirectory::StateDirectory(Descriptor descriptor, std::string path)
    : descriptor_(std::move(descriptor)), path_(std::move(path)) {}

StateDirectory::StateDirectory(const std::string& path)
    : StateDirectory(Descriptor(opened_at(AT_FDCWD, path, path, O_RDONLY | O_DIRECTORY)), path) {}

StateDirectory StateDirectory::make(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) io_error("make", path, error.value());
  return StateDirectory(path);
}

std::pair<dev_t, ino_t> StateDirectory::identity() const {
  struct stat facts {};
  if (::fstat(descriptor_.number(), &facts) != 0) io_error("open", path_);
  return {facts.st_dev, facts.st_ino};
}

StateDirectory StateDirectory::subdirectory(const std::string& name) const {
  const std::string path = path_ + "/" + name;
  return {Descriptor(opened_at(descriptor_.number(), name, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW)), path};
}

void StateDirectory::make_subdirectory(const std::string& name) const {
  if (::mkdirat(descriptor_.number(), name.c_str(), 0755) != 0) io_error("make", path_ + "/" + name);
}

StateFile StateDirectory::create(const std::string& name) const {
  const std::string path = path_ + "/" + name;
  ::unlinkat(descriptor_.number(), name.c_str(), 0);
  return {Descriptor(opened_at(descriptor_.number(), name, path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW)),
          path};
}

StateFile StateDirectory::open(const std::string& name) const {
  const std::string path = path_ + "/" + name;
  return {Descriptor(opened_at(descriptor_.number(), name, path, O_RDONLY)), path};
}

std::string StateDirectory::read(const std::string& name, std::uint64_t most_bytes) const {
  const StateFile file = open(name);
  const std::uint64_t bytes = file.bytes();
  if (bytes > most_bytes)
    corrupt(file.path(), "it has " + std::to_string(bytes) + " bytes, far more than were written");
  std::string text(bytes, '\0');
  file.read_at(0, text.data(), text.size());
  return text;
}

void StateDirectory::write_synced(const std::string& name, const std::string& text) const {
  StateFile file = create(name);
  file.write(text.data(), text.size());
  file.sync();
}

bool StateDirectory::has(const std::string& name) const {
  struct stat facts {};
  return ::fstatat(descriptor_.number(), name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) == 0;
}

std::vector<std::string> StateDirectory::names() const {
  std::vector<std::string> names;
  const int copy = ::openat(descriptor_.number(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const stream = copy < 0 ? nullptr : ::fdopendir(copy);
  if (stream == nullptr) io_error("list", path_);
  while (const dirent* entry = ::readdir(stream)) names.emplace_back(entry->d_name);
  ::closedir(stream);
  return names;
}

std::string StateDirectory::progress() const {
  std::string text;
  for (const std::string& name : names()) {
    // Opened: a network file system then looks anew.
    const Descriptor file(
        ::openat(descriptor_.number(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
    struct stat facts {};
    if (::fstat(file.number(), &facts) != 0 || !S_ISREG(facts.st_mode)) continue;
    for (const std::int64_t fact : {facts.st_size, facts.st_mtim.tv_sec, facts.st_mtim.tv_nsec})
      text += std::to_string(fact) + " ";
    text += name + "\n";
  }
  return text;
}

void StateDirectory::rename(const std::string& from, const std::string& to) const {
  if (!rename_directory(from, to)) io_error("rename", path_ + "/" + from);
}

bool StateDirectory::rename_directory(const std::string& from, const std::string& to) const {
  if (::renameat(descriptor_.number(), from.c_str(), descriptor_.number(), to.c_str()) == 0) return true;
  if (errno != EXDEV) io_error("rename", path_ + "/" + from);
  return false;
}

void StateDirectory::sync() const {
  const int error = sync_error(descriptor_.number());
  // EINVAL and EOPNOTSUPP: the file system cannot sync a directory by itself. The files in it are synced.
  if (error != 0 && error != EINVAL && error != EOPNOTSUPP) io_error("sync", path_, error);
}

void StateDirectory::remove(const std::string& name) const noexcept {
  try {
    if (!has(name)) return;
    const StateDirectory removed = subdirectory(name);
    for (const std::string& file : removed.names())
      if (is_state_file(file)) ::unlinkat(removed.descriptor_.number(), file.c_str(), 0);
  } catch (const Error&) {
    // It is no directory, or may not be read.
  }
  ::unlinkat(descriptor_.number(), name.c_str(), AT_REMOVEDIR);
}

bool StateDirectory::remove_link(const std::string& name) const noexcept {
  struct stat found {};
  return ::fstatat(descriptor_.number(), name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISLNK(found.st_mode) && ::unlinkat(descriptor_.number(), name.c_str(), 0) == 0;
}

namespace {

// The locks of this process, and how often each was taken. They belong to the descriptors here, so that other
// descriptors of the files may be closed, as a backup of the directory does. A child of fork() has none of
// them: its copies of the descriptors, which would keep the locks after this process, are closed.
struct TakenLocks {
  struct Taken {
    StateFile file;
    int count = 0;
    bool saves = false;
  };
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, Taken> by_directory;
};

TakenLocks& taken_locks() {
  static TakenLocks& locks = *new TakenLocks;  // Until the end of the process: a fork may come at any time.
  static const int has_handlers = ::pthread_atfork([] { locks.mutex.lock(); }, [] { locks.mutex.unlock(); },
                                                   [] {
                                                     locks.by_directory.clear();
                                                     locks.mutex.unlock();
                                                   });
  static_cast<void>(has_handlers);
  return locks;
}

}  // namespace

StateLock::~StateLock() {
  if (!held_) return;
  TakenLocks& locks = taken_locks();
  const std::lock_guard guard(locks.mutex);
  const auto taken = locks.by_directory.find(key_);
  if (taken == locks.by_directory.end()) return;  // Taken before a fork().
  if (saves_) taken->second.saves = false;
  if (--taken->second.count > 0) return;
  taken->second.file.unlock();  // A child that was made just now has its copy still.
  locks.by_directory.erase(taken);
}

StateLock::StateLock(const StateDirectory& directory, bool saves) : saves_(saves) {
  key_ = directory.identity();
  TakenLocks& locks = taken_locks();
  const std::lock_guard guard(locks.mutex);
  if (const auto taken = locks.by_directory.find(key_); taken != locks.by_directory.end()) {
    if (saves && taken->second.saves) {
      throw Error(StatusCode::kUnavailable, "cannot save in " + shown_path(directory.path()) +
                                                ": another engine of this process is saving its state there; "
                                                "give each engine a directory of its own");
    }
    taken->second.saves |= saves;
    ++taken->second.count;
    held_ = true;
    return;
  }

  const std::string path = directory.path() + "/" + kLockName;
  refuse_lock_of_another_user(directory.descriptor_.number(), path);
  Descriptor opened(
      opened_at(directory.descriptor_.number(), kLockName, path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
  const int number = opened.number();
  check_is_lock(number, path);
  StateFile file(std::move(opened), path);
  keep_from_others(number);
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (::fcntl(number, F_OFD_SETLK, &lock) != 0) {
    if (errno != EAGAIN && errno != EACCES) {
      log(LogLevel::kWarning, "cannot lock %s: %s; see to it that no other job saves its state there",
          path.c_str(), std::strerror(errno));
      return;
    }
    std::string holder = directory.read(kLockName, kMostHolderBytes);
    std::erase_if(holder, [](char c) { return c < ' ' || c > '~'; });
    refuse_locked(number, directory.path(), path, holder);
  }
  const std::string text =
      kHolderBegin + std::to_string(::getpid()) + " on " + host_name() + ", since " + present_time() + "\n";
  if (::ftruncate(number, 0) != 0) io_error("write", path);
  file.write(text.data(), text.size());
  locks.by_directory.emplace(key_, TakenLocks::Taken{std::move(file), 1, saves});
  held_ = true;
}

}  // namespace forebay::internal
