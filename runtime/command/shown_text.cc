#include "runtime/command/shown_text.h"

#include "forebay/text.h"

namespace forebay {
namespace {

// As a language would write it in a string.
std::string spelled_out(std::uint32_t character, bool is_byte) {
  if (character == '\n') return "\\n";
  if (character == '\r') return "\\r";
  if (character == '\t') return "\\t";
  return format_text(is_byte || character < 0x80 ? "\\x%02x" : "\\u%04x", static_cast<unsigned>(character));
}

}  // namespace

std::size_t utf8_length(std::string_view text, std::uint32_t* character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) {
    *character = byte(0);
    return 1;
  }
  const std::size_t length = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < length) return 0;
  *character = byte(0) & (0xFFu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    *character = *character << 6 | (byte(i) & 0x3Fu);
  }
  constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = *character >= 0xD800 && *character <= 0xDFFF;
  return *character < kSmallest[length] || *character > 0x10FFFF || is_surrogate ? 0 : length;
}

bool is_invisible(std::uint32_t character) {
  return character < 0x20 || (character >= 0x7F && character < 0xA0) || character == 0x061C ||
         (character >= 0x200B && character <= 0x200F) || (character >= 0x2028 && character <= 0x202E) ||
         (character >= 0x2060 && character <= 0x206F) || character == 0xFEFF;
}

std::string shown_text(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    std::uint32_t character = 0;
    const std::size_t length = utf8_length(text, &character);
    if (length == 0) {
      shown += spelled_out(static_cast<unsigned char>(text[0]), true);
    } else if (is_invisible(character)) {
      shown += spelled_out(character, false);
    } else {
      shown += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return shown;
}

}  // namespace forebay
