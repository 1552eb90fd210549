// Text from elsewhere (the words of a command line, the names of files, what a file says), as it is shown to
// people: on a terminal, or in a line of a report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace forebay {

// The text in one line that a terminal shows and does nothing else with. What would move the cursor, end the
// line, change the direction of writing or show as nothing is spelled out: "\n", "\x1b", "\u202e"; so are
// bytes that are no UTF-8. The rest stays, backslashes too: it is for eyes, and cannot be read back.
std::string shown_text(std::string_view text);

// Of the character at the beginning of `text`, which is not empty: its bytes, and 0 for what is no UTF-8.
std::size_t utf8_length(std::string_view text, std::uint32_t* character);

// Whether a character would be shown as nothing, or do something to its neighbours. Ends of lines are among
// them.
bool is_invisible(std::uint32_t character);

}  // namespace forebay
