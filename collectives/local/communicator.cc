#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/arguments.h"
#include "collectives/fingerprint.h"
#include "collectives/operation_book.h"
#include "collectives/process/transport.h"
#include "collectives/wait_chain.h"
#include "forebay/local_communicator.h"
#include "forebay/stream_call.h"

namespace forebay {
namespace {

using internal::Fingerprint;
using internal::Issued;
using internal::Operation;
using internal::OperationBook;
using internal::Piece;
using internal::SplitWish;

// There are two ways to move bytes.
//
// In memory that the host reaches, an operation is a host function on each rank's stream: the functions of
// all ranks meet, and each copies with the host what is for its rank.
//
// In memory that it does not reach, the Backend has to copy, and a host function must not call it. The ranks
// meet as they *issue* the operation, and the last to come queues on the streams of all: each stream waits
// for the others to have come to the operation, copies what is for its rank, and waits for the others to have
// copied from it. So a stream is only ever told to wait for what is already queued. Host functions that wait
// for each other would be the other possibility, but a CUDA driver may run those of all streams on one
// thread, where the first to wait would wait for ever; and a wait for what is queued later stops every stream
// that happens to share its hardware queue.

// Where a data operation of one rank is queued, when it is the Backend that copies; else empty.
struct Port {
  Backend* backend = nullptr;
  Stream stream;
  Event come;    // The stream is there: the source holds its bytes and the target may be written.
  Event copied;  // The stream has what it wants from the others' sources.
  int rank = 0;  // In the world: for messages.

  bool used() const noexcept { return backend != nullptr; }
};

// All ranks in one operation. They arrive, then copy from each other, then leave once all have copied, so
// that a source may be written again by whatever is queued next.
struct Round {
  explicit Round(int size)
      : arrived(static_cast<std::size_t>(size)),
        copied(static_cast<std::size_t>(size)),
        fingerprints(static_cast<std::size_t>(size)),
        pieces(static_cast<std::size_t>(size)),
        ports(static_cast<std::size_t>(size)) {}

