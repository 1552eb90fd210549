#include "collectives/process/shm_group.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "forebay/shm_communicator.h"

namespace forebay::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// How long a rank that fails waits for another to write the first failure, which takes microseconds unless
// that rank was stopped half-way. After it the two may report different failures.
constexpr milliseconds kFirstFailureWaitMax{1000};
constexpr milliseconds kPoll{2};
// How long a rank that serves the store stays for ranks that do not leave a failed run. They ask it nothing.
constexpr milliseconds kFarewellMax{500};

// With more ranks than processors, a rank that spins keeps the rank it waits for from running.
bool may_spin(int size) noexcept {
  cpu_set_t mine;
  return sched_getaffinity(0, sizeof(mine), &mine) == 0 && CPU_COUNT(&mine) >= size;
}

// Where the other ranks find the memory of a group.
struct Offer {
  std::int32_t process;
  std::int32_t descriptor;
  std::uint64_t start_time;
};

}  // namespace

ShmGroup::ShmGroup(Membership given, std::unique_ptr<ShmSegment> segment, ShmSegment* board)
    : Transport(std::move(given)),
      segment_(std::move(segment)),
      board_(board != nullptr ? board : segment_.get()),
      may_spin_(may_spin(size())) {}

ShmGroup::~ShmGroup() {
  leave_origin();
  if (segment_ == nullptr) return;
  if (store_ != nullptr && has_failed()) store_->stay_at_most(kFarewellMax);
  segment_->rank(rank()).presence.store(ShmPresence::kLeft, std::memory_order_release);
  for (const ShmPlane plane : {kShmDataPlane, kShmControlPlane}) ring_peers(plane);
}

int ShmGroup::first_left(const std::vector<int>& ranks) {
  for (const int peer : ranks) {
    if (segment_->rank(peer).presence.load(std::memory_order_acquire) == ShmPresence::kLeft) return peer;
  }
  return -1;
}

std::vector<int> ShmGroup::find_dead() {
  return peers_where([&](int peer) {
    const ShmRank& other = segment_->rank(peer);
    return other.presence.load(std::memory_order_acquire) == ShmPresence::kJoined &&
           !is_running(other.process) &&
           // It may have left between these two looks.
           other.presence.load(std::memory_order_acquire) == ShmPresence::kJoined;
  });
}

Status ShmGroup::lost(const std::string& context, const std::vector<int>& dead) {
  std::string processes;
  for (const int peer : dead)
    processes += (processes.empty() ? "" : ", ") + std::to_string(segment_->rank(peer).process.id);
  return fail(Status(StatusCode::kPeerLost, context, ": ", rank_list(world_ranks(dead)), " died (process ",
                     processes, "); see why it ended"));
}

Status ShmGroup::own_status() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok() || segment_ == nullptr) return failure_;
  }
  if (has_failed()) return adopt_first_failure();
  const std::int64_t now = nanoseconds(Clock::now().time_since_epoch()).count();
  std::int64_t next = next_look_ns_.load(std::memory_order_relaxed);
  const std::int64_t after = now + nanoseconds(kShmLivenessPeriod).count();
  if (now < next || !next_look_ns_.compare_exchange_strong(next, after)) return {};
  const std::vector<int> dead = find_dead();
  if (dead.empty()) return {};
  return lost("rank " + std::to_string(world_rank(rank())) + " checked its peers", dead);
}

Status ShmGroup::adopt_first_failure() noexcept {
  return fail_own(Status(StatusCode::kInternal, "another rank failed first"));
}

