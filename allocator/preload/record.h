// PreloadRecord: what a process under the preload did with device memory, in a file that the process maps and
// counts in. Whoever started it reads the file whenever it likes, also after the process was killed: nothing
// is written at the end, and no code runs in an exit handler.
//
// What it is not: a trace (events.h). It holds counts, and the first reason of whatever did not go as
// wished.
//
// Threads: counters may be added to from any thread; texts are written once, by one thread, before their
// flag.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/status.h"

namespace forebay {

// The environment of a process under the preload. FOREBAY_PRELOAD is one of the modes below by name; without
// it: arena. FOREBAY_PRELOAD_RECORDS is a directory for records; without it none is kept.
inline constexpr char kPreloadModeVariable[] = "FOREBAY_PRELOAD";
inline constexpr char kPreloadRecordsVariable[] = "FOREBAY_PRELOAD_RECORDS";
// Most device memory to use, in bytes or as "24GiB": what the program is told the device has.
inline constexpr char kPreloadMemoryVariable[] = "FOREBAY_MEMORY";

enum class PreloadMode : std::uint32_t {
  kOff = 0,      // "off": everything goes to the driver, and nothing is recorded.
  kObserve = 1,  // "observe": everything goes to the driver, and is recorded.
  kArena = 2,    // "arena": the arena serves what it can.
};

// Who served an allocation, and why it was not the arena.
enum class PreloadServer : std::uint8_t {
  kArena = 0,
  kObserved,       // The mode is observe.
  kCaptured,       // Allocated on a stream that is being captured: it belongs to the graph.
  kOtherPool,      // From a memory pool of the program's own.
  kOtherContext,   // In a context made by cuCtxCreate, whose streams and events are apart from the device's.
  kPitched,        // cuMemAllocPitch.
  kManaged,        // cuMemAllocManaged.
  kVirtualMemory,  // cuMemCreate: the program maps memory itself, as PyTorch's expandable segments do.
  kUnavailable,    // The arena could not be made, or failed; the record's problem says why.
};
inline constexpr std::size_t kPreloadServerCount = 9;
// "a memory pool of the program's own", for messages.
const char* preload_server_text(PreloadServer server) noexcept;

struct PreloadCount {
  std::atomic<std::uint64_t> allocations;
  std::atomic<std::uint64_t> bytes;  // As asked for.
};

// A text that is written once.
struct PreloadText {
  std::atomic<std::uint32_t> state;  // 0: empty, 1: being written, 2: there.
  char text[1020];
};

inline constexpr std::uint64_t kPreloadRecordMagic = 0x3144524F43455246;  // "FRECORD1"
// The layout of the file: the structure as it is in memory.
struct PreloadRecord {
  std::uint64_t magic;
  std::uint32_t bytes;  // Of the structure.
  PreloadMode mode;
  std::int32_t process;
  std::int32_t parent;
  std::int32_t rank;  // As the launcher has told it (RANK, SLURM_PROCID and the like); -1: not told.
  // Counted up by whoever reads, when the arenas are to give back what they keep and do not use.
  std::atomic<std::uint32_t> trim_requests;
  std::atomic<std::uint32_t> trims;          // The last request that was done.
  std::atomic<std::uint64_t> trimmed_bytes;  // Given back for all of them.
  char program[256];  // As the process was started, with its arguments, cut where it is too long.

  PreloadCount served[kPreloadServerCount];  // Allocations that succeeded, by server.
  std::atomic<std::uint64_t> refused;        // Allocations that ended with out-of-memory.
  // Frees of addresses that nobody was seen to allocate: the process allocates around the hook.
  std::atomic<std::uint64_t> unknown_frees;
  // Of what the arena serves, over all devices.
  std::atomic<std::uint64_t> live_bytes;
  std::atomic<std::uint64_t> peak_live_bytes;

  PreloadText problem;  // Why something could not be served, in a sentence.
  PreloadText around;   // Which libraries reach the driver past the hook.
  PreloadText events;   // The name of the file of events, in the same directory; empty: none is kept.

  std::uint64_t allocation_count() const noexcept;
  std::uint64_t allocation_bytes() const noexcept;
};

// The record of this process: mapped from a new file where FOREBAY_PRELOAD_RECORDS names a directory, plain
// memory otherwise. Made by the first call, never given back.
PreloadRecord& preload_record_of_process(PreloadMode mode) noexcept;

// A new file of this process in the directory, "PROCESS-XXXXXX" and the suffix, of that many bytes, readable
// for others; -1, with the reason in errno, when there can be none (EFBIG: beyond `ulimit -f`). `path`: its
// name.
int make_preload_file(const char* directory, const char* suffix, std::size_t bytes, std::string* path);

// Writes `text` if nothing is there yet.
void set_preload_text(PreloadText& target, const std::string& text) noexcept;

// A copy of what a file of records said when it was read.
struct PreloadReport {
  std::string path;
  PreloadMode mode = PreloadMode::kOff;
  int process = 0;
  int parent = 0;
  int rank = -1;
  std::string program;
  std::uint64_t allocations[kPreloadServerCount] = {};
  std::uint64_t bytes[kPreloadServerCount] = {};
  std::uint64_t refused = 0;
  std::uint64_t unknown_frees = 0;
  std::uint64_t live_bytes = 0;
  std::uint64_t peak_live_bytes = 0;
  std::string problem;
  std::string around;
  std::string events;  // The path of the file of events; empty: none is kept.
  std::uint32_t trims = 0;
  std::uint64_t trimmed_bytes = 0;
};

// A file that is named as a record and was not read.
struct PreloadLeftOut {
  std::string path;
  std::string why;
};

// Every record in the directory, by process. Errors: kIoError when the directory cannot be read. A file that
// cannot be read, or is no record of this layout, is left out and told of in `left_out`, where that is given.
Result<std::vector<PreloadReport>> read_preload_records(const std::string& directory,
                                                        std::vector<PreloadLeftOut>* left_out = nullptr);

// Asks the process of that record to have its arenas give back what they keep and do not use; it does so at
// its next call that allocates, frees or asks how much there is. Errors: kIoError.
Status request_preload_trim(const std::string& record_path);

}  // namespace forebay
