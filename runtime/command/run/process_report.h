// The reports of `forebay run --report`, in text and in JSON: one of each process, and one of the whole run.
#pragma once

#include <string>
#include <vector>

#include "allocator/preload/record.h"
#include "runtime/command/page/report_page.h"
#include "runtime/command/repeated_lines.h"
#include "runtime/command/run/process_history.h"

namespace forebay {

// A process of a run, at the moment when its record was read.
struct ProcessReport {
  PreloadReport record;
  std::vector<ProcessHistory> histories;  // By device.
  std::string events_problem;             // The reason why there are no histories; empty: no problem.

  // "rank 3, process 1234", "process 1234".
  std::string name() const;
};

struct RunStory {
  std::string command;
  PreloadMode mode = PreloadMode::kArena;
  // "the run goes on", "the command has ended with 137": when this was written.
  std::string state;
  std::vector<ProcessReport> processes;
  // Files of records that were not read and files of the report that could not be written, with the reasons.
  std::vector<RepeatedLine> left_out;
  std::vector<RepeatedLine> not_written;
};

// Reads the events that belong to a record.
ProcessReport read_process(PreloadReport record);

std::string process_text(const ProcessReport& process);
std::string process_json(const ProcessReport& process);
// Lines about missing parts of the report: processes without events, files left out or not written.
std::vector<std::string> missing_lines(const RunStory& story);
// The worst processes first: processes that ran out of memory, then by held minus requested bytes, then
// processes without events.
std::string story_text(const RunStory& story);
std::string story_json(const RunStory& story);
ReportPage story_page(const RunStory& story);
// The page's part about one history. The caller adds the name, the process and the mode.
PageProcess history_page(const ProcessHistory& history);
// "rank 3, process 1234, cuda:0: ..."; empty if no process has allocated.
std::string worst_line(const RunStory& story);

}  // namespace forebay
