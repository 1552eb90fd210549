#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "forebay/model_backend.h"
#include "forebay/text.h"
#include "runtime/command/command_line.h"
#include "runtime/command/replay/trace_page.h"
#include "runtime/command/run/output_file.h"
#include "runtime/command/terminal_line.h"
#include "runtime/command/traces/allocation_trace.h"
#include "runtime/command/traces/explanation.h"

namespace forebay {
namespace {

struct ExplainArguments {
  std::string path;
  std::string report;  // A directory; empty: none.
};

Result<PageProcess> explanation_page(const AllocationTrace& trace, const Explanation& explanation,
                                     TerminalLine& line) {
  ModelBackendOptions options;
  options.memory_bytes = ample_memory(trace);
  FOREBAY_ASSIGN_OR_RETURN(const std::unique_ptr<ModelBackend> backend,
                           ModelBackend::create(std::move(options)));
  FOREBAY_ASSIGN_OR_RETURN(PageProcess page, trace_page(trace, *backend, [&](std::size_t event_count) {
                             if (line.due())
                               line.show(trace.name + ": page, " + share_text(trace, event_count));
                           }));
  const std::vector<std::string> lines = explanation_lines(trace, explanation);
  page.lines.insert(page.lines.begin(), lines.begin(), lines.end());
  page.capacity_bytes = explanation.capacity_bytes;
  return page;
}

// Explains every device of the file, and draws it if `page` is not null. Returns the text.
Result<std::string> explain_file(const std::string& path, ReportPage* page) {
  std::string text;
  TerminalLine line;
  line.show("reading " + path);
  FOREBAY_ASSIGN_OR_RETURN(const std::vector<AllocationTrace> traces, read_allocation_traces(path));
  line.show("");
  for (const AllocationTrace& trace : traces) {
    FOREBAY_ASSIGN_OR_RETURN(
        const Explanation explanation, explain(trace, [&](const char* allocator, const CapacityProbe& probe) {
          if (!line.due()) return;
          line.show(trace.name + ": smallest capacity of the " + allocator + ", " + probe_text(probe, trace));
        }));
    if (!text.empty()) text += "\n";
    text += explanation_text(trace, explanation);
    line.show("");
    if (page == nullptr) continue;
    FOREBAY_ASSIGN_OR_RETURN(PageProcess process, explanation_page(trace, explanation, line));
    page->processes.push_back(std::move(process));
  }
  return text;
}

int explain(const ExplainArguments& arguments) {
  const auto failed = [](const Status& status) {
    return complain("forebay explain", status.message(), kBadUsage);
  };
  const bool draws = !arguments.report.empty();
  if (draws) {
    if (const Status made = make_report_directory(arguments.report); !made.ok()) return failed(made);
  }
  ReportPage page{.title = "forebay explain " + shown_text(arguments.path), .lines = {}, .processes = {}};
  const Result<std::string> text = explain_file(arguments.path, draws ? &page : nullptr);
  if (!text.ok()) return failed(text.status());
  if (draws) {
    const Status drawn = write_report_file(arguments.report + "/" + kReportPage, report_page(page), false);
    if (!drawn.ok()) return failed(drawn);
  }
  const Status written = write_standard_output(text.value());
  return written.ok() ? 0 : failed(written);
}

int run(const ExplainArguments& arguments) {
  try {
    return explain(arguments);
  } catch (const std::bad_alloc&) {
    return complain("forebay explain",
                    "the host has no memory to replay '" + arguments.path +
                        "'; free host memory, or raise the limit of this process (ulimit -v)",
                    kBadUsage);
  }
}

}  // namespace

void add_explain_command(CLI::App& app, Action& action) {
  const auto arguments =
      std::make_shared<ExplainArguments>();  // Shared by the parser's fields and the action.
  CLI::App* command = app.add_subcommand("explain",
                                         "Explain why memory ran out: fragmentation or shortage, holders of "
                                         "memory, smallest sufficient capacity");
  add_value(*command, "snapshot", arguments->path, "SNAPSHOT",
            "A PyTorch memory snapshot (.pickle; nothing in it is executed), an RMM log or a text trace")
      ->required();
  add_value(*command, "--report", arguments->report, "DIR",
            "Draw DIR/report.html: memory over time, the blocks at the peak and at the failure with their "
            "holders, and the baseline beside the arena");
  command->footer(
      "The smallest capacities are searched in steps of 2 MiB by playing the recorded requests on a model "
      "device. Exit code: 0, or 2 if the file could not be read.");
  command->callback([arguments, &action] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace forebay
