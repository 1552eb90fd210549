#include "collectives/local/rounds.h"

#include <cstring>

namespace forebay::internal {

Status LocalRounds::run(LocalPlane plane, int rank, const Fingerprint& fingerprint, const DevicePart& part) {
  const LocalWorld::Nanoseconds limit = world_.deadline();
  LocalWorld::Lock lock(world_.mutex());
  if (world_.has_failed()) return world_.failure();
  auto& rounds = plane == LocalPlane::kData ? data_rounds_ : control_rounds_;
  Round& round = rounds.try_emplace(fingerprint.sequence, ranks_.size()).first->second;
  const Turn turn{.plane = plane, .rank = rank, .fingerprint = fingerprint, .limit = limit, .round = round};
  FOREBAY_RETURN_IF_ERROR(arrive(turn, part));
  const bool is_last = round.arrived.all();
  world_.notify();

  Status status = await_all(lock, turn, round.arrived, false);
  if (status.ok()) {
    status = part.port.used() ? copy_by_backend(lock, round, is_last) : copy_by_host(lock, turn);
  }
  // A copy that has begun is not interrupted: a rank of a failed round leaves when nobody reads its source.
  world_.await(lock, [&] { return round.copying_count == 0; });
  if (++round.left_count == ranks_.size()) rounds.erase(fingerprint.sequence);
  return status;
}

Status LocalRounds::arrive(const Turn& turn, const DevicePart& part) {
  Round& round = turn.round;
  for (int other = 0; other < ranks_.size(); ++other) {
    const auto o = static_cast<std::size_t>(other);
    if (!round.arrived.of[o] || round.fingerprints[o] == turn.fingerprint) continue;
    ranks_.fail_locked(mismatch(ranks_.world_rank(turn.rank), turn.fingerprint, ranks_.world_rank(other),
                                round.fingerprints[o]));
    return world_.failure();
  }
  const auto me = static_cast<std::size_t>(turn.rank);
  round.fingerprints[me] = turn.fingerprint;
  round.parts[me] = part;
  round.arrived.set(turn.rank);
  return {};
}

Status LocalRounds::await_all(LocalWorld::Lock& lock, const Turn& turn, const Marks& marks, bool came) {
  const auto first_gone = [&] {
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      if (!marks.of[static_cast<std::size_t>(rank)] && ranks_.is_gone(turn.plane, rank)) return rank;
    }
    return -1;
  };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      if (!marks.of[static_cast<std::size_t>(rank)]) ranks.push_back(rank);
    }
    return ranks;
  };
  const auto what = [&] { return describe(turn.fingerprint); };
  const bool in_time =
      ranks_.await(lock, turn.rank, {.what = what, .missing = missing, .came = came, .limit = turn.limit},
                   [&] { return marks.all() || world_.has_failed() || first_gone() >= 0; });
  if (!world_.has_failed() && in_time && !marks.all())
    ranks_.fail_locked(ranks_.lost(turn.rank, what(), first_gone()));
  return world_.failure();
}

Status LocalRounds::copy_by_host(LocalWorld::Lock& lock, const Turn& turn) {
  Round& round = turn.round;
  const int size = ranks_.size();
  const auto me = static_cast<std::size_t>(turn.rank);
  const Piece& piece = round.parts[me].piece;
  if (size > 1) {
    world_.pass_link_time(lock, piece.bytes * static_cast<std::uint64_t>(size - 1));
    if (world_.has_failed()) return world_.failure();
  }
  ++round.copying_count;
  lock.unlock();
  // Each rank starts with its right neighbour, so that not all ranks read one source at once.
  for (int step = 1; step < size && piece.bytes > 0; ++step) {
    const auto peer = static_cast<std::size_t>((turn.rank + step) % size);
    const Piece& theirs = round.parts[peer].piece;
    std::memcpy(piece.target + peer * piece.target_stride, theirs.source + me * theirs.source_stride,
                piece.bytes);
  }
  place_own(piece, turn.rank);
  lock.lock();
  --round.copying_count;
  round.copied.set(turn.rank);
  world_.notify();
  return await_all(lock, turn, round.copied, true);
}

Status LocalRounds::copy_by_backend(LocalWorld::Lock& lock, Round& round, bool is_last) {
  if (!is_last) {
    // The last one waits for nobody, so this needs no deadline.
    world_.await(lock, [&] { return round.copied.all() || world_.has_failed(); });
    return world_.failure();
  }
  ++round.copying_count;
  lock.unlock();
  const Status queued = queue_collective_copies(round.parts);
  lock.lock();
  --round.copying_count;
  if (queued.ok()) {
    for (int rank = 0; rank < ranks_.size(); ++rank) round.copied.set(rank);
  } else {
    ranks_.fail_locked(queued);
  }
  world_.notify();
  return world_.failure();
}

}  // namespace forebay::internal
