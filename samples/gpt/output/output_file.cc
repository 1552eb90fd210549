#include "output/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "forebay/error.h"
#include "forebay/output_pipe.h"
#include "forebay/text.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

std::atomic<bool> output_has_failed{false};

constexpr int kLinksMax = 40;  // Linux's own limit. Fewer: we would refuse chains that open() follows.
constexpr int kNamesMax =
    16;  // Random names to try. Fewer: a coincidence could fail the run. More: no benefit.

[[noreturn]] void cannot_write(
    const std::string& path, const std::string& found,
    const char* advice = "give a path in a directory that exists, may be written and has room") {
  throw Error(StatusCode::kIoError, "cannot write " + shown_path(path) + ": " + found + "; " + advice);
}

// Follows symbolic links from `path`, even if the last one leads to no file yet.
std::string follow_links(const std::string& path) {
  fs::path target = path;
  for (int i = 0; i < kLinksMax; ++i) {
    std::error_code error;
    if (!fs::is_symlink(target, error)) return target.string();
    const fs::path next = fs::read_symlink(target, error);
    if (error) cannot_write(path, error.message());
    target = target.parent_path() / next;  // An absolute `next` replaces the directory.
  }
  cannot_write(path, std::strerror(ELOOP));
}

struct Found {
  bool exists = false;
  bool regular = false;
  mode_t permissions = 0;
};

Found look_at(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) cannot_write(path, std::strerror(errno));
    return {};
  }
  if (S_ISDIR(status.st_mode)) cannot_write(path, "it is a directory");
  if (::access(path.c_str(), W_OK) != 0) cannot_write(path, std::strerror(errno));
  return {.exists = true, .regular = S_ISREG(status.st_mode), .permissions = status.st_mode & 07777};
}

}  // namespace

OutputFile::OutputFile(const std::string& path, Links links) : path_(path) {
  if (links == Links::kReplace) {
    target_ = path_;
    create_temporary();
    return;
  }
  const Found found = look_at(path_);
  if (found.exists && !found.regular) {
    file_ = open_output_pipe(path_.c_str());
    if (file_ < 0 && errno == ENXIO)
      cannot_write(path_, "no process reads from it", "start the reader first");
    if (file_ < 0) fail("opening it", errno);
    return;
  }
  target_ = follow_links(path_);
  create_temporary();
  if (found.exists && ::fchmod(file_, found.permissions) != 0) fail("keeping its permissions", errno);
}

void OutputFile::create_temporary() {
  std::random_device random;
  for (int i = 0; i < kNamesMax; ++i) {
    char suffix[48];
    std::snprintf(suffix, sizeof(suffix), ".tmp.%ld-%08x", static_cast<long>(::getpid()), random());
    temporary_ = target_ + suffix;
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (file_ >= 0) return;
    if (errno != EEXIST) break;
  }
  const int error = errno;
  temporary_.clear();  // Another process owns that name.
  fail("creating a file beside it", error);
}

OutputFile::~OutputFile() {
  if (file_ < 0) return;
  ::close(file_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::write(const void* data, std::size_t bytes) {
  const std::size_t written = write_all(file_, data, bytes);
  written_bytes_ += written;
  if (written < bytes) fail("writing", errno);
}

void OutputFile::finish() {
  if (!temporary_.empty()) {
    if (::fsync(file_) != 0) fail("syncing", errno);
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("renaming", errno);
    temporary_.clear();
  }
  if (::close(std::exchange(file_, -1)) != 0) fail("closing", errno);
}

void OutputFile::check(const std::string& path) {
  const Found found = look_at(path);
  if (!found.exists || found.regular) const OutputFile trial(path);
}

void OutputFile::check_regular(const std::string& path) {
  const Found found = look_at(path);
  if (found.exists && !found.regular) {
    cannot_write(path, "it is not a regular file", "give the path of a regular file, or of none yet");
  }
  const OutputFile trial(path);
}

void OutputFile::fail(const std::string& action, int error) {
  // A constructor that throws runs no destructor.
  if (file_ >= 0) ::close(std::exchange(file_, -1));
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
  const std::string found = action + " failed: " + std::strerror(error);
  if (error != EFBIG) cannot_write(path_, found);
  cannot_write(path_, found + " after " + std::to_string(written_bytes_) + " bytes",
               "raise the limit of a file's size (ulimit -f)");
}

void write_file(const std::string& path, const std::string& text, OutputFile::Links links) {
  OutputFile file(path, links);
  file.write(text.data(), text.size());
  file.finish();
}

void note_output_failed() noexcept {
  output_has_failed = true;
}
bool output_failed() noexcept {
  return output_has_failed;
}

}  // namespace forebay::gpt
