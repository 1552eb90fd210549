#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "allocator/preload/learned_file.h"
#include "forebay/cuda_backend.h"
#include "forebay/host_backend.h"
#include "forebay/model_backend.h"
#include "forebay/text.h"
#include "forebay/units.h"
#include "runtime/command/command_line.h"
#include "runtime/command/page/text.h"
#include "runtime/command/replay/replay_report.h"
#include "runtime/command/replay/trace_page.h"
#include "runtime/command/replay/trace_replay.h"
#include "runtime/command/run/output_file.h"
#include "runtime/command/terminal_line.h"
#include "runtime/command/traces/allocation_trace.h"

namespace forebay {
namespace {

constexpr int kIncomplete = 1;
constexpr int kPassLimit = 1000;
constexpr int kLearnPasses = 3;
// One chunk of the model and host devices.
constexpr std::uint64_t kLeastMemory = std::uint64_t{2} << 20;

struct ReplayArguments {
  std::vector<std::string> traces;
  std::string memory;
  std::string device = "model";
  int passes = 5;
  bool baseline = false;
  bool minimum_capacity = false;
  bool json = false;
  std::string report;  // A directory; empty: none.
  std::string learn;   // Files; empty: none.
  std::string learned;
  std::size_t mappings_max = ArenaMappings().most;
  const CLI::Option* memory_option = nullptr;
};

// The device that the arguments describe.
struct ReplayDevice {
  BackendKind kind = BackendKind::kModel;
  int ordinal = 0;
  std::uint64_t memory_bytes = 0;  // 0: not given.
};

// Placements of earlier runs and for later ones.
struct ReplayKnowledge {
  std::string learned;           // Bytes; empty: none.
  std::string* learn = nullptr;  // Receives bytes; null: none.
};

Result<ReplayDevice> read_device(const ReplayArguments& arguments) {
  ReplayDevice device;
  if (const std::string question = size_question(arguments.memory.c_str()); !question.empty())
    return refuse("--memory is " + question);
  if (arguments.memory_option->count() > 0 &&
      (!parse_bytes(arguments.memory.c_str(), &device.memory_bytes) || device.memory_bytes < kLeastMemory ||
       device.memory_bytes > kTraceBlockLimit)) {
    return refuse("--memory is '" + arguments.memory + "'; use " + format_bytes(kLeastMemory) + " to " +
                  format_bytes(kTraceBlockLimit) +
                  ", in bytes or with KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB or TB (of 1000) behind "
                  "the number, such as 80GiB or 24GB");
  }
  const std::string& name = arguments.device;
  std::uint64_t ordinal = 0;
  if (name == "model") {
    device.kind = BackendKind::kModel;
  } else if (name == "host") {
    device.kind = BackendKind::kHost;
  } else if (name == "cuda" ||
             (name.rfind("cuda:", 0) == 0 && parse_number(std::string_view(name).substr(5), 10, &ordinal) &&
              ordinal < 1024)) {
    device.kind = BackendKind::kCuda;
    device.ordinal = static_cast<int>(ordinal);
  } else {
    return refuse("--device is '" + name + "'; use model, host, cuda or cuda:N");
  }
  if (arguments.passes < 1 || arguments.passes > kPassLimit) {
    return refuse("--repeat is " + std::to_string(arguments.passes) + "; use 1 to " +
                  std::to_string(kPassLimit));
  }
  if (!arguments.learn.empty()) {
    if (arguments.passes < kLearnPasses) {
      return refuse("--learn needs a job that has settled, and --repeat is " +
                    std::to_string(arguments.passes) + "; use " + std::to_string(kLearnPasses) + " or more");
    }
    FOREBAY_RETURN_IF_ERROR(check_run_file("--learn", arguments.learn, kLearnedBeginning));
  }
  return device;
}

// A new one for each replay, so that no replay finds the memory of another.
Result<std::unique_ptr<Backend>> make_backend(const ReplayDevice& device, const AllocationTrace& trace) {
  const std::uint64_t memory_bytes = device.memory_bytes != 0 ? device.memory_bytes : ample_memory(trace);
  const auto owned = [](auto made) -> Result<std::unique_ptr<Backend>> {
    if (!made.ok()) return made.status();
    return std::unique_ptr<Backend>(std::move(made).value());
  };
  if (device.kind == BackendKind::kCuda) {
    return owned(CudaBackend::create({.ordinal = device.ordinal, .memory_bytes = device.memory_bytes}));
  }
  if (device.kind == BackendKind::kHost) {
    HostBackendOptions options;
    options.memory_bytes = memory_bytes;
    options.poison = false;  // Nothing is read, and filling would take the machine's memory.
    return owned(HostBackend::create(std::move(options)));
  }
  ModelBackendOptions options;
  options.memory_bytes = memory_bytes;
  return owned(ModelBackend::create(std::move(options)));
}

Result<ReplayFigures> replay_one(const AllocationTrace& trace, const ReplayArguments& arguments,
                                 const ReplayDevice& device, const ReplayKnowledge& knowledge,
                                 ReplayTarget target, TerminalLine& progress, ReplayReport* report) {
  const std::string by = trace.name + (target == ReplayTarget::kArena ? ": arena, " : ": baseline, ");
  FOREBAY_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, make_backend(device, trace));
  report->device = backend->capabilities().name;
  report->memory_bytes = backend->capabilities().memory_bytes;
  ReplayOptions options;
  options.passes = arguments.passes;
  options.learned = knowledge.learned;
  options.mappings_max = arguments.mappings_max;
  options.learn = target == ReplayTarget::kArena ? knowledge.learn : nullptr;
  options.progress = [&](int pass, std::size_t event_count) {
    if (event_count != 0 && !progress.due()) return;
    progress.show(by + "pass " + std::to_string(pass) + " of " + std::to_string(arguments.passes) + ": " +
                  share_text(trace, event_count));
  };
  ReplayFigures figures;
  FOREBAY_ASSIGN_OR_RETURN(figures.result, replay_trace(trace, *backend, target, options));
  if (arguments.minimum_capacity) {
    figures.searched_minimum = true;
    FOREBAY_ASSIGN_OR_RETURN(figures.minimum_capacity_bytes,
                             find_minimum_capacity(trace, target, [&](const CapacityProbe& probe) {
                               if (progress.due())
                                 progress.show(by + "smallest capacity, " + probe_text(probe, trace));
                             }));
  }
  return figures;
}

Result<PageProcess> replay_page(const AllocationTrace& trace, const ReplayReport& report,
                                const ReplayDevice& device, TerminalLine& progress) {
  FOREBAY_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, make_backend(device, trace));
  FOREBAY_ASSIGN_OR_RETURN(PageProcess page, trace_page(trace, *backend, [&](std::size_t event_count) {
                             if (progress.due())
                               progress.show(trace.name + ": page, " + share_text(trace, event_count));
                           }));
  const ReplayFigures& arena = report.arena;
  if (device.memory_bytes != 0) page.capacity_bytes = device.memory_bytes;
  if (arena.result.completed) {
    page.figures.push_back(
        {"Fragmentation of the last repeat", percent_text(arena.result.last_fragmentation())});
  }
  page.figures.push_back(
      {"Driver calls of the first pass", std::to_string(arena.result.first_pass_calls.total())});
  if (arena.result.steady_calls) {
    page.figures.push_back(
        {"Driver calls of a steady pass", format_text("%.1f", *arena.result.steady_calls)});
  }
  if (arena.minimum_capacity_bytes) {
    page.figures.push_back({"Smallest sufficient capacity", format_bytes(*arena.minimum_capacity_bytes)});
  }
  return page;
}

