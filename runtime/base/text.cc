#include "forebay/text.h"

#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "forebay/units.h"

namespace forebay {
namespace {

// Letters to add, drop, replace or swap with their neighbour (optimal string alignment).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last, last, row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before_last = std::move(last);
    last = row;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
  }
  return row[b.size()];
}

// As a language would write it in a string.
std::string spelled_out(std::uint32_t character, bool is_byte) {
  if (character == '\n') return "\\n";
  if (character == '\r') return "\\r";
  if (character == '\t') return "\\t";
  return format_text(is_byte || character < 0x80 ? "\\x%02x" : "\\u%04x", static_cast<unsigned>(character));
}

// At most `most` bytes of a text, cut off between two characters.
std::string shown(std::string_view text, std::size_t most) {
  if (text.size() <= most) return shown_text(text);
  for (int i = 0; i < 3 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80; ++i) --most;
  return shown_text(text.substr(0, most)) + "...";
}

}  // namespace

std::string format_text(const char* format, ...) {
  std::va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  std::string text(static_cast<std::size_t>(std::max(std::vsnprintf(nullptr, 0, format, arguments), 0)), ' ');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  va_end(arguments);
  return text;
}

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

std::string shown_value(std::string_view value) {
  constexpr std::size_t kShownMax = 64;
  return shown(value, kShownMax);
}

std::string shown_path(std::string_view path) {
  constexpr std::size_t kShownMax = 300;
  return shown(path, kShownMax);
}

bool is_nested_deeper(std::string_view json, int depth_max) {
  int depth = 0;
  bool in_text = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char letter = json[i];
    if (in_text && letter == '\\') ++i;
    if (letter == '"') in_text = !in_text;
    if (in_text) continue;
    if (letter == '[' || letter == '{') ++depth;
    if (letter == ']' || letter == '}') --depth;
    if (depth > depth_max) return true;
  }
  return false;
}

std::optional<std::string> repeated_name(std::string_view json, std::size_t size) {
  std::vector<std::string_view> names;
  int depth = 0;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char letter = json[i];
    if (letter == '[' || letter == '{') ++depth;
    if (letter == ']' || letter == '}') --depth;
    if (letter != '"') continue;
    const std::size_t begin = ++i;
    while (i < json.size() && json[i] != '"') i += json[i] == '\\' ? 2 : 1;
    const std::size_t next = json.find_first_not_of(" \t\r\n", i + 1);
    if (depth == 1 && next != std::string_view::npos && json[next] == ':')
      names.push_back(json.substr(begin, i - begin));
  }
  if (names.size() == size) return std::nullopt;
  std::sort(names.begin(), names.end());
  const auto found = std::adjacent_find(names.begin(), names.end());
  return found == names.end() ? "a name" : std::string(*found);
}

std::string nearest_name(std::string_view word, Span<const std::string> names) {
  constexpr std::size_t kMostWord = 256;  // A comparison takes the product of both lengths.
  if (word.size() > kMostWord) return "";
  std::string nearest;
  std::size_t least = std::max<std::size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    if (name.size() >= word.size() + least) continue;
    const std::size_t distance = edit_distance(word, name);
    if (distance >= least) continue;
    least = distance;
    nearest = name;
  }
  return nearest;
}

std::string wrap_text(std::string_view text, std::size_t width, std::size_t indent) {
  std::string wrapped;
  for (bool is_first = true; is_first || !text.empty(); is_first = false) {
    const std::string_view paragraph = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), paragraph.size() + 1));
    const std::size_t spaces = std::min(paragraph.find_first_not_of(' '), paragraph.size());
    if (!is_first) wrapped += '\n' + std::string(paragraph.empty() ? 0 : indent, ' ');
    wrapped += paragraph.substr(0, spaces);
    std::size_t column = indent + spaces;
    for (std::size_t begin = spaces; begin < paragraph.size();) {
      // Spaces within a line stay, because some lines are columns.
      const std::size_t word = std::min(paragraph.find_first_not_of(' ', begin), paragraph.size());
      const std::size_t end = std::min(paragraph.find(' ', word), paragraph.size());
      if (begin > spaces && column + (end - begin) > width) {
        wrapped += '\n' + std::string(indent + spaces, ' ');
        column = indent + spaces;
        begin = word;
      }
      wrapped += paragraph.substr(begin, end - begin);
      column += end - begin;
      begin = end;
    }
  }
  return wrapped;
}

std::string size_question(const char* text) {
  constexpr std::uint64_t kPageBytes = 4096;
  std::uint64_t bytes = 0;
  if (!parse_bytes(text, &bytes) || bytes == 0 || bytes >= kPageBytes) return "";
  const std::string number = std::to_string(bytes);
  return number == text ? number + " bytes; did you mean " + number + "GiB?" : "";
}

}  // namespace forebay
