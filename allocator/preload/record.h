// PreloadRecord: counts of the device memory that a process under the preload allocates and frees. The
// process maps the file and counts in it. `forebay run` reads it at any time, also after the process was
// killed: nothing is written at the end of the process, and no code runs in an exit handler.
//
// It is not a trace (events.h). It holds counts, and the reason of the first problem.
//
// Private to forebay: the layout is that of one build.
// Threads: any thread may add to the counters. A text is written once, by one thread, before its flag.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "forebay/descriptor.h"
#include "forebay/status.h"

namespace forebay {

// The environment of a process under the preload. FOREBAY_PRELOAD names one of the modes below; unset: arena.
// FOREBAY_PRELOAD_RECORDS is a directory for records; unset: no record is kept.
inline constexpr char kPreloadModeVariable[] = "FOREBAY_PRELOAD";
inline constexpr char kPreloadRecordsVariable[] = "FOREBAY_PRELOAD_RECORDS";
// The most device memory to use, in bytes or as "24GiB". The program is told that the device has that much.
inline constexpr char kPreloadMemoryVariable[] = "FOREBAY_MEMORY";
inline constexpr char kPreloadRoomVariable[] = "FOREBAY_DEVICE_ROOM";

enum class PreloadMode : std::uint32_t {
  kOff = 0,      // "off": the driver serves all calls, and nothing is recorded.
  kObserve = 1,  // "observe": the driver serves all calls, and they are recorded.
  kArena = 2,    // "arena": the arena serves all requests that it can.
};

// The server of an allocation: the arena, or the driver for one of these reasons.
enum class PreloadServer : std::uint8_t {
  kArena = 0,
  kObserved,       // The mode is observe.
  kCaptured,       // Allocated on a stream that is being captured: the graph owns it.
  kOtherPool,      // From a memory pool that the program made.
  kOtherContext,   // In a context of cuCtxCreate, with streams and events apart from the primary context's.
  kPitched,        // cuMemAllocPitch.
  kManaged,        // cuMemAllocManaged.
  kVirtualMemory,  // cuMemCreate: the program maps memory itself, as PyTorch's expandable segments do.
  kUnavailable,    // The arena could not be made, or failed; PreloadRecord::problem says why.
};
inline constexpr std::size_t kPreloadServerCount = 9;
// For messages, such as "from a memory pool of the program's own".
const char* preload_server_text(PreloadServer server) noexcept;

struct PreloadCount {
  std::atomic<std::uint64_t> allocations;
  std::atomic<std::uint64_t> bytes;  // As requested.
};

// A text that is written once.
struct PreloadText {
  std::atomic<std::uint32_t> state;  // 0: empty, 1: being written, 2: complete.
  char text[1020];
};

inline constexpr std::uint64_t kPreloadRecordMagic = 0x3144524F43455246;  // "FRECORD1"
// The file is this structure, as it is in memory.
struct PreloadRecord {
  std::uint64_t magic;
  std::uint32_t bytes;  // Size of the structure.
  PreloadMode mode;
  std::int32_t process;
  std::int32_t parent;
  std::int32_t rank;  // From the launcher (RANK, SLURM_PROCID and the like); -1: not known.
  // The reader adds one to ask the arenas to give unused memory back.
  std::atomic<std::uint32_t> trim_requests;
  std::atomic<std::uint32_t> trims;          // The latest request that was carried out.
  std::atomic<std::uint64_t> trimmed_bytes;  // Given back for all requests.
  char program[256];                         // The command line, cut if it is too long.

  PreloadCount served[kPreloadServerCount];  // Allocations that succeeded, by server.
  std::atomic<std::uint64_t> refused;        // Allocations that ended with out-of-memory.
  // Frees of addresses that were not seen to be allocated: the process allocates past the hook.
  std::atomic<std::uint64_t> unknown_frees;
  // Blocks that the arena serves, over all devices.
  std::atomic<std::uint64_t> live_bytes;
  std::atomic<std::uint64_t> peak_live_bytes;

  PreloadText problem;  // The first problem, in a sentence.
  PreloadText around;   // The libraries that reach the driver past the hook.
  PreloadText events;   // The name of the events file in the same directory; empty: none is kept.
};

// A file of the preload. It is read and not mapped: another user may make it shorter at any moment, and
// access to a mapping would then end this process (SIGBUS).
class PreloadFile {
 public:
  explicit PreloadFile(const std::string& path, bool writable = false);

  const internal::Descriptor& descriptor() const noexcept { return file_; }
  int error() const noexcept { return error_; }            // 0, or the errno for which it cannot be read.
  std::uint64_t bytes() const noexcept { return bytes_; }  // The size of the file when it was opened.
  // False if the file does not have all of these bytes any more, or they cannot be read.
  bool read(std::uint64_t offset, void* target, std::size_t bytes) const noexcept;

 private:
  internal::Descriptor file_;
  int error_ = 0;
  std::uint64_t bytes_ = 0;
};

// The record of this process. It is mapped from a new file if FOREBAY_PRELOAD_RECORDS names a directory, else
// plain memory. The first call makes it; it is never released.
PreloadRecord& preload_record_of_process(PreloadMode mode) noexcept;

// Makes a file of that many bytes in the directory, named "PROCESS-XXXXXX" and the suffix, readable for other
// users. Returns its descriptor and sets `path`. On failure -1, with the reason in errno (EFBIG: `ulimit
// -f`).
int make_preload_file(const char* directory, const char* suffix, std::size_t bytes, std::string* path);

// Writes `text` if the target is still empty.
void set_preload_text(PreloadText& target, const std::string& text) noexcept;

// A copy of a record, made when its file was read.
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
  std::string events;  // The path of the events file; empty: none is kept.
  std::uint32_t trims = 0;
  std::uint64_t trimmed_bytes = 0;
};

// A file that has the name of a record and could not be read.
struct PreloadLeftOut {
  std::string path;
  std::string why;
};

// Reads every record in the directory, ordered by process. A file that cannot be read, or is not a record of
// this build, is left out and listed in `left_out`, if given.
// Errors: kIoError when the directory cannot be read.
Result<std::vector<PreloadReport>> read_preload_records(const std::string& directory,
                                                        std::vector<PreloadLeftOut>* left_out = nullptr);

// Asks the process of that record to give unused memory of its arenas back to the device. It does so at its
// next call that allocates, frees or asks how much memory there is.
// Errors: kIoError.
Status request_preload_trim(const std::string& record_path);

}  // namespace forebay
