// OutputFile: a file that appears complete or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace forebay::gpt {

// Writes to a temporary name beside `path`; finish() syncs it and gives it its name. Without finish() an old
// file at `path` stays as it is, and no new file is left. A symbolic link is followed: the file that it names
// is replaced, not the link. A pipe, or another file that is not regular, is written directly; a pipe that
// nobody opens for reading within some seconds is an error.
class OutputFile {
 public:
  // A link that others put at a name which the user did not choose is replaced, as is any other file there.
  enum class Links { kFollow, kReplace };
  // Errors: throws Error(kIoError), also for a directory or a file that may not be written. So do write() and
  // finish().
  explicit OutputFile(const std::string& path, Links links = Links::kFollow);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void finish();

  // Throws like the constructor and leaves no file behind. It opens no pipe, which may have no reader yet.
  static void check(const std::string& path);
  // The same, and refuses a pipe and every other file that is not regular.
  static void check_regular(const std::string& path);

 private:
  void create_temporary();
  [[noreturn]] void fail(const std::string& action, int error);

  const std::string path_;
  std::string target_;     // `path_` with links followed.
  std::string temporary_;  // Empty: target_ is written directly.
  int file_ = -1;
  std::uint64_t written_bytes_ = 0;
};

// Writes `text` by an OutputFile. Errors: throws Error(kIoError).
void write_file(const std::string& path, const std::string& text,
                OutputFile::Links links = OutputFile::Links::kFollow);

// Remembers that this process could not write a file that the training itself does not need.
void note_output_failed() noexcept;
bool output_failed() noexcept;

}  // namespace forebay::gpt
