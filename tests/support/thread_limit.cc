#include "tests/support/thread_limit.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

namespace forebay::testing {
namespace {

constexpr int kNoLimit = -1;
std::atomic<int> threads_left{kNoLimit};

bool may_start() {
  int left = threads_left.load();
  while (left > 0 && !threads_left.compare_exchange_weak(left, left - 1)) {
  }
  return left != 0;
}

}  // namespace

ThreadLimit::ThreadLimit(int threads) {
  threads_left = threads;
}
ThreadLimit::~ThreadLimit() {
  threads_left = kNoLimit;
}

}  // namespace forebay::testing

// In place of the C library's, for the libraries of this program too.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  if (!forebay::testing::may_start()) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto next = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, run, argument);
}
