#include "runtime/command/page/report_page.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <tuple>

#include "forebay/units.h"
#include "runtime/command/page/blocks.h"
#include "runtime/command/page/text.h"
#include "runtime/command/page/timeline.h"

namespace forebay {
namespace {

constexpr char kStyle[] =
#include "report_page.css.inc"
    ;
constexpr char kScript[] =
#include "report_page.js.inc"
    ;

// Moments and holders shown per process. More would be pages that nobody reads to their end.
constexpr std::size_t kMomentsShown = 4;
constexpr std::size_t kHoldersShown = 20;

std::string signed_bytes(std::uint64_t bytes, std::uint64_t than) {
  return bytes >= than ? format_bytes(bytes - than) + " more" : format_bytes(than - bytes) + " less";
}

std::string paragraphs(const std::vector<std::string>& lines, const char* kind) {
  std::string text;
  for (const std::string& line : lines) {
    text += std::string("<p class=\"") + kind + "\">" + html_text(line) + "</p>\n";
  }
  return text;
}

std::string anchor(std::size_t place) {
  return "process-" + std::to_string(place + 1);
}

std::string identity(const PageProcess& process) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (process.process) add("process " + std::to_string(*process.process));
  if (process.device) add("device " + std::to_string(*process.device));
  if (!process.mode.empty()) add(html_text(process.mode));
  return text;
}

std::string process_row(const PageProcess& process, std::size_t place) {
  const std::string name = html_text(process.name.empty() ? "(no name)" : process.name);
  std::string text = "<tr><th scope=\"row\">";
  text += place < kPageProcesses ? "<a href=\"#" + anchor(place) + "\">" + name + "</a>" : name;
  const auto cell = [&](const std::string& value) { text += "<td class=\"n\">" + value + "</td>"; };
  text += "</th>";
  cell(process.process ? std::to_string(*process.process) : "");
  cell(process.device ? std::to_string(*process.device) : "");
  text += "<td>" + html_text(process.mode) + "</td>";
  cell(format_bytes(process.peak_requested_bytes));
  cell(format_bytes(process.peak_reserved_bytes));
  cell(format_bytes(process.unused_bytes()));
  cell(percent_text(process.fragmentation()));
  cell(process.baseline_reserved_bytes ? format_bytes(*process.baseline_reserved_bytes) : "not known");
  if (process.out_of_memory_count == 0) {
    cell("0");
  } else {
    cell("<strong>" + std::to_string(process.out_of_memory_count) + "</strong>");
  }
  return text + "</tr>\n";
}

std::string process_table(const ReportPage& page, const std::vector<std::size_t>& order) {
  std::string text =
      "<h2>Processes</h2>\n<div class=\"wide\" tabindex=\"0\" role=\"region\" "
      "aria-label=\"Processes\"><table>\n<caption>The worst first: processes that ran out of memory, then by "
      "reserved minus requested bytes</caption>\n<thead><tr>";
  for (const char* head : {"Process", "Number", "Device", "Mode", "Peak requested", "Peak reserved",
                           "Reserved, unused", "Fragmentation", "Baseline would reserve", "Out of memory"}) {
    const std::string_view name = head;
    text += name == "Process" || name == "Mode" ? "<th scope=\"col\">" : "<th scope=\"col\" class=\"n\">";
    text += std::string(name) + "</th>";
  }
  text += "</tr></thead>\n<tbody>\n";
  for (std::size_t i = 0; i < order.size(); ++i) text += process_row(page.processes[order[i]], i);
  return text + "</tbody></table></div>\n";
}

std::string figures(const PageProcess& process) {
  std::string text = "<dl class=\"figures\">\n";
  // `value` and `note` are HTML already.
  const auto add = [&](const std::string& name, const std::string& value, const std::string& note = "") {
    text += "<div><dt>" + name + "</dt><dd>" + value + (note.empty() ? "" : " <small>" + note + "</small>") +
            "</dd></div>\n";
  };
  add("Peak requested", format_bytes(process.peak_requested_bytes));
  add("Peak reserved", format_bytes(process.peak_reserved_bytes));
  add("Reserved, unused", format_bytes(process.unused_bytes()),
      percent_text(process.fragmentation()) + " of the reserved memory");
  if (process.baseline_reserved_bytes) {
    add("A caching allocator would reserve", format_bytes(*process.baseline_reserved_bytes),
        signed_bytes(*process.baseline_reserved_bytes, process.peak_reserved_bytes));
  }
  if (process.capacity_bytes) add("There was", format_bytes(*process.capacity_bytes));
  add("Out of memory", format_count(process.out_of_memory_count, "time"));
  for (const PageFigure& figure : process.figures) add(html_text(figure.name), html_text(figure.value));
  return text + "</dl>\n";
}

std::string holders_table(const PageProcess& process) {
  if (process.holders.empty()) return "";
  std::string text =
      "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Holders\"><table>\n<caption>Holders "
      "of memory at the peak</caption>\n<thead><tr><th scope=\"col\">Holder</th><th scope=\"col\" "
      "class=\"n\">Bytes</th><th scope=\"col\" class=\"n\">Blocks</th><th scope=\"col\" class=\"n\">Of the "
      "peak</th></tr></thead>\n<tbody>\n";
  const auto row = [&](const std::string& name, std::uint64_t bytes, std::uint64_t count) {
    text +=
        "<tr><th scope=\"row\">" + name + "</th><td class=\"n\">" + format_bytes(bytes) +
        "</td><td class=\"n\">" + std::to_string(count) + "</td><td class=\"n\">" +
        (process.peak_requested_bytes == 0
             ? std::string("not known")
             : percent_text(static_cast<double>(bytes) / static_cast<double>(process.peak_requested_bytes))) +
        "</td></tr>\n";
  };
  PageHolder rest;
  for (std::size_t i = 0; i < process.holders.size(); ++i) {
    const PageHolder& holder = process.holders[i];
    if (i < kHoldersShown) {
      row(html_text(holder.name), holder.bytes, holder.count);
    } else {
      rest.bytes += holder.bytes;
      rest.count += holder.count;
    }
  }
  if (process.holders.size() > kHoldersShown) {
    row(format_count(process.holders.size() - kHoldersShown, "other"), rest.bytes, rest.count);
  }
  return text + "</tbody></table></div>\n";
}

std::string process_section(const PageProcess& process, std::size_t place) {
  std::string text = "<section id=\"" + anchor(place) + "\">\n<h2>" +
                     html_text(process.name.empty() ? "(no name)" : process.name) +
                     "</h2>\n<p class=\"note\">" + identity(process) + "</p>\n";
  text += paragraphs(process.lines, "why") + figures(process) + timeline_html(process);
  for (std::size_t i = 0; i < std::min(process.moments.size(), kMomentsShown); ++i) {
    text += blocks_html(process.moments[i]);
  }
  if (process.moments.size() > kMomentsShown) {
    text += "<p class=\"note\">" + format_count(process.moments.size() - kMomentsShown, "further moment") +
            " not shown.</p>\n";
  }
  return text + holders_table(process) + "</section>\n";
}

}  // namespace

