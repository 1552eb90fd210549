// Mover: bytes from a Store to device memory (fetch) and back (spill), in the order of one stream. They pass
// through staging buffers in pieces, of which as many are under way as there are buffers; when all are taken
// a move waits, and nothing else does.
//
// Order. A move begins when what was queued on its stream before has run, and what is queued there after it
// begins when the move has ended: for a fetch, its bytes are in device memory, for a spill, in the store. So
// events on that stream say when a move may begin and when it has ended. Moves do not overlap each other; the
// pieces of one do. It uses Backend::call_host: on cuda, no other host function of the process runs while a
// piece is waited for.
//
// Failure. The first failure of the store stays in status(), and later moves do nothing; what a fetch leaves
// on the device is undefined then. The stream goes on, so whoever waits for it must ask status() before use.
//
// Threads: one thread queues moves; status() may be called by any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "forebay/backend.h"
#include "forebay/staging_buffers.h"
#include "forebay/store.h"

namespace forebay {

// A piece of a range, and the bytes of it that are the caller's.
struct StoredBytes {
  StoreRange range;
  std::uint64_t offset = 0;       // From the range's begin; a multiple of the granule.
  std::uint64_t bytes = 0;        // Zero moves nothing.
  std::uint64_t range_bytes = 0;  // Of the whole range: the transfer's end is rounded up, to there at most.
};

class Mover {
 public:
  // Takes all of `buffers`, each of a multiple of the store's granule, for its life. Requires: backend, store
  // and buffers outlive it. Errors: kInvalidArgument where a buffer is taken or no multiple; the Backend's.
  static Result<std::unique_ptr<Mover>> create(Backend& backend, Store& store, StagingBuffers& buffers);
  // Waits for the stream's work.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  Stream stream() const noexcept { return stream_; }

  // Queues a move on stream(). Errors: the Backend's. The store's are met when the move runs.
  Status fetch(const StoredBytes& source, DevicePtr target);
  // What lies behind the caller's bytes up to the end of the granule is undefined afterwards.
  Status spill(const std::byte* source, const StoredBytes& target);

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

  mutable std::mutex mutex_;
  Status status_;          // Guarded by mutex_,
  std::list<Move> moves_;  // like these, whose contents belong to the stream once they are queued.
};

}  // namespace forebay
