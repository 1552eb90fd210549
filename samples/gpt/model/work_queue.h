// WorkQueue: where a model's pieces of computing go, in one order with what its ranks do together between
// them.
#pragma once

#include <functional>

namespace forebay::gpt {

class WorkQueue {
 public:
  virtual ~WorkQueue() = default;
  // Runs `work`, now or later, after all that was given before.
  virtual void run(std::function<void()> work) = 0;
};

// For a model that nothing else shares a stream with.
class RunsAtOnce final : public WorkQueue {
 public:
  void run(std::function<void()> work) override { work(); }
};

}  // namespace forebay::gpt
