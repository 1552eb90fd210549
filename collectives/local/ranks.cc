#include "collectives/local/ranks.h"

#include <chrono>
#include <cmath>
#include <utility>

namespace forebay::internal {
namespace {

// Saturates, so that a deadline of "never" stays one.
HostClock::Nanoseconds after(HostClock::Nanoseconds start, HostClock::Nanoseconds duration) {
  return duration > HostClock::kNever - start ? HostClock::kNever : start + duration;
}

std::vector<int> numbers_in_world(const LocalRanks& origin, const std::vector<SplitWish>& members) {
  std::vector<int> numbers;
  for (const SplitWish& wish : members) numbers.push_back(origin.world_rank(wish.rank));
  return numbers;
}

}  // namespace

LocalWorld::LocalWorld(int size, const LocalOptions& options)
    : size_(size),
      own_clock_(options.clock == nullptr ? std::make_unique<HostClock>() : nullptr),
      options_(options),
      clock_(options.clock != nullptr ? *options.clock : *own_clock_) {}

HostClock::Nanoseconds LocalWorld::deadline() const {
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(HostClock::kNever);
  if (options_.deadline >= limit) return HostClock::kNever;
  return after(clock_.now(), options_.deadline);
}

void LocalWorld::fail(Status cause) {
  if (failure_.ok()) failure_ = std::move(cause);
  clock_.notify();
}

bool LocalWorld::await(Lock& lock, const LocalWait& wait, const std::function<bool()>& ready,
                       Nanoseconds limit) {
  struct Listed {
    Listed(std::vector<const LocalWait*>& list, const LocalWait& one) : waits(list), wait(one) {
      waits.push_back(&wait);
    }
    ~Listed() { std::erase(waits, &wait); }
    std::vector<const LocalWait*>& waits;
    const LocalWait& wait;
  };
  const Listed listed(waits_, wait);
  if (clock_.wait(lock, ready, limit)) return true;
  fail_late(wait, limit);
  return false;
}

void LocalWorld::fail_late(const LocalWait& wait, Nanoseconds now) {
  fail(explain_timeout(wait.rank, wait.describe(now), options_.deadline, [&](int rank) {
    std::vector<Wait> found;
    for (const LocalWait* other : waits_) {
      if (other->rank != rank) continue;
      if (Wait one = other->describe(now); !one.ranks.empty()) found.push_back(std::move(one));
    }
    return found;
  }));
}

void LocalWorld::pass_time(Lock& lock, Nanoseconds duration) {
  if (duration.count() <= 0) return;
  // In virtual time the clock takes its mutex to tell the time.
  lock.unlock();
  const Nanoseconds start = clock_.now();
  lock.lock();
  clock_.wait(
      lock, [this] { return has_failed(); }, after(start, duration));
}

void LocalWorld::pass_link_time(Lock& lock, std::uint64_t bytes) {
  Nanoseconds duration = options_.latency;
  if (options_.bytes_per_second > 0) {
    duration += Nanoseconds(std::llround(static_cast<double>(bytes) / options_.bytes_per_second * 1e9));
  }
  pass_time(lock, duration);
}

LocalRanks::LocalRanks(std::shared_ptr<LocalWorld> world)
    : world_(std::move(world)), members_(static_cast<std::size_t>(world_->size())) {
  // The books may outlive this, but not the world.
  for (int rank = 0; rank < size(); ++rank)
    member(rank).book =
        std::make_unique<OperationBook>(rank, size(), [world = world_] { return world->now(); });
}

LocalRanks::LocalRanks(LocalRanks& origin, const std::vector<SplitWish>& members)
    : world_(origin.world_),
      world_ranks_(numbers_in_world(origin, members)),
      name_(describe_group(world_ranks_, world_->size())),
      members_(members.size()) {
  for (int rank = 0; rank < size(); ++rank) {
    const int rank_in_origin = members[static_cast<std::size_t>(rank)].rank;
    member(rank).book =
        std::make_unique<OperationBook>(rank, origin.book(rank_in_origin), name_, world_ranks_);
  }
}

Status LocalRanks::status() const {
  const std::lock_guard lock(world_->mutex());
  return world_->failure();
}

void LocalRanks::fail(Status cause) {
  const std::lock_guard lock(world_->mutex());
  fail_locked(std::move(cause));
}

void LocalRanks::fail_locked(Status cause) {
  world_->fail(name_.empty() ? std::move(cause) : cause.with_context(name_));
}

Status LocalRanks::lost(int rank, const std::string& what, int peer) const {
  return Status(StatusCode::kPeerLost, what, " on ", name_of(rank), ": ", name_of(peer),
                " has left the communicator; see why it ended");
}

void LocalRanks::begin_operation(int rank) {
  const std::lock_guard lock(world_->mutex());
  ++member(rank).outstanding_count;
}

void LocalRanks::finish_operation(int rank) {
  const std::lock_guard lock(world_->mutex());
  --member(rank).outstanding_count;
  world_->notify();
}

void LocalRanks::close(int rank) noexcept {
  const std::lock_guard lock(world_->mutex());
  member(rank).closed = true;
  world_->notify();
}

void LocalRanks::die(int rank) {
  const std::lock_guard lock(world_->mutex());
  member(rank).dead = true;
  world_->notify();
}

bool LocalRanks::is_dead(int rank) const {
  const std::lock_guard lock(world_->mutex());
  return member(rank).dead;
}

bool LocalRanks::is_gone(LocalPlane plane, int rank) const {
  const Member& peer = member(rank);
  if (peer.dead) return true;
  return peer.closed && (plane == LocalPlane::kControl || peer.outstanding_count == 0);
}

Status LocalRanks::vote(int rank, std::uint64_t step, std::span<const std::byte> decision) {
  const std::lock_guard lock(world_->mutex());
  if (!world_->has_failed()) member(rank).ballot.mark(step, decision);
  return world_->failure();
}

std::optional<std::vector<std::byte>> LocalRanks::survivors_vote(std::uint64_t step) const {
  const std::lock_guard lock(world_->mutex());
  for (const Member& other : members_) {
    if (other.ballot.is_for(step)) return other.ballot.decision;
  }
  return std::nullopt;
}

bool LocalRanks::await(LocalWorld::Lock& lock, int rank, const Waiting& waiting,
                       const std::function<bool()>& ready) {
  if (ready()) return true;
  const LocalWorld::Nanoseconds limit = waiting.limit;
  const LocalWorld::Nanoseconds begin =
      limit == HostClock::kNever ? LocalWorld::Nanoseconds(0) : limit - world_->options().deadline;
  const auto describe = [&](LocalWorld::Nanoseconds now) {
    std::vector<int> ranks = waiting.missing();
    for (int& missing : ranks) missing = world_rank(missing);
    return Wait{.what = waiting.what() + (name_.empty() ? "" : " ") + name_,
                .ranks = std::move(ranks),
                .came = waiting.came,
                .age = now - begin};
  };
  return world_->await(lock, {world_rank(rank), describe}, ready, limit);
}

}  // namespace forebay::internal
