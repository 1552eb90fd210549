// TerminalLine: progress on standard error, as one line that is overwritten and erased at the end; nothing if
// standard error is no terminal.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>

#include "forebay/text.h"

namespace forebay {

class TerminalLine {
 public:
  TerminalLine() : shown_(::isatty(STDERR_FILENO) == 1) {}
  TerminalLine(const TerminalLine&) = delete;
  TerminalLine& operator=(const TerminalLine&) = delete;
  ~TerminalLine() { show(""); }

  // Cut to the terminal's width: a line that wraps could not be overwritten.
  void show(const std::string& text) {
    if (!shown_) return;
    winsize size{};
    std::size_t width = 80;
    if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) width = size.ws_col;
    std::fprintf(stderr, "\r%s\x1b[K", shown_text(text).substr(0, width - 1).c_str());
    next_ = text.empty() ? Clock::time_point() : Clock::now() + kPause;
  }
  // Whether it is shown and the last text has been there long enough to be read. Cheap enough for thousands
  // of calls a second.
  bool due() const { return shown_ && Clock::now() >= next_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPause{100};

  const bool shown_;
  Clock::time_point next_;
};

}  // namespace forebay
