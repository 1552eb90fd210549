// Sizes and rounding. KiB, MiB and GiB are powers of two; GB in reports is 1e9 bytes, as in the ZeRO paper.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "forebay/language.h"

namespace forebay {

constexpr std::uint64_t operator""_KiB(unsigned long long n) {
  return n << 10;
}
constexpr std::uint64_t operator""_MiB(unsigned long long n) {
  return n << 20;
}
constexpr std::uint64_t operator""_GiB(unsigned long long n) {
  return n << 30;
}

// The smallest multiple of `multiple` (not zero) that is at least `value`.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
// The same for a multiple that is a power of two, without a division.
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + (alignment - 1)) & ~(alignment - 1);
}
constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// "3.50 GiB", "512 B": for messages.
std::string format_bytes(std::uint64_t bytes);

// "12,345,678": for columns that are read digit by digit.
std::string grouped(std::uint64_t number);

// "1 block", "3 blocks": for messages. `many` where an s does not make the plural.
std::string format_count(std::uint64_t count, const char* one, const char* many = nullptr);

// Reads "4096", "64KiB", "1.5 GiB", "2GB" (2e9), "2G" (2 GiB); capitals do not matter. False for other text,
// for a size that does not fit, for one of more than nothing and less than a byte, and for hexadecimal
// numbers. The decimal point is a point in every locale.
bool parse_bytes(const char* text, std::uint64_t* bytes);

}  // namespace forebay
