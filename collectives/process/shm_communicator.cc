// A collective is cut into rounds. In each, a rank fills one of its slots and takes its part of its peers'
// slots of that round; it fills up to kSlotCount rounds ahead of the slowest reader, so that the peers add
// round k while it copies round k + 1. All ranks count the same rounds, because fingerprints are compared
// before anybody reads a slot; a slot is never read or written past its end, whatever a peer's counts say.
//
//   data slot, reduce_scatter   one piece per destination, at the same place in every rank's slot, so that
//                               the owner's pieces lie at one stride, as Kernels::accumulate wants them
//   data slot, all_gather       one piece for everybody
//   data slot, send             one piece for one receiver, once no collective's piece is left in the slots
//   control slot                one piece for everybody
//
// Who waits sleeps at its own bell; who publishes a count rings the others'.
#include "forebay/shm_communicator.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/ballot.h"
#include "collectives/fingerprint.h"
#include "collectives/first_failure.h"
#include "collectives/process/joining.h"
#include "collectives/process/shm_announcement.h"
#include "collectives/process/shm_segment.h"
#include "collectives/process/transport.h"
#include "collectives/rendezvous/rendezvous_store.h"
#include "forebay/host_gradients.h"
#include "forebay/stream_copy.h"

namespace forebay {
namespace {

using internal::Fingerprint;
using internal::Joining;
using internal::kShmControlPlane;
using internal::kShmDataPlane;
using internal::Membership;
using internal::Operation;
using internal::Piece;
using internal::ProcessIdentity;
using internal::RendezvousStore;
using internal::ShmFailure;
using internal::ShmMessage;
using internal::ShmPlane;
using internal::ShmPresence;
using internal::ShmSegment;
using internal::SplitWish;
using internal::Transport;
using internal::TransportPlane;
using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// About what it costs to be woken. Shorter: a peer that publishes in a moment has to wake us. Longer: a
// processor is kept from whoever has work.
constexpr std::chrono::microseconds kSpin{50};
// How long a rank that fails waits for another's words on the first failure, which take microseconds unless
// that rank was stopped half-way. After it the two may report different causes.
constexpr milliseconds kFirstFailureWaitMax{1000};
constexpr milliseconds kPoll{2};
// How long a rank that serves the store stays for those that do not leave a failed run. They ask it nothing.
constexpr milliseconds kFarewellMax{500};
// Pieces in a slot begin at cache lines, so that two destinations never share one.
constexpr std::size_t kPieceAlignment = 64;

// More ranks than processors: whoever spins keeps the one it waits for from running.
bool may_spin(int size) noexcept {
  cpu_set_t mine;
  return sched_getaffinity(0, sizeof(mine), &mine) == 0 && CPU_COUNT(&mine) >= size;
}

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

class Group final : public Transport {
 public:
  // `segment` is null when there are no peers; this rank has its process's identity in it already.
  // `board` is the segment of all ranks, of a group that is not all; who waits says so there.
  Group(Membership given, std::unique_ptr<ShmSegment> segment, ShmSegment* board = nullptr)
      : Transport(std::move(given)),
        segment_(std::move(segment)),
        board_(board != nullptr ? board : segment_.get()),
        may_spin_(may_spin(size())) {}
  ~Group() override;

  ShmSegment& segment() noexcept { return *segment_; }

  // The place where the ranks met: it is given up by whoever made it, which must not be before all others
  // have removed what they wrote there.
  void keep(std::shared_ptr<RendezvousStore> store) { store_ = std::move(store); }

  // Says that this rank is here and waits for the others. A rank that cannot come leaves its reason in the
  // text `failure_name`.
  Status join(SteadyClock::time_point limit, RendezvousStore& store, const std::string& failure_name);

  const char* name() const noexcept override { return "shm"; }

