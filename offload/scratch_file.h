// ScratchFile: a file without a name. Its space is gone with its descriptor, however the process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "forebay/status.h"

namespace forebay::internal {

struct ScratchFileOptions {
  bool direct = true;  // Past the page cache where the file system can.
  bool unnamed =
      true;  // Made without a name where the file system can; otherwise named and unlinked at once.
};

class ScratchFile {
 public:
  // Errors: kInvalidArgument when `directory` is none; kIoError.
  static Result<ScratchFile> create(const std::string& directory, const ScratchFileOptions& options);
  ScratchFile(ScratchFile&& other) noexcept;
  ScratchFile& operator=(ScratchFile&& other) noexcept;
  ~ScratchFile();

  int descriptor() const noexcept { return descriptor_; }
  const std::string& directory() const noexcept { return directory_; }
  bool direct() const noexcept { return direct_; }
  // Addresses, offsets and sizes must be multiples of it; 1 when not direct.
  std::size_t alignment_bytes() const noexcept { return alignment_bytes_; }
  std::uint64_t bytes() const noexcept { return bytes_; }

  // Makes the file `bytes` long, with disk blocks behind all of it where the file system can promise them
  // (`reserved` says whether it did). Growing only. Errors: kOutOfMemory when there is no room (disk, quota,
  // or the limit of this process on the size of a file), kIoError; the file is then as it was.
  Status grow(std::uint64_t bytes, bool* reserved);
  // Back to a smaller size. Cannot fail: a problem is logged once.
  void shrink(std::uint64_t bytes) noexcept;

 private:
  ScratchFile(std::string directory, int descriptor)
      : directory_(std::move(directory)), descriptor_(descriptor) {}

  std::string directory_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::size_t alignment_bytes_ = 1;
  std::uint64_t bytes_ = 0;
};

// "No space left on device (errno 28)".
std::string errno_text(int error);

}  // namespace forebay::internal
