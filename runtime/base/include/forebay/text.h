// Text for people who type commands.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "forebay/span.h"

namespace forebay {

// printf into a string.
__attribute__((format(printf, 1, 2))) std::string format_text(const char* format, ...);

// A value from a file, for a message: at most 64 characters of it, and those that a terminal could act on
// spelled out ("\x1b").
std::string shown_value(std::string_view value);

// A path, for a message: cut off after 300 characters, and letters that a terminal could act on spelled out.
std::string shown_path(std::string_view path);

// Whether brackets are nested deeper than `depth_max` in a JSON text. Values that are nested without end use
// up the stack when they are shown.
bool is_nested_deeper(std::string_view json, int depth_max);

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
