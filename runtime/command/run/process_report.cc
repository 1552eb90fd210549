#include "runtime/command/run/process_report.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/run/summary.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

// Holders listed per moment. More are noise.
constexpr std::size_t kHoldersTold = 12;

void add_line(const std::string& line, std::string* text) {
  *text += shown_text(line) + "\n";
}

// A process on a device, and where it stands in the table.
struct Row {
  const ProcessReport* process = nullptr;
  const ProcessHistory* history = nullptr;
};

std::vector<Row> rows_of(const RunStory& story) {
  std::vector<Row> rows;
  for (const ProcessReport& process : story.processes) {
    for (const ProcessHistory& history : process.histories) rows.push_back({&process, &history});
  }
  return rows;
}

std::string device_name(const ProcessHistory& history) {
  return "cuda:" + std::to_string(history.figures.device);
}

std::uint64_t unused_bytes(const PreloadDeviceFigures& figures) {
  return figures.peak_reserved_bytes - std::min(figures.peak_reserved_bytes, figures.peak_requested_bytes);
}

double fragmentation(const PreloadDeviceFigures& figures) {
  return figures.peak_reserved_bytes == 0
             ? 0
             : static_cast<double>(unused_bytes(figures)) / static_cast<double>(figures.peak_reserved_bytes);
}

std::string percent(double share) {
  return format_text("%.1f %%", 100 * share);
}

std::string seconds(std::uint64_t ns) {
  return format_text("%.3f s", static_cast<double>(ns) / 1e9);
}

const char* mode_text(PreloadMode mode) {
  switch (mode) {
    case PreloadMode::kArena:
      return "arena";
    case PreloadMode::kObserve:
      return "observe";
    case PreloadMode::kOff:
      break;
  }
  return "off";
}

// Lines about missing or inexact parts of a history.
std::vector<std::string> limits_of(const ProcessHistory& history) {
  std::vector<std::string> lines;
  const PreloadDeviceFigures& figures = history.figures;
  if (history.dropped_events != 0) {
    lines.push_back("The bound of events was reached: the " + std::to_string(history.dropped_events) +
                    " oldest of the process were dropped. Peaks and counts are of the whole run; moments, "
                    "holders and the baseline are of the " +
                    std::to_string(history.events.size()) + " that are kept" +
                    (history.peak_requested_bytes < figures.peak_requested_bytes
                         ? ", whose own peak is " + format_bytes(history.peak_requested_bytes)
                         : std::string()) +
                    ".");
  }
  if (history.untold_blocks != 0) {
    lines.push_back("The table of live blocks was full " + std::to_string(history.untold_blocks) +
                    " times: blocks that are older than the events may be missing.");
  }
  if (history.untracked_count != 0) {
    lines.push_back(
        "Mapped by the program itself (cuMemCreate): " + format_count(history.untracked_count, "allocation") +
        ", " + format_bytes(history.untracked_bytes) +
        " in total; their frees are not seen, so no figure includes them.");
  }
  return lines;
}

std::string fragmentation_line(const ProcessHistory& history) {
  const PreloadDeviceFigures& figures = history.figures;
  return "At most " + format_bytes(figures.peak_requested_bytes) + " were asked for at one time, and " +
         format_bytes(figures.peak_reserved_bytes) + " were held: " + format_bytes(unused_bytes(figures)) +
         " (" + percent(fragmentation(figures)) + ") more.";
}

void append_moment(const PageMoment& moment, std::string* text) {
  *text += "  " + moment.name + " (" + seconds(moment.time_ns) + "): ";
  if (moment.asked_bytes != 0) *text += format_bytes(moment.asked_bytes) + " more were asked for; ";
  *text += format_count(moment.blocks.size(), "block") + " of " + format_bytes(moment.requested_bytes) +
           ", " + format_bytes(moment.reserved_bytes) + " held\n";
  const std::vector<HistoryHolder> holders = holders_of(moment.blocks);
  for (std::size_t i = 0; i < std::min(holders.size(), kHoldersTold); ++i) {
    *text += "    " + format_bytes(holders[i].bytes) + " in " + format_count(holders[i].count, "block") +
             " of " + holder_text(holders[i]) + "\n";
  }
  if (holders.size() > kHoldersTold) {
    *text += "    and " + format_count(holders.size() - kHoldersTold, "smaller group") + "\n";
  }
}

