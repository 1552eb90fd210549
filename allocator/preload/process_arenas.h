// ProcessArenas: the arenas that serve a process which knows nothing of forebay, one for each device, made
// when one is first asked for. The preload and the entry points for PyTorch allocate from the same ones.
//
// Threads: every function may be called from any thread. A Use keeps its device's arena from being dropped.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "allocator/preload/block_book.h"
#include "forebay/arena.h"
#include "forebay/cuda_backend.h"

namespace forebay {

class ProcessArenas {
  struct Entry;
  struct Relay;
  struct ThreadSlots;

 public:
  // One device's arena, while it lasts. Empty: there is none.
  class Use {
   public:
    Use() = default;
    explicit operator bool() const noexcept { return entry_ != nullptr; }
    int device() const noexcept;
    Arena& arena() const noexcept;
    CudaBackend& backend() const noexcept;
    // Context that the arena's memory and events are of, as whoever made the arena has set it.
    void* context() const noexcept;

   private:
    friend class ProcessArenas;
    std::shared_lock<std::shared_mutex> lock_;
    Entry* entry_ = nullptr;
  };

  // Made by the first call and never destroyed: the process may free memory until its very end.
  static ProcessArenas& of_process();

  // The device's arena, made if there is none. Empty: it cannot be made, and `why` says so. What failed for
  // want of memory is tried again by the next call, anything else is not. context_of: called once the arena's
  // backend holds the device's context; gives the value of Use::context.
  Use use(int device, void* (*context_of)(int device), Status* why);
  // The same, if it is there.
  Use find(int device);

  // Gives the device's arena back with everything in it. Returns the blocks that were live. Requires: no
  // queued work still uses its blocks. Order: waits for those who use it.
  BlockBook::Blocks drop(int device);

  // The blocks of all arenas, and others that the preload knows of.
  BlockBook& blocks() noexcept { return blocks_; }

  // --- the calling thread's own default stream, which no other thread can name ---
  // A stream that stands for it: what is freed on it (free_on_thread_stream) may be used again at once by
  // work that the thread queues on its default stream, and by others in the order of events. Null: there is
  // none, and only what nobody uses any more will do.
  static Stream thread_stream(const Use& use);
  // Frees a block whose last use is queued on the calling thread's default stream.
  static Status free_on_thread_stream(const Use& use, DevicePtr block);

 private:
  struct Entry {
    // Held exclusively while the rest is made or dropped.
    std::shared_mutex mutex;
    int device = -1;
    std::unique_ptr<CudaBackend> backend;
    std::unique_ptr<Arena> arena;
    void* context = nullptr;
    bool has_given_up = false;
    Status why;
    std::uint64_t generation = 0;  // Counts the arenas of this device.
    std::mutex relay_mutex;
    // Guarded by relay_mutex: those of threads that have ended, and how many there are in all.
    Relay* left_relays = nullptr;
    int relay_count = 0;
  };

  Status make(Entry& entry, int device, void* (*context_of)(int device));
  static Relay* relay_of_thread(Entry& entry);
  static Relay* take_left_relay(Entry& entry);
  static void leave_relays(void* slots);

  Entry entries_[kPreloadDeviceLimit];
  BlockBook blocks_;
};

}  // namespace forebay