  Status reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) override;
  Status gather(TransportPlane plane, const Fingerprint& fingerprint, const Piece& piece) override {
    return gather(plane == TransportPlane::kData ? kShmDataPlane : kShmControlPlane, fingerprint, piece);
  }
  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              std::uint64_t sequence) override;
  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag,
              std::uint64_t sequence) override;
  Status vote(std::uint64_t step, std::span<const std::byte> decision) override;
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override;

 protected:
  // Looks after the peers now and then.
  Status own_status() override;
  Status fail_own(const Status& cause) noexcept override;
  Result<std::shared_ptr<Transport>> split_own(Membership membership, const std::vector<SplitWish>& members,
                                               const Exchange& exchange) override;

 private:
  Status gather(ShmPlane plane, const Fingerprint& fingerprint, const Piece& piece);
  Result<std::unique_ptr<ShmSegment>> share_group(const Membership& membership,
                                                  const std::vector<SplitWish>& members,
                                                  const Exchange& exchange);

  internal::ShmPlaneState& state(int rank, ShmPlane plane) noexcept {
    return segment_->rank(rank).planes[plane];
  }
  template <typename Function>
  void for_peers(Function function) const {
    // Each rank starts with its right neighbour, so that no rank's slots are read by all at once.
    for (int step = 1; step < size(); ++step) function((rank() + step) % size());
  }
  void ring_peers(ShmPlane plane) noexcept {
    for_peers([&](int peer) { state(peer, plane).bell.ring(); });
  }
  template <typename Condition>
  std::vector<int> peers_where(Condition condition) const {
    std::vector<int> found;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && condition(peer)) found.push_back(peer);
    }
    return found;
  }

  bool has_failed() noexcept {
    return segment_->failure().state.load(std::memory_order_acquire) == ShmFailure::kThere;
  }

  // Runs write(round, slot) and read(round, first_slot) for all rounds of a collective, in order.
  template <typename Write, typename Read>
  Status collective(ShmPlane plane, const Fingerprint& fingerprint, std::uint64_t rounds, Write write,
                    Read read);

  // Waits until ready(). `missing()` are the ranks waited for, who have not even come (`came` false) or have
  // not finished; `what()` names the operation. Both are for messages, and to see who is needed.
  struct Missing {
    std::vector<int> ranks;
    bool came;
  };
  template <typename Ready, typename Blame, typename What>
  Status wait(ShmPlane plane, SteadyClock::time_point limit, Ready ready, Blame missing, What what);

  std::string place() const { return " on rank " + std::to_string(world_rank(rank())); }
  // Publishes `cause` unless there is one; the first one of all.
  Status agree_on_first(const Status& cause);
  // The peers whose processes are gone, though they have not left.
  std::vector<int> find_dead();
  Status lost(const std::string& context, const std::vector<int>& dead);

  std::shared_ptr<RendezvousStore> store_;
  const std::unique_ptr<ShmSegment> segment_;
  ShmSegment* const board_;  // The first group's, which lives as long.
  const bool may_spin_;
  std::atomic<std::int64_t> next_look_ns_{0};  // When status() looks after the peers again.
  // Of the thread that runs a plane's operations: those done, and their rounds.
  std::uint64_t collectives_[internal::kShmPlaneCount] = {};
  std::uint64_t rounds_[internal::kShmPlaneCount] = {};
  std::uint64_t messages_ = 0;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Status failure_;
  internal::Ballot alone_;  // Without peers.
};

Group::~Group() {
  leave_origin();
  if (segment_ == nullptr) return;
  if (store_ != nullptr && has_failed()) store_->stay_at_most(kFarewellMax);
  segment_->rank(rank()).presence.store(ShmPresence::kLeft, std::memory_order_release);
  for (const ShmPlane plane : {kShmDataPlane, kShmControlPlane}) ring_peers(plane);
}

std::vector<int> Group::find_dead() {
  return peers_where([&](int peer) {
    const internal::ShmRank& other = segment_->rank(peer);
    return other.presence.load(std::memory_order_acquire) == ShmPresence::kJoined &&
           !is_running(other.process) &&
           // It may have left between the two looks.
           other.presence.load(std::memory_order_acquire) == ShmPresence::kJoined;
  });
}

Status Group::lost(const std::string& context, const std::vector<int>& dead) {
  std::string processes;
  for (const int peer : dead)
    processes += (processes.empty() ? "" : ", ") + std::to_string(segment_->rank(peer).process.id);
  return fail(Status(StatusCode::kPeerLost, context + ": " + internal::rank_list(world_ranks(dead)) +
                                                " died (process " + processes + "); see why it ended"));
}