Json moment_json(const PageMoment& moment) {
  Json json = {{"name", moment.name},
               {"time_ns", moment.time_ns},
               {"asked_bytes", moment.asked_bytes},
               {"requested_bytes", moment.requested_bytes},
               {"reserved_bytes", moment.reserved_bytes},
               {"block_count", moment.blocks.size()},
               {"holders", Json::array()}};
  for (const HistoryHolder& holder : holders_of(moment.blocks)) {
    json["holders"].push_back({{"least_block_bytes", holder.least_bytes},
                               {"stream", holder.stream},
                               {"stream_name", preload_stream_text(holder.stream)},
                               {"server", preload_server_text(holder.server)},
                               {"bytes", holder.bytes},
                               {"block_count", holder.count}});
  }
  return json;
}

Json device_json(const ProcessHistory& history) {
  const PreloadDeviceFigures& figures = history.figures;
  Json json = {{"device", figures.device},
               {"capacity_bytes", figures.capacity_bytes == 0 ? Json() : Json(figures.capacity_bytes)},
               {"allocations", figures.allocations},
               {"frees", figures.frees},
               {"out_of_memory", figures.refused},
               {"peak_requested_bytes", figures.peak_requested_bytes},
               {"peak_reserved_bytes", figures.peak_reserved_bytes},
               {"fragmentation", fragmentation(figures)},
               {"live_requested_bytes", figures.requested_bytes},
               {"held_bytes", figures.arena_bytes + figures.elsewhere_bytes},
               {"baseline_reserved_bytes",
                history.baseline_reserved_bytes ? Json(*history.baseline_reserved_bytes) : Json()},
               {"events", {{"kept", history.events.size()}, {"dropped_by_process", history.dropped_events}}},
               {"peak_requested_bytes_of_kept_events", history.peak_requested_bytes},
               {"untracked", {{"count", history.untracked_count}, {"bytes", history.untracked_bytes}}},
               {"moments", Json::array()}};
  for (const PageMoment& moment : history.moments) json["moments"].push_back(moment_json(moment));
  return json;
}

Json process_object(const ProcessReport& process) {
  const PreloadReport& record = process.record;
  Json json = {{"process", record.process},
               {"parent", record.parent},
               {"rank", record.rank < 0 ? Json() : Json(record.rank)},
               {"program", record.program},
               {"mode", mode_text(record.mode)},
               {"served", Json::array()},
               {"refused", record.refused},
               {"unknown_frees", record.unknown_frees},
               {"problem", record.problem},
               {"reached_the_driver_past_the_hook", record.around},
               {"events_problem", process.events_problem},
               {"devices", Json::array()}};
  for (std::size_t i = 0; i < kPreloadServerCount; ++i) {
    if (record.allocations[i] == 0) continue;
    json["served"].push_back({{"by", preload_server_text(static_cast<PreloadServer>(i))},
                              {"allocations", record.allocations[i]},
                              {"bytes", record.bytes[i]}});
  }
  for (const ProcessHistory& history : process.histories) json["devices"].push_back(device_json(history));
  return json;
}

// A program's text need not be UTF-8.
std::string dumped(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

PageProcess page_process(const Row& row) {
  PageProcess page = history_page(*row.history);
  const PreloadReport& record = row.process->record;
  page.name = record.rank >= 0 ? "rank " + std::to_string(record.rank) : shown_text(record.program);
  page.process = record.process;
  page.device = row.history->figures.device;
  page.mode = mode_text(record.mode);
  return page;
}

// Ordered as on the page: processes that ran out of memory, then by held minus requested bytes, then by the
// peak.
std::vector<Row> worst_rows(const RunStory& story) {
  const std::vector<Row> rows = rows_of(story);
  std::vector<PageProcess> processes;
  for (const Row& row : rows) {
    PageProcess& process = processes.emplace_back();
    process.peak_requested_bytes = row.history->figures.peak_requested_bytes;
    process.peak_reserved_bytes = row.history->figures.peak_reserved_bytes;
    process.out_of_memory_count = row.history->figures.refused;
  }
  std::vector<Row> ordered;
  for (const std::size_t i : worst_first(processes)) ordered.push_back(rows[i]);
  return ordered;
}

std::string row_name(const Row& row) {
  return row.process->name() + ", " + device_name(*row.history);
}

std::vector<std::string> summary_lines(const RunStory& story) {
  std::vector<PreloadReport> records;
  for (const ProcessReport& process : story.processes) records.push_back(process.record);
  std::vector<std::string> lines = run_summary(story.mode, records);
  for (std::string& line : missing_lines(story)) lines.push_back(std::move(line));
  return lines;
}

// When it was written, and whether all of it could be.
std::string state_text(const RunStory& story) {
  return story.state + (story.not_written.empty() ? "" : ", and not all of this report could be written");
}

std::uint64_t allocation_count(const PreloadReport& record) {
  return std::accumulate(std::begin(record.allocations), std::end(record.allocations), std::uint64_t{0});
}

}  // namespace

