#include "runtime/command/run/check.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

#include "allocator/preload/record.h"
#include "forebay/text.h"
#include "runtime/command/command_line.h"
#include "runtime/command/run/child.h"
#include "runtime/command/run/timed_process.h"
#include "runtime/command/terminal_line.h"

namespace forebay {
namespace {

constexpr char kProbe[] =
#include "check_probe.py.inc"
    ;
constexpr const char* kTorchVariables[] = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"};
constexpr char kUnbuffered[] = "PYTHONUNBUFFERED";
constexpr std::size_t kReasonLength = 160;  // Longer ones break over lines and hide the others.

// The ways in which the arena can serve PyTorch.
struct Mode {
  const char* name;   // The option that selects it.
  const char* text;   // Its description.
  const char* probe;  // Its name in the probe.
  bool tensors;
};
constexpr Mode kModes[] = {
    {"--tensors", "the default: PyTorch asks for every tensor, by backend:cudaMallocAsync", "tensors", true},
    {"--no-tensors", "PyTorch's own cache asks for segments", "cache", false},
    {"forebay_torch_alloc", "the program sets CUDAPluggableAllocator, or a MemPool of it", "pluggable",
     false},
};
constexpr std::size_t kDefaultMode = 0;
constexpr std::size_t kModeCount = std::size(kModes);

struct Feature {
  const char* name;
  const char* probe;
  bool needed;       // Every program needs it: a mode without it serves no program.
  const char* ours;  // forebay's replacement, which works in every mode; null: none.
};
constexpr Feature kFeatures[] = {
    {"allocation", "allocation", true, nullptr},
    {"statistics", "statistics", false, "forebay run --report DIR"},
    {"history", "history", false, "forebay run --snapshot FILE"},
    {"MemPool", "mempool", false, nullptr},
    {"CUDA graphs", "graphs", false, nullptr},
    {"compiled graphs", "compiled_graphs", false, nullptr},
    {"IPC", "ipc", false, nullptr},
    {"out of memory", "out_of_memory", true, nullptr},
};
constexpr std::size_t kFeatureCount = std::size(kFeatures);

struct Answer {
  bool tried = false;
  bool works = false;
  std::string words;  // The reason of a failure, or a remark.
};
using Answers = Answer[kModeCount][kFeatureCount];

int complain(const std::string& line, int exit_code) {
  return forebay::complain("forebay run", line, exit_code);
}

// As much of it as a line has room for.
std::string printable(const std::string& words) {
  const std::string text = shown_text(words);
  if (text.size() <= kReasonLength) return text;
  std::size_t end = kReasonLength - 4;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // No half characters.
  return text.substr(0, end) + " ...";
}

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.find_first_not_of(" \t\r") != std::string::npos) lines.push_back(printable(line));
  }
  return lines;
}

// "python3", "python3.12", "/opt/venv/bin/python", "pypy3".
bool is_python(const std::string& word) {
  const std::string name = std::filesystem::path(word).filename().string();
  for (const char* known : {"python", "pypy"}) {
    const std::size_t length = std::strlen(known);
    if (name.compare(0, length, known) != 0) continue;
    const auto fits = [](unsigned char letter) {
      return std::isdigit(letter) != 0 || letter == '.' || letter == 't';
    };
    return std::all_of(name.begin() + static_cast<std::ptrdiff_t>(length), name.end(), fits);
  }
  return false;
}

// The Python that runs the command: itself, or the one that a script such as torchrun names in its first
// line. Empty when there is none.
std::string python_of(const std::string& command) {
  if (is_python(command)) return command;
  std::ifstream file(find_command(command));
  std::string line;
  if (!std::getline(file, line) || line.compare(0, 2, "#!") != 0) return {};
  std::istringstream words(line.substr(2));
  for (std::string word; words >> word;) {
    if (is_python(word)) return word;
    // "#!/usr/bin/env -S python3".
    if (word[0] != '-' && std::filesystem::path(word).filename() != "env") break;
  }
  return {};
}

