// Lines of many processes or files that say the same, told once with how many of them there are.
#pragma once

#include <string>
#include <vector>

namespace forebay {

// A line, and the name in it by which it differs from others of its kind besides numbers: a path, or nothing.
struct RepeatedLine {
  std::string text;
  std::string name;
};

// So many lines of a kind are shown as they are; more become one.
inline constexpr std::size_t kLinesOfAKind = 3;

// The lines in the order in which their kinds first appear. Lines are of one kind when they are the same but
// for their names and numbers. Where there are more than kLinesOfAKind of one, they become a line with "*"
// for what differs: "trace: out/trace.process-*.txt (30 of these)".
std::vector<std::string> told_once(const std::vector<RepeatedLine>& lines);

}  // namespace forebay
