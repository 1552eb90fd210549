// let_others_run(): between two looks of a loop that waits for another thread or process.
#pragma once

#include <chrono>
#include <thread>

namespace forebay::testing {

// Leaves the processor to the tests that run beside this one. A loop around yield() takes a whole core.
inline void let_others_run() {
  std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace forebay::testing
