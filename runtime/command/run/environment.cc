#include "runtime/command/run/environment.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>

#include "allocator/preload/events.h"
#include "allocator/preload/learned_file.h"
#include "forebay/text.h"
#include "forebay/units.h"

namespace forebay {
namespace {

constexpr std::uint64_t kLeastMemory = 2_MiB;

// PyTorch has had two names for one thing; which of them it reads depends on its version.
constexpr const char* kTorchVariables[] = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"};
constexpr const char* kTorchTensors = "backend:cudaMallocAsync";
// UCX hooks the driver's calls to learn which memory is the device's. It does not see the arena's memory,
// takes it for host memory, and copies it on the host. Without its cache it asks the driver.
constexpr const char* kUcxVariable = "UCX_MEMTYPE_CACHE";
constexpr const char* kJaxVariables[] = {"XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"};

std::string value_of(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::string() : found->second;
}

// The entries of "a:b,c:d", without white space.
std::vector<std::pair<std::string, std::string>> entries_of(const std::string& configuration) {
  std::vector<std::pair<std::string, std::string>> entries;
  std::string text;
  std::copy_if(configuration.begin(), configuration.end(), std::back_inserter(text),
               [](unsigned char letter) { return std::isspace(letter) == 0; });
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::size_t colon = entry.find(':');
    if (colon != std::string::npos) entries.emplace_back(entry.substr(0, colon), entry.substr(colon + 1));
    begin = end + 1;
  }
  return entries;
}

// The list as LD_PRELOAD has it, without that path.
std::string without(const std::string& list, const std::string& path) {
  std::string rest;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find_first_of(" :", begin), list.size());
    const std::string entry = list.substr(begin, end - begin);
    if (!entry.empty() && entry != path) rest += (rest.empty() ? "" : ":") + entry;
    begin = end + 1;
  }
  return rest;
}

// The variable that the user has set, and its value.
struct TorchChoice {
  std::string variable;  // Empty: none.
  std::string value;
};
TorchChoice torch_choice(const Environment& inherited) {
  for (const char* variable : kTorchVariables) {
    if (const std::string value = value_of(inherited, variable); !value.empty()) return {variable, value};
  }
  return {};
}

const char* granularity_text(TorchGranularity granularity) {
  switch (granularity) {
    case TorchGranularity::kTensors:
      return "PyTorch allocates tensor by tensor (backend:cudaMallocAsync; its own history and snapshots are "
             "off with that backend; --report and --snapshot give them)";
    case TorchGranularity::kExpandable:
      return "PyTorch maps its memory itself (expandable_segments), which the arena does not serve";
    case TorchGranularity::kSegments:
      break;
  }
  return "PyTorch's cache asks for whole segments, and fragmentation inside them stays";
}

// Decides how PyTorch allocates, and returns the end of the first line.
std::string choose_torch(const RunOptions& options, const Environment& inherited, Environment* set) {
  const TorchChoice chosen = torch_choice(inherited);
  const bool is_chosen = !chosen.variable.empty();
  const bool tensors = options.tensors.value_or(!is_chosen);
  if (!tensors && !is_chosen) return granularity_text(TorchGranularity::kSegments);
  if (!tensors) {
    const TorchGranularity granularity = torch_granularity(chosen.value);
    const bool is_outer = !value_of(inherited, kRunWithinVariable).empty() && chosen.value == kTorchTensors;
    std::string text = chosen.variable + " is '" + chosen.value +
                       (is_outer ? "' (of the forebay run around this one, kept): " : "' (yours, kept): ") +
                       granularity_text(granularity);
    if (granularity != TorchGranularity::kTensors) text += "; --tensors replaces it";
    return text;
  }
  for (const char* variable : kTorchVariables) (*set)[variable] = kTorchTensors;
  std::string text = granularity_text(TorchGranularity::kTensors);
  if (is_chosen && torch_granularity(chosen.value) != TorchGranularity::kTensors) {
    text += ", in place of your " + chosen.variable + "='" + chosen.value + "'";
  }
  return text;
}

// The limit of a `forebay run` around this one; 0: none.
std::uint64_t outer_limit(const Environment& inherited) {
  std::uint64_t bytes = 0;
  const std::string text = value_of(inherited, kRunWithinMemoryVariable);
  return parse_bytes(text.c_str(), &bytes) ? bytes : 0;
}

std::string not_held(std::uint64_t outer_bytes) {
  return "the " + format_bytes(outer_bytes) +
         " that the forebay run around this one allows are not enforced: only the arena enforces a limit";
}

