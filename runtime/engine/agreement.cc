#include "agreement.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <sstream>
#include <vector>

#include "forebay/error.h"

namespace forebay {
namespace {

constexpr std::size_t kMessageBytes = 1024;
constexpr std::uint64_t kTextBytesMax = 1 << 20;  // A peer's length is not to be trusted with an allocation.

struct Message {
  char text[kMessageBytes] = {};
};

// Of all ranks, in rank order.
template <typename T>
std::vector<T> exchanged(Communicator& communicator, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(communicator.size()));
  throw_if_error(
      communicator.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all))));
  return all;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string difference(const std::vector<std::string>& texts) {
  const std::vector<std::string> first = lines_of(texts.front());
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const std::vector<std::string> other = lines_of(texts[rank]);
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string mine = i < first.size() ? first[i] : "nothing";
      const std::string theirs = i < other.size() ? other[i] : "nothing";
      if (mine != theirs)
        return "rank 0 has \"" + mine + "\", rank " + std::to_string(rank) + " has \"" + theirs + "\"";
    }
  }
  return "beyond the " + std::to_string(kTextBytesMax) + " bytes that are compared";
}

}  // namespace

void agree(Communicator& communicator, const Status& mine) {
  const std::vector<std::uint64_t> codes = exchanged(communicator, static_cast<std::uint64_t>(mine.code()));
  const auto bad = std::find_if(codes.begin(), codes.end(), [](std::uint64_t code) { return code != 0; });
  if (bad == codes.end()) return;
  // Rare, so the messages travel only now.
  Message message;
  std::memcpy(message.text, mine.message().data(), std::min(mine.message().size(), kMessageBytes - 1));
  const std::vector<Message> messages = exchanged(communicator, message);
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
  throw_if_error(
      communicator.exchange(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(texts))));
  std::vector<std::string> by_rank;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    by_rank.emplace_back(&texts[rank * longest], std::min(all[rank].bytes, longest));
  throw Error(StatusCode::kInvalidArgument, "the ranks were given different " + what + ": " +
                                                difference(by_rank) +
                                                "; give every rank of the group the same");
}

}  // namespace forebay
