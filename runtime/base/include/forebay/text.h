// Text for people who type commands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "forebay/span.h"

namespace forebay {

// printf into a string.
__attribute__((format(printf, 1, 2))) std::string format_text(const char* format, ...);

// Foreign text (words of a command line, names and content of files) as one line of visible characters.
// Characters that would move the cursor, end the line, change the direction of writing or be invisible are
// spelled out ("\n", "\x1b", "\u202e"), and so are bytes that are not UTF-8. The rest stays, backslashes too:
// the text is for people and cannot be parsed back.
std::string shown_text(std::string_view text);

// shown_text() of at most 64 bytes: a value from a file, for a message.
std::string shown_value(std::string_view value);

// shown_text() of at most 300 bytes: a path, for a message.
std::string shown_path(std::string_view path);

// Reads the first character of `text` and returns its length in bytes; 0 if it is not UTF-8.
//
// Requires: `text` is not empty.
std::size_t utf8_length(std::string_view text, std::uint32_t* character);

// Whether a character is invisible or changes its neighbours. Ends of lines are invisible.
bool is_invisible(std::uint32_t character);

// Whether brackets are nested deeper than `depth_max` in a JSON text. Values that are nested without end use
// up the stack when they are shown.
bool is_nested_deeper(std::string_view json, int depth_max);

// A name that the outermost object of a JSON text has twice, as it is written there; nothing if there is
// none. `size`: how many members the parsed object has, so that names that are written in two ways count as
// one.
//
// Requires: `json` was parsed. Cost: n log n.
std::optional<std::string> repeated_name(std::string_view json, std::size_t size);

// The name that a mistyped `word` most likely means, for "did you mean": the one with the fewest letters to
// add, drop, replace or swap. Empty when more than a third of the letters differ.
std::string nearest_name(std::string_view word, Span<const std::string> names);

// Breaks lines at spaces so that none is longer than `width`; longer words stay whole. Each line after the
// first begins with `indent` spaces and, within a paragraph, with the spaces that the paragraph begins with.
// The first line begins at column `indent`, and the text ends without a line break.
std::string wrap_text(std::string_view text, std::size_t width, std::size_t indent = 0);

// How parse_bytes() (units.h) reads sizes; for help texts.
inline constexpr const char* kBytesSyntax =
    "65536, 64KiB, 80G, 1.5 TiB (K, M, G and T are powers of 1024, as KiB, MiB, GiB and TiB; KB, MB, GB and "
    "TB of 1000)";

// "80 bytes; did you mean 80GiB?" for a number below 4096 without a suffix, where memory of a device or a
// host is meant; otherwise empty. 0 is no question.
std::string size_question(const char* text);

}  // namespace forebay
