#include <memory>
#include <new>
#include <string>
#include <vector>

#include "runtime/command/command_line.h"
#include "runtime/command/terminal_line.h"
#include "runtime/command/traces/allocation_trace.h"
#include "runtime/command/traces/explanation.h"

namespace forebay {
namespace {

int explain_file(const std::string& path) {
  const auto failed = [](const Status& status) {
    return complain("forebay explain", status.message(), kBadUsage);
  };
  std::string text;
  {
    TerminalLine line;
    line.show("reading " + path);
    const Result<std::vector<AllocationTrace>> traces = read_allocation_traces(path);
    line.show("");
    if (!traces.ok()) return failed(traces.status());
    for (const AllocationTrace& trace : traces.value()) {
      const Result<Explanation> explanation = explain(trace, [&](const char* allocator,
                                                                 const CapacityProbe& probe) {
        if (!line.due()) return;
        line.show(trace.name + ": smallest capacity of the " + allocator + ", " + probe_text(probe, trace));
      });
      line.show("");
      if (!explanation.ok()) return failed(explanation.status());
      if (!text.empty()) text += "\n";
      text += explanation_text(trace, explanation.value());
    }
  }
  const Status written = write_standard_output(text);
  return written.ok() ? 0 : failed(written);
}

int run(const std::string& path) {
  try {
    return explain_file(path);
  } catch (const std::bad_alloc&) {
    return complain("forebay explain",
                    "the host has no memory to replay '" + path +
                        "'; free host memory, or raise the limit of this process (ulimit -v)",
                    kBadUsage);
  }
}

}  // namespace

void add_explain_command(CLI::App& app, Action& action) {
  const auto path = std::make_shared<std::string>();  // Shared by the parser's field and the action.
  CLI::App* command = app.add_subcommand("explain",
                                         "Explain why memory ran out: fragmentation or shortage, holders of "
                                         "memory, smallest sufficient capacity");
  add_value(*command, "snapshot", *path, "SNAPSHOT",
            "A PyTorch memory snapshot (.pickle; nothing in it is executed), an RMM log or a text trace")
      ->required();
  command->footer(
      "The smallest capacities are searched in steps of 2 MiB by playing the recorded requests on a model "
      "device. Exit code: 0, or 2 if the file could not be read.");
  command->callback([path, &action] { action = [path] { return run(*path); }; });
}

}  // namespace forebay
