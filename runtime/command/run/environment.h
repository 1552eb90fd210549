// What `forebay run` changes in the environment of the command it starts, and what it has to say about it.
// Computed from the environment there is, so that a test can ask what becomes of any.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "allocator/preload/record.h"
#include "forebay/status.h"

namespace forebay {

using Environment = std::map<std::string, std::string>;

struct RunOptions {
  PreloadMode mode = PreloadMode::kArena;
  // Whether PyTorch is to allocate tensor by tensor. Not given: yes, unless the user has chosen otherwise.
  std::optional<bool> tensors;
  std::string memory;             // As given; empty: what the device has.
  std::string events;             // Most bytes of events of a process, as given; empty: none.
  std::string preload_library;    // From the root.
  std::string records_directory;  // From the root.
};

// Set for the command, so that a `forebay run` in it knows what is the outer one's and what a user's: the
// directory of the outer one's records.
inline constexpr char kRunWithinVariable[] = "FOREBAY_RUN_WITHIN";
// The same of the outer one's limit, in bytes: FOREBAY_MEMORY may be set anew in between.
inline constexpr char kRunWithinMemoryVariable[] = "FOREBAY_RUN_WITHIN_MEMORY";

// The mode that the user has asked for by FOREBAY_PRELOAD, which an outer `forebay run` sets too and means.
// Where it says nothing that the preload knows: arena.
PreloadMode inherited_mode(const Environment& inherited);
// The user's FOREBAY_PRELOAD_RECORDS; empty where there is none, or it is an outer `forebay run`'s.
std::string inherited_records(const Environment& inherited);

struct RunEnvironment {
  Environment set;  // Variables with their new values.
  // One line each: the first says what is in force and what that means for PyTorch, the others what else was
  // changed or found.
  std::vector<std::string> lines;
};

// Errors: kInvalidArgument for an option that cannot be.
Result<RunEnvironment> run_environment(const RunOptions& options, const Environment& inherited);

// What of PyTorch's allocator a configuration as PYTORCH_CUDA_ALLOC_CONF has it leaves to the arena.
enum class TorchGranularity {
  kSegments,    // PyTorch's own cache, which asks for large segments.
  kTensors,     // backend:cudaMallocAsync: every tensor is asked for, in the order of its stream.
  kExpandable,  // expandable_segments: PyTorch maps memory itself, past us.
};
TorchGranularity torch_granularity(const std::string& configuration);

}  // namespace forebay
