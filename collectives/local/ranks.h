// LocalRanks: the ranks of one local group as they see each other: their numbers in the world, which of them
// have left, their votes and their books, and waits for them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/operation_book.h"
#include "collectives/wait_graph.h"
#include "forebay/host_clock.h"
#include "forebay/local_communicator.h"
#include "forebay/status.h"

namespace forebay::internal {

// A wait in progress. `describe(now)` is called with the world's mutex held; its ranks are the world's.
struct LocalWait {
  int rank;  // The rank that waits, in the world.
  std::function<Wait(HostClock::Nanoseconds now)> describe;
};

// The state that all local ranks of a run share: a clock, with the mutex that guards all state of the local
// communicators; the first failure; and the waits in progress.
class LocalWorld {
 public:
  using Nanoseconds = HostClock::Nanoseconds;
  using Lock = std::unique_lock<std::mutex>;

  LocalWorld(int size, const LocalOptions& options);

  int size() const noexcept { return size_; }
  const LocalOptions& options() const noexcept { return options_; }
  std::mutex& mutex() const noexcept { return clock_.mutex(); }

  // Takes the mutex in virtual time, as deadline() does.
  Nanoseconds now() const { return clock_.now(); }
  // When an operation that begins now comes to its deadline.
  Nanoseconds deadline() const;

  // --- with the mutex held ---
  const Status& failure() const noexcept { return failure_; }
  bool has_failed() const noexcept { return !failure_.ok(); }
  // Keeps the first failure and wakes everyone.
  void fail(Status cause);
  void notify() { clock_.notify(); }

  // Waits until ready(), without a deadline.
  void await(Lock& lock, const std::function<bool()>& ready) { clock_.wait(lock, ready); }
  // Waits until ready() or, failing the world, until `limit`. The other ranks see `wait` meanwhile. Returns
  // ready().
  bool await(Lock& lock, const LocalWait& wait, const std::function<bool()>& ready, Nanoseconds limit);

  // Each returns early when the world fails, and releases the mutex for a moment.
  void pass_time(Lock& lock, Nanoseconds duration);
  // The time that the modelled link takes for `bytes`.
  void pass_link_time(Lock& lock, std::uint64_t bytes);

 private:
  void fail_late(const LocalWait& wait, Nanoseconds now);

  const int size_;
  const std::unique_ptr<HostClock> own_clock_;  // Null where the options bring one.
  const LocalOptions options_;
  HostClock& clock_;
  // Guarded by mutex().
  Status failure_;
  std::vector<const LocalWait*> waits_;  // The oldest first.
};

// Control operations block their caller, data operations run on streams: both may be under way at once.
enum class LocalPlane : std::uint8_t { kData, kControl };

// Threads: any; functions that take a Lock, or say so, need the world's mutex held.
class LocalRanks {
 public:
  // All ranks of the world.
  explicit LocalRanks(std::shared_ptr<LocalWorld> world);
  // The ranks that `members` of `origin` become, in this order.
  LocalRanks(LocalRanks& origin, const std::vector<SplitWish>& members);

  int size() const noexcept { return static_cast<int>(members_.size()); }
  LocalWorld& world() const noexcept { return *world_; }
  const std::shared_ptr<LocalWorld>& shared_world() const noexcept { return world_; }
  // Messages name ranks by their numbers in the world.
  int world_rank(int rank) const {
    return world_ranks_.empty() ? rank : world_ranks_[static_cast<std::size_t>(rank)];
  }
  std::string name_of(int rank) const { return "rank " + std::to_string(world_rank(rank)); }
  OperationBook& book(int rank) { return *member(rank).book; }

  // --- failure: that of the world, since its groups fail together ---
  Status status() const;
  void fail(Status cause);
  // Requires: the mutex is held.
  void fail_locked(Status cause);
  // The error of `rank` that needs `peer`, which has left, for the operation `what`.
  Status lost(int rank, const std::string& what, int peer) const;

  // --- who is here ---
  // A data operation of `rank` was queued; finish_operation follows when it has run, or when it could not be
  // queued after all.
  void begin_operation(int rank);
  void finish_operation(int rank);
  // `rank`'s communicator is destroyed: peers that wait for an operation it never issued learn that now.
  void close(int rank) noexcept;
  // Scripted: `rank` issues nothing more, and nobody is told.
  void die(int rank);
  bool is_dead(int rank) const;
  // Whether `rank` will issue no more operations on `plane`. Requires: the mutex is held.
  bool is_gone(LocalPlane plane, int rank) const;

  // --- votes ---
  Status vote(int rank, std::uint64_t step, std::span<const std::byte> decision);
  // No vote is taken once the world has failed, so there is nothing to wait for.
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) const;

  // --- waits ---
  struct Waiting {
    std::function<std::string()> what;          // The operation.
    std::function<std::vector<int>()> missing;  // The ranks of this group that are waited for.
    bool came = false;                          // They have come, but not finished.
    LocalWorld::Nanoseconds limit{0};
  };
  // `rank` waits until ready() or, failing the world, until the limit. Returns ready().
  bool await(LocalWorld::Lock& lock, int rank, const Waiting& waiting, const std::function<bool()>& ready);

 private:
  struct Member {
    bool closed = false;
    bool dead = false;                    // By script.
    std::uint64_t outstanding_count = 0;  // Data operations queued and not run yet.
    Ballot ballot;
    std::unique_ptr<OperationBook> book;
  };

  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  const Member& member(int rank) const { return members_[static_cast<std::size_t>(rank)]; }

  const std::shared_ptr<LocalWorld> world_;  // Shared by the groups that were split from each other.
  const std::vector<int> world_ranks_;       // By rank; empty in the world.
  const std::string name_;                   // The name of this group in messages; empty for all ranks.
  std::vector<Member> members_;              // Guarded by the world's mutex, except `book`.
};

}  // namespace forebay::internal
