// The operations of ShmGroup: bytes through the slots of the shared memory.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "collectives/operation_book.h"
#include "collectives/process/shm_group.h"
#include "forebay/host_gradients.h"
#include "forebay/stream_copy.h"

namespace forebay::internal {
namespace {

// Pieces in a slot begin at cache lines, so that two destinations never share one.
constexpr std::size_t kPieceAlignment = 64;

// The lower 16 bits of ShmMessage::open while a message is for `peer`.
constexpr std::uint64_t kReceiverMask = 0xffff;
constexpr std::uint64_t receiver(int peer) {
  return static_cast<std::uint64_t>(peer) + 1;
}

std::uint64_t rounds_of(std::uint64_t total, std::uint64_t piece) {
  return (total + piece - 1) / piece;
}

}  // namespace

// One collective of this rank while it runs: the rounds that it has written and taken, and the peers whose
// fingerprints agree.
template <typename Write, typename Read>
class ShmGroup::Collective {
 public:
  Collective(ShmGroup& group, ShmPlane plane, const Fingerprint& fingerprint, std::uint64_t rounds,
             const Write& write, const Read& read)
      : group_(group),
        plane_(plane),
        fingerprint_(fingerprint),
        rounds_(rounds),
        write_(write),
        read_(read),
        sequence_(group.collectives_[plane]),
        base_(group.rounds_[plane]),
        mine_(group.state(group.rank(), plane)),
        agreed_(static_cast<std::size_t>(group.size())) {
    agreed_[static_cast<std::size_t>(group.rank())] = 1;
  }

  Status run() {
    const Clock::time_point limit = group_.deadline();
    announce();
    while (is_unfinished()) {
      if (group_.has_failed()) return group_.status();
      FOREBAY_RETURN_IF_ERROR(compare_announced());
      if (can_write()) {
        write_one();
        group_.ring_peers(plane_);
      } else if (can_read()) {
        FOREBAY_RETURN_IF_ERROR(read_one());
      } else if (is_unfinished()) {
        FOREBAY_RETURN_IF_ERROR(group_.wait(
            plane_, limit, [this] { return can_write() || can_read() || has_news(); },
            [this] { return missing(); }, [this] { return describe(fingerprint_); }));
      }
    }
    group_.collectives_[plane_] = sequence_ + 1;
    group_.rounds_[plane_] = base_ + rounds_;
    return {};
  }

 private:
  // A rank may have taken all rounds before its own last ones found a free slot.
  bool is_unfinished() const { return written_ < rounds_ || taken_ < rounds_ || !all_agree(); }
  bool all_agree() const { return agreed_count_ == group_.size(); }

  template <typename Condition>
  bool all_peers(Condition condition) const {
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer != group_.rank() && !condition(group_.state(peer, plane_))) return false;
    }
    return true;
  }
  // The slot that the next round takes is free at this peer.
  bool has_read(const ShmPlaneState& peer) const {
    return peer.read.load(std::memory_order_acquire) + ShmSegment::kSlotCount > base_ + written_;
  }
  bool has_written(const ShmPlaneState& peer) const {
    return peer.written.load(std::memory_order_acquire) > base_ + taken_;
  }
  bool can_write() const {
    return written_ < rounds_ && all_peers([&](const ShmPlaneState& peer) { return has_read(peer); });
  }
  bool can_read() const {
    return all_agree() && taken_ < rounds_ &&
           all_peers([&](const ShmPlaneState& peer) { return has_written(peer); });
  }

  void write_one() {
    write_(written_, group_.segment_->slot(plane_, group_.rank(), base_ + written_));
    mine_.written.store(base_ + ++written_, std::memory_order_release);
  }
  Status read_one() {
    FOREBAY_RETURN_IF_ERROR(read_(taken_, base_ + taken_));
    mine_.read.store(base_ + ++taken_, std::memory_order_release);
    group_.ring_peers(plane_);
    return {};
  }

  void announce() {
    if (can_write()) write_one();
    mine_.fingerprints[sequence_ % 2] = fingerprint_;
    mine_.announced.store(sequence_ + 1, std::memory_order_release);
    group_.ring_peers(plane_);
  }
  bool has_announced(int peer) const {
    return group_.state(peer, plane_).announced.load(std::memory_order_acquire) > sequence_;
  }
  bool is_news(int peer) const { return !agreed_[static_cast<std::size_t>(peer)] && has_announced(peer); }
  bool has_news() const {
    for (int peer = 0; !all_agree() && peer < group_.size(); ++peer) {
      if (is_news(peer)) return true;
    }
    return false;
  }
  // Fingerprints are compared as they come, so that two ranks that disagree are named though a third never
  // comes.
  Status compare_announced() {
    for (int peer = 0; !all_agree() && peer < group_.size(); ++peer) {
      if (!is_news(peer)) continue;
      const Fingerprint& other = group_.state(peer, plane_).fingerprints[sequence_ % 2];
      if (other != fingerprint_) {
        return group_.fail(
            mismatch(group_.world_rank(group_.rank()), fingerprint_, group_.world_rank(peer), other));
      }
      agreed_[static_cast<std::size_t>(peer)] = 1;
      ++agreed_count_;
    }
    return {};
  }

  Missing missing() const {
    std::vector<int> absent = group_.peers_where([&](int peer) { return !has_announced(peer); });
    if (!absent.empty()) return {std::move(absent), false};
    return {group_.peers_where([&](int peer) {
              const ShmPlaneState& other = group_.state(peer, plane_);
              return !has_written(other) || (written_ < rounds_ && !has_read(other));
            }),
            true};
  }

  ShmGroup& group_;
  const ShmPlane plane_;
  const Fingerprint& fingerprint_;
  const std::uint64_t rounds_;
  const Write& write_;
  const Read& read_;
  const std::uint64_t sequence_;
  const std::uint64_t base_;  // Rounds of the collectives before this one.
  ShmPlaneState& mine_;
  std::vector<char> agreed_;  // By rank.
  int agreed_count_ = 1;
  std::uint64_t written_ = 0;
  std::uint64_t taken_ = 0;
};

