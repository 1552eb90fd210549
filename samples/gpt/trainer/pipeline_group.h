// PipelineGroup: the stages of a pipeline, and what this one hands to its neighbours: activations forwards,
// their gradients backwards.
//
// The two directions have a communicator and a stream of their own, so that neither waits for the other, and
// what is on its way passes beside the computing. A pipeline of one stage does nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "forebay/backend.h"
#include "forebay/communicator.h"
#include "model/device_handles.h"
#include "model/shape.h"

namespace forebay::gpt {

// One direction. What is handed on or taken is in order with a compute stream: with what was queued there
// until then, and with what is queued there after the wait. Calls without a neighbour on that side do
// nothing.
class StageLink {
 public:
  // `from`, `to`: the neighbours' ranks. The stream outlives this, or is drained before.
  StageLink(Backend& backend, Communicator& communicator, Stream compute, std::optional<int> from,
            std::optional<int> to);
  // Waits for what is queued.
  ~StageLink();
  StageLink(const StageLink&) = delete;
  StageLink& operator=(const StageLink&) = delete;

  void receive(DevicePtr target, std::size_t bytes);
  // The latest one.
  void wait_for_received();
  void send(const std::byte* source, std::size_t bytes, std::uint64_t micro_step);
  // Before what the micro-step before the last one has sent is overwritten.
  void wait_for_place(std::uint64_t micro_step);

  void drain() noexcept;

 private:
  void follow_compute();

  Backend& backend_;
  Communicator& communicator_;
  const Stream compute_;
  const std::optional<int> from_;
  const std::optional<int> to_;
  const Stream stream_;
  OwnedEvent computed_;  // Only from its record to the wait that follows.
  OwnedEvent received_;
  std::array<OwnedEvent, 2> sent_;  // By micro-step, in turn.
};

class PipelineGroup {
 public:
  struct Options {
    Communicator* forward = nullptr;  // Each used by nobody else. Null: one stage.
    Communicator* backward = nullptr;
    Backend* backend = nullptr;
    Stream compute;
    // Whether calls queue and return whatever the neighbours do; then gradients are asked for ahead.
    bool queues = true;
  };

  // What the options point to outlives this.
  explicit PipelineGroup(const Options& options);

  PipelineStage stage() const;
  bool asks_ahead() const { return options_.queues; }
  // None of a pipeline of one stage.
  StageLink* forward() { return forward_ ? &*forward_ : nullptr; }
  StageLink* backward() { return backward_ ? &*backward_ : nullptr; }
  void drain() noexcept;

 private:
  Options options_;
  std::optional<StageLink> forward_;
  std::optional<StageLink> backward_;
};

}  // namespace forebay::gpt
