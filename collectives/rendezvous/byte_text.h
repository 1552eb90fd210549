// Writes numbers and texts as bytes for files and sockets, low byte first, and reads them from bytes that
// anybody may have written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace forebay::internal {

template <typename Number>
void append_number(std::string& bytes, Number number) {
  for (std::size_t i = 0; i < sizeof(Number); ++i) {
    bytes += static_cast<char>(static_cast<std::uint64_t>(number) >> (8 * i) & 0xff);
  }
}

// With its length in front.
inline void append_text(std::string& bytes, std::string_view text) {
  append_number(bytes, static_cast<std::uint32_t>(text.size()));
  bytes += text;
}

// Takes a number off the front of `bytes`; false when there are too few bytes.
template <typename Number>
bool take_number(std::string_view* bytes, Number* number) {
  if (bytes->size() < sizeof(Number)) return false;
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(Number); ++i) {
    value |= std::uint64_t{static_cast<unsigned char>((*bytes)[i])} << (8 * i);
  }
  *number = static_cast<Number>(value);
  bytes->remove_prefix(sizeof(Number));
  return true;
}

// Takes a text of at most `bytes_max` off the front of `bytes`.
inline bool take_text(std::string_view* bytes, std::size_t bytes_max, std::string* text) {
  std::uint32_t length = 0;
  if (!take_number(bytes, &length) || length > bytes_max || length > bytes->size()) return false;
  text->assign(bytes->substr(0, length));
  bytes->remove_prefix(length);
  return true;
}

}  // namespace forebay::internal
