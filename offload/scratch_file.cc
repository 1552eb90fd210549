#include "offload/scratch_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "forebay/log.h"
#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay::internal {
namespace {

// The alignment of direct transfers where the file system does not ask for more. Smaller: drives with
// sectors of 4 KiB refuse. Larger: more of a range's end goes through a bounce buffer.
constexpr std::size_t kDirectAlignment = 4096;

// Tries at a name that is not taken.
constexpr int kNameTriesMax = 100;

struct Opened {
  int descriptor = -1;
  int error = 0;
};

// Without a name from the begin.
Opened open_unnamed(const std::string& directory, int flags) {
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC | flags, 0600);
  return {descriptor, descriptor < 0 ? errno : 0};
}

// With a name that is gone before anything is in the file.
Opened open_unlinked(const std::string& directory, int flags) {
  for (int i = 0; i < kNameTriesMax; ++i) {
    const std::string path =
        directory + "/.forebay-scratch-" + std::to_string(::getpid()) + "-" + std::to_string(i);
    const int descriptor = ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | flags, 0600);
    const int error = errno;
    // Some file systems make the file and then refuse to open it past the page cache.
    if (descriptor < 0 && error == EINVAL && (flags & O_DIRECT) != 0) ::unlink(path.c_str());
    if (descriptor < 0 && error == EEXIST) continue;
    if (descriptor < 0) return {-1, error};
    if (::unlink(path.c_str()) != 0) {
      const int unlink_error = errno;
      ::close(descriptor);
      return {-1, unlink_error};
    }
    return {descriptor, 0};
  }
  return {-1, EEXIST};
}

Opened open_either(const std::string& directory, int flags, bool unnamed) {
  if (unnamed) {
    const Opened opened = open_unnamed(directory, flags);
    // The answers of file systems and kernels that do not know O_TMPFILE.
    const bool unknown = opened.error == EOPNOTSUPP || opened.error == EISDIR || opened.error == ENOENT;
    if (opened.descriptor >= 0 || !unknown) return opened;
  }
  return open_unlinked(directory, flags);
}

// The alignment that the file system asks of direct transfers; 0 when it has none for this file.
std::size_t direct_alignment(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx facts {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 &&
      (facts.stx_mask & STATX_DIOALIGN) != 0) {
    if (facts.stx_dio_offset_align == 0) return 0;
    return std::max<std::size_t>({kDirectAlignment, facts.stx_dio_mem_align, facts.stx_dio_offset_align});
  }
#else
  static_cast<void>(descriptor);
#endif
  return kDirectAlignment;
}

std::string free_text(int descriptor) {
  struct statvfs facts {};
  if (::fstatvfs(descriptor, &facts) != 0) return "free space unknown";
  return format_bytes(static_cast<std::uint64_t>(facts.f_bavail) * facts.f_frsize) + " free";
}

}  // namespace

std::string errno_text(int error) {
  return std::system_category().message(error) + " (errno " + std::to_string(error) + ")";
}

Result<ScratchFile> ScratchFile::create(const std::string& directory, const ScratchFileOptions& options) {
  struct stat facts {};
  if (::stat(directory.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode)) {
    return Status(StatusCode::kInvalidArgument, "cannot keep scratch files in '" + shown_path(directory) +
                                                    "': it is not a directory; make it, or name another");
  }
  Opened opened;
  bool direct = options.direct;
  if (direct) {
    opened = open_either(directory, O_DIRECT, options.unnamed);
    std::size_t alignment = 0;
    if (opened.descriptor >= 0) alignment = direct_alignment(opened.descriptor);
    if (opened.descriptor >= 0 && alignment == 0) {
      ::close(opened.descriptor);
      opened = {-1, EINVAL};
    }
    if (opened.descriptor >= 0) {
      ScratchFile file(directory, opened.descriptor);
      file.direct_ = true;
      file.alignment_bytes_ = alignment;
      return file;
    }
    direct = opened.error != EINVAL;  // EINVAL: the file system has no direct transfers.
  }
  if (!direct) opened = open_either(directory, 0, options.unnamed);
  if (opened.descriptor < 0) {
    return Status(StatusCode::kIoError, "cannot make a scratch file in '" + shown_path(directory) +
                                            "': " + errno_text(opened.error) +
                                            "; see that the directory is writable, or name another");
  }
  return ScratchFile(directory, opened.descriptor);
}

ScratchFile::ScratchFile(ScratchFile&& other) noexcept
    : directory_(std::move(other.directory_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      direct_(other.direct_),
      alignment_bytes_(other.alignment_bytes_),
      bytes_(other.bytes_) {}

ScratchFile& ScratchFile::operator=(ScratchFile&& other) noexcept {
  std::swap(directory_, other.directory_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(direct_, other.direct_);
  std::swap(alignment_bytes_, other.alignment_bytes_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

ScratchFile::~ScratchFile() {
  if (descriptor_ < 0) return;
  // A ring that had it registered lets go of it some time after it has ended; its space is free at once.
  if (bytes_ > 0) shrink(0);
  ::close(descriptor_);
}

Status ScratchFile::grow(std::uint64_t bytes, bool* reserved) {
  *reserved = true;
  if (bytes <= bytes_) return {};
  const auto refuse = [&](StatusCode code, const std::string& why) {
    return Status(code,
                  "cannot take " + format_bytes(bytes - bytes_) + " more in '" + directory_ + "': " + why);
  };
  // Asked beforehand, because exceeding it raises a signal that ends the process.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) {
    return refuse(StatusCode::kOutOfMemory, "a file of this process may have at most " +
                                                format_bytes(limit.rlim_cur) +
                                                "; raise the limit (ulimit -f) or add a directory");
  }
  int error = 0;
  do {
    error = ::fallocate(descriptor_, 0, static_cast<off_t>(bytes_), static_cast<off_t>(bytes - bytes_)) == 0
                ? 0
                : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP || error == ENOSYS) {
    *reserved = false;
    error = ::ftruncate(descriptor_, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  }
  if (error != 0) {
    shrink(bytes_);  // A failed fallocate may have taken a part.
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    return refuse(
        full ? StatusCode::kOutOfMemory : StatusCode::kIoError,
        errno_text(error) + ", " + free_text(descriptor_) +
            (full ? "; free some or name another directory" : "; see the system log about the drive"));
  }
  bytes_ = bytes;
  return {};
}

void ScratchFile::shrink(std::uint64_t bytes) noexcept {
  if (::ftruncate(descriptor_, static_cast<off_t>(bytes)) == 0) {
    bytes_ = bytes;
    return;
  }
  static bool said = false;
  if (!std::exchange(said, true)) {
    log(LogLevel::kWarning, "cannot give space in '%s' back before the store ends: errno %d",
        directory_.c_str(), errno);
  }
}

}  // namespace forebay::internal
