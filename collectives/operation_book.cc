#include "collectives/operation_book.h"

#include <algorithm>
#include <utility>

namespace forebay::internal {
namespace {

std::chrono::nanoseconds steady_now() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

// Payload bytes that go to, or come from, one peer.
std::uint64_t piece_bytes(const Fingerprint& fingerprint) {
  switch (fingerprint.operation) {
    case Operation::kReduceScatter:
      return fingerprint.count * element_bytes(static_cast<DataType>(fingerprint.type));
    case Operation::kSplit:
    case Operation::kBarrier:
      return 0;
    default:
      return fingerprint.count;
  }
}

}  // namespace

Issued issued_message(Operation operation, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t sequence) {
  return {.fingerprint = {.sequence = sequence, .count = bytes, .operation = operation},
          .peer = peer,
          .tag = tag};
}

std::string describe(const Issued& issued) {
  const auto operation = issued.fingerprint.operation;
  if (operation != Operation::kSend && operation != Operation::kRecv) return describe(issued.fingerprint);
  return std::string(operation_name(operation)) + " of " + std::to_string(issued.fingerprint.count) +
         " bytes " + (operation == Operation::kSend ? "to" : "from") + " rank " +
         std::to_string(issued.peer) + " with tag " + std::to_string(issued.tag);
}

OperationBook::Flight::Flight(std::function<std::chrono::nanoseconds()> clock)
    : now(clock ? std::move(clock) : steady_now), start(now()) {
  entries.reserve(kRecordCount);
}

OperationBook::Entry* OperationBook::Flight::find(std::uint64_t number) {
  Entry& entry = entries[number % kRecordCount];
  return entry.number == number ? &entry : nullptr;
}

OperationBook::OperationBook(int rank, int size, std::function<std::chrono::nanoseconds()> now)
    : rank_(rank), size_(size), flight_(std::make_shared<Flight>(std::move(now))) {}

OperationBook::OperationBook(int rank, const OperationBook& origin, std::string where,
                             std::vector<int> world_ranks)
    : rank_(rank),
      size_(static_cast<int>(world_ranks.size())),
      flight_(origin.flight_),
      where_(std::move(where)),
      world_ranks_(std::move(world_ranks)) {}

std::uint64_t OperationBook::issue(const Issued& issued) {
  const std::chrono::nanoseconds now = flight_->time();
  const std::lock_guard lock(flight_->mutex);
  const std::uint64_t number = flight_->issued_count++;
  Entry entry{.number = number, .issued = issued, .where = where_, .queued = now};
  if (issued.peer >= 0 && !world_ranks_.empty())
    entry.issued.peer = world_ranks_[static_cast<std::size_t>(issued.peer)];
  std::vector<Entry>& entries = flight_->entries;
  if (entries.size() < kRecordCount) {
    entries.push_back(entry);
  } else {
    entries[number % kRecordCount] = entry;
  }
  return number;
}

void OperationBook::begin(std::uint64_t number) {
  const std::chrono::nanoseconds now = flight_->time();
  const std::lock_guard lock(flight_->mutex);
  if (Entry* const entry = flight_->find(number)) {
    entry->begun = now;
    entry->state = OperationState::kRunning;
  }
}

void OperationBook::end(std::uint64_t number, const Issued& issued, bool ok) {
  const std::chrono::nanoseconds now = flight_->time();
  {
    const std::lock_guard lock(flight_->mutex);
    if (Entry* const entry = flight_->find(number)) {
      entry->ended = now;
      entry->state = ok ? OperationState::kDone : OperationState::kFailed;
    }
  }
  if (!ok) return;
  const std::lock_guard lock(mutex_);
  count(issued);
}

void OperationBook::count(const Issued& issued) {
  const auto operation = issued.fingerprint.operation;
  Account& account = accounts_[static_cast<std::size_t>(operation)];
  if (account.peers.empty()) account.peers.resize(static_cast<std::size_t>(size_));
  ++account.count;
  const std::uint64_t bytes = piece_bytes(issued.fingerprint);
  if (operation == Operation::kSend) {
    account.peers[static_cast<std::size_t>(issued.peer)].sent_bytes += bytes;
  } else if (operation == Operation::kRecv) {
    account.peers[static_cast<std::size_t>(issued.peer)].received_bytes += bytes;
  } else {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      account.peers[static_cast<std::size_t>(peer)].sent_bytes += bytes;
      account.peers[static_cast<std::size_t>(peer)].received_bytes += bytes;
    }
  }
}

Traffic OperationBook::traffic() const {
  const std::lock_guard lock(mutex_);
  Traffic sum;
  for (const Account& account : accounts_) {
    for (const Traffic& peer : account.peers) {
      sum.sent_bytes += peer.sent_bytes;
      sum.received_bytes += peer.received_bytes;
    }
  }
  return sum;
}

std::vector<OperationTraffic> OperationBook::operation_traffic() const {
  const std::lock_guard lock(mutex_);
  std::vector<OperationTraffic> result;
  for (std::size_t i = 0; i < accounts_.size(); ++i) {
    if (accounts_[i].count == 0) continue;
    result.push_back({operation_name(static_cast<Operation>(i)), accounts_[i].count, accounts_[i].peers});
  }
  return result;
}

std::vector<OperationRecord> OperationBook::last_operations() const {
  std::vector<Entry> entries;
  {
    const std::lock_guard lock(flight_->mutex);
    entries = flight_->entries;
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.number < b.number; });
  std::vector<OperationRecord> result;
  for (const Entry& entry : entries)
    result.push_back({describe(entry.issued) + (entry.where.empty() ? "" : " " + entry.where), entry.state,
                      entry.queued, entry.begun, entry.ended});
  return result;
}

}  // namespace forebay::internal
