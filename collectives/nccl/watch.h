// What the ranks of an NCCL communicator tell each other about their data operations, and what follows from
// it. No NCCL here, no threads: values in, a Status out.
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
// How long a rank that leaves waits for the others to leave too, so that NCCL can end in order. After it this
// rank aborts its part of NCCL, which loses nothing: all operations are done.
inline constexpr std::chrono::milliseconds kNcclGoodbyeMax{200};

// One data operation as its rank issued it. Travels between devices with the operation, and in heartbeats.
// The fingerprint's `sequence` counts collectives from 0, and for a send or recv those of its direction with
// its peer.
using NcclOperation = Issued;
static_assert(sizeof(NcclOperation) == 32 && std::is_trivially_copyable_v<NcclOperation>);

inline bool is_collective(const NcclOperation& operation) noexcept {
  return operation.peer < 0;
}

enum class NcclMemberState : std::uint32_t {
  kRunning,
  kLeaving,  // Will issue nothing more, and all it issued is done.
  kGone,     // Takes part in no later heartbeat.
};

// Operations of a rank that a heartbeat shows: the oldest that are not done. The first is the one the rank
// hangs in, if it does; the others make a mismatch show before it is reached.
inline constexpr std::size_t kNcclWindow = 4;

struct NcclHeartbeat {
  NcclMemberState state = NcclMemberState::kRunning;
  std::uint32_t open_count = 0;
  std::uint64_t collective_count = 0;  // Collectives issued so far.
  NcclOperation open[kNcclWindow];

  std::span<const NcclOperation> open_operations() const noexcept { return {open, open_count}; }
};
static_assert(std::is_trivially_copyable_v<NcclHeartbeat>);

// The error of a rank whose operation met `theirs` of `peer`, if they do not belong together. For a recv,
// `theirs` is the send. All with the numbers that messages know.
Status compare_operations(int rank, const NcclOperation& mine, int peer, const NcclOperation& theirs);

// Whether what came from `rank` of `size` can be a heartbeat at all. Errors: kCorruption.
Status check_heartbeat(const NcclHeartbeat& heartbeat, int rank, int size);

// The number by which messages know a rank: that of `numbers`, by rank, or where they are empty its own.
inline int number_of(std::span<const int> numbers, int rank) {
  return numbers.empty() ? rank : numbers[static_cast<std::size_t>(rank)];
}
// As messages name it.
NcclOperation numbered(NcclOperation operation, std::span<const int> numbers);

// What all ranks' heartbeats, by rank, show to be wrong: ranks that issued different operations, or a rank
// that left before a collective that another one is in. The same words on every rank that has the same
// heartbeats.
// Requires: each has passed check_heartbeat.
Status judge_heartbeats(std::span<const NcclHeartbeat> members, std::span<const int> numbers = {});

// The timeout of `operation` on `rank`, which names the ranks that have not issued it.
Status operation_timeout(int rank, const NcclOperation& operation, std::span<const NcclHeartbeat> members,
                         std::chrono::milliseconds deadline, std::span<const int> numbers = {});

}  // namespace forebay::internal