  std::vector<char> arrived;
  std::vector<char> copied;
  std::vector<Fingerprint> fingerprints;
  std::vector<Piece> pieces;
  std::vector<Port> ports;
  int arrived_count = 0;
  int copying_count = 0;  // Ranks that use `pieces` now; nobody leaves while there are any, failed or not.
  int copied_count = 0;
  int left_count = 0;
};

// A send that waits for its recv.
struct Message {
  const std::byte* source;
  std::size_t bytes;
  Port port;
  bool taken = false;
  bool copying = false;
  bool done = false;
};

enum Plane : int { kDataPlane, kControlPlane, kPlaneCount };

// Who copies. The same for all ranks of a group.
enum class Mover : std::uint8_t { kUndecided, kHost, kBackend };

Status of_rank(const Port& port, const Status& status) {
  return status.with_context("rank " + std::to_string(port.rank));
}

// One copy between ranks.
struct Transfer {
  const Port& writer;
  const Port& reader;
  const std::byte* source;
  std::byte* target;
  std::size_t bytes;
};

// Queues the copy on the reader's stream, after what the writer's stream holds by now, and makes the writer's
// stream wait for it. Once the copy is queued the writer's source is safe, failed or not.
Status queue_transfer(const Transfer& t) {
  const auto at_writer = [&](const Status& status) { return of_rank(t.writer, status); };
  const auto at_reader = [&](const Status& status) { return of_rank(t.reader, status); };
  Backend& writer = *t.writer.backend;
  Backend& reader = *t.reader.backend;
  FOREBAY_RETURN_IF_ERROR(at_writer(writer.event_record(t.writer.come, t.writer.stream)));
  FOREBAY_RETURN_IF_ERROR(at_reader(reader.stream_wait(t.reader.stream, t.writer.come)));
  FOREBAY_RETURN_IF_ERROR(at_reader(reader.copy_async(t.target, t.source, t.bytes, t.reader.stream)));
  Status closed = at_reader(reader.event_record(t.reader.copied, t.reader.stream));
  if (closed.ok()) closed = at_writer(writer.stream_wait(t.writer.stream, t.reader.copied));
  if (!closed.ok()) static_cast<void>(reader.stream_synchronize(t.reader.stream));
  return closed;
}

// Queues the copies of a round, each on the stream of the rank it is for. `reader_count` counts the ranks
// whose streams have got any.
Status queue_copies(const Round& round, std::size_t* reader_count) {
  const std::size_t size = round.ports.size();
  for (std::size_t r = 0; r < size; ++r) {
    const Port& port = round.ports[r];
    FOREBAY_RETURN_IF_ERROR(of_rank(port, port.backend->event_record(port.come, port.stream)));
  }
  for (std::size_t r = 0; r < size; ++r) {
    const Port& port = round.ports[r];
    const Piece& piece = round.pieces[r];
    ++*reader_count;
    const auto copy = [&](std::size_t from, const std::byte* source) {
      std::byte* const place = piece.target + from * piece.target_stride;
      if (place == source) return Status();
      return of_rank(port, port.backend->copy_async(place, source, piece.bytes, port.stream));
    };
    if (piece.keep_own) FOREBAY_RETURN_IF_ERROR(copy(r, piece.source));
    // Each rank starts with its right neighbour, so that no source is read by all at once.
    for (std::size_t step = 1; step < size; ++step) {
      const std::size_t peer = (r + step) % size;
      const Piece& theirs = round.pieces[peer];
      FOREBAY_RETURN_IF_ERROR(of_rank(port, port.backend->stream_wait(port.stream, round.ports[peer].come)));
      FOREBAY_RETURN_IF_ERROR(copy(peer, theirs.source + r * theirs.source_stride));
    }
  }
  return {};
}

// Makes every rank's stream wait for the copies of the first `reader_count` ranks.
Status queue_waits(const Round& round, std::size_t reader_count) {
  const std::size_t size = round.ports.size();
  for (std::size_t r = 0; r < reader_count; ++r) {
    const Port& port = round.ports[r];
    FOREBAY_RETURN_IF_ERROR(of_rank(port, port.backend->event_record(port.copied, port.stream)));
  }
  for (std::size_t r = 0; r < size; ++r) {
    const Port& port = round.ports[r];
    for (std::size_t peer = 0; peer < reader_count; ++peer) {
      if (peer == r) continue;
      FOREBAY_RETURN_IF_ERROR(
          of_rank(port, port.backend->stream_wait(port.stream, round.ports[peer].copied)));
    }
  }
  return {};
}

// A round that all ranks have come to, by their backends. Sources are safe when it returns, failed or not: a
// copy that is queued is not taken back, so whoever it reads from has to wait for it.
Status queue_by_backends(const Round& round) {
  if (round.pieces[0].bytes == 0) return {};
  std::size_t reader_count = 0;
  const Status copies = queue_copies(round, &reader_count);
  const Status waits = queue_waits(round, reader_count);
  if (!waits.ok()) {
    for (std::size_t r = 0; r < reader_count; ++r) {
      static_cast<void>(round.ports[r].backend->stream_synchronize(round.ports[r].stream));
    }
  }
  return copies.ok() ? waits : copies;
}

// The state that all ranks share, under the clock's mutex.
class LocalGroupImpl final : public LocalGroup, public std::enable_shared_from_this<LocalGroupImpl> {
 public:
  // `own_clock` may be null when options.clock is not; split groups share their parent's.
  // `origin` is the group that this one is split from, if any, and `wishes` those of its ranks.
  LocalGroupImpl(int size, LocalOptions options, std::shared_ptr<HostClock> own_clock,
                 std::shared_ptr<LocalGroupImpl> origin = nullptr, const std::vector<SplitWish>& wishes = {})
      : size_(size),
        options_(std::move(options)),
        own_clock_(std::move(own_clock)),
        clock_(options_.clock != nullptr ? *options_.clock : *own_clock_),
        origin_(std::move(origin)),
        world_(origin_ != nullptr ? origin_->world_ : *this),
        world_ranks_(numbers_in_world(wishes)),
        name_(origin_ != nullptr ? internal::describe_group(world_ranks_, world_.size_) : ""),
        failure_(world_.own_failure_),
        members_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      member(rank).book =
          origin_ == nullptr
              ? std::make_unique<OperationBook>(rank, size, [this] { return clock_.now(); })
              : std::make_unique<OperationBook>(
                    rank, origin_->book(wishes[static_cast<std::size_t>(rank)].rank), name_, world_ranks_);
    }
  }

  // The number in the first group, by which messages know a rank.
  int world_rank(int rank) const {
    return world_ranks_.empty() ? rank : world_ranks_[static_cast<std::size_t>(rank)];
  }

  Result<std::unique_ptr<Communicator>> communicator(int rank, Backend& backend, Kernels& kernels) override;

  int size() const noexcept { return size_; }
  const LocalOptions& options() const noexcept { return options_; }

  Status status() {
    const std::lock_guard lock(clock_.mutex());
    return failure_;
  }

  void fail(Status cause) {
    const std::lock_guard lock(clock_.mutex());
    fail_locked(std::move(cause));
  }

  OperationBook& book(int rank) { return *member(rank).book; }

