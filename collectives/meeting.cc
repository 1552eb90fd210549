#include "meeting.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "fingerprint.h"

namespace forebay::internal {
namespace {

// A directory shared by hosts tells nobody that a file appeared, so it is read again after a while that
// doubles from the first to the second of these.
constexpr std::chrono::milliseconds kPollMin{1};
constexpr std::chrono::milliseconds kPollMax{32};

constexpr char kMagic[8] = {'f', 'o', 'r', 'e', 'b', 'a', 'y', '1'};
constexpr std::size_t kHostBytes = 64;
// More ranks than this in a file is damage, not a job.
constexpr std::uint32_t kSizeMax = 1u << 20;

struct Card {
  std::uint32_t size = 0;
  std::string host;
  std::vector<std::uint64_t> numbers;  // By rank; 0: not seen yet.
};

std::string encode(const Card& card) {
  std::string text(kMagic, sizeof(kMagic));
  text.append(reinterpret_cast<const char*>(&card.size), sizeof(card.size));
  char host[kHostBytes] = {};
  std::strncpy(host, card.host.c_str(), sizeof(host) - 1);
  text.append(host, sizeof(host));
  text.append(reinterpret_cast<const char*>(card.numbers.data()),
              card.numbers.size() * sizeof(std::uint64_t));
  return text;
}

// False for what is not a card of this protocol.
bool decode(const std::string& text, Card* card) {
  constexpr std::size_t kHead = sizeof(kMagic) + sizeof(card->size) + kHostBytes;
  if (text.size() < kHead || std::memcmp(text.data(), kMagic, sizeof(kMagic)) != 0) return false;
  std::memcpy(&card->size, text.data() + sizeof(kMagic), sizeof(card->size));
  if (card->size == 0 || card->size > kSizeMax || text.size() != kHead + card->size * sizeof(std::uint64_t)) {
    return false;
  }
  const char* host = text.data() + sizeof(kMagic) + sizeof(card->size);
  card->host.assign(host, strnlen(host, kHostBytes));
  card->numbers.resize(card->size);
  std::memcpy(card->numbers.data(), text.data() + kHead, card->size * sizeof(std::uint64_t));
  return true;
}

std::string card_name(int rank) {
  return "rank." + std::to_string(rank);
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (number == 0) {
    if (getrandom(&number, sizeof(number), 0) != sizeof(number)) number = 0;
  }
  return number;
}

std::string generation_of(const std::vector<std::uint64_t>& numbers) {
  // FNV-1a over random numbers: as unlikely to repeat as they are.
  std::uint64_t hash = 14695981039346656037u;
  for (const std::uint64_t number : numbers) {
    for (int i = 0; i < 8; ++i) hash = (hash ^ ((number >> (8 * i)) & 0xff)) * 1099511628211u;
  }
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

Status size_mismatch(int rank, int size, int other, std::uint32_t other_size) {
  return Status(StatusCode::kInvalidArgument,
                "rank " + std::to_string(rank) + " was started as one of " + std::to_string(size) +
                    " ranks, rank " + std::to_string(other) + " as one of " + std::to_string(other_size) +
                    "; start all ranks with the same number");
}

}  // namespace

Result<Meeting> meet(RendezvousStore& store, const Participant& participant,
                     std::chrono::steady_clock::time_point deadline,
                     std::chrono::milliseconds deadline_length) {
  const int rank = participant.rank;
  const int size = participant.size;
  const auto me = static_cast<std::size_t>(rank);
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  Card mine{.size = static_cast<std::uint32_t>(size), .host = host, .numbers = {}};
  mine.host.resize(std::min(mine.host.size(), kHostBytes - 1));
  mine.numbers.resize(static_cast<std::size_t>(size));
  mine.numbers[me] = random_number();
  FOREBAY_RETURN_IF_ERROR(store.write(card_name(rank), encode(mine)));

  // Who was here once is not missing, though it may have given up and gone before we do.
  std::vector<char> came(static_cast<std::size_t>(size));
  came[me] = 1;
  for (auto pause = kPollMin;; pause = std::min(pause * 2, kPollMax)) {
    std::vector<Card> cards(static_cast<std::size_t>(size));
    int disagreeing = -1;
    bool changed = false;
    bool agreed = true;
    for (int r = 0; r < size; ++r) {
      Card& card = cards[static_cast<std::size_t>(r)];
      const std::optional<std::string> text = store.read(card_name(r));
      const bool valid = text.has_value() && decode(*text, &card);
      if (r == rank) {
        if (valid && card.numbers[me] == mine.numbers[me]) continue;
        return Status(
            StatusCode::kInvalidArgument,
            "another process came to " + store.where() + " as rank " + std::to_string(rank) +
                " too; give every process a rank of its own, and every run a store directory of its own");
      }
      const bool knows_us = valid && me < card.numbers.size() && card.numbers[me] == mine.numbers[me];
      if (knows_us) came[static_cast<std::size_t>(r)] = 1;
      if (knows_us && card.size != mine.size) disagreeing = r;
      const bool usable = valid && static_cast<std::size_t>(r) < card.numbers.size();
      if (usable && card.numbers[static_cast<std::size_t>(r)] != mine.numbers[static_cast<std::size_t>(r)]) {
        mine.numbers[static_cast<std::size_t>(r)] = card.numbers[static_cast<std::size_t>(r)];
        changed = true;
      }
      agreed = agreed && valid && card.numbers == mine.numbers;
    }
    if (changed) FOREBAY_RETURN_IF_ERROR(store.write(card_name(rank), encode(mine)));
    if (disagreeing >= 0) {
      // Our card stays, so that the other rank can find the same error.
      return size_mismatch(rank, size, disagreeing, cards[static_cast<std::size_t>(disagreeing)].size);
    }
    if (changed) {
      pause = kPollMin;
      continue;
    }
    if (agreed) {
      cards[me] = mine;
      Meeting meeting{.generation = generation_of(mine.numbers), .first_host = cards[0].host};
      for (int r = 1; r < size; ++r) {
        if (cards[static_cast<std::size_t>(r)].host == meeting.first_host) continue;
        meeting.one_host = false;
        meeting.other_host_rank = r;
        meeting.other_host = cards[static_cast<std::size_t>(r)].host;
        break;
      }
      return meeting;
    }
    FOREBAY_RETURN_IF_ERROR(store.status());
    if (std::chrono::steady_clock::now() >= deadline) {
      store.remove(card_name(rank));
      std::vector<int> missing;
      std::string doubt;
      for (int r = 0; r < size; ++r) {
        const Card& card = cards[static_cast<std::size_t>(r)];
        if (!came[static_cast<std::size_t>(r)]) missing.push_back(r);
        if (card.size != 0 && card.size != mine.size && doubt.empty() && r != rank) {
          doubt = " (a file there says that rank " + std::to_string(r) + " is one of " +
                  std::to_string(card.size) + ")";
        }
      }
      const std::string who =
          missing.empty() ? "the others have given up" : rank_list(missing) + " did not come";
      return Status(StatusCode::kTimeout,
                    "rank " + std::to_string(rank) + " of " + std::to_string(size) + " waited " +
                        std::to_string(deadline_length.count()) + " ms in " + store.where() + ": " + who +
                        doubt + "; start all ranks, with the same store directory and the same size");
    }
    std::this_thread::sleep_for(pause);
  }
}

void leave_meeting(RendezvousStore& store, int rank) noexcept {
  store.remove(card_name(rank));
}

}  // namespace forebay::internal
