// The events of a process under the preload: every allocation, free and refusal, in a file beside its record
// that the process maps and appends to. Whoever started it reads the file whenever it likes, also after the
// process was killed: an event is there once it is counted, and nothing is written at the end.
//
// The file holds the latest events and a table of the blocks that are live. Once the bound is reached the
// oldest events make room; what was live when the oldest one that is left happened follows from the table, so
// figures, traces and reports go on being right for what is kept. Without FOREBAY_PRELOAD_EVENTS there is no
// file and nothing is done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "allocator/preload/record.h"

namespace forebay {

// Most bytes of events to keep for each process, in bytes or as "256MiB"; without it, or 0: no events. Needs
// FOREBAY_PRELOAD_RECORDS.
inline constexpr char kPreloadEventsVariable[] = "FOREBAY_PRELOAD_EVENTS";
// What `forebay run` sets when a report is asked for: six million events and two million live blocks.
// Smaller: what is told goes back less far. Larger: more of the disk, and longer to read.
inline constexpr std::uint64_t kPreloadEventsDefaultBytes = std::uint64_t{256} << 20;
// Less would keep nothing worth reading; more would not fit a trace.
inline constexpr std::uint64_t kPreloadEventsLeastBytes = std::uint64_t{64} << 10;
inline constexpr std::uint64_t kPreloadEventsMostBytes = std::uint64_t{2} << 30;

enum class PreloadEventKind : std::uint8_t {
  kAllocation = 1,
  kFree = 2,       // Bytes, stream and server are those of the block.
  kRefused = 3,    // Out-of-memory. `address`: bytes that were free to the process, in pieces or not.
  kReserved = 4,   // The arena's physical memory has changed: from `address` bytes to `bytes`.
  kUntracked = 5,  // Allocated in a way whose free is not seen (cuMemCreate).
};

// Streams by small numbers, in order of appearance after these. Beyond the last they are told as one.
inline constexpr std::uint16_t kPreloadPlainStream = 0;      // A plain allocation: whoever uses it.
inline constexpr std::uint16_t kPreloadLegacyStream = 1;     // The default stream.
inline constexpr std::uint16_t kPreloadPerThreadStream = 2;  // Some thread's own default stream.
inline constexpr std::uint16_t kPreloadStreamLimit = 256;
// "stream 3", "the default stream", "plain allocations": for reports.
std::string preload_stream_text(std::uint16_t stream);

struct PreloadEvent {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;    // As asked for.
  std::uint64_t time_ns = 0;  // Since the log's start.
  std::uint16_t stream = 0;
  std::int16_t device = -1;  // -1: not known.
  PreloadServer server{};
  PreloadEventKind kind = PreloadEventKind::kAllocation;
  std::uint16_t unused = 0;
};
static_assert(sizeof(PreloadEvent) == 32);

// A live block.
struct PreloadBlock {
  std::uint64_t address = 0;  // 0: this entry is free.
  std::uint64_t bytes = 0;
  std::uint64_t number = 0;  // Of the event of its allocation, from 0. In a free entry: the next free one.
  std::uint16_t stream = 0;
  std::int16_t device = -1;
  PreloadServer server{};
  std::uint8_t unused[3] = {};
};
static_assert(sizeof(PreloadBlock) == 32);

inline constexpr int kPreloadEventDevices = 64;

// Of one device, exact also when events were dropped.
struct PreloadDeviceCounts {
  std::atomic<std::uint64_t> allocations;
  std::atomic<std::uint64_t> frees;
  std::atomic<std::uint64_t> refused;
  std::atomic<std::uint64_t> requested_bytes;  // Live, as asked for, whoever served them.
  std::atomic<std::uint64_t> peak_requested_bytes;
  std::atomic<std::uint64_t> elsewhere_bytes;  // Of these, what the driver serves.
  std::atomic<std::uint64_t> arena_bytes;      // Physical memory that the arena holds.
  // The most of arena_bytes and elsewhere_bytes together.
  std::atomic<std::uint64_t> peak_reserved_bytes;
  std::atomic<std::uint64_t> capacity_bytes;  // What the process could have had; 0: not known.
  std::atomic<std::uint64_t> chunk_bytes;     // The arena's; 0: there was none.
};

inline constexpr std::uint64_t kPreloadEventsMagic = 0x3153544E45564546;  // "FEVENTS1"
// The beginning of the file. The events follow at event_offset, a ring; the table of blocks at block_offset.
struct PreloadEventsHeader {
  std::atomic<std::uint64_t> magic;
  std::uint32_t bytes;  // Of the structure.
  std::int32_t process;
  std::uint64_t start_us;  // Since the epoch.
  std::uint64_t event_offset;
  std::uint64_t block_offset;
  std::atomic<std::uint64_t> event_capacity;  // Of the ring; smaller than planned where the disk is full.
  std::atomic<std::uint64_t> written;         // Events so far; the latest event_capacity are there.
  std::atomic<std::uint64_t> block_count;     // Entries of the table that were ever used.
  std::atomic<std::uint64_t> untold_blocks;   // Allocations for which the table had no room.
  PreloadDeviceCounts devices[kPreloadEventDevices];
};

// Figures of a device, as they were when the file was read.
struct PreloadDeviceFigures {
  int device = 0;
  std::uint64_t allocations = 0;
  std::uint64_t frees = 0;
  std::uint64_t refused = 0;
  std::uint64_t requested_bytes = 0;
  std::uint64_t peak_requested_bytes = 0;
  std::uint64_t elsewhere_bytes = 0;
  std::uint64_t arena_bytes = 0;
  std::uint64_t peak_reserved_bytes = 0;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t chunk_bytes = 0;
};

// A copy of what a file of events said when it was read.
struct PreloadEventLog {
  std::uint64_t start_us = 0;
  std::uint64_t first_number = 0;  // Of the first event that is kept; those before were dropped.
  std::uint64_t untold_blocks = 0;
  std::vector<PreloadDeviceFigures> devices;  // Those with anything to tell.
  std::vector<PreloadBlock> live_before;      // What was live before the first event, by address.
  std::vector<PreloadEvent> events;
};

// Errors: kIoError when it cannot be read, kCorruption when it is no file of events of this build. An event
// that was being written when the process was killed is not there.
Result<PreloadEventLog> read_preload_events(const std::string& path);

}  // namespace forebay
