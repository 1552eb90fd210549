// The thread of a rank over NCCL that exchanges heartbeats with the others, and fails operations that cannot
// end.
#include <signal.h>

#include <algorithm>
#include <utility>

#include "collectives/nccl/member.h"
#include "forebay/log.h"

namespace forebay::internal {
namespace {

using Clock = NcclHandle::Clock;
using std::chrono::milliseconds;

// How often a rank that is about to leave looks whether its last operations are done.
constexpr milliseconds kLeavePoll{1};
// How much longer than its deadline an operation waits for heartbeats to find the reason. Shorter: a rank
// that waits for a rank of another group is blamed. Longer: a rank that lives and does nothing is found
// later.
constexpr milliseconds kNcclPrecedence{1000};

}  // namespace

// --- the watch ---

void NcclMember::watch() noexcept {
  // Signals are for the program's own threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  bool over = false;
  bool failed = false;
  bool hurries = false;
  while (!over && !failed) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, hurries ? kLeavePoll : kNcclHeartbeat,
                        [&] { return !failure_.ok() || leaving_ != hurries; });
      hurries = leaving_;
      failed = !failure_.ok();
    }
    if (failed) break;
    try {
      if (const Status status = beat(&over); !status.ok()) {
        static_cast<void>(fail(status));
        failed = true;
      }
    } catch (const std::exception&) {
      static_cast<void>(
          fail(Status(StatusCode::kOutOfMemory,
                      "cannot watch an NCCL communicator: the host has no memory left; free host memory")));
      failed = true;
    }
  }
  if (failed) handle_->abort();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

Status NcclMember::beat(bool* over) {
  NcclHeartbeat mine;
  FOREBAY_RETURN_IF_ERROR(drain(&mine));
  FOREBAY_RETURN_IF_ERROR(control_->status());
  FOREBAY_RETURN_IF_ERROR(handle_->async_error());
  FOREBAY_RETURN_IF_ERROR(check_deadline());
  bool leaving = false;
  {
    const std::lock_guard lock(mutex_);
    leaving = leaving_;
  }
  const Clock::time_point now = Clock::now();
  if (leaving && mine.open_count == 0) {
    if (!std::exchange(has_left_, true)) leaving_since_ = now;
    mine.state = now - leaving_since_ < kNcclGoodbyeMax ? NcclMemberState::kLeaving : NcclMemberState::kGone;
  }
  FOREBAY_RETURN_IF_ERROR(exchange_heartbeats(mine));

  const auto all_watched = [&](auto condition) {
    return std::all_of(watched_.begin(), watched_.end(),
                       [&](int r) { return condition(table_[static_cast<std::size_t>(r)].state); });
  };
  if (all_watched([](NcclMemberState state) { return state != NcclMemberState::kRunning; })) {
    handle_->close(static_cast<int>(watched_.size()) == size(), limit());
    *over = true;
    return {};
  }
  if (all_watched([](NcclMemberState state) { return state != NcclMemberState::kGone; })) return {};
  FOREBAY_RETURN_IF_ERROR(part(mine.state == NcclMemberState::kGone));
  if (mine.state != NcclMemberState::kGone) return {};
  handle_->close(false, limit());
  *over = true;
  return {};
}

Status NcclMember::exchange_heartbeats(const NcclHeartbeat& mine) {
  std::vector<NcclHeartbeat> all(watched_.size());
  const Status exchanged =
      watch_->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  if (!exchanged.ok()) {
    // A failure that came from `control` is the first one already; any other was found here.
    const Status known = control_->status();
    return known.ok() ? exchanged : known;
  }
  const Clock::time_point now = Clock::now();
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    FOREBAY_RETURN_IF_ERROR(check_heartbeat(all[i], watched_[i], size()));
    const auto r = static_cast<std::size_t>(watched_[i]);
    if (all[i].state != NcclMemberState::kRunning && table_[r].state == NcclMemberState::kRunning)
      left_at_[r] = now;
    table_[r] = all[i];
  }
  return judge_heartbeats(table_, world_.numbers);
}

// All watched ranks come here in the same heartbeat. From then on the ranks that leave and the ranks that
// stay watch separately.
Status NcclMember::part(bool gone) {
  FOREBAY_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> rest, watch_->split(gone ? 1 : 0, rank()));
  std::erase_if(watched_, [&](int r) {
    return (table_[static_cast<std::size_t>(r)].state == NcclMemberState::kGone) != gone;
  });
  Status failure;
  std::shared_ptr<Communicator> watch = std::move(rest);
  {
    const std::lock_guard lock(mutex_);
    std::swap(watch_, watch);
    failure = failure_;
  }
  return failure;
}

Status NcclMember::check_deadline() {
  NcclOperation operation;
  Clock::duration waited{};
  {
    const std::lock_guard lock(journal_mutex_);
    if (oldest_ == next_ || !slot(oldest_).started) return {};
    operation = slot(oldest_).operation;
    waited = Clock::now() - slot(oldest_).started_at;
  }
  if (!is_collective(operation)) {
    // A peer that has left has done its part of all operations that it issued. It did not issue one that
    // stays open so long.
    const auto peer = static_cast<std::size_t>(operation.peer);
    const bool left = table_[peer].state != NcclMemberState::kRunning;
    if (left && waited > kNcclGoodbyeMax && Clock::now() - left_at_[peer] > kNcclGoodbyeMax) {
      return Status(StatusCode::kPeerLost, describe(numbered(operation, world_.numbers)), " on rank ",
                    world_rank(rank()), ": rank ", world_rank(operation.peer),
                    " left before it; see why it ended");
    }
  }
  // A rank that does not come may itself wait for a stopped rank in another group. The heartbeats of that
  // group miss the stopped rank and name it.
  if (waited < deadline_ + std::min<Clock::duration>(deadline_ / 4, kNcclPrecedence)) return {};
  return operation_timeout(rank(), operation, table_, deadline_, world_.numbers);
}

void NcclMember::leave() noexcept {
  std::unique_lock lock(mutex_);
  leaving_ = true;
  changed_.notify_all();
  // The watch ends after all queued operations are done, or fails at the deadline; then it has its own waits.
  const milliseconds patience = deadline_ + deadline_ + kNcclDrainMax;
  const bool ended = changed_.wait_for(lock, patience, [&] { return ended_; });
  lock.unlock();
  if (!watcher_.joinable()) return;
  if (ended) {
    watcher_.join();
    return;
  }
  log(LogLevel::kError,
      "NCCL does not return from ending a communicator; the thread that waits for it is left behind");
  watcher_.detach();
  // The memory that the thread uses is leaked: when it returns, the backend may be gone.
  static_cast<void>(new std::shared_ptr<NcclMember>(shared_from_this()));
}

}  // namespace forebay::internal
