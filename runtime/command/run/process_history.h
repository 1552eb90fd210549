// ProcessHistory: the memory of one process under the preload on one device, computed from its events: the
// bytes requested and held over time, the blocks at the peak and at out-of-memory, and their holders.
//
// Holders are told by size, stream and server, not by source line: the preload does not know the program's
// source.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "allocator/preload/events.h"
#include "forebay/memory_snapshot.h"
#include "runtime/command/page/report_page.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {

// Blocks of one size class, stream and server.
struct HistoryHolder {
  std::uint64_t least_bytes = 0;  // The class: a power of two, and less than twice that.
  std::uint16_t stream = 0;
  PreloadServer server = PreloadServer::kArena;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
};
// "1.00 MiB to 2.00 MiB each, stream 3, the arena".
std::string holder_text(const HistoryHolder& holder);
// Largest first.
std::vector<HistoryHolder> holders_of(const std::vector<PageBlock>& blocks);

struct ProcessHistory {
  PreloadDeviceFigures figures;  // Exact, even if events were dropped.
  std::uint64_t start_us = 0;    // Start of the log, since the epoch.
  // Counts of the process, over all its devices.
  std::uint64_t dropped_events = 0;
  std::uint64_t untold_blocks = 0;
  // This device's blocks and events, in order.
  std::vector<PreloadBlock> live_before;  // Before the first event that is kept.
  std::vector<PreloadEvent> events;
  // --- computed ---
  std::uint64_t peak_requested_bytes = 0;  // Among the kept events.
  std::vector<PagePoint> points;           // At most a few ten thousand; each keeps the peak of its events.
  // At the peak, at the first and the last out-of-memory if there was one, and at the end.
  std::vector<PageMoment> moments;
  std::uint64_t untracked_count = 0;  // Allocations by calls that have no visible free.
  std::uint64_t untracked_bytes = 0;
  // The most that the baseline caching allocator would have held for the same requests.
  std::optional<std::uint64_t> baseline_reserved_bytes;

  const PageMoment* moment(const std::string& name) const;
};
inline constexpr char kPeakMoment[] = "at the peak";
inline constexpr char kFirstRefusalMoment[] = "at the first out-of-memory";
inline constexpr char kLastRefusalMoment[] = "at the last out-of-memory";
inline constexpr char kEndMoment[] = "at the end";

// The free pieces in the arena's chunks that contain these blocks, as free blocks. Chunks without any block
// are left out: their addresses are not known.
std::vector<PageBlock> free_pieces(const std::vector<PageBlock>& blocks, const PreloadDeviceFigures& figures);

// One for each device. Cost: a replay of the events, and one by the baseline allocator on a model device.
std::vector<ProcessHistory> process_histories(const PreloadEventLog& log);

// The allocations and frees as a trace, without refused requests and untracked allocations.
AllocationTrace history_trace(const ProcessHistory& history);

// The beginning of every text trace that forebay writes.
inline constexpr char kHistoryTraceBeginning[] = "# allocations of ";

// Writes the same as a text trace, which `forebay replay` reads. `title` is part of its first line. Errors:
// kIoError.
Status write_history_trace(const ProcessHistory& history, const std::string& title, int file);

// A snapshot of the blocks when the log was read, with the events, for PyTorch's memory visualiser. Blocks of
// the arena lie in segments of whole chunks; chunks without a block are not shown. The snapshot's settings
// name `forebay run` and the mode.
MemorySnapshot history_snapshot(const std::vector<ProcessHistory>& histories, PreloadMode mode);
// The keys and values of these settings.
inline constexpr char kSnapshotAllocatorSetting[] = "allocator";
inline constexpr char kSnapshotRunAllocator[] = "forebay run";
inline constexpr char kSnapshotModeSetting[] = "mode";
inline constexpr char kSnapshotObserveMode[] = "observe";

}  // namespace forebay
