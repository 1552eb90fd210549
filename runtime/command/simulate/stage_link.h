// One direction between pipeline stages: activations to the next one, or gradients to the one before, each on
// a communicator and a stream of its own, as a trainer has it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "forebay/communicator.h"
#include "forebay/model_backend.h"

namespace forebay {

// Order: a transfer starts after the work that the compute stream has at the call; the compute stream
// continues after a wait. Calls do nothing where this stage has no neighbour on that side.
class StageLink {
 public:
  struct Options {
    Stream compute;
    std::uint64_t bytes = 0;  // One message.
    std::optional<int> from;  // The neighbours' ranks.
    std::optional<int> to;
  };

  // The references outlive this. `memory`: of a device, for messages; nothing is written.
  StageLink(Backend& backend, Communicator& communicator, DevicePtr memory, const Options& options);
  ~StageLink();
  StageLink(const StageLink&) = delete;
  StageLink& operator=(const StageLink&) = delete;

  void receive();
  // Makes the compute stream wait for the latest receive().
  void wait_for_received();
  void send(int micro_step);
  // Makes the compute stream wait until the data sent two micro-steps before may be overwritten.
  void wait_for_place(int micro_step);

 private:
  void follow_compute();

  Backend& backend_;
  Communicator& communicator_;
  DevicePtr const memory_;
  const Options options_;
  const Stream stream_;
  const Event computed_;
  const Event received_;
  const std::array<Event, 2> sent_;  // Micro-steps take them in turn.
};

}  // namespace forebay
