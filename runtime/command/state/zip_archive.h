// The directory of a zip archive with stored entries, as PyTorch writes them. An archive may be a part of a
// file.
//
// Source: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3 (zip64).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "runtime/command/state/input_file.h"

namespace forebay {

class ZipArchive {
 public:
  struct Place {
    std::uint64_t at = 0;  // From the start of the file.
    std::uint64_t bytes = 0;
  };

  // The archive is bytes [begin, begin + bytes) of the file. Nothing outside of them is read.
  // Errors: throws Error: kCorruption for a directory that is not whole, kUnsupported for compressed or
  // encrypted entries, kIoError.
  // Cost: memory for the directory, at most kMostDirectoryBytes.
  ZipArchive(const InputFile& file, std::uint64_t begin, std::uint64_t bytes);

  static constexpr std::uint64_t kMostDirectoryBytes = 64u << 20;

  // By name.
  bool has(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  // The place of the content of an entry. `file`: the same as before.
  // Errors: throws Error(kCorruption) where there is no such entry, or it is not within the archive.
  Place find(const InputFile& file, std::string_view name) const;
  // "archive" where the one entry that ends with "/data.pkl" is "archive/data.pkl".
  // Errors: throws Error(kCorruption) unless there is one.
  std::string root(const InputFile& file) const;

 private:
  struct Entry {
    std::uint64_t header = 0;  // From the start of the archive.
    std::uint64_t bytes = 0;
  };
  void read_directory(const InputFile& file, std::uint64_t at, std::uint64_t bytes, std::uint64_t count);

  std::uint64_t begin_ = 0;
  std::uint64_t directory_ = 0;  // From the start of the archive; the entries lie before it.
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace forebay