Status Group::own_status() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok() || segment_ == nullptr) return failure_;
  }
  if (has_failed()) return fail_own(Status(StatusCode::kInternal, "not the first failure"));
  const std::int64_t now = nanoseconds(SteadyClock::now().time_since_epoch()).count();
  std::int64_t next = next_look_ns_.load(std::memory_order_relaxed);
  const std::int64_t after = now + nanoseconds(kShmLivenessPeriod).count();
  if (now < next || !next_look_ns_.compare_exchange_strong(next, after)) return {};
  const std::vector<int> dead = find_dead();
  if (dead.empty()) return {};
  return lost("rank " + std::to_string(world_rank(rank())) + " looked after its peers", dead);
}

Status Group::fail_own(const Status& cause) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  try {
    failure_ = segment_ == nullptr ? cause : agree_on_first(cause);
  } catch (const std::exception&) {
    // No memory for the text; the code is enough to stop.
    failure_ = Status(cause.code(), {});
  }
  if (segment_ == nullptr) return failure_;
  for (int r = 0; r < size(); ++r) {
    for (const ShmPlane plane : {kShmDataPlane, kShmControlPlane}) state(r, plane).bell.ring();
  }
  return failure_;
}

Status Group::agree_on_first(const Status& cause) {
  ShmFailure& failure = segment_->failure();
  const std::uint32_t writing = ShmFailure::kWriting + static_cast<std::uint32_t>(rank());
  const SteadyClock::time_point patience = SteadyClock::now() + kFirstFailureWaitMax;
  const std::string text = internal::encode_failure(cause);
  std::uint32_t seen = ShmFailure::kNone;
  while (!failure.state.compare_exchange_strong(seen, writing, std::memory_order_acq_rel)) {
    if (seen == ShmFailure::kThere) {
      return internal::decode_failure(
          std::string(failure.text, std::min<std::size_t>(failure.bytes, ShmFailure::kTextMax)));
    }
    // A rank that died while it wrote leaves its place to the next.
    const int writer = static_cast<int>(seen - ShmFailure::kWriting);
    if (!is_running(segment_->rank(writer).process)) continue;
    if (SteadyClock::now() >= patience) return cause;
    seen = ShmFailure::kNone;
    std::this_thread::sleep_for(kPoll);
  }
  failure.bytes = static_cast<std::uint32_t>(text.copy(failure.text, ShmFailure::kTextMax));
  failure.state.store(ShmFailure::kThere, std::memory_order_release);
  // As the others read it: a long one is cut.
  return internal::decode_failure(text.substr(0, ShmFailure::kTextMax));
}

template <typename Ready, typename Blame, typename What>
Status Group::wait(ShmPlane plane, SteadyClock::time_point limit, Ready ready, Blame missing, What what) {
  if (ready()) return {};
  if (may_spin_) {
    const SteadyClock::time_point end = SteadyClock::now() + kSpin;
    do {
      for (int i = 0; i < 16; ++i) relax();
      if (ready()) return {};
    } while (SteadyClock::now() < end);
  }
  internal::Bell& bell = state(rank(), plane).bell;
  const internal::WaitReporting reporting = internal::wait_reporting(membership().deadline);
  internal::ShmWaitSign sign(board_->rank(world_rank(rank())), limit - membership().deadline);
  const auto wait_for = [&](const Missing& whom) {
    const std::string& group = membership().name_in_origin;
    return internal::Wait{.what = what() + (group.empty() ? "" : " ") + group,
                          .ranks = world_ranks(whom.ranks),
                          .came = whom.came};
  };
  SteadyClock::time_point next_beat = SteadyClock::now() + reporting.period;
  SteadyClock::time_point next_look = SteadyClock::now() + kShmLivenessPeriod;
  for (;;) {
    const std::uint32_t heard = bell.rings.load(std::memory_order_seq_cst);
    if (ready()) return {};
    if (has_failed() || origin_has_failed()) return status();
    // Who has left or died may have published all that we wait for before, so that is looked at once more.
    const Missing now_missing = missing();
    for (const int peer : now_missing.ranks) {
      if (segment_->rank(peer).presence.load(std::memory_order_acquire) != ShmPresence::kLeft) continue;
      if (ready()) return {};
      if (has_failed() || origin_has_failed()) return status();
      return fail(Status(StatusCode::kPeerLost,
                         what() + place() + ": " + internal::rank_list({world_rank(peer)}) +
                             " has left the communicator; see why it ended, or let it take part"));
    }
    const SteadyClock::time_point now = SteadyClock::now();
    if (now >= next_look) {
      next_look = now + kShmLivenessPeriod;
      if (const std::vector<int> dead = find_dead(); !dead.empty()) {
        if (ready()) return {};
        return lost(what() + place(), dead);
      }
    }
    if (now >= limit) {
      return fail_of_all(internal::explain_timeout(
          world_rank(rank()), wait_for(now_missing), membership().deadline,
          [&](int other) { return internal::read_waits(board_->rank(other), reporting.validity); }));
    }
    if (now >= next_beat) {
      next_beat = now + reporting.period;
      sign.say(wait_for(now_missing));
    }
    bell.sleep(heard, std::min({limit, next_look, next_beat}));
  }
}

