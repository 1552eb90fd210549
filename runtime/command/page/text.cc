#include "runtime/command/page/text.h"

#include <algorithm>
#include <cstddef>

#include "forebay/text.h"

namespace forebay {

namespace {

// Each character of the text, or `instead(character)` where that is not empty.
template <typename Instead>
std::string escaped(std::string_view text, Instead instead) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    std::uint32_t character = 0;
    const std::size_t length = utf8_length(text, &character);
    if (length == 0 || (is_invisible(character) && character != '\n' && character != '\t')) {
      result += "\xEF\xBF\xBD";  // U+FFFD.
    } else if (const std::string_view other = instead(character); !other.empty()) {
      result += other;
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

}  // namespace

std::string html_text(std::string_view text) {
  return escaped(text, [](std::uint32_t character) -> std::string_view {
    if (character == '&') return "&amp;";
    if (character == '<') return "&lt;";
    if (character == '>') return "&gt;";
    if (character == '"') return "&quot;";
    if (character == '\'') return "&#39;";
    return {};
  });
}

std::string script_text(std::string_view text) {
  const auto instead = [](std::uint32_t character) -> std::string_view {
    if (character == '<') return "\\u003c";
    if (character == '"') return "\\\"";
    if (character == '\\') return "\\\\";
    if (character == '\n') return "\\n";
    if (character == '\t') return "\\t";
    return {};
  };
  return "\"" + escaped(text, instead) + "\"";
}

std::string time_text(std::uint64_t ns) {
  const auto value = static_cast<double>(ns);
  if (ns == 0) return "0 s";
  if (ns < 1000) return format_text("%.0f ns", value);
  // A figure that would be rounded to 1000.00, or to 60.00 s, is one of the next unit.
  if (ns < 999'995) return format_text("%.2f µs", value / 1e3);
  if (ns < 999'995'000) return format_text("%.2f ms", value / 1e6);
  if (ns < 59'995'000'000) return format_text("%.2f s", value / 1e9);
  const std::uint64_t seconds = std::max<std::uint64_t>(ns / 1'000'000'000, 60);
  return std::to_string(seconds / 60) + " min " + std::to_string(seconds % 60) + " s";
}

std::string percent_text(double part) {
  return format_text(part < 0.0995 ? "%.1f %%" : "%.0f %%", part * 100);
}

std::string address_text(std::uint64_t address) {
  return format_text("0x%llx", static_cast<unsigned long long>(address));
}

}  // namespace forebay
