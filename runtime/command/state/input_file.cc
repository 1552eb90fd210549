#include "runtime/command/state/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "forebay/error.h"
#include "forebay/text.h"

namespace forebay {

void refuse_import(const std::string& path, const std::string& finding) {
  throw Error(StatusCode::kCorruption, shown_path(path) + " cannot be imported: " + finding +
                                           "; give whole files as the other tool wrote them");
}

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK, a named pipe would wait for its other end.
  file_ = internal::Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file_.number() < 0) fail(errno);
  struct stat facts {};
  if (::fstat(file_.number(), &facts) != 0) fail(errno);
  if (!S_ISREG(facts.st_mode)) refuse_import(path_, "it is not a regular file");
  bytes_ = static_cast<std::uint64_t>(facts.st_size);
}

void InputFile::read_at(std::uint64_t offset, void* data, std::uint64_t bytes) const {
  if (offset > bytes_ || bytes > bytes_ - offset) refuse_import(path_, "it ends early");
  const ssize_t count = file_.read_at(offset, data, bytes);
  if (count < 0) fail(errno);
  if (static_cast<std::uint64_t>(count) < bytes) refuse_import(path_, "it ends early");
}

std::string InputFile::text(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset > bytes_ || bytes > bytes_ - offset) refuse_import(path_, "it ends early");
  std::string text(bytes, '\0');
  read_at(offset, text.data(), bytes);
  return text;
}

void InputFile::fail(int error) const {
  throw Error(StatusCode::kIoError, "cannot read " + shown_path(path_) + ": " + std::strerror(error) +
                                        "; give a file that exists and may be read");
}

std::size_t InputFiles::add(std::string path) {
  paths_.push_back(std::move(path));
  return paths_.size() - 1;
}

const InputFile& InputFiles::open(std::size_t file) {
  // Smaller: files of many ranks are opened again and again. Larger: the limit on open files is near.
  constexpr std::size_t kMostOpen = 64;
  const auto found =
      std::find_if(open_.begin(), open_.end(), [&](const auto& one) { return one.first == file; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
  } else {
    open_.emplace_front(file, std::make_unique<InputFile>(paths_.at(file)));
    if (open_.size() > kMostOpen) open_.pop_back();
  }
  return *open_.front().second;
}

}  // namespace forebay
