#include "trainer/launcher_watch.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>

namespace forebay::gpt {
namespace {

// Longer: ranks go on for that long. The kernel can tell at once, but when the thread ends that started this
// process, which a launcher may have done long before.
constexpr std::chrono::milliseconds kLookPeriod{500};

void watch(std::stop_token stop, pid_t parent) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  while (::getppid() == parent) {
    stopped.wait_for(lock, stop, kLookPeriod, [] { return false; });
    if (stop.stop_requested()) return;
  }
  std::fprintf(stderr, "forebay-gpt: the launcher (process %d) has ended, and so does this rank\n",
               static_cast<int>(parent));
  ::kill(::getpid(), SIGTERM);
}

}  // namespace

std::jthread watch_launcher() {
  return std::jthread(watch, ::getppid());
}

}  // namespace forebay::gpt