struct MemoryLimit {
  std::uint64_t bytes = 0;        // 0: none.
  std::uint64_t outer_bytes = 0;  // The limit of a `forebay run` around this one; 0: none.
  std::string line;               // A remark for the user, or empty.
};

// The command line before FOREBAY_MEMORY, and never more than a `forebay run` around this one allows.
Result<MemoryLimit> memory_limit(const RunOptions& options, const Environment& inherited) {
  const std::string from_environment = value_of(inherited, kPreloadMemoryVariable);
  const bool is_option = !options.memory.empty();
  const std::string wanted = is_option ? options.memory : from_environment;
  const std::string name = is_option ? "--memory" : kPreloadMemoryVariable;
  MemoryLimit limit;
  if (const std::string question = size_question(wanted.c_str()); !question.empty())
    return Status(StatusCode::kInvalidArgument, name + " is " + question);
  if (!wanted.empty() && (!parse_bytes(wanted.c_str(), &limit.bytes) || limit.bytes < kLeastMemory)) {
    return Status(StatusCode::kInvalidArgument,
                  name + " is '" + wanted + "'; use bytes, such as 24GiB, and at least " +
                      format_bytes(kLeastMemory) + ", the unit in which a device maps memory");
  }
  limit.outer_bytes = outer_limit(inherited);
  std::uint64_t variable_bytes = 0;
  if (limit.outer_bytes != 0 && (limit.bytes == 0 || limit.bytes > limit.outer_bytes)) {
    if (limit.bytes != 0) {
      limit.line = name + " " + wanted + " is more than the " + format_bytes(limit.outer_bytes) +
                   " that the forebay run around this one allows, so the smaller limit holds";
    }
    limit.bytes = limit.outer_bytes;
  } else if (is_option && parse_bytes(from_environment.c_str(), &variable_bytes) &&
             variable_bytes < limit.bytes) {
    limit.line = "--memory " + wanted + " is more than " + kPreloadMemoryVariable + "=" + from_environment +
                 ", and replaces it";
  }
  return limit;
}

// JAX takes three quarters of the device in one piece, and manages that by itself.
void choose_jax(const Environment& inherited, RunEnvironment* environment) {
  for (const char* variable : kJaxVariables) {
    if (!value_of(inherited, variable).empty()) return;
  }
  environment->set[kJaxVariables[0]] = "false";
}

// The command runs without the preload.
RunEnvironment off_environment(const Environment& inherited) {
  RunEnvironment environment;
  environment.set[kPreloadModeVariable] = "off";
  environment.lines.push_back(format_text(
      "%s=off: the command runs as it is, and nothing is served or counted", kPreloadModeVariable));
  if (const std::uint64_t outer = outer_limit(inherited); outer != 0) {
    environment.lines.push_back(not_held(outer));
  }
  return environment;
}

Status check_preload_path(const std::string& library) {
  if (library.find_first_of(" :") == std::string::npos) return Status();
  return {StatusCode::kInvalidArgument,
          "cannot preload " + library +
              ": LD_PRELOAD ends a path at a space or a colon; install forebay in a directory without"};
}

void set_preload(const RunOptions& options, const Environment& inherited, RunEnvironment* environment) {
  std::string preloads = options.preload_library;
  if (const std::string others = without(value_of(inherited, "LD_PRELOAD"), options.preload_library);
      !others.empty()) {
    preloads += ":" + others;
    environment->lines.push_back("LD_PRELOAD was '" + others + "', which stays behind ours");
  }
  environment->set["LD_PRELOAD"] = preloads;
  environment->set[kPreloadModeVariable] = options.mode == PreloadMode::kObserve ? "observe" : "arena";
  environment->set[kPreloadRecordsVariable] = options.records_directory;
  environment->set[kRunWithinVariable] = options.records_directory;
}

Status set_events(const std::string& events, RunEnvironment* environment) {
  if (events.empty()) return Status();
  std::uint64_t bytes = 0;
  if (!parse_bytes(events.c_str(), &bytes) ||
      (bytes != 0 && (bytes < kPreloadEventsLeastBytes || bytes > kPreloadEventsMostBytes))) {
    return {StatusCode::kInvalidArgument,
            "--events is '" + events + "'; use " + format_bytes(kPreloadEventsLeastBytes) + " to " +
                format_bytes(kPreloadEventsMostBytes) + ", such as 256MiB, or 0 for none"};
  }
  environment->set[kPreloadEventsVariable] = std::to_string(bytes);
  return Status();
}