  Status vote(int rank, std::uint64_t step, std::span<const std::byte> decision) {
    const std::lock_guard lock(clock_.mutex());
    if (failure_.ok()) member(rank).ballot.mark(step, decision);
    return failure_;
  }
  // No vote is taken any more once the group has failed, so there is nothing to wait for.
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) {
    const std::lock_guard lock(clock_.mutex());
    for (const Member& other : members_) {
      if (other.ballot.is_for(step)) return other.ballot.decision;
    }
    return std::nullopt;
  }

  // A data operation of `rank` was queued; finish_operation follows when it has run, or could not be queued
  // after all.
  void begin_operation(int rank) {
    const std::lock_guard lock(clock_.mutex());
    ++member(rank).outstanding_count;
  }
  void finish_operation(int rank) {
    const std::lock_guard lock(clock_.mutex());
    --member(rank).outstanding_count;
    clock_.notify();
  }

  // `rank`'s communicator is destroyed: peers that wait for an operation it never issued learn that now.
  void close(int rank) noexcept {
    const std::lock_guard lock(clock_.mutex());
    member(rank).closed = true;
    clock_.notify();
  }

  // --- faults by script ---
  bool is_dead(int rank) {
    const std::lock_guard lock(clock_.mutex());
    return member(rank).dead;
  }
  void die(int rank) {
    const std::lock_guard lock(clock_.mutex());
    member(rank).dead = true;
    clock_.notify();
  }
  // Ends early when the group fails.
  void pass_time(std::chrono::nanoseconds duration) {
    const HostClock::Nanoseconds start = clock_.now();
    std::unique_lock lock(clock_.mutex());
    clock_.wait(
        lock, [&] { return !failure_.ok(); }, after(start, duration));
  }
  void await_failure() {
    std::unique_lock lock(clock_.mutex());
    clock_.wait(lock, [&] { return !failure_.ok(); });
  }

  // One operation of one rank, when its stream comes to it or, with a port, when it is issued.
  Status run_round(Plane plane, int rank, const Fingerprint& fingerprint, const Piece& piece,
                   const Port& port);
  Status send(int rank, int peer, std::uint32_t tag, const std::byte* source, std::size_t bytes,
              const Port& port);
  Status recv(int rank, int peer, std::uint32_t tag, std::byte* target, std::size_t bytes, const Port& port);

  // The group of the ranks of `color` in the split that had control sequence `sequence`.
  std::shared_ptr<LocalGroupImpl> split_group(std::uint64_t sequence, int color,
                                              const std::vector<SplitWish>& members);

 private:
  struct Member {
    bool taken = false;
    bool closed = false;
    bool dead = false;                    // By script.
    std::uint64_t outstanding_count = 0;  // Data operations queued and not run yet.
    internal::Ballot ballot;
    std::unique_ptr<OperationBook> book;
  };
  struct Split {
    std::shared_ptr<LocalGroupImpl> group;
    int remaining_count;
  };

  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }

  void fail_locked(Status cause) {
    fail_of_all(name_.empty() ? std::move(cause) : cause.with_context(name_));
  }
  // With a cause that says itself in which group what happened.
  void fail_of_all(Status cause) {
    if (failure_.ok()) failure_ = std::move(cause);
    clock_.notify();
  }

  std::vector<int> numbers_in_world(const std::vector<SplitWish>& wishes) const {
    std::vector<int> numbers;
    for (const SplitWish& wish : wishes) numbers.push_back(origin_->world_rank(wish.rank));
    return numbers;
  }

  // A wait in progress, listed in the world for as long as it lives. Under clock_.mutex().
  class OpenWait {
   public:
    // `missing()`: the ranks of this group that are waited for. It and `what` live as long as this.
    OpenWait(LocalGroupImpl& group, int rank, const std::function<std::string()>& what, bool came,
             const std::function<std::vector<int>()>& missing, HostClock::Nanoseconds begin)
        : group_(group),
          rank_(group.world_rank(rank)),
          what_(what),
          came_(came),
          missing_(missing),
          begin_(begin) {
      group_.world_.waits_.push_back(this);
    }
    ~OpenWait() { std::erase(group_.world_.waits_, this); }
    OpenWait(const OpenWait&) = delete;
    OpenWait& operator=(const OpenWait&) = delete;

    int rank() const noexcept { return rank_; }
    internal::Wait wait(HostClock::Nanoseconds now) const {
      std::vector<int> ranks = missing_();
      for (int& rank : ranks) rank = group_.world_rank(rank);
      std::string what = what_() + (group_.name_.empty() ? "" : " ") + group_.name_;
      return {.what = std::move(what), .ranks = std::move(ranks), .came = came_, .age = now - begin_};
    }

   private:
    LocalGroupImpl& group_;
    const int rank_;  // In the world.
    const std::function<std::string()>& what_;
    const bool came_;
    const std::function<std::vector<int>()>& missing_;
    const HostClock::Nanoseconds begin_;
  };

  // `wait` has come to its deadline, `now`.
  void fail_late(const OpenWait& wait, HostClock::Nanoseconds now) {
    fail_of_all(internal::judge(wait.rank(), wait.wait(now), options_.deadline, [&](int rank) {
      std::vector<internal::Wait> found;
      for (const OpenWait* other : world_.waits_) {
        if (other->rank() != rank) continue;
        if (internal::Wait one = other->wait(now); !one.ranks.empty()) found.push_back(std::move(one));
      }
      return found;
    }));
  }

  // Saturating, so that a deadline of "never" stays one.
  HostClock::Nanoseconds after(HostClock::Nanoseconds start, HostClock::Nanoseconds duration) const {
    return duration > HostClock::kNever - start ? HostClock::kNever : start + duration;
  }
  HostClock::Nanoseconds deadline() {
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(HostClock::kNever);
    if (options_.deadline >= limit) return HostClock::kNever;
    return after(clock_.now(), options_.deadline);
  }

  // True when `rank` will never issue what others wait for.
  bool gone(Plane plane, int rank) {
    const Member& peer = member(rank);
    if (peer.dead) return true;
    return peer.closed && (plane == kControlPlane || peer.outstanding_count == 0);
  }

  // The first rank that is not in `present` and never will be, or -1.
  int first_gone(Plane plane, const std::vector<char>& present) {
    for (int r = 0; r < size_; ++r) {
      if (!present[static_cast<std::size_t>(r)] && gone(plane, r)) return r;
    }
    return -1;
  }

  // Waits until all ranks are marked in `present`, which they have done before if they `came`. Fails the
  // group when that cannot happen.
  Status await_all(std::unique_lock<std::mutex>& lock, Plane plane, int rank, const Fingerprint& fingerprint,
                   bool came, const std::vector<char>& present, const int& present_count,
                   HostClock::Nanoseconds deadline);

  // Waits until ready() or, failing the ranks, until `limit`; meanwhile the others can see for whom. Returns
  // ready().
  bool await(std::unique_lock<std::mutex>& lock, int rank, const std::function<std::string()>& what,
             bool came, const std::function<std::vector<int>()>& missing, const std::function<bool()>& ready,
             HostClock::Nanoseconds limit) {
    if (ready()) return true;
    const HostClock::Nanoseconds begin =
        limit == HostClock::kNever ? HostClock::Nanoseconds(0) : limit - options_.deadline;
    const OpenWait wait(*this, rank, what, came, missing, begin);
    if (clock_.wait(lock, ready, limit)) return true;
    fail_late(wait, limit);
    return false;
  }

  // The second half of run_round: this rank's copies by the host, or all ranks' by the last that arrived.
  Status copy_by_host(std::unique_lock<std::mutex>& lock, Plane plane, int rank, Round& round,
                      HostClock::Nanoseconds limit);
  Status copy_by_backend(std::unique_lock<std::mutex>& lock, Round& round, bool last);

  // Lets the modelled link's time for `bytes` pass. Returns early when the group fails.
  void pass_link_time(std::unique_lock<std::mutex>& lock, HostClock::Nanoseconds start, std::uint64_t bytes);

  Status lost(int rank, const std::string& what, int peer) const {
    return Status(StatusCode::kPeerLost, what + " on rank " + std::to_string(world_rank(rank)) + ": rank " +
                                             std::to_string(world_rank(peer)) +
                                             " has left the communicator; see why it ended");
  }

  const int size_;
  const LocalOptions options_;
  // Shared with the groups split from this one, which may outlive it.
  const std::shared_ptr<HostClock> own_clock_;
  HostClock& clock_;
  const std::shared_ptr<LocalGroupImpl> origin_;
  LocalGroupImpl& world_;               // The first group, from which all others were split.
  const std::vector<int> world_ranks_;  // By rank; empty in the world.
  const std::string name_;              // What messages call this group; empty for all ranks.

  // Guarded by clock_.mutex().
  Mover mover_ = Mover::kUndecided;  // By the first rank's backend.
  Status own_failure_;
  Status& failure_;               // Of the world: its groups fail together.
  std::vector<OpenWait*> waits_;  // Of the world: those of all groups, the oldest first.
  std::vector<Member> members_;
  std::map<std::uint64_t, Round> rounds_[kPlaneCount];
  std::map<std::tuple<int, int, std::uint32_t>, std::deque<Message*>> messages_;  // (source, target, tag)
  std::map<std::pair<std::uint64_t, int>, Split> splits_;
};

