#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "allocator/preload/events.h"
#include "allocator/preload/learned_file.h"
#include "forebay/secrets.h"
#include "forebay/text.h"
#include "runtime/command/command_line.h"
#include "runtime/command/repeated_lines.h"
#include "runtime/command/run/check.h"
#include "runtime/command/run/child.h"
#include "runtime/command/run/environment.h"
#include "runtime/command/run/recorder.h"
#include "runtime/command/run/summary.h"

extern char** environ;

namespace forebay {
namespace {

constexpr int kNotWritten = 1;
constexpr char kLibraryName[] = "libforebay-preload.so";
constexpr char kSystemPreloads[] = "/etc/ld.so.preload";

// The environment of `forebay run` itself. The command does not get these: a second `forebay run` below would
// overwrite the first one's files.
constexpr char kReportVariable[] = "FOREBAY_RUN_REPORT";
constexpr char kTraceVariable[] = "FOREBAY_RUN_TRACE";
constexpr char kSnapshotVariable[] = "FOREBAY_RUN_SNAPSHOT";
constexpr char kPauseSignalVariable[] = "FOREBAY_RUN_PAUSE_SIGNAL";

struct RunArguments {
  std::vector<std::string> command;
  std::string memory;
  std::string records;
  std::string from;
  std::string events;
  std::string learned;
  RunOutputs outputs;
  std::string pause_signal;
  bool observe = false;
  bool tensors = false;
  bool no_tensors = false;
  bool check = false;
  int check_limit_s = 120;
};

void say(const std::string& line) {
  std::fprintf(stderr, "forebay run: %s\n", shown_text(line).c_str());
}

Environment inherited_environment() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string::npos) environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

// The preload lies beside the core that this program runs on, so that both are of one build. A program of
// FOREBAY_STANDALONE contains the core.
Result<std::string> find_library() {
  Dl_info info{};
  const auto* core = reinterpret_cast<const void*>(&preload_record_of_process);
  if (::dladdr(core, &info) == 0 || info.dli_fname == nullptr) info.dli_fname = "";
  std::error_code error;
  std::filesystem::path path;
  for (const char* file : {info.dli_fname, "/proc/self/exe"}) {
    path = std::filesystem::canonical(file, error).parent_path() / kLibraryName;
    if (std::filesystem::exists(path, error)) return path.string();
  }
  return Status(
      StatusCode::kUnavailable,
      "cannot find " + path.string() +
          ": it belongs beside libforebay-core.so and is built on Linux on x86-64 and aarch64; install it");
}

// Where the processes of one run leave their records: a directory of the user's, or one that goes with this.
class Records {
 public:
  Records() = default;
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;
  ~Records() {
    std::error_code ignored;
    if (is_temporary_) std::filesystem::remove_all(path_, ignored);
  }
  Status open(const std::string& wanted) {
    std::error_code error;
    if (wanted.empty()) {
      const std::string temporary = temporary_directory(error);
      std::string pattern = temporary + "/forebay-run-XXXXXX";
      if (error || ::mkdtemp(pattern.data()) == nullptr) {
        return {StatusCode::kIoError,
                "cannot make a directory for records in " + temporary + ": " +
                    (error ? error.message() : std::strerror(errno)) +
                    "; set TMPDIR to one that can be written to, or name one with --records"};
      }
      path_ = pattern;
      is_temporary_ = true;
      return {};
    }
    std::filesystem::create_directories(wanted, error);
    if (!error) path_ = std::filesystem::canonical(wanted, error).string();
    if (error) {
      return {StatusCode::kIoError, "cannot use --records " + wanted + ": " + error.message() +
                                        "; name a directory in a place that can be written to"};
    }
    // Records of an earlier run are not this one's.
    if (const Result<std::vector<PreloadReport>> old = read_preload_records(path_);
        old.ok() && !old.value().empty()) {
      return {StatusCode::kInvalidArgument,
              "--records " + wanted + " has records of another run; name an empty directory"};
    }
    return {};
  }
  const std::string& path() const { return path_; }
  // Lets them stay, for --from.
  void keep() { is_temporary_ = false; }

