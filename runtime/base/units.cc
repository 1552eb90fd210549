#include "forebay/units.h"

#include <locale.h>
#include <strings.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace forebay {

std::string format_bytes(std::uint64_t bytes) {
  constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  int index = 0;
  while (value >= 1024.0 && index < 5) {
    value /= 1024.0;
    ++index;
  }
  char text[32];
  std::snprintf(text, sizeof(text), index == 0 ? "%.0f %s" : "%.2f %s", value, kNames[index]);
  return text;
}

std::string grouped(std::uint64_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t place = digits.size(); place > 3;) {
    place -= 3;
    digits.insert(place, 1, ',');
  }
  return digits;
}

std::string format_count(std::uint64_t count, const char* one, const char* many) {
  std::string text = std::to_string(count) + " ";
  if (count != 1 && many != nullptr) return text + many;
  return text + one + (count == 1 ? "" : "s");
}

bool parse_bytes(const char* text, std::uint64_t* bytes) {
  if (text == nullptr || text[0] < '0' || text[0] > '9') return false;
  if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) return false;
  // Kept: a program may set another locale at any time.
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  char* end = nullptr;
  errno = 0;
  const double number = ::strtod_l(text, &end, plain);
  const bool underflows = errno == ERANGE;
  while (*end == ' ') ++end;
  struct Suffix {
    const char* name;
    double factor;
  };
  constexpr Suffix kSuffixes[] = {{"", 1},
                                  {"B", 1},
                                  {"K", 1024.0},
                                  {"KiB", 1024.0},
                                  {"KB", 1e3},
                                  {"M", 1048576.0},
                                  {"MiB", 1048576.0},
                                  {"MB", 1e6},
                                  {"G", 1073741824.0},
                                  {"GiB", 1073741824.0},
                                  {"GB", 1e9},
                                  {"T", 1099511627776.0},
                                  {"TiB", 1099511627776.0},
                                  {"TB", 1e12}};
  for (const Suffix& suffix : kSuffixes) {
    if (::strcasecmp_l(end, suffix.name, plain) != 0) continue;
    const double value = number * suffix.factor;
    if (!(value >= 0) || value >= 18446744073709551616.0) return false;
    if (value < 1 && (number > 0 || underflows)) return false;  // Zero often means no limit: it must be said.
    *bytes = static_cast<std::uint64_t>(value);
    return true;
  }
  return false;
}

}  // namespace forebay