Status LocalGroupImpl::await_all(std::unique_lock<std::mutex>& lock, Plane plane, int rank,
                                 const Fingerprint& fingerprint, bool came, const std::vector<char>& present,
                                 const int& present_count, HostClock::Nanoseconds deadline) {
  const auto ready = [&] {
    return present_count == size_ || !failure_.ok() || first_gone(plane, present) >= 0;
  };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r) {
      if (!present[static_cast<std::size_t>(r)]) ranks.push_back(r);
    }
    return ranks;
  };
  const bool in_time = await(
      lock, rank, [&] { return describe(fingerprint); }, came, missing, ready, deadline);
  if (!failure_.ok()) return failure_;
  if (in_time && present_count < size_) {
    fail_locked(lost(rank, describe(fingerprint), first_gone(plane, present)));
  }
  return failure_;
}

void LocalGroupImpl::pass_link_time(std::unique_lock<std::mutex>& lock, HostClock::Nanoseconds start,
                                    std::uint64_t bytes) {
  HostClock::Nanoseconds duration = options_.latency;
  if (options_.bytes_per_second > 0) {
    duration +=
        HostClock::Nanoseconds(std::llround(static_cast<double>(bytes) / options_.bytes_per_second * 1e9));
  }
  if (duration.count() <= 0) return;
  clock_.wait(
      lock, [&] { return !failure_.ok(); }, after(start, duration));
}

