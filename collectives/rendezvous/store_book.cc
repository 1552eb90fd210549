#include "collectives/rendezvous/store_book.h"

#include <algorithm>

#include "collectives/fingerprint.h"

namespace forebay::internal {
namespace {

// The memory of a text in the tables, beside its bytes.
constexpr std::size_t kTextCost = 128;

std::string rank_name(int rank) {
  return "rank " + std::to_string(rank);
}

Message refusal(const Status& cause) {
  return {MessageType::kRefused, {}, encode_failure(cause)};
}

}  // namespace

StoreBook::StoreBook(Greeting own, std::string where) : own_(std::move(own)), where_(std::move(where)) {
  const auto size = static_cast<std::size_t>(own_.introduction.who.size);
  roster_.came.resize(size);
  introductions_.resize(size);
  addresses_.resize(size);
  tokens_.resize(size);
  answered_.resize(size);
}

Status StoreBook::fail(Status cause) {
  if (!cause_.ok()) return cause_;
  cause_ = std::move(cause);
  news_.push_back({MessageType::kFirstFailure, {}, encode_failure(cause_)});
  return cause_;
}

Status StoreBook::greet(const Greeting& greeting, const std::string& from) {
  const Introduction& introduction = greeting.introduction;
  const std::string who = rank_name(introduction.who.rank) + " at " + from;
  if (greeting.job != own_.job) {
    note_refusal(from, who + " is of the run \"" + greeting.job + "\"");
    return invalid_argument(
        who, " is of the run \"", greeting.job, "\", but the store at ", where_, " is that of the run \"",
        own_.job, "\"; end the remaining processes of the earlier run, or give each run a port of its own");
  }
  if (const auto index = static_cast<std::size_t>(introduction.who.rank);
      index < answered_.size() && answered_[index] == 0) {
    answered_[index] = 1;
    ++answered_count_;
  }
  if (!cause_.ok()) return cause_;
  if (is_complete()) {
    note_refusal(from, who + " came late");
    return Status(StatusCode::kUnavailable, who, " came to ", where_, " when all ",
                  own_.introduction.who.size,
                  " ranks of the run were there already; start all ranks together, and each run at a "
                  "port of its own");
  }
  return admit(introduction, from);
}

Status StoreBook::admit(const Introduction& introduction, const std::string& from) {
  if (Status differs = compare(own_.introduction, introduction); !differs.ok()) return fail(differs);
  const auto index = static_cast<std::size_t>(introduction.who.rank);
  if (roster_.came[index]) {
    return fail(invalid_argument("two processes came to ", where_, " as ", rank_name(introduction.who.rank),
                                 ", from ", addresses_[index], " and from ", from,
                                 "; give every process a rank of its own, and every run a port of its own"));
  }
  roster_.came[index] = true;
  introductions_[index] = introduction;
  addresses_[index] = from;
  tokens_[index] = hexadecimal(random_digest());
  if (++came_count_ < introductions_.size()) return {};
  for (const Introduction& one : introductions_) roster_.hosts.push_back(one.host);
  roster_.generation = hexadecimal(random_digest()).substr(0, 16);
  return {};
}

bool StoreBook::may_return(const Greeting& greeting, const std::string& token) const {
  const auto index = static_cast<std::size_t>(greeting.introduction.who.rank);
  return greeting.job == own_.job && index < tokens_.size() && !token.empty() && tokens_[index] == token;
}

Message StoreBook::answer(int rank, const Message& message) {
  switch (message.type) {
    case MessageType::kWrite:
      return write(message, false);
    case MessageType::kWriteOnce:
      return write(message, true);
    case MessageType::kRead: {
      const auto found = texts_.find(message.name);
      if (found == texts_.end()) return {MessageType::kNothing, {}, {}};
      return {MessageType::kText, {}, found->second.content};
    }
    case MessageType::kRemove:
      if (const auto found = texts_.find(message.name); found != texts_.end()) {
        text_bytes_ -= found->first.size() + found->second.content.size() + kTextCost;
        texts_.erase(found);
      }
      return {MessageType::kDone, {}, {}};
    case MessageType::kRoster:
      return {MessageType::kText, {}, encode(roster_)};
    case MessageType::kFail:
      return {MessageType::kText, {}, encode_failure(fail(decode_failure(message.content)))};
    default:
      return refusal(Status(StatusCode::kInternal, rank_name(rank),
                            " sent the store a message that is for "
                            "clients; run one version of forebay"));
  }
}

Message StoreBook::write(const Message& message, bool once) {
  const auto found = texts_.find(message.name);
  if (once && found != texts_.end()) return {MessageType::kText, {}, found->second.content};
  std::size_t bytes = text_bytes_ + message.name.size() + message.content.size() + kTextCost;
  if (found != texts_.end()) bytes -= found->first.size() + found->second.content.size() + kTextCost;
  if (bytes > kBytesMax) {
    return refusal(Status(StatusCode::kOutOfMemory, "the store at ", where_, " cannot keep ",
                          message.content.size(), " bytes more: it has ", text_bytes_, " of at most ",
                          kBytesMax, "; it is for the texts with which ranks meet, not for data"));
  }
  text_bytes_ = bytes;
  texts_[message.name] = {message.content, once};
  if (!once) return {MessageType::kDone, {}, {}};
  shared_ = true;
  news_.push_back({MessageType::kShared, message.name, message.content});
  return {MessageType::kText, {}, message.content};
}

void StoreBook::post(const Message& message) {
  // A text that was written once is not replaced.
  if (!texts_.contains(message.name)) news_.push_back({MessageType::kPosted, message.name, message.content});
}

void StoreBook::leave(int rank) {
  if (is_complete()) return;
  static_cast<void>(fail(Status(StatusCode::kPeerLost, rank_name(rank), " left before all ranks had come to ",
                                where_, "; see its output")));
}

std::string lost_name(int rank) {
  return "lost." + std::to_string(rank);
}

void StoreBook::lose(int rank) {
  static_cast<void>(write({MessageType::kWriteOnce, lost_name(rank), {}}, true));
  static_cast<void>(
      fail(Status(StatusCode::kPeerLost, rank_name(rank), " at ", addresses_[static_cast<std::size_t>(rank)],
                  " ended: its connection to ", where_, " closed; see why it ended")));
}

void StoreBook::note_refusal(const std::string& from, const std::string& reason) {
  ++refusal_count_;
  roster_.doubt = "refused " + std::to_string(refusal_count_) +
                  (refusal_count_ == 1 ? " connection, from " : " connections, the last from ") + from +
                  ": " + reason;
  roster_.doubt.resize(std::min(roster_.doubt.size(), kDoubtBytesMax));
}

std::vector<Message> StoreBook::take_news() {
  return std::exchange(news_, {});
}

std::vector<Message> StoreBook::news_for_newcomer() const {
  std::vector<Message> news;
  for (const auto& [name, text] : texts_) {
    if (text.shared) news.push_back({MessageType::kShared, name, text.content});
  }
  return news;
}

}  // namespace forebay::internal
