// Text for people who type commands.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace forebay {

// The name that a mistyped `word` most likely means, for "did you mean": the one with the fewest letters to
// add, drop, replace or swap. Empty when more than a third of the letters differ.
std::string nearest_name(std::string_view word, std::span<const std::string> names);

}  // namespace forebay
