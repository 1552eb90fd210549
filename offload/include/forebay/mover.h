// Mover: moves bytes from a file store to device memory (fetch) and back (spill), in the order of one stream.
// They pass through staging buffers in pieces, one piece per buffer at a time. When all buffers are taken,
// only the move waits.
//
// Order. A move begins after the earlier work of its stream, and later work of the stream begins after the
// move: the bytes of a fetch are in device memory then, those of a spill in the store. So events on the
// stream say when a move may begin and when it has ended. Moves do not overlap each other; the pieces of one
// move do. The mover waits for its pieces in host functions (Backend::call_host), on a thread of the stream.
//
// Failure. The first failure of the store stays in status(), and later moves do nothing; the target of a
// failed fetch is undefined. The stream goes on, so ask status() after waiting for it and before using the
// bytes. Work that cannot ask is stopped by `on_failure`.
//
// Threads: one thread queues moves; status() may be called by any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "forebay/backend.h"
#include "forebay/staging_buffers.h"
#include "forebay/store.h"

namespace forebay {

// A part of a range, and how many of its bytes are the caller's.
struct StoredBytes {
  StoreRange range;
  std::uint64_t offset = 0;       // From the start of the range; a multiple of the granule.
  std::uint64_t bytes = 0;        // Zero moves nothing.
  std::uint64_t range_bytes = 0;  // The whole range's; a transfer's end is rounded up to a granule within it.
};

class Mover {
 public:
  // Takes all of `buffers` for its life. Their size is a multiple of the store's granule.
  // `on_failure`, unless empty, gets the first failure of the store, on a thread of the stream and before the
  // work that follows the move there. It neither throws nor calls the Backend.
  // Requires: backend, store and buffers outlive it. Errors: kInvalidArgument when a buffer is taken or the
  // size is no multiple; the Backend's.
  static Result<std::unique_ptr<Mover>> create(Backend& backend, Store& store, StagingBuffers& buffers,
                                               std::function<void(const Status&)> on_failure = {});
  // Waits for the stream's work.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // The mover's own stream, on which its moves run. It ends with the mover.
  Stream stream() const noexcept { return stream_; }

  // Queues a move on stream(). Errors: the Backend's. Failures of the store show in status() when the move
  // runs.
  Status fetch(const StoredBytes& source, DevicePtr target);
  // The range's bytes behind the caller's, up to the end of the granule, are undefined afterwards.
  Status spill(const std::byte* source, const StoredBytes& target);

  // The first failure of the store. Threads: any.
  Status status() const;

 private:
  struct Move;

  Mover(Backend& backend, Store& store) noexcept;
  Move& add_move(const StoredBytes& stored);
  Status call(void (*function)(Move& move, std::size_t piece), Move& move, std::size_t piece);
  void begin(Move& move, std::size_t piece, StoreDirection direction);
  void end(StoreTicket& ticket);
  void fail(const Status& status);

  Backend& backend_;
  Store& store_;
  Stream stream_;
  std::vector<StagingBuffer> buffers_;
  std::size_t piece_bytes_ = 0;
  std::uint64_t granule_bytes_ = 0;
  std::function<void(const Status&)> on_failure_;

  mutable std::mutex mutex_;
  // Guarded by mutex_. The contents of a queued move belong to the stream.
  Status status_;
  std::list<Move> moves_;
};

}  // namespace forebay
