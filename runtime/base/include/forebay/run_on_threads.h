// run_on_threads: a function on several threads that need each other, so that all of them run or none.
#pragma once

#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "forebay/status.h"

namespace forebay::internal {

// Runs function(i) for each i from 0 to count - 1 on a thread of its own, and waits for all. The function
// throws nothing. Errors: kUnavailable if a thread cannot be made; then the function was not called.
template <typename Function>
Status run_on_threads(int count, const Function& function) {
  std::promise<bool> promise;
  const std::shared_future<bool> all_made(promise.get_future());
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  std::string why;
  try {
    for (int i = 0; i < count; ++i) {
      threads.emplace_back([&function, &all_made, i] {
        if (all_made.get()) function(i);
      });
    }
  } catch (const std::system_error& error) {
    why = error.what();
  }
  promise.set_value(why.empty());
  for (std::thread& thread : threads) thread.join();
  if (why.empty()) return {};
  return {StatusCode::kUnavailable,
          "cannot start thread ",
          threads.size() + 1,
          " of ",
          count,
          ": ",
          why,
          "; raise ulimit -u (processes) or -v (addresses)"};
}

}  // namespace forebay::internal
