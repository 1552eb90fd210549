#include "model/token_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "forebay/error.h"
#include "forebay/text.h"

namespace forebay::gpt {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

// llm.c: 256 numbers of 32 bits, which begin with these.
constexpr std::size_t kHeaderBytes = 1024;
constexpr std::int32_t kMagic = 20240520;
constexpr std::int32_t kVersion = 1;
constexpr std::int32_t kMagicOf32Bits = 20240801;  // Llama 3: tokens of 32 bits.

}  // namespace

TokenFile::TokenFile(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (file_ < 0) cannot_read(std::strerror(errno));
  try {
    read_header();
  } catch (...) {
    ::close(file_);
    throw;
  }
}

TokenFile::~TokenFile() {
  ::close(file_);
}

void TokenFile::read_header() {
  struct stat facts {};
  if (::fstat(file_, &facts) != 0) cannot_read(std::strerror(errno));
  if (!S_ISREG(facts.st_mode)) cannot_read("it is not a regular file");
  const auto bytes = static_cast<std::uint64_t>(facts.st_size);
  if (bytes == 0) cannot_read("it is empty");
  std::int32_t header[3] = {};  // The last: the number of tokens.
  read_bytes(0, header, std::min<std::uint64_t>(bytes, sizeof header));
  const bool has_header = header[0] == kMagic || header[0] == kMagicOf32Bits;
  const auto refuse = [&](StatusCode code, const std::string& finding) {
    throw Error(code, shown_path(path_) + " is no file of 16-bit tokens: " + finding +
                          "; make one as nanoGPT or llm.c does (GPT-2 format), and give it with --data");
  };
  if (has_header && (header[0] == kMagicOf32Bits || header[1] != kVersion))
    refuse(StatusCode::kUnsupported, "its header says another version");
  if (bytes % sizeof(std::uint16_t) != 0)
    refuse(StatusCode::kCorruption, "it has an odd number of bytes, " + std::to_string(bytes));
  begin_ = has_header ? kHeaderBytes : 0;
  if (bytes < begin_) refuse(StatusCode::kCorruption, "it ends in its header");
  size_ = (bytes - begin_) / sizeof(std::uint16_t);
  if (has_header && size_ < static_cast<std::uint32_t>(header[2])) {
    refuse(StatusCode::kCorruption, "its header says " +
                                        std::to_string(static_cast<std::uint32_t>(header[2])) +
                                        " tokens, and it has " + std::to_string(size_));
  }
}

void TokenFile::read(std::uint64_t first, std::span<std::uint16_t> target) const {
  read_bytes(begin_ + first * sizeof(std::uint16_t), target.data(), target.size_bytes());
}

void TokenFile::read_bytes(std::uint64_t at, void* target, std::size_t bytes) const {
  auto* to = static_cast<std::byte*>(target);
  while (bytes > 0) {
    const ssize_t read = ::pread(file_, to, bytes, static_cast<off_t>(at));
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) cannot_read(std::strerror(errno));
    if (read == 0) cannot_read("it has become shorter since it was opened");
    at += static_cast<std::uint64_t>(read);
    to += read;
    bytes -= static_cast<std::size_t>(read);
  }
}

void TokenFile::cannot_read(const std::string& reason) const {
  throw Error(StatusCode::kIoError, "cannot read the token file " + shown_path(path_) + ": " + reason +
                                        "; give an existing file with --data");
}

}  // namespace forebay::gpt
