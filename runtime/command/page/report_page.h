// The web page of a run's report: what each process of `forebay run` asked for and what that took over time,
// which blocks there were at the peak and when memory ran out, and what was fragmented. One HTML file that
// needs nothing but itself: no network, no other file.
//
// What it is not: a reader of records. Whoever has read them fills the structs below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "allocator/preload/record.h"

namespace forebay {

// What happened at a point of the timeline.
enum class PageEvent : std::uint8_t {
  kAllocation,
  kFree,
  kOutOfMemory,  // A request that was refused; the bytes beside it are those that stayed.
  kOther,        // A change of what is reserved.
};

// The state after an event, in the order of the events.
struct PagePoint {
  std::uint64_t time_ns = 0;  // Since the process's first event. All 0: not known; the page counts events.
  std::uint64_t requested_bytes = 0;  // Live, as asked for.
  std::uint64_t reserved_bytes = 0;   // Taken from the device.
  std::uint64_t bytes = 0;            // Of this event: asked for or freed.
  PageEvent event = PageEvent::kAllocation;
};

enum class PageBlockState : std::uint8_t {
  kLive,
  kPending,  // Freed, and waiting for its stream.
  kFree,     // Reserved, and nobody's.
};

struct PageBlock {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  // Its number in the events (allocator/preload/events.h), or a handle's value. Not looked at for a free one.
  std::uint64_t stream = 0;
  std::uint64_t order = 0;  // Which allocation of the process it was, from 1; 0: not known.
  PreloadServer server = PreloadServer::kArena;
  PageBlockState state = PageBlockState::kLive;
};

// The blocks at one moment. Free pieces are given as blocks too; addresses that no block covers are left out
// of the drawing.
struct PageMoment {
  std::string name;  // "at the peak", "at the first out-of-memory".
  std::uint64_t time_ns = 0;
  std::uint64_t asked_bytes = 0;  // By the request that was refused; 0: none was.
  std::uint64_t requested_bytes = 0;
  std::uint64_t reserved_bytes = 0;
  std::vector<PageBlock> blocks;  // In any order.
};

// Who held memory at the peak: a stream, a size, a source line.
struct PageHolder {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;  // Blocks.
};

// A figure that has no field of its own. The value comes with its unit.
struct PageFigure {
  std::string name;
  std::string value;
};

// One per process and device.
struct PageProcess {
  std::string name;  // The command, or "rank 3".
  int process = 0;
  int device = 0;
  std::string mode;  // "arena, tensors".
  std::uint64_t peak_requested_bytes = 0;
  std::uint64_t peak_reserved_bytes = 0;
  std::uint64_t out_of_memory_count = 0;
  std::optional<std::uint64_t> capacity_bytes;           // What the process could have had.
  std::optional<std::uint64_t> baseline_reserved_bytes;  // What a caching allocator would have reserved.
  std::vector<PageFigure> figures;
  std::vector<std::string> lines;  // What is fragmented and why, a sentence or two each.
  std::vector<PagePoint> points;   // Any number; the page keeps the peaks of what it leaves out.
  std::vector<PageMoment> moments;
  std::vector<PageHolder> holders;  // Largest first.

  // Reserved and never asked for: the peaks' difference.
  std::uint64_t unused_bytes() const;
  // The same over what was reserved; 0 when nothing was.
  double fragmentation() const;
};

struct ReportPage {
  std::string title;
  std::vector<std::string> lines;  // Under the title.
  std::vector<PageProcess> processes;
};

// Indices of the processes, the worst first: those that ran out of memory, then by unused bytes, then by
// peak.
std::vector<std::size_t> worst_first(const std::vector<PageProcess>& processes);

// The page, in UTF-8. Names and lines may hold anything: they are shown as text. Beyond the first
// kPageProcesses of worst_first a process is a line of the table and nothing else.
inline constexpr std::size_t kPageProcesses = 16;
std::string report_page(const ReportPage& page);

}  // namespace forebay
