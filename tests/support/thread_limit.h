// A program that has no more threads: the system's limit (ulimit -u) without its privileges and its races.
//
// thread_limit.cc is a source of each test that uses it.
#pragma once

namespace forebay::testing {

// While it lives, `threads` more threads can start. Threads: one limit at a time.
class ThreadLimit {
 public:
  explicit ThreadLimit(int threads);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace forebay::testing
