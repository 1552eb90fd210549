// Transport: moves bytes between ranks that are processes, and keeps the first failure. The communicator over
// it (communicator.cc) does everything that does not depend on how the bytes travel. Every operation blocks,
// at most the deadline.
//
// Threads: collectives and messages of the data plane come from one thread at a time, control operations from
// one thread at a time, the other calls from any.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/fingerprint.h"
#include "forebay/communicator.h"

namespace forebay::internal {

enum class TransportPlane : std::uint8_t { kData, kControl };

class Transport;

// Which rank of which group a transport is for.
struct Membership {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds deadline{0};
  std::string generation{};  // A word that no other group has; empty when there are no peers.
  // The group that this one was split from, which lives as long, and the name of this one in messages.
  std::shared_ptr<Transport> origin{};
  std::string name_in_origin{};
  // By rank of this group: its number in the world, by which messages name it. Empty in the world itself.
  std::vector<int> world_ranks{};

  int world_rank(int of) const {
    return world_ranks.empty() ? of : world_ranks[static_cast<std::size_t>(of)];
  }
};

// The membership of `rank` in a world of `size` ranks. The transport called `name` has to reach the memory of
// `backend`. Errors: kInvalidArgument, kUnsupported.
Result<Membership> check_membership(const char* name, int rank, int size, std::chrono::milliseconds deadline,
                                    const Backend& backend);

// A group and those split from it fail together: the first failure of any of them is that of all.
class Transport : public std::enable_shared_from_this<Transport> {
 public:
  explicit Transport(Membership membership) : membership_(std::move(membership)) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const noexcept { return membership_.rank; }
  int size() const noexcept { return membership_.size; }
  const Membership& membership() const noexcept { return membership_; }
  int world_rank(int of) const { return membership_.world_rank(of); }
  const Transport& world() const noexcept {
    return membership_.origin == nullptr ? *this : membership_.origin->world();
  }
  std::vector<int> world_ranks(std::vector<int> of) const {
    for (int& rank : of) rank = world_rank(rank);
    return of;
  }
  std::chrono::steady_clock::time_point deadline() const {
    return std::chrono::steady_clock::now() + membership_.deadline;
  }
  virtual const char* name() const noexcept = 0;

  // The first failure of all ranks, or ok.
  Status status();
  // Fails this rank with the first failure of all ranks, which is `cause` unless a rank failed before.
  // Returns that first failure. fail() adds the name of the group to the cause; fail_of_all() takes a cause
  // that names the group itself.
  Status fail(const Status& cause) noexcept;
  Status fail_of_all(const Status& cause) noexcept;

  virtual Status reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) = 0;
  // Gives every rank the slices of all ranks: all_gather and the control operations.
  virtual Status gather(TransportPlane plane, const Fingerprint& fingerprint, const Piece& piece) = 0;
  // `sequence` counts the messages between the two ranks with this tag, from 0.
  virtual Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t sequence) = 0;
  virtual Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t sequence) = 0;

  // As in Communicator.
  virtual Status vote(std::uint64_t step, std::span<const std::byte> decision) = 0;
  virtual std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) = 0;

  // The transport of a new group with this membership. Its ranks are, in order, `members` of this one.
  // Collective over all ranks of this one, which may `exchange` more with each other meanwhile.
  using Exchange = std::function<Status(std::span<const std::byte> mine, std::span<std::byte> all)>;
  Result<std::shared_ptr<Transport>> split(Membership membership, const std::vector<SplitWish>& members,
                                           const Exchange& exchange);

 protected:
  // status() and fail() for this group alone. fail_own() gets the first failure of all ranks, unless a rank
  // of this group was faster.
  virtual Status own_status() = 0;
  virtual Status fail_own(const Status& cause) noexcept = 0;
  virtual Result<std::shared_ptr<Transport>> split_own(Membership membership,
                                                       const std::vector<SplitWish>& members,
                                                       const Exchange& exchange) = 0;
  // Called first in the destructor of each implementation: from then on its origin does not fail it any more.
  void leave_origin() noexcept;
  // Whether the group that this one was split from has failed. A thread that waits asks it now and then.
  bool origin_has_failed() { return membership_.origin != nullptr && !membership_.origin->status().ok(); }

 private:
  void spread(const Status& cause) noexcept;

  const Membership membership_;
  std::mutex parts_mutex_;
  // Guarded by parts_mutex_. The groups split from this one. Not owned: the thread that fails a group must
  // not be the one that destroys it.
  std::vector<Transport*> parts_;
};

// The communicator over `transport`. Its queued operations run on `backend`'s streams.
std::unique_ptr<Communicator> create_process_communicator(std::shared_ptr<Transport> transport,
                                                          Backend& backend);

}  // namespace forebay::internal
