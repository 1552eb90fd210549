// The events of a process under the preload: every allocation, free and refusal. They are in a file beside
// the process's record, which the process maps and appends to. `forebay run` reads the file at any time, also
// after the process was killed: nothing is written at the end of the process.
//
// The file holds the latest events and a table of the live blocks. When the bound is reached, new events
// replace the oldest ones. The blocks that were live before the oldest kept event follow from the table, so
// figures, traces and reports stay right for the kept events. Without FOREBAY_PRELOAD_EVENTS there is no file
// and no cost.
//
// Private to forebay: the layout is that of one build.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "allocator/preload/record.h"

namespace forebay {

// The most bytes of events to keep for each process, in bytes or as "256MiB". Unset or 0: no events. Needs
// FOREBAY_PRELOAD_RECORDS.
inline constexpr char kPreloadEventsVariable[] = "FOREBAY_PRELOAD_EVENTS";
// The bound that `forebay run` sets for a report: six million events and two million live blocks. Smaller:
// the report goes back less far. Larger: more disk space, and longer to read.
inline constexpr std::uint64_t kPreloadEventsDefaultBytes = std::uint64_t{256} << 20;
// Smaller than the least: too few events to be useful. Larger than the most: they would not fit a trace.
inline constexpr std::uint64_t kPreloadEventsLeastBytes = std::uint64_t{64} << 10;
inline constexpr std::uint64_t kPreloadEventsMostBytes = std::uint64_t{2} << 30;

enum class PreloadEventKind : std::uint8_t {
  kAllocation = 1,
  kFree = 2,       // Bytes, stream and server are those of the block.
  kRefused = 3,    // Out-of-memory. `address`: the bytes that were free to the process, fragmented or not.
  kReserved = 4,   // The arena's physical memory has changed from `address` bytes to `bytes`.
  kUntracked = 5,  // An allocation whose free is not seen (cuMemCreate).
};

// Streams have small numbers, in order of appearance after these. All streams from the last number on share
// it.
inline constexpr std::uint16_t kPreloadPlainStream = 0;      // A plain allocation: any stream may use it.
inline constexpr std::uint16_t kPreloadLegacyStream = 1;     // The default stream.
inline constexpr std::uint16_t kPreloadPerThreadStream = 2;  // The default stream of some thread.
inline constexpr std::uint16_t kPreloadStreamLimit = 256;
// For reports: "stream 3", "the default stream", "plain allocations".
std::string preload_stream_text(std::uint16_t stream);

struct PreloadEvent {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;    // As requested.
  std::uint64_t time_ns = 0;  // Since the start of the log.
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
  std::uint64_t number =
      0;  // The number of its allocation event, from 0. In a free entry: the next free one.
  std::uint16_t stream = 0;
  std::int16_t device = -1;
  PreloadServer server{};
  std::uint8_t unused[3] = {};
};
static_assert(sizeof(PreloadBlock) == 32);

inline constexpr int kPreloadEventDevices = 64;

// Counts of one device. They are exact even when events were dropped.
template <typename Count>
struct PreloadDeviceNumbers {
  Count allocations{};
  Count frees{};
  Count refused{};
  Count requested_bytes{};  // Live blocks, served by the arena or not.
  Count peak_requested_bytes{};
  Count elsewhere_bytes{};      // The part of them that the driver serves.
  Count arena_bytes{};          // Physical memory that the arena holds.
  Count peak_reserved_bytes{};  // The most of arena_bytes and elsewhere_bytes together.
  Count capacity_bytes{};       // The most the process could have; 0: not known.
  Count chunk_bytes{};          // The arena's; 0: there was none.
};
using PreloadDeviceCounts = PreloadDeviceNumbers<std::atomic<std::uint64_t>>;

inline constexpr std::uint64_t kPreloadEventsMagic = 0x3153544E45564546;  // "FEVENTS1"
// The beginning of the file. The events follow at event_offset, a ring; the table of blocks at block_offset.
struct PreloadEventsHeader {
  std::atomic<std::uint64_t> magic;
  std::uint32_t bytes;  // Size of the structure.
  std::int32_t process;
  std::uint64_t start_us;  // Since the epoch.
  std::uint64_t event_offset;
  std::uint64_t block_offset;
  std::atomic<std::uint64_t> event_capacity;  // The ring's; smaller than planned if the disk is full.
  std::atomic<std::uint64_t> written;         // Events so far; the latest event_capacity are kept.
  std::atomic<std::uint64_t> block_count;     // Entries of the table ever used.
  std::atomic<std::uint64_t> untold_blocks;   // Allocations for which the table had no room.
  PreloadDeviceCounts devices[kPreloadEventDevices];
};

// A copy of PreloadDeviceCounts, made when the file was read.
struct PreloadDeviceFigures : PreloadDeviceNumbers<std::uint64_t> {
  int device = 0;
};

// A copy of an events file, made when it was read.
struct PreloadEventLog {
  std::uint64_t start_us = 0;
  std::uint64_t first_number = 0;  // The number of the first kept event; earlier ones were dropped.
  std::uint64_t untold_blocks = 0;
  std::vector<PreloadDeviceFigures> devices;  // Devices with any count.
  std::vector<PreloadBlock> live_before;      // Live before the first kept event, by address.
  std::vector<PreloadEvent> events;
};

// An event that was being written when the process was killed is left out.
// Errors: kIoError when the file cannot be read; kCorruption when it is not an events file of this build.
Result<PreloadEventLog> read_preload_events(const std::string& path);

}  // namespace forebay
