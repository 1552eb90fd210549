// LocalRanks: the ranks of one local group as they see each other: their numbers in the world, which of them
// have left, their votes and their books, and waits for them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/ballot.h"
#include "collectives/local/world.h"
#include "collectives/operation_book.h"

namespace forebay::internal {

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