 private:
  std::string path_;
  bool is_temporary_ = false;
};

// Libraries that the system preloads into every program, and that may hook the same calls.
std::string system_preloads() {
  std::ifstream file(kSystemPreloads);
  std::string all;
  for (std::string word; file >> word;) all += (all.empty() ? "" : " ") + word;
  return all;
}

// For people: without secrets.
std::string text_of(const std::vector<std::string>& command) {
  std::string text;
  for (const std::string& word : command) text += word + '\0';
  if (!text.empty()) text.pop_back();
  mask_secrets(text.data(), text.size());
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

// 0: it is none of those that can be taken.
int signal_number(const std::string& text) {
  const std::string name = text.rfind("SIG", 0) == 0 ? text.substr(3) : text;
  if (name == "USR1" || name == std::to_string(SIGUSR1)) return SIGUSR1;
  if (name == "USR2" || name == std::to_string(SIGUSR2)) return SIGUSR2;
  if (name == "HUP" || name == std::to_string(SIGHUP)) return SIGHUP;
  return 0;
}

void say_all(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) say(line);
}

int refused(const Status& status) {
  return complain("forebay run", status.message(), kBadUsage);
}

// Why no program could use CUDA from here; empty: the driver can be opened.
std::string driver_obstacle() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return ::dlerror();
  ::dlclose(driver);
  return {};
}

// Prints a summary of the command's processes.
void sum_up(PreloadMode mode, const std::vector<PreloadReport>& records) {
  const std::string obstacle = records.empty() ? driver_obstacle() : "";
  if (obstacle.empty()) return say_all(run_summary(mode, records));
  say("handled 0 of 0 allocations: no CUDA driver is found from here, so nothing can have used one (" +
      obstacle + ")");
}

void say_left_out(const std::vector<PreloadLeftOut>& left_out) {
  std::vector<RepeatedLine> lines;
  for (const PreloadLeftOut& one : left_out) lines.push_back(left_out_line(one));
  say_all(told_once(lines));
}

// The options by which --from tells the same in another place.
std::string told_elsewhere(const RunOutputs& outputs) {
  std::string options;
  if (!outputs.report.empty()) options += " --report ELSEWHERE";
  if (!outputs.trace.empty()) options += " --trace ELSEWHERE/trace.txt";
  if (!outputs.snapshot.empty()) options += " --snapshot ELSEWHERE/snapshot.pickle";
  return options;
}

// Reports on the records of processes that this program did not start.
int tell_from(const RunArguments& arguments) {
  // A file beyond `ulimit -f` is one that cannot be written.
  (void)::signal(SIGXFSZ, SIG_IGN);
  std::vector<PreloadLeftOut> left_out;
  const Result<std::vector<PreloadReport>> records = read_preload_records(arguments.from, &left_out);
  if (!records.ok()) return refused(records.status());
  // A report lists them itself.
  if (!arguments.outputs.any() || records.value().empty()) say_left_out(left_out);
  if (records.value().empty()) {
    std::error_code error;
    const bool is_report = std::filesystem::exists(arguments.from + "/summary.txt", error);
    say("there is no record in --from " + arguments.from +
        (is_report ? ", which seems to be a report; name the directory of the records it was made from"
                   : "; name the directory that processes had in " + std::string(kPreloadRecordsVariable) +
                         ", or that --records made"));
    return kBadUsage;
  }
  const PreloadMode mode = records.value().front().mode;
  say_all(run_summary(mode, records.value()));
  if (!arguments.outputs.any()) return 0;
  RunRecorder recorder({.outputs = arguments.outputs,
                        .records_directory = arguments.from,
                        .mode = mode,
                        .command = "the records in " + arguments.from});
  if (const Status opened = recorder.open(); !opened.ok()) return refused(opened);
  say_all(recorder.write("read from the records"));
  return recorder.is_complete() ? 0 : kNotWritten;
}

