// AllocationTrace: the allocations and frees of a process, in order, from any kind of recording. Three kinds
// of file are read (each parser has a file of its own): forebay's text traces, PyTorch's memory snapshots and
// RMM's CSV logs. They are told apart by their content.
//
// A trace keeps the order of calls and no times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// Bounds of a file that is read. Smaller ones refuse real recordings; larger ones let a damaged file take all
// memory of the machine.
inline constexpr std::size_t kTraceFileLimit = std::size_t{2} << 30;  // Bytes of a file.
inline constexpr std::uint64_t kTraceBlockLimit = std::uint64_t{1}
                                                  << 46;  // Bytes of a block, and of all live.
inline constexpr std::size_t kTraceEventLimit = std::size_t{1} << 26;
inline constexpr std::uint32_t kTraceStreamLimit = 256;  // Streams told apart; the rest count as the last.

struct TraceBlock {
  std::uint64_t bytes = 0;   // As requested, not rounded.
  std::uint32_t stream = 0;  // Dense, from 0 in order of appearance.
  std::uint32_t holder = 0;  // Into AllocationTrace::holders.
  bool failed = false;       // The request failed when recorded; a replay makes it and frees it at once.
};

struct TraceEvent {
  std::uint32_t block =
      0;  // Into AllocationTrace::blocks. Each block is allocated once and freed at most once.
  std::uint32_t stream = 0;  // On which it is freed; for an allocation the block's.
  bool is_free = false;
};

// The final state of the recorded allocator, if the file contains it.
struct RecordedState {
  std::uint64_t reserved_bytes = 0;      // Taken from the device.
  std::uint64_t live_bytes = 0;          // In blocks, rounded as that allocator does.
  std::uint64_t requested_bytes = 0;     // In the same blocks, as requested.
  std::uint64_t pending_bytes = 0;       // Freed, but waiting for a stream.
  std::uint64_t largest_free_bytes = 0;  // The largest free piece of the reserved memory.
};

// A request that failed when it was recorded.
struct RecordedFailure {
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> device_free_bytes;  // Free memory of the device at that moment.
  std::size_t event = 0;                           // Index of its allocation in AllocationTrace::events.
};

// The recorded allocator, if the file names it. The advice depends on it.
enum class TraceOrigin : std::uint8_t {
  kUnknown,
  kPyTorch,
  kRun,          // `forebay run`: the arena.
  kRunObserved,  // `forebay run --observe`: the driver.
};

struct AllocationTrace {
  std::string name;    // The file, and the device if the file has several.
  std::string format;  // "text trace", "PyTorch memory snapshot", "snapshot of forebay run", "RMM log".
  TraceOrigin origin = TraceOrigin::kUnknown;
  std::vector<TraceBlock> blocks;
  std::vector<TraceEvent> events;
  std::size_t warm_event_count =
      0;  // The first events: blocks that were live before the recording, in address order.
  std::uint32_t stream_count = 0;
  std::vector<std::string> holders{""};  // "train.py:12 forward"; 0 is "not known".
  std::optional<RecordedState> state;
  std::optional<RecordedFailure> failure;  // The last one.
  std::vector<std::string> notes;          // Oddities of the file and how they were interpreted, with counts.

  // The most requested bytes that were live at one time.
  std::uint64_t peak_requested_bytes() const;
  // The event after which that peak is first reached.
  std::size_t peak_event() const;
};

// Reads a file; one trace per device in it. Errors: kIoError; kInvalidArgument for a file that is none of the
// three kinds or is damaged, with the line or the byte offset of the damage.
Result<std::vector<AllocationTrace>> read_allocation_traces(const std::string& path);

// The same from memory. `name` is for messages.
Result<std::vector<AllocationTrace>> parse_allocation_traces(std::string_view text, const std::string& name);

// Builds a trace event by event and refuses contradictory events. Ids are the file's own (numbers,
// addresses); an id may be used again after its block is freed.
class TraceBuilder {
 public:
  enum class Outcome : std::uint8_t { kTaken, kIsLive, kUnknown, kTooLarge, kTooMany };

  // kIsLive: a live block has that id. kTooLarge: the block, or all live ones, exceed kTraceBlockLimit.
  Outcome allocate(std::uint64_t id, std::uint64_t bytes, std::uint64_t stream, std::uint32_t holder = 0);
  // kUnknown: no live block has that id. Without a stream: the block's own.
  Outcome free(std::uint64_t id, std::optional<std::uint64_t> stream = std::nullopt);
  // A request that failed. It is recorded as allocated and freed at once, so that a replay makes it too.
  Outcome fail(std::uint64_t bytes, std::uint64_t stream, std::uint32_t holder,
               std::optional<std::uint64_t> device_free_bytes);
  bool is_live(std::uint64_t id) const { return live_.contains(id); }
  std::size_t live_count() const { return live_.size(); }
  // Everything so far was live before the recording.
  void end_warm() { trace_.warm_event_count = trace_.events.size(); }
  // The index of this name among the holders.
  std::uint32_t holder(std::string name);

  AllocationTrace& trace() { return trace_; }
  AllocationTrace finish();

 private:
  std::uint32_t dense_stream(std::uint64_t stream);

  AllocationTrace trace_;
  std::unordered_map<std::uint64_t, std::uint32_t> live_;  // Id to block.
  std::unordered_map<std::uint64_t, std::uint32_t> streams_;
  std::unordered_map<std::string, std::uint32_t> holder_indices_;
  std::uint64_t live_bytes_ = 0;
};

// "block 7 is live already; ..." for messages: the meaning of the outcome, and a remedy.
std::string describe_outcome(TraceBuilder::Outcome outcome, const std::string& id, std::uint64_t bytes);

// The lines of a text, one after another, without their ends (LF or CRLF).
class LineReader {
 public:
  explicit LineReader(std::string_view text) : rest_(text) {}
  // False at the end.
  bool next(std::string_view* line);
  std::size_t number() const { return number_; }  // Number of the current line, from 1.

 private:
  std::string_view rest_;
  std::size_t number_ = 0;
};

// Reads all of `text` as a number of that base; false for an empty one, a sign, other letters, or too large.
bool parse_number(std::string_view text, int base, std::uint64_t* value);

// The beginning of a line for a message: at most 40 characters, unprintable ones shown as '?'.
std::string quote_text(std::string_view text);

}  // namespace forebay
