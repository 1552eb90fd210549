#include "trainer/launcher_watch.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace forebay::gpt {
namespace {

// Longer: ranks go on for that long. The kernel can tell at once, but when the thread ends that started this
// process, which a launcher may have done long before.
constexpr std::chrono::milliseconds kLookPeriod{500};

}  // namespace

LauncherWatch::LauncherWatch() : parent_(::getppid()), thread_([this] { watch(); }) {}

LauncherWatch::~LauncherWatch() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LauncherWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookPeriod, [this] { return ending_; })) {
    if (::getppid() == parent_) continue;
    std::fprintf(stderr, "forebay-gpt: the launcher (process %d) has ended, and so does this rank\n",
                 static_cast<int>(parent_));
    ::kill(::getpid(), SIGTERM);
    return;
  }
}

}  // namespace forebay::gpt