std::uint64_t PageProcess::unused_bytes() const {
  return peak_reserved_bytes > peak_requested_bytes ? peak_reserved_bytes - peak_requested_bytes : 0;
}

double PageProcess::fragmentation() const {
  if (peak_reserved_bytes == 0) return 0;
  return static_cast<double>(unused_bytes()) / static_cast<double>(peak_reserved_bytes);
}

std::vector<std::size_t> worst_first(const std::vector<PageProcess>& processes) {
  std::vector<std::size_t> order(processes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto key = [&](std::size_t i) {
    const PageProcess& process = processes[i];
    return std::tuple(process.out_of_memory_count > 0, process.unused_bytes(), process.peak_requested_bytes);
  };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return key(a) > key(b); });
  return order;
}

std::string report_page(const ReportPage& page) {
  const std::string title = html_text(page.title.empty() ? "forebay run" : page.title);
  // The policy forbids every connection, also for injected content.
  std::string text =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
      "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>" +
      title + "</title>\n<style>\n" + kStyle + "</style>\n</head>\n<body>\n<main>\n<h1>" + title + "</h1>\n";
  text += paragraphs(page.lines, "lead");
  const std::vector<std::size_t> order = worst_first(page.processes);
  if (order.empty()) {
    text += "<p class=\"note\">No process has recorded anything.</p>\n";
  } else {
    text += process_table(page, order);
  }
  for (std::size_t i = 0; i < std::min(order.size(), kPageProcesses); ++i) {
    text += process_section(page.processes[order[i]], i);
  }
  if (order.size() > kPageProcesses) {
    text += "<p class=\"note\">" +
            format_count(order.size() - kPageProcesses, "further process", "further processes") +
            " in the table alone.</p>\n";
  }
  return text + "</main>\n<script>\n" + kScript + "</script>\n</body>\n</html>\n";
}

}  // namespace forebay
