#include "runtime/command/page/text.h"

#include <cstddef>

#include "forebay/text.h"

namespace forebay {

std::string html_text(std::string_view text) {
  std::string html;
  html.reserve(text.size());
  while (!text.empty()) {
    std::uint32_t character = 0;
    const std::size_t length = utf8_length(text, &character);
    if (length == 0 || (is_invisible(character) && character != '\n' && character != '\t')) {
      html += "\xEF\xBF\xBD";  // U+FFFD.
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
  if (ns < 1000) return format_text("%.0f ns", value);
  if (ns < 1'000'000) return format_text("%.2f µs", value / 1e3);
  if (ns < 1'000'000'000) return format_text("%.2f ms", value / 1e6);
  if (ns < 60'000'000'000) return format_text("%.2f s", value / 1e9);
  const std::uint64_t seconds = ns / 1'000'000'000;
  return std::to_string(seconds / 60) + " min " + std::to_string(seconds % 60) + " s";
}

std::string percent_text(double part) {
  return format_text(part < 0.0995 ? "%.1f %%" : "%.0f %%", part * 100);
}

std::string address_text(std::uint64_t address) {
  return format_text("0x%llx", static_cast<unsigned long long>(address));
}

}  // namespace forebay