Status LocalGroupImpl::run_round(Plane plane, int rank, const Fingerprint& fingerprint, const Piece& piece,
                                 const Port& port) {
  const auto me = static_cast<std::size_t>(rank);
  const HostClock::Nanoseconds limit = deadline();
  std::unique_lock lock(clock_.mutex());
  if (!failure_.ok()) return failure_;

  Round& round = rounds_[plane].try_emplace(fingerprint.sequence, size_).first->second;
  for (int r = 0; r < size_; ++r) {
    if (round.arrived[static_cast<std::size_t>(r)] &&
        round.fingerprints[static_cast<std::size_t>(r)] != fingerprint) {
      fail_locked(internal::mismatch(world_rank(rank), fingerprint, world_rank(r),
                                     round.fingerprints[static_cast<std::size_t>(r)]));
      return failure_;
    }
  }
  round.fingerprints[me] = fingerprint;
  round.pieces[me] = piece;
  round.ports[me] = port;
  round.arrived[me] = 1;
  const bool last = ++round.arrived_count == size_;
  clock_.notify();

  Status status = await_all(lock, plane, rank, fingerprint, false, round.arrived, round.arrived_count, limit);
  if (status.ok()) {
    status = port.used() ? copy_by_backend(lock, round, last) : copy_by_host(lock, plane, rank, round, limit);
  }
  // A failed round too lets go of its sources only when nobody reads them: a copy that has begun is not
  // interrupted.
  clock_.wait(lock, [&] { return round.copying_count == 0; });
  if (++round.left_count == size_) rounds_[plane].erase(fingerprint.sequence);
  return status;
}

Status LocalGroupImpl::copy_by_host(std::unique_lock<std::mutex>& lock, Plane plane, int rank, Round& round,
                                    HostClock::Nanoseconds limit) {
  const auto me = static_cast<std::size_t>(rank);
  const Piece& piece = round.pieces[me];
  const Fingerprint& fingerprint = round.fingerprints[me];
  if (size_ > 1) {
    lock.unlock();
    const HostClock::Nanoseconds start = clock_.now();
    lock.lock();
    pass_link_time(lock, start, piece.bytes * static_cast<std::uint64_t>(size_ - 1));
    if (!failure_.ok()) return failure_;
  }
  ++round.copying_count;
  lock.unlock();
  // Each rank starts with its right neighbour, so that no source is read by all at once. `pieces` does not
  // change any more: every rank has arrived.
  for (int step = 1; step < size_; ++step) {
    const auto peer = static_cast<std::size_t>((rank + step) % size_);
    if (piece.bytes == 0) break;
    const Piece& theirs = round.pieces[peer];
    std::memcpy(piece.target + peer * piece.target_stride, theirs.source + me * theirs.source_stride,
                piece.bytes);
  }
  internal::place_own(piece, rank);
  lock.lock();
  --round.copying_count;
  round.copied[me] = 1;
  ++round.copied_count;
  clock_.notify();
  return await_all(lock, plane, rank, fingerprint, true, round.copied, round.copied_count, limit);
}

Status LocalGroupImpl::copy_by_backend(std::unique_lock<std::mutex>& lock, Round& round, bool last) {
  if (last) {
    ++round.copying_count;
    lock.unlock();
    const Status queued = queue_by_backends(round);
    lock.lock();
    --round.copying_count;
    if (queued.ok()) {
      round.copied_count = size_;
    } else {
      fail_locked(queued);
    }
    clock_.notify();
  } else {
    // The last one waits for nobody, so this needs no deadline.
    clock_.wait(lock, [&] { return round.copied_count == size_ || !failure_.ok(); });
  }
  return failure_;
}

Status LocalGroupImpl::send(int rank, int peer, std::uint32_t tag, const std::byte* source, std::size_t bytes,
                            const Port& port) {
  const HostClock::Nanoseconds limit = deadline();
  const auto what = [&] {
    return "send of " + std::to_string(bytes) + " bytes to rank " + std::to_string(world_rank(peer)) +
           " with tag " + std::to_string(tag);
  };
  const auto missing = [&] { return std::vector<int>{peer}; };
  Message message{.source = source, .bytes = bytes, .port = port};
  std::unique_lock lock(clock_.mutex());
  if (!failure_.ok()) return failure_;
  std::deque<Message*>& queue = messages_[{rank, peer, tag}];
  queue.push_back(&message);
  clock_.notify();

  const auto ready = [&] {
    return message.done || !failure_.ok() || (!message.taken && gone(kDataPlane, peer));
  };
  static_cast<void>(await(lock, rank, what, false, missing, ready, limit));
  if (!message.done && failure_.ok()) fail_locked(lost(rank, what(), peer));
  clock_.wait(lock, [&] { return !message.copying; });
  if (!message.taken) std::erase(queue, &message);
  return message.done ? Status() : failure_;
}

