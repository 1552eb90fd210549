#include "tests/fakes/cuda/ptx/lexer.h"

#include <string>

#include "tests/fakes/cuda/ptx/fault.h"

namespace forebay::ptx {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool begins_word(char c) {
  return is_letter(c) || c == '_' || c == '%' || c == '$' || c == '.';
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  std::vector<Token> run() {
    std::vector<Token> tokens;
    for (skip_space(); at_ < text_.size(); skip_space()) tokens.push_back(next());
    tokens.push_back({TokenKind::kEnd, {}, line_});
    return tokens;
  }

 private:
  char peek(std::size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  [[noreturn]] void refuse(const char* why) const {
    throw Fault(FaultKind::kRefused, "PTX line " + std::to_string(line_) + ": " + why);
  }

  void skip_space() {
    for (; at_ < text_.size(); ++at_) {
      if (peek() == '\n') {
        ++line_;
      } else if (peek() == '/' && peek(1) == '/') {
        at_ = std::min(text_.find('\n', at_), text_.size()) - 1;
      } else if (peek() == '/' && peek(1) == '*') {
        const std::size_t end = text_.find("*/", at_ + 2);
        if (end == std::string_view::npos) refuse("a comment has no end");
        for (; at_ < end + 1; ++at_) line_ += peek() == '\n';
      } else if (peek() != ' ' && peek() != '\t' && peek() != '\r') {
        return;
      }
    }
  }

  Token next() {
    const std::size_t begin = at_;
    TokenKind kind = TokenKind::kMark;
    if (is_digit(peek())) {
      kind = TokenKind::kNumber;
      while (is_digit(peek()) || is_letter(peek()) || peek() == '.') ++at_;
    } else if (begins_word(peek())) {
      kind = TokenKind::kWord;
      // A colon ends a label, but two of them lie within a modifier ("shared::cta").
      for (;;) {
        if (peek() == ':' && peek(1) == ':') {
          at_ += 2;
        } else if (begins_word(peek()) || is_digit(peek())) {
          ++at_;
        } else {
          break;
        }
      }
    } else if (peek() == '"') {
      const std::size_t end = text_.find('"', at_ + 1);
      if (end == std::string_view::npos) refuse("a string has no end");
      at_ = end + 1;
      return {TokenKind::kString, text_.substr(begin + 1, end - begin - 1), line_};
    } else {
      ++at_;
    }
    return {kind, text_.substr(begin, at_ - begin), line_};
  }

  std::string_view text_;
  std::size_t at_ = 0;
  unsigned line_ = 1;
};

}  // namespace

std::vector<Token> lex(std::string_view text) {
  return Lexer(text).run();
}

}  // namespace forebay::ptx
