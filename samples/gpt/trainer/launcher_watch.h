// LauncherWatch: the end of the process that started this one. A launcher that is killed cannot end its
// ranks; they would train on with nobody to stop them.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace forebay::gpt {

class LauncherWatch {
 public:
  // From here until destroyed: sends this process SIGTERM when its parent has ended, which is only wrong
  // where the parent is no launcher and may go. Errors: throws std::system_error without a thread to be had.
  LauncherWatch();
  ~LauncherWatch();
  LauncherWatch(const LauncherWatch&) = delete;
  LauncherWatch& operator=(const LauncherWatch&) = delete;

 private:
  void watch();

  const pid_t parent_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;  // Guarded by mutex_.
  std::thread thread_;
};

}  // namespace forebay::gpt