Status LocalGroupImpl::recv(int rank, int peer, std::uint32_t tag, std::byte* target, std::size_t bytes,
                            const Port& port) {
  const HostClock::Nanoseconds limit = deadline();
  const auto what = [&] {
    return "recv of " + std::to_string(bytes) + " bytes from rank " + std::to_string(world_rank(peer)) +
           " with tag " + std::to_string(tag);
  };
  const auto missing = [&] { return std::vector<int>{peer}; };
  std::unique_lock lock(clock_.mutex());
  if (!failure_.ok()) return failure_;
  std::deque<Message*>& queue = messages_[{peer, rank, tag}];
  const auto ready = [&] { return !queue.empty() || !failure_.ok() || gone(kDataPlane, peer); };
  static_cast<void>(await(lock, rank, what, false, missing, ready, limit));
  if (!failure_.ok()) return failure_;
  if (queue.empty()) {
    fail_locked(lost(rank, what(), peer));
    return failure_;
  }

  Message& message = *queue.front();
  if (message.bytes != bytes) {
    fail_locked(Status(StatusCode::kInvalidArgument, what() + " on rank " + std::to_string(world_rank(rank)) +
                                                         ", but rank " + std::to_string(world_rank(peer)) +
                                                         " sends " + std::to_string(message.bytes) +
                                                         " bytes; give both the same size"));
    return failure_;
  }
  message.taken = true;
  message.copying = true;  // From here on the sender stays, so that `message` does too.
  queue.pop_front();
  lock.unlock();
  const HostClock::Nanoseconds start = clock_.now();
  lock.lock();
  pass_link_time(lock, start, bytes);
  bool copies = failure_.ok();
  lock.unlock();
  Status queued;
  if (copies && bytes > 0) {
    if (port.used()) {
      queued = queue_transfer({.writer = message.port,
                               .reader = port,
                               .source = message.source,
                               .target = target,
                               .bytes = bytes});
    } else {
      std::memcpy(target, message.source, bytes);
    }
  }
  lock.lock();
  if (!queued.ok()) {
    fail_locked(std::move(queued));
    copies = false;
  }
  if (copies) message.done = true;
  message.copying = false;
  clock_.notify();
  return copies ? Status() : failure_;
}

std::shared_ptr<LocalGroupImpl> LocalGroupImpl::split_group(std::uint64_t sequence, int color,
                                                            const std::vector<SplitWish>& members) {
  const auto member_count = static_cast<int>(members.size());
  const std::lock_guard lock(clock_.mutex());
  auto [place, fresh] = splits_.try_emplace({sequence, color});
  if (fresh) {
    LocalOptions options = options_;
    options.fault = {};  // A script counts the operations of the communicator it was written for.
    place->second = {std::make_shared<LocalGroupImpl>(member_count, std::move(options), own_clock_,
                                                      shared_from_this(), members),
                     member_count};
  }
  std::shared_ptr<LocalGroupImpl> group = place->second.group;
  if (--place->second.remaining_count == 0) splits_.erase(place);
  return group;
}

class LocalCommunicator final : public Communicator {
 public:
  // Takes the port's events, if it has any.
  LocalCommunicator(std::shared_ptr<LocalGroupImpl> group, int rank, Backend& backend, Kernels& kernels,
                    const Port& port)
      : group_(std::move(group)), rank_(rank), backend_(backend), kernels_(kernels), port_(port) {}
  ~LocalCommunicator() override {
    group_->close(rank_);
    for (const Event event : {port_.come, port_.copied}) {
      if (event.handle != nullptr) static_cast<void>(backend_.event_destroy(event));
    }
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return group_->size(); }
  const char* name() const noexcept override { return "local"; }

  Status reduce_scatter(const ReduceScatterArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(group_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    // Alone, there is nobody to wait for and nothing to compare: only the sum is queued, unless a script has
    // a fault.
    if (size() > 1 || group_->options().fault.rank >= 0) {
      FOREBAY_RETURN_IF_ERROR(queue_round(internal::reduce_scatter_transfer(arguments), stream));
    }
    if (arguments.count == 0) return {};
    return fail_unless_ok(
        kernels_.accumulate(internal::accumulate_arguments(arguments, rank_, size()), stream));
  }

  Status all_gather(const AllGatherArguments& arguments, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(group_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_arguments(arguments, size()));
    return queue_round(internal::all_gather_transfer(arguments), stream);
  }

  Status send(const std::byte* source, std::size_t bytes, int peer, std::uint32_t tag,
              Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(group_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_peer("send", source, bytes, peer, rank_, size()));
    return queue(stream, message(Operation::kSend, bytes, peer, tag),
                 [group = group_.get(), rank = rank_, peer, tag, source,
                  port = port_on(stream)](const Fingerprint& fingerprint) {
                   return group->send(rank, peer, tag, source, fingerprint.count, port);
                 });
  }

  Status recv(std::byte* target, std::size_t bytes, int peer, std::uint32_t tag, Stream stream) override {
    FOREBAY_RETURN_IF_ERROR(group_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_peer("recv", target, bytes, peer, rank_, size()));
    return queue(stream, message(Operation::kRecv, bytes, peer, tag),
                 [group = group_.get(), rank = rank_, peer, tag, target,
                  port = port_on(stream)](const Fingerprint& fingerprint) {
                   return group->recv(rank, peer, tag, target, fingerprint.count, port);
                 });
  }

  Status exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    FOREBAY_RETURN_IF_ERROR(group_->status());
    FOREBAY_RETURN_IF_ERROR(internal::check_exchange(mine, all, size()));
    return control(Operation::kExchange, control_sequence_++, mine, all);
  }

