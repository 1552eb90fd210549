// WorkQueue: runs a model's computations in order, also relative to its collectives.
#pragma once

#include <functional>

namespace forebay::gpt {

class WorkQueue {
 public:
  virtual ~WorkQueue() = default;
  // Runs `work`, now or later, after all earlier work.
  virtual void run(std::function<void()> work) = 0;
};

}  // namespace forebay::gpt
