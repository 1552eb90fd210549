#include "runtime/command/run/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "forebay/output_pipe.h"
#include "forebay/text.h"

namespace forebay {
namespace {

Status cannot_write(const std::string& path, const std::string& reason,
                    const char* advice = "name a place that can be written to") {
  return {StatusCode::kIoError, "cannot write " + shown_path(path) + ": " + reason + "; " + advice};
}

Status write_text(int file, const std::string& text) {
  if (write_all(file, text.data(), text.size()) == text.size()) return {};
  return {StatusCode::kIoError, std::strerror(errno)};
}

Status refusal(const std::string& option, const std::string& path, const std::string& reason) {
  return {StatusCode::kInvalidArgument, "cannot write " + option + " " + shown_path(path) + ": " + reason};
}

// Why a file that is there may not be written over; empty: it is empty or begins as it should.
std::string why_to_keep(const std::string& option, const std::string& path, std::string_view beginning) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    return std::string("the file exists and cannot be read: ") + std::strerror(errno) + "; name another";
  }
  std::string found(beginning.size(), '\0');
  const ssize_t count = ::read(file, found.data(), found.size());
  ::close(file);
  if (count == 0 || found == beginning) return {};
  return "the file was not written by " + option + ", and is not overwritten; name another file or remove it";
}

// Why no file can be made there; empty: it is a directory.
std::string directory_problem(const std::string& directory) {
  struct stat facts {};
  if (::stat(directory.c_str(), &facts) == 0) {
    return S_ISDIR(facts.st_mode) ? "" : shown_path(directory) + " is no directory; name a file in one";
  }
  if (errno == ENOENT) return shown_path(directory) + " does not exist; make it first";
  return shown_path(directory) + " cannot be read: " + std::strerror(errno) +
         "; name a place that can be written to";
}

// Behind a link is where the file lies; the link stays.
std::string place_of(const std::string& path) {
  std::error_code error;
  const std::filesystem::path place = std::filesystem::canonical(path, error);
  return error ? path : place.string();
}

// A new file beside `place`, which others cannot read: reports hold command lines, which may hold secrets.
// Sets `partial` to its name. Errors: -1 and errno.
int open_partial(const std::string& place, std::string* partial) {
  *partial = place + ".partial-XXXXXX";
  return ::mkostemp(partial->data(), O_CLOEXEC);
}

// As rename(), where nothing has the name `to`. Errors: EEXIST.
int rename_to_new(const char* from, const char* to) {
  if (::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return -1;
  // A file system that does not know the flag.
  struct stat facts {};
  if (::lstat(to, &facts) == 0) {
    errno = EEXIST;
    return -1;
  }
  return errno == ENOENT ? ::rename(from, to) : -1;
}

// Writes a new file and gives it the name `place`. `path` is for messages.
Status write_whole(const std::string& path, const std::string& place,
                   const std::function<Status(int file)>& write, int (*rename)(const char*, const char*)) {
  std::string partial;
  const int file = open_partial(place, &partial);
  if (file < 0) return cannot_write(path, std::strerror(errno));
  std::string reason;
  if (const Status written = write(file); !written.ok()) reason = written.message();
  if (::close(file) != 0 && reason.empty()) reason = std::strerror(errno);
  if (reason.empty() && rename(partial.c_str(), place.c_str()) == 0) return {};
  const bool is_taken = reason.empty() && errno == EEXIST;
  if (reason.empty()) reason = std::strerror(errno);
  (void)::unlink(partial.c_str());
  return is_taken ? cannot_write(path, reason, "name another, or remove it") : cannot_write(path, reason);
}

}  // namespace

Status make_report_directory(const std::string& directory) {
  std::error_code error;
  // Only the last directory is made: a missing parent is probably a misspelled path.
  std::filesystem::create_directory(directory, error);
  if (error) {
    return {StatusCode::kIoError, "cannot make --report " + directory + ": " + error.message() +
                                      "; name a directory in one that exists and can be written to"};
  }
  for (const char* file : {kReportSummary, kReportPage, kReportJson}) {
    // A link is one too, wherever it leads.
    if (std::filesystem::symlink_status(directory + "/" + file, error).type() ==
        std::filesystem::file_type::not_found)
      continue;
    return {StatusCode::kInvalidArgument,
            "--report " + directory + " has a report already; name an empty directory"};
  }
  return {};
}

