#include "tests/fakes/cuda/ptx/image.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>

#include "tests/fakes/cuda/ptx/fault.h"

namespace forebay::ptx {
namespace {

constexpr std::uint32_t kFatBinary = 0xBA55ED50, kFatBinaryWrapper = 0x466243B1;

struct FatHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t bytes;  // The size of the entries that follow.
};

struct FatEntry {
  std::uint16_t kind;  // kPtx, or an ELF file.
  std::uint16_t version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;         // The size of the content that follows, with padding.
  std::uint32_t packed_bytes;  // The size of packed content, without padding.
  std::uint32_t options_offset;
  std::uint16_t minor, major;
  std::uint32_t architecture;
  std::uint32_t name_offset, name_bytes;
  std::uint64_t flags;
  std::uint64_t zero;
  std::uint64_t unpacked_bytes;
};
static_assert(sizeof(FatEntry) == 64);

constexpr std::uint16_t kPtx = 1;
constexpr std::uint64_t kPackedByLz4 = 0x2000, kPackedByZstandard = 0x8000;

[[noreturn]] void refuse(const std::string& why) {
  throw Fault(FaultKind::kRefused, "the fat binary's PTX cannot be read: " + why);
}

// An LZ4 block: runs of literals, each followed by a copy of earlier output.
std::string unpack_lz4(const unsigned char* packed, std::size_t packed_bytes, std::size_t bytes) {
  std::string text;
  std::size_t at = 0;
  const auto next = [&] {
    if (at == packed_bytes) refuse("its LZ4 block ends early");
    return packed[at++];
  };
  const auto length = [&](std::size_t nibble) {
    if (nibble != 15) return nibble;
    for (unsigned char more = 255; more == 255;) nibble += more = next();
    return nibble;
  };
  while (at < packed_bytes) {
    const unsigned char token = next();
    const std::size_t literals = length(token >> 4);
    if (literals > packed_bytes - at) refuse("its LZ4 block ends early");
    text.append(reinterpret_cast<const char*>(packed) + at, literals);
    at += literals;
    if (at == packed_bytes) break;
    std::size_t distance = next();
    distance |= std::size_t{next()} << 8;
    if (distance == 0 || distance > text.size()) refuse("its LZ4 block points before its begin");
    for (std::size_t count = length(token & 15) + 4; count > 0; --count) text += text[text.size() - distance];
  }
  if (text.size() != bytes) refuse("its LZ4 block has another length than its header says");
  return text;
}

// By the system's library: Debian's package manager depends on it, so it is there without a package of ours.
std::string unpack_zstandard(const unsigned char* packed, std::size_t packed_bytes, std::size_t bytes) {
  using Decompress = std::size_t(void*, std::size_t, const void*, std::size_t);
  static auto* const decompress = [] {
    void* const library = ::dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? nullptr : reinterpret_cast<Decompress*>(::dlsym(library, "ZSTD_decompress"));
  }();
  if (decompress == nullptr)
    refuse("it is packed by Zstandard, and libzstd.so.1 was not found; install libzstd1");
  std::string text(bytes, '\0');
  if (decompress(text.data(), bytes, packed, packed_bytes) != bytes) refuse("its Zstandard frame is damaged");
  return text;
}

std::string text_of_entry(const FatEntry& entry, const unsigned char* content) {
  std::string text;
  if ((entry.flags & (kPackedByLz4 | kPackedByZstandard)) == 0) {
    text.assign(reinterpret_cast<const char*>(content), entry.bytes);
  } else {
    const std::size_t packed_bytes = entry.packed_bytes;
    if (packed_bytes > entry.bytes) refuse("an entry is longer than its place");
    text = (entry.flags & kPackedByLz4) != 0 ? unpack_lz4(content, packed_bytes, entry.unpacked_bytes)
                                             : unpack_zstandard(content, packed_bytes, entry.unpacked_bytes);
  }
  return text.substr(0, text.find('\0'));
}

std::string text_of_fat_binary(const unsigned char* image) {
  FatHeader header;
  std::memcpy(&header, image, sizeof header);
  if (header.version != 1 || header.header_bytes < sizeof header) refuse("its header has an unknown form");
  std::string newest;
  std::uint32_t architecture = 0;
  for (std::size_t at = header.header_bytes, end = at + header.bytes; at < end;) {
    FatEntry entry;
    if (end - at < sizeof entry) refuse("it ends within the header of an entry");
    std::memcpy(&entry, image + at, sizeof entry);
    if (entry.header_bytes < sizeof entry || entry.header_bytes > end - at ||
        entry.bytes > end - at - entry.header_bytes) {
      refuse("an entry reaches beyond its end");
    }
    if (entry.kind == kPtx && entry.architecture >= architecture) {
      newest = text_of_entry(entry, image + at + entry.header_bytes);
      architecture = entry.architecture;
    }
    at += entry.header_bytes + entry.bytes;
  }
  return newest;
}

}  // namespace

std::string text_of_image(const void* image) {
  const auto* bytes = static_cast<const unsigned char*>(image);
  std::uint32_t magic = 0;
  std::memcpy(&magic, bytes, sizeof magic);
  if (magic == kFatBinaryWrapper) {  // Magic, version, and a pointer to the fat binary.
    std::memcpy(&bytes, bytes + 8, sizeof bytes);
    std::memcpy(&magic, bytes, sizeof magic);
  }
  if (magic == kFatBinary) return text_of_fat_binary(bytes);
  const auto* const text = reinterpret_cast<const char*>(bytes);
  const bool is_ptx = std::strncmp(text, "//", 2) == 0 || std::strncmp(text, ".version", 8) == 0;
  return is_ptx ? text : std::string();
}

}  // namespace forebay::ptx
