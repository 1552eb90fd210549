// OperationBook: the traffic of a communicator and the record of its last operations (the flight recorder).
// Both follow an operation from its issue to its end.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/fingerprint.h"
#include "forebay/communicator.h"

namespace forebay::internal {

// An operation as one rank issued it.
struct Issued {
  Fingerprint fingerprint;
  int peer = -1;  // The peer of a send or recv; -1 for a collective.
  std::uint32_t tag = 0;
};

// A send or a recv.
Issued issued_message(Operation operation, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t sequence = 0);

// "send of 16 bytes to rank 2 with tag 7", "all_gather of 8 bytes (operation 3)".
std::string describe(const Issued& issued);

// Threads: any.
class OperationBook {
 public:
  static constexpr std::size_t kRecordCount = 64;

  // `now`: null is a steady clock.
  OperationBook(int rank, int size, std::function<std::chrono::nanoseconds()> now = nullptr);
  // For a communicator split from that of `origin`: both share one record of last operations, in which
  // `where` says that an operation was this group's. Its ranks have the numbers `world_ranks` in the world.
  OperationBook(int rank, const OperationBook& origin, std::string where, std::vector<int> world_ranks);

  // issue() gives the operation's number, which the others take.
  std::uint64_t issue(const Issued& issued);
  void begin(std::uint64_t number);
  // Counts the payload when `ok`.
  void end(std::uint64_t number, const Issued& issued, bool ok);

  Traffic traffic() const;
  std::vector<OperationTraffic> operation_traffic() const;
  std::vector<OperationRecord> last_operations() const;

 private:
  struct Entry {
    std::uint64_t number = 0;
    Issued issued;
    std::string where;
    OperationState state = OperationState::kQueued;
    std::chrono::nanoseconds queued{0};
    std::chrono::nanoseconds begun{0};
    std::chrono::nanoseconds ended{0};
  };
  struct Account {
    std::uint64_t count = 0;
    std::vector<Traffic> peers;
  };

  // The last operations of a communicator and of those split from it.
  struct Flight {
    explicit Flight(std::function<std::chrono::nanoseconds()> clock);
    std::chrono::nanoseconds time() const { return now() - start; }
    // Null when a later operation has taken its place.
    Entry* find(std::uint64_t number);

    const std::function<std::chrono::nanoseconds()> now;
    const std::chrono::nanoseconds start;
    std::mutex mutex;
    // Guarded by mutex.
    std::uint64_t issued_count = 0;
    std::vector<Entry> entries;  // A ring by number.
  };

  void count(const Issued& issued);

  const int rank_;
  const int size_;
  const std::shared_ptr<Flight> flight_;
  const std::string where_;
  const std::vector<int> world_ranks_;  // By rank; empty in the world.
  mutable std::mutex mutex_;
  std::array<Account, kOperationCount> accounts_;  // Guarded by mutex_.
};

}  // namespace forebay::internal
