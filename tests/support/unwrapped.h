// The words of a text that a program has wrapped into lines.
#pragma once

#include <sstream>
#include <string>

namespace forebay::testing {

// `text` with one space for each run of white space.
inline std::string unwrapped(const std::string& text) {
  std::istringstream words(text);
  std::string joined;
  for (std::string word; words >> word;) joined += (joined.empty() ? "" : " ") + word;
  return joined;
}

}  // namespace forebay::testing
