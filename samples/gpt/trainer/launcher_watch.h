// LauncherWatch: notices the end of the process that started this one. A launcher that is killed cannot end
// its ranks; without this they would go on training.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace forebay::gpt {

class LauncherWatch {
 public:
  // Until it is destroyed, it sends this process SIGTERM once its parent has ended. Do not use it if the
  // parent is no launcher and may end first. Errors: throws std::system_error if no thread can be started.
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
