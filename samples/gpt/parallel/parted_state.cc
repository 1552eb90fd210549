#include "parallel/parted_state.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "forebay/error.h"
#include "forebay/text.h"

namespace forebay::gpt {
namespace {

namespace fs = std::filesystem;

std::string parts_file(const std::string& directory) {
  return directory + "/parts";
}

std::string step_name(std::uint64_t step) {
  return "step-" + std::to_string(step);
}

std::string parts_text(const std::string& step, const RankGrid& shape) {
  return step + " tensor-parallel " + std::to_string(shape.tensor_parallel()) + " pipeline-parallel " +
         std::to_string(shape.pipeline_parallel()) + "\n";
}

}  // namespace

std::string directory_to_load(Grid& grid, const std::string& directory, std::optional<std::uint64_t> wanted) {
  std::error_code error;
  if (fs::exists(directory + "/latest", error) || !fs::exists(parts_file(directory), error)) return directory;
  std::ifstream file(parts_file(directory));
  std::string step;
  std::getline(file, step, ' ');
  std::ostringstream rest;
  rest << step << ' ' << file.rdbuf();
  if (step.rfind("step-", 0) != 0 || step.find('/') != std::string::npos ||
      !fs::is_directory(directory + "/" + step, error)) {
    throw Error(StatusCode::kCorruption, shown_path(parts_file(directory)) +
                                             " names no saved state; it says \"" + shown_value(step) +
                                             "\"; give another directory with --load-state");
  }
  if (rest.str() != parts_text(step, grid.shape())) {
    throw Error(StatusCode::kInvalidArgument,
                "--load-state " + shown_path(directory) +
                    " was saved by an older version, in other parts than this run has: " +
                    shown_value(rest.str().substr(0, rest.str().find('\n'))) +
                    "; save the state again with these numbers of parts, and then load it with any");
  }
  if (wanted) step = step_name(*wanted);
  if (!fs::is_directory(directory + "/" + step, error)) {
    throw Error(StatusCode::kIoError, "--load-step: no state of step " + std::to_string(*wanted) +
                                          " is saved in " + shown_path(directory));
  }
  return directory + "/" + step + "/part-" + std::to_string(grid.part());
}

bool holds_state(const std::string& directory) {
  std::error_code error;
  for (const std::string& name : {directory + "/latest", parts_file(directory)}) {
    // A damaged name, such as a link in a loop, counts: there may be states that it should name.
    if (fs::exists(fs::symlink_status(name, error))) return true;
  }
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step-") && fs::exists(entry.path() / "manifest.json", error)) return true;
  }
  return false;
}

}  // namespace forebay::gpt
