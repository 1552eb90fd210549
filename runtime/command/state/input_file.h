// Files that are imported: bounded reads at any place.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

// Any number of files, of which a few are open at once.
class InputFiles {
 public:
  std::size_t add(std::string path);
  std::size_t size() const { return paths_.size(); }
  const std::string& path(std::size_t file) const { return paths_.at(file); }
  // Valid until the next call. Errors: those of InputFile.
  const InputFile& open(std::size_t file);

 private:
  std::vector<std::string> paths_;
  std::list<std::pair<std::size_t, std::unique_ptr<InputFile>>> open_;  // The last used first.
};

}  // namespace forebay
