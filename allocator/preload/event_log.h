// EventLog: the writer of a process's file of events (events.h).
//
// Threads: every function may be called from any thread. One short lock makes the order in the file the order
// in which things happened; under it no host memory is allocated, and a system call is made only where the
// file is given another piece of the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "allocator/preload/block_book.h"
#include "allocator/preload/driver_types.h"
#include "forebay/arena.h"
#include "allocator/preload/events.h"

namespace forebay {

// What an event says of a request.
struct EventRequest {
  std::size_t bytes = 0;
  int device = -1;
  DriverStream stream = nullptr;  // By its number; null: a plain allocation.
  PreloadServer server = PreloadServer::kArena;
};

class EventLog {
 public:
  // Of the process; null when nobody has asked for one, or there can be none.
  static EventLog* of_process() noexcept;
  // Makes it where FOREBAY_PRELOAD_EVENTS asks for one. Called once, before any replaced call. What is wrong
  // becomes the record's problem.
  static void start(PreloadRecord& record);

  // A block that nobody else knows yet. `arena`: who serves it, if one does. Sets the facts' stream and slot.
  void allocated(DevicePtr address, const EventRequest& request, const Arena* arena, BlockFacts* facts);
  // A block that nobody else can free, and that is still its owner's.
  void freed(DevicePtr address, const BlockFacts& facts);
  // Its address was given out anew: its free did not come by.
  void lost(const BlockFacts& facts);
  void refused(const EventRequest& request, std::uint64_t driver_free_bytes);
  void untracked(const EventRequest& request);
  // What the arena holds has changed, perhaps. Null: the arena is gone.
  void look_at(int device, const Arena* arena);
  // What an arena of the device may hold, and in what pieces.
  void set_capacity(int device, std::uint64_t bytes, std::uint64_t chunk_bytes);

 private:
  struct StreamNumber {
    DriverStream stream = nullptr;
    std::uint16_t number = 0;  // 0: this entry is free.
  };

  EventLog(unsigned char* memory, std::string path, PreloadRecord& record);
  // 0, or why not: an errno.
  int back(std::uint64_t offset, std::uint64_t bytes) const;
  std::uint64_t free_bytes(int device, std::uint64_t driver_free_bytes);
  void tell_of_lack(std::uint64_t kept_bytes, int error);
  std::uint16_t number_of(DriverStream stream);
  PreloadDeviceCounts* counts(int device);
  void append(const PreloadEvent& event);
  std::uint32_t take_slot(const PreloadBlock& block);
  void leave_slot(std::uint32_t slot);
  void look(int device, const Arena* arena, std::uint64_t time_ns);
  void settle_peak(PreloadDeviceCounts& count, std::uint64_t arena_peak_bytes);
  void forget(const BlockFacts& facts);
  std::uint64_t now() const;

  unsigned char* const memory_;
  const std::string path_;  // From the root.
  PreloadRecord& record_;
  PreloadEventsHeader& header_;
  const std::uint64_t start_ns_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t written_ = 0;
  std::uint64_t backed_events_ = 0;  // As many as there is disk for.
  std::uint64_t backed_blocks_ = 0;
  std::uint64_t block_limit_ = 0;
  std::uint64_t block_count_ = 0;
  std::uint64_t free_slot_ = UINT64_MAX;  // The first of those that are free, each of which names the next.
  std::uint64_t arena_peaks_[kPreloadEventDevices] = {};  // What the arena has said so far.
  std::uint16_t stream_count_ = kPreloadPerThreadStream + 1;
  StreamNumber streams_[2 * kPreloadStreamLimit];
};

}  // namespace forebay
