// NcclHandle: one non-blocking ncclComm_t, used as NCCL demands: by one thread at a time, from the device's
// context, with every result checked, and every wait ended by a deadline or by interrupt().
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <type_traits>

#include "collectives/nccl/library.h"
#include "forebay/cuda_backend.h"

namespace forebay::internal {

// One call: its result, and its name for messages.
struct NcclStep {
  nccl::NcclResult result = nccl::NcclResult::kSuccess;
  const char* call = "";

  bool ok() const noexcept {
    return result == nccl::NcclResult::kSuccess || result == nccl::NcclResult::kInProgress;
  }
};

class NcclHandle {
 public:
  using Clock = std::chrono::steady_clock;
  // Asked while waiting; its failure ends the wait. May be empty.
  using Check = std::function<Status()>;

  NcclHandle(const NcclLibrary& library, CudaBackend& backend) : library_(library), backend_(backend) {}
  // Aborts a communicator that is still open.
  ~NcclHandle() { abort(); }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  const NcclLibrary& library() const noexcept { return library_; }

  // Joins the communicator that `id` names, with all its ranks. Errors: kTimeout when they did not come.
  Status init(int size, const nccl::NcclUniqueId& id, int rank, Clock::time_point limit, const Check& check);
  // Takes the trainer's communicator, which must have this rank and size.
  Status adopt(void* comm, int size, int rank);

  // Calls `body(comm)`, which returns an NcclStep, inside an NCCL group, and waits until NCCL has taken all
  // calls. Errors: kTimeout at `limit`, kUnavailable after interrupt() or the end.
  template <typename Body>
  Status submit(const std::string& what, Clock::time_point limit, Body body) {
    return locked_call(what, limit, [&](nccl::NcclComm comm) {
      NcclStep step{library_.ncclGroupStart(), "ncclGroupStart"};
      if (step.ok()) {
        step = body(comm);
        // The group is closed in any case; the first failure counts.
        const NcclStep end{library_.ncclGroupEnd(), "ncclGroupEnd"};
        if (step.ok()) step = end;
      }
      return step;
    });
  }
  // The same outside a group, for calls that may not be in one.
  template <typename Body>
  Status call(const std::string& what, Clock::time_point limit, Body body) {
    return locked_call(what, limit, body);
  }

  // An error that NCCL found between calls. Ok when another thread is in a call: that thread will see it.
  Status async_error();

  // Ends a call in progress, and refuses later ones. Any thread.
  void interrupt() noexcept { interrupted_ = true; }
  // Ends when no operation is left. `together` with all other ranks: in order, if that is done by the limit.
  // Alone: at once. An adopted communicator is left as it is.
  void close(bool together, Clock::time_point limit) noexcept;
  // Ends at once, and so does work queued on streams. An adopted communicator is revoked where that is
  // possible.
  void abort() noexcept;

 private:
  template <typename Function>
  Status in_context(Function function) {
    return backend_.call_in_context(
        [](void* argument) { (*static_cast<std::remove_reference_t<Function>*>(argument))(); }, &function);
  }

  template <typename Body>
  Status locked_call(const std::string& what, Clock::time_point limit, Body body) {
    const std::lock_guard lock(mutex_);
    FOREBAY_RETURN_IF_ERROR(check_open(what));
    NcclStep step;
    FOREBAY_RETURN_IF_ERROR(in_context([&] { step = body(comm_); }));
    return settle(what, step, limit, {});
  }

  // Locks the mutex, if that succeeds within the patience of an abort.
  std::unique_lock<std::mutex> lock_for_abort();
  Status check_open(const std::string& what) const;
  // Waits until NCCL has finished the step. Requires: the mutex.
  Status settle(const std::string& what, NcclStep step, Clock::time_point limit, const Check& check);
  Status failure(const std::string& what, NcclStep step) const {
    return nccl_failure(library_, step.result, comm_, step.call, what);
  }
  void end(nccl::NcclComm comm) noexcept;
  // Requires: the mutex.
  Status finalize(Clock::time_point limit);

  const NcclLibrary& library_;
  CudaBackend& backend_;
  std::atomic<bool> interrupted_{false};
  std::mutex mutex_;
  // Guarded by mutex_.
  nccl::NcclComm comm_ = nullptr;
  bool adopted_ = false;
};

}  // namespace forebay::internal
