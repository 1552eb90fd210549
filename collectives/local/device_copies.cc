#include "collectives/local/device_copies.h"

#include <string>

namespace forebay::internal {
namespace {

Status of_rank(const DevicePort& port, const Status& status) {
  return status.with_context("rank " + std::to_string(port.rank));
}

// Queues the copies for one rank on its stream.
Status queue_copies_of(std::size_t rank, std::span<const DevicePart> parts) {
  const auto& [port, piece] = parts[rank];
  const auto copy = [&](std::size_t from, const std::byte* source) {
    std::byte* const place = piece.target + from * piece.target_stride;
    if (place == source) return Status();
    return of_rank(port, port.backend->copy_async(place, source, piece.bytes, port.stream));
  };
  if (piece.keep_own) FOREBAY_RETURN_IF_ERROR(copy(rank, piece.source));
  // Each rank starts with its right neighbour, so that not all ranks read one source at once.
  for (std::size_t step = 1; step < parts.size(); ++step) {
    const std::size_t peer = (rank + step) % parts.size();
    const auto& [peer_port, peer_piece] = parts[peer];
    FOREBAY_RETURN_IF_ERROR(of_rank(port, port.backend->stream_wait(port.stream, peer_port.come)));
    FOREBAY_RETURN_IF_ERROR(copy(peer, peer_piece.source + rank * peer_piece.source_stride));
  }
  return {};
}

// Queues the copies of all ranks. `reader_count` counts the ranks whose streams got any.
Status queue_copies(std::span<const DevicePart> parts, std::size_t* reader_count) {
  for (const auto& [port, piece] : parts)
    FOREBAY_RETURN_IF_ERROR(of_rank(port, port.backend->event_record(port.come, port.stream)));
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    ++*reader_count;
    FOREBAY_RETURN_IF_ERROR(queue_copies_of(rank, parts));
  }
  return {};
}

// Makes every rank's stream wait for the copies of the first `reader_count` ranks.
Status queue_waits(std::span<const DevicePart> parts, std::size_t reader_count) {
  for (std::size_t rank = 0; rank < reader_count; ++rank) {
    const DevicePort& port = parts[rank].port;
    FOREBAY_RETURN_IF_ERROR(of_rank(port, port.backend->event_record(port.copied, port.stream)));
  }
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    const DevicePort& port = parts[rank].port;
    for (std::size_t peer = 0; peer < reader_count; ++peer) {
      if (peer == rank) continue;
      FOREBAY_RETURN_IF_ERROR(of_rank(port, port.backend->stream_wait(port.stream, parts[peer].port.copied)));
    }
  }
  return {};
}

}  // namespace

Status queue_collective_copies(std::span<const DevicePart> parts) {
  if (parts[0].piece.bytes == 0) return {};
  std::size_t reader_count = 0;
  const Status copies = queue_copies(parts, &reader_count);
  const Status waits = queue_waits(parts, reader_count);
  if (!waits.ok()) {
    // A queued copy cannot be taken back, so the host waits in place of the streams.
    for (const auto& [port, piece] : parts.first(reader_count))
      static_cast<void>(port.backend->stream_synchronize(port.stream));
  }
  return copies.ok() ? waits : copies;
}

Status queue_message_copy(const DeviceMessage& message) {
  const DevicePort& sender = message.sender;
  const DevicePort& receiver = message.receiver;
  FOREBAY_RETURN_IF_ERROR(of_rank(sender, sender.backend->event_record(sender.come, sender.stream)));
  FOREBAY_RETURN_IF_ERROR(of_rank(receiver, receiver.backend->stream_wait(receiver.stream, sender.come)));
  FOREBAY_RETURN_IF_ERROR(of_rank(receiver, receiver.backend->copy_async(message.target, message.source,
                                                                         message.bytes, receiver.stream)));
  Status closed = of_rank(receiver, receiver.backend->event_record(receiver.copied, receiver.stream));
  if (closed.ok()) closed = of_rank(sender, sender.backend->stream_wait(sender.stream, receiver.copied));
  if (!closed.ok()) static_cast<void>(receiver.backend->stream_synchronize(receiver.stream));
  return closed;
}

}  // namespace forebay::internal