  Status barrier() override {
    FOREBAY_RETURN_IF_ERROR(group_->status());
    return control(Operation::kBarrier, control_sequence_++, {}, {});
  }

  Result<std::unique_ptr<Communicator>> split(int color, int key) override {
    FOREBAY_RETURN_IF_ERROR(group_->status());
    const SplitWish mine{color, key, rank_};
    std::vector<SplitWish> all(static_cast<std::size_t>(size()));
    const std::uint64_t sequence = control_sequence_++;
    FOREBAY_RETURN_IF_ERROR(control(Operation::kSplit, sequence, std::as_bytes(std::span(&mine, 1)),
                                    std::as_writable_bytes(std::span(all))));
    const std::vector<SplitWish> members = internal::split_members(std::move(all), color);
    const auto place = std::find_if(members.begin(), members.end(),
                                    [&](const SplitWish& wish) { return wish.rank == rank_; });
    return group_->split_group(sequence, color, members)
        ->communicator(static_cast<int>(place - members.begin()), backend_, kernels_);
  }

  Status status() const override { return group_->status(); }

  void abort(const Status& cause) noexcept override {
    if (group_->is_dead(rank_)) return;
    group_->fail(cause.ok()
                     ? Status(StatusCode::kPeerLost, "rank " + std::to_string(group_->world_rank(rank_)) +
                                                         " aborted the communicator without a cause")
                     : cause);
  }

  Status vote(std::uint64_t step, std::span<const std::byte> decision) override {
    FOREBAY_RETURN_IF_ERROR(internal::check_vote(decision));
    if (group_->is_dead(rank_)) return died(group_->world_rank(rank_));
    return group_->vote(rank_, step, decision);
  }
  std::optional<std::vector<std::byte>> survivors_vote(std::uint64_t step) override {
    return group_->survivors_vote(step);
  }

  Traffic traffic() const override { return group_->book(rank_).traffic(); }
  std::vector<OperationTraffic> operation_traffic() const override {
    return group_->book(rank_).operation_traffic();
  }
  std::vector<OperationRecord> last_operations() const override {
    return group_->book(rank_).last_operations();
  }

 private:
  static Issued message(Operation operation, std::size_t bytes, int peer, std::uint32_t tag) {
    return {.fingerprint = {.count = bytes, .operation = static_cast<std::uint32_t>(operation)},
            .peer = peer,
            .tag = tag};
  }

  Status fail_unless_ok(Status status) {
    // The peers' half of this operation would wait for ours until the deadline; tell them now.
    if (!status.ok()) group_->fail(status.with_context("rank " + std::to_string(group_->world_rank(rank_))));
    return status;
  }

  Status control(Operation operation, std::uint64_t sequence, std::span<const std::byte> mine,
                 std::span<std::byte> all) {
    internal::Collective collective = internal::control_transfer(operation, mine, all);
    collective.fingerprint.sequence = sequence;
    const Issued issued{.fingerprint = collective.fingerprint};
    return recorded(*group_, rank_, group_->book(rank_).issue(issued), issued, [&] {
      if (group_->is_dead(rank_)) return died(group_->world_rank(rank_));
      return group_->run_round(kControlPlane, rank_, collective.fingerprint, collective.piece, {});
    });
  }

  // Carries out what the book has as `number`.
  template <typename Function>
  static Status recorded(LocalGroupImpl& group, int rank, std::uint64_t number, const Issued& issued,
                         Function operation) {
    OperationBook& book = group.book(rank);
    book.begin(number);
    const Status status = operation();
    book.end(number, issued, status.ok());
    return status;
  }

  Status queue_round(internal::Collective collective, Stream stream) {
    collective.fingerprint.sequence = data_sequence_++;
    const Issued issued{.fingerprint = collective.fingerprint};
    return queue(stream, issued,
                 [group = group_.get(), rank = rank_, piece = collective.piece,
                  port = port_on(stream)](const Fingerprint& fingerprint) {
                   return group->run_round(kDataPlane, rank, fingerprint, piece, port);
                 });
  }

  Port port_on(Stream stream) const {
    Port port = port_;
    port.stream = stream;
    return port;
  }

