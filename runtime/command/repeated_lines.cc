#include "runtime/command/repeated_lines.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <map>
#include <string_view>
#include <utility>

namespace forebay {
namespace {

bool is_digit(char letter) {
  return std::isdigit(static_cast<unsigned char>(letter)) != 0;
}

// A line taken apart: `fixed[0]`, `varying[0]`, `fixed[1]`, ... Numbers vary, and so does the name.
struct Pieces {
  std::vector<std::string> fixed{""};
  std::vector<std::string> varying;
};

Pieces pieces_of(const RepeatedLine& line) {
  Pieces pieces;
  const auto vary = [&](std::string_view text) {
    pieces.varying.emplace_back(text);
    pieces.fixed.emplace_back();
  };
  const std::string_view text = line.text;
  for (std::size_t at = 0; at < text.size();) {
    if (!line.name.empty() && text.substr(at, line.name.size()) == line.name) {
      vary(line.name);
      at += line.name.size();
    } else if (is_digit(text[at])) {
      const auto end = std::find_if_not(text.begin() + static_cast<std::ptrdiff_t>(at), text.end(), is_digit);
      const auto length = static_cast<std::size_t>(end - text.begin()) - at;
      vary(text.substr(at, length));
      at += length;
    } else {
      pieces.fixed.back() += text[at++];
    }
  }
  return pieces;
}

// The common beginning and the common end of all, and "*" in between; a number is not cut.
std::string pattern_of(const std::vector<std::string>& names) {
  const std::string& first = names.front();
  std::size_t head = first.size();
  std::size_t tail = first.size();
  for (const std::string& name : names) {
    const auto apart = std::mismatch(first.begin(), first.end(), name.begin(), name.end()).first;
    head = std::min(head, static_cast<std::size_t>(apart - first.begin()));
    const auto apart_behind = std::mismatch(first.rbegin(), first.rend(), name.rbegin(), name.rend()).first;
    tail = std::min(tail, static_cast<std::size_t>(apart_behind - first.rbegin()));
  }
  if (head == first.size() && tail == first.size()) return first;
  // "10" and "100" share a beginning and an end that overlap.
  for (const std::string& name : names) tail = std::min(tail, name.size() - std::min(name.size(), head));
  while (head > 0 && is_digit(first[head - 1])) --head;
  while (tail > 0 && is_digit(first[first.size() - tail])) --tail;
  return first.substr(0, head) + "*" + first.substr(first.size() - tail);
}

std::string text_of(const std::vector<Pieces>& kind) {
  std::string text = kind.front().fixed.front();
  for (std::size_t i = 0; i < kind.front().varying.size(); ++i) {
    std::vector<std::string> names;
    for (const Pieces& pieces : kind) names.push_back(pieces.varying[i]);
    text += pattern_of(names) + kind.front().fixed[i + 1];
  }
  return text + " (" + std::to_string(kind.size()) + " of these)";
}

}  // namespace

std::vector<std::string> told_once(const std::vector<RepeatedLine>& lines) {
  struct Kind {
    std::vector<Pieces> pieces;
    std::vector<std::string> texts;
  };
  std::vector<Kind> kinds;
  std::map<std::vector<std::string>, std::size_t> known;
  for (const RepeatedLine& line : lines) {
    Pieces pieces = pieces_of(line);
    const auto [found, is_new] = known.emplace(pieces.fixed, kinds.size());
    if (is_new) kinds.emplace_back();
    Kind& kind = kinds[found->second];
    kind.pieces.push_back(std::move(pieces));
    kind.texts.push_back(line.text);
  }
  std::vector<std::string> told;
  for (const Kind& kind : kinds) {
    if (kind.texts.size() > kLinesOfAKind) {
      told.push_back(text_of(kind.pieces));
    } else {
      told.insert(told.end(), kind.texts.begin(), kind.texts.end());
    }
  }
  return told;
}

}  // namespace forebay
