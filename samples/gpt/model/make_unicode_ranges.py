#!/usr/bin/env python3
"""Prints unicode_ranges.h: the letters and numbers of Unicode, as Python's unicodedata has them."""

import unicodedata


def ranges(group):
    found = []
    for code in range(0x80, 0x110000):
        if unicodedata.category(chr(code))[0] != group:
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def table(name, comment, group):
    entries = [f"{{0x{first:X}, 0x{last:X}}}," for first, last in ranges(group)]
    lines = [""]
    for entry in entries:
        if len(lines[-1]) + len(entry) > 105:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + entry
    body = "\n".join("    " + line for line in lines)
    return f"// {comment}\ninline constexpr CodeRange {name}[] = {{\n{body}\n}};\n"


print(f"""// The letters and numbers of Unicode {unicodedata.unidata_version} beyond ASCII. make_unicode_ranges.py writes this file.
#pragma once

#include <cstdint>

namespace forebay::gpt {{

// Code points from `first` to `last`.
struct CodeRange {{
  std::uint32_t first, last;
}};

// clang-format off
{table("kLetters", "Category L.", "L")}
{table("kNumbers", "Category N.", "N")}// clang-format on

}}  // namespace forebay::gpt""")
