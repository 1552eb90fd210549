// Text of a report's web page: escaping, and figures with units.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace forebay {

// The text escaped for HTML, attributes included. Bytes that are not UTF-8, control characters and characters
// that change the direction of writing become U+FFFD.
std::string html_text(std::string_view text);

// The text as a JSON string that may stand inside a <script> element. Other characters as html_text.
std::string script_text(std::string_view text);

// "850 ns", "12.50 s", "3 min 20 s".
std::string time_text(std::uint64_t ns);

// "25 %" for 0.25, "0.4 %" below 10.
std::string percent_text(double part);

// "0x7f0010000000".
std::string address_text(std::uint64_t address);

}  // namespace forebay
