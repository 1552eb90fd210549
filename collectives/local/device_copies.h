// Copies between local ranks whose memory the host does not reach: the ranks' Backends make them.
//
// The ranks meet when they *issue* the operation. The last to come queues work on the streams of all: each
// stream waits until the others have come to the operation, copies the bytes for its rank, and waits until
// the others have copied from it. So a stream only ever waits for work that is already queued.
//
// Host functions that wait for each other would not do. A CUDA driver may run the host functions of all
// streams on one thread, where the first to wait would wait for ever; and a wait for work that is queued
// later stops every stream that shares the hardware queue.
#pragma once

#include <cstddef>
#include <span>

#include "collectives/arguments.h"
#include "forebay/backend.h"
#include "forebay/status.h"

namespace forebay::internal {

// Where a data operation of one rank is queued. Without a backend: the host copies, and nothing here is used.
struct DevicePort {
  Backend* backend = nullptr;
  Stream stream{};
  Event come{};    // The stream has come to the operation: its source is filled, its target may be written.
  Event copied{};  // The stream has copied all that it needs from the other ranks.
  int rank = 0;    // In the world: for messages.

  bool used() const noexcept { return backend != nullptr; }
};

// One rank's part in a collective.
struct DevicePart {
  DevicePort port;
  Piece piece;
};

// Queues the copies of a collective that all ranks have come to. `parts` is by rank.
// Order: when it returns, failed or not, each stream waits for the copies that read its source.
Status queue_collective_copies(std::span<const DevicePart> parts);

struct DeviceMessage {
  const DevicePort& sender;
  const DevicePort& receiver;
  const std::byte* source;
  std::byte* target;
  std::size_t bytes;
};

// Queues the copy on the receiver's stream, after the work that the sender's stream holds by now.
// Order: when it returns, failed or not, the sender's stream waits for the copy if it was queued.
Status queue_message_copy(const DeviceMessage& message);

}  // namespace forebay::internal