Status Group::join(SteadyClock::time_point limit, RendezvousStore& store, const std::string& failure_name) {
  segment_->rank(rank()).presence.store(ShmPresence::kJoined, std::memory_order_release);
  ring_peers(kShmControlPlane);
  const auto absent = [&] {
    return Missing{peers_where([&](int peer) {
                     return segment_->rank(peer).presence.load(std::memory_order_acquire) ==
                            ShmPresence::kAbsent;
                   }),
                   false};
  };
  SteadyClock::time_point next_look = SteadyClock::now();
  std::optional<std::string> reason;
  const auto ready = [&] {
    if (absent().ranks.empty()) return true;
    if (SteadyClock::now() < next_look) return false;
    next_look = SteadyClock::now() + kShmLivenessPeriod;
    reason = store.read(failure_name);
    if (const Status lost = store.status(); !reason && !lost.ok()) reason = internal::encode_failure(lost);
    return reason.has_value();
  };
  FOREBAY_RETURN_IF_ERROR(
      wait(kShmControlPlane, limit, ready, absent, [] { return std::string("joining"); }));
  // A failure from here on is that of the operations: others may have begun some already.
  return reason ? fail(internal::decode_failure(*reason)) : Status();
}

template <typename Write, typename Read>
Status Group::collective(ShmPlane plane, const Fingerprint& fingerprint, std::uint64_t rounds, Write write,
                         Read read) {
  const SteadyClock::time_point limit = deadline();
  const std::uint64_t sequence = collectives_[plane];
  const std::uint64_t base = rounds_[plane];
  internal::ShmPlaneState& mine = state(rank(), plane);
  const auto all_peers = [&](auto condition) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && !condition(state(peer, plane))) return false;
    }
    return true;
  };
  std::uint64_t written = 0;
  std::uint64_t taken = 0;
  const auto can_write = [&] {
    return written < rounds && all_peers([&](internal::ShmPlaneState& peer) {
             return peer.read.load(std::memory_order_acquire) + ShmSegment::kSlotCount > base + written;
           });
  };
  const auto can_read = [&] {
    return taken < rounds && all_peers([&](internal::ShmPlaneState& peer) {
             return peer.written.load(std::memory_order_acquire) > base + taken;
           });
  };
  const auto write_one = [&] {
    write(written, segment_->slot(plane, rank(), base + written));
    mine.written.store(base + ++written, std::memory_order_release);
  };
  const auto announced = [&](int peer) {
    return state(peer, plane).announced.load(std::memory_order_acquire) > sequence;
  };

  if (can_write()) write_one();
  mine.fingerprints[sequence % 2] = fingerprint;
  mine.announced.store(sequence + 1, std::memory_order_release);
  ring_peers(plane);

  // Compared as they come, so that two that disagree are named though a third never comes.
  std::vector<char> agreed(static_cast<std::size_t>(size()));
  agreed[static_cast<std::size_t>(rank())] = 1;
  int agreed_count = 1;
  const auto news = [&] {
    for (int peer = 0; peer < size(); ++peer) {
      if (!agreed[static_cast<std::size_t>(peer)] && announced(peer)) return true;
    }
    return false;
  };
  const auto ready = [&] {
    if (agreed_count < size() && news()) return true;
    return can_write() || (agreed_count == size() && can_read());
  };
  const auto missing = [&] {
    std::vector<int> ranks = peers_where([&](int peer) { return !announced(peer); });
    if (!ranks.empty()) return Missing{std::move(ranks), false};
    return Missing{
        peers_where([&](int peer) {
          const internal::ShmPlaneState& other = state(peer, plane);
          return other.written.load(std::memory_order_acquire) <= base + taken ||
                 (written < rounds &&
                  other.read.load(std::memory_order_acquire) + ShmSegment::kSlotCount <= base + written);
        }),
        true};
  };
  // A rank may have taken all before its own last rounds found a free slot.
  const auto unfinished = [&] { return written < rounds || taken < rounds || agreed_count < size(); };
  while (unfinished()) {
    if (has_failed()) return status();
    if (agreed_count < size()) {
      for (int peer = 0; peer < size(); ++peer) {
        if (agreed[static_cast<std::size_t>(peer)] || !announced(peer)) continue;
        const Fingerprint& other = state(peer, plane).fingerprints[sequence % 2];
        if (other != fingerprint) {
          return fail(internal::mismatch(world_rank(rank()), fingerprint, world_rank(peer), other));
        }
        agreed[static_cast<std::size_t>(peer)] = 1;
        ++agreed_count;
      }
    }
    if (can_write()) {
      write_one();
      ring_peers(plane);
    } else if (agreed_count == size() && can_read()) {
      FOREBAY_RETURN_IF_ERROR(read(taken, base + taken));
      mine.read.store(base + ++taken, std::memory_order_release);
      ring_peers(plane);
    } else if (unfinished()) {
      FOREBAY_RETURN_IF_ERROR(wait(plane, limit, ready, missing, [&] { return describe(fingerprint); }));
    }
  }
  collectives_[plane] = sequence + 1;
  rounds_[plane] = base + rounds;
  return {};
}

