// The web page of a run's report: the requested and reserved memory of each process of `forebay run` over
// time, the blocks at the peak and when memory ran out, and the fragmentation. It is one HTML file that needs
// no network and no other file.
//
// It does not read records: the caller fills the structs below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "allocator/preload/record.h"

namespace forebay {

// The kind of a point of the timeline.
enum class PageEvent : std::uint8_t {
  kAllocation,
  kFree,
  kOutOfMemory,  // A refused request; the point's other bytes are those that stayed.
  kOther,        // A change of the reserved bytes.
};

// The state after an event, in the order of the events.
struct PagePoint {
  // Since the process's first event. All 0: not known; the page counts the points. With
  // PageProcess::counts_events it is the number of the event.
  std::uint64_t time_ns = 0;
  std::uint64_t requested_bytes = 0;  // Live, as requested.
  std::uint64_t reserved_bytes = 0;   // Taken from the device.
  std::uint64_t bytes = 0;            // Requested or freed by this event.
  PageEvent event = PageEvent::kAllocation;
};

enum class PageBlockState : std::uint8_t {
  kLive,
  kPending,  // Freed, and waiting for its stream.
  kFree,     // Reserved, and in no block.
};

struct PageBlock {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  // Its number in the events (allocator/preload/events.h), or a handle's value. Ignored for a free block.
  std::uint64_t stream = 0;
  std::uint64_t order = 0;   // Number of the allocation in the process, from 1; 0: not known.
  std::uint32_t holder = 0;  // Into PageMoment::holders.
  PreloadServer server = PreloadServer::kArena;
  PageBlockState state = PageBlockState::kLive;
};

// The blocks at one moment. Free pieces are blocks too; addresses that no block covers are not drawn.
struct PageMoment {
  std::string name;  // "at the peak", "at the first out-of-memory".
  std::uint64_t time_ns = 0;
  std::uint64_t asked_bytes = 0;  // Size of the refused request; 0: none was refused.
  std::uint64_t requested_bytes = 0;
  std::uint64_t reserved_bytes = 0;
  std::vector<PageBlock> blocks;         // In any order.
  std::vector<std::string> holders{""};  // Source lines, or whatever names a holder; 0 is "not known".
};

// A holder of memory at the peak: a stream, a size, a source line.
struct PageHolder {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;  // Blocks.
};

// A figure that has no field of its own. The value includes its unit.
struct PageFigure {
  std::string name;
  std::string value;
};

// One per process and device.
struct PageProcess {
  std::string name;            // The command, or "rank 3".
  std::optional<int> process;  // Its number.
  std::optional<int> device;
  std::string mode;  // "arena, tensors".
  std::uint64_t peak_requested_bytes = 0;
  std::uint64_t peak_reserved_bytes = 0;
  std::uint64_t out_of_memory_count = 0;
  std::optional<std::uint64_t> capacity_bytes;           // Limit of the process's device memory.
  std::optional<std::uint64_t> baseline_reserved_bytes;  // The same requests with a caching allocator.
  std::vector<PageFigure> figures;
  std::vector<std::string> lines;  // Fragmentation and its reasons, a sentence or two each.
  std::vector<PagePoint> points;   // Any number; the page samples them and keeps the peaks.
  bool counts_events = false;      // No times are known: PagePoint::time_ns counts events.
  std::vector<PageMoment> moments;
  std::vector<PageHolder> holders;  // Largest first.

  // The peak of reserved minus the peak of requested bytes.
  std::uint64_t unused_bytes() const;
  // unused_bytes() / the peak of reserved bytes; 0 if nothing was reserved.
  double fragmentation() const;
};

struct ReportPage {
  std::string title;
  std::vector<std::string> lines;  // Under the title.
  std::vector<PageProcess> processes;
};

// Indices of the processes, the worst first: processes that ran out of memory, then by unused bytes, then by
// peak.
std::vector<std::size_t> worst_first(const std::vector<PageProcess>& processes);

// The page, in UTF-8. Names and lines may hold any text: they are escaped. After the first kPageProcesses of
// worst_first, a process is only a line of the table.
inline constexpr std::size_t kPageProcesses = 16;
std::string report_page(const ReportPage& page);

}  // namespace forebay
