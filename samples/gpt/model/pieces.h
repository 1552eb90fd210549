// The pieces into which GPT-2 divides a text before it merges bytes: a contraction, or letters, numbers or
// other characters with a space before them, or white space. GPT-2 writes them as
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Source: https://github.com/openai/gpt-2, src/encoder.py.
#pragma once

#include <cstddef>
#include <string_view>

namespace forebay::gpt {

// The end of the piece of `text` that begins at `begin`. A byte that is not part of UTF-8 counts as a
// character that is no letter, number or space. Requires: begin < text.size().
std::size_t piece_end(std::string_view text, std::size_t begin);

}  // namespace forebay::gpt