// An option with a value that says nothing here. `variable`: where it comes from if not from the command
// line; null: nowhere.
struct IdleOption {
  const char* name;
  std::string value;
  const char* variable;
};

// Says which options have no effect beside `other`. False: one of them is on the command line, so it was
// meant.
bool may_be_idle(const char* other, const char* why, const std::vector<IdleOption>& options) {
  bool may_be = true;
  for (const IdleOption& option : options) {
    if (option.value.empty()) continue;
    const char* inherited = option.variable != nullptr ? std::getenv(option.variable) : nullptr;
    if (inherited != nullptr && option.value == inherited) {
      say(std::string(option.variable) + " is ignored: " + other + " " + why);
    } else {
      say(std::string(other) + " " + why + ", so " + option.name + " has no effect; leave one of them out");
      may_be = false;
    }
  }
  return may_be;
}

std::string flag(bool is_set) {
  return is_set ? "1" : "";
}

// Refuses options that exclude --check or --from.
bool fits_together(const RunArguments& a) {
  if (!a.from.empty()) {
    if (!a.command.empty()) {
      say("--from reads existing records and runs nothing; leave out the command or --from");
      return false;
    }
    return may_be_idle("--from", "reads existing records and runs nothing",
                       {{"--check", flag(a.check), nullptr},
                        {"--events", a.events, kPreloadEventsVariable},
                        {"--learned", a.learned, kPreloadLearnedVariable},
                        {"--memory", a.memory, nullptr},
                        {"--no-tensors", flag(a.no_tensors), nullptr},
                        {"--observe", flag(a.observe), nullptr},
                        {"--pause-signal", a.pause_signal, kPauseSignalVariable},
                        {"--records", a.records, nullptr},
                        {"--tensors", flag(a.tensors), nullptr}});
  }
  if (a.command.empty()) {
    say("no command was given; put it behind the options, after --");
    return false;
  }
  if (a.check) {
    return may_be_idle("--check", "runs nothing of the command's",
                       {{"--events", a.events, kPreloadEventsVariable},
                        {"--learned", a.learned, kPreloadLearnedVariable},
                        {"--pause-signal", a.pause_signal, kPauseSignalVariable},
                        {"--records", a.records, nullptr},
                        {"--report", a.outputs.report, kReportVariable},
                        {"--snapshot", a.outputs.snapshot, kSnapshotVariable},
                        {"--trace", a.outputs.trace, kTraceVariable}});
  }
  if (a.tensors && a.no_tensors) {
    say("--tensors and --no-tensors contradict each other; leave one out");
    return false;
  }
  return true;
}

RunOptions options_of(const RunArguments& arguments, const Environment& inherited) {
  RunOptions options;
  options.mode = arguments.observe ? PreloadMode::kObserve : inherited_mode(inherited);
  if (arguments.tensors || arguments.no_tensors) options.tensors = arguments.tensors;
  options.memory = arguments.memory;
  options.events = arguments.events;
  if (arguments.outputs.any() && options.events.empty()) {
    options.events = std::to_string(kPreloadEventsDefaultBytes);
  }
  return options;
}

// The signal of --pause-signal, 0 without one. None: it is refused, and the user was told.
std::optional<int> pause_signal_of(const RunArguments& arguments) {
  const int signal = signal_number(arguments.pause_signal);
  if (signal == 0 && !arguments.pause_signal.empty()) {
    say("--pause-signal is '" + arguments.pause_signal + "'; use SIGUSR1, SIGUSR2 or SIGHUP");
    return std::nullopt;
  }
  if (signal == SIGUSR1 && arguments.outputs.any()) {
    say("--pause-signal cannot be SIGUSR1, at which reports are written; use SIGUSR2 or SIGHUP");
    return std::nullopt;
  }
  return signal;
}

