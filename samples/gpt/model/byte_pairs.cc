#include "model/byte_pairs.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>

#include "forebay/error.h"
#include "model/pieces.h"

namespace forebay::gpt {
namespace {

// Pieces of which the tokens are kept while a text is encoded. Fewer: common words are merged again. More:
// memory.
constexpr std::size_t kKeptPieces = std::size_t{1} << 16;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x100000001B3u;  // FNV-1a
}

[[noreturn]] void refuse(const std::string& found) {
  throw Error(StatusCode::kCorruption,
              "the tokenizer is not one of bytes: " + found + "; give the files of a GPT-2");
}

}  // namespace

BytePairs::BytePairs(Tables tables) : tables_(std::move(tables)), hash_(0xCBF29CE484222325u) {
  const std::vector<std::string>& tokens = tables_.tokens;
  std::array<bool, 256> has{};
  for (std::size_t token = 0; token < tokens.size(); ++token) {
    hash_ = mixed(hash_, tokens[token].size());
    for (const char byte : tokens[token]) hash_ = mixed(hash_, static_cast<unsigned char>(byte));
    if (tokens[token].size() != 1) continue;
    const auto byte = static_cast<unsigned char>(tokens[token].front());
    byte_tokens_[byte] = static_cast<Token>(token);
    has[byte] = true;
  }
  for (std::size_t byte = 0; byte < has.size(); ++byte) {
    if (!has[byte]) refuse("the byte " + std::to_string(byte) + " has no token");
  }
  std::uint32_t rank = 0;
  for (const Merge& merge : tables_.merges) {
    for (const Token token : {merge.left, merge.right, merge.result}) {
      hash_ = mixed(hash_, token);
      if (token >= tokens.size() || tokens[token].empty())
        refuse("merge " + std::to_string(rank) + " names the token " + std::to_string(token) +
               ", which is not there");
    }
    rules_.try_emplace(key(merge.left, merge.right), Rule{rank++, merge.result});
  }
  for (const auto* const whole : {&tables_.whole, &tables_.whole_after}) {
    for (const Token token : *whole) {
      hash_ = mixed(hash_, token);
      if (token >= tokens.size() || tokens[token].empty())
        refuse("the whole token " + std::to_string(token) + " is not there");
    }
  }
}

std::string_view BytePairs::bytes_of(Token token) const {
  return token < tables_.tokens.size() ? std::string_view(tables_.tokens[token]) : std::string_view();
}

std::vector<Token> BytePairs::encode(std::string_view text) const {
  std::vector<Token> tokens;
  KeptPieces kept;
  take(tables_.whole, text, tokens, [&](std::string_view part) {
    take(tables_.whole_after, part, tokens, [&](std::string_view rest) { append_text(rest, kept, tokens); });
  });
  return tokens;
}

template <typename Append>
void BytePairs::take(const std::vector<Token>& whole, std::string_view text, std::vector<Token>& tokens,
                     const Append& append) const {
  // The next place of each whole token, found again once it is passed.
  std::vector<std::size_t> next(whole.size(), 0);
  std::size_t begin = 0;
  bool is_first = true;
  while (true) {
    std::size_t place = text.size();
    std::size_t chosen = next.size();
    for (std::size_t i = 0; i < next.size(); ++i) {
      const std::string_view bytes = bytes_of(whole[i]);
      if (is_first || next[i] < begin) next[i] = std::min(text.find(bytes, begin), text.size());
      // The longer of two at one place.
      const bool is_longer = chosen < next.size() && bytes.size() > bytes_of(whole[chosen]).size();
      if (next[i] < place || (next[i] == place && place < text.size() && is_longer)) {
        place = next[i];
        chosen = i;
      }
    }
    is_first = false;
    append(text.substr(begin, place - begin));
    if (chosen == next.size()) return;
    tokens.push_back(whole[chosen]);
    begin = place + bytes_of(whole[chosen]).size();
  }
}

void BytePairs::append_text(std::string_view text, KeptPieces& kept, std::vector<Token>& tokens) const {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = piece_end(text, begin);
    const std::string_view piece = text.substr(begin, end - begin);
    begin = end;
    const auto found = kept.find(piece);
    if (found != kept.end()) {
      tokens.insert(tokens.end(), found->second.begin(), found->second.end());
      continue;
    }
    std::vector<Token> of_piece = merged(piece);
    tokens.insert(tokens.end(), of_piece.begin(), of_piece.end());
    if (kept.size() < kKeptPieces) kept.emplace(piece, std::move(of_piece));
  }
}

// Symbols are a linked list, and a heap has the pairs that may be merged; an entry of a pair that has changed
// since is passed over. So a piece of n bytes takes n log n steps.
std::vector<Token> BytePairs::merged(std::string_view piece) const {
  struct Symbol {
    Token token;
    bool is_merged;  // Into the one before.
    std::size_t before, after;
  };
  struct Pair {
    std::uint32_t rank;
    std::size_t place;  // The index of the left symbol.
    Token left, right, result;
    bool operator>(const Pair& other) const {
      return std::tie(rank, place) > std::tie(other.rank, other.place);
    }
  };
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (std::size_t i = 0; i < piece.size(); ++i) {
    symbols.push_back({byte_tokens_[static_cast<unsigned char>(piece[i])], false, i == 0 ? kNone : i - 1,
                       i + 1 < piece.size() ? i + 1 : kNone});
  }
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;
  const auto offer = [&](std::size_t place) {
    if (place == kNone || symbols[place].after == kNone) return;
    const Token left = symbols[place].token, right = symbols[symbols[place].after].token;
    const auto rule = rules_.find(key(left, right));
    if (rule != rules_.end()) pairs.push({rule->second.rank, place, left, right, rule->second.result});
  };
  for (std::size_t i = 0; i < symbols.size(); ++i) offer(i);
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    Symbol& left = symbols[pair.place];
    if (left.is_merged || left.token != pair.left || left.after == kNone) continue;
    Symbol& right = symbols[left.after];
    if (right.token != pair.right) continue;
    left.token = pair.result;
    right.is_merged = true;
    left.after = right.after;
    if (left.after != kNone) symbols[left.after].before = pair.place;
    offer(left.before);
    offer(pair.place);
  }
  std::vector<Token> tokens;
  for (std::size_t i = 0; i != kNone && i < symbols.size(); i = symbols[i].after)
    tokens.push_back(symbols[i].token);
  return tokens;
}

}  // namespace forebay::gpt
