#include "runtime/api/page_text.h"

#include <cstddef>
#include <cstdio>

namespace forebay {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";

// Of the character at the beginning of `text`, which is not empty: its bytes, and 0 for what is no UTF-8.
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

// It would be shown as nothing, or move its neighbours.
bool is_invisible(std::uint32_t character) {
  return character < 0x20 || (character >= 0x7F && character < 0xA0) || character == 0x061C ||
         (character >= 0x200B && character <= 0x200F) || (character >= 0x2028 && character <= 0x202E) ||
         (character >= 0x2060 && character <= 0x206F) || character == 0xFEFF;
}

}  // namespace

std::string html_text(std::string_view text) {
  std::string html;
  html.reserve(text.size());
  while (!text.empty()) {
    std::uint32_t character = 0;
    const std::size_t length = utf8_length(text, &character);
    if (length == 0 || (is_invisible(character) && character != '\n' && character != '\t')) {
      html += kReplacement;
    } else if (character == '&') {
      html += "&amp;";
    } else if (character == '<') {
      html += "&lt;";
    } else if (character == '>') {
      html += "&gt;";
    } else if (character == '"') {
      html += "&quot;";
    } else if (character == '\'') {
      html += "&#39;";
    } else {
      html += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return html;
}

std::string time_text(std::uint64_t ns) {
  const auto value = static_cast<double>(ns);
  if (ns == 0) return "0 s";
  char text[64];
  if (ns < 1000) {
    std::snprintf(text, sizeof(text), "%.0f ns", value);
  } else if (ns < 1'000'000) {
    std::snprintf(text, sizeof(text), "%.2f µs", value / 1e3);
  } else if (ns < 1'000'000'000) {
    std::snprintf(text, sizeof(text), "%.2f ms", value / 1e6);
  } else if (ns < 60'000'000'000) {
    std::snprintf(text, sizeof(text), "%.2f s", value / 1e9);
  } else {
    const std::uint64_t seconds = ns / 1'000'000'000;
    std::snprintf(text, sizeof(text), "%llu min %llu s", static_cast<unsigned long long>(seconds / 60),
                  static_cast<unsigned long long>(seconds % 60));
  }
  return text;
}

std::string percent_text(double part) {
  char text[32];
  std::snprintf(text, sizeof(text), part < 0.0995 ? "%.1f %%" : "%.0f %%", part * 100);
  return text;
}

std::string address_text(std::uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace forebay
