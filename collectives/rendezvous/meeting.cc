#include "collectives/rendezvous/meeting.h"

#include <sys/random.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <thread>

#include "collectives/fingerprint.h"
#include "collectives/rendezvous/byte_text.h"
#include "forebay/log.h"

namespace forebay::internal {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A directory shared by hosts tells nobody that a file appeared, so the store is read again after a while
// that doubles from the first to the second of these.
constexpr milliseconds kPollMin{1};
constexpr milliseconds kPollMax{32};

constexpr std::size_t kPresenceBytesMax = 512;
constexpr std::string_view kMagic = "forebay3";

}  // namespace

std::string encode(const Card& card) {
  std::string text(kMagic);
  text += encode(card.introduction);
  append_text(text, card.presence);
  for (const std::uint64_t number : card.numbers) append_number(text, number);
  return text;
}

bool decode(std::string_view text, Card* card) {
  if (!text.starts_with(kMagic)) return false;
  text.remove_prefix(kMagic.size());
  if (!decode(&text, &card->introduction)) return false;
  if (!take_text(&text, kPresenceBytesMax, &card->presence)) return false;
  const auto size = static_cast<std::size_t>(card->introduction.who.size);
  if (text.size() != size * sizeof(std::uint64_t)) return false;
  card->numbers.resize(size);
  for (std::uint64_t& number : card->numbers) take_number(&text, &number);
  return true;
}

namespace {

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

std::string absent_ranks(const std::vector<char>& came) {
  std::vector<int> missing;
  for (std::size_t r = 0; r < came.size(); ++r) {
    if (came[r] == 0) missing.push_back(static_cast<int>(r));
  }
  return missing.empty() ? "the others have given up" : rank_list(missing) + " did not join";
}

Status nobody_came(const RendezvousStore& store, const Participant& me, milliseconds waited,
                   const std::vector<char>& came, const std::string& doubt) {
  return Status(StatusCode::kTimeout, "rank " + std::to_string(me.rank) + " of " + std::to_string(me.size) +
                                          " waited " + std::to_string(waited.count()) + " ms in " +
                                          store.where() + ": " + absent_ranks(came) +
                                          (doubt.empty() ? "" : " (" + doubt + ")") +
                                          "; start all ranks, with the same store and the same size");
}

// A person who waits learns for whom, from one of those that came.
class Notice {
 public:
  Notice(const RendezvousStore& store, const Participant& me, SteadyClock::time_point deadline)
      : store_(store), me_(me), deadline_(deadline) {}

  void say(const std::vector<char>& came) {
    const SteadyClock::time_point now = SteadyClock::now();
    if (said_ || now < begin_ + kPatience) return;
    said_ = true;
    const auto first = std::find(came.begin(), came.end(), 1) - came.begin();
    if (first != me_.rank) return;
    log(LogLevel::kWarning, "rank %d of %d waits in %s, %lld s more: %s yet", me_.rank, me_.size,
        store_.where().c_str(),
        static_cast<long long>(std::chrono::ceil<std::chrono::seconds>(deadline_ - now).count()),
        absent_ranks(came).c_str());
  }

 private:
  // Shorter: hosts that start one after the other make noise. Longer: a person believes that it hangs.
  static constexpr milliseconds kPatience{1500};

