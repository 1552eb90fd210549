#include "runtime/command/run/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

#include "forebay/memory_snapshot.h"
#include "forebay/regular_file.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/run/output_file.h"

namespace forebay {
namespace {

// The beginning of every snapshot of write_memory_snapshot: a dictionary and its first key.
constexpr char kSnapshotBytes[] = "\x80\x02}X\x08\0\0\0segments";
constexpr std::string_view kSnapshotBeginning(kSnapshotBytes, sizeof kSnapshotBytes - 1);
// A report at out-of-memory may take its time again only after this many times as long: a program that is
// refused memory all the time, and goes on, is not to keep a core busy with reports.
constexpr int kWritePauses = 10;
constexpr std::chrono::seconds kLeastPause{1};
constexpr std::uint64_t kMostSummaryBytes = 64 << 20;

// The part of a file's name that names the process; a second process with the same number gets a suffix.
std::string file_name(const ProcessReport& process, std::map<int, int>* uses) {
  const PreloadReport& record = process.record;
  std::string name = "process-" + std::to_string(record.process);
  if (record.rank >= 0) name = "rank-" + std::to_string(record.rank) + "-" + name;
  const int use = ++(*uses)[record.process];
  return use == 1 ? name : name + "-" + std::to_string(use);
}

}  // namespace

RepeatedLine left_out_line(const PreloadLeftOut& one) {
  return {one.path + " is left out: " + one.why, one.path};
}

std::string with_middle(const std::string& file, const std::string& middle) {
  if (is_run_stream(file)) return file;
  const std::size_t slash = file.find_last_of('/');
  const std::size_t name = slash == std::string::npos ? 0 : slash + 1;
  const std::size_t dot = file.find_last_of('.');
  const std::size_t at = dot == std::string::npos || dot <= name ? file.size() : dot;
  return file.substr(0, at) + "." + middle + file.substr(at);
}

Status RunRecorder::open() {
  const RunOutputs& outputs = options_.outputs;
  if (!outputs.report.empty()) FOREBAY_RETURN_IF_ERROR(make_report_directory(outputs.report));
  // Better now than after hours.
  FOREBAY_RETURN_IF_ERROR(check_files());
  if (!outputs.report.empty()) {
    FOREBAY_RETURN_IF_ERROR(write_report_file(
        kReportSummary, shown_text(options_.command) + "\nthe run goes on, and nothing was reported yet\n"));
  }
  return {};
}

Status RunRecorder::check_files() const {
  const RunOutputs& outputs = options_.outputs;
  if (!outputs.trace.empty()) {
    FOREBAY_RETURN_IF_ERROR(check_run_file("--trace", outputs.trace, kHistoryTraceBeginning));
  }
  if (!outputs.snapshot.empty()) {
    FOREBAY_RETURN_IF_ERROR(check_run_file("--snapshot", outputs.snapshot, kSnapshotBeginning));
  }
  return check_different_files("--trace", outputs.trace, "--snapshot", outputs.snapshot);
}

std::vector<std::string> RunRecorder::write(const std::string& state) {
  const Clock::time_point begin = Clock::now();
  has_new_refusals_ = false;
  is_complete_ = true;
  RunStory story;
  story.command = options_.command;
  story.mode = options_.mode;
  story.state = state;
  std::vector<PreloadLeftOut> left_out;
  Result<std::vector<PreloadReport>> records = read_preload_records(options_.records_directory, &left_out);
  if (!records.ok()) return without_records(state, records.status().message());
  for (const PreloadLeftOut& one : left_out) story.left_out.push_back(left_out_line(one));
  for (PreloadReport& record : records.value()) {
    seen_[record.path].refused = record.refused;
    story.processes.push_back(read_process(std::move(record)));
  }
  std::vector<std::string> lines = missing_lines(story);
  const auto add = [&](std::vector<std::string> more) {
    std::move(more.begin(), more.end(), std::back_inserter(lines));
  };
  if (!options_.outputs.report.empty()) add(write_report(&story));
  if (!options_.outputs.trace.empty()) add(write_traces(story));
  if (!options_.outputs.snapshot.empty()) add(write_snapshots(story));
  const Clock::time_point end = Clock::now();
  next_write_ = end + std::max<Clock::duration>(kWritePauses * (end - begin), kLeastPause);
  return lines;
}

Status RunRecorder::write_report_file(const std::string& name, const std::string& text) {
  const std::string path = options_.outputs.report + "/" + name;
  FOREBAY_RETURN_IF_ERROR(forebay::write_report_file(path, text, report_.count(name) > 0));
  report_.insert(name);
  return {};
}

// A file that cannot be written takes none of the others with it.
std::vector<std::string> RunRecorder::write_report(RunStory* story) {
  // Somebody may have cleaned up meanwhile; whether it is there now the first file says.
  std::error_code ignored;
  std::filesystem::create_directory(options_.outputs.report, ignored);
  const auto write = [&](const std::string& name, const std::string& text) {
    const Status written = write_report_file(name, text);
    if (!written.ok())
      story->not_written.push_back({written.message(), options_.outputs.report + "/" + name});
    return written.ok();
  };
  std::map<int, int> uses;
  for (const ProcessReport& process : story->processes) {
    const std::string name = file_name(process, &uses);
    write(name + ".txt", process_text(process));
    write(name + ".json", process_json(process));
  }
  const bool has_page = write(kReportPage, report_page(story_page(*story)));
  write(kReportJson, story_json(*story));
  // Last: who finds it finds the rest.
  const bool has_summary = write(kReportSummary, story_text(*story));
  is_complete_ = is_complete_ && story->not_written.empty();
  std::vector<std::string> lines = told_once(story->not_written);
  if (!has_summary) {
    restate_report(story->state +
                   ", and this report could not be written: " + story->not_written.back().text);
    return lines;
  }
  lines.push_back("the report is in " + options_.outputs.report + ": summary.txt" +
                  (has_page ? ", report.html" : ""));
  if (const std::string worst = worst_line(*story); !worst.empty()) lines.push_back("the worst: " + worst);
  return lines;
}

// The records were deleted. Earlier outputs stay.
std::vector<std::string> RunRecorder::without_records(const std::string& state, const std::string& problem) {
  is_complete_ = false;
  if (!options_.outputs.report.empty()) {
    restate_report(state + ", and the records were deleted before, so the rest is older: " + problem);
  }
  return {"nothing more can be reported: " + problem};
}

// Replaces the second line of the report, which states a state that is out of date.
void RunRecorder::restate_report(const std::string& state) {
  const std::string path = options_.outputs.report + "/" + kReportSummary;
  const Result<std::string> text = internal::read_regular_file(path, kMostSummaryBytes);
  if (!text.ok()) return;
  std::istringstream lines(text.value());
  std::string command, old_state;
  if (!std::getline(lines, command) || !std::getline(lines, old_state)) return;
  const std::string rest{std::istreambuf_iterator<char>(lines), {}};
  (void)overwrite_run_text(path, command + "\n" + shown_text(state) + "\n" + rest);
}

RepeatedLine RunRecorder::outcome_of(const Status& written, const std::string& kind,
                                     const std::string& path) {
  is_complete_ = is_complete_ && written.ok();
  return {written.ok() ? kind + ": " + path : written.message(), path};
}

std::vector<std::string> RunRecorder::write_traces(const RunStory& story) {
  struct Trace {
    std::string title;
    std::string middle;
    const ProcessHistory* history;
  };
  std::vector<Trace> traces;
  std::map<int, int> uses;
  for (const ProcessReport& process : story.processes) {
    const std::string name = file_name(process, &uses);
    for (const ProcessHistory& history : process.histories) {
      const std::string device = "cuda" + std::to_string(history.figures.device);
      traces.push_back({process.name() + ", " + device + ": " + process.record.program,
                        process.histories.size() > 1 ? name + "-" + device : name, &history});
    }
  }
  const std::string& file = options_.outputs.trace;
  std::set<std::string> written;
  std::vector<RepeatedLine> outcomes;
  for (const Trace& trace : traces) {
    const std::string path = traces.size() == 1 ? file : with_middle(file, trace.middle);
    Status status = check_run_file("--trace", path, kHistoryTraceBeginning);
    if (status.ok()) {
      status = write_run_file(
          path, [&](int target) { return write_history_trace(*trace.history, trace.title, target); });
    }
    if (status.ok()) written.insert(path);
    outcomes.push_back(outcome_of(status, "trace", path));
  }
  remove_stale(std::move(written), &traces_);
  if (traces.empty()) return {"no trace: no process has recorded allocations"};
  return told_once(outcomes);
}

std::vector<std::string> RunRecorder::write_snapshots(const RunStory& story) {
  const auto count = static_cast<std::size_t>(
      std::count_if(story.processes.begin(), story.processes.end(),
                    [](const ProcessReport& process) { return !process.histories.empty(); }));
  const std::string& file = options_.outputs.snapshot;
  std::set<std::string> written;
  std::vector<RepeatedLine> outcomes;
  std::map<int, int> uses;
  for (const ProcessReport& process : story.processes) {
    const std::string name = file_name(process, &uses);
    if (process.histories.empty()) continue;
    const std::string path = count == 1 ? file : with_middle(file, name);
    Status status = check_run_file("--snapshot", path, kSnapshotBeginning);
    if (status.ok()) {
      status = write_run_file(path, [&](int target) {
        return write_memory_snapshot(history_snapshot(process.histories, process.record.mode), target);
      });
    }
    if (status.ok()) written.insert(path);
    outcomes.push_back(outcome_of(status, "snapshot", path));
  }
  remove_stale(std::move(written), &snapshots_);
  if (count == 0) return {"no snapshot: no process has recorded allocations"};
  return told_once(outcomes);
}

// With one process more, files have other names.
void RunRecorder::remove_stale(std::set<std::string> now, std::set<std::string>* before) {
  for (const std::string& path : *before) {
    if (!now.contains(path) && !is_run_stream(path)) (void)::unlink(path.c_str());
  }
  *before = std::move(now);
}

std::vector<std::string> RunRecorder::poll() {
  const Result<std::vector<PreloadReport>> records = read_preload_records(options_.records_directory);
  if (!records.ok()) return {};
  std::vector<RepeatedLine> news;
  for (const PreloadReport& record : records.value()) {
    Seen& seen = seen_[record.path];
    const std::string name = ProcessReport{.record = record, .histories = {}, .events_problem = {}}.name();
    if (record.trims != seen.trims) {
      news.push_back(
          {name + " has given back " + format_bytes(record.trimmed_bytes - seen.trimmed_bytes), {}});
      seen.trims = record.trims;
      seen.trimmed_bytes = record.trimmed_bytes;
    }
    if (record.refused == seen.refused) continue;
    seen.refused = record.refused;
    has_new_refusals_ = true;
    if (!std::exchange(seen.was_told, true))
      news.push_back({name + " was refused memory (out-of-memory)", {}});
  }
  std::vector<std::string> lines = told_once(news);
  if (has_new_refusals_ && options_.outputs.any() && Clock::now() >= next_write_) {
    for (std::string& line : write("written at out-of-memory; the run goes on")) {
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

std::vector<std::string> RunRecorder::request_trim() {
  const Result<std::vector<PreloadReport>> records = read_preload_records(options_.records_directory);
  if (!records.ok()) return {records.status().message()};
  std::vector<RepeatedLine> failures;
  std::size_t count = 0;
  for (const PreloadReport& record : records.value()) {
    if (const Status asked = request_preload_trim(record.path); !asked.ok()) {
      failures.push_back({asked.message(), record.path});
    } else {
      ++count;
    }
  }
  std::vector<std::string> lines = told_once(failures);
  lines.push_back("asked " + format_count(count, "process", "processes") +
                  " to give back the unused memory of the arena at the next call for memory");
  return lines;
}

}  // namespace forebay
