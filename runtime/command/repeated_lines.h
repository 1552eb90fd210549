// Merges lines of many processes or files that say the same into one line with their number.
#pragma once

#include <string>
#include <vector>

namespace forebay {

// A line, and the name in it (a path, or nothing) by which it differs from others of its kind besides
// numbers.
struct RepeatedLine {
  std::string text;
  std::string name;
};

// Up to this many lines of a kind are shown unchanged; more become one.
inline constexpr std::size_t kLinesOfAKind = 3;

// The lines in the order in which their kinds first appear. Lines are of one kind if they differ only in
// names and numbers. More than kLinesOfAKind of one kind become one line with "*" for the parts that differ:
// "trace: out/trace.process-*.txt (30 of these)".
std::vector<std::string> told_once(const std::vector<RepeatedLine>& lines);

}  // namespace forebay
