// ShmGroup: the Transport over shared memory. Every rank has a fixed number of slots of a fixed size per
// plane.
//
// A collective is cut into rounds. In each round a rank fills one of its slots and takes its part of its
// peers' slots of that round. It fills up to kSlotCount rounds ahead of the slowest reader, so that the peers
// add round k while it copies round k + 1. All ranks count the same rounds, because fingerprints are compared
// before a slot is read. A slot is never read or written past its end, even if a peer's counts are wrong.
//
//   data slot, reduce_scatter   one piece per destination, at the same place in every rank's slot, so that
//                               the owner's pieces lie at one stride, as Kernels::accumulate wants them
//   data slot, all_gather       one piece for all peers
//   data slot, send             one piece for one receiver, once no collective's piece is left in the slots
//   control slot                one piece for all peers
//
// A rank that waits sleeps at its own bell; a rank that publishes a count rings the bells of the others.
//
// Its parts: shm_group.cc (failing, waiting, votes, groups), shm_operations.cc (bytes through the slots).
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/fingerprint.h"
#include "collectives/process/shm_segment.h"
#include "collectives/process/transport.h"
#include "collectives/rendezvous/rendezvous_store.h"

namespace forebay::internal {

class ShmGroup final : public Transport {
 public:
  using Clock = std::chrono::steady_clock;

  // `segment` has this rank's process identity already; it is null when there are no peers. `board` is the
  // segment of all ranks, where waits are shown; null: `segment`.
  ShmGroup(Membership given, std::unique_ptr<ShmSegment> segment, ShmSegment* board = nullptr);
  ~ShmGroup() override;

  ShmSegment& segment() noexcept { return *segment_; }

  // Keeps the store in which the ranks met until this rank leaves. The rank that made the store removes it,
  // which must come after all others have removed their texts.
  void keep(std::shared_ptr<RendezvousStore> store) { store_ = std::move(store); }

  // Says that this rank is here, and waits for the others. A rank that cannot join leaves its reason in the
  // text `failure_name`.
  Status join(Clock::time_point limit, RendezvousStore& store, const std::string& failure_name);

  const char* name() const noexcept override { return "shm"; }

  Status reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) override;
  Status gather(TransportPlane plane, const Fingerprint& fingerprint, const Piece& piece) override;
  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              std::uint64_t sequence) override;
  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag,
              std::uint64_t sequence) override;
  Status vote(std::uint64_t step, std::span<const std::byte> decision) override;
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override;

 protected:
  // Checks now and then whether the peers' processes still run.
  Status own_status() override;
  Status fail_own(const Status& cause) noexcept override;
  Result<std::shared_ptr<Transport>> split_own(Membership membership, const std::vector<SplitWish>& members,
                                               const Exchange& exchange) override;

 private:
  // The ranks that a wait needs.
  struct Missing {
    std::vector<int> ranks;
    bool came;  // They have come to the operation, but have not finished it.
  };
  struct Waiting {
    std::function<bool()> ready;
    std::function<Missing()> missing;
    std::function<std::string()> what;  // The operation, for messages.
  };

  template <typename Write, typename Read>
  class Collective;
  template <typename Write, typename Read>
  Status run_collective(ShmPlane plane, const Fingerprint& fingerprint, std::uint64_t rounds,
                        const Write& write, const Read& read);
  Status check_message(const ShmMessage& message, std::size_t bytes, int peer, std::uint32_t tag);

  ShmPlaneState& state(int rank, ShmPlane plane) noexcept { return segment_->rank(rank).planes[plane]; }
  // Each rank starts with its right neighbour, so that not all ranks read one rank's slots at once.
  template <typename Function>
  void for_peers(Function function) const {
    for (int step = 1; step < size(); ++step) function((rank() + step) % size());
  }
  template <typename Condition>
  std::vector<int> peers_where(Condition condition) const {
    std::vector<int> found;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && condition(peer)) found.push_back(peer);
    }
    return found;
  }
  void ring_peers(ShmPlane plane) noexcept {
    for_peers([&](int peer) { state(peer, plane).bell.ring(); });
  }

  // Waits until ready(). Errors: the first failure; that a rank of missing() has left or died, or that
  // `limit` passed, which what() and missing() then describe.
  template <typename Ready, typename MissingNow, typename What>
  Status wait(ShmPlane plane, Clock::time_point limit, const Ready& ready, const MissingNow& missing,
              const What& what) {
    if (ready() || spin_until(ready)) return {};
    return sleep_until(plane, limit, {std::cref(ready), std::cref(missing), std::cref(what)});
  }
  template <typename Ready>
  bool spin_until(const Ready& ready) const {
    if (!may_spin_) return false;
    const Clock::time_point end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 16; ++i) relax();
      if (ready()) return true;
    } while (Clock::now() < end);
    return false;
  }
  static void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
  Status sleep_until(ShmPlane plane, Clock::time_point limit, const Waiting& waiting);
  Status fail_late(const Wait& wait);
  Wait described(const Waiting& waiting, const Missing& missing) const;

  bool has_failed() noexcept {
    return segment_->failure().state.load(std::memory_order_acquire) == ShmFailure::kThere;
  }
  // Fails with the first failure of all ranks, which is there already.
  Status adopt_first_failure() noexcept;
  // Publishes `cause` unless there is a failure already; returns the first one.
  Status agree_on_first(const Status& cause);
  // The first of these ranks that has left, or -1.
  int first_left(const std::vector<int>& ranks);
  // The peers that have not left, but whose processes are gone.
  std::vector<int> find_dead();
  Status lost(const std::string& context, const std::vector<int>& dead);
  std::string place() const {
    return " on rank " + std::to_string(world_rank(rank()));
  }

  Result<std::unique_ptr<ShmSegment>> share_group(const Membership& membership,
                                                  const std::vector<SplitWish>& members,
                                                  const Exchange& exchange);

  // About the cost of a wake-up. Shorter: a peer that publishes in a moment has to wake us. Longer: it keeps
  // a processor from threads that have work.
  static constexpr std::chrono::microseconds kSpin{50};

  std::shared_ptr<RendezvousStore> store_;
  const std::unique_ptr<ShmSegment> segment_;
  ShmSegment* const board_;  // The world's, which lives as long.
  const bool may_spin_;
  std::atomic<std::int64_t> next_look_ns_{0};  // When status() checks the peers again.
  // Used by the thread that runs the plane's operations: operations done, and their rounds.
  std::uint64_t collectives_[kShmPlaneCount] = {};
  std::uint64_t rounds_[kShmPlaneCount] = {};
  std::uint64_t messages_ = 0;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Status failure_;
  Ballot alone_;  // The vote of a rank without peers.
};

}  // namespace forebay::internal