std::string ProcessReport::name() const {
  const std::string process = "process " + std::to_string(record.process);
  return record.rank < 0 ? process : "rank " + std::to_string(record.rank) + ", " + process;
}

ProcessReport read_process(PreloadReport record) {
  ProcessReport process;
  process.record = std::move(record);
  if (process.record.events.empty()) {
    process.events_problem = "it has kept no events, so only its counts are known";
    return process;
  }
  const Result<PreloadEventLog> log = read_preload_events(process.record.events);
  if (!log.ok()) {
    process.events_problem = log.status().message();
  } else {
    process.histories = process_histories(log.value());
    if (process.histories.empty())
      process.events_problem =
          process.record.events + " has no events of a device, so there is nothing to report";
  }
  return process;
}

std::string process_text(const ProcessReport& process) {
  const PreloadReport& record = process.record;
  std::string text;
  add_line(process.name() + ": " + record.program, &text);
  add_line(std::string("mode: ") + mode_text(record.mode), &text);
  for (const std::string& line : run_summary(record.mode, {record})) add_line(line, &text);
  if (!process.events_problem.empty()) add_line(process.events_problem, &text);
  for (const ProcessHistory& history : process.histories) {
    const PreloadDeviceFigures& figures = history.figures;
    text += "\n" + device_name(history) + "\n";
    if (figures.capacity_bytes != 0) {
      text += "  it could have had " + format_bytes(figures.capacity_bytes) + "\n";
    }
    text += "  peak requested " + format_bytes(figures.peak_requested_bytes) + "\n  peak reserved  " +
            format_bytes(figures.peak_reserved_bytes) + "\n  fragmentation  " +
            percent(fragmentation(figures)) + " (" + format_bytes(unused_bytes(figures)) + ")\n";
    if (history.baseline_reserved_bytes) {
      text += "  the baseline caching allocator would have reserved " +
              format_bytes(*history.baseline_reserved_bytes) + " for the same requests\n";
    }
    text += "  " + format_count(figures.allocations, "allocation") + ", " +
            format_count(figures.frees, "free") + ", out of memory " + format_count(figures.refused, "time") +
            "\n";
    for (const std::string& line : limits_of(history)) text += "  " + line + "\n";
    for (const PageMoment& moment : history.moments) append_moment(moment, &text);
  }
  return text;
}

std::string process_json(const ProcessReport& process) {
  return dumped(process_object(process));
}

std::string worst_line(const RunStory& story) {
  const std::vector<Row> rows = worst_rows(story);
  if (rows.empty()) return {};
  const PreloadDeviceFigures& figures = rows.front().history->figures;
  std::string line = row_name(rows.front()) + ": peak requested " +
                     format_bytes(figures.peak_requested_bytes) + ", reserved " +
                     format_bytes(figures.peak_reserved_bytes) + ", fragmentation " +
                     percent(fragmentation(figures));
  if (figures.refused != 0) line += ", out of memory " + format_count(figures.refused, "time");
  return line;
}

std::vector<std::string> missing_lines(const RunStory& story) {
  std::vector<RepeatedLine> lines;
  for (const ProcessReport& process : story.processes) {
    if (process.events_problem.empty()) continue;
    lines.push_back({process.name() + ": " + process.events_problem, process.record.events});
  }
  lines.insert(lines.end(), story.left_out.begin(), story.left_out.end());
  lines.insert(lines.end(), story.not_written.begin(), story.not_written.end());
  return told_once(lines);
}