bool is_run_stream(const std::string& path) {
  // Other processes write to standard output too, whether it is a file or a pipe.
  for (const char* place : {"/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/"}) {
    if (path.rfind(place, 0) == 0) return true;
  }
  struct stat facts {};
  return ::stat(path.c_str(), &facts) == 0 && !S_ISREG(facts.st_mode);
}

Status check_run_file(const std::string& option, const std::string& path, std::string_view beginning) {
  if (path == "-") return refusal(option, path, "for standard output give /dev/stdout");
  if (path.back() == '/') return refusal(option, path, "the name is that of a directory; add a file's name");
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return refusal(option, path, "it is a directory; name a file, such as one in it");
  }
  if (is_run_stream(path)) {
    return ::access(path.c_str(), W_OK) == 0 ? Status() : refusal(option, path, std::strerror(errno));
  }
  if (std::filesystem::exists(path, error)) {
    if (const std::string why = why_to_keep(option, path, beginning); !why.empty()) {
      return refusal(option, path, why);
    }
  }
  if (std::filesystem::is_symlink(path, error) && !std::filesystem::exists(path, error)) {
    return refusal(option, path, "it is a link to a file that does not exist; name the file itself");
  }
  const std::string directory = std::filesystem::absolute(path, error).parent_path().string();
  if (const std::string problem = directory_problem(directory); !problem.empty()) {
    return refusal(option, path, problem);
  }
  std::string partial;
  const int file = open_partial(place_of(path), &partial);
  if (file < 0) {
    return refusal(option, path, std::string(std::strerror(errno)) + "; name a place that can be written to");
  }
  (void)::unlink(partial.c_str());
  ::close(file);
  return {};
}

Status check_different_files(const std::string& option, const std::string& path,
                             const std::string& other_option, const std::string& other_path) {
  if (path.empty() || other_path.empty() || is_run_stream(path)) return {};
  std::error_code error;
  // "same" and "./same" are one file, also before it is made.
  const auto place = [&](const std::string& file) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(file, error), error);
  };
  if (place(path) != place(other_path)) return {};
  return {StatusCode::kInvalidArgument, option + " and " + other_option + " both name " + shown_path(path) +
                                            "; give each a file of its own"};
}

Status write_run_file(const std::string& path, const std::function<Status(int file)>& write) {
  if (!is_run_stream(path)) return write_whole(path, place_of(path), write, ::rename);
  const int file = open_output_pipe(path.c_str(), O_NOCTTY | O_APPEND);
  if (file < 0 && errno == ENXIO)
    return cannot_write(path, "no process reads from it", "start the reader first");
  if (file < 0) return cannot_write(path, std::strerror(errno));
  const Status written = write(file);
  if (::close(file) != 0 && written.ok()) return cannot_write(path, std::strerror(errno));
  return written.ok() ? Status() : cannot_write(path, written.message());
}

Status write_run_text(const std::string& path, const std::string& text) {
  return write_run_file(path, [&](int file) { return write_text(file, text); });
}

Status write_report_file(const std::string& path, const std::string& text, bool replaces) {
  return write_whole(
      path, path, [&](int file) { return write_text(file, text); }, replaces ? ::rename : rename_to_new);
}

Status overwrite_run_text(const std::string& path, const std::string& text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return cannot_write(path, std::strerror(errno));
  Status written = write_text(file, text);
  if (written.ok() && ::ftruncate(file, static_cast<off_t>(text.size())) != 0) {
    written = Status(StatusCode::kIoError, std::strerror(errno));
  }
  if (::close(file) != 0 && written.ok()) written = Status(StatusCode::kIoError, std::strerror(errno));
  return written.ok() ? Status() : cannot_write(path, written.message());
}

}  // namespace forebay
