#include "tests/fakes/cuda/ptx/image.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "tests/fakes/cuda/ptx/fault.h"

namespace forebay::ptx {
namespace {

constexpr std::uint32_t kFatBinary = 0xBA55ED50, kFatBinaryWrapper = 0x466243B1, kElf = 0x464C457F;

bool has_magic(const void* image, std::uint32_t magic) {
  return std::memcmp(image, &magic, sizeof magic) == 0;
}

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

template <typename Take>  // take(entry, content)
void for_each_entry(const unsigned char* image, Take&& take) {
  FatHeader header;
  std::memcpy(&header, image, sizeof header);
  if (header.version != 1 || header.header_bytes < sizeof header) refuse("its header has an unknown form");
  for (std::size_t at = header.header_bytes, end = at + header.bytes; at < end;) {
    FatEntry entry;
    if (end - at < sizeof entry) refuse("it ends within the header of an entry");
    std::memcpy(&entry, image + at, sizeof entry);
    if (entry.header_bytes < sizeof entry || entry.header_bytes > end - at ||
        entry.bytes > end - at - entry.header_bytes) {
      refuse("an entry reaches beyond its end");
    }
    take(entry, image + at + entry.header_bytes);
    at += entry.header_bytes + entry.bytes;
  }
}

// The PTX for the newest architecture.
std::string text_of_fat_binary(const unsigned char* image) {
  std::string newest;
  std::uint32_t architecture = 0;
  for_each_entry(image, [&](const FatEntry& entry, const unsigned char* content) {
    if (entry.kind != kPtx || entry.architecture < architecture) return;
    newest = text_of_entry(entry, content);
    architecture = entry.architecture;
  });
  return newest;
}

// The fat binary in its wrapper (magic, version, and a pointer), or the image itself.
const unsigned char* without_wrapper(const void* image) {
  const auto* bytes = static_cast<const unsigned char*>(image);
  if (has_magic(bytes, kFatBinaryWrapper)) std::memcpy(&bytes, bytes + 8, sizeof bytes);
  return bytes;
}

bool is_text(const unsigned char* image) {
  const auto* const text = reinterpret_cast<const char*>(image);
  return std::strncmp(text, "//", 2) == 0 || std::strncmp(text, ".version", 8) == 0;
}

int release_of_ptx(int major, int minor) {
  return major < 7 ? 0 : (major + 4) * 1000 + (major == 8 && minor > 5 ? minor + 1 : minor) * 10;
}

bool runs_on(const FatEntry& entry, std::uint32_t compute_capability) {
  if (entry.architecture > compute_capability) return false;
  return entry.kind == kPtx || entry.architecture / 10 == compute_capability / 10;
}

int release_of_elf(const unsigned char* content) {
  return content[8] >= 8 ? 13000 : 0;  // e_ident[EI_ABIVERSION]
}

}  // namespace

std::string text_of_image(const void* image) {
  const unsigned char* const bytes = without_wrapper(image);
  if (has_magic(bytes, kFatBinary)) return text_of_fat_binary(bytes);
  return is_text(bytes) ? reinterpret_cast<const char*>(bytes) : std::string();
}

int needed_driver(const void* image, int compute_capability) {
  const unsigned char* const bytes = without_wrapper(image);
  if (has_magic(bytes, kFatBinary)) {
    int least = kNoDriver;
    for_each_entry(bytes, [&](const FatEntry& entry, const unsigned char* content) {
      if (!runs_on(entry, static_cast<std::uint32_t>(compute_capability))) return;
      least = std::min(
          least, entry.kind == kPtx ? release_of_ptx(entry.major, entry.minor) : release_of_elf(content));
    });
    return least;
  }
  if (has_magic(bytes, kElf)) return release_of_elf(bytes);
  const char* const version =
      is_text(bytes) ? std::strstr(reinterpret_cast<const char*>(bytes), ".version ") : nullptr;
  int major = 0, minor = 0;
  if (version == nullptr || std::sscanf(version, ".version %d.%d", &major, &minor) != 2) return 0;
  return release_of_ptx(major, minor);
}

}  // namespace forebay::ptx
