// Computes the changes that `forebay run` makes to the environment of its command, and the lines that report
// them. A function of the inherited environment, so that a test can pass any.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "allocator/preload/record.h"
#include "forebay/status.h"

namespace forebay {

using Environment = std::map<std::string, std::string>;

struct RunOptions {
  PreloadMode mode = PreloadMode::kArena;
  // Whether PyTorch allocates tensor by tensor. Not given: yes, unless the user has configured its allocator.
  std::optional<bool> tensors;
  std::string memory;             // As given; empty: all of the device.
  std::string events;             // Most bytes of events of a process, as given; empty: none.
  std::string learned;            // A file of learned placements; empty: none.
  std::string preload_library;    // An absolute path.
  std::string records_directory;  // An absolute path.
};

// Set for the command to the directory of this `forebay run`'s records, so that a `forebay run` inside it can
// tell this one's settings from the user's.
inline constexpr char kRunWithinVariable[] = "FOREBAY_RUN_WITHIN";
// Set for the command to this `forebay run`'s limit in bytes: FOREBAY_MEMORY may be changed in between.
inline constexpr char kRunWithinMemoryVariable[] = "FOREBAY_RUN_WITHIN_MEMORY";

// The mode in FOREBAY_PRELOAD, set by the user or by an outer `forebay run`; arena for an unknown value.
PreloadMode inherited_mode(const Environment& inherited);
// The user's FOREBAY_PRELOAD_RECORDS; empty without one, or if it is an outer `forebay run`'s.
std::string inherited_records(const Environment& inherited);

// TMPDIR if it is set and not empty, else /tmp. `error`: it is no directory.
std::string temporary_directory(std::error_code& error);

struct RunEnvironment {
  Environment set;  // Variables with their new values.
  // The first says which mode is in force and its meaning for PyTorch, the others list further changes and
  // findings.
  std::vector<std::string> lines;
};

// Errors: kInvalidArgument for an option or variable with a wrong value, and for options that exclude each
// other.
Result<RunEnvironment> run_environment(const RunOptions& options, const Environment& inherited);

// The requests that PyTorch makes of the arena under a configuration (PYTORCH_CUDA_ALLOC_CONF).
enum class TorchGranularity {
  kSegments,    // PyTorch's own cache, which asks for large segments.
  kTensors,     // backend:cudaMallocAsync: a request for every tensor, in the order of its stream.
  kExpandable,  // expandable_segments: none; PyTorch maps memory itself.
};
TorchGranularity torch_granularity(const std::string& configuration);

}  // namespace forebay
