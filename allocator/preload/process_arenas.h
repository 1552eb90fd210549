// ProcessArenas: the arenas of a process that is not written for forebay. There is one for each device, made
// at its first use. The preload and the functions for PyTorch allocate from the same arenas.
//
// Threads: every function may be called from any thread. While a Use exists, its arena is not dropped.
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
  struct ThreadRelays;

 public:
  // Keeps one device's arena alive. Empty: there is none.
  class Use {
   public:
    Use() = default;
    explicit operator bool() const noexcept { return entry_ != nullptr; }
    int device() const noexcept;
    Arena& arena() const noexcept;
    CudaBackend& backend() const noexcept;
    // The number of the arena among those that its device has had.
    std::uint64_t generation() const noexcept;
    // The context of the arena's memory and events, as `context_of` returned it.
    void* context() const noexcept;

   private:
    friend class ProcessArenas;
    std::shared_lock<std::shared_mutex> lock_;
    Entry* entry_ = nullptr;
  };

  // Made by the first call and never destroyed, because the process may free memory until its end.
  static ProcessArenas& of_process();

  // The device's arena, made if there is none. Empty: it cannot be made, and `why` has the reason. The next
  // call tries again only if memory was missing. context_of: called when the arena's backend holds the
  // device's context; returns the value of Use::context.
  Use use(int device, void* (*context_of)(int device), Status* why);
  // The device's arena if it exists.
  Use find(int device);

  // Destroys the device's arena with all its blocks, and returns the blocks that were live.
  // Requires: no queued work still uses its blocks.
  // Order:    waits until no other thread has a Use of it.
  BlockBook::Blocks drop(int device);

  // The blocks of all arenas, and those of the driver that the preload has seen.
  BlockBook& blocks() noexcept { return blocks_; }

  // --- the calling thread's own default stream, which no other thread can name ---
  // A stream that stands for it: memory that was freed on that stream serves the thread's next work at once,
  // and other streams in the order of events. Null: there is none, so only idle memory can be allocated.
  static Stream thread_stream(const Use& use);
  // A stream of the arena's that has waited for all work queued on it so far; for most threads the one that
  // stands for it. Null: that work has run. Requires: it is not captured.
  static Result<Stream> stream_behind_thread(const Use& use);

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
    // Guarded by relay_mutex: the relays of threads that have ended, the number of all relays, and the one of
    // the threads beyond the limit.
    Relay* left_relays = nullptr;
    int relay_count = 0;
    Relay* shared_relay = nullptr;
  };

  static Status follow(Entry& entry, ArenaOptions options, const char* path);
  Status make(Entry& entry, int device, void* (*context_of)(int device));
  static Relay* relay_of_thread(Entry& entry);
  static Relay* take_left_relay(Entry& entry);
  static Relay* make_relay(Entry& entry);
  static void leave_relays(void* relays);

  Entry entries_[kPreloadDeviceLimit];
  BlockBook blocks_;
};

}  // namespace forebay