Result<ReplayReport> replay(const AllocationTrace& trace, const ReplayArguments& arguments,
                            const ReplayDevice& device, const ReplayKnowledge& knowledge, double cycle_ns,
                            TerminalLine& progress) {
  ReplayReport report;
  report.trace = trace.name;
  report.format = trace.format;
  report.event_count = trace.events.size();
  report.warm_count = trace.warm_event_count;
  report.stream_count = trace.stream_count;
  report.notes = trace.notes;
  report.passes = arguments.passes;
  report.mappings_max = arguments.mappings_max;
  report.cycle_ns = cycle_ns;
  FOREBAY_ASSIGN_OR_RETURN(
      report.arena, replay_one(trace, arguments, device, knowledge, ReplayTarget::kArena, progress, &report));
  if (arguments.baseline) {
    FOREBAY_ASSIGN_OR_RETURN(report.baseline, replay_one(trace, arguments, device, knowledge,
                                                         ReplayTarget::kBaseline, progress, &report));
  }
  progress.show(trace.name + ": glibc");
  report.glibc = replay_malloc(trace, arguments.passes);
  return report;
}

int play(const ReplayArguments& arguments) {
  const auto failed = [](const Status& status) {
    return complain("forebay replay", status.message(), kBadUsage);
  };
  const Result<ReplayDevice> device = read_device(arguments);
  if (!device.ok()) return failed(device.status());
  if (!arguments.report.empty()) {
    if (const Status made = make_report_directory(arguments.report); !made.ok()) return failed(made);
  }
  std::string learnt;
  ReplayKnowledge knowledge;
  if (!arguments.learn.empty()) knowledge.learn = &learnt;
  if (!arguments.learned.empty()) {
    Result<std::string> read = read_learned_file(arguments.learned);
    if (!read.ok()) return failed(read.status());
    knowledge.learned = std::move(read).value();
  }
  const double cycle_ns = measure_cycle_ns();
  std::vector<ReplayReport> reports;
  ReportPage page{.title = "forebay replay", .lines = {}, .processes = {}};
  int exit_code = 0;
  {
    TerminalLine progress;
    // One that cannot be read does not keep the others from being played.
    for (const std::string& path : arguments.traces) {
      progress.show("reading " + path);
      const Result<std::vector<AllocationTrace>> traces = read_allocation_traces(path);
      if (!traces.ok()) {
        progress.show("");
        exit_code = failed(traces.status());
        continue;
      }
      for (const AllocationTrace& trace : traces.value()) {
        if (knowledge.learn != nullptr && (arguments.traces.size() > 1 || traces.value().size() > 1)) {
          progress.show("");
          return failed(
              refuse("--learn writes one file, for the trace of one device; there are more: name one trace, "
                     "and record devices one by one (forebay run --trace writes a file for each)"));
        }
        Result<ReplayReport> report = replay(trace, arguments, device.value(), knowledge, cycle_ns, progress);
        if (!report.ok()) {
          progress.show("");
          return failed(report.status());
        }
        if (!report.value().arena.result.completed) exit_code = std::max(exit_code, kIncomplete);
        if (!arguments.report.empty()) {
          Result<PageProcess> process = replay_page(trace, report.value(), device.value(), progress);
          if (!process.ok()) {
            progress.show("");
            return failed(process.status());
          }
          page.processes.push_back(std::move(process).value());
        }
        reports.push_back(std::move(report).value());
      }
    }
  }
  if (!arguments.report.empty()) {
    const Status drawn = write_report_file(arguments.report + "/" + kReportPage, report_page(page), false);
    if (!drawn.ok()) return failed(drawn);
  }
  if (!learnt.empty()) {
    const Status kept = write_run_text(arguments.learn, learnt);
    if (!kept.ok()) return failed(kept);
    if (const std::uint64_t calls = reports.front().arena.result.pass_calls.back(); calls != 0) {
      complain("forebay replay",
               "the last repeat still made " + format_count(calls, "driver call") + ", so " +
                   arguments.learn + " has no steady state; use a larger --repeat",
               0);
    }
  }
  const std::string text = arguments.json ? replay_json(reports) : replay_text(reports);
  const Status written = write_standard_output(text);
  return written.ok() ? exit_code : failed(written);
}

