// CudaOrderBook: the streams and events of the process's cuda backends, and the host functions that failed.
// It tells a handle that is gone from one that is somebody else's, which the driver does not promise to do.
// It calls no driver. There is one for all backends, because they may be given each other's streams and
// events.
//
// An ended stream is kept (parked) and used again for its backend's next stream_create: as long as its object
// exists, nobody else's stream can have its handle.
//
// Threads: every function may be called from any thread; no memory is allocated or freed under its mutex,
// except by the lists for the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "forebay/backend.h"
#include "runtime/device/cuda/abi.h"

namespace forebay {

// The state of a stream's host functions. Shared by the book and by the calls that are queued, which may
// outlive the book on a stream that is not ours.
class CudaStreamState {
 public:
  // The number of the host function that is queued next, from 1.
  std::uint64_t next_call() noexcept;
  std::uint64_t call_count() const noexcept;
  void fail(std::uint64_t call, Status status);
  // The first failure, if it is one of the host functions up to `call`.
  Status failure(std::uint64_t call) const;

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t call_count_ = 0;
  std::uint64_t failed_call_ = 0;  // 0: none.
  Status failure_;
};

class CudaOrderBook {
 public:
  // Made at the first call and never destroyed: work may still be queued while the process ends.
  static CudaOrderBook& of_process();

  // Parked streams kept per process. Fewer: the handle of an ended stream may come back as somebody else's
  // and is then not told apart. More: driver memory held for nothing.
  static constexpr std::size_t kParkedLimit = 64;

  // The backend that made a stream or event, as an identity; null when others made it.
  using Owner = const void*;
  enum class StreamKind : std::uint8_t { kOurs, kForeign, kEnded };

  // --- streams ---
  StreamKind kind(cuda::CuStream stream) const;
  bool is_owner(cuda::CuStream stream, Owner owner) const;
  // Puts a parked stream of the owner's, urgent or not, back to use; null when there is none.
  cuda::CuStream take_parked(Owner owner, bool urgent);
  void add_stream(cuda::CuStream stream, Owner owner, bool urgent);
  // Ends a stream of ours. False when there is no room to park it: it is forgotten, and the caller destroys
  // it.
  bool park_stream(cuda::CuStream stream);
  void forget_stream(cuda::CuStream stream);
  // The state of any stream, made when there is none yet.
  std::shared_ptr<CudaStreamState> state(cuda::CuStream stream);
  // The failure of a host function queued so far.
  Status failure(cuda::CuStream stream) const;

  // --- events ---
  void add_event(cuda::CuEvent event, Owner owner);
  bool has_event(cuda::CuEvent event) const;
  void remove_event(cuda::CuEvent event);
  void record(cuda::CuEvent event, cuda::CuStream stream);
  // The failure of a host function before the event's last record.
  Status failure(cuda::CuEvent event) const;

  // The owner's streams in use and events.
  std::size_t live_count(Owner owner) const;
  // The handles that the owner has to destroy at its end. This forgets them.
  struct Left {
    std::vector<cuda::CuStream> in_use;
    std::vector<cuda::CuStream> parked;
    std::vector<cuda::CuEvent> events;
  };
  Left take_all(Owner owner);

 private:
  struct StreamEntry {
    StreamKind kind = StreamKind::kForeign;
    Owner owner = nullptr;
    std::shared_ptr<CudaStreamState> state;
    bool urgent = false;
  };
  struct EventEntry {
    Owner owner = nullptr;
    std::shared_ptr<CudaStreamState> state;  // The last recording stream's; null: nothing can fail.
    std::uint64_t call = 0;                  // Host functions queued there before.
  };
  using Streams = std::map<cuda::CuStream, StreamEntry>;
  using Events = std::map<cuda::CuEvent, EventEntry>;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Streams streams_;  // Ours, in use or parked, and the foreign ones that had host functions.
  Events events_;
  std::size_t parked_count_ = 0;
};

}  // namespace forebay