Status observe(const RunOptions& options, const Environment& inherited, std::uint64_t outer_bytes,
               RunEnvironment* environment) {
  const auto refusal = [](const std::string& option) {
    return Status(StatusCode::kInvalidArgument,
                  "--observe changes nothing, so it cannot " + option + "; leave one of them out");
  };
  if (!options.memory.empty()) return refusal("keep to --memory " + options.memory);
  if (!options.learned.empty()) return refusal("place blocks by --learned " + options.learned);
  if (options.tensors.value_or(false)) return refusal("have PyTorch allocate by --tensors");
  const bool is_inherited = inherited_mode(inherited) == PreloadMode::kObserve;
  const std::string source = is_inherited ? format_text(" (%s=observe)", kPreloadModeVariable) : "";
  environment->lines.insert(
      environment->lines.begin(),
      "observing" + source + ": every allocation goes to the driver and is counted; nothing is changed");
  if (outer_bytes != 0) environment->lines.push_back(not_held(outer_bytes));
  return Status();
}

void serve(const RunOptions& options, const Environment& inherited, const MemoryLimit& limit,
           RunEnvironment* environment) {
  if (!limit.line.empty()) environment->lines.push_back(limit.line);
  std::string first = "the arena serves device memory";
  if (limit.bytes != 0) {
    environment->set[kPreloadMemoryVariable] = std::to_string(limit.bytes);
    environment->set[kRunWithinMemoryVariable] = std::to_string(limit.bytes);
    first += ", at most " + format_bytes(limit.bytes) + " of each device";
  }
  if (!options.learned.empty()) {
    environment->set[kPreloadLearnedVariable] = options.learned;
    first += ", placed as learned";
  }
  first += "; " + choose_torch(options, inherited, &environment->set);
  choose_jax(inherited, environment);
  if (value_of(inherited, kUcxVariable).empty()) environment->set[kUcxVariable] = "n";
  if (environment->set.count(kJaxVariables[0]) != 0) first += "; JAX preallocates nothing";
  environment->lines.insert(environment->lines.begin(), first);
}

}  // namespace

TorchGranularity torch_granularity(const std::string& configuration) {
  TorchGranularity granularity = TorchGranularity::kSegments;
  for (const auto& [name, value] : entries_of(configuration)) {
    if (name == "backend" && value == "cudaMallocAsync") return TorchGranularity::kTensors;
    if (name == "expandable_segments" && (value == "True" || value == "true")) {
      granularity = TorchGranularity::kExpandable;
    }
  }
  return granularity;
}

PreloadMode inherited_mode(const Environment& inherited) {
  const std::string mode = value_of(inherited, kPreloadModeVariable);
  if (mode == "off") return PreloadMode::kOff;
  return mode == "observe" ? PreloadMode::kObserve : PreloadMode::kArena;
}

std::string inherited_records(const Environment& inherited) {
  const std::string records = value_of(inherited, kPreloadRecordsVariable);
  return records == value_of(inherited, kRunWithinVariable) ? std::string() : records;
}

Result<RunEnvironment> run_environment(const RunOptions& options, const Environment& inherited) {
  const std::string mode = value_of(inherited, kPreloadModeVariable);
  if (!mode.empty() && mode != "arena" && mode != "observe" && mode != "off") {
    return Status(StatusCode::kInvalidArgument,
                  format_text("%s is '%s'; use arena, observe or off, or leave it out", kPreloadModeVariable,
                              shown_value(mode).c_str()));
  }
  if (options.mode == PreloadMode::kOff) return off_environment(inherited);
  FOREBAY_RETURN_IF_ERROR(check_preload_path(options.preload_library));
  RunEnvironment environment;
  set_preload(options, inherited, &environment);
  FOREBAY_RETURN_IF_ERROR(set_events(options.events, &environment));
  FOREBAY_ASSIGN_OR_RETURN(const MemoryLimit limit, memory_limit(options, inherited));
  if (options.mode == PreloadMode::kObserve) {
    FOREBAY_RETURN_IF_ERROR(observe(options, inherited, limit.outer_bytes, &environment));
  } else {
    serve(options, inherited, limit, &environment);
  }
  return environment;
}

std::string temporary_directory(std::error_code& error) {
  const char* chosen = std::getenv("TMPDIR");
  const std::string directory = chosen != nullptr && chosen[0] != '\0' ? chosen : "/tmp";
  if (!std::filesystem::is_directory(directory, error) && !error)
    error = std::make_error_code(std::errc::not_a_directory);
  return directory;
}

}  // namespace forebay
