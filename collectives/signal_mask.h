// Signals are for the program's own threads. A thread inherits the signal mask of the thread that starts it,
// so a thread of ours is started while all signals are blocked.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace forebay::internal {

// Blocks all signals for the calling thread, until destroyed.
class BlockedSignals {
 public:
  BlockedSignals() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace forebay::internal
