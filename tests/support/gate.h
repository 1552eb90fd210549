// Holds the work of a stream until it is opened.
#pragma once

#include <condition_variable>
#include <mutex>

namespace forebay::testing {

// Give `wait` and the gate to call_host. The gate must outlive the streams that wait at it.
class Gate {
 public:
  static void wait(void* gate) {
    auto* self = static_cast<Gate*>(gate);
    std::unique_lock lock(self->mutex_);
    self->opened_.wait(lock, [self] { return self->open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

}  // namespace forebay::testing
