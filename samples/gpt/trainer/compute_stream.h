// A stream of the device on which the model computes, in order with the engine's gathers.
#pragma once

#include <exception>
#include <functional>
#include <utility>

#include "forebay/backend.h"
#include "forebay/error.h"
#include "forebay/log.h"
#include "forebay/stream_call.h"
#include "model/work_queue.h"

namespace forebay::gpt {

class ComputeStream final : public WorkQueue {
 public:
  // `queues`: each function given to run() queues work on stream() itself, so it runs at once on the calling
  // thread. Otherwise the function computes, and runs on the stream's thread.
  ComputeStream(Backend& backend, bool queues)
      : backend_(backend), queues_(queues), stream_(value_or_throw(backend.stream_create())) {}
  // Waits for queued work.
  ~ComputeStream() override { static_cast<void>(backend_.stream_destroy(stream_)); }
  ComputeStream(const ComputeStream&) = delete;
  ComputeStream& operator=(const ComputeStream&) = delete;

  Stream stream() const { return stream_; }

  // Runs `work` after all work that was queued before. Errors: after a function on the stream's thread has
  // thrown, later ones are skipped and synchronize() throws the same exception.
  void run(std::function<void()> work) override {
    if (queues_) return work();
    throw_if_error(call_on(backend_, stream_, [this, work = std::move(work)] {
      if (failure_) return;
      try {
        work();
      } catch (...) {
        failure_ = std::current_exception();
      }
    }));
  }

  void synchronize() {
    throw_if_error(backend_.stream_synchronize(stream_));
    if (failure_) std::rethrow_exception(failure_);
  }
  // Waits, and only logs a failure.
  void drain() noexcept {
    const Status status = backend_.stream_synchronize(stream_);
    if (!status.ok()) log(LogLevel::kInfo, "%s", status.message().c_str());
  }

 private:
  Backend& backend_;
  const bool queues_;
  const Stream stream_;
  std::exception_ptr failure_;  // Written on the stream's thread, read when it is idle.
};

}  // namespace forebay::gpt