  // Queues operation(fingerprint), with what the script does to it. With a port it queues by itself.
  template <typename Function>
  Status queue(Stream stream, const Issued& issued, Function operation) {
    const LocalFault& fault = group_->options().fault;
    const bool faulty = fault.rank == rank_ && fault.operation == operation_count_;
    ++operation_count_;
    const std::uint64_t number = group_->book(rank_).issue(issued);
    // The failure of an operation is the group's: status() reports it.
    const auto run = [group = group_.get(), rank = rank_, faulty, number, issued, operation] {
      return recorded(*group, rank, number, issued, [&] {
        if (group->is_dead(rank)) return died(group->world_rank(rank));
        return faulty ? run_faulty(*group, rank, issued.fingerprint, operation)
                      : operation(issued.fingerprint);
      });
    };
    if (port_.used()) return run();
    group_->begin_operation(rank_);
    // The closure keeps the group alive: it may run after this communicator is gone.
    Status status = call_on(backend_, stream, [group = group_, rank = rank_, run] {
      static_cast<void>(run());
      group->finish_operation(rank);
    });
    if (!status.ok()) {
      group_->finish_operation(rank_);
      group_->book(rank_).end(number, issued, false);
    }
    return fail_unless_ok(std::move(status));
  }

  static Status died(int rank) {
    return Status(StatusCode::kPeerLost, "rank " + std::to_string(rank) + " died by script");
  }

  template <typename Function>
  static Status run_faulty(LocalGroupImpl& group, int rank, Fingerprint fingerprint, Function operation) {
    const LocalFault& fault = group.options().fault;
    switch (fault.kind) {
      case LocalFault::Kind::kFails:
        group.fail(fault.cause);
        return group.status();
      case LocalFault::Kind::kFailsAfter: {
        const Status status = operation(fingerprint);
        group.pass_time(fault.delay);
        group.fail(status.ok() ? fault.cause : status);
        return group.status();
      }
      case LocalFault::Kind::kDies:
        group.die(rank);
        return died(group.world_rank(rank));
      case LocalFault::Kind::kStalls:
        group.await_failure();
        return group.status();
      case LocalFault::Kind::kMismatches:
        ++fingerprint.count;
        return operation(fingerprint);
      case LocalFault::Kind::kComesLate:
        group.pass_time(fault.delay);
        return operation(fingerprint);
    }
    return {};
  }

  const std::shared_ptr<LocalGroupImpl> group_;  // Shared with the other ranks and with queued operations.
  const int rank_;
  Backend& backend_;
  Kernels& kernels_;
  const Port port_;  // Without a stream.
  // Data operations are issued from one thread at a time, control operations from one thread at a time.
  std::uint64_t data_sequence_ = 0;
  std::uint64_t operation_count_ = 0;
  std::uint64_t control_sequence_ = 0;
};

Result<std::unique_ptr<Communicator>> LocalGroupImpl::communicator(int rank, Backend& backend,
                                                                   Kernels& kernels) {
  if (rank < 0 || rank >= size_) {
    return Status(StatusCode::kInvalidArgument, "a local group of " + std::to_string(size_) +
                                                    " has no rank " + std::to_string(rank) +
                                                    "; ranks are 0.." + std::to_string(size_ - 1));
  }
  const Capabilities& device = backend.capabilities();
  const Mover mover = device.host_accessible ? Mover::kHost : Mover::kBackend;
  const bool has_link = options_.latency.count() > 0 || options_.bytes_per_second > 0;
  if (mover == Mover::kBackend && has_link) {
    return Status(StatusCode::kUnsupported, std::string("local ranks on ") + device.name +
                                                " have its own speed; leave latency and bytes_per_second "
                                                "out, or model the link on the host backend");
  }
  {
    const std::lock_guard lock(clock_.mutex());
    if (member(rank).taken) {
      return Status(
          StatusCode::kInvalidArgument,
          "rank " + std::to_string(rank) + " of a local group was handed out before; ask once per rank");
    }
    if (mover_ != Mover::kUndecided && mover_ != mover) {
      return Status(StatusCode::kInvalidArgument,
                    "rank " + std::to_string(rank) + " of a local group is on " + device.name +
                        ", whose memory the host " + (mover == Mover::kHost ? "reaches" : "does not reach") +
                        ", unlike that of the ranks before it; put all ranks on the same kind of backend");
    }
    mover_ = mover;
    member(rank).taken = true;
  }
  Port port;
  if (mover == Mover::kBackend) {
    port.backend = &backend;
    port.rank = world_rank(rank);
    Result<Event> come = backend.event_create();
    FOREBAY_RETURN_IF_ERROR(come.status());
    port.come = come.value();
    Result<Event> copied = backend.event_create();
    if (!copied.ok()) {
      static_cast<void>(backend.event_destroy(port.come));
      return copied.status();
    }
    port.copied = copied.value();
  }
  return std::unique_ptr<Communicator>(
      std::make_unique<LocalCommunicator>(shared_from_this(), rank, backend, kernels, port));
}

}  // namespace

std::shared_ptr<LocalGroup> LocalGroup::create(int size, LocalOptions options) {
  FOREBAY_CHECK(size >= 1, "a local group needs at least one rank, not %d", size);
  std::shared_ptr<HostClock> own_clock;
  if (options.clock == nullptr) own_clock = std::make_shared<HostClock>();
  return std::make_shared<LocalGroupImpl>(size, std::move(options), std::move(own_clock));
}

}  // namespace forebay
