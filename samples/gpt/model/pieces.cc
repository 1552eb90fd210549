#include "model/pieces.h"

#include <algorithm>
#include <cstdint>
#include <span>

#include "model/unicode_ranges.h"

namespace forebay::gpt {
namespace {

enum class Kind : std::uint8_t { kSpace, kLetter, kNumber, kOther };

struct Character {
  Kind kind;
  std::size_t bytes;
};

// The property White_Space of Unicode beyond ASCII.
constexpr CodeRange kSpaces[] = {{0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
                                 {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};

bool has(std::span<const CodeRange> ranges, std::uint32_t code) {
  const auto after =
      std::upper_bound(ranges.begin(), ranges.end(), code,
                       [](std::uint32_t one, const CodeRange& range) { return one < range.first; });
  return after != ranges.begin() && code <= std::prev(after)->last;
}

Kind ascii_kind(unsigned char c) {
  if (c == ' ' || (c >= '\t' && c <= '\r')) return Kind::kSpace;
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return Kind::kLetter;
  return c >= '0' && c <= '9' ? Kind::kNumber : Kind::kOther;
}

// Requires: place < text.size().
Character character_at(std::string_view text, std::size_t place) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[place + i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {ascii_kind(first), 1};
  const std::size_t count = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  constexpr Character kNotUtf8{Kind::kOther, 1};
  if (first < 0xC2 || first > 0xF4 || place + count > text.size()) return kNotUtf8;
  std::uint32_t code = first & (0xFFu >> (count + 1));
  for (std::size_t i = 1; i < count; ++i) {
    if ((byte(i) & 0xC0u) != 0x80u) return kNotUtf8;
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[count] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return kNotUtf8;
  if (has(kLetters, code)) return {Kind::kLetter, count};
  if (has(kNumbers, code)) return {Kind::kNumber, count};
  return {has(kSpaces, code) ? Kind::kSpace : Kind::kOther, count};
}

// The end of the characters of one kind from `place` on.
std::size_t run_end(std::string_view text, std::size_t place, Kind kind) {
  while (place < text.size()) {
    const Character character = character_at(text, place);
    if (character.kind != kind) break;
    place += character.bytes;
  }
  return place;
}

}  // namespace

std::size_t piece_end(std::string_view text, std::size_t begin) {
  for (const std::string_view word : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.substr(begin).starts_with(word)) return begin + word.size();
  }
  const std::size_t after_space = begin + (text[begin] == ' ' ? 1 : 0);
  if (after_space < text.size()) {
    const Kind kind = character_at(text, after_space).kind;
    if (kind != Kind::kSpace) return run_end(text, after_space, kind);
  }
  // White space; the last character before another word is left to that word.
  std::size_t end = begin, last = begin;
  while (end < text.size()) {
    const Character character = character_at(text, end);
    if (character.kind != Kind::kSpace) return last > begin ? last : end;
    last = end;
    end += character.bytes;
  }
  return end;
}

}  // namespace forebay::gpt
