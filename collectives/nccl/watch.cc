#include "collectives/nccl/watch.h"

#include <map>
#include <utility>

namespace forebay::internal {
namespace {

bool is(const NcclOperation& operation, Operation kind) {
  return operation.fingerprint.operation == kind;
}

std::string size_and_tag(const NcclOperation& operation) {
  return std::to_string(operation.fingerprint.count) + " bytes with tag " + std::to_string(operation.tag);
}

Status compare_message(int receiver, const NcclOperation& recv, int sender, const NcclOperation& send) {
  if (recv.fingerprint.count == send.fingerprint.count && recv.tag == send.tag) return {};
  return invalid_argument(describe(recv), " on rank ", receiver, ", but rank ", sender, " sends ",
                          size_and_tag(send), "; give both the same sizes and tags in the same order");
}

// The first collective that two ranks have issued differently.
Status judge_collectives(std::span<const NcclHeartbeat> members, std::span<const int> numbers) {
  struct Issued {
    int rank;
    Fingerprint fingerprint;
  };
  std::map<std::uint64_t, std::pair<Issued, Issued>> seen;  // By sequence: the first, and one that differs.
  const auto add = [&](std::size_t rank, const Fingerprint& fingerprint) {
    const Issued mine{static_cast<int>(rank), fingerprint};
    const auto [place, is_first] = seen.try_emplace(fingerprint.sequence, mine, mine);
    auto& [first, other] = place->second;
    if (!is_first && other.rank == first.rank && fingerprint != first.fingerprint) other = mine;
  };
  for (std::size_t r = 0; r < members.size(); ++r) {
    const NcclHeartbeat& member = members[r];
    for (std::uint64_t n = member.last_begin(); n != member.collective_count; ++n)
      add(r, member.last[n % kNcclBatch]);
    for (const NcclOperation& operation : member.open_operations()) {
      if (is_collective(operation)) add(r, operation.fingerprint);
    }
  }
  for (const auto& [sequence, pair] : seen) {
    const auto& [first, other] = pair;
    if (first.rank != other.rank)
      return mismatch(number_of(numbers, first.rank), first.fingerprint, number_of(numbers, other.rank),
                      other.fingerprint);
  }
  return {};
}

Status judge_messages(std::span<const NcclHeartbeat> members, std::span<const int> numbers) {
  for (std::size_t sender = 0; sender < members.size(); ++sender) {
    for (const NcclOperation& send : members[sender].open_operations()) {
      if (!is(send, Operation::kSend)) continue;
      const auto receiver = static_cast<std::size_t>(send.peer);
      for (const NcclOperation& recv : members[receiver].open_operations()) {
        if (!is(recv, Operation::kRecv) || recv.peer != static_cast<int>(sender) ||
            recv.fingerprint.sequence != send.fingerprint.sequence) {
          continue;
        }
        FOREBAY_RETURN_IF_ERROR(compare_message(number_of(numbers, send.peer), numbered(recv, numbers),
                                                number_of(numbers, static_cast<int>(sender)), send));
      }
    }
  }
  return {};
}

Status judge_departures(std::span<const NcclHeartbeat> members, std::span<const int> numbers) {
  for (std::size_t left = 0; left < members.size(); ++left) {
    if (members[left].state == NcclMemberState::kRunning) continue;
    const std::uint64_t next = members[left].collective_count;
    for (std::size_t r = 0; r < members.size(); ++r) {
      if (members[r].collective_count <= next) continue;
      std::string what = "a collective (operation " + std::to_string(next) + ")";
      for (const NcclOperation& operation : members[r].open_operations()) {
        if (is_collective(operation) && operation.fingerprint.sequence == next) what = describe(operation);
      }
      const auto name = [&](std::size_t rank) {
        return std::to_string(number_of(numbers, static_cast<int>(rank)));
      };
      return Status(StatusCode::kPeerLost, what, " on rank ", name(r), ": rank ", name(left),
                    " left before it; see why it ended");
    }
  }
  return {};
}

}  // namespace

NcclOperation numbered(NcclOperation operation, std::span<const int> numbers) {
  if (operation.peer >= 0) operation.peer = number_of(numbers, operation.peer);
  return operation;
}

Status compare_operations(int rank, const NcclOperation& mine, int peer, const NcclOperation& theirs) {
  if (!is_collective(mine) && is(theirs, Operation::kSend)) return compare_message(rank, mine, peer, theirs);
  if (mine.fingerprint == theirs.fingerprint) return {};
  return mismatch(rank, mine.fingerprint, peer, theirs.fingerprint);
}

Status check_heartbeat(const NcclHeartbeat& heartbeat, int rank, int size) {
  bool is_whole = heartbeat.state <= NcclMemberState::kGone && heartbeat.open_count <= kNcclWindow;
  for (std::size_t i = 0; is_whole && i < heartbeat.open_count; ++i) {
    const NcclOperation& operation = heartbeat.open[i];
    const bool is_message = is(operation, Operation::kSend) || is(operation, Operation::kRecv);
    is_whole = is_message ? operation.peer >= 0 && operation.peer < size : is_collective(operation);
  }
  for (std::uint64_t n = heartbeat.last_begin(); is_whole && n != heartbeat.collective_count; ++n)
    is_whole = heartbeat.last[n % kNcclBatch].sequence == n;
  if (is_whole) return {};
  return Status(StatusCode::kCorruption, "cannot watch rank ", rank,
                ": its heartbeat cannot be read; run the same build of forebay on all ranks");
}

Status judge_heartbeats(std::span<const NcclHeartbeat> members, std::span<const int> numbers) {
  FOREBAY_RETURN_IF_ERROR(judge_collectives(members, numbers));
  FOREBAY_RETURN_IF_ERROR(judge_messages(members, numbers));
  return judge_departures(members, numbers);
}

Status operation_timeout(int rank, const NcclOperation& operation, std::span<const NcclHeartbeat> members,
                         std::chrono::milliseconds deadline, std::span<const int> numbers) {
  std::vector<int> missing;
  const auto add = [&](int other) { missing.push_back(number_of(numbers, other)); };
  for (std::size_t r = 0; r < members.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    if (is_collective(operation) && members[r].collective_count <= operation.fingerprint.sequence)
      add(static_cast<int>(r));
  }
  std::string who = "all ranks have issued it, and it is not done";
  if (!is_collective(operation)) add(operation.peer);
  if (!missing.empty()) who = rank_list(missing) + " did not join";
  return Status(StatusCode::kTimeout, describe(numbered(operation, numbers)), " on rank ",
                number_of(numbers, rank), ": ", who, " within ", deadline.count(),
                " ms; look there for the reason, or raise the deadline");
}

}  // namespace forebay::internal
