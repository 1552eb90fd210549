// A file that is imported: bounded reads at any place.
#pragma once

#include <cstdint>
#include <string>

#include "forebay/descriptor.h"

namespace forebay {

// Errors: throws Error(kCorruption) for an import of `path`.
[[noreturn]] void refuse_import(const std::string& path, const std::string& finding);

class InputFile {
 public:
  // Errors: throws Error(kIoError); kCorruption if it is not a regular file.
  explicit InputFile(std::string path);

  std::uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  // Errors: throws Error(kIoError); kCorruption past the end.
  void read_at(std::uint64_t offset, void* data, std::uint64_t bytes) const;
  std::string text(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  [[noreturn]] void fail(int error) const;

  std::string path_;
  internal::Descriptor file_;
  std::uint64_t bytes_ = 0;
};

}  // namespace forebay
