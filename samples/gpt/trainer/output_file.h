// A file that a run leaves at its end: whole, or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace forebay::gpt {

// Writes to a temporary name beside `path`; finish() syncs it and gives it its name. Without finish() nothing
// is left behind, and what was there before stays. A symbolic link is followed, so that what it names is
// replaced and not the link. What is there and is no regular file (a pipe, /dev/null) is written directly.
class OutputFile {
 public:
  // Errors: throws Error(kIoError), as do the others; also for a directory or a file that may not be written.
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void finish();

  // Throws what the constructor would throw, and leaves nothing behind. Opens no pipe, which may have no
  // reader yet.
  static void check(const std::string& path);

 private:
  void create_temporary();
  [[noreturn]] void fail(const std::string& action, int error);

  const std::string path_;
  std::string target_;     // What links lead to.
  std::string temporary_;  // Empty: written directly.
  int file_ = -1;
  std::uint64_t written_bytes_ = 0;
};

}  // namespace forebay::gpt
