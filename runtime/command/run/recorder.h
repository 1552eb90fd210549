// RunRecorder: writes what `forebay run` was asked to tell of its processes, from what they have recorded:
// reports, traces and snapshots. The processes themselves write none of it, so that it makes no difference
// how they end.
//
// What it is not: thread-safe. It belongs to the loop that waits for the command.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "allocator/preload/record.h"
#include "forebay/status.h"
#include "runtime/command/run/process_report.h"

namespace forebay {

struct RunOutputs {
  std::string report;    // A directory; empty: none.
  std::string trace;     // A file; empty: none.
  std::string snapshot;  // The same.
  bool any() const { return !report.empty() || !trace.empty() || !snapshot.empty(); }
};

class RunRecorder {
 public:
  struct Options {
    RunOutputs outputs;
    std::string records_directory;
    PreloadMode mode = PreloadMode::kArena;
    std::string command;  // For people.
  };

  explicit RunRecorder(Options options) : options_(std::move(options)) {}

  // Makes the directory of the report. Errors: kInvalidArgument when it has a report already, kIoError.
  Status open();

  // Writes everything that was asked for, over what was written before, and returns what to say about it.
  // `state`: "the run goes on", "the command has ended with 0". Cost: reads all events.
  std::vector<std::string> write(const std::string& state);

  // Whether the last write() has written all that was asked for.
  bool is_complete() const { return is_complete_; }

  // To be called now and then while the command runs: notices that a process ran out of memory, and writes;
  // notices what was given back.
  std::vector<std::string> poll();

  // Asks every process to give back what its arenas keep and do not use.
  std::vector<std::string> request_trim();

 private:
  using Clock = std::chrono::steady_clock;

  // What was seen of a process, by its record.
  struct Seen {
    std::uint64_t refused = 0;
    std::uint32_t trims = 0;
    std::uint64_t trimmed_bytes = 0;
    bool was_told = false;  // That it ran out of memory.
  };

  Status check_files() const;
  // Returns what to say about it.
  std::vector<std::string> write_report(RunStory* story);
  std::vector<std::string> without_records(const std::string& state, const std::string& problem);
  void restate_report(const std::string& state);
  // What to say of a file; `what`: which it is.
  RepeatedLine outcome_of(const Status& written, const std::string& what, const std::string& path);
  std::vector<std::string> write_traces(const RunStory& story);
  std::vector<std::string> write_snapshots(const RunStory& story);
  void remove_stale(std::set<std::string> now, std::set<std::string>* before);

  const Options options_;
  std::map<std::string, Seen> seen_;
  bool has_new_refusals_ = false;
  bool is_complete_ = true;
  Clock::time_point next_write_{};
  std::set<std::string> traces_;  // The files that were written.
  std::set<std::string> snapshots_;
};

// What to say of a file that was left out.
RepeatedLine left_out_line(const PreloadLeftOut& one);

// `file` with `middle` before its suffix: "a/trace.txt" and "12" give "a/trace.12.txt". What is no file
// (/dev/stdout) stays.
std::string with_middle(const std::string& file, const std::string& middle);

}  // namespace forebay
