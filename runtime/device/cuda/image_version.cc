#include "runtime/device/cuda/image_version.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace forebay {
namespace {

constexpr std::string_view kElfMagic = "\177ELF", kFatBinaryMagic = "\x50\xED\x55\xBA";
constexpr std::size_t kElfAbiOffset = 8;  // EI_ABIVERSION
constexpr int kFirstElfAbiOfCuda13 = 8;
constexpr std::uint16_t kPtxEntry = 1, kElfEntry = 2;

struct FatHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t bytes;  // The size of the entries that follow.
};
struct FatEntry {
  std::uint16_t kind;
  std::uint16_t version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;  // The size of the content that follows.
  std::uint32_t packed_bytes, options_offset;
  std::uint16_t minor, major;  // The version of PTX; 1 and the ABI version of an ELF file.
};
static_assert(sizeof(FatHeader) == 16 && sizeof(FatEntry) == 32);

// PTX 7.0 came with CUDA 11.0, 8.0 with 12.0, 9.0 with 13.0. CUDA 12.6 brought no version of its own.
int release_of_ptx(int major, int minor) noexcept {
  if (major < 7) return 0;
  if (major == 8 && minor > 5) ++minor;
  return (major + 4) * 1000 + minor * 10;
}

int release_of_elf(int abi) noexcept {
  return abi >= kFirstElfAbiOfCuda13 ? 13000 : 0;
}

int release_of_text(std::string_view text) noexcept {
  constexpr std::string_view kDirective = ".version ";
  const std::size_t at = text.find(kDirective);
  if (at == std::string_view::npos) return 0;
  const char* const end = text.data() + text.size();
  int major = 0, minor = 0;
  const auto point = std::from_chars(text.data() + at + kDirective.size(), end, major);
  if (point.ec != std::errc() || point.ptr == end || *point.ptr != '.') return 0;
  return std::from_chars(point.ptr + 1, end, minor).ec == std::errc() ? release_of_ptx(major, minor) : 0;
}

int release_of_fat_binary(std::string_view image) noexcept {
  FatHeader header;
  if (image.size() < sizeof header) return 0;
  std::memcpy(&header, image.data(), sizeof header);
  if (header.header_bytes < sizeof header || header.header_bytes > image.size()) return 0;
  image = image.substr(header.header_bytes, header.bytes);
  int least = 0;
  for (bool is_first = true; !image.empty(); is_first = false) {
    FatEntry entry;
    if (image.size() < sizeof entry) return 0;
    std::memcpy(&entry, image.data(), sizeof entry);
    if (entry.header_bytes < sizeof entry || entry.header_bytes > image.size() ||
        entry.bytes > image.size() - entry.header_bytes) {
      return 0;
    }
    const int release = entry.kind == kElfEntry   ? release_of_elf(entry.minor)
                        : entry.kind == kPtxEntry ? release_of_ptx(entry.major, entry.minor)
                                                  : 0;
    least = is_first ? release : std::min(least, release);
    image.remove_prefix(entry.header_bytes + entry.bytes);
  }
  return least;
}

}  // namespace

int needed_cuda_driver(const void* image, std::size_t bytes) noexcept {
  const std::string_view content(static_cast<const char*>(image), bytes);
  if (content.starts_with(kFatBinaryMagic)) return release_of_fat_binary(content);
  if (content.starts_with(kElfMagic))
    return bytes > kElfAbiOffset ? release_of_elf(content[kElfAbiOffset]) : 0;
  return release_of_text(content);
}

std::string cuda_release_text(int release) {
  return std::to_string(release / 1000) + "." + std::to_string(release % 1000 / 10);
}

}  // namespace forebay