void say_before_start(const RunArguments& arguments, PreloadMode mode,
                      const std::vector<std::string>& environment_lines) {
  say_all(environment_lines);
  if (const std::string others = system_preloads(); !others.empty()) {
    say(std::string(kSystemPreloads) + " puts " + others + " under every program too, behind ours");
  }
  if (const std::string obstacle = preload_obstacle(arguments.command.front()); !obstacle.empty()) {
    say(obstacle + "; nothing will be handled");
  }
  if (mode == PreloadMode::kOff && arguments.outputs.any()) {
    say("the report, trace and snapshot will be empty, because nothing is served or counted");
  }
}

Result<ChildEnd> watch_command(const RunArguments& arguments, Environment variables,
                               const ChildSignals& signals, int pause_signal, RunRecorder* recorder) {
  for (const char* own : {kReportVariable, kTraceVariable, kSnapshotVariable, kPauseSignalVariable}) {
    if (std::getenv(own) != nullptr) variables[own] = "";
  }
  ChildWatch watch;
  if (arguments.outputs.any()) {
    watch.handlers[SIGUSR1] = [recorder] { say_all(recorder->write("the run goes on")); };
  }
  if (pause_signal != 0) watch.handlers[pause_signal] = [recorder] { say_all(recorder->request_trim()); };
  if (!watch.handlers.empty()) watch.poll = [recorder] { say_all(recorder->poll()); };
  return run_child(arguments.command, variables, signals, watch);
}

// Prints the summary, and writes the outputs for the last time.
void tell_end(const RunArguments& arguments, PreloadMode mode, const ChildEnd& end, Records* records,
              RunRecorder* recorder) {
  std::vector<PreloadLeftOut> left_out;
  const Result<std::vector<PreloadReport>> read = read_preload_records(records->path(), &left_out);
  const bool has_summary = end.was_started && mode != PreloadMode::kOff;
  if (has_summary && read.ok()) {
    sum_up(mode, read.value());
    if (!arguments.outputs.any()) say_left_out(left_out);
  } else if (has_summary) {
    say("the records in " + records->path() +
        " were removed while the command ran, or cannot be read any more; name a directory that nobody "
        "cleans up with --records");
  }
  if (!arguments.outputs.any()) return;
  say_all(recorder->write("the command has ended with " + std::to_string(end.exit_code)));
  if (!recorder->is_complete() && read.ok()) {
    records->keep();
    say("the records are kept in " + records->path() + "; forebay run --from " + records->path() +
        told_elsewhere(arguments.outputs));
  }
}

int run(const RunArguments& arguments) {
  if (!fits_together(arguments)) return kBadUsage;
  if (!arguments.from.empty()) return tell_from(arguments);
  const Result<std::string> library = find_library();
  if (!library.ok()) return refused(library.status());
  const Environment inherited = inherited_environment();
  if (arguments.check) {
    const RunCheck check{.command = arguments.command,
                         .memory = arguments.memory,
                         .preload_library = library.value(),
                         .limit = std::chrono::seconds(arguments.check_limit_s)};
    return run_check(check, inherited);
  }
  // Signals are held from here on: a report requested early is written when it can be, and the outputs at the
  // end are whole.
  const ChildSignals signals;
  Records records;
  const std::string wanted = arguments.records.empty() ? inherited_records(inherited) : arguments.records;
  if (const Status opened = records.open(wanted); !opened.ok()) return refused(opened);
  RunOptions options = options_of(arguments, inherited);
  if (!arguments.learned.empty()) {
    const Result<std::string> learned = read_learned_file(arguments.learned);
    if (!learned.ok()) return refused(learned.status());
    std::error_code error;
    // The command may change its directory.
    options.learned = std::filesystem::absolute(arguments.learned, error).string();
  }
  options.preload_library = library.value();
  options.records_directory = records.path();
  const std::optional<int> pause_signal = pause_signal_of(arguments);
  if (!pause_signal) return kBadUsage;
  const Result<RunEnvironment> environment = run_environment(options, inherited);
  if (!environment.ok()) return refused(environment.status());
  RunRecorder recorder({.outputs = arguments.outputs,
                        .records_directory = records.path(),
                        .mode = options.mode,
                        .command = text_of(arguments.command)});
  if (const Status opened = recorder.open(); !opened.ok()) return refused(opened);
  say_before_start(arguments, options.mode, environment.value().lines);
  const Result<ChildEnd> end =
      watch_command(arguments, environment.value().set, signals, *pause_signal, &recorder);
  if (!end.ok()) return refused(end.status());
  tell_end(arguments, options.mode, end.value(), &records, &recorder);
  return end.value().exit_code;
}

