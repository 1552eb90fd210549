// Makes foreign text (words of a command line, names and content of files) safe to show: on a terminal, or in
// a line of a report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace forebay {

// The text as one line of visible characters. Characters that would move the cursor, end the line, change the
// direction of writing or be invisible are spelled out ("\n", "\x1b", "\u202e"), and so are bytes that are
// not UTF-8. The rest stays, backslashes too: the text is for people and cannot be parsed back.
std::string shown_text(std::string_view text);

// Reads the first character of `text` and returns its length in bytes; 0 if it is not UTF-8.
//
// Requires: `text` is not empty.
std::size_t utf8_length(std::string_view text, std::uint32_t* character);

// Whether a character is invisible or changes its neighbours. Ends of lines are invisible.
bool is_invisible(std::uint32_t character);

}  // namespace forebay
