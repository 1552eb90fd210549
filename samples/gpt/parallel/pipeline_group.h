// PipelineGroup: sends activations to the next pipeline stage and their gradients to the preceding one.
//
// Each direction has its own communicator and stream, so neither waits for the other and transfers overlap
// the computation. With one stage it does nothing.
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

// One direction. Order: a transfer starts after the work that the compute stream has at the call; the compute
// stream continues after a wait. Calls do nothing where this stage has no neighbour on that side.
class StageLink {
 public:
  // `from` and `to` are the neighbours' ranks. `compute` outlives this, or is drained before.
  StageLink(Backend& backend, Communicator& communicator, Stream compute, std::optional<int> from,
            std::optional<int> to);
  // Waits for queued transfers.
  ~StageLink();
  StageLink(const StageLink&) = delete;
  StageLink& operator=(const StageLink&) = delete;

  void receive(DevicePtr target, std::size_t bytes);
  // Makes the compute stream wait for the latest receive().
  void wait_for_received();
  void send(const std::byte* source, std::size_t bytes, std::uint64_t micro_step);
  // Makes the compute stream wait until the data sent two micro-steps before may be overwritten.
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
  OwnedEvent computed_;  // Reused: valid only until the next wait.
  OwnedEvent received_;
  std::array<OwnedEvent, 2> sent_;  // Micro-steps take them in turn.
};

class PipelineGroup {
 public:
  struct Options {
    Communicator* forward = nullptr;  // Not shared with other users. Null: one stage.
    Communicator* backward = nullptr;
    Backend* backend = nullptr;
    Stream compute;
    // Calls only queue and never wait for the neighbours. Then gradients are requested ahead.
    bool queues = true;
  };

  // The objects in `options` outlive this.
  explicit PipelineGroup(const Options& options);

  PipelineStage stage() const;
  bool asks_ahead() const { return options_.queues; }
  // Null with one stage.
  StageLink* forward() { return forward_ ? &*forward_ : nullptr; }
  StageLink* backward() { return backward_ ? &*backward_ : nullptr; }
  void drain() noexcept;

 private:
  Options options_;
  std::optional<StageLink> forward_;
  std::optional<StageLink> backward_;
};

}  // namespace forebay::gpt
