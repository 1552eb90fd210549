// TerminalLine: progress on standard error, as one line that is written over and gone at the end; nothing
// where nobody watches.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

namespace forebay {

class TerminalLine {
 public:
  TerminalLine() : shown_(::isatty(STDERR_FILENO) == 1) {}
  TerminalLine(const TerminalLine&) = delete;
  TerminalLine& operator=(const TerminalLine&) = delete;
  ~TerminalLine() { show(""); }

  void show(const std::string& text) const {
    if (shown_) std::fprintf(stderr, "\r%s\x1b[K", text.c_str());
  }

 private:
  const bool shown_;
};

}  // namespace forebay
