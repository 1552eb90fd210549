// Heartbeats: the facts about data operations that the ranks of an NCCL communicator exchange, and the errors
// that follow from them. There is no NCCL here and no thread: values in, a Status out.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "collectives/fingerprint.h"
#include "collectives/operation_book.h"
#include "forebay/status.h"

namespace forebay::internal {

// How often ranks tell each other where they are. Smaller: more exchanges on `control`. Larger: a mismatch or
// a lost rank is found later.
inline constexpr std::chrono::milliseconds kNcclHeartbeat{50};
// Operations queued on the stream and not done; an operation beyond them waits. Smaller: the host waits more
// often. Larger: more memory for fingerprints.
inline constexpr int kNcclInFlightMax = 64;
// The fingerprints of so many collectives travel together, with the last of them or with one that decides.
// Smaller: more copies and collectives. Larger: a mismatch of operations that have equal sizes is found
// later.
inline constexpr std::size_t kNcclBatch = 8;
// How long a rank that leaves waits for the others to leave too, so that NCCL can end in order. After it this
// rank aborts its part of NCCL, which loses nothing: all operations are done.
inline constexpr std::chrono::milliseconds kNcclGoodbyeMax{200};

// One data operation as its rank issued it. Travels between devices and in heartbeats.
// The fingerprint's `sequence` counts collectives from 0, and for a send or recv those of its direction with
// its peer.
using NcclOperation = Issued;
static_assert(sizeof(NcclOperation) == 32 && std::is_trivially_copyable_v<NcclOperation>);

inline bool is_collective(const NcclOperation& operation) noexcept {
  return operation.peer < 0;
}

enum class NcclMemberState : std::uint32_t {
  kRunning,
  kLeaving,  // Issues nothing more, and all its operations are done.
  kGone,     // Takes part in no later heartbeat.
};

// Operations of a rank in a heartbeat: the oldest that are not done. If the rank hangs, it hangs in the
// first; the others show a mismatch before it is reached.
inline constexpr std::size_t kNcclWindow = 4;

struct NcclHeartbeat {
  NcclMemberState state = NcclMemberState::kRunning;
  std::uint32_t open_count = 0;
  std::uint64_t collective_count = 0;  // Collectives issued so far.
  NcclOperation open[kNcclWindow];
  // The last collectives, sequence n at n % kNcclBatch, done or not: NCCL does not notice operations that
  // differ in more than their sizes.
  Fingerprint last[kNcclBatch];

  std::span<const NcclOperation> open_operations() const noexcept { return {open, open_count}; }
  // The first sequence that `last` has.
  std::uint64_t last_begin() const noexcept {
    return collective_count > kNcclBatch ? collective_count - kNcclBatch : 0;
  }
};
static_assert(std::is_trivially_copyable_v<NcclHeartbeat>);

// The error when `mine` of `rank` met `theirs` of `peer` and they do not belong together, or ok. For a recv,
// `theirs` is the send. Rank numbers are those of the world.
Status compare_operations(int rank, const NcclOperation& mine, int peer, const NcclOperation& theirs);

// Whether the bytes from `rank` of `size` can be a heartbeat. Errors: kCorruption.
Status check_heartbeat(const NcclHeartbeat& heartbeat, int rank, int size);

// The number of a rank in messages: that in `numbers`, or if these are empty its own.
inline int number_of(std::span<const int> numbers, int rank) {
  return numbers.empty() ? rank : numbers[static_cast<std::size_t>(rank)];
}
// The operation as messages name it.
NcclOperation numbered(NcclOperation operation, std::span<const int> numbers);

// The error that the heartbeats of all ranks, by rank, show: ranks that issued different operations, or a
// rank that left before a collective that another rank is in. The same words on every rank that has the same
// heartbeats. Requires: each has passed check_heartbeat.
Status judge_heartbeats(std::span<const NcclHeartbeat> members, std::span<const int> numbers = {});

// The timeout of `operation` on `rank`, which names the ranks that have not issued it.
Status operation_timeout(int rank, const NcclOperation& operation, std::span<const NcclHeartbeat> members,
                         std::chrono::milliseconds deadline, std::span<const int> numbers = {});

}  // namespace forebay::internal