int run(const ReplayArguments& arguments) {
  try {
    return play(arguments);
  } catch (const std::bad_alloc&) {
    return complain("forebay replay",
                    "the host has no memory for the records of " +
                        format_count(static_cast<std::uint64_t>(arguments.passes), "pass", "passes") +
                        "; play fewer files at a time, use a smaller --repeat, or raise the limit of this "
                        "process (ulimit -v)",
                    kBadUsage);
  }
}

}  // namespace

void add_replay_command(CLI::App& app, Action& action) {
  const auto arguments =
      std::make_shared<ReplayArguments>();  // Shared by the parser's fields and the action.
  ReplayArguments& a = *arguments;
  CLI::App* command = app.add_subcommand("replay",
                                         "Play recorded allocations against the arena: memory taken, time "
                                         "per call, smallest sufficient capacity");
  add_value(*command, "traces", a.traces, "TRACE",
            "Text traces, PyTorch memory snapshots (.pickle; nothing in them is executed), RMM logs (.csv)")
      ->required();
  a.memory_option = add_value(*command, "--memory", a.memory, "BYTES",
                              "Memory of the device (default: 128 GiB, or twice the requested peak if "
                              "that is more; cuda: all of the device)");
  add_value(*command, "--repeat", a.passes, "N",
            "Times each trace is played, everything being freed in between; from the third on a step "
            "counts as steady")
      ->capture_default_str();
  add_value(*command, "--device", a.device, "NAME",
            "The device: model (books only), host (real mappings), cuda or cuda:N (a real device)")
      ->capture_default_str();
  command->add_flag("--baseline", a.baseline,
                    "Play them against a caching allocator of the best-fit-with-coalescing kind too "
                    "(forebay's own yardstick)");
  command->add_flag("--minimum-capacity", a.minimum_capacity,
                    "Search the smallest device, in steps of 2 MiB, on which each trace completes once (on "
                    "the model device; completing need not be monotone in the capacity)");
  add_value(
      *command, "--learn", a.learn, "FILE",
      "Write where the blocks of the last repeat lay, for 'forebay run --learned FILE': a later run of the "
      "same job has the waste of the steady state from its first step on");
  add_value(*command, "--learned", a.learned, "FILE", "Play with such placements");
  add_value(*command, "--mappings-max", a.mappings_max, "N",
            "The most mappings that the arena keeps for a repeated step")
      ->capture_default_str();
  add_value(*command, "--report", a.report, "DIR",
            "Draw DIR/report.html: memory over time, the blocks at the peak with their holders, and the "
            "baseline beside the arena");
  command->add_flag("--json", a.json, "Print JSON; driver_calls are those of the first pass");
  command->footer(
      "Columns: frag % and last %: fragmentation of the first pass and of the last repeat, 1 - peak "
      "requested "
      "/ peak physical; smallest: the least device memory with which the trace completes; over %: the excess "
      "of that over the peak requested; steady calls and chunks moved: driver calls and mappings of each "
      "repeat from the third on; off the mapping path: allocations that made no driver call.\n"
      "Exit code: 0; 1 if the arena did not complete a trace; 2 if something could not be read.");
  command->callback([arguments, &action] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace forebay