// Runs write(round, slot) and read(round, slot_round) for all rounds of a collective, in order.
template <typename Write, typename Read>
Status ShmGroup::run_collective(ShmPlane plane, const Fingerprint& fingerprint, std::uint64_t rounds,
                                const Write& write, const Read& read) {
  return Collective<Write, Read>(*this, plane, fingerprint, rounds, write, read).run();
}

Status ShmGroup::reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) {
  FOREBAY_RETURN_IF_ERROR(status());
  AccumulateArguments sum = accumulate_arguments(arguments, rank(), size());
  if (size() == 1) {
    const Status added = host_accumulate(sum);
    return added.ok() ? added : fail(added.with_context("rank " + std::to_string(world_rank(0))));
  }
  const std::size_t element = element_bytes(arguments.type);
  const std::size_t piece_bytes = ShmSegment::slot_bytes(kShmDataPlane) / static_cast<std::size_t>(size()) /
                                  kPieceAlignment * kPieceAlignment;
  const std::size_t piece_count = piece_bytes / element;
  const auto count_of = [&](std::uint64_t round) {
    return std::min(piece_count, arguments.count - round * piece_count);
  };
  const auto write = [&](std::uint64_t round, std::byte* slot) {
    for_peers([&](int peer) {
      const auto p = static_cast<std::size_t>(peer);
      std::memcpy(slot + p * piece_bytes,
                  arguments.source + p * arguments.source_stride_bytes + round * piece_count * element,
                  count_of(round) * element);
    });
  };
  const std::byte* const own = static_cast<const std::byte*>(sum.own);
  const auto read = [&](std::uint64_t round, std::uint64_t slot_round) {
    sum.own = own + round * piece_count * element;
    sum.received =
        segment_->slot(kShmDataPlane, 0, slot_round) + static_cast<std::size_t>(rank()) * piece_bytes;
    sum.received_stride_bytes = ShmSegment::rank_stride(kShmDataPlane);
    sum.target = arguments.target + round * piece_count;
    sum.count = count_of(round);
    const Status added = host_accumulate(sum);
    // The peers' half of this operation would wait for ours until the deadline; tell them now.
    return added.ok() ? added : fail(added.with_context("rank " + std::to_string(world_rank(rank()))));
  };
  return run_collective(kShmDataPlane, fingerprint, rounds_of(arguments.count, piece_count), write, read);
}

Status ShmGroup::gather(TransportPlane which, const Fingerprint& fingerprint, const Piece& piece) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (size() == 1) {
    place_own(piece, rank());
    return {};
  }
  const ShmPlane plane = which == TransportPlane::kData ? kShmDataPlane : kShmControlPlane;
  const std::size_t piece_bytes = ShmSegment::slot_bytes(plane);
  const auto bytes_of = [&](std::uint64_t round) {
    return std::min(piece_bytes, piece.bytes - round * piece_bytes);
  };
  // The own slice goes to its place while it is in the cache, so that it is read from memory once.
  const auto write = [&](std::uint64_t round, std::byte* slot) {
    Piece part = piece;
    part.source += round * piece_bytes;
    part.target += round * piece_bytes;
    part.bytes = bytes_of(round);
    std::memcpy(slot, part.source, part.bytes);
    place_own(part, rank());
  };
  const auto read = [&](std::uint64_t round, std::uint64_t slot_round) {
    for_peers([&](int peer) {
      stream_copy(piece.target + static_cast<std::size_t>(peer) * piece.target_stride + round * piece_bytes,
                  segment_->slot(plane, peer, slot_round), bytes_of(round));
    });
    return Status();
  };
  return run_collective(plane, fingerprint, rounds_of(piece.bytes, piece_bytes), write, read);
}

