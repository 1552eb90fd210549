#include "collectives/rendezvous/store_directory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "collectives/rendezvous/authentication.h"
#include "forebay/output_pipe.h"
#include "forebay/text.h"

namespace forebay::internal {
namespace {

// Several jobs of one user may make and remove the parent directory at the same time. A try that finds it
// removed makes it again.
constexpr int kMakeTries = 16;

// The mode of a directory that a rank has made. Where nobody else can write, the sticky bit has no other
// meaning, so it tells the last rank to leave that it may remove the directory.
constexpr mode_t kMadeMode = S_IRWXU | S_ISVTX;

bool is_made_by_ranks(const std::string& path) {
  struct stat facts {};
  return lstat(path.c_str(), &facts) == 0 && (facts.st_mode & ~S_IFMT) == kMadeMode &&
         facts.st_uid == geteuid();
}

Status io_error(const std::string& what) {
  return Status(StatusCode::kIoError, what, ": ", std::strerror(errno),
                "; set FOREBAY_STORE to a directory that every rank can write");
}

// Ok when `path` is a directory that nobody else can put files into.
Status check_private(const std::string& path) {
  struct stat facts {};
  if (lstat(path.c_str(), &facts) != 0) return io_error("cannot look at the store directory " + path);
  if (S_ISLNK(facts.st_mode)) {
    return invalid_argument("the store ", path,
                            " is a link; set FOREBAY_STORE to the directory that it leads to");
  }
  if (!S_ISDIR(facts.st_mode)) {
    return invalid_argument("the store ", path,
                            " is not a directory; set FOREBAY_STORE to a directory of your own");
  }
  const bool shared = (facts.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if (shared && (facts.st_mode & S_ISVTX) != 0) {
    return invalid_argument("the store directory ", path,
                            " is one that all users share; set FOREBAY_STORE to a new "
                            "directory in it, such as ",
                            path, path.ends_with('/') ? "" : "/", "forebay-run-1, which the ranks make");
  }
  if (facts.st_uid != geteuid()) {
    return invalid_argument("the store directory ", path, " belongs to user ", facts.st_uid, ", not to ",
                            geteuid(), "; set FOREBAY_STORE to a directory of your own");
  }
  if (shared) {
    return invalid_argument(
        "other users can write to the store directory ", path,
        "; set FOREBAY_STORE to a new directory where only you can write, which the ranks make");
  }
  return {};
}

// Ok when no other user can replace the contents of `path`, or lead ranks elsewhere: the directory, and the
// link where it is one, belongs to this user or root, and others cannot write there unless it is sticky, as
// /tmp is. Ok when it is not there.
Status check_parent(const std::string& path) {
  constexpr char kAdvice[] =
      "; set XDG_RUNTIME_DIR to a directory of your own, or FOREBAY_STORE to a directory elsewhere";
  const auto is_trusted = [](const struct stat& facts) {
    return facts.st_uid == geteuid() || facts.st_uid == 0;
  };
  const std::string shown = shown_path(path) + ", the parent of the store directory, ";
  struct stat facts {};
  if (path.empty() || lstat(path.c_str(), &facts) != 0) return {};
  if (S_ISLNK(facts.st_mode) && !is_trusted(facts))
    return invalid_argument(shown, "is a link of user ", facts.st_uid, ", who can change it", kAdvice);
  // The checked directory is the one that an open descriptor has.
  const Descriptor opened(
      ::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC | (S_ISLNK(facts.st_mode) ? 0 : O_NOFOLLOW)));
  if (!opened.valid() && errno == ENOENT) return {};
  if (!opened.valid() || fstat(opened.number(), &facts) != 0) {
    return io_error("cannot look at " + shown_path(path) + ", the parent of the store directory");
  }
  if (!is_trusted(facts))
    return invalid_argument(shown, "belongs to user ", facts.st_uid, ", not to ", geteuid(), kAdvice);
  if ((facts.st_mode & (S_IWGRP | S_IWOTH)) == 0 || (facts.st_mode & S_ISVTX) != 0) return {};
  return invalid_argument(shown, "is one that other users can write to, so they can replace its contents",
                          kAdvice);
}

}  // namespace

Result<std::unique_ptr<StoreDirectory>> StoreDirectory::open(const std::string& path) {
  if (path.empty()) {
    return invalid_argument(
        "no store directory given; set FOREBAY_STORE to a directory that every rank sees");
  }
  const std::string parent = std::filesystem::path(path).parent_path().string();
  bool made = false;
  bool made_parent = false;
  for (int i = 0;; ++i) {
    // Nothing is made in a directory of another user.
    FOREBAY_RETURN_IF_ERROR(check_parent(parent));
    if (mkdir(path.c_str(), kMadeMode) == 0) {
      made = true;
      break;
    }
    if (errno == EEXIST) break;
    if (errno != ENOENT || i == kMakeTries || parent.empty()) {
      return io_error("cannot make the store directory " + path);
    }
    if (mkdir(parent.c_str(), kMadeMode) == 0) {
      made_parent = true;
    } else if (errno != EEXIST) {
      return io_error("cannot make the directory " + parent);
    }
  }
  FOREBAY_RETURN_IF_ERROR(check_parent(parent));
  FOREBAY_RETURN_IF_ERROR(check_private(path));
  made = made || is_made_by_ranks(path);
  made_parent = made_parent || is_made_by_ranks(parent);
  return std::unique_ptr<StoreDirectory>(new StoreDirectory(path, made, made_parent));
}

namespace {

// How often the locks are looked at. Shorter: ranks that wait load a shared file system. Longer: a killed
// rank is noticed later.
constexpr std::chrono::milliseconds kLookPeriod{50};

constexpr char kHere[] = "here.";
constexpr char kTwice[] = "twice.";
constexpr std::size_t kGenerationLengthMin = 16;

// How long the last rank of a failed run waits for another that is about to end.
constexpr std::chrono::milliseconds kDyingMax{500};
constexpr std::chrono::milliseconds kSweepPeriod{5};

std::string here_name(int rank) {
  return kHere + std::to_string(rank);
}
std::string twice_name(int rank) {
  return kTwice + std::to_string(rank);
}

// Names this process: a word that no other process has, a colon, the boot id of its host, and then its id and
// host for a reader.
std::string identity() {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return hexadecimal(random_digest()).substr(0, 16) + ":" + boot + " process " + std::to_string(getpid()) +
         " on " + host;
}
std::string shown(const std::string& identity) {
  return identity.substr(std::min(identity.size(), identity.find(' ') + 1));
}
// Empty when it is not known.
std::string boot_of(const std::string& identity) {
  const std::string word = identity.substr(0, identity.find(' '));
  const std::size_t colon = word.find(':');
  return colon == std::string::npos ? "" : word.substr(colon + 1);
}

struct flock whole_file(short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

// Whether a process holds the lock of the file. Does not take it.
bool is_held(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct flock lock = whole_file(F_RDLCK);
  return file.valid() && fcntl(file.number(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// Locks that show that a rank is there. They belong to descriptors, which a child of fork() has too and would
// keep after this process, so a child gives its copies up; the numbers stay taken, since objects have them.
struct PresenceFiles {
  std::mutex mutex;
  std::set<int> numbers;
};
PresenceFiles& presence_files() {
  static PresenceFiles& files =
      *new PresenceFiles;  // Until the end of the process: a fork may come at any time.
  static const int has_handlers = ::pthread_atfork([] { files.mutex.lock(); }, [] { files.mutex.unlock(); },
                                                   [] {
                                                     const int nothing =
                                                         ::open("/dev/null", O_RDWR | O_CLOEXEC);
                                                     for (const int number : files.numbers)
                                                       static_cast<void>(::dup3(nothing, number, O_CLOEXEC));
                                                     if (nothing >= 0) ::close(nothing);
                                                     files.numbers.clear();
                                                     files.mutex.unlock();
                                                   });
  static_cast<void>(has_handlers);
  return files;
}

bool is_named(int file, const std::string& path) {
  struct stat open_one {};
  struct stat named {};
  return fstat(file, &open_one) == 0 && stat(path.c_str(), &named) == 0 && open_one.st_dev == named.st_dev &&
         open_one.st_ino == named.st_ino;
}

}  // namespace

Status StoreDirectory::come(const Participant& who) {
  rank_ = who.rank;
  size_ = who.size;
  const std::string path = path_of(here_name(rank_));
  const std::string me = identity();
  for (int i = 0; i < kMakeTries; ++i) {
    Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!file.valid()) return io_error("cannot make a file in the store directory " + path_);
    const struct flock lock = whole_file(F_WRLCK);
    if (fcntl(file.number(), F_OFD_SETLK, &lock) != 0) {
      if (errno != EAGAIN && errno != EACCES) return {};
      const std::string other = read(here_name(rank_)).value_or("");
      // That process has the lock and has not written yet, or has ended meanwhile.
      if (other.empty()) continue;
      FOREBAY_RETURN_IF_ERROR(write(twice_name(rank_), other + "\n" + me));
      const std::lock_guard guard(mutex_);
      return status_ = came_twice(rank_, other, me);
    }
    if (!is_named(file.number(), path)) continue;  // Its earlier owner has removed it.
    const bool written = ftruncate(file.number(), 0) == 0 &&
                         ::write(file.number(), me.data(), me.size()) == static_cast<ssize_t>(me.size());
    presence_ = std::move(file);
    {
      const std::lock_guard guard(presence_files().mutex);
      presence_files().numbers.insert(presence_.number());
    }
    const std::lock_guard guard(mutex_);
    seen_[rank_] = me;
    if (!written) return io_error("cannot write " + path);
    return {};
  }
  return {};
}

Status StoreDirectory::came_twice(int rank, const std::string& first, const std::string& second) const {
  return invalid_argument("two processes came to ", path_, " as rank ", rank, ": ", shown(first), " and ",
                          shown(second),
                          "; give every process a rank of its own, and every run a store of its own");
}

Status StoreDirectory::look() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) {
      // Without a file it has not come, or has left: in order, or because it was told that it came twice.
      const bool held = is_held(path_of(here_name(rank)));
      const std::string who = read(here_name(rank)).value_or("");
      const auto seen = seen_.find(rank);
      if (held && !who.empty()) {
        seen_[rank] = who;
      } else if (!held && seen != seen_.end() && seen->second == who) {
        return Status(StatusCode::kPeerLost, "in ", path_, ": rank ", rank, " died (", shown(who),
                      ") before all were ready; see why it ended");
      }
    }
    const auto seen = seen_.find(rank);
    if (seen == seen_.end()) continue;
    const std::string twice = read(twice_name(rank)).value_or("");
    if (twice.starts_with(seen->second + "\n"))
      return came_twice(rank, seen->second, twice.substr(seen->second.size() + 1));
  }
  return {};
}

std::string StoreDirectory::presence() const {
  if (!presence_.valid()) return {};
  const std::lock_guard lock(mutex_);
  return seen_.at(rank_);
}

void StoreDirectory::expect(int rank, const std::string& presence) {
  if (!presence_.valid() || presence.empty()) return;
  const std::lock_guard lock(mutex_);
  const std::string boot = boot_of(presence);
  if (!boot.empty() && boot == boot_of(seen_.at(rank_))) seen_[rank] = presence;
}

Status StoreDirectory::status() {
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (!status_.ok() || rank_ < 0 || now < next_look_) return status_;
  next_look_ = now + kLookPeriod;
  return status_ = look();
}

void StoreDirectory::remember(const std::string& name) {
  const std::lock_guard lock(names_mutex_);
  known_.insert(name);
}

bool StoreDirectory::sweep() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_))
    names.push_back(entry.path().filename());
  const auto is_of_a_rank = [](const std::string& name, std::string_view prefix) {
    return name.starts_with(prefix) && name.size() > prefix.size() &&
           name.find_first_not_of("0123456789", prefix.size()) == std::string::npos;
  };
  const auto is_presence = [&](const std::string& name) { return is_of_a_rank(name, kHere); };
  for (const std::string& name : names) {
    if (is_presence(name) && is_held(path_of(name))) return false;
  }
  // Texts with names that begin with the run's generation are of this run.
  std::set<std::string> runs;
  for (const std::string& name : known_) {
    const std::size_t dot = name.find('.');
    if (dot != std::string::npos && dot >= kGenerationLengthMin) runs.insert(name.substr(0, dot + 1));
  }
  for (const std::string& name : names) {
    const bool of_this_run = known_.contains(name) || runs.contains(name.substr(0, name.find('.') + 1));
    if (is_presence(name) || is_of_a_rank(name, kTwice) || of_this_run) unlink(path_of(name).c_str());
  }
  return true;
}

