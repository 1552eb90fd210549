// EventLog: the writer of a process's file of events (events.h).
//
// Threads: every function may be called from any thread. Under one short lock events are written in the order
// in which they happen. No host memory is allocated under it, and the only system call takes more of the disk
// for the file.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "allocator/preload/block_book.h"
#include "allocator/preload/calls.h"
#include "allocator/preload/events.h"
#include "forebay/arena.h"

namespace forebay {

// A request, as an event tells of it.
struct EventRequest {
  std::size_t bytes = 0;
  int device = -1;
  DriverStream stream = nullptr;  // Numbered (routes.h); null: a plain allocation.
  PreloadServer server = PreloadServer::kArena;
};

class EventLog {
 public:
  // The log of the process; null if none was asked for or none could be made.
  static EventLog* of_process() noexcept;
  // Makes the log if FOREBAY_PRELOAD_EVENTS asks for one. Called once, before any replaced call. If it fails
  // the reason becomes the record's problem.
  static void start(PreloadRecord& record);

  // A new block, before the program gets its address. `arena`: the arena that serves it, or null. Sets the
  // stream and the table entry in `facts`.
  void allocated(DevicePtr address, const EventRequest& request, const Arena* arena, BlockFacts* facts);
  // A free, before the memory is given back. No other thread frees the block.
  void freed(DevicePtr address, const BlockFacts& facts);
  // A block whose free was not seen: its address has been given out again.
  void lost(const BlockFacts& facts);
  void refused(const EventRequest& request, std::uint64_t driver_free_bytes);
  void untracked(const EventRequest& request);
  // Records how much the arena holds, if that has changed. Null: the arena is gone.
  void look_at(int device, const Arena* arena);
  // The limit and the chunk size of the device's arena.
  void set_capacity(int device, std::uint64_t bytes, std::uint64_t chunk_bytes);

 private:
  struct StreamNumber {
    DriverStream stream = nullptr;
    std::uint16_t number = 0;  // 0: this entry is free.
  };

  EventLog(unsigned char* memory, std::string path, const struct stat& facts, PreloadRecord& record);
  // Takes disk space for this part of the file. 0, or an errno.
  int back(std::uint64_t offset, std::uint64_t bytes) const;
  std::uint64_t free_bytes(int device, std::uint64_t driver_free_bytes);
  void tell_of_lack(std::uint64_t kept_bytes, int error);
  std::uint16_t number_of(DriverStream stream);
  PreloadEvent event_of(PreloadEventKind kind, const EventRequest& request, std::uint64_t address);
  PreloadDeviceCounts* counts(int device);
  void append(const PreloadEvent& event);
  std::uint32_t take_entry(const PreloadBlock& block);
  void leave_entry(std::uint32_t index);
  void look(int device, const Arena* arena, std::uint64_t time_ns);
  void settle_peak(PreloadDeviceCounts& count, std::uint64_t arena_peak_bytes);
  void forget(const BlockFacts& facts);
  std::uint64_t now() const;

  unsigned char* const memory_;
  const std::string path_;  // Absolute.
  const dev_t device_;      // The number of the file.
  const ino_t inode_;
  PreloadRecord& record_;
  PreloadEventsHeader& header_;
  const std::uint64_t start_ns_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::uint64_t written_ = 0;
  std::uint64_t backed_events_ = 0;  // Entries that disk space has been taken for.
  std::uint64_t backed_blocks_ = 0;
  std::uint64_t block_limit_ = 0;
  std::uint64_t block_count_ = 0;
  std::uint64_t free_entry_ = UINT64_MAX;  // The first free entry of the table; each one names the next.
  std::uint64_t arena_peaks_[kPreloadEventDevices] = {};  // The arena's latest peak_reserved_bytes.
  std::uint16_t stream_count_ = kPreloadPerThreadStream + 1;
  StreamNumber streams_[2 * kPreloadStreamLimit];
};

}  // namespace forebay
