// What a communicator's operations moved, and which were the last: accounts and flight recorder in one, since
// both follow an operation from its issue to its end.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "fingerprint.h"
#include "forebay/communicator.h"

namespace forebay::internal {

// An operation as one rank issued it.
struct Issued {
  Fingerprint fingerprint;
  int peer = -1;  // Of send and recv.
  std::uint32_t tag = 0;
};

// "send of 16 bytes to rank 2 with tag 7", "all_gather of 8 bytes (operation 3)".
std::string describe(const Issued& issued);

// Threads: any.
class OperationBook {
 public:
  static constexpr std::size_t kRecordCount = 64;

  // `now`: null is a steady clock.
  OperationBook(int rank, int size, std::function<std::chrono::nanoseconds()> now = nullptr);

  // Each gives or takes the operation's number.
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
    OperationState state = OperationState::kQueued;
    std::chrono::nanoseconds queued{0};
    std::chrono::nanoseconds begun{0};
    std::chrono::nanoseconds ended{0};
  };
  struct Account {
    std::uint64_t count = 0;
    std::vector<Traffic> peers;
  };

  // Null when later ones have taken its place.
  Entry* find(std::uint64_t number);
  std::chrono::nanoseconds time() const { return now_() - start_; }
  void count(const Issued& issued);

  const int rank_;
  const int size_;
  const std::function<std::chrono::nanoseconds()> now_;
  const std::chrono::nanoseconds start_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t issued_count_ = 0;
  std::vector<Entry> entries_;  // A ring by number.
  std::array<Account, kOperationCount> accounts_;
};

}  // namespace forebay::internal