  const RendezvousStore& store_;
  const Participant& me_;
  const SteadyClock::time_point begin_ = SteadyClock::now();
  const SteadyClock::time_point deadline_;
  bool said_ = false;
};

Meeting meeting_of(std::string generation, const std::vector<std::string>& hosts) {
  Meeting meeting{.generation = std::move(generation), .first_host = hosts.front()};
  const auto other = std::find_if(hosts.begin(), hosts.end(),
                                  [&](const std::string& host) { return host != meeting.first_host; });
  if (other != hosts.end()) {
    meeting.one_host = false;
    meeting.other_host_rank = static_cast<int>(other - hosts.begin());
    meeting.other_host = *other;
  }
  return meeting;
}

// In a store that lets in only the ranks of this run.
Result<Meeting> await_attendance(RendezvousStore& store, const Participant& me,
                                 SteadyClock::time_point deadline, milliseconds deadline_length) {
  Notice notice(store, me, deadline);
  for (auto pause = kPollMin;; pause = std::min(pause * 2, kPollMax)) {
    const Attendance attendance = store.attendance().value_or(Attendance{});
    FOREBAY_RETURN_IF_ERROR(store.status());
    if (attendance.hosts.size() == static_cast<std::size_t>(me.size))
      return meeting_of(attendance.generation, attendance.hosts);
    const std::vector<char> came(attendance.came.begin(), attendance.came.end());
    notice.say(came);
    if (SteadyClock::now() >= deadline) {
      return store.fail(nobody_came(store, me, deadline_length, came, attendance.doubt));
    }
    std::this_thread::sleep_for(pause);
  }
}

// In a store that anybody of this user may write to, now or in an earlier run.
Result<Meeting> exchange_cards(RendezvousStore& store, const Participant& me,
                               SteadyClock::time_point deadline, milliseconds deadline_length) {
  const int rank = me.rank;
  const auto own = static_cast<std::size_t>(rank);
  const auto size = static_cast<std::size_t>(me.size);
  Card mine{introduce(me), store.presence(), std::vector<std::uint64_t>(size)};
  mine.numbers[own] = random_number();
  FOREBAY_RETURN_IF_ERROR(store.write(card_name(rank), encode(mine)));

  // Who was here once is not missing, though it may have given up and gone before we do.
  std::vector<char> came(size);
  came[own] = 1;
  Notice notice(store, me, deadline);
  for (auto pause = kPollMin;; pause = std::min(pause * 2, kPollMax)) {
    std::vector<Card> cards(size);
    Status disagreement;
    bool changed = false;
    bool agreed = true;
    for (std::size_t r = 0; r < size; ++r) {
      Card& card = cards[r];
      const std::optional<std::string> text = store.read(card_name(static_cast<int>(r)));
      const bool valid = text.has_value() && decode(*text, &card);
      if (r == own) {
        if (valid && own < card.numbers.size() && card.numbers[own] == mine.numbers[own]) continue;
        if (!text.has_value()) {
          return Status(StatusCode::kIoError,
                        "what rank " + std::to_string(rank) + " wrote to " + store.where() +
                            " is gone; leave the directory alone until the run has ended");
        }
        return Status(StatusCode::kInvalidArgument,
                      "another process came to " + store.where() + " as rank " + std::to_string(rank) +
                          " too; give every process a rank of its own, and every run a store of its own");
      }
      const bool knows_us = valid && own < card.numbers.size() && card.numbers[own] == mine.numbers[own];
      if (knows_us) {
        came[r] = 1;
        store.expect(static_cast<int>(r), card.presence);
      }
      if (knows_us && disagreement.ok()) disagreement = compare(mine.introduction, card.introduction);
      const bool usable = valid && r < card.numbers.size();
      if (usable && card.numbers[r] != mine.numbers[r]) {
        mine.numbers[r] = card.numbers[r];
        changed = true;
      }
      agreed = agreed && valid && card.numbers == mine.numbers;
    }
    if (changed) FOREBAY_RETURN_IF_ERROR(store.write(card_name(rank), encode(mine)));
    // Our card stays, so that the other rank can find the same error.
    FOREBAY_RETURN_IF_ERROR(disagreement);
    if (changed) {
      pause = kPollMin;
      continue;
    }
    if (agreed) {
      cards[own] = mine;
      std::vector<std::string> hosts;
      for (const Card& card : cards) hosts.push_back(card.introduction.host);
      return meeting_of(generation_of(mine.numbers), hosts);
    }
    FOREBAY_RETURN_IF_ERROR(store.status());
    notice.say(came);
    if (SteadyClock::now() >= deadline) {
      store.remove(card_name(rank));
      std::string doubt;
      for (std::size_t r = 0; r < size && doubt.empty(); ++r) {
        if (r == own || cards[r].numbers.empty()) continue;
        if (const Status differs = compare(mine.introduction, cards[r].introduction); !differs.ok())
          doubt = "a text there, perhaps an old one, says that " + differs.message();
      }
      return nobody_came(store, me, deadline_length, came, doubt);
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

Result<Meeting> meet(RendezvousStore& store, const Participant& me, SteadyClock::time_point deadline,
                     milliseconds deadline_length) {
  if (store.attendance()) return await_attendance(store, me, deadline, deadline_length);
  return exchange_cards(store, me, deadline, deadline_length);
}

void leave_meeting(RendezvousStore& store, int rank) noexcept {
  if (!store.attendance()) store.remove(card_name(rank));
}

}  // namespace forebay::internal
