#include "forebay/log.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace forebay {
namespace {

LogLevel enabled_level() noexcept {
  const char* value = std::getenv("FOREBAY_LOG");
  if (value == nullptr) return LogLevel::kWarning;
  if (std::strcmp(value, "off") == 0) return LogLevel::kOff;
  if (std::strcmp(value, "error") == 0) return LogLevel::kError;
  if (std::strcmp(value, "info") == 0) return LogLevel::kInfo;
  if (std::strcmp(value, "debug") == 0) return LogLevel::kDebug;
  if (value[0] != '\0' && std::strcmp(value, "warning") != 0) {
    constexpr char kAdvice[] = "forebay: FOREBAY_LOG is not one of off, error, warning, info and debug\n";
    [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, kAdvice, sizeof kAdvice - 1);
  }
  return LogLevel::kWarning;
}

// Texts of others, such as a variable's value, shall not command the terminal.
void hide_controls(char* text, int length) noexcept {
  std::replace_if(
      text, text + length, [](char c) { return (c >= 0 && c < ' ' && c != '\n' && c != '\t') || c == 0x7F; },
      '?');
}

}  // namespace

void log(LogLevel level, const char* format, ...) noexcept {
  static const LogLevel enabled = enabled_level();
  if (level > enabled) return;
  constexpr char kPrefix[] = "forebay: ";
  constexpr int kPrefixLength = sizeof(kPrefix) - 1;
  char line[1024];
  std::memcpy(line, kPrefix, kPrefixLength);
  va_list arguments;
  va_start(arguments, format);
  const int written =
      std::vsnprintf(line + kPrefixLength, sizeof(line) - kPrefixLength - 1, format, arguments);
  va_end(arguments);
  if (written < 0) return;
  int length = kPrefixLength + std::min<int>(written, sizeof(line) - kPrefixLength - 2);
  hide_controls(line, length);
  line[length++] = '\n';
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, line, static_cast<std::size_t>(length));
}

}  // namespace forebay
