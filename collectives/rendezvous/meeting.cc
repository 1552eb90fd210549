#include "collectives/rendezvous/meeting.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>

#include "collectives/fingerprint.h"
#include "collectives/rendezvous/authentication.h"
#include "collectives/rendezvous/byte_text.h"
#include "forebay/log.h"
#include "forebay/text.h"

namespace forebay::internal {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A directory that hosts share notifies nobody of a new file, so the store is polled. The pause doubles from
// the first to the second of these.
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
  while (number == 0) std::memcpy(&number, random_digest().data(), sizeof(number));
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
  return Status(StatusCode::kTimeout, "rank ", me.rank, " of ", me.size, " waited ", waited.count(),
                " ms in ", shown_text(store.where()), ": ", absent_ranks(came),
                doubt.empty() ? "" : " (" + doubt + ")",
                "; start all ranks, with the same store and the same size");
}

// Tells a person who waits for which ranks, from one of the ranks that are here.
class Notice {
 public:
  Notice(const RendezvousStore& store, const Participant& me, SteadyClock::time_point deadline)
      : store_(store), me_(me), deadline_(deadline) {}

  void say(const std::vector<char>& came) {
    const SteadyClock::time_point now = SteadyClock::now();
    if (said_ || now < begin_ + kPatience) return;
    said_ = true;
    const auto left = std::chrono::ceil<std::chrono::seconds>(deadline_ - now).count();
    const auto first = std::find(came.begin(), came.end(), 1) - came.begin();
    if (first != me_.rank || left <= 0) return;
    log(LogLevel::kWarning, "rank %d of %d waits in %s: %s yet; it waits at most %lld s more", me_.rank,
        me_.size, shown_text(store_.where()).c_str(), absent_ranks(came).c_str(),
        static_cast<long long>(left));
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

// The cards of a meeting in a store that anybody of this user may write to, now or in an earlier run.
class CardTable {
 public:
  CardTable(RendezvousStore& store, const Participant& me)
      : store_(store),
        rank_(me.rank),
        own_(static_cast<std::size_t>(me.rank)),
        mine_{introduce(me), store.presence(), std::vector<std::uint64_t>(static_cast<std::size_t>(me.size))},
        came_(static_cast<std::size_t>(me.size)) {
    mine_.numbers[own_] = random_number();
    came_[own_] = 1;
  }

  // By rank: the ranks of this run that have been here. One may have given up since, and is not missing.
  const std::vector<char>& came() const noexcept { return came_; }

  Status write() { return store_.write(card_name(rank_), encode(mine_)); }
  void remove() { store_.remove(card_name(rank_)); }

  // Reads all cards. Errors: another process has this rank, this rank's card is gone, or another rank of this
  // run differs in a way that it must not.
  Status read() {
    cards_.assign(came_.size(), {});
    has_changed_ = false;
    agrees_ = true;
    Status disagreement;
    for (std::size_t r = 0; r < cards_.size(); ++r) {
      const std::optional<std::string> text = store_.read(card_name(static_cast<int>(r)));
      Card& card = cards_[r];
      const bool is_card = text.has_value() && decode(*text, &card);
      const bool knows_us =
          is_card && own_ < card.numbers.size() && card.numbers[own_] == mine_.numbers[own_];
      if (r == own_) {
        if (!knows_us) return not_our_card(text.has_value());
        continue;
      }
      if (knows_us) {
        came_[r] = 1;
        store_.expect(static_cast<int>(r), card.presence);
        if (disagreement.ok()) disagreement = compare(mine_.introduction, card.introduction);
      }
      if (is_card && r < card.numbers.size() && card.numbers[r] != mine_.numbers[r]) {
        mine_.numbers[r] = card.numbers[r];
        has_changed_ = true;
      }
      agrees_ = agrees_ && is_card && card.numbers == mine_.numbers;
    }
    if (has_changed_) FOREBAY_RETURN_IF_ERROR(write());
    // After a disagreement our card stays, so that the other rank can find the same error.
    return disagreement;
  }
  // The last read() found a number that this rank's card did not have.
  bool has_changed() const noexcept { return has_changed_; }
  // All cards say the same: the ranks have met.
  bool agrees() const noexcept { return agrees_ && !has_changed_; }

  Meeting meeting() const {
    std::vector<std::string> hosts;
    for (const Card& card : cards_) hosts.push_back(card.introduction.host);
    hosts[own_] = mine_.introduction.host;
    return meeting_of(generation_of(mine_.numbers), hosts);
  }

  // How one of the cards differs from ours, though its rank may be of an earlier run; may be empty.
  std::string doubt() const {
    for (std::size_t r = 0; r < cards_.size(); ++r) {
      if (r == own_ || cards_[r].numbers.empty()) continue;
      if (const Status differs = compare(mine_.introduction, cards_[r].introduction); !differs.ok())
        return "a text there, perhaps an old one, says that " + differs.message();
    }
    return {};
  }

 private:
  Status not_our_card(bool is_there) const {
    if (!is_there) {
      return Status(StatusCode::kIoError, "the text that rank ", rank_, " wrote to ", store_.where(),
                    " is gone; leave the directory alone until the run has ended");
    }
    return invalid_argument("another process came to ", store_.where(), " as rank ", rank_,
                            " too; give every process a rank of its own, and every run a store of its own");
  }

  RendezvousStore& store_;
  const int rank_;
  const std::size_t own_;
  Card mine_;
  std::vector<Card> cards_;  // By rank, as last read; a card's numbers are empty where it could not be read.
  std::vector<char> came_;
  bool has_changed_ = false;
  bool agrees_ = false;
};

Result<Meeting> exchange_cards(RendezvousStore& store, const Participant& me,
                               SteadyClock::time_point deadline, milliseconds deadline_length) {
  CardTable table(store, me);
  FOREBAY_RETURN_IF_ERROR(table.write());
  Notice notice(store, me, deadline);
  for (auto pause = kPollMin;; pause = std::min(pause * 2, kPollMax)) {
    FOREBAY_RETURN_IF_ERROR(table.read());
    if (table.has_changed()) {
      pause = kPollMin;
      continue;
    }
    if (table.agrees()) return table.meeting();
    FOREBAY_RETURN_IF_ERROR(store.status());
    notice.say(table.came());
    if (SteadyClock::now() >= deadline) {
      table.remove();
      return nobody_came(store, me, deadline_length, table.came(), table.doubt());
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