Status ShmGroup::fail_own(const Status& cause) noexcept {
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

Status ShmGroup::agree_on_first(const Status& cause) {
  ShmFailure& failure = segment_->failure();
  const std::uint32_t writing = ShmFailure::kWriting + static_cast<std::uint32_t>(rank());
  const Clock::time_point patience = Clock::now() + kFirstFailureWaitMax;
  const std::string text = encode_failure(cause);
  std::uint32_t seen = ShmFailure::kNone;
  while (!failure.state.compare_exchange_strong(seen, writing, std::memory_order_acq_rel)) {
    if (seen == ShmFailure::kThere) {
      return decode_failure(
          std::string(failure.text, std::min<std::size_t>(failure.bytes, ShmFailure::kTextMax)));
    }
    // A rank that died while it wrote leaves its place to the next one.
    const int writer = static_cast<int>(seen - ShmFailure::kWriting);
    if (!is_running(segment_->rank(writer).process)) continue;
    if (Clock::now() >= patience) return cause;
    seen = ShmFailure::kNone;
    std::this_thread::sleep_for(kPoll);
  }
  failure.bytes = static_cast<std::uint32_t>(text.copy(failure.text, ShmFailure::kTextMax));
  failure.state.store(ShmFailure::kThere, std::memory_order_release);
  // The same text as the others read: a long one is shortened.
  return decode_failure(text.substr(0, ShmFailure::kTextMax));
}

Status ShmGroup::sleep_until(ShmPlane plane, Clock::time_point limit, const Waiting& waiting) {
  Bell& bell = state(rank(), plane).bell;
  const WaitReporting reporting = wait_reporting(membership().deadline);
  ShmWaitSign sign(board_->rank(world_rank(rank())), limit - membership().deadline);
  Clock::time_point next_report = Clock::now() + reporting.period;
  Clock::time_point next_look = Clock::now() + kShmLivenessPeriod;
  for (;;) {
    const std::uint32_t heard = bell.rings.load(std::memory_order_seq_cst);
    if (waiting.ready()) return {};
    if (has_failed() || origin_has_failed()) return status();
    // A rank that has left or died may have published everything before, so ready() is asked once more.
    const Missing missing = waiting.missing();
    if (const int left = first_left(missing.ranks); left >= 0) {
      if (waiting.ready()) return {};
      if (has_failed() || origin_has_failed()) return status();
      return fail(Status(StatusCode::kPeerLost, waiting.what(), place(), ": ", rank_list({world_rank(left)}),
                         " has left the communicator; see why it ended, or let it take part"));
    }
    const Clock::time_point now = Clock::now();
    if (now >= next_look) {
      next_look = now + kShmLivenessPeriod;
      if (const std::vector<int> dead = find_dead(); !dead.empty()) {
        if (waiting.ready()) return {};
        return lost(waiting.what() + place(), dead);
      }
    }
    if (now >= limit) return fail_late(described(waiting, missing));
    if (now >= next_report) {
      next_report = now + reporting.period;
      sign.say(described(waiting, missing));
    }
    bell.sleep(heard, std::min({limit, next_look, next_report}));
  }
}

Wait ShmGroup::described(const Waiting& waiting, const Missing& missing) const {
  const std::string& group = membership().name_in_origin;
  return {.what = waiting.what() + (group.empty() ? "" : " ") + group,
          .ranks = world_ranks(missing.ranks),
          .came = missing.came};
}

Status ShmGroup::fail_late(const Wait& wait) {
  const std::chrono::nanoseconds validity = wait_reporting(membership().deadline).validity;
  return fail_of_all(explain_timeout(world_rank(rank()), wait, membership().deadline,
                                     [&](int other) { return read_waits(board_->rank(other), validity); }));
}

Status ShmGroup::join(Clock::time_point limit, RendezvousStore& store, const std::string& failure_name) {
  segment_->rank(rank()).presence.store(ShmPresence::kJoined, std::memory_order_release);
  ring_peers(kShmControlPlane);
  const auto absent = [&] {
    return Missing{peers_where([&](int peer) {
                     return segment_->rank(peer).presence.load(std::memory_order_acquire) ==
                            ShmPresence::kAbsent;
                   }),
                   false};
  };
  Clock::time_point next_look = Clock::now();
  std::optional<std::string> reason;
  const auto ready = [&] {
    if (absent().ranks.empty()) return true;
    if (Clock::now() < next_look) return false;
    next_look = Clock::now() + kShmLivenessPeriod;
    reason = store.read(failure_name);
    if (const Status lost = store.status(); !reason && !lost.ok()) reason = encode_failure(lost);
    return reason.has_value();
  };
  FOREBAY_RETURN_IF_ERROR(
      wait(kShmControlPlane, limit, ready, absent, [] { return std::string("joining"); }));
  // Others may have begun operations already: their failure is not one of joining.
  return reason ? fail(decode_failure(*reason)) : Status();
}

// A rank that reads a ballot closes it first. So a vote is either taken before the failure, for all ranks, or
// it is refused, and no rank has to be waited for, not even one that is stopped.
Status ShmGroup::vote(std::uint64_t step, std::span<const std::byte> decision) {
  FOREBAY_RETURN_IF_ERROR(status());
  if (segment_ == nullptr) {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) alone_.mark(step, decision);
    return failure_;
  }
  if (segment_->rank(rank()).ballot.cast(step, decision)) return {};
  // The failure is there before the first ballot is closed.
  return adopt_first_failure();
}

std::optional<std::vector<std::byte>> ShmGroup::survivors_vote(std::uint64_t step) {
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

// The ranks exchange the descriptors of the groups' memories; after the barrier all have opened theirs, and
// the descriptors are closed. A rank that cannot fails the group that is split, so that all hear of it.
Result<std::unique_ptr<ShmSegment>> ShmGroup::share_group(const Membership& membership,
                                                          const std::vector<SplitWish>& members,
                                                          const Exchange& exchange) {
  const ProcessIdentity me = segment_->rank(rank()).process;
  Offer offer{.process = me.id, .descriptor = -1, .start_time = me.start_time};
  std::unique_ptr<ShmSegment> segment;
  if (membership.rank == 0 && membership.size > 1) {
    FOREBAY_ASSIGN_OR_RETURN(segment, ShmSegment::create(membership.size, membership.generation));
    offer.descriptor = segment->descriptor();
  }
  std::vector<Offer> offers(static_cast<std::size_t>(size()));
  FOREBAY_RETURN_IF_ERROR(
      exchange(std::as_bytes(std::span(&offer, 1)), std::as_writable_bytes(std::span(offers))));
  if (membership.rank != 0) {
    const Offer& owner = offers[static_cast<std::size_t>(members.front().rank)];
    FOREBAY_ASSIGN_OR_RETURN(segment, ShmSegment::open({owner.process, owner.start_time}, owner.descriptor,
                                                       membership.size, membership.generation));
  }
  if (segment != nullptr) {
    segment->rank(membership.rank).process = me;
    segment->rank(membership.rank).presence.store(ShmPresence::kJoined, std::memory_order_release);
  }
  FOREBAY_RETURN_IF_ERROR(exchange({}, {}));
  if (segment != nullptr) segment->close_descriptor();
  return segment;
}

Result<std::shared_ptr<Transport>> ShmGroup::split_own(Membership membership,
                                                       const std::vector<SplitWish>& members,
                                                       const Exchange& exchange) {
  std::unique_ptr<ShmSegment> segment;
  if (size() > 1) {
    Result<std::unique_ptr<ShmSegment>> shared = share_group(membership, members, exchange);
    if (!shared.ok()) return fail(shared.status().with_context("split" + place()));
    segment = std::move(shared).value();
  }
  return std::shared_ptr<Transport>(
      std::make_shared<ShmGroup>(std::move(membership), std::move(segment), board_));
}

}  // namespace forebay::internal