Status ShmGroup::send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t /*sequence*/) {
  FOREBAY_RETURN_IF_ERROR(status());
  const Clock::time_point limit = deadline();
  const auto what = [&] { return describe(issued_message(Operation::kSend, bytes, world_rank(peer), tag)); };
  const auto to_peer = [&] { return Missing{{peer}, false}; };
  const auto behind = [&] {
    return Missing{peers_where([&](int other) {
                     return state(other, kShmDataPlane).read.load(std::memory_order_acquire) <
                            rounds_[kShmDataPlane];
                   }),
                   true};
  };
  FOREBAY_RETURN_IF_ERROR(wait(
      kShmDataPlane, limit, [&] { return behind().ranks.empty(); }, behind, what));

  ShmMessage& message = segment_->rank(rank()).message;
  message.bytes = bytes;
  message.tag = tag;
  message.written.store(0, std::memory_order_relaxed);
  message.taken.store(0, std::memory_order_relaxed);
  message.open.store(++messages_ << 16 | receiver(peer), std::memory_order_release);
  state(peer, kShmDataPlane).bell.ring();
  const auto is_closed = [&] { return (message.open.load(std::memory_order_acquire) & kReceiverMask) == 0; };

  const std::size_t piece_bytes = ShmSegment::slot_bytes(kShmDataPlane);
  const std::uint64_t rounds = rounds_of(bytes, piece_bytes);
  for (std::uint64_t round = 0; round <= rounds; ++round) {
    // After the last piece: until the receiver has all.
    const auto done = [&] {
      if (round == rounds) return is_closed();
      return message.taken.load(std::memory_order_acquire) + ShmSegment::kSlotCount > round;
    };
    FOREBAY_RETURN_IF_ERROR(wait(
        kShmDataPlane, limit, [&] { return done(); }, to_peer, what));
    if (round == rounds) break;
    std::memcpy(segment_->slot(kShmDataPlane, rank(), round), source + round * piece_bytes,
                std::min(piece_bytes, bytes - round * piece_bytes));
    message.written.store(round + 1, std::memory_order_release);
    state(peer, kShmDataPlane).bell.ring();
  }
  return {};
}

// Whether the message that `peer` sends is the one that this rank receives.
Status ShmGroup::check_message(const ShmMessage& message, std::size_t bytes, int peer, std::uint32_t tag) {
  const bool has_tag = message.tag == tag;
  if (has_tag && message.bytes == bytes) return {};
  const std::string sent = std::to_string(message.bytes) + " bytes";
  return fail(invalid_argument(describe(issued_message(Operation::kRecv, bytes, world_rank(peer), tag)),
                               place(), ", but rank ", world_rank(peer), " sends ",
                               has_tag ? sent + "; give both the same size"
                                       : sent + " with tag " + std::to_string(message.tag) +
                                             " first; receive in the order of the sends"));
}

Status ShmGroup::recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag,
                      std::uint64_t /*sequence*/) {
  FOREBAY_RETURN_IF_ERROR(status());
  const Clock::time_point limit = deadline();
  const auto what = [&] { return describe(issued_message(Operation::kRecv, bytes, world_rank(peer), tag)); };
  const auto from_peer = [&] { return Missing{{peer}, false}; };
  ShmMessage& message = segment_->rank(peer).message;
  const auto is_open = [&] {
    return (message.open.load(std::memory_order_acquire) & kReceiverMask) == receiver(rank());
  };
  FOREBAY_RETURN_IF_ERROR(wait(
      kShmDataPlane, limit, [&] { return is_open(); }, from_peer, what));
  FOREBAY_RETURN_IF_ERROR(check_message(message, bytes, peer, tag));

  const std::size_t piece_bytes = ShmSegment::slot_bytes(kShmDataPlane);
  const std::uint64_t rounds = rounds_of(bytes, piece_bytes);
  for (std::uint64_t round = 0; round < rounds; ++round) {
    FOREBAY_RETURN_IF_ERROR(wait(
        kShmDataPlane, limit, [&] { return message.written.load(std::memory_order_acquire) > round; },
        [&] {
          return Missing{{peer}, true};
        },
        what));
    std::memcpy(target + round * piece_bytes, segment_->slot(kShmDataPlane, peer, round),
                std::min(piece_bytes, bytes - round * piece_bytes));
    message.taken.store(round + 1, std::memory_order_release);
    if (round + 1 < rounds) state(peer, kShmDataPlane).bell.ring();
  }
  message.open.store(message.open.load(std::memory_order_relaxed) & ~kReceiverMask,
                     std::memory_order_release);
  state(peer, kShmDataPlane).bell.ring();
  return {};
}

}  // namespace forebay::internal
