#include "runtime/command/page/text.h"

#include <cstddef>
#include <cstdio>

#include "runtime/command/shown_text.h"

namespace forebay {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";

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
