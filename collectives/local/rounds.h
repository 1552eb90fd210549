// LocalRounds: the collectives of a local group. A collective is a round of all ranks: they arrive, copy from
// each other, and leave once all have copied, so that a source may be written again by the work that follows.
// The memory decides how bytes are copied. Where the host reaches it, an operation is a host function on each
// rank's stream and each rank copies with memcpy. Where the host does not reach it, device_copies.h says how.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/fingerprint.h"
#include "collectives/local/device_copies.h"
#include "collectives/local/ranks.h"

namespace forebay::internal {

// Threads: any.
class LocalRounds {
 public:
  explicit LocalRounds(LocalRanks& ranks) : ranks_(ranks), world_(ranks.world()) {}

  // One collective of one rank: when its stream comes to it or, with a port, when it is issued. Blocks, at
  // most the deadline, until the rank's source is no longer needed.
  Status run(LocalPlane plane, int rank, const Fingerprint& fingerprint, const DevicePart& part);

 private:
  // The ranks that have come to a point of a round.
  struct Marks {
    explicit Marks(int size) : of(static_cast<std::size_t>(size)) {}
    void set(int rank) {
      of[static_cast<std::size_t>(rank)] = 1;
      ++count;
    }
    bool all() const noexcept { return count == of.size(); }

    std::vector<char> of;
    std::size_t count = 0;
  };

  struct Round {
    explicit Round(int size)
        : arrived(size),
          copied(size),
          fingerprints(static_cast<std::size_t>(size)),
          parts(static_cast<std::size_t>(size)) {}

    Marks arrived;
    Marks copied;
    std::vector<Fingerprint> fingerprints;
    std::vector<DevicePart> parts;  // Fixed once all have arrived.
    int copying_count = 0;          // Ranks that read `parts` now; nobody leaves before they are done.
    int left_count = 0;
  };

  // One rank in one round.
  struct Turn {
    LocalPlane plane;
    int rank;
    Fingerprint fingerprint;
    LocalWorld::Nanoseconds limit;
    Round& round;
  };

  // Puts the rank's part into the round. Errors: a rank that arrived before has issued something else.
  Status arrive(const Turn& turn, const DevicePart& part);
  // Waits until all ranks are in `marks`; `came` tells whether all have arrived before.
  Status await_all(LocalWorld::Lock& lock, const Turn& turn, const Marks& marks, bool came);
  // This rank's copies.
  Status copy_by_host(LocalWorld::Lock& lock, const Turn& turn);
  // All ranks' copies, queued by the last that arrived.
  Status copy_by_backend(LocalWorld::Lock& lock, Round& round, bool is_last);

  LocalRanks& ranks_;
  LocalWorld& world_;
  // Guarded by the world's mutex. By the operation's sequence number.
  std::map<std::uint64_t, Round> data_rounds_;
  std::map<std::uint64_t, Round> control_rounds_;
};

}  // namespace forebay::internal