std::uint64_t rounds_of(std::uint64_t total, std::uint64_t piece) {
  return (total + piece - 1) / piece;
}

Status Group::reduce_scatter(const Fingerprint& fingerprint, const ReduceScatterArguments& arguments) {
  FOREBAY_RETURN_IF_ERROR(status());
  AccumulateArguments sum = internal::accumulate_arguments(arguments, rank(), size());
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
  FOREBAY_RETURN_IF_ERROR(
      collective(kShmDataPlane, fingerprint, rounds_of(arguments.count, piece_count), write, read));
  return {};
}

Status Group::gather(ShmPlane plane, const Fingerprint& fingerprint, const Piece& piece) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (size() == 1) {
    internal::place_own(piece, rank());
    return {};
  }
  const std::size_t piece_bytes = ShmSegment::slot_bytes(plane);
  const auto bytes_of = [&](std::uint64_t round) {
    return std::min(piece_bytes, piece.bytes - round * piece_bytes);
  };
  // To its own place as well while it is in the cache, so that it is read from memory once.
  const auto write = [&](std::uint64_t round, std::byte* slot) {
    Piece part = piece;
    part.source += round * piece_bytes;
    part.target += round * piece_bytes;
    part.bytes = bytes_of(round);
    std::memcpy(slot, part.source, part.bytes);
    internal::place_own(part, rank());
  };
  const auto read = [&](std::uint64_t round, std::uint64_t slot_round) {
    for_peers([&](int peer) {
      stream_copy(piece.target + static_cast<std::size_t>(peer) * piece.target_stride + round * piece_bytes,
                  segment_->slot(plane, peer, slot_round), bytes_of(round));
    });
    return Status();
  };
  return collective(plane, fingerprint, rounds_of(piece.bytes, piece_bytes), write, read);
}

// The lower 16 bits of ShmMessage::open while a message is for `peer`.
constexpr std::uint64_t kReceiverMask = 0xffff;
constexpr std::uint64_t receiver(int peer) {
  return static_cast<std::uint64_t>(peer) + 1;
}