bool is_option(const std::string& word) {
  return word.size() > 1 && word[0] == '-';
}

// The value that an option needs, by its placeholder.
std::string value_text(const std::string& values) {
  if (values == "DIR") return "a directory";
  if (values == "FILE") return "a file";
  if (values == "BYTES") return "bytes, such as 24GiB";
  if (values == "SIG") return "a signal";
  return "a number";
}

constexpr char kFooter[] =
    "The first line on standard error names the mode in force, the last ones the handled allocations. The "
    "exit code is the command's own (128 + n if signal n ended it).\n\n"
    "Where the command line cannot be changed, the environment does the same:\n"
    "  LD_PRELOAD=/path/to/libforebay-preload.so   the preload itself; an absolute path\n"
    "  FOREBAY_PRELOAD=arena|observe|off           its mode (default: arena)\n"
    "  FOREBAY_MEMORY=24GiB                        as --memory\n"
    "  FOREBAY_DEVICE_ROOM=384MiB                  device memory left for the driver; 0: none\n"
    "  FOREBAY_PRELOAD_RECORDS=DIR                 as --records; forebay run --from DIR reads it\n"
    "  FOREBAY_PRELOAD_EVENTS=256MiB               as --events (default: none)\n"
    "  FOREBAY_PRELOAD_LEARNED=FILE                as --learned\n"
    "  FOREBAY_LOG=info                            a line on standard error when an arena begins to serve\n"
    "  PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync, and PYTORCH_ALLOC_CONF   as --tensors\n"
    "  XLA_PYTHON_CLIENT_PREALLOCATE=false         for JAX, set unless you have set it\n"
    "  UCX_MEMTYPE_CACHE=n                         for UCX and MPI over it, set unless you have set it\n"
    "and, for forebay run itself, FOREBAY_RUN_REPORT, FOREBAY_RUN_TRACE, FOREBAY_RUN_SNAPSHOT and "
    "FOREBAY_RUN_PAUSE_SIGNAL as the options.\n\n"
    "Signals are passed to the command, but for SIGKILL, SIGXCPU, those of faults (SIGSEGV, SIGABRT, ...) "
    "and "
    "SIGTSTP. Two more are not: with --report, --trace or --snapshot SIGUSR1 (sent to the process of forebay "
    "run) writes these outputs at once, and the signal of --pause-signal pauses.";

}  // namespace

std::optional<int> take_run_command(const CommandText& called, std::vector<std::string>* arguments,
                                    std::vector<std::string>* command) {
  if (called.name != "forebay run") return std::nullopt;
  std::size_t at = 1;
  for (; at < arguments->size() && is_option((*arguments)[at]) && (*arguments)[at] != "--"; ++at) {
    const std::string& word = (*arguments)[at];
    const std::string name = word.substr(0, word.find('='));
    const auto option =
        std::find_if(called.options.begin(), called.options.end(), [&](const OptionText& one) {
          return std::find(one.names.begin(), one.names.end(), name) != one.names.end();
        });
    if (option == called.options.end()) {
      say(unknown_word_text(called, word) + "; the order is: forebay run [OPTIONS] -- COMMAND [ARGUMENTS]");
      return kBadUsage;
    }
    if (option->values.empty() || name.size() != word.size()) continue;
    const bool has_value = at + 1 < arguments->size() && (*arguments)[at + 1].rfind("--", 0) != 0;
    if (!has_value) {
      say(name + " needs " + value_text(option->values) + ": " + name + " " + option->values);
      return kBadUsage;
    }
    ++at;
  }
  const bool has_mark = at < arguments->size() && (*arguments)[at] == "--";
  const auto end = arguments->begin() + static_cast<std::ptrdiff_t>(at);
  command->assign(end + (has_mark ? 1 : 0), arguments->end());
  arguments->erase(end, arguments->end());
  return std::nullopt;
}

