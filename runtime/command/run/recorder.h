// RunRecorder: writes the reports, traces and snapshots of `forebay run` from the records of its processes.
// The processes themselves write no report, so that it makes no difference how they end.
//
// Threads: one. It belongs to the loop that waits for the command.
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
  std::string snapshot;  // A file; empty: none.
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

  // Makes the directory of the report. Errors: kInvalidArgument if it already contains a report; kIoError.
  Status open();

  // Writes all requested outputs, over the earlier ones, and returns lines for the user. `state`: "the run
  // goes on", "the command has ended with 0". Cost: reads all events.
  std::vector<std::string> write(const std::string& state);

  // Whether the last write() has written all requested outputs.
  bool is_complete() const { return is_complete_; }

  // To be called regularly while the command runs. Writes the outputs when a process ran out of memory, and
  // returns lines for the user, also about memory that was given back.
  std::vector<std::string> poll();

  // Asks every process to give back the unused memory of its arenas.
  std::vector<std::string> request_trim();

 private:
  using Clock = std::chrono::steady_clock;

  // The last seen state of a process's record.
  struct Seen {
    std::uint64_t refused = 0;
    std::uint32_t trims = 0;
    std::uint64_t trimmed_bytes = 0;
    bool was_told = false;  // The user was told that it ran out of memory.
  };

  Status check_files() const;
  Status write_report_file(const std::string& name, const std::string& text);
  // Returns lines for the user.
  std::vector<std::string> write_report(RunStory* story);
  std::vector<std::string> without_records(const std::string& state, const std::string& problem);
  void restate_report(const std::string& state);
  // The line about a written file; `kind`: "report", "trace".
  RepeatedLine outcome_of(const Status& written, const std::string& kind, const std::string& path);
  std::vector<std::string> write_traces(const RunStory& story);
  std::vector<std::string> write_snapshots(const RunStory& story);
  void remove_stale(std::set<std::string> now, std::set<std::string>* before);

  const Options options_;
  std::map<std::string, Seen> seen_;
  bool has_new_refusals_ = false;
  bool is_complete_ = true;
  Clock::time_point next_write_{};
  std::set<std::string> report_;  // The files that were written, in the directory.
  std::set<std::string> traces_;
  std::set<std::string> snapshots_;
};

// The line about a file that was left out.
RepeatedLine left_out_line(const PreloadLeftOut& one);

// `file` with `middle` before its suffix: "a/trace.txt" and "12" give "a/trace.12.txt". /dev/stdout and other
// streams stay unchanged.
std::string with_middle(const std::string& file, const std::string& middle);

}  // namespace forebay
