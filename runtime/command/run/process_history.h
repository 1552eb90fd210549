// ProcessHistory: what a process under the preload did on one device, worked out from its events: how much
// was asked for and held over time, which blocks there were at the peak and at out-of-memory, and who held
// them.
//
// What it is not: attributed to source lines. Below the driver nothing is known of the program's own; holders
// are told by size, stream and server.
#pragma once

#include <cstddef>
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
  PreloadDeviceFigures figures;  // Exact, whatever was dropped.
  std::uint64_t start_us = 0;    // Of the log, since the epoch.
  // Of the process, over all its devices.
  std::uint64_t dropped_events = 0;
  std::uint64_t untold_blocks = 0;
  // Of this device, in order.
  std::vector<PreloadBlock> live_before;  // Before the first event that is kept.
  std::vector<PreloadEvent> events;
  // --- worked out ---
  std::uint64_t peak_requested_bytes = 0;  // Among the events that are kept.
  std::vector<PagePoint> points;           // At most a few ten thousand: the peaks of what they stand for.
  // At the peak, at the first and the last out-of-memory, and at the end; those that there were.
  std::vector<PageMoment> moments;
  std::uint64_t untracked_count = 0;  // Allocated in a way whose free is not seen.
  std::uint64_t untracked_bytes = 0;
  // The most that the baseline caching allocator would have held for the same requests.
  std::optional<std::uint64_t> baseline_reserved_bytes;

  const PageMoment* moment(const std::string& name) const;
};
inline constexpr char kPeakMoment[] = "at the peak";
inline constexpr char kFirstRefusalMoment[] = "at the first out-of-memory";
inline constexpr char kLastRefusalMoment[] = "at the last out-of-memory";
inline constexpr char kEndMoment[] = "at the end";

// What is free in the arena's chunks that these blocks lie in, as free blocks. Chunks without any block are
// held too, but where they are is not known.
std::vector<PageBlock> free_pieces(const std::vector<PageBlock>& blocks, const PreloadDeviceFigures& figures);

// One for each device. Cost: a replay of the events, and one by the baseline allocator on a model device.
std::vector<ProcessHistory> process_histories(const PreloadEventLog& log);

// What was asked for and freed, as a trace: refused requests and what is not tracked are left out.
AllocationTrace history_trace(const ProcessHistory& history);

// What every text trace of ours begins with.
inline constexpr char kHistoryTraceBeginning[] = "# allocations of ";

// The same as a text trace, which `forebay replay` reads. `title`: said in its first line. Errors: kIoError.
Status write_history_trace(const ProcessHistory& history, const std::string& title, int file);

// As things stood when the log was read, with the events, for PyTorch's memory visualiser. Blocks of the
// arena stand in segments of whole chunks; memory that it held without a block in it is not shown. Its
// settings say that it is `forebay run`'s, and the mode.
MemorySnapshot history_snapshot(const std::vector<ProcessHistory>& histories, PreloadMode mode);
// Those settings.
inline constexpr char kSnapshotAllocatorSetting[] = "allocator";
inline constexpr char kSnapshotRunAllocator[] = "forebay run";
inline constexpr char kSnapshotModeSetting[] = "mode";
inline constexpr char kSnapshotObserveMode[] = "observe";

}  // namespace forebay
