#include "collectives/nccl/handle.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "forebay/log.h"

namespace forebay::internal {
namespace {

using nccl::NcclComm;
using nccl::NcclResult;

// The pause between two questions whether NCCL is done: short at first, because most waits are short.
constexpr std::chrono::microseconds kPollMin{20};
constexpr std::chrono::microseconds kPollMax{1000};
// How long an abort waits for a thread that is in NCCL, which allows no other thread then. A thread that does
// not return in this time hangs in NCCL, and only the abort frees it.
constexpr std::chrono::milliseconds kAbortPatience{2000};

}  // namespace

Status NcclHandle::init(int size, const nccl::NcclUniqueId& id, int rank, Clock::time_point limit,
                        const Check& check) {
  const std::lock_guard lock(mutex_);
  const std::string what =
      "join " + std::to_string(size) + " ranks over NCCL as rank " + std::to_string(rank);
  if (interrupted_) return check_open(what);
  nccl::NcclConfig config;
  config.blocking = 0;
  NcclStep step{NcclResult::kSuccess, "ncclCommInitRankConfig"};
  FOREBAY_RETURN_IF_ERROR(
      in_context([&] { step.result = library_.ncclCommInitRankConfig(&comm_, size, id, rank, &config); }));
  return settle(what, step, limit, check);
}

Status NcclHandle::adopt(void* comm, int size, int rank) {
  const std::lock_guard lock(mutex_);
  comm_ = static_cast<NcclComm>(comm);
  adopted_ = true;
  const std::string what = "adopt the trainer's NCCL communicator";
  int found_size = 0;
  int found_rank = 0;
  NcclStep step;
  FOREBAY_RETURN_IF_ERROR(in_context([&] {
    step = {library_.ncclCommCount(comm_, &found_size), "ncclCommCount"};
    if (step.ok()) step = {library_.ncclCommUserRank(comm_, &found_rank), "ncclCommUserRank"};
  }));
  Status status = step.ok() ? Status() : failure(what, step);
  if (status.ok() && (found_size != size || found_rank != rank)) {
    status = invalid_argument("cannot ", what, ": it is rank ", found_rank, " of ", found_size, ", not rank ",
                              rank, " of ", size, "; give the one of these ranks");
  }
  if (!status.ok()) comm_ = nullptr;  // It belongs to the trainer; we do not revoke it.
  return status;
}

Status NcclHandle::check_open(const std::string& what) const {
  if (comm_ != nullptr && !interrupted_) return {};
  return Status(StatusCode::kUnavailable, "cannot ", what,
                ": the NCCL communicator was aborted; see its first failure");
}

Status NcclHandle::settle(const std::string& what, NcclStep step, Clock::time_point limit,
                          const Check& check) {
  std::chrono::microseconds pause = kPollMin;
  while (step.result == NcclResult::kInProgress) {
    if (interrupted_) return check_open(what);
    if (check) FOREBAY_RETURN_IF_ERROR(check());
    if (Clock::now() >= limit) {
      return Status(StatusCode::kTimeout, "cannot ", what, ": ", step.call,
                    " is not done at the deadline; see whether all ranks joined, or raise the deadline");
    }
    NcclResult now = NcclResult::kInProgress;
    NcclResult asked = NcclResult::kSuccess;
    FOREBAY_RETURN_IF_ERROR(in_context([&] { asked = library_.ncclCommGetAsyncError(comm_, &now); }));
    if (asked != NcclResult::kSuccess) return failure(what, {asked, "ncclCommGetAsyncError"});
    step.result = now;
    if (now != NcclResult::kInProgress) break;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kPollMax);
  }
  return step.ok() ? Status() : failure(what, step);
}

Status NcclHandle::async_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr || interrupted_) return {};
  NcclStep step{NcclResult::kSuccess, "ncclCommGetAsyncError"};
  NcclResult found = NcclResult::kSuccess;
  FOREBAY_RETURN_IF_ERROR(in_context([&] { step.result = library_.ncclCommGetAsyncError(comm_, &found); }));
  if (step.result == NcclResult::kSuccess) step.result = found;
  return step.ok() ? Status() : failure("go on with operations queued over NCCL", step);
}

void NcclHandle::close(bool together, Clock::time_point limit) noexcept {
  try {
    const std::unique_lock lock(mutex_);
    if (adopted_) comm_ = nullptr;
    if (comm_ != nullptr && together) {
      const Status status = finalize(limit);
      if (!status.ok()) log(LogLevel::kWarning, "%s", status.message().c_str());
    }
  } catch (const std::exception& error) {
    log(LogLevel::kError, "cannot end an NCCL communicator in order: %s", error.what());
  }
  abort();
}

Status NcclHandle::finalize(Clock::time_point limit) {
  const std::string what = "end an NCCL communicator in order";
  NcclStep step{NcclResult::kSuccess, "ncclCommFinalize"};
  FOREBAY_RETURN_IF_ERROR(in_context([&] { step.result = library_.ncclCommFinalize(comm_); }));
  FOREBAY_RETURN_IF_ERROR(settle(what, step, limit, {}));
  const NcclComm comm = std::exchange(comm_, nullptr);
  FOREBAY_RETURN_IF_ERROR(in_context([&] { step = {library_.ncclCommDestroy(comm), "ncclCommDestroy"}; }));
  return step.ok() ? Status() : nccl_failure(library_, step.result, nullptr, step.call, what);
}

// The thread in a call leaves it when it sees the interruption. A timed mutex would be shorter, but
// ThreadSanitizer does not know it.
std::unique_lock<std::mutex> NcclHandle::lock_for_abort() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  const Clock::time_point limit = Clock::now() + kAbortPatience;
  while (!lock.owns_lock() && Clock::now() < limit) {
    std::this_thread::sleep_for(kPollMin);
    static_cast<void>(lock.try_lock());
  }
  return lock;
}

void NcclHandle::abort() noexcept {
  interrupt();
  try {
    const std::unique_lock lock = lock_for_abort();
    const NcclComm comm = std::exchange(comm_, nullptr);
    if (comm != nullptr) end(comm);
  } catch (const std::exception& error) {
    log(LogLevel::kError, "cannot abort an NCCL communicator: %s", error.what());
  }
}

void NcclHandle::end(NcclComm comm) noexcept {
  if (adopted_ && library_.ncclCommRevoke == nullptr) {
    log(LogLevel::kWarning,
        "the trainer's NCCL communicator is left as it is, because this NCCL cannot revoke one; abort it "
        "where work queued on it must end");
    return;
  }
  NcclStep step;
  const Status status = in_context([&] {
    step = adopted_ ? NcclStep{library_.ncclCommRevoke(comm, 0), "ncclCommRevoke"}
                    : NcclStep{library_.ncclCommAbort(comm), "ncclCommAbort"};
  });
  if (!status.ok()) {
    log(LogLevel::kWarning, "an NCCL communicator could not be released: %s", status.message().c_str());
  } else if (!step.ok()) {
    log(LogLevel::kWarning, "%s returned %d; resources of the communicator may be leaked", step.call,
        static_cast<int>(step.result));
  }
}

}  // namespace forebay::internal
