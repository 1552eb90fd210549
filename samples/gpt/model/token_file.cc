#include "model/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "forebay/error.h"

namespace forebay::gpt {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

// llm.c: 256 numbers of 32 bits, which begin with these.
constexpr std::size_t kHeaderBytes = 1024;
constexpr std::int32_t kMagic = 20240520;
constexpr std::int32_t kVersion = 1;
constexpr std::int32_t kMagicOf32Bits = 20240801;  // Llama 3: tokens of 32 bits.

[[noreturn]] void cannot_map(const std::string& path, const std::string& reason) {
  throw Error(StatusCode::kIoError,
              "cannot map the token file " + path + ": " + reason + "; give an existing file with --data");
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : path_(path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) cannot_map(path, std::strerror(errno));
  struct stat facts {};
  const bool is_regular = ::fstat(file, &facts) == 0 && S_ISREG(facts.st_mode);
  const auto bytes = static_cast<std::size_t>(facts.st_size);
  if (is_regular && bytes > 0) mapping_ = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  ::close(file);
  if (!is_regular) cannot_map(path, "it is not a regular file");
  if (bytes == 0) cannot_map(path, "it is empty");
  if (mapping_ == MAP_FAILED) cannot_map(path, std::strerror(error));
  mapped_bytes_ = bytes;

  std::int32_t header[2] = {};
  std::memcpy(header, mapping_, std::min(bytes, sizeof header));
  const bool has_header = header[0] == kMagic || header[0] == kMagicOf32Bits;
  const auto refuse = [&](StatusCode code, const std::string& finding) {
    ::munmap(mapping_, mapped_bytes_);
    throw Error(code, path + " is no file of 16-bit tokens: " + finding +
                          "; make one as nanoGPT or llm.c does (GPT-2 format), and give it with --data");
  };
  if (has_header && (header[0] == kMagicOf32Bits || header[1] != kVersion))
    refuse(StatusCode::kUnsupported, "its header says another version");
  if (bytes % sizeof(std::uint16_t) != 0)
    refuse(StatusCode::kCorruption, "it has an odd number of bytes, " + std::to_string(bytes));
  const std::size_t skipped = has_header ? kHeaderBytes : 0;
  if (bytes < skipped) refuse(StatusCode::kCorruption, "it ends in its header");
  tokens_ = {reinterpret_cast<const std::uint16_t*>(static_cast<const std::byte*>(mapping_) + skipped),
             (bytes - skipped) / sizeof(std::uint16_t)};
}

TokenFile::~TokenFile() {
  ::munmap(mapping_, mapped_bytes_);
}

}  // namespace forebay::gpt
