// What `forebay run --report` says of a process, in text and in JSON, and of all processes of a run.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "allocator/preload/record.h"
#include "runtime/command/page/report_page.h"
#include "runtime/command/repeated_lines.h"
#include "runtime/command/run/process_history.h"

namespace forebay {

// A process of a run, as it was when it was looked at.
struct ProcessReport {
  PreloadReport record;
  std::vector<ProcessHistory> histories;  // By device.
  std::string events_problem;             // Why there are no histories; empty: nothing is wrong.

  // "rank 3, process 1234", "process 1234".
  std::string name() const;
};

struct RunStory {
  std::string command;
  PreloadMode mode = PreloadMode::kArena;
  // "the run goes on", "the command has ended with 137": when this was written.
  std::string state;
  std::vector<ProcessReport> processes;
  // Files of records that were not read, and files of the report that could not be written, and why.
  std::vector<RepeatedLine> left_out;
  std::vector<RepeatedLine> not_written;
};

// Reads the events beside a record.
ProcessReport read_process(PreloadReport record);

std::string process_text(const ProcessReport& process);
std::string process_json(const ProcessReport& process);
// What is missing of what there was to tell: processes without events, files left out or not written.
std::vector<std::string> missing_lines(const RunStory& story);
// Names the worst first: those that ran out of memory, then by what they held beyond what they asked for;
// then those of which there are only counts.
std::string story_text(const RunStory& story);
std::string story_json(const RunStory& story);
ReportPage story_page(const RunStory& story);
// "rank 3, process 1234, cuda:0: ..."; empty without any process that has allocated.
std::string worst_line(const RunStory& story);

}  // namespace forebay
