// BytePairs: GPT-2's byte-level tokenizer. A text is divided into pieces (pieces.h), and the bytes of a piece
// are merged by pairs, the pair of the lowest rank first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/tokens.h"

namespace forebay::gpt {

class BytePairs {
 public:
  struct Merge {
    Token left, right, result;
  };
  struct Tables {
    std::vector<std::string> tokens;  // The bytes of each token. Empty: there is no token of this number.
    std::vector<Merge> merges;        // In the order of ranks.
    // Tokens that are taken from a text before it is divided, such as <|endoftext|>, and others that are
    // taken from the parts that are left then.
    std::vector<Token> whole, whole_after;
  };

  // Errors: throws Error(kCorruption) when a byte has no token or a merge names a token that is not there.
  explicit BytePairs(Tables tables);

  // One more than the largest token.
  std::size_t vocabulary() const { return tables_.tokens.size(); }
  // Any bytes, also such as are not UTF-8.
  std::vector<Token> encode(std::string_view text) const;
  // The bytes of a token; empty for a number without a token.
  std::string_view bytes_of(Token token) const;
  // Over all tables, by which ranks and runs notice that their tokenizers differ.
  std::uint64_t hash() const { return hash_; }

 private:
  struct Rule {
    std::uint32_t rank;
    Token result;
  };

  using KeptPieces = std::unordered_map<std::string_view, std::vector<Token>>;

  static std::uint32_t key(Token left, Token right) { return std::uint32_t{left} << 16 | right; }
  // Appends those of `whole` to `tokens`, and passes what lies between them to `append`.
  template <typename Append>
  void take(const std::vector<Token>& whole, std::string_view text, std::vector<Token>& tokens,
            const Append& append) const;
  void append_text(std::string_view text, KeptPieces& kept, std::vector<Token>& tokens) const;
  std::vector<Token> merged(std::string_view piece) const;

  Tables tables_;
  std::array<Token, 256> byte_tokens_{};
  std::unordered_map<std::uint32_t, Rule> rules_;  // By key().
  std::uint64_t hash_;
};

}  // namespace forebay::gpt