void add_run_command(CLI::App& app, Action& action, const std::vector<std::string>& words) {
  const auto arguments = std::make_shared<RunArguments>();  // Shared by the parser's fields and the action.
  RunArguments& a = *arguments;
  CLI::App* command = app.add_subcommand(
      "run", "Run a command with forebay's arena as its device allocator; the command itself is not changed");
  // For --help alone: its words are taken out before anything is parsed.
  add_value(*command, "command", a.command, "COMMAND",
            "The command and its arguments, behind all options of forebay run");
  add_value(*command, "--memory", a.memory, "BYTES",
            "Most device memory to use; every process sees a device of this size (default: all of the "
            "device; within another forebay run the smaller limit holds)");
  add_value(*command, "--learned", a.learned, "FILE",
            "Place blocks as an earlier run of the same job did in its steady state, from the first step on "
            "(the file is written by 'forebay replay --learn'; another job is served as without it)")
      ->envname(kPreloadLearnedVariable);
  command->add_flag("--observe", a.observe, "Change nothing; only count allocations");
  command->add_flag("--tensors", a.tensors,
                    "Have PyTorch allocate tensor by tensor (the default, unless you have configured its "
                    "allocator yourself)");
  command->add_flag("--no-tensors", a.no_tensors,
                    "Leave PyTorch's own cache in place, which allocates segments");
  CLI::Option* check = command->add_flag(
      "--check", a.check,
      "Do not run the command; try with its Python which features of PyTorch work in each of these modes");
  add_value(*command, "--check-limit", a.check_limit_s, "SECONDS",
            "Seconds that one probe of --check may take")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str()
      ->needs(check);
  for (const char* other : {"--observe", "--tensors", "--no-tensors"}) check->excludes(other);
  add_value(*command, "--records", a.records, "DIR", "Keep every process's record in this directory");
  add_value(*command, "--report", a.outputs.report, "DIR",
            "Write a report of each process, summary.txt and report.html into this directory: at the "
            "end, when a process runs out of memory, and on SIGUSR1")
      ->envname(kReportVariable);
  add_value(*command, "--trace", a.outputs.trace, "FILE",
            "Write the allocations and frees, for 'forebay replay'; several processes or devices get "
            "a file each, as FILE with process-N before its suffix")
      ->envname(kTraceVariable);
  add_value(*command, "--snapshot", a.outputs.snapshot, "FILE",
            "Write it for 'forebay explain' and PyTorch's memory visualiser (pytorch.org/memory_viz); "
            "files named as those of --trace")
      ->envname(kSnapshotVariable);
  add_value(*command, "--events", a.events, "BYTES",
            "Most bytes to keep of a process's events, 32 each; the oldest make room (64KiB to 2GiB; "
            "default: 256MiB for a report, trace or snapshot, and otherwise none)")
      ->envname(kPreloadEventsVariable);
  add_value(*command, "--pause-signal", a.pause_signal, "SIG",
            "On this signal (SIGUSR1, SIGUSR2, SIGHUP) have every process give back the unused memory "
            "of its arena, at its next call for memory; allocated blocks stay")
      ->envname(kPauseSignalVariable);
  add_value(*command, "--from", a.from, "DIR",
            "Run nothing: report, trace and snapshot from the records that processes have left in "
            "this directory (FOREBAY_PRELOAD_RECORDS)");
  command->footer(kFooter);
  command->callback([arguments, &action, &words] {
    arguments->command = words;
    action = [arguments] { return run(*arguments); };
  });
}

}  // namespace forebay
