#include "run_command.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "run_child.h"
#include "run_environment.h"
#include "run_summary.h"

extern char** environ;

namespace forebay {
namespace {

constexpr int kBadUsage = 2;
constexpr char kLibraryName[] = "libforebay-preload.so";
constexpr char kSystemPreloads[] = "/etc/ld.so.preload";

struct RunArguments {
  std::vector<std::string> command;
  std::string memory;
  std::string records;
  bool observe = false;
  bool tensors = false;
  bool no_tensors = false;
};

void say(const std::string& line) {
  std::fprintf(stderr, "forebay run: %s\n", line.c_str());
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

// The preload lies beside the core that this program runs on, so that both are of one build.
Result<std::string> find_library() {
  Dl_info info{};
  const auto* core = reinterpret_cast<const void*>(&preload_record_of_process);
  std::error_code error;
  std::filesystem::path path;
  if (::dladdr(core, &info) != 0 && info.dli_fname != nullptr) {
    path = std::filesystem::canonical(info.dli_fname, error).parent_path() / kLibraryName;
  }
  if (path.empty() || !std::filesystem::exists(path, error)) {
    return Status(
        StatusCode::kUnavailable,
        "cannot find " + (path.empty() ? std::string(kLibraryName) : path.string()) +
            ": it belongs beside libforebay-core.so and is built on Linux on x86-64 and aarch64; install it");
  }
  return path.string();
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
      std::string pattern = (std::filesystem::temp_directory_path(error) / "forebay-run-XXXXXX").string();
      if (error || ::mkdtemp(pattern.data()) == nullptr) {
        return {StatusCode::kIoError,
                "cannot make a directory for records in " + pattern +
                    "; set TMPDIR to one that can be written to, or name one with --records"};
      }
      path_ = pattern;
      is_temporary_ = true;
      return {};
    }
    std::filesystem::create_directories(wanted, error);
    if (!error) path_ = std::filesystem::canonical(wanted, error).string();
    if (error) return {StatusCode::kIoError, "cannot use --records " + wanted + ": " + error.message()};
    // What an earlier run left there is not this one's.
    if (const Result<std::vector<PreloadReport>> old = read_preload_records(path_);
        old.ok() && !old.value().empty()) {
      return {StatusCode::kInvalidArgument,
              "--records " + wanted + " has records of another run; name an empty directory"};
    }
    return {};
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool is_temporary_ = false;
};

// Others that the system puts under every program, and that may hook what we hook.
std::string system_preloads() {
  std::ifstream file(kSystemPreloads);
  std::string all;
  for (std::string word; file >> word;) all += (all.empty() ? "" : " ") + word;
  return all;
}

int run(const RunArguments& arguments) {
  const auto complain = [](const Status& status) {
    say(status.message());
    return kBadUsage;
  };
  if (arguments.tensors && arguments.no_tensors) {
    say("--tensors and --no-tensors contradict each other; leave one out");
    return kBadUsage;
  }
  const Result<std::string> library = find_library();
  if (!library.ok()) return complain(library.status());
  Records records;
  if (const Status opened = records.open(arguments.records); !opened.ok()) return complain(opened);
  RunOptions options;
  options.mode = arguments.observe ? PreloadMode::kObserve : PreloadMode::kArena;
  if (arguments.tensors || arguments.no_tensors) options.tensors = arguments.tensors;
  options.memory = arguments.memory;
  options.preload_library = library.value();
  options.records_directory = records.path();
  const Result<RunEnvironment> environment = run_environment(options, inherited_environment());
  if (!environment.ok()) return complain(environment.status());
  for (const std::string& line : environment.value().lines) say(line);
  if (const std::string others = system_preloads(); !others.empty()) {
    say(std::string(kSystemPreloads) + " puts " + others + " under every program too, behind ours");
  }
  if (const std::string obstacle = preload_obstacle(arguments.command.front()); !obstacle.empty()) {
    say(obstacle + "; nothing will be handled");
  }

  const Result<int> exit_code = run_child(arguments.command, environment.value().set);
  if (!exit_code.ok()) return complain(exit_code.status());
  const Result<std::vector<PreloadReport>> read = read_preload_records(records.path());
  if (!read.ok()) {
    say(read.status().message());
  } else {
    for (const std::string& line : run_summary(options.mode, read.value())) say(line);
  }
  return exit_code.value();
}

constexpr char kFooter[] =
    "What is in force is said in the first line on standard error, and what was handled in the last ones. "
    "The exit code "
    "is the command's own (128 + n when signal n ended it).\n\n"
    "Where the command line cannot be changed, the environment does the same:\n"
    "  LD_PRELOAD=/path/to/libforebay-preload.so   the preload itself; the path from the root\n"
    "  FOREBAY_PRELOAD=arena|observe|off           what it does (default: arena)\n"
    "  FOREBAY_MEMORY=24GiB                        as --memory\n"
    "  FOREBAY_PRELOAD_RECORDS=DIR                 as --records\n"
    "  FOREBAY_LOG=info                            says on standard error when an arena begins to serve\n"
    "  PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync, and PYTORCH_ALLOC_CONF   as --tensors\n"
    "  XLA_PYTHON_CLIENT_PREALLOCATE=false         for JAX, set unless you have set it";

}  // namespace

void add_run_command(CLI::App& app, std::function<int()>& action) {
  const auto arguments = std::make_shared<RunArguments>();  // Shared by the parser's fields and the action.
  RunArguments& a = *arguments;
  CLI::App* command = app.add_subcommand(
      "run", "Run a command with the arena under its device memory; the command itself is not changed");
  command->add_option("command", a.command, "The command and its arguments, after --")
      ->required()
      ->type_name("COMMAND");
  command
      ->add_option(
          "--memory", a.memory,
          "Most device memory to use: what every process is told that a device has (default: all it has)")
      ->type_name("BYTES");
  command->add_flag("--observe", a.observe, "Change nothing; only count what is allocated");
  command->add_flag("--tensors", a.tensors,
                    "Have PyTorch allocate tensor by tensor (the default unless you have set its allocator's "
                    "configuration yourself)");
  command->add_flag("--no-tensors", a.no_tensors,
                    "Leave PyTorch's own cache in place, which allocates segments");
  command->add_option("--records", a.records, "Keep every process's record in this directory")
      ->type_name("DIR");
  command->footer(kFooter);
  command->callback([arguments, &action] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace forebay