Status Group::send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
                   std::uint64_t /*sequence*/) {
  FOREBAY_RETURN_IF_ERROR(status());
  const SteadyClock::time_point limit = deadline();
  const auto what = [&] {
    return "send of " + std::to_string(bytes) + " bytes to rank " + std::to_string(world_rank(peer)) +
           " with tag " + std::to_string(tag);
  };
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

Status Group::recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag,
                   std::uint64_t /*sequence*/) {
  FOREBAY_RETURN_IF_ERROR(status());
  const SteadyClock::time_point limit = deadline();
  const auto what = [&] {
    return "recv of " + std::to_string(bytes) + " bytes from rank " + std::to_string(world_rank(peer)) +
           " with tag " + std::to_string(tag);
  };
  const auto from_peer = [&] { return Missing{{peer}, false}; };
  ShmMessage& message = segment_->rank(peer).message;
  const auto is_open = [&] {
    return (message.open.load(std::memory_order_acquire) & kReceiverMask) == receiver(rank());
  };
  FOREBAY_RETURN_IF_ERROR(wait(
      kShmDataPlane, limit, [&] { return is_open(); }, from_peer, what));
  if (message.tag != tag) {
    return fail(Status(StatusCode::kInvalidArgument,
                       what() + place() + ", but rank " + std::to_string(world_rank(peer)) + " sends " +
                           std::to_string(message.bytes) + " bytes with tag " + std::to_string(message.tag) +
                           " first; receive in the order of the sends"));
  }
  if (message.bytes != bytes) {
    return fail(Status(StatusCode::kInvalidArgument,
                       what() + place() + ", but rank " + std::to_string(world_rank(peer)) + " sends " +
                           std::to_string(message.bytes) + " bytes; give both the same size"));
  }

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

// What the owner of a group's memory tells the others.
struct Offer {
  std::int32_t process;
  std::int32_t descriptor;
  std::uint64_t start_time;
};

// Whoever could read a ballot closes it, so a vote is taken before the failure for all or refused; nobody has
// to be waited for, not even a rank that is stopped.
Status Group::vote(std::uint64_t step, std::span<const std::byte> decision) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (segment_ == nullptr) {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) alone_.mark(step, decision);
    return failure_;
  }
  if (segment_->rank(rank()).ballot.cast(step, decision)) return {};
  // The failure is there before the first ballot is closed.
  return fail_own(Status(StatusCode::kInternal, "not the first failure"));
}

std::optional<std::vector<std::byte>> Group::survivors_vote(std::uint64_t step) {
  if (segment_ == nullptr) {
    const std::lock_guard lock(mutex_);
    return alone_.is_for(step) ? std::optional(alone_.decision) : std::nullopt;
  }
  std::optional<std::vector<std::byte>> found;
  for (int r = 0; r < size(); ++r) {
    if (std::optional<std::vector<std::byte>> vote = segment_->rank(r).ballot.close(step)) found = vote;
  }
  return found;
}

// The descriptors of the groups' memories, then a barrier: after it all have opened theirs, and the
// descriptors are closed. Who cannot fails the group it splits, so that all hear it.
Result<std::unique_ptr<ShmSegment>> Group::share_group(const Membership& membership,
                                                       const std::vector<SplitWish>& members,
                                                       const Exchange& exchange) {
  const ProcessIdentity me = segment_->rank(rank()).process;
  Offer offer{.process = me.id, .descriptor = -1, .start_time = me.start_time};
  std::unique_ptr<ShmSegment> segment;
  if (membership.rank == 0 && membership.size > 1) {
    Result<std::unique_ptr<ShmSegment>> created = ShmSegment::create(membership.size, membership.generation);
    FOREBAY_RETURN_IF_ERROR(created.status());
    segment = std::move(created).value();
    offer.descriptor = segment->descriptor();
  }
  std::vector<Offer> offers(static_cast<std::size_t>(size()));
  FOREBAY_RETURN_IF_ERROR(
      exchange(std::as_bytes(std::span(&offer, 1)), std::as_writable_bytes(std::span(offers))));
  if (membership.rank != 0) {
    const Offer& owner = offers[static_cast<std::size_t>(members.front().rank)];
    Result<std::unique_ptr<ShmSegment>> opened = ShmSegment::open(
        {owner.process, owner.start_time}, owner.descriptor, membership.size, membership.generation);
    FOREBAY_RETURN_IF_ERROR(opened.status());
    segment = std::move(opened).value();
  }
  if (segment != nullptr) {
    segment->rank(membership.rank).process = me;
    segment->rank(membership.rank).presence.store(ShmPresence::kJoined, std::memory_order_release);
  }
  FOREBAY_RETURN_IF_ERROR(exchange({}, {}));
  if (segment != nullptr) segment->close_descriptor();
  return segment;
}

