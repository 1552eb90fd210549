#include "runtime/command/replay/replay_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "forebay/status.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/repeated_lines.h"

namespace forebay {
namespace {

using Json = nlohmann::ordered_json;

double rounded(double value) {
  return std::round(value * 10) / 10;
}

Json times_json(const CallTimes& times, double unit_ns) {
  if (times.count == 0) return nullptr;
  return {{"p50", rounded(times.p50_ns / unit_ns)},
          {"p99", rounded(times.p99_ns / unit_ns)},
          {"p999", rounded(times.p999_ns / unit_ns)},
          {"worst", rounded(times.worst_ns / unit_ns)}};
}

// Nanoseconds, and core cycles beside them; all calls, and those off the mapping path.
void add_times(Json& json, const ReplayTimes& times, double cycle_ns) {
  const auto add = [&](const std::string& name, const CallTimes& all, const CallTimes& off_mapping) {
    json[name + "_ns"] = times_json(all, 1);
    json[name + "_off_mapping_ns"] = times_json(off_mapping, 1);
    json[name + "_cycles"] = times_json(all, cycle_ns);
    json[name + "_off_mapping_cycles"] = times_json(off_mapping, cycle_ns);
  };
  add("malloc", times.allocate, times.allocate_off_mapping);
  add("free", times.free, times.free_off_mapping);
  json["malloc_own_ns"] = times_json(times.allocate_own, 1);
  json["free_own_ns"] = times_json(times.free_own, 1);
  json["malloc_miss_count"] = times.allocate_mapping.count;
  json["malloc_miss_ns"] = times_json(times.allocate_mapping, 1);
}

Json optional_json(const std::optional<double>& value) {
  return value ? Json(rounded(*value)) : Json(nullptr);
}

void add_figures(Json& json, const ReplayFigures& figures, double cycle_ns) {
  const ReplayResult& result = figures.result;
  json["completed"] = result.completed;
  if (!result.completed) json["failure"] = result.failure;
  json["peak_requested_bytes"] = result.peak_requested_bytes;
  json["peak_physical_bytes"] = result.peak_physical_bytes;
  // The peak of a trace that was cut short is too low.
  json["fragmentation"] = result.completed ? Json(result.fragmentation()) : Json(nullptr);
  json["fragmentation_last_repeat"] = result.completed ? Json(result.last_fragmentation()) : Json(nullptr);
  json["minimum_capacity_bytes"] =
      figures.minimum_capacity_bytes ? Json(*figures.minimum_capacity_bytes) : Json(nullptr);
  if (figures.minimum_capacity_bytes && result.peak_requested_bytes > 0) {
    json["minimum_capacity_overhead"] = static_cast<double>(*figures.minimum_capacity_bytes) /
                                            static_cast<double>(result.peak_requested_bytes) -
                                        1;
  }
  add_times(json, result.times, cycle_ns);
  const DriverCalls& calls = result.first_pass_calls;
  json["driver_calls"] = {{"create", calls.create},   {"map", calls.map},
                          {"unmap", calls.unmap},     {"set_access", calls.set_access},
                          {"destroy", calls.destroy}, {"alloc", calls.alloc},
                          {"free", calls.free}};
  json["driver_calls_per_pass"] = result.pass_calls;
  json["mappings_dropped_in_last_repeat"] = result.last_dropped_mappings;
  json["mappings_enough"] = result.enough_mappings;
  json["steady_driver_calls_per_repeat"] = optional_json(result.steady_calls);
  json["steady_chunks_moved_per_repeat"] = optional_json(result.steady_chunks_moved);
  json["retries_after_synchronizing"] = result.retry_count;
}

double mib(std::uint64_t bytes) {
  return static_cast<double>(bytes) / 1048576.0;
}

constexpr int kNameWidth = 30;

// The end of a long path says more than its beginning.
std::string short_name(const std::string& trace) {
  const std::string name = shown_text(trace);
  if (name.size() <= kNameWidth) return name;
  return "..." + name.substr(name.size() - (kNameWidth - 3));
}

std::string row_begin(const std::string& name, const char* allocator) {
  return format_text("%-*s %-8s", kNameWidth, name.c_str(), allocator);
}

void memory_row(std::string& text, const std::string& name, const char* allocator,
                const ReplayFigures& figures) {
  const ReplayResult& result = figures.result;
  text += row_begin(name, allocator) + format_text(" %-4s %9.0f %9.0f", result.completed ? "yes" : "NO",
                                                   mib(result.peak_requested_bytes),
                                                   mib(result.peak_physical_bytes));
  if (result.completed) {
    text += format_text(" %6.2f %6.2f", 100 * result.fragmentation(), 100 * result.last_fragmentation());
  } else {
    text += format_text(" %6s %6s", "-", "-");
  }
  if (figures.minimum_capacity_bytes) {
    text +=
        format_text(" %9.0f %6.2f\n", mib(*figures.minimum_capacity_bytes),
                    100 * (static_cast<double>(*figures.minimum_capacity_bytes) /
                               static_cast<double>(std::max<std::uint64_t>(result.peak_requested_bytes, 1)) -
                           1));
  } else {
    text += format_text(" %9s %6s\n", figures.searched_minimum ? "none" : "-", "-");
  }
}

void calls_row(std::string& text, const std::string& name, const char* allocator,
               const ReplayFigures& figures) {
  const ReplayResult& result = figures.result;
  const DriverCalls& calls = result.first_pass_calls;
  text += row_begin(name, allocator) +
          format_text(" %8llu %8llu %8llu %8llu", static_cast<unsigned long long>(calls.create + calls.alloc),
                      static_cast<unsigned long long>(calls.map),
                      static_cast<unsigned long long>(calls.unmap + calls.free),
                      static_cast<unsigned long long>(calls.set_access));
  if (result.steady_calls && result.steady_chunks_moved) {
    text += format_text(" %9.1f %9.1f\n", *result.steady_calls, *result.steady_chunks_moved);
  } else {
    text += format_text(" %9s %9s\n", "-", "-");
  }
}

// The driver calls of each pass: those of the last one in any case, so that a row has at most 100 columns.
constexpr std::size_t kPassesShown = 5;

void passes_row(std::string& text, const std::string& name, const char* allocator,
                const ReplayFigures& figures) {
  const std::vector<std::uint64_t>& calls = figures.result.pass_calls;
  const bool all = calls.size() <= kPassesShown;
  text += row_begin(name, allocator);
  for (std::size_t i = 0; i < (all ? calls.size() : kPassesShown - 1); ++i) {
    text += format_text(" %7llu", static_cast<unsigned long long>(calls[i]));
  }
  if (!all) text += format_text(" ... %7llu", static_cast<unsigned long long>(calls.back()));
  text += "\n";
}

std::string time_cells(const CallTimes& times) {
  if (times.count == 0) return format_text(" | %6s %7s %8s", "-", "-", "-");
  return format_text(" | %6.0f %7.0f %8.0f", times.p50_ns, times.p99_ns, times.p999_ns);
}

void time_rows(std::string& text, const std::string& name, const char* allocator, const ReplayTimes& times) {
  text += row_begin(name, allocator) + " malloc" + time_cells(times.allocate) +
          time_cells(times.allocate_off_mapping) + "\n";
  if (times.allocate_mapping.count > 0)
    text += row_begin("", "") + " alone " + time_cells(times.allocate_own) + time_cells({}) + "\n";
  text += row_begin("", "") + " free  " + time_cells(times.free) + time_cells(times.free_off_mapping) + "\n";
}

// Calls `row` with the name, the allocator and the figures of each row.
template <typename AddRow>
void add_rows(const std::vector<ReplayReport>& reports, const AddRow& row) {
  for (const ReplayReport& report : reports) {
    row(short_name(report.trace), "arena", report.arena);
    if (report.baseline) row("", "baseline", *report.baseline);
  }
}

}  // namespace

std::string replay_json(const std::vector<ReplayReport>& reports) {
  Json list = Json::array();
  for (const ReplayReport& report : reports) {
    Json json;
    json["trace"] = report.trace;
    json["format"] = report.format;
    json["events"] = report.event_count;
    json["warm_blocks"] = report.warm_count;
    json["streams"] = report.stream_count;
    json["device"] = report.device;
    json["memory_bytes"] = report.memory_bytes;
    json["repeats"] = report.passes;
    json["cycle_ns"] = report.cycle_ns;
    add_figures(json, report.arena, report.cycle_ns);
    if (report.glibc) {
      Json glibc;
      add_times(glibc, *report.glibc, report.cycle_ns);
      json["glibc"] = {{"malloc_ns", glibc["malloc_ns"]},
                       {"free_ns", glibc["free_ns"]},
                       {"malloc_cycles", glibc["malloc_cycles"]},
                       {"free_cycles", glibc["free_cycles"]}};
    } else {
      json["glibc"] = nullptr;
    }
    if (report.baseline) {
      Json baseline;
      baseline["label"] = "forebay's own caching allocator (best fit with coalescing), a yardstick";
      add_figures(baseline, *report.baseline, report.cycle_ns);
      json["baseline"] = std::move(baseline);
    }
    json["notes"] = report.notes;
    list.push_back(std::move(json));
  }
  // Names and messages may hold bytes of a file that are no UTF-8.
  return list.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string replay_text(const std::vector<ReplayReport>& reports) {
  if (reports.empty()) return "";
  std::string text;
  const ReplayReport& first = reports.front();
  text += format_text("Device: %s, %s; %s each%s.\n\n", first.device.c_str(),
                      format_bytes(first.memory_bytes).c_str(),
                      format_count(static_cast<std::uint64_t>(first.passes), "pass", "passes").c_str(),
                      first.passes == 1 ? "" : ", everything freed in between");
  const char* const memory_format = " %-4s %9s %9s %6s %6s %9s %6s\n";
  text += row_begin("MEMORY", "") +
          format_text(memory_format, "com-", "requested", "physical", "frag.", "last", "smallest", "over") +
          row_begin("trace", "by") + format_text(memory_format, "pl.", "MiB", "MiB", "%", "%", "MiB", "%");
  add_rows(reports, [&](const auto&... row) { memory_row(text, row...); });
  const char* const calls_format = " %8s %8s %8s %8s %9s %9s\n";
  text += "\n" + row_begin("DRIVER CALLS", "") +
          format_text(calls_format, "first", "pass", "", "", "steady", "chunks") + row_begin("trace", "by") +
          format_text(calls_format, "create", "map", "unmap", "access", "calls", "moved");
  add_rows(reports, [&](const auto&... row) { calls_row(text, row...); });
  if (first.passes > 1) {
    text += "\nDRIVER CALLS OF EACH PASS\n";
    add_rows(reports, [&](const auto&... row) { passes_row(text, row...); });
  }
  if (first.arena.result.times.allocate.count > 0) {
    text += "\n" + row_begin("TIMES, ns (p50 p99 p99.9)", "") +
            format_text("        | %-23s | %s\n", "all calls", "off the mapping path");
    for (const ReplayReport& report : reports) {
      time_rows(text, short_name(report.trace), "arena", report.arena.result.times);
      if (report.baseline) time_rows(text, "", "baseline", report.baseline->result.times);
      if (report.glibc) time_rows(text, "", "glibc", *report.glibc);
    }
    text += format_text(
        "\nOne core cycle is %.3f ns here (a loop of dependent multiplications, 3 cycles each). The "
        "timer's own cost is taken off. alone: malloc without the time in the device's calls.\n",
        first.cycle_ns);
  }
  const bool has_baseline = std::any_of(reports.begin(), reports.end(),
                                        [](const ReplayReport& one) { return one.baseline.has_value(); });
  if (has_baseline) {
    text +=
        "The baseline is forebay's own caching allocator of the best-fit-with-coalescing kind, a yardstick; "
        "its create and unmap are blocks taken and given back.\n";
  }
  std::vector<RepeatedLine> lines;
  for (const ReplayReport& report : reports) {
    const auto add = [&](const std::string& words) {
      lines.push_back({report.trace + ": " + words, report.trace});
    };
    for (const std::string& note : report.notes) add(note);
    const ReplayResult& arena = report.arena.result;
    if (report.passes > 2 && arena.last_dropped_mappings != 0) {
      add(join_text("the last repeat made driver calls because the arena gave up ",
                    format_count(arena.last_dropped_mappings, "mapping"), " to keep about ",
                    std::to_string(report.mappings_max), "; ", std::to_string(arena.enough_mappings),
                    " are enough (--mappings-max)"));
    }
    const auto failed = [&](const char* by, const ReplayResult& result) {
      if (!result.completed) add(join_text("NOT COMPLETED by the ", by, ": ", result.failure));
    };
    failed("arena", report.arena.result);
    if (report.baseline) failed("baseline", report.baseline->result);
  }
  for (const std::string& line : told_once(lines)) text += shown_text(line) + "\n";
  return text;
}

}  // namespace forebay