// A directory that goes with this.
class Scratch {
 public:
  Scratch() {
    std::error_code error;
    std::string pattern = temporary_directory(error) + "/forebay-check-XXXXXX";
    if (!error && ::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

class Checker {
 public:
  Checker(const RunCheck& check, const Environment& inherited, std::string python)
      : check_(check), inherited_(inherited), python_(std::move(python)) {}

  int run() {
    if (scratch_.path().empty() || !(std::ofstream(scratch_ / "probe.py") << kProbe)) {
      return complain(
          "cannot write the probe of --check to a directory for temporary files; set TMPDIR to one that can "
          "be written to",
          kCheckUsage);
    }
    if (const std::optional<int> obstacle = start()) return *obstacle;
    for (std::size_t mode = 0; mode < kModeCount; ++mode) {
      if (const std::optional<int> obstacle = check_mode(mode)) return *obstacle;
    }
    progress_.show("");
    print();
    return recommend();
  }

 private:
  struct Probed {
    TimedEnd end;
    std::vector<std::string> answer;  // The lines of the file.
    std::string last_words;           // The last line it printed.
  };

  // One probe. Without a mode nothing is preloaded. Errors: no process, or an option that cannot be.
  Result<Probed> probe(const char* feature, const Mode* mode) {
    for (const char* left : {"answer", "output", "records"}) {
      std::error_code ignored;
      std::filesystem::remove_all(scratch_ / left, ignored);
    }
    TimedProcess process;
    const std::string core =
        std::filesystem::path(check_.preload_library).replace_filename(FOREBAY_CORE_SONAME).string();
    process.command = {python_, scratch_ / "probe.py", feature, mode != nullptr ? mode->probe : "cache",
                       core,    scratch_ / "answer"};
    process.output = scratch_ / "output";
    process.limit = check_.limit;
    process.unset.assign(std::begin(kTorchVariables), std::end(kTorchVariables));
    if (mode != nullptr) {
      Environment without = inherited_;
      for (const char* variable : kTorchVariables) without.erase(variable);
      std::error_code ignored;
      std::filesystem::create_directory(scratch_ / "records", ignored);
      FOREBAY_ASSIGN_OR_RETURN(const RunEnvironment environment,
                               run_environment({.tensors = mode->tensors,
                                                .memory = check_.memory,
                                                .preload_library = check_.preload_library,
                                                .records_directory = scratch_ / "records"},
                                               without));
      process.set = environment.set;
    }
    // Python buffers output to a file, and a probe that crashes would lose its last words. A variable instead
    // of -u, so that processes that the probe starts have it too.
    process.set[kUnbuffered] = "1";
    FOREBAY_ASSIGN_OR_RETURN(const TimedEnd end, run_timed(process));
    Probed probed{.end = end, .answer = lines_of(scratch_ / "answer")};
    if (const std::vector<std::string> printed = lines_of(process.output); !printed.empty()) {
      probed.last_words = printed.back();
    }
    return probed;
  }

  // How a probe ended that gave no answer, or gave one and then did not end as it should.
  std::string end_text(const Probed& probed) const {
    if (probed.end.timed_out) return "gave no answer within " + std::to_string(check_.limit.count()) + " s";
    std::string text = "ended with exit code " + std::to_string(probed.end.exit_code);
    if (probed.end.signal != 0) {
      text = "ended by signal " + std::to_string(probed.end.signal) + " (" + ::strsignal(probed.end.signal) +
             ")";
    }
    if (!probed.answer.empty()) return "answered, and then " + text;
    return probed.last_words.empty() ? text : text + ": " + probed.last_words;
  }

  // Asks without the preload whether there is anything to try. The exit code if there is not.
  std::optional<int> start() {
    progress_.show("starting " + python_);
    const Result<Probed> probed = probe("start", nullptr);
    progress_.show("");
    if (!probed.ok()) return complain(probed.status().message(), kCheckUsage);
    const Probed& found = probed.value();
    if (found.end.interrupted != 0) return 128 + found.end.interrupted;
    const std::string kind = found.answer.empty() ? "" : found.answer[0];
    const auto line = [&](std::size_t i) { return i < found.answer.size() ? found.answer[i] : "not known"; };
    if (kind == "device") {
      subject_ = "torch " + line(1) + " (CUDA " + line(2) + ") of " + python_ + ", on " + line(3);
      return std::nullopt;
    }
    if (kind == "no device") {
      return complain("--check tries PyTorch on a device, and torch " + line(1) + " of " + python_ +
                          " finds none: " + line(2) + "; run it where `nvidia-smi` lists one",
                      kCheckNoDevice);
    }
    return complain(
        "--check tries the PyTorch of " + python_ + ", and importing it " +
            (kind == "no torch" ? "raises " + line(1) : end_text(found)) +
            "; give the Python that the training runs with: forebay run --check -- /path/to/python",
        kCheckNoTorch);
  }

  std::optional<int> check_mode(std::size_t mode) {
    for (std::size_t i = 0; i < kFeatureCount; ++i) {
      progress_.show(std::string("trying ") + kFeatures[i].name + " under " + kModes[mode].name);
      const Result<Probed> probed = probe(kFeatures[i].probe, &kModes[mode]);
      if (!probed.ok()) {
        progress_.show("");
        return complain(probed.status().message(), kCheckUsage);
      }
      if (probed.value().end.interrupted != 0) return 128 + probed.value().end.interrupted;
      Answer& answer = answers_[mode][i];
      answer = judge(probed.value());
      if (i == 0) {
        add_served(&answer);
        if (!answer.works) break;  // The others would fail of the same.
      }
    }
    return std::nullopt;
  }

  Answer judge(const Probed& probed) const {
    constexpr char kFails[] = "fails: ";
    Answer answer{.tried = true};
    const bool ended_well = !probed.end.timed_out && probed.end.signal == 0 && probed.end.exit_code == 0;
    const std::string words = probed.answer.empty() ? "" : probed.answer[0];
    if (words.compare(0, sizeof(kFails) - 1, kFails) == 0) {
      answer.words = words.substr(sizeof(kFails) - 1);
    } else if (!ended_well || words != "works") {
      answer.words = end_text(probed);
    } else {
      answer.works = true;
    }
    return answer;
  }

  // Whether it was the arena that the tensors came from.
  void add_served(Answer* answer) const {
    const Result<std::vector<PreloadReport>> records = read_preload_records(scratch_ / "records");
    if (!answer->works || !records.ok()) return;
    std::uint64_t served = 0, all = 0;
    std::string problem;
    for (const PreloadReport& record : records.value()) {
      served += record.allocations[static_cast<std::size_t>(PreloadServer::kArena)];
      for (const std::uint64_t count : record.allocations) all += count;
      if (problem.empty()) problem = record.problem;
    }
    answer->works = served > 0;
    answer->words =
        "the arena served " + std::to_string(served) + " of " + std::to_string(all) + " allocations";
    if (!answer->works && !problem.empty()) answer->words += ": " + printable(problem);
  }

  bool works(std::size_t mode, std::size_t feature) const { return answers_[mode][feature].works; }
  // Whether every feature that all programs need works.
  bool serves(std::size_t mode) const {
    for (std::size_t i = 0; i < kFeatureCount; ++i) {
      if (kFeatures[i].needed && !works(mode, i)) return false;
    }
    return true;
  }
  // A mode that has the feature; the first of them.
  std::optional<std::size_t> mode_with(std::size_t feature) const {
    for (std::size_t mode = 0; mode < kModeCount; ++mode) {
      if (works(mode, feature) && serves(mode)) return mode;
    }
    return std::nullopt;
  }

  void print() const {
    std::printf("%s\n", subject_.c_str());
    for (const char* variable : kTorchVariables) {
      if (const auto found = inherited_.find(variable); found != inherited_.end() && !found->second.empty()) {
        std::printf("without your %s='%s', which would choose one of these modes\n", variable,
                    printable(found->second).c_str());
      }
    }
    for (std::size_t mode = 0; mode < kModeCount; ++mode) {
      std::printf("\n%s, %s\n", kModes[mode].name, kModes[mode].text);
      for (std::size_t i = 0; i < kFeatureCount; ++i) {
        std::printf("  %-17s%s\n", kFeatures[i].name, answer_text(mode, i).c_str());
      }
    }
    std::printf("\n");
  }

  std::string answer_text(std::size_t mode, std::size_t feature) const {
    const Answer& answer = answers_[mode][feature];
    if (answer.works) return answer.words.empty() ? "works" : "works; " + answer.words;
    const std::string words = answer.tried ? answer.words : "not tried, since nothing can be allocated";
    std::string instead;
    if (const std::optional<std::size_t> other = mode_with(feature)) instead = kModes[*other].name;
    if (const char* ours = kFeatures[feature].ours; ours != nullptr && answer.tried) {
      instead += (instead.empty() ? "" : " or ") + std::string(ours);
    }
    return (instead.empty() ? "fails" : "use instead " + instead) + ": " + words;
  }

  // The last line: the options to run with.
  int recommend() const {
    std::string missing;
    for (std::size_t i = 0; i < kFeatureCount; ++i) {
      if (works(kDefaultMode, i)) continue;
      if (kFeatures[i].needed && serves(1)) {
        std::printf("use --no-tensors with this PyTorch: under --tensors, %s fails\n", kFeatures[i].name);
        return kCheckDone;
      }
      missing += (missing.empty() ? "" : ", ") + std::string(kFeatures[i].name);
    }
    if (serves(kDefaultMode)) {
      std::printf(
          "--tensors stays the default%s%s\n",
          missing.empty() ? ": all of this works" : "; it is not for programs that need: ", missing.c_str());
      return kCheckDone;
    }
    if (serves(2)) {
      std::printf(
          "use forebay_torch_alloc, by two lines in the program; neither --tensors nor --no-tensors serves "
          "this PyTorch\n");
      return kCheckDone;
    }
    std::printf(
        "nothing of the arena serves this PyTorch; `forebay run --observe` counts without changing "
        "anything\n");
    return kCheckNothing;
  }

  const RunCheck& check_;
  const Environment& inherited_;
  const std::string python_;
  const Scratch scratch_;
  TerminalLine progress_;
  std::string subject_;  // "torch 2.11 (CUDA 13.0) of python3, on NVIDIA H200".
  Answers answers_;
};

}  // namespace

int run_check(const RunCheck& check, const Environment& inherited) {
  const std::string python = python_of(check.command.front());
  if (python.empty()) {
    return complain(
        "--check was asked for '" + printable(check.command.front()) +
            "', which is no Python and no script that names one in its first line; give the Python that the "
            "training runs with: forebay run --check -- /path/to/python",
        kCheckUsage);
  }
  return Checker(check, inherited, python).run();
}

}  // namespace forebay