Result<std::shared_ptr<Transport>> Group::split_own(Membership membership,
                                                    const std::vector<SplitWish>& members,
                                                    const Exchange& exchange) {
  std::unique_ptr<ShmSegment> segment;
  if (size() > 1) {
    Result<std::unique_ptr<ShmSegment>> shared = share_group(membership, members, exchange);
    if (!shared.ok()) return fail(shared.status().with_context("split" + place()));
    segment = std::move(shared).value();
  }
  return std::shared_ptr<Transport>(
      std::make_shared<Group>(std::move(membership), std::move(segment), board_));
}

// --- joining ---

// Rank 0 makes the memory, the others find it.
Result<std::unique_ptr<ShmSegment>> share_segment(const Joining& joining, const ProcessIdentity& me) {
  const Membership& membership = joining.membership;
  Result<std::string> host = internal::host_identity();
  FOREBAY_RETURN_IF_ERROR(host.status());
  const std::string name = joining.name("segment");
  if (membership.rank == 0) {
    Result<std::unique_ptr<ShmSegment>> segment = ShmSegment::create(membership.size, membership.generation);
    FOREBAY_RETURN_IF_ERROR(segment.status());
    FOREBAY_RETURN_IF_ERROR(joining.store->write(
        name, internal::encode(internal::ShmAnnouncement{host.value(), me, segment.value()->descriptor()})));
    return segment;
  }
  const Result<std::string> text =
      internal::await_text(joining, name, "rank 0 came but made no memory to share");
  FOREBAY_RETURN_IF_ERROR(text.status());
  const std::optional<internal::ShmAnnouncement> found = internal::decode_shm_announcement(text.value());
  if (!found) {
    return Status(StatusCode::kCorruption, "the text " + name + " in " + joining.store->where() +
                                               " is damaged; give every run a store of its own");
  }
  if (found->host != host.value()) {
    return Status(StatusCode::kUnsupported,
                  "rank 0 is on " + found->host + ", rank " + std::to_string(membership.rank) + " on " +
                      host.value() +
                      ": they cannot share memory; start all ranks on one host and in one container, or use "
                      "another communicator");
  }
  return ShmSegment::open(found->owner, found->descriptor, membership.size, membership.generation);
}

Result<std::shared_ptr<Transport>> join_group(const Joining& joining) {
  const Membership& membership = joining.membership;
  Result<ProcessIdentity> me = internal::this_process();
  FOREBAY_RETURN_IF_ERROR(me.status());
  Result<std::unique_ptr<ShmSegment>> segment = share_segment(joining, me.value());
  FOREBAY_RETURN_IF_ERROR(segment.status());
  segment.value()->rank(membership.rank).process = me.value();
  auto group = std::make_shared<Group>(membership, std::move(segment).value());
  FOREBAY_RETURN_IF_ERROR(group->join(joining.limit, *joining.store, joining.name("failed")));
  group->segment().close_descriptor();
  group->keep(joining.store);
  return std::shared_ptr<Transport>(std::move(group));
}

}  // namespace

Result<std::shared_ptr<Transport>> internal::connect_shm(const Joining& joining) {
  Result<std::shared_ptr<Transport>> transport = join_group(joining);
  if (joining.membership.rank == 0) joining.store->remove(joining.name("segment"));
  return transport;
}

Result<std::unique_ptr<Communicator>> create_shm_communicator(const ShmOptions& options, Backend& backend) {
  if (options.size > kShmRanksMax) {
    return Status(StatusCode::kInvalidArgument,
                  std::to_string(options.size) + " ranks cannot share memory, at most " +
                      std::to_string(kShmRanksMax) + " can; use another communicator");
  }
  if (options.size > 1) return internal::create_over("shm", internal::connect_shm, options, backend);
  Result<Membership> membership =
      internal::check_membership("shm", options.rank, options.size, options.deadline, backend);
  FOREBAY_RETURN_IF_ERROR(membership.status());
  return internal::create_process_communicator(
      std::make_shared<Group>(std::move(membership).value(), nullptr), backend);
}

}  // namespace forebay