StoreDirectory::~StoreDirectory() {
  if (presence_.valid()) {
    remove(here_name(rank_));
    {
      const std::lock_guard guard(presence_files().mutex);
      presence_files().numbers.erase(presence_.number());
      presence_.reset();
    }
    try {
      // Peers hear of the end of a process before its locks are released.
      const auto limit =
          std::chrono::steady_clock::now() + (keeps_ ? kDyingMax : std::chrono::milliseconds(0));
      while (!sweep() && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(kSweepPeriod);
    } catch (const std::exception&) {
      // The directory cannot be read any more, or there is no memory: the files stay.
    }
  }
  if (made_) rmdir(path_.c_str());
  if (made_parent_) rmdir(std::filesystem::path(path_).parent_path().c_str());
}

Result<std::string> StoreDirectory::write_temporary(std::string_view content) {
  static std::atomic<unsigned> counter{0};
  // Ranks on several hosts may share a process id, so the host is part of the name.
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  const std::string name = path_of(std::string(".") + host + "." + std::to_string(getpid()) + "." +
                                   std::to_string(counter.fetch_add(1)));
  const int descriptor = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (descriptor < 0) return io_error("cannot make a file in the store directory " + path_);
  Status status;
  if (write_all(descriptor, content.data(), content.size()) < content.size())
    status = io_error("cannot write " + name);
  // A network file system may report only now that it could not write.
  if (close(descriptor) != 0 && status.ok()) status = io_error("cannot write " + name);
  if (status.ok()) return name;
  unlink(name.c_str());
  return status;
}

Status StoreDirectory::write(const std::string& name, std::string_view content) {
  remember(name);
  FOREBAY_ASSIGN_OR_RETURN(std::string temporary, write_temporary(content));
  if (rename(temporary.c_str(), path_of(name).c_str()) != 0) {
    Status status = io_error("cannot write " + path_of(name));
    unlink(temporary.c_str());
    return status;
  }
  return {};
}

std::optional<std::string> StoreDirectory::read(const std::string& name) {
  const Descriptor file(::open(path_of(name).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file.valid()) return std::nullopt;
  std::string content;
  char buffer[4096];
  ssize_t count = 0;
  do {
    count = ::read(file.number(), buffer, sizeof(buffer));
    if (count > 0) content.append(buffer, static_cast<std::size_t>(count));
  } while (count > 0 || (count < 0 && errno == EINTR));
  if (count < 0) return std::nullopt;
  remember(name);
  return content;
}

std::optional<std::string> StoreDirectory::write_once(const std::string& name, std::string_view content) {
  remember(name);
  {
    const std::lock_guard lock(names_mutex_);
    keeps_ = true;
  }
  Result<std::string> temporary = write_temporary(content);
  if (temporary.ok()) {
    // link() refuses an existing name, on network file systems too, so exactly one rank is the first.
    static_cast<void>(link(temporary.value().c_str(), path_of(name).c_str()));
    unlink(temporary.value().c_str());
  }
  return read(name);
}

void StoreDirectory::remove(const std::string& name) noexcept {
  unlink(path_of(name).c_str());
}

}  // namespace forebay::internal
