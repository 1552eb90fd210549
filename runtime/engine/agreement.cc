#include "forebay/agreement.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "forebay/error.h"

namespace forebay {
namespace {

constexpr std::size_t kMessageBytes = 1024;
constexpr std::uint64_t kTextBytesMax = 1 << 20;  // Bounds an allocation by a length that a peer sent.

struct Message {
  char text[kMessageBytes] = {};
};

// The texts of all ranks, in rank order.
template <typename T>
std::vector<T> exchanged(Communicator& communicator, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(communicator.size()));
  const Status status =
      communicator.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  if (!status.ok()) throw AgreementLost(status);
  return all;
}

// A rank that ends after its error must not be taken for lost by one that still reads the difference. A
// failure of this barrier changes nothing: the difference is known.
void let_all_read(Communicator& communicator) {
  static_cast<void>(communicator.barrier());
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

std::vector<std::pair<std::string, std::string>> key_value_lines(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t tab = line.find('\t');
    const std::size_t space = tab != std::string::npos ? tab : line.find(' ');
    lines.emplace_back(line.substr(0, space), space == std::string::npos ? "" : line.substr(space + 1));
  }
  return lines;
}

// Names the first key whose values differ, and which ranks have which.
std::string first_difference(const std::string& what, const std::vector<std::string>& texts) {
  for (const std::string& reference : texts) {
    for (const auto& [key, unused] : key_value_lines(reference)) {
      std::map<std::string, std::vector<int>> ranks_by_value;
      for (std::size_t rank = 0; rank < texts.size(); ++rank) {
        std::string value = "nothing";
        for (const auto& [other_key, other_value] : key_value_lines(texts[rank])) {
          if (other_key == key) value = other_value;
        }
        ranks_by_value[value].push_back(static_cast<int>(rank));
      }
      if (ranks_by_value.size() < 2) continue;
      std::string message = "the ranks were given different " + what + ": " + key + " is";
      const char* separator = " ";
      for (const auto& [value, ranks] : ranks_by_value) {
        const std::string shown = value.size() > 80 ? value.substr(0, 80) + "..." : value;
        message += separator + shown + " on " + ranks_text(ranks);
        separator = ", ";
      }
      return message + "; give every rank the same " + what;
    }
  }
  return "the ranks were given different " + what + ", beyond the " + std::to_string(kTextBytesMax) +
         " bytes that are compared";
}

}  // namespace

void agree(Communicator& communicator, const Status& mine) {
  const std::vector<std::uint64_t> codes = exchanged(communicator, static_cast<std::uint64_t>(mine.code()));
  const auto bad = std::find_if(codes.begin(), codes.end(), [](std::uint64_t code) { return code != 0; });
  if (bad == codes.end()) return;
  // Failures are rare, so the messages are sent only now.
  Message message;
  std::memcpy(message.text, mine.message().data(), std::min(mine.message().size(), kMessageBytes - 1));
  const std::vector<Message> messages = exchanged(communicator, message);
  let_all_read(communicator);
  const auto rank = static_cast<std::size_t>(bad - codes.begin());
  if (static_cast<int>(rank) == communicator.rank()) throw Error(mine);
  throw Error(static_cast<StatusCode>(*bad), "rank " + std::to_string(rank) + ": " + messages[rank].text);
}

void agree_on_text(Communicator& communicator, const std::string& what, const std::string& mine) {
  struct Summary {
    std::uint64_t hash;
    std::uint64_t bytes;
  };
  const Summary summary{XXH3_64bits(mine.data(), mine.size()), mine.size()};
  const std::vector<Summary> all = exchanged(communicator, summary);
  const bool same =
      std::all_of(all.begin(), all.end(), [&](const Summary& other) { return other.hash == summary.hash; });
  if (same) return;
  std::uint64_t longest = 0;
  for (const Summary& other : all) longest = std::max(longest, other.bytes);
  longest = std::min(longest, kTextBytesMax);
  std::vector<char> padded(longest, '\0');
  std::memcpy(padded.data(), mine.data(), std::min<std::size_t>(mine.size(), longest));
  std::vector<char> texts(longest * all.size(), '\0');
  const Status status =
      communicator.exchange(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(texts)));
  if (!status.ok()) throw AgreementLost(status);
  let_all_read(communicator);
  std::vector<std::string> by_rank;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    by_rank.emplace_back(&texts[rank * longest], std::min(all[rank].bytes, longest));
  throw Error(StatusCode::kInvalidArgument, first_difference(what, by_rank));
}

}  // namespace forebay
