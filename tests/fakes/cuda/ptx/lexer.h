// PTX text cut into tokens.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace forebay::ptx {

enum class TokenKind : std::uint8_t {
  kWord,    // An opcode with its modifiers, a directive, a register, a label or another name.
  kNumber,  // As written, without a sign.
  kString,  // Without its quotes.
  kMark,    // One character.
  kEnd,
};

struct Token {
  TokenKind kind;
  std::string_view text;  // Within the lexed text.
  unsigned line;          // From 1.

  bool is(std::string_view expected) const { return kind != TokenKind::kString && text == expected; }
};

// The tokens, ended by one of kEnd. Errors: throws Fault(kRefused).
std::vector<Token> lex(std::string_view text);

}  // namespace forebay::ptx