std::string story_text(const RunStory& story) {
  std::string text;
  add_line(story.command, &text);
  add_line(state_text(story), &text);
  for (const std::string& line : summary_lines(story)) add_line(line, &text);
  if (const std::string worst = worst_line(story); !worst.empty()) text += "\nthe worst: " + worst + "\n";
  if (!story.processes.empty()) text += "\nall, the worst first:\n";
  for (const Row& row : worst_rows(story)) {
    const PreloadDeviceFigures& figures = row.history->figures;
    text += "  " + row_name(row) + ": requested " + format_bytes(figures.peak_requested_bytes) +
            ", reserved " + format_bytes(figures.peak_reserved_bytes) + ", fragmentation " +
            percent(fragmentation(figures)) + ", out of memory " + std::to_string(figures.refused);
    if (row.history->baseline_reserved_bytes) {
      text += ", baseline " + format_bytes(*row.history->baseline_reserved_bytes);
    }
    add_line(": " + row.process->record.program, &text);
  }
  for (const ProcessReport& process : story.processes) {
    if (!process.histories.empty()) continue;
    const std::uint64_t count = allocation_count(process.record);
    add_line("  " + process.name() + ": " +
                 (count == 0 ? "nothing was allocated"
                             : format_count(count, "allocation") + "; nothing more is known of them") +
                 ": " + process.record.program,
             &text);
  }
  return text;
}

std::string story_json(const RunStory& story) {
  Json json = {{"command", story.command}, {"state", state_text(story)},    {"mode", mode_text(story.mode)},
               {"worst", Json()},          {"lines", summary_lines(story)}, {"processes", Json::array()}};
  if (const std::vector<Row> rows = worst_rows(story); !rows.empty()) {
    json["worst"] = {
        {"process", rows.front().process->record.process},
        {"rank", rows.front().process->record.rank < 0 ? Json() : Json(rows.front().process->record.rank)},
        {"device", rows.front().history->figures.device}};
  }
  for (const ProcessReport& process : story.processes) json["processes"].push_back(process_object(process));
  return dumped(json);
}

PageProcess history_page(const ProcessHistory& history) {
  const PreloadDeviceFigures& figures = history.figures;
  PageProcess page;
  page.peak_requested_bytes = figures.peak_requested_bytes;
  page.peak_reserved_bytes = figures.peak_reserved_bytes;
  page.out_of_memory_count = figures.refused;
  if (figures.capacity_bytes != 0) page.capacity_bytes = figures.capacity_bytes;
  page.baseline_reserved_bytes = history.baseline_reserved_bytes;
  page.figures = {{"Allocations", std::to_string(figures.allocations)},
                  {"Frees", std::to_string(figures.frees)},
                  {"Live at the end", format_bytes(figures.requested_bytes)}};
  page.lines.push_back(fragmentation_line(history));
  for (std::string& line : limits_of(history)) page.lines.push_back(std::move(line));
  page.points = history.points;
  page.moments = history.moments;
  for (PageMoment& one : page.moments) {
    const std::vector<PageBlock> pieces = free_pieces(one.blocks, figures);
    one.blocks.insert(one.blocks.end(), pieces.begin(), pieces.end());
  }
  if (figures.chunk_bytes != 0) {
    page.lines.push_back(
        "Free pieces are those in chunks that hold a block; the addresses of the arena's other chunks are "
        "not known.");
  }
  if (const PageMoment* peak = history.moment(kPeakMoment)) {
    for (const HistoryHolder& holder : holders_of(peak->blocks)) {
      page.holders.push_back({holder_text(holder), holder.bytes, holder.count});
    }
  }
  return page;
}

ReportPage story_page(const RunStory& story) {
  ReportPage page;
  page.title = shown_text(story.command);
  page.lines.push_back(state_text(story));
  for (const std::string& line : summary_lines(story)) page.lines.push_back(shown_text(line));
  for (const Row& row : rows_of(story)) page.processes.push_back(page_process(row));
  return page;
}

}  // namespace forebay
